"""On a GPU: the same answers as on the CPU, in each precision; batches halved when its memory is full; training."""

from __future__ import annotations

import gc
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis import AdaptedFeatures, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.heads import HEADS, Head
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.evaluation.accuracy import Variant, evaluate_source
from fewshot_mahalanobis.research.training.meta_train import meta_train
from fewshot_mahalanobis.research.training.pretrain import pretrain
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, PretrainRecipe
from tests.drawn_tasks import make_task
from tests.research.training.small import PRETRAIN, draw_colours, meta_recipe
from tests.tiny import QUERY_LABELS, SUPPORT_LABELS, drawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

#: Difference of features from those on the CPU, as a share of their norm. In float32, PyTorch lets convolutions round
#: their inputs to TF32, which has the 10 bits of float16; bfloat16 has 7.
TOLERANCE = {"float32": 2**-8, "bfloat16": 2**-4}

#: As in ``recipes/efficientnet_lite0_features.toml``, with smaller images.
MODEL = {
    "image_size": 96,
    "head": "auto",
    "encoder_size": 64,
    "scale": 0.12,
    "beta": 0.3,
    "frozen_features": True,
    "pooling": [{"maps": "final"}, {"maps": "last_block", "weight": 0.6}],
}


@pytest.fixture(scope="module")
def support() -> NDArray[np.uint8]:
    return drawn(SUPPORT_LABELS, 1)


@pytest.fixture(scope="module")
def queries() -> NDArray[np.uint8]:
    return drawn(QUERY_LABELS, 2)


def classifier(device: str, support: NDArray[np.uint8], **arguments: Any) -> SimpleCNAPSClassifier:
    return SimpleCNAPSClassifier(device=device, **arguments).fit(support, SUPPORT_LABELS)


