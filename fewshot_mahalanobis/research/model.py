"""What training and evaluation ask of a model: Simple CNAPS and the methods that it is compared with satisfy it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.networks.extractor import FeatureExtractor
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.generators import FilmGenerator
from fewshot_mahalanobis.networks.task import AdaptedNetwork, AdaptedTask


class EpisodicModel(Protocol):
    """A model that adapts to a support set, besides being an ``nn.Module``.

    There are two: :class:`~fewshot_mahalanobis.SimpleCNAPS` and
    :class:`~fewshot_mahalanobis.research.baselines.model.Baseline`, a network with any of the methods as its head.
    """

    config: dict[str, Any]
    image_size: int
    training: bool

    @property
    def feature_extractor(self) -> FeatureExtractor:
        """The network."""

    @property
    def film_generator(self) -> FilmGenerator | None:
        """The generator of FiLM parameters; None for a model that does not adapt by FiLM."""

    @property
    def projection(self) -> nn.Module | None:
        """The learned projection of the "+P" variant, if there is one."""

    @property
    def head(self) -> Head[Any]:
        """The model's own head."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    def with_film(self, film: Film | None = None, dtype: torch.dtype = torch.float32) -> AdaptedNetwork:
        """Return the network with given FiLM parameters; None leaves it without adaptation."""

    def adapt(
        self,
        support_images: Tensor,
        support_labels: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 64,
    ) -> AdaptedTask:
        """Adapt to support images (n, 3, h, w) and labels (n,): the network, and the model's own head."""

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""

    def train(self, mode: bool = True) -> Any:
        """Set training or evaluation mode."""
