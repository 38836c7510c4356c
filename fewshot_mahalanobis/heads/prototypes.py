"""Heads that compare a query with the mean of each class: the metrics of the paper's ablation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.leave_out import MeansWithout
from fewshot_mahalanobis.gaussians.support import check_features, class_means, full_precision, result_dtype
from fewshot_mahalanobis.heads.head import Head

#: Examples per block, of whose comparisons only the diagonal is used.
_PAIRS = 128


class PrototypeHead(Head[Tensor]):
    """A head that compares queries with class means mu_k (k, d), which are its state. Subclasses define ``compare``."""

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Class means (k, d) of the support features (n, d), labels (n,)."""
        return class_means(support_features, support_labels)

    def logits(self, state: Tensor, query_features: Tensor) -> Tensor:
        """Compare queries (m, d) with each class mean: logits (m, k)."""
        check_features(query_features, "query features", width=state.shape[1])
        with full_precision(query_features):
            dtype = torch.promote_types(result_dtype(query_features), state.dtype)
            return self.compare(query_features.to(dtype), state.to(dtype))

    def leave_one_out_logits(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others: only means of its group move."""
        with full_precision(support_features):
            means = self.fit(support_features, support_labels)
            features = support_features.to(means.dtype)
            without = MeansWithout.of(features, support_labels, groups)
            pairs = zip(features[without.rows].split(_PAIRS), without.means.split(_PAIRS), strict=True)
            moved = torch.cat([self.compare(x, mean).diagonal() for x, mean in pairs])
            return without.put(self.compare(features, means), moved)

    def export(self, state: Tensor) -> nn.Module:
        """The comparison with the class means."""
        return _ExportedPrototypes(self.exported_compare, state)

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Logits (m, k) of ``queries`` (m, d) against ``means`` (k, d), of one dtype."""
        raise NotImplementedError

    def exported_compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """``compare`` by operations that ONNX has."""
        return self.compare(queries, means)


class EuclideanHead(PrototypeHead):
    """Logits = -||x - mu_k||^2: prototypical networks (Snell et al., NeurIPS 2017), from differences."""

    name = "euclidean"
    title = "Euclidean"
    paper_title = "squared Euclidean"
    distance_power = 2

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Minus the squared Euclidean distances."""
        return -torch.cdist(queries, means, compute_mode="donot_use_mm_for_euclid_dist").square()

    def exported_compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """The same without ``torch.cdist``, for which the exporter has no form."""
        return -(queries[:, None] - means).square().sum(dim=2)


class ManhattanHead(PrototypeHead):
    """Logits = -||x - mu_k||_1: the absolute difference of the paper's metric ablation."""

    name = "manhattan"
    title = "Manhattan"
    paper_title = "absolute distance"
    distance_power = 1

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Minus the sums of absolute differences."""
        return -torch.cdist(queries, means, p=1.0)

    def exported_compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """The same without ``torch.cdist``, for which the exporter has no form."""
        return -(queries[:, None] - means).abs().sum(dim=2)


class CosineHead(PrototypeHead):
    """Logits = cosine of the angle between x and mu_k, in [-1, 1]; 0 where either is zero."""

    name = "cosine"
    title = "cosine"
    paper_title = "cosine"

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Cosine similarities."""
        return F.normalize(queries, dim=1) @ F.normalize(means, dim=1).T


class DotProductHead(PrototypeHead):
    """Logits = x . mu_k: the negative dot product as a distance, of the paper's metric ablation."""

    name = "dot_product"
    title = "dot product"
    paper_title = "dot product"

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Dot products."""
        return queries @ means.T


class _ExportedPrototypes(nn.Module):
    """A comparison with class means (k, d)."""

    means: Tensor

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor], means: Tensor) -> None:
        super().__init__()
        self.compare = compare
        self.register_buffer("means", means.float())

    def forward(self, x: Tensor) -> Tensor:
        return self.compare(x, self.means)