def distance(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Norm of the difference, as a share of that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("checkpoint", ["efficientnet-lite0", "resnet18"])
def test_a_gpu_answers_as_the_cpu(
    checkpoint: str, precision: str, support: NDArray[np.uint8], queries: NDArray[np.uint8]
) -> None:
    gpu = classifier("cuda", support, checkpoint=checkpoint, precision=precision)
    cpu = classifier("cpu", support, checkpoint=checkpoint, precision="float32")
    assert gpu.device_ == torch.device("cuda:0")
    assert gpu.precision_ == precision
    assert (gpu.predict(queries) == cpu.predict(queries)).all()
    expected = cpu.transform(queries)
    assert distance(gpu.transform(queries), expected) <= TOLERANCE[precision]


def test_without_tf32_a_gpu_computes_in_float32(
    support: NDArray[np.uint8], queries: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    features, expected = (
        classifier(device, support, precision="float32").transform(queries) for device in ("cuda", "cpu")
    )
    assert distance(features, expected) <= 2**-13


def test_a_gpu_repeats_itself_bit_by_bit(support: NDArray[np.uint8], queries: NDArray[np.uint8]) -> None:
    first, again = (classifier("cuda", support) for _ in range(2))
    np.testing.assert_array_equal(first.decision_function(queries), again.decision_function(queries))
    np.testing.assert_array_equal(first.decision_function(queries), first.decision_function(queries))


def test_files_are_read_for_a_gpu_as_for_the_cpu(tmp_path: Path, support: NDArray[np.uint8]) -> None:
    files = []
    for index, picture in enumerate(drawn(QUERY_LABELS * 10, 3)):
        files.append(tmp_path / f"{index}.jpg")
        Image.fromarray(picture).resize((90, 70)).save(files[-1])
    gpu, cpu = (classifier(device, support, batch_size=16) for device in ("cuda", "cpu"))
    assert (gpu.predict(files) == cpu.predict(files)).all()


def test_adapted_features_of_a_gpu_are_arrays_like_those_of_the_cpu(
    support: NDArray[np.uint8], queries: NDArray[np.uint8]
) -> None:
    gpu, cpu = (
        AdaptedFeatures(device=device, precision="float32").fit(support).transform(queries)
        for device in ("cuda", "cpu")
    )
    assert isinstance(gpu, np.ndarray)
    assert distance(gpu, cpu) <= TOLERANCE["float32"]
    again = pickle.loads(pickle.dumps(AdaptedFeatures(device="cuda").fit(support)))
    assert again.device_.type == "cuda"


@pytest.mark.parametrize("name", HEADS)
def test_every_head_computes_on_a_gpu_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    head: Head[Any] = HEADS[name]()
    task = make_task(0, [1, 5, 2, 3], 512, queries=6)
    expected = head(*task)
    logits = head.to("cuda")(*(part.cuda() for part in task))
    assert logits.device.type == "cuda"
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_batches_are_halved_when_the_memory_of_a_gpu_is_full(
    support: NDArray[np.uint8], queries: NDArray[np.uint8]
) -> None:
    fitted = classifier("cuda", support, precision="float32", batch_size=512)
    expected = fitted.decision_function(queries)
    many = np.tile(queries, (512 // len(queries), 1, 1, 1))
    gc.collect()
    torch.cuda.empty_cache()
    spare = 600_000_000  # 512 pictures of 224 pixels alone have 308 MB, and their first maps 822 MB each
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        with pytest.warns(UserWarning, match="does not hold a batch of"):
            logits = fitted.decision_function(many)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    scale = abs(expected).max()
    np.testing.assert_allclose(logits, np.tile(expected, (512 // len(queries), 1)), atol=0.01 * scale)


def test_what_a_gpu_fitted_is_exported(tmp_path: Path, support: NDArray[np.uint8]) -> None:
    fitted = classifier("cuda", support)
    before = fitted.predict(support)
    fitted.export_page(tmp_path / "page")
    assert (tmp_path / "page" / "index.html").exists()
    assert fitted.device_.type == "cuda"
    assert (fitted.predict(support) == before).all()


def test_both_trainings_run_on_a_gpu_and_continue(tmp_path: Path) -> None:
    folder = draw_colours(tmp_path / "colours")
    pretrain(PretrainRecipe((folder,), folder, **PRETRAIN), tmp_path / "backbone", device="auto", progress=False)
    recipe = meta_recipe(folder, tmp_path / "backbone", validation=(folder,), precision="bfloat16")
    model = meta_train(recipe, tmp_path / "meta", device="auto", progress=False)
    log = [json.loads(line) for line in (tmp_path / "meta" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2]
    assert all(np.isfinite(record["loss"]) for record in log)
    again = meta_train(recipe, tmp_path / "meta", device="auto", progress=False)
    for name, values in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], values)


def test_the_fourth_stage_takes_a_step_on_a_gpu_with_and_without_lite(tmp_path: Path) -> None:
    folder = draw_colours(tmp_path / "colours")
    for lite in (None, 4):
        recipe = MetaTrainRecipe(
            (folder,),
            "efficientnet-lite0",
            init="efficientnet-lite0",
            tasks=2,
            tasks_per_step=1,
            episodes="small",
            queries=2,
            floor=1.0,
            sizes=(64, 96),
            augment=True,
            camera=True,
            average=0.5,
            schedule="cosine",
            learn_pooling=True,
            lite=lite,
            model=MODEL,
        )
        meta_train(recipe, tmp_path / f"run{lite}", device="auto", progress=False)
        trained = load_checkpoint(tmp_path / f"run{lite}" / "checkpoint").config["backbone"]["pooling"]
        assert trained[0]["weight"] == 1
        assert trained[1]["weight"] != 0.6


def test_accuracies_on_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    source = load_source(draw_colours(tmp_path / "colours"), size=84)
    model, variants = load_checkpoint("resnet18"), (Variant(True, "auto"), Variant(False, "mahalanobis"))
    found = [
        evaluate_source(model.to(device), source, variants, way=3, shot=2, queries=2, episodes=4, precision="float32")
        for device in ("cuda", "cpu")
    ]
    for variant in variants:
        np.testing.assert_allclose(found[0][variant].mean(), found[1][variant].mean(), atol=0.05)
