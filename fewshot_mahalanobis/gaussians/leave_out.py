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

Examples of one group G, such as copies of a picture, are left out together. With X and V the x_i and v_i of its g
members as rows, of which g_k are of class k, and J = 1 1^T,

    (n - g - 1)            Sigma   without G = (n - 1)   Sigma   - X^T A X,          A^-1 = I - J / n
    (n_k - g_k - 1)        Sigma_k without G = (n_k - 1) Sigma_k - V_k^T A_k V_k,    A_k^-1 = I - J / n_k
    (n - g - (k - gone))   W       without G = (n - k)   W       - sum_k V_k^T A_k V_k

where ``gone`` counts the classes of which nothing stays; those have A_k = I. Again Q_j without G is B_j - U^T A U, B_j
the same for all groups of one size, and

    delta^T (B - U^T A U)^-1 delta = delta^T B^-1 delta + t^T (A^-1 - U B^-1 U^T)^-1 t,    t = U B^-1 delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.covariance import (
    ClassBatch,
    CovarianceSettings,
    class_batch,
    class_batches,
    shared_covariance,
)
from fewshot_mahalanobis.gaussians.low_rank import (
    MAX_CHUNK_NUMBERS,
    MIN_ROUNDINGS,
    Metric,
    SharedCovariance,
    roots_of_scatter,
)
from fewshot_mahalanobis.gaussians.support import (
    check_support,
    deviations,
    full_precision,
    groups_by_size,
    joined_groups,
    left_out_weights,
    members_by_shots,
    result_dtype,
    working_dtype,
)
from fewshot_mahalanobis.gaussians.temperature import temperature_fit


