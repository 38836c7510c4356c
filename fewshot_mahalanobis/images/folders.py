"""Folders and tables of pictures: which files are images, which class each belongs to, and what was left out."""

from __future__ import annotations

import csv
import io
import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path, PurePath
from typing import NamedTuple

from fewshot_mahalanobis.images.formats import REMEDIES, image_suffixes, starts_as_image
from fewshot_mahalanobis.images.region import Region

__all__ = [
    "UNSURE",
    "ClassImages",
    "FolderImages",
    "LabelledImages",
    "find_class_images",
    "find_images",
    "is_image_name",
    "load_folder",
    "read_labels",
]

#: The folder of images whose class `sort` is in doubt of; it is no class.
UNSURE = "unsure"
#: Columns of a table that `predict` wrote, after path and label: for the user's mark, empty; the label as predicted;
#: its probability, empty where it is no class; a mark, if asked for, where that is low or the image of no class.
ANSWER_COLUMNS = ("checked", "predicted", "probability", "doubtful")
#: Files that macOS and Windows leave behind, in lower case.
_JUNK_FILES = {".ds_store", "icon\r", "thumbs.db", "ehthumbs.db", "desktop.ini"}
#: Bins, thumbnails, snapshots and the like of operating systems and network drives, in lower case. Folders whose names
#: begin with a dot are left out too: of version control, caches, bins of Linux, thumbnails of QNAP...
_SYSTEM_FOLDERS = {
    *("$recycle.bin", "recycler", "system volume information", "$winreagent", "msocache"),  # Windows
    *(f"found.{number:03}" for number in range(10)),  # what chkdsk finds
    *("__macosx", "temporary items", "network trash folder", "thevolumesettingsfolder"),  # macOS
    *("lost+found", "lost.dir"),  # Linux, Android
    *("@eadir", "@tmp", "#recycle", "#snapshot", "@sharebin", "@database"),  # Synology
    *("@recycle", "@recently-snapshot", "network recycle bin", "network recycle bin 1", "@__thumb"),  # QNAP
    *("~snapshot", "trashbox"),  # NetApp, Buffalo
    *("__pycache__", "lightroom previews.lrdata"),
}
#: Names of the parts of a data set; the group is the kind of part.
_SPLIT = re.compile(
    r"(?:[a-z]+[ _-])?(train|trainval|val|dev|test|eval|holdout|support|query|gallery)(?:ing|id|idation|uation)?"
    r"(?:[ _-]?(?:set|data|images|\d{4}))?|(?:fold|split)[ _-]?(\d+)"
)


@dataclass(frozen=True)
class FolderImages:
    """The image files of a folder.

    Attributes
    ----------
    paths : list of Path
        In the natural order of their names, 2 before 10.
    ignored : Counter of str
        Other files by kind: "HEIC file", "MP4 file", "broken link"...; and folders that hold no pictures of the user's
        by name: ".git folder", "@eaDir folder". Single files of the operating system, such as .DS_Store, are not
        counted.
    """

    paths: list[Path]
    ignored: Counter[str] = field(default_factory=Counter)

    def note(self) -> str:
        """One sentence about what was left out; empty if that is nothing."""
        return f"Left out: {_listed(self.ignored)}." if self.ignored else ""


@dataclass(frozen=True)
class ClassImages(FolderImages):
    """The image files of a folder with one sub-folder a class.

    Attributes
    ----------
    labels : list of str
        The class of each of ``paths``: the name of its sub-folder.
    empty : list of str
        Sub-folders without any image.
    unsure : int
        Images in the sub-folder "unsure", which is no class; they are left out.
    """

    labels: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    unsure: int = 0

    def note(self) -> str:
        """Sentences about files that were left out and class folders without images; empty if there are none."""
        names = ", ".join(map(repr, self.empty))
        empty = f"No image in class folder{'s' * (len(self.empty) > 1)} {names}." if self.empty else ""
        images = _counted("image", self.unsure)
        unsure = f"The folder {UNSURE!r} is no class: {images} left out." if self.unsure else ""
        return " ".join(filter(None, (super().note(), empty, unsure)))


