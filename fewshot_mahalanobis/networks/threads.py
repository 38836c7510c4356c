"""The cores of a processor, shared by images rather than by layers.

With all cores in each layer, every layer ends when the slowest core does. That is slow where the layers are small, and
very slow where other work takes a core away. So each batch runs on one core from the first layer to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor


def map_in_threads(function: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
    """``[function(batch) for batch in batches]`` without gradients, a batch on each core.

    As many run at once as the calling thread has intra-op threads (``torch.get_num_threads()``), which stay as they
    are. A single batch keeps all of them within its layers. So does every batch where the caller has one thread, as in
    the workers of joblib and ``DataLoader``.
    """
    threads = min(torch.get_num_threads(), len(batches))
    with torch.no_grad():
        if threads < 2:
            return [function(batch) for batch in batches]
    with ThreadPoolExecutor(threads, thread_name_prefix="network", initializer=_one_thread_each) as pool:
        return list(pool.map(torch.no_grad()(function), batches))


def _one_thread_each() -> None:
    """Give the calling thread one intra-op thread. ``torch.set_num_threads`` would change the whole process."""
    torch.get_num_threads()  # in a new thread PyTorch would otherwise set its number later, over this one
    _openmp().limit(limits=1)


@cache
def _openmp() -> Any:
    return ThreadpoolController().select(user_api="openmp")
