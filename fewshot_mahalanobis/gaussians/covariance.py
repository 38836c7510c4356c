"""Regularised class covariances and Mahalanobis distances, without ever building a d x d matrix per class.

Equation 3 of Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020:

    Q_k = lambda_k Sigma_k + (1 - lambda_k) Sigma + beta I,    lambda_k = n_k / (n_k + 1)

Sigma_k has rank below n_k and Sigma rank below n, so with root matrices B^T B = Sigma (n rows) and
A_k^T A_k = Sigma_k (n_k rows) everything is a product of thin matrices. Two steps, both exact:

1. The part shared by all classes of one shot count, S = (1 - lambda) Sigma + beta I, is whitened once: a linear
   map T with T^T T = S^-1. For n >= d / 2, T is the inverse Cholesky factor of S. For fewer only an n x n matrix is
   factored: x^T S^-1 x = min_b { ||x - B'^T b||^2 + ||b||^2 } / beta with B' = sqrt((1 - lambda) / beta) B (ridge
   regression and its dual), so T x stacks that residual and those coefficients.
2. In whitened space Q_k becomes I + F_k^T F_k with F_k = sqrt(lambda_k) A_k T^T (n_k rows). The Woodbury identity
   needs the n_k x n_k matrix I + F_k F_k^T alone, batched over the classes of one shot count.

Cost model, in multiplications, with a = n / d and the whitened width p = d by Cholesky, d + n by ridge regression:

    step                                          Cholesky                  ridge regression
    Sigma, or the n x n products; once            3/4 n d^2                 n^2 d
    factor, for each distinct shot count          d^3 / 3                   n^2 d / 2 + n^3 / 3
    whiten the support, likewise                  n d^2 / 2                 2 n^2 d + n^3 / 2
    in units of d^3                               1/3 + 1.1 a               3.5 a^2 + 0.8 a^3        equal at a = 0.46
    whiten m queries, for each shot count         m d^2 / 2                 2 m n d + m n^2 / 2
    their products with n rows                    m n d                     m n (d + n)
    in units of m d^2                             1/2 + a                   3 a + 1.5 a^2            equal at a = 0.22

so from n = d / 2 on the Cholesky factor pays whatever the number of queries. A class adds n_k^2 p + n_k^3 / 3.
One with n_k >= d gets the Cholesky factor of its own d x d matrix instead: from there on it is cheaper to fit, cheaper
per query (d^2 / 2 against n_k d) and no larger (d^2 against n_k d numbers). Memory grows with n d throughout: no matrix
is larger than 2 n d numbers but the chunks of queries.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Most numbers in one temporary of a chunk of queries (16 MB in float64).
_CHUNK_NUMBERS = 2**21
#: Strips in which Sigma is computed.
_STRIPS = 2
#: A difference that keeps less than this share of its terms counts as cancelled.
_CANCELLED = {torch.float64: 2.0**-13, torch.float32: 2.0**-3}
#: A distance of less than this share of the squared lengths of query and mean is lost when they are rounded to float32.
_ROUNDED = 2.0**-8
#: Squared lengths of whitened queries whose sums neither vanish nor overflow on the way.
_SQUARES = {torch.float64: (0.0, torch.finfo(torch.float64).max), torch.float32: (2.0**-80, 2.0**120)}
#: Float32 is enough for support features at most so many sqrt(beta) away from the task mean: then the condition of Q_k
#: is 2^10 at most, as tr Sigma and tr Sigma_k are at most twice the largest squared distance.
_FLOAT32_LENGTH = 2.0**4.5
#: And where each pivot of a Cholesky factorisation keeps this share of its diagonal entry: no more has cancelled.
_FLOAT32_PIVOT = 2.0**-4
#: A Cholesky pivot of fewer roundings than this is noise.
_LOST = 2.0**10


def check_features(features: Tensor, name: str, width: int | None = None) -> None:
    """Raise ValueError unless ``features`` is a finite floating-point matrix (n, d), d equal to ``width`` if given."""
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"{name} must have shape (n, d) with d >= 1, got {tuple(features.shape)}")
    if not features.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {features.dtype}")
    if width is not None and features.shape[1] != width:
        raise ValueError(f"{name} have {features.shape[1]} columns, but the support features had {width}")
    if len(features) == 0:
        return
    low, high = features.detach().aminmax()  # one pass, in which NaN and infinity show
    if not (torch.isfinite(low) & torch.isfinite(high)):
        row = int((~torch.isfinite(features).all(dim=1)).nonzero()[0])
        raise ValueError(f"row {row} of {name} holds NaN or infinity")


def check_support(features: Tensor, labels: Tensor) -> Tensor:
    """Validate a support set and count its shots.

    Parameters
    ----------
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)

    Returns
    -------
    counts : int64 Tensor of shape (k,)
        Examples of each class.

    Raises
    ------
    ValueError
        On a wrong shape or dtype, NaN or infinity, no example at all, or a class of 0..k-1 without an example.
    """
    check_features(features, "support features")
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise ValueError(f"support labels must be int64 of shape (n,), got {labels.dtype} {tuple(labels.shape)}")
    if len(labels) != len(features):
        raise ValueError(f"{len(features)} support features but {len(labels)} labels")
    if labels.device != features.device:
        raise ValueError(f"support features are on {features.device} but the labels on {labels.device}")
    if len(labels) == 0:
        raise ValueError("the support set is empty: at least one example is needed")
    classes, counts = torch.unique(labels, return_counts=True)
    if classes[0] < 0:
        raise ValueError(f"labels must be 0..k-1, got {int(classes[0])}")
    if classes[-1] != len(classes) - 1:
        missing = int((classes != torch.arange(len(classes), device=classes.device)).nonzero()[0])
        raise ValueError(
            f"class {missing} has no support example although label {int(classes[-1])} occurs: "
            "labels must be 0..k-1, each with at least one example"
        )
    return counts


def result_dtype(features: Tensor) -> torch.dtype:
    """Return the dtype of means and distances: the features', float32 at least."""
    return torch.promote_types(features.dtype, torch.float32)


