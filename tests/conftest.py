"""Tests compute in one thread, alone or side by side (pytest-xdist), and so do the processes that they start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before PyTorch is imported


@pytest.fixture(scope="module")
def narrow_resnet18() -> Iterator[None]:
    """As :func:`tests.tiny.narrow`, from here to the end of the module."""
    from tests.tiny import narrow

    with narrow():
        yield
