"""Accuracy against shots and against ways, as in figures 5 and 6 of the paper (Bateni et al., CVPR 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.research.evaluation.averages import averages
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Group, Result

#: Groups of shots, or of ways, begin at the powers of this: 1, 2, 3, 4, 5, 6-7, 8-9, 10-11, 12-14, ...
_STEP = 1.25


def pooled_curve(results: Sequence[Result], against: str) -> list[Result]:
    """Pool accuracies by shots, over the classes of all episodes and sources, or by ways, over all episodes.

    ``against`` is "shot" or "way"; the results are from the variable protocol. There is one row for each group of
    neighbouring numbers, at the rounded mean of the group.
    """
    points: dict[int, dict[str, list[Group]]] = {}
    for result in results:
        for method, accuracy in result.scores.items():
            for group in accuracy.by_shot if against == "shot" else accuracy.by_way:
                bin_ = math.floor(math.log(group[0]) / math.log(_STEP) + 1e-9)
                points.setdefault(bin_, {}).setdefault(method, []).append(group)
    rows = []
    for _, by_method in sorted(points.items()):
        scores = {method: _pooled(groups) for method, groups in by_method.items()}
        groups = next(iter(by_method.values()))  # every method has the same episodes
        number = round(sum(size * n for n, size, *_ in groups) / sum(size for _, size, *_ in groups))
        way, shot = (None, number) if against == "shot" else (number, None)
        rows.append(Result(source=f"{len(results)} sources", way=way, shot=shot, scores=scores))
    return rows


def _pooled(groups: Sequence[Group]) -> Accuracy:
    """Return mean and interval of the accuracies of all groups, as if they were one list."""
    _, counts, means, deviations = np.array(groups, dtype=np.float64).T
    n = counts.sum()
    mean = (counts * means).sum() / n
    squares = ((counts - 1) * deviations**2 + counts * (means - mean) ** 2).sum()
    return Accuracy(float(mean), 1.96 * math.sqrt(squares / (n - 1) / n) if n > 1 else 0.0, int(n))


def plot_curves(results: Sequence[Result], folder: str | Path) -> list[Path]:
    """Write ``accuracy_by_shot.png`` and ``accuracy_by_way.png`` into a folder, made if absent; returns the files.

    Results of the variable protocol give both, by the shots of classes and the ways of episodes. Results of the fixed
    protocol give the averages over sources, by shots. All results must have the same protocol.
    """
    from fewshot_mahalanobis.plotting import Figure, plot_accuracy

    variable = [result for result in results if result.protocol == "variable"]
    if variable:
        curves = {against: pooled_curve(variable, against) for against in ("shot", "way")}
    else:
        curves = {"shot": averages(results)}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for against, curve in curves.items():
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        plot_accuracy(curve, against, ax=figure.subplots())
        files.append(folder / f"accuracy_by_{against}.png")
        with atomic_replace(files[-1]) as temporary:
            figure.savefig(temporary, dpi=150)
    return files
