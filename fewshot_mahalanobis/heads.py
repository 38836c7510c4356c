"""Metric heads: support features and labels in, logits of query features out.

Every head has one interface, in one call or in two steps:

    logits = head(support_features, support_labels, query_features)
    state = head.fit(support_features, support_labels); logits = head.logits(state, query_features)

``MahalanobisHead`` is Simple CNAPS (Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020, equations
1-3), ``LinearHead`` the learned classifier of CNAPS (Requeima et al., NeurIPS 2019) and the others the metrics that
the paper compares with. Probabilities are the softmax of the logits (equation 1).

A head is one class: its name in settings, its title in tables and its exported form are part of it. ``HEADS`` lists
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.covariance import ClassGaussians, RegularizedCovariance
from fewshot_mahalanobis.gaussians.inputs import (
    check_features,
    check_support,
    class_means,
    full_precision,
    result_dtype,
)
from fewshot_mahalanobis.gaussians.leave_one_out import leave_one_out_distance
from fewshot_mahalanobis.gaussians.uncertain_means import (
    MeansSettings,
    UncertainMeans,
    choose_means_settings,
    leave_one_out_means_logits,
    relative_distance,
    to_power,
)

State = TypeVar("State")

#: Examples per block, where of each block's comparisons only the diagonal is used.
_PAIRS = 128
#: Size of the class matrices of an exported head, in numbers (1 GB): a protobuf file holds 2 GB.
MAX_EXPORTED_NUMBERS = 2**28


class Head(nn.Module, Generic[State]):
    """A classifier fitted to the support features of one task.

    Features are finite floating-point tensors of shape (n, d), labels int64 of shape (n,) in 0..k-1, each with at
    least one example. Heads compute in float32 or float64 outside autocast whatever the features' dtype, and are
    differentiable with respect to support and query features. ValueError on anything else.

    Attributes
    ----------
    name : str
        In settings and on the command line.
    title : str
        In our tables.
    paper_title : str
        In the paper's tables: the method that uses it. Empty where the paper has none.
    is_squared_distance : bool
        Whether logits are minus squared distances to class means, up to a factor.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    paper_title: ClassVar[str] = ""
    is_squared_distance: ClassVar[bool] = False

    def fit(self, support_features: Tensor, support_labels: Tensor) -> State:
        """Fit to support features (n, d) and labels (n,); the state serves any number of queries."""
        raise NotImplementedError

    def logits(self, state: State, query_features: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d)."""
        raise NotImplementedError

    def export(self, state: State) -> nn.Module:
        """Make a module of a fitted head, features (m, d) -> logits (m, k), in float32, for ONNX and torch.export.

        It has no checks and no data-dependent control flow. Raises ValueError where a head has no such form.
        """
        raise ValueError(
            f"a {type(self).__name__} as head has no form as an ONNX graph: use one of the package's heads"
        )

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example, features (n, d), by the head fitted to the others.

        Minus infinity where a class has no other example. This takes n fits; the package's heads have shortcuts.
        """
        counts = check_support(support_features, support_labels)
        rows = []
        for i, label in enumerate(support_labels.tolist()):
            rest = torch.arange(len(support_labels), device=support_labels.device) != i
            present, labels = support_labels[rest].unique(return_inverse=True)
            row = self(support_features[rest], labels, support_features[i : i + 1])[0]
            if counts[label] == 1:
                row = row.new_full((len(counts),), -torch.inf).index_copy(0, present, row)
            rows.append(row)
        return torch.stack(rows)

    def forward(self, support_features: Tensor, support_labels: Tensor, query_features: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d), given support features (n, d) and labels (n,)."""
        return self.logits(self.fit(support_features, support_labels), query_features)


class MahalanobisHead(Head[ClassGaussians]):
    """Logits = -s (x - mu_k)^T Q_k^-1 (x - mu_k), the head of Simple CNAPS (CVPR 2020, equations 1-3).

    Parameters
    ----------
    covariance : RegularizedCovariance, optional
        How Q_k is estimated; with the paper's settings if left out.
    scale : float
        s > 0: 1/2 is the paper's equation 2; 1 is the published implementation and the paper's numbers.

    Raises
    ------
    ValueError
        If ``scale`` is not positive and finite.
    """

    name = "mahalanobis"
    title = "Mahalanobis"
    paper_title = "Simple CNAPS"
    is_squared_distance = True

    def __init__(self, covariance: RegularizedCovariance | None = None, scale: float = 1.0) -> None:
        super().__init__()
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"scale must be positive and finite, got {scale!r}")
        self.covariance = RegularizedCovariance() if covariance is None else covariance
        self.scale = float(scale)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> ClassGaussians:
        """Fit a Gaussian to each class of the support features (n, d), labels (n,)."""
        gaussians: ClassGaussians = self.covariance(support_features, support_labels)
        return gaussians

    def logits(self, state: ClassGaussians, query_features: Tensor) -> Tensor:
        """Minus s times the squared Mahalanobis distance of queries (m, d) to each class: (m, k)."""
        return -self.scale * state.squared_distance(query_features)

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others, exactly, by downdating."""
        covariance = self.covariance.with_chosen_settings(support_features, support_labels)
        return -self.scale * leave_one_out_distance(covariance.settings, support_features, support_labels)

    def export(self, state: ClassGaussians) -> nn.Module:
        """Logits as sums of squares in a basis of the support features."""
        return _ExportedMahalanobis(state, self.scale)

    def extra_repr(self) -> str:
        """Name the setting in ``repr``."""
        return f"scale={self.scale}"


