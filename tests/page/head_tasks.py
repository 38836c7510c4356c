"""Tasks of feature vectors, on which the head in JavaScript is compared with the one in Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_mahalanobis.support_set.copies import joined

Numbers = NDArray[np.float64]


def write_tasks(path: Path) -> None:
    """Write all tasks as JSON: features (n, d), labels, groups or null, examples of no class, queries, how to fit."""
    path.write_text(json.dumps([*map(_plain, head_tasks())]))


def head_tasks() -> list[dict[str, Any]]:
    copied = _groups_of_copies()
    return [
        _task("equal shots", [5] * 5, 40, positive=True),
        _task("equal shots of features of both signs", [5] * 5, 40),
        _task("unequal shots", [1, 2, 3, 8, 12], 64, reject=True),
        _task("unequal shots of skewed features", [2, 3, 9], 24, positive=True, reject=True),
        _task("one shot", [1] * 6, 24, positive=True),
        _task("two shots of two classes", [2, 2], 12, reject=True),
        _task("more examples than features", [20, 30, 25], 8, reject=True, temperature=2.0),
        _task("more examples than are left out", [120, 150, 90], 5, reject=True),
        _task("more classes than decide on the power", [3] * 8 + [2] * 6, 30, positive=True, reject=True),
        _task("one class", [4], 10),
        _task("copies", [6, 4, 5], 24, groups=copied, copies=True, reject=True),
        _task("groups across classes", [4, 4, 3], 16, groups=[0, 1, 2, 3, 0, 4, 5, 6, 0, 1, 7], reject=True),
        _task("a group that is a class", [2, 4, 3], 16, groups=[0, 0, 1, 2, 3, 0, 4, 4, 5], reject=True),
        _task("every class one group", [2, 3], 12, groups=[0, 0, 1, 1, 1]),
        _task("examples of no class", [4, 5, 6], 24, reject=True, negatives=5),
        _task("examples of no class and skewed features", [3, 3, 4, 6], 16, positive=True, reject=True, negatives=3),
        _task(
            "one example of no class, and copies", [6, 4, 5], 24, groups=copied, copies=True, reject=True, negatives=1
        ),
        _task("more examples than features, some of no class", [20, 30, 25], 8, reject=True, negatives=12),
        _task("examples of no class beside one class", [7], 12, reject=True, negatives=4),
        _task("one class that is rejected", [5], 10, reject=True),
        _task("altered copies", [6, 4, 5], 24, groups=copied, twins=True, reject=True),
        _task(
            "altered copies, and examples of no class",
            [6, 4, 5],
            24,
            groups=copied,
            twins=True,
            reject=True,
            negatives=4,
        ),
        _task(
            "altered copies, some in named groups",
            [6, 4, 5],
            24,
            groups=copied,
            names=_names(),
            twins=True,
            reject=True,
        ),
        _task("priors", [3, 5, 4], 16, priors=[0.7, 0.1, 0.2]),
        _task("priors, one of them zero, and none", [4, 4, 4], 16, reject=True, negatives=3, priors=[0.5, 0.0, 0.5]),
        _task("examples that are all equal", [3, 3], 12, noise=0.0, distance=0.0),
    ]


def _groups_of_copies() -> list[int]:
    return [0, 0, 0, 1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9]


def _names() -> list[str | None]:
    """Names of groups of `_groups_of_copies`: one of three copies has none, two have two names, two share one."""
    names = dict.fromkeys(range(15), None) | {0: "a", 2: "b", 3: "c", 4: "d", 8: "e", 12: "f", 13: "f", 14: "f"}
    return [*names.values()]


def _task(
    name: str,
    shots: Sequence[int],
    width: int,
    *,
    positive: bool = False,
    groups: list[int] | None = None,
    names: list[str | None] | None = None,
    copies: bool = False,
    twins: bool = False,
    reject: bool = False,
    temperature: float | str = "auto",
    noise: float = 1.0,
    distance: float = 0.9,
    negatives: int = 0,
    priors: list[float] | None = None,
) -> dict[str, Any]:
    rng = np.random.default_rng([*name.encode()])
    labels = np.repeat(np.arange(len(shots)), shots)
    means = distance * rng.normal(size=(len(shots), width)) + 0.3
    spectrum = noise / np.sqrt(1 + np.arange(width))

    def drawn(of_classes: NDArray[np.int64]) -> Numbers:
        x = means[of_classes] * 0.6 + rng.normal(size=(len(of_classes), width)) * spectrum
        return np.exp(x) if positive else x

    features = drawn(labels)
    if copies or twins:
        first = {group: index for index, group in reversed([*enumerate(groups or [])])}
        nearly = features[[first[group] for group in groups or []]]
        features = nearly + (0.1 if twins else 1e-3) * rng.normal(size=nearly.shape)
    if twins:
        found = None if names is None else joined(len(labels), np.empty((0, 2), np.int64), names)
        groups = None if found is None else found.tolist()
    queries = np.concatenate([drawn(rng.permutation(labels)[:6]), 3 * rng.normal(size=(2, width)) ** 2])
    of_none = 1.5 * rng.normal(size=(negatives, width))
    of_none = np.exp(of_none) if positive else of_none
    mixing = rng.normal(size=(width, width)) / np.sqrt(width)
    return {
        "name": name,
        "features": features,
        "unadapted": features @ mixing,
        "labels": labels,
        "groups": groups,
        "names": names,
        "negatives": of_none,
        "unadapted_negatives": of_none @ mixing,
        "queries": queries,
        "unadapted_queries": queries @ mixing,
        "temperature": temperature,
        "reject": reject,
        "twins": twins,
        "priors": priors,
        "permutations": _permutations(
            len({*zip(labels, range(len(labels)) if groups is None else groups, strict=True)})
        ),
    }


def _permutations(n: int) -> list[list[int]]:
    """The orders of n sets in which the learning curve of Python draws them."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(n, generator=generator).tolist() for _ in range(40)]


def _plain(task: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in task.items()}
