"""What breaks in mid-work - Ctrl-C, kills, full disks, no network, no memory - breaks nothing; nor does company."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis import adapted_features as adapted_features_module
from fewshot_mahalanobis import classifier as classifier_module
from fewshot_mahalanobis.checkpoints import CheckpointError, classifier_file, published, save_checkpoint
from fewshot_mahalanobis.checkpoints import download as download_module
from fewshot_mahalanobis.checkpoints import folder as folder_module
from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS
from fewshot_mahalanobis.checkpoints.download import LOCAL_COPIES_VARIABLE
from fewshot_mahalanobis.checkpoints.published import CACHE_VARIABLE
from fewshot_mahalanobis.images import decode as images_module
from fewshot_mahalanobis.networks import task
from tests.checkpoints.checkpoint_server import Server, git_blob_id, send
from tests.forked import forked_pool, needs_fork
from tests.tiny import LABELS, pictures, tiny_classifier, tiny_model


def forked(call: Callable[..., Any], *arguments: Any) -> multiprocessing.Process:
    """Start ``call`` in a copy of this process."""

    def alone() -> None:
        torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads and would wait for them
        call(*arguments)

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    return process  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------ interruption


def fitted_state(classifier: SimpleCNAPSClassifier) -> dict[str, Any]:
    parameters = classifier.get_params()
    return {name: value for name, value in vars(classifier).items() if name not in parameters}


def interrupted_at_line(number: int, call: Callable[[], Any]) -> bool:
    """Call with a Ctrl-C before the given line of the classifier's two files that is reached; False if fewer are."""
    reached, outer = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal reached
        if frame.f_code.co_filename not in (classifier_module.__file__, adapted_features_module.__file__):
            return None
        if event == "line":
            reached += 1
            if reached == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
    return False


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_ctrl_c_at_any_line_leaves_the_old_fitted_state_or_the_new_one(method: str) -> None:
    classifier, others, queries = tiny_classifier(), pictures(4, 2), pictures(5, 3)
    before, answer = fitted_state(classifier), classifier.decision_function(queries)
    number, unchanged = 0, 0
    while True:
        number += 1
        done = not interrupted_at_line(number, lambda: getattr(classifier, method)(others, ["a", "b", "a", "b"]))
        after = fitted_state(classifier)
        kept = {name: after[name] is value for name, value in before.items()}
        if all(kept.values()):
            assert not done
            unchanged += 1
            assert (classifier.decision_function(queries) == answer).all()
        else:  # whole: every fitted array belongs to the same new task
            assert not kept["_fitted"]
            assert classifier.model_ is before["_fitted"].model  # the module that was given, which nothing changes
            assert classifier.decision_function(queries).shape[:1] == (5,)
            assert len(classifier.classes_) == len(classifier.class_counts_) == (2 if method == "fit" else 5)
            assert classifier.class_counts_.sum() == len(classifier.fitted_head_.labels)
            vars(classifier).update(before)
        if done:
            break
    assert unchanged > 20


def test_ctrl_c_in_a_first_fit_leaves_an_unfitted_classifier() -> None:
    classifier = SimpleCNAPSClassifier(tiny_model())
    assert interrupted_at_line(15, lambda: classifier.fit(pictures(8, 1), LABELS))
    assert fitted_state(classifier) == {}


