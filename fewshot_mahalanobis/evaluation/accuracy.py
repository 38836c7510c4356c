"""Accuracy of a model over the episodes of one source, for several variants on the same episodes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance
from fewshot_mahalanobis.episodes.sampling import Episode, draw_episode, episode_rng
from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.heads import HEADS, Head, MahalanobisHead
from fewshot_mahalanobis.networks.simple_cnaps import AdaptedTask, SimpleCNAPS

#: Heads whose name is not how a table calls them.
_TITLES = {"euclidean": "Euclidean", "manhattan": "Manhattan", "dot_product": "dot product"}


class Variant(NamedTuple):
    """What is compared on one set of episodes: with or without adaptation, and which head.

    The head that a model was trained with is the model's own, and "mahalanobis" has the settings of the model's config.

    Attributes
    ----------
    adapt : bool
    head : str
    task_covariance : bool
        False leaves the task's covariance out of equation 3, lambda_k = 1: the "-TR" ablation.
    projection : bool
        False leaves out the projection of a model of the "+P" variant.
    """

    adapt: bool
    head: str
    task_covariance: bool = True
    projection: bool = True

    @property
    def title(self) -> str:
        """Heading of its column in a table."""
        parts = ["adapted" if self.adapt else "not adapted"]
        parts += [_TITLES.get(self.head, self.head)] * (self.head != "mahalanobis")
        parts += ["-TR"] * (not self.task_covariance) + ["no projection"] * (not self.projection)
        return ", ".join(parts)


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
    """Features (n, d) of every image of a source by the network without adaptation, which no task changes."""
    task = AdaptedTask(model, None, model.head, dtype)
    batches = np.array_split(np.arange(len(source.images)), math.ceil(len(source.images) / batch_size))
    bar = tqdm(batches, desc=f"{source.name} features", disable=not progress, leave=False)
    return torch.cat([task.features(source.network_input(batch), batch_size) for batch in bar])


class UnadaptedFeatures:
    """The same, computed for an image when it is first asked for: ``features[indices]`` -> (len(indices), d).

    However many episodes there are, each of their images goes through the network once. The features lie in a temporary
    file, so memory does not grow with the source.

    Parameters
    ----------
    model : SimpleCNAPS
    source : ImageSource
    dtype : torch.dtype
        Precision of the convolutions.
    batch_size : int
        Images in work at a time.
    """

    def __init__(
        self, model: SimpleCNAPS, source: ImageSource, *, dtype: torch.dtype = torch.float32, batch_size: int = 128
    ) -> None:
        self._task = AdaptedTask(model, None, model.head, dtype)
        self._source = source
        self._batch_size = batch_size
        n = len(source.images)
        self._known = np.zeros(n, dtype=bool)
        with tempfile.TemporaryFile() as file:  # it lives as long as the map
            self._features = np.memmap(file, np.float32, "w+", shape=(n, model.feature_extractor.out_features))

    def __getitem__(self, indices: NDArray[np.int64]) -> Tensor:
        """Features of images by their indices, float32, on the CPU."""
        missing = np.unique(indices[~self._known[indices]])
        for start in range(0, len(missing), self._batch_size):
            batch = missing[start : start + self._batch_size]
            features = self._task.features(self._source.network_input(batch), self._batch_size)
            self._features[batch] = features.cpu().numpy()
            self._known[batch] = True
        return torch.from_numpy(np.array(self._features[indices]))


class Scores(NamedTuple):
    """What variants scored in e episodes, which have c classes altogether.

    Attributes
    ----------
    ways : int64 array of shape (e,)
    shots : int64 array of shape (c,)
        Support images of each class of each episode.
    accuracies : dict of Variant to float64 array of shape (e,)
        Shares of an episode's queries that were labelled right.
    class_accuracies : dict of Variant to float64 array of shape (c,)
        Shares of a class's queries, in the order of ``shots``.
    """

    ways: NDArray[np.int64]
    shots: NDArray[np.int64]
    accuracies: dict[Variant, NDArray[np.float64]]
    class_accuracies: dict[Variant, NDArray[np.float64]]


def head_of(model: SimpleCNAPS, variant: Variant) -> Head[Any]:
    """The head of a variant.

    Raises
    ------
    ValueError
        There is no such head, or it has weights and the model was not trained with it; or another head than
        "mahalanobis" is to do without the task's covariance.
    """
    if variant.head not in HEADS:
        raise ValueError(f"there is no head {variant.head!r}; there are {', '.join(HEADS)}")
    if not variant.task_covariance and variant.head != "mahalanobis":
        raise ValueError(f"the head {variant.head!r} has no task covariance to leave out")
    if variant.head == "mahalanobis":
        config = model.config
        task_covariance = config["task_covariance"] and variant.task_covariance
        covariance = RegularizedCovariance(config["beta"], task_covariance, config["one_shot_covariance"])
        return MahalanobisHead(covariance, config["scale"])
    if variant.head == model.config["head"]:
        return model.head
    if variant.head == "linear":
        raise ValueError(f"the checkpoint has no trained linear head, its head is {model.config['head']!r}")
    return HEADS[variant.head]()


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
    plain_features: UnadaptedFeatures | Tensor | None = None,
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
    plain_features : UnadaptedFeatures or Tensor of shape (n, d), optional
        Features of this source without adaptation, to compute them once for several calls.
    progress : bool
        Show a progress bar.

    Returns
    -------
    dict of Variant to float64 array of shape (episodes,)
        Shares of queries that were labelled right.
    """
    classes = source.indices_of_class()
    return evaluate_episodes(
        model,
        source,
        variants,
        lambda index: draw_episode(classes, [shot] * way, queries, episode_rng(seed, index)),
        episodes,
        dtype=dtype,
        batch_size=batch_size,
        plain_features=plain_features,
        description=f"{source.name} {way}-way {shot}-shot" if progress else None,
    ).accuracies


