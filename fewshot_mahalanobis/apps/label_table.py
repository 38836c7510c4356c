"""The table of labels that a user gives to files or regions of them: a CSV file that grows with every answer."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import SoftFileLock, Timeout

from fewshot_mahalanobis.checkpoints.files import atomic_replace, check_writable
from fewshot_mahalanobis.images.boxes import BOX_COLUMNS, read_boxes
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.images.tables import labelled_rows, located, table_columns, table_rows

__all__ = ["LabelTable", "Place", "Row", "has_a_name_in_tables", "place_of", "whole_path"]

#: Seconds that another program may take to write the table.
_PATIENCE = 10
#: What a row is about: a file, whichever path leads to it, and the box if it is about a region.
Place = tuple[Any, ...]


class Row(NamedTuple):
    """A row of the table, without its box."""

    path: str  # the whole path, as it was given
    label: str


class LabelTable:
    """Labels of files, or of regions of them, in a CSV file that ``fit`` reads.

    Parameters
    ----------
    path : Path
        With the columns path and label, and between them x, y, width and height for regions.
    regions : bool
        Whether its rows are about regions.
    """

    def __init__(self, path: Path, *, regions: bool) -> None:
        self.path = path
        self.columns = ["path", *(BOX_COLUMNS if regions else ()), "label"]

    def read(self) -> dict[Place, Row]:
        """The rows that this program, or a person after it, has written; none if there is no table.

        ValueError if it is another kind of table.
        """
        if not self.path.exists():
            return {}
        if [name for name in table_columns(self.path, self.columns) if name] != self.columns:
            kind = " of boxes" if len(self.columns) > 2 else ""
            raise ValueError(
                f"{self.path} is no table that a review{kind} wrote, whose first line is {','.join(self.columns)}: "
                "name another file with -o"
            )
        if not [*table_rows(self.path, self.columns)]:
            return {}
        if len(self.columns) > 2:
            boxes = read_boxes(self.path)
            pairs = zip(boxes.regions, boxes.labels or [], strict=True)
            return {place_of(region): Row(whole_path(region), label) for region, label in pairs}
        found = [(located(self.path.parent, path), label) for path, label in labelled_rows(self.path, "path", "label")]
        return {place_of(path): Row(whole_path(path), label) for path, label in found}

    def write(self, rows: Mapping[Place, Row]) -> None:
        """Replace the file, whole or not at all."""
        text = self.text(rows, Path(whole_path(self.path.parent)))
        with atomic_replace(self.path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")

    def text(self, rows: Mapping[Place, Row], folder: Path | None = None) -> str:
        """Rows as CSV, with whole paths, or with relative ones for files below ``folder``."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows((_relative(path, folder), *box, label) for (_, *box), (path, label) in rows.items())
        return file.getvalue()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Read and write while no other program of this kind does; OSError if the file cannot be written."""
        check_writable(self.path)
        target = Path(os.path.realpath(self.path))
        lock = target.with_name(f".{target.name}.lock")
        try:
            with SoftFileLock(lock, timeout=_PATIENCE):
                yield
        except Timeout as error:
            raise TimeoutError(f"another program is writing {self.path}. If none is, delete {lock}") from error


def place_of(path: Path | Region, pixels: tuple[int, int, int, int] | None = None) -> Place:
    """The key of a picture; ``pixels`` is the box in pixels of a region whose own is in shares."""
    if isinstance(path, Region):
        return (os.path.realpath(path.image), *(pixels if path.normalized and pixels else path.box))
    return (os.path.realpath(path),)


def whole_path(path: Path | Region) -> str:
    """A file's absolute path without ".."; links stay."""
    file = path.image if isinstance(path, Region) else path
    return os.path.abspath(file)  # noqa: PTH100 ("a/../b.jpg" is "b.jpg")


def has_a_name_in_tables(path: Path | Region) -> bool:
    """Whether a table can have the name of a file: it is valid text, and readers keep all of it."""
    name = str(path.image if isinstance(path, Region) else path)
    return name.encode("utf-8", "replace").decode() == name and name == name.rstrip()


def _relative(path: str, folder: Path | None) -> str:
    """A path relative to a folder that it is in, else the path itself."""
    if folder is None or not Path(path).is_relative_to(folder):
        return path
    inside = str(Path(path).relative_to(folder))
    return inside if inside == inside.lstrip() else path  # readers drop white space around a cell
