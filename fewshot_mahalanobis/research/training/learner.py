"""A model in meta-training: its logits with gradients, its loss, what is trained, and how it is saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.heads import MahalanobisHead
from fewshot_mahalanobis.networks.devices import device_of
from fewshot_mahalanobis.networks.efficientnet import EfficientNet, EfficientNetLayers
from fewshot_mahalanobis.networks.pooling import Pooling
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.research.baselines.baseline import Baseline
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.training.bounded_memory import lite_logits

Model = TypeVar("Model", SimpleCNAPS, Baseline)


class Learner(nn.Module, Generic[Model]):
    """What the loop of meta-training asks of a model, as one module whose forward pass Accelerate wraps."""

    #: Learning rate of the network, a share of the recipe's: it was trained before.
    network_rate = 0.1

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model: Model = model

    def prepare(self, sources: Sequence[ImageSource]) -> None:
        """Take what the model needs of the training sources, each named once, before the first step."""

    def forward(
        self, support_images: Tensor, support_labels: Tensor, query_images: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """Logits (m, k) of a task; ``classes`` (k,) are its classes among those of all training sources."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of the logits (m, k) of queries with labels (m,)."""
        return F.cross_entropy(logits, labels)

    def penalty(self) -> Tensor | float:
        """L2 penalty on the scales of the FiLM generator; 0 without one."""
        return 0.0 if self.model.film_generator is None else self.model.film_generator.penalty()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters for the optimizer."""
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        network = [p for name, p in trained.items() if name.startswith("model.feature_extractor.")]
        others = [p for name, p in trained.items() if not name.startswith("model.feature_extractor.")]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": network, "factor": self.network_rate}]
        return [group for group in groups if group["params"]]

    def store(self) -> None:
        """Give the model what was learned outside its own parameters."""

    def save(self, folder: Path) -> None:
        """Write the model in float16."""
        raise NotImplementedError


class LearnedPooling(Pooling):
    """The same pooling with learned weights and sigmas, each by its logarithm.

    Weights of 1 stay: the first part keeps the scale of the features.
    """

    def __init__(self, pooling: Pooling) -> None:
        super().__init__(pooling.statistics, pooling.length)
        self.weights, self.sigmas = nn.ParameterDict(), nn.ParameterDict()
        for index, statistic in enumerate(pooling.statistics):
            if statistic.weight != 1:
                self.weights[str(index)] = nn.Parameter(torch.tensor(statistic.weight).log())
            if not isinstance(statistic.sigma, msgspec.UnsetType):
                self.sigmas[str(index)] = nn.Parameter(torch.tensor(statistic.sigma).log())

    def numbers(self) -> tuple[list[Any], list[Any]]:
        """Weight and sigma of each statistic; gradients flow to those that are learned."""
        weights, sigmas = map(list, super().numbers())
        for numbers, logs in ((weights, self.weights), (sigmas, self.sigmas)):
            for index, log in logs.items():
                numbers[int(index)] = log.exp()
        return weights, sigmas

    @torch.no_grad()
    def store(self) -> None:
        """Put what was learned into :attr:`statistics`."""
        weights, sigmas = ([x.item() if isinstance(x, Tensor) else x for x in numbers] for numbers in self.numbers())
        self.statistics = tuple(
            msgspec.structs.replace(statistic, weight=weight, sigma=sigma)
            for statistic, weight, sigma in zip(self.statistics, weights, sigmas, strict=True)
        )


class CNAPSLearner(Learner[SimpleCNAPS]):
    """Simple CNAPS in training.

    Parameters
    ----------
    model : SimpleCNAPS
    lite : int, optional
        Back-propagate through this many support images of a task
        (:mod:`~fewshot_mahalanobis.research.training.bounded_memory`).
    learn_scale : bool
        Train the scale s of the Mahalanobis head.
    learn_pooling : bool
        Train weights and sigmas of the pooling of an EfficientNet.

    Raises
    ------
    ValueError
        The scale of another head is to be learned, or the pooling of another network.
    """

    network_rate = 20.0  # only its pooling learns: a few numbers

    def __init__(
        self, model: SimpleCNAPS, lite: int | None = None, learn_scale: bool = False, learn_pooling: bool = False
    ) -> None:
        super().__init__(model)
        self.lite = lite
        self.pooling: LearnedPooling | None = None
        if learn_pooling:
            if not isinstance(model.feature_extractor, EfficientNet):
                raise ValueError("learn_pooling is for an EfficientNet")
            network = cast(EfficientNetLayers, model.feature_extractor.network)
            self.pooling = network.pooling = LearnedPooling(network.pooling)
        self.log_scale: nn.Parameter | None = None
        if learn_scale:
            if not isinstance(model.head, MahalanobisHead):
                raise ValueError(f"learn_scale is for the Mahalanobis head, not for {model.config['head']!r}")
            self.log_scale = nn.Parameter(torch.tensor(model.head.scale, device=device_of(model)).log())

    def forward(
        self, support_images: Tensor, support_labels: Tensor, query_images: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """Logits (m, k) of a task, with LITE's gradient if ``lite`` is set; ``classes`` are ignored."""
        if self.lite is None:
            logits = self.model(support_images, support_labels, query_images)
        else:
            logits = lite_logits(self.model, support_images, support_labels, query_images, self.lite)
        if self.log_scale is None:
            return logits
        return logits / cast(MahalanobisHead, self.model.head).scale * self.log_scale.exp()

    def store(self) -> None:
        """Give the model the scale and the pooling that were learned."""
        if self.pooling is not None:
            self.pooling.store()
            self.model.config["backbone"] = cast(EfficientNet, self.model.feature_extractor).description
        if self.log_scale is not None:
            scale = float(self.log_scale.detach().exp())
            cast(MahalanobisHead, self.model.head).scale = self.model.config["scale"] = scale

    def save(self, folder: Path) -> None:
        """Write a checkpoint, in float16."""
        save_checkpoint(self.model, folder, dtype=torch.float16)


class BaselineLearner(Learner[Baseline]):
    """A method to compare with in training."""

    def prepare(self, sources: Sequence[ImageSource]) -> None:
        """Show the method the training classes."""
        self.model.prepare(sources)

    def forward(
        self, support_images: Tensor, support_labels: Tensor, query_images: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """Logits (m, k) of a task; some methods hide its ``classes`` from themselves."""
        return self.model(support_images, support_labels, query_images, classes)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of the method."""
        return self.model.head.loss(logits, labels)

    def save(self, folder: Path) -> None:
        """Write the trained method, in float16."""
        self.model.save(folder, dtype=torch.float16)
