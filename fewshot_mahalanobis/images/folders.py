"""Folders and tables of pictures: which files are images, which class each belongs to, and what was left out."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path, PurePath
from typing import NamedTuple

from fewshot_mahalanobis.images.formats import REMEDIES, image_suffixes, starts_as_image
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.images.tables import (
    check_some_exist,
    checked_pairs,
    groups_of_rows,
    located,
    rows_of_labels,
)
from fewshot_mahalanobis.support_set.answers import composed

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

    def without(self, files: Iterable[Path]) -> FolderImages:
        """The same, with these files no longer among those left out."""
        return replace(self, ignored=self.ignored - Counter(_kind_of_name(file.name) for file in files))


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
    rejected_labels : frozenset of str
        The labels that ``predict`` gave to pictures that it rejected.
    """

    images: list[Path | Region]
    labels: list[str]
    groups: list[str] | None = None
    note: str = ""
    rejected_labels: frozenset[str] = frozenset()

    def where(self, wanted: Sequence[bool]) -> LabelledImages:
        """Those that are ``wanted``."""
        groups = None if self.groups is None else [*compress(self.groups, wanted)]
        images, labels = [*compress(self.images, wanted)], [*compress(self.labels, wanted)]
        return self._replace(images=images, labels=labels, groups=groups)


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
    """Like :func:`load_folder`, but with a minimum of classes, and return what was left out instead of warning."""
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {str(root)!r}: expected one with a sub-folder of images for each class")
    paths, labels, empty, ignored, unsure = list[Path](), list[str](), list[str](), Counter[str](), 0
    sub_folders = dict[str, set[str]]()  # of each class with images; "" for images in the class folder itself
    for entry in sorted(root.iterdir(), key=lambda e: natural_key(e.name)):
        if entry.is_dir() and (kind := _kind_of_folder(entry)):
            ignored[kind] += 1
        elif entry.is_dir() and entry.name == UNSURE:
            unsure = len(find_images(entry, allow_empty=True).paths)
        elif entry.is_dir():
            images = find_images(entry, allow_empty=True)
            paths += images.paths
            labels += [composed(entry.name)] * len(images.paths)
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
        As for :func:`~fewshot_mahalanobis.support_set.answers.labels_of_answers`.
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
    found, note, rejected_labels = rows_of_labels(file, ("path", "label", *more), rows)
    pairs = checked_pairs(file, found, "path", "label")
    groups = None if group_column is None else groups_of_rows(file, found, group_column)
    folder = file.parent if image_folder is None else image_folder
    paths = [located(folder, path) for path, _ in pairs]
    check_some_exist(file, paths)
    return LabelledImages([*paths], [label for _, label in pairs], groups, note, rejected_labels)


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


def kinds_of(files: Iterable[Path]) -> str:
    """Kinds of files that are no images, with their numbers: "2 AAE files, 1 XMP file"."""
    kinds = Counter(_kind_of_name(file.name) for file in files)
    return ", ".join(f"{number} {_in_plural(kind, number)}" for kind, number in kinds.most_common())


def is_image(file: Path) -> bool:
    """Whether a file is an image, by its name or its first bytes."""
    return _kind(file) is None


def class_folders_in(folder: Path) -> tuple[list[Path], str]:
    """Sub-folders of a folder that may be classes, and a sentence about those that are left out, or ""."""
    found, ignored = list[Path](), Counter[str]()
    for entry in filter(Path.is_dir, folder.iterdir()):
        if kind := _kind_of_folder(entry):
            ignored[kind] += 1
        else:
            found.append(entry)
    return found, FolderImages([], ignored).note()


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


def _kind_of_folder(folder: Path) -> str | None:
    """None if a sub-folder may be a class, else what to call it."""
    if _is_system_folder(folder.name):
        return f"{folder.name} folder"
    around = Path(os.path.realpath(folder.parent)).is_relative_to(os.path.realpath(folder))
    return "link to a folder around it" if around else None


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
    return f"{number} {_in_plural(kind, number)}" + (f" ({remedy})" if remedy else "")


def _in_plural(kind: str, number: int) -> str:
    return _PLURALS.get(kind, f"{kind}s") if number > 1 else kind


#: Plurals of kinds that are not formed by an s at the end.
_PLURALS = {
    "file without an extension": "files without an extension",
    "image outside the class folders": "images outside the class folders",
    "link to a folder": "links to folders",
    "link to a folder around it": "links to folders around them",
    "folder that may not be read": "folders that may not be read",
    "pipe, socket or device": "pipes, sockets or devices",
}
