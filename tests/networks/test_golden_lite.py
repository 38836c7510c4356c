"""LITE's figures, reproduced: its Simple CNAPS on EfficientNet-B0 at 224 pixels."""

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.networks.efficientnet import EvenSameConv2d
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters
from tests.golden import recipe
from tests.networks.test_golden import GOLDEN, relative_error
from tests.tiny import task_representation

MODEL = "lite_simple_cnaps"


@pytest.fixture(scope="module")
def state_dict():
    return {key: torch.from_numpy(value) for key, value in recipe.state_dict(MODEL, GOLDEN).items()}


@pytest.fixture(scope="module")
def model(state_dict):
    return SimpleCNAPS.from_published_state_dict(state_dict)


def relative_to_longest(ours: torch.Tensor, golden: np.ndarray) -> float:
    return float(np.abs(ours.double().numpy() - golden).max() / np.abs(golden).max())


@pytest.mark.parametrize("case", ["5way2shot", "with_1shot"])
def test_published_figures_are_reproduced(model, case):
    golden = np.load(GOLDEN / f"{MODEL}.{case}.npz")
    images = {}
    for split in ("support", "query"):
        small = recipe.images(f"{MODEL}.{case}", split, golden[f"{split}_labels"], 14)
        images[split] = torch.from_numpy(small.repeat(16, axis=2).repeat(16, axis=3))
        sums = [images[split].double().sum(), images[split].double().abs().sum()]
        np.testing.assert_allclose(np.array(sums), golden[f"{split}_checksum"], rtol=1e-9)
    with torch.no_grad():
        z, film = task_representation(model, images["support"]), film_parameters(model, images["support"])
        unfolded = model.feature_extractor(images["support"], film)
    assert relative_error(z[None], golden["task_representation"]) < 1e-4
    assert len(film) == 18
    for number, pair in enumerate(film.values()):
        for name, ours in zip(("gamma", "beta"), pair, strict=True):
            assert relative_error(ours, golden[f"film.{number}.{name}"]) < 1e-4, (number, name)
    task = model.adapt(images["support"], torch.from_numpy(golden["support_labels"]))
    for ours, name in (
        (unfolded, "support"),
        (task.fitted_head.support.adapted, "support"),
        (task.features(images["query"]), "query"),
    ):
        assert relative_to_longest(ours, golden[f"{name}_features"]) < 2e-5
    assert relative_error(task.logits(images["query"]), golden["logits"]) < 1e-4


def test_at_84_pixels_the_padding_is_still_that_of_224(state_dict):
    model = SimpleCNAPS.from_published_state_dict(state_dict, image_size=84)
    assert model.image_size == 84
    network = model.feature_extractor.network
    strided = [module for module in network.modules() if isinstance(module, EvenSameConv2d)]
    assert [conv.kernel_size[0] for conv in strided] == [3, 3, 5, 3, 5]
    sides = []
    hooks = [conv.register_forward_hook(lambda m, i, o: sides.append((i[0].shape[2], o.shape[2]))) for conv in strided]
    with torch.no_grad():
        model.feature_extractor(torch.zeros(1, 3, 84, 84))
    for hook in hooks:
        hook.remove()
    # TensorFlow's "same" would round up: 21 -> 11.
    assert sides == [(84, 42), (42, 21), (21, 10), (10, 5), (5, 2)]


def test_a_missing_key_is_an_error(state_dict):
    less = {key: value for key, value in state_dict.items() if "gamma_regularizers" not in key}
    with pytest.raises(ValueError, match="not weights of the published implementation"):
        SimpleCNAPS.from_published_state_dict(less)
    less = {key: value for key, value in state_dict.items() if key != "feature_extractor._bn1.weight"}
    with pytest.raises(ValueError, match="EfficientNet"):
        SimpleCNAPS.from_published_state_dict(less)
