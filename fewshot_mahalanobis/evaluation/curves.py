"""Accuracy against shots and against ways, as in figures 5 and 6 of the paper (Bateni et al., CVPR 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fewshot_mahalanobis.evaluation.tables import averages

#: Groups of shots, or of ways, begin at the powers of this: 1, 2, 3, 4, 5, 6-7, 8-9, 10-11, 12-14, ...
_STEP = 1.25


def pooled_curve(records: Sequence[Mapping[str, Any]], against: str) -> list[dict[str, Any]]:
    """Accuracy by shots, over the classes of all episodes and sources, or by ways, over all episodes.

    Parameters
    ----------
    records : list of dict
        Of the variable protocol, from :func:`~fewshot_mahalanobis.evaluation.tables.evaluate`.
    against : {"shot", "way"}

    Returns
    -------
    list of dict
        A record for each group of neighbouring numbers, as :func:`~fewshot_mahalanobis.plotting.plot_accuracy` takes
        them; its number is the rounded mean of its group.
    """
    other = "way" if against == "shot" else "shot"
    points: dict[int, dict[str, list[Sequence[float]]]] = {}
    for record in records:
        for variant, rows in record[f"by_{against}"].items():
            for row in rows:
                group = math.floor(math.log(row[0]) / math.log(_STEP) + 1e-9)
                points.setdefault(group, {}).setdefault(variant, []).append(row)
    found = []
    for _, by_variant in sorted(points.items()):
        accuracy = {}
        for variant, rows in by_variant.items():
            numbers, counts, means, spreads = np.array(rows, dtype=np.float64).T
            n = counts.sum()
            mean = (counts * means).sum() / n
            squares = ((counts - 1) * spreads**2 + counts * (means - mean) ** 2).sum()
            half_width = 1.96 * math.sqrt(squares / (n - 1) / n) if n > 1 else 0.0
            accuracy[variant] = [float(mean), half_width]
        place = round(float((counts * numbers).sum() / n))
        found.append({"source": f"{len(records)} sources", against: place, other: None, "accuracy": accuracy})
    return found


def plot_curves(records: Sequence[Mapping[str, Any]], folder: str | Path) -> list[Path]:
    """Write ``accuracy_by_shot.png`` and ``accuracy_by_way.png``.

    Of the variable protocol's records both, by the shots of classes and the ways of episodes. Of the fixed protocol's
    records the averages over sources, by shots.

    Parameters
    ----------
    records : list of dict
        From :func:`~fewshot_mahalanobis.evaluation.tables.evaluate`, of one protocol.
    folder : path
        Made if absent.

    Returns
    -------
    list of path
        The files.
    """
    from matplotlib.figure import Figure

    from fewshot_mahalanobis.plotting import plot_accuracy

    variable = [record for record in records if record.get("protocol") == "variable"]
    if variable:
        curves = {against: pooled_curve(variable, against) for against in ("shot", "way")}
    else:
        curves = {"shot": averages(records)}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for against, curve in curves.items():
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        plot_accuracy(curve, against, ax=figure.subplots())
        files.append(folder / f"accuracy_by_{against}.png")
        figure.savefig(files[-1], dpi=150)
    return files
