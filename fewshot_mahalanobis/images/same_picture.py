"""Which images are the same picture: the same again, compressed, mirrored or slightly cropped, by their aligned pixels.

Images are compared as small pictures. Each is paired with the few that are nearest to it by a network's features and by
its pixels, as they are or mirrored. The pictures of a pair that looks alike are laid over each other: one is moved and
scaled along both axes until it fits the other (Lucas and Kanade, 1981; Baker and Matthews, 2004), coarsely and then
finely. They are the same picture if their edges then agree but for what compression changes, and their colours too. So
pictures of different things are told apart however alike a network finds them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.cores import one_thread, one_thread_if_small

__all__ = ["same_pictures", "small_pictures", "with_small_pictures"]

#: Side of the small pictures, 7 kB each.
SIDE = 48
#: Edges of the same picture, 16 pixels wide, disagree by no more: compression of 32-pixel pictures loses 0.009. Those
#: of different drawn characters disagree by 0.016 and more, of photographs by 0.1. Chosen on classes that are not for
#: testing, and on solar cells and steel.
DISAGREEMENT = 0.01
#: Mean colours of the same picture differ by no more, of 1.
COLOUR = 0.04
#: Nearest pictures with which each is paired, and the least correlation of their pixels, 8 pixels wide.
_NEAREST, _CORRELATION = 3, 0.5
#: Most disagreement of pictures that are coarsely aligned, so that they are aligned finely.
_COARSE_DISAGREEMENT = 0.4
#: Sides of the pictures that are correlated and of those that are coarsely aligned; steps of alignment.
_CORRELATED_SIDE, _COARSE_SIDE = 8, 16
_COARSE_STEPS, _FINE_STEPS = 4, 3
#: The most that a picture is scaled, and moved, of half its side.
_MOST_SCALE, _MOST_SHIFT = 1.18, 0.2
#: Differences that compression and rounding make where a picture is even.
_ROUNDING = 1.5 / 255
#: Shares of red, green and blue in brightness.
_BRIGHTNESS = (0.299, 0.587, 0.114)
#: Images made small, rows of similarities and pairs aligned at a time.
_IMAGES, _ROWS, _PAIRS = 8, 256, 64


@one_thread()
def small_pictures(images: Tensor) -> Tensor:
    """Images (n, 3, h, w) in [-1, 1] as small pictures, uint8 (n, 3, 48, 48) on the CPU."""
    small = torch.cat([_shrunk(some.cpu().float(), SIDE) for some in images.split(_IMAGES)])
    return small.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).contiguous()


def with_small_pictures(batches: Iterable[Tensor], pictures: list[Tensor]) -> Generator[Tensor, None, None]:
    """Yield batches of images; small pictures of each batch are added to ``pictures``."""
    for images in batches:
        pictures.append(small_pictures(images))
        yield images


def same_pictures(pictures: Tensor, features: Tensor) -> NDArray[np.int64]:
    """Find the pairs of images that are the same picture, whatever their classes.

    Parameters
    ----------
    pictures : uint8 Tensor of shape (n, 3, 48, 48)
        As :func:`small_pictures` makes them.
    features : Tensor of shape (n, d)
        Features of the same images.

    Returns
    -------
    int64 ndarray of shape (p, 2)
        The smaller index first, in order. Of many copies of one picture, each is paired with some others.
    """
    if len(pictures) < 2:
        return np.empty((0, 2), np.int64)
    with one_thread_if_small(features):
        return _same_pictures(pictures, features)


def _same_pictures(pictures: Tensor, features: Tensor) -> NDArray[np.int64]:
    coarse = torch.cat([_shrunk(some.float() / 255, _COARSE_SIDE) for some in pictures.split(_PAIRS)])
    pairs, mirrored = _alike(_shrunk(coarse, _CORRELATED_SIDE), features.detach().cpu().float())
    grey, parts = _brightness(coarse), zip(pairs.split(_PAIRS), mirrored.split(_PAIRS), strict=True)
    same = torch.cat([_same(pictures, grey, *part) for part in parts])
    return pairs[same].unique(dim=0).numpy()


def _alike(tiny: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (p, 2) of an image and its nearest that look alike, and whether so if one is mirrored, (p,)."""
    n = len(tiny)
    tiny = tiny - tiny.mean(dim=(2, 3), keepdim=True)
    own, theirs = (F.normalize(F.pad(x.flatten(1), (0, 1), value=_ROUNDING), dim=1) for x in (tiny, tiny.flip(3)))
    features = F.normalize(features, dim=1)
    found = []
    for rows in torch.arange(n, device="cpu").split(_ROWS):
        correlation = torch.stack([own[rows] @ own.T, own[rows] @ theirs.T], dim=2)
        similarity = correlation.amax(dim=2) + features[rows] @ features.T
        similarity[rows - rows[0], rows] = -torch.inf
        nearest = similarity.topk(min(_NEAREST, n - 1), dim=1).indices
        alike = correlation.gather(1, nearest[:, :, None].expand(-1, -1, 2)) > _CORRELATION
        row, rank, mirrored = alike.nonzero(as_tuple=True)
        pairs = torch.stack([rows[row], nearest[row, rank]], dim=1).sort(dim=1).values
        found.append(torch.cat([pairs, mirrored[:, None]], dim=1))
    views = torch.cat(found).unique(dim=0)
    return views[:, :2], views[:, 2].bool()


