"""Folders of pictures: which files are images, which class each belongs to, and what was left out."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fewshot_mahalanobis.formats import REMEDIES, image_suffixes, starts_as_image

__all__ = ["Found", "FoundClasses", "find_class_images", "find_images", "is_image_name", "load_folder"]

#: What macOS, Windows, network drives and Jupyter leave behind, in lower case.
_JUNK = {
    *(".ds_store", "icon\r", ".spotlight-v100", ".trashes", ".trash", ".fseventsd", ".temporaryitems", "__macosx"),
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
    *("@eadir", ".ipynb_checkpoints"),
}


@dataclass(frozen=True)
class Found:
    """The image files of a folder.

    Attributes
    ----------
    paths : list of Path
        In the natural order of their names, 2 before 10.
    ignored : Counter of str
        Other files by kind: "HEIC file", "MP4 file", "broken link"... Junk of the operating system is not counted.
    """

    paths: list[Path]
    ignored: Counter[str] = field(default_factory=Counter)

    def note(self) -> str:
        """What was left out, as a sentence; empty if that is nothing."""
        return f"Left out: {_listed(self.ignored)}." if self.ignored else ""


@dataclass(frozen=True)
class FoundClasses(Found):
    """The image files of a folder with one sub-folder a class.

    Attributes
    ----------
    labels : list of str
        The class of each of ``paths``: the name of its sub-folder.
    empty : list of str
        Sub-folders without any image.
    """

    labels: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    def note(self) -> str:
        """What was left out and which class folders have no image, as sentences; empty if there is nothing to say."""
        names = ", ".join(map(repr, self.empty))
        empty = f"No image in class folder{'s' * (len(self.empty) > 1)} {names}." if self.empty else ""
        return " ".join(filter(None, (super().note(), empty)))


def load_folder(path: str | os.PathLike[str]) -> tuple[list[Path], list[str]]:
    """Image files of a folder with one sub-folder a class, and their labels.

    A file is an image by its extension, in any case, or by its first bytes where it has no extension that is known.
    Sub-folders of a class folder are searched too.

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
        Fewer than two sub-folders have images. The message lists the files that are none.

    Warns
    -----
    UserWarning
        Files were left out, by kind and number, or class folders have no image.

    Examples
    --------
    >>> from fewshot_mahalanobis import SimpleCNAPSClassifier, load_folder
    >>> classifier = SimpleCNAPSClassifier().fit(*load_folder("photos"))  # doctest: +SKIP
    """
    found = find_class_images(path)
    if note := found.note():
        warnings.warn(f"{os.fspath(path)}: {note}", stacklevel=2)
    return found.paths, found.labels


def find_class_images(path: str | os.PathLike[str]) -> FoundClasses:
    """As :func:`load_folder`, with what was left out instead of a warning."""
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {str(root)!r}: expected one with a sub-folder of images for each class")
    paths, labels, empty, ignored = list[Path](), list[str](), list[str](), Counter[str]()
    for entry in sorted(root.iterdir(), key=lambda e: natural_key(e.name)):
        if _is_junk(entry.name):
            continue
        if entry.is_dir():
            found = find_images(entry, allow_empty=True)
            paths += found.paths
            labels += [entry.name] * len(found.paths)
            ignored += found.ignored
            if not found.paths:
                empty.append(entry.name)
        elif (kind := _kind(entry)) is None:
            ignored["image outside the class folders"] += 1
        else:
            ignored[kind] += 1
    result = FoundClasses(paths, ignored, labels, empty)
    if (number := len(set(labels))) < 2:
        have = ("no sub-folder with images", f"one sub-folder with images, {labels[0]!r}" if labels else "")[number]
        raise ValueError(f"{root} has {have}; at least two are needed, one for each class. {result.note()}".rstrip())
    return result


def find_images(path: str | os.PathLike[str], *, allow_empty: bool = False) -> Found:
    """The image files in a folder and its sub-folders, or the one file that ``path`` is, whatever its name.

    Raises
    ------
    FileNotFoundError
        There is nothing at ``path``.
    ValueError
        A folder holds no image, unless ``allow_empty``. The message lists what it does hold.
    """
    path = Path(path)
    if path.is_file():
        return Found([path])
    if not path.is_dir():
        raise FileNotFoundError(f"no image file or folder {str(path)!r}")
    paths, ignored = list[Path](), Counter[str]()
    for file, kind in _walk(path):
        if kind is None:
            paths.append(file)
        else:
            ignored[kind] += 1
    found = Found(sorted(paths, key=lambda file: natural_key(str(file))), ignored)
    if not paths and not allow_empty:
        raise ValueError(f"folder {str(path)!r} holds no image. {found.note()}".rstrip())
    return found


def natural_key(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key under which "2.png" comes before "10.png"."""
    parts = re.split(r"(\d+)", text)
    return tuple((not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts)


def is_image_name(name: str) -> bool:
    """Whether a path is that of an image by its extension, in any case, and no junk of an operating system."""
    path = Path(name)
    return path.suffix.lower() in image_suffixes() and not any(map(_is_junk, path.parts))


def _walk(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the files below a folder, each with None for an image and else the kind that it is ignored as."""
    unreadable = list[OSError]()
    for parent, folders, files in os.walk(folder, onerror=unreadable.append):
        for name in folders:
            if Path(parent, name).is_symlink() and not _is_junk(name):
                yield Path(parent, name), "link to a folder"  # it could lead round in a circle
        folders[:] = [name for name in folders if not _is_junk(name)]
        for name in files:
            if not _is_junk(name):
                yield Path(parent, name), _kind(Path(parent, name))
    for error in unreadable:
        yield Path(error.filename), "folder that may not be read"


def _is_junk(name: str) -> bool:
    return name.startswith("._") or name.lower() in _JUNK


def _kind(file: Path) -> str | None:
    """None if a file is an image, else what to call it."""
    suffix = file.suffix.lower()
    if not file.is_file():
        return "broken link" if file.is_symlink() else "pipe, socket or device"
    if suffix in image_suffixes():
        return None
    # A camera's raw file starts as a TIFF, but one of a thumbnail.
    if suffix[1:].upper() not in REMEDIES and starts_as_image(file):
        return None
    return f"{suffix[1:].upper()} file" if suffix else "file without an extension"


def _listed(ignored: Counter[str]) -> str:
    """Say kinds and numbers, most frequent first: "6 HEIC files (export them as JPEG), 2 MP4 files"."""
    return ", ".join(_counted(kind, number) for kind, number in sorted(ignored.items(), key=lambda i: (-i[1], i[0])))


def _counted(kind: str, number: int) -> str:
    remedy = REMEDIES.get(kind.removesuffix(" file"))
    words = _PLURALS.get(kind, f"{kind}s") if number > 1 else kind
    return f"{number} {words}" + (f" ({remedy})" if remedy else "")


#: Kinds that take no plain s at their end.
_PLURALS = {
    "file without an extension": "files without an extension",
    "image outside the class folders": "images outside the class folders",
    "link to a folder": "links to folders",
    "folder that may not be read": "folders that may not be read",
    "pipe, socket or device": "pipes, sockets or devices",
}
