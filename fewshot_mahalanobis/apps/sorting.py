"""Sort image files into one folder for each class."""

from __future__ import annotations

import filecmp
import hashlib
import itertools
import os
import re
import shutil
import stat
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fewshot_mahalanobis.apps.labelling import LabelledFile, predict_files
from fewshot_mahalanobis.checkpoints.files import atomic_replace, shortened
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.folders import UNSURE, class_folders_in, find_images

__all__ = ["Sorted", "SortedFile", "sort_files"]

#: Longest name of a file or folder on the usual file systems.
MOST_BYTES = 255
#: Names that mean a device on Windows, with any extension too.
_DEVICES = re.compile(r"^(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(?= *(\.|$))", re.IGNORECASE)


class SortedFile(NamedTuple):
    """A file and its place among the sorted ones."""

    path: Path
    label: Any  # the prediction, also where the file is in the folder of unsure ones
    probability: float  # of the most probable class
    sorted_as: Path


class Sorted(NamedTuple):
    """What :func:`sort_files` did.

    Parameters
    ----------
    new : list of SortedFile
        Files that were not there before.
    no_longer_unsure : list of SortedFile
        Files of the folder of unsure ones that were moved to their class; ``path`` is where each was.
    called_otherwise : list of SortedFile
        Files that are in the folder of one class and are now surely called by another. They stay where they are, as
        you may have put them there; ``sorted_as`` is that place.
    problems : dict of Path to str
        Images that were left out, and why.
    """

    new: list[SortedFile]
    no_longer_unsure: list[SortedFile]
    called_otherwise: list[SortedFile]
    problems: dict[Path, str]


def sort_files(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Path],
    output: Path,
    *,
    how: Literal["copy", "link", "move"] = "copy",
    min_probability: float = 0.5,
    skip_errors: bool = False,
) -> Sorted:
    """Copy, link or move image files to ``output/<class>/``, or to ``output/unsure/`` where the class is in doubt.

    No file is overwritten or deleted: of equal names the later gets a number. A file that a folder of ``output``
    already has, under any name, is not sorted again. So a run that was interrupted can be repeated, and files that you
    have moved to another class stay there. Files in ``output/unsure/`` that are no longer in doubt are moved to their
    class, whether or not they are among ``paths``.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted.
    paths : sequence of Path
        A file given twice is sorted once. Of those below ``output``, only the unsure ones are sorted.
    output : Path
        Made if it does not exist.
    how : {"copy", "link", "move"}
        "link" makes symbolic links.
    min_probability : float
        A file is unsure if no class has this probability, or if the prediction is ``unknown_label``.
    skip_errors : bool
        Leave out images that cannot be read.

    Returns
    -------
    Sorted

    Raises
    ------
    ValueError
        A class is called "unsure", two classes would share a folder, images cannot be read (without ``skip_errors``),
        or all images are in ``output`` itself, and none is unsure. Nothing is sorted.
    OSError
        A file cannot be written. Those before it are sorted.
    """
    folders = _class_folders([str(label) for label in classifier.classes_.tolist()])
    output = output.resolve()
    by_place = {_absolute(path): path for path in paths}
    outside = [path for place, path in by_place.items() if output not in place.parents]
    unsure = _images_in(output / UNSURE)
    if paths and not outside and not by_place.keys() <= {*unsure}:
        raise ValueError(f"all images are in {output} itself: sort into another folder, such as {output / 'sorted'}")
    present = _files_by_size(output)
    sorted_before = {path: _among(path, present) for path in outside}
    sorted_before = {
        path: place for path, place in sorted_before.items() if place is None or place.parent.name != UNSURE
    }
    sorted_before |= {path: path for path in unsure}
    if not sorted_before:
        return Sorted([], [], [], {})
    answers, problems = predict_files(classifier, [*sorted_before], skip_errors=skip_errors)
    done = Sorted([], [], [], problems)
    for answer in answers:
        sure, before = not answer.doubtful(min_probability), sorted_before[answer.path]
        folder = output / (folders[str(answer.label)] if sure else UNSURE)
        if before is None or (before.parent.name == UNSURE and sure):
            folder.mkdir(parents=True, exist_ok=True)
            target = _free_name(folder / answer.path.name)
            _put(answer.path, target, how if before is None else "rename")
            (done.new if before is None else done.no_longer_unsure).append(_sorted_as(answer, target))
        elif sure and before.parent != folder and before.parent.name in folders.values():
            done.called_otherwise.append(_sorted_as(answer, before))
    return done


