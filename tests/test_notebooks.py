"""The notebooks of examples/: what is committed is a whole run, and they run."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import EXAMPLES, execute, outputs

pytestmark = [pytest.mark.docs, pytest.mark.process]

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
#: The start of a path on the machine that it was run on.
_MACHINE_PATHS = re.compile(r"(/(home|root|tmp|work|Users|usr|opt|var)/)|([A-Z]:\\\\)|site-packages")


def texts(notebook: nbformat.NotebookNode) -> str:
    """Everything that the outputs say in words."""
    said = []
    for output in outputs(notebook):
        said += [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if not k.startswith("image/"))]
    return "\n".join(map(str, said))


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """Kinds of a cell's outputs, one after the other; what is printed arrives in any number of pieces."""
    return [kind for kind, _ in groupby(output.output_type for output in cell.get("outputs", []))]


def test_there_are_the_five_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "any_features",
        "meta_training",
        "own_images",
        "paper_to_code",
        "uncertainty",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_one_whole_run_small_and_without_the_machine_in_it(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [
        output for output in outputs(notebook) if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert not _MACHINE_PATHS.search(texts(notebook))
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_in_an_empty_folder(path: Path, tmp_path: Path) -> None:
    """Without an error or a warning, and with an output of the same kind wherever the committed run has one."""
    run = execute(path, tmp_path)
    assert not [output.text for output in outputs(run) if output.get("name") == "stderr"]
    committed = nbformat.read(path, as_version=4)
    for ours, theirs in zip(run.cells, committed.cells, strict=True):
        assert kinds(ours) == kinds(theirs), theirs.source


def test_the_eight_lines_of_the_first_notebook_are_eight() -> None:
    notebook = nbformat.read(EXAMPLES / "own_images.ipynb", as_version=4)
    (cell,) = [cell for cell in notebook.cells if "labels.csv" in cell.source and cell.cell_type == "code"]
    assert len([line for line in cell.source.splitlines() if line.strip()]) <= 8