def evaluate_episodes(
    model: SimpleCNAPS,
    source: ImageSource,
    variants: Iterable[Variant],
    draw: Callable[[int], Episode],
    episodes: int,
    *,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 128,
    plain_features: UnadaptedFeatures | Tensor | None = None,
    description: str | None = None,
) -> Scores:
    """What every variant scores in every episode and in every class of it.

    Parameters
    ----------
    model, source, variants, dtype, batch_size, plain_features
        As for :func:`evaluate_source`.
    draw : callable
        Index -> episode: ``VariableEpisodes(source).draw``, say.
    episodes : int
    description : str, optional
        Of a progress bar; none without.

    Raises
    ------
    ValueError
        A variant's head cannot be had: see :func:`head_of`.
    """
    variants = tuple(dict.fromkeys(variants))
    heads = {variant: head_of(model, variant).to(model.device) for variant in variants}
    if plain_features is None and not all(v.adapt for v in variants):
        plain_features = UnadaptedFeatures(model, source, dtype=dtype, batch_size=batch_size)
    ways: list[int] = []
    shots: list[NDArray[np.int64]] = []
    accuracies: dict[Variant, list[float]] = {v: [] for v in variants}
    class_accuracies: dict[Variant, list[NDArray[np.float64]]] = {v: [] for v in variants}
    for index in tqdm(range(episodes), desc=description, disable=description is None, leave=False):
        episode = draw(index)
        ways.append(episode.way)
        shots.append(np.bincount(episode.support_labels))
        queries = np.bincount(episode.query_labels, minlength=episode.way)
        labels = torch.from_numpy(episode.support_labels).to(model.device)
        features: dict[bool, tuple[Tensor, Tensor]] = {}
        if plain_features is not None:
            features[False] = plain_features[episode.support], plain_features[episode.query]
        if any(v.adapt for v in variants):
            task = model.adapt(source.network_input(episode.support), labels, dtype=dtype, batch_size=batch_size)
            features[True] = task.support_features, task.features(source.network_input(episode.query), batch_size)
        for variant in variants:
            support_features, query_features = (f.to(model.device) for f in features[variant.adapt])
            with torch.no_grad():
                if model.projection is not None and variant.projection:
                    support_features, query_features = map(model.projection, (support_features, query_features))
                predicted = heads[variant](support_features, labels, query_features).argmax(1).cpu().numpy()
            right = predicted == episode.query_labels
            accuracies[variant].append(float(right.mean()))
            class_accuracies[variant].append(np.bincount(episode.query_labels, right, episode.way) / queries)
    return Scores(
        np.array(ways),
        np.concatenate(shots),
        {variant: np.array(values) for variant, values in accuracies.items()},
        {variant: np.concatenate(values) for variant, values in class_accuracies.items()},
    )


def markdown_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A Markdown table with columns padded to one width."""
    widths = [max(len(str(row[i])) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(str(c).ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])
