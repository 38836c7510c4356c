"""Copies in a support set, and the groups of examples that leave-one-out leaves out together.

A copy of a picture, compressed again, mirrored or cropped, says nothing about how well the picture would be recognised
if it were new. Where copies stay behind, the distances of left-out examples are far too small: thresholds reject what
they should accept, and probabilities are too sure. So copies form a group and are left out together.

Pictures are copies where their aligned pixels agree (:mod:`~fewshot_mahalanobis.images.same_picture`), other examples
where their features are equal. Groups that the user names take precedence.

Copies in different classes contradict each other. They form no group, but are named in a warning.

Pictures that were altered further, turned by degrees or given other colours, are found by their features, as twins. A
few different pictures are twins by chance, so twins are no copies: they are named nowhere and are examples of their
own. Only the choice of settings, temperature and threshold leaves them out together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import pdist
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.cores import one_thread, one_thread_if_small
from fewshot_mahalanobis.plain import plain
from fewshot_mahalanobis.support_set.caller_warnings import warn_caller

#: Equal rows of features are copies if at least this many columns have different values in most different rows.
_TELLING_COLUMNS = 8
#: Columns that are looked at in turn until there are as many.
_COLUMNS = 64
#: Rounding of a feature that was computed in another batch, relative to the largest of its column.
_ROUNDING = 1e-5

#: Twins are nearer to each other than this share of the distance to the next of their class. Among 25 pictures of
#: validation classes 0.1 pairs are so by chance, at 0.9 already 1.1 (benchmarks/results/copies.md).
_TWIN_SHARE = 0.8
#: Twins are searched in classes of at most this many examples.
_MOST_OF_CLASS = 1000

#: Pairs of copies in different classes that a warning names.
_MOST_NAMED = 5


def equal_rows(features: Tensor) -> NDArray[np.int64]:
    """Pairs (p, 2) of examples, of any classes, whose features (n, d) are equal but for rounding.

    Where features have few values, as counts and categories do, different examples can be equal by chance. So there
    must be eight columns in which most different rows differ.
    """
    with one_thread_if_small(features):
        return _equal_rows(features)


def _equal_rows(features: Tensor) -> NDArray[np.int64]:
    x = features.detach().cpu().double()
    scale = torch.linalg.vector_norm(x, torch.inf, dim=0)
    scale = torch.where(scale > 0, scale, 1.0)
    # Equal rows are neighbours in this order, and different ones rarely meet, as rows of counts with one sum would.
    order = (x @ (torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device).sin() / scale)).argsort(stable=True)
    found = torch.stack([order[:-1], order[1:]], dim=1)
    for some in (slice(_COLUMNS), slice(None)):  # few pairs are equal in the first columns
        first, second = (x[found[:, side], some] for side in (0, 1))
        found = found[((second - first).abs() / scale[some]).amax(dim=1) <= _ROUNDING]
    if len(found) == 0:
        return found.numpy()
    different = x.new_ones(len(x), dtype=torch.bool).index_fill(0, found[:, 1], False)
    telling, rows = 0, x[different] / scale
    for columns in rows.split(_COLUMNS, dim=1):  # the first are enough, but for counts and categories
        values = (columns.sort(dim=0).values.diff(dim=0) > _ROUNDING).sum(dim=0) + 1
        telling += int((values > len(rows) / 2).sum())
        if telling >= _TELLING_COLUMNS:
            return found.sort(dim=1).values.numpy()
    return found[:0].numpy()


@one_thread()
def near_twins(features: Tensor, labels: Tensor) -> NDArray[np.int64]:
    """Pairs (p, 2) of examples that are implausibly near for their class, by features (n, d) and labels (n,).

    Examples of a class are joined from the nearest on, by the angle of their features (single linkage). A cluster of at
    most half the class is one of twins if it came together within 0.8 of the distance to the next example. Its pairs
    are a chain.
    """
    x, codes = F.normalize(features.detach().cpu().double(), dim=1).numpy(), labels.cpu().numpy()
    pairs: list[tuple[int, int]] = []
    for code in np.flatnonzero(np.bincount(codes) >= 4):
        rows = np.flatnonzero(codes == code)
        if (n := len(rows)) > _MOST_OF_CLASS:
            continue
        clusters, heights = [[row] for row in rows.tolist()], [0.0] * n
        for first, second, height, _ in linkage(pdist(x[rows]), "single").tolist():
            joining = int(first), int(second)
            for cluster in joining:
                if 2 <= len(clusters[cluster]) <= n / 2 and heights[cluster] < _TWIN_SHARE * height:
                    pairs += pairwise(clusters[cluster])
            clusters.append([row for cluster in joining for row in clusters[cluster]])
            heights.append(height)
    return np.array(sorted({(min(pair), max(pair)) for pair in pairs}), np.int64).reshape(-1, 2)


def joined(n: int, pairs: NDArray[np.int64], names: Sequence[Any]) -> Tensor | None:
    """Groups (n,) of examples that copies or a common name join, directly or through others; None if none are.

    Parameters
    ----------
    n : int
    pairs : int64 ndarray of shape (p, 2)
        Copies. They join examples unless both have a name.
    names : sequence of n
        Names of groups that the user gave, None where they gave none.
    """
    named = np.array([name is not None for name in names])
    pairs = pairs[~named[pairs].all(axis=1)]
    first: dict[Any, int] = {}
    same = [(i, first.setdefault(name, i)) for i, name in enumerate(names) if name is not None]
    i, j = np.concatenate([pairs, np.array(same, np.int64).reshape(-1, 2)]).T
    number, groups = connected_components(coo_array((np.ones(len(i)), (i, j)), shape=(n, n)), directed=False)
    return None if number == n else torch.from_numpy(groups.astype(np.int64))


def grouped(
    labels: Tensor,
    names: Sequence[Any],
    copies: NDArray[np.int64] | None = None,
    twins: NDArray[np.int64] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Groups (n,) of support examples by copies and names, and groups by twins too.

    Of the pairs (p, 2) only those of one class count. The first are None if no examples belong together, the second if
    there are no twins.
    """
    n, codes, none = len(labels), labels.cpu().numpy(), np.empty((0, 2), np.int64)
    copied, alike = (none if pairs is None else within_classes(pairs, codes) for pairs in (copies, twins))
    groups = joined(n, copied, names)
    with_twins = joined(n, np.concatenate([copied, alike]), names) if len(alike) else None
    return (
        None if groups is None else groups.to(labels.device),
        None if with_twins is None else with_twins.to(labels.device),
    )