class LabelledImages(NamedTuple):
    """Images and their labels.

    Parameters
    ----------
    images : list of Path or Region
    labels : list of str
    groups : list of str, optional
        What each image belongs to, where that was asked for.
    note : str
        Sentences about what was left out; empty if that is nothing.
    """

    images: list[Path | Region]
    labels: list[str]
    groups: list[str] | None = None
    note: str = ""

    def where(self, wanted: Sequence[bool]) -> LabelledImages:
        """Those that are ``wanted``."""
        groups = None if self.groups is None else [*compress(self.groups, wanted)]
        return LabelledImages([*compress(self.images, wanted)], [*compress(self.labels, wanted)], groups, self.note)


def load_folder(path: str | os.PathLike[str]) -> tuple[list[Path], list[str]]:
    """Image files of a folder with one sub-folder a class, and their labels.

    A file is an image if its extension, in any case, is that of an image format, or if its first bytes are. Sub-folders
    of a class folder are searched too. Hidden folders, the bins and thumbnails of operating systems and network drives,
    and the folder "unsure", where the command ``sort`` puts what it is in doubt of, are left out.

    Parameters
    ----------
    path : path
        ``photos`` in ``photos/<class>/<image>``.

    Returns
    -------
    paths : list of Path
        In the natural order of their names, 2 before 10.
    labels : list of str
        The name of each image's class folder.

    Raises
    ------
    FileNotFoundError
        There is no folder at ``path``.
    ValueError
        No sub-folder has images, or one of several (the message lists the other files); or the sub-folders are no
        classes, but parts of a data set, such as "train" and "val", or all have the same sub-folders.

    Warns
    -----
    UserWarning
        Files or folders were left out (the warning counts them by kind), or class folders have no image.

    Examples
    --------
    >>> from fewshot_mahalanobis import SimpleCNAPSClassifier, load_folder
    >>> classifier = SimpleCNAPSClassifier().fit(*load_folder("photos"))  # doctest: +SKIP
    """
    images = find_class_images(path)
    if note := images.note():
        warnings.warn(f"{os.fspath(path)}: {note}", stacklevel=2)
    return images.paths, images.labels


def find_class_images(path: str | os.PathLike[str], *, at_least: int = 2) -> ClassImages:
    """Like :func:`load_folder`, but return what was left out instead of warning of it; ``at_least`` so many classes."""
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {str(root)!r}: expected one with a sub-folder of images for each class")
    paths, labels, empty, ignored, unsure = list[Path](), list[str](), list[str](), Counter[str](), 0
    sub_folders = dict[str, set[str]]()  # of each class with images; "" for images in the class folder itself
    for entry in sorted(root.iterdir(), key=lambda e: natural_key(e.name)):
        if entry.is_dir() and _is_system_folder(entry.name):
            ignored[f"{entry.name} folder"] += 1
        elif entry.is_dir() and entry.name == UNSURE:
            unsure = len(find_images(entry, allow_empty=True).paths)
        elif entry.is_dir():
            images = find_images(entry, allow_empty=True)
            paths += images.paths
            labels += [_composed(entry.name)] * len(images.paths)
            ignored += images.ignored
            if images.paths:
                sub_folders[entry.name] = {"".join(file.relative_to(entry).parts[:-1][:1]) for file in images.paths}
            else:
                empty.append(entry.name)
        elif _is_junk(entry.name):
            continue
        elif (kind := _kind(entry)) is None:
            ignored["image outside the class folders"] += 1
        else:
            ignored[kind] += 1
    result = ClassImages(paths, ignored, labels, empty, unsure)
    nested = any(len(names - {""}) > 1 for names in sub_folders.values())
    # One class may be meant: ``fit`` knows.
    if not labels or (len(set(labels)) < at_least and (nested or empty)):
        have = f"one sub-folder with images, {labels[0]!r}" if labels else "no sub-folder with images"
        hint = f"Are the classes in {str(root / next(iter(sub_folders)))!r}? " if nested else ""
        needed = "at least two are needed, one for each class" if at_least > 1 else "expected one for each class"
        raise ValueError(f"{root} has {have}; {needed}. {hint}{result.note()}".rstrip())
    if problem := _no_classes(root, sub_folders):
        raise ValueError(problem)
    return result


