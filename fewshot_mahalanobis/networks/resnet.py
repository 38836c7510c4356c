"""The feature extractor f_theta: a ResNet18 for 84 x 84 images whose blocks take FiLM parameters.

It departs from the ImageNet ResNet18 as CNAPS does: the first convolution is 5 x 5 with padding 1
and no max pool follows it, which keeps 41 x 41 positions of an 84 x 84 image. FiLM scales and shifts
the output of both BatchNorms of every block; the stem and the shortcuts are not adapted (Bateni et
al., CVPR 2020, figure 4 and the appendix on CNAPS).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.networks.film import Film, film_batch_norm
from fewshot_mahalanobis.networks.folding import FoldedConv

#: Feature maps of the four residual layers.
LAYER_WIDTHS = (64, 128, 256, 512)
#: Residual blocks in each layer.
BLOCKS_PER_LAYER = 2


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

    def forward(self, x: Tensor, film: Film | None = None) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w'); the positions of ``film`` are "bn1" and "bn2"."""
        if film is None:
            out = self.bn2(self.conv2(F.relu_(self.bn1(self.conv1(x)))))
        else:
            out = F.relu_(film_batch_norm(self.bn1, self.conv1(x), film["bn1"]))
            out = film_batch_norm(self.bn2, self.conv2(out), film["bn2"])
        return F.relu_(out.add_(self.downsample(x)))  # in place: maps are large and memory is slow


class FilmResNet18(nn.Module):
    """ResNet18 for 84 x 84 images in [-1, 1] with FiLM after the BatchNorms of its blocks.

    Other image sizes work too: the network ends in a global average pool.
    """

    out_features = LAYER_WIDTHS[-1]
    bfloat16_measured = True

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
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:  # where it would import torch's compiler
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def blocks(self) -> list[list[FilmBlock]]:
        """Residual blocks, ``blocks[layer][number]``: ``layers`` with its type."""
        return cast("list[list[FilmBlock]]", self.layers)

    @property
    def film_positions(self) -> dict[str, int]:
        """Names of the BatchNorms that FiLM follows -> their numbers of feature maps."""
        return {
            f"layers.{index}.{number}.bn{norm}": channels
            for index, channels in enumerate(LAYER_WIDTHS)
            for number in range(BLOCKS_PER_LAYER)
            for norm in (1, 2)
        }

    @property
    def for_set_encoder(self) -> FilmResNet18:
        """Itself: the set encoder reads the features."""
        return self

    @property
    def network(self) -> FilmResNet18:
        """Itself: it reads images as they are."""
        return self

    def prepared(self, images: Tensor) -> Tensor:
        """The images themselves."""
        return images

    def stem(self, images: Tensor) -> Tensor:
        """Images (n, 3, h, w) -> the maps (n, 64, h', w') that enter the first residual layer."""
        return F.relu_(self.bn1(self.conv1(images)))

    def layer(self, index: int, x: Tensor, film: Film | None = None) -> Tensor:
        """Residual layer ``index`` (0 to 3) on maps (n, C_in, h, w) -> (n, C, h', w')."""
        for number, block in enumerate(self.blocks[index]):
            x = block(x, None if film is None else film.within(f"layers.{index}.{number}"))
        return x

    def forward(self, images: Tensor, film: Film | None = None) -> Tensor:
        """Images -> features.

        Parameters
        ----------
        images : Tensor of shape (n, 3, h, w)
            In [-1, 1].
        film : Film, optional
            FiLM parameters of a generator. By default the network is not adapted.

        Returns
        -------
        Tensor of shape (n, 512)
            float32, whatever the precision of the convolutions.
        """
        return self.maps(images, film).float().mean(dim=(2, 3))

    def maps(self, images: Tensor, film: Film | None = None) -> Tensor:
        """Images (n, 3, h, w) -> the last maps (n, 512, h', w'); their mean is the feature vector."""
        x = self.stem(images)
        for index in range(len(self.layers)):
            x = self.layer(index, x, film)
        return x

    def for_inference(self, film: Film | None = None, dtype: torch.dtype | None = None) -> FoldedResNet18:
        """Return a network for inference, with BatchNorm and FiLM absorbed into its convolutions.

        Its weights are channels_last and in ``dtype``, by default that of this network.
        """
        return FoldedResNet18(self, film, dtype).eval()


class FoldedBlock(nn.Module):
    """A :class:`FilmBlock` for inference."""

    def __init__(self, block: FilmBlock, film: Film | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.conv1 = FoldedConv(block.conv1, block.bn1, None if film is None else film["bn1"], dtype, "relu")
        self.conv2 = FoldedConv(block.conv2, block.bn2, None if film is None else film["bn2"], dtype, "relu")
        self.downsample: nn.Module = nn.Identity()
        if isinstance(block.downsample, nn.Sequential):
            conv, bn = cast("tuple[nn.Conv2d, nn.BatchNorm2d]", tuple(block.downsample))
            self.downsample = FoldedConv(conv, bn, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w')."""
        return self.conv2(self.conv1(x), self.downsample(x))


class FoldedResNet18(nn.Module):
    """A :class:`FilmResNet18` for inference, adapted to one task or to none."""

    out_features = FilmResNet18.out_features

    def __init__(self, network: FilmResNet18, film: Film | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.stem = FoldedConv(network.conv1, network.bn1, dtype=dtype, activation="relu")
        self.blocks = nn.Sequential(
            *(
                FoldedBlock(block, None if film is None else film.within(f"layers.{index}.{number}"), dtype)
                for index, layer in enumerate(network.blocks)
                for number, block in enumerate(layer)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, h, w) in [-1, 1] -> features (n, 512), float32."""
        return self.blocks(self.stem(images)).float().mean(dim=(2, 3))
