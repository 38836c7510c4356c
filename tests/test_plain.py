"""Labels and parameters of NumPy, tensors and enumerations: those of a caller who writes Python's own, everywhere."""

from __future__ import annotations

import json
import pickle
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import MahalanobisHead
from fewshot_mahalanobis.plain import plain
from fewshot_mahalanobis.support_set.copies import checked_groups
from tests.tiny import SUPPORT_LABELS, drawn, unadapted_model


class Dog(str, Enum):
    """Names that NumPy cuts to the same length."""

    LABRADOR = "labrador"
    LABRADOODLE = "labradoodle"
    NONE = "no dog"


class Number(IntEnum):
    THREE = 3
    SEVEN = 7
    NONE = -1


class Quoted(str):
    """Says something else than it is."""

    def __str__(self) -> str:
        return f"<{super().__str__()}>"


class Level(float):
    def __str__(self) -> str:
        return "high"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(8), 8),
        (np.uint64(2**63), 2**63),
        (np.bool_(True), True),
        (np.float32(0.5), 0.5),
        (np.str_("a"), "a"),
        (np.array(3), 3),
        (torch.tensor(4, dtype=torch.int32), 4),
        (torch.tensor(True), True),
        (Dog.LABRADOR, "labrador"),
        (Number.SEVEN, 7),
        (Quoted("a"), "a"),
        (Level(2), 2.0),
        ((np.int8(0), np.float64(4095)), (0, 4095.0)),
        ({Dog.LABRADOR: np.float32(0.25), Quoted("b"): 0.75}, {"labrador": 0.25, "b": 0.75}),
    ],
)
def test_a_value_becomes_pythons_own(value, expected):
    made = plain(value)
    assert (made, repr(made), type(made)) == (expected, repr(expected), type(expected))
    assert json.loads(json.dumps(made)) == json.loads(json.dumps(expected))


@pytest.mark.parametrize("value", [None, "auto", Path("a"), torch.zeros(2), np.zeros((1, 2)), SimpleCNAPS])
def test_other_values_stay_as_they_are(value):
    assert plain(value) is value


