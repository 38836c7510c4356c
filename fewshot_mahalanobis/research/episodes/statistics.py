"""Plots of the ways and shots that a sampler draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.research.episodes.sampling import Episode


def plot_ways_and_shots(episodes: Mapping[str, Sequence[Episode]], path: str | Path) -> None:
    """Plot the distribution of ways, support images and shots per class over the episodes of each source.

    Parameters
    ----------
    episodes : mapping of str to list of Episode
        Source to its episodes.
    path : path
        File to write; the suffix gives the format (.png, .pdf, .svg).
    """
    from matplotlib.figure import Figure

    measures = {
        "ways": lambda episode: [episode.way],
        "support images": lambda episode: [len(episode.support)],
        "shots per class": lambda episode: np.bincount(episode.support_labels).tolist(),
    }
    figure = Figure(figsize=(2 + 0.5 * len(episodes), 2.5 * len(measures)), layout="constrained")
    for axes, (title, measure) in zip(figure.subplots(len(measures), sharex=True), measures.items(), strict=True):
        values = [[value for episode in drawn for value in measure(episode)] for drawn in episodes.values()]
        axes.boxplot(values, whis=(0, 100))  # quartiles, and whiskers to the extremes
        axes.set_ylabel(title)
        axes.set_yscale("log")
    axes.set_xticks(range(1, len(episodes) + 1), list(episodes), rotation=90)
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format=temporary.suffix[1:] or "png")  # it would add an ending
