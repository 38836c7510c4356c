"""A method on the network of Simple CNAPS: what ``meta-train --method`` trains and ``evaluate --method`` reads."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.checkpoints.folder import WEIGHTS, check_finite, read_config, read_tensors, write_folder
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.networks.backbone import check_image_size
from fewshot_mahalanobis.networks.devices import device_of
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.generators import LayerwiseFilmGenerator
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.set_encoder import SetEncoder, in_batches
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedNetwork, AdaptedTask, channels_last, check_episode
from fewshot_mahalanobis.research.baselines import METHODS
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead


class BaselineSettings(msgspec.Struct, forbid_unknown_fields=True):
    """``Baseline.config``."""

    head: str
    image_size: int
    base_classes: int


def checked_baseline_settings(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return ``config`` if it has every setting of a baseline, each of its type, and no more; or CheckpointError."""
    try:
        return msgspec.structs.asdict(msgspec.convert(config, BaselineSettings))
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: {error}") from error


def read_baseline(folder: Path) -> Baseline:
    """Read a method that ``meta-train --method`` trained.

    Raises
    ------
    CheckpointError
        A file is missing, malformed or not that of a trained method.
    """
    settings = checked_baseline_settings(read_config(folder), str(folder))
    try:
        with torch.device("meta"):
            baseline = Baseline(**settings)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    expected = baseline.state_dict()
    weights = read_tensors(folder / WEIGHTS, expected)
    check_finite(folder / WEIGHTS, weights)
    baseline.load_state_dict({name: weight.to(expected[name].dtype) for name, weight in weights.items()}, assign=True)
    baseline.eval()
    return baseline


