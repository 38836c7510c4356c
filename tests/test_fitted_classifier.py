"""What a fitted image classifier keeps to: its classes, its features, its range of values, its settings."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.model_selection import learning_curve
from torch import nn

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.checkpoints import card
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.support_set.features import Features
from tests.tiny import LABELS, adapting_model, pictures, tiny_classifier, tiny_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

# ---------------------------------------------------------------------- classes of a stream


@pytest.mark.parametrize("order", ["aabb", "abab", "baab"])
def test_a_stream_may_begin_with_one_class_if_all_are_named(order: str) -> None:
    stream = SimpleCNAPSClassifier(tiny_model(), device="cpu")
    for image, label in zip(pictures(4, 1), order, strict=True):
        stream.partial_fit(image[None], [label], classes=["a", "b"])
    whole = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(4, 1), list(order))
    assert stream.classes_.tolist() == ["a", "b"]
    np.testing.assert_allclose(stream.predict_proba(pictures(5, 2)), whole.predict_proba(pictures(5, 2)), rtol=1e-5)


@pytest.mark.parametrize(("labels", "classes"), [([3, 3], [3, 5]), (["x"], ["x", "y", "z"]), ([True], [False, True])])
def test_one_class_is_all_that_is_predicted_until_another_comes(labels: list[Any], classes: list[Any]) -> None:
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").partial_fit(
        pictures(len(labels), 1), labels, classes=classes
    )
    assert classifier.predict(pictures(2, 2)).tolist() == labels[:1] * 2
    np.testing.assert_array_equal(classifier.predict_proba(pictures(2, 2)), np.ones((2, 1)))


@pytest.mark.parametrize("adapting", [True, False])
def test_learning_curves_of_scikit_learn_feed_images_a_few_at_a_time(adapting: bool) -> None:
    model = adapting_model() if adapting else tiny_model()
    y = np.arange(12) % 2
    sizes, _, scores = learning_curve(
        SimpleCNAPSClassifier(model, device="cpu"),
        pictures(12, 1),
        y,
        cv=2,
        train_sizes=[0.2, 0.5, 1.0],  # the first has one class
        exploit_incremental_learning=True,
        error_score="raise",
    )
    assert sizes.tolist() == [1, 3, 6]
    assert np.isfinite(scores).all()


def test_labels_outside_the_named_classes_are_refused_and_change_nothing() -> None:
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu")
    with pytest.raises(ValueError, match="'c' is not among the classes"):
        classifier.partial_fit(pictures(2, 1), ["a", "c"], classes=["a", "b"])
    assert not hasattr(classifier, "task_")
    with pytest.raises(ValueError, match=r"two classes.*partial_fit\(X, y, classes=...\)"):
        classifier.partial_fit(pictures(2, 1), ["a", "a"])
    classifier.partial_fit(pictures(2, 1), ["a", "a"], classes=["a", "b"])
    for labels, classes, message in (
        (["c"], None, "'c' is not among the classes"),
        (["a"], ["a", "c"], "an earlier partial_fit named"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier.partial_fit(pictures(1, 2), labels, classes=classes)
    assert classifier.class_counts_.tolist() == [2]
    kept = pickle.loads(pickle.dumps(classifier))
    with pytest.raises(ValueError, match="'c' is not among the classes"):
        kept.partial_fit(pictures(1, 2), ["c"])
    classifier.fit(pictures(2, 1), ["c", "d"])  # a new start
    assert classifier.partial_fit(pictures(1, 2), ["e"]).classes_.tolist() == ["c", "d", "e"]


# ---------------------------------------------------------------------- features in place of images


@pytest.mark.parametrize("settings", [{}, {"unknown_label": "?", "false_rejection_rate": 0.2}], ids=str)
def test_features_serve_in_place_of_their_images(settings: dict[str, Any]) -> None:
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", **settings).fit(pictures(8, 1), LABELS)
    queries, more = pictures(5, 2), pictures(3, 3)
    seen = classifier.features(queries)
    assert classifier.predict(seen).tolist() == classifier.predict(queries).tolist()
    np.testing.assert_array_equal(classifier.predict_proba(seen), classifier.predict_proba(queries))
    np.testing.assert_array_equal(classifier.outlier_score(seen), classifier.outlier_score(queries))
    one, other = copy.copy(classifier), copy.copy(classifier)
    one.partial_fit(classifier.features(more), ["red", "red", "new"])
    other.partial_fit(more, ["red", "red", "new"])
    np.testing.assert_allclose(one.predict_proba(queries), other.predict_proba(queries), rtol=1e-5)
    assert classifier.classes_.tolist() == ["blue", "green", "red"]  # a copy is a classifier of its own
    assert [len(row.adapted) for row in seen.rows()] == [1] * 5


def test_features_of_another_classifier_are_refused() -> None:
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", unknown_label="?", false_rejection_rate=0.2)
    classifier.fit(pictures(8, 1), LABELS)
    own = classifier.features(pictures(2, 2))
    for foreign in (Features(own.adapted), Features(own.adapted[:, :5], own.unadapted)):
        with pytest.raises(ValueError, match="another classifier"):
            classifier.predict(foreign)
        with pytest.raises(ValueError, match="another classifier"):
            classifier.partial_fit(foreign, ["red", "blue"])


# ---------------------------------------------------------------------- range of values


@pytest.mark.parametrize("value_range", [(0, 4095), (0, 1000), (-1, 1)])
def test_pictures_are_drawn_and_shared_by_the_range_of_the_classifier(
    value_range: tuple[int, int], tmp_path: Path
) -> None:
    plotting = pytest.importorskip("fewshot_mahalanobis.plotting")
    low, high = value_range
    images = np.random.default_rng(0).uniform(low, high, (8, 20, 20))
    if high > 1:
        images = images.astype(np.uint16)
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu", value_range=value_range).fit(images, LABELS)
    wanted = next(ImageBatches(images, 84, value_range=value_range).decoded()).pixels
    support_axes, query_axes = plotting.plot_task(
        classifier, images, LABELS, images[:2], LABELS[:2], figure=plotting.Figure()
    )
    np.testing.assert_array_equal(support_axes[0, 0].images[0].get_array(), wanted[0])  # blue
    np.testing.assert_array_equal(query_axes[1, 0].images[0].get_array(), wanted[1])  # green
    axes = plotting.plot_support_influence(classifier, images, images[3], figure=plotting.Figure())
    np.testing.assert_array_equal(axes[0, 0].images[0].get_array(), wanted[3])
    strips = card._write_strips(tmp_path, classifier._state(), images, LABELS)
    shown = np.asarray(Image.open(tmp_path / strips[0]))[:, :84].astype(float)
    assert abs(shown.mean() - wanted[0].mean()) < 3


# ---------------------------------------------------------------------- settings after fit


@pytest.mark.parametrize(
    ("fitted", "late"),
    [
        ({}, {"unknown_label": "none"}),
        ({"unknown_label": "?", "false_rejection_rate": 0.2}, {"unknown_label": None}),
        ({"unknown_label": "?", "false_rejection_rate": 0.2}, {"unknown_label": "other"}),
        ({}, {"temperature": 3.0}),
    ],
)
@pytest.mark.parametrize("writes", ["save", "export_onnx", "export_program", "export_page"])
def test_settings_that_came_after_fit_are_named_when_a_file_is_written(
    fitted: dict[str, Any], late: dict[str, Any], writes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = (
        "checkpoints.classifier_file.write_classifier",
        "export.graph.write_onnx",
        "export.graph.write_program",
        "export.web_page.write_web_page",
    )
    for door in doors:
        monkeypatch.setattr(f"fewshot_mahalanobis.{door}", lambda *given, **named: None)
    classifier = tiny_classifier(**fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(classifier, writes)(tmp_path / "before")
    classifier.set_params(**late)
    (name,) = late
    with pytest.warns(UserWarning, match=rf"{name}={late[name]!r} was set after fit and is not in force"):
        getattr(classifier, writes)(tmp_path / "after")
    classifier.partial_fit(pictures(2, 9), ["red", "blue"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(classifier, writes)(tmp_path / "applied")


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("kind", [str, Path, "both"])
def test_the_summary_calls_files_by_their_paths(tmp_path: Path, kind: Any) -> None:
    paths: list[Any] = [tmp_path / f"{i}.png" for i in range(9)]
    for path, image in zip(paths, [*pictures(8, 1), pictures(8, 1)[0]], strict=True):  # the last is a copy of the first
        Image.fromarray(image).save(path)
    given = [str(path) if kind is str or (kind == "both" and i % 2) else path for i, path in enumerate(paths)]
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(given, [*LABELS, "blue"])
    assert f"{paths[0]} (blue): almost the same as {paths[8]}" in str(classifier.summary())
    classifier.partial_fit([*pictures(1, 1), *paths[1:2]], ["blue", "green"])
    said = str(classifier.summary())
    assert str(paths[1]) in said
    kept = str(pickle.loads(pickle.dumps(classifier)).summary())
    assert "image 0 (blue)" in kept
    assert str(tmp_path) not in kept


# ---------------------------------------------------------------------- networks that are no checkpoint


class Named(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.body(images))


SETTINGS: dict[str, Any] = {"image_size": 32, "mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.mark.parametrize(
    ("head", "warned"),
    [
        (nn.Linear(8, 1000), True),
        (nn.Sequential(nn.Dropout(), nn.Linear(8, 10)), True),
        (nn.Identity(), False),
        (nn.Sequential(nn.Linear(8, 6), nn.ReLU()), False),
    ],
)
def test_a_network_with_its_classification_layer_is_remarked(head: nn.Module, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SimpleCNAPS.from_backbone(Named(head), **SETTINGS)
    messages = [str(warning.message) for warning in caught]
    assert any("classification layer" in message and "'classifier" in message for message in messages) is warned


@pytest.mark.parametrize("network", [Named(nn.Identity()), nn.Flatten(), nn.Linear(2, 2)])
def test_a_network_in_place_of_a_checkpoint_is_told_how_to_become_one(network: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"checkpoint is a {type(network).__name__}, .*SimpleCNAPS.from_backbone"):
        SimpleCNAPSClassifier(network).fit(pictures(8, 1), LABELS)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "efficientnet_b0", "vit_small_patch14_dinov2.lvd142m"])
def test_a_name_of_timm_in_place_of_a_checkpoint_is_told_where_it_goes(name: str) -> None:
    with pytest.raises(ValueError, match=r"SimpleCNAPS.from_backbone\(name\)"):
        load_checkpoint(name)