@pytest.fixture
def python_answers_ctrl_c() -> Iterator[None]:
    """A process that was started in the background ignores the signal, which its children inherit."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
@pytest.mark.usefixtures("python_answers_ctrl_c")
@pytest.mark.parametrize("method", ["fit", "partial_fit", "predict", "transform"])
def test_an_interrupt_signal_while_images_are_decoded_ends_the_threads_and_changes_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, queries = tiny_classifier(batch_size=4), pictures(40, 2)
    before, answer, threads = fitted_state(classifier), classifier.predict(queries), threading.active_count()
    decode = images_module.read_item

    def interrupting(item: Any, index: int, *rest: Any) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return decode(item, index, *rest)

    labels = [["a", "b"][i % 2] for i in range(40)]
    with monkeypatch.context() as patch:
        patch.setattr(images_module, "read_item", interrupting)
        with pytest.raises(KeyboardInterrupt):
            getattr(classifier, method)(queries, *([labels] if "fit" in method else []))
    gc.collect()
    assert threading.active_count() == threads
    assert all(getattr(classifier, name) is value for name, value in before.items())
    assert (classifier.predict(queries) == answer).all()


@needs_fork
def test_a_kill_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    path.write_text("old")

    def half_then_killed(tensors: Any, temporary: Path, metadata: Any) -> None:
        temporary.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(classifier_file, "save_file", half_then_killed)
    process = forked(tiny_classifier().save, path)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert path.read_text() == "old"


@needs_fork
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_kill_at_any_step_of_saving_a_checkpoint_never_mixes_old_and_new(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    save_checkpoint(model, tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.config["beta"] = 2.0
    with torch.no_grad():
        model.feature_extractor.conv1.weight.mul_(2)
    replace, calls = os.replace, iter(range(1, 9))

    def killed(*arguments: Any) -> None:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)

    monkeypatch.setattr(folder_module.os, "replace", killed)
    process = forked(lambda: save_checkpoint(model, tmp_path, card="new"))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    now = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    if "config.json" in now:  # without it the folder is an error to read
        assert now["config.json"] == old["config.json"]
        assert now["model.safetensors"] == old["model.safetensors"]


# ---------------------------------------------------------------------------------------------- the cache

NAME = "simple-cnaps-meta-dataset"


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A published file of a megabyte on a server, a cache, and a conversion that only copies it."""
    content = tmp_path / "best_simple_cnaps.pt"
    torch.save({"weights": torch.arange(250_000.0)}, content)
    body = content.read_bytes()

    def save(model: torch.Tensor, folder: Path, card: str) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(model.numpy().tobytes())
        (folder / "config.json").write_text("{}")

    def read(folder: Path) -> bytes:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is not whole")
        return (folder / "model.safetensors").read_bytes()

    monkeypatch.setattr(published, "model_from_published_state_dict", lambda weights, image_size: weights["weights"])
    monkeypatch.setattr(published, "save_checkpoint", save)
    monkeypatch.setattr(published, "read_checkpoint", read)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(LOCAL_COPIES_VARIABLE, raising=False)
    monkeypatch.setattr(download_module, "TIMEOUT", (5.0, 5.0))
    with Server(lambda handler: send(handler, body)) as server:
        record = dataclasses.replace(
            CHECKPOINTS[NAME], url=f"{server.url}/best_simple_cnaps.pt", blob_id=git_blob_id(body)
        )
        monkeypatch.setitem(CHECKPOINTS, NAME, record)
        yield SimpleNamespace(
            server=server, body=body, cache=tmp_path / "cache", expected=torch.arange(250_000.0).numpy().tobytes()
        )


def whole_files(folder: Path) -> list[str]:
    """What a cache shows beside the locks' empty files."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@needs_fork
def test_a_kill_in_mid_download_leaves_a_cache_that_works(light: SimpleNamespace) -> None:
    half_sent, killed = threading.Event(), threading.Event()

    def half(handler: Any) -> None:
        send(handler, light.body[: len(light.body) // 2], length=len(light.body))
        handler.wfile.flush()
        half_sent.set()
        killed.wait(60)

    whole = light.server.answer
    light.server.answer = half
    process = forked(load_checkpoint, NAME)
    assert half_sent.wait(60)
    process.kill()
    process.join(60)
    killed.set()
    light.server.answer = whole
    assert load_checkpoint(NAME) == light.expected  # type: ignore[comparison-overlap]
    assert [name for name in whole_files(light.cache) if not name.startswith(NAME)] == []


@needs_fork
def test_a_kill_in_mid_conversion_leaves_a_cache_that_works_without_another_download(
    light: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_then_killed(model: torch.Tensor, folder: Path, card: str) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(published, "save_checkpoint", half_then_killed)
        process = forked(load_checkpoint, NAME)
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(whole_files(light.cache)) == 2  # the verified download, and half a folder under its temporary name
    assert load_checkpoint(NAME) == light.expected  # type: ignore[comparison-overlap]
    assert len(light.server.requests) == 1
    assert len(whole_files(light.cache)) == 1


def test_offline_with_a_warm_cache_no_connection_is_attempted(
    light: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_checkpoint(NAME)
    attempts: list[object] = []

    def refused(*arguments: object, **options: object) -> None:
        attempts.append(arguments)
        raise OSError("the network is unreachable")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    assert load_checkpoint(NAME) == light.expected  # type: ignore[comparison-overlap]
    assert load_checkpoint("default").config["adaptation"] == "film"
    assert attempts == []


Mount = Callable[..., None]


@pytest.fixture
def small_disk(light: SimpleNamespace) -> Iterator[Mount]:
    """Makes the cache a disk of its own: ``mount("size=1m")`` first, ``mount("remount,size=9m")`` again."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a disk of its own size can only be mounted by root on Linux")
    light.cache.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(light.cache)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"mounting a small disk is not permitted here: {result.stderr.strip()}")

    yield mount
    subprocess.run(["umount", str(light.cache)], capture_output=True, check=False)


