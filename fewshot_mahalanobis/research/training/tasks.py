"""Training and validation tasks: the images of an episode, prepared in any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from fewshot_mahalanobis.research.data.datasets import open_training_source
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.meta_dataset import EVALUATION, TRAINING, VariableEpisodes
from fewshot_mahalanobis.research.episodes.sampling import Episodes, FixedEpisodes, SmallEpisodes, episode_rng
from fewshot_mahalanobis.research.training.augment import augment_task, camera_task, is_grey
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, image_size_at


class Task(NamedTuple):
    """Images and labels of one episode: images (n, 3, s, s) in [-1, 1], labels 0 to way - 1.

    ``classes`` are the task's classes, by their numbers among those of all training sources; empty in validation.
    """

    support_images: Tensor
    support_labels: Tensor
    query_images: Tensor
    query_labels: Tensor
    classes: Tensor

    def to(self, device: torch.device) -> Task:
        """The same task on a device."""
        return Task(*(part.to(device, non_blocking=True) for part in self))


def training_episodes(source: ImageSource, recipe: MetaTrainRecipe) -> Episodes:
    """Make the sampler of a recipe's training episodes."""
    if recipe.episodes == "variable":
        limits = replace(TRAINING, max_way=recipe.max_way, max_support=recipe.max_support, max_queries=recipe.queries)
        return VariableEpisodes(source, limits, seed=recipe.seed)
    if recipe.episodes == "fixed":
        return FixedEpisodes(source, recipe.way, recipe.shot, recipe.queries, seed=recipe.seed)
    return SmallEpisodes(source, recipe.queries, seed=recipe.seed)


def validation_episodes(source: ImageSource, recipe: MetaTrainRecipe) -> Episodes:
    """Make the sampler of a recipe's validation episodes: Meta-Dataset's for evaluation, or N-way K-shot.

    The seed is always 0, so that runs can be compared.
    """
    if recipe.episodes == "variable":
        return VariableEpisodes(source, EVALUATION)
    return FixedEpisodes(source, recipe.way, recipe.shot, recipe.queries)


class TrainingTasks(Dataset[Task]):
    """Training tasks by number: a pure function of (recipe, number), so that any worker can prepare them."""

    def __init__(self, sources: Sequence[ImageSource], recipe: MetaTrainRecipe, size: int) -> None:
        self.sources = sources
        self.recipe = recipe
        self.phases = recipe.phases or ((1.0, size),)
        self.episodes = [training_episodes(source, recipe) for source in sources]
        for episodes in self.episodes:
            episodes.draw(0)  # fail now if the source is too small, not in a worker
        self.grey = [(recipe.augment or recipe.camera) and is_grey(source) for source in sources]
        self.first_class: dict[str, int] = {}
        count = 0
        for name, source in zip(recipe.sources, sources, strict=True):
            if name not in self.first_class:
                self.first_class[name] = count
                count += len(source.class_names)

    @property
    def each_source(self) -> list[ImageSource]:
        """The sources, each once."""
        return [self.sources[self.recipe.sources.index(name)] for name in self.first_class]

    def __len__(self) -> int:
        return self.recipe.tasks

    def __getitem__(self, number: int) -> Task:
        rng = episode_rng(self.recipe.seed, number)
        which = int(rng.integers(len(self.sources)))
        episode = self.episodes[which].draw(number)
        order = np.arange(len(episode.support))
        if self.recipe.lite is not None:  # the first images are LITE's subset
            order = rng.permutation(order)
        images = self.sources[which].network_input(np.concatenate([episode.support[order], episode.query]))
        size = image_size_at(number / len(self), self.phases)
        if self.recipe.sizes:
            size = int(rng.choice(self.recipe.sizes))
        if self.recipe.camera and not self.grey[which] and rng.random() < 0.5:
            images = camera_task(images, size, rng)
        elif self.recipe.augment:
            images = augment_task(images, size, self.grey[which], rng)
        task = _task(images, episode.support_labels[order], episode.query_labels, size)
        classes = np.unique(self.sources[which].labels[episode.support])
        return task._replace(classes=torch.from_numpy(classes + self.first_class[self.recipe.sources[which]]))


class ValidationTasks(Dataset[Task]):
    """Validation tasks of one source, by episode number."""

    def __init__(self, source: ImageSource, recipe: MetaTrainRecipe, size: int) -> None:
        self.source = source
        self.size = size
        self.count = recipe.validation_episodes
        self.episodes = validation_episodes(source, recipe)
        self.episodes.draw(0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Task:
        episode = self.episodes.draw(number)
        images = self.source.network_input(np.concatenate([episode.support, episode.query]))
        return _task(images, episode.support_labels, episode.query_labels, self.size)


def open_tasks(recipe: MetaTrainRecipe, size: int, *, lazy: bool) -> tuple[TrainingTasks, dict[str, ValidationTasks]]:
    """Open every source of a recipe once, for its largest images; the model's have this ``size``.

    Returns
    -------
    training : TrainingTasks
    validation : dict of str to ValidationTasks
        By source.
    """
    largest = max(size, *recipe.sizes, 0)
    sources = {
        source: open_training_source(source, root=recipe.root, size=largest, lazy=lazy)
        for source in dict.fromkeys(recipe.sources + recipe.validation)
    }
    training = TrainingTasks([sources[name] for name in recipe.sources], recipe, size)
    return training, {name: ValidationTasks(sources[name], recipe, size) for name in recipe.validation}


def _task(images: Tensor, support_labels: NDArray[np.int64], query_labels: NDArray[np.int64], size: int) -> Task:
    """Make a task of support and query images (n + m, 3, h, w), resized to ``size``."""
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    images = images.contiguous(memory_format=torch.channels_last)
    support, query = images.split([len(support_labels), len(query_labels)])
    none = torch.empty(0, dtype=torch.int64)
    return Task(support, torch.from_numpy(support_labels), query, torch.from_numpy(query_labels), none)
