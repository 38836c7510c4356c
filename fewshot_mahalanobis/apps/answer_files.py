"""Files of answers: a table as CSV or Parquet, JSON, or a file of boxes with the labels filled in."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fewshot_mahalanobis.apps.labelling import NEW_CLASS, LabelledFile
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.images.boxes import BOX_COLUMNS, Boxes
from fewshot_mahalanobis.support_set.answers import ANSWER_COLUMNS, GRADE_COLUMNS

#: What stands between the candidates of a cell.
_BETWEEN = "; "


class Column(NamedTuple):
    """A column of a table of answers; None where a cell is empty."""

    name: str
    kind: Literal["text", "label", "number", "share", "mark"]
    values: list[Any]


def answer_columns(
    predictions: Sequence[LabelledFile],
    classes: Sequence[Any] = (),
    top_k: int = 0,
    min_probability: float | None = None,
    errors: bool = False,
) -> list[Column]:
    """The columns of a table of answers, of which "checked" is empty, for the user's marks.

    Parameters
    ----------
    predictions : sequence of LabelledFile
    classes : sequence
        Those whose probabilities have a column, which is named after the class. Where another column has that name,
        "probability of " stands before it.
    top_k : int
        How many of the most probable labels have columns.
    min_probability : float, optional
        Mark answers as doubtful that are less probable.
    errors : bool
        Add a column for what is wrong with pictures that cannot be read.

    Returns
    -------
    list of Column
        The path; the box of regions, as in a table of boxes; the label; those of :data:`ANSWER_COLUMNS`, "doubtful"
        only with ``min_probability`` or candidates; "candidates", "group" and "new_class" if asked for; those of
        :data:`GRADE_COLUMNS` if the classifier rejects; probabilities; best labels; errors.
    """

    def answered(value: Callable[[LabelledFile], Any]) -> list[Any]:
        return [value(each) if each.error is None else None for each in predictions]

    columns = [Column("path", "text", [os.fspath(each.path) for each in predictions])]
    if any(each.box for each in predictions):
        sides = zip(*(each.box or [None] * len(BOX_COLUMNS) for each in predictions), strict=True)
        columns += [Column(name, "number", [*values]) for name, values in zip(BOX_COLUMNS, sides, strict=True)]
    columns += [
        Column("label", "label", answered(lambda each: each.label)),
        Column("checked", "text", [None] * len(predictions)),
        Column("predicted", "label", answered(lambda each: each.label)),
        Column("probability", "share", answered(lambda each: each.probability)),
    ]
    marks = answered(lambda each: _is_doubtful(each, min_probability))
    if any(mark is not None for mark in marks):
        columns.append(Column("doubtful", "mark", marks))
    if any(each.candidates is not None for each in predictions):
        joined = answered(lambda each: _BETWEEN.join(map(str, each.candidates or ())))
        columns.append(Column("candidates", "text", joined))
    if any(each.group is not None for each in predictions):
        columns.append(Column("group", "label", answered(lambda each: each.group)))
    if any(each.new_class is not None for each in predictions):
        columns.append(Column("new_class", "text", answered(lambda each: _new_name(each.new_class))))
    if any(each.grade is not None for each in predictions):
        columns.append(Column(GRADE_COLUMNS[0], "label", answered(lambda each: each.grade and each.grade.best)))
        for place, name in enumerate(GRADE_COLUMNS[1:], start=1):
            values = [None if each.grade is None else each.grade[place] for each in predictions]
            columns.append(Column(name, "share", values))
    best = list[Column]()
    ranked = [_ranked(each) for each in predictions] if top_k else []
    for place in range(top_k):
        found = [pairs[place] if pairs else (None, None) for pairs in ranked]
        best.append(Column(f"label_{place + 1}", "label", [label for label, _ in found]))
        best.append(Column(f"probability_{place + 1}", "share", [share for _, share in found]))
    if errors:
        best.append(Column("error", "text", [each.error for each in predictions]))
    taken = {"path", "label", *ANSWER_COLUMNS, *(column.name for column in (*columns, *best))}
    for label, name in zip(classes, _class_columns(classes, taken), strict=True):
        shares = [each.probabilities[label] if each.probabilities else None for each in predictions]
        columns.append(Column(name, "share", shares))
    return columns + best


def to_csv(columns: Sequence[Column]) -> str:
    """A table as CSV."""
    formats: dict[str, Callable[[Any], Any]] = {"share": "{:.6f}".format, "mark": lambda mark: "yes" if mark else ""}

    def cells(column: Column) -> list[Any]:
        shown = formats.get(column.kind, lambda value: value)
        return ["" if value is None else shown(value) for value in column.values]

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(column.name for column in columns)
    table.writerows(zip(*map(cells, columns), strict=True))
    return text.getvalue()


def write_parquet(file: Path, columns: Sequence[Column]) -> None:
    """Write a table as a Parquet file; an empty cell is null.

    Paths, labels of text and errors are strings (:func:`as_text`), marks are Booleans, the rest are numbers.
    ImportError if pyarrow is absent.
    """
    pa, parquet = import_parquet()
    types = {"text": pa.string(), "number": pa.float64(), "share": pa.float64(), "mark": pa.bool_()}

    def array(column: Column) -> Any:
        values = [as_text(value) for value in column.values]
        text = None if any(value is not None for value in values) else pa.string()
        return pa.array(values, types.get(column.kind, text))

    parquet.write_table(pa.table([*map(array, columns)], names=[as_text(column.name) for column in columns]), file)


def import_parquet() -> tuple[Any, Any]:
    """Import and return pyarrow and its module for Parquet; ImportError says what installs it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{error}: {install_command('parquet')}") from error
    return pyarrow, pyarrow.parquet