@pytest.mark.parametrize("room", ["600k", "1200k"], ids=["download", "conversion"])
def test_a_full_disk_is_one_clear_error_without_half_a_file_and_with_room_it_works(
    room: str, light: SimpleNamespace, small_disk: Mount
) -> None:
    small_disk(f"size={room}")
    with pytest.raises(CheckpointError, match=f"No space left.*{CACHE_VARIABLE}"):
        load_checkpoint(NAME)
    # A verified download is kept for the next try; nothing else is.
    kept = {path.name: path.read_bytes() for path in light.cache.iterdir() if path.suffix != ".lock"}
    assert kept == ({"best_simple_cnaps.pt": light.body} if room == "1200k" else {})
    small_disk("remount,size=9m")
    assert load_checkpoint(NAME) == light.expected  # type: ignore[comparison-overlap]


def test_saving_to_a_full_disk_is_one_clear_error_and_keeps_the_old_file(
    light: SimpleNamespace, small_disk: Mount
) -> None:
    small_disk("size=64k")
    path = light.cache / "saved"
    path.write_text("old")
    with pytest.raises(OSError, match=r"saved cannot be written: .*No space left"):
        tiny_classifier().save(path)
    with pytest.raises(CheckpointError, match=r"checkpoint cannot be written: .*No space left"):
        save_checkpoint(tiny_model(), light.cache / "checkpoint")
    assert path.read_text() == "old"
    assert list((light.cache / "checkpoint").iterdir()) == []


def test_a_read_only_cache_serves_when_warm_and_is_one_clear_error_when_cold(
    light: SimpleNamespace, small_disk: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_disk("size=9m")
    load_checkpoint(NAME)
    small_disk("remount,ro")
    assert load_checkpoint(NAME) == light.expected  # type: ignore[comparison-overlap]
    record = dataclasses.replace(CHECKPOINTS[NAME], name="another")
    monkeypatch.setitem(CHECKPOINTS, "another", record)
    with pytest.raises(CheckpointError, match=f"[Rr]ead-only.*{CACHE_VARIABLE}"):
        load_checkpoint("another")
    assert len(light.server.requests) == 1


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission_to_write_is_one_clear_error(light: SimpleNamespace) -> None:
    light.cache.mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match=CACHE_VARIABLE):
        load_checkpoint(NAME)
    assert light.server.requests == []


# -------------------------------------------------------------------------------------------- concurrency


def test_eight_threads_predict_what_one_does() -> None:
    classifier, queries = tiny_classifier(batch_size=3), pictures(64, 2)
    expected, probabilities = classifier.predict(queries), classifier.predict_proba(queries)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(classifier.predict, [queries] * 16))
        others = list(pool.map(classifier.predict_proba, [queries[i : i + 8] for i in range(0, 64, 8)]))
    assert all((answer == expected).all() for answer in answers)
    np.testing.assert_allclose(np.concatenate(others), probabilities, rtol=1e-5, atol=1e-7)


@needs_fork
def test_forked_workers_predict_what_their_parent_does() -> None:
    classifier, queries = tiny_classifier(), pictures(12, 2)
    with forked_pool(2) as pool:
        parts = pool.map(classifier.decision_function, [queries[:6], queries[6:]])
    np.testing.assert_allclose(np.concatenate(parts), classifier.decision_function(queries), rtol=1e-5)


# ----------------------------------------------------------------------------------------------- memory


def test_a_cpu_has_a_bounded_number_of_pixels_in_the_network_whatever_the_batch_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for batch_size, most in ((64, 32), (20, 20)):
        classifier = tiny_classifier(batch_size=batch_size)
        monkeypatch.setattr(task, "MAX_CPU_PIXELS", 32 * classifier.model_.image_size**2)
        network = classifier.task_.network.extractor
        network.batches.clear()
        features = classifier.transform(pictures(50, 2))
        assert (sum(network.batches), max(network.batches) <= most) == (50, True)
        alone = [classifier.transform(picture[None]) for picture in pictures(50, 2)]
        np.testing.assert_allclose(features, np.concatenate(alone), rtol=1e-5)


def test_queries_that_do_not_fit_into_cuda_memory_are_halved_with_one_warning() -> None:
    classifier, queries = tiny_classifier(batch_size=16), pictures(50, 2)
    expected, network = classifier.decision_function(queries), classifier.task_.network.extractor
    network.largest_batch = 5
    for method, answer in (("decision_function", expected), ("predict", classifier.classes_[expected.argmax(axis=1)])):
        network.batches.clear()
        with pytest.warns(UserWarning, match="does not hold a batch of 16 images: continuing with 4") as caught:
            result = getattr(classifier, method)(queries)
        assert sum("does not hold" in str(w.message) for w in caught) == 1
        assert network.batches == [4] * 12 + [2]
        if method == "predict":
            assert (result == answer).all()
        else:
            np.testing.assert_allclose(result, answer, rtol=1e-5)


