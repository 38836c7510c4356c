import csv
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.cli import app


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.stderr if status else result.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_checkpoint(SimpleCNAPS(image_size=32), folder, dtype=torch.float16)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, colour in (("red", (220, 30, 30)), ("blue", (30, 30, 220)), ("green", (30, 200, 30))):
        (root / name).mkdir()
        for i in range(3):
            pixels = np.clip(np.array(colour) + rng.normal(0, 25, (40, 30, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def test_every_command_has_help():
    listed = run("--help")
    for command in ("demo", "fit", "predict", "pretrain", "meta-train", "evaluate", "checkpoints"):
        assert command in listed
        assert "Usage" in run(command, "--help")


def test_fit_then_predict_labels_a_folder(checkpoint, photos, tmp_path):
    model = tmp_path / "model.safetensors"
    said = run("fit", photos, "-o", model, "--checkpoint", checkpoint, "--device", "cpu")
    assert "3 classes (blue 3, green 3, red 3)" in said
    rows = list(
        csv.DictReader(io.StringIO(run("predict", model, photos / "red", photos / "blue" / "1.png", "--proba")))
    )
    assert [Path(row["path"]).parent.name for row in rows] == ["red", "red", "red", "blue"]
    for row in rows:
        probabilities = {name: float(row[name]) for name in ("blue", "green", "red")}
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert row["label"] == max(probabilities, key=probabilities.get)
    assert [row["label"] for row in rows] == ["red", "red", "red", "blue"]


def test_what_the_user_gave_wrongly_is_one_line_and_status_1(checkpoint, photos, tmp_path):
    said = run("fit", tmp_path / "nowhere", "-o", tmp_path / "m", status=1)
    assert said.startswith("error: no folder")
    (tmp_path / "broken.safetensors").write_text("hello")
    said = run("predict", tmp_path / "broken.safetensors", photos, status=1)
    assert said.startswith("error: ")
    assert "broken.safetensors" in said
    said = run("evaluate", photos, "--checkpoint", tmp_path / "none", status=1)
    assert "none" in said


def test_checkpoints_lists_the_table():
    listed = run("checkpoints")
    assert "default" in listed
    assert "simple-cnaps-meta-dataset" in listed
    assert "MIT" in listed


def test_evaluate_prints_a_table_with_intervals(checkpoint, photos, tmp_path):
    settings = ("--checkpoint", checkpoint, "--way", 3, "--shot", 1, "--queries", 1, "--episodes", 3, "--device", "cpu")
    table = run("evaluate", photos, *settings, "-o", tmp_path / "r.json")
    assert f"| {photos.name}, 3-way 1-shot" in table
    assert "±" in table
    assert (tmp_path / "r.json").exists()
    assert run("evaluate", photos, *settings, "-o", tmp_path / "r.json").splitlines()[-3:] == table.splitlines()[-3:]
