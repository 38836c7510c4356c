"""A small network as a frozen backbone."""

from __future__ import annotations

from torch import nn

from fewshot_mahalanobis import SimpleCNAPS


class TwoLayers(nn.Sequential):
    """Normalised images (n, 3, s, s) -> features (n, 32)."""

    def __init__(self) -> None:
        pool = nn.AdaptiveAvgPool2d(1)
        super().__init__(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), pool, nn.Flatten())


def two_layers() -> SimpleCNAPS:
    """Model whose features are those of the two layers."""
    return SimpleCNAPS.from_backbone(TwoLayers(), image_size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
