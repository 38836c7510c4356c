"""Metric heads: support features and labels in, logits of query features out.

``MahalanobisHead`` is Simple CNAPS (Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020, equations
1-3), ``AutoHead`` the default of the classifiers, ``LinearHead`` the learned classifier of CNAPS (Requeima et al.,
NeurIPS 2019) and the others the metrics that the paper compares with. Probabilities are the softmax of the logits
(equation 1).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from fewshot_mahalanobis.heads.auto import AutoHead
from fewshot_mahalanobis.heads.head import Head
from fewshot_mahalanobis.heads.linear import LinearClassifier, LinearHead, LinearLayerHead
from fewshot_mahalanobis.heads.mahalanobis import MahalanobisHead
from fewshot_mahalanobis.heads.prototypes import (
    CosineHead,
    DotProductHead,
    EuclideanHead,
    ManhattanHead,
    PrototypeHead,
)
from fewshot_mahalanobis.plain import plain

__all__ = [
    "HEADS",
    "AutoHead",
    "CosineHead",
    "DotProductHead",
    "EuclideanHead",
    "Head",
    "LinearClassifier",
    "LinearHead",
    "LinearLayerHead",
    "MahalanobisHead",
    "ManhattanHead",
    "PrototypeHead",
    "describe_head",
    "make_head",
]

#: Every head by its name. Messages list these names; tests check that help texts and pages list the same.
HEADS: dict[str, type[Head[Any]]] = {
    head.name: head
    for head in (AutoHead, MahalanobisHead, EuclideanHead, ManhattanHead, CosineHead, DotProductHead, LinearHead)
}

#: Settings of :class:`MahalanobisHead` as in the paper.
PAPER_SETTINGS = {"scale": 1.0, "beta": 1.0, "task_covariance": True, "one_shot_covariance": "zero"}


def make_head(
    head: str | nn.Module | Mapping[str, Any],
    settings: Mapping[str, Any] = PAPER_SETTINGS,
    own: Head[Any] | None = None,
) -> Head[Any]:
    """Make the head that a setting stands for.

    Parameters
    ----------
    head : str, Head or mapping
        A name of ``HEADS``; a head object, which is copied; or what :func:`describe_head` returned.
    settings : mapping
        Settings of a head by its name: scale, beta, task_covariance and one_shot_covariance of ``MahalanobisHead``, as
        in ``SimpleCNAPS.config``.
    own : Head, optional
        The head of a model, with its weights. Its name stands for it itself.

    Raises
    ------
    ValueError
        There is no such head, or it has learned weights and is not ``own``. Or TypeError if the description is of no
        head.
    """
    if isinstance(head, nn.Module):
        return cast("Head[Any]", copy.deepcopy(head).eval())
    if isinstance(head, str):
        return own if own is not None and head == own.name else _head_class(head).from_settings(settings)
    arguments = {name: value for name, value in head.items() if name != "name"}
    return _head_class(head.get("name")).from_description(arguments)


def _head_class(name: Any) -> type[Head[Any]]:
    if name not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {name!r}")
    return HEADS[name]


def describe_head(head: Head[Any]) -> dict[str, Any]:
    """Return the name and the settings of a head as JSON values, for a file; :func:`make_head` makes it again.

    Raises
    ------
    ValueError
        The head has learned weights, or a class that the file's reader would not know.
    """
    remedy = f"name one of {', '.join(HEADS)}, or pickle the classifier"
    if HEADS.get(head.name) is not type(head):
        raise ValueError(f"a {type(head).__name__} as head cannot be written to a file, which has no code: {remedy}")
    try:
        return plain({"name": head.name, **head.describe()})
    except ValueError as error:
        raise ValueError(f"a {type(head).__name__} object as head cannot be written: {error}. {remedy}") from error
