"""The command ``evaluate``, from folders to tables."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.checkpoints import save_checkpoint

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, ``omniglot/test`` and ``photos``, and a checkpoint that does not adapt."""
    root = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    for source in ("omniglot/test", "photos"):
        for k in range(6):
            (root / source / f"alphabet.{k}").mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 256, (1, 1, 3)) + rng.normal(0, 60, (32, 32, 3))
                Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(
                    root / source / f"alphabet.{k}" / f"{i}.png"
                )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_checkpoint(SimpleCNAPS(adaptation="none", image_size=32), root / "checkpoint")
    return root


def run(folder: Path, *options: Any, status: int = 0) -> str:
    sources = (f"{folder / 'omniglot'}:test", folder / "photos")
    settings = ("--checkpoint", folder / "checkpoint", "--device", "cpu", "--episodes", 4, "--queries", 2)
    result = CliRunner().invoke(app, ["evaluate", *map(str, (*sources, *settings, *options))])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_variable_episodes_give_json_latex_and_plots_and_are_computed_once(folder, tmp_path, monkeypatch):
    options = (
        "--protocol",
        "variable",
        "--in-domain",
        "omniglot",
        "-o",
        tmp_path / "r.json",
        "--plots",
        tmp_path / "plots",
    )
    found = json.loads(run(folder, *options, "--format", "json", "--head", "cosine", "--head", "mahalanobis"))
    assert [result["source"] for result in found["results"]] == ["omniglot/test", "photos"]
    assert [list(result["scores"]) for result in found["results"]] == [["not adapted, cosine", "not adapted"]] * 2
    assert [average["name"] for average in found["averages"]] == [
        "in-domain average of 1", "out-of-domain average of 1", "average of 2",
    ]  # fmt: skip
    assert found["results"] == json.loads((tmp_path / "r.json").read_text())
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        "accuracy_by_shot.png",
        "accuracy_by_way.png",
    ]

    monkeypatch.setattr("fewshot_mahalanobis.research.evaluation.report.evaluate_episodes", None)
    table = run(folder, *options, "--format", "latex", "--head", "mahalanobis")
    assert re.search(r"in-domain average of 1 +& ", table)
    assert "cosine" not in table


def test_ablations_and_shots_are_columns_and_rows(folder, tmp_path):
    options = ("--shot", 1, "--shot", 2, "--way", 4, "--head", "mahalanobis", "--no-task-covariance")
    table = run(folder, *options, "--plots", tmp_path).splitlines()
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == ["source", "not adapted", "not adapted, -TR"]
    titles = [line.split("|")[1].strip() for line in table[2:]]
    assert titles == [
        "omniglot/test, 4-way 1-shot", "photos, 4-way 1-shot", "omniglot/test, 4-way 2-shot", "photos, 4-way 2-shot",
        "average of 2, 4-way 1-shot", "average of 2, 4-way 2-shot",
    ]  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["accuracy_by_shot.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shot", 1, "--plots", "p"), "--plots needs --protocol variable, or several --shot"),
        (("--shot", 1, "--in-domain", "omniglott"), "no source is called 'omniglott'"),
        (("--adapt",), "the checkpoint has no adaptation"),
        (("--no-projection",), "the checkpoint has no projection"),
        (("--head", "linear"), "no trained linear head"),
        (("--image-size", 16), "image_size must be a whole number from 32 to 1024 pixels, not 16"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_one_line(folder, options, message):
    said = run(folder, *options, status=1)
    assert said.splitlines()[-1].startswith("error: ")
    assert message in said


def test_another_image_size_gives_what_a_checkpoint_of_that_size_does(folder, tmp_path):
    other = tmp_path / "other"
    SimpleCNAPS.from_pretrained(folder / "checkpoint").at_size(48).save_pretrained(other)
    options = ("--shot", 2, "--way", 4, "--head", "mahalanobis", "--format", "json")
    found, expected, before = (  # of the last checkpoint
        [[*result["scores"].values()][-1]["by_episode"] for result in json.loads(run(folder, *more))["results"]]
        for more in ((*options, "--image-size", 48), (*options, "--checkpoint", other), options)
    )
    assert found != before
    assert found == expected


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, Path]:
    """Checkpoints that adapt, by their heads."""
    found = {}
    with torch.random.fork_rng(devices=[]):
        for seed, head in enumerate(("mahalanobis", "euclidean", "linear")):
            torch.manual_seed(seed)
            found[head] = folder / head
            save_checkpoint(SimpleCNAPS(head=head, image_size=32), found[head])
    return found