def leave_one_out_distance(
    settings: CovarianceSettings, features: Tensor, labels: Tensor, groups: Tensor | None = None
) -> Tensor:
    """Squared Mahalanobis distance of each support example to each class of the Gaussians fitted to the others.

    Parameters
    ----------
    settings : CovarianceSettings
        Beta is a number.
    features : Tensor of shape (n, d)
        As for :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    groups : int64 Tensor of shape (n,), optional
        Examples of equal number are left out together, whatever their classes. By default each is left out alone.

    Returns
    -------
    Tensor of shape (n, k)
        Row i, column j: fitted without example i and its group, its distance to class j. Infinite where class j has
        no other example.
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
        if (groups := joined_groups(groups)) is not None:
            return _without_groups(x, labels, counts, groups, centre, settings).to(result_dtype(features))
        left = _shared_without_one(x, labels, counts, settings)
        distances = x.new_full((len(x), len(counts)), torch.inf)
        for group in class_batches(x, labels, counts, centre, settings):
            metric = group.metric(left.shared, settings.ridge)
            column = _of_other_classes(metric, x, left.vectors, (1 - group.class_weight) * left.removed)
            if settings.shared == "within" and not settings.without_shared and (counts == 1).any():
                # An example that is alone in its class leaves nothing behind: the other classes are as they were.
                whole = shared_covariance(x, labels, counts, settings)
                alone = (counts[labels] == 1).nonzero()[:, 0]
                unchanged = group.metric(whole, settings.ridge).squared_distance(x[alone])
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


def squared_distance_to_others(features: Tensor, groups: Tensor | None = None) -> Tensor:
    """Squared distance (n,) of each example to the affine span of the others, of other groups.

    For affinely independent points it is 1 / (K^+)_ii, with K the Gram matrix of the centred points: the height of a
    simplex is one over the length of the gradient of its barycentric coordinate. A point of the others' span is at 0.
    Of each group one example stands for all.
    """
    x = features.detach().to(working_dtype(features))
    index = torch.arange(len(x), device=x.device)
    if groups is not None:
        names, index = groups.unique(return_inverse=True)
        first = torch.full((len(names),), len(x), device=x.device).scatter_reduce(
            0, index, torch.arange(len(x), device=x.device), "amin"
        )
        x = x[first]
    x = x - x.mean(dim=0)
    gram = x @ x.T
    inverse = torch.linalg.pinv(gram, rtol=1e-9, hermitian=True)
    # e_i is in the range of K and 1 if point i is independent of the others: its leverage is then 1 - 1 / n.
    independent = ((gram @ inverse).diagonal() - (1 - 1 / len(x))).abs() < 1e-6
    heights = torch.where(independent, 1 / inverse.diagonal(), 0.0)
    return heights[index]


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
        group = class_batch(members.flip(1).flatten(0, 1)[:, None], classes, centre, settings)
        members, vectors, removed = (tensor.flatten(0, 1)[:, None] for tensor in (members, vectors, removed))
        own_removed = 0.0
    else:
        weight = settings.class_weight(shots - 1.0)
        roots = roots_of_scatter(members, shots - 2) if weight else members[:, :0]
        group = ClassBatch(classes, members.mean(dim=1), roots, weight)
        own_removed = weight * shots / ((shots - 1) * (shots - 2))
    metric = group.metric(shared, settings.ridge)
    return _of_own_class(metric, members, vectors, (1 - group.class_weight) * removed, own_removed)


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


# ---------------------------------------------------------------- groups


@dataclass(frozen=True, eq=False)
class _LeftGroups:
    """S without one of G groups is ``shared`` less ``shared.scale`` V^T A V, V the ``vectors`` of its members."""

    rows: Tensor  # (G, g), the members
    labels: Tensor  # (G, g), their classes
    shared: SharedCovariance
    vectors: Tensor  # (n, d)
    inverse_weights: Tensor  # A^-1 (G, g, g)


def _without_groups(
    x: Tensor, labels: Tensor, counts: Tensor, groups: Tensor, centre: Tensor, settings: CovarianceSettings
) -> Tensor:
    """Distances (n, k) of centred examples to the classes without their groups."""
    distances = x.new_full((len(x), len(counts)), torch.inf)
    whole = class_batches(x, labels, counts, centre, settings)
    for left in _left_groups(x, labels, counts, groups, settings):
        rows = left.rows.flatten()
        for group in whole:
            metric = group.metric(left.shared, settings.ridge)
            columns = _of_untouched_classes(metric, x, left, (1 - group.class_weight) * left.shared.scale)
            distances = distances.index_put((rows[:, None], group.classes[None]), columns)
        held = F.one_hot(left.labels, len(counts)).sum(dim=1)  # members in each class (G, k)
        gone = (held == counts).repeat_interleave(left.rows.shape[1], dim=0)
        distances = distances.index_copy(0, rows, distances[rows].masked_fill(gone, torch.inf))
        touched = ((held > 0) & (held < counts)).nonzero()  # (group, class) of which something stays (P, 2)
        sizes = torch.stack([counts[touched[:, 1]], held[touched[:, 0], touched[:, 1]]], dim=1)
        for shots, lost in sizes.unique(dim=0).tolist():
            pairs = touched[(sizes == sizes.new_tensor([shots, lost])).all(dim=1)]
            if shots - lost == 1:
                members = _members(labels, counts, pairs[:, 1], shots)  # (P, shots)
                stays = ~(members[:, :, None] == left.rows[pairs[:, 0], None]).any(dim=2)
                own = _of_classes_of_one(x, members[stays], pairs, left, centre, settings)
            else:
                classes, places = pairs[:, 1].unique(return_inverse=True)
                members = x[_members(labels, counts, classes, shots)]
                own = _of_touched_classes(x, members, classes, places, pairs[:, 0], shots - lost, left, settings)
            distances = distances.index_put((left.rows[pairs[:, 0]], pairs[:, 1:]), own)
    return distances


def _left_groups(
    x: Tensor, labels: Tensor, counts: Tensor, groups: Tensor, settings: CovarianceSettings
) -> list[_LeftGroups]:
    """All groups; together those of one size without which S has the same divisor."""
    n, k = len(x), len(counts)
    of_task = settings.shared == "task"
    vectors = x if of_task else deviations(x, labels, counts)
    found = []
    for rows in groups_by_size(groups):
        within, shots = (torch.zeros_like(rows), counts.new_tensor([n])) if of_task else (labels[rows], counts)
        gone = (F.one_hot(labels[rows], k).sum(dim=1) == counts).sum(dim=1)
        freedom = n - rows.shape[1] - (torch.ones_like(gone) if of_task else k - gone)
        for divisor in freedom.unique().tolist():
            empty = settings.without_shared or divisor < 1  # nothing is left of S
            shared = SharedCovariance(x[:0], 0.0) if empty else SharedCovariance(vectors, 1.0 / divisor)
            chosen = freedom == divisor
            inverse_weights = removal_weights(within[chosen], shots)
            found.append(_LeftGroups(rows[chosen], labels[rows[chosen]], shared, vectors, inverse_weights))
    return found


def removal_weights(labels: Tensor, counts: Tensor) -> Tensor:
    """A^-1 (G, g, g) of groups whose members have ``labels`` (G, g): I - J / n_k in each class that stays."""
    dtype, same = working_dtype(labels), labels[:, :, None] == labels[:, None]
    shots = counts[labels][:, None]
    stays = same.sum(dim=1, keepdim=True) < shots
    return torch.eye(labels.shape[1], dtype=dtype, device=labels.device) - (same & stays) / shots.to(dtype)


def _members(labels: Tensor, counts: Tensor, classes: Tensor, shots: int) -> Tensor:
    """Rows (P, shots) of the examples of ``classes`` (P,), which have so many."""
    order, starts = labels.argsort(stable=True), counts.cumsum(0) - counts
    return order[starts[classes, None] + torch.arange(shots, device=labels.device)]


def _of_untouched_classes(metric: Metric, x: Tensor, left: _LeftGroups, removed: float) -> Tensor:
    """Distances (G g, k') of the members to the means of ``metric``, under B_j less ``removed`` V^T A V."""
    columns = []
    size = left.rows.shape[1]
    step = max(1, MAX_CHUNK_NUMBERS // (size * (metric.numbers_per_query() + size * len(metric.means))))
    for rows, inverse_weights in zip(left.rows.split(step), left.inverse_weights.split(step), strict=True):
        distance = metric.squared_distance(x[rows.flatten()])
        if removed:
            gram, cross = metric.group_products(left.vectors[rows], x[rows])
            t = _solve(inverse_weights - removed * gram, math.sqrt(removed) * cross)
            distance = distance + t.square().sum(dim=2).flatten(1).T
        columns.append(distance)
    return torch.cat(columns)


def _of_classes_of_one(
    x: Tensor, rest: Tensor, pairs: Tensor, left: _LeftGroups, centre: Tensor, settings: CovarianceSettings
) -> Tensor:
    """Distances (P, g) of the members of P groups to classes of which one example stays, in row ``rest`` (P,)."""
    rows = left.rows[pairs[:, 0]]
    group = class_batch(x[rest][:, None], pairs[:, 1], centre, settings)
    metric = group.metric(left.shared, settings.ridge)
    delta = metric.coordinates(x[rows]) - metric.mean_coordinates()
    u = math.sqrt((1 - group.class_weight) * left.shared.scale) * metric.coordinates(left.vectors[rows])
    return _downdated(delta, u, left.inverse_weights[pairs[:, 0]])


def _of_touched_classes(
    x: Tensor,
    of_class: Tensor,
    classes: Tensor,
    places: Tensor,
    groups: Tensor,
    shots: int,
    left: _LeftGroups,
    settings: CovarianceSettings,
) -> Tensor:
    """Distances (P, g) of the members of ``groups`` (P,) to classes of which ``shots`` > 1 examples stay.

    The classes are given by their places (P,) in ``classes`` (k',), whose examples are ``of_class`` (k', n_k, d).
    """
    # A table (k', w) of the pairs of each class, in which its first fills what is empty.
    numbers = places.bincount()
    order, starts = places.argsort(stable=True), numbers.cumsum(0) - numbers
    slots = torch.arange(len(groups), device=x.device) - starts.repeat_interleave(numbers)
    table = order[starts, None].repeat(1, int(numbers.max()))
    table[places[order], slots] = order
    lost = groups[table]  # (k', w)

    weight = settings.class_weight(float(shots))
    roots = roots_of_scatter(of_class, shots - 1) if weight else of_class[:, :0]
    group = ClassBatch(classes, of_class.mean(dim=1), roots, weight)
    metric = group.metric(left.shared, settings.ridge)
    rows = left.rows[lost]  # (k', w, g)
    v, vectors = (metric.coordinates(z[rows].flatten(1, 2)).unflatten(1, rows.shape[1:]) for z in (x, left.vectors))
    own = (left.labels[lost] == classes[:, None, None]).to(x)
    v = v - metric.mean_coordinates()[:, None]
    of_own = own[..., None] * v
    delta = v + of_own.sum(dim=2, keepdim=True) / shots  # x less the mean of those that stay
    u = [math.sqrt(weight / (shots - 1)) * of_own, math.sqrt((1 - group.class_weight) * left.shared.scale) * vectors]
    g = rows.shape[2]
    inverse_weights = x.new_zeros(*rows.shape[:2], 2 * g, 2 * g)
    identity = torch.eye(g, dtype=x.dtype, device=x.device)
    inverse_weights[..., :g, :g] = identity - own[..., None] * own[..., None, :] / of_class.shape[1]
    inverse_weights[..., g:, g:] = left.inverse_weights[lost]
    found = _downdated(delta, torch.cat(u, dim=2), inverse_weights)
    return found[places[order], slots][order.argsort()]


def _downdated(delta: Tensor, u: Tensor, inverse_weights: Tensor) -> Tensor:
    """Squared lengths (..., g) of ``delta`` (..., g, p) under I - U^T A U, U (..., r, p) and A^-1 (..., r, r)."""
    t = _solve(inverse_weights - u @ u.mT, u @ delta.mT)
    return delta.square().sum(dim=-1) + t.square().sum(dim=-2)


def _solve(rest: Tensor, cross: Tensor) -> Tensor:
    """L^-1 ``cross`` for L L^T = ``rest``."""
    lower, _ = torch.linalg.cholesky_ex(rest)
    _kept(lower.diagonal(dim1=-2, dim2=-1).square())
    return torch.linalg.solve_triangular(lower, cross, upper=False)


# ---------------------------------------------------------------- beta

#: Candidates for beta, in units of the features' mean variance, strongest first: 10^2 to 10^-2.5.
BETA_GRID = tuple(10.0 ** (half / 2) for half in range(4, -6, -1))
#: Prior: log10(beta / v) ~ Normal(CENTRE, SPREAD).
_PRIOR_CENTRE, _PRIOR_SPREAD = 1.0, 0.5


def choose_beta(
    settings: CovarianceSettings, features: Tensor, labels: Tensor, groups: Tensor | None = None
) -> CovarianceSettings:
    """Replace a beta of "auto" by the most probable one under leave-one-out and a prior.

    Twenty-five examples say little about beta, and the best of many candidates on so few is the luckiest. So beta has a
    log-normal prior: with v the mean variance of a feature over the support set, log10(beta / v) has mean 1 and
    standard deviation 1/2, numbers chosen on validation classes. The beta returned minimises the sum of the left-out
    examples' cross-entropies, each at its beta's best temperature, less the logarithm of the prior. With many examples
    the prior hardly counts.

    Targets of the cross-entropy are smoothed by Laplace's rule: with N examples the true class gets (N + 1) / (N + k).

    Parameters
    ----------
    settings : CovarianceSettings
        Returned unchanged if beta is a number.
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    groups : int64 Tensor of shape (n,), optional
        Examples of equal number are left out together, and count as one.

    Returns
    -------
    CovarianceSettings
        Beta is one of ``BETA_GRID`` times v. If no class has two groups nothing can be left out, and beta is v. If v
        is zero beta does not matter, and is 1.

    Raises
    ------
    ValueError
        As :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    """
    if settings.beta != "auto":
        return settings
    check_support(features, labels)
    features = features.detach().double()
    variance = float(features.var(dim=0).mean()) if len(features) > 1 else 0.0
    groups = joined_groups(groups)
    weights = left_out_weights(labels, groups)
    left_out = float(weights.sum())
    if variance == 0.0 or left_out == 0.0:
        return replace(settings, beta=variance or 1.0)
    posterior: list[tuple[float, CovarianceSettings]] = []
    for factor in BETA_GRID:
        candidate = replace(settings, beta=factor * variance)
        loss = temperature_fit(-leave_one_out_distance(candidate, features, labels, groups), labels, 1.0, weights).loss
        deviation = (math.log10(factor) - _PRIOR_CENTRE) / _PRIOR_SPREAD
        posterior.append((left_out * loss + 0.5 * deviation**2, candidate))
    return min(posterior, key=lambda pair: pair[0])[1]
