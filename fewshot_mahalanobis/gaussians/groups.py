"""Groups of support examples that leave-one-out leaves out together: copies, frames of a video, pictures of one object.

A group is a number that its examples share, groups an int64 Tensor of shape (n,). Where every example is a group of its
own, groups are None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.checks import working_dtype
from fewshot_mahalanobis.gaussians.low_rank import members_by_shots


def joined_groups(groups: Tensor | None) -> Tensor | None:
    """Return ``groups``, or None if no two examples share one."""
    return None if groups is None or len(groups.unique()) == len(groups) else groups


def groups_by_size(groups: Tensor) -> list[Tensor]:
    """Rows (G, g) of the examples of all groups of g examples, for each g."""
    _, groups, sizes = groups.unique(return_inverse=True, return_counts=True)
    return [rows for _, rows in members_by_shots(groups, sizes)]


def examples_left(labels: Tensor, groups: Tensor | None) -> Tensor:
    """How many examples stay in the class of each example when its group is left out, (n,)."""
    counts = labels.bincount()[labels]
    if groups is None:
        return counts - 1
    _, parts, sizes = torch.stack([groups, labels]).unique(dim=1, return_inverse=True, return_counts=True)
    return counts - sizes[parts]


def effective_counts(labels: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Independent examples (Kish) that the mean of a class is worth, and that of its examples outside a group.

    Of n_k examples in groups of g each, which are alike, a class mean has the noise of n_k^2 / sum g^2 examples.

    Returns
    -------
    of_classes : Tensor of shape (k,)
    without_groups : Tensor of shape (n,)
        For each example, those of its class that are not in its group; 0 where there are none.
    """
    counts = labels.bincount().to(working_dtype(labels))
    parts, index, sizes = torch.stack([labels, groups]).unique(dim=1, return_inverse=True, return_counts=True)
    sizes = sizes.to(counts)
    squares = torch.zeros_like(counts).index_add(0, parts[0], sizes.square())
    left, of_left = counts[labels] - sizes[index], squares[labels] - sizes[index].square()
    return counts.square() / squares, left.square() / of_left.clamp(min=1)


def group_weights(groups: Tensor) -> Tensor:
    """Weight of each example (n,), so that every group has a weight of 1."""
    _, groups, sizes = groups.unique(return_inverse=True, return_counts=True)
    return 1 / sizes[groups].to(working_dtype(groups))


def left_out_weights(labels: Tensor, groups: Tensor | None) -> Tensor:
    """How many left-out examples each example counts as, (n,): every group counts as one.

    Examples whose class goes with their group count as none, and the others of the group stand for all of it.
    """
    counted = examples_left(labels, groups) > 0
    weights = counted.to(working_dtype(labels))
    return weights if groups is None else weights.masked_scatter(counted, group_weights(groups[counted]))
