"""Which images are the same picture: the same again, compressed, mirrored or slightly cropped, by their aligned pixels.

Images are compared as small colour pictures. One is moved and scaled along both axes until it fits the other (Lucas and
Kanade, 1981; Baker and Matthews, 2004), as it is and mirrored, coarsely and then finely. They are the same picture if
their edges then agree far better than those of an image and its nearest usually do, and their colours too. So pictures
of different things are told apart however alike a network finds them.

Only an image and its nearest are aligned, by a network's features, which change little when a picture is cropped, or by
their pixels, as they are or mirrored, which change little when it is compressed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

__all__ = ["same_pictures", "small_pictures"]

#: Sides of the small pictures: 7 kB each; and of the first, coarse comparison.
SIDE, COARSE_SIDE = 48, 16
#: Least agreement of the edges of two pictures, from -1 to 1, so that they are aligned finely.
COARSE_AGREEMENT = 0.6
#: The same picture disagrees by no more than this, 1 less its agreement...
DISAGREEMENT = 0.03
#: ... or than this times the square of the usual disagreement of an image and its nearest: pictures of 32 pixels that
#: are compressed lose 0.1, where those of different things disagree by 0.8; drawn characters differ by 0.05, and
#: usually by 0.5. Both were chosen on classes that are not for testing.
USUAL_SHARE = 0.15
#: Mean colours of the same picture differ by no more, of 1.
COLOUR = 0.04
#: Edges that are rounding: without them all pictures of one even colour agree.
_ROUNDING = 0.5 / 255
#: Nearest pictures, by features, by pixels and by mirrored pixels, with which each is compared.
_NEAREST = 3
#: Steps of alignment, coarse and fine; and the most that a picture is scaled and moved, of half its side.
_STEPS, _MOST_SCALE, _MOST_SHIFT = (6, 4), 1.18, 0.2
#: Pairs aligned at a time, and rows of similarities.
_PAIRS, _ROWS = 256, 256


def small_pictures(images: Tensor) -> Tensor:
    """Images (n, 3, h, w) in [-1, 1] as small, slightly blurred pictures, uint8 (n, 3, 48, 48) on the CPU."""
    small = _shrunk(images.detach().cpu().float(), SIDE)
    weights = torch.tensor([0.25, 0.5, 0.25])
    padded = F.pad(small, (1, 1, 1, 1), mode="replicate").flatten(0, 1)[:, None]
    blurred = F.conv2d(padded, torch.outer(weights, weights)[None, None]).view_as(small)
    return blurred.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


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
    coarse = _shrunk(pictures.float() / 255, COARSE_SIDE)
    pixels = coarse - coarse.mean(dim=(2, 3), keepdim=True)
    mirrored, pixels, features = pixels.flip(3).flatten(1), pixels.flatten(1), features.detach().cpu().float()
    pairs = _nearest((features, features), (pixels, pixels), (pixels, mirrored))
    if len(pairs) == 0:
        return pairs.numpy()
    agreement, placed, mirrored = (
        torch.cat(part) for part in zip(*(_coarsely_aligned(coarse, some) for some in pairs.split(_PAIRS)), strict=True)
    )
    most = max(DISAGREEMENT, USUAL_SHARE * float(1 - agreement.median()) ** 2)
    close = (agreement > COARSE_AGREEMENT).nonzero()[:, 0]
    same = [_same(pictures, pairs[some], placed[some], mirrored[some], most) for some in close.split(_PAIRS)]
    return pairs[close[torch.cat(same)]].numpy()


def _nearest(*descriptions: tuple[Tensor, Tensor]) -> Tensor:
    """Pairs (p, 2) of each image and its nearest others, by the angle of two descriptions (n, d), its and theirs."""
    n = len(descriptions[0][0])
    if n < 2:
        return torch.empty(0, 2, dtype=torch.int64)
    pairs = []
    for own, others in descriptions:
        x, y = F.normalize(own, dim=1), F.normalize(others, dim=1)
        for rows in torch.arange(n).split(_ROWS):
            similarity = x[rows] @ y.T
            similarity[torch.arange(len(rows)), rows] = -torch.inf
            nearest = similarity.topk(min(_NEAREST, n - 1), dim=1).indices
            pairs.append(torch.stack([rows[:, None].expand_as(nearest), nearest], dim=2).flatten(0, 1))
    return torch.cat(pairs).sort(dim=1).values.unique(dim=0)


def _coarsely_aligned(coarse: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Agreement of the pictures of each pair (p, 2), the place of the second, and whether the first is mirrored."""
    first, second = coarse[pairs[:, 0]], coarse[pairs[:, 1]]
    start = torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(len(pairs), 1)
    views = (first, first.flip(3))
    placed = [_aligned(view, second, start, _STEPS[0]) for view in views]
    agreements = [_agreement(view, second, place)[0] for view, place in zip(views, placed, strict=True)]
    agreement, mirrored = torch.stack(agreements).max(dim=0)
    return agreement, torch.where(mirrored[:, None].bool(), placed[1], placed[0]), mirrored.bool()


