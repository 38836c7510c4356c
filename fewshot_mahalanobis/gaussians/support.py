"""A support set: checks of its features and labels, its class means, and its groups.

A group is a set of examples that leave-one-out leaves out together: copies, frames of a video, pictures of one object.
Examples of a group share a number, and groups are an int64 Tensor of shape (n,). Where every example is a group of its
own, groups are None.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    low, high = features.detach().aminmax()  # one pass; NaN and infinity show in it
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


def working_dtype(features: Tensor) -> torch.dtype:
    """Float64: the head is small beside the network, and features of scale 1e3 give Q_k a condition of 1e9."""
    return torch.float32 if features.device.type == "mps" else torch.float64  # MPS has no float64


def full_precision(features: Tensor) -> torch.autocast:
    """Make a context in which autocast is off on the features' device."""
    return torch.autocast(device_type=features.device.type, enabled=False)


# ---------------------------------------------------------------- classes


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


def exact_class_means(x: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Class means (k, d) as the first example plus the mean difference from it: exact for equal examples."""
    first = x[labels.argsort(stable=True)[counts.cumsum(0) - counts]]
    sums = torch.zeros_like(first).index_add(0, labels, x - first[labels])
    return first + sums / counts[:, None]


def deviations(x: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Each feature less its class mean, (n, d); exactly zero for an example that is alone in its class."""
    return x - exact_class_means(x, labels, counts)[labels]


def members_by_shots(labels: Tensor, counts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each number of shots s, return its classes (k',) and the rows (k', s) of their examples."""
    found = []
    for shots in counts.unique().tolist():
        classes = (counts == shots).nonzero()[:, 0]
        found.append((classes, rows_of_classes(labels, counts, classes, shots)))
    return found


def rows_of_classes(labels: Tensor, counts: Tensor, classes: Tensor, shots: int) -> Tensor:
    """Rows (k', shots) of the examples of ``classes`` (k',), which have ``shots`` each."""
    order, starts = labels.argsort(stable=True), counts.cumsum(0) - counts
    return order[starts[classes, None] + torch.arange(shots, device=labels.device)]


# ---------------------------------------------------------------- groups


def joined_groups(groups: Tensor | None) -> Tensor | None:
    """Return ``groups``, or None if no two examples share one."""
    return None if groups is None or len(groups.unique()) == len(groups) else groups


def groups_by_size(groups: Tensor) -> list[Tensor]:
    """Rows (G, g) of the examples of all groups of g examples, for each g."""
    _, groups, sizes = groups.unique(return_inverse=True, return_counts=True)
    return [rows for _, rows in members_by_shots(groups, sizes)]


def remaining_examples(labels: Tensor, groups: Tensor | None) -> Tensor:
    """How many examples remain in the class of each example when its group is left out, (n,)."""
    counts = labels.bincount()[labels]
    if groups is None:
        return counts - 1
    _, parts, sizes = torch.stack([groups, labels]).unique(dim=1, return_inverse=True, return_counts=True)
    return counts - sizes[parts]


def effective_counts(labels: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """Independent examples (Kish) that the mean of a class is worth, and that of its examples outside a group.

    The mean of n_k examples in groups of g each, which are alike, has the noise of n_k^2 / sum g^2 examples.

    Returns
    -------
    class_counts : Tensor of shape (k,)
    without_groups : Tensor of shape (n,)
        For each example, those of its class that are not in its group; 0 where there are none.
    """
    counts = labels.bincount().to(working_dtype(labels))
    if groups is None:
        return counts, counts[labels] - 1
    parts, index, sizes = torch.stack([labels, groups]).unique(dim=1, return_inverse=True, return_counts=True)
    sizes = sizes.to(counts)
    squares = torch.zeros_like(counts).index_add(0, parts[0], sizes.square())
    remaining, remaining_squares = counts[labels] - sizes[index], squares[labels] - sizes[index].square()
    return counts.square() / squares, remaining.square() / remaining_squares.clamp(min=1)


def group_weights(groups: Tensor) -> Tensor:
    """Weight of each example (n,), so that every group has a weight of 1."""
    _, groups, sizes = groups.unique(return_inverse=True, return_counts=True)
    return 1 / sizes[groups].to(working_dtype(groups))


def left_out_weights(labels: Tensor, groups: Tensor | None) -> Tensor:
    """How many left-out examples each example counts as, (n,): every group counts as one.

    An example counts 0 if leaving out its group empties its class; the others of the group share the weight of one.
    """
    counted = remaining_examples(labels, groups) > 0
    weights = counted.to(working_dtype(labels))
    return weights if groups is None else weights.masked_scatter(counted, group_weights(groups[counted]))