def as_text(value: Any) -> Any:
    r"""A value for Parquet: bytes of a name that are not UTF-8 are written as in ``caf\xe9.jpg``."""
    return os.fsencode(value).decode("utf-8", "backslashreplace") if isinstance(value, str) else value


def _class_columns(classes: Sequence[Any], taken: set[str]) -> list[str]:
    """Names for the columns of classes, different from one another and from those that are taken."""
    columns = []
    for name in map(str, classes):
        while name.strip() in taken:  # whoever reads the table may drop white space
            name = f"probability of {name}"
        taken.add(name.strip())
        columns.append(name)
    return columns


def _new_name(number: int | None) -> str | None:
    return NEW_CLASS.format(number) if number else None


def _is_doubtful(answer: LabelledFile, min_probability: float | None) -> bool | None:
    """Whether it may have several classes, or the label, or its rejection, is less probable; None if not asked."""
    if answer.candidates is not None:
        return len(answer.candidates) > 1
    if min_probability is None:
        return None
    unsure = answer.grade is not None and 1 - answer.grade.doubt / 2 < min_probability
    return unsure or (not answer.unknown and answer.probability < min_probability)


def _ranked(answer: LabelledFile) -> list[tuple[Any, float]]:
    """The classes with their probabilities, best first; none where they were not asked for."""
    return sorted((answer.probabilities or {}).items(), key=lambda pair: -pair[1])


def to_json(predictions: Iterable[LabelledFile], proba: bool, top_k: int, min_probability: float | None = None) -> str:
    """A list of objects with "path" and "label", with "probabilities" if ``proba`` and "top" if ``top_k`` > 0.

    A region has its "box" too. With ``min_probability`` or candidates each object says whether it is "doubtful". Then
    follow "candidates", "group" and "new_class" if asked for, and "probability" and :data:`GRADE_COLUMNS` if the
    classifier rejects. A picture that cannot be read has an "error", and null for a label.
    """
    rows = []
    for prediction in predictions:
        row: dict[str, Any] = {"path": str(prediction.path), "label": prediction.label}
        if prediction.box is not None:
            row["box"] = prediction.box
        if prediction.error is not None:
            row["error"] = prediction.error
        elif (doubtful := _is_doubtful(prediction, min_probability)) is not None:
            row["doubtful"] = doubtful
        if prediction.candidates is not None:
            row["candidates"] = list(prediction.candidates)
        if prediction.group is not None:
            row["group"] = prediction.group
        if prediction.new_class is not None:
            row["new_class"] = _new_name(prediction.new_class)
        if prediction.grade is not None:
            row |= {"probability": prediction.probability, **dict(zip(GRADE_COLUMNS, prediction.grade, strict=True))}
        if proba:
            row["probabilities"] = prediction.probabilities
        if top_k:
            row["top"] = [{"label": label, "probability": share} for label, share in _ranked(prediction)[:top_k]]
        rows.append(row)
    return json.dumps(rows, indent=1, ensure_ascii=False)


def filled_in(boxes: Boxes, answers: Sequence[LabelledFile], labels: Sequence[Any], top_k: int) -> str:
    """The JSON file that boxes come from, with the labels of their regions.

    Parameters
    ----------
    boxes : Boxes
    answers : sequence of LabelledFile
        For each of ``boxes.regions``, with probabilities.
    labels : sequence
        All labels that the classifier may give.
    top_k : int
        How many classes each box gets: its label, then the most probable others. A box that is unlike every class gets
        its label alone, with probability 1.
    """

    def shown(answer: LabelledFile) -> list[tuple[Any, float]] | None:
        if answer.error is not None:
            return None
        if answer.label not in (answer.probabilities or {}):
            return [(answer.label, 1.0)]
        # Its own label first, which a threshold may have chosen, then the most probable.
        return sorted(_ranked(answer), key=lambda pair: pair[0] != answer.label)[:top_k]

    return json.dumps(boxes.fill(labels, [*map(shown, answers)]), indent=1, ensure_ascii=False)
