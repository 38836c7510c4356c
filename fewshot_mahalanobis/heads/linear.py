"""The learned classifier of CNAPS (Requeima et al., NeurIPS 2019), which Simple CNAPS does without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.leave_out import MeansWithout
from fewshot_mahalanobis.gaussians.support import check_features, class_means, full_precision
from fewshot_mahalanobis.heads.head import Head


class LinearClassifier(NamedTuple):
    """Weights of a linear classifier generated for one task."""

    weight: Tensor  # (k, d)
    bias: Tensor  # (k,)


class LinearLayerHead(Head[LinearClassifier]):
    """A head that is a linear layer once it is fitted: logits = W x + b. Subclasses define ``fit``."""

    def logits(self, state: LinearClassifier, query_features: Tensor) -> Tensor:
        """W x + b of queries (m, d): (m, k), in the dtype of the layer."""
        check_features(query_features, "query features", width=state.weight.shape[1])
        with full_precision(query_features):
            return F.linear(query_features.to(state.weight.dtype), state.weight, state.bias)

    def export(self, state: LinearClassifier) -> nn.Module:
        """The fitted layer."""
        return _ExportedLinear(*state)


class LinearHead(LinearLayerHead):
    """The learned classifier of CNAPS: logits = W x + b, each class's row generated from its mean support feature.

    w_k = f(mu_k) + mu_k and b_k = g(mu_k), where f and g are three linear layers with ELU between (Requeima et al.,
    "Fast and Flexible Multi-Task Classification Using Conditional Neural Adaptive Processes", NeurIPS 2019). For 512
    features that is 788,485 parameters, which Simple CNAPS does without.

    Parameters
    ----------
    in_features : int
        Feature width d.
    """

    name = "linear"
    title = "linear"
    paper_title = "CNAPS"

    def __init__(self, in_features: int = 512) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight_generator = _ThreeLayers(in_features, in_features)
        self.bias_generator = _ThreeLayers(in_features, 1)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> LinearClassifier:
        """Generate the classifier from the class means of the support features (n, d), labels (n,)."""
        check_features(support_features, "support features")
        if support_features.shape[1] != self.in_features:
            raise ValueError(
                f"support features have {support_features.shape[1]} columns, but LinearHead was made for "
                f"in_features={self.in_features}"
            )
        with full_precision(support_features):
            return self._generate(class_means(support_features, support_labels))

    def leave_one_out_logits(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others: only the means of its group move."""
        logits = self(support_features, support_labels, support_features)
        with full_precision(support_features):
            features = support_features.to(logits.dtype)
            without = MeansWithout.of(features, support_labels, groups)
            moved = self._generate(without.means)
            return without.put(logits, (moved.weight * features[without.rows]).sum(dim=1) + moved.bias)

    def describe(self) -> dict[str, Any]:
        """Raise ValueError: its learned weights are part of a checkpoint, not settings."""
        raise ValueError("a file cannot describe the learned weights of a LinearHead")

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> LinearHead:
        """Raise ValueError, as :meth:`describe`."""
        raise ValueError("no file describes the learned weights of a LinearHead")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> LinearHead:
        """Raise ValueError: settings are no learned weights."""
        raise ValueError(
            "there is no trained linear head here: choose another head, or SimpleCNAPSClassifier with a checkpoint of "
            "CNAPS, which was trained with it"
        )

    def _generate(self, means: Tensor) -> LinearClassifier:
        means = means.to(self.weight_generator.linear1.weight.dtype)
        return LinearClassifier(self.weight_generator(means) + means, self.bias_generator(means)[:, 0])


class _ThreeLayers(nn.Module):
    """linear3(ELU(linear2(ELU(linear1(x))))); hidden layers are as wide as the output."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(in_features, out_features)
        self.linear2 = nn.Linear(out_features, out_features)
        self.linear3 = nn.Linear(out_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear3(F.elu(self.linear2(F.elu(self.linear1(x)))))


class _ExportedLinear(nn.Module):
    """W x + b."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
