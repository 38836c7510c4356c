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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fewshot_mahalanobis.apps.journal import Journal
from fewshot_mahalanobis.apps.labelling import NEW_CLASS, LabelledFile, predict_files
from fewshot_mahalanobis.checkpoints.files import atomic_replace, shortened
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.folders import UNSURE, class_folders_in, find_images, is_image

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
    went_along : list of Path
        Side files that were moved with their pictures; where each was.
    """

    new: list[SortedFile]
    no_longer_unsure: list[SortedFile]
    called_otherwise: list[SortedFile]
    problems: dict[Path, str]
    went_along: list[Path]


def sort_files(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Path],
    output: Path,
    *,
    how: Literal["copy", "link", "move"] = "copy",
    min_probability: float = 0.5,
    groups: Sequence[Any] | None = None,
    together: bool = False,
    propose: bool = False,
    skip_errors: bool = False,
    journal: Journal | None = None,
) -> Sorted:
    """Copy, link or move image files to ``output/<class>/``, or to ``output/unsure/`` where the class is in doubt.

    Images of no class go to the folder of the classifier's ``unknown_label``.

    Where an image is moved, its side files go along: those in its folder that are no images and have its name
    with another ending (1.xmp, 1.aae or 1.cr2 beside 1.jpg) or a further one (1.jpg.json). Copies and links go without.

    No file is overwritten or deleted: of equal names the later gets a number. A file that a folder of ``output``
    already has, under any name, is not sorted again. So a run that was interrupted can be repeated, and files that you
    have moved to another class stay there. Files in ``output/unsure/`` that are no longer in doubt are moved to their
    class, whether or not they are among ``paths``.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted.
    paths : sequence of Path
        A file given twice is sorted once. Of the files below ``output``, only the unsure ones are sorted.
    output : Path
        Made if it does not exist.
    how : {"copy", "link", "move"}
        "link" makes symbolic links.
    min_probability : float
        A file is unsure if no class has this probability.
    groups : sequence of str or number, optional
        Group of each of ``paths``; files of one group share an answer, as in ``predict``. Unsure files that are not
        among ``paths`` have one each.
    together : bool
        Learn from all images that are to be sorted, for this call, as ``predict(X, transductive=True)`` does.
    propose : bool
        Put images of no class that look like one another into sub-folders of their folder, new-1, new-2, ..., the most
        alike first. Later runs leave these as they are, and number their own from the next free one on.
    skip_errors : bool
        Leave out images that cannot be read.
    journal : Journal, optional
        As for :func:`~fewshot_mahalanobis.apps.labelling.predict_files`.

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
    labels = map(str, classifier.fitted_head_.output_labels.tolist())
    folders = _class_folders([label for label in labels if label != str(classifier.unknown_label) or label != UNSURE])
    output = Path(os.path.realpath(output))
    by_place = {_absolute(path): path for path in paths}
    outside = [path for place, path in by_place.items() if output not in place.parents]
    unsure = _images_in(output / UNSURE)
    if paths and not outside and not by_place.keys() <= {*unsure}:
        raise ValueError(f"all images are in {output} itself: sort into another folder, such as {output / 'sorted'}")
    rejected = output / folders.get(str(classifier.unknown_label), UNSURE)
    present = _files_by_size(output, _sub_folders(rejected))
    sorted_before = {path: _among(path, present) for path in outside}
    sorted_before = {
        path: place for path, place in sorted_before.items() if place is None or place.parent.name != UNSURE
    }
    sorted_before |= {path: path for path in unsure}
    if not sorted_before:
        return Sorted([], [], [], {}, [])
    names = None if groups is None else dict(zip(map(_absolute, paths), groups, strict=True))
    shared = None if names is None else [names.get(_absolute(path), str(path)) for path in sorted_before]
    answers, problems = predict_files(
        classifier,
        [*sorted_before],
        groups=shared,
        transductive=together,
        propose=propose,
        skip_errors=skip_errors,
        journal=journal,
    )
    done = Sorted([], [], [], problems, [])
    moved = [answer.path for answer in answers if sorted_before[answer.path] is not None or how == "move"]
    side_files, last = _side_files(moved), _last_new_folder(rejected)
    for answer in answers:
        before = sorted_before[answer.path]
        sure = answer.unknown or answer.probability >= min_probability
        folder = output / (folders.get(str(answer.label), UNSURE) if sure else UNSURE)
        sure = folder.name != UNSURE  # nor is an image of no class, if "unsure" is what these are called
        if before is None or (before.parent.name == UNSURE and sure):
            if answer.new_class:
                folder = rejected / NEW_CLASS.format(last + answer.new_class)
            folder.mkdir(parents=True, exist_ok=True)
            along = side_files.get(answer.path, {})
            target = _free_name(folder / answer.path.name, along.values())
            for file, ending in along.items():  # before their picture, which an interrupted run finds again
                _put(file, target.with_name(target.stem + ending), how if before is None else "rename")
            _put(answer.path, target, how if before is None else "rename")
            done.went_along.extend(along)
            (done.new if before is None else done.no_longer_unsure).append(_sorted_as(answer, target))
        elif (
            sure
            and before.parent != folder
            and before.parent.parent == output
            and before.parent.name in folders.values()
        ):
            done.called_otherwise.append(_sorted_as(answer, before))
    return done


