"""A method on the network of Simple CNAPS: what ``meta-train --method`` trains and ``evaluate --method`` reads."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.checkpoints.folder import WEIGHTS, check_finite, read_config, read_tensors, write_folder
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedNetwork, AdaptedTask, channels_last
from fewshot_mahalanobis.research.baselines import METHODS
from fewshot_mahalanobis.research.baselines.gidaris import Gidaris
from fewshot_mahalanobis.research.baselines.maml import MAML
from fewshot_mahalanobis.research.baselines.method import Fitted, Method
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


def save_baseline(baseline: Baseline, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Write a trained method with its card; the arguments are those of ``checkpoints.folder.write_folder``."""
    settings = checked_baseline_settings(baseline.config, "baseline.config")
    write_folder(folder, settings, baseline.state_dict(), dtype=dtype, card=baseline.card)


def read_baseline(folder: Path) -> Baseline:
    """Read a method that ``meta-train --method`` trained.

    Raises
    ------
    CheckpointError
        A file is missing, malformed or not a trained method's.
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


class Baseline(SimpleCNAPS):
    """FiLM ResNet18 and a method; episodes in, logits out, as :class:`~fewshot_mahalanobis.SimpleCNAPS`.

    Parameters
    ----------
    head : str
        One of ``METHODS`` that has something to train.
    image_size : int
        Side of the square images the network was trained on, in pixels.
    base_classes : int
        Training classes whose weights "gidaris" keeps.

    Raises
    ------
    ValueError
        There is no such method, or it has nothing to train.
    """

    def __init__(self, *, head: str, image_size: int = 84, base_classes: int = 0) -> None:
        method = METHODS.get(head)
        if method is None:
            raise ValueError(f"there is no method {head!r}; there are {', '.join(METHODS)}")
        if not (method.needs_training or method.trains_network):
            raise ValueError(f"the method {head!r} has nothing to train: evaluate it with --method {head}")
        super().__init__(adaptation="film" if method.adaptation == "film" else "none", image_size=image_size)
        self.config: dict[str, Any] = {"head": head, "image_size": image_size, "base_classes": base_classes}
        width = self.feature_extractor.out_features
        self.head = Gidaris(width, base_classes) if method is Gidaris else method(width)
        self.network.requires_grad_(method.trains_network)

    @property
    def network(self) -> FilmResNet18:
        """The network that the method is trained with."""
        return cast(FilmResNet18, self.feature_extractor)

    @property
    def method(self) -> Method[Any]:
        """The head."""
        return cast("Method[Any]", self.head)

    @property
    def card(self) -> str:
        """Model card."""
        return (
            f"# {self.head.title}\n\nA method to compare with: `fewshot-mahalanobis evaluate SOURCE --method FOLDER`.\n"
        )

    def see_classes(self, sources: Sequence[ImageSource], images: int = 5) -> None:
        """Give "gidaris" the mean unit features of all classes of the training sources, from a few images each."""
        if isinstance(self.head, Gidaris):
            network, means = self.with_film(), []
            for source in sources:
                for indices in source.indices_of_class():
                    means.append(
                        F.normalize(network.features(source.network_input(indices[:images])), dim=1).mean(dim=0)
                    )
            self.head.imprint(F.normalize(torch.stack(means), dim=1))
            self.config["base_classes"] = len(means)

    def forward(
        self, support_images: Tensor, support_labels: Tensor, query_images: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """Logits of one episode, as of :class:`~fewshot_mahalanobis.SimpleCNAPS`.

        ``classes`` are the numbers (k,) of the task's classes among those of the training sources, for "gidaris".
        """
        if isinstance(self.head, Gidaris):
            self.head.hidden = classes
            logits = super().forward(support_images, support_labels, query_images)
            self.head.hidden = None
            return logits
        if not isinstance(self.head, MAML):
            return super().forward(support_images, support_labels, query_images)
        weights, layer = self.head.adapt(self.network, support_images, support_labels, self.head.training_steps)
        features = functional_call(self.network, weights, (query_images,))
        return self.head.logits(Fitted(features.shape[1], layer), features)

    @torch.no_grad()
    def adapt(
        self,
        support_images: Tensor,
        support_labels: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 64,
        **options: Any,
    ) -> AdaptedTask:
        """Adapt to a support set, as :meth:`SimpleCNAPS.adapt`: MAML by gradient steps on a copy of the network."""
        if not isinstance(self.head, MAML):
            return super().adapt(support_images, support_labels, dtype=dtype, batch_size=batch_size, **options)
        images, labels = channels_last(support_images.to(self.device)), support_labels.to(self.device)
        network = copy.deepcopy(self.network)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            weights, layer = self.head.adapt(network, images, labels, self.head.steps)
        network.load_state_dict(weights, strict=False)
        adapted = AdaptedNetwork(network, None, dtype, projection=None, device=self.device)
        head = _TrainedLayer(self.head, Fitted(network.out_features, layer))
        return AdaptedTask(adapted, FittedHead.fit(head, Features(adapted.features(images, batch_size)), labels))


class _TrainedLayer(Head[Any]):
    """The layer that gradient steps have trained together with the network."""

    def __init__(self, method: Head[Any], state: Any) -> None:
        super().__init__()
        self.method, self.state = method, state

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Any:
        return self.state

    def logits(self, state: Any, query_features: Tensor) -> Tensor:
        return self.method.logits(state, query_features)
