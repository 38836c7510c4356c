"""The set encoder g_phi: a support set -> one vector z that describes the task.

Five layers of convolution, BatchNorm, ReLU and max pool, a global average pool, and the mean over the
images (Bateni et al., CVPR 2020, figure "Set encoders", a). The mean makes it blind to the order of the
support set. BatchNorm normalises with the statistics of the support set itself, at test time too, so
every image of the set takes part in every statistic: a large set is therefore encoded layer by layer,
not image by image.

BatchNorm and ReLU do not decrease where gamma >= 0, so they may trade places with the max pool; where
gamma < 0 the convolution is turned around with it, as gamma y = (-gamma) (-y). So a layer computes each
convolution once, takes its statistics, and keeps the pooled maps alone, a quarter of them, until the
statistics are complete. Memory: 64 * 42 * 42 numbers an image of 84 pixels, five times the image itself
(0.45 MB in float32), and the unpooled maps of one chunk.

In bfloat16 a last bit that differs in z is not a last bit any more once FiLM parameters and weights have been
rounded by it, so there z must be the same bits whatever the order of the set, its chunks or the number of threads.
It is: a float64 holds sums of bfloat16 numbers and of their squares exactly, and exact sums know no order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Length of the task representation z.
TASK_FEATURES = 64
#: Most images of a chunk: their maps of 84 x 84 positions fit into a processor's cache.
_MOST_IMAGES = 16


class SetEncoder(nn.Module):
    """Support images (n, 3, h, w) -> task representation z (64,)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, *[TASK_FEATURES] * 5)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths))
        # The scale and shift of BatchNorm: there are no running statistics to keep or to change.
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(TASK_FEATURES, track_running_stats=False) for _ in range(len(self.convs))
        )

    @property
    def layers(self) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
        """Convolution and BatchNorm of each layer."""
        return cast("list[tuple[nn.Conv2d, nn.BatchNorm2d]]", list(zip(self.convs, self.norms, strict=True)))

    def forward(self, support_images: Tensor, chunk_size: int | None = None) -> Tensor:
        """Encode a support set.

        Parameters
        ----------
        support_images : Tensor of shape (n, 3, h, w)
            In [-1, 1]; sides of 32 pixels or more.
        chunk_size : int, optional
            Most images in work at a time. It bounds memory and does not change the result beyond rounding. No
            gradient passes where it is given.

        Returns
        -------
        Tensor of shape (64,)
        """
        if min(support_images.shape[2:]) < 2 ** len(self.convs):
            raise ValueError(f"images must be at least 32 x 32 pixels, not {tuple(support_images.shape[2:])}")
        if chunk_size is not None:
            return self._in_chunks(support_images, min(chunk_size, _MOST_IMAGES))
        x = support_images
        for conv, norm in self.layers:
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return x.float().mean(dim=(0, 2, 3))

    @torch.no_grad()
    def _in_chunks(self, support_images: Tensor, chunk_size: int) -> Tensor:
        """The same with each convolution computed once and the unpooled maps of one chunk in memory."""
        maps = list(support_images.split(chunk_size))
        normalise: Callable[[Tensor], Tensor] = nn.Identity()  # what the layer before left
        for conv, norm in self.layers:
            assert conv.bias is not None
            sign = torch.ones_like(norm.weight).copysign(norm.weight)
            weight, bias = conv.weight * sign[:, None, None, None], conv.bias * sign
            parts = []
            for index, chunk in enumerate(maps):
                y = F.conv2d(normalise(chunk), weight, bias, padding=1)
                parts.extend(_statistics(y))
                maps[index] = F.max_pool2d(y, 2)
            mean, variance = _of_all(parts, torch.promote_types(y.dtype, torch.float32))
            normalise = partial(_batch_norm_relu, norm, mean, variance)
        of_images = torch.cat([normalise(chunk).float().mean(dim=(2, 3)) for chunk in maps])
        return mean_over_set(of_images)


def mean_over_set(x: Tensor) -> Tensor:
    """Mean over the images of ``x`` (n, c) whose last bit does not tell their order: (c,), in the dtype of ``x``."""
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
    return x.to(wide).mean(dim=0).to(x.dtype)


def _statistics(y: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Count, mean (c,) and unbiased variance (c,) of each of the maps (b, c, h, w): of all images, or of one each."""
    if y.dtype == torch.bfloat16 and y.device.type != "mps":  # which has no float64
        return [_exact_statistics(image) for image in y]  # one at a time stays in the cache as float64
    dtype = torch.promote_types(y.dtype, torch.float32)
    mean, variance = (torch.zeros(y.shape[1], dtype=dtype, device=y.device) for _ in range(2))
    # BatchNorm in training mode is the fastest way to both: with momentum 1 it stores them as they are.
    F.batch_norm(y, mean, variance, training=True, momentum=1.0)
    return [(y.numel() // y.shape[1], mean, variance)]


def _exact_statistics(y: Tensor) -> tuple[int, Tensor, Tensor]:
    """Count, mean and unbiased variance, float64, of bfloat16 maps (c, h, w) from sums without any rounding."""
    values = y.permute(1, 2, 0).flatten(0, 1).double()
    count, total, squares = len(values), values.sum(dim=0), values.square_().sum(dim=0)
    return count, total / count, (squares - total * (total / count)).clamp(min=0) / (count - 1)


def _of_all(parts: list[tuple[int, Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the whole from those of its parts (Chan, Golub & LeVeque, 1983)."""
    device = parts[0][1].device
    counts = torch.tensor([[count] for count, _, _ in parts], dtype=torch.float64, device="cpu")
    means = torch.stack([mean for _, mean, _ in parts]).cpu().double()
    variances = torch.stack([variance for _, _, variance in parts]).cpu().double()
    mean = (counts * means).sum(dim=0) / counts.sum()
    squares = ((counts - 1) * variances + counts * (means - mean).square()).sum(dim=0)
    return mean.to(device, dtype), (squares / counts.sum()).to(device, dtype)


def _batch_norm_relu(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, x: Tensor) -> Tensor:
    """ReLU of BatchNorm by given statistics, of maps whose sign is that of gamma."""
    return F.relu_(F.batch_norm(x, mean, variance, norm.weight.abs(), norm.bias, training=False, eps=norm.eps))
