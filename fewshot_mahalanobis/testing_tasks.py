"""Few-shot tasks for :mod:`fewshot_mahalanobis.testing`: how they are drawn, and the same task told differently."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """Features of a few-shot task. Its ``repr`` is Python that makes it again.

    Attributes
    ----------
    support_features : Tensor of shape (n, d)
    support_labels : int64 Tensor of shape (n,)
        0..k-1, each at least once.
    query_features : Tensor of shape (m, d)
        Of the support features' dtype.
    """

    support_features: Tensor
    support_labels: Tensor
    query_features: Tensor

    def __repr__(self) -> str:
        tensors = (
            f"{name}=torch.tensor({tensor.tolist()}, dtype={tensor.dtype})" for name, tensor in vars(self).items()
        )
        return f"Task({', '.join(tensors)})"


def tasks(
    *,
    classes: tuple[int, int] = (1, 5),
    shots: tuple[int, int] = (1, 6),
    width: tuple[int, int] = (1, 10),
    scale: tuple[float, float] = (1e-6, 1e6),
    dtypes: Collection[torch.dtype] = _DTYPES,
) -> st.SearchStrategy[Task]:
    """Strategy of few-shot tasks, easy and awkward: a hypothesis strategy for ``@given``.

    Entries are small integers, floats in [-1, 1] or Gaussian; then features may become constant or linear combinations
    of others, examples (queries too) copies of others, and all may move far from the origin.

    Parameters
    ----------
    classes, shots, width : (int, int)
        Least and greatest k, n_k and d. Every class has its own number of shots.
    scale : (float, float)
        Least and greatest factor, drawn log-uniformly, on entries of the order of 1. Where the dtype cannot hold the
        product it is cut off at a quarter of the largest number.
    dtypes : collection of torch.dtype
        Of the features.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Task
        With one to four queries.
    """
    return _draw_task(classes, shots, width, scale, tuple(dtypes))


@st.composite
def _draw_task(
    draw: st.DrawFn,
    classes: tuple[int, int],
    shots: tuple[int, int],
    width: tuple[int, int],
    scale: tuple[float, float],
    dtypes: tuple[torch.dtype, ...],
) -> Task:
    counts = draw(st.lists(st.integers(*shots), min_size=classes[0], max_size=classes[1]))
    n, d = sum(counts), draw(st.integers(*width))
    rows = n + draw(st.integers(1, 4))
    integers = arrays(np.int8, (rows, d), elements=st.integers(-4, 4))
    floats = arrays(np.float64, (rows, d), elements=st.floats(-1, 1))
    gaussian = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).standard_normal((rows, d)))
    x = draw(st.one_of(integers, floats, gaussian)).astype(np.float64)

    row, column = st.integers(0, rows - 1), st.integers(0, d - 1)
    for target, first, second in draw(st.lists(st.tuples(column, column, column), max_size=2)):
        x[:, target] = 2 * x[:, first] - x[:, second]
    for target in draw(st.lists(column, max_size=2)):
        x[:, target] = x[0, target]
    for target, source in draw(st.lists(st.tuples(row, row), max_size=4)):
        x[target] = x[source]
    x += draw(st.sampled_from([0.0, 0.0, 100.0]))

    x *= 10.0 ** draw(st.floats(*np.log10(scale).tolist()))
    dtype = draw(st.sampled_from(dtypes))
    largest = torch.finfo(dtype).max / 4
    features = torch.from_numpy(x).clamp(-largest, largest).to(dtype)
    labels = np.random.default_rng(draw(st.integers(0, 2**16))).permutation(np.repeat(np.arange(len(counts)), counts))
    return Task(features[:n], torch.from_numpy(labels), features[n:])


def in_float64(task: Task) -> Task:
    """The task in float64."""
    return Task(task.support_features.double(), task.support_labels, task.query_features.double())


def at_unit_scale(task: Task) -> Task:
    """The task in float64, its largest entry 1."""
    task = in_float64(task)
    factor = 1 / max(largest_entry(task), torch.finfo(torch.float64).tiny)
    return Task(factor * task.support_features, task.support_labels, factor * task.query_features)


def shuffled(task: Task) -> Task:
    """The task with its examples in another order."""
    order = torch.randperm(len(task.support_labels), generator=fixed_generator())
    return Task(task.support_features[order], task.support_labels[order], task.query_features)


def renamed_labels(task: Task) -> tuple[Task, Tensor]:
    """The task with class j called names[j], and ``names`` (k,)."""
    names = torch.randperm(len(task.support_labels.unique()), generator=fixed_generator())
    return Task(task.support_features, names[task.support_labels], task.query_features), names


def moved(task: Task) -> Task:
    """The task moved by one vector, as long as its features."""
    shift = largest_entry(task) * torch.randn(
        task.query_features.shape[1], dtype=torch.float64, generator=fixed_generator()
    )
    return Task(task.support_features + shift, task.support_labels, task.query_features + shift)


def rotated(task: Task) -> Task:
    """The task turned by one orthogonal matrix."""
    d = task.query_features.shape[1]
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=fixed_generator())).Q
    return Task(task.support_features @ rotation, task.support_labels, task.query_features @ rotation)


def largest_entry(task: Task) -> float:
    """Largest entry of a feature, M."""
    return max(float(task.support_features.abs().max()), float(task.query_features.abs().max()))


def fixed_generator() -> torch.Generator:
    """Random numbers that are the same for every example, so that counterexamples stay ones."""
    return torch.Generator().manual_seed(0)
