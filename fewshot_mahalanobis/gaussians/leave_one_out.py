"""Exact leave-one-out distances of a support set, by downdating instead of refitting.

How far would each support example lie from every class, had it not been in the support set? With the others alone

    Q_j = lambda_j Sigma_j + (1 - lambda_j) Sigma + beta I        (Bateni et al., CVPR 2020, equation 3)

changes by at most a factor and two vectors. With x_i centred at the task mean and v_i = x_i - mu_k for its class k,

    (n - 2)   Sigma   without i = (n - 1)   Sigma   - n / (n - 1)     x_i x_i^T
    (n_k - 2) Sigma_k without i = (n_k - 1) Sigma_k - n_k / (n_k - 1) v_i v_i^T,   lambda_k = (n_k - 1) / n_k

so Q_j without i is B_j - U_i U_i^T, where B_j is the same for every i and factored once, and U_i holds x_i alone for
the classes that i is not of, x_i and v_i for its own. The Woodbury identity then gives every distance from inner
products under B_j^-1:

    delta^T (B - U U^T)^-1 delta = delta^T B^-1 delta + t^T (I - U^T B^-1 U)^-1 t,    t = U^T B^-1 delta

In all that costs about two fits and one prediction of the support set, where n refits cost n fits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.covariance import (
    _CHUNK_NUMBERS,
    _LOST,
    RegularizedCovariance,
    _CholeskyMetric,
    _class_group,
    _ClassGroup,
    _contrasts,
    _Metric,
    _metric,
    _TaskScatter,
    _working_dtype,
    check_support,
    full_precision,
    result_dtype,
)


def leave_one_out_distance(covariance: RegularizedCovariance, features: Tensor, labels: Tensor) -> Tensor:
    """Squared Mahalanobis distance of each support example to each class of the Gaussians fitted to the others.

    Parameters
    ----------
    covariance : RegularizedCovariance
    features : Tensor of shape (n, d)
        As for ``covariance``.
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.

    Returns
    -------
    Tensor of shape (n, k)
        Row i, column j: ``covariance`` fitted without example i, its distance to class j. Infinite where class j has
        no other example. In the features' dtype, float32 at least; differentiable.

    Raises
    ------
    ValueError
        As ``covariance`` raises, and if an example outweighs the others so far that its removal is lost to rounding.
    """
    counts = check_support(features, labels)
    covariance = covariance.on(features, labels)
    beta = float(covariance.beta)
    with full_precision(features):
        x = features.to(_working_dtype(features))
        centre = x.mean(dim=0)
        x = x - centre
        n, d = x.shape
        # (n - 1) / (n - 2) Sigma; nothing is left of Sigma when one example is.
        task = _TaskScatter(x if covariance.task_covariance and n > 2 else x[:0], 1.0 / max(n - 2, 1))
        dense = task.covariance() if n >= d else None
        removed = n / (n - 1) * task.scale if len(task.rows) else 0.0

        def metric_of(group: _ClassGroup) -> _Metric:
            return _metric(group, task, dense, beta)

        distances = x.new_full((n, len(counts)), torch.inf)
        by_class = labels.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        for shots in counts.unique().tolist():
            classes = (counts == shots).nonzero()[:, 0]
            rows = by_class[starts[classes, None] + torch.arange(shots, device=x.device)]
            members = x[rows]
            group = _class_group(members, classes, centre, covariance)
            column = _of_other_classes(metric_of(group), x, group.task_weight * removed)
            distances = distances.index_copy(1, classes, column)
            if shots == 1:
                own = x.new_full(rows.shape, torch.inf)
            elif shots == 2:  # each of a pair against the other, a class of one
                alone = _class_group(members.flip(1).flatten(0, 1)[:, None], classes, centre, covariance)
                own = _of_own_class(metric_of(alone), members.flatten(0, 1)[:, None], alone.task_weight * removed, 0.0)
            else:
                weight = (shots - 1) / shots if covariance.task_covariance else 1.0  # lambda_k without one example
                roots = math.sqrt(weight / (shots - 2)) * _contrasts(shots, members) @ members
                without = _ClassGroup(classes, group.means, roots, 1.0 - weight)
                own_removed = weight * shots / ((shots - 1) * (shots - 2))
                own = _of_own_class(metric_of(without), members, without.task_weight * removed, own_removed)
            distances = distances.index_put((rows.flatten(), classes.repeat_interleave(shots)), own.flatten())
        return distances.to(result_dtype(features))


def _of_other_classes(metric: _Metric, x: Tensor, removed: float) -> Tensor:
    """Distances (n, k') under B_j - ``removed`` x_i x_i^T of each x_i (n, d) to the means of ``metric``."""
    columns = []
    for chunk in x.split(max(1, _CHUNK_NUMBERS // metric.numbers_per_query())):
        distance = metric.squared_distance(chunk)
        if removed:
            size, along = _inner_products(metric, chunk)
            distance = distance + removed * along.square() / _kept(1.0 - removed * size)
        columns.append(distance)
    return torch.cat(columns)


def _inner_products(metric: _Metric, x: Tensor) -> tuple[Tensor, Tensor]:
    """x_i^T B_j^-1 x_i and x_i^T B_j^-1 (x_i - mu_j), both (m, k')."""
    if isinstance(metric, _CholeskyMetric):
        at = metric.coordinates(x[None])
        return at.square().sum(dim=2).T, (at * (at - metric.mean_coordinates())).sum(dim=2).T
    # As the metric itself: B_j^-1 = T^T (I - G_j^T G_j) T, by two products of matrices.
    w, reduction = metric.whitening(x), metric.ridge.reduction
    along = (w @ reduction.flatten(0, 1).T).unflatten(1, reduction.shape[:2])  # G_j T x_i: (m, k', r)
    size = w.square().sum(dim=1)[:, None] - along.square().sum(dim=2)
    return size, size - (w @ metric.means.T - (along * metric.means_along).sum(dim=2))


def _of_own_class(metric: _Metric, members: Tensor, task_removed: float, own_removed: float) -> Tensor:
    """Distances (k', n') of each of ``members`` (k', n', d) to its own class, fitted without it.

    The class's matrix is B - ``task_removed`` x x^T - ``own_removed`` v v^T with v = x - mean. Where ``own_removed`` is
    zero the metric's means are without the example already.
    """
    x = metric.coordinates(members)  # in which B is the identity
    v = x - metric.mean_coordinates()
    shots = members.shape[1]
    delta = v * (shots / (shots - 1)) if own_removed else v  # x less the mean of the others
    removed = torch.stack([math.sqrt(task_removed) * x, math.sqrt(own_removed) * v], dim=2)  # U^T: (k', n', 2, p)
    rest = torch.eye(2, dtype=x.dtype, device=x.device) - removed @ removed.mT
    cholesky, _ = torch.linalg.cholesky_ex(rest)
    _kept(cholesky.diagonal(dim1=-2, dim2=-1).square())
    t = torch.linalg.solve_triangular(cholesky, removed @ delta[..., None], upper=False)[..., 0]
    return delta.square().sum(dim=-1) + t.square().sum(dim=-1)


def _kept(share: Tensor) -> Tensor:
    """``share`` of a vector's weight that its removal leaves, refused where it is mostly rounding."""
    if not (share > _LOST * torch.finfo(share.dtype).eps).all():
        raise ValueError(
            "a support example outweighs the others so far that its removal is lost to rounding: "
            "scale the features down or raise beta"
        )
    return share
