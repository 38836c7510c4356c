"""Check a folder of image data: its sources, their sizes, and where to get what is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from fewshot_mahalanobis.images.folders import class_folders_in
from fewshot_mahalanobis.research.data.datasets import DATA_SETS, DataSet
from fewshot_mahalanobis.research.data.layouts import IS_A, IS_A_URL, class_split
from fewshot_mahalanobis.research.data.readers import ImageFiles
from fewshot_mahalanobis.research.data.sources import class_folders, classes_of_split


@dataclass(frozen=True)
class Found:
    """A data set on disk, or another folder or zip of class folders.

    Attributes
    ----------
    name : str
        The data set's name, or the path below the root.
    title : str
    folder : Path or None
        Its location; None if it is missing.
    splits : dict of str to (int, int)
        Split ("" without splits) to its number of classes with images, and of images. ``name:split`` (or ``name``) is a
        source that :func:`open_source` opens with this root.
    expected : dict of str to (int, int)
        The numbers of the complete data set; empty if unknown.
    remarks : list of str
        Problems and their remedies.
    """

    name: str
    title: str
    folder: Path | None
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    expected: dict[str, tuple[int, int]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def check_data(root: str | Path) -> list[Found]:
    """List the named data sets below ``root``, missing ones too, then other folders and zips of class folders, by name.

    Images are counted, not decoded. NotADirectoryError if ``root`` is not a folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise NotADirectoryError(f"no folder {str(root)!r}: give the folder that contains the data sets")
    entries = [_check(data_set, root) for data_set in DATA_SETS.values()]
    known = {
        path.relative_to(root).parts[0]
        for data_set in DATA_SETS.values()
        for folder, contents in data_set.places
        for path in (root / folder).glob(contents)
    }
    folders, note = class_folders_in(root)
    zips = [entry for entry in sorted(root.iterdir()) if entry.suffix == ".zip" and not entry.is_dir()]
    for entry in sorted([*folders, *zips]):
        if entry.name not in known:
            entries += _other(entry)
    if note:
        entries.append(Found(str(root), str(root), root, remarks=[note]))
    return entries


def _check(data_set: DataSet, root: Path) -> Found:
    folder = data_set.find(root)
    entry = Found(data_set.name, data_set.title, folder, expected=dict(data_set.splits))
    if folder is None:
        entry.remarks.append(data_set.how_to_get)
        return entry
    for split, (expected_classes, expected_images) in data_set.splits.items():
        try:
            listing = data_set.list_split(folder, split)
        except (OSError, ValueError, LookupError, ImportError) as error:
            entry.remarks.append(f"{split} cannot be read: {type(error).__name__}: {error}")
            continue
        present = {name: images for name, images in listing.images.items() if len(images)}
        images = sum(map(len, present.values()))
        entry.splits[split] = len(present), images
        if len(present) < expected_classes:
            expected = class_split(data_set.name)[split] if data_set.name in _SPLIT_BY_CLASS else ()
            names = _shortened(sorted(set(expected) - present.keys()))
            entry.remarks.append(
                f"{split}: {expected_classes - len(present)} of {expected_classes} classes are missing"
                f"{': ' * bool(names)}{names}. {data_set.how_to_get}"
            )
        elif images != expected_images:
            entry.remarks.append(
                f"{split}: {images:,} images where {expected_images:,} are expected; "
                + ("is it unpacked completely?" if images < expected_images else "is this another edition?")
            )
        reader = listing.reader(present) if present else None
        if isinstance(reader, ImageFiles) and (missing := _missing_files(reader)):
            entry.remarks.append(f"{split}: {len(missing)} image files are not in {reader.root}: {_shortened(missing)}")
    if data_set.name == "ilsvrc_2012":
        if not (folder / IS_A).is_file():
            entry.remarks.append(f"no {IS_A}, so episodes ignore ImageNet's hierarchy: put {IS_A_URL} in {folder}")
        if not any(folder.glob("ImageNet_*_duplicates.txt")):
            entry.remarks.append(
                "no ImageNet_*_duplicates.txt, so images that are also in Birds and Caltech stay: put the lists of "
                f"https://github.com/google-research/meta-dataset (meta_dataset/dataset_conversion) in {folder}"
            )
    return entry


_SPLIT_BY_CLASS = frozenset(
    {"ilsvrc_2012", "aircraft", "cu_birds", "dtd", "quickdraw", "fungi", "vgg_flower", "traffic_sign", "mscoco"}
)


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


def _missing_files(reader: ImageFiles) -> list[str]:
    """Image files of a reader that do not exist; lists every folder once."""
    files_in: dict[str, set[str]] = {}
    missing = []
    for name in map(os.fsdecode, reader.names.tolist()):
        folder, file = os.path.split(name)
        if folder not in files_in:
            path = reader.root / folder
            files_in[folder] = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        if file not in files_in[folder]:
            missing.append(name)
    return missing


def _other(path: Path) -> list[Found]:
    """Find class folders in a folder or zip that belongs to no named data set."""
    name = f"./{path.name}" if path.name.partition(":")[0] in DATA_SETS else path.name  # a path, not that data set
    entry = Found(name, path.name, path)
    try:
        by_split, note = class_folders(path)
    except (OSError, ValueError) as error:
        entry.remarks.append(str(error))
        return [entry]
    if not by_split:
        return []
    named = sorted(filter(None, by_split))
    for split in [None] if None in by_split and len(named) < 2 else named:
        try:
            classes = classes_of_split(path, by_split, split)
        except ValueError as error:
            entry.remarks.append(str(error))
        else:
            entry.splits[split or ""] = len(classes), sum(map(len, classes.values()))
    if None in by_split and len(named) > 1:
        outside = sum(map(len, by_split[None].values()))
        entry.remarks.append(f"{outside:,} images of {path} are in none of its splits {named}, and cannot be used")
    if note:
        entry.remarks.append(note)
    return [entry]


def report(entries: Sequence[Found]) -> str:
    """Format the findings of :func:`check_data`: a table, then remarks, then missing data sets."""
    rows = []
    for entry in entries:
        for split, (classes, images) in entry.splits.items():
            expected_classes, expected_images = entry.expected.get(split, (classes, images))
            rows.append(
                (
                    f"{entry.name}:{split}" if split else entry.name,
                    f"{classes:,}" + (f" of {expected_classes:,}" if classes != expected_classes else ""),
                    f"{images:,}" + (f" of {expected_images:,}" if images != expected_images else ""),
                    str(entry.folder),
                )
            )
    header = ("source", "classes", "images", "folder")
    lines = [tabulate(rows, header, tablefmt="plain", disable_numparse=True)]
    for heading, missing in (("Remarks", False), ("Missing", True)):
        items = [entry for entry in entries if entry.remarks and (entry.folder is None) == missing]
        if items:
            lines += ["", heading, *(f"- {entry.title}: {remark}" for entry in items for remark in entry.remarks)]
    return "\n".join(lines)
