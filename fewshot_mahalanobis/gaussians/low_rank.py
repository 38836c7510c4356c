"""Mahalanobis distances under Q_k = lambda_k Sigma_k + (1 - lambda_k) S + beta I by products of thin matrices.

Sigma_k has rank below n_k and S rank below n, so with root matrices B^T B = S (n rows) and A_k^T A_k = Sigma_k (n_k
rows) no d x d matrix per class is needed. Two steps, both exact:

1. The part that all classes of one lambda share, P = (1 - lambda) S + beta I, is whitened once: a linear map T with
   T^T T = P^-1. For n >= d / 2, T is the inverse Cholesky factor of P. For fewer only an n x n matrix is factored:
   x^T P^-1 x = min_b { ||x - B'^T b||^2 + ||b||^2 } / beta with B' = sqrt((1 - lambda) / beta) B (ridge regression and
   its dual), so T x stacks that residual and those coefficients.
2. In whitened space Q_k becomes I + F_k^T F_k with F_k = sqrt(lambda_k) A_k T^T (n_k rows). The Woodbury identity
   needs the n_k x n_k matrix I + F_k F_k^T alone, batched over the classes of one shot count.

Cost model, in multiplications, with a = n / d and the whitened width p = d by Cholesky, d + n by ridge regression:

    step                                          Cholesky                  ridge regression
    S, or the n x n products; once                3/4 n d^2                 n^2 d
    factor, for each distinct lambda              d^3 / 3                   n^2 d / 2 + n^3 / 3
    whiten the support, likewise                  n d^2 / 2                 2 n^2 d + n^3 / 2
    in units of d^3                               1/3 + 1.1 a               3.5 a^2 + 0.8 a^3        equal at a = 0.46
    whiten m queries, for each lambda             m d^2 / 2                 2 m n d + m n^2 / 2
    their products with n rows                    m n d                     m n (d + n)
    in units of m d^2                             1/2 + a                   3 a + 1.5 a^2            equal at a = 0.22

So from n = d / 2 on the Cholesky factor pays whatever the number of queries. A class adds n_k^2 p + n_k^3 / 3. One
with n_k >= d gets the Cholesky factor of its own d x d matrix: from there on that is cheaper to fit, cheaper per query
(d^2 / 2 against n_k d) and no larger. Memory grows with n d: no matrix is larger than 2 n d numbers but the chunks of
queries.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Size of the largest temporary of a chunk of queries, in numbers (16 MB in float64).
MAX_CHUNK_NUMBERS = 2**21
#: S is computed in this many strips.
_STRIPS = 2
#: A difference that keeps less than this share of its terms counts as cancelled.
_CANCELLED = 2.0**-13
#: A Cholesky pivot below this many roundings of its diagonal entry is noise.
MIN_ROUNDINGS = 2.0**10


@dataclass(frozen=True, eq=False)
class SharedCovariance:
    """S by its rows: S = scale * rows^T rows. No rows where S is left out or zero."""

    rows: Tensor  # (r, d)
    scale: float

    @property
    def is_wide(self) -> bool:
        """Whether d x d matrices are cheaper than thin factors."""
        return 2 * len(self.rows) >= self.rows.shape[1]

    @functools.cached_property
    def dense(self) -> Tensor:
        """S (d, d), by its lower strips, which take 3/4 of the products, and symmetry."""
        d = self.rows.shape[1]
        dense, start = self.rows.new_empty(d, d), 0
        for strip in self.rows.chunk(_STRIPS, dim=1):
            stop = start + strip.shape[1]
            lower = self.scale * (strip.T @ self.rows[:, :stop])
            dense[start:stop, :stop] = lower
            dense[:start, start:stop] = lower[:, :start].T
            start = stop
        return dense


def roots_of_scatter(members: Tensor, freedom: int) -> Tensor:
    """Roots A_k (k', r, d) of the scatters of classes (k', n_k, d) over ``freedom``, their degrees of freedom.

    They have r = n_k - 1 rows, which saves time where n_k is small, or n_k, where that takes less memory.
    """
    scale, (shots, width) = math.sqrt(1.0 / max(freedom, 1)), members.shape[1:]
    if shots > width:
        return scale * (members - members.mean(dim=1, keepdim=True))
    return scale * _contrasts(shots, members) @ members


def _contrasts(n: int, like: Tensor) -> Tensor:
    """Helmert's orthonormal contrasts C (n - 1, n): C^T C removes the mean, so C X is a root of X's scatter.

    It has one row fewer than X - mean, and none for a single example, whose covariance is zero.
    """
    row = torch.arange(1, n, dtype=like.dtype, device=like.device)[:, None]
    column = torch.arange(n, dtype=like.dtype, device=like.device)
    return ((column < row).to(like.dtype) - row * (column == row)) / torch.sqrt(row * (row + 1))


# ---------------------------------------------------------------- factors


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


def _ridge(rows: Tensor, weight: float) -> _Ridge:
    """The form for F = sqrt(weight) ``rows``, which is not formed."""
    identity = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    lower = cholesky(identity + weight * (rows @ rows.mT))
    # L G = F, solved as G^T L^T = F^T, which is faster for factors of a few rows.
    scaled = lower.mT / math.sqrt(weight)
    return _Ridge(torch.linalg.solve_triangular(scaled, rows.mT, upper=True, left=False).mT, lower)


@dataclass(frozen=True, eq=False)
class _CholeskyWhitening:
    """T = L^-1 for P = L L^T, d x d."""

    cholesky: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.cholesky.mT, x, upper=True, left=False)


@dataclass(frozen=True, eq=False)
class _RidgeWhitening:
    """T for P = beta (I + F^T F), by way of n x n; T x has d + n entries."""

    ridge: _Ridge
    beta: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat(self.ridge.parts(x), dim=-1) / math.sqrt(self.beta)


@dataclass(frozen=True, eq=False)
class _ScalarWhitening:
    """T for P = beta I."""

    beta: float

    def __call__(self, x: Tensor) -> Tensor:
        return x / math.sqrt(self.beta)


_Whitening = _CholeskyWhitening | _RidgeWhitening | _ScalarWhitening


def shared_whitening(shared: SharedCovariance, weight: float, beta: float) -> _Whitening:
    """T with T^T T = P^-1, P = ``weight`` S + beta I."""
    if len(shared.rows) == 0:
        return _ScalarWhitening(beta)
    if shared.is_wide:
        dense = weight * shared.dense
        dense.diagonal().add_(beta)
        return _CholeskyWhitening(cholesky(dense))
    return _RidgeWhitening(_ridge(shared.rows, weight * shared.scale / beta), beta)


# ---------------------------------------------------------------- distances


@dataclass(frozen=True, eq=False)
class CholeskyMetric:
    """Distances by the d x d factors of Q_k."""

    means: Tensor  # (k', d)
    cholesky: Tensor  # (k', d, d)

    def numbers_per_query(self) -> int:
        """Size of the largest temporary, in numbers for each query."""
        return self.means.numel()

    def squared_distance(self, x: Tensor) -> Tensor:
        """Distances (m, k') of centred queries (m, d)."""
        return self.coordinates(x - self.means[:, None]).square().sum(dim=2).T

    def coordinates(self, x: Tensor) -> Tensor:
        """Map vectors (k', m, d), or (1, m, d) for all classes, to where Q_k is the identity: (k', m, d)."""
        return torch.linalg.solve_triangular(self.cholesky, x.mT, upper=False).mT

    def inner_products(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products under Q_k^-1 within G groups of vectors u and x (G, g, d).

        Returns those of u and u, and of u and x - mu_k, both (G, k', g, g).
        """
        size, at_u = u.shape[1], self.coordinates(u.flatten(0, 1)[None]).transpose(0, 1)
        at_x = self.coordinates(x.flatten(0, 1) - self.means[:, None]).transpose(0, 1)
        return _within_groups(at_u, at_u, size), _within_groups(at_u, at_x, size)

    def mean_coordinates(self) -> Tensor:
        """Coordinates of the means, (k', 1, d)."""
        return self.coordinates(self.means[:, None])


@dataclass(frozen=True, eq=False)
class LowRankMetric:
    """Distances by the Woodbury identity in whitened space, where Q_k is I + F_k^T F_k.

    With w = T x and w_k = T mu_k the squared distance is ||w - w_k||^2 - ||G_k (w - w_k)||^2: two products of
    matrices for all queries and classes. Both terms are nearly always far from cancelling: the scatter of a class is
    part of that in S, so F_k^T F_k <= 2 (n - 1) / nu I whatever the scale of the features, and the difference keeps at
    least 1 / (1 + 2 (n - 1) / nu) of ||w - w_k||^2. A query for which a term does cancel (it lies next to a mean, or S
    is left out and features are large) is served by the slower sums of squares.
    """

    whitening: _Whitening
    means: Tensor  # w_k (k', p)
    lengths: Tensor  # ||w_k||^2 (k',)
    ridge: _Ridge  # with F_k = T-transformed roots (k', r, p)
    means_along: Tensor  # G_k w_k (k', r)

    def numbers_per_query(self) -> int:
        """Size of the largest temporary, in numbers for each query."""
        classes, rows, width = self.ridge.reduction.shape
        return width + classes * (rows + 1)

    def squared_distance(self, x: Tensor) -> Tensor:
        """Distances (m, k') of centred queries (m, d)."""
        w = self.whitening(x)
        norms = w.square().sum(dim=1)[:, None] + self.lengths
        distance = torch.addmm(norms, w, self.means.T, alpha=-2.0)  # ||w - w_k||^2 (m, k')
        if rows := self.means_along.shape[1]:
            # G_k (w - w_k), in an order (m, r, k') in which sums over r are sums of whole rows.
            along = torch.addmm(-self.means_along.T.flatten(), w, self.ridge.reduction.transpose(0, 1).flatten(0, 1).T)
            distance = distance - along.unflatten(1, (rows, -1)).square_().sum(dim=1)
        exact = (distance >= _CANCELLED * norms).all(dim=1) & norms.isfinite().all(dim=1)
        if len(cancelled := (~exact).nonzero()[:, 0]):
            distance = distance.index_copy(0, cancelled, self._sum_of_squares(x[cancelled]))
        return distance

    def coordinates(self, x: Tensor) -> Tensor:
        """Map vectors (k', m, d), or (1, m, d) for all classes, to where Q_k is the identity: (k', m, p + r)."""
        return torch.cat(self.ridge.parts(self.whitening(x)), dim=-1)

    def inner_products(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products under Q_k^-1 within G groups of vectors u and x (G, g, d).

        Returns those of u and u, and of u and x - mu_k, both (G, k', g, g). As the distances, they are products of
        matrices: Q_k^-1 = T^T (I - G_k^T G_k) T.
        """
        size, reduction = u.shape[1], self.ridge.reduction
        w_u = self.whitening(u.flatten(0, 1))
        w_x = w_u if x is u else self.whitening(x.flatten(0, 1))
        along_u, along_x = ((w @ reduction.flatten(0, 1).T).unflatten(1, reduction.shape[:2]) for w in (w_u, w_x))
        w_u, w_x = w_u[:, None], w_x[:, None]
        to_means = (w_u[:, 0] @ self.means.T).unflatten(0, (-1, size)).transpose(1, 2)[..., None]  # (G, k', g, 1)
        gram = _within_groups(w_u, w_u, size) - _within_groups(along_u, along_u, size)
        cross = _within_groups(w_u, w_x, size) - to_means
        return gram, cross - _within_groups(along_u, along_x - self.means_along, size)

    def mean_coordinates(self) -> Tensor:
        """Coordinates of the means, (k', 1, p + r)."""
        return torch.cat(self.ridge.parts(self.means[:, None]), dim=-1)

    def _sum_of_squares(self, x: Tensor) -> Tensor:
        """Take the same distances from the (m, k', p) residuals, a few queries at a time."""
        distances = []
        for chunk in self.whitening(x).split(max(1, MAX_CHUNK_NUMBERS // self.means.numel())):
            residual, b = self.ridge.parts(chunk - self.means[:, None])
            distances.append((residual.square().sum(dim=2) + b.square().sum(dim=2)).T)
        return torch.cat(distances)


def _within_groups(u: Tensor, x: Tensor, size: int) -> Tensor:
    """Inner products (G, k', g, g) of u and x (G g, k', p) within each ``size`` = g rows."""
    if size == 1:
        return (u * x).sum(dim=2)[..., None, None]
    u, x = (z.unflatten(0, (-1, size)).transpose(1, 2) for z in (u, x))
    return u @ x.mT


Metric = CholeskyMetric | LowRankMetric


def low_rank_metric(
    means: Tensor, roots: Tensor, class_weight: float, shared: SharedCovariance, beta: float
) -> LowRankMetric:
    """Factor the covariances of classes of means (k', d) and roots A_k (k', r, d) that have one lambda."""
    whitening = shared_whitening(shared, 1.0 - class_weight, beta)
    means = whitening(means)
    ridge = _ridge(whitening(roots.flatten(0, 1)).unflatten(0, roots.shape[:2]), class_weight)
    # The metric multiplies the rows in this order: the first of every class, then the second.
    ridge = _Ridge(ridge.reduction.transpose(0, 1).contiguous().transpose(0, 1), ridge.cholesky)
    along = (ridge.reduction @ means[:, :, None])[:, :, 0]
    return LowRankMetric(whitening, means, means.square().sum(dim=1), ridge, along)


def cholesky(matrix: Tensor) -> Tensor:
    """Cholesky factor (..., r, r); raise if rounding dominates a pivot, as beta I is lost in ``matrix`` then."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots, diagonal = factor.diagonal(dim1=-2, dim2=-1).square(), matrix.diagonal(dim1=-2, dim2=-1)
    significant = pivots > MIN_ROUNDINGS * torch.finfo(matrix.dtype).eps * diagonal
    if not (significant.all() and (failed == 0).all()):
        raise ValueError(
            "the support features are so large that beta I is lost to rounding and Q_k is singular: "
            "scale the features down or raise beta"
        )
    return factor