def full_precision(features: Tensor) -> torch.autocast:
    """Make a context in which autocast is off on the features' device."""
    return torch.autocast(device_type=features.device.type, enabled=False)


def class_means(features: Tensor, labels: Tensor) -> Tensor:
    """Mean support feature of each class, mu_k.

    Parameters
    ----------
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        0..k-1.

    Returns
    -------
    means : Tensor of shape (k, d)
        In the dtype of the features, float32 at least.

    Raises
    ------
    ValueError
        As ``check_support``.
    """
    counts = check_support(features, labels)
    features = features.to(result_dtype(features))
    sums = features.new_zeros(len(counts), features.shape[1]).index_add(0, labels, features)
    return sums / counts[:, None]


class RegularizedCovariance(nn.Module):
    """Class Gaussians with the regularised covariance Q_k of equation 3 (Bateni et al., CVPR 2020).

    Q_k = lambda_k Sigma_k + (1 - lambda_k) Sigma + beta I with lambda_k = n_k / (n_k + 1): Sigma_k is the covariance
    of the n_k support features of class k, Sigma that of all n support features, both unbiased (n - 1), and zero for
    a single example.

    Parameters
    ----------
    beta : float or "auto"
        Weight of the identity, > 0, in squared feature units. The default suits the features that the Simple CNAPS
        checkpoints were trained to have; "auto" chooses it on each support set by leaving out one example at a time
        (:func:`~fewshot_mahalanobis.calibration.choose_beta`), for features of any scale.
    task_covariance : bool
        False leaves out the task covariance, Q_k = Sigma_k + beta I: the ablation "-TR" (lambda_k = 1) of the paper.
    one_shot_covariance : {"zero", "published"}
        Sigma_k of a class with one example: zero as in the paper, or what the published implementation computes and
        its weights expect: the variance c of the d entries of that feature vector (d - 1), in every entry of Sigma_k.

    Raises
    ------
    ValueError
        If ``beta`` is neither positive and finite nor "auto", or ``one_shot_covariance`` is unknown.
    """

    def __init__(
        self,
        beta: float | str = 1.0,
        task_covariance: bool = True,
        one_shot_covariance: str = "zero",
    ) -> None:
        super().__init__()
        if beta != "auto" and (isinstance(beta, str) or not (beta > 0 and math.isfinite(beta))):
            raise ValueError(f'beta must be positive and finite, or "auto", got {beta!r}')
        if one_shot_covariance not in ("zero", "published"):
            raise ValueError(f'one_shot_covariance must be "zero" or "published", got {one_shot_covariance!r}')
        self.beta = beta if isinstance(beta, str) else float(beta)
        self.task_covariance = task_covariance
        self.one_shot_covariance = one_shot_covariance

    def forward(self, features: Tensor, labels: Tensor) -> ClassGaussians:
        """Fit the Gaussian of each class; differentiable with respect to the features.

        Parameters
        ----------
        features : Tensor of shape (n, d)
            Any floating-point dtype, finite. Arithmetic is in float64 (float32 on devices without it), or, for features
            of another dtype, in float32 where that gives distances to 1e-5; always outside autocast. Results come back
            in the features' dtype, float32 at least.
        labels : int64 Tensor of shape (n,)
            0..k-1, every class with at least one example.

        Returns
        -------
        ClassGaussians

        Raises
        ------
        ValueError
            On a wrong shape or dtype, NaN or infinity (the row is named), an empty support set, a class without an
            example (the class is named), or features so large that ``beta`` is lost to rounding.
        """
        counts = check_support(features, labels)
        with full_precision(features):
            return ClassGaussians(features, labels, counts, self.on(features, labels))

    def on(self, features: Tensor, labels: Tensor) -> RegularizedCovariance:
        """These settings with beta chosen on the support set, features (n, d) and labels (n,), where it is "auto"."""
        if self.beta != "auto":
            return self
        from fewshot_mahalanobis.calibration import choose_beta  # which builds on this module

        return RegularizedCovariance(
            choose_beta(self, features, labels), self.task_covariance, self.one_shot_covariance
        )

    def extra_repr(self) -> str:
        """Name the settings in ``repr``."""
        return (
            f"beta={self.beta!r}, task_covariance={self.task_covariance}, "
            f"one_shot_covariance={self.one_shot_covariance!r}"
        )


