"""Augmentation of training images: one at a time for pre-training, all images of a task alike for meta-training."""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.research.data.sources import ImageSource


def uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    """Draw float32 from U[low, high)."""
    return torch.rand(shape, generator=generator) * (high - low) + low


def random_resized_crops(images: Tensor, size: int, min_area: float, generator: torch.Generator) -> Tensor:
    """Crop uint8 images (n, h, w, 3) at random and resize the crops: (n, 3, size, size), channels last in memory.

    Aspect ratios are 3/4 to 4/3; ``min_area`` is the minimum area of a crop, as a share of the image.
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
    """Flip each image (n, c, h, w) horizontally with probability 1/2."""
    flip = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def random_brightness_contrast(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Change contrast and brightness of each image (n, c, h, w), in [-1, 1], by up to ``strength``."""
    n = len(images)
    contrast = uniform((n, 1, 1, 1), 1 - strength, 1 + strength, generator)
    brightness = uniform((n, 1, 1, 1), -strength, strength, generator)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return ((images - mean) * contrast + mean + brightness).clamp_(-1, 1)


def random_turns(images: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rotate a ``share`` of the images (n, c, s, s) by 1 to 3 quarter turns; also returns these, (n,), int64."""
    turned = torch.rand(len(images), generator=generator) < share
    quarters = torch.where(turned, torch.randint(1, 4, (len(images),), generator=generator), 0)
    rotated = [torch.rot90(image, k, (1, 2)) for image, k in zip(images, quarters.tolist(), strict=True)]
    return torch.stack(rotated), quarters


def to_other_domains(images: Tensor, share: float, grey: bool, generator: torch.Generator) -> Tensor:
    """Enlarge a ``share`` of the images (n, c, s, s) from 16 to 56 pixels; invert as many drawings (``grey``)."""
    sides = torch.exp(uniform((len(images),), math.log(16), math.log(56), generator)).round().int()
    coarse = torch.rand(len(images), generator=generator) < share
    inverted = torch.rand(len(images), generator=generator) < (share if grey else 0.0)
    out = torch.where(inverted[:, None, None, None], -images, images)  # values are in [-1, 1]
    for i in coarse.nonzero()[:, 0].tolist():
        small = F.interpolate(out[i, None], (int(sides[i]),) * 2, mode="bilinear", antialias=True)
        out[i] = F.interpolate(small, images.shape[2:], mode="bilinear", antialias=True)[0]
    return out


def is_grey(source: ImageSource) -> bool:
    """Whether the three channels are equal in a sample of the source's images."""
    sample = source.images[:: max(1, len(source.images) // 64)]
    return bool((sample == sample[..., :1]).all())


def augment_task(images: Tensor, size: int, grey: bool, rng: np.random.Generator) -> Tensor:
    """Transform all images (n, 3, h, w) of a task alike, at random: (n, 3, size, size), channels last in memory.

    Classes stay the same while the task moves to another domain, so that few sources give many domains. Transforms are
    flips, resolution, contrast and brightness; for drawings (``grey``, see :func:`is_grey`) also quarter turns, framing
    and inversion; for photographs also greyscale. Values are in [-1, 1].
    """
    if rng.random() < 0.5:
        images = images.flip(3)
    if grey:
        images = torch.rot90(images, int(rng.integers(4)), dims=(2, 3))
        framing = rng.random()
        if framing < 0.4:  # scanned characters are often cropped one by one
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


def camera_task(images: Tensor, size: int, rng: np.random.Generator) -> Tensor:
    """Change the photographs (n, 3, h, w) of a task in the way cameras do: (n, 3, size, size), channels last in memory.

    Crop, mirror, contrast, brightness and white balance are drawn for each image, support and query alike; how much
    they vary is drawn once for the task. For some tasks all images are less sharp, compressed by JPEG, or grey. Values
    are in [-1, 1].
    """
    generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
    pixels = ((images + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
    soft = rng.random() < 0.2
    sharpness = max(24, int(size * rng.uniform(0.35, 0.9))) if soft else size
    pixels = random_resized_crops(pixels, sharpness, float(rng.choice([0.5, 0.75, 1.0])), generator)
    if rng.random() < 0.2:
        pixels = _compressed(pixels, quality=int(rng.integers(30, 90)))
    images = to_network_range(pixels)
    if sharpness != size:
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    if rng.random() < 0.7:
        images = random_flips(images, generator)
    images = random_brightness_contrast(images, rng.uniform(0, 0.25), generator)
    white = uniform((len(images), 3, 1, 1), -1, 1, generator) * rng.uniform(0, 0.12)
    images = (images + 1) * (1 + white) - 1
    if rng.random() < 0.05:
        images = images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    return images.clamp(-1, 1).contiguous(memory_format=torch.channels_last)


def _compressed(images: Tensor, quality: int) -> Tensor:
    """Compress uint8 images (n, 3, h, w) by JPEG and read them again."""
    decoded = []
    for image in images.permute(0, 2, 3, 1).numpy():
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(image)).save(file, "JPEG", quality=quality)
        decoded.append(np.asarray(Image.open(file)))
    return torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2)


def cut_to_ink(images: Tensor, margin: float) -> Tensor:
    """Zoom each image (n, 3, h, w) to the square around its ink, the pixels darker than mid-grey.

    ``margin`` is the free space around the ink, as a share of the square's side. Images without ink stay as they are.
    """
    n, _, height, width = images.shape
    ink = images[:, 0] < 0
    boxes = []
    for marked, length in ((ink.any(2), height), (ink.any(1), width)):
        first, last = marked.byte().argmax(1), length - marked.flip(1).byte().argmax(1)
        boxes.append((torch.where(marked.any(1), first, 0), last))
    (top, bottom), (left, right) = boxes
    side = torch.maximum((bottom - top) / height, (right - left) / width) * (1 + margin)
    # affine_grid maps output coordinates to input coordinates, both from -1 to 1.
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, 0, 2], theta[:, 1, 2] = (left + right) / width - 1, (top + bottom) / height - 1
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
