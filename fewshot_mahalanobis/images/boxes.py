"""Files of boxes: a table, a COCO annotation file, MegaDetector's results. They are read as regions of photographs.

The units are those of the formats: pixels in a table and in COCO, shares of the picture's sides in MegaDetector's.

References
----------
COCO: https://cocodataset.org/#format-data. MegaDetector's batch results: https://lila.science/megadetector-output-format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.images.tables import (
    check_some_exist,
    checked_cells,
    groups_of_rows,
    is_table,
    located,
    rows_of_labels,
    table_columns,
)
from fewshot_mahalanobis.plain import quoted

__all__ = ["Boxes", "is_box_file", "read_boxes"]

#: Columns of a box in a table, in the order of a Region's box.
BOX_COLUMNS = ("x", "y", "width", "height")
#: Where files say that a box is turned: a column of a table, a field of a COCO annotation or of its attributes.
_ANGLES = ("rotation", "angle", "theta", "rotation_angle")


@dataclass(frozen=True)
class Boxes:
    """The boxes of a file, in its order.

    Attributes
    ----------
    regions : list of Region
    labels : list of str or None
        None if the file has none.
    groups : list of str or None
        What each region belongs to, where that was asked for.
    note : str
        One sentence about what was left out; empty if that is nothing.
    document : dict or None
        The file, if it is JSON; of COCO or, with the key "detection_categories", MegaDetector.
    entries : list of dict
        The part of ``document`` that each region comes from.
    rejected_labels : frozenset of str
        The labels that ``predict`` gave to boxes that it rejected.
    """

    regions: list[Region]
    labels: list[str] | None = None
    groups: list[str] | None = None
    note: str = ""
    document: dict[str, Any] | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    rejected_labels: frozenset[str] = frozenset()

    def fill(self, labels: Sequence[Any], answers: Sequence[Sequence[tuple[Any, float]] | None]) -> dict[str, Any]:
        """Write answers into ``document`` as its classification, in place of an earlier one; returns it.

        Parameters
        ----------
        labels : sequence
            All that may occur.
        answers : sequence of n
            Labels and their probabilities for each region, the best first; None where there is no answer.

        Returns
        -------
        dict
            In COCO the best label is the category of an annotation and its probability the "score"; annotations without
            an answer are removed. In MegaDetector's format a detection has all of them as "classifications".
        """
        assert self.document is not None
        numbers = {str(label): number for number, label in enumerate(labels, start=1)}
        if _is_megadetector(self.document):
            _forget_classification(self.document)
            self.document["info"] = {**self.document.get("info", {}), "classifier": "fewshot-mahalanobis"}
            self.document["classification_categories"] = {str(number): name for name, number in numbers.items()}
        else:
            self.document["categories"] = [{"id": number, "name": name} for name, number in numbers.items()]
            self.document["annotations"] = [
                entry for entry, answer in zip(self.entries, answers, strict=True) if answer
            ]
        for entry, answer in zip(self.entries, answers, strict=True):
            if answer and _is_megadetector(self.document):
                entry["classifications"] = [[str(numbers[str(label)]), share] for label, share in answer]
            elif answer:
                entry["category_id"], entry["score"] = numbers[str(answer[0][0])], answer[0][1]
        return self.document


def is_box_file(path: Path) -> bool:
    """Whether a path is a JSON file, or a table with columns "x" and "y"."""
    if not path.is_file():
        return False
    return path.suffix.lower() == ".json" or (is_table(path) and {"x", "y"} <= {*table_columns(path, BOX_COLUMNS)})


def read_boxes(
    file: Path,
    *,
    image_folder: Path | None = None,
    margin: float = 0.0,
    min_confidence: float = 0.0,
    category: str | None = None,
    rows: str = "all",
    group_column: str | None = None,
) -> Boxes:
    """Read a file of boxes.

    Parameters
    ----------
    file : Path
        A table with the columns path, x, y, width and height, in pixels, and perhaps label; a COCO annotation file; or
        MegaDetector's results.
    image_folder : Path, optional
        Where relative paths start; by default the folder of ``file``.
    margin : float
        Margin of every region.
    min_confidence : float
        Leave out MegaDetector's detections of less confidence.
    category : str, optional
        Leave out MegaDetector's detections of other categories than this one: "animal", "person" or "vehicle".
    rows : {"all", "checked", "sure"}
        Which rows of a table of answers: see :func:`~fewshot_mahalanobis.support_set.answers.labels_of_answers`.
        Likewise COCO's annotations with a "score", which a network gave, are left out if it is "checked".
    group_column : str, optional
        Column of the groups in a table.

    Raises
    ------
    ValueError
        The file is none of these, has no box, or a box or its label cannot be read. The message names the row,
        annotation or image. Or none of the images is there.
    """
    folder = file.parent if image_folder is None else image_folder
    if file.suffix.lower() != ".json":
        boxes = _read_table(file, folder, margin, rows, group_column)
    else:
        boxes = _read_json(file, folder, margin, min_confidence, category, rows)
    if not _is_megadetector(boxes.document or {}) and (min_confidence or category is not None):
        raise ValueError(f"{file} has no confidences and categories of detections: they are MegaDetector's")
    if not boxes.regions:
        raise ValueError(f"{file} has no box. {boxes.note}".rstrip())
    check_some_exist(file, [region.image for region in boxes.regions])
    return boxes


# -------------------------------------------------------------------- tables


def _read_table(file: Path, folder: Path, margin: float, rows: str, group_column: str | None) -> Boxes:
    regions, labels = list[Region](), list[str]()
    known = dict[Region, tuple[int, str]]()
    names = table_columns(file, ("path", *BOX_COLUMNS))
    labelled, angles = "label" in names, [name for name in _ANGLES if name in names]
    more = [*("label",) * labelled, *(() if group_column is None else (group_column,)), *angles]
    found, note, rejected_labels = rows_of_labels(file, ("path", *BOX_COLUMNS, *more), rows if labelled else "all")
    groups = None if group_column is None else groups_of_rows(file, found, group_column)
    for line, cells in found:
        path, label = checked_cells(file, line, cells["path"], cells.get("label"), folder)
        _check_upright(cells, f"line {line} of {file} ({path})")
        box = tuple(_number(cells[name], f"line {line} of {file}: {name}") for name in BOX_COLUMNS)
        region = _region(located(folder, path), box, margin, f"line {line} of {file.name}")
        other_line, other = known.setdefault(region, (line, label))
        if other != label:
            raise ValueError(
                f"lines {other_line} and {line} of {file} give one box of {path} two labels, {other!r} and {label!r}"
            )
        regions.append(region)
        labels.append(label)
    return Boxes(regions, labels if labelled else None, groups, note, rejected_labels=rejected_labels)


def _number(cell: str, what: str) -> float:
    try:
        return int(cell)
    except ValueError:
        pass
    try:
        return float(cell)
    except ValueError:
        comma = ": write it with a point" if "," in cell else ""
        raise ValueError(f"{what} is {quoted(cell)}, not a number{comma}") from None


# -------------------------------------------------------------------- JSON


def _read_json(
    file: Path, folder: Path, margin: float, min_confidence: float, category: str | None, rows: str
) -> Boxes:
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # of JSON, and of UTF-8
        raise ValueError(f"{file} is not JSON in UTF-8: {error}") from error
    try:
        if isinstance(document, dict) and isinstance(document.get("images"), list):
            if _is_megadetector(document):
                return _read_megadetector(document, file, folder, margin, min_confidence, category)
            if isinstance(document.get("annotations"), list):
                return _read_coco(document, file, folder, margin, rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    raise ValueError(
        f'{file} is neither a COCO annotation file, with "images" and "annotations", nor MegaDetector\'s results, with '
        '"images" and "detection_categories"'
    )


def _is_megadetector(document: dict[str, Any]) -> bool:
    return "detection_categories" in document


def _forget_classification(document: dict[str, Any]) -> None:
    """Remove what MegaDetector's format says of an earlier classification."""
    detections = [entry for image in document["images"] for entry in image.get("detections") or ()]
    for fields in (document, document.get("info", {}), *detections):
        for name in [name for name in fields if name.startswith("classif")]:
            del fields[name]


