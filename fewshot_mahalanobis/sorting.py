"""Sort image files into a folder a class, with a table of what went where, by which it can be undone."""

from __future__ import annotations

import csv
import filecmp
import io
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.files import atomic_replace
from fewshot_mahalanobis.labelling import predict_files

__all__ = ["TABLE", "UNSURE", "SortedFile", "sort_files", "undo_sorting"]

#: The table in the folder of sorted files, and the sub-folder of files that no class is sure of.
TABLE, UNSURE = "sorted.csv", "unsure"
_END = "\r\n"  # of a line of the table


@dataclass(frozen=True)
class SortedFile:
    """One row of the table."""

    path: str  # absolute
    label: str  # the answer, also where the file is in the folder of unsure ones
    probability: str  # of the most probable class
    sorted_as: str  # relative to the folder of the table, with slashes


_COLUMNS = [field.name for field in fields(SortedFile)]


def sort_files(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Path],
    output: Path,
    *,
    link: bool = False,
    min_probability: float = 0.5,
    skip_errors: bool = False,
) -> tuple[list[SortedFile], dict[Path, str]]:
    """Copy or link image files to ``output/<class>/``; the files themselves stay where they are.

    A file of a class in doubt goes to ``output/unsure/``. No file is overwritten: of equal names the later gets a
    number. Each file is entered in ``output/sorted.csv`` before it is written, and its line ended after that, so that a
    run which was interrupted goes on where it stopped. A later run adds new files only, wherever you moved the others.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted.
    paths : sequence of Path
        Those below ``output`` are left out; one that is given twice is sorted once.
    output : Path
        Made if it does not exist.
    link : bool
        Make symbolic links instead of copies.
    min_probability : float
        A file is unsure if no class has this probability, or if the answer is ``unknown_label``.
    skip_errors : bool
        Leave out images that cannot be read.

    Returns
    -------
    rows : list of SortedFile
        What this run has sorted.
    problems : dict of Path to str
        What was left out, and why.

    Raises
    ------
    ValueError
        A class is called "unsure", or two classes would share a folder; images cannot be read (without
        ``skip_errors``); the table is damaged; all images are in ``output`` itself. Nothing is sorted.
    OSError
        A file cannot be written. Those before it are in the table.
    """
    folders = _class_folders([str(label) for label in classifier.classes_.tolist()])
    output = output.resolve()
    table = output / TABLE
    done = {row.path for row in _resume(table)}
    given = {_full(path): path for path in paths}
    new = [path for source, path in given.items() if str(source) not in done and output not in source.parents]
    if paths and not new and not table.is_file():
        raise ValueError(f"all images are in {output} itself: sort into another folder, such as {output / 'sorted'}")
    if not new:
        return [], {}
    predictions, problems = predict_files(classifier, new, probabilities=True, skip_errors=skip_errors)
    output.mkdir(parents=True, exist_ok=True)
    rows = []
    with table.open("a", newline="", encoding="utf-8", errors="surrogateescape") as file:
        if not file.tell():
            file.write(_csv([_COLUMNS]))
        for prediction in predictions:
            label, probability = str(prediction.label), prediction.top(1)[0][1]
            sure = label in folders and probability >= min_probability
            folder = output / (folders[label] if sure else UNSURE)
            folder.mkdir(exist_ok=True)
            source = _full(prediction.path)
            target = _free_name(folder / source.name)
            row = SortedFile(str(source), label, f"{probability:.4f}", target.relative_to(output).as_posix())
            file.write(_csv([astuple(row)]).removesuffix(_END))
            file.flush()  # before the file is there: what stands in the table is ours
            _put(source, target, link)
            file.write(_END)  # tells a file that the user moved later from one that was never finished
            rows.append(row)
    return rows, problems


