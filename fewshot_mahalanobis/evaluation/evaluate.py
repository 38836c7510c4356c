"""Accuracy of a model over the episodes of one source, for several variants on the same episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from fewshot_mahalanobis.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.episodes.sources import ImageSource
from fewshot_mahalanobis.heads import HEADS
from fewshot_mahalanobis.networks.simple_cnaps import AdaptedTask, SimpleCNAPS


class Variant(NamedTuple):
    """What is compared on one set of episodes: with or without adaptation, and which head.

    The head "mahalanobis" of a model that was trained with it is the model's own.
    """

    adapt: bool
    head: str


class Accuracy(NamedTuple):
    """Mean accuracy over episodes and the half-width of its 95 % interval, as shares of 1."""

    mean: float
    half_width: float
    episodes: int

    @classmethod
    def of(cls, accuracies: NDArray[np.float64]) -> Accuracy:
        """From one accuracy an episode: 1.96 standard errors, as is usual in the field."""
        n = len(accuracies)
        return cls(float(accuracies.mean()), float(1.96 * accuracies.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0, n)

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.half_width:.1f}"


def unadapted_features(
    model: SimpleCNAPS,
    source: ImageSource,
    *,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 128,
    progress: bool = False,
) -> Tensor:
    """Features (n, 512) of every image of a source by the network without adaptation, which no task changes."""
    task = AdaptedTask(model, None, model.head, dtype)
    batches = np.array_split(np.arange(len(source.images)), math.ceil(len(source.images) / batch_size))
    bar = tqdm(batches, desc=f"{source.name} features", disable=not progress, leave=False)
    return torch.cat([task.features(source.network_input(batch), batch_size) for batch in bar])


def evaluate_source(
    model: SimpleCNAPS,
    source: ImageSource,
    variants: Iterable[Variant] = (Variant(True, "mahalanobis"),),
    *,
    way: int = 5,
    shot: int = 5,
    queries: int = 10,
    episodes: int = 600,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 128,
    plain_features: Tensor | None = None,
    progress: bool = False,
) -> dict[Variant, NDArray[np.float64]]:
    """Accuracy of every variant in every episode.

    Parameters
    ----------
    model : SimpleCNAPS
    source : ImageSource
    variants : iterable of Variant
        All see the same episodes.
    way, shot, queries : int
        Classes an episode, support and query images a class.
    episodes : int
        Episode ``i`` is a function of (seed, i).
    seed : int
    dtype : torch.dtype
        Precision of the convolutions.
    batch_size : int
        Images in work at a time.
    plain_features : Tensor of shape (n, 512), optional
        What :func:`unadapted_features` gave for this source, to compute it once for several calls.
    progress : bool
        Show a progress bar.

    Returns
    -------
    dict of Variant to float64 array of shape (episodes,)
        Shares of queries that were labelled right.
    """
    variants = tuple(dict.fromkeys(variants))
    classes = source.indices_of_class()
    heads = {v: model.head if v.head == model.config["head"] else HEADS[v.head]() for v in variants}
    if plain_features is None and not all(v.adapt for v in variants):
        plain_features = unadapted_features(model, source, dtype=dtype, batch_size=batch_size, progress=progress)
    accuracies: dict[Variant, list[float]] = {v: [] for v in variants}
    for index in tqdm(range(episodes), desc=f"{source.name} {way}-way {shot}-shot", disable=not progress, leave=False):
        episode = draw_episode(classes, [shot] * way, queries, episode_rng(seed, index))
        labels = torch.from_numpy(episode.support_labels).to(model.device)
        truth = torch.from_numpy(episode.query_labels)
        features: dict[bool, tuple[Tensor, Tensor]] = {}
        if plain_features is not None:
            features[False] = plain_features[episode.support], plain_features[episode.query]
        if any(v.adapt for v in variants):
            task = model.adapt(source.network_input(episode.support), labels, dtype=dtype, batch_size=batch_size)
            features[True] = task.support_features, task.features(source.network_input(episode.query), batch_size)
        for variant in variants:
            support_features, query_features = features[variant.adapt]
            with torch.no_grad():
                if model.projection is not None:
                    support_features, query_features = map(model.projection, (support_features, query_features))
                predicted = heads[variant](support_features, labels, query_features).argmax(1).cpu()
            accuracies[variant].append(float((predicted == truth).double().mean()))
    return {variant: np.array(values) for variant, values in accuracies.items()}


def markdown_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A Markdown table with columns padded to one width."""
    widths = [max(len(str(row[i])) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(str(c).ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])
