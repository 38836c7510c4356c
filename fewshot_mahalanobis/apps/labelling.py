"""Fit a classifier to labelled image files, label other files, and write the answers as a table."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.boxes import BOX_COLUMNS, Boxes
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.folders import ANSWER_COLUMNS
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.support_set.estimator import Predictions

#: What is labelled.
Picture = TypeVar("Picture", bound=Path | Region)

#: Batch size where images are decoded while others are classified: small, because the first batch is waited for.
_BATCH = 16
#: Side of the squares of images that are only checked, in pixels.
_CHECKED_SIZE = 32


class UnreadableImages(ValueError):
    """Images cannot be read.

    Attributes
    ----------
    problems : mapping of Path or Region to str
        What is wrong with each.
    """

    def __init__(self, message: str, problems: Mapping[Any, str]) -> None:
        super().__init__(message)
        self.problems = problems


@dataclass(frozen=True)
class LabelledFile:
    """The label of one file or region, and the probabilities of the classes where they are wanted."""

    path: Path
    label: Any
    probability: float  # of the label; where that is of no class, of the most probable class
    unknown: bool = False  # whether it is of no class
    probabilities: dict[Any, float] | None = None
    box: tuple[float, float, float, float] | None = None  # of a region: x, y, width and height in pixels

    def doubtful(self, min_probability: float) -> bool:
        """Whether it is of no class, or less probable than this."""
        return self.unknown or self.probability < min_probability

    def top(self, k: int) -> list[tuple[Any, float]]:
        """The ``k`` most probable classes with their probabilities, best first."""
        return sorted((self.probabilities or {}).items(), key=lambda pair: -pair[1])[:k]


def fit_files(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Picture],
    labels: Sequence[str],
    *,
    groups: Sequence[Any] | None = None,
    skip_errors: bool = False,
    add: bool = False,
) -> dict[Picture, str]:
    """Fit a classifier to image files or regions of them, ``labels[i]`` for ``paths[i]``; ``groups`` are as in ``fit``.

    With ``add`` they are added to what it was fitted to before (``partial_fit``).

    Returns
    -------
    dict of Path or Region to str
        Images that were left out, and why; empty without ``skip_errors``.

    Raises
    ------
    UnreadableImages
        Images cannot be read and ``skip_errors`` is False, or no image of a class can be read.
    """
    problems: dict[Picture, str] = {}
    try:
        _fit(classifier, paths, labels, groups, add)
        return problems
    except ImageError as error:
        first = error
    with warnings.catch_warnings():  # what there is to remark comes with the images that can be read
        warnings.simplefilter("ignore")
        for _ in image_batches(classifier, paths, _CHECKED_SIZE, problems, "reading", _BATCH).decoded():
            pass  # to name every image that cannot be read
    if not problems:
        raise first
    _check(problems, len(paths), skip_errors)
    readable = [index for index, path in enumerate(paths) if path not in problems]
    if lost := sorted(set(labels) - {labels[index] for index in readable}):
        raise UnreadableImages(f"no image of class {lost[0]!r} can be read: nothing was fitted", problems)
    groups = None if groups is None else [groups[index] for index in readable]
    _fit(classifier, [paths[index] for index in readable], [labels[index] for index in readable], groups, add)
    return problems


def _fit(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Picture],
    labels: Sequence[str],
    groups: Sequence[Any] | None,
    add: bool,
) -> None:
    """Fit with a progress bar where somebody sees it."""
    verbose = classifier.verbose
    try:
        classifier.set_params(verbose=int(sys.stderr.isatty()))
        (classifier.partial_fit if add else classifier.fit)(paths, labels, groups=groups)
    finally:
        classifier.set_params(verbose=verbose)


def predict_files(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Picture],
    *,
    probabilities: bool = False,
    threshold: tuple[Any, float] | None = None,
    skip_errors: bool = False,
) -> tuple[list[LabelledFile], dict[Picture, str]]:
    """Label image files, or regions of them, by a fitted classifier.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted.
    paths : sequence of Path or Region
    probabilities : bool
        Keep the probabilities of every class.
    threshold : (label, float), optional
        A class and a probability: an image gets this label if its probability is at least that, else the most probable
        other one. Images unlike every class stay unknown. For two classes it is scikit-learn's
        ``FixedThresholdClassifier``.
    skip_errors : bool
        Leave out images that cannot be read.

    Returns
    -------
    predictions : list of LabelledFile
        In the order of ``paths``.
    problems : dict of Path or Region to str
        Images that were left out, and why.

    Raises
    ------
    UnreadableImages
        Images cannot be read and ``skip_errors`` is False, or none can be read. It lists all of them.
    """
    classes, size = classifier.classes_.tolist(), classifier.model_.image_size
    predictions: list[LabelledFile] = []
    problems: dict[Picture, str] = {}
    on_cpu = classifier.device_.type == "cpu"
    batches = image_batches(
        classifier, paths, size, problems, "predicting", classifier.batch_size if on_cpu else _BATCH
    )
    batches.ahead = not on_cpu  # as in ``SimpleCNAPSClassifier.predict``
    for batch in batches.decoded():
        if problems and not skip_errors:
            continue  # only to find the other images that cannot be read
        answers = classifier.predict_all(batch)
        rows = answers.probabilities.tolist() if probabilities else [None] * len(batch.indices)
        labels, best = answers.labels, answers.probabilities.max(axis=1)
        if threshold is not None:
            labels, best = _at_threshold(answers, classes, *threshold)
        unknown = answers.unknown.tolist()
        answered = zip(batch.indices, labels.tolist(), best.tolist(), unknown, rows, batch.boxes, strict=True)
        for index, label, probability, is_unknown, row, pixels in answered:
            image, by_class = paths[index], None if row is None else dict(zip(classes, row, strict=True))
            if isinstance(image, Region):
                path, box = Path(image.image), pixels if image.normalized else image.box
            else:
                path, box = image, None
            predictions.append(LabelledFile(path, label, probability, is_unknown, by_class, box))
    _check(problems, len(paths), skip_errors)
    return predictions, problems


def _at_threshold(
    answers: Predictions, classes: list[Any], label: Any, threshold: float
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Labels (m,), ``label`` where its probability reaches the threshold, else the best other one, and their shares."""
    column = classes.index(label)
    ranked = answers.probabilities.copy()
    ranked[:, column] = np.where(ranked[:, column] >= threshold, np.inf, -np.inf)
    chosen = np.where(answers.unknown, answers.probabilities.argmax(axis=1), ranked.argmax(axis=1))
    labels = np.array(classes, answers.labels.dtype)[chosen]
    probabilities = np.take_along_axis(answers.probabilities, chosen[:, None], axis=1)[:, 0]
    return np.where(answers.unknown, answers.labels, labels), probabilities


