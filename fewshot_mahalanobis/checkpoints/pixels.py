"""Pixels of an image of any size -> the square that a network reads, by operations that every exporter knows.

The steps are those of ``images/``: transparent pixels become white, blocks of 2^k x 2^k pixels become their mean, k as
large as leaves both sides at least twice as long as the square's, and an antialiased bilinear filter resizes the rest.
A row of the square is a weighted sum of the image's rows, and so is a column: two products of matrices whose weights
depend only on the image's size. As Pillow does, the columns come first, and each step rounds to 8 bits, half up. Only
the means of blocks are not rounded, so the square of a large image may differ by one or two of 255.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Square(nn.Module):
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
        opaque = torch.full_like(pixels[..., :1], 255)
        channels = torch.cat([pixels, opaque], dim=2).float()  # so that the fourth is alpha, of RGB and of RGBA
        alpha = channels[..., 3:4] / 255
        colours = (channels[..., :3] * alpha + 255 * (1 - alpha)).round()
        height, width = pixels.shape[0], pixels.shape[1]
        block = self._block(torch.minimum(_scalar(height), _scalar(width)))
        columns = _eight_bits(torch.einsum("jw,hwc->hjc", self._weights(width, block), colours))
        square = _eight_bits(torch.einsum("ih,hjc->cij", self._weights(height, block), columns))
        return (square / 127.5 - 1)[None]

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


def _eight_bits(values: Tensor) -> Tensor:
    return (values + 0.5).floor().clamp(0, 255)


def _scalar(number: int) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.float32)
