"""A network as parts of graphs: with FiLM parameters as an input, and the set encoder and generator that make them.

A task changes few weights: those of the convolutions that FiLM follows. So a graph has all weights once, whatever the
tasks that it serves, and computes the changed ones from the FiLM parameters. These are one vector in a graph: gamma and
beta of each position, in the order of the network's ``film_positions``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewshot_mahalanobis.networks.devices import device_of
from fewshot_mahalanobis.networks.efficientnet import EfficientNet
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.folding import fold_network
from fewshot_mahalanobis.networks.generators import AutoregressiveFilmGenerator, FilmGenerator
from fewshot_mahalanobis.networks.norms import trace_norms
from fewshot_mahalanobis.networks.pooling import Poolings
from fewshot_mahalanobis.networks.set_encoder import SetEncoder
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.template import FLOAT32, Graph, add_network, film_layers, has_template


class FilmedNetwork(nn.Module):
    """Images (n, 3, s, s) and FiLM parameters (f,) -> features (n, d); without the parameters, those as pretrained.

    Attributes
    ----------
    positions : mapping of str to int
        Normalisation layers that FiLM follows -> their numbers of feature maps.
    """

    def __init__(self, model: SimpleCNAPS) -> None:
        super().__init__()
        extractor = model.feature_extractor
        self.prepared = extractor.prepared
        blank = torch.zeros(1, 3, model.image_size, model.image_size, device=device_of(model))
        with torch.no_grad():
            foldable = trace_norms(extractor.network, lambda: extractor(blank)).foldable
        self.network = fold_network(extractor.network, foldable)
        self.projection = copy.deepcopy(model.projection)
        self.positions: Mapping[str, int] = dict(extractor.film_positions)
        convolution = {norm: conv for conv, norm in foldable}
        #: What takes the FiLM parameters of each position: the norm, or the convolution that has absorbed it.
        self._layers = [convolution.get(position, position) for position in self.positions]

    def forward(self, images: Tensor, film: Tensor | None = None) -> Tensor:
        """Adapt the network in the graph, and run it."""
        return self.projected(self.pooled(images, film))

    def pooled(self, images: Tensor, film: Tensor | None = None) -> Tensor:
        """What the adapted network gives, float32."""
        weights = {} if film is None else self._adapted(film)
        output: Tensor = functional_call(self.network, weights, (self.prepared(images),))
        return output.flatten(1).float()

    def projected(self, features: Tensor) -> Tensor:
        """Features (n, d) by the learned projection, if there is one."""
        return features if self.projection is None else self.projection(features)

    def _adapted(self, film: Tensor) -> dict[str, Tensor]:
        """Weights and biases that FiLM changes: gamma (w x + b) + beta."""
        adapted = {}
        parts = film.split([width for width in self.positions.values() for _ in range(2)])
        for name, gamma, beta in zip(self._layers, parts[::2], parts[1::2], strict=True):
            weight, bias = (self.network.get_parameter(f"{name}.{kind}") for kind in ("weight", "bias"))
            adapted[f"{name}.weight"] = weight * gamma.reshape(-1, *[1] * (weight.ndim - 1))
            adapted[f"{name}.bias"] = bias * gamma + beta
        return adapted


def film_vector(film: Film) -> Tensor:
    """FiLM parameters as one vector (f,)."""
    return torch.cat([vector.float() for pair in film.values() for vector in pair])


class SupportGraph(nn.Module):
    """Images (n, 3, s, s) and FiLM parameters (f,) -> features (n, d), and what the set encoder reads of the images.

    It reads them small, (n, 3, e, e), and statistics of the network's maps (n, d'), with the network as pretrained.
    Without a set encoder the images come back as they are.
    """

    def __init__(self, model: SimpleCNAPS) -> None:
        super().__init__()
        self.network = FilmedNetwork(model)
        extractor = model.feature_extractor
        reading = extractor.for_set_encoder
        self.width, self.width_read = extractor.out_features, reading.out_features
        if reading is not extractor:
            network = self.network.network  # once for both: they are statistics of the same maps
            network.pooling = Poolings([one.get_submodule("pooling") for one in (network, reading.network)])
        self.side = model.image_size if model.set_encoder is None else model.config.get("encoder_size")

    def forward(self, images: Tensor, film: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Run the network, and resize."""
        small = images
        if self.side is not None and self.side != images.shape[2]:
            small = F.interpolate(images, (self.side, self.side), mode="bilinear", antialias=True)
        pooled = self.network.pooled(images, film)  # if both read the same, both are all of it
        return self.network.projected(pooled[:, : self.width]), small, pooled[:, -self.width_read :]


