"""A fitted classifier of features as a file: it answers alike, and what is no such file is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.exceptions import NotFittedError
from sklearn.preprocessing import StandardScaler

from fewshot_mahalanobis import LinearHead, MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import EuclideanHead
from tests.heads.test_own_head import MedianHead
from tests.tiny import LABELS, SUPPORT_LABELS, adapting_model, drawn


def vectors(seed: int, n: int = 8) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(n, 6)) * 1e3 + 1e5


X, QUERIES = vectors(1), vectors(2, 20)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.5, "scale": 0.5, "task_covariance": False},
        {"beta": "auto", "head": "mahalanobis", "temperature": "auto"},
        {"head": "cosine", "priors": [0.2, 0.5, 0.3]},
        {"head": EuclideanHead(), "temperature": 3.0},
        {"unknown_label": "none", "false_rejection_rate": 0.2},
        {"beta": np.float32(0.5), "scale": np.int64(2)},
    ],
    ids=str,
)
def test_a_saved_classifier_answers_alike(settings: dict[str, Any], tmp_path: Path) -> None:
    classifier = MahalanobisClassifier(**settings).fit(X, LABELS)
    classifier.save(tmp_path / "a.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    loaded = MahalanobisClassifier.load(tmp_path / "a.safetensors")
    for method in ("predict", "predict_proba", "decision_function", "outlier_score"):
        assert np.array_equal(getattr(loaded, method)(QUERIES), getattr(classifier, method)(QUERIES))
    for name in ("beta_", "temperature_", "threshold_", "n_features_in_"):
        assert getattr(loaded, name) == getattr(classifier, name)
    for name, value in classifier.get_params().items():
        if name != "head" or isinstance(value, str):
            assert getattr(loaded, name) == value
    assert str(loaded.summary()) == str(classifier.summary())
    assert np.array_equal(
        loaded.partial_fit(QUERIES[:2], LABELS[:2]).means_, classifier.partial_fit(QUERIES[:2], LABELS[:2]).means_
    )


@pytest.mark.parametrize("labels", [[1, 0, 2, 0, 1, 2, 0, 1], [True, False] * 4, LABELS])
def test_labels_keep_their_type_and_groups_stay(labels: list[Any], tmp_path: Path) -> None:
    groups = ["a", "a", "c", "d", "b", "e", "b", "f"]
    classifier = MahalanobisClassifier().fit(X, labels, groups=groups)
    classifier.save(tmp_path / "a")
    loaded = MahalanobisClassifier.load(tmp_path / "a")
    assert loaded.classes_.dtype == classifier.classes_.dtype
    assert loaded.predict(QUERIES).tolist() == classifier.predict(QUERIES).tolist()
    assert loaded.fitted_head_.group_names == groups
    assert loaded.fitted_head_.groups.tolist() == classifier.fitted_head_.groups.tolist()


def test_names_of_columns_are_kept_and_checked(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    names = [f"feature {i}" for i in range(6)]
    MahalanobisClassifier().fit(pandas.DataFrame(X, columns=names), LABELS).save(tmp_path / "a")
    loaded = MahalanobisClassifier.load(tmp_path / "a")
    assert loaded.feature_names_in_.tolist() == names
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(pandas.DataFrame(QUERIES, columns=names[::-1]))
    MahalanobisClassifier().fit(X, LABELS).save(tmp_path / "b")
    assert not hasattr(MahalanobisClassifier.load(tmp_path / "b"), "feature_names_in_")
    with pytest.raises(ValueError, match="7 features"):
        MahalanobisClassifier.load(tmp_path / "b").predict(np.zeros((1, 7)))


@pytest.mark.parametrize("of", [MahalanobisClassifier, SimpleCNAPSClassifier])
def test_the_classes_that_partial_fit_was_told_are_kept(of: Any, tmp_path: Path) -> None:
    of_features = of is MahalanobisClassifier
    settings = {} if of_features else {"checkpoint": adapting_model(), "device": "cpu"}
    examples = X if of_features else drawn(SUPPORT_LABELS, seed=3)
    classifier = of(**settings).partial_fit(examples[:6], ["a", "c"] * 3, classes=["a", "bcde", "c"])
    classifier.save(tmp_path / "a")
    of.load(tmp_path / "a").save(tmp_path / "b")
    loaded = of.load(tmp_path / "b")
    with pytest.raises(ValueError, match=r"label 'd' is not among the classes \['a', 'bcde', 'c'\]"):
        loaded.partial_fit(examples[6:7], ["d"])
    with pytest.raises(ValueError, match="an earlier partial_fit named"):
        loaded.partial_fit(examples[6:7], ["c"], classes=["a", "c"])
    assert loaded.partial_fit(examples[6:7], ["bcde"]).classes_.tolist() == ["a", "bcde", "c"]


@pytest.mark.process
@pytest.mark.slow
def test_a_file_opens_in_another_process(tmp_path: Path) -> None:
    scaler = StandardScaler().fit(X)
    classifier = MahalanobisClassifier().fit(scaler.transform(X), LABELS)
    classifier.save(tmp_path / "a")
    np.save(tmp_path / "queries.npy", scaler.transform(QUERIES))
    code = (
        "import sys, numpy; from fewshot_mahalanobis import MahalanobisClassifier; folder = sys.argv[1]; "
        "classifier = MahalanobisClassifier.load(f'{folder}/a'); "
        "print(*classifier.predict(numpy.load(f'{folder}/queries.npy')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == classifier.predict(scaler.transform(QUERIES)).tolist()


def test_settings_that_came_after_fit_are_named_when_a_file_is_written(tmp_path: Path) -> None:
    classifier = MahalanobisClassifier(temperature=2.0).fit(X, LABELS).set_params(temperature=3.0, priors=[1, 0, 0])
    with pytest.warns(UserWarning, match=r"temperature=3.0, priors=\[1, 0, 0\] was set after fit.*more examples"):
        classifier.save(tmp_path / "a")
    assert MahalanobisClassifier.load(tmp_path / "a").temperature_ == 2.0


def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        MahalanobisClassifier().save(tmp_path / "a")
    classifier = MahalanobisClassifier(head=LinearHead(6)).fit(X, LABELS)
    with pytest.raises(ValueError, match=r"LinearHead object .* pickle"):
        classifier.save(tmp_path / "a")
    classifier = MahalanobisClassifier().fit(X, LABELS).set_params(beta="much")
    with pytest.raises(ValueError, match="much"):
        classifier.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_files_of_images_and_of_features_are_told_apart(tmp_path: Path) -> None:
    MahalanobisClassifier().fit(X, LABELS).save(tmp_path / "features")
    images = SimpleCNAPSClassifier(adapting_model(), device="cpu").fit(drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS)
    images.save(tmp_path / "images")
    with pytest.raises(ValueError, match=r"SimpleCNAPSClassifier\.save wrote: MahalanobisClassifier\.load reads it"):
        SimpleCNAPSClassifier.load(tmp_path / "features")
    with pytest.raises(ValueError, match=r"MahalanobisClassifier\.save wrote: SimpleCNAPSClassifier\.load reads it"):
        MahalanobisClassifier.load(tmp_path / "images")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        MahalanobisClassifier.load(tmp_path / "nowhere")


def test_damaged_and_forged_files_are_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    MahalanobisClassifier(priors=[0.2, 0.5, 0.3]).fit(X, LABELS).save(good)
    data = good.read_bytes()
    with safe_open(good, "pt") as file:
        metadata = file.metadata()
    tensors, header = load_file(good), json.loads(metadata["classifier"])

    def assert_refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MahalanobisClassifier.load(bad)

    def forge(changed: dict[str, Any], of: dict[str, torch.Tensor] = tensors) -> None:
        save_file(of, bad, {**metadata, "classifier": json.dumps({**header, **changed})})

    for content in (b"", b"text", data[:200], data[:-1]):
        bad.write_bytes(content)
        assert_refused("not a safetensors file, or is damaged or cut short")
    flipped = bytearray(data)
    flipped[-8] ^= 1
    bad.write_bytes(flipped)
    assert_refused("do not match their digest")
    forge({"version": 99})
    assert_refused("newer version, .* upgrade")
    forge({"surplus": 1})
    assert_refused("surplus")
    forge({"columns": ["one"]})
    assert_refused("1 names of 6 features")
    for priors, message in (([0.5, 0.5], "shape"), ([-1, 1, 1], "share of 'blue' is -1"), ([0, 0, 0], "share 0")):
        forge({"fitted": {**header["fitted"], "priors": priors}})
        assert_refused(message)
    for allowed in (["blue", "green"], ["red", "green", "blue"], ["blue", "green", "red", "red"], [1, 2, 3], []):
        forge({"labels": {**header["labels"], "allowed": allowed}})
        assert_refused("does not fit together")
    forge({}, {**tensors, "support_features": tensors["support_features"][:, :3].contiguous()})
    assert_refused("do not match their digest")
    for surplus in ("model.weight", "unadapted_features"):
        forge({}, {**tensors, surplus: tensors["support_features"].clone()})
        assert_refused("unexpected")
    forge({}, {name: tensor for name, tensor in tensors.items() if name != "support_features"})
    assert_refused("missing|shape")
    forge({}, {**tensors, "support_labels": torch.tensor(0)})
    assert_refused("shape")


# ------------------------------------------------------------------------------------------ as a graph


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"head": "mahalanobis", "beta": 1e5, "temperature": 50.0},
        {"head": "cosine", "priors": [0.2, 0.0, 0.8]},
        {"head": "euclidean", "temperature": "auto"},
        {"head": "manhattan", "temperature": 2.0},
        {"head": MedianHead()},
        {"unknown_label": "none", "false_rejection_rate": 0.2, "priors": [0.2, 0.0, 0.8]},
        {"unknown_label": "red", "false_rejection_rate": 0.2},  # which leaves two classes and examples of none
        {"unknown_label": "defect", "false_rejection_rate": 0.2},  # beside one class
    ],
    ids=str,
)
def test_the_graph_gives_probabilities_labels_and_outlier_scores(settings: dict[str, Any], tmp_path: Path) -> None:
    """For every kind of head and of decision; tests/export/test_pixels.py has a network and pixels before one."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    scaler = StandardScaler().fit(X)
    one_class = settings.get("unknown_label") == "defect"
    classifier = MahalanobisClassifier(**settings)
    classifier.fit(scaler.transform(X), ["good"] * len(X) if one_class else LABELS)
    classifier.export_onnx(tmp_path / "a.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]
    session = runtime.InferenceSession(tmp_path / "a.onnx")
    properties = session.get_modelmeta().custom_metadata_map
    assert json.loads(properties["classes"]) == classifier.classes_.tolist()
    labels = json.loads(properties["labels"])
    assert labels == [*classifier.classes_, *([settings["unknown_label"]] if "unknown_label" in settings else [])]
    for count in (1, 20):
        queries = scaler.transform(QUERIES[:count])
        if "unknown_label" in settings:
            queries = np.concatenate([queries, queries + 50])
        answers = session.run(None, {"features": queries.astype(np.float32)})
        np.testing.assert_allclose(answers[0], classifier.predict_proba(queries), atol=1e-3)
        assert [labels[index] for index in answers[1]] == classifier.predict(queries).tolist()
        np.testing.assert_allclose(answers[2], classifier.outlier_score(queries), rtol=1e-3, atol=1e-3)
    threshold = json.loads(properties["threshold"])
    assert threshold == classifier.threshold_
    if threshold is None:
        return
    classifier.set_params(false_rejection_rate=0.5).export_onnx(tmp_path / "a.onnx")  # without another fit
    session = runtime.InferenceSession(tmp_path / "a.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["threshold"]) == classifier.threshold_ < threshold
    answers = session.run(None, {"features": queries.astype(np.float32)})
    assert [labels[index] for index in answers[1]] == classifier.predict(queries).tolist()


def test_an_unfitted_classifier_has_no_graph(tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        MahalanobisClassifier().export_onnx(tmp_path / "a.onnx")
