"""Gradient steps on the support set: against a plain loop, and what refine="auto" promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, refine
from fewshot_mahalanobis.heads import AutoHead, CosineHead, Head, MahalanobisHead
from fewshot_mahalanobis.networks.adapted_task import AdaptedTask
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.refine import refined
from fewshot_mahalanobis.temperature import temperature_fit
from tests.tiny import QUERY_LABELS, SUPPORT_LABELS, adapting_model, drawn

LABELS = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0, 3])


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    return adapting_model()


@pytest.fixture(scope="module")
def backbone_model() -> SimpleCNAPS:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(12)
        convolutions = [nn.Conv2d(3, 12, 3, 2), norm, nn.ReLU(), nn.Conv2d(12, 12, 3, 2), nn.BatchNorm2d(12), nn.ReLU()]
        network = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        made = SimpleCNAPS.from_backbone(
            network, image_size=32, mean=[0.5] * 3, std=[0.5] * 3, adaptation="film"
        ).eval()
        for parameter in made.film_generator.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made


def support_images() -> Tensor:
    names = ["green", "red", "blue"]
    images = torch.from_numpy(drawn([names[label % 3] for label in LABELS], seed=3)).permute(0, 3, 1, 2)
    return F.interpolate(images.float(), (32, 32)) / 127.5 - 1


def adapted(model: SimpleCNAPS, head: Head[Any] | None = None) -> AdaptedTask:
    return model.adapt(support_images(), LABELS, head=head or AutoHead())


def plain_loop(model: SimpleCNAPS, task: AdaptedTask, steps: int) -> tuple[Film, list[float]]:
    """All in one graph, one left-out image at a time; the parameters after every step are tried."""
    gates = torch.ones(len(task.film), 2, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=0.15)
    tried, losses = [], []
    for _ in range(steps + 1):
        film = {}
        for (name, (gamma, beta)), (a, b) in zip(task.film.items(), gates):
            film[name] = (a * gamma + (1 - a), b * beta)
        x = model.feature_extractor(support_images(), Film(film))
        head = AutoHead(AutoHead().fit(x.detach(), LABELS).settings) if isinstance(task.head, AutoHead) else task.head
        logits, targets = [], []
        y = LABELS.tolist()
        fold = [(y[:i].count(label) + label) % 5 if y.count(label) > 1 else None for i, label in enumerate(y)]
        for i, label in enumerate(y):
            if fold[i] is not None:
                others = [j for j in range(len(y)) if fold[j] != fold[i]]
                logits.append(head(x[others], LABELS[others], x[i : i + 1])[0])
                targets.append(label)
        together, wanted = torch.stack(logits), torch.tensor(targets)
        loss = F.cross_entropy(
            together / temperature_fit(together, wanted, 0.25 / 4).temperature, wanted, reduction="sum"
        )
        tried.append(Film({name: (g.detach(), b.detach()) for name, (g, b) in film.items()}))
        losses.append(float(loss))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return tried[int(np.argmin(losses))], losses


@pytest.mark.parametrize("head", [AutoHead(), MahalanobisHead(), CosineHead()], ids=["auto", "mahalanobis", "cosine"])
@pytest.mark.parametrize("network", ["model", "backbone_model"])
def test_steps_are_those_of_a_plain_loop(network: str, head: Head[Any], request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(network)
    task = adapted(model, head)
    expected, losses = plain_loop(model, task, 3)
    found = refined(model, task, support_images(), steps=3, batch_size=4)
    assert min(losses) < losses[0]  # so that the steps count
    assert found.film is not None
    for name, pair in expected.items():
        torch.testing.assert_close(found.film[name], pair, rtol=1e-3, atol=1e-4)
    assert torch.equal(found.support_features, found.features(support_images()))


def test_gates_reach_from_the_pretrained_network_to_the_generated_parameters(model: SimpleCNAPS) -> None:
    film = adapted(model).film
    assert film is not None
    for gates, expected in ((torch.ones, film), (torch.zeros, Film.identity(model.feature_extractor.film_positions))):
        found = refine.gated(film, gates(len(film), 2))
        for name, pair in expected.items():
            torch.testing.assert_close(found[name], pair, rtol=0, atol=1e-6)


def test_left_out_images_become_more_likely_under_parameters_that_went_too_far(model: SimpleCNAPS) -> None:
    film = adapted(model).film
    assert film is not None
    spoilt = model.with_film(refine.gated(film, torch.full((len(film), 2), 4.0)), AutoHead())
    spoilt = spoilt.refit(spoilt.features(support_images()), LABELS)
    folds = refine._folds(LABELS)
    better = refined(model, spoilt, support_images(), steps=6)
    assert refine._held_out_loss(better, folds)[0] < 0.9 * refine._held_out_loss(spoilt, folds)[0]


def test_gradients_pass_through_some_images_in_turn(model: SimpleCNAPS, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    original = refine._gradient
    monkeypatch.setattr(refine, "_MAX_IMAGES", 4)
    monkeypatch.setattr(refine, "_gradient", lambda *a: (seen.append(a[3]), original(*a))[1])
    refined(model, adapted(model), support_images(), steps=3)
    assert [len(images) for images in seen] == [3, 3, 3]
    assert torch.equal(torch.cat(seen).sort(dim=0).values, support_images().sort(dim=0).values)


# -------------------------------------------------------------------- as an argument of the classifier


def fitted(model: SimpleCNAPS, **arguments: Any) -> SimpleCNAPSClassifier:
    classifier = SimpleCNAPSClassifier(model, precision="float32", device="cpu", **arguments)
    return classifier.fit(drawn(SUPPORT_LABELS, seed=1), SUPPORT_LABELS)


def test_fits_are_equal_and_survive_a_file(model: SimpleCNAPS, tmp_path: Path) -> None:
    queries = drawn(QUERY_LABELS, seed=2)
    random = torch.get_rng_state()
    classifier, plain = fitted(model, refine=3), fitted(model)
    assert torch.equal(torch.get_rng_state(), random)
    logits = classifier.decision_function(queries)
    assert (logits != plain.decision_function(queries)).any()
    assert (logits == fitted(model, refine=3).decision_function(queries)).all()
    classifier.save(tmp_path / "file")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "file", device="cpu")
    assert loaded.refine == 3
    assert (loaded.decision_function(queries) == logits).all()


def test_auto_that_declines_leaves_predictions_as_they_are(model: SimpleCNAPS, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = drawn(QUERY_LABELS, seed=2)
    plain = fitted(model).decision_function(queries)
    monkeypatch.setattr(refine, "MIN_GAIN", 1e-9)
    assert (fitted(model, refine="auto").decision_function(queries) != plain).any()
    for gain in (
        1e9,
        0.5 * refine._held_out_loss(fitted(model).task_, refine._folds(fitted(model).task_.support_labels))[0],
    ):
        monkeypatch.setattr(refine, "MIN_GAIN", gain)
        assert (fitted(model, refine="auto").decision_function(queries) == plain).all()
    one_shot = SimpleCNAPSClassifier(model, refine="auto", device="cpu").fit(drawn(["red", "blue"], seed=1), [0, 1])
    assert one_shot.task_.film is not None


def test_what_cannot_be_refined_is_refused(model: SimpleCNAPS) -> None:
    for wrong in (-1, 2.5, True, None, "yes"):
        with pytest.raises(ValueError, match="refine must be"):
            fitted(model, refine=wrong)
    with pytest.raises(ValueError, match="adapt=True"):
        fitted(model, refine=2, adapt=False)
    with pytest.raises(ValueError, match="two support images"):
        SimpleCNAPSClassifier(model, refine=2).fit(drawn(["red", "blue"], seed=1), [0, 1])
    assert fitted(model, refine="auto", adapt=False).task_.film is None