class ClassGaussians:
    """A Gaussian N(mu_k, Q_k) for each class; made by ``RegularizedCovariance``.

    It holds thin factors of Q_k, in all O(n d) numbers; only ``covariance`` and ``precision`` build (k, d, d).

    Attributes
    ----------
    means : Tensor of shape (k, d)
        Class means mu_k.
    counts : int64 Tensor of shape (k,)
        Support examples n_k.
    beta : float
        Weight of the identity in Q_k.
    """

    def __init__(self, features: Tensor, labels: Tensor, counts: Tensor, settings: RegularizedCovariance) -> None:
        self.counts = counts
        self._dtype = result_dtype(features)
        self.beta = float(settings.beta)
        # Distances do not change when everything moves by the task mean, and products of centred features are exact
        # where those of uncentred ones cancel.
        in_single = _single_precision(features, labels, counts, settings)
        self._support = features.clone(), labels.clone(), settings  # for what is made when it is asked for
        if in_single is None:
            self._single, self._centre = None, features.mean(dim=0, dtype=_working_dtype(features))
            means = self._full.means
        else:
            self._single, self._centre = in_single
            means = self._single.means * math.sqrt(self.beta)
        self.means = (means + self._centre).to(self._dtype)

    def squared_distance(self, queries: Tensor) -> Tensor:
        """Squared Mahalanobis distance (x - mu_k)^T Q_k^-1 (x - mu_k): equation 2 without its factor 1/2.

        Parameters
        ----------
        queries : Tensor of shape (m, d)
            Finite; any floating-point dtype.

        Returns
        -------
        Tensor of shape (m, k)
            Never negative, in the dtype of the queries, float32 at least, and to 1e-5 in that. Temporaries are bounded:
            queries are served in chunks, and a query's distances do not depend on the others' but for rounding.

        Raises
        ------
        ValueError
            On a wrong shape or dtype, NaN or infinity.
        """
        check_features(queries, "query features", width=self.means.shape[1])
        with full_precision(queries):
            wide = queries.dtype == torch.float64 or queries.requires_grad or not _products_are_float32()
            single = None if wide else self._single
            numbers = (single or self._full).numbers_per_query()
            distances = []
            for chunk in queries.split(max(1, _CHUNK_NUMBERS // numbers)):
                if single is None:
                    distance = self._full.squared_distance(chunk - self._centre)
                else:
                    distance, cancelled = single.by_products(_in_float32(chunk, self._centre, self.beta))
                    if len(rows := cancelled.nonzero()[:, 0]):
                        exact = self._full.squared_distance(chunk[rows] - self._centre)
                        distance.index_copy_(0, rows, exact.to(distance.dtype))
                distances.append(distance.to(result_dtype(queries)))
            return torch.cat(distances)

    def covariance(self) -> Tensor:
        """Q_k of every class, dense, shape (k, d, d)."""
        with full_precision(self.means):
            return self._covariance().to(self._dtype)

    def precision(self) -> Tensor:
        """Inverse of Q_k of every class, dense, shape (k, d, d)."""
        with full_precision(self.means):
            return torch.cholesky_inverse(_cholesky(self._covariance())).to(self._dtype)

    @functools.cached_property
    def _full(self) -> _Factors:
        """The factors in the working precision; where there are some in float32, made when first asked for."""
        features, labels, settings = self._support
        return _Factors(features - self._centre, labels, self.counts, self._centre, settings)

    def _covariance(self) -> Tensor:
        """Q_k of every class, dense (k, d, d), in the working precision."""
        features, labels, settings = self._support
        x = features - self._centre
        task_covariance = _TaskScatter.of(x, settings).covariance()
        groups = _class_groups(x, labels, self.counts, self._centre, settings)
        stacks = [_regularised_covariance(group, task_covariance, self.beta) for group in groups]
        dense = torch.cat(stacks)[_by_class(groups)]
        return (dense + dense.mT) / 2  # a product A^T A is symmetric but for its last bits


def _in_float32(features: Tensor, centre: Tensor, beta: float) -> Tensor:
    """Centred features in units of sqrt(beta), to float32's precision of the difference, by float32 numbers alone."""
    high = centre.float()
    low = (centre - high).float()
    return (features.detach().float() - high).sub_(low).mul_(1.0 / math.sqrt(beta))


def _single_precision(
    features: Tensor, labels: Tensor, counts: Tensor, settings: RegularizedCovariance
) -> tuple[_Factors, Tensor] | None:
    """Factors in float32, in units of sqrt(beta), where those give the distances of float32 queries to 1e-5.

    Beside them the task mean (d,) in the working precision: to float32's precision of what is left when it is taken
    away, which is little here.

    Rounding moves a distance by a few 2^-24 of the condition of Q_k, which is small where beta suits the features. Not
    for gradients, which a difference quotient checks to more digits, and not for the published covariance of one
    example, which is as large as what the task mean takes away.
    """
    if features.requires_grad or _working_dtype(features) == torch.float32 or features.dtype == torch.float64:
        return None
    if not _products_are_float32():
        return None
    if settings.one_shot_covariance == "published" and counts.min() == 1:
        return None
    beta = float(settings.beta)
    if not 2.0**-60 < beta < 2.0**60:  # so that lengths of about sqrt(beta) are ordinary numbers
        return None
    nearly = features.float().mean(dim=0)
    centre = nearly.to(_working_dtype(features)) + (features - nearly).mean(dim=0)
    x = _in_float32(features, centre, beta)
    if not torch.linalg.vector_norm(x, dim=1).max() <= _FLOAT32_LENGTH:
        return None
    try:
        return _Factors(x, labels, counts, centre, RegularizedCovariance(1.0, settings.task_covariance)), centre
    except ValueError:  # of pivots that lose too much in float32; whether they do in float64 is another question
        return None


def _products_are_float32() -> bool:
    """Whether products of float32 matrices are that, and not of TF32 or bfloat16, as a program may have settled."""
    try:
        settled = torch.get_float32_matmul_precision()
    except RuntimeError:  # by another interface, for one backend
        return False
    return settled == "highest" and getattr(torch.backends, "fp32_precision", "none") in ("none", "ieee")


class _Factors:
    """Thin factors of every Q_k in one precision, that of the centred features ``x``."""

    def __init__(
        self, x: Tensor, labels: Tensor, counts: Tensor, centre: Tensor, settings: RegularizedCovariance
    ) -> None:
        n, d = x.shape
        task = _TaskScatter.of(x, settings)
        task_covariance = task.covariance() if 2 * n >= d else None
        groups = _class_groups(x, labels, counts, centre, settings)
        self._metrics = [_metric(group, task, task_covariance, float(settings.beta)) for group in groups]
        # Column j of the groups' concatenated results belongs to class order[j]; this puts class 0 first.
        self._columns = _by_class(groups)
        self.means = torch.cat([group.means for group in groups])[self._columns]  # less the task mean, (k, d)
        self._longest_mean = self.means.square().sum(dim=1).max()

    def numbers_per_query(self) -> int:
        return max(metric.numbers_per_query() for metric in self._metrics)

    def squared_distance(self, x: Tensor) -> Tensor:
        """Distances (m, k) of centred queries (m, d)."""
        return self._in_order([metric.squared_distance(x) for metric in self._metrics])

    def by_products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The distances by matrix products alone, and the queries (m,) of which one distance has cancelled."""
        distances, cancelled = zip(*(metric.by_products(x) for metric in self._metrics), strict=True)
        distance = self._in_order(list(distances))
        # Rounding x and mu_k has moved them by a share of their lengths, not of those of T x and T mu_k.
        lengths = x.square().sum(dim=1) + self._longest_mean
        rounded = ~(distance.amin(dim=1) >= _ROUNDED * lengths)
        return distance, torch.stack([*cancelled, rounded]).any(dim=0)

    def _in_order(self, distances: list[Tensor]) -> Tensor:
        """Columns by class; those of a single group are already."""
        return distances[0] if len(distances) == 1 else torch.cat(distances, dim=1)[:, self._columns]


@dataclass(frozen=True, eq=False)
class _TaskScatter:
    """Sigma of all support features, by its rows; no rows where Sigma is left out."""

    rows: Tensor  # centred features (n, d)
    scale: float  # 1 / (n - 1)

    @classmethod
    def of(cls, x: Tensor, settings: RegularizedCovariance) -> _TaskScatter:
        return cls(x if settings.task_covariance else x[:0], 1.0 / max(len(x) - 1, 1))

    def covariance(self) -> Tensor:
        """Sigma (d, d). A symmetric matrix is half a matrix: its lower strips take 3/4 of the products."""
        d = self.rows.shape[1]
        sigma, start = self.rows.new_empty(d, d), 0
        for strip in self.rows.chunk(_STRIPS, dim=1):
            stop = start + strip.shape[1]
            lower = self.scale * (strip.T @ self.rows[:, :stop])
            sigma[start:stop, :stop] = lower
            sigma[:start, start:stop] = lower[:, :start].T
            start = stop
        return sigma


@dataclass(frozen=True, eq=False)
class _ClassGroup:
    """The k' classes that share one shot count, hence lambda. ``means`` are centred at the task mean."""

    classes: Tensor  # (k',) class indices
    means: Tensor  # (k', d)
    roots: Tensor  # (k', r, d): sqrt(lambda_k) A_k, so that roots^T roots = lambda_k Sigma_k
    task_weight: float  # 1 - lambda_k


def _class_groups(
    x: Tensor, labels: Tensor, counts: Tensor, centre: Tensor, settings: RegularizedCovariance
) -> list[_ClassGroup]:
    """Make the groups of classes of one shot count, from centred features (n, d), the fewest shots first."""
    by_class = labels.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    groups = []
    for shots in counts.unique().tolist():
        classes = (counts == shots).nonzero()[:, 0]
        members = x[by_class[starts[classes, None] + torch.arange(shots, device=x.device)]]
        groups.append(_class_group(members, classes, centre, settings))
    return groups


def _by_class(groups: list[_ClassGroup]) -> Tensor:
    """Where each class (k,) stands among the groups' classes one after another."""
    return torch.cat([group.classes for group in groups]).argsort()


def _class_group(members: Tensor, classes: Tensor, centre: Tensor, settings: RegularizedCovariance) -> _ClassGroup:
    shots, d = members.shape[1:]
    weight = shots / (shots + 1) if settings.task_covariance else 1.0  # lambda_k
    means = members.mean(dim=1)
    if shots == 1 and settings.one_shot_covariance == "published":
        # c in every entry of Sigma_k is c 1 1^T, of root sqrt(c) 1^T. c is that of the vector before centring. Its
        # square root has no gradient at zero, so a constant vector (c = 0) is replaced before the root, not after.
        vectors = members + centre
        c = (vectors - vectors.mean(dim=2, keepdim=True)).square().sum(dim=2, keepdim=True) / max(d - 1, 1)
        roots = torch.where(c > 0, torch.where(c > 0, weight * c, 1.0).sqrt(), 0.0).expand(-1, 1, d)
    else:
        roots = math.sqrt(weight / max(shots - 1, 1)) * _contrasts(shots, members) @ members
    return _ClassGroup(classes, means, roots, 1.0 - weight)


def _contrasts(n: int, like: Tensor) -> Tensor:
    """Helmert's orthonormal contrasts C (n - 1, n): C^T C removes the mean, so C X is a root of X's scatter.

    One row fewer than X - mean has; none for a single example, whose covariance is zero.
    """
    row = torch.arange(1, n, dtype=like.dtype, device=like.device)[:, None]
    column = torch.arange(n, dtype=like.dtype, device=like.device)
    return ((column < row).to(like.dtype) - row * (column == row)) / torch.sqrt(row * (row + 1))


def _regularised_covariance(group: _ClassGroup, task_covariance: Tensor, beta: float) -> Tensor:
    """Equation 3, dense: (k', d, d)."""
    identity = torch.eye(len(task_covariance), dtype=task_covariance.dtype, device=task_covariance.device)
    return group.roots.mT @ group.roots + group.task_weight * task_covariance + beta * identity


@dataclass(frozen=True, eq=False)
class _Ridge:
    """The quadratic form of (I + F^T F)^-1 for F with few rows, held as L L^T = I + F F^T and G = L^-1 F.

    Woodbury: (I + F^T F)^-1 = I - G^T G. Ridge regression on the rows of F: x^T (I + F^T F)^-1 x is the minimum over
    b of ||x - F^T b||^2 + ||b||^2, attained at b = L^-T G x. The second is a sum of squares: nothing cancels and
    nothing turns negative.
    """

    reduction: Tensor  # G (..., r, p)
    cholesky: Tensor  # L (..., r, r)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Residual x - F^T b (..., m, p) and coefficients b (..., m, r) of each row of ``x`` (..., m, p)."""
        along = x @ self.reduction.mT
        return x - along @ self.reduction, torch.linalg.solve_triangular(self.cholesky, along, upper=False, left=False)


def _ridge(factor: Tensor) -> _Ridge:
    identity = torch.eye(factor.shape[-2], dtype=factor.dtype, device=factor.device)
    cholesky = _cholesky(identity + factor @ factor.mT)
    # L G = F, solved as G^T L^T = F^T, which is faster for factors of a few rows.
    return _Ridge(torch.linalg.solve_triangular(cholesky.mT, factor.mT, upper=True, left=False).mT, cholesky)


@dataclass(frozen=True, eq=False)
class _CholeskyWhitening:
    """T = L^-1 for S = L L^T, d x d."""

    cholesky: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.cholesky.mT, x, upper=True, left=False)


@dataclass(frozen=True, eq=False)
class _RidgeWhitening:
    """T for S = beta (I + F^T F), by way of n x n; T x has d + n entries."""

    ridge: _Ridge
    beta: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat(self.ridge.parts(x), dim=-1) / math.sqrt(self.beta)


@dataclass(frozen=True, eq=False)
class _ScalarWhitening:
    """T for S = beta I."""

    beta: float

    def __call__(self, x: Tensor) -> Tensor:
        return x / math.sqrt(self.beta)


_Whitening = _CholeskyWhitening | _RidgeWhitening | _ScalarWhitening


def _whitening(task: _TaskScatter, task_covariance: Tensor | None, weight: float, beta: float) -> _Whitening:
    """T with T^T T = S^-1, S = ``weight`` Sigma + beta I."""
    if len(task.rows) == 0:
        return _ScalarWhitening(beta)
    if task_covariance is not None:
        shared = weight * task_covariance
        shared.diagonal().add_(beta)
        return _CholeskyWhitening(_cholesky(shared))
    return _RidgeWhitening(_ridge(math.sqrt(weight * task.scale / beta) * task.rows), beta)


@dataclass(frozen=True, eq=False)
class _CholeskyMetric:
    """Distances by the d x d factors of Q_k."""

    means: Tensor  # (k', d)
    cholesky: Tensor  # (k', d, d)

    def numbers_per_query(self) -> int:
        return self.means.numel()

    def squared_distance(self, x: Tensor) -> Tensor:
        return self.coordinates(x - self.means[:, None]).square().sum(dim=2).T

    def by_products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Distances (m, k'), of which none cancels."""
        return self.squared_distance(x), torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def coordinates(self, x: Tensor) -> Tensor:
        """Vectors (k', m, d), or (1, m, d) for all classes, where Q_k is the identity: (k', m, d)."""
        return torch.linalg.solve_triangular(self.cholesky, x.mT, upper=False).mT

    def mean_coordinates(self) -> Tensor:
        """The means there, (k', 1, d)."""
        return self.coordinates(self.means[:, None])


@dataclass(frozen=True, eq=False)
class _LowRankMetric:
    """Distances by the Woodbury identity in whitened space, where Q_k is I + F_k^T F_k.

    With w = T x and w_k = T mu_k the squared distance is ||w - w_k||^2 - ||G_k (w - w_k)||^2: two products of
    matrices for all queries and classes. Both terms are nearly always far from cancelling in float64: the scatter of
    a class is part of that of the task, so F_k^T F_k <= 2 (n - 1) I whatever the scale of the features, and the
    difference keeps at least ||w - w_k||^2 / (2 n). A query for which a term does cancel (it lies next to a mean, or
    the task covariance is left out and features are large) is served by the slower sums of squares.
    """

    whitening: _Whitening
    means: Tensor  # w_k (k', p)
    lengths: Tensor  # ||w_k||^2 (k',)
    ridge: _Ridge  # with F_k = T-transformed roots (k', r, p)
    means_along: Tensor  # G_k w_k (k', r)

    def numbers_per_query(self) -> int:
        classes, rows, width = self.ridge.reduction.shape
        return width + classes * (rows + 1)

    def squared_distance(self, x: Tensor) -> Tensor:
        distance, cancelled = self.by_products(x)
        if len(rows := cancelled.nonzero()[:, 0]):
            distance = distance.index_copy(0, rows, self._sum_of_squares(x[rows]))
        return distance

    def by_products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Distances (m, k'), and for which queries (m,) one of them has cancelled."""
        w = self.whitening(x)
        of_queries = w.square().sum(dim=1)
        norms = of_queries[:, None] + self.lengths
        distance = torch.addmm(norms, w, self.means.T, alpha=-2.0)  # ||w - w_k||^2 (m, k')
        # G_k (w - w_k), in an order (m, r, k') in which sums over r are sums of whole rows.
        along = torch.addmm(-self.means_along.T.flatten(), w, self.ridge.reduction.transpose(0, 1).flatten(0, 1).T)
        distance = distance - along.unflatten(1, self.means_along.T.shape).square_().sum(dim=1)
        kept = (distance >= _CANCELLED[w.dtype] * norms).all(dim=1)
        low, high = _SQUARES[w.dtype]
        return distance, ~(kept & (of_queries >= low) & (of_queries <= high))

    def coordinates(self, x: Tensor) -> Tensor:
        """Vectors (k', m, d), or (1, m, d) for all classes, where Q_k is the identity: (k', m, p + r)."""
        return torch.cat(self.ridge.parts(self.whitening(x)), dim=-1)

    def mean_coordinates(self) -> Tensor:
        """The means there, (k', 1, p + r)."""
        return torch.cat(self.ridge.parts(self.means[:, None]), dim=-1)

    def _sum_of_squares(self, x: Tensor) -> Tensor:
        """Take the same distances from the (m, k', p) residuals, a few queries at a time."""
        distances = []
        for chunk in self.whitening(x).split(max(1, _CHUNK_NUMBERS // self.means.numel())):
            residual, b = self.ridge.parts(chunk - self.means[:, None])
            distances.append((residual.square().sum(dim=2) + b.square().sum(dim=2)).T)
        return torch.cat(distances)


_Metric = _CholeskyMetric | _LowRankMetric


def _metric(group: _ClassGroup, task: _TaskScatter, task_covariance: Tensor | None, beta: float) -> _Metric:
    """Distances to the classes of ``group``; ``task_covariance`` is the dense (d, d) of ``task`` where n >= d."""
    rows, d = group.roots.shape[1:]
    if task_covariance is not None and rows + 1 >= d:
        return _CholeskyMetric(group.means, _cholesky(_regularised_covariance(group, task_covariance, beta)))
    whitening = _whitening(task, task_covariance, group.task_weight, beta)
    means = whitening(group.means)
    ridge = _ridge(whitening(group.roots.flatten(0, 1)).unflatten(0, group.roots.shape[:2]))
    # In memory row by row of all classes, in which order the metric multiplies them.
    ridge = _Ridge(ridge.reduction.transpose(0, 1).contiguous().transpose(0, 1), ridge.cholesky)
    along = (ridge.reduction @ means[:, :, None])[:, :, 0]
    return _LowRankMetric(whitening, means, means.square().sum(dim=1), ridge, along)


def _working_dtype(features: Tensor) -> torch.dtype:
    """Float64: the head is small beside the network, and features of scale 1e3 make Q_k's condition 1e9."""
    return torch.float32 if features.device.type == "mps" else torch.float64  # MPS has no float64


def _cholesky(matrix: Tensor) -> Tensor:
    """Cholesky factor (..., r, r), refused where its pivots are mostly rounding: the beta I in ``matrix`` is lost.

    Below the working precision, which can take over, already where they have lost more than 1e-5 leaves room for.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots, diagonal = factor.diagonal(dim1=-2, dim2=-1).square(), matrix.diagonal(dim1=-2, dim2=-1)
    spare = matrix.dtype != _working_dtype(matrix)
    kept = pivots > (_FLOAT32_PIVOT if spare else _LOST * torch.finfo(matrix.dtype).eps) * diagonal
    if not (kept.all() and (failed == 0).all()):
        raise ValueError(
            "the support features are so large that beta I is lost to rounding and Q_k is singular: "
            "scale the features down or raise beta"
        )
    return factor
