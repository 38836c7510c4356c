"""EfficientNet-Lite0 for inference: BatchNorms, FiLM, shortcuts and ReLU6 are inside its convolutions.

Its depthwise convolutions are bound by memory, so each pass over the maps that is saved counts, and so does their
precision: in bfloat16 all maps are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.networks.efficientnet import DepthwiseSeparable, EfficientNet, InvertedBottleneck
from fewshot_mahalanobis.networks.film import Film, FoldedConv


class FoldedLite0(nn.Module):
    """An EfficientNet-Lite0 adapted to one task, or to none.

    Parameters
    ----------
    network : EfficientNet
    film : Film, optional
    dtype : torch.dtype, optional
        Of weights and maps.
    """

    def __init__(self, network: EfficientNet, film: Film | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        film = Film({}) if film is None else film
        self.stem = FoldedConv(network.conv_stem, network.bn1, film.get("bn1"), dtype, "relu6")
        kinds = (DepthwiseSeparable, InvertedBottleneck)
        blocks = [(name, module) for name, module in network.named_modules() if isinstance(module, kinds)]
        self.blocks = nn.Sequential(*(FoldedBottleneck(block, film.within(name), dtype) for name, block in blocks))
        self.head = FoldedConv(network.conv_head, network.bn2, film.get("bn2"), dtype, "relu6")

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, s, s), normalised -> features (n, 1280), float32."""
        return self.head(self.blocks(self.stem(images.to(self.stem.weight.dtype)))).float().mean((2, 3))


class FoldedBottleneck(nn.Module):
    """An :class:`InvertedBottleneck` or a :class:`DepthwiseSeparable` block for inference."""

    def __init__(self, block: InvertedBottleneck | DepthwiseSeparable, film: Film, dtype: torch.dtype | None) -> None:
        super().__init__()
        if isinstance(block, InvertedBottleneck):
            self.skips, last = block.skips, (block.conv_pwl, block.bn3, film.get("bn3"))
            inner = [(block.conv_pw, block.bn1, film.get("bn1")), (block.conv_dw, block.bn2, film.get("bn2"))]
        else:
            self.skips, last = False, (block.conv_pw, block.bn2, film.get("bn2"))
            inner = [(block.conv_dw, block.bn1, film.get("bn1"))]
        self.inner = nn.Sequential(*(FoldedConv(*layer, dtype, "relu6") for layer in inner))
        self.last = FoldedConv(*last, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w')."""
        return self.last(self.inner(x), x if self.skips else None)
