"""Metric heads: support features and labels in, logits of query features out.

``MahalanobisHead`` is Simple CNAPS (Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020, equations
1-3), ``AutoHead`` the default of the classifiers, ``LinearHead`` the learned classifier of CNAPS (Requeima et al.,
NeurIPS 2019) and the others the metrics that the paper compares with. Probabilities are the softmax of the logits
(equation 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewshot_mahalanobis.heads.head import Head
from fewshot_mahalanobis.heads.linear import LinearClassifier, LinearHead, LinearLayerHead
from fewshot_mahalanobis.heads.mahalanobis import MahalanobisHead
from fewshot_mahalanobis.heads.plda import AutoHead
from fewshot_mahalanobis.heads.prototypes import (
    CosineHead,
    DotProductHead,
    EuclideanHead,
    ManhattanHead,
    PrototypeHead,
)

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
    "head_from_description",
    "make_head",
]

#: Every head by its name.
HEADS: dict[str, type[Head[Any]]] = {
    head.name: head
    for head in (MahalanobisHead, AutoHead, EuclideanHead, ManhattanHead, CosineHead, DotProductHead, LinearHead)
}

#: Settings of :class:`MahalanobisHead` as in the paper.
PAPER_SETTINGS = {"scale": 1.0, "beta": 1.0, "task_covariance": True, "one_shot_covariance": "zero"}


def make_head(name: str, settings: Mapping[str, Any] = PAPER_SETTINGS, in_features: int = 512) -> Head[Any]:
    """Make a head by its name.

    Parameters
    ----------
    name : str
        One of ``HEADS``.
    settings : mapping
        Settings of a model, as ``SimpleCNAPS.config``. ``MahalanobisHead`` uses scale, beta, task_covariance and
        one_shot_covariance.
    in_features : int
        Feature width, for ``LinearHead``.

    Raises
    ------
    ValueError
        There is no such head.
    """
    if name not in HEADS:
        raise ValueError(f"head must be one of {sorted(HEADS)}, got {name!r}")
    return HEADS[name].of_model(settings, in_features)


def describe_head(head: Head[Any]) -> dict[str, Any]:
    """Return the name and the settings of a head as JSON values, for a file.

    Raises
    ------
    ValueError
        The head has learned weights, or a class that the file's reader would not know.
    """
    remedy = f"name one of {sorted(HEADS)}, or pickle the classifier"
    if HEADS.get(head.name) is not type(head):
        raise ValueError(f"a {type(head).__name__} as head cannot be written to a file, which has no code: {remedy}")
    try:
        return {"name": head.name, **head.describe()}
    except ValueError as error:
        raise ValueError(f"a {type(head).__name__} object as head cannot be written: {error}. {remedy}") from error


def head_from_description(description: Mapping[str, Any]) -> Head[Any]:
    """Make the head that :func:`describe_head` described; ValueError or TypeError if no head fits."""
    name, settings = description.get("name"), {key: value for key, value in description.items() if key != "name"}
    if name not in HEADS:
        raise ValueError(f"head must be one of {sorted(HEADS)}, got {name!r}")
    return HEADS[name].from_description(settings)