def write_csv(
    stream: TextIO,
    predictions: Iterable[LabelledFile],
    classes: Sequence[Any],
    top_k: int,
    min_probability: float | None = None,
) -> None:
    """Write a table of answers, which says of each row whether somebody has checked it: nobody has.

    Its columns are path and label; those of :data:`~fewshot_mahalanobis.images.folders.ANSWER_COLUMNS`, "doubtful" only
    with ``min_probability``; the probability of each of ``classes``; the ``top_k`` best labels with theirs.

    Where a prediction is of a region, its box stands between path and label, in the columns of a table of boxes. The
    column of a class is named after it. Where another column has that name, "probability of " stands before it.
    """
    table = csv.writer(stream, lineterminator="\n")
    best = [f"{name}_{place}" for place in range(1, top_k + 1) for name in ("label", "probability")]
    predictions = [*predictions]
    box = BOX_COLUMNS if any(prediction.box for prediction in predictions) else ()
    own = [name for name in ANSWER_COLUMNS if name != "doubtful" or min_probability is not None]
    taken = {"path", "label", *box, *ANSWER_COLUMNS, *best}
    table.writerow(["path", *box, "label", *own, *_class_columns(classes, taken), *best])
    for prediction in predictions:
        answer: list[Any] = ["", prediction.label, "" if prediction.unknown else f"{prediction.probability:.6f}"]
        if min_probability is not None:
            answer.append("yes" if prediction.doubtful(min_probability) else "")
        probabilities = [f"{(prediction.probabilities or {})[name]:.6f}" for name in classes]
        top = [cell for label, share in prediction.top(top_k) for cell in (label, f"{share:.6f}")]
        sides = prediction.box or [""] * len(box)
        table.writerow([prediction.path, *sides, prediction.label, *answer, *probabilities, *top])


