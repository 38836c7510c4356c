"""Class Gaussians with a regularised covariance (Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020).

Equation 3 of the paper, and with other settings the family around it:

    Q_k = lambda_k Sigma_k + (1 - lambda_k) S + beta I,    lambda_k = n_k / (n_k + nu)

Sigma_k is the covariance of the n_k support features of class k. S is the covariance Sigma of all n support features
(the paper's), or the covariance pooled within classes (that of linear discriminant analysis). nu is the number of shots
that S is worth: 1 in the paper, infinite in linear discriminant analysis. Covariances are unbiased, and zero where no
degree of freedom is left: Sigma_k of one example, the pooled one if every class has one example.

:func:`regularized_covariance` is the equation. Distances rarely need the matrix: ``low_rank.py`` has them from factors
of few rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.low_rank import (
    MAX_CHUNK_NUMBERS,
    CholeskyMetric,
    Metric,
    SharedCovariance,
    cholesky,
    low_rank_metric,
    roots_of_scatter,
)
from fewshot_mahalanobis.gaussians.support import (
    check_features,
    check_support,
    deviations,
    exact_class_means,
    full_precision,
    members_by_shots,
    result_dtype,
    working_dtype,
)

_ONE_SHOT = ("zero", "published")
_SHARED = ("task", "within")

#: A number of examples, whole or the sum of weights.
Number = TypeVar("Number", float, Tensor)


def regularized_covariance(
    class_covariance: Tensor, shared_covariance: Tensor, class_weight: float | Tensor, beta: float
) -> Tensor:
    """Equation 3: Q_k = lambda_k Sigma_k + (1 - lambda_k) S + beta I.

    Parameters
    ----------
    class_covariance : Tensor of shape (..., d, d)
        Sigma_k.
    shared_covariance : Tensor of shape (d, d)
        S.
    class_weight : float or Tensor
        lambda_k.
    beta : float

    Returns
    -------
    Tensor of shape (..., d, d)
    """
    identity = torch.eye(len(shared_covariance), dtype=shared_covariance.dtype, device=shared_covariance.device)
    return class_weight * class_covariance + (1 - class_weight) * shared_covariance + beta * identity


@dataclass(frozen=True)
class CovarianceSettings:
    """Settings of Q_k = lambda_k Sigma_k + (1 - lambda_k) S + beta I with lambda_k = n_k / (n_k + nu).

    The defaults are equation 3 of Bateni et al., CVPR 2020.

    Parameters
    ----------
    beta : float or "auto"
        Weight of the identity, > 0, in squared feature units. "auto" is replaced on each support set by
        :func:`~fewshot_mahalanobis.gaussians.leave_out.choose_beta`.
    task_covariance : bool
        False leaves S out, Q_k = Sigma_k + beta I: the paper's ablation "-TR" (lambda_k = 1).
    one_shot_covariance : {"zero", "published"}
        Sigma_k of a class with one example; see :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    shared : {"task", "within"}
        S: the covariance of all support features, or the one pooled within classes.
    prior_shots : float
        nu >= 0, the number of shots that S is worth. 1 is the paper's; infinity trusts S alone, as linear discriminant
        analysis does; 0 leaves S out.

    Raises
    ------
    ValueError
        A setting is out of its range.
    """

    beta: float | str = 1.0
    task_covariance: bool = True
    one_shot_covariance: str = "zero"
    shared: str = "task"
    prior_shots: float = 1.0

    def __post_init__(self) -> None:
        if self.beta != "auto" and (isinstance(self.beta, str) or not (self.beta > 0 and math.isfinite(self.beta))):
            raise ValueError(f'beta must be positive and finite, or "auto", got {self.beta!r}')
        if self.one_shot_covariance not in _ONE_SHOT:
            raise ValueError(f'one_shot_covariance must be "zero" or "published", got {self.one_shot_covariance!r}')
        if self.shared not in _SHARED:
            raise ValueError(f'shared must be "task" or "within", got {self.shared!r}')
        if not (isinstance(self.prior_shots, Real) and self.prior_shots >= 0):
            raise ValueError(f"prior_shots must be 0 or more, got {self.prior_shots!r}")
        for name in ("beta", "prior_shots"):
            if not isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, float(value))

    @property
    def ridge(self) -> float:
        """Beta as a number; ValueError while it is "auto"."""
        return float(self.beta)

    @property
    def without_shared(self) -> bool:
        """Whether S is left out."""
        return not self.task_covariance or self.prior_shots == 0

    def class_weight(self, shots: Number) -> Number:
        """lambda_k = n_k / (n_k + nu) of a class of that many examples."""
        return shots / (shots + (0.0 if self.without_shared else self.prior_shots))


class ClassGaussians:
    """A Gaussian N(mu_k, Q_k) for each class, fitted to a support set.

    It holds thin factors of Q_k, in all O(n d) numbers; only ``covariance`` and ``precision`` build (k, d, d).

    Parameters
    ----------
    features : Tensor of shape (n, d)
        Any floating-point dtype, finite. Arithmetic is in float64 (float32 on devices without it), outside autocast.
        Results come back in the features' dtype, float32 at least, and are differentiable.
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    settings : CovarianceSettings
        Beta is a number.

    Attributes
    ----------
    means : Tensor of shape (k, d)
        Class means mu_k.
    counts : int64 Tensor of shape (k,)
        Support examples n_k.
    settings : CovarianceSettings
        Beta is a number.
    """

    def __init__(self, features: Tensor, labels: Tensor, settings: CovarianceSettings) -> None:
        self.counts = check_support(features, labels)
        self.settings = settings
        self._support = features.clone(), labels.clone()  # for the dense matrices
        # Distances do not change when everything moves by the task mean, and products of centred features are exact
        # where those of uncentred ones cancel.
        self._centre = features.mean(dim=0, dtype=working_dtype(features))
        with full_precision(features):
            batches, shared = self._estimates()
            self._metrics: list[Metric] = [batch.metric(shared, self.beta) for batch in batches]
        # Column j of the batches' concatenated results belongs to another class; this puts class 0 first.
        self._columns = by_class(batches)
        means = torch.cat([batch.means for batch in batches])[self._columns]
        self.means = (means + self._centre).to(result_dtype(features))

    @property
    def beta(self) -> float:
        """Weight of the identity in Q_k."""
        return self.settings.ridge

    def squared_distance(self, queries: Tensor) -> Tensor:
        """Return the squared Mahalanobis distance (x - mu_k)^T Q_k^-1 (x - mu_k): equation 2 without its factor 1/2.

        Parameters
        ----------
        queries : Tensor of shape (m, d)
            Finite; any floating-point dtype.

        Returns
        -------
        Tensor of shape (m, k)
            Never negative, in the dtype of the queries, float32 at least. Queries are served in chunks of bounded
            memory, and a query's distances do not depend on the others' but for rounding.

        Raises
        ------
        ValueError
            On a wrong shape or dtype, NaN or infinity.
        """
        check_features(queries, "query features", width=self.means.shape[1])
        with full_precision(queries):
            numbers = max(metric.numbers_per_query() for metric in self._metrics)
            distances = []
            for chunk in queries.split(max(1, MAX_CHUNK_NUMBERS // numbers)):
                x = chunk - self._centre
                distance = torch.cat([metric.squared_distance(x) for metric in self._metrics], dim=1)
                if len(self._metrics) > 1:
                    distance = distance[:, self._columns]
                distances.append(distance.to(result_dtype(queries)))
            return torch.cat(distances)

    def covariance(self) -> Tensor:
        """Q_k of every class, dense, shape (k, d, d)."""
        with full_precision(self.means):
            return self._covariance().to(self.means.dtype)

    def precision(self) -> Tensor:
        """Inverse of Q_k of every class, dense, shape (k, d, d)."""
        with full_precision(self.means):
            q = self._covariance()
            if self.is_shared:
                return torch.cholesky_inverse(cholesky(q[0])).to(self.means.dtype).expand_as(q)
            return torch.cholesky_inverse(cholesky(q)).to(self.means.dtype)

    @property
    def is_shared(self) -> bool:
        """Whether all classes have the same covariance."""
        return self.settings.class_weight(1.0) == 0.0

    def in_coordinates(self, basis: Tensor) -> ClassGaussians:
        """The same Gaussians with U^T (x - c) in the place of x, c the task mean and U = ``basis`` (d, r)."""
        features, labels = self._support
        return ClassGaussians((features - self._centre) @ basis, labels, self.settings)

    def support_basis(self) -> tuple[Tensor, Tensor]:
        """Task mean c (d,), and an orthonormal basis (d, r) of the span of all examples less c; r <= d."""
        return self._centre, torch.linalg.qr(self._points().T).Q

    def _points(self) -> Tensor:
        """All examples less the task mean."""
        return self._support[0] - self._centre

    def _estimates(self) -> tuple[list[ClassBatch], SharedCovariance]:
        features, labels = self._support
        x = features - self._centre
        batches = class_batches(x, labels, self.counts, self._centre, self.settings)
        return batches, shared_covariance(x, labels, self.counts, self.settings)

    def _covariance(self) -> Tensor:
        """Q_k of every class, dense (k, d, d), in the working precision."""
        batches, shared = self._estimates()
        if self.is_shared:
            batches = [replace(batches[0], roots=batches[0].roots[:1])]
        dense = torch.cat([batch.covariance(shared, self.beta) for batch in batches])
        dense = (dense + dense.mT) / 2  # a product A^T A is symmetric but for its last bits
        return dense.expand(len(self.counts), -1, -1) if self.is_shared else dense[self._columns]


# ---------------------------------------------------------------- estimates


@dataclass(frozen=True, eq=False)
class ClassBatch:
    """k' classes of one lambda. ``means`` are centred at the task mean."""

    classes: Tensor  # (k',) class indices
    means: Tensor  # (k', d)
    roots: Tensor  # A_k (k', r, d), A_k^T A_k = Sigma_k; no rows where lambda_k is 0
    class_weight: float  # lambda_k

    def covariance(self, shared: SharedCovariance, beta: float) -> Tensor:
        """Q_k, dense (k', d, d)."""
        return regularized_covariance(self.roots.mT @ self.roots, shared.dense, self.class_weight, beta)

    def metric(self, shared: SharedCovariance, beta: float) -> Metric:
        """Dense Cholesky factors where a class has as many examples as features, else low-rank ones."""
        rows, d = self.roots.shape[1:]
        # Without S, I + F_k F_k^T has an eigenvalue near 1 even where Sigma_k has none near 0: thin factors lose
        # digits.
        if (shared.is_wide and rows + 1 >= d) if len(shared.rows) else rows >= d:
            return CholeskyMetric(self.means, cholesky(self.covariance(shared, beta)))
        return low_rank_metric(self.means, self.roots, self.class_weight, shared, beta)