def _last_new_folder(rejected: Path) -> int:
    """The largest number of a sub-folder for a proposed class that is there; 0 if none is."""
    numbers = [re.fullmatch(NEW_CLASS.format("([0-9]+)"), path.name) for path in _sub_folders(rejected)]
    return max((int(number[1]) for number in numbers if number), default=0)


def _sub_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _side_files(pictures: Iterable[Path]) -> dict[Path, dict[Path, str]]:
    """Picture -> its side files, each with what its name adds to the stem of the picture's.

    A file that could be of several pictures is that of the first, or of the one whose whole name it begins with.
    """
    side_files: dict[Path, dict[Path, str]] = {picture: {} for picture in pictures}
    for folder in {picture.parent for picture in side_files}:
        by_name = {picture.name: picture for picture in side_files if picture.parent == folder}
        by_stem = {picture.stem: picture for picture in reversed([*by_name.values()])}
        for file in sorted(folder.iterdir()):
            beginnings = [file.name[: dot.start()] for dot in re.finditer(r"\.", file.name)]
            picture = next((by_name[name] for name in beginnings if name in by_name), by_stem.get(file.stem))
            if (
                file.suffix
                and picture is not None
                and file.name not in by_name
                and file.is_file()
                and not is_image(file)
            ):
                side_files[picture][file] = file.name[len(picture.stem) :]
    return side_files


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
    return Path(os.path.realpath(path.parent), path.name)


def _files_by_size(output: Path, proposed: Sequence[Path]) -> dict[int, list[Path]]:
    """Size in bytes -> files in the class folders, and those of ``proposed`` classes, links included."""
    files = defaultdict[int, list[Path]](list)
    for folder in [*class_folders_in(output)[0], *proposed] if output.is_dir() else []:
        for path in filter(Path.is_file, folder.iterdir()):
            files[path.stat().st_size].append(path)
    return files


def _among(path: Path, files: dict[int, list[Path]]) -> Path | None:
    """The one of the files that has the content of ``path``, if any."""
    candidates = files.get(path.stat().st_size, []) if path.is_file() else []
    return next((other for other in candidates if filecmp.cmp(path, other, shallow=False)), None)


def _free_name(path: Path, more_endings: Iterable[str] = ()) -> Path:
    """The path, or the first of "name-2.jpg", "name-3.jpg"... that does not exist; a long name is shortened.

    With ``more_endings`` in place of its suffix it does not exist either.
    """
    endings = [path.suffix, *more_endings]
    longest = max(len(os.fsencode(ending)) for ending in endings)
    for number in itertools.count(1):
        counted = f"-{number}" * (number > 1)
        stem = shortened(path.stem, MOST_BYTES - longest - len(counted)) + counted
        if not any(os.path.lexists(path.with_name(stem + ending)) for ending in endings):
            return path.with_name(stem + path.suffix)
    raise AssertionError  # numbers do not end


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
        shutil.copyfile(source, temporary)
        with suppress(OSError):  # a disk that has no times or modes
            shutil.copystat(source, temporary)
    if how == "move":
        source.unlink()