class AutoHead(Head[UncertainMeans]):
    """Gaussians of one covariance with uncertain means, all settings chosen on the support set.

    The covariance is the one pooled within classes, regularised by beta I; class means have a prior, so that a class of
    few examples is neither put back nor preferred: see :mod:`fewshot_mahalanobis.gaussians.uncertain_means`. Beta and
    the scale of the logits maximise the leave-one-out likelihood, and so does the choice between features that are
    never negative and their square roots. Choosing is not differentiated through.

    Parameters
    ----------
    settings : MeansSettings, optional
        Fixed settings. By default each fit chooses its own.
    """

    name = "auto"
    title = "auto"

    def __init__(self, settings: MeansSettings | None = None) -> None:
        super().__init__()
        self.settings = settings

    def fit(self, support_features: Tensor, support_labels: Tensor) -> UncertainMeans:
        """Choose the settings and fit to support features (n, d), labels (n,)."""
        check_support(support_features, support_labels)
        with full_precision(support_features):
            return UncertainMeans(support_features, support_labels, self._settings(support_features, support_labels))

    def logits(self, state: UncertainMeans, query_features: Tensor) -> Tensor:
        """Logits (m, k) of queries (m, d)."""
        check_features(query_features, "query features", width=state.gaussians.means.shape[1])
        with full_precision(query_features):
            return state.logits(query_features)

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head with the same settings fitted to the others, exactly."""
        counts = check_support(support_features, support_labels)
        with full_precision(support_features):
            settings = self._settings(support_features, support_labels)
            if settings.shared == "within" and counts.max() > 1 and len(counts) > 1:
                return leave_one_out_means_logits(settings, support_features, support_labels)
            return Head.leave_one_out_logits(AutoHead(settings), support_features, support_labels)

    def export(self, state: UncertainMeans) -> nn.Module:
        """Distances as sums of squares, and logits from them."""
        return _ExportedUncertainMeans(state)

    def _settings(self, features: Tensor, labels: Tensor) -> MeansSettings:
        return choose_means_settings(features, labels) if self.settings is None else self.settings


class _PrototypeHead(Head[Tensor]):
    """A head whose state is the class means mu_k (k, d)."""

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Class means (k, d) of the support features (n, d), labels (n,)."""
        return class_means(support_features, support_labels)

    def logits(self, state: Tensor, query_features: Tensor) -> Tensor:
        """Compare queries (m, d) with each class mean: logits (m, k)."""
        check_features(query_features, "query features", width=state.shape[1])
        with full_precision(query_features):
            dtype = torch.promote_types(result_dtype(query_features), state.dtype)
            return self.compare(query_features.to(dtype), state.to(dtype))

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others: only its own mean moves."""
        with full_precision(support_features):
            means = self.fit(support_features, support_labels)
            features = support_features.to(means.dtype)
            pairs = zip(features.split(_PAIRS), _means_without(features, support_labels).split(_PAIRS), strict=True)
            own = torch.cat([self.compare(x, without).diagonal() for x, without in pairs])
            return _with_own(self.compare(features, means), own, support_labels)

    def export(self, state: Tensor) -> nn.Module:
        """The comparison with the class means."""
        return _ExportedPrototypes(self.exported_compare, state)

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Logits (m, k) of ``queries`` (m, d) against ``means`` (k, d), of one dtype."""
        raise NotImplementedError

    def exported_compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """``compare`` by operations that ONNX has."""
        return self.compare(queries, means)


