"""The paper's figures, shown beside one's own (Bateni et al., CVPR 2020).

A figure is shown only if the paper measured it: a network meta-trained with that head, or the pretrained network
without adaptation. It is marked ``*`` if the episodes are drawn in another way than the paper's (variable ways and
shots, at most 10 queries per class), and ``†`` if the images are different ones of the same domain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fewshot_mahalanobis.checkpoints.catalogue import DEFAULT
from fewshot_mahalanobis.heads import HEADS
from fewshot_mahalanobis.research.evaluation.accuracy import Variant
from fewshot_mahalanobis.research.evaluation.averages import data_set_of
from fewshot_mahalanobis.research.evaluation.result import Result

#: This package's names of the data sets -> the paper's.
_DATA_SETS = {
    "ilsvrc_2012": "ILSVRC",
    "omniglot": "Omniglot",
    "aircraft": "Aircraft",
    "cu_birds": "Birds",
    "dtd": "DTD",
    "quickdraw": "QuickDraw",
    "fungi": "Fungi",
    "vgg_flower": "VGG Flower",
    "traffic_sign": "Traffic Signs",
    "mscoco": "MSCOCO",
    "mnist": "MNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "mini_imagenet": "mini-ImageNet",
    "tiered_imagenet": "tieredImageNet",
}
#: Other images of the same domain, by their names in our model cards.
_SIMILAR = {"cub200_2010": "Birds", "dtd10": "DTD", "quickdraw345": "QuickDraw", "gtsrb": "Traffic Signs"}

#: Data sets for which the paper has fixed ways and shots.
_FIXED = {"mini_imagenet", "tiered_imagenet"}

_META_DATASET = tuple(_DATA_SETS)[:8]
_OF_OURS = ("mini_imagenet", "tiny_imagenet", "omniglot", "cub200_2010", "quickdraw345", "dtd10")
#: Named checkpoint -> the data sets it was trained on (their training classes).
IN_DOMAIN: dict[str, tuple[str, ...]] = {
    "resnet18": ("ilsvrc_2012", *_OF_OURS),
    "efficientnet-lite0": ("ilsvrc_2012", *_OF_OURS),
    "simple-cnaps-meta-dataset": _META_DATASET,
    "simple-ar-cnaps-meta-dataset": _META_DATASET,
    "lite-simple-cnaps-224": (*_META_DATASET, "mnist"),
    "lite-simple-cnaps-84": (*_META_DATASET, "mnist"),
    "no-adaptation-meta-dataset": ("ilsvrc_2012",),
    "no-adaptation-mini-imagenet": ("mini_imagenet",),
}
IN_DOMAIN["default"] = IN_DOMAIN[DEFAULT]


class Figure(NamedTuple):
    """Accuracy and half-width of its 95 % interval, in per cent, and the marks of differences in protocol or data.

    The half-width is None where the paper has none.
    """

    mean: float
    half_width: float | None
    marks: str

    def __str__(self) -> str:
        interval = "" if self.half_width is None else f" ± {self.half_width:.1f}"
        return f"{self.mean:.1f}{interval}{self.marks}"


def published_method(config: Mapping[str, Any], variant: Variant) -> str | None:
    """Return the paper's name of a variant of a model with these settings (``SimpleCNAPS.config``), if it has one."""
    if variant.adapt and config["adaptation"] != "none" and not variant.as_trained(config):
        return None  # its network was not trained with that head
    name = HEADS[variant.head].paper_title if variant.head in HEADS else ""
    if variant.head == "mahalanobis" and not (variant.task_covariance and config["task_covariance"]):
        name += " -TR"
    if config["projection"] and variant.projection:
        name += " +P"
    if not variant.adapt or config["adaptation"] == "none":
        name += ", not adapted"
    elif config["adaptation"] == "auto-regressive":
        name = {"Simple CNAPS": "Simple AR-CNAPS", "CNAPS": "AR-CNAPS"}.get(name, "")
    return name if name in _published()["methods"] else None


def published_figure(method: str, row: Result) -> Figure | None:
    """Return the paper's figure of a method (from :func:`published_method`) for one row of a table, if it has one.

    The figure for an average is over the same data sets in the paper, with the interval of their mean.
    """
    figures = _published()["methods"][method]
    named = []
    for source in row.sources or (row.source,):
        name = _paper_name(source, row)
        if name is None:
            return None
        named.append(name)
    marks = "".join(sorted({mark for _, marks in named for mark in marks}))
    singly = [figures[name] for name, _ in named if name in figures]
    if len(singly) == len(named):
        half_width = None if None in [f[1] for f in singly] else math.hypot(*(f[1] for f in singly)) / len(singly)
        return Figure(sum(f[0] for f in singly) / len(singly), half_width, marks)
    average = _average_of([name for name, _ in named])
    if average not in figures:
        return None
    mean, half_width = figures[average]
    return Figure(mean, half_width, marks)


def _paper_name(source: str, row: Result) -> tuple[str, str] | None:
    """Return the paper's name of a source and the marks of what differs; None if the paper does not have it."""
    data_set, split = data_set_of(source)
    name = _DATA_SETS.get(data_set, _SIMILAR.get(data_set))
    if name is None or split not in (None, "test"):
        return None
    marks = "†" if data_set in _SIMILAR else ""
    if data_set in _FIXED:
        return f"{name}, {row.way}-way {row.shot}-shot", marks
    as_in_the_paper = row.protocol == "variable" and row.queries == 10
    return name, marks if as_in_the_paper else "*" + marks


def _average_of(names: Sequence[str]) -> str:
    """Return the name of the paper's average over these data sets, or ""."""
    inside, outside = _published()["in-domain"], _published()["out-of-domain"]
    known = {"in-domain": inside, "out-of-domain": outside, "overall": inside + outside}
    return next((title for title, sets in known.items() if sorted(sets) == sorted(names)), "")


@cache
def _published() -> dict[str, Any]:
    return json.loads((files(__package__) / "published.json").read_text(encoding="utf-8"))
