"""Random views of training images, from an explicit generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    """Float32 draws from U[low, high)."""
    return torch.rand(shape, generator=generator) * (high - low) + low


def random_resized_crops(images: Tensor, size: int, min_area: float, generator: torch.Generator) -> Tensor:
    """A crop of min_area to 1 of each image's area, aspect 3/4 to 4/3, resized to ``size``.

    Parameters
    ----------
    images : uint8 Tensor of shape (n, h, w, 3)
    size : int
        Side of the square result, in pixels.
    min_area : float
        Smallest crop, as a share of the image's area.
    generator : torch.Generator

    Returns
    -------
    uint8 Tensor of shape (n, 3, size, size), channels last in memory.
    """
    n, height, width, _ = images.shape
    area = uniform((n,), min_area, 1.0, generator)
    aspect = torch.exp(uniform((n,), math.log(3 / 4), math.log(4 / 3), generator))
    crop_h = (torch.sqrt(area / aspect) * height).round().clamp(1, height).long()
    crop_w = (torch.sqrt(area * aspect) * width).round().clamp(1, width).long()
    top = (uniform((n,), 0, 1, generator) * (height - crop_h + 1)).long()
    left = (uniform((n,), 0, 1, generator) * (width - crop_w + 1)).long()
    out = torch.empty((n, 3, size, size), dtype=torch.uint8, memory_format=torch.channels_last)
    boxes = zip(top.tolist(), left.tolist(), crop_h.tolist(), crop_w.tolist(), strict=True)
    for index, (y, x, h, w) in enumerate(boxes):
        crop = images[index, y : y + h, x : x + w].permute(2, 0, 1)[None]
        out[index] = F.interpolate(crop, (size, size), mode="bilinear", antialias=True)[0]
    return out


def random_flips(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image (n, c, h, w) left to right with probability 1/2."""
    flip = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def random_brightness_contrast(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Scale each image (n, c, h, w), in [-1, 1], about its mean and shift it, each by up to ``strength``."""
    n = len(images)
    contrast = uniform((n, 1, 1, 1), 1 - strength, 1 + strength, generator)
    brightness = uniform((n, 1, 1, 1), -strength, strength, generator)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return ((images - mean) * contrast + mean + brightness).clamp_(-1, 1)


def random_turns(images: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Turn a ``share`` of the images (n, c, s, s) by one, two or three quarters; with the quarters (n,), int64."""
    turned = torch.rand(len(images), generator=generator) < share
    quarters = torch.where(turned, torch.randint(1, 4, (len(images),), generator=generator), 0)
    rotated = [torch.rot90(image, k, (1, 2)) for image, k in zip(images, quarters.tolist(), strict=True)]
    return torch.stack(rotated), quarters
