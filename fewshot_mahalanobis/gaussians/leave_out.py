"""Exact leave-one-out of a support set, by downdating instead of refitting.

How far would each support example lie from every class, had it not been in the support set? Examples of one group, such
as copies of a picture, are left out together; an example without copies is a group of one. With the others alone

    Q_j = lambda_j Sigma_j + (1 - lambda_j) S + beta I        (Bateni et al., CVPR 2020, equation 3)

changes by a factor and few vectors. Let X and V hold the x_i, centred at the task mean, and the v_i = x_i - mu_k, k the
class of i, of the g members of a group G as rows. g_k of them are of class k, and J = 1 1^T. Then

    (n - g - 1)            Sigma   without G = (n - 1)   Sigma   - X^T A X,          A^-1 = I - J / n
    (n_k - g_k - 1)        Sigma_k without G = (n_k - 1) Sigma_k - V_k^T A_k V_k,    A_k^-1 = I - J / n_k
    (n - g - (k - e))      W       without G = (n - k)   W       - sum_k V_k^T A_k V_k

where S is Sigma, the task covariance, or W, the covariance pooled within k classes. e classes are left without an
example; those have A_k = I. So Q_j without G is B_j - U^T A U, where B_j is the same for all groups of one size and
factored once. U holds S's vectors, and for the classes of G their v_i too. The Woodbury identity gives every distance
from inner products under B_j^-1:

    delta^T (B - U^T A U)^-1 delta = delta^T B^-1 delta + t^T (A^-1 - U B^-1 U^T)^-1 t,    t = U B^-1 delta

The cost is about two fits and one prediction of the support set; n refits cost n fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.covariance import (
    ClassBatch,
    CovarianceSettings,
    class_batch,
    class_batches,
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
    class_means,
    deviations,
    full_precision,
    groups_by_size,
    joined_groups,
    left_out_weights,
    result_dtype,
    rows_of_classes,
    working_dtype,
)
from fewshot_mahalanobis.gaussians.temperature import temperature_fit

# ---------------------------------------------------------------- groups


@dataclass(frozen=True, eq=False)
class Removal:
    """G groups of g examples, each left out in turn; leaving out any of them empties the same number of classes."""

    rows: Tensor  # (G, g), the examples
    labels: Tensor  # (G, g), their classes
    shots: Tensor  # n_k (G, g), examples of their classes
    remaining: Tensor  # n_k - g_k (G, g), those that are not in the group
    emptied: int  # e, classes of which nothing remains

    def split(self, numbers: int) -> Iterator[Removal]:
        """Yield parts of them, so few that ``numbers`` for each member fit into a chunk."""
        size = max(1, MAX_CHUNK_NUMBERS // (self.rows.shape[1] * numbers))
        for start in range(0, len(self.rows), size):
            yield self.select(slice(start, start + size))

    def select(self, groups: Tensor | slice) -> Removal:
        """Choose some groups, by a mask (G,) or a slice."""
        tensors = (self.rows, self.labels, self.shots, self.remaining)
        rows, labels, shots, remaining = (tensor[groups] for tensor in tensors)
        return Removal(rows, labels, shots, remaining, self.emptied)

    def inverse_weights(self) -> Tensor:
        """A^-1 (G, g, g) of the covariance pooled within classes: I - J / n_k in each class that remains."""
        dtype, same = working_dtype(self.labels), _same(self.labels)
        identity = torch.eye(same.shape[1], dtype=dtype, device=same.device)
        return identity - (same & (self.remaining > 0)[:, None]) / self.shots[:, None].to(dtype)


def removals(labels: Tensor, counts: Tensor, groups: Tensor | None) -> list[Removal]:
    """Every group of a support set, by its size and by how many classes go with it.

    Parameters
    ----------
    labels : int64 Tensor of shape (n,)
    counts : int64 Tensor of shape (k,)
        Examples of each class.
    groups : int64 Tensor of shape (n,) or None
        None where every example is a group of its own.
    """
    alone = [torch.arange(len(labels), device=labels.device)[:, None]]
    found = []
    for rows in alone if groups is None else groups_by_size(groups):
        taken, shots = _same(labels[rows]).sum(dim=2), counts[labels[rows]]  # g_k and n_k
        emptied = ((taken == shots) / taken).sum(dim=1).round().long()
        whole = Removal(rows, labels[rows], shots, shots - taken, 0)
        found += [replace(whole.select(emptied == number), emptied=number) for number in emptied.unique().tolist()]
    return found


def _same(labels: Tensor) -> Tensor:
    """Whether two members of a group (G, g) are of one class, (G, g, g)."""
    return labels[:, :, None] == labels[:, None]


def removal_solve(rest: Tensor, products: Tensor) -> Tensor:
    """L^-1 ``products`` (..., g, m) for L L^T = ``rest`` (..., g, g), which is A^-1 - U B^-1 U^T.

    ValueError where the members of a group outweigh the other examples so far that ``rest`` is mostly rounding.
    """
    if rest.shape[-1] == 1:
        return products / _significant(rest).sqrt()
    lower, _ = torch.linalg.cholesky_ex(rest)
    _significant(lower.diagonal(dim1=-2, dim2=-1).square())
    return torch.linalg.solve_triangular(lower, products, upper=False)


def _significant(share: Tensor) -> Tensor:
    """Return ``share``; raise if rounding error dominates it."""
    if not (share > MIN_ROUNDINGS * torch.finfo(share.dtype).eps).all():
        raise ValueError(
            "a support example outweighs the others so far that its removal is lost to rounding: "
            "scale the features down or raise beta"
        )
    return share


# ---------------------------------------------------------------- class means


class MeansWithout(NamedTuple):
    """Class means without each example and its group: one for each example and class of its group."""

    rows: Tensor  # (p,) examples
    classes: Tensor  # (p,)
    means: Tensor  # (p, d), of the examples that remain in the class; of any value where none do
    remain: Tensor  # bool (p,), whether any do

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, groups: Tensor | None) -> MeansWithout:
        """Means of features (n, d) and labels (n,) without each example and its group (n,)."""
        means, counts = class_means(features, labels), labels.bincount()
        alone = torch.arange(len(labels), device=labels.device)
        groups = alone if groups is None else groups.unique(return_inverse=True)[1]
        parts, index, sizes = (groups * len(counts) + labels).unique(return_inverse=True, return_counts=True)
        part_groups, classes = parts // len(counts), parts % len(counts)
        sums = features.new_zeros(len(sizes), features.shape[1]).index_add(0, index, features)
        remaining = counts[classes] - sizes
        without = (counts[classes, None] * means[classes] - sums) / remaining.clamp(min=1)[:, None]
        # The parts are sorted by group: each example takes those of its group, one after the other.
        _, group, group_sizes = part_groups.unique_consecutive(return_inverse=True, return_counts=True)
        numbers, first = group_sizes[group[index]], (group_sizes.cumsum(0) - group_sizes)[group[index]]
        rows = alone.repeat_interleave(numbers)
        pairs = torch.arange(len(rows), device=rows.device) - (numbers.cumsum(0) - numbers - first)[rows]
        return cls(rows, classes[pairs], without[pairs], remaining[pairs] > 0)

    def centres(self, means: Tensor, examples: int) -> Tensor:
        """Mean (n, d) over the classes that remain of their means, which are ``means`` (k, d) where none moves."""
        moved = self.means.where(self.remain[:, None], 0.0) - means[self.classes]
        sums = means.sum(dim=0).repeat(examples, 1).index_add(0, self.rows, moved)
        emptied = torch.bincount(self.rows[~self.remain], minlength=examples)
        return sums / (len(means) - emptied).clamp(min=1)[:, None]

    def put(self, logits: Tensor, moved: Tensor) -> Tensor:
        """``logits`` (n, k) with ``moved`` (p,) for the means that move, minus infinity where nothing remains."""
        return logits.index_put((self.rows, self.classes), torch.where(self.remain, moved, -torch.inf))


# ---------------------------------------------------------------- Mahalanobis distances


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
    return DistancesWithout(settings, features, labels, groups).at(settings.ridge)


class DistancesWithout:
    """:func:`leave_one_out_distance` for any beta in place of the settings': what beta does not change is kept."""

    def __init__(
        self, settings: CovarianceSettings, features: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> None:
        counts = check_support(features, labels)
        with full_precision(features):
            x = features.to(working_dtype(features))
            centre = x.mean(dim=0)
            x = x - centre
            self.batches = class_batches(x, labels, counts, centre, settings)
            self.parts = [
                _DowndatedDistances(removal, x, labels, counts, centre, settings)
                for removal in removals(labels, counts, joined_groups(groups))
            ]
        self.features, self.classes = features, len(counts)

    def at(self, beta: float) -> Tensor:
        """Squared distances (n, k) for this beta."""
        with full_precision(self.features):
            dtype = working_dtype(self.features)
            distances = self.features.new_full((len(self.features), self.classes), torch.inf, dtype=dtype)
            for without in self.parts:
                rows = without.removal.rows.flatten()[:, None]
                for batch in self.batches:
                    distances[rows, batch.classes] = without.to_other_classes(batch, beta)
                for members, classes, own in without.to_own_classes(beta):
                    distances[members, classes[:, None]] = own
            return distances.to(result_dtype(self.features))


@dataclass(frozen=True, eq=False)
class _OwnClasses:
    """P pairs of one of G groups and a class of which it holds examples, in a table (k', w) with a row for each class.

    The first pair of a class fills what is empty in its row.
    """

    batch: ClassBatch  # Sigma_k with the divisor of those that remain, still of all examples
    remaining: int  # examples that remain of each class
    row: Tensor  # (P,)
    column: Tensor  # (P,)
    groups: Tensor  # (k', w)
    in_class: Tensor | None  # (k', w, g), 1.0 for members of the class, else 0.0; None where Sigma_k does not change
    inverse_weights: Tensor  # (k', w, r, r)


class _DowndatedDistances:
    """Distances to the Gaussians without each of G groups.

    S without a group is ``shared`` less ``shared.scale`` V^T A V, V the ``vectors`` of its members.
    """

    def __init__(
        self,
        removal: Removal,
        x: Tensor,
        labels: Tensor,
        counts: Tensor,
        centre: Tensor,
        settings: CovarianceSettings,
    ) -> None:
        self.removal, self.x, self.labels, self.counts = removal, x, labels, counts
        self.centre, self.settings = centre, settings
        n, size = len(x), removal.rows.shape[1]
        if settings.shared == "task":
            self.vectors, divisor = x, n - size - 1
            identity = torch.eye(size, dtype=x.dtype, device=x.device)
            self.inverse_weights = (identity - 1 / n).expand(len(removal.rows), -1, -1)
        else:
            self.vectors, divisor = deviations(x, labels, counts), n - size - (len(counts) - removal.emptied)
            self.inverse_weights = removal.inverse_weights()
        empty = settings.without_shared or divisor < 1  # nothing remains of S
        self.shared = SharedCovariance(x[:0], 0.0) if empty else SharedCovariance(self.vectors, 1.0 / divisor)
        self.emptied, self.own = self._own_classes()

    def _own_classes(self) -> tuple[tuple[Tensor, Tensor], list[_OwnClasses]]:
        """Classes of which the groups hold examples: rows (P, g) and classes (P,) if none remains, then the others."""
        removal, found = self.removal, []
        again = _same(removal.labels).tril(-1).any(dim=2)  # a member that is not the first of its class
        group, member = (~again).nonzero().T
        classes = removal.labels[group, member]
        sizes = torch.stack([removal.shots[group, member], removal.remaining[group, member]], dim=1)
        for shots, remaining in sizes.unique(dim=0).tolist():
            pairs = (sizes == sizes.new_tensor([shots, remaining])).all(dim=1)
            if remaining == 1:
                found.append(self._classes_of_one(group[pairs], classes[pairs], shots))
            elif remaining > 1:
                found.append(self._classes_of_more(group[pairs], classes[pairs], shots, remaining))
        emptied = sizes[:, 1] == 0
        return (removal.rows[group[emptied]], classes[emptied]), found

    def _classes_of_one(self, group: Tensor, classes: Tensor, shots: int) -> _OwnClasses:
        """Pairs (P,) of groups and classes of which one of ``shots`` examples remains, which is the class."""
        members = rows_of_classes(self.labels, self.counts, classes, shots)
        remaining = members[~(members[:, :, None] == self.removal.rows[group][:, None]).any(dim=2)]
        batch = class_batch(self.x[remaining][:, None], classes, self.centre, self.settings)
        row = torch.arange(len(group), device=group.device)
        return _OwnClasses(
            batch, 1, row, torch.zeros_like(row), group[:, None], None, self.inverse_weights[group][:, None]
        )

    def _classes_of_more(self, group: Tensor, classes: Tensor, shots: int, remaining: int) -> _OwnClasses:
        """Pairs (P,) of groups and classes of which several of ``shots`` examples remain."""
        classes, row, numbers = classes.unique(return_inverse=True, return_counts=True)
        order, starts = row.argsort(stable=True), numbers.cumsum(0) - numbers
        column = torch.empty_like(row)
        column[order] = torch.arange(len(group), device=group.device) - starts.repeat_interleave(numbers)
        groups = group[order[starts], None].repeat(1, int(numbers.max())).index_put((row, column), group)  # (k', w)

        members = self.x[rows_of_classes(self.labels, self.counts, classes, shots)]  # (k', n_k, d)
        weight = self.settings.class_weight(float(remaining))
        roots = roots_of_scatter(members, remaining - 1) if weight else members[:, :0]
        batch = ClassBatch(classes, members.mean(dim=1), roots, weight)
        in_class = (self.removal.labels[groups] == classes[:, None, None]).to(members)
        size = in_class.shape[2]
        inverse_weights = members.new_zeros(*groups.shape, 2 * size, 2 * size)
        identity = torch.eye(size, dtype=members.dtype, device=members.device)
        inverse_weights[..., :size, :size] = identity - in_class[..., None] * in_class[..., None, :] / shots
        inverse_weights[..., size:, size:] = self.inverse_weights[groups]
        return _OwnClasses(batch, remaining, row, column, groups, in_class, inverse_weights)

    def to_other_classes(self, batch: ClassBatch, beta: float) -> Tensor:
        """Distances (G g, k') of the members to a batch of classes of which the groups hold no example."""
        metric, removed = batch.metric(self.shared, beta), self._removed(batch)
        size, columns = self.removal.rows.shape[1], []
        step = max(1, MAX_CHUNK_NUMBERS // (size * (metric.numbers_per_query() + size * len(metric.means))))
        for rows, inverse_weights in zip(self.removal.rows.split(step), self.inverse_weights.split(step), strict=True):
            x = self.x[rows]
            distance = metric.squared_distance(x.flatten(0, 1))
            if removed:
                gram, cross = metric.inner_products(x if self.vectors is self.x else self.vectors[rows], x)
                t = removal_solve(inverse_weights[:, None] - removed * gram, math.sqrt(removed) * cross)
                distance = distance + t.square().sum(dim=2).transpose(1, 2).flatten(0, 1)
            columns.append(distance)
        return torch.cat(columns)

    def to_own_classes(self, beta: float) -> Iterator[tuple[Tensor, Tensor, Tensor | float]]:
        """Yield rows (P, g) of groups, classes (P,) of which they hold examples, and distances (P, g) to these."""
        yield *self.emptied, torch.inf
        for own in self.own:
            metric = own.batch.metric(self.shared, beta)
            x, vectors = self._coordinates(metric, self.removal.rows[own.groups])
            delta, u = x - metric.mean_coordinates()[:, None], math.sqrt(self._removed(own.batch)) * vectors
            if own.in_class is not None:
                v = own.in_class[..., None] * delta
                delta = delta + v.sum(dim=2, keepdim=True) / own.remaining  # x less the mean of those that remain
                u = torch.cat([math.sqrt(own.batch.class_weight / (own.remaining - 1)) * v, u], dim=2)
            distances = _downdated(delta, u, own.inverse_weights)[own.row, own.column]
            yield self.removal.rows[own.groups[own.row, own.column]], own.batch.classes[own.row], distances

    def _coordinates(self, metric: Metric, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The members in ``rows`` (k', w, g) and their vectors, (k', w, g, p), where Q_k is the identity."""
        x = metric.coordinates(self.x[rows].flatten(1, 2)).unflatten(1, rows.shape[1:])
        if self.vectors is self.x:
            return x, x
        return x, metric.coordinates(self.vectors[rows].flatten(1, 2)).unflatten(1, rows.shape[1:])

    def _removed(self, batch: ClassBatch) -> float:
        """Factor of V^T A V in what is taken off the covariances of a batch."""
        return (1 - batch.class_weight) * self.shared.scale


def _downdated(delta: Tensor, u: Tensor, inverse_weights: Tensor) -> Tensor:
    """Squared lengths (..., g) of ``delta`` (..., g, p) under I - U^T A U, U (..., r, p) and A^-1 (..., r, r)."""
    t = removal_solve(inverse_weights - u @ u.mT, u @ delta.mT)
    return delta.square().sum(dim=-1) + t.square().sum(dim=-2)


def squared_distance_to_others(features: Tensor, groups: Tensor | None = None) -> Tensor:
    """Squared distance (n,) of each example to the affine span of the others, of other groups.

    For affinely independent points it is 1 / (K^+)_ii, with K the Gram matrix of the centred points: the height of a
    simplex is one over the length of the gradient of its barycentric coordinate.
    A point of the others' span is at 0.
    One example of each group stands for all.
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


# ---------------------------------------------------------------- choosing settings


@dataclass(frozen=True)
class NormalPrior:
    """Candidates for a setting, with a normal prior. Losses are minus the log-likelihoods of left-out examples.

    Few examples say little about a setting, and the best of many candidates on so few is the luckiest. With many
    examples the prior hardly counts. Priors were chosen on validation classes.
    """

    candidates: tuple[float, ...]
    centre: float
    spread: float

    def mode(self, losses: Sequence[float]) -> float:
        """Return the most probable candidate by the loss of each."""
        return self.candidates[int(self._log_posterior(losses).argmax())]

    def mean(self, losses: Sequence[float]) -> float:
        """Return the mean of the candidates under the posterior by the loss of each."""
        return float(self._log_posterior(losses).softmax(dim=0) @ self._tensor(self.candidates))

    def _log_posterior(self, losses: Sequence[float]) -> Tensor:
        deviations = (self._tensor(self.candidates) - self.centre) / self.spread
        return -self._tensor(losses) - deviations.square() / 2

    @staticmethod
    def _tensor(numbers: Sequence[float]) -> Tensor:
        """Float64 on the CPU, whatever type and device are PyTorch's defaults."""
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")


#: Prior of log10(beta / v), v the mean variance of a feature: strong regularisation first.
BETA_PRIOR = NormalPrior(tuple(half / 2 for half in range(4, -6, -1)), 1.0, 0.5)


def choose_beta(
    settings: CovarianceSettings, features: Tensor, labels: Tensor, groups: Tensor | None = None
) -> CovarianceSettings:
    """Replace a beta of "auto" by the most probable one under leave-one-out and :data:`BETA_PRIOR`.

    The beta returned minimises the sum of the left-out examples' cross-entropies, each at its beta's best temperature,
    less the logarithm of the prior. Targets of the cross-entropy are smoothed by Laplace's rule: with N examples the
    true class gets (N + 1) / (N + k).

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
        Beta is v times 10 to the power of a candidate, v the mean variance of a feature over the support set. If no
        class has two groups nothing can be left out, and beta is v. If v is zero beta does not matter, and is 1.

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
    examples = float(weights.sum())
    if variance == 0.0 or examples == 0.0:
        return replace(settings, beta=variance or 1.0)

    without = DistancesWithout(settings, features, labels, groups)

    def loss(exponent: float) -> float:
        distance = without.at(10.0**exponent * variance)
        return examples * temperature_fit(-distance, labels, 1.0, weights).loss

    exponent = BETA_PRIOR.mode([loss(exponent) for exponent in BETA_PRIOR.candidates])
    return replace(settings, beta=10.0**exponent * variance)
