"""Accuracy of a model over the episodes of one source, for several variants on the same episodes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from fewshot_mahalanobis.heads import HEADS, Head, MahalanobisHead, make_head
from fewshot_mahalanobis.networks.devices import choose_dtype, device_of
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedNetwork, AdaptedTask
from fewshot_mahalanobis.research.baselines import METHODS
from fewshot_mahalanobis.research.baselines.baseline import EpisodicModel
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import Episode, evaluation_episodes
from fewshot_mahalanobis.research.evaluation.result import Accuracy


class Variant(NamedTuple):
    """One way of using a model: with or without adaptation, and with which head.

    The head that the model was trained with keeps its weights; "mahalanobis" has the settings in the model's config.

    Attributes
    ----------
    adapt : bool
    head : str or Head
        A name of ``HEADS`` or of ``METHODS``, or a head of your own.
    task_covariance : bool
        False leaves the task covariance out of equation 3 (lambda_k = 1): the "-TR" ablation.
    projection : bool
        False leaves out the projection of a "+P" model.
    """

    adapt: bool
    head: str | Head[Any]
    task_covariance: bool = True
    projection: bool = True

    def as_trained(self, config: Mapping[str, Any]) -> bool:
        """Whether it uses the head that a model with these settings was trained with, unchanged."""
        return bool(self.head == config["head"] and self.task_covariance and self.projection)

    @property
    def title(self) -> str:
        """Heading of its column in a table."""
        parts = ["adapted" if self.adapt else "not adapted"]
        if isinstance(self.head, Head):
            parts.append(self.head.title)
        elif self.head != "mahalanobis":
            parts.append(HEADS[self.head].title if self.head in HEADS else self.head)
        parts += ["-TR"] * (not self.task_covariance) + ["no projection"] * (not self.projection)
        return ", ".join(parts)


class UnadaptedFeatures:
    """Features of a source's images from the network without adaptation: ``features[indices]`` -> (len(indices), d).

    Each image goes through the network once, when its features are first needed, ``batch_size`` at a time. The features
    are stored in a temporary file, so memory does not grow with the source.
    """

    def __init__(
        self, model: EpisodicModel, source: ImageSource, *, dtype: torch.dtype = torch.float32, batch_size: int = 128
    ) -> None:
        self._network = AdaptedNetwork(model.feature_extractor, None, dtype, model.projection)
        self._source = source
        self._batch_size = batch_size
        n = len(source.images)
        self._known = np.zeros(n, dtype=bool)
        with tempfile.TemporaryFile() as file:  # lives as long as the map
            self._features = np.memmap(file, np.float32, "w+", shape=(n, self._network.out_features))

    def __getitem__(self, indices: NDArray[np.int64]) -> Tensor:
        """Features of images by their indices, float32, on the CPU."""
        missing = np.unique(indices[~self._known[indices]])
        for start in range(0, len(missing), self._batch_size):
            batch = missing[start : start + self._batch_size]
            features = self._network.unprojected_features(self._source.network_input(batch), self._batch_size)
            self._features[batch] = features.cpu().numpy()
            self._known[batch] = True
        return torch.from_numpy(np.array(self._features[indices]))


def head_of(model: EpisodicModel, variant: Variant) -> Head[Any]:
    """Return the head of a variant, on the model's device.

    ValueError if there is no such head, it has weights and the model was not trained with it, or it has no task
    covariance to leave out.
    """
    head, trained_with = variant.head, model.config["head"]
    if isinstance(head, str) and head != trained_with:
        if head in METHODS:
            return METHODS[head]().to(device_of(model))
        if trained_with in METHODS:
            raise ValueError(f"this network was trained with the method {trained_with!r}, not with {head!r}")
    if variant.task_covariance:
        return make_head(head, model.config, model.head).to(device_of(model))
    if head != MahalanobisHead.name:
        raise ValueError(f"the head {head!r} has no task covariance to leave out")
    return make_head(head, {**model.config, "task_covariance": False}).to(device_of(model))


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
    precision: str = "auto",
    batch_size: int = 128,
    plain_features: UnadaptedFeatures | Tensor | None = None,
    progress: bool = False,
) -> dict[Variant, NDArray[np.float64]]:
    """Measure the accuracy of every variant in every episode.

    Parameters
    ----------
    model : SimpleCNAPS
    source : ImageSource
    variants : iterable of Variant
        Evaluated on the same episodes.
    way, shot, queries : int
        Classes per episode, support and query images per class.
    episodes : int
        Episode ``i`` is a function of (seed, i): models are compared on the same episodes.
    seed : int
    precision : {"auto", "float32", "bfloat16"}
        Precision of the convolutions. "auto" is bfloat16 for the embedded checkpoints' networks where the processor or
        GPU computes in it natively, else float32.
    batch_size : int
        Images that go through the network at a time.
    plain_features : UnadaptedFeatures or Tensor of shape (n, d), optional
        Features of this source without adaptation, shared between calls.
    progress : bool
        Show a progress bar.

    Returns
    -------
    dict of Variant to float64 array of shape (episodes,)
        Share of correct queries in each episode.
    """
    accuracies = evaluate_episodes(
        model,
        source,
        variants,
        evaluation_episodes(source, way, shot, queries, seed=seed),
        episodes,
        dtype=choose_dtype(precision, model.feature_extractor),
        batch_size=batch_size,
        plain_features=plain_features,
        description=f"{source.name} {way}-way {shot}-shot" if progress else None,
    )
    return {variant: np.array(accuracy.by_episode) for variant, accuracy in accuracies.items()}


def evaluate_episodes(
    model: EpisodicModel,
    source: ImageSource,
    variants: Iterable[Variant],
    draw: Callable[[int], Episode],
    episodes: int,
    *,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 128,
    plain_features: UnadaptedFeatures | Tensor | None = None,
    description: str | None = None,
) -> dict[Variant, Accuracy]:
    """Measure the accuracy of every variant over the episodes ``draw(0)`` to ``draw(episodes - 1)``.

    The other arguments are those of :func:`evaluate_source`. ``description`` is the text of a progress bar; without
    it there is none. ValueError if a variant has no head, see :func:`head_of`.
    """
    variants = tuple(dict.fromkeys(variants))
    heads = {variant: head_of(model, variant).to(device_of(model)) for variant in variants}
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
        logits = _episode_logits(model, source, episode, heads, plain_features, dtype, batch_size)
        for variant in variants:
            predicted = logits[variant].argmax(1).cpu().numpy()
            right = predicted == episode.query_labels
            accuracies[variant].append(float(right.mean()))
            class_accuracies[variant].append(np.bincount(episode.query_labels, right, episode.way) / queries)
    return {
        variant: Accuracy.from_classes(
            np.array(accuracies[variant]),
            np.array(ways),
            np.concatenate(class_accuracies[variant]),
            np.concatenate(shots),
        )
        for variant in variants
    }


@torch.no_grad()
def _episode_logits(
    model: EpisodicModel,
    source: ImageSource,
    episode: Episode,
    heads: Mapping[Variant, Head[Any]],
    plain_features: UnadaptedFeatures | Tensor | None,
    dtype: torch.dtype,
    batch_size: int,
) -> dict[Variant, Tensor]:
    """Logits (m, k) of an episode's queries, by the head of every variant."""
    labels = torch.from_numpy(episode.support_labels).to(device_of(model))
    features: dict[bool, tuple[Tensor, Tensor]] = {}
    task: AdaptedTask | None = None
    if plain_features is not None:
        features[False] = plain_features[episode.support], plain_features[episode.query]
    if any(variant.adapt for variant in heads):
        images, query_images = map(source.network_input, (episode.support, episode.query))
        task = model.adapt(images, labels, dtype=dtype, batch_size=batch_size)
        support = task.fitted_head.support.adapted
        if model.projection is not None:
            support = task.network.unprojected_features(images, batch_size)
        features[True] = support, task.network.unprojected_features(query_images, batch_size)
    logits = {}
    for variant, head in heads.items():
        support, queries = (f.to(device_of(model)) for f in features[variant.adapt])
        if model.projection is not None and variant.projection:
            support, queries = model.projection(support), model.projection(queries)
        if task is not None and variant.adapt and variant.as_trained(model.config):
            logits[variant] = task.fitted_head.logits(queries)  # gradient steps may have moved the head too
        else:
            logits[variant] = head(support, labels, queries)
    return logits
