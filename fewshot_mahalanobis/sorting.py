"""Sort image files into a folder a class, with a table of what went where, by which it can be undone."""

from __future__ import annotations

import csv
import filecmp
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.files import atomic_replace
from fewshot_mahalanobis.labelling import predict_files

__all__ = ["TABLE", "UNSURE", "SortedFile", "sort_files", "undo_sorting"]

#: The table in the folder of sorted files, and the sub-folder of files that no class is sure of.
TABLE, UNSURE = "sorted.csv", "unsure"


@dataclass(frozen=True)
class SortedFile:
    """One row of the table."""

    path: str  # absolute
    label: str  # the answer, also where the file is in the folder of unsure ones
    probability: str  # of the most probable class
    sorted_as: str  # relative to the folder of the table, with slashes


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
    number. Each file is entered in ``output/sorted.csv`` before it is written, so that a run which was interrupted goes
    on where it stopped, and a later run adds new files only.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted.
    paths : sequence of Path
        Those below ``output`` are left out.
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
        ``skip_errors``); the table is damaged. Nothing is sorted.
    OSError
        A file cannot be written. Those before it are in the table.
    """
    folders = _class_folders([str(label) for label in classifier.classes_.tolist()])
    output = output.absolute()
    table = output / TABLE
    done = {row.path for row in _resume(table)}
    new = [path for path in paths if str(path.absolute()) not in done and output not in path.absolute().parents]
    if not new:
        return [], {}
    predictions, problems = predict_files(classifier, new, probabilities=True, skip_errors=skip_errors)
    output.mkdir(parents=True, exist_ok=True)
    rows = []
    with table.open("a", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SortedFile)])
        if not file.tell():
            writer.writeheader()
        for prediction in predictions:
            label, probability = str(prediction.label), prediction.top(1)[0][1]
            sure = label in folders and probability >= min_probability
            folder = output / (folders[label] if sure else UNSURE)
            folder.mkdir(exist_ok=True)
            source = prediction.path.absolute()
            target = _free_name(folder / source.name)
            row = SortedFile(str(source), label, f"{probability:.4f}", target.relative_to(output).as_posix())
            writer.writerow(asdict(row))
            file.flush()  # before the file is there: what stands in the table is ours
            _put(source, target, link)
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
    kept = []
    rows = _resume(table)
    for row in rows:
        source, target = Path(row.path), output / row.sorted_as
        if target.is_symlink() and target.readlink() == source:
            target.unlink()
        elif os.path.lexists(target):
            if source.is_file() and not target.is_symlink() and filecmp.cmp(source, target, shallow=False):
                target.unlink()
            else:
                kept.append(row)
    for folder in {(output / row.sorted_as).parent for row in rows}:
        _remove_if_empty(folder)
    if kept:
        _write_table(table, kept)
    else:
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
    """Rows of the table; the last one goes, with half a copy, if the run was interrupted there."""
    if not table.is_file():
        return []
    with table.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    lines = text.splitlines(keepends=True)
    whole = not lines or lines[-1].endswith("\n")
    names = [field.name for field in fields(SortedFile)]
    found = list(csv.reader(lines))
    if found and found[0] != names:
        raise ValueError(f"{table} is no table of sorted files: its first line is not {','.join(names)}")
    if any(len(row) != len(names) for row in (found[1:] if whole else found[1:-1])):
        raise ValueError(f"{table} is damaged: a line has not {len(names)} columns")
    rows = [SortedFile(*row) for row in (found[1:] if whole else found[1:-1])]
    if rows and not _finished(rows[-1], table.parent):
        (table.parent / rows[-1].sorted_as).unlink(missing_ok=True)
        rows, whole = rows[:-1], False
    if not whole:
        _write_table(table, rows)
    return rows


def _finished(row: SortedFile, output: Path) -> bool:
    """Whether the last row's file is there. A copy that is the beginning of its original was interrupted."""
    source, target = Path(row.path), output / row.sorted_as
    if not os.path.lexists(target):
        return False
    if target.is_symlink() or not source.is_file() or target.stat().st_size >= source.stat().st_size:
        return True
    return not source.read_bytes().startswith(target.read_bytes())


def _write_table(table: Path, rows: Sequence[SortedFile]) -> None:
    with (
        atomic_replace(table) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.DictWriter(file, [field.name for field in fields(SortedFile)])
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
