"""Graphs in the form of ONNX, and those of the embedded networks: layers without weights, and the weights by name.

The graph of a network is the same for every task but for its weights, so it is written down once, here. An export
stores the weights in it (:mod:`~fewshot_mahalanobis.export.graph`), ONNX Runtime takes them from memory. A file of ONNX
is a message of Protocol Buffers. The few kinds of messages that a graph needs are written here, so that neither the
package ``onnx`` nor PyTorch's exporter is needed to run a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fewshot_mahalanobis.networks.efficientnet import FoldedBottleneck, FoldedLite0
from fewshot_mahalanobis.networks.extractor import FeatureExtractor
from fewshot_mahalanobis.networks.folding import FoldedConv
from fewshot_mahalanobis.networks.pooling import Pooling, position_weights
from fewshot_mahalanobis.networks.resnet import FoldedBlock, FoldedResNet18

#: Versions of ONNX's operations and of its files.
OPSET, IR_VERSION = 18, 10
#: Types of numbers in ONNX.
FLOAT32, UINT8, INT64 = (np.dtype(kind) for kind in (np.float32, np.uint8, np.int64))
_NUMBERS = {FLOAT32: 1, UINT8: 2, INT64: 7}
#: Activations of folded convolutions as operations, and their bounds.
_ACTIVATIONS: dict[str, tuple[str, Sequence[float]]] = {"relu": ("Relu", ()), "relu6": ("Clip", (0.0, 6.0))}

#: Sizes of a tensor; one that varies has a name.
Shape = Sequence[int | str]


class Graph:
    """Operations of ONNX in the order in which they run, added one by one.

    Parameters
    ----------
    name : str, optional
        What the names of its values begin with. Branches of a graph need different ones.

    Attributes
    ----------
    inputs, outputs : dict of str to (dtype, Shape)
    weights : dict of str to Tensor
        By name; a file may leave them out.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: dict[str, tuple[np.dtype[Any], Shape]] = {}
        self.outputs: dict[str, tuple[np.dtype[Any], Shape]] = {}
        self.weights: dict[str, Tensor] = {}
        self._nodes: list[bytes] = []
        self._constants: dict[str, bytes] = {}

    def input(self, name: str, dtype: np.dtype[Any], shape: Shape) -> str:
        """Add an input; returns its name."""
        self.inputs[name] = dtype, shape
        return name

    def output(self, name: str, value: str, dtype: np.dtype[Any], shape: Shape) -> None:
        """Make a value an output."""
        self._nodes.append(_node("Identity", [value], name, {}))
        self.outputs[name] = dtype, shape

    def weight(self, name: str, value: Tensor) -> str:
        """Add a weight, once; returns its name."""
        self.weights[name] = value
        return name

    def constant(self, value: Any, dtype: np.dtype[Any] = FLOAT32) -> str:
        """Add numbers that every file has; returns their name."""
        name = f"{self.name}.constant.{len(self._constants)}"
        array = np.asarray(value, dtype)
        self._constants[name] = _tensor(name, array.shape, dtype, array.tobytes())
        return name

    def node(self, operation: str, *inputs: str, **attributes: Any) -> str:
        """Add an operation; returns the name of its result. A graph among the attributes is a branch."""
        name = f"{self.name}.{operation}.{len(self._nodes)}"
        self._nodes.append(_node(operation, inputs, name, attributes))
        return name

    def cut(self, value: str, start: int, end: int, *, axis: int) -> str:
        """Add a part of a value along an axis; returns its name."""
        return self.node("Slice", value, *(self.constant([number], INT64) for number in (start, end, axis)))

    def model(self, *, with_weights: bool) -> bytes:
        """The graph as an ONNX file; without weights it declares that they are elsewhere."""
        weights = [
            _tensor(name, value.shape, FLOAT32, as_array(value).tobytes() if with_weights else None)
            for name, value in self.weights.items()
        ]
        version = _message((8, _message((2, OPSET))))
        return _message((1, IR_VERSION), (7, self.message(weights))) + version

    def message(self, weights: Sequence[bytes] = ()) -> bytes:
        """The graph as a message, with its weights' messages."""
        return _message(
            *((1, node) for node in self._nodes),
            (2, self.name),
            *((5, tensor) for tensor in (*self._constants.values(), *weights)),
            *((11, _value(name, *kind)) for name, kind in self.inputs.items()),
            *((12, _value(name, *kind)) for name, kind in self.outputs.items()),
        )


