"""Pixels of an image of any size -> the square that a network reads, by operations that every exporter knows.

The steps are those of ``images/``: transparent pixels become white, blocks of 2^k x 2^k pixels become their mean, k as
large as leaves both sides at least twice as long as the square's, and an antialiased bilinear filter resizes the rest.
A row of the square is a weighted sum of the image's rows, and so is a column: two products of matrices whose weights
depend only on the image's size. Each step rounds to 8 bits, half up, the columns first as there. Only the means of
blocks are not rounded, so the square may differ from Pillow's by one of 255 there, and elsewhere at ties.

Most of these weights are zero: a column of the square is made of a narrow strip of the image. So the square is made in
strips, of which one at a time is held as floats.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

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
        of_columns, of_rows = self._weights(width, block), self._weights(height, block)
        # Before each step one large matrix is transposed: moving 3 numbers at a time takes nine times as long.
        columns = pixels.flatten(1).T.unflatten(0, pixels.shape[1:])  # (w, 3 or 4, h)
        strips = [_on_white(weights, part) for weights, part in self._strips(of_columns, columns)]
        rows = _eight_bits(torch.cat(strips)).flatten(0, 1).T  # (h, s of 3 or 4)
        strips = [weights @ part for weights, part in self._strips(of_rows, rows)]
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
            of_strip = start + torch.arange(strip)
            yield weights[first : first + STRIP].index_select(1, of_strip), image.index_select(0, of_strip)

    def _block(self, shorter: Tensor) -> Tensor:
        """Side 2^k of the blocks, a whole number as float."""
        times = torch.floor(shorter / (2 * self.size)).clamp(min=1)
        return torch.exp2(torch.floor(torch.log2(times + 0.5)))  # + 0.5, lest log2 of a power of two be rounded down

    def _weights(self, length: int, block: Tensor) -> Tensor:
        """Weight of each of ``length`` pixels in each of the s pixels of the result, (s, length)."""
        of_block = torch.floor(torch.arange(length, dtype=torch.float32) / block)
        blocks = torch.ceil(_scalar(length) / block)
        # The last block may be cut off: its mean is of fewer pixels.
        in_block = torch.minimum(block, _scalar(length) - of_block * block)
        scale = blocks / self.size
        centres = (torch.arange(self.size, dtype=torch.float32) + 0.5) * scale
        distance = (of_block + 0.5 - centres[:, None]).abs() / scale.clamp(min=1)  # the filter widens where it shrinks
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
