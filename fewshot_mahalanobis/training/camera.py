"""One random camera for all images of a task: many domains of a few sources.

Every image of the task changes alike, so classes stay what they are while the task becomes one of another domain.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.data.sources import ImageSource


def is_grey(source: ImageSource) -> bool:
    """Whether a sample of the source's images has three equal channels."""
    sample = source.images[:: max(1, len(source.images) // 64)]
    return bool((sample == sample[..., :1]).all())


def one_camera(images: Tensor, size: int, grey: bool, rng: np.random.Generator) -> Tensor:
    """All images of a task (n, 3, h, w), in [-1, 1], seen through one random camera; -> (n, 3, size, size).

    Every image of the task changes alike (mirror, quarter turn, framing, negative, coarse resolution,
    brightness, contrast), so classes stay what they are while the task becomes one of another domain.
    Turns, framing and negatives are for drawings; photographs lose their colours at times.
    """
    if rng.random() < 0.5:
        images = images.flip(3)
    if grey:
        images = torch.rot90(images, int(rng.integers(4)), dims=(2, 3))
        framing = rng.random()
        if framing < 0.4:  # scanned characters are often cut out one by one
            images = cut_to_ink(images, rng.uniform(0.0, 0.3))
        elif framing < 0.6:
            margin = int(rng.uniform(0, 0.2) * images.shape[2])
            images = images[:, :, margin : images.shape[2] - margin, margin : images.shape[3] - margin]
        if rng.random() < 0.5:
            images = -images
    elif rng.random() < 0.1:
        images = images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    if rng.random() < (0.65 if grey else 0.3):
        coarse = round(math.exp(rng.uniform(math.log(7), math.log(32)))) if grey else int(rng.integers(24, 57))
        images = F.interpolate(images, (coarse, coarse), mode="bilinear", antialias=True)
    if images.shape[2] != size:
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    contrast, brightness = rng.uniform(0.7, 1.2), rng.uniform(-0.2, 0.2)
    return (images * contrast + brightness).clamp(-1, 1).contiguous(memory_format=torch.channels_last)


def cut_to_ink(images: Tensor, margin: float) -> Tensor:
    """Each image (n, 3, h, w) zoomed to the square around what is darker than mid-grey; -> the same shape.

    ``margin`` is left free round it, as a share of the square's side. An image without ink stays whole.
    """
    n, _, height, width = images.shape
    ink = images[:, 0] < 0
    boxes = []
    for marked, length in ((ink.any(2), height), (ink.any(1), width)):
        first, last = marked.byte().argmax(1), length - marked.flip(1).byte().argmax(1)
        boxes.append((torch.where(marked.any(1), first, 0), last))
    (top, bottom), (left, right) = boxes
    side = torch.maximum((bottom - top) / height, (right - left) / width) * (1 + margin)
    # affine_grid takes the source of the result's corners, in coordinates from -1 to 1.
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, 0, 2], theta[:, 1, 2] = (left + right) / width - 1, (top + bottom) / height - 1
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
