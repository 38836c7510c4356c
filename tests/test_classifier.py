"""The image classifier: the scikit-learn contract, the support set's semantics, saving, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, get_scorer
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.utils import get_tags

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import EuclideanHead, MahalanobisHead
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.networks.devices import device_of
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from tests.tiny import COLOURS, QUERY_LABELS, SUPPORT_LABELS, adapting_model, drawn

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

SIZE = 32
Pictures = NDArray[np.uint8]


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    return adapting_model()


@pytest.fixture(scope="module")
def support() -> Pictures:
    return drawn(SUPPORT_LABELS, seed=1)


@pytest.fixture(scope="module")
def queries() -> Pictures:
    return drawn(QUERY_LABELS, seed=2)


@pytest.fixture(scope="module")
def fitted(model: SimpleCNAPS, support: Pictures) -> SimpleCNAPSClassifier:
    return SimpleCNAPSClassifier(model, precision="float32", head="mahalanobis").fit(support, SUPPORT_LABELS)


def paths_of(images: Pictures, folder: Path) -> list[str]:
    paths = [str(folder / f"{index}.png") for index in range(len(images))]
    for path, image in zip(paths, images):
        Image.fromarray(image).save(path)
    return paths


def assert_close(a: NDArray[Any], b: NDArray[Any]) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


# -------------------------------------------------------------------- fit and predict


def test_it_recognises_what_the_support_shows(fitted: SimpleCNAPSClassifier, queries: Pictures) -> None:
    assert fitted.predict(queries).tolist() == QUERY_LABELS
    assert fitted.score(queries, QUERY_LABELS) == 1.0


def test_fitted_attributes_describe_the_support_set(fitted: SimpleCNAPSClassifier) -> None:
    assert fitted.classes_.tolist() == ["blue", "green", "red"]
    assert fitted.class_counts_.tolist() == [2, 3, 3]
    assert fitted.n_features_out_ == 64
    assert fitted.device_ == device_of(fitted.model_)
    assert fitted.fitted_head_.support.adapted.shape == (8, 64)


def test_logits_are_those_of_the_model(
    fitted: SimpleCNAPSClassifier, model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    images, others = (torch.cat(list(ImageBatches(x, SIZE))) for x in (support, queries))
    codes = torch.tensor([sorted(COLOURS).index(label) for label in SUPPORT_LABELS])
    with torch.no_grad():
        expected = model(images, codes, others)
    assert_close(fitted.decision_function(queries), expected.numpy())


def test_probabilities_are_the_softmax_of_the_logits(fitted: SimpleCNAPSClassifier, queries: Pictures) -> None:
    logits = fitted.decision_function(queries).astype(float)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = exponentials / exponentials.sum(axis=1, keepdims=True)
    probabilities = fitted.predict_proba(queries)
    assert logits.shape == probabilities.shape == (7, 3)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(np.exp(fitted.predict_log_proba(queries)), expected, rtol=1e-6, atol=1e-12)
    assert (fitted.classes_[probabilities.argmax(axis=1)] == fitted.predict(queries)).all()


def test_two_classes_give_the_log_odds_of_the_second(model: SimpleCNAPS) -> None:
    labels = ["red", "blue", "red", "blue"]
    classifier = SimpleCNAPSClassifier(model).fit(drawn(labels, 1), labels)
    query_labels = ["blue", "red", "red", "blue", "blue"]
    pictures = drawn(query_labels, 2)
    decision = classifier.decision_function(pictures)
    assert decision.shape == (5,)
    log_probabilities = classifier.predict_log_proba(pictures)
    assert log_probabilities.shape == (5, 2)
    np.testing.assert_allclose(decision, log_probabilities[:, 1] - log_probabilities[:, 0], rtol=1e-5)
    assert (classifier.classes_[(decision > 0).astype(int)] == classifier.predict(pictures)).all()
    assert get_scorer("roc_auc")(classifier, pictures, query_labels) == 1.0


def test_transform_gives_the_adapted_features(
    fitted: SimpleCNAPSClassifier, support: Pictures, queries: Pictures
) -> None:
    features = fitted.transform(queries)
    assert features.shape == (7, 64)
    assert features.dtype == np.float32
    assert_close(fitted.transform(support), fitted.fitted_head_.support.adapted.numpy())
    logits = fitted.fitted_head_.logits(torch.from_numpy(features)).numpy()
    assert_close(logits, fitted.decision_function(queries))


@pytest.mark.parametrize(
    "rename",
    [
        pytest.param(lambda y: [{"red": 10, "green": -3, "blue": 7}[v] for v in y], id="integers"),
        pytest.param(lambda y: np.array([len(v) for v in y], dtype=np.uint8), id="uint8"),
        pytest.param(lambda y: [{"red": 1.0, "green": 2.0, "blue": 0.0}[v] for v in y], id="whole floats"),
        pytest.param(lambda y: [v == "red" for v in y], id="Booleans"),
        pytest.param(lambda y: np.array(y), id="string array"),
        pytest.param(lambda y: np.array(y, dtype=object), id="object array"),
        pytest.param(lambda y: tuple(y), id="tuple"),
        pytest.param(lambda y: pd.Series(y, index=range(5, 5 + len(y))), id="series"),
        pytest.param(lambda y: pd.Series(y, dtype="category"), id="categories"),
        pytest.param(lambda y: pd.Series([len(v) for v in y], dtype="Int64"), id="nullable integers"),
        pytest.param(lambda y: torch.tensor([len(v) for v in y]), id="tensor"),
    ],
)
def test_labels_of_any_kind_come_back_as_given(
    rename: Any, model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    y = rename(SUPPORT_LABELS)
    classifier = SimpleCNAPSClassifier(model).fit(support, y)
    expected = np.asarray(rename(QUERY_LABELS))
    predicted = classifier.predict(queries)
    assert predicted.tolist() == expected.tolist()
    assert classifier.classes_.tolist() == sorted(set(np.asarray(y).tolist()))
    if isinstance(y, np.ndarray):
        assert predicted.dtype.kind == y.dtype.kind


def test_every_kind_of_collection_gives_the_same_answer(
    fitted: SimpleCNAPSClassifier, model: SimpleCNAPS, support: Pictures, queries: Pictures, tmp_path: Path
) -> None:
    expected = fitted.decision_function(queries)
    tensor = torch.from_numpy(queries).permute(0, 3, 1, 2)
    paths = paths_of(queries, tmp_path)
    for kind in (paths, [Image.open(path) for path in paths], queries / 255, tensor, tensor / 255, list(queries)):
        assert (fitted.decision_function(kind) == expected).all()
    mixed = [Image.fromarray(support[0]), *list(support[1:])]
    classifier = SimpleCNAPSClassifier(model, head="mahalanobis", precision="float32").fit(mixed, SUPPORT_LABELS)
    assert (classifier.decision_function(queries) == expected).all()


def test_answers_do_not_depend_on_batches_company_or_support_order(
    fitted: SimpleCNAPSClassifier, model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    expected = fitted.decision_function(queries)
    order = np.random.default_rng(3).permutation(len(support))
    for batch_size in (1, 3, 1000):
        classifier = SimpleCNAPSClassifier(
            model, head="mahalanobis", precision="float32", batch_size=batch_size, n_jobs=2
        )
        classifier.fit(support[order], np.array(SUPPORT_LABELS)[order])
        assert_close(classifier.decision_function(queries), expected)
    alone = np.concatenate([fitted.decision_function(queries[i : i + 1]) for i in range(len(queries))])
    assert_close(alone, expected)


def test_renaming_the_classes_permutes_the_columns(
    fitted: SimpleCNAPSClassifier, model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    names = {"blue": "z", "green": "y", "red": "x"}
    classifier = SimpleCNAPSClassifier(model, head="mahalanobis", precision="float32").fit(
        support, [names[label] for label in SUPPORT_LABELS]
    )
    assert_close(classifier.decision_function(queries)[:, ::-1], fitted.decision_function(queries))


def test_adaptation_can_be_left_out(model: SimpleCNAPS, support: Pictures, queries: Pictures) -> None:
    plain = SimpleCNAPSClassifier(model, precision="float32", adapt=False).fit(support, SUPPORT_LABELS)
    assert plain.task_.network.film is None
    with torch.no_grad():
        features = model.feature_extractor(torch.cat(list(ImageBatches(queries, SIZE))))
    assert_close(plain.transform(queries), features.numpy())
    adapted = SimpleCNAPSClassifier(model, precision="float32").fit(support, SUPPORT_LABELS)
    assert np.abs(adapted.transform(queries) - plain.transform(queries)).max() > 1e-3


# -------------------------------------------------------------------- heads


@pytest.mark.parametrize("head", ["auto", "mahalanobis", "euclidean", "manhattan", "cosine", "dot_product"])
def test_every_metric_head_can_be_named(head: str, model: SimpleCNAPS, support: Pictures, queries: Pictures) -> None:
    classifier = SimpleCNAPSClassifier(model, head=head).fit(support, SUPPORT_LABELS)
    assert classifier.decision_function(queries).shape == (7, 3)
    if head in ("auto", "mahalanobis", "euclidean", "cosine"):
        assert classifier.score(queries, QUERY_LABELS) == 1.0


def test_the_named_head_of_the_checkpoint_keeps_its_settings(fitted: SimpleCNAPSClassifier) -> None:
    head = fitted.fitted_head_.head
    assert isinstance(head, MahalanobisHead)
    assert (head.scale, head.covariance.settings.beta) == (0.5, 0.5)


def test_a_head_object_is_used_and_left_alone(
    fitted: SimpleCNAPSClassifier, model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    head = MahalanobisHead(RegularizedCovariance(beta=0.5), scale=2.0)
    classifier = SimpleCNAPSClassifier(model, precision="float32", head=head).fit(support, SUPPORT_LABELS)
    assert_close(classifier.decision_function(queries), 4 * fitted.decision_function(queries))
    assert classifier.head is head
    assert classifier.fitted_head_.head is not head


def test_the_linear_head_needs_a_checkpoint_that_was_trained_with_it(
    model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    with pytest.raises(ValueError, match="no trained linear head"):
        SimpleCNAPSClassifier(model, head="linear").fit(support, SUPPORT_LABELS)
    cnaps = SimpleCNAPS(head="linear", adaptation="none", image_size=SIZE)
    classifier = SimpleCNAPSClassifier(cnaps, head="linear").fit(support, SUPPORT_LABELS)
    assert classifier.fitted_head_.head is classifier.model_.head
    assert classifier.decision_function(queries).shape == (7, 3)


# -------------------------------------------------------------------- partial_fit


def test_partial_fit_equals_one_fit_under_the_first_adaptation(
    model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    rounds = [["red", "green", "red", "green"], ["green", "blue", "blue"], ["red"]]
    pictures = [drawn(labels, seed) for seed, labels in enumerate(rounds)]
    classifier = SimpleCNAPSClassifier(model, precision="float32")
    for x, y in zip(pictures, rounds):
        assert classifier.partial_fit(x, y) is classifier
    first = SimpleCNAPSClassifier(model, precision="float32").fit(pictures[0], rounds[0])
    features = torch.from_numpy(first.transform(np.concatenate(pictures)))
    labels = torch.tensor([sorted(COLOURS).index(label) for labels in rounds for label in labels])
    queries_features = first.task_.features(torch.cat(list(ImageBatches(queries, SIZE))))
    expected = first.fitted_head_.head(features, labels, queries_features)
    assert_close(classifier.decision_function(queries), expected.numpy())
    assert classifier.classes_.tolist() == ["blue", "green", "red"]
    assert classifier.class_counts_.tolist() == [2, 3, 3]
    assert classifier.score(queries, QUERY_LABELS) == 1.0


def test_partial_fit_without_adaptation_equals_fit(model: SimpleCNAPS, support: Pictures, queries: Pictures) -> None:
    labels = np.array(SUPPORT_LABELS)
    whole = SimpleCNAPSClassifier(model, precision="float32", adapt=False).fit(support, labels)
    parts = SimpleCNAPSClassifier(model, precision="float32", adapt=False)
    for chosen in (slice(0, 2), slice(2, 6), slice(6, 8)):
        parts.partial_fit(support[chosen], labels[chosen])
    assert_close(parts.decision_function(queries), whole.decision_function(queries))


def test_partial_fit_takes_a_single_image_of_a_longer_label(
    model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    classifier = SimpleCNAPSClassifier(model).fit(support, SUPPORT_LABELS)
    white = np.full((1, 24, 24, 3), 250, np.uint8)
    classifier.partial_fit(white, ["a much longer name"])
    assert classifier.classes_.tolist() == ["a much longer name", "blue", "green", "red"]
    assert classifier.predict(white).tolist() == ["a much longer name"]
    assert classifier.predict(queries).tolist() == QUERY_LABELS


def test_partial_fit_refuses_labels_of_another_type_and_keeps_its_state(
    model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    classifier = SimpleCNAPSClassifier(model).fit(support, SUPPORT_LABELS)
    before = classifier.decision_function(queries)
    with pytest.raises(ValueError, match=r"label 3 is a whole number, but .* type string"):
        classifier.partial_fit(support[:1], [3])
    with pytest.raises(ImageError, match="image 1"):
        classifier.partial_fit([support[0], support[1] * np.nan], ["red", "new"])
    assert classifier.classes_.tolist() == ["blue", "green", "red"]
    assert (classifier.decision_function(queries) == before).all()
    integers = SimpleCNAPSClassifier(model).fit(support, np.arange(8) % 2)
    with pytest.raises(ValueError, match=r"label 1.5|y\[0\] is 1.5"):
        integers.partial_fit(support[:1], [1.5])
    with pytest.raises(ValueError, match="label True is a Boolean"):
        integers.partial_fit(support[:1], [True])


# -------------------------------------------------------------------- scikit-learn


def test_constructor_arguments_are_kept_and_cloned(model: SimpleCNAPS, support: Pictures) -> None:
    arguments = {
        "checkpoint": "somewhere", "head": "cosine", "adapt": False, "device": "cpu", "precision": "float32",
        "batch_size": 3, "temperature": 2.0, "unknown_label": "none", "false_rejection_rate": 0.2,
        "priors": [0.2, 0.3, 0.5], "value_range": (0, 255), "pages": "max", "bands": (2, 1, 0),
        "image_size": 40, "n_jobs": 2, "verbose": 0, "memory": None,
    }  # fmt: skip
    classifier = SimpleCNAPSClassifier(**arguments)  # type: ignore[arg-type]
    assert classifier.get_params() == arguments
    assert clone(classifier).get_params() == arguments
    classifier.set_params(checkpoint=model, head="euclidean")
    before = classifier.get_params()
    classifier.fit(support, SUPPORT_LABELS)
    assert all(classifier.get_params()[name] is value for name, value in before.items())
    assert not hasattr(clone(classifier), "task_")


def test_tags_tell_that_images_are_not_feature_tables() -> None:
    tags = get_tags(SimpleCNAPSClassifier())
    assert tags.estimator_type == "classifier"
    assert not tags.input_tags.two_d_array
    assert tags.input_tags.string
    assert not tags.input_tags.allow_nan


@pytest.mark.parametrize("kind", ["array", "tensor", "paths", "images"])
def test_cross_validation_slices_every_kind_of_collection(kind: str, model: SimpleCNAPS, tmp_path: Path) -> None:
    labels = ["red", "green", "blue"] * 4
    pictures = drawn(labels, seed=5)
    collection: Any = pictures
    if kind == "tensor":
        collection = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    elif kind == "paths":
        collection = paths_of(pictures, tmp_path)
    elif kind == "images":
        collection = [Image.fromarray(picture) for picture in pictures]
    classifier = SimpleCNAPSClassifier(model)
    assert cross_val_score(classifier, collection, labels, cv=2).tolist() == [1.0, 1.0]
    if kind == "paths":
        probabilities = cross_val_predict(classifier, collection, labels, cv=2, method="predict_proba")
        assert accuracy_score(labels, np.array(sorted(COLOURS))[probabilities.argmax(axis=1)]) == 1.0


def test_grid_search_chooses_a_head(model: SimpleCNAPS, tmp_path: Path) -> None:
    labels = ["red", "green"] * 4
    paths = paths_of(drawn(labels, seed=6), tmp_path)
    heads = {"head": ["mahalanobis", "euclidean", EuclideanHead()]}
    search = GridSearchCV(SimpleCNAPSClassifier(model), heads, cv=2).fit(paths, labels)
    assert search.cv_results_["mean_test_score"].shape == (3,)
    assert search.best_score_ == 1.0
    assert search.predict(paths).tolist() == labels


@pytest.mark.parametrize("method", ["predict", "predict_proba", "predict_log_proba", "decision_function", "transform"])
def test_queries_before_fit_are_refused(method: str, queries: Pictures) -> None:
    with pytest.raises(NotFittedError):
        getattr(SimpleCNAPSClassifier(), method)(queries)


def test_saving_before_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        SimpleCNAPSClassifier().save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_no_module_is_changed(model: SimpleCNAPS, support: Pictures, queries: Pictures) -> None:
    before = copy.deepcopy(model.state_dict())
    for mode in (True, False):
        model.train(mode)
        modes = [module.training for module in model.modules()]
        classifier = SimpleCNAPSClassifier(model).fit(support, SUPPORT_LABELS)
        fitted_weights = copy.deepcopy(classifier.model_.state_dict())
        classifier.predict(queries)
        classifier.partial_fit(support[:2], SUPPORT_LABELS[:2])
        for state, reference in ((model.state_dict(), before), (classifier.model_.state_dict(), fitted_weights)):
            assert all(torch.equal(state[name], value) for name, value in reference.items())
        assert [module.training for module in model.modules()] == modes


def test_training_the_given_module_on_does_not_touch_the_classifier(
    model: SimpleCNAPS, support: Pictures, queries: Pictures
) -> None:
    own = copy.deepcopy(model)
    classifier = SimpleCNAPSClassifier(own).fit(support, SUPPORT_LABELS)
    before = classifier.decision_function(queries)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(1.5)
    assert (classifier.decision_function(queries) == before).all()


def test_progress_is_shown_on_request(
    model: SimpleCNAPS, support: Pictures, capsys: pytest.CaptureFixture[str]
) -> None:
    SimpleCNAPSClassifier(model, verbose=0).fit(support, SUPPORT_LABELS)
    assert capsys.readouterr() == ("", "")
    SimpleCNAPSClassifier(model, verbose=1).fit(support, SUPPORT_LABELS).predict(support)
    output = capsys.readouterr().err
    assert "fit" in output
    assert "8/8" in output


def test_without_standard_error_there_is_no_progress_and_no_error(
    model: SimpleCNAPS, support: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = SimpleCNAPSClassifier(model, verbose=1).fit(support, SUPPORT_LABELS)
    expected = shown.predict_proba(support)
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    hidden = SimpleCNAPSClassifier(model, verbose=1).fit(support, SUPPORT_LABELS)
    np.testing.assert_array_equal(hidden.predict_proba(support), expected)


def test_bfloat16_agrees_on_the_labels(model: SimpleCNAPS, support: Pictures, queries: Pictures) -> None:
    classifier = SimpleCNAPSClassifier(model, precision="bfloat16").fit(support, SUPPORT_LABELS)
    assert classifier.task_.network.dtype == torch.bfloat16
    assert classifier.transform(queries).dtype == np.float32
    assert classifier.predict(queries).tolist() == QUERY_LABELS


def test_queries_are_streamed(fitted: SimpleCNAPSClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    features = fitted.task_.network.features

    def watched(images: torch.Tensor, batch_size: int) -> torch.Tensor:
        sizes.append(len(images))
        return features(images, batch_size)

    monkeypatch.setattr(fitted.task_.network, "features", watched)
    many = np.broadcast_to(drawn(["red"], 7), (150, 24, 24, 3))
    assert (fitted.predict(many) == "red").all()
    assert sizes == [64, 64, 22]


# -------------------------------------------------------------------- keeping


@pytest.mark.parametrize("keep", ["pickle", "joblib", "deepcopy"])
def test_a_fitted_classifier_survives_pickling(
    keep: str, fitted: SimpleCNAPSClassifier, queries: Pictures, support: Pictures
) -> None:
    if keep == "deepcopy":
        again = copy.deepcopy(fitted)
    else:
        library: Any = {"pickle": pickle, "joblib": joblib}[keep]
        buffer = io.BytesIO()
        library.dump(fitted, buffer)
        buffer.seek(0)
        again = library.load(buffer)
    assert (again.decision_function(queries) == fitted.decision_function(queries)).all()
    again.partial_fit(support[:1], ["other"])
    assert again.classes_.tolist() == ["blue", "green", "other", "red"]
    assert fitted.classes_.tolist() == ["blue", "green", "red"]


def test_a_pickle_from_an_absent_device_opens_on_the_cpu(fitted: SimpleCNAPSClassifier, queries: Pictures) -> None:
    elsewhere = copy.deepcopy(fitted)
    elsewhere._fitted = dataclasses.replace(elsewhere._fitted, device=torch.device("cuda:99"))
    data = pickle.dumps(elsewhere)
    with pytest.warns(UserWarning, match="no device cuda:99 here"):
        again = pickle.loads(data)
    assert again.device_ == torch.device("cpu")
    assert (again.decision_function(queries) == fitted.decision_function(queries)).all()


def test_an_unfitted_classifier_pickles() -> None:
    again = pickle.loads(pickle.dumps(SimpleCNAPSClassifier(head="cosine")))
    assert again.head == "cosine"
    assert not hasattr(again, "task_")


# -------------------------------------------------------------------- ONNX


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {}),
        ({"one_shot_covariance": "published", "projection": True}, {}),
        ({"head": "linear", "adaptation": "none"}, {"head": "linear"}),
    ],
)
@pytest.mark.slow
def test_the_onnx_file_gives_the_same_logits_and_names_the_classes(
    settings: dict[str, Any], arguments: dict[str, Any], model: SimpleCNAPS, queries: Pictures, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    labels = ["red", "green", "blue", "red", "green", "red"]  # blue has one shot
    checkpoint = SimpleCNAPS(image_size=SIZE, **settings) if settings else model
    classifier = SimpleCNAPSClassifier(checkpoint, precision="float32", **arguments).fit(drawn(labels, 1), labels)
    classifier.export_onnx(tmp_path / "a.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == classifier.classes_.tolist()
    for images in (queries, queries[:1]):
        (logits,) = session.run(["logits"], {"images": next(iter(ImageBatches(images, SIZE))).numpy()})
        assert_close(logits, classifier.decision_function(images))


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (SUPPORT_LABELS[:-1], "8 images but 7 labels"),
        ([*SUPPORT_LABELS, "red"], "8 images but 9 labels"),
        (None, "y is None"),
        ("red", "one dimension"),
        ([[label] for label in SUPPORT_LABELS], r"shape is \(8, 1\)\. For several labels .*MultiOutputClassifier"),
        (["red"] * 8, "at least two classes .* 'red'"),
        ([*SUPPORT_LABELS[:6], None, "red"], r"y\[6\] is None"),
        ([*SUPPORT_LABELS[:6], float("nan"), "red"], r"y\[6\] is nan"),
        ([0, 1, 2, np.nan, 0, 1, 2, 0], r"y\[3\] is nan"),
        (pd.Series([0, 1, 2, None, 0, 1, 2, 0], dtype="Int64"), r"y\[3\] is <NA>"),
        ([0, 1, "a", 2, 0, 1, 2, 0], r"y\[2\] is 'a', a string, but y\[0\] is 0"),
        (np.linspace(0, 1, 8), r"y\[1\] is 0.14.*whole number.*AdaptedFeatures\(\), Ridge"),
        ([b"a", b"b"] * 4, r"y\[0\] is b'a'"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(
    labels: Any, message: str, model: SimpleCNAPS, support: Pictures
) -> None:
    classifier = SimpleCNAPSClassifier(model)
    with pytest.raises(ValueError, match=message):
        classifier.fit(support, labels)
    with pytest.raises(NotFittedError):
        classifier.predict(support)


def test_a_failed_fit_leaves_the_fitted_state(
    model: SimpleCNAPS, support: Pictures, queries: Pictures, tmp_path: Path
) -> None:
    classifier = SimpleCNAPSClassifier(model).fit(support, SUPPORT_LABELS)
    before = {name: getattr(classifier, name) for name in ("model_", "task_", "fitted_head_", "classes_")}
    broken = tmp_path / "broken.png"
    paths = paths_of(support, tmp_path)
    broken.write_bytes(Path(paths[0]).read_bytes()[:-300])
    for images, labels in (([*paths, broken], [*SUPPORT_LABELS, "new"]), (support, ["red"] * 8)):
        with pytest.raises(ValueError, match=r"broken.png|two classes"):
            classifier.fit(images, labels)
    assert all(getattr(classifier, name) is value for name, value in before.items())
    with pytest.raises(ImageError, match=r"image 8 \('.*broken.png'\)"):
        classifier.predict([*paths, broken])
    with pytest.raises(ImageError, match="there are no images"):
        classifier.predict([])
    with pytest.raises(ImageError, match="wrap it in a list"):
        classifier.predict(queries[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "cosinus"}, "head must be one of .*cosine.* got 'cosinus'"),
        ({"precision": "float16"}, "precision must be .* got 'float16'"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"n_jobs": 0}, "n_jobs"),
        ({"n_jobs": "2"}, "n_jobs must be a whole number or None, got '2'"),
        ({"temperature": None}, "temperature must be positive and finite, .* got None"),
        ({"temperature": float("nan")}, "temperature must be positive and finite, .* got nan"),
        ({"false_rejection_rate": "5%"}, "false_rejection_rate must lie between 0 and 1, got '5%'"),
    ],
)
def test_constructor_arguments_that_mean_nothing_are_refused_by_fit(
    arguments: dict[str, Any], message: str, model: SimpleCNAPS, support: Pictures
) -> None:
    with pytest.raises(ValueError, match=message):
        SimpleCNAPSClassifier(model, **arguments).fit(support, SUPPORT_LABELS)


def test_an_unknown_checkpoint_is_refused_by_fit(support: Pictures) -> None:
    with pytest.raises(ValueError, match="no-such-checkpoint"):
        SimpleCNAPSClassifier("no-such-checkpoint").fit(support, SUPPORT_LABELS)


def test_the_size_of_images_is_a_choice_of_the_user(support: Pictures, queries: Pictures, tmp_path: Path) -> None:
    model = adapting_model()
    classifier = SimpleCNAPSClassifier(model, image_size=48).fit(support, SUPPORT_LABELS)
    expected = SimpleCNAPS(image_size=48, beta=0.5, scale=0.5).eval()
    expected.load_state_dict(model.state_dict())
    of_expected = SimpleCNAPSClassifier(expected).fit(support, SUPPORT_LABELS)
    probabilities = of_expected.predict_proba(queries)
    assert (classifier.predict_proba(queries) == probabilities).all()
    assert model.image_size == model.config["image_size"] == 32
    classifier.save(tmp_path / "classifier.safetensors")
    classifier.set_params(image_size=64)  # it says what the next fit does
    loaded = SimpleCNAPSClassifier.load(tmp_path / "classifier.safetensors")
    assert loaded.get_params()["image_size"] == 48
    for kept in (classifier, loaded, pickle.loads(pickle.dumps(classifier))):
        assert (kept.predict_proba(queries) == probabilities).all()
        kept.partial_fit(support[:1], SUPPORT_LABELS[:1])
    of_expected.partial_fit(support[:1], SUPPORT_LABELS[:1])
    assert (loaded.predict_proba(queries) == of_expected.predict_proba(queries)).all()


@pytest.mark.parametrize("size", [31, 1025, 40.5, "large"])
def test_a_size_that_no_image_can_have_is_refused(size: Any, support: Pictures) -> None:
    with pytest.raises(ValueError, match="image_size must be a whole number from 32 to 1024"):
        SimpleCNAPSClassifier(adapting_model(), image_size=size).fit(support, SUPPORT_LABELS)


def test_a_network_of_your_own_has_its_own_size(support: Pictures) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    model = SimpleCNAPS.from_backbone(network, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(ValueError, match=r"from_backbone\(image_size=...\)"):
        SimpleCNAPSClassifier(model, image_size=48).fit(support, SUPPORT_LABELS)