class Baseline(nn.Module):
    """A FiLM ResNet18 with a method as its head: episodes in, logits out.

    Training and evaluation use it as they use Simple CNAPS.

    Parameters
    ----------
    head : str
        One of ``METHODS`` that has something to train.
    image_size : int
        Side of the square images that the network is trained on, in pixels.
    base_classes : int
        Number of training classes whose weights "gidaris" keeps.

    Attributes
    ----------
    head : Method
    feature_extractor : FilmResNet18
    set_encoder : SetEncoder or None
    film_generator : LayerwiseFilmGenerator or None
        The adaptation networks of a method that conditions the network by FiLM ("tadam").
    config : dict
        The arguments above: what ``config.json`` of a saved method holds.

    Raises
    ------
    ValueError
        There is no such method, or it has nothing to train.
    """

    projection: nn.Module | None = None

    def __init__(self, *, head: str, image_size: int = 84, base_classes: int = 0) -> None:
        super().__init__()
        method = METHODS.get(head)
        if method is None:
            raise ValueError(f"there is no method {head!r}; there are {', '.join(METHODS)}")
        if not (method.needs_training or method.trains_network):
            raise ValueError(f"the method {head!r} has nothing to train: evaluate it with --method {head}")
        check_image_size(image_size, 32)
        self.config: dict[str, Any] = {"head": head, "image_size": image_size, "base_classes": base_classes}
        self.image_size = image_size
        self.feature_extractor = FilmResNet18().requires_grad_(method.trains_network).eval()
        by_film = method.adaptation == "film"
        self.set_encoder = SetEncoder() if by_film else None
        self.film_generator = LayerwiseFilmGenerator() if by_film else None
        self.head = method.for_model(self.config, self.feature_extractor.out_features)

    def train(self, mode: bool = True) -> Baseline:
        """Set training mode everywhere but in the network, whose BatchNorms keep their statistics."""
        super().train(mode)
        self.feature_extractor.eval()
        return self

    def save(self, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Write the trained method with its card; the arguments are those of ``checkpoints.folder.write_folder``."""
        settings = checked_baseline_settings(self.config, "baseline.config")
        card = (
            f"# {self.head.title}\n\nA method to compare with: `fewshot-mahalanobis evaluate SOURCE --method FOLDER`.\n"
        )
        write_folder(folder, settings, self.state_dict(), dtype=dtype, card=card)

    def prepare(self, sources: Sequence[ImageSource], images: int = 5) -> None:
        """Show the method the features of a few images of each class of the training sources."""
        network = AdaptedNetwork(self.feature_extractor)
        self.head.prepare(
            network.features(source.network_input(indices[:images]))
            for source in sources
            for indices in source.indices_of_class()
        )
        self.config["base_classes"] = self.head.base_classes

    def forward(
        self, support_images: Tensor, support_labels: Tensor, query_images: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """Logits of one episode, differentiable with respect to every trained parameter.

        Parameters
        ----------
        support_images : Tensor of shape (n, 3, h, w)
            In [-1, 1].
        support_labels : int64 Tensor of shape (n,)
            Classes 0 to k - 1, each with at least one image.
        query_images : Tensor of shape (m, 3, h, w)
            In [-1, 1].
        classes : int64 Tensor of shape (k,), optional
            Numbers of the episode's classes among those of the training sources.

        Returns
        -------
        Tensor of shape (m, k)

        Raises
        ------
        ValueError
            Shapes or labels do not fit, or a class has no image.
        """
        check_episode(support_images, support_labels)
        network = self.feature_extractor
        weights, state = self.head.adapt_network(network, support_images, support_labels, training=True)
        if state is not None:
            return self.head.logits(state, functional_call(network, weights, (query_images,)))
        features = network(torch.cat([support_images, query_images]), self._film(support_images))
        support_features, query_features = features.split([len(support_images), len(query_images)])
        return self.head.training_logits(support_features, support_labels, query_features, classes)

    def _film(self, support_images: Tensor, batch_size: int | None = None) -> Film | None:
        """FiLM parameters for a support set; None for a method that does not adapt by FiLM."""
        if self.set_encoder is None or self.film_generator is None:
            return None
        z = self.set_encoder(support_images, batch_size)
        return self.film_generator(z, in_batches(support_images, batch_size), self.feature_extractor)

    @torch.no_grad()
    def adapt(
        self,
        support_images: Tensor,
        support_labels: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 64,
    ) -> AdaptedTask:
        """Adapt to a support set: the network by FiLM, by gradient steps on a copy, or not at all; then the method.

        This module is not changed.

        Parameters
        ----------
        support_images : Tensor of shape (n, 3, h, w)
            In [-1, 1]; on any device.
        support_labels : int64 Tensor of shape (n,)
            Classes 0 to k - 1, each with at least one image.
        dtype : {torch.float32, torch.bfloat16}
            Precision of the convolutions.
        batch_size : int
            Images processed at a time; it bounds memory.
        """
        check_episode(support_images, support_labels)
        extractor: FilmResNet18 = self.feature_extractor
        head: Head[Any] = self.head
        device = device_of(extractor)
        images, labels = channels_last(support_images.to(device)), support_labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            film = self._film(images, batch_size)
            weights, state = self.head.adapt_network(extractor, images, labels, training=False)
        if state is not None:
            extractor, head = copy.deepcopy(extractor), _TrainedLayer(self.head, state)
            extractor.load_state_dict(weights, strict=False)
        network = AdaptedNetwork(extractor, film, dtype)
        support = Features(network.features(support_images, batch_size))
        return AdaptedTask(network, FittedHead.fit(head, support, support_labels))


#: What training and evaluation take.
EpisodicModel: TypeAlias = SimpleCNAPS | Baseline


class _TrainedLayer(Head[Any]):
    """The layer that gradient steps have trained together with the network."""

    def __init__(self, method: Head[Any], state: Any) -> None:
        super().__init__()
        self.method, self.state = method, state

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Any:
        return self.state

    def logits(self, state: Any, query_features: Tensor) -> Tensor:
        return self.method.logits(state, query_features)