def _no_classes(root: Path, sub_folders: dict[str, set[str]]) -> str | None:
    """Why folders, with the names of their sub-folders, are parts of a data set and not its classes; or None."""
    kinds = {name: part[1] or part[2] for name in sub_folders if (part := _SPLIT.fullmatch(name.lower()))}
    nested = {name: kind for name, kind in kinds.items() if "" not in sub_folders[name]}
    for splits in (kinds if len(kinds) == len(sub_folders) else {}, nested):
        if len({*splits.values()}) > 1:
            first = min(splits, key=lambda name: splits[name] not in ("train", "trainval", "support"))
            return (
                f"{root} has the parts of a data set, {_enumerated(splits)}, not a folder for each class: give one of "
                f"them, {str(root / first)!r}"
            )
    common = set.intersection(*sub_folders.values())
    if len(common) > 1 and "" not in set.union(*sub_folders.values()):
        return (
            f"the folders {_enumerated(sub_folders)} of {root} all have the sub-folders "
            f"{_enumerated(sorted(common, key=natural_key))}. If these are the classes, give one of the folders, "
            f"{str(root / next(iter(sub_folders)))!r}; if not, give paths and labels, or a table of them"
        )
    return None


def _enumerated(names: Collection[str], most: int = 4) -> str:
    return ", ".join(map(repr, [*names][:most])) + (", ..." if len(names) > most else "")


def find_images(path: str | os.PathLike[str], *, allow_empty: bool = False) -> FolderImages:
    """The image files in a folder and its sub-folders, or the one file that ``path`` is, whatever its name.

    Raises
    ------
    FileNotFoundError
        There is nothing at ``path``.
    ValueError
        A folder holds no image, unless ``allow_empty``. The message lists its other files.
    """
    path = Path(path)
    if path.is_file():
        return FolderImages([path])
    if not path.is_dir():
        raise FileNotFoundError(f"no image file or folder {str(path)!r}")
    paths, ignored = list[Path](), Counter[str]()
    for file, kind in _walk(path):
        if kind is None:
            paths.append(file)
        else:
            ignored[kind] += 1
    images = FolderImages(sorted(paths, key=lambda file: natural_key(str(file))), ignored)
    if not paths and not allow_empty:
        raise ValueError(f"folder {str(path)!r} holds no image. {images.note()}".rstrip())
    return images


def read_labels(
    file: Path, image_folder: Path | None = None, *, rows: str = "all", group_column: str | None = None
) -> LabelledImages:
    """Images and labels of a CSV file with columns "path" and "label".

    Parameters
    ----------
    file : Path
    image_folder : Path, optional
        Where relative paths start; by default the folder of the CSV file.
    rows : {"all", "checked", "sure"}
        As for :func:`rows_of_labels`.
    group_column : str, optional
        Column of the groups.

    Raises
    ------
    FileNotFoundError
        There is no file.
    ValueError
        It is no such table, or ambiguous (as :func:`table_rows`); a path, label or group is missing or has several
        lines; one path has two labels; or none of the images exists. The message names the line.
    """
    more = () if group_column is None else (group_column,)
    found, note = rows_of_labels(file, ("path", "label", *more), rows)
    pairs = _checked_pairs(file, found, "path", "label")
    groups = None if group_column is None else groups_of_rows(file, found, group_column)
    paths = [(file.parent if image_folder is None else image_folder) / path for path, _ in pairs]
    check_some_exist(file, paths)
    return LabelledImages([*paths], [label for _, label in pairs], groups, note)


