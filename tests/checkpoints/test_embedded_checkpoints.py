"""The embedded checkpoints: they load without a network and are as good as the README says they are."""

import importlib.resources

import numpy as np
import pytest

from fewshot_mahalanobis import SimpleCNAPSClassifier, available_checkpoints, load_checkpoint
from fewshot_mahalanobis.apps.demo import run_demo
from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS, DEFAULT
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.evaluation import Accuracy, Variant, evaluate_source
from tests.image_sets import DATA, needs_data
from tests.robustness.process import CONTEXTS
from tests.tiny import pictures

EMBEDDED = [name for name, record in CHECKPOINTS.items() if record.embedded and name == record.name]
FOLDERS = importlib.resources.files("fewshot_mahalanobis.checkpoints")


@pytest.fixture(scope="module")
def model():
    return load_checkpoint("default")


def test_there_are_two_and_each_is_a_simple_cnaps_on_its_own_backbone():
    assert EMBEDDED == ["resnet18", "efficientnet-lite0"]
    bytes_at_most = {"resnet18": 25_000_000, "efficientnet-lite0": 8_000_000}
    for name in EMBEDDED:
        model, record = load_checkpoint(name), available_checkpoints()[name]
        assert model.config["adaptation"] == "film"
        assert model.config["image_size"] == record.image_size
        for setting, value in record.settings.items():
            assert model.config[setting] == value, (name, setting)
        with importlib.resources.as_file(FOLDERS / name / "model.safetensors") as path:
            assert path.stat().st_size <= bytes_at_most[name]


@pytest.mark.parametrize("name", EMBEDDED)
def test_they_give_the_same_features_in_whatever_contexts_the_caller_is(name):
    """Other contexts and smaller networks: tests/robustness/test_contexts.py."""

    def features():
        classifier = SimpleCNAPSClassifier(name, device="cpu", precision="float32")
        return classifier.fit(pictures(4, seed=0), [0, 0, 1, 1]).transform(pictures(2, seed=1))

    without = features()
    with CONTEXTS["autocast"](), CONTEXTS["float64 by default"]():
        np.testing.assert_array_equal(features(), without)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet18", ("non-commercial", "Recipe", "all of ImageNet", "mini_imagenet", "5-shot", "95 %")),
        ("efficientnet-lite0", ("non-commercial", "Recipe", "all of ImageNet", "Apache 2.0", "CE-Shape-1")),
    ],
)
def test_records_and_model_cards_tell_what_it_is_and_what_it_was_trained_on(name, words):
    assert "mini-ImageNet" in available_checkpoints()[name].trained_on
    card = (FOLDERS / name / "README.md").read_text()
    for word in words:
        assert word in card


def test_the_default_is_one_of_them_and_its_accuracy_is_known():
    assert DEFAULT in EMBEDDED
    assert len(available_checkpoints()["default"].accuracies) >= 18


def test_the_demo_reports_and_draws_and_on_its_digits_an_unseen_domain_adapting_helps(tmp_path):
    pytest.importorskip("matplotlib", reason="the demo's picture needs the extra demo")
    said: list[str] = []
    found = run_demo(tmp_path / "demo.png", tasks=3, say=said.append)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    text = "\n".join(said)
    for name, accuracy in found.items():
        assert name in text
        assert str(accuracy) in text
    adapted, plain, raw_pixels = found.values()
    assert adapted.mean > plain.mean
    assert adapted.mean > raw_pixels.mean


@needs_data
@pytest.mark.parametrize("name", ["omniglot.zip:test", "mini_imagenet_test.zip"])
def test_readme_accuracies_hold_on_fresh_episodes(model, name):
    """Few other episodes than the table's; the mean must lie within their joint interval of its figure."""
    variant = Variant(True, model.config["head"])
    source = load_source(f"{DATA}/{name}", size=model.image_size, lazy=True)
    accuracies = evaluate_source(model, source, [variant], queries=3, episodes=5, seed=1234)[variant]
    mean, half_width = available_checkpoints()["default"].accuracies[f"{source.name}, 5-way 5-shot"]
    found = Accuracy.of(accuracies)
    assert abs(100 * found.mean - mean) < np.hypot(2 * 100 * found.half_width, half_width)