def _read_coco(document: dict[str, Any], file: Path, folder: Path, margin: float, rows: str) -> Boxes:
    images = _by_id(document["images"], "file_name", "image", file)
    categories = _by_id(document.get("categories", ()), "name", "category", file)
    names = {number: str(category["name"]) for number, category in categories.items()}
    single = [entry for entry in document["annotations"] if not entry.get("iscrowd")]
    crowds = len(document["annotations"]) - len(single)
    unchecked = sum("score" in entry for entry in single) if rows == "checked" else 0
    single = [entry for entry in single if not unchecked or "score" not in entry]
    regions, labels = list[Region](), list[str]()
    for entry in single:
        where = f"annotation {entry['id']} of {file.name}"
        image, label = images.get(entry["image_id"]), names.get(entry.get("category_id"))
        if image is None:
            raise ValueError(f"{where} is of image {quoted(entry['image_id'])}, which is not among the images")
        if label is None and names:
            raise ValueError(
                f"{where} is of category {quoted(entry.get('category_id'))}, which is not among the categories"
            )
        if not entry.get("bbox"):
            raise ValueError(f"{where} ({image['file_name']}) has no bbox")
        for fields in (entry, entry.get("attributes")):
            _check_upright(fields, f"{where} ({image['file_name']})")
        regions.append(_region(located(folder, image["file_name"]), entry["bbox"], margin, where, image))
        labels.append(label or "")
    left_out = {"of crowds (iscrowd)": crowds, "with a score, answers of a network (--rows all takes them)": unchecked}
    listed = [f"{number} annotation{'s' * (number > 1)} {what}" for what, number in left_out.items() if number]
    note = f"Left out: {', '.join(listed)}." if listed else ""
    return Boxes(regions, labels if names else None, note=note, document=document, entries=single)


