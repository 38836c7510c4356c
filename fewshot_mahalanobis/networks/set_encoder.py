"""The set encoder g_phi: a support set -> one vector z that describes the task.

Five layers of convolution, BatchNorm, ReLU and max pool, a global average pool, and the mean over the
images (Bateni et al., CVPR 2020, figure "Set encoders", a). The mean makes it blind to the order of the
support set. BatchNorm normalises with the statistics of the support set itself, at test time too, so
every image of the set takes part in every statistic: a large set is therefore encoded layer by layer,
not image by image.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Length of the task representation z.
TASK_FEATURES = 64


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

    def forward(self, support_images: Tensor, chunk_size: int | None = None) -> Tensor:
        """Encode a support set.

        Parameters
        ----------
        support_images : Tensor of shape (n, 3, h, w)
            In [-1, 1]; sides of 32 pixels or more.
        chunk_size : int, optional
            Images in work at a time. It bounds memory and does not change the result beyond rounding;
            no gradient passes when it divides the set.

        Returns
        -------
        Tensor of shape (64,)
        """
        if min(support_images.shape[2:]) < 2 ** len(self.convs):
            raise ValueError(f"images must be at least 32 x 32 pixels, not {tuple(support_images.shape[2:])}")
        x = support_images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if chunk_size is None or len(x) <= chunk_size:
                x = F.max_pool2d(F.relu(norm(conv(x))), 2)
            else:
                x = _layer_in_chunks(x, conv, norm, chunk_size)  # type: ignore[arg-type]
        return x.float().mean(dim=(0, 2, 3))


@torch.no_grad()
def _layer_in_chunks(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d, chunk_size: int) -> Tensor:
    """One layer with the statistics of the whole set, holding the unpooled maps of one chunk only.

    The convolution is computed twice: its maps are four times as large as what the layer passes on.
    """
    chunks = x.split(chunk_size)
    count, mean, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for chunk in chunks:  # Chan, Golub & LeVeque (1983): means and sums of squares of parts combine exactly
        variance, average = torch.var_mean(conv(chunk).double(), dim=(0, 2, 3), correction=0)
        size = chunk.shape[0] * chunk.shape[2] * chunk.shape[3]
        difference = average - mean.to(average.device)
        squares = squares.to(average.device) + variance * size + difference**2 * (count * size / (count + size))
        mean = mean.to(average.device) + difference * (size / (count + size))
        count += size
    mean, variance = mean.float(), (squares / count).float()
    out = []
    for chunk in chunks:
        y = F.batch_norm(conv(chunk), mean, variance, norm.weight, norm.bias, training=False, eps=norm.eps)
        out.append(F.max_pool2d(F.relu(y), 2))
    return torch.cat(out)
