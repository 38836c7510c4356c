"""The cores of a processor, shared by images rather than by layers.

With all cores in each operation, every one of them ends when the slowest core does. That is slow where operations are
small, and very slow where other work takes a core away: the cores that are ready wait at full speed. So each batch of
images runs on one core from the first layer to the last, and what is small has one core too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import local
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

Batch = TypeVar("Batch")
Result = TypeVar("Result")

#: One core takes 0.2 s to fit a head to this many numbers, 650 examples of 1,600 features.
_SMALL = 2**20

_caller = local()


def cores() -> int:
    """How many cores the calling thread has: its intra-op threads, or those that it had before :func:`one_thread`."""
    return getattr(_caller, "cores", None) or torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Give the calling thread one intra-op thread, around operations that are too small to be shared.

    ``torch.set_num_threads`` would change the whole process. :func:`map_in_threads` has all cores here too.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    with _openmp().limit(limits=1):
        _caller.cores = before
        try:
            yield
        finally:
            _caller.cores = None


def one_thread_if_small(*features: Tensor) -> AbstractContextManager[None]:
    """:func:`one_thread` around linear algebra on few features (n, d); that on many is shared by the cores."""
    return one_thread() if sum(each.numel() for each in features) <= _SMALL else nullcontext()


def map_in_threads(function: Callable[[Batch], Result], batches: Sequence[Batch]) -> list[Result]:
    """``[function(batch) for batch in batches]`` without gradients, a batch on each core.

    As many run at once as the calling thread has :func:`cores`, each with one intra-op thread and the caller's
    autocast. Where the caller has one core, as in the workers of joblib and ``DataLoader``, so it is here.
    """
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def alone(batch: Batch) -> Result:
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=enabled):
            return function(batch)

    threads = min(cores(), len(batches))
    if threads < 2:
        with one_thread():
            return [alone(batch) for batch in batches]
    with ThreadPoolExecutor(threads, thread_name_prefix="network", initializer=_keep_to_one_thread) as pool:
        return list(pool.map(alone, batches))


def _keep_to_one_thread() -> None:
    torch.get_num_threads()  # in a new thread PyTorch would otherwise set its number later, over this one
    _openmp().limit(limits=1)


@cache
def _openmp() -> Any:
    return ThreadpoolController().select(user_api="openmp")
