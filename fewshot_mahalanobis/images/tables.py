"""Tables of pictures in CSV: their rows, where the paths in them lead, and which rows give a picture its label."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path, PureWindowsPath

from fewshot_mahalanobis.support_set.answers import READ_COLUMNS, LabelledRows, composed, labels_of_answers

__all__ = [
    "check_some_exist",
    "checked_cells",
    "checked_pairs",
    "groups_of_rows",
    "is_table",
    "labelled_rows",
    "located",
    "rows_of_labels",
    "table_columns",
    "table_rows",
]


def rows_of_labels(file: Path, columns: Sequence[str], rows: str = "all") -> LabelledRows:
    """Read the rows of a table that give an image its label, as :func:`labels_of_answers` chooses them."""
    names = table_columns(file, (*columns, *READ_COLUMNS))
    present = {name for name in READ_COLUMNS if name in names and not (name == "probability" and names.count(name) > 1)}
    found = [*table_rows(file, [*dict.fromkeys((*columns, *sorted(present)))])]
    return labels_of_answers(file, found, present, rows)


def located(folder: Path, path: str) -> Path:
    """The file that a path in a table or a file of boxes means, from ``folder`` on if it is relative.

    A path with the backslashes of Windows is one with "/" if that exists and the path as it stands does not.
    """
    place = folder / path
    if "\\" in path and not os.path.lexists(place):
        converted = folder / path.replace("\\", "/")
        return converted if os.path.lexists(converted) else place
    return place


def groups_of_rows(file: Path, rows: Iterable[tuple[int, dict[str, str]]], column: str) -> list[str]:
    """The group of each row; ValueError names a line that lacks it."""
    groups = []
    for line, cells in rows:
        if not cells[column]:
            raise ValueError(f"line {line} of {file} names no {column}: give each picture the group that it is of")
        groups.append(cells[column])
    return groups


def check_some_exist(file: Path, paths: Sequence[Path]) -> None:
    """ValueError if none of the images that a file lists is there."""
    paths = [*dict.fromkeys(paths)]
    if not any(map(os.path.exists, paths)):
        # Where "C:..." is no full path, it is taken to be below the folder.
        foreign = os.name != "nt" and any(PureWindowsPath(part).drive for part in paths[0].parts)
        hint = ". Full paths of Windows lead nowhere here: write them from that folder on" if foreign else ""
        raise ValueError(
            f"none of the {len(paths)} files that {file} lists is there; the first would be {paths[0]}. Relative paths "
            "start at its folder: put it back where it was, write full paths, or name their folder (--image-folder)"
            f"{hint}"
        )


def labelled_rows(file: Path, path_column: str, label_column: str) -> list[tuple[str, str]]:
    """Path and label of each row of a CSV file, as :func:`table_rows` reads it.

    ValueError as there, and if a path or label is missing or has several lines, or one path has two labels.
    """
    return checked_pairs(file, table_rows(file, (path_column, label_column)), path_column, label_column)


def checked_pairs(
    file: Path, rows: Iterable[tuple[int, dict[str, str]]], path_column: str, label_column: str
) -> list[tuple[str, str]]:
    """Path and label of each row, as :func:`labelled_rows`."""
    found = list[tuple[str, str]]()
    known = dict[str, tuple[int, str]]()  # path -> its first line and its label
    for line, cells in rows:
        path, label = checked_cells(file, line, cells[path_column], cells[label_column])
        place = os.path.realpath(located(file.parent, path))
        other_line, other = known.setdefault(place, (line, label))
        if other != label:
            raise ValueError(f"lines {other_line} and {line} of {file} give {path} two labels, {other!r} and {label!r}")
        found.append((path, label))
    if not found:
        raise ValueError(f"{file} lists no image")
    return found


def checked_cells(file: Path, line: int, path: str, label: str | None, folder: Path | None = None) -> tuple[str, str]:
    """Path and label of a row, the label in its composed form; "" for None, where the table has no labels."""
    if not path or label == "":
        raise ValueError(f"line {line} of {file} lacks a path or a label")
    label = label or ""
    place = located(folder or file.parent, path)
    if _has_lines(label) or (_has_lines(path) and not os.path.exists(place)):  # noqa: PTH110 (False if too long)
        raise ValueError(f'line {line} of {file} has a path or label of several lines: is a quote (") not closed?')
    return path, composed(label)


def is_table(path: Path) -> bool:
    """Whether a path has the name of a table and is no folder."""
    return path.suffix.lower() in (".csv", ".tsv", ".txt") and not path.is_dir()


def table_columns(file: Path, known: Collection[str]) -> list[str]:
    """Names of the columns of a CSV file, separated so that it has the most of those that are ``known``."""
    text = _text(file)
    return next(_rows(file, text, _separator(text, known)), (1, []))[1]


def table_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line and the cells by column of each row of a CSV file in UTF-8, separated by comma, semicolon or tab.

    White space around a cell is dropped. Empty rows and columns of other names are ignored.

    Raises
    ------
    FileNotFoundError
        There is no file.
    ValueError
        The table lacks a column, or may not mean what it would be read as: a row has more cells than the first line has
        names (a comma without quotes), a quote is not closed, a column is there twice. The message names the line.
    """
    text = _text(file)
    separator = _separator(text, columns)
    rows = _rows(file, text, separator)
    first, names = next(rows, (1, []))
    for column in columns:
        if column not in names:
            listed = " and ".join((", ".join(columns[:-1]), columns[-1]))
            raise ValueError(f"{file} has no column {column!r}: its first line must name {listed}")
        if names.count(column) > 1:
            raise ValueError(f"line {first} of {file} names two columns {column!r}: rename or remove one of them")
    width = max(number for number, name in enumerate(names, start=1) if name)
    for line, cells in rows:
        if any(cells[width:]):
            raise ValueError(
                f"line {line} of {file} has {len(cells)} cells for {width} columns: put a path or label that contains "
                f'a {_SEPARATORS[separator]} in quotes ("..."), or name the other columns in the first line'
            )
        cells += [""] * (len(names) - len(cells))
        yield line, {column: cells[names.index(column)] for column in columns}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # -sig: spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f'{file} is not in UTF-8: save it as "CSV UTF-8"') from error


#: What may separate the cells of a table.
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}


def _separator(text: str, columns: Collection[str]) -> str:
    """The separator by which the first line has the columns; other names in it may contain any character."""
    first = re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0][:100_000]  # within csv's limit of a cell

    def known(separator: str) -> int:
        names = next(csv.reader([first], delimiter=separator, skipinitialspace=True), [])
        return sum(name.strip() in columns for name in names)

    return max(_SEPARATORS, key=known)


def _rows(file: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the cells of each row that is not empty."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    line = 1
    try:
        for cells in reader:
            if any(stripped := [cell.strip() for cell in cells]):
                yield line, stripped
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f'line {line} of {file}: a quote (") is not closed, or text follows the closing one'
        ) from error


def _has_lines(text: str) -> bool:
    return "\n" in text or "\r" in text
