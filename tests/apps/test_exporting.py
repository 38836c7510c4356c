"""An exported folder: its program gives the answers of the classifier, and the check says where it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image, ImageCms
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps import exporting
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.exporting import PROGRAMS, Compared, compare, export_folder
from tests.tiny import QUERY_LABELS, SUPPORT_LABELS, adapting_model, drawn

DOCS = Path(__file__).parents[2] / "docs" / "shipping.md"


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    settings = {"device": "cpu", "precision": "float32", "unknown_label": "none", "false_rejection_rate": 0.12}
    return SimpleCNAPSClassifier(adapting_model(), **settings).fit(drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS)


@pytest.fixture(scope="module")
def exported(classifier: SimpleCNAPSClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("exported")
    export_folder(classifier, folder, [*PROGRAMS])
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of every kind that the program treats in a way of its own."""
    folder, drawings = tmp_path_factory.mktemp("pictures"), [*map(Image.fromarray, drawn(QUERY_LABELS, 1))]
    large = drawings[0].resize((1003, 781), Image.Resampling.BICUBIC)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    turned = Image.Exif()
    turned[0x0112] = 6
    transparent = drawings[1].resize((90, 70)).convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize((90, 70)))
    large.save(folder / "large.jpg", quality=95)  # decoded at a smaller scale
    large.save(folder / "turned.jpg", exif=turned)
    large.convert("CMYK").save(folder / "cmyk.jpg")
    large.convert("L").save(folder / "grey.jpg")
    transparent.save(folder / "transparent.png")
    drawings[2].save(folder / "profile.png", icc_profile=profile)  # of colours that are none of RGB: ignored
    drawings[3].quantize(8).save(folder / "palette.png")
    drawings[4].save(folder / "small.png")
    return sorted(folder.iterdir())


def test_the_program_answers_as_the_classifier(
    classifier: SimpleCNAPSClassifier, exported: Path, pictures: list[Path]
) -> None:
    compared = compare(classifier, exported, pictures)
    assert [each.path for each in compared] == pictures
    assert [each.exported_label for each in compared] == [each.label for each in compared]
    # The square of blocks of pixels may differ by one of 255 from Pillow's.
    assert max(each.probability_difference for each in compared) < 0.02
    exact = [each for each in compared if each.path.name in ("small.png", "palette.png")]
    assert max(each.probability_difference for each in exact) < 1e-4


@pytest.mark.process
def test_the_program_runs_without_this_package(
    classifier: SimpleCNAPSClassifier, exported: Path, pictures: list[Path]
) -> None:
    code = "import runpy, sys; sys.modules |= dict.fromkeys(('torch', 'fewshot_mahalanobis', 'sklearn'))\n"
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(exported / "classify.py"), *map(str, pictures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header == "path,label,probability"
    assert [row.split(",")[:2] for row in rows] == [
        [str(path), str(label)] for path, label in zip(pictures, classifier.predict(pictures), strict=True)
    ]


def test_the_command_exports_and_checks(
    classifier: SimpleCNAPSClassifier, exported: Path, pictures: list[Path], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(SimpleCNAPSClassifier, "load", lambda *arguments, **settings: classifier)
    monkeypatch.setattr(exporting, "export_folder", lambda *arguments: [*exported.iterdir()])
    command = ["export", "model.safetensors", "-o", str(exported), "--check", str(pictures[0].parent)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"{len(pictures)} pictures: {len(pictures)} with the same label" in result.stdout
    result = CliRunner().invoke(app, [*command, "--language", "cpp"])
    assert result.exit_code == 1
    assert "--language python" in result.stderr


@pytest.mark.parametrize(("is_near", "status"), [(True, 0), (False, 1)])
def test_another_label_is_an_error_unless_near_a_threshold(
    is_near: bool, status: int, classifier: SimpleCNAPSClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(drawn(["red"], 0)[0]).save(picture)
    monkeypatch.setattr(SimpleCNAPSClassifier, "load", lambda *arguments, **settings: classifier)
    monkeypatch.setattr(exporting, "export_folder", lambda *arguments: [])
    monkeypatch.setattr(exporting, "compare", lambda *arguments: [Compared(picture, "a", "b", 0.5, 0.1, is_near)])
    result = CliRunner().invoke(app, ["export", "model", "-o", str(tmp_path / "out"), "--check", str(picture)])
    assert result.exit_code == status
    assert f"1 with another ({int(is_near)} near a threshold)" in result.stdout
    assert (f"Near a threshold, where rounding may decide: {picture}" in result.stdout) == is_near


@pytest.mark.parametrize(("language", "name"), [("cpp", "classify.cpp"), ("js", "classify.mjs")])
def test_the_programs_of_the_page_are_those_that_are_exported(language: str, name: str) -> None:
    (shown,) = re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    program = Path(exporting.__file__).parents[1] / "export" / "programs" / name
    assert program.read_text(encoding="utf-8") == shown.replace("pets.onnx", "model.onnx")


def test_a_page_becomes_a_space_whose_description_its_owner_may_write(
    classifier: SimpleCNAPSClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_page(self: SimpleCNAPSClassifier, folder: Path, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "index.html").touch()

    monkeypatch.setattr(SimpleCNAPSClassifier, "load", lambda *arguments, **settings: classifier)
    monkeypatch.setattr(SimpleCNAPSClassifier, "export_page", export_page)
    command, readme = (
        ["page", "model", "-o", str(tmp_path / "page"), "--title", 'Cat: "yes"?'],
        tmp_path / "page/README.md",
    )
    assert CliRunner().invoke(app, command).exit_code == 0
    assert not readme.exists()
    assert CliRunner().invoke(app, [*command, "--space"]).exit_code == 0
    _, header, _ = readme.read_text().split("---\n")
    assert yaml.safe_load(header) == {"title": 'Cat: "yes"?', "sdk": "static", "app_file": "index.html"}
    readme.write_text("mine")
    assert CliRunner().invoke(app, [*command, "--space"]).exit_code == 0
    assert readme.read_text() == "mine"
