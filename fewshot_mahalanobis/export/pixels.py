"""Pixels of an image of any size -> the square that a network reads, as a module and as operations of ONNX.

The steps are those of ``images/``: transparent pixels become white, blocks of 2^k x 2^k pixels become their mean, k as
large as leaves both sides at least twice as long as the square's, and an antialiased bilinear filter resizes the rest.
A row of the square is a weighted sum of the image's rows, and so is a column: two products of matrices whose weights
depend only on the image's size. Each step rounds to 8 bits, half up, the columns first as there. Only the means of
blocks are not rounded, so the square may differ from Pillow's by one of 255 there, and elsewhere at ties.

Most of these weights are zero: a column of the square is made of a narrow strip of the image. So the square is made in
strips, of which one at a time is held as floats.

:func:`add_pixels_to_square` is :class:`PixelsToSquare` step by step, for ONNX: PyTorch's exporter would take a minute
for the many sizes that vary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.networks.template import FLOAT32, INT64, Graph

#: Rows or columns of the square that are made at a time. Fewer take less memory and fewer products with zeros, but as
#: neighbouring strips of the image overlap, more of its pixels are read twice.
STRIP = 16


class PixelsToSquare(nn.Module):
    """Pixels, uint8 (h, w, 3) or (h, w, 4), -> images (1, 3, s, s), float32 in [-1, 1].

    Parameters
    ----------
    size : int
        Side s of the square.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, pixels: Tensor) -> Tensor:
        """Composite on white, resize and normalise one image."""
        height, width = pixels.shape[0], pixels.shape[1]
        block = self._block(torch.minimum(_scalar(height), _scalar(width)))
        column_weights, row_weights = self._weights(width, block), self._weights(height, block)
        # Before each step one large matrix is transposed: moving 3 numbers at a time takes nine times as long.
        columns = pixels.flatten(1).T.unflatten(0, pixels.shape[1:])  # (w, 3 or 4, h)
        strips = [_on_white(weights, part) for weights, part in self._strips(column_weights, columns)]
        rows = _eight_bits(torch.cat(strips)).flatten(0, 1).T  # (h, s of 3 or 4)
        strips = [weights @ part for weights, part in self._strips(row_weights, rows)]
        square = _eight_bits(torch.cat(strips)).unflatten(1, (self.size, pixels.shape[2])).permute(2, 0, 1)
        square = torch.cat([square, square[:1]])[:3]  # at least four, as exporters refuse to cut 3 from 3
        return (square / 127.5 - 1)[None]

    def _strips(self, weights: Tensor, image: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Strips of an image (l, ...) and their weights (r, strip) in r rows or columns of the square, in order.

        In rows of the square, the filter reaches half a row beyond them, its blocks a quarter more, and the last block,
        which may end behind the image, moves it down by at most another half: 3/4 above, 5/4 below.
        """
        length = image.shape[0]
        strip = torch.sym_min((STRIP + 2) * length // self.size + 5, length)
        for first in range(0, self.size, STRIP):
            start = torch.scalar_tensor((4 * first - 3) * length // (4 * self.size) - 2, dtype=torch.int64)
            start = torch.minimum(start.clamp(min=0), torch.scalar_tensor(length - strip, dtype=torch.int64))
            indices = start + torch.arange(strip)
            yield weights[first : first + STRIP].index_select(1, indices), image.index_select(0, indices)

    def _block(self, shorter: Tensor) -> Tensor:
        """Side 2^k of the blocks, a whole number as float."""
        times = torch.floor(shorter / (2 * self.size)).clamp(min=1)
        return torch.exp2(torch.floor(torch.log2(times + 0.5)))  # + 0.5: log2 of a power of two may be rounded down

    def _weights(self, length: int, block: Tensor) -> Tensor:
        """Weight of each of ``length`` pixels in each of the s pixels of the result, (s, length)."""
        block_number = torch.floor(torch.arange(length, dtype=torch.float32) / block)
        blocks = torch.ceil(_scalar(length) / block)
        # The last block may be cut off: its mean is of fewer pixels.
        in_block = torch.minimum(block, _scalar(length) - block_number * block)
        scale = blocks / self.size
        centres = (torch.arange(self.size, dtype=torch.float32) + 0.5) * scale
        # The filter widens where it shrinks.
        distance = (block_number + 0.5 - centres[:, None]).abs() / scale.clamp(min=1)
        weights = (1 - distance).clamp(min=0) / in_block
        return weights / weights.sum(dim=1, keepdim=True)


def _on_white(weights: Tensor, columns: Tensor) -> Tensor:
    """Weights (r, w), whose rows sum to 1, and columns (w, 3 or 4, h) -> their weighted sums on white, (r, 3 or 4, h).

    The fourth means nothing.
    """
    sums: Tensor = torch.cond(columns.shape[1] == 4, _composite, _opaque, (weights, columns))
    return sums


def _composite(weights: Tensor, columns: Tensor) -> Tensor:
    colours = columns.float()
    alpha = colours[:, -1:] / 255
    return 255 - _opaque(weights, ((255 - colours) * alpha).round())


def _opaque(weights: Tensor, columns: Tensor) -> Tensor:
    return (weights @ columns.flatten(1).float()).unflatten(1, columns.shape[1:])


def _eight_bits(values: Tensor) -> Tensor:
    return (values + 0.5).floor().clamp(0, 255)


def _scalar(number: int) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.float32)


def add_pixels_to_square(graph: Graph, pixels: str, size: int) -> str:
    """Add :class:`PixelsToSquare` to a graph; returns the name of the images (1, 3, s, s)."""
    return _Square(graph, size).images(pixels)


class _Square:
    """Names of values in a graph; the methods are those of :class:`PixelsToSquare`."""

    def __init__(self, graph: Graph, size: int) -> None:
        self.graph, self.size = graph, size

    def images(self, pixels: str) -> str:
        graph, node = self.graph, self.graph.node
        shape = node("Shape", pixels)
        height, width, channels = (node("Gather", shape, self._whole([axis])) for axis in range(3))
        block = self._block(node("Min", self._float(height), self._float(width)))
        column_weights, row_weights = self._weights(width, block), self._weights(height, block)
        columns = node("Transpose", node("Flatten", pixels, axis=1), perm=[1, 0])
        columns = node("Reshape", columns, node("Concat", width, channels, height, axis=0))
        strips = [self._on_white(*strip, channels, height) for strip in self._strips(column_weights, columns, width)]
        rows = self._eight_bits(node("Concat", *strips, axis=0))
        rows = node("Transpose", node("Reshape", rows, node("Concat", self._whole([-1]), height, axis=0)), perm=[1, 0])
        strips = [node("MatMul", *strip[1:]) for strip in self._strips(row_weights, rows, height)]
        square = node("Reshape", self._eight_bits(node("Concat", *strips, axis=0)), self._whole([self.size] * 2 + [-1]))
        square = self._cut(node("Transpose", square, perm=[2, 0, 1]), self._whole([0]), self._whole([3]), 0)
        scaled = node("Sub", node("Div", square, graph.constant(127.5)), graph.constant(1))
        return node("Unsqueeze", scaled, self._whole([0]))

    def _strips(self, weights: str, image: str, length: str) -> Iterator[tuple[int, str, str]]:
        """Rows of a strip, the weights (rows, strip) and the strip of the image."""
        node = self.graph.node
        strip = node("Add", self._divided(node("Mul", length, self._whole([STRIP + 2])), self.size), self._whole([5]))
        strip = node("Min", strip, length)
        last = node("Sub", length, strip)
        for first in range(0, self.size, STRIP):
            rows = min(STRIP, self.size - first)
            start = self._divided(node("Mul", length, self._whole([4 * first - 3])), 4 * self.size)
            start = node("Min", node("Max", node("Sub", start, self._whole([2])), self._whole([0])), last)
            end = node("Add", start, strip)
            row_weights = self._cut(weights, self._whole([first]), self._whole([first + rows]), 0)
            yield rows, self._cut(row_weights, start, end, 1), self._cut(image, start, end, 0)

    def _block(self, shorter: str) -> str:
        node, constant = self.graph.node, self.graph.constant
        times = node("Max", node("Floor", node("Div", shorter, constant(2 * self.size))), constant(1))
        power = node("Div", node("Log", node("Add", times, constant(0.5))), constant(math.log(2)))
        return node("Pow", constant(2), node("Floor", power))

    def _weights(self, length: str, block: str) -> str:
        node, constant = self.graph.node, self.graph.constant
        size = self._float(length)
        block_number = node("Floor", node("Div", node("Range", constant(0), size, constant(1)), block))
        scale = node("Div", node("Ceil", node("Div", size, block)), constant(self.size))
        in_block = node("Min", block, node("Sub", size, node("Mul", block_number, block)))
        centres = node("Mul", constant(torch.arange(self.size)[:, None].numpy() + 0.5), scale)
        distance = node("Abs", node("Sub", node("Add", block_number, constant(0.5)), centres))
        distance = node("Div", distance, node("Max", scale, constant(1)))
        weights = node("Div", node("Max", node("Sub", constant(1), distance), constant(0)), in_block)
        return node("Div", weights, node("ReduceSum", weights, self._whole([1]), keepdims=1))

    def _on_white(self, rows: int, weights: str, columns: str, channels: str, height: str) -> str:
        shape = self.graph.node("Concat", self._whole([rows]), channels, height, axis=0)
        branches = {
            "then_branch": self._branch("composite", weights, columns, shape),
            "else_branch": self._branch("opaque", weights, columns, shape),
        }
        has_opacity = self.graph.node("Equal", channels, self._whole([4]))
        return self.graph.node("If", has_opacity, **branches)

    def _branch(self, kind: str, weights: str, columns: str, shape: str) -> Graph:
        """The weighted sums of columns on white, or of columns without opacity."""
        graph = Graph(f"{self.graph.name}.{kind}.{columns}")
        node, constant = graph.node, graph.constant
        colours = node("Cast", columns, to=1)
        if kind == "composite":
            opacity = node("Gather", colours, graph.constant([3], INT64), axis=1)
            darkness = node("Mul", node("Sub", constant(255), colours), node("Div", opacity, constant(255)))
            colours = node("Round", darkness)
        sums = node("Reshape", node("MatMul", weights, node("Flatten", colours, axis=1)), shape)
        if kind == "composite":
            sums = node("Sub", constant(255), sums)
        graph.output(f"{graph.name}.sums", sums, FLOAT32, ["r", "c", "h"])
        return graph

    def _eight_bits(self, values: str) -> str:
        node, constant = self.graph.node, self.graph.constant
        return node("Clip", node("Floor", node("Add", values, constant(0.5))), constant(0), constant(255))

    def _cut(self, values: str, start: str, end: str, axis: int) -> str:
        return self.graph.node("Slice", values, start, end, self._whole([axis]))

    def _divided(self, numbers: str, by: int) -> str:
        """Whole numbers, rounded towards 0: where that differs from rounding down, the start of a strip is 0."""
        return self.graph.node("Div", numbers, self._whole([by]))

    def _float(self, number: str) -> str:
        return self.graph.node("Squeeze", self.graph.node("Cast", number, to=1))

    def _whole(self, numbers: list[int]) -> str:
        return self.graph.constant(numbers, INT64)
