"""The FiLM generators psi_phi: task representation -> FiLM parameters of every block of the network.

Bateni et al., CVPR 2020, appendix on CNAPS; Requeima et al., NeurIPS 2019. The generator proper conditions
every residual layer on z alone. The auto-regressive one conditions layer j also on the support set's
activations after the already adapted layers 1 to j - 1.

Both compute in float32 under autocast too: a gamma of 1.002 would round to 1, and rounding weights that are multiplied
by a single vector takes longer than multiplying them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.gaussians.support import full_precision
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.resnet import BLOCKS_PER_LAYER, LAYER_WIDTHS, FilmResNet18
from fewshot_mahalanobis.networks.set_encoder import TASK_FEATURES, mean_over_set, recomputed

#: The FiLM vectors of a block, under which their networks stand in a checkpoint.
_VECTORS = ("gamma1", "beta1", "gamma2", "beta2")


class ResidualDense(nn.Linear):
    """W x + b + x."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        return super().forward(input) + input


def _residual_mlp(channels: int) -> list[nn.Module]:
    """Three residual dense layers with ReLU between them."""
    return [
        ResidualDense(channels, channels),
        nn.ReLU(),
        ResidualDense(channels, channels),
        nn.ReLU(),
        ResidualDense(channels, channels),
    ]


def _new_scales(channels: int) -> nn.Parameter:
    """Scales (channels,) that hardly adapt at first."""
    scales = torch.empty(channels)
    if not scales.is_meta:  # where it would import torch's compiler
        nn.init.normal_(scales, 0.0, 0.001)
    return nn.Parameter(scales)


