"""``fit`` on more images than it keeps: the same classifier, in memory that does not hold the images."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.images import decode
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.networks import set_encoder
from tests.tiny import LABELS, TinyExtractor, adapting_model, drawn, pictures, tiny_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

MANY = ["red", "green", "blue"] * 7


def fitted(model: SimpleCNAPS, images: Any, labels: list[str], **settings: Any) -> SimpleCNAPSClassifier:
    classifier = SimpleCNAPSClassifier(model, precision="float32", device="cpu", **settings)
    return classifier.fit(images, labels, groups=range(len(labels)))


def auto_regressive_model() -> SimpleCNAPS:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SimpleCNAPS(adaptation="auto-regressive", image_size=32, beta=0.5).eval()
        assert model.film_generator is not None
        for parameter in model.film_generator.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("kind", ["film", "auto-regressive", "none", "default"])
@pytest.mark.parametrize("settings", [{}, {"unknown_label": "?"}], ids=["", "unknown"])
def test_images_that_are_read_twice_give_the_classifier_of_images_that_are_kept(
    kind: str, settings: dict[str, Any]
) -> None:
    images, queries = drawn(MANY, 3), drawn(MANY[:5], 4)
    if kind == "default":
        model, images = load_checkpoint("default").at_size(96), images[:9]  # its set encoder reads 64 x 64 pixels
    else:
        model = {"film": adapting_model, "auto-regressive": auto_regressive_model, "none": tiny_model}[kind]()
    labels = MANY[: len(images)]
    kept = fitted(model, images, labels, **settings)
    streamed = fitted(model, images, labels, batch_size=2, **settings)
    np.testing.assert_allclose(streamed.transform(queries), kept.transform(queries), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(streamed.predict_proba(queries), kept.predict_proba(queries), rtol=1e-3, atol=1e-5)
    assert streamed.predict(queries).tolist() == kept.predict(queries).tolist()


@pytest.mark.parametrize("sizes", [(3,), (4, 4, 3), (20, 1)])
def test_a_set_too_large_to_keep_its_maps_has_the_same_encoding(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = set_encoder.SetEncoder()
        for norm in encoder.norms:
            nn.init.uniform_(norm.weight, -1.5, 1.5)
    images = torch.rand(sum(sizes), 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        kept = encoder.encodings(images.split(sizes))
        monkeypatch.setattr(set_encoder, "MAX_KEPT", 0)
        torch.testing.assert_close(encoder.encodings(images.split(sizes)), kept, rtol=0, atol=0)


def test_at_most_two_batches_of_a_large_support_set_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = weakref.WeakSet[Any](), 0
    whole = decode.ImageBatches.__iter__

    class Owner(np.ndarray):  # what a batch's memory belongs to
        __hash__ = object.__hash__  # type: ignore[assignment]

    def watched(self: decode.ImageBatches) -> Iterator[Tensor]:
        nonlocal most
        for batch in whole(self):
            owner = batch.numpy().copy(order="K").view(Owner)
            alive.add(owner)
            most = max(most, len(alive))
            yield torch.from_numpy(owner)
            del owner

    monkeypatch.setattr(decode.ImageBatches, "__iter__", watched)
    model = load_checkpoint("default").at_size(96)
    fitted(model, drawn(MANY[:12], 3), MANY[:12], batch_size=1, unknown_label="?")
    assert most <= 2


@pytest.mark.parametrize(("batch_size", "adapt", "times"), [(8, True, 1), (2, True, 2), (2, False, 1)])
def test_files_are_read_once_or_if_there_are_many_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch_size: int, adapt: bool, times: int
) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(9)]
    for path, image in zip(paths, drawn(MANY[:9], 5), strict=True):
        Image.fromarray(image).save(path)
    seen, whole = Counter[int](), decode.read_item

    def counted(item: Any, index: int, *rest: Any) -> Any:
        seen[index] += 1
        return whole(item, index, *rest)

    monkeypatch.setattr(decode, "read_item", counted)
    fitted(adapting_model(), paths, MANY[:9], batch_size=batch_size, adapt=adapt)
    assert set(seen.values()) == {times}
    assert len(seen) == 9


def test_a_remark_about_images_that_are_read_twice_comes_once() -> None:
    dark = drawn(MANY[:9], 5).astype(np.float32) / 255 / 16
    with pytest.warns(UserWarning, match="value_range") as caught:
        fitted(adapting_model(), dark, MANY[:9], batch_size=2)
    assert sum("value_range" in str(warning.message) for warning in caught) == 1


def test_a_batch_too_large_for_the_memory_is_halved_in_a_large_support_set_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = fitted(tiny_model(), pictures(21, 1), MANY)
    monkeypatch.setattr(TinyExtractor, "largest_batch", 1)
    with pytest.warns(UserWarning, match="does not hold a batch of 4 images: continuing with 1 at a time") as caught:
        halved = fitted(tiny_model(), pictures(21, 1), MANY, batch_size=4)
    assert len(caught) == 1
    np.testing.assert_allclose(halved.transform(pictures(3, 2)), plain.transform(pictures(3, 2)), rtol=1e-5)


def test_adapting_to_a_large_support_set_halves_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapting_model()
    plain, encode = fitted(model, drawn(MANY, 3), MANY), set_encoder.SetEncoder.encodings

    def small(self: Any, images: Any, batch_size: int | None = None) -> Tensor:
        batches = list(images)
        if max(map(len, batches)) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (played)")
        return encode(self, batches, batch_size)

    monkeypatch.setattr(set_encoder.SetEncoder, "encodings", small)
    with pytest.warns(UserWarning, match="continuing with 1 at a time"):
        halved = fitted(model, drawn(MANY, 3), MANY, batch_size=4)
    np.testing.assert_allclose(
        halved.transform(drawn(MANY[:3], 4)), plain.transform(drawn(MANY[:3], 4)), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("broken", [0, 8, 17])
def test_a_file_that_cannot_be_read_leaves_nothing_half_fitted(broken: int) -> None:
    images: list[NDArray[Any]] = list(pictures(len(MANY), 1))
    images[broken] = np.full((4, 4), np.nan)
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu", batch_size=2).fit(pictures(8, 1), LABELS)
    before = classifier.predict_proba(pictures(2, 5))
    with pytest.raises(ImageError, match=f"image {broken} "):
        classifier.fit(images, MANY)
    np.testing.assert_array_equal(classifier.predict_proba(pictures(2, 5)), before)
