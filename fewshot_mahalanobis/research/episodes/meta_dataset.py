"""Episodes of variable way and shot, as Meta-Dataset samples them.

Triantafillou et al., "Meta-Dataset: A Dataset of Datasets for Learning to Learn from Few Examples", ICLR 2020,
section 3.2: first the classes, then the number of images of each. Where paper and published code
(github.com/google-research/meta-dataset, ``meta_dataset/data/sampling.py``) differ, this follows the code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import Episode, draw_images, episode_rng

#: Nodes of ImageNet's hierarchy with more classes below them are not drawn; every class is below some smaller node.
MAX_LEAVES = 392


@dataclass(frozen=True)
class EpisodeLimits:
    """Parameters of Meta-Dataset's sampling; the defaults are the published ones.

    Attributes
    ----------
    min_way, max_way : int
        Classes per episode.
    max_queries : int
        Query images per class.
    max_support : int
        Support images per episode.
    max_share : int
        Contribution of a class to the size of the support set. Only the sum is bounded: in an imbalanced episode a
        class can have more support images than this.
    log_weights : (float, float)
        Bounds of the uniform alpha; a class's share of the support set is proportional to its size times exp(alpha).
    """

    min_way: int = 5
    max_way: int = 50
    max_queries: int = 10
    max_support: int = 500
    max_share: int = 100
    log_weights: tuple[float, float] = (math.log(0.5), math.log(2.0))

    def __post_init__(self) -> None:
        if not 1 < self.min_way <= self.max_way <= self.max_support:
            raise ValueError(
                f"need 2 <= min_way <= max_way <= max_support, got {self.min_way}, {self.max_way}, {self.max_support}"
            )
        if self.max_queries < 1 or self.max_share < 1:
            raise ValueError(f"max_queries and max_share must be positive, got {self.max_queries}, {self.max_share}")


#: For evaluation, as in the paper (Bateni et al., CVPR 2020, after CNAPS: Requeima et al., NeurIPS 2019).
EVALUATION = EpisodeLimits()
#: For meta-training, as in the paper.
TRAINING = EpisodeLimits(max_way=40, max_support=400)


class VariableEpisodes:
    """Meta-Dataset's episodes of one source, of variable way and shot.

    If the source has a hierarchy, the classes of an episode are from one alphabet, or below one synset. ValueError if a
    class has only one image, or there are fewer than ``min_way`` classes (in an alphabet, or below every synset).
    """

    def __init__(self, source: ImageSource, limits: EpisodeLimits = EVALUATION, *, seed: int = 0) -> None:
        self._source_name = source.name
        self._limits = limits
        self._seed = seed
        self._images = source.indices_of_class()
        small = [name for name, images in zip(source.class_names, self._images, strict=True) if len(images) < 2]
        if small:
            raise ValueError(
                f"{source.name}: {len(small)} classes have fewer than 2 images, one for support and one for query: "
                f"{', '.join(map(repr, small[:5]))}{', …' * (len(small) > 5)}; leave them out"
            )
        self._whole = source.hierarchy is not None and source.hierarchy.whole
        self._groups = [np.arange(len(self._images))]
        if source.hierarchy is not None:
            self._groups = [np.array(group) for group in source.hierarchy.groups]
        if self._whole:
            self._groups = [group for group in self._groups if limits.min_way <= len(group) <= MAX_LEAVES]
        fewest = min(map(len, self._groups), default=0)
        if fewest < limits.min_way:
            where = "a group of its classes" if source.hierarchy is not None else "it"
            raise ValueError(f"{source.name}: {where} has {fewest} classes, fewer than min_way = {limits.min_way}")

    def draw(self, index: int) -> Episode:
        """Episode ``index``."""
        rng = episode_rng(self._source_name, self._seed, index)
        classes = draw_classes(self._groups, self._whole, self._limits, rng)
        images = [self._images[k] for k in classes]
        sizes = np.array([len(members) for members in images])
        queries = queries_per_class(sizes, self._limits)
        return draw_images(images, draw_shots(sizes, queries, self._limits, rng), queries, rng)


def draw_classes(
    groups: Sequence[NDArray[np.int64]], whole: bool, limits: EpisodeLimits, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Step 1: the classes of an episode.

    All groups are equally likely. With ``whole``, all classes of the group, or ``max_way`` random ones if there are
    more; else a uniform number of them from ``min_way`` to ``max_way`` or the size of the group.
    """
    group = groups[int(rng.integers(len(groups)))]
    most = min(limits.max_way, len(group))
    if whole and len(group) == most:
        return group
    way = most if whole else int(rng.integers(limits.min_way, most + 1))
    return rng.choice(group, way, replace=False)


def queries_per_class(sizes: NDArray[np.int64], limits: EpisodeLimits) -> int:
    """Step 2a: q = min(10, half of the smallest class), equal for all classes.

    ``sizes`` (way,) are the image counts of the episode's classes, 2 or more.
    """
    return int(min(limits.max_queries, sizes.min() // 2))


def draw_shots(
    sizes: NDArray[np.int64], queries: int, limits: EpisodeLimits, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Steps 2b and 2c: the support images of each class, (way,).

    The size of the support set is min(500, sum_c ceil(beta min(100, size_c - q))), with one beta uniform in (0, 1].
    Each class gets one image and its share of the rest, rounded down and limited to its remaining images. Shares are
    proportional to exp(alpha_c) size_c, with alpha_c uniform in [log 1/2, log 2).
    """
    available = sizes - queries
    beta = rng.uniform()  # in [0, 1): floor(beta x) + 1 is ceil(beta x) for beta in (0, 1]
    support = min(limits.max_support, int((np.floor(beta * np.minimum(limits.max_share, available)) + 1).sum()))
    weights = sizes * np.exp(rng.uniform(*limits.log_weights, size=len(sizes)))
    shares = np.floor(weights / weights.sum() * (support - len(sizes))).astype(np.int64)
    return np.minimum(1 + shares, available)