FEATURES = np.random.default_rng(0).normal(size=(6, 4)) + np.repeat([[0], [9]], 3, axis=0)
#: Two labels three times each, as callers have them -> the classes.
LABELS = {
    "members of an enumeration": ([Dog.LABRADOR] * 3 + [Dog.LABRADOODLE] * 3, ["labradoodle", "labrador"]),
    "members in an array": (np.array([Dog.LABRADOR] * 3 + [Dog.LABRADOODLE] * 3, object), ["labradoodle", "labrador"]),
    "members in a column": (pd.Series([Dog.LABRADOR] * 3 + [Dog.LABRADOODLE] * 3), ["labradoodle", "labrador"]),
    "members and strings": ([Dog.LABRADOR, "labrador"] + [Dog.LABRADOR] + ["b"] * 3, ["b", "labrador"]),
    "numbers of an enumeration": ([Number.THREE] * 3 + [Number.SEVEN] * 3, [3, 7]),
    "strings with a __str__": ([Quoted("a")] * 3 + [Quoted("b")] * 3, ["a", "b"]),
    "a tensor": (torch.tensor([1, 1, 1, 0, 0, 0]), [0, 1]),
    "a tensor of the graph": (torch.tensor([1.0, 1, 1, 0, 0, 0], requires_grad=True), [0.0, 1.0]),
    "a list of tensors": ([torch.tensor(number) for number in [5, 5, 5, 4, 4, 4]], [4, 5]),
    "strings of NumPy": ([np.str_("a")] * 3 + [np.str_("b")] * 3, ["a", "b"]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_their_values_in_fit_partial_fit_score_and_priors(kind, tmp_path):
    labels, classes = LABELS[kind]
    priors = dict(zip([labels[0], labels[5]], [0.75, 0.25], strict=True)) if "tensor" not in kind else None
    classifier = MahalanobisClassifier(priors=priors).fit(FEATURES, labels)
    assert classifier.classes_.tolist() == classes
    assert {type(label) for label in classifier.classes_.tolist()} == {type(classes[0])}
    assert classifier.score(FEATURES, labels) == 1
    if priors is not None:
        assert classifier.priors_[classes.index(plain(labels[0]))] == 0.75
    classifier.partial_fit(FEATURES, labels, classes=[labels[0], labels[5]])
    assert classifier.class_counts_.tolist() == [6, 6]
    classifier.save(tmp_path / "file")
    answers = MahalanobisClassifier.load(tmp_path / "file").predict(FEATURES).tolist()
    assert answers == [plain(label) for label in labels]


def test_names_of_groups_are_their_values():
    groups = [Dog.LABRADOR, "labrador", Number.THREE, np.int8(3), Quoted("a"), np.str_("a")]
    assert checked_groups(groups, 6) == ["labrador", "labrador", 3, 3, "a", "a"]
    assert {type(name) for name in checked_groups(groups, 6)} == {str, int}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_labels_may_be_on_a_gpu():
    labels = torch.tensor([1, 1, 1, 0, 0, 0], device="cuda")
    for given in (labels, [*labels]):
        classifier = MahalanobisClassifier().fit(FEATURES, given)
        assert classifier.classes_.tolist() == [0, 1]
        assert classifier.score(FEATURES, given) == 1


#: Constructor arguments as callers have them, beside a label that is no class.
PARAMETERS: dict[str, dict[str, Any]] = {
    "of NumPy": {
        "image_size": np.int64(40),
        "batch_size": np.int16(3),
        "n_jobs": np.int64(1),
        "verbose": np.uint8(0),
        "adapt": np.bool_(False),
        "temperature": np.float32(2),
        "head": np.str_("mahalanobis"),
        "value_range": tuple(np.array([0, 255])),
        "false_rejection_rate": np.float32(0.5),
    },
    "of tensors": {
        "image_size": torch.tensor(40),
        "batch_size": torch.tensor(3),
        "temperature": torch.tensor(2.0),
        "false_rejection_rate": torch.tensor(0.5),
        "head": "mahalanobis",
        "value_range": torch.tensor([0, 255]).unbind(),
    },
    "of enumerations": {
        "image_size": IntEnum("Size", {"SMALL": 40}).SMALL,
        "batch_size": 3,
        "temperature": Level(2),
        "false_rejection_rate": Level(0.5),
        "head": Enum("Head", {"PAPER": "mahalanobis"}, type=str).PAPER,
        "precision": Quoted("float32"),
        "device": Quoted("cpu"),
        "value_range": [Number.NONE + 1, 255],
    },
}
UNKNOWN = {"of NumPy": np.array(["none"])[0], "of tensors": Quoted("none"), "of enumerations": Dog.NONE}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_are_their_values_on_every_surface_and_are_never_changed(kind, tmp_path):
    given = {**PARAMETERS[kind], "unknown_label": UNKNOWN[kind]}
    images = drawn(SUPPORT_LABELS, 0)
    network = unadapted_model()
    classifier = SimpleCNAPSClassifier(network, **given).fit(images, SUPPORT_LABELS)
    own = {name: plain(value) for name, value in given.items()}
    expected = SimpleCNAPSClassifier(network, **own).fit(images, SUPPORT_LABELS)
    assert all(getattr(classifier, name) is value for name, value in given.items())
    assert classifier.fitted_head_.unknown_label == own["unknown_label"]
    assert type(classifier.fitted_head_.unknown_label) is str

    classifier.save(tmp_path / "given")
    expected.save(tmp_path / "own")
    with safe_open(tmp_path / "given", "pt") as one, safe_open(tmp_path / "own", "pt") as other:
        assert one.metadata() == other.metadata()
    answers = expected.predict(images).tolist()
    for other in (classifier, SimpleCNAPSClassifier.load(tmp_path / "given"), pickle.loads(pickle.dumps(expected))):
        assert other.predict(images).tolist() == answers
    assert json.dumps(classifier.model_.config) == json.dumps(expected.model_.config)


def test_an_unknown_label_beyond_the_classes_of_an_array_is_saved_and_exported(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    y = np.array([0, 0, 0, 1, 1, 1])
    classifier = MahalanobisClassifier(unknown_label=y.max() + 1, false_rejection_rate=np.float32(0.4)).fit(FEATURES, y)
    classifier.save(tmp_path / "file")
    far = FEATURES + 100
    assert MahalanobisClassifier.load(tmp_path / "file").predict(far).tolist() == [2] * 6
    classifier.export_onnx(tmp_path / "file.onnx")
    properties = {entry.key: entry.value for entry in onnx.load(tmp_path / "file.onnx").metadata_props}
    assert json.loads(properties["labels"]) == [0, 1, 2]


def test_a_model_and_a_head_with_numbers_of_numpy_are_written(tmp_path):
    model = SimpleCNAPS(adaptation="none", image_size=np.int64(32), beta=np.float32(2), task_covariance=np.bool_(True))
    assert json.loads(json.dumps(model.config))["image_size"] == 32
    classifier = MahalanobisClassifier(head=MahalanobisHead(scale=np.float32(2))).fit(FEATURES, [0, 0, 0, 1, 1, 1])
    classifier.save(tmp_path / "file")
    assert MahalanobisClassifier.load(tmp_path / "file").head.scale == 2
