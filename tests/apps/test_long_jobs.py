"""Long jobs of ``predict`` and ``sort``: whatever ends one, the next goes on from there and ends as if undisturbed."""

from __future__ import annotations

import csv
import errno
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fewshot_mahalanobis import Region, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.journal import Journal
from fewshot_mahalanobis.apps.labelling import LabelledFile, predict_files
from fewshot_mahalanobis.images.tables import rows_of_labels
from tests.forked import needs_fork
from tests.tiny import pictures, tiny_classifier

#: Of two pictures each; the last has one.
BATCHES = 4


@pytest.fixture(scope="module")
def fitted() -> SimpleCNAPSClassifier:
    return tiny_classifier(batch_size=2, n_jobs=1)


@pytest.fixture
def model(tmp_path: Path, fitted: SimpleCNAPSClassifier, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the commands take for the fitted classifier."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a model")
    monkeypatch.setattr(SimpleCNAPSClassifier, "load", lambda *arguments, **settings: fitted)
    return file


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for index, image in enumerate(pictures(2 * BATCHES - 1, 1)):
        Image.fromarray(image).save(folder / f"{index}.png")
    return folder


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.stderr


@pytest.fixture
def asked(fitted: SimpleCNAPSClassifier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the pictures of each batch that the classifier has answered."""
    numbers, predict_all = list[int](), SimpleCNAPSClassifier.predict_all

    def counted(self: SimpleCNAPSClassifier, batch: Any) -> Any:
        numbers.append(len(batch.indices))
        return predict_all(self, batch)

    monkeypatch.setattr(SimpleCNAPSClassifier, "predict_all", counted)
    return numbers


def stopping(moment: int, stop: Callable[[], object]) -> Callable[..., Any]:
    """``Journal.add`` that stops the program at the n-th batch, with half of its line written."""
    add, calls = Journal.add, iter(range(100))

    def stopped(self: Journal, answers: Any) -> None:
        if next(calls) != moment:
            add(self, answers)
            return
        before = self.file.read_bytes() if self.file.exists() else b""
        add(self, answers)
        after = self.file.read_bytes()
        self.file.write_bytes(after[: (len(before) + len(after)) // 2])
        stop()

    return stopped


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", range(BATCHES))
@pytest.mark.parametrize("ending", [".csv", ".json"])
def test_an_interrupted_table_becomes_that_of_an_undisturbed_run(
    ending: str, moment: int, model: Path, photos: Path, tmp_path: Path, asked: list[int], monkeypatch: Any
) -> None:
    output, expected = tmp_path / f"labels{ending}", tmp_path / f"expected{ending}"
    command = ("predict", model, photos, "--proba", "--no-cache", "-o")
    run(*command, expected)
    asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stopping(moment, interrupt))
        assert CliRunner().invoke(app, [*map(str, (*command, output))]).exit_code != 0
    assert not output.exists()
    said = run(*command, output)
    assert output.read_bytes() == expected.read_bytes()
    assert ("has the answers for" in said) == (moment > 0)
    assert asked == [2, 2, 2, 1][: moment + 1] + [2, 2, 2, 1][moment:]  # the torn batch alone twice
    assert {path.name for path in tmp_path.iterdir()} == {"photos", model.name, output.name, expected.name}


@needs_fork
@pytest.mark.process
@pytest.mark.parametrize("command", ["predict", "sort"])
@pytest.mark.parametrize("moment", range(BATCHES))
def test_a_killed_program_is_repeated_from_where_it_was(
    command: str, moment: int, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"predict": "labels.csv", "sort": "sorted"}
    output, expected = tmp_path / names[command], tmp_path / f"expected{Path(names[command]).suffix}"

    def arguments(place: Path) -> list[str]:
        return [command, str(model), str(photos), "-o", str(place)]

    def killed() -> None:
        torch.set_num_threads(1)  # a forked child has none of its parent's threads
        os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        torch.set_num_threads(1)
        app(arguments(output))

    run(*arguments(expected))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stopping(moment, killed))
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    run(*arguments(output))
    if command == "predict":
        assert output.read_bytes() == expected.read_bytes()
    else:
        assert contents(output) == contents(expected)
    assert not list(tmp_path.rglob("*.partial"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_damaged_picture_does_not_cost_the_other_answers(
    model: Path, photos: Path, tmp_path: Path, asked: list[int]
) -> None:
    output = tmp_path / "labels.csv"
    (photos / "9.png").write_text("hello")
    said = run("predict", model, photos, "-o", output, status=1)
    assert "1 of 8 images cannot be read" in said
    assert not output.exists()
    asked.clear()
    said = run("predict", model, photos, "-o", output, "--skip-errors", status=3)
    assert asked == []
    assert "7 of 8 images" in said
    rows = [*csv.DictReader(output.open())]
    assert [bool(row["error"]) for row in rows] == [False] * 7 + [True]
    assert [bool(row["label"]) for row in rows] == [True] * 7 + [False]
    taken = rows_of_labels(output, ("path", "label"), "all")
    assert len(taken.rows) == 7
    assert "1 row of pictures that cannot be read" in taken.note


def test_an_error_has_its_row_in_json_too(model: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "3.png").write_text("hello")
    run("predict", model, photos, "-o", tmp_path / "a.json", "--skip-errors", status=3)
    rows = json.loads((tmp_path / "a.json").read_text())
    assert len(rows) == 2 * BATCHES - 1
    assert [row["path"] for row in rows if "error" in row] == [str(photos / "3.png")]
    assert rows[3]["label"] is None


def test_parquet_has_the_cells_of_csv_in_types_of_their_own(
    model: Path, photos: Path, tmp_path: Path, fitted: SimpleCNAPSClassifier
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (photos / "3.png").write_text("hello")
    options = ("--skip-errors", "--proba", "--top-k", 2, "--min-probability", 0.5)
    for ending in ("csv", "parquet"):
        run("predict", model, photos, "-o", tmp_path / f"labels.{ending}", *options, status=3)
    rows = [*csv.DictReader((tmp_path / "labels.csv").open())]
    table = parquet.read_table(tmp_path / "labels.parquet")
    assert table.column_names == [*rows[0]]
    for row, expected in zip(table.to_pylist(), rows, strict=True):
        shown = {
            name: f"{value:.6f}" if isinstance(value, float) else "yes" if value is True else value or ""
            for name, value in row.items()
        }
        assert shown == expected
    assert str(table.schema.field("doubtful").type) == "bool"
    assert {str(table.schema.field(name).type) for name in fitted.classes_} == {"double"}


def test_a_file_with_another_ending_or_another_format_is_refused(model: Path, photos: Path, tmp_path: Path) -> None:
    assert ".csv, .json or .parquet" in run("predict", model, photos, "-o", tmp_path / "labels.xlsx", status=1)
    assert "--json" in run("predict", model, photos, "-o", tmp_path / "labels.csv", "--json", status=1)
    assert "there is no folder" in run("predict", model, photos, "-o", tmp_path / "no" / "labels.csv", status=1)


@pytest.fixture
def journal_file(tmp_path: Path) -> Path:
    return tmp_path / "labels.csv.partial"


def test_a_changed_picture_is_asked_about_anew(photos: Path, journal_file: Path) -> None:
    """Also one that has the same name, size and, by a trick, date."""
    first, second, *_ = sorted(photos.iterdir())
    journal = Journal(journal_file, {})
    assert journal.find(first) is journal.find(second) is None
    journal.add([(first, "a"), (second, "b")])
    times, content = first.stat(), bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = Journal(journal_file, {})
    assert again.find(first) is None
    assert again.find(second) == "b"


def test_regions_of_one_picture_have_answers_of_their_own(photos: Path, journal_file: Path) -> None:
    first = min(photos.iterdir())
    regions = [Region(first, (0, 0, 5, 5)), Region(first, (0, 0, 5, 5), margin=0.1), Region(first, (1, 0, 5, 5))]
    journal = Journal(journal_file, {})
    assert [*map(journal.find, regions)] == [None] * 3
    journal.add(zip(regions, "abc", strict=True))
    assert [*map(Journal(journal_file, {}).find, [*regions, first])] == ["a", "b", "c", None]


def test_answers_about_something_else_are_begun_anew(photos: Path, journal_file: Path) -> None:
    first = min(photos.iterdir())
    for model in "ab":
        journal = Journal(journal_file, {"model": model})
        assert journal.begun_anew == (model == "b")
        assert journal.find(first) is None
        journal.add([(first, model)])
        assert Journal(journal_file, {"model": model}).find(first) == model


def test_after_a_full_disk_the_answers_before_it_are_there(
    photos: Path, journal_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = sorted(photos.iterdir())

    class Full:
        """A file on a disk with room for twenty bytes."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def write(self, content: bytes) -> None:
            self.stream.write(content[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = Journal(journal_file, {})
    assert journal.find(first) is journal.find(second) is None
    journal.add([(first, "a")])
    with monkeypatch.context() as patch:
        whole = Path.open
        patch.setattr(
            Path, "open", lambda self, mode="r": Full(whole(self, mode)) if "a" in mode else whole(self, mode)
        )
        with pytest.raises(OSError, match=r"labels\.csv\.partial: No space left.*repeat the command"):
            journal.add([(second, "b")])
    again = Journal(journal_file, {})
    assert (again.find(first), again.find(second)) == ("a", None)
    again.add([(second, "c")])
    assert Journal(journal_file, {}).find(second) == "c"


def answers() -> Iterator[LabelledFile]:
    for label in ("cat", 3, True, 2.0):
        shares = dict.fromkeys([label, "other"], 0.1 + 0.2)
        yield LabelledFile(Path("a.jpg"), label, 1 / 3, True, shares, (1, 2, 3, 4))
        yield LabelledFile(Path("a.jpg"), label, 1 / 3)
    yield LabelledFile.unreadable(Path("a.jpg"), "damaged")


@pytest.mark.parametrize("answer", [*answers()])
def test_an_answer_comes_back_as_it_was(answer: LabelledFile) -> None:
    state = json.loads(json.dumps(answer.to_state()))
    assert LabelledFile.from_state(Path("a.jpg"), state, [*(answer.probabilities or {})]) == answer


def test_a_second_program_at_the_same_table_loses_nothing(
    photos: Path, journal_file: Path, fitted: SimpleCNAPSClassifier
) -> None:
    """Both begin before the other has written, and the first to end deletes the file."""
    paths = sorted(photos.iterdir())
    expected, _ = predict_files(fitted, paths)
    first, second = Journal(journal_file, {}), Journal(journal_file, {})
    found = [predict_files(fitted, paths, journal=journal)[0] for journal in (first, second)]
    first.remove()
    second.remove()
    assert found == [expected, expected]