def _sorted_as(answer: LabelledFile, place: Path) -> SortedFile:
    return SortedFile(answer.path, answer.label, answer.probability, place)


def _images_in(folder: Path) -> list[Path]:
    """The image files of a folder, without those of its sub-folders; none if it does not exist."""
    images = find_images(folder, allow_empty=True).paths if folder.is_dir() else []
    return [path for path in images if path.parent == folder]


def _class_folders(labels: Sequence[str]) -> dict[str, str]:
    """Class -> name of its folder, which every operating system accepts."""
    folders = {label: _folder_name(label) for label in labels}
    taken = {UNSURE: "the folder of unsure files"}
    for label, folder in folders.items():
        # Windows and macOS ignore case, macOS also which of Unicode's forms an accent is written in.
        other = taken.setdefault(unicodedata.normalize("NFC", folder).casefold(), f"class {label!r}")
        if other != f"class {label!r}":
            raise ValueError(f"class {label!r} and {other} would share the folder {folder!r}: rename the class")
    return folders


def _folder_name(label: str) -> str:
    name = re.sub(r'[/\\:*?"<>|\x00-\x1f]|^\.|[. ]$', "_", label) or "_"
    name = _DEVICES.sub(r"\1_", name)
    if len(os.fsencode(name)) <= MOST_BYTES:
        return name
    digest = hashlib.sha256(os.fsencode(label)).hexdigest()[:12]  # tells long labels of one beginning apart
    return f"{shortened(name, MOST_BYTES - len(digest) - 1)}-{digest}"


def _absolute(path: Path) -> Path:
    """A file's one absolute path, without "..", whichever way its folder is named. A link stays the link."""
    return path.parent.resolve() / path.name


def _files_by_size(output: Path) -> dict[int, list[Path]]:
    """Size in bytes -> files in the class folders, links included."""
    files = defaultdict[int, list[Path]](list)
    for folder in class_folders_in(output)[0] if output.is_dir() else []:
        for path in filter(Path.is_file, folder.iterdir()):
            files[path.stat().st_size].append(path)
    return files


def _among(path: Path, files: dict[int, list[Path]]) -> Path | None:
    """The one of the files that has the content of ``path``, if any."""
    candidates = files.get(path.stat().st_size, []) if path.is_file() else []
    return next((other for other in candidates if filecmp.cmp(path, other, shallow=False)), None)


def _free_name(path: Path) -> Path:
    """The path, or the first of "name-2.jpg", "name-3.jpg"... that does not exist; a long name is shortened."""
    endings = (f"-{number}" * (number > 1) + path.suffix for number in itertools.count(1))
    names = (shortened(path.stem, MOST_BYTES - len(os.fsencode(ending))) + ending for ending in endings)
    return next(target for target in map(path.with_name, names) if not os.path.lexists(target))


def _put(source: Path, target: Path, how: str) -> None:
    """Copy, link, move or rename a file to a free name; it appears there whole or not at all."""
    if how == "rename":
        source.rename(target)
        return
    if how == "link":
        target.symlink_to(_absolute(source))
        return
    same_disk = source.stat().st_dev == target.parent.stat().st_dev
    if how == "move" and same_disk and not source.is_symlink():  # a relative link would lead elsewhere
        source.rename(target)
        return
    with atomic_replace(target, mode=stat.S_IMODE(source.stat().st_mode)) as temporary:  # a private picture stays so
        shutil.copy2(source, temporary)
    if how == "move":
        source.unlink()
