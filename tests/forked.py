"""Forked processes that compute beside each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool

import pytest
import torch

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


@contextmanager
def forked_pool(processes: int) -> Iterator[Pool]:
    """Processes with one thread each: a forked child has none of its parent's OpenMP threads and would wait for them.

    They end by themselves. ``terminate`` would wait for ever where a library has set a handler of SIGTERM before.
    """
    with multiprocessing.get_context("fork").Pool(processes, torch.set_num_threads, (1,)) as pool:
        yield pool
        pool.close()
        pool.join()