def class_batches(
    x: Tensor, labels: Tensor, counts: Tensor, centre: Tensor, settings: CovarianceSettings
) -> list[ClassBatch]:
    """Estimate the classes by number of shots, the fewest shots first, from features (n, d) less the task mean.

    Where no class has a covariance of its own they are one batch.
    """
    if settings.class_weight(1.0) == 0.0:
        classes = torch.arange(len(counts), device=x.device)
        return [ClassBatch(classes, exact_class_means(x, labels, counts), x.new_zeros(len(counts), 0, x.shape[1]), 0.0)]
    return [class_batch(x[rows], classes, centre, settings) for classes, rows in members_by_shots(labels, counts)]


def class_batch(members: Tensor, classes: Tensor, centre: Tensor, settings: CovarianceSettings) -> ClassBatch:
    """Estimate classes from their ``members`` (k', n_k, d), which are less the task mean ``centre``."""
    shots, d = members.shape[1:]
    first = members[:, 0]
    means = first + (members - first[:, None]).mean(dim=1)  # exact for equal examples
    weight = settings.class_weight(float(shots))
    if weight == 0.0:
        roots = members[:, :0]
    elif shots == 1 and settings.one_shot_covariance == "published":
        # c in every entry of Sigma_k is c 1 1^T, of root sqrt(c) 1^T. c is that of the vector before centring. Its
        # square root has no gradient at zero, so a constant vector (c = 0) is replaced before the root, not after.
        vectors = members + centre
        c = (vectors - vectors.mean(dim=2, keepdim=True)).square().sum(dim=2, keepdim=True) / max(d - 1, 1)
        roots = torch.where(c > 0, torch.where(c > 0, c, 1.0).sqrt(), 0.0).expand(-1, 1, d)
    else:
        roots = roots_of_scatter(members, shots - 1)
    return ClassBatch(classes, means, roots, weight)


def by_class(batches: list[ClassBatch]) -> Tensor:
    """Index of each class (k,) in the concatenation of the batches."""
    return torch.cat([batch.classes for batch in batches]).argsort()


def shared_covariance(x: Tensor, labels: Tensor, counts: Tensor, settings: CovarianceSettings) -> SharedCovariance:
    """Estimate S from features (n, d) less the task mean."""
    if settings.without_shared:
        return SharedCovariance(x[:0], 0.0)
    if settings.shared == "task":
        return SharedCovariance(x, 1.0 / max(len(x) - 1, 1))
    freedom = len(x) - len(counts)
    return SharedCovariance(deviations(x, labels, counts) if freedom else x[:0], 1.0 / max(freedom, 1))
