"""The command ``evaluate``, from folders to tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.cli import app


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
    assert [record["source"] for record in found["records"]] == ["omniglot/test", "photos"]
    assert [list(record["accuracy"]) for record in found["records"]] == [["not adapted, cosine", "not adapted"]] * 2
    assert [average["source"] for average in found["averages"]] == [
        "in-domain average of 1", "out-of-domain average of 1", "average of 2",
    ]  # fmt: skip
    assert found["records"] == json.loads((tmp_path / "r.json").read_text())
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        "accuracy_by_shot.png",
        "accuracy_by_way.png",
    ]

    monkeypatch.setattr("fewshot_mahalanobis.evaluation.report.evaluate_episodes", None)
    table = run(folder, *options, "--format", "latex", "--head", "mahalanobis")
    assert "in-domain average of 1 & " in table
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
    ],
)
def test_what_cannot_be_evaluated_is_said_in_one_line(folder, options, message):
    said = run(folder, *options, status=1)
    assert said.splitlines()[-1].startswith("error: ")
    assert message in said