class EuclideanHead(_PrototypeHead):
    """Logits = -||x - mu_k||^2: prototypical networks (Snell et al., NeurIPS 2017), from differences."""

    name = "euclidean"
    title = "Euclidean"
    paper_title = "squared Euclidean"
    is_squared_distance = True

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Minus the squared Euclidean distances."""
        return -torch.cdist(queries, means, compute_mode="donot_use_mm_for_euclid_dist").square()

    def exported_compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """The same without ``torch.cdist``, for which the exporter has no form."""
        return -(queries[:, None] - means).square().sum(dim=2)


class ManhattanHead(_PrototypeHead):
    """Logits = -||x - mu_k||_1: the absolute difference of the paper's metric ablation."""

    name = "manhattan"
    title = "Manhattan"
    paper_title = "absolute distance"

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Minus the sums of absolute differences."""
        return -torch.cdist(queries, means, p=1.0)

    def exported_compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """The same without ``torch.cdist``, for which the exporter has no form."""
        return -(queries[:, None] - means).abs().sum(dim=2)


class CosineHead(_PrototypeHead):
    """Logits = cosine of the angle between x and mu_k, in [-1, 1]; 0 where either is zero."""

    name = "cosine"
    title = "cosine"
    paper_title = "cosine"

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Cosine similarities."""
        return F.normalize(queries, dim=1) @ F.normalize(means, dim=1).T


class DotProductHead(_PrototypeHead):
    """Logits = x . mu_k: the negative dot product as a distance, of the paper's metric ablation."""

    name = "dot_product"
    title = "dot product"
    paper_title = "dot product"

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Dot products."""
        return queries @ means.T


def _means_without(features: Tensor, labels: Tensor) -> Tensor:
    """Mean of the other examples of each example's class, (n, d); zero where there are none."""
    counts = labels.bincount()[labels, None]
    return (counts * class_means(features, labels)[labels] - features) / (counts - 1).clamp(min=1)


