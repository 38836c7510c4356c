"""Whatever PyTorch contexts the caller is in, answers are those outside them, to the bit."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPS, SimpleCNAPSClassifier
from tests.robustness.process import CONTEXTS
from tests.tiny import LABELS, adapting_model, pictures

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


class Tokens(nn.Module):
    """A transformer of one layer: 32 pixels -> 32 features."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, 32, 16, 16), nn.Flatten(2))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(self.patches(images).mT).mean(dim=1)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tokens()


def answers(checkpoint: Any, backbone: nn.Module | None, precision: str, folder: Path) -> dict[str, Any]:
    """What a classifier says, fitted, pickled and read from a file."""
    queries = pictures(6, seed=1)
    if backbone is not None:
        checkpoint = SimpleCNAPS.from_backbone(backbone, image_size=32, mean=(0.5, 0.4, 0.6), std=(0.5, 0.5, 0.5))
    fitted = SimpleCNAPSClassifier(
        checkpoint, device="cpu", precision=precision, unknown_label="none", temperature="auto"
    ).fit(pictures(len(LABELS), seed=0), LABELS)
    fitted.save(folder / "fitted.safetensors")
    read = SimpleCNAPSClassifier.load(folder / "fitted.safetensors", "cpu", backbone=backbone)
    said: dict[str, Any] = {}
    for name, classifier in {"fitted": fitted, "pickled": pickle.loads(pickle.dumps(fitted)), "read": read}.items():
        said |= {
            f"{name}: features": classifier.transform(queries),
            f"{name}: probabilities": classifier.predict_proba(queries),
            f"{name}: transductive": classifier.predict_proba(queries, transductive=True),
            f"{name}: labels": classifier.predict(queries),
            f"{name}: outlier scores": classifier.outlier_score(queries),
            f"{name}: temperature": classifier.temperature_,
            f"{name}: accuracy": classifier.summary().accuracy,
        }
        classifier.partial_fit(queries, ["red", "blue", "white"] * 2)
        said[f"{name}: after partial_fit"] = classifier.predict_proba(queries)
    return said


def assert_same(inside: dict[str, Any], outside: dict[str, Any]) -> None:
    for name, value in outside.items():
        np.testing.assert_array_equal(inside[name], value, err_msg=name)


@pytest.fixture(scope="module")
def adapting() -> SimpleCNAPS:
    return adapting_model()


@pytest.fixture(scope="module")
def outside(
    adapting: SimpleCNAPS, tokens: Tokens, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("outside")
    return {
        "adapting": answers(adapting, None, "float32", folder),
        "float32": answers(None, tokens, "float32", folder),
        "bfloat16": answers(None, tokens, "bfloat16", folder),
    }


#: A whole classifier is asked in several contexts at once; the tests below ask its parts in each alone.
TOGETHER = [("autocast", "float64 by default", "gradients"), ("bfloat16 by default", "inference")]


@contextmanager
def entered(contexts: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(CONTEXTS[context]())
        yield


@pytest.mark.parametrize("contexts", [*TOGETHER, ("meta device",)], ids=", ".join)
def test_a_classifier_says_the_same(
    contexts: tuple[str, ...], adapting: SimpleCNAPS, outside: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with entered(contexts):
        inside = answers(adapting, None, "float32", tmp_path)
    assert_same(inside, outside["adapting"])


@pytest.mark.parametrize("contexts", TOGETHER, ids=", ".join)  # PyTorch's layer fails on the meta device
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:this processor has no instructions for bfloat16")
def test_a_transformer_says_the_same(
    contexts: tuple[str, ...], precision: str, tokens: Tokens, outside: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with entered(contexts):
        inside = answers(None, tokens, precision, tmp_path)
    assert_same(inside, outside[precision])


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("head", ["auto", "mahalanobis", "cosine"])
def test_features_of_your_own_say_the_same(context: str, head: str) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(20, 6)), np.arange(20) % 3

    def said() -> list[Any]:
        classifier = MahalanobisClassifier(head=head, unknown_label=-1, temperature="auto").fit(X, y)
        return [classifier.predict_proba(X), classifier.outlier_score(X), classifier.temperature_, classifier.means_]

    outside = said()
    with CONTEXTS[context]():
        inside = said()
    for one, other in zip(inside, outside, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_episode_of_tensors_says_the_same(context: str) -> None:
    model = adapting_model()
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = torch.tensor([0, 1, 0, 1, 2, 2])
    outside = model.adapt(images, labels).logits(images)
    with CONTEXTS[context]():
        inside = model.adapt(images, labels).logits(images)
    assert torch.equal(inside, outside)
