"""The programs of the page "How to ship it" give the labels of the classifier."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import markers
from benchmarks.shipping import TITLES
from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.export.web_page import RUNTIME_VERSION
from tests.tiny import SUPPORT_LABELS, adapting_model, drawn

pytestmark = [pytest.mark.docs, pytest.mark.process]

PAGE = Path(__file__).parents[1] / "docs" / "shipping.md"
COLOURS = ["red", "green", "blue"]


def program(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of a classifier, and pictures in PPM, which have that many columns more than rows."""
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("shipped")
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", precision="float32")
    classifier.fit(drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS).export_onnx(folder / "pets.onnx", pixels=True)
    pictures = drawn(COLOURS, 3)[:, :17]
    assert classifier.predict(pictures).tolist() == COLOURS
    for name, picture in zip(COLOURS, pictures, strict=True):
        (folder / f"{name}.ppm").write_bytes(b"P6\n24 17\n255\n" + picture.tobytes())
    (folder / "labels.json").write_text(json.dumps(classifier.classes_.tolist()))
    return folder


def labels_by(command: list[str], folder: Path) -> list[str]:
    labels = json.loads((folder / "labels.json").read_text())
    answers = []
    for name in COLOURS:
        done = subprocess.run([*command, f"{name}.ppm"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(labels[int(done.stdout.strip().removesuffix("n"))])
    return answers


def options_for_onnx_runtime(folder: Path) -> list[str] | None:
    """What a compiler is told of ONNX Runtime: of the variable of the page, else of the system; None without both.

    Where the variable's folder has headers alone, the library is the one inside the Python package.
    """
    runtime = os.environ.get("ONNXRUNTIME")
    if runtime is None:
        if shutil.which("pkg-config") is None:
            return None
        known = ["pkg-config", "--cflags", "--libs", "libonnxruntime"]
        asked = subprocess.run(known, capture_output=True, text=True, check=False)
        return None if asked.returncode else asked.stdout.split()
    libraries = Path(runtime, "lib")
    if not libraries.exists():
        onnxruntime, libraries = pytest.importorskip("onnxruntime"), folder / "lib"
        libraries.mkdir()
        (library,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
        for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
            (libraries / name).symlink_to(library)
    return ["-I", f"{runtime}/include", "-L", str(libraries), f"-Wl,-rpath,{libraries}", "-lonnxruntime"]


def test_the_program_in_cpp_labels_pictures(folder: Path) -> None:
    compiler, options = shutil.which("g++"), options_for_onnx_runtime(folder)
    if compiler is None or options is None:
        pytest.skip("there is no g++, or no ONNX Runtime: pkg-config knows none, and ONNXRUNTIME names no folder of it")
    (folder / "classify.cpp").write_text(program("cpp"))
    command = [compiler, "-std=c++17", "classify.cpp", *options, "-o", "classify"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert labels_by(["./classify"], folder) == COLOURS


def test_the_program_in_javascript_labels_pictures(folder: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node or no npm on PATH: install Node.js")
    command = ["npm", "install", "--no-audit", "--no-fund", f"onnxruntime-web@{RUNTIME_VERSION}"]
    (folder / "package.json").write_text("{}")
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"npm has no onnxruntime-web@{RUNTIME_VERSION} here: {installed.stderr.strip()[-200:]}")
    (folder / "classify.mjs").write_text(program("js"))
    assert labels_by(["node", "classify.mjs"], folder) == COLOURS


def test_the_table_of_the_page_is_that_of_the_record() -> None:
    begin, end = markers("shipping")
    record = (PAGE.parents[1] / "benchmarks" / "results" / "speed.md").read_text().split(begin)[1].split(end)[0]
    found = [row for row in _rows(PAGE.read_text()) if row[0] in TITLES.values()]
    assert [row for row in _rows(record) if row[0] in TITLES.values()] == found
    assert len(found) == len(TITLES)


def _rows(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
