"""Gradients in bounded memory (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result], *arguments: object) -> Result:
    """``function(*arguments)``, keeping no activations: they are computed again when the gradient is."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
