"""The embedded checkpoint: it loads without a network and is as good as the README says it is."""

import importlib.resources
import os
from pathlib import Path

import numpy as np
import pytest

from fewshot_mahalanobis import available_checkpoints, load_checkpoint
from fewshot_mahalanobis.data.sources import load_source
from fewshot_mahalanobis.demo import compare, digits, run_demo
from fewshot_mahalanobis.devices import choose_dtype
from fewshot_mahalanobis.evaluation import Accuracy, Variant, evaluate_source

DATA = Path(os.environ.get("FEWSHOT_MAHALANOBIS_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="module")
def model():
    return load_checkpoint("default")


def test_it_is_a_whole_simple_cnaps_of_at_most_45_mb(model):
    assert model.config["adaptation"] == "film"
    assert model.config["head"] == "mahalanobis"
    assert model.config["image_size"] == 84
    file = importlib.resources.files("fewshot_mahalanobis.checkpoints") / "default" / "model.safetensors"
    with importlib.resources.as_file(file) as path:
        assert path.stat().st_size <= 45_000_000


def test_its_record_and_model_card_tell_what_it_is():
    record = available_checkpoints()["default"]
    assert record.embedded
    assert "mini-ImageNet" in record.trained_on
    assert len(record.accuracies) >= 20
    card = (importlib.resources.files("fewshot_mahalanobis.checkpoints") / "default" / "README.md").read_text()
    for word in ("non-commercial", "Recipe", "mini_imagenet", "5-shot", "95 %"):
        assert word in card


def test_on_the_demos_digits_an_unseen_domain_adapted_beats_raw_pixels_beats_unadapted(model):
    images, targets = digits()
    adapted, plain, raw_pixels = compare(model, images, targets, tasks=40, dtype=choose_dtype("auto", model)).values()
    assert adapted.mean > raw_pixels.mean > plain.mean


def test_the_demo_reports_and_draws(tmp_path):
    pytest.importorskip("matplotlib", reason="the demo's picture needs the extra demo")
    said: list[str] = []
    found = run_demo(tmp_path / "demo.png", tasks=2, say=said.append)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    text = "\n".join(said)
    for name, accuracy in found.items():
        assert name in text
        assert str(accuracy) in text


@pytest.mark.skipif(
    not DATA.is_dir() and "FEWSHOT_MAHALANOBIS_REQUIRE_DATA" not in os.environ,
    reason="the image sets of the README's table are not here (FEWSHOT_MAHALANOBIS_DATA names their folder)",
)
@pytest.mark.parametrize("name", ["omniglot.zip:test", "mini_imagenet_test.zip"])
def test_readme_accuracies_hold_on_fresh_episodes(model, name):
    """Few other episodes than the table's; the mean must lie within their joint interval of its figure."""
    source = load_source(f"{DATA}/{name}")
    accuracies = evaluate_source(model, source, queries=5, episodes=40, seed=1234, dtype=choose_dtype("auto", model))[
        Variant(True, "mahalanobis")
    ]
    mean, half_width = available_checkpoints()["default"].accuracies[f"{source.name}, 5-way 5-shot"]
    found = Accuracy.of(accuracies)
    assert abs(100 * found.mean - mean) < np.hypot(2 * 100 * found.half_width, half_width)