def as_array(value: Tensor) -> NDArray[Any]:
    """A tensor's numbers on the CPU in the usual order, copied if they are in another."""
    array: NDArray[Any] = value.detach().cpu().contiguous().numpy()
    return array


# -------------------------------------------------------------------- messages, by the numbers of their fields


def _node(operation: str, inputs: Sequence[str], output: str, attributes: Mapping[str, Any]) -> bytes:
    fields = ((5, _attribute(name, value)) for name, value in attributes.items())
    return _message(*((1, name) for name in inputs), (2, output), (3, output), (4, operation), *fields)


def _attribute(name: str, value: Any) -> bytes:
    if isinstance(value, Graph):
        return _message((1, name), (6, value.message()), (20, 5))
    if isinstance(value, str):
        return _message((1, name), (4, value), (20, 3))
    if isinstance(value, int):
        return _message((1, name), (3, value), (20, 2))
    return _message((1, name), *((8, number) for number in value), (20, 7))


def _tensor(name: str, shape: Sequence[int], dtype: np.dtype[Any], numbers: bytes | None) -> bytes:
    elsewhere = (13, _message((1, "location"), (2, "memory"))), (14, 1)
    stored = elsewhere if numbers is None else ((9, numbers),)
    return _message(*((1, size) for size in shape), (2, _NUMBERS[dtype]), (8, name), *stored)


def _value(name: str, dtype: np.dtype[Any], shape: Shape) -> bytes:
    sizes = ((1, _message((2 if isinstance(size, str) else 1, size))) for size in shape)
    kind = _message((1, _NUMBERS[dtype]), (2, _message(*sizes)))
    return _message((1, name), (2, _message((1, kind))))


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A message of fields, by their numbers: integers, or text and bytes, which are preceded by their length."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_whole(number << 3), _whole(value)]
        else:
            content = value.encode() if isinstance(value, str) else value
            parts += [_whole(number << 3 | 2), _whole(len(content)), content]
    return b"".join(parts)


def _whole(number: int) -> bytes:
    """An integer as a varint: seven bits in a byte, the lowest first."""
    number %= 1 << 64  # negative numbers in two's complement
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


# -------------------------------------------------------------------- the embedded networks


def has_template(network: nn.Module) -> bool:
    """Whether a folded network, as an extractor's ``for_inference`` makes it, is one of those below."""
    return isinstance(network, FoldedLite0 | FoldedResNet18)


def network_graph(network: nn.Module, height: int, width: int) -> Graph:
    """The graph of a folded network, without its projection: "images" (n, 3, h, w) -> "features" (n, d)."""
    graph = Graph()
    images = graph.input("images", FLOAT32, ["n", 3, height, width])
    features = add_network(graph, network, images, (height, width))
    graph.output("features", features, FLOAT32, ["n", "d"])
    return graph


