"""The device and the precision of a network."""

from __future__ import annotations

import copy
import itertools
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from fewshot_mahalanobis.networks.extractor import FeatureExtractor
from fewshot_mahalanobis.switches import SwitchedOff


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device of this name, with its index: "cuda:0" for "cuda".

    "auto" is CUDA if it is available, else the CPU. ValueError if no tensor can be created on the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.empty(0, device=device).device
        if chosen.type == "meta":
            raise ValueError("device 'meta' computes nothing: its tensors have no values. Choose 'cpu' or 'cuda'")
        return chosen
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: torch was not compiled for it
        raise ValueError(f"device {device!r} cannot be used here: {error}") from error


def device_of(module: nn.Module | FeatureExtractor) -> torch.device:
    """Device of a module's weights."""
    module = cast(nn.Module, module)
    return next(itertools.chain(module.parameters(), module.buffers())).device


def choose_dtype(precision: str, network: FeatureExtractor) -> torch.dtype:
    """Precision of a network's convolutions on the device where it is, see :func:`native_dtype`.

    "auto" is float32 for networks other than those of the embedded checkpoints: the effect of bfloat16 on their
    predictions has not been measured.
    """
    measured = network.bfloat16_measured
    return native_dtype("float32" if precision == "auto" and not measured else precision, device_of(network))


def native_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Precision of convolutions on a device.

    Parameters
    ----------
    precision : {"auto", "float32", "bfloat16"}
        "auto" is bfloat16 where the device computes in it natively, else float32.
    device : torch.device

    Raises
    ------
    ValueError
        ``precision`` is something else.

    Warns
    -----
    UserWarning
        ``precision`` is "bfloat16" and the processor only emulates it, which is slower than float32.
    """
    check_precision(precision)
    native = native_bfloat16(device)
    if precision == "bfloat16" and not native and device.type == "cpu":
        # oneDNN computes in bfloat16 with any AVX-512; without it PyTorch falls back to its own slow convolutions.
        factor = 2 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 10
        warnings.warn(
            f"this processor has no instructions for bfloat16: convolutions are about {factor} times slower than in "
            'float32. Choose the precision "auto" or "float32"',
            stacklevel=2,
        )
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and native) else torch.float32


def check_precision(precision: str) -> None:
    """Raise ValueError unless ``precision`` is "auto", "float32" or "bfloat16"."""
    if precision not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"precision must be 'auto', 'float32' or 'bfloat16', got {precision!r}")


def precision_name(dtype: torch.dtype) -> str:
    """Name of a precision in recipes and results: "float32" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for convolutions in bfloat16, rather than emulating them.

    Hiding AVX-512 by the environment variable ONEDNN_MAX_CPU_ISA=AVX2 makes this False, as convolutions then are slow.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # follows ONEDNN_MAX_CPU_ISA; true of any AVX-512
        return False
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    # Older versions of torch have these functions instead, some of them only one.
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, question, lambda: False)() for question in questions)


_CUDNN_OFF = SwitchedOff(torch.backends.cudnn, "enabled")


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, compute the convolutions of this block, and of its backward pass, by PyTorch's own kernels.

    cuDNN plans each convolution anew for another number of images, which takes seconds for a network of depthwise and
    1 x 1 convolutions. These do not need cuDNN (benchmarks/results/speed.md). PyTorch has no such setting for one
    convolution and its backward pass, so it holds for the process while any thread is in such a block.
    """
    return _CUDNN_OFF if device.type == "cuda" else nullcontext()


def on_cpu(value: Any) -> Any:
    """Copy a module to the CPU if it is on another device; return anything else as it is."""
    elsewhere = isinstance(value, nn.Module) and any(p.device.type != "cpu" for p in value.parameters())
    return copy.deepcopy(value).cpu() if elsewhere else value