def support_graph(model: SimpleCNAPS, *, adapts: bool) -> Graph | None:
    """:class:`SupportGraph` of a network that has a template, else None; with ``adapts`` it takes FiLM parameters."""
    extractor, side = model.feature_extractor, model.image_size
    folded = extractor.for_inference()
    if model.projection is not None or not has_template(folded):
        return None
    graph = Graph()
    images = graph.input("images", FLOAT32, [1, 3, side, side])
    positions = extractor.film_positions
    film = None
    if adapts:
        vector = graph.input("film", FLOAT32, [2 * sum(positions.values())])
        layers = film_layers(extractor, folded)
        film = {layers[position]: pair for position, pair in _film_pairs(graph, vector, positions).items()}
    reading, poolings = extractor.for_set_encoder, None
    width, width_read = extractor.out_features, reading.out_features
    if reading is not extractor:
        poolings = [cast(EfficientNet, one).pooling for one in (extractor, reading)]
    features = add_network(graph, folded, images, (side, side), film, poolings)
    small, encoder_side = images, model.image_size if model.set_encoder is None else model.config.get("encoder_size")
    if encoder_side is not None and encoder_side != side:
        # Each row of a resized image is a weighted sum of its rows, and so is a column. ONNX's own "Resize" has others.
        rows = F.interpolate(torch.eye(side)[None, None], (encoder_side, side), mode="bilinear", antialias=True)[0, 0]
        weights, transposed = (graph.constant(matrix.numpy()) for matrix in (rows, rows.T))
        small = graph.node("MatMul", graph.node("MatMul", weights, images), transposed)
    else:
        encoder_side = side
    read = features
    if poolings is not None:
        features, read = (
            graph.cut(features, *columns, axis=1) for columns in ((0, width), (width, width + width_read))
        )
    graph.output("features", features, FLOAT32, [1, width])
    graph.output("small", small, FLOAT32, [1, 3, encoder_side, encoder_side])
    graph.output("read", read, FLOAT32, [1, width_read])
    return graph


def _film_pairs(graph: Graph, vector: str, positions: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Positions -> names of gamma and beta, parts of a vector as :func:`film_vector` makes it."""
    pairs, first = {}, 0
    for position, width in positions.items():
        gamma, beta = (graph.cut(vector, start, start + width, axis=0) for start in (first, first + width))
        pairs[position] = gamma, beta
        first += 2 * width
    return pairs


class FilmParameters(nn.Module):
    """What the set encoder reads of a support set, images (n, 3, e, e) and statistics (n, d') -> FiLM parameters (f,).

    ValueError if the parameters of a layer depend on the maps of earlier ones.
    """

    def __init__(self, model: SimpleCNAPS) -> None:
        super().__init__()
        if isinstance(model.film_generator, AutoregressiveFilmGenerator):
            raise ValueError(
                "the FiLM parameters of an auto-regressive model have no graph, as they depend on the maps of layers "
                "that are already adapted: choose a checkpoint of another kind"
            )
        assert isinstance(model.set_encoder, SetEncoder)
        assert isinstance(model.film_generator, FilmGenerator)
        modules = model.set_encoder, model.film_generator, model.feature_encoder
        self.set_encoder, self.film_generator, self.feature_encoder = copy.deepcopy(modules)

    def forward(self, images: Tensor, read: Tensor) -> Tensor:
        """Encode the set and generate."""
        z = self._encodings(images).mean(dim=0)
        if self.feature_encoder is None:
            z = z + 0 * read.sum()  # an input of every graph
        else:
            mean = read.mean(dim=0)
            deviation = (read - mean).square().mean(dim=0).sqrt()
            z = z + self.feature_encoder(torch.cat([mean, deviation]))
        return film_vector(self.film_generator(z, [], None))

    def _encodings(self, x: Tensor) -> Tensor:
        """Encodings (n, 64) of images (n, 3, e, e), as :class:`SetEncoder` makes them, by operations of ONNX.

        Maps are pooled before they are normalised, as BatchNorm and ReLU do not decrease once gamma's sign is in the
        convolution.
        """
        for conv, norm in self.set_encoder.layers:
            sign = torch.where(norm.weight < 0, -1.0, 1.0)
            maps = F.conv2d(x, conv.weight * sign[:, None, None, None], padding=1)
            positions = maps.flatten(2)  # means of images before that of the set: no copy of the maps is made
            mean = positions.mean(dim=2).mean(dim=0)
            square = (torch.linalg.vector_norm(positions, dim=2).square() / positions.shape[2]).mean(dim=0)
            scale = norm.weight.abs() * torch.rsqrt((square - mean.square()).clamp(min=0) + norm.eps)
            shift = norm.bias - mean * scale
            x = F.relu(F.max_pool2d(maps, 2) * scale[:, None, None] + shift[:, None, None])
        return x.mean(dim=(2, 3))
