"""Hostile checkpoints and saved classifiers: one clear ValueError each, no code run, no memory on a claim's word."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.checkpoints import CheckpointError, classifier_file, save_checkpoint
from fewshot_mahalanobis.research.data.sources import load_source
from tests.checkpoints.forging import Forgery, safetensors
from tests.checkpoints.models import Bomb
from tests.tiny import pictures, unadapted_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

SIZE = 32
LABELS = ["blue", "green", "red", "blue", "green"]


@pytest.fixture(scope="module")
def support() -> NDArray[np.uint8]:
    return pictures(5, 0)


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    return unadapted_model()


@pytest.fixture(scope="module")
def fitted(model: SimpleCNAPS, support: NDArray[np.uint8]) -> SimpleCNAPSClassifier:
    return SimpleCNAPSClassifier(model, device="cpu").fit(support, LABELS)


@pytest.fixture(scope="module")
def saved(fitted: SimpleCNAPSClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "colours.safetensors"
    fitted.save(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(model: SimpleCNAPS, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(model, folder, dtype=torch.float16)
    return folder


@pytest.fixture
def forgery(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forgery:
    forged = Forgery(saved, tmp_path / "forged.safetensors")
    monkeypatch.setattr(classifier_file, "_digest", lambda tensors: forged.json["digest"])
    return forged


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        SimpleCNAPSClassifier.load(path, device="cpu")
    assert str(path) in str(caught.value)


# -------------------------------------------------------------------------------- saved classifiers


def test_a_forgery_with_nothing_changed_is_read(forgery: Forgery) -> None:
    assert SimpleCNAPSClassifier.load(forgery.write(), device="cpu").classes_.tolist() == ["blue", "green", "red"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="half"),
        pytest.param("[]", id="list"),
        pytest.param("null", id="null"),
        pytest.param('"text"', id="string"),
        pytest.param("[" * 100_000, id="deep list"),
        pytest.param('{"a":' * 100_000, id="deep object"),
        pytest.param("9" * 6000, id="long number"),
        pytest.param('{"version": ' + "9" * 6000 + "}", id="long version"),
    ],
)
def test_a_header_that_is_no_json_object_is_refused(text: str, forgery: Forgery) -> None:
    assert_refused(forgery.write(text), "damaged")


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        ((), "version", 4, "newer version, .* upgrade"),
        ((), "version", True, r"\.version"),
        ((), "version", "1", r"\.version"),
        ((), "version", ..., "missing required field `version`"),
        ((), "digest", None, r"\.digest"),
        ((), "checkpoint", 3, r"\.checkpoint"),
        ((), "checkpoint", ["default"], r"\.checkpoint"),
        ((), "extra", 1, "unknown field `extra`"),
        ((), "model", [], r"\.model"),
        (("model",), "depth", 18, "unknown field `depth`"),
        (("model",), "scale", ..., "missing required field `scale`"),
        (("model",), "scale", "1", r"Expected `float`, got `str` - at `\$\.scale"),
        (("model",), "beta", -1.0, "beta"),
        (("model",), "image_size", 10**9, "image_size"),
        (("model",), "head", "oracle", "head must be one of"),
        (("model",), "head", "linear", "tensors are missing"),
        (("model",), "adaptation", "film", "tensors are missing"),
        (("parameters",), "batch_size", "64", r"\.parameters\.batch_size"),
        (("parameters",), "batch_size", True, r"\.parameters\.batch_size"),
        (("parameters",), "batch_size", 1.5, r"\.parameters\.batch_size"),
        (("parameters",), "adapt", 1, r"\.parameters\.adapt"),
        (("parameters",), "n_jobs", "2", r"\.parameters\.n_jobs"),
        (("parameters",), "verbose", None, r"\.parameters\.verbose"),
        (("parameters",), "precision", "float64", "precision must be"),
        (("parameters",), "head", 3, r"\.parameters\.head"),
        (("parameters",), "head", {"name": "oracle"}, "head must be one of"),
        ((), "precision", "float64", "precision must be"),
        ((), "precision", None, r"\.precision"),
        (("fitted",), "head", 3, r"\.fitted\.head"),
        (("fitted",), "head", "oracle", "head must be one of"),
        (("fitted",), "head", "linear", "no trained linear head"),
        (("fitted",), "head", {}, "head must be one of"),
        (("fitted",), "head", {"name": "linear"}, "does not fit together"),
        (("fitted",), "head", {"name": "cosine", "scale": 1.0}, "unexpected keyword argument 'scale'"),
        (("fitted",), "head", {"name": "mahalanobis", "scale": "1", "covariance": {}}, "does not fit together"),
        (("fitted",), "head", {"name": "mahalanobis", "scale": 1.0, "covariance": [1.0] * 9}, "does not fit together"),
        (("fitted",), "head", {"name": "mahalanobis", "scale": 1.0, "covariance": {"beta": 0.0}}, "beta must be"),
        (("fitted",), "settled", {"name": "auto", "settings": {"beta": "1"}}, "does not fit together"),
        (("parameters",), "checkpoint", "/etc", "unknown field `checkpoint`"),
        (("parameters",), "temperature", 0.0, "temperature must be positive"),
        (("parameters",), "temperature", float("inf"), "temperature must be positive"),
        (("parameters",), "temperature", "warm", "temperature must be positive"),
        (("parameters",), "temperature", None, r"\.parameters\.temperature"),
        (("parameters",), "false_rejection_rate", 1.0, "between 0 and 1"),
        (("parameters",), "false_rejection_rate", float("nan"), "between 0 and 1"),
        (("fitted",), "unknown_label", "grey", "a threshold of None"),
        (("parameters",), "unknown_label", ["grey"], r"\.parameters\.unknown_label"),
        ((), "fitted", {"temperature": 1.0}, "missing required field `priors`"),
        (("fitted",), "temperature", -1.0, "a temperature of -1.0"),
        (("fitted",), "temperature", float("nan"), "a temperature of nan"),
        (("fitted",), "temperature", True, r"\.fitted\.temperature"),
        (("fitted",), "threshold", 1.0, "a threshold of 1.0 with unknown_label=None"),
        (("fitted",), "threshold", "1", r"\.fitted\.threshold"),
        (("labels",), "dtype", 3, r"\.labels\.dtype"),
        (("labels",), "dtype", "nonsense", "does not fit together"),
        (("labels",), "dtype", "<U500000000", "labels of type"),
        (("labels",), "dtype", "V1000000000", "labels of type"),
        (("labels",), "dtype", "(1000000,)f8", "labels of type"),
        (("labels",), "dtype", "<M8[s]", "labels of type"),
        (("labels",), "dtype", "f8,O", "labels of type"),
        (("labels",), "dtype", "<U3", "not sorted, not different or not of type"),
        (("labels",), "dtype", "<i8", "does not fit together"),
        (("labels",), "classes", "abc", r"\.labels\.classes"),
        (("labels",), "classes", ["blue", "green"], "2 labels for the classes of 5 support images"),
        (("labels",), "classes", ["blue", "green", "red", "white"], "4 labels for the classes of 5"),
        (("labels",), "classes", ["red", "green", "blue"], "not sorted"),
        (("labels",), "classes", ["blue", "blue", "red"], "not different"),
        (("labels",), "classes", ["blue", "green", None], "does not fit together"),
        (("labels",), "classes", ["blue", "green", ["red"]], "does not fit together"),
        (("labels",), "classes", [1, 2, 3], "not of type"),
        ((), "labels", {"dtype": "<i8", "classes": [1, 2, 10**30]}, "does not fit together"),
        ((), "labels", {"dtype": "|i1", "classes": [1, 2, 300]}, "does not fit together"),
        ((), "labels", {"dtype": "<f8", "classes": [0.0, 1.0, float("nan")]}, "does not fit together"),
        ((), "labels", {"dtype": "|O", "classes": ["a", {"b": 1}, "c"]}, "does not fit together"),
        ((), "labels", {"dtype": "|O", "classes": ["a", "b", 1]}, "does not fit together"),
    ],
)
def test_a_wrong_field_is_refused_without_memory_for_it(
    where: tuple[str, ...], name: str, value: Any, message: str, forgery: Forgery
) -> None:
    fields = forgery.json
    for key in where:
        fields = fields[key]
    if value is ...:
        del fields[name]
    else:
        fields[name] = value
    path = forgery.write()
    tracemalloc.start()
    try:
        assert_refused(path, message)
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("unknown", "threshold", "message"),
    [
        ("red", 1.0, "is the label of a class"),
        (7, 1.0, "not of the type of the labels"),
        ("grey", float("inf"), "threshold of the outlier score must be finite"),
        ("grey" * 1000, 1.0, "an unknown_label of 4000 characters"),
    ],
)
def test_an_answer_for_unknown_images_that_cannot_be_is_refused(
    unknown: Any, threshold: float, message: str, forgery: Forgery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier_file, "MAX_LABEL_BYTES", 2**12)
    forgery.json["fitted"] |= {"unknown_label": unknown, "threshold": threshold}
    assert_refused(forgery.write(), message)


FIRST = "model.feature_extractor.conv1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"../../extra": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}), "unexpected"),
        (lambda t: t.update({"film.0.0.gamma1": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}), "missing"),
        (lambda t: t[FIRST].update(shape=[8 * 75]), "has shape"),
        (lambda t: t[FIRST].update(shape=t[FIRST]["shape"][::-1]), "has shape"),
        (lambda t: t[FIRST].update(dtype="I32"), "has type I32"),
        (lambda t: t[FIRST].update(dtype="U32"), "has type U32"),
        (lambda t: t["support_labels"].update(dtype="F64"), "has type F64"),
        (lambda t: t["support_labels"].update(shape=[5, 1]), "has shape"),
        (lambda t: t["support_features"].update(shape=[64, 5]), "has shape"),
        (lambda t: t[FIRST].update(dtype="F64"), "not a safetensors file"),
        (lambda t: t[FIRST].update(shape=[2**62, 2**62]), "not a safetensors file"),
        (lambda t: t[FIRST].update(data_offsets=[2**62, 2**63]), "not a safetensors file"),
        (lambda t: t[FIRST].update(data_offsets=t["support_features"]["data_offsets"]), "not a safetensors file"),
        (lambda t: t[FIRST].update(dtype="PICKLE"), "not a safetensors file"),
    ],
)  # fmt: skip
def test_a_lying_tensor_header_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, forgery: Forgery
) -> None:
    end = max(entry["data_offsets"][1] for entry in forgery.tensors.values())
    change(forgery.header)
    for entry in forgery.header.values():  # the file itself stays as large as it was
        if "data_offsets" in entry and entry["data_offsets"][1] > end:
            path = forgery.path
            path.write_bytes(safetensors(forgery.header))
            os.truncate(path, path.stat().st_size + end)
            assert_refused(path, message)
            return
    assert_refused(forgery.write(), message)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 5], [0, 1, -1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 2, 3, 2**62]])
def test_support_labels_that_do_not_count_the_classes_are_refused(labels: list[int], forgery: Forgery) -> None:
    forgery.small["support_labels"] = np.array(labels, "<i8").tobytes()
    assert_refused(forgery.write(), "does not fit together")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_support_features_that_are_not_finite_are_refused(value: float, forgery: Forgery) -> None:
    forgery.small["support_features"] = np.full((5, 64), value, "<f4").tobytes()
    assert_refused(forgery.write(), "'support_features' has NaN or infinite entries")


def test_pickles_are_refused_and_no_code_runs(
    fitted: SimpleCNAPSClassifier, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = Bomb(tmp_path / "ran")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    buffers = [io.BytesIO() for _ in range(4)]
    torch.save({FIRST: bomb}, buffers[0])
    torch.save({FIRST: bomb}, buffers[1], _use_new_zipfile_serialization=False)
    joblib.dump(bomb, buffers[2])
    np.save(buffers[3], np.array([bomb], dtype=object), allow_pickle=True)
    for content in [pickle.dumps(bomb), *(buffer.getvalue() for buffer in buffers)]:
        (folder / "model.safetensors").write_bytes(content)
        assert_refused(folder / "model.safetensors", "not a safetensors file")
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_checkpoint(folder)
    # Not even beside a whole checkpoint.
    (folder / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    for name in ("pytorch_model.bin", "model.pt", "model.pkl"):
        (folder / name).write_bytes(pickle.dumps(bomb))
    load_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


def test_a_classifier_over_the_tensors_of_another_is_refused(
    saved: Path, model: SimpleCNAPS, support: NDArray[np.uint8], tmp_path: Path
) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.feature_extractor.conv1.weight.mul_(1.01)
    SimpleCNAPSClassifier(other).fit(support, LABELS).save(tmp_path / "other")
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(tmp_path / "other"), tmp_path / "mixed", metadata)
    assert_refused(tmp_path / "mixed", "digest")


def test_a_saved_classifier_does_not_depend_on_the_checkpoint_that_its_name_means_now(
    support: NDArray[np.uint8], model: SimpleCNAPS, tmp_path: Path
) -> None:
    save_checkpoint(model, tmp_path / "checkpoint")
    classifier = SimpleCNAPSClassifier(tmp_path / "checkpoint").fit(support, LABELS)
    classifier.save(tmp_path / "saved")
    for path in (tmp_path / "checkpoint").iterdir():
        path.write_bytes(b"another")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "saved")
    assert (loaded.decision_function(support) == classifier.decision_function(support)).all()
    with pytest.raises(CheckpointError, match=r"config\.json"):  # only a new fit asks for it
        loaded.fit(support, LABELS)
    assert (loaded.decision_function(support) == classifier.decision_function(support)).all()


def test_a_loaded_classifier_does_not_follow_later_changes_of_its_file(
    fitted: SimpleCNAPSClassifier, saved: Path, support: NDArray[np.uint8], tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    path.write_bytes(saved.read_bytes())
    loaded = SimpleCNAPSClassifier.load(path, device="cpu")
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert (loaded.decision_function(support) == fitted.decision_function(support)).all()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (tmp_path / "pipe", tmp_path / "dangling", tmp_path, Path("/dev/zero")):
        with pytest.raises(FileNotFoundError, match="no saved classifier") as caught:
            SimpleCNAPSClassifier.load(path)
        assert str(path) in str(caught.value)


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("field", ["scale", "beta"])
@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e999", "-1e999", "NaN", "-1", "0"])
def test_a_number_that_no_float_holds_or_no_method_takes_is_refused(
    field: str, value: str, checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config[field] = "here"
    (tmp_path / "config.json").write_text(json.dumps(config).replace('"here"', value))
    os.link(checkpoint / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(tmp_path)


def test_a_file_of_many_empty_tensors_is_refused_by_their_number(checkpoint: Path, tmp_path: Path) -> None:
    header = {f"../{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(5_000)}
    (tmp_path / "model.safetensors").write_bytes(safetensors(header))
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="missing") as caught:
        load_checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000


def test_finite_weights_whose_features_overflow_are_an_error_not_an_answer(
    model: SimpleCNAPS, support: NDArray[np.uint8]
) -> None:
    huge = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in huge.parameters():
            parameter.fill_(1e38)
    classifier = SimpleCNAPSClassifier(huge)
    with pytest.raises(ValueError, match="NaN or infinity"):
        classifier.fit(support, LABELS)
    assert not hasattr(classifier, "task_")


def test_a_published_state_dict_of_anything_else_is_refused(model: SimpleCNAPS) -> None:
    weights = {"feature_extractor.conv1.weight": torch.zeros(64, 3, 5, 5)}
    for state_dict in (
        {},
        {"state_dict": {}},
        weights,
        {"feature_extractor.conv1.weight": "text"},
        {"conv1.weight": torch.zeros(1)},
        {**model.state_dict(), "extra": torch.zeros(1)},
    ):
        with pytest.raises(ValueError, match=r"published|keys"):
            SimpleCNAPS.from_published_state_dict(state_dict)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("", id="empty"),
        pytest.param("null", id="null"),
        pytest.param("[" * 100_000, id="deep list"),
        pytest.param('{"scale": ' + "9" * 6000 + "}", id="long number"),
        pytest.param(" " * (1 << 24), id="long"),
        pytest.param('{"adaptation": "none", "model_file": "../../etc/passwd"}', id="unknown field"),
        pytest.param("\udcff", id="no text"),
    ],
)
def test_from_pretrained_refuses_a_hostile_configuration_as_load_checkpoint_does(
    config: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
    os.link(checkpoint / "model.safetensors", tmp_path / "model.safetensors")
    tracemalloc.start()
    try:
        for load in (load_checkpoint, SimpleCNAPS.from_pretrained):
            with pytest.raises(CheckpointError, match=r"config\.json"):
                load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------------------------------- archives


def archive_of(path: Path, content: bytes, method: int, claim: int | None = None) -> Path:
    """A zip of two classes, whose one member holds ``content`` and claims to expand to ``claim`` bytes."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a/0.png", content)
        archive.writestr("b/0.png", b"")
    if claim is not None:
        data = bytearray(path.read_bytes())
        data[22:26] = struct.pack("<I", claim)  # in the member's own header, and in the directory at the end
        at = data.index(b"PK\1\2") + 24
        data[at : at + 4] = struct.pack("<I", claim)
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("method", "claim", "message"),
    [
        (zipfile.ZIP_DEFLATED, 2**29 + 1, "it claims 536870913 bytes"),
        (zipfile.ZIP_DEFLATED, 100, "CRC-32"),
        (zipfile.ZIP_DEFLATED, 0, "not an image file"),
        (zipfile.ZIP_STORED, 2**32 - 2, "it claims 4294967294 bytes"),
        (zipfile.ZIP_BZIP2, 100, "can expand without bound: deflate it"),
        (zipfile.ZIP_LZMA, 100, "can expand without bound: deflate it"),
    ],
    ids=["honest bomb", "lying bomb", "nothing", "stored", "bzip2", "LZMA"],
)
def test_a_zip_bomb_is_refused_by_name_without_memory_for_it(
    method: int, claim: int, message: str, tmp_path: Path
) -> None:
    path = archive_of(tmp_path / "source.zip", bytes(100 if method == zipfile.ZIP_STORED else 2**25), method, claim)
    assert path.stat().st_size < 2**16
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            load_source(path, size=SIZE, lazy=True).images[0]
        assert tracemalloc.get_traced_memory()[1] < 2**23  # a quarter of what it expands to
    finally:
        tracemalloc.stop()
    assert "cannot read image 'a/0.png' of" in str(caught.value)
    assert str(path) in str(caught.value)