def _same(pictures: Tensor, pairs: Tensor, placed: Tensor, mirrored: Tensor, most: float) -> Tensor:
    """Whether the two pictures of each pair (p, 2) disagree by at most ``most`` when they are finely aligned, (p,)."""
    a, b = (pictures[side].float() / 255 for side in pairs.T)
    a = torch.where(mirrored[:, None, None, None], a.flip(3), a)
    agreement, colour = _agreement(a, b, _aligned(a, b, placed, _STEPS[1]))
    return (1 - agreement <= most) & (colour <= COLOUR)


def _aligned(a: Tensor, b: Tensor, placed: Tensor, steps: int) -> Tensor:
    """Move and scale pictures b (p, 3, s, s) to fit a, from ``placed`` on, by Gauss-Newton steps.

    ``placed`` (p, 4) has the scales along x and y and the shifts, in units of half the side: scale x + shift in b is x
    in a.
    """
    side = a.shape[-1]
    for _ in range(steps):
        moved, inside, at = _moved(b, placed)
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


def _agreement(a: Tensor, b: Tensor, placed: Tensor) -> tuple[Tensor, Tensor]:
    """How far the edges of a and of the moved b agree where they overlap, and the difference of their colours, (p,).

    Edges g and h agree by 2 g'h / (g'g + h'h): 1 if they are equal, less if they have another direction or contrast.
    """
    moved, inside, _ = _moved(b, placed)
    area = inside.sum(dim=(1, 2, 3))
    both = each = 3 * 2 * area * _ROUNDING**2
    for dim in (2, 3):
        n = a.shape[dim] - 1
        overlap = inside.narrow(dim, 0, n) * inside.narrow(dim, 1, n)
        g, h = a.diff(dim=dim), moved.diff(dim=dim)
        both = both + (2 * g * h * overlap).sum(dim=(1, 2, 3))
        each = each + ((g.square() + h.square()) * overlap).sum(dim=(1, 2, 3))
    colour = ((a - moved) * inside).sum(dim=(2, 3)) / area[:, None]
    return both / each, colour.abs().amax(dim=1)


def _moved(b: Tensor, placed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures b at their places; 1 where they cover the square, (p, 1, s, s); coordinates of its columns, (s,)."""
    side = b.shape[-1]
    at = (torch.arange(side) + 0.5) * (2 / side) - 1
    x, y = (placed[:, axis, None] * at + placed[:, axis + 2, None] for axis in (0, 1))
    grid = torch.stack([x[:, None].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)], dim=3)
    inside = (grid.abs() <= 1 - 1 / side).all(dim=3)[:, None].float()
    return F.grid_sample(b, grid, padding_mode="border", align_corners=False), inside, at


def _shrunk(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True)
