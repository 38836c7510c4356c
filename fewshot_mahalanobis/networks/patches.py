"""Mean and covariance of what a first convolution looks at, which give the statistics of its maps without the maps.

A map of a 3 x 3 convolution is w . p + b for the patch p of 27 numbers around each position, so its mean is
w . mean(p) + b and its variance w^T cov(p) w: of 27 numbers a position, not of 64. Nor need the patches be formed.
Neighbours in a row are cut out together, and rows of patches overlap: a row of pixels is the upper row of some patches,
the middle row of others and the lower row of more. So the sums over all patches are those over cuts through one row,
and of their products with the same cut of the same row, of the next and of the next but one, less what the edges lack.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

#: Side of a patch.
_SIDE = 3
#: Most neighbouring patches that are cut out together: with more of them, more products are of pixels that share no
#: patch, with fewer a pixel is copied more often. Six are 8 columns, and 24 numbers fill a processor's registers.
_MOST_TOGETHER = 6


def patch_moments(chunks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and covariance (biased) of the 3 x 3 patches around all positions of all images, beyond whose edges is zero.

    Parameters
    ----------
    chunks : iterable of Tensors of shape (b, c, h, w)
        The images, at least one, some at a time. h and w are 2 or more.

    Returns
    -------
    mean : Tensor of shape (9 c,)
        Of a patch's numbers in the order of a convolution's weights: channel, row, column. float64, on MPS float32.
    covariance : Tensor of shape (9 c, 9 c)
    """
    parts, n = [], 0
    for images in chunks:
        parts.append(_sums_of_cuts(images))
        n += len(images)
    _, c, h, w = images.shape
    first, second = _sums_of_patches(c, *(torch.stack(of_chunks).sum(0) for of_chunks in zip(*parts, strict=True)))
    mean = first / (n * h * w)
    return mean, second / (n * h * w) - mean.outer(mean)


def _sums_of_cuts(images: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the cuts through single rows of images (b, c, h, w), each of x = (together + 2) c numbers.

    Returns their sums (3, x) over all rows, the first row and the last; and those of their products (5, x, x) with
    themselves, with the next row, the next but one, with themselves in the first row and in the last.
    """
    _, _, h, w = images.shape
    together = max(size for size in range(1, _MOST_TOGETHER + 1) if w % size == 0)
    in_row = w // together
    # MPS has no float64.
    pixels = images.permute(0, 2, 3, 1).to(torch.float32 if images.device.type == "mps" else torch.float64)
    padded = F.pad(pixels, (0, 0, 1, 1))
    cuts = padded.unfold(2, together + _SIDE - 1, together).mT.reshape(len(images), h * in_row, -1)
    edges = [cuts[:, row * in_row : (row + 1) * in_row].flatten(0, 1) for row in (0, h - 1)]
    products = [torch.bmm(cuts[:, : (h - lag) * in_row].mT, cuts[:, lag * in_row :]).sum(0) for lag in range(_SIDE)]
    return (
        torch.stack([cuts.sum(dim=(0, 1)), *(edge.sum(0) for edge in edges)]),
        torch.stack([*products, *(edge.mT @ edge for edge in edges)]),
    )


def _sums_of_patches(c: int, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over all patches p of images with c channels: of p (9 c,) and of p p^T (9 c, 9 c)."""
    every, first, last = sums
    same, next_, over, first_, last_ = products
    # The last row of pixels is the upper row of no patch, the first the lower row of none.
    rows = torch.stack([every - last, every, every - first])
    pairs = torch.stack(
        [
            torch.stack([same - last_, next_, over]),
            torch.stack([next_.mT, same, next_]),
            torch.stack([over.mT, next_.mT, same - first_]),
        ]
    )
    # The patches of a cut lie one to the right of the other.
    columns = rows.unflatten(1, (-1, c))
    together = columns.shape[1] - _SIDE + 1
    of_pixels = columns.unfold(1, together, 1).sum(-1)  # (row, column, channel)
    columns = pairs.unflatten(3, (-1, c)).unflatten(2, (-1, c)).unfold(2, together, 1).unfold(4, together, 1)
    of_pairs = columns.diagonal(dim1=-2, dim2=-1).sum(-1)  # (row, row', column, channel, column', channel')
    return of_pixels.permute(2, 0, 1).flatten(), of_pairs.permute(3, 0, 2, 5, 1, 4).reshape(9 * c, 9 * c)
