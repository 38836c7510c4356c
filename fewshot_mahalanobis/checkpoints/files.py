"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_replace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file or folder under a temporary name, then rename it to ``path``.

    Readers, and a process killed at any moment, see the old contents or the new ones. Two writers do not disturb each
    other: the last one wins.

    Parameters
    ----------
    path : path
        In an existing folder. A folder can only take the place of an empty one.

    Yields
    ------
    Path
        What to write instead of ``path``: in the same file system, with the same name. Nothing stands there yet. If the
        block raises, it is deleted and ``path`` stays as it was.

    Raises
    ------
    OSError
        The folder of ``path`` does not exist or cannot be written to.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    with tempfile.TemporaryDirectory(prefix=_prefix(path), dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)


def remove_leftovers(path: Path) -> None:
    """Delete what writers of ``path`` that were killed have left; the caller holds a lock against living ones."""
    for folder in path.parent.glob(f"{glob.escape(_prefix(path))}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(path: Path) -> str:
    return f".saving-{path.name[:60]}-"  # names of files have a largest length
