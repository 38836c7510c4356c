"""The set encoder g_phi: a support set -> one vector z that describes the task.

Five layers of convolution, BatchNorm, ReLU and max pool, a global average pool, and the mean over the
images (Bateni et al., CVPR 2020, figure "Set encoders", a). The mean makes it blind to the order of the
support set. BatchNorm normalises with the statistics of the support set itself, at test time too, so
every image takes part in every statistic: a set is encoded layer by layer, not image by image.

Within a layer, images pass in batches, which bounds memory. BatchNorm and ReLU do not decrease where gamma >= 0, so
they commute with the max pool; where gamma < 0 the convolution changes sign with it, as gamma y = (-gamma) (-y). So a
layer keeps the pooled maps alone, a quarter of them, until the statistics of the whole set are known. The first two
layers have larger maps than images: a large set does not keep them, and computes them again for the next layer. On a
processor each core has a batch at a time.

A one-ulp change in z can flip bfloat16 rounding downstream, in FiLM parameters and folded weights. So statistics do not
depend on the order of the set or its batches: each column of each map is summed by itself, in float32, and the columns
in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fewshot_mahalanobis.cores import map_in_threads

Item = TypeVar("Item")
Result = TypeVar("Result")
Run: TypeAlias = Callable[..., Any]
Steps: TypeAlias = list[Callable[[Tensor], Tensor]]

#: Length of the task representation z.
TASK_FEATURES = 64
#: Images at a time on one core. Larger batches make every layer allocate fresh, zeroed pages, and share cores worse.
MAX_CPU_BATCH = 4
#: Most entries of a layer's maps that are kept in place of the smaller images, 34 MB: 128 images of 64 x 64 pixels in
#: layer 1.
MAX_KEPT = 2**23


class SetEncoder(nn.Module):
    """Support images (n, 3, h, w) -> task representation z (64,)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, *[TASK_FEATURES] * 5)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths))
        # Scale and shift alone: there are no running statistics to keep or to change.
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(TASK_FEATURES, track_running_stats=False) for _ in range(len(self.convs))
        )

    @property
    def layers(self) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
        """Convolution and BatchNorm of each layer."""
        return cast("list[tuple[nn.Conv2d, nn.BatchNorm2d]]", list(zip(self.convs, self.norms, strict=True)))

    def forward(self, support_images: Tensor | Iterable[Tensor], batch_size: int | None = None) -> Tensor:
        """Encode a support set.

        Parameters
        ----------
        support_images : Tensor of shape (n, 3, h, w), or such batches of it
            In [-1, 1]; sides of 32 pixels or more. A list of batches is emptied, so that they are freed on the way.
        batch_size : int, optional
            Process at most this many images at a time. It bounds memory, with gradients too: activations are then
            computed again in the backward pass.

        Returns
        -------
        Tensor of shape (64,)
        """
        return mean_over_set(self.encodings(support_images, batch_size))

    def encodings(self, support_images: Tensor | Iterable[Tensor], batch_size: int | None = None) -> Tensor:
        """Encode each image of a set, shape (n, 64); the mean of the encodings is z."""
        batches = [part for images in in_batches(support_images, batch_size) for part in self._parts(images)]
        if isinstance(support_images, list):
            support_images.clear()
        training = torch.is_grad_enabled()
        run: Run = recomputed if training and len(batches) > 1 else _called
        each = map_in_threads if batches[0].device.type == "cpu" and not training else _one_by_one
        steps: Steps = []  # from what is kept of a batch to the layer's input
        skipped = 0
        for conv, norm in self.layers:
            keep = training or _may_be_kept(batches, skipped)
            moments = each(partial(_moments, batches, keep, run, steps, conv, norm), range(len(batches)))
            means, variances = (torch.cat(parts) for parts in zip(*moments, strict=True))
            mean, variance = _combined(means, variances, 0)
            scale = norm.weight.abs() * torch.rsqrt(variance + norm.eps)
            assert conv.bias is not None
            shift = norm.bias - mean * scale + 0 * conv.bias  # unused in _pooled: its gradient is 0, not None
            normalised = partial(_normalised, scale=scale.to(norm.weight), shift=shift.to(norm.bias))
            if keep:
                steps, skipped = [normalised], 0
            else:
                steps, skipped = [*steps, partial(_layer, conv, norm, normalised)], skipped + 1
        return torch.cat(each(lambda maps: _after(run, steps, maps).float().mean(dim=(2, 3)), batches))

    def _parts(self, images: Tensor) -> tuple[Tensor, ...]:
        """Split a batch into parts that are computed one at a time."""
        if min(images.shape[2:]) < 2 ** len(self.convs):
            raise ValueError(f"images must be at least 32 x 32 pixels, not {tuple(images.shape[2:])}")
        small = images.device.type == "cpu" and not torch.is_grad_enabled()
        # PyTorch computes small maps of a single image by another library, whose sums depend on the number of threads.
        return images.tensor_split(-(-len(images) // MAX_CPU_BATCH)) if small else (images,)


def in_batches(images: Tensor | Iterable[Tensor], batch_size: int | None) -> Iterable[Tensor]:
    """Batches of images (n, 3, h, w), which may come as batches already."""
    return images.split(batch_size or len(images)) if isinstance(images, Tensor) else images


def _may_be_kept(batches: list[Tensor], skipped: int) -> bool:
    """Whether pooled maps may replace their batches, ``skipped`` layers after the last that did."""
    entries = sum(images[:, 0].numel() for images in batches) // 4 ** (1 + skipped) * TASK_FEATURES
    return entries <= max(MAX_KEPT, sum(images.numel() for images in batches))


def _one_by_one(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [function(item) for item in items]


def _called(function: Callable[..., Any], *arguments: object) -> Any:
    return function(*arguments)


def recomputed(function: Callable[..., Result], *arguments: object) -> Result:
    """Return ``function(*arguments)`` but keep no activations: they are computed again in the backward pass.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def mean_over_set(x: Tensor) -> Tensor:
    """Mean (c,) over the images of ``x`` (n, c), in its dtype; no bit depends on their order."""
    return _mean(x, 0).to(x.dtype)


def _mean(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim, dtype=torch.float32 if x.device.type == "mps" else torch.float64)  # MPS has no float64


def _moments(
    batches: list[Tensor], keep: bool, run: Run, steps: Steps, conv: nn.Conv2d, norm: nn.BatchNorm2d, index: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance of each image's maps, both (b, c), in a batch; its maps take its place if they are kept."""
    maps, means, variances = run(_pooled, conv, norm, _after(run, steps, batches[index]))
    if keep:
        batches[index] = maps
    return means, variances


def _after(run: Run, steps: Steps, maps: Tensor) -> Tensor:
    for step in steps:
        maps = run(step, maps)
    return maps


def _pooled(conv: nn.Conv2d, norm: nn.BatchNorm2d, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Max-pooled maps of a convolution with the sign of gamma; mean and variance of each image's maps, both (b, c).

    The convolution's bias is left out: BatchNorm subtracts it again, and the rounding is smaller without it.
    """
    y = _convolved(conv, norm, images)
    means, variances = _ColumnMoments.apply(y)
    return _max_pool(y), *_combined(means, variances, 1)


def _layer(conv: nn.Conv2d, norm: nn.BatchNorm2d, normalised: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Maps of a layer whose statistics are known."""
    return normalised(_max_pool(_convolved(conv, norm, images)))


def _convolved(conv: nn.Conv2d, norm: nn.BatchNorm2d, images: Tensor) -> Tensor:
    sign = torch.ones_like(norm.weight).copysign(norm.weight.detach())
    return F.conv2d(images, conv.weight * sign[:, None, None, None], padding=1)


def _max_pool(y: Tensor) -> Tensor:
    """``F.max_pool2d(y, 2)``; without gradient, without the int64 map of where each maximum was."""
    if y.requires_grad:
        return F.max_pool2d(y, 2)
    height, width = y.shape[2] // 2 * 2, y.shape[3] // 2 * 2
    y = torch.maximum(y[:, :, 0:height:2], y[:, :, 1:height:2])
    return torch.maximum(y[..., 0:width:2], y[..., 1:width:2])


class _ColumnMoments(torch.autograd.Function):
    """Mean and biased variance of each column of maps (b, c, h, w), both (b, w, c).

    A function of its own, as autograd would keep two more tensors of the maps' size.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        columns, dtype = y.permute(0, 2, 3, 1), torch.promote_types(y.dtype, torch.float32)
        if y.device.type == "cpu":
            # The first half of BatchNorm, on h rows of w c entries: it reads the maps twice and writes none.
            zeros = torch.zeros(columns[0, 0].numel(), dtype=dtype, device="cpu")
            moments = [torch.batch_norm_update_stats(rows, zeros, zeros, 0.0) for rows in columns.flatten(2)]
            means, variances = (torch.stack(part).unflatten(1, columns.shape[2:]) for part in zip(*moments))
        else:
            variances, means = torch.var_mean(columns.to(dtype), dim=1, correction=0)
        ctx.save_for_backward(y, means)
        return means, variances

    @staticmethod
    def backward(ctx: Any, for_means: Tensor, for_variances: Tensor) -> Tensor:
        y, means = ctx.saved_tensors
        gradient = y.permute(0, 2, 3, 1).to(means.dtype, copy=True).sub_(means[:, None])
        gradient.mul_(2 * for_variances[:, None]).add_(for_means[:, None]).div_(y.shape[2])
        return gradient.permute(0, 3, 1, 2).to(y.dtype)


def _combined(means: Tensor, variances: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a set from those of its parts of equal size, which lie along ``dim``."""
    mean = _mean(means, dim)
    return mean, _mean(variances, dim) + _mean((means - mean.to(means.dtype).unsqueeze(dim)).square(), dim)


def _normalised(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """ReLU of scale * maps + shift, by the fused BatchNorm with mean 0 and variance 1, epsilon included."""
    eps = 2.0**-10  # PyTorch 2.11 refuses 0. In float32, 1 - eps and its sum with eps are exact
    mean, variance = torch.zeros_like(scale), torch.full_like(scale, 1 - eps)
    return F.relu_(F.batch_norm(maps, mean, variance, scale, shift, training=False, eps=eps))
