"""Few-shot tasks of features, drawn from Gaussians."""

from __future__ import annotations

import torch
from torch import Tensor


def make_task(
    seed: int, shots: list[int], d: int, queries: int = 20, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw shuffled support features and labels, and queries, from one Gaussian a class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(shots)).repeat_interleave(torch.tensor(shots))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    centres = 3 * torch.randn(len(shots), d, generator=generator)
    support = centres[labels] + torch.randn(len(labels), d, generator=generator)
    of_queries = torch.randint(len(shots), (queries,), generator=generator)
    query = centres[of_queries] + torch.randn(queries, d, generator=generator)
    return (scale * support).to(dtype), labels, (scale * query).to(dtype)