class _BlockProcessors(nn.Module):
    """One small network and one vector of scales for each of the four FiLM vectors of each block of a layer."""

    def __init__(self, channels: int, conditioned_on: int | None = None) -> None:
        super().__init__()
        self.processors = nn.ModuleList()
        self.scales = nn.ModuleList()
        for _ in range(BLOCKS_PER_LAYER):
            networks, scales = nn.ModuleDict(), nn.ParameterDict()
            for name in _VECTORS:
                first = [nn.Linear(conditioned_on, channels), nn.ReLU()] if conditioned_on is not None else []
                networks[name] = nn.Sequential(*first, *_residual_mlp(channels))
                scales[name] = _new_scales(channels)
            self.processors.append(networks)
            self.scales.append(scales)

    def film(self, h: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Vector h that the layer is conditioned on -> FiLM parameters of its blocks, "0.bn1" to "1.bn2"."""
        film = {}
        for number, (networks, scales) in enumerate(zip(self.processors, self.scales, strict=True)):
            v = {name: networks[name](h) * scales[name] for name in _VECTORS}  # type: ignore[index]
            # gamma is generated about 1: a fresh generator leaves the network nearly as it is.
            film[f"{number}.bn1"] = v["gamma1"] + 1, v["beta1"]
            film[f"{number}.bn2"] = v["gamma2"] + 1, v["beta2"]
        return film


class LayerGenerator(_BlockProcessors):
    """FiLM parameters of one residual layer of ``channels`` maps from the task representation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.shared = nn.Sequential(nn.Linear(TASK_FEATURES, channels), nn.ReLU())

    def forward(self, z: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Task representation (64,) -> FiLM parameters of the layer's blocks."""
        return self.film(self.shared(z))


class AutoregressiveLayerGenerator(_BlockProcessors):
    """FiLM parameters of one residual layer from z and the support activations that enter the layer."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(channels, conditioned_on=channels + TASK_FEATURES)
        self.shared = nn.Sequential(nn.Linear(in_channels, channels), nn.ReLU(), *_residual_mlp(channels))
        self.shared_post = nn.Sequential(nn.Linear(channels, channels), nn.ReLU())

    def forward(self, z: Tensor, activations: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Z (64,) and mean-pooled support activations (n, C_in) -> FiLM parameters of the layer's blocks."""
        h = self.shared_post(mean_over_set(self.shared(activations)))
        return self.film(torch.cat([h, z]))


class FilmGenerator(nn.Module):
    """FiLM parameters of a network from the task representation. A subclass makes the modules and defines ``forward``.

    Parameters that scale what is generated have ``scales.`` in their names.
    """

    def penalty(self) -> Tensor:
        """Sum of squares of all scales, the quantity that meta-training penalises."""
        return torch.stack([p.square().sum() for name, p in self.named_parameters() if "scales." in name]).sum()

    def forward(self, z: Tensor, support_batches: Iterable[Tensor], extractor: Any) -> Film:
        """Z (64,), batches (b, 3, h, w) of the support set and the frozen network -> FiLM parameters."""
        raise NotImplementedError


class LayerwiseFilmGenerator(FilmGenerator):
    """FiLM parameters of the four residual layers from the task representation z alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LayerGenerator(channels) for channels in LAYER_WIDTHS)

    def forward(self, z: Tensor, support_batches: Iterable[Tensor], extractor: FilmResNet18) -> Film:
        """Z (64,) -> FiLM parameters. The support images and the extractor are not used."""
        with full_precision(z):
            return Film(
                {f"layers.{j}.{name}": v for j, layer in enumerate(self.layers) for name, v in layer(z).items()}
            )


class AutoregressiveFilmGenerator(FilmGenerator):
    """FiLM parameters of layer j from z and the support set's activations after the adapted layers before it."""

    def __init__(self) -> None:
        super().__init__()
        widths = (LAYER_WIDTHS[0], *LAYER_WIDTHS)
        self.layers = nn.ModuleList(AutoregressiveLayerGenerator(i, o) for i, o in pairwise(widths))

    def forward(self, z: Tensor, support_batches: Iterable[Tensor], extractor: FilmResNet18) -> Film:
        """Z (64,), batches (b, 3, h, w) of the support set and the frozen network -> FiLM parameters.

        The support set passes through the network one layer at a time: a layer is conditioned on means over the whole
        set, whose maps are kept. Several batches bound memory (with gradients, activations are then computed again).
        """
        film, maps = Film({}), [extractor.stem(images) for images in support_batches]
        in_bounded_memory = torch.is_grad_enabled() and len(maps) > 1
        for index, layer in enumerate(self.layers):
            activations = torch.cat([batch.float().mean(dim=(2, 3)) for batch in maps])
            with full_precision(z):
                new = {f"layers.{index}.{name}": vectors for name, vectors in layer(z, activations).items()}
            film = Film({**film, **new})
            if index + 1 < len(self.layers):
                step = partial(recomputed, extractor.layer) if in_bounded_memory else extractor.layer
                maps = [step(index, batch, film) for batch in maps]
        return film


class NetworkFilmGenerator(FilmGenerator):
    """FiLM parameters of any network from z, each vector by a small network of its own (LITE, NeurIPS 2021).

    A vector of C entries is Linear(64, C) of ReLU(LayerNorm(Linear(64, 64))) of z, times a learned vector.

    Parameters
    ----------
    positions : mapping of str to int
        Normalisation layer and its number of feature maps C.
    """

    def __init__(self, positions: Mapping[str, int]) -> None:
        super().__init__()
        self.positions = tuple(positions)
        self.processors, self.scales = nn.ModuleList(), nn.ParameterList()
        for width in positions.values():
            for _ in range(2):  # gamma, beta
                first = [nn.Linear(TASK_FEATURES, TASK_FEATURES), nn.LayerNorm(TASK_FEATURES), nn.ReLU()]
                self.processors.append(nn.Sequential(*first, nn.Linear(TASK_FEATURES, width)))
                self.scales.append(_new_scales(width))

    def forward(self, z: Tensor, support_batches: Iterable[Tensor], extractor: nn.Module) -> Film:
        """Z (64,) -> FiLM parameters. The support images and the extractor are not used."""
        with full_precision(z):
            vectors = [p(z) * scale for p, scale in zip(self.processors, self.scales, strict=True)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        # gamma is generated about 1: a fresh generator leaves the network nearly as it is.
        return Film({name: (gamma + 1, beta) for name, (gamma, beta) in zip(self.positions, pairs, strict=True)})
