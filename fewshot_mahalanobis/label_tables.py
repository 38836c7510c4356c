"""Tables of image files and labels: the CSV that `fit` reads, the CSV and JSON that `predict` writes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from fewshot_mahalanobis.labelling import Prediction


def read_labels(file: Path) -> tuple[list[Path], list[str]]:
    """Paths and labels of a CSV file with columns "path" and "label", which are separated by comma, semicolon or tab.

    Relative paths are relative to the folder of the CSV file; white space around a cell is dropped. FileNotFoundError
    if there is no file; ValueError if it is no such table, a row lacks its path or label, or none of the images exists.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # -sig: spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f'{file} is not in UTF-8: save it as "CSV UTF-8"') from error
    separator = max(",;\t", key=text.partition("\n")[0].count)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    table.fieldnames = [name.strip() for name in table.fieldnames or ()]
    if missing := {"path", "label"} - {*table.fieldnames}:
        raise ValueError(f"{file} has no column {min(missing)!r}: its first line must name path and label")
    paths, labels = [], []
    for row in table:
        path, label = ((row[name] or "").strip() for name in ("path", "label"))
        if not path or not label:
            raise ValueError(f"line {table.line_num} of {file} lacks a path or a label")
        paths.append(file.parent / path)
        labels.append(label)
    if not paths:
        raise ValueError(f"{file} lists no image")
    if not any(path.exists() for path in paths):
        raise ValueError(
            f"none of the {len(paths)} files that {file} lists is there; the first would be {paths[0]}. "
            "Relative paths start at the folder of the table: put it back where it was, or write full paths"
        )
    return paths, labels


def write_csv(stream: TextIO, predictions: Iterable[Prediction], classes: Sequence[Any], top_k: int) -> None:
    """Write path and label, a probability for each of ``classes``, then the ``top_k`` best labels with theirs."""
    table = csv.writer(stream, lineterminator="\n")
    best = [f"{name}_{place}" for place in range(1, top_k + 1) for name in ("label", "probability")]
    table.writerow(["path", "label", *classes, *best])
    for prediction in predictions:
        probabilities = [f"{(prediction.probabilities or {})[name]:.6f}" for name in classes]
        top = [cell for label, share in prediction.top(top_k) for cell in (label, f"{share:.6f}")]
        table.writerow([prediction.path, prediction.label, *probabilities, *top])


def to_json(predictions: Iterable[Prediction], proba: bool, top_k: int) -> str:
    """List of objects with "path", "label", and "probabilities" and "top" where asked for."""
    rows = []
    for prediction in predictions:
        row: dict[str, Any] = {"path": str(prediction.path), "label": prediction.label}
        if proba:
            row["probabilities"] = prediction.probabilities
        if top_k:
            row["top"] = [{"label": label, "probability": share} for label, share in prediction.top(top_k)]
        rows.append(row)
    return json.dumps(rows, indent=1, ensure_ascii=False)
