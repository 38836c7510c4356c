"""A large collection on a local Ray cluster of two workers, of which one is killed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.ray import Labelled, label_collection, label_images, main
from fewshot_mahalanobis.support_set.answers import GRADE_COLUMNS

pytestmark = [pytest.mark.process, pytest.mark.slow]

ray = pytest.importorskip("ray")
pyarrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

IMAGES = 240
COLOURS = {"red": (200, 60, 60), "green": (60, 180, 60), "blue": (60, 60, 200)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        patch.setenv("RAY_worker_niceness", "0")  # workers are not to yield to whatever else the machine does
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=200 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,  # short: sockets below it have at most 107 characters
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(adaptation="none", image_size=64).eval()
    support = [noisy(colour, seed) for seed, colour in enumerate(list(COLOURS.values()) * 3)]
    return SimpleCNAPSClassifier(model, device="cpu").fit(support, list(COLOURS) * 3)


def noisy(colour: tuple[int, int, int], seed: int) -> Image.Image:
    pixels = np.array(colour) + np.random.default_rng(seed).normal(0, 60, (48, 80, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs in folders, some with an EXIF orientation or transparency, two of them unreadable."""
    root = tmp_path_factory.mktemp("collection")
    colours = list(COLOURS.values())
    for index in range(IMAGES):
        picture = noisy(colours[index % 3], 100 + index)
        file = root / f"{index % 4}" / f"picture {index}.jpg"
        file.parent.mkdir(exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = 1 + index % 8
        if index % 10 == 9:
            picture.putalpha(120)
            picture.save(file.with_suffix(".png"))
        else:
            picture.save(file, exif=exif)
    whole = root / "0" / "picture 0.jpg"
    (root / "0" / "cut.jpg").write_bytes(whole.read_bytes()[:300])
    (root / "1" / "empty.png").touch()
    return root


@pytest.fixture(scope="module")
def saved(classifier: SimpleCNAPSClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "colours.safetensors"
    classifier.save(file)
    return file


def parent(process: str) -> str:
    """Process id of the parent, from /proc; the name before it is in parentheses and may hold anything."""
    return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1]


def workers() -> set[int]:
    """Process ids of this cluster's actors, which name themselves after their class; tests beside this have theirs."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = b"ray::" in (line := (folder / "cmdline").read_bytes()) and b"_Worker" in line
            if is_worker and parent(parent(folder.name)) == str(os.getpid()):
                found.add(int(folder.name))
        except OSError:  # it ended meanwhile
            pass
    return found


class Run(NamedTuple):
    """A collection labelled by two workers, one of which was killed when ``files`` files were written."""

    output: Path
    wanted: list[str]
    done: Labelled
    killed: int | None
    files: int


@pytest.fixture(scope="module")
def labelled(cluster, saved, collection, tmp_path_factory) -> Run:
    output = tmp_path_factory.mktemp("output") / "labels"
    wanted = [str(file) for file in collection.glob("*/*")] + [str(collection / "no such.jpg")]
    over = Event()

    def kill_a_worker() -> tuple[int | None, int]:
        while not over.wait(0.02):
            files = len(list(output.glob("[!_]*.parquet")))
            if files >= 3:
                killed = min(workers())
                os.kill(killed, signal.SIGKILL)
                return killed, files
        return None, 0

    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(kill_a_worker)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fewshot_mahalanobis.apps.ray.IMAGES_PER_FILE", 16)
                done = label_collection(saved, [*wanted, *wanted[:5]], output, workers=2)
        finally:
            over.set()
    return Run(output, wanted, done, *attack.result())


def test_a_killed_worker_loses_no_image_and_labels_none_twice(labelled, classifier, collection):
    assert labelled.killed is not None
    assert not Path(f"/proc/{labelled.killed}").exists()
    assert labelled.files < len(labelled.wanted) // 16 - 4  # files were waiting for both workers
    assert labelled.done == Labelled(labelled=IMAGES, unreadable=3, known=0)
    rows = pq.read_table(labelled.output).to_pylist()
    assert sorted(row["path"] for row in rows) == sorted(labelled.wanted)


def test_labels_are_those_of_predict_and_unreadable_images_have_a_reason(labelled, classifier, collection):
    rows = {row["path"]: row for row in pq.read_table(labelled.output).to_pylist()}
    paths = sorted(str(file) for file in collection.glob("*/picture *"))
    expected = classifier.predict(paths).tolist()
    assert [rows[path]["label"] for path in paths] == expected
    assert len(set(expected)) == 3
    probabilities = classifier.predict_proba(paths).max(axis=1)
    np.testing.assert_allclose([rows[path]["probability"] for path in paths], probabilities, rtol=1e-4)
    assert {rows[path]["error"] for path in paths} == {None}
    for name, reason in {"0/cut.jpg": "damaged", "1/empty.png": "empty", "no such.jpg": "no such file"}.items():
        row = rows[str(collection / name)]
        assert row["label"] is row["probability"] is None
        assert reason in row["error"]
    assert {row[name] for row in rows.values() for name in GRADE_COLUMNS} == {None}  # it rejects nothing


def test_what_a_worker_returns_has_the_grade_of_rejection(cluster, classifier, collection, tmp_path):
    support = [noisy(colour, seed) for seed, colour in enumerate(list(COLOURS.values()) * 3)]
    rejecting = SimpleCNAPSClassifier(classifier.model_, unknown_label="?", false_rejection_rate=0.3, device="cpu")
    rejecting.fit(support, list(COLOURS) * 3).save(tmp_path / "model")
    paths = sorted(str(file) for file in collection.glob("*/picture *"))[:4]
    rows = {row["path"]: row for row in label_images(tmp_path / "model", paths, workers=1).take_all()}
    expected = rejecting.predict_all(paths)
    assert [rows[path]["label"] for path in paths] == expected.labels.tolist()
    best = rejecting.classes_[expected.probabilities.argmax(axis=1)].tolist()
    assert [rows[path]["class"] for path in paths] == best
    assert {rows[path]["outlier_threshold"] for path in paths} == {rejecting.threshold_}
    np.testing.assert_allclose([rows[path]["outlier_score"] for path in paths], expected.outlier_scores, rtol=1e-3)
    np.testing.assert_allclose([rows[path]["doubt"] for path in paths], expected.doubts, rtol=1e-2, atol=1e-6)


def test_a_task_of_ray_keeps_to_its_thread_and_gives_the_same_bits(cluster, classifier, collection):
    paths = sorted(map(str, collection.glob("*/picture *")))[:40]

    @ray.remote
    def task(classifier: SimpleCNAPSClassifier) -> tuple[int, np.ndarray]:
        return torch.get_num_threads(), classifier.transform(paths)

    threads, features = ray.get(task.remote(classifier))
    assert threads == 1
    np.testing.assert_array_equal(features, classifier.transform(paths))


def test_a_repeated_run_adds_what_is_new(labelled, saved, collection, tmp_path):
    for index in range(3):
        noisy(COLOURS["red"], index).save(collection / "2" / f"new {index}.png")
    (labelled.output / "_half.parquet").write_bytes(b"PAR1 of a killed run")
    app = typer.Typer()
    app.command()(main)
    command = [str(saved), collection.as_uri(), labelled.output.as_uri(), "--workers", "1"]
    for counts in ("3 images labelled, 0 unreadable", "0 images labelled, 0 unreadable"):
        said = CliRunner().invoke(app, command)
        assert said.exit_code == 0, said.output
        assert counts in said.output
    assert f"{IMAGES + 2 + 3} known from earlier runs" in said.output
    rows = pq.read_table(labelled.output).to_pylist()
    assert len({row["path"] for row in rows}) == len(rows) == len(labelled.wanted) + 3
    assert not list(labelled.output.glob("_*"))


def test_what_cannot_be_used_is_refused_before_any_work(saved, collection, tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved classifier"):
        label_images(tmp_path / "none.safetensors", ["a.jpg"])
    with pytest.raises(ValueError, match="workers must be positive, got 0"):
        label_images(saved, ["a.jpg"], workers=0)
    with pytest.raises(FileNotFoundError, match="no image file or folder"):
        label_collection(saved, tmp_path / "none", tmp_path / "labels")
    with pytest.raises(ValueError, match="the list is empty"):
        label_collection(saved, [], tmp_path / "labels")
    assert not (tmp_path / "labels").exists()

    (tmp_path / "labels").mkdir()
    pq.write_table(pyarrow.table({"path": ["a.jpg"]}), tmp_path / "labels" / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has labels of another classifier"):
        label_collection(saved, collection, tmp_path / "labels")


def test_names_and_classes_that_are_no_utf8_are_labelled_and_written_with_escapes(cluster, tmp_path):
    """Names in the encodings of old archives; a damaged file among them; the second run knows them all."""
    names = [b"caf\xe9.png", b"\x83t\x83@.png", b"plain.png", "schön.png".encode(), b"sub\xff/one.png", b"cut \xe9.jpg"]
    folder = os.fsencode(tmp_path / "in")
    for index, name in enumerate(names):
        file = Path(os.fsdecode(os.path.join(folder, name)))  # noqa: PTH118 (bytes)
        file.parent.mkdir(parents=True, exist_ok=True)
        noisy(list(COLOURS.values())[index % 3], index).save(file)
    Path(os.fsdecode(folder + b"/" + names[-1])).write_bytes(b"\xff\xd8\xff")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(adaptation="none", image_size=64).eval()
    support = [noisy(colour, seed) for seed, colour in enumerate(list(COLOURS.values()) * 3)]
    classifier = SimpleCNAPSClassifier(model, device="cpu").fit(support, ["r\udce9d", "green", "blue"] * 3)
    classifier.save(tmp_path / "m.safetensors")
    for done in (Labelled(labelled=5, unreadable=1, known=0), Labelled(labelled=0, unreadable=0, known=6)):
        assert label_collection(tmp_path / "m.safetensors", tmp_path / "in", tmp_path / "out", workers=1) == done
    rows = {row["path"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    written = {f"{tmp_path}/in/" + name.decode("utf-8", "backslashreplace"): name for name in names}
    assert rows.keys() == written.keys()
    for path, name in written.items():
        label, error = rows[path]["label"], rows[path]["error"]
        if error is None:
            assert label == os.fsencode(classifier.predict([os.fsdecode(folder + b"/" + name)])[0]).decode(
                "utf-8", "backslashreplace"
            )
        else:
            assert name == names[-1]
    assert {row["label"] for row in rows.values()} == {r"r\xe9d", "green", "blue", None}


def test_names_that_look_alike_as_text_are_refused_before_any_work(saved, tmp_path):
    paths = [os.fsdecode(os.fsencode(tmp_path) + name) for name in (rb"/caf\xe9.png", b"/caf\xe9.png", b"/other.png")]
    with pytest.raises(ValueError, match=r"two files would be called .*/caf\\xe9\.png in the results: rename"):
        label_collection(saved, paths, tmp_path / "out")
    with pytest.raises(ValueError, match=r"name of the folder .*/out\\xff is not in UTF-8"):
        label_collection(saved, paths[1:], os.fsdecode(os.fsencode(tmp_path) + b"/out\xff"))
    assert list(tmp_path.iterdir()) == []


def test_the_driver_loads_the_classifier_once(cluster, saved, collection, tmp_path, monkeypatch):
    loads, load = [], SimpleCNAPSClassifier.load

    def counted(*arguments, **options):
        loads.append(arguments)
        return load(*arguments, **options)

    monkeypatch.setattr(SimpleCNAPSClassifier, "load", counted)
    files = sorted(collection.glob("0/picture *"))[:2]
    assert label_collection(saved, files, tmp_path / "out", workers=1).labelled == 2
    assert len(loads) == 1


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folders_that_hold_no_pictures_of_the_users_are_left_out_and_listed(saved, scheme, tmp_path, monkeypatch):
    wanted = [tmp_path / ".share" / "photos" / name for name in ("1.jpg", "more/2.JPG")]
    skipped = [tmp_path / ".share" / "photos" / name for name in (".git/1.jpg", "more/@eaDir/2.JPG/3.jpg", "film.mp4")]
    for path in (*wanted, *skipped):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    class Listed(Exception):
        pass

    def label(content, paths, *settings):
        raise Listed([os.fsdecode(path) for path in paths.to_pylist()])

    monkeypatch.setattr("fewshot_mahalanobis.apps.ray._labelled", label)
    folder = f"{scheme}{tmp_path / '.share' / 'photos'}"
    left_out = "Left out: 1 .git folder, 1 @eaDir folder, 1 MP4 file"
    with pytest.warns(UserWarning, match=left_out) as warned, pytest.raises(Listed) as listed:
        label_collection(saved, folder, tmp_path / "labels")
    assert listed.value.args == ([str(path) for path in wanted],)
    assert [warning.filename for warning in warned] == [__file__]