def _same(pictures: Tensor, coarse: Tensor, pairs: Tensor, mirrored: Tensor) -> Tensor:
    """Whether the two pictures of each pair (p, 2), the first of them ``mirrored`` (p,) or not, are the same, (p,)."""
    a, b = _pair(coarse, pairs, mirrored)
    placed = _aligned(a, b, _tensor([1.0, 1.0, 0.0, 0.0]).repeat(len(pairs), 1), _COARSE_STEPS)
    close = (_disagreement(a, *_moved(b, placed)) <= _COARSE_DISAGREEMENT).nonzero()[:, 0]

    a, b = (_blurred(x.float() / 255) for x in _pair(pictures, pairs[close], mirrored[close]))
    placed = _aligned(_brightness(a), _brightness(b), placed[close], _FINE_STEPS)
    moved, inside = _moved(b, placed)
    colour = (((a - moved) * inside).sum(dim=(2, 3)) / inside.sum(dim=(2, 3))).abs().amax(dim=1)
    by = SIDE // _COARSE_SIDE
    a, b, overlap = (F.avg_pool2d(x, by) for x in (_brightness(a), _brightness(moved), inside))
    same = torch.zeros(len(pairs), dtype=torch.bool, device="cpu")
    same[close] = (_disagreement(a, b, (overlap > 0.99).float()) <= DISAGREEMENT) & (colour <= COLOUR)
    return same


def _pair(pictures: Tensor, pairs: Tensor, mirrored: Tensor) -> tuple[Tensor, Tensor]:
    """Both pictures of each pair (p, 2), the first mirrored or not, (p,)."""
    first, second = pictures[pairs[:, 0]], pictures[pairs[:, 1]]
    return torch.where(mirrored[:, None, None, None], first.flip(3), first), second


def _aligned(a: Tensor, b: Tensor, placed: Tensor, steps: int) -> Tensor:
    """Move and scale grey pictures b (p, 1, s, s) to fit a, from ``placed`` on, by Gauss-Newton steps.

    ``placed`` (p, 4) has the scales along x and y and the shifts, in units of half the side: scale x + shift in b is x
    in a.
    """
    side, at = a.shape[-1], _coordinates(a.shape[-1])
    for _ in range(steps):
        moved, inside = _moved(b, placed)
        dx = F.pad(moved[..., 2:] - moved[..., :-2], (1, 1)) * (side / 4) / placed[:, 0, None, None, None]
        dy = F.pad(moved[..., 2:, :] - moved[..., :-2, :], (0, 0, 1, 1)) * (side / 4) / placed[:, 1, None, None, None]
        slopes = (torch.stack([dx * at, dy * at[:, None], dx, dy], dim=1) * inside[:, None]).flatten(2)
        square = slopes @ slopes.transpose(1, 2)
        square = square + torch.diag_embed(1e-3 * square.diagonal(dim1=1, dim2=2) + 1e-6)
        error = ((a - moved) * inside).flatten(1)[:, :, None]
        placed = placed + torch.linalg.solve(square, slopes @ error)[..., 0].clamp(-0.1, 0.1)
        placed = torch.cat(
            [placed[:, :2].clamp(1 / _MOST_SCALE, _MOST_SCALE), placed[:, 2:].clamp(-_MOST_SHIFT, _MOST_SHIFT)], dim=1
        )
    return placed


def _disagreement(a: Tensor, b: Tensor, overlap: Tensor) -> Tensor:
    """How far the edges of grey pictures (p, 1, s, s) disagree where they overlap, (p,), from 0 to 2.

    Edges g and h disagree by 1 - 2 g'h / (g'g + h'h): 0 if they are equal, more if they have another direction or
    contrast.
    """
    both = each = 2 * 2 * overlap.sum(dim=(1, 2, 3)) * _ROUNDING**2
    for dim in (2, 3):
        n = a.shape[dim] - 1
        within = overlap.narrow(dim, 0, n) * overlap.narrow(dim, 1, n)
        g, h = a.diff(dim=dim), b.diff(dim=dim)
        both = both + (2 * g * h * within).sum(dim=(1, 2, 3))
        each = each + ((g.square() + h.square()) * within).sum(dim=(1, 2, 3))
    return 1 - both / each


def _moved(b: Tensor, placed: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures b (p, c, s, s) at their places, and 1 where both they and the square have neighbours, (p, 1, s, s).

    What lies beyond the border of a picture has a part in the pixels beside it.
    """
    side = b.shape[-1]
    at = _coordinates(side)
    x, y = (placed[:, axis, None] * at + placed[:, axis + 2, None] for axis in (0, 1))
    grid = torch.stack([x[:, None].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)], dim=3)
    within = (grid.abs() <= 1 - 3 / side).all(dim=3)[:, None].float()
    inside = F.pad(within[..., 1:-1, 1:-1], (1, 1, 1, 1))
    return F.grid_sample(b, grid, padding_mode="border", align_corners=False), inside


def _coordinates(side: int) -> Tensor:
    """Pixel centres, from -1 to 1."""
    return (torch.arange(side, dtype=torch.float32, device="cpu") + 0.5) * (2 / side) - 1


def _shrunk(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True)


def _blurred(pictures: Tensor) -> Tensor:
    weights = _tensor([0.25, 0.5, 0.25])
    padded = F.pad(pictures, (1, 1, 1, 1), mode="replicate").flatten(0, 1)[:, None]
    return F.conv2d(padded, torch.outer(weights, weights)[None, None]).view_as(pictures)


def _brightness(pictures: Tensor) -> Tensor:
    return torch.einsum("pchw,c->phw", pictures, _tensor(_BRIGHTNESS))[:, None]


def _tensor(numbers: Sequence[float]) -> Tensor:
    """Numbers as the pictures are, whatever the caller's default dtype and device."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")
