"""The set encoder g_phi: a support set -> one vector z that describes the task.

Five layers of convolution, BatchNorm, ReLU and max pool, a global average pool, and the mean over the
images (Bateni et al., CVPR 2020, figure "Set encoders", a). The mean makes it blind to the order of the
support set. BatchNorm normalises with the statistics of the support set itself, at test time too, so
every image of the set takes part in every statistic: a large set is therefore encoded layer by layer,
not image by image.

BatchNorm and ReLU do not decrease where gamma >= 0, so they may trade places with the max pool; where
gamma < 0 the convolution is turned around with it, as gamma y = (-gamma) (-y). So a layer takes the statistics of
its convolution and keeps the pooled maps alone, a quarter of them, until the statistics are complete. Those of the
first layer, 64 * 84 * 84 numbers for an image of 84 pixels, are known before it is computed, from the covariance of the
patches that it looks at. Memory: the 64 * 21 * 21 numbers that the second layer leaves of an image, a third more than
its pixels are, and the unpooled maps of one chunk.

In bfloat16 a last bit that differs in z is not a last bit any more once FiLM parameters and weights have been
rounded by it, so there z should be the same bits whatever the order of the set, its chunks or the number of
threads. Hence each row of each map is summed by itself, in float32, and the rows in float64, as the patches are, whose
rounding is far below float32's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.networks.patches import patch_moments

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
        place = support_images.device.type
        dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else support_images.dtype
        kept = list(support_images.to(dtype).split(chunk_size))
        ready: Callable[[Tensor], Tensor] = nn.Identity()  # from what is kept to the input of the layer
        for number, (conv, norm) in enumerate(self.layers):
            assert conv.bias is not None
            sign = torch.ones_like(norm.weight).copysign(norm.weight)
            weight, bias = (conv.weight * sign[:, None, None, None]).to(dtype), (conv.bias * sign).to(dtype)
            convolve = partial(F.conv2d, weight=weight, bias=bias, padding=1)
            if number == 0:
                statistics = _of_patches(kept, weight, bias)
            else:
                parts = []
                for index, chunk in enumerate(kept):
                    y = convolve(ready(chunk))
                    parts.append(_statistics(y))
                    kept[index] = _max_pool(y)
                means, variances = (torch.cat(part) for part in zip(*parts, strict=True))
                statistics = _of_parts(means, variances, 0)
            mean, variance = (of_all.to(norm.weight.dtype) for of_all in statistics)
            normalise = partial(_batch_norm_relu, mean, variance, norm.weight.abs(), norm.bias, norm.eps)
            ready = normalise if number > 0 else partial(_first_layer, convolve, normalise)
        of_images = torch.cat([ready(chunk).float().mean(dim=(2, 3)) for chunk in kept])
        return mean_over_set(of_images)


def mean_over_set(x: Tensor) -> Tensor:
    """Mean over the images of ``x`` (n, c) whose last bit does not tell their order: (c,), in the dtype of ``x``."""
    return _mean(x, 0).to(x.dtype)


def _mean(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim, dtype=torch.float32 if x.device.type == "mps" else torch.float64)  # MPS has no float64


def _of_patches(images: list[Tensor], weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the maps that a convolution will give, both (c,)."""
    mean, covariance = patch_moments(images)
    w = weight.flatten(1).to(mean.dtype)
    return w @ mean + bias, ((w @ covariance) * w).sum(1).clamp_min(0)


def _statistics(y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each image's maps (b, c, h, w), both (b, c)."""
    rows = y.permute(0, 2, 3, 1).to(torch.promote_types(y.dtype, torch.float32), copy=True)
    mean = rows.mean(dim=2)
    return _of_parts(mean, rows.sub_(mean[:, :, None]).square_().mean(dim=2), 1)


def _of_parts(means: Tensor, variances: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of all from those of parts of one size, which lie along ``dim``."""
    mean = _mean(means, dim)
    between = (means - mean.to(means.dtype).unsqueeze(dim)).square_()
    return mean, _mean(variances, dim) + _mean(between, dim)


def _first_layer(convolve: Callable[[Tensor], Tensor], normalise: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """The first layer, whose maps are used at once."""
    return normalise(_max_pool(convolve(images)))


def _max_pool(y: Tensor) -> Tensor:
    """``F.max_pool2d(y, 2)``, without the int64 map of where each maximum was, four times as large as bfloat16 maps."""
    height, width = y.shape[2] // 2 * 2, y.shape[3] // 2 * 2
    y = torch.maximum(y[:, :, 0:height:2], y[:, :, 1:height:2])
    return torch.maximum(y[..., 0:width:2], y[..., 1:width:2])


def _batch_norm_relu(mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, maps: Tensor) -> Tensor:
    """ReLU of BatchNorm by given statistics, of maps whose sign is that of gamma."""
    return F.relu_(F.batch_norm(maps, mean, variance, weight, bias, training=False, eps=eps))