def undo_sorting(output: Path) -> list[Path]:
    """Remove what :func:`sort_files` put into a folder: links, and copies whose original is still there unchanged.

    Class folders that are empty then, the table and the folder itself are removed too.

    Parameters
    ----------
    output : Path
        The folder, or the table in it.

    Returns
    -------
    list of Path
        Files that were kept and stay in the table: they or their originals were changed, moved or deleted.

    Raises
    ------
    FileNotFoundError
        There is no table.
    ValueError
        The table is damaged.
    """
    table = output if output.suffix == ".csv" else output / TABLE
    if not table.is_file():
        raise FileNotFoundError(f"no table {str(table)!r}: nothing was sorted into this folder")
    output = table.absolute().parent
    rows, removed = _resume(table), set()
    try:
        for row in rows:
            if _is_ours(output / row.sorted_as, Path(row.path)):
                (output / row.sorted_as).unlink()
                removed.add(row)
    finally:  # interrupted or not, the table has what was not removed
        kept = [row for row in rows if row not in removed]
        _write_table(table, kept)
    for folder in {(output / row.sorted_as).parent for row in rows}:
        _remove_if_empty(folder)
    if not kept:
        table.unlink()
        _remove_if_empty(output)
    return [output / row.sorted_as for row in kept]


def _class_folders(labels: Sequence[str]) -> dict[str, str]:
    """Class -> name of its folder, which every operating system takes."""
    folders = {label: re.sub(r'[/\\:*?"<>|\x00-\x1f]|^\.|[. ]$', "_", label) or "_" for label in labels}
    taken = {UNSURE: "the folder of unsure files"}
    for label, folder in folders.items():
        other = taken.setdefault(folder.lower(), f"class {label!r}")
        if other != f"class {label!r}":
            raise ValueError(f"class {label!r} and {other} would share the folder {folder!r}: rename the class")
    return folders


def _full(path: Path) -> Path:
    """A file's one absolute path, without "..", whichever way its folder was named; a link stays the link."""
    return path.parent.resolve() / path.name


def _free_name(path: Path) -> Path:
    """The path, or the first of "name-2.jpg", "name-3.jpg"... that nothing has."""
    target, number = path, 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return target


def _put(source: Path, target: Path, link: bool) -> None:
    """Copy or link a file to a name that nothing has; half a copy does not stay."""
    if link:
        target.symlink_to(source)
        return
    with source.open("rb") as original, target.open("xb") as copy:  # x: fails if somebody was faster
        try:
            shutil.copyfileobj(original, copy)
        except BaseException:
            target.unlink()
            raise
    shutil.copystat(source, target)


def _resume(table: Path) -> list[SortedFile]:
    """Rows of the table; if a run was interrupted, without the file that it did not finish, whose half copy goes."""
    if not table.is_file():
        return []
    with table.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    found = list(csv.reader(io.StringIO(text, newline="")))
    if found and found[0] != _COLUMNS:
        raise ValueError(f"{table} is no table of sorted files: its first line is not {','.join(_COLUMNS)}")
    lines = found[1:]
    last = lines.pop() if lines and not text.endswith("\n") else []
    if any(len(line) != len(_COLUMNS) for line in lines):
        raise ValueError(f"{table} is damaged: a line has not {len(_COLUMNS)} columns")
    rows = [SortedFile(*line) for line in lines]
    if not text.endswith("\n"):
        if len(last) == len(_COLUMNS) and _finished(SortedFile(*last), table.parent):
            rows.append(SortedFile(*last))
        _write_table(table, rows)
    return rows


def _finished(row: SortedFile, output: Path) -> bool:
    """Whether the file of the line without an end is there. A copy that is the beginning of its original goes."""
    source, target = Path(row.path), output / row.sorted_as
    if _is_ours(target, source):
        return True
    if target.is_file() and source.is_file() and source.read_bytes().startswith(target.read_bytes()):
        target.unlink()
    return False


def _is_ours(target: Path, source: Path) -> bool:
    """Whether a sorted file is what was put there: a link to its original, or a copy of it as it is now."""
    if target.is_symlink():
        return target.readlink() == source
    return target.is_file() and source.is_file() and filecmp.cmp(source, target, shallow=False)


def _write_table(table: Path, rows: Sequence[SortedFile]) -> None:
    with (
        atomic_replace(table) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        file.write(_csv([_COLUMNS, *map(astuple, rows)]))


def _csv(rows: Iterable[Iterable[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=_END).writerows(rows)
    return text.getvalue()


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