def test_several_checkpoints_are_compared_on_the_same_episodes(folder, checkpoints, tmp_path, monkeypatch):
    options = ["-o", tmp_path / "r.json", "--shot", 1, "--shot", 2, "--way", 4]
    for path in checkpoints.values():
        options += ["--checkpoint", path]
    sources = [f"{folder / 'omniglot'}:test", folder / "photos"]
    options = [*sources, *options, "--device", "cpu", "--episodes", 2, "--queries", 1]

    def evaluated(*more: Any) -> str:
        result = CliRunner().invoke(app, ["evaluate", *map(str, (*options, *more))])
        assert result.exit_code == 0, result.output
        return result.stdout

    table = evaluated().splitlines()
    columns = ["Simple CNAPS", "Simple CNAPS, not adapted", "squared Euclidean", "CNAPS"]
    assert [cell.strip() for cell in table[0].split("|")[2:6]] == columns
    cells = [[cell.strip() for cell in line.split("|")[1:6]] for line in table[2:] if line.startswith("|")]
    rows = {title: of for title, *of in cells}
    lines = [f"average of 2{less}, 4-way {shot}-shot" for less in ("", ", less Simple CNAPS") for shot in (1, 2)]
    assert list(rows)[4:8] == lines

    monkeypatch.setattr(
        "fewshot_mahalanobis.research.evaluation.report.evaluate_episodes", None
    )  # nothing is computed twice
    found = json.loads(evaluated("--format", "json"))
    for shot, line in ((1, lines[2]), (2, lines[3])):
        results = [result["scores"] for result in found["results"] if result["shot"] == shot]
        assert [list(scores) for scores in results] == [columns] * 2
        gained = next(record for record in found["differences"] if record["shot"] == shot)
        assert list(gained["accuracy"]) == columns[1:]
        for column, cell in zip(columns, rows[line], strict=True):
            if column == columns[0]:
                assert cell == ""
                continue
            means, variances = [], []
            for scores in results:
                assert np.mean(scores[column]["by_episode"]) == pytest.approx(scores[column]["accuracy"][0])
                difference = np.subtract(scores[column]["by_episode"], scores[columns[0]]["by_episode"])
                means.append(difference.mean())
                variances.append(difference.var(ddof=1) / len(difference))
            half_width = 1.96 * np.sqrt(np.sum(variances)) / len(results)
            assert gained["accuracy"][column] == pytest.approx([np.mean(means), half_width, 4])
            shown = [float(number) for number in cell.split(" ± ")]
            rounding = 0.05 + 1e-6  # a tie, of shares of eight queries, goes either way by the last bit
            assert shown == pytest.approx([100 * np.mean(means), 100 * half_width], abs=rounding)
    assert re.search(r"average of 2, less Simple CNAPS, 4-way 1-shot +& ", evaluated("--format", "latex"))


@pytest.mark.parametrize("head", ["mahalanobis", "cosine"])
def test_checkpoints_go_by_their_own_names_where_the_paper_has_none(folder, checkpoints, head):
    """Here it has no name for an adapted network with a head that it was not trained with."""
    table = run(folder, "--checkpoint", checkpoints["euclidean"], "--head", head, "--shot", 1, "--way", 3)
    first, second = folder / "checkpoint", checkpoints["euclidean"]
    title = "" if head == "mahalanobis" else ", cosine"
    columns = [f"{first}, not adapted{title}" if title else f"{first}", f"{second}, adapted{title}"]
    assert [cell.strip() for cell in table.splitlines()[0].split("|")[2:4]] == columns
    assert f"average of 2, less {columns[0]}, 3-way 1-shot" in table


# -------------------------------------------------------------------- pictures are read once


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each picture whose pixels were decoded."""
    pictures, load = list[None](), ImageFile.ImageFile.load

    def counted(image: Any) -> Any:
        pictures.extend([None] if image.tile else [])
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return pictures


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """Sources that a test may change, as bitmaps: they have one size whatever they show."""
    for name in ("omniglot/test", "photos"):
        for file in (folder / name).rglob("*.png"):
            place = tmp_path / "own" / name / file.parent.name / f"{file.stem}.bmp"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.open(file).save(place)
    (tmp_path / "own" / "checkpoint").symlink_to(folder / "checkpoint")
    return tmp_path / "own"


SCORES = ("--shot", 1, "--format", "json")


def test_a_second_evaluation_reads_no_picture(own: Path, tmp_path: Path, decoded: list[None]) -> None:
    expected = run(own, *SCORES, "--no-cache", "-o", tmp_path / "none.json")
    assert not (tmp_path / ".fewshot-mahalanobis").exists()
    assert len(decoded) == 60
    for name, number in (("first", 60), ("second", 0)):
        decoded.clear()
        assert run(own, *SCORES, "-o", tmp_path / f"{name}.json") == expected
        assert len(decoded) == number
    decoded.clear()
    assert run(own, *SCORES, "--cache", tmp_path / ".fewshot-mahalanobis") == expected
    assert decoded == []


def test_without_a_file_of_results_there_is_no_place_to_remember_in(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(own, *SCORES)
    assert not list(tmp_path.rglob(".fewshot-mahalanobis"))


def test_a_changed_picture_is_evaluated_anew(own: Path, tmp_path: Path, decoded: list[None]) -> None:
    """Also those of the same names, sizes and, by a trick, dates."""
    memory = ("--cache", tmp_path / "memory")
    before = run(own, *SCORES, *memory)
    rng = np.random.default_rng(1)
    for file in (own / "photos").rglob("*.bmp"):
        status = file.stat()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size
    decoded.clear()
    after = run(own, *SCORES, *memory)
    assert len(decoded) == 30
    assert after == run(own, *SCORES, "--no-cache") != before


def test_damaged_entries_are_computed_again(own: Path, tmp_path: Path, decoded: list[None]) -> None:
    memory = ("--cache", tmp_path / "memory")
    expected = run(own, *SCORES, *memory)
    with sqlite3.connect(tmp_path / "memory" / "pictures.sqlite") as database:
        database.execute("UPDATE entries SET value = CAST(substr(value, 1, 100) AS BLOB)")
    database.close()
    decoded.clear()
    assert run(own, *SCORES, *memory) == expected
    assert len(decoded) == 60
