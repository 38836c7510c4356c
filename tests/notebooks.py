"""Runs the notebooks of examples/ from top to bottom, each in an empty folder.

python -m tests.notebooks            # all of them, in place: after a change of the package or of a notebook
python -m tests.notebooks NAME...    # those
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in ``folder``; nbclient's error where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    # What changes from run to run or from machine to machine, and says nothing.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def main(names: list[str]) -> None:
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                notebook = execute(path, Path(folder))
            nbformat.write(notebook, path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