def rows_of_labels(
    file: Path, columns: Sequence[str], rows: str = "all"
) -> tuple[list[tuple[int, dict[str, str]]], str]:
    """Rows of a table that give an image its label, as :func:`table_rows` has them, and a note on the others.

    Every row does in a table without the columns "predicted" and "checked". With one of them it is a table of answers
    that ``predict`` wrote, and an answer is no label before somebody has checked it: its label was changed, so that it
    is no longer what was predicted, or there is a mark in the column "checked". ``rows="sure"`` takes other answers
    too, without those that are marked in the column "doubtful"; "all" takes these too.

    ValueError if no row is left, or ``rows`` is "sure" and the table has no column "doubtful".
    """
    present = {*table_columns(file, (*columns, *ANSWER_COLUMNS))}
    marks = [name for name in ("checked", "predicted", "doubtful") if name in present and name not in columns]
    found = [*table_rows(file, (*columns, *marks))]
    if not {"predicted", "checked"} & present or rows == "all":
        return found, ""
    if rows == "sure" and "doubtful" not in present:
        raise ValueError(f"{file} does not say which answers are doubtful: `predict --min-probability` marks them")
    changed = {line for line, cells in found if cells["label"] != cells.get("predicted", cells["label"])}
    checked = {line for line, cells in found if _is_marked(cells.get("checked", ""))} - changed
    cleared = {line for line, cells in found if not cells["label"]}
    sure = {line for line, cells in found if rows == "sure" and not _is_marked(cells["doubtful"])} - changed - checked
    taken = [(line, cells) for line, cells in found if line in (changed | checked | sure) - cleared]
    if not taken:
        raise ValueError(
            f"{file} has {_counted('answer', len(found))} of `predict`, and nobody has checked any: correct the labels "
            "that are wrong, mark those that are right with an x in the column checked, or take all (--rows all)"
        )
    counts = {"changed": changed - cleared, "checked": checked - cleared, "sure": sure - cleared}
    listed = ", ".join(f"{len(lines)} {name}" for name, lines in counts.items() if lines)
    left_out = {
        "that nobody has checked (--rows all takes them)": len(found) - len(taken) - len(cleared),
        "without a label": len(cleared),
    }
    others = [f"{_counted('answer', number)} {what}" for what, number in left_out.items() if number]
    note = f"{len(taken)} of {_counted('row', len(found))} taken ({listed})."
    return taken, f"{note} Left out: {', '.join(others)}." if others else note


def _is_marked(cell: str) -> bool:
    """Whether a cell says yes, as any text does but those by which spreadsheets and people say no."""
    return cell.casefold() not in ("", "0", "no", "n", "false", "-")


def groups_of_rows(file: Path, rows: Iterable[tuple[int, dict[str, str]]], column: str) -> list[str]:
    """The group of each row; ValueError names a line that lacks it."""
    groups = []
    for line, cells in rows:
        if not cells[column]:
            raise ValueError(f"line {line} of {file} lacks a {column}")
        groups.append(cells[column])
    return groups


def check_some_exist(file: Path, paths: Sequence[Path]) -> None:
    """ValueError if none of the images that a file lists is there."""
    paths = [*dict.fromkeys(paths)]
    if not any(map(os.path.exists, paths)):
        raise ValueError(
            f"none of the {len(paths)} files that {file} lists is there; the first would be {paths[0]}. Relative paths "
            "start at its folder: put it back where it was, write full paths, or name their folder (--image-folder)"
        )


def labelled_rows(file: Path, path_column: str, label_column: str) -> list[tuple[str, str]]:
    """Path and label of each row of a CSV file, as :func:`table_rows` reads it.

    ValueError as there, and if a path or label is missing or has several lines, or one path has two labels.
    """
    return _checked_pairs(file, table_rows(file, (path_column, label_column)), path_column, label_column)


def _checked_pairs(
    file: Path, rows: Iterable[tuple[int, dict[str, str]]], path_column: str, label_column: str
) -> list[tuple[str, str]]:
    found = list[tuple[str, str]]()
    known = dict[str, tuple[int, str]]()  # path -> its first line and its label
    for line, cells in rows:
        path, label = checked_cells(file, line, cells[path_column], cells[label_column])
        place = os.path.abspath(file.parent / path)  # noqa: PTH100 ("a/../b.jpg" is "b.jpg")
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
    place = (folder or file.parent) / path
    if _has_lines(label) or (_has_lines(path) and not os.path.exists(place)):  # noqa: PTH110 (False if too long)
        raise ValueError(f'line {line} of {file} has a path or label of several lines: is a quote (") not closed?')
    return path, _composed(label)


def is_table(path: Path) -> bool:
    """Whether a path is called like a table and is no folder."""
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


