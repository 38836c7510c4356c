"""ONNX Runtime as the engine of a network on a processor, where that is faster than PyTorch.

In float32 its convolutions take half to four fifths of the time of PyTorch's on a processor with AVX2 alone. It gets
the graph of :mod:`~fewshot_mahalanobis.networks.template` and the folded weights from memory, so a task costs one
session, below 0.1 s. A session has one thread; images are shared among the cores as for PyTorch, so an image has the
same features whatever their number.
"""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.networks.template import as_array, has_template, network_graph

ONNX_RUNTIME, PYTORCH = "ONNX Runtime", "PyTorch"
#: A session is worth its time from so many pixels on: ten images of 224 pixels.
_WORTHWHILE = 10 * 224 * 224


def choose_engine(network: nn.Module, device: torch.device, dtype: torch.dtype, pixels: int | None = None) -> str:
    """Return the engine of a folded network: :data:`ONNX_RUNTIME` or :data:`PYTORCH`.

    ONNX Runtime runs networks that have a template, in float32 on processors of the x86-64 family, for which its
    convolutions are written, if it is installed (the extra ``fast``).

    Parameters
    ----------
    network : nn.Module
    device : torch.device
    dtype : torch.dtype
    pixels : int, optional
        How many pixels of images it is for, if that is known: for a few images no session is made.
    """
    suits = device.type == "cpu" and dtype == torch.float32 and has_template(network)
    pays = platform.machine().lower() in ("x86_64", "amd64") and (pixels is None or pixels >= _WORTHWHILE)
    return ONNX_RUNTIME if suits and pays and find_spec("onnxruntime") is not None else PYTORCH


def engine_version(engine: str) -> str:
    """Name and version of an engine, as features of different ones must not be mixed."""
    if engine == PYTORCH:
        return f"{engine} {torch.__version__}"
    import onnxruntime

    return f"{engine} {onnxruntime.__version__}"


class OnnxRuntime:
    """A folded network in ONNX Runtime: images (n, 3, h, w) in [-1, 1] -> features (n, d), float32, on the CPU.

    Any number of threads may call it at once. Pickles and copies hold the network, and make their own session.

    Parameters
    ----------
    network : nn.Module
        One that has a template.

    Attributes
    ----------
    cpu_pixels : int
        Pixels at a time on one core, 2 images of 224 pixels: no number is faster, and more take more memory.
    """

    cpu_pixels = 2 * 224 * 224

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._session: tuple[torch.Size, Any, Any] | None = None  # size of images, session, weights that it points to

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the features, without gradients."""
        features: Tensor = torch.from_numpy(
            self._session_for(images.shape[2:]).run(None, {"images": as_array(images)})[0]
        )
        return features

    def _session_for(self, size: torch.Size) -> Any:
        """The session for images of this size. Threads that need the first one at the same time make one each."""
        known = self._session
        if known is None or known[0] != size:
            self._session = known = size, *_session(self.network, *size)
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"network": self.network, "_session": None}


def _session(network: nn.Module, height: int, width: int) -> tuple[Any, Any]:
    """A session, and the weights that it was given."""
    import onnxruntime

    graph, options = network_graph(network, height, width), onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    weights = [onnxruntime.OrtValue.ortvalue_from_numpy(as_array(weight)) for weight in graph.weights.values()]
    options.add_external_initializers([*graph.weights], weights)
    model = graph.model(with_weights=False)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]), weights
