"""What is checked of features and labels, and the precision that the Gaussians compute in."""

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


def result_dtype(features: Tensor) -> torch.dtype:
    """Return the dtype of means and distances: the features', float32 at least."""
    return torch.promote_types(features.dtype, torch.float32)


def working_dtype(features: Tensor) -> torch.dtype:
    """Float64: the head is small beside the network, and features of scale 1e3 give Q_k a condition of 1e9."""
    return torch.float32 if features.device.type == "mps" else torch.float64  # MPS has no float64


def full_precision(features: Tensor) -> torch.autocast:
    """Make a context in which autocast is off on the features' device."""
    return torch.autocast(device_type=features.device.type, enabled=False)
