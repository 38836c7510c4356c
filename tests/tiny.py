"""A classifier whose network is one convolution, for tests in which the network is not the point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.networks import generators, resnet
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters

LABELS = ["blue", "green", "red", "green", "blue", "red", "green", "blue"]


class TinyExtractor(nn.Module):
    """Images (n, 3, 32, 32) -> features (n, 512); like a GPU, it can be too small for a batch."""

    out_features = 512
    film_positions: ClassVar[dict[str, int]] = {}
    bfloat16_measured = False
    largest_batch = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, self.out_features, 8, stride=8)
        self.batches: list[int] = []

    def for_inference(self, film: Any, dtype: torch.dtype | None = None) -> TinyExtractor:
        return self

    def forward(self, images: Tensor, film: Any = None) -> Tensor:
        if len(images) > self.largest_batch:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (played)")
        self.batches.append(len(images))
        return self.conv1(images).float().mean(dim=(2, 3))


@contextmanager
def narrow() -> Iterator[None]:
    """ResNet18 with an eighth of its feature maps, where its width is not the point: a model is a megabyte, not eighty.

    Checkpoints of the real ResNet18 do not fit into it, and other processes have the real one.
    """
    widths = tuple(width // 8 for width in resnet.LAYER_WIDTHS)
    with pytest.MonkeyPatch.context() as patch:
        for module in (resnet, generators):
            patch.setattr(module, "LAYER_WIDTHS", widths)
        for network in (resnet.FilmResNet18, resnet.FoldedResNet18):
            patch.setattr(network, "out_features", widths[-1])
        yield


def tiny_model() -> SimpleCNAPS:
    with torch.device("meta"):
        model = SimpleCNAPS(adaptation="none", image_size=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.feature_extractor = TinyExtractor()  # type: ignore[assignment]
    return model.eval()


def unadapted_model() -> SimpleCNAPS:
    """An untrained ResNet18 for 32 pixels, without adaptation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SimpleCNAPS(adaptation="none", image_size=32).eval()


def pictures(n: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(n, 12, 12, 3), dtype=np.uint8)


def tiny_classifier(**arguments: Any) -> SimpleCNAPSClassifier:
    """Fitted to three classes."""
    return SimpleCNAPSClassifier(tiny_model(), device="cpu", **arguments).fit(pictures(8, 1), LABELS)


COLOURS = {"blue": (40, 60, 220), "green": (50, 190, 60), "red": (210, 50, 50)}
OTHER_COLOURS = {"yellow": (225, 215, 40), "purple": (200, 40, 200)}  # of no class
SUPPORT_LABELS = ["red", "green", "blue", "green", "red", "red", "blue", "green"]
QUERY_LABELS = ["blue", "red", "green", "red", "blue", "green", "green"]


def drawn(labels: list[str], seed: int) -> NDArray[np.uint8]:
    """Noisy patches of the colour that the label names, (n, 24, 24, 3)."""
    rng = np.random.default_rng(seed)
    colours = np.array([(COLOURS | OTHER_COLOURS)[label] for label in labels])[:, None, None, :]
    return (colours + rng.integers(-35, 36, size=(len(labels), 24, 24, 3))).clip(0, 255).astype(np.uint8)


def adapting_model() -> SimpleCNAPS:
    """An untrained Simple CNAPS for 32 pixels whose FiLM parameters depend visibly on the support set."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32, beta=0.5, scale=0.5).eval()
        assert model.film_generator is not None
        for parameter in model.film_generator.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, std=0.05)
    return model


def task_representation(model: SimpleCNAPS, support: Tensor, batch_size: int | None = None) -> Tensor:
    """z (64,) of a support set: what the model's FiLM generator gets."""
    assert model.film_generator is not None
    seen: list[Tensor] = []
    hook = model.film_generator.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    film_parameters(model, support, batch_size)
    hook.remove()
    return seen[0]
