"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
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
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)