def once_each(unlabelled: Tensor, n: int, pairs: NDArray[np.int64], names: Sequence[Any] | None = None) -> Tensor:
    """Unlabelled examples (m', d) that count: no copies of labelled ones, of other copies one, of a group its mean.

    Parameters
    ----------
    unlabelled : Tensor of shape (m, d)
    n : int
        Labelled examples.
    pairs : int64 ndarray of shape (p, 2)
        Copies among all n + m examples, of which the unlabelled ones are numbered from n on.
    names : sequence of m, optional
        Names of groups that the user gave. A group with a copy of a labelled example counts no further.
    """
    m = len(unlabelled)
    groups = joined(n + m, pairs, [None] * n + [*([None] * m if names is None else names)])
    if groups is None:
        return unlabelled
    if names is not None:
        unlabelled = group_means(unlabelled, groups[n:])[groups[n:].to(unlabelled.device)]
    first = np.sort(np.unique(groups.numpy(), return_index=True)[1])
    return unlabelled[first[first >= n] - n]


def chained(groups: Tensor) -> NDArray[np.int64]:
    """Pairs (p, 2) that join the examples of each group, by numbers (n,)."""
    numbers = groups.cpu().numpy()
    order = numbers.argsort(kind="stable")
    pairs: NDArray[np.int64] = np.stack([order[:-1], order[1:]], axis=1)
    return within_classes(pairs, numbers)


def within_classes(pairs: NDArray[np.int64], labels: NDArray[Any]) -> NDArray[np.int64]:
    """Those of the pairs (p, 2) whose two examples have the same of the labels (n,)."""
    return pairs[labels[pairs[:, 0]] == labels[pairs[:, 1]]]


