"""A fitted classifier as a file: it answers alike, old files load, and what is no such file is refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import EuclideanHead, LinearHead, MahalanobisHead, describe_head
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from tests.tiny import QUERY_LABELS, SUPPORT_LABELS, adapting_model, drawn

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

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
    return SimpleCNAPSClassifier(model, precision="float32").fit(support, SUPPORT_LABELS)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"adapt": False, "batch_size": np.int64(5), "n_jobs": 2},
        {"head": "cosine", "precision": "bfloat16"},
        {"head": EuclideanHead()},
        {"head": MahalanobisHead(RegularizedCovariance(2.0, False, "published"), 0.25)},
    ],
    ids=["default", "unadapted", "cosine", "head object", "Mahalanobis settings"],
)
def test_a_saved_classifier_answers_alike(
    arguments: dict[str, Any], model: SimpleCNAPS, support: Pictures, queries: Pictures, tmp_path: Path
) -> None:
    classifier = SimpleCNAPSClassifier(model, **arguments).fit(support, SUPPORT_LABELS)
    path = tmp_path / "colours.safetensors"
    classifier.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = SimpleCNAPSClassifier.load(path, device="cpu")
    assert (loaded.decision_function(queries) == classifier.decision_function(queries)).all()
    assert loaded.predict(queries).tolist() == classifier.predict(queries).tolist()
    assert loaded.class_counts_.tolist() == [2, 3, 3]
    for name in ("adapt", "precision", "batch_size", "n_jobs", "verbose"):
        assert getattr(loaded, name) == getattr(classifier, name)
    assert loaded.device == "cpu"
    loaded.partial_fit(support[:1], ["new"])
    assert loaded.classes_.tolist() == ["blue", "green", "new", "red"]
    loaded.set_params(head="euclidean").fit(support, SUPPORT_LABELS)


def test_a_classifier_saved_after_partial_fit_keeps_the_first_adaptation(
    model: SimpleCNAPS, support: Pictures, queries: Pictures, tmp_path: Path
) -> None:
    classifier = SimpleCNAPSClassifier(model).fit(support[:4], SUPPORT_LABELS[:4])
    classifier.partial_fit(support[4:], SUPPORT_LABELS[4:])
    classifier.save(tmp_path / "a")
    assert (SimpleCNAPSClassifier.load(tmp_path / "a").transform(queries) == classifier.transform(queries)).all()


@pytest.mark.parametrize("dtype", ["<U5", object, np.int16, bool])
def test_saved_labels_keep_their_type(dtype: Any, model: SimpleCNAPS, support: Pictures, tmp_path: Path) -> None:
    labels = np.array([4, 2, 4, 2, 2, 4, 2, 4] if dtype is np.int16 else [0, 1] * 4).astype(dtype)
    if dtype is object:
        labels = np.array(["no", "a much longer yes"] * 4, dtype=object)
    classifier = SimpleCNAPSClassifier(model, adapt=False).fit(support[:8], labels)
    classifier.save(tmp_path / "a")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "a")
    assert loaded.classes_.dtype == classifier.classes_.dtype == dtype
    assert loaded.classes_.tolist() == classifier.classes_.tolist() == sorted(set(labels.tolist()))


@pytest.mark.skipif(not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="NumPy 1")
def test_labels_of_numpys_variable_strings_are_saved_as_strings(
    model: SimpleCNAPS, support: Pictures, tmp_path: Path
) -> None:
    labels = np.array(SUPPORT_LABELS, dtype=np.dtypes.StringDType())
    SimpleCNAPSClassifier(model, adapt=False).fit(support, labels).save(tmp_path / "a")
    assert SimpleCNAPSClassifier.load(tmp_path / "a").classes_.tolist() == sorted(set(SUPPORT_LABELS))


@pytest.mark.parametrize("head", ["auto", MahalanobisHead(RegularizedCovariance(2.0))])
@pytest.mark.parametrize(
    "changed", [{"head": "cosine"}, {"head": "cosinus"}, {"precision": "bfloat16", "adapt": False}]
)
def test_what_was_fitted_is_saved_and_not_what_was_set_after(
    head: Any, changed: dict[str, Any], model: SimpleCNAPS, support: Pictures, queries: Pictures, tmp_path: Path
) -> None:
    classifier = SimpleCNAPSClassifier(model, head=head, precision="float32").fit(support, SUPPORT_LABELS)
    before = classifier.decision_function(queries)
    classifier.set_params(**changed).save(tmp_path / "a")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "a", device="cpu")
    assert (loaded.decision_function(queries) == before).all()
    assert {name: loaded.get_params()[name] for name in changed} == changed  # in effect from the next fit
    assert (pickle.loads(pickle.dumps(classifier)).decision_function(queries) == before).all()


def test_a_setting_that_could_not_be_read_is_not_written(model: SimpleCNAPS, support: Pictures, tmp_path: Path) -> None:
    classifier = SimpleCNAPSClassifier(model).fit(support, SUPPORT_LABELS).set_params(temperature=-1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        classifier.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_weights_are_stored_as_float16_only_where_nothing_is_lost(
    model: SimpleCNAPS, support: Pictures, queries: Pictures, tmp_path: Path
) -> None:
    short = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in short.parameters():
            parameter.copy_(parameter.half().float())
    sizes = []
    for name, checkpoint in (("long", model), ("short", short)):
        classifier = SimpleCNAPSClassifier(checkpoint).fit(support, SUPPORT_LABELS)
        classifier.save(tmp_path / name)
        sizes.append((tmp_path / name).stat().st_size)
        loaded = SimpleCNAPSClassifier.load(tmp_path / name)
        assert (loaded.decision_function(queries) == classifier.decision_function(queries)).all()
    assert sizes[1] < 0.52 * sizes[0]


def test_a_head_that_no_file_can_describe_is_refused(model: SimpleCNAPS, support: Pictures, tmp_path: Path) -> None:
    classifier = SimpleCNAPSClassifier(model, head=LinearHead(64)).fit(support, SUPPORT_LABELS)
    with pytest.raises(ValueError, match=r"LinearHead object .* pickle"):
        classifier.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(
    fitted: SimpleCNAPSClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("old")

    def failing(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(OSError, match="disk full"):
        fitted.save(tmp_path / "a")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("name", [b"caf\xe9.safetensors", b"caf\xe9/pets.safetensors", b"\xff"])
def test_a_name_that_is_no_utf_8_is_said_and_not_taken_for_damage(
    name: bytes, fitted: SimpleCNAPSClassifier, tmp_path: Path
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path / "whole.safetensors")[: -len("whole.safetensors")] + name))
    path.parent.mkdir(exist_ok=True)
    fitted.save(tmp_path / "whole.safetensors")
    (tmp_path / "whole.safetensors").rename(path)
    with pytest.raises(ValueError, match="not valid UTF-8: rename"):
        SimpleCNAPSClassifier.load(path)


def test_files_that_are_no_saved_classifier_are_refused(fitted: SimpleCNAPSClassifier, tmp_path: Path) -> None:
    good = tmp_path / "good"
    fitted.save(good)
    data = good.read_bytes()
    bad = tmp_path / "bad"

    def assert_refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SimpleCNAPSClassifier.load(bad)

    for content in (b"", b"text", data[:5], data[:200], data[:-1]):
        bad.write_bytes(content)
        assert_refused("not a safetensors file, or is damaged or cut short")
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    bad.write_bytes(flipped)
    assert_refused("do not match their digest")
    save_file({"a": torch.zeros(1)}, bad)
    assert_refused("not one that SimpleCNAPSClassifier.save wrote")

    with safe_open(good, "pt") as file:
        metadata = file.metadata()
    tensors, header = load_file(good), json.loads(metadata["classifier"])
    save_file(tensors, bad, {**metadata, "classifier": json.dumps({**header, "version": 99})})
    assert_refused("newer version, .* upgrade .*, or fit and save again")
    save_file(tensors, bad, {**metadata, "classifier": json.dumps({**header, "version": 0})})
    assert_refused(r"its header is wrong: .* `\$\.version`")
    save_file(tensors, bad, {**metadata, "classifier": "{"})
    assert_refused("damaged header")
    save_file(tensors, bad, {**metadata, "classifier": json.dumps({k: v for k, v in header.items() if k != "labels"})})
    assert_refused("incomplete")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SimpleCNAPSClassifier.load(tmp_path / "nowhere")


def test_saving_and_pickling_keep_the_same_state(model: SimpleCNAPS, support: Pictures, tmp_path: Path) -> None:
    """Both go through ``FittedHead.to_state``."""
    classifier = SimpleCNAPSClassifier(model, unknown_label="none", temperature="auto").fit(support, SUPPORT_LABELS)
    classifier.save(tmp_path / "a")
    loaded, unpickled = SimpleCNAPSClassifier.load(tmp_path / "a"), pickle.loads(pickle.dumps(classifier))
    kept, same = (again.fitted_head_.to_state() for again in (loaded, unpickled))
    assert kept.keys() == same.keys()
    for name, value in kept.items():
        if name in ("head", "settled"):
            assert describe_head(value) == describe_head(same[name])
        elif name == "tensors":
            assert value.keys() == same[name].keys()
            assert all(torch.equal(tensor, same[name][of]) for of, tensor in value.items())
        elif name == "values":
            assert msgspec.structs.asdict(value).items() == msgspec.structs.asdict(same[name]).items()
        else:
            assert np.array_equal(value, same[name])
    assert loaded.task_.network.film is not None
    for position, pair in loaded.task_.network.film.items():
        assert all(map(torch.equal, pair, unpickled.task_.network.film[position]))
