"""The recipes of CONTRIBUTING: the files of examples/extending pass tests, lint and types where the page puts them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.docs, pytest.mark.process]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
RECIPES = ROOT / "examples" / "extending"
#: File of examples/extending -> the folder that it goes to.
PLACES = {
    "chebyshev.py": "fewshot_mahalanobis/heads",
    "test_chebyshev.py": "tests/heads",
    "two_layers.py": "own",
    "test_two_layers.py": "tests",
    "test_pretrained_cosine.py": "tests/support_set",
    "digits_source.py": "own",
    "test_digits_source.py": "tests",
    "ort.py": "fewshot_mahalanobis/export",
    "test_ort.py": "tests/export",
}
#: Files of the package in which a line is added.
CHANGED = ("fewshot_mahalanobis/heads/__init__.py", "fewshot_mahalanobis/support_set/unknown.py")


def insert(file: Path, before: str, line: str) -> None:
    """Write ``line`` in front of the first text that matches ``before``."""
    text = file.read_text(encoding="utf-8")
    found = re.search(before, text)
    assert found is not None, f"{file}: {before}"
    file.write_text(text[: found.start()] + line + text[found.start() :], encoding="utf-8")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with every recipe in its place."""
    root = tmp_path_factory.mktemp("extended")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fewshot_mahalanobis", root / "fewshot_mahalanobis", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, folder in PLACES.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(RECIPES / name, root / folder)
    heads, unknown = (root / name for name in CHANGED)
    insert(
        heads, "from fewshot_mahalanobis.heads.head", "from fewshot_mahalanobis.heads.chebyshev import ChebyshevHead\n"
    )
    insert(heads, r"(?<=\W)LinearHead\)\n\}", "ChebyshevHead, ")
    (term,) = re.findall(r"`(Similarity\(.*\),)`", PAGE.read_text(encoding="utf-8"))
    insert(unknown, r"(?<=\nSIMILARITIES = \()\n", f"\n    {term}")
    run(root, "ruff", "format", *CHANGED)
    return root


def run(extended: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(extended), str(extended / "own")])}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_the_files_word_for_word_and_their_places() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert {file.name for file in RECIPES.glob("*.py")} == set(PLACES)
    quoted = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    modules = [name for name in PLACES if not name.startswith("test_")]
    assert quoted == [(RECIPES / name).read_text(encoding="utf-8") for name in modules]
    for name in modules:
        place = "your own project" if PLACES[name] == "own" else f"`{PLACES[name]}/`"
        assert f"| `{name}` | {place} |" in page


def test_the_recipes_pass_their_tests_where_the_page_puts_them(extended: Path) -> None:
    tests = [f"{folder}/{name}" for name, folder in PLACES.items() if name.startswith("test_")]
    run(extended, "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *tests)


def test_the_recipes_pass_lint_and_types_where_the_page_puts_them(extended: Path, tmp_path: Path) -> None:
    placed = [f"{folder}/{name}" for name, folder in PLACES.items()]
    run(extended, "ruff", "check", *placed, *CHANGED)
    run(extended, "ruff", "format", "--check", *placed)
    run(extended, "mypy", "--cache-dir", str(tmp_path), *placed, *CHANGED)
