"""The published implementation's figures, reproduced: every logit, feature and FiLM parameter."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPS
from tests.golden import recipe
from tests.tiny import task_representation

GOLDEN = Path(recipe.__file__).parent
MODELS = ("simple_cnaps", "simple_ar_cnaps", "simple_cnaps_no_adaptation", "cnaps", "ar_cnaps")
CASES = [
    (model, file.name.removeprefix(f"{model}.").removesuffix(".npz"))
    for model in MODELS
    for file in sorted(GOLDEN.glob(f"{model}.*.npz"))
]


@lru_cache(maxsize=1)
def published_state_dict(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in recipe.state_dict(name, GOLDEN).items()}


@lru_cache(maxsize=1)
def published_model(name: str) -> SimpleCNAPS:
    return SimpleCNAPS.from_published_state_dict(published_state_dict(name))


class Episode:
    def __init__(self, model: str, case: str) -> None:
        self.golden = np.load(GOLDEN / f"{model}.{case}.npz")
        self.support_labels, self.query_labels = self.golden["support_labels"], self.golden["query_labels"]
        size = int(self.golden["image_size"])
        self.support = torch.from_numpy(recipe.images(case, "support", self.support_labels, size))
        self.query = torch.from_numpy(recipe.images(case, "query", self.query_labels, size))


def relative_error(ours: torch.Tensor, golden: np.ndarray) -> float:
    """Largest difference relative to each figure's own size; figures that cancel to less than a
    hundredth of their vector's largest are held to that hundredth (float32 has no more digits there)."""
    scale = np.maximum(np.abs(golden), 1e-2 * np.abs(golden).max(axis=-1, keepdims=True))
    return float((np.abs(ours.double().numpy() - golden) / scale).max())


def test_there_are_golden_vectors_of_every_supported_model():
    assert {model for model, _ in CASES} == set(MODELS)
    assert len(CASES) >= 14


@pytest.mark.parametrize(("model", "case"), CASES)
def test_published_figures_are_reproduced(model, case):
    episode = Episode(model, case)
    for images, name in ((episode.support, "support"), (episode.query, "query")):
        sums = np.array([images.double().sum(), images.double().abs().sum()])
        np.testing.assert_allclose(sums, episode.golden[f"{name}_checksum"], rtol=1e-9)
    network = published_model(model)
    labels = torch.from_numpy(episode.support_labels)

    task = network.adapt(episode.support, labels)
    if network.film_generator is not None:
        with torch.no_grad():
            z = task_representation(network, episode.support)
        assert relative_error(z[None], episode.golden["task_representation"].reshape(1, 64)) < 1e-4
        film = task.network.film
        for layer in range(4):
            for block in range(2):
                for norm in (1, 2):
                    for name, ours in zip(("gamma", "beta"), film[f"layers.{layer}.{block}.bn{norm}"]):
                        golden = episode.golden[f"film.layer{layer + 1}.block{block}.{name}{norm}"]
                        assert relative_error(ours, golden) < 1e-4, (layer, block, name)

    assert relative_error(task.fitted_head.support.adapted, episode.golden["support_features"]) < 1e-4
    assert relative_error(task.features(episode.query), episode.golden["query_features"]) < 1e-4
    tolerance = 1e-5 if model in ("cnaps", "ar_cnaps") else 1e-4
    assert relative_error(task.logits(episode.query), episode.golden["logits"]) < tolerance


@pytest.mark.parametrize("model", ["simple_cnaps", "cnaps"])
def test_differentiable_forward_equals_the_folded_network(model):
    episode = Episode(model, "5way5shot")
    with torch.no_grad():
        logits = published_model(model)(episode.support, torch.from_numpy(episode.support_labels), episode.query)
    assert relative_error(logits, episode.golden["logits"]) < 1e-4


def test_cnaps_has_exactly_the_paper_s_number_of_parameters_more_than_simple_cnaps():
    def count(config):
        return sum(p.numel() for p in SimpleCNAPS(**config).parameters())

    for adaptation in ("film", "auto-regressive"):
        plain = count({"adaptation": adaptation})
        assert count({"adaptation": adaptation, "head": "linear"}) - plain == 788_485


def test_a_missing_published_weight_is_named():
    weights = dict(published_state_dict("simple_cnaps"))
    del weights["feature_adaptation_network.layers.2.gamma1_regularizers.1"]
    with pytest.raises(ValueError, match=r"film_generator.layers.2.scales.1.gamma1"):
        SimpleCNAPS.from_published_state_dict(weights)


def test_a_bare_pretrained_network_reads_as_no_adaptation():
    weights = published_state_dict("simple_cnaps")
    bare = {
        "module." + key.removeprefix("feature_extractor."): value
        for key, value in weights.items()
        if key.startswith("feature_extractor.")
    }
    bare["module.fc.weight"], bare["module.fc.bias"] = torch.zeros(712, 512), torch.zeros(712)
    model = SimpleCNAPS.from_published_state_dict({"epoch": 3, "state_dict": bare})
    assert model.config["adaptation"] == "none"
    assert torch.equal(model.feature_extractor.conv1.weight, weights["feature_extractor.conv1.weight"])