def _class_columns(classes: Sequence[Any], taken: set[str]) -> list[str]:
    """Names of the columns of classes, unlike each other and unlike those that are taken."""
    columns = []
    for name in map(str, classes):
        while name.strip() in taken:  # whoever reads the table may drop white space
            name = f"probability of {name}"
        taken.add(name.strip())
        columns.append(name)
    return columns


def to_json(predictions: Iterable[LabelledFile], proba: bool, top_k: int, min_probability: float | None = None) -> str:
    """List of objects with "path" and "label", with "probabilities" if ``proba`` and "top" if ``top_k`` > 0.

    Those of a region have its "box" too, and with ``min_probability`` each says whether it is "doubtful".
    """
    rows = []
    for prediction in predictions:
        row: dict[str, Any] = {"path": str(prediction.path), "label": prediction.label}
        if prediction.box is not None:
            row["box"] = prediction.box
        if min_probability is not None:
            row["doubtful"] = prediction.doubtful(min_probability)
        if proba:
            row["probabilities"] = prediction.probabilities
        if top_k:
            row["top"] = [{"label": label, "probability": share} for label, share in prediction.top(top_k)]
        rows.append(row)
    return json.dumps(rows, indent=1, ensure_ascii=False)


def filled_in(
    boxes: Boxes,
    predictions: Iterable[LabelledFile],
    problems: Collection[Path | Region],
    labels: Sequence[Any],
    top_k: int,
) -> str:
    """The JSON file that boxes come from, with the labels of their regions.

    Parameters
    ----------
    boxes : Boxes
    predictions, problems
        What :func:`predict_files` returned for ``boxes.regions``, with probabilities.
    labels : sequence
        All labels that the classifier may give.
    top_k : int
        So many classes for each box: its label, then the most probable others. One that is unlike every class gets its
        label alone, as sure.
    """
    answers = iter(predictions)

    def answer() -> list[tuple[Any, float]]:
        prediction = next(answers)
        probabilities = prediction.probabilities or {}
        if prediction.label not in probabilities:
            return [(prediction.label, 1.0)]
        # Its own label first, which a threshold may have chosen, then the most probable.
        return sorted(prediction.top(len(probabilities)), key=lambda pair: pair[0] != prediction.label)[:top_k]

    document = boxes.fill(labels, [None if region in problems else answer() for region in boxes.regions])
    return json.dumps(document, indent=1, ensure_ascii=False)


def image_batches(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Picture],
    size: int,
    problems: dict[Picture, str],
    progress: str,
    batch_size: int,
) -> ImageBatches:
    """Batches of image files; files that cannot be read are left out and entered in ``problems``."""

    def record(error: ImageError) -> None:
        assert error.index is not None
        problems[paths[error.index]] = error.reason

    return ImageBatches(
        paths,
        size,
        batch_size=batch_size,
        on_error=record,
        value_range=classifier.value_range,
        progress=progress if sys.stderr.isatty() else None,
    )


def _check(problems: Mapping[Any, str], total: int, skip_errors: bool) -> None:
    if problems and (not skip_errors or len(problems) == total):
        remedy = "" if skip_errors else ": mend or remove them, or leave them out with --skip-errors"
        images = "1 image" if total == 1 else f"{total} images"
        raise UnreadableImages(f"{len(problems)} of {images} cannot be read{remedy}", problems)
