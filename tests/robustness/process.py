"""The state of the process: all that a call must leave as it was, and what a caller may have set."""

from __future__ import annotations

import copy
import locale
import logging
import os
import random
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile


def process_state() -> dict[str, Any]:
    """Everything global that a numerical library might change in passing."""
    import matplotlib

    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "NumPy's random state": [np.asarray(part).tolist() for part in np.random.get_state()],  # noqa: NPY002
        "random's state": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "convolutions": (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.mkldnn.enabled,
        ),
        "printing of tensors": copy.copy(vars(torch._tensor_str.PRINT_OPTS)),
        "warning filters": list(warnings.filters),
        "NumPy's errors": np.geterr(),
        "NumPy's printing": np.get_printoptions(),
        "matplotlib's settings": {
            # past rcParams's own look-up, which would choose a backend
            key: dict.__getitem__(matplotlib.rcParams, key)
            for key in matplotlib.rcParams
        },
        "Pillow's limits": (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "import path": list(sys.path),
        "recursion limit": sys.getrecursionlimit(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.disabled),
        "locale": locale.setlocale(locale.LC_ALL),
        "sockets": socket.getdefaulttimeout(),
        "hooks": (sys.excepthook, sys.displayhook),
    }


@contextmanager
def process_unchanged() -> Iterator[None]:
    before = process_state()
    yield
    after = process_state()
    assert [name for name in before if before[name] != after[name]] == []


@contextmanager
def other_process_state() -> Iterator[None]:
    """Other seeds, no gradients, deterministic algorithms: what a caller may have set."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002
    random.seed(123)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
}
