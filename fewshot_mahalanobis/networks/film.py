"""FiLM, feature-wise linear modulation: gamma * x + beta per feature map (Perez et al., AAAI 2018).

A FiLM layer that follows a BatchNorm in inference mode is that BatchNorm with another scale and shift,
and both can be absorbed by the convolution before them. The first form is used where gradients flow to
gamma and beta, the second once a task's adaptation is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BlockFilm(NamedTuple):
    """FiLM parameters of one residual block, each of shape (C,)."""

    gamma1: Tensor
    beta1: Tensor
    gamma2: Tensor
    beta2: Tensor


#: FiLM parameters of one residual layer: one ``BlockFilm`` a block.
LayerFilm = Sequence[BlockFilm]
#: FiLM parameters of the whole network: one ``LayerFilm`` a layer.
Film = Sequence[LayerFilm]


def film_batch_norm(bn: nn.BatchNorm2d, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Gamma * bn(x) + beta, with ``bn`` in inference mode whatever mode the module is in.

    Scale and shift stay in float32 when x is in bfloat16, where gamma = 1.002 would round to 1.
    """
    weight, bias = bn.weight * gamma, bn.bias * gamma + beta
    return F.batch_norm(x, bn.running_mean, bn.running_var, weight, bias, training=False, eps=bn.eps)


class FoldedConv(nn.Module):
    """A convolution with bias that computes gamma * bn(conv(x)) + beta, ``bn`` in inference mode.

    Its weights are channels_last, in ``dtype`` if that is given. It is no ``nn.Conv2d``: that would draw initial
    weights, which takes longer than to fold.
    """

    @torch.no_grad()
    def __init__(
        self,
        conv: nn.Conv2d,
        bn: nn.BatchNorm2d,
        gamma: Tensor | None = None,
        beta: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert bn.running_mean is not None
        assert bn.running_var is not None
        # One number a feature map: float64 costs nothing here and saves a rounding.
        scale = bn.weight.double() / torch.sqrt(bn.running_var.double() + bn.eps)
        shift = bn.bias.double() - bn.running_mean.double() * scale
        if gamma is not None and beta is not None:
            scale, shift = scale * gamma.double(), shift * gamma.double() + beta.double()
        dtype = dtype or conv.weight.dtype
        weight = conv.weight * scale.to(conv.weight.dtype)[:, None, None, None]
        self.weight = nn.Parameter(weight.to(dtype, memory_format=torch.channels_last), requires_grad=False)
        self.bias = nn.Parameter(shift.to(dtype), requires_grad=False)
        self.stride, self.padding = conv.stride, conv.padding

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w')."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
