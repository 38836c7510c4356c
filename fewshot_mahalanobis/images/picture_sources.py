"""Labelled images of several sources: folders with a folder for each class, tables, files of boxes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from fewshot_mahalanobis.images.boxes import Boxes, is_box_file, read_boxes
from fewshot_mahalanobis.images.folders import LabelledImages, find_class_images, find_images, read_labels
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.images.tables import check_some_exist, groups_of_rows, is_table, located, table_rows

__all__ = ["Pictures", "find_pictures", "read_sources"]

#: Most corrections that are listed one by one.
_MOST_LISTED = 5


class Pictures(NamedTuple):
    """Pictures without labels: to classify, or to learn from.

    Parameters
    ----------
    images : list of Path or Region
    boxes : list of Boxes
        The files of boxes among the places.
    notes : list of str
        What was left out.
    groups : list of str or None
        What each image belongs to, where that was asked for.
    """

    images: list[Path | Region]
    boxes: list[Boxes]
    notes: list[str]
    groups: list[str] | None

    def where(self, wanted: Sequence[bool]) -> Pictures:
        """Those that are ``wanted``."""
        groups = None if self.groups is None else [*compress(self.groups, wanted)]
        return self._replace(images=[*compress(self.images, wanted)], groups=groups)


def find_pictures(
    places: Sequence[Path],
    *,
    image_folder: Path | None = None,
    margin: float = 0.0,
    min_confidence: float = 0.0,
    category: str | None = None,
    group_column: str | None = None,
) -> Pictures:
    """Find the pictures of folders, image files, tables with a column "path", and files of boxes.

    Parameters
    ----------
    places : sequence of Path
    image_folder : Path, optional
        Where relative paths in tables and files of boxes start; by default the folder of each file.
    margin, min_confidence, category
        As for :func:`~fewshot_mahalanobis.images.boxes.read_boxes`.
    group_column : str, optional
        Column of the groups, which every place must have.

    Raises
    ------
    FileNotFoundError
        A place is absent.
    ValueError
        A place has no picture or cannot be read, or an argument is for places of another kind. The message names it.
    """
    images, boxes, notes, groups = list[Path | Region](), list[Boxes](), list[str](), list[str]()
    tables = 0
    for place in places:
        lists_pictures = is_table(place) and place.is_file()
        if group_column is not None and not lists_pictures:
            raise ValueError(
                f"{place} has no columns, and pictures are to be grouped by the column {group_column}: give a table "
                f"with path and {group_column}"
            )
        if is_box_file(place):
            limits = {"min_confidence": min_confidence, "category": category, "group_column": group_column}
            boxes.append(read_boxes(place, image_folder=image_folder, margin=margin, **limits))  # type: ignore[arg-type]
            images += boxes[-1].regions
            groups += boxes[-1].groups or []
            if boxes[-1].note:
                notes.append(boxes[-1].note)
        elif lists_pictures:
            tables += 1
            rows = [*table_rows(place, ("path", *(() if group_column is None else (group_column,))))]
            for line, cells in rows:
                if not cells["path"]:
                    raise ValueError(f"line {line} of {place} lacks a path")
            paths = [located(image_folder or place.parent, cells["path"]) for _, cells in rows]
            if not paths:
                raise ValueError(f"{place} lists no image")
            check_some_exist(place, paths)
            images += paths
            groups += [] if group_column is None else groups_of_rows(place, rows, group_column)
        else:
            found = find_images(place)
            images += found.paths
            if note := found.note():
                notes.append(f"{place}: {note}")
    options: dict[str, Any] = {"margin": margin, "min_confidence": min_confidence, "category": category}
    if not tables:
        options = {"image_folder": image_folder, **options}
    if not boxes and any(options.values()):
        listed = ", ".join(f"--{name.replace('_', '-')}" for name, value in options.items() if value)
        raise ValueError(f"{listed}: for files of boxes, and there is none")
    return Pictures(images, boxes, notes, None if group_column is None else groups)


class _Entry(NamedTuple):
    image: Path | Region
    label: str
    group: str
    place: Any  # the same for one file, or one box in it, however its path is written

    def __str__(self) -> str:
        return str(self.image)


def read_sources(
    sources: Sequence[Path],
    *,
    image_folder: Path | None = None,
    margin: float = 0.0,
    rows: str = "checked",
    group_column: str | None = None,
    at_least: int = 2,
) -> tuple[LabelledImages, list[str]]:
    """Read the images and labels of sources. What a later one says of an image corrects what an earlier one says.

    Parameters
    ----------
    sources : sequence of Path
        Folders with a sub-folder for each class, tables of paths and labels, files of boxes with labels.
    image_folder : Path, optional
        Where relative paths in tables and files of boxes start; by default the folder of each file.
    margin : float
        Margin of every box.
    rows : {"checked", "sure", "all"}
        What counts in a table that ``predict`` wrote, as for
        :func:`~fewshot_mahalanobis.support_set.answers.labels_of_answers`.
    group_column : str, optional
        Column of the groups, which every source must have.
    at_least : int
        Fewest classes of a folder, unless it is one of several sources.

    Returns
    -------
    LabelledImages
    notes : list of str
        What was left out, and what was corrected.

    Raises
    ------
    FileNotFoundError
        A source is absent.
    ValueError
        A source cannot be read, or an argument is for sources of another kind. The message names it.
    """
    _check_kinds(sources, image_folder, margin)
    entries, notes, rejected_labels = list[_Entry](), list[str](), frozenset[str]()
    for source in sources:
        read = _read(source, image_folder, margin, rows, group_column, at_least if len(sources) == 1 else 1)
        rejected_labels |= read.rejected_labels
        group_names = read.groups or [""] * len(read.images)
        new = [_Entry(*row, _place(row[0])) for row in zip(read.images, read.labels, group_names, strict=True)]
        labels = {entry.place: entry.label for entry in new}
        corrected = [entry for entry in entries if labels.get(entry.place, entry.label) != entry.label]
        notes += [f"{source}: {note}" for note in (read.note, _corrections(corrected, labels)) if note]
        entries = [entry for entry in entries if entry.place not in labels] + new
    groups = None if group_column is None else [entry.group for entry in entries]
    images, labels_of_images = [entry.image for entry in entries], [entry.label for entry in entries]
    return LabelledImages(images, labels_of_images, groups, rejected_labels=rejected_labels), notes


def _check_kinds(sources: Sequence[Path], image_folder: Path | None, margin: float) -> None:
    """ValueError if an argument is for a kind of source of which there is none."""
    listed, has = ", ".join(map(str, sources)), "has" if len(sources) == 1 else "have"
    if margin and not any(map(is_box_file, sources)):
        raise ValueError(f"--margin is for boxes, and {listed} {has} none")
    if image_folder is not None and not any(is_table(source) or is_box_file(source) for source in sources):
        raise ValueError(f"--image-folder is for a table or a file of boxes, and there is none among {listed}")


def _read(
    source: Path, image_folder: Path | None, margin: float, rows: str, group_column: str | None, at_least: int
) -> LabelledImages:
    """One source."""
    if group_column is not None and not is_table(source):
        raise ValueError(
            f"--groups {group_column}: a folder or a JSON file has no columns. Give a table with path, label and "
            f"{group_column} in place of {source}"
        )
    if is_box_file(source):
        boxes = read_boxes(source, image_folder=image_folder, margin=margin, rows=rows, group_column=group_column)
        if boxes.labels is None:
            raise ValueError(f"{source} has boxes without labels: give a table with a column label, or a COCO file")
        return LabelledImages([*boxes.regions], boxes.labels, boxes.groups, boxes.note, boxes.rejected_labels)
    if is_table(source):
        return read_labels(source, image_folder, rows=rows, group_column=group_column)
    if source.suffix == ".safetensors" and source.is_file():
        raise ValueError(f"{source} is a model, not images. To add images to it: --from {source}")
    images = find_class_images(source, at_least=at_least)
    return LabelledImages([*images.paths], images.labels, note=images.note())


def _place(image: Path | Region) -> Any:
    if isinstance(image, Region):
        return os.path.realpath(image.image), image.box, image.normalized
    return os.path.realpath(image)


def _corrections(corrected: Sequence[_Entry], labels: dict[Any, str]) -> str:
    """A sentence about the images that a source gives other labels than an earlier source."""
    if not corrected:
        return ""
    listed = [f"{entry} ({entry.label} -> {labels[entry.place]})" for entry in corrected[:_MOST_LISTED]]
    more = [f"{len(corrected) - _MOST_LISTED} more"] if len(corrected) > _MOST_LISTED else []
    return f"Corrected: {', '.join(listed + more)}."
