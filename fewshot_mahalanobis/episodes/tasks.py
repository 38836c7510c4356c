"""Training and validation tasks: an episode's indices become images, in whatever process asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from fewshot_mahalanobis.episodes.meta_dataset import EVALUATION, TRAINING, VariableEpisodes
from fewshot_mahalanobis.episodes.sampling import (
    Episode,
    FixedEpisodes,
    draw_episode,
    draw_training_shots,
    episode_rng,
)
from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.training.camera import is_grey, one_camera
from fewshot_mahalanobis.training.recipes import MetaTrainRecipe
from fewshot_mahalanobis.training.run import image_size_at


class Task(NamedTuple):
    """One episode: images (n, 3, s, s) in [-1, 1], labels 0 to way - 1."""

    support_images: Tensor
    support_labels: Tensor
    query_images: Tensor
    query_labels: Tensor

    def to(self, device: torch.device) -> Task:
        """The same task on a device."""
        return Task(*(part.to(device, non_blocking=True) for part in self))


class Episodes(Protocol):
    """Index -> episode."""

    def draw(self, index: int) -> Episode:
        """Episode ``index``."""


class SmallEpisodes:
    """Episodes like those that a user brings: 5 to 10 ways, 1 to 6 shots; a function of source name, seed and index."""

    def __init__(self, source: ImageSource, queries: int, *, seed: int = 0) -> None:
        self.source_name = source.name
        self.seed = seed
        self._classes = source.indices_of_class()
        self._queries = queries

    def draw(self, index: int) -> Episode:
        """Episode ``index``."""
        rng = episode_rng(self.source_name, self.seed, index)
        return draw_episode(self._classes, draw_training_shots(self._classes, rng), self._queries, rng)


def training_episodes(source: ImageSource, recipe: MetaTrainRecipe) -> Episodes:
    """The episodes of one source that a recipe trains on."""
    if recipe.episodes == "variable":
        limits = replace(TRAINING, max_way=recipe.max_way, max_support=recipe.max_support, max_queries=recipe.queries)
        return VariableEpisodes(source, limits, seed=recipe.seed)
    if recipe.episodes == "fixed":
        return FixedEpisodes(source, recipe.way, recipe.shot, recipe.queries, seed=recipe.seed)
    return SmallEpisodes(source, recipe.queries, seed=recipe.seed)


def validation_episodes(source: ImageSource, recipe: MetaTrainRecipe) -> Episodes:
    """The episodes of one source that a recipe is judged on: Meta-Dataset's for evaluation, or N-way K-shot ones.

    The seed is 0 whatever the recipe's, so that runs can be compared.
    """
    if recipe.episodes == "variable":
        return VariableEpisodes(source, EVALUATION)
    return FixedEpisodes(source, recipe.way, recipe.shot, recipe.queries)


class TrainingTasks(Dataset[Task]):
    """Task number -> task; a pure function of (seed, number), so any worker of any process may make it."""

    def __init__(self, sources: Sequence[ImageSource], recipe: MetaTrainRecipe, size: int) -> None:
        self.sources = sources
        self.recipe = recipe
        self.phases = recipe.phases or ((1.0, size),)
        self.episodes = [training_episodes(source, recipe) for source in sources]
        for episodes in self.episodes:
            episodes.draw(0)  # what a source lacks is said now, not in a worker
        self.grey = [recipe.augment and is_grey(source) for source in sources]

    def __len__(self) -> int:
        return self.recipe.tasks

    def __getitem__(self, number: int) -> Task:
        rng = episode_rng(self.recipe.seed, number)
        which = int(rng.integers(len(self.sources)))
        episode = self.episodes[which].draw(number)
        order = np.arange(len(episode.support))
        if self.recipe.lite is not None:  # the first images are LITE's subset; nothing else depends on the order
            order = rng.permutation(order)
        images = self.sources[which].network_input(np.concatenate([episode.support[order], episode.query]))
        size = image_size_at(number / len(self), self.phases)
        if self.recipe.augment:
            images = one_camera(images, size, self.grey[which], rng)
        return _task(images, episode.support_labels[order], episode.query_labels, size)


class ValidationTasks(Dataset[Task]):
    """Episode number -> task of one source."""

    def __init__(self, source: ImageSource, recipe: MetaTrainRecipe) -> None:
        self.source = source
        self.count = recipe.validation_episodes
        self.episodes = validation_episodes(source, recipe)
        self.episodes.draw(0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Task:
        episode = self.episodes.draw(number)
        images = self.source.network_input(np.concatenate([episode.support, episode.query]))
        return _task(images, episode.support_labels, episode.query_labels, images.shape[-1])


def _task(images: Tensor, support_labels: NDArray[np.int64], query_labels: NDArray[np.int64], size: int) -> Task:
    """Support images, then query images (n + m, 3, h, w) and their labels -> a task with images of one side."""
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    images = images.contiguous(memory_format=torch.channels_last)
    support, query = images.split([len(support_labels), len(query_labels)])
    return Task(support, torch.from_numpy(support_labels), query, torch.from_numpy(query_labels))