def checked_groups(groups: Iterable[Any] | None, n: int) -> list[Any]:
    """Names of the groups of n examples, as strings and numbers; None for each if none are given.

    Raises
    ------
    ValueError
        There are more or fewer than n, or one is neither a string nor a number.
    """
    names = group_names(groups)
    if names is None:
        return [None] * n
    if len(names) != n:
        raise ValueError(f"{n} examples but {len(names)} groups: give each example a group")
    for i, name in enumerate(names):
        if not isinstance(name, (str, Integral, Real)) or name != name:
            raise ValueError(f"group {i} is {name!r}: name groups by strings or numbers")
    return names


def group_names(groups: Iterable[Any] | None) -> list[Any] | None:
    """Names of groups as a list; ValueError if they are one string, or nothing of several."""
    if groups is None:
        return None
    if isinstance(groups, (str, bytes)) or not isinstance(groups, Iterable):
        raise ValueError("groups must be a sequence of strings or numbers, one for each example")
    return [plain(name) for name in groups]


def group_rows(groups: Iterable[Any], n: int) -> Tensor:
    """Number of the group of each of n examples, int64 (n,), by their names; ValueError as :func:`checked_groups`."""
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in checked_groups(groups, n)])


def group_means(values: Tensor, rows: Tensor) -> Tensor:
    """Mean (g, ...) of the values (n, ...) of each of g groups, whose numbers are ``rows`` (n,)."""
    sums = values.new_zeros(int(rows.max()) + 1, *values.shape[1:]).index_add(0, rows.to(values.device), values)
    counts = rows.bincount().to(sums)
    return sums / counts.reshape(-1, *[1] * (values.ndim - 1))


def number_of_copies(groups: Tensor | None) -> int:
    """Examples beyond the first of each group."""
    return 0 if groups is None else len(groups) - len(groups.unique())


def groups_of_several(groups: Tensor | None) -> list[list[int]]:
    """The examples of each group of at least two."""
    members: dict[int, list[int]] = {}
    for i, number in enumerate([] if groups is None else groups.tolist()):
        members.setdefault(number, []).append(i)
    return [examples for examples in members.values() if len(examples) > 1]


def warn_of_copies(groups: Tensor | None, names: Sequence[Any], before: int = 0) -> None:
    """Say once how many copies were found that the user did not name, if they are more than ``before``."""
    found = copies_found(groups, names)
    if found > before:
        n = len(names)
        warn_caller(
            f"{found} of {n} support examples are copies of others: the same, compressed, mirrored or cropped. "
            "Leave-one-out, which chooses threshold, temperature and settings, counts all as "
            f"{n - number_of_copies(groups)} examples. To say which examples belong together, pass groups=... "
            "(on the command line --groups COLUMN); groups=range(n) (--groups none) says that none do"
        )


def copies_found(groups: Tensor | None, names: Sequence[Any]) -> int:
    """Copies that were found beyond the groups that the user named."""
    return number_of_copies(groups) - number_of_copies(joined(len(names), np.empty((0, 2), np.int64), names))


def warn_of_contradictions(
    pairs: NDArray[np.int64], labels: NDArray[Any], name: Callable[[int], str], before: int = 0
) -> None:
    """Name the copies, of pairs (p, 2), that have different labels (n,).

    Parameters
    ----------
    pairs : int64 ndarray of shape (p, 2)
    labels : ndarray of shape (n,)
    name : callable
        What to call an example by its index.
    before : int
        Pairs of examples with smaller indices are known from an earlier call.
    """
    first, second = labels[pairs[:, 0]], labels[pairs[:, 1]]
    contradictory = pairs[(first != second) & (pairs.max(axis=1, initial=-1) >= before)].tolist()
    if contradictory:
        named = [" and ".join(f"{name(i)} in {labels[i]!s}" for i in pair) for pair in contradictory[:_MOST_NAMED]]
        more = f"; and {len(contradictory) - _MOST_NAMED} more pairs" if len(contradictory) > _MOST_NAMED else ""
        warn_caller(
            f"copies of one example are in different classes: {'; '.join(named)}{more}. Give all copies one label, or "
            "leave them out: no classifier can learn both"
        )