def _with_own(logits: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """``logits`` (n, k) with ``own`` (n,) for each example's own class, minus infinity where it is alone in it."""
    own = torch.where(labels.bincount()[labels] == 1, -torch.inf, own)
    return logits.scatter(1, labels[:, None], own[:, None])


class LinearClassifier(NamedTuple):
    """Weights of a linear classifier generated for one task."""

    weight: Tensor  # (k, d)
    bias: Tensor  # (k,)


class LinearHead(Head[LinearClassifier]):
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

    def logits(self, state: LinearClassifier, query_features: Tensor) -> Tensor:
        """W x + b of queries (m, d): (m, k), in the dtype of the head's parameters."""
        check_features(query_features, "query features", width=self.in_features)
        with full_precision(query_features):
            return F.linear(query_features.to(state.weight.dtype), state.weight, state.bias)

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others: only its own row moves."""
        logits = self(support_features, support_labels, support_features)
        with full_precision(support_features):
            features = support_features.to(logits.dtype)
            without = self._generate(_means_without(features, support_labels))
            return _with_own(logits, (without.weight * features).sum(dim=1) + without.bias, support_labels)

    def export(self, state: LinearClassifier) -> nn.Module:
        """The generated linear layer."""
        return _ExportedLinear(*state)

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


# ---------------------------------------------------------------- exported forms


class _ExportedMahalanobis(nn.Module):
    """-s (x - mu_k)^T Q_k^-1 (x - mu_k) as a sum of squares.

    Outside the span of the centred support features every Q_k is beta I (equation 3). So with an orthonormal basis U
    (d, r) of that span, z = U^T (x - c) and c the task mean, which like every mu_k lies in c + span U,

        (x - mu_k)^T Q_k^-1 (x - mu_k) = ||x - c - U z||^2 / beta + ||L_k^T (z - U^T (mu_k - c))||^2,

    where L_k L_k^T is the inverse of U^T Q_k U.
    """

    centre: Tensor
    basis: Tensor
    means: Tensor
    roots: Tensor

    def __init__(self, gaussians: ClassGaussians, scale: float) -> None:
        super().__init__()
        n, d = int(gaussians.counts.sum()), gaussians.means.shape[1]
        centre, basis = gaussians.support_basis()
        # The covariance of one shot as published, c in every entry, leaves the span: there the basis is everything.
        self.everything = n >= d or gaussians.settings.one_shot_covariance == "published"
        rank, classes = d if self.everything else basis.shape[1], len(gaussians.counts)
        if (1 if gaussians.is_shared else classes) * rank**2 > MAX_EXPORTED_NUMBERS:
            raise ValueError(
                f"{classes} classes need a {rank} x {rank} matrix each, too much for an ONNX file: fit fewer classes"
            )
        if self.everything:  # in original coordinates, where the variance of a vector's entries has its meaning
            means = gaussians.means - centre
        else:
            gaussians = gaussians.in_coordinates(basis)
            means = gaussians.means
        self.scale, self.beta = scale, gaussians.beta
        self.register_buffer("centre", centre.float())
        self.register_buffer("basis", basis.float().contiguous())
        self.register_buffer("means", means.float()[:, None])  # (k, 1, r)
        precision = gaussians.precision()
        roots = torch.linalg.cholesky((precision[:1] if gaussians.is_shared else precision).to(centre.dtype))
        self.register_buffer("roots", roots.float().contiguous())  # L_k; one for all classes where Q is shared

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.centre
        z = x if self.everything else x @ self.basis
        whitened = (z - self.means) @ self.roots  # (k, m, r)
        distance = whitened.square().sum(dim=2).T
        if not self.everything:
            distance = distance + (x - z @ self.basis.T).square().sum(dim=1, keepdim=True) / self.beta
        return -self.scale * distance


class _ExportedUncertainMeans(nn.Module):
    """Logits of ``AutoHead`` from the exported distances to class means."""

    shrink: Tensor
    ratio: Tensor
    to_centre: Tensor

    def __init__(self, state: UncertainMeans) -> None:
        super().__init__()
        self.distances = _ExportedMahalanobis(state.gaussians, -1.0)
        self.scale, self.freedom, self.power = state.settings.scale, state.settings.freedom, state.settings.power
        self.register_buffer("shrink", state.shrink.float())
        self.register_buffer("ratio", state.ratio.float())
        self.register_buffer("to_centre", state.to_centre.float())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.shrink, self.ratio, self.to_centre
        return -self.scale * relative_distance(self.distances(to_power(x, self.power)), *parts, self.freedom)


class _ExportedPrototypes(nn.Module):
    """A comparison with class means (k, d)."""

    means: Tensor

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor], means: Tensor) -> None:
        super().__init__()
        self.compare = compare
        self.register_buffer("means", means.float())

    def forward(self, x: Tensor) -> Tensor:
        return self.compare(x, self.means)


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


#: Every head by its name.
HEADS: dict[str, type[Head[Any]]] = {
    head.name: head
    for head in (MahalanobisHead, AutoHead, EuclideanHead, ManhattanHead, CosineHead, DotProductHead, LinearHead)
}


def make_head(
    name: str, *, covariance: RegularizedCovariance | None = None, scale: float = 1.0, in_features: int = 512
) -> Head[Any]:
    """Make a head by its name.

    Parameters
    ----------
    name : str
        One of ``HEADS``.
    covariance, scale : optional
        Of ``MahalanobisHead``; the other heads have neither.
    in_features : int
        Feature width of ``LinearHead``.

    Raises
    ------
    ValueError
        There is no such head.
    """
    if name not in HEADS:
        raise ValueError(f"head must be one of {sorted(HEADS)}, got {name!r}")
    if name == MahalanobisHead.name:
        return MahalanobisHead(covariance, scale)
    return LinearHead(in_features) if name == LinearHead.name else HEADS[name]()