def test_a_support_set_that_does_not_fit_into_cuda_memory_is_halved_with_one_warning() -> None:
    model, support, queries = tiny_model(), pictures(8, 1), pictures(5, 2)
    expected = SimpleCNAPSClassifier(model).fit(support, LABELS).decision_function(queries)
    model.feature_extractor.largest_batch = 3  # type: ignore[assignment]
    classifier = SimpleCNAPSClassifier(model, batch_size=8)
    with pytest.warns(UserWarning, match="continuing with 2") as caught:
        classifier.fit(support, LABELS)
    assert sum("continuing with" in str(w.message) for w in caught) == 1
    assert classifier.batch_size == 8
    with pytest.warns(UserWarning, match="continuing with"):
        np.testing.assert_allclose(classifier.decision_function(queries), expected, rtol=1e-5)


def test_an_image_that_does_not_fit_alone_is_an_error_that_changes_nothing() -> None:
    classifier, queries = tiny_classifier(), pictures(5, 2)
    before, answer = fitted_state(classifier), classifier.decision_function(queries)
    classifier.task_.network.extractor.largest_batch = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        classifier.partial_fit(queries, LABELS[:5])
    classifier.task_.network.extractor.largest_batch = 99
    assert all(getattr(classifier, name) is value for name, value in before.items())
    assert (classifier.decision_function(queries) == answer).all()


class OnGpu(nn.Module):
    """Stands for a module on a GPU where there is none."""

    moved = False

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cpu" if self.moved else "cuda"))

    def cpu(self) -> OnGpu:
        self.moved = True
        return self


def test_modules_given_on_a_gpu_are_pickled_on_the_cpu() -> None:
    head = OnGpu()
    again = pickle.loads(pickle.dumps(SimpleCNAPSClassifier(head=head)))
    assert again.head.moved
    assert not head.moved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_cuda_saved_loads_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint("default").cuda()
    classifier = SimpleCNAPSClassifier(checkpoint, device="cuda", precision="float32").fit(pictures(8, 1), LABELS)
    expected = classifier.decision_function(pictures(5, 2))
    classifier.save(tmp_path / "saved")
    data = pickle.dumps(classifier)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loaded = SimpleCNAPSClassifier.load(tmp_path / "saved")
    assert loaded.device_.type == "cpu"
    np.testing.assert_allclose(loaded.decision_function(pictures(5, 2)), expected, rtol=1e-2)
    real = adapted_features_module.choose_device
    monkeypatch.setattr(adapted_features_module, "choose_device", lambda d: real("nowhere" if "cuda" in str(d) else d))
    with pytest.warns(UserWarning, match="no device cuda"):
        again = pickle.loads(data)
    assert {p.device.type for p in again.checkpoint.parameters()} == {"cpu"}
    np.testing.assert_allclose(again.decision_function(pictures(5, 2)), expected, rtol=1e-2)


def _fits_over_and_over() -> tuple[list[bool], list[int]]:
    """Which earlier fits are alive after twenty-five, and what twenty of them added: threads, open files, objects."""
    threading.settrace(None)  # type: ignore[arg-type]  # measuring coverage keeps objects of every thread
    classifier, support, queries = SimpleCNAPSClassifier(tiny_model()), pictures(8, 1), pictures(5, 2)
    earlier: list[weakref.ref[Any]] = []
    open_files = Path("/proc/self/fd")
    counts = []
    for number in range(25):
        classifier.fit(support, LABELS).predict(queries)
        classifier.partial_fit(queries[:2], ["blue", "new"])
        earlier.append(weakref.ref(classifier.fitted_head_))
        if number in (4, 24):
            gc.collect()
            files = len(list(open_files.iterdir())) if open_files.is_dir() else 0
            counts.append([threading.active_count(), files, len(gc.get_objects())])
    return [reference() is not None for reference in earlier], [after - before for before, after in zip(*counts)]


@needs_fork
def test_fitting_over_and_over_keeps_nothing_of_the_earlier_fits() -> None:
    # In a process of its own: what the threads of other tests do counts objects too.
    with forked_pool(1) as pool:
        alive, (threads, files, objects) = pool.apply(_fits_over_and_over)
    assert alive == [False] * 24 + [True]
    assert (threads, files) == (0, 0)
    assert objects < 150  # of twenty fits


def test_no_warning_comes_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny_classifier().predict(pictures(3, 2)).shape == (3,)
