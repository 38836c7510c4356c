"""Gradient steps on the support set: against a plain loop, and what refine="auto" promises."""

from __future__ import annotations

import itertools
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


def plain_loop(model: SimpleCNAPS, task: AdaptedTask, steps: int) -> tuple[list[Film], list[list[float]]]:
    """All in one graph, one left-out image at a time: parameters, and losses of the images that check, by step."""
    gates = torch.ones(len(task.film), 2, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=0.1)
    y, films, checking = LABELS.tolist(), [], []
    place = [y[:i].count(label) if y.count(label) > 1 else None for i, label in enumerate(y)]
    fold = [None if place[i] is None else (place[i] + label) % 5 for i, label in enumerate(y)]
    for _ in range(steps + 1):
        film = {}
        for (name, (gamma, beta)), (a, b) in zip(task.film.items(), gates):
            film[name] = (a * gamma + (1 - a), b * beta)
        x = model.feature_extractor(support_images(), Film(film))
        head = AutoHead(AutoHead().fit(x.detach(), LABELS).settings) if isinstance(task.head, AutoHead) else task.head
        left_out = [i for i in range(len(y)) if place[i] is not None]
        logits = []
        for i in left_out:
            others = [j for j in range(len(y)) if fold[j] != fold[i]]
            logits.append(head(x[others], LABELS[others], x[i : i + 1])[0])
        together, targets = torch.stack(logits), LABELS[left_out]
        temperature = temperature_fit(together, targets, 0.25 / 4).temperature
        losses = [F.cross_entropy(row / temperature, t) for row, t in zip(together, targets)]
        films.append(Film({name: (g.detach(), b.detach()) for name, (g, b) in film.items()}))
        checking.append(sorted(float(loss.detach()) for i, loss in zip(left_out, losses) if place[i] % 2 == 1))
        optimiser.zero_grad()
        torch.stack([loss for i, loss in zip(left_out, losses) if place[i] % 2 == 0]).sum().backward()
        optimiser.step()
    return films, checking


@pytest.mark.parametrize("head", [AutoHead(), MahalanobisHead(), CosineHead()], ids=["auto", "mahalanobis", "cosine"])
@pytest.mark.parametrize("network", ["model", "backbone_model"])
def test_steps_are_those_of_a_plain_loop(network: str, head: Head[Any], request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(network)
    task = adapted(model, head)
    # Adam divides small gradients by themselves, so rounding in the settings that the auto head chooses adds up.
    steps = 1 if isinstance(head, AutoHead) else 3
    films, checking = plain_loop(model, task, steps)
    found = itertools.islice(refine._trajectory(model, task, support_images(), 64), steps + 1)
    for film, losses, (now, checked) in zip(films, checking, found, strict=True):
        for name, pair in film.items():
            torch.testing.assert_close(now.film[name], pair, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(checked.sort().values, losses, rtol=1e-3, atol=1e-4)
        assert torch.equal(now.support_features, now.features(support_images()))
    best = int(np.argmin([sum(losses) for losses in checking]))
    chosen = refined(model, task, support_images(), steps=steps, batch_size=4)
    for name, pair in films[best].items():
        torch.testing.assert_close(chosen.film[name], pair, rtol=1e-3, atol=1e-4)


def test_gates_reach_from_the_pretrained_network_to_the_generated_parameters(model: SimpleCNAPS) -> None:
    film = adapted(model).film
    assert film is not None
    for gates, expected in ((torch.ones, film), (torch.zeros, Film.identity(model.feature_extractor.film_positions))):
        found = refine.gated(film, gates(len(film), 2))
        for name, pair in expected.items():
            torch.testing.assert_close(found[name], pair, rtol=0, atol=1e-6)


def test_images_that_check_become_more_likely_under_parameters_that_went_too_far(model: SimpleCNAPS) -> None:
    film = adapted(model).film
    assert film is not None
    spoilt = model.with_film(refine.gated(film, torch.full((len(film), 2), 4.0)), AutoHead())
    spoilt = spoilt.refit(spoilt.features(support_images()), LABELS)
    better = refined(model, spoilt, support_images(), steps=6)
    assert refine._held_out_losses(better)[0].sum() < 0.95 * refine._held_out_losses(spoilt)[0].sum()


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
    monkeypatch.setattr(refine, "MIN_ERRORS", 0.0)
    assert (fitted(model, refine="auto").decision_function(queries) != plain).any()
    for name in ("MIN_GAIN", "MIN_ERRORS"):
        with monkeypatch.context() as patched:
            patched.setattr(refine, name, 1e9)
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
