"""Exact leave-one-out distances of a support set, by downdating instead of refitting.

How far would each support example lie from every class, had it not been in the support set? With the others alone

    Q_j = lambda_j Sigma_j + (1 - lambda_j) S + beta I        (Bateni et al., CVPR 2020, equation 3)

changes by at most a factor and two vectors. With x_i centred at the task mean and v_i = x_i - mu_k for its class k,

    (n - 2)     Sigma   without i = (n - 1)   Sigma   - n / (n - 1)     x_i x_i^T
    (n_k - 2)   Sigma_k without i = (n_k - 1) Sigma_k - n_k / (n_k - 1) v_i v_i^T,   lambda_k of n_k - 1 examples
    (n - k - 1) W       without i = (n - k)   W       - n_k / (n_k - 1) v_i v_i^T

where S is Sigma, the task covariance, or W, the covariance pooled within k classes. (An example alone in its class
leaves W as it is.) So Q_j without i is B_j - U_i U_i^T, where B_j is the same for every i and factored once. U_i holds
S's vector, and for i's own class v_i too. The Woodbury identity gives every distance from inner products under B_j^-1:

    delta^T (B - U U^T)^-1 delta = delta^T B^-1 delta + t^T (I - U^T B^-1 U)^-1 t,    t = U^T B^-1 delta

The cost is about two fits and one prediction of the support set; n refits cost n fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.checks import check_support, full_precision, result_dtype, working_dtype
from fewshot_mahalanobis.gaussians.low_rank import (
    MAX_CHUNK_NUMBERS,
    MIN_ROUNDINGS,
    ClassGroup,
    Metric,
    SharedCovariance,
    class_group,
    class_groups,
    class_roots,
    deviations,
    make_metric,
    members_by_shots,
)
from fewshot_mahalanobis.gaussians.settings import CovarianceSettings


def leave_one_out_distance(settings: CovarianceSettings, features: Tensor, labels: Tensor) -> Tensor:
    """Squared Mahalanobis distance of each support example to each class of the Gaussians fitted to the others.

    Parameters
    ----------
    settings : CovarianceSettings
        Beta is a number.
    features : Tensor of shape (n, d)
        As for :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.

    Returns
    -------
    Tensor of shape (n, k)
        Row i, column j: fitted without example i, its distance to class j. Infinite where class j has no other example.
        In the features' dtype, float32 at least; differentiable.

    Raises
    ------
    ValueError
        As ``RegularizedCovariance`` raises, and if an example outweighs the others so far that its removal is lost to
        rounding.
    """
    counts = check_support(features, labels)
    with full_precision(features):
        x = features.to(working_dtype(features))
        centre = x.mean(dim=0)
        x = x - centre
        left = _shared_without_one(x, labels, counts, settings)
        distances = x.new_full((len(x), len(counts)), torch.inf)
        for group in class_groups(x, labels, counts, centre, settings):
            metric = make_metric(group, left.shared, settings.ridge)
            column = _of_other_classes(metric, x, left.vectors, group.shared_weight * left.removed)
            if settings.shared == "within" and not settings.without_shared and (counts == 1).any():
                # An example that is alone in its class leaves nothing behind: the other classes are as they were.
                whole = SharedCovariance.of(x, labels, counts, settings)
                alone = (counts[labels] == 1).nonzero()[:, 0]
                unchanged = make_metric(group, whole, settings.ridge).squared_distance(x[alone])
                column = column.index_copy(0, alone, unchanged)
            distances = distances.index_copy(1, group.classes, column)
        for classes, rows in members_by_shots(labels, counts):
            own = _of_own_classes(
                x[rows], left.vectors[rows], left.removed[rows], left.shared, classes, centre, settings
            )
            distances = distances.index_put((rows.flatten(), classes.repeat_interleave(rows.shape[1])), own.flatten())
        return distances.to(result_dtype(features))


@dataclass(frozen=True, eq=False)
class _Left:
    """S without example i is ``shared`` less ``removed[i]`` times the outer square of ``vectors[i]``."""

    shared: SharedCovariance
    vectors: Tensor  # (n, d)
    removed: Tensor  # (n,)


def _shared_without_one(x: Tensor, labels: Tensor, counts: Tensor, settings: CovarianceSettings) -> _Left:
    n, k = len(x), len(counts)
    if settings.shared == "task":
        vectors, freedom = x, n - 2
        examples = torch.full((n,), float(n), dtype=x.dtype, device=x.device)
    else:
        vectors, freedom = deviations(x, labels, counts), n - k - 1
        examples = counts[labels].to(x.dtype)
    if settings.without_shared or freedom < 1:  # nothing is left of S
        return _Left(SharedCovariance(x[:0], 0.0), vectors, torch.zeros_like(examples))
    removed = torch.where(examples > 1, examples / (examples - 1).clamp(min=1) / freedom, 0.0)
    return _Left(SharedCovariance(vectors, 1.0 / freedom), vectors, removed)


def _of_other_classes(metric: Metric, x: Tensor, vectors: Tensor, removed: Tensor) -> Tensor:
    """Distances (n, k') of each x_i to the means of ``metric``, under B_j less ``removed[i]`` u_i u_i^T."""
    columns = []
    size = max(1, MAX_CHUNK_NUMBERS // metric.numbers_per_query())
    for chunk, u, share in zip(x.split(size), vectors.split(size), removed.split(size), strict=True):
        distance = metric.squared_distance(chunk)
        if share.any():
            length, along = metric.inner_products(u, chunk)
            distance = distance + share[:, None] * along.square() / _kept(1.0 - share[:, None] * length)
        columns.append(distance)
    return torch.cat(columns)


def _of_own_classes(
    members: Tensor,
    vectors: Tensor,
    removed: Tensor,
    shared: SharedCovariance,
    classes: Tensor,
    centre: Tensor,
    settings: CovarianceSettings,
) -> Tensor:
    """Distances (k', n_k), or as many in another shape, of ``members`` (k', n_k, d) to their classes without them.

    ``vectors`` and ``removed`` are those of ``_Left``, for each member.
    """
    shots = members.shape[1]
    if shots == 1:
        return members.new_full((len(members), 1), torch.inf)
    if shots == 2:  # each of a pair against the other, a class of one
        group = class_group(members.flip(1).flatten(0, 1)[:, None], classes, centre, settings)
        members, vectors, removed = (tensor.flatten(0, 1)[:, None] for tensor in (members, vectors, removed))
        own_removed = 0.0
    else:
        weight = settings.class_weight(shots - 1)
        roots = class_roots(members, weight, shots - 2)
        group = ClassGroup(classes, members.mean(dim=1), roots, 1.0 - weight)
        own_removed = weight * shots / ((shots - 1) * (shots - 2))
    metric = make_metric(group, shared, settings.ridge)
    return _of_own_class(metric, members, vectors, group.shared_weight * removed, own_removed)


def _of_own_class(metric: Metric, members: Tensor, vectors: Tensor, removed: Tensor, own_removed: float) -> Tensor:
    """Distances (k', n') of each of ``members`` (k', n', d) to its own class, fitted without it.

    The class's matrix is B - ``removed`` u u^T - ``own_removed`` v v^T with u of ``vectors`` and v = x - mean. Where
    n' is 1 the metric's means are without the example already.
    """
    x = metric.coordinates(members)  # in which B is the identity
    v = x - metric.mean_coordinates()
    shots = members.shape[1]
    delta = v * (shots / (shots - 1)) if shots > 1 else v  # x less the mean of the others
    vectors = metric.coordinates(vectors)
    u = torch.stack([removed.sqrt()[..., None] * vectors, math.sqrt(own_removed) * v], dim=2)  # U^T: (k', n', 2, p)
    rest = torch.eye(2, dtype=x.dtype, device=x.device) - u @ u.mT
    lower, _ = torch.linalg.cholesky_ex(rest)
    _kept(lower.diagonal(dim1=-2, dim2=-1).square())
    t = torch.linalg.solve_triangular(lower, u @ delta[..., None], upper=False)[..., 0]
    return delta.square().sum(dim=-1) + t.square().sum(dim=-1)


def _kept(share: Tensor) -> Tensor:
    """``share`` of a vector's weight that is left when it is removed, refused where it is mostly rounding."""
    if not (share > MIN_ROUNDINGS * torch.finfo(share.dtype).eps).all():
        raise ValueError(
            "a support example outweighs the others so far that its removal is lost to rounding: "
            "scale the features down or raise beta"
        )
    return share