def _by_id(entries: Iterable[dict[str, Any]], name: str, kind: str, file: Path) -> dict[Any, dict[str, Any]]:
    """Images or categories of COCO by their id; ValueError if one id stands for two of them."""
    known = dict[Any, dict[str, Any]]()
    for entry in entries:
        other = known.setdefault(entry["id"], entry)
        if other[name] != entry[name]:
            raise ValueError(
                f"{file} has the {kind} id {quoted(entry['id'])} twice, for {quoted(other[name])} and "
                f"{quoted(entry[name])}. If two files were put together, give them one by one, or give "
                "the entries of one of them new ids"
            )
    return known


def _check_upright(fields: Any, where: str) -> None:
    """ValueError if an annotation or a row says that its box is turned: it would be cut out as if it were not."""
    if not isinstance(fields, dict):  # attributes may be of any kind
        return
    if len(fields.get("bbox") or ()) == 5:
        raise ValueError(f"{where} has a bbox of five numbers, the last of them an angle: {_UPRIGHT}")
    for name in _ANGLES:
        try:
            turned = float(str(fields.get(name) or 0).replace(",", ".").rstrip("° ")) % 360
        except ValueError:  # a field of the user's own
            continue
        if turned:
            raise ValueError(f"{where} is a turned box ({name} {fields[name]}): {_UPRIGHT}")


#: What to do about a turned box.
_UPRIGHT = "boxes are cut out upright. Give the upright box around it, or crop and turn the picture yourself"


def _read_megadetector(
    document: dict[str, Any], file: Path, folder: Path, margin: float, min_confidence: float, category: str | None
) -> Boxes:
    categories = document["detection_categories"]
    if category is not None and category not in categories.values():
        listed = ", ".join(map(repr, categories.values()))
        raise ValueError(f"{file} has no detections of category {category!r}, but of {listed}")
    regions, entries = list[Region](), list[dict[str, Any]]()
    failed = sum(image.get("detections") is None for image in document["images"])
    for image in document["images"]:
        for number, entry in enumerate(image.get("detections") or (), start=1):
            if entry["conf"] >= min_confidence and category in (None, categories.get(entry["category"])):
                where = f"detection {number} of {file.name}"
                regions.append(
                    _region(located(folder, image["file"]), entry["bbox"], margin, where, image, normalized=True)
                )
                entries.append(entry)
    note = f"Images that the detector could not read: {failed}." if failed else ""
    return Boxes(regions, note=note, document=document, entries=entries)


def _region(
    path: Path,
    box: Iterable[float],
    margin: float,
    where: str,
    image: dict[str, Any] | None = None,
    *,
    normalized: bool = False,
) -> Region:
    """A region whose picture has the size that a file says, if it says one."""
    size = ((image or {}).get("width"), (image or {}).get("height"))
    known = size if all(isinstance(side, int) and side > 0 for side in size) else None
    return Region(path, tuple(box), margin, normalized=normalized, picture_size=known, name=where)  # type: ignore[arg-type]