def add_network(
    graph: Graph,
    network: nn.Module,
    images: str,
    size: tuple[int, int],
    film: Mapping[str, tuple[str, str]] | None = None,
    poolings: Sequence[Pooling] | None = None,
) -> str:
    """Add a folded network to a graph; returns the name of the features.

    Parameters
    ----------
    graph : Graph
    network : FoldedLite0 or FoldedResNet18
    images : str
        Name of the images (n, 3, h, w).
    size : (int, int)
        h and w.
    film : mapping of str to (str, str), optional
        Convolutions, by their names in the network, to the names of gamma and beta (C,) that change them in the graph.
    poolings : sequence of Pooling, optional
        In place of Lite0's own; their features stand side by side.
    """
    layers = _Layers(graph, network, {} if film is None else film)
    if isinstance(network, FoldedResNet18):
        x = layers.convolution(network.stem, images)
        for residual in network.blocks:
            block = cast(FoldedBlock, residual)
            shortcut = x if isinstance(block.downsample, nn.Identity) else layers.convolution(block.downsample, x)
            x = layers.convolution(block.conv2, layers.convolution(block.conv1, x), shortcut)
        return graph.node("Flatten", graph.node("GlobalAveragePool", x))
    assert isinstance(network, FoldedLite0)
    x = layers.convolution(network.stem, images)
    for module in (*network.large, *network.small):
        bottleneck, inner = cast(FoldedBottleneck, module), x
        for convolution in bottleneck.inner:
            inner = layers.convolution(convolution, inner)
        x = layers.convolution(bottleneck.last, inner, x if bottleneck.skips else None)
    maps = {"final": layers.convolution(network.head, x), "last_block": x}
    positions = -(-size[0] // 32), -(-size[1] // 32)
    pooled = [_pooled(graph, maps, positions, pooling) for pooling in poolings or [network.pooling]]
    return pooled[0] if len(pooled) == 1 else graph.node("Concat", *pooled, axis=1)


class _Layers:
    """Adds folded convolutions to a graph, under their names in a network."""

    def __init__(self, graph: Graph, network: nn.Module, film: Mapping[str, tuple[str, str]]) -> None:
        self.graph, self.film = graph, film
        self.names = {part: name for name, part in network.named_modules()}

    def convolution(self, layer: nn.Module, x: str, shortcut: str | None = None) -> str:
        """Add the convolution of maps ``x``, with the maps ``shortcut`` added; takes and returns names."""
        assert isinstance(layer, FoldedConv)
        graph, name = self.graph, self.names[layer]
        weight = layer.weight[:, :, 1:, 1:] if layer.pads_by_size else layer.weight
        # A leading row of zeros stands for the padding that ONNX has under this name.
        padding = {"auto_pad": "SAME_UPPER"} if layer.pads_by_size else {"pads": [*layer.padding, *layer.padding]}
        numbers = graph.weight(f"network.{name}.weight", weight), graph.weight(f"network.{name}.bias", layer.bias)
        if name in self.film:
            numbers = self._filmed(*numbers, *self.film[name])
        y = graph.node("Conv", x, *numbers, strides=[*layer.stride], group=layer.groups, **padding)
        if shortcut is not None:
            y = graph.node("Add", y, shortcut)
        if layer.activation == "none":
            return y
        operation, bounds = _ACTIVATIONS[layer.activation]
        return graph.node(operation, y, *map(graph.constant, bounds))

    def _filmed(self, weight: str, bias: str, gamma: str, beta: str) -> tuple[str, str]:
        """Weight and bias of gamma (w x + b) + beta."""
        graph = self.graph
        per_map = graph.node("Unsqueeze", gamma, graph.constant([1, 2, 3], INT64))
        shifted = graph.node("Add", graph.node("Mul", bias, gamma), beta)
        return graph.node("Mul", weight, per_map), shifted


def film_layers(extractor: FeatureExtractor, folded: nn.Module) -> dict[str, str]:
    """Positions of FiLM -> names of the folded convolutions that take it.

    Both have their BatchNorms, or the convolutions that have absorbed them, in the same order.
    """
    norms = [name for name, part in extractor.network.named_modules() if isinstance(part, nn.BatchNorm2d)]
    convolutions = [name for name, part in folded.named_modules() if isinstance(part, FoldedConv)]
    return dict(zip(norms, convolutions, strict=True))


def _pooled(graph: Graph, maps: Mapping[str, str], size: tuple[int, int], pooling: Pooling) -> str:
    """Maps (n, C, h, w) of this size by their names -> features (n, d), as :class:`Pooling` makes them."""
    parts = []
    for statistic in pooling.statistics:
        x = maps[statistic.maps]
        if isinstance(statistic.sigma, msgspec.UnsetType):
            mean = graph.node("Flatten", graph.node("GlobalAveragePool", x))
            parts.append(graph.node("Mul", mean, graph.constant(statistic.weight)))
        else:
            weights = statistic.weight * position_weights(*size, statistic.sigma)
            positions = graph.node("Reshape", x, graph.constant([0, 0, -1], INT64))
            parts.append(graph.node("MatMul", positions, graph.constant(weights.flatten().numpy())))
    features = parts[0] if len(parts) == 1 else graph.node("Concat", *parts, axis=1)
    if pooling.length is None:
        return features
    length = graph.node("ReduceL2", features, graph.constant([1], INT64), keepdims=1)
    unit = graph.node("Div", features, graph.node("Max", length, graph.constant(1e-12)))
    return graph.node("Mul", unit, graph.constant(pooling.length))
