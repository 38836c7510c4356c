"""Copies in a support set, and the groups of examples that leave-one-out leaves out together.

A copy of a picture, compressed again, mirrored or cropped, says nothing about how well the picture would be recognised
if it were new. Where copies stay behind, the distances of left-out examples are far too small: thresholds reject what
they should accept, and probabilities are too sure. So copies form a group and are left out together.

Two examples of a class are copies where their features are closer than half of what is usual in that class. Groups
that the user names take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.support_set.warn import warn_caller

#: Copies are closer than this share of the usual distance, by the angle of their features. Of pictures of validation
#: classes 0.5 finds nearly all copies that are mirrored, cropped by 5 % or compressed, and 0 to 2 % of different ones.
COPY_SHARE = 0.5
#: Usual is the median distance in the class, and at least this share of the median distance between classes. That
#: recognises the copies of a class of one picture.
LEAST_SHARE = 0.4
#: Most examples that a median is taken of, and rows of distances at a time.
_MOST, _ROWS = 1000, 256
#: Equal rows of features are copies if so many columns have different values in most different rows.
_TELLING_COLUMNS = 8
#: Rounding of a feature that was computed in another batch, relative to the largest of its column.
_ROUNDING = 1e-5

#: Features (n, d) and labels (n,) -> pairs (p, 2) of copies.
CopyFinder = Callable[[Tensor, Tensor], NDArray[np.int64]]


def near_copies(features: Tensor, labels: Tensor) -> NDArray[np.int64]:
    """Pairs (p, 2) of support images of one class that are near-copies, by a network's features (n, d), labels (n,)."""
    x = F.normalize(features.detach().cpu().double(), dim=1)
    labels = labels.cpu()
    some, of_some = _spread_out(x), _spread_out(labels)
    between = torch.cdist(some, some)[of_some[:, None] != of_some]
    least = LEAST_SHARE * float(between.median()) if len(between) else 0.0
    pairs = []
    for rows in _by_class(labels):
        if len(rows) > 1:
            usual = max(float(torch.pdist(_spread_out(x[rows])).median()), least)
            for first in range(0, len(rows), _ROWS):
                close = torch.cdist(x[rows[first : first + _ROWS]], x[rows]) < COPY_SHARE * usual
                i, j = close.triu(diagonal=first + 1).nonzero().T
                pairs.append(torch.stack([rows[first + i], rows[j]], dim=1))
    return torch.cat(pairs).numpy() if pairs else np.empty((0, 2), np.int64)


def equal_rows(features: Tensor, labels: Tensor) -> NDArray[np.int64]:
    """Pairs (p, 2) of examples of one class whose features (n, d) are equal but for rounding.

    Where features have few values, as counts and categories do, different examples can be equal by chance. So there
    must be eight columns in which most different rows differ.
    """
    x, pairs = features.detach().cpu().double(), []
    scale = x.abs().amax(dim=0)
    x = x / torch.where(scale > 0, scale, 1.0)
    for rows in _by_class(labels.cpu()):
        order = rows[x[rows].sum(dim=1).argsort(stable=True)]  # equal rows are neighbours
        equal = (x[order[1:]] - x[order[:-1]]).abs().amax(dim=1) <= _ROUNDING
        pairs.append(torch.stack([order[:-1], order[1:]], dim=1)[equal])
    found = torch.cat(pairs)
    if len(found) == 0:
        return found.numpy()
    different = x.new_ones(len(x), dtype=torch.bool).index_fill(0, found[:, 1], False)
    values = (x[different].sort(dim=0).values.diff(dim=0) > _ROUNDING).sum(dim=0) + 1
    return (found if (values > different.sum() / 2).sum() >= _TELLING_COLUMNS else found[:0]).numpy()


def _by_class(labels: Tensor) -> list[Tensor]:
    """Rows of the examples of each class."""
    return [(labels == label).nonzero()[:, 0] for label in labels.unique()]


def _spread_out(x: Tensor) -> Tensor:
    """At most ``_MOST`` rows of ``x``, evenly from all."""
    return x[:: -(-len(x) // _MOST)]


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


def checked_groups(groups: Iterable[Any] | None, n: int) -> list[Any]:
    """Names of the groups of n examples, as strings and numbers; None for each if none are given.

    Raises
    ------
    ValueError
        There are more or fewer than n, or one is neither a string nor a number.
    """
    if groups is None:
        return [None] * n
    if isinstance(groups, (str, bytes)) or not isinstance(groups, Iterable):
        raise ValueError("groups must be a sequence of strings or numbers, one for each example")
    names = [name.item() if isinstance(name, np.generic) else name for name in groups]
    if len(names) != n:
        raise ValueError(f"{n} examples but {len(names)} groups: give each example a group")
    for i, name in enumerate(names):
        if not isinstance(name, (str, Integral, Real)) or name != name:
            raise ValueError(f"group {i} is {name!r}: name groups by strings or numbers")
    return names


def number_of_copies(groups: Tensor | None) -> int:
    """Examples beyond the first of each group."""
    return 0 if groups is None else len(groups) - len(groups.unique())


def warn_of_copies(groups: Tensor | None, names: Sequence[Any], before: int = 0) -> None:
    """Say once how many copies were found that the user did not name, if they are more than ``before``."""
    found = copies_found(groups, names)
    if found > before:
        n = len(names)
        warn_caller(
            f"{found} of {n} support examples look like copies of others: the same, compressed, mirrored or cropped. "
            "Leave-one-out, which chooses threshold, temperature and settings, counts all as "
            f"{n - number_of_copies(groups)} examples. To say which examples belong together, pass groups=...; "
            "groups=range(n) says that none do"
        )


def copies_found(groups: Tensor | None, names: Sequence[Any]) -> int:
    """Copies that were found beyond the groups that the user named."""
    return number_of_copies(groups) - number_of_copies(joined(len(names), np.empty((0, 2), np.int64), names))
