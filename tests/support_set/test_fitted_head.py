"""A fitted head as one object: it is the same on another device, and parts of a state that do not fit are refused.

Other wrong parts, as they stand in a file: tests/robustness/test_hostile_files.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from tests.tiny import LABELS, drawn, tiny_classifier

LABELLED = [*LABELS, "yellow", "purple"]


@pytest.fixture(scope="module")
def fitted() -> FittedHead:
    """With everything that a fitted head may have: examples of no class, groups, twins, unlabelled, further ones."""
    classifier = tiny_classifier(unknown_label="none", false_rejection_rate=0.2)
    images = drawn(LABELLED, 1)
    labels = ["none" if label in ("yellow", "purple") else label for label in LABELLED]
    groups = [0, 1, 2, 1, 0, *range(3, 8)]
    classifier.fit(images, labels, groups=groups, unlabelled=drawn(LABELS, 2))
    head = classifier.calibrate(drawn(LABELS * 4, 3)).fitted_head_
    assert head.groups is not None
    return replace(head, groups_with_twins=head.groups // 2)


@pytest.fixture
def state(fitted: FittedHead) -> dict[str, Any]:
    state = fitted.to_state()
    return state | {"tensors": dict(state["tensors"])}


def test_on_another_device_it_answers_the_same(fitted: FittedHead) -> None:
    here, other = fitted.support.adapted.device, torch.device("cpu", 0)
    assert fitted.to(here) is fitted
    assert other != here  # by its name: PyTorch counts it as another device
    moved = fitted.to(other)
    assert moved is not fitted
    queries = Features(fitted.support.adapted[::2] + 0.01)
    for ours, theirs in zip(fitted.predict(queries), moved.predict(queries), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(fitted.doubts(fitted.predict(queries)), moved.doubts(moved.predict(queries)))
    assert moved.rate_interval == fitted.rate_interval
    assert moved.temperature_of_all == fitted.temperature_of_all
    for name, tensor in fitted.to_state()["tensors"].items():
        assert torch.equal(tensor, moved.to_state()["tensors"][name]), name


def test_a_state_is_undone(fitted: FittedHead, state: dict[str, Any]) -> None:
    again = FittedHead.from_state(state)
    queries = Features(fitted.support.adapted + 0.01)
    for ours, theirs in zip(fitted.predict(queries), again.predict(queries), strict=True):
        assert torch.equal(ours, theirs)
    assert again.rate_interval == fitted.rate_interval


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threshold": None, "unknown_label": None}, "a threshold of None with unknown_label=None"),
        ({"false_rejection_rate": 1.0}, "a false_rejection_rate of 1.0"),
        ({"group_names": [None] * 7}, "7 names of groups of 8 support images"),
        ({"pool_temperature": 0.0}, "a temperature of 0.0 with unlabelled examples"),
        ({"pool_temperature": float("inf")}, "a temperature of inf with unlabelled examples"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(
    values: dict[str, Any], message: str, state: dict[str, Any]
) -> None:
    state["values"] = msgspec.structs.replace(state["values"], **values)
    with pytest.raises(ValueError, match=message):
        FittedHead.from_state(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(unadapted_negatives=t["negative_features"]), "without the features that those of classes"),
        (lambda t: t.update(negative_features=t["negative_features"][:0]), "without the features that those of class"),
        (
            lambda t: t.update(unadapted_negatives=t.pop("negative_features")),
            "examples of no class without their adapted features",
        ),
        (lambda t: t.update(calibration_scores=t["calibration_scores"][:0]), "a calibration .* from no example"),
        (lambda t: t.pop("memberships"), "unlabelled examples without their classes"),
        (lambda t: t.pop("unlabelled_features"), "or these without the examples"),
        (lambda t: t.update(memberships=-t["memberships"]), "negative or sum to more than 1"),
        (lambda t: t.update(memberships=t["memberships"] + 0.5), "negative or sum to more than 1"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(change: Any, message: str, state: dict[str, Any]) -> None:
    change(state["tensors"])
    with pytest.raises(ValueError, match=message):
        FittedHead.from_state(state)


def test_scores_of_further_examples_need_a_threshold(state: dict[str, Any]) -> None:
    state["values"] = msgspec.structs.replace(state["values"], threshold=None, unknown_label=None, units=None)
    with pytest.raises(ValueError, match="a calibration of a threshold that there is not"):
        FittedHead.from_state(state)