def _composed(label: str) -> str:
    """Unicode's composed form (NFC): file systems and spreadsheets differ in how they write an accent."""
    return unicodedata.normalize("NFC", label)


def natural_key(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key under which "2.png" comes before "10.png"."""
    parts = re.split(r"(\d+)", text)
    return tuple((not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts)


def is_image_name(name: str) -> bool:
    """Whether the name of a file has the extension of an image, in any case, and is no junk of an operating system."""
    return PurePath(name).suffix.lower() in image_suffixes() and not _is_junk(name)


def image_names(names: Iterable[str]) -> tuple[list[str], str]:
    """Choose the images of a zip or a remote folder by their names, which are paths in it with "/".

    Returns
    -------
    names : list of str
    note : str
        One sentence about what was left out; empty if that is nothing.
    """
    images, ignored, system_folders = list[str](), Counter[str](), set[tuple[str, ...]]()
    for name in names:
        *folders, file = name.split("/")
        depth = next((depth for depth, folder in enumerate(folders, 1) if _is_system_folder(folder)), None)
        if depth is not None:
            system_folders.add(tuple(folders[:depth]))
        elif is_image_name(file):
            images.append(name)
        elif file and not _is_junk(file):
            ignored[_kind_of_name(file)] += 1
    ignored += Counter(f"{folders[-1]} folder" for folders in system_folders)
    return images, FolderImages([], ignored).note()


def class_folders_in(folder: Path) -> tuple[list[Path], str]:
    """Sub-folders of a folder that may be classes, and a sentence about those that are left out, or ""."""
    found = [entry for entry in folder.iterdir() if entry.is_dir()]
    ignored = Counter(f"{entry.name} folder" for entry in found if _is_system_folder(entry.name))
    return [entry for entry in found if not _is_system_folder(entry.name)], FolderImages([], ignored).note()


def _walk(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the files below a folder, each with None if it is an image, else with the kind that it is ignored as."""
    unreadable = list[OSError]()
    for parent, folders, files in os.walk(folder, onerror=unreadable.append):
        for name in folders:
            if _is_system_folder(name):
                yield Path(parent, name), f"{name} folder"
            elif Path(parent, name).is_symlink():
                yield Path(parent, name), "link to a folder"  # it could lead round in a circle
        folders[:] = [name for name in folders if not _is_system_folder(name)]
        for name in files:
            if not _is_junk(name):
                yield Path(parent, name), _kind(Path(parent, name))
    for error in unreadable:
        yield Path(error.filename), "folder that may not be read"


def _is_junk(name: str) -> bool:
    return name.startswith("._") or name.lower() in _JUNK_FILES


def _is_system_folder(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM_FOLDERS


def _kind(file: Path) -> str | None:
    """None if a file is an image, else what to call it."""
    suffix = file.suffix.lower()
    if not file.is_file():
        return "broken link" if file.is_symlink() else "pipe, socket or device"
    if suffix in image_suffixes():
        return None
    # A camera's raw file starts like a TIFF, but that TIFF is a thumbnail.
    if suffix[1:].upper() not in REMEDIES and starts_as_image(file):
        return None
    return _kind_of_name(file.name)


def _kind_of_name(name: str) -> str:
    suffix = PurePath(name).suffix
    return f"{suffix[1:].upper()} file" if suffix else "file without an extension"


def _listed(ignored: Counter[str]) -> str:
    """Kinds and numbers, most frequent first: "6 HEIC files (export them as JPEG), 2 MP4 files"."""
    return ", ".join(_counted(kind, number) for kind, number in sorted(ignored.items(), key=lambda i: (-i[1], i[0])))


def _counted(kind: str, number: int) -> str:
    remedy = REMEDIES.get(kind.removesuffix(" file"))
    words = _PLURALS.get(kind, f"{kind}s") if number > 1 else kind
    return f"{number} {words}" + (f" ({remedy})" if remedy else "")


#: Plurals of kinds that are not formed by an s at the end.
_PLURALS = {
    "file without an extension": "files without an extension",
    "image outside the class folders": "images outside the class folders",
    "link to a folder": "links to folders",
    "folder that may not be read": "folders that may not be read",
    "pipe, socket or device": "pipes, sockets or devices",
}
