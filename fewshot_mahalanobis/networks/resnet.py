"""The feature extractor f_theta: a ResNet18 for 84 x 84 images whose blocks take FiLM parameters.

It departs from the ImageNet ResNet18 as CNAPS does: the first convolution is 5 x 5 with padding 1
and no max pool follows it, which keeps 41 x 41 positions of an 84 x 84 image. FiLM (Perez et al.,
AAAI 2018) scales and shifts the output of every BatchNorm inside a block; the stem and the shortcuts
are not adapted (Bateni et al., CVPR 2020, appendix "CNAPS details").
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Feature maps of the four residual layers.
LAYER_WIDTHS = (64, 128, 256, 512)
#: Residual blocks in each layer.
BLOCKS_PER_LAYER = 2


class BlockFilm(NamedTuple):
    """FiLM parameters of one residual block, each of shape (C,): x -> gamma * x + beta."""

    gamma1: Tensor
    beta1: Tensor
    gamma2: Tensor
    beta2: Tensor


#: FiLM parameters of one residual layer: one ``BlockFilm`` a block.
LayerFilm = Sequence[BlockFilm]
#: FiLM parameters of the whole network: one ``LayerFilm`` a layer.
Film = Sequence[LayerFilm]


def _film(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return x * gamma.to(x.dtype)[:, None, None] + beta.to(x.dtype)[:, None, None]


class FilmBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut; FiLM follows each of their BatchNorms."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor, film: BlockFilm | None = None) -> Tensor:
        out = self.bn1(self.conv1(x))
        if film is not None:
            out = _film(out, film.gamma1, film.beta1)
        out = self.bn2(self.conv2(F.relu(out)))
        if film is not None:
            out = _film(out, film.gamma2, film.beta2)
        return F.relu(out + self.downsample(x))

    def fold_(self, film: BlockFilm | None) -> None:
        """Absorb BatchNorm and FiLM into the convolutions, in place. No gradient passes."""
        gamma1, beta1, gamma2, beta2 = film if film is not None else (None, None, None, None)
        self.conv1, self.bn1 = _folded(self.conv1, self.bn1, gamma1, beta1), nn.Identity()
        self.conv2, self.bn2 = _folded(self.conv2, self.bn2, gamma2, beta2), nn.Identity()
        if isinstance(self.downsample, nn.Sequential):
            self.downsample = _folded(self.downsample[0], self.downsample[1])


def _folded(
    conv: nn.Conv2d, bn: nn.BatchNorm2d, gamma: Tensor | None = None, beta: Tensor | None = None
) -> nn.Conv2d:
    """One convolution with bias that computes gamma * bn(conv(x)) + beta, bn in inference mode.

    The products are taken in float64, so that folding costs one rounding and no more.
    """
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError("a BatchNorm without running statistics cannot be folded")
    scale = bn.weight.double() / torch.sqrt(bn.running_var.double() + bn.eps)
    shift = bn.bias.double() - bn.running_mean.double() * scale
    if gamma is not None and beta is not None:
        scale, shift = scale * gamma.double(), shift * gamma.double() + beta.double()
    folded = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        device="meta",
    )
    weight = conv.weight.double() * scale[:, None, None, None]
    folded.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=False)
    folded.bias = nn.Parameter(shift.to(conv.weight.dtype), requires_grad=False)
    return folded


class FilmResNet18(nn.Module):
    """ResNet18 for 84 x 84 images in [-1, 1] with FiLM after the BatchNorms of its blocks.

    Any image size from 32 up works: the network ends in a global average pool.
    """

    out_features = LAYER_WIDTHS[-1]

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, LAYER_WIDTHS[0], 5, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(LAYER_WIDTHS[0])
        self.layers = nn.ModuleList()
        in_channels = LAYER_WIDTHS[0]
        for index, channels in enumerate(LAYER_WIDTHS):
            blocks = nn.ModuleList()
            for block in range(BLOCKS_PER_LAYER):
                blocks.append(FilmBlock(in_channels, channels, 2 if index > 0 and block == 0 else 1))
                in_channels = channels
            self.layers.append(blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stem(self, images: Tensor) -> Tensor:
        """Images (n, 3, h, w) -> the maps (n, 64, h', w') that enter the first residual layer."""
        return F.relu(self.bn1(self.conv1(images)))

    def layer(self, index: int, x: Tensor, film: LayerFilm | None = None) -> Tensor:
        """Residual layer ``index`` (0 to 3) on maps ``x`` (n, C, h, w)."""
        for number, block in enumerate(self.layers[index]):  # type: ignore[arg-type]
            x = block(x, None if film is None else film[number])
        return x

    def forward(self, images: Tensor, film: Film | None = None) -> Tensor:
        """Images (n, 3, h, w) in [-1, 1] -> features (n, 512).

        Parameters
        ----------
        images : Tensor of shape (n, 3, h, w)
            In [-1, 1].
        film : list of 4 lists of 2 BlockFilm, optional
            From a FiLM generator; without it the network is not adapted.
        """
        x = self.stem(images)
        for index in range(len(self.layers)):
            x = self.layer(index, x, None if film is None else film[index])
        return x.float().mean(dim=(2, 3))

    @torch.no_grad()
    def folded(self, film: Film | None = None) -> FilmResNet18:
        """A copy with BatchNorm and FiLM absorbed into its convolutions, for inference alone.

        Adaptation is constant within a task, so an adapted network costs what a plain one does.
        """
        network = copy.deepcopy(self).requires_grad_(False)
        network.conv1, network.bn1 = _folded(network.conv1, network.bn1), nn.Identity()
        for index, blocks in enumerate(network.layers):
            for number, block in enumerate(blocks):  # type: ignore[arg-type]
                block.fold_(None if film is None else film[index][number])
        return network
