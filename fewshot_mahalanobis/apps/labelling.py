"""Fit a classifier to labelled image files, and label other files."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_mahalanobis.apps.journal import Journal
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.folders import LabelledImages
from fewshot_mahalanobis.images.memory import remembered_in
from fewshot_mahalanobis.images.picture_sources import Pictures
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.images.same_picture import same_pictures, small_pictures
from fewshot_mahalanobis.support_set.copies import equal_rows
from fewshot_mahalanobis.support_set.estimator import Predictions
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.new_classes import check_proposes, proposed_classes
from fewshot_mahalanobis.support_set.prediction_sets import largest_surprise, surprises_within

#: An image file, or a region of one.
Picture = TypeVar("Picture", bound=Path | Region)

#: What a proposed class is called until somebody names it, by its number from 1 on.
NEW_CLASS = "new-{}"
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


class Grade(NamedTuple):
    """How near an answer is to rejection, or a rejection to an answer."""

    best: Any  # the most probable class, even if the picture is of no class
    outlier_score: float
    outlier_threshold: float  # above it a picture is of no class
    doubt: float  # from 0 to 1, by the nearest boundary: between classes, or of rejection


@dataclass(frozen=True)
class LabelledFile:
    """The label of one file or region, and the probabilities of the classes if they were asked for."""

    path: Path
    label: Any
    probability: float  # of the label, or of the most probable class if the picture is of no class
    unknown: bool = False  # whether it is of no class
    probabilities: dict[Any, float] | None = None
    box: tuple[float, float, float, float] | None = None  # of a region: x, y, width and height in pixels
    error: str | None = None  # why the picture cannot be read; there is no label then
    grade: Grade | None = None  # by a classifier that rejects
    candidates: tuple[Any, ...] | None = None  # the classes that it may have, if a coverage was asked for
    group: Any = None  # all pictures of one group share an answer
    new_class: int | None = None  # number of the new class proposed for it, from 1 on, 0 for none; None if not asked

    @classmethod
    def unreadable(cls, picture: Path | Region, error: str) -> LabelledFile:
        """The entry of a picture that cannot be read."""
        box = picture.box if isinstance(picture, Region) and not picture.normalized else None
        return cls(_file(picture), None, 0.0, box=box, error=error)

    def to_state(self) -> dict[str, Any]:
        """Everything but the path, in types of JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "path"}
        probabilities = None if self.probabilities is None else [*self.probabilities.values()]
        return {**values, "probabilities": probabilities}

    @classmethod
    def from_state(cls, picture: Path | Region, values: dict[str, Any], classes: Sequence[Any]) -> LabelledFile:
        """Undo :meth:`to_state`, for a picture and the classes of the model."""
        shares, box = values["probabilities"], values["box"]
        by_class = None if shares is None else dict(zip(classes, shares, strict=True))
        grade, candidates = values["grade"], values["candidates"]
        values = {
            **values,
            "probabilities": by_class,
            "box": None if box is None else tuple(box),
            "grade": None if grade is None else Grade(*grade),
            "candidates": None if candidates is None else tuple(candidates),
        }
        return cls(_file(picture), **values)


def fit_files(
    classifier: SimpleCNAPSClassifier,
    labelled: LabelledImages,
    unlabelled: Pictures,
    *,
    skip_errors: bool = False,
    add: bool = False,
) -> dict[Path | Region, str]:
    """Fit a classifier to labelled and unlabelled image files, or regions of them.

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
    problems: dict[Path | Region, str] = {}
    try:
        _fit(classifier, labelled, unlabelled, add)
        return problems
    except ImageError as error:
        first = error
    with warnings.catch_warnings():  # they come with the fit to the images that can be read
        warnings.simplefilter("ignore")
        for some in filter(None, (labelled.images, unlabelled.images)):
            for _ in image_batches(classifier, some, _CHECKED_SIZE, problems, "reading", _BATCH).decoded():
                pass  # to name every image that cannot be read
    if not problems:
        raise first
    _check(problems, len(labelled.images) + len(unlabelled.images), skip_errors)
    readable = labelled.where([image not in problems for image in labelled.images])
    if missing := sorted({*labelled.labels} - {*readable.labels}):
        raise UnreadableImages(f"no image of class {missing[0]!r} can be read: nothing was fitted", problems)
    _fit(classifier, readable, unlabelled.where([image not in problems for image in unlabelled.images]), add)
    return problems


def _fit(classifier: SimpleCNAPSClassifier, labelled: LabelledImages, unlabelled: Pictures, add: bool) -> None:
    """Fit with a progress bar where somebody sees it."""
    verbose = classifier.verbose
    try:
        classifier.set_params(verbose=int(sys.stderr.isatty()))
        (classifier.partial_fit if add else classifier.fit)(
            labelled.images,
            labelled.labels,
            groups=labelled.groups,
            unlabelled=unlabelled.images or None,
            unlabelled_groups=unlabelled.groups or None,
        )
    finally:
        classifier.set_params(verbose=verbose)


def predict_files(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Picture],
    *,
    probabilities: bool = False,
    threshold: tuple[Any, float] | None = None,
    coverage: float | None = None,
    groups: Sequence[Any] | None = None,
    transductive: bool = False,
    propose: bool = False,
    skip_errors: bool = False,
    journal: Journal | None = None,
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
    coverage : float, optional
        Find the classes that each image may have, as ``predict_set`` does.
    groups : sequence of str or number, optional
        Images of one group share an answer, as in ``predict``. Their features are kept until the last is computed, and
        no journal can have the answers before.
    transductive : bool
        Learn from all of the images for these answers, as ``predict`` does. What holds for groups holds here too.
    propose : bool
        Propose new classes among the images of no class, as ``propose_classes`` does. What holds for groups holds here
        too.
    skip_errors : bool
        Leave out images that cannot be read.
    journal : Journal, optional
        About this classifier and these settings. Images that have an answer in it are not read again, and new answers
        are added batch by batch: whatever ends the call, the next one goes on from there.

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
    ValueError
        The support images cannot promise the coverage, or new classes are to be proposed and none is rejected.
    OSError
        The journal cannot be written.
    """
    head = classifier.fitted_head_
    classes, size = head.classes.tolist(), classifier.model_.image_size
    surprise = None if coverage is None else largest_surprise(head, coverage)
    if propose:
        check_proposes(head, "image")
    predictions, fresh, again = dict[int, LabelledFile](), list[int](), list[int]()
    for index, path in enumerate(paths):
        known = None if journal is None else journal.find(path)
        if known is None:
            fresh.append(index)
        elif known["error"] is not None:  # it may be the decoder that was missing
            again.append(index)
        else:
            predictions[index] = LabelledFile.from_state(path, known, classes)
    # Those that could not be read come last, so that the other batches are those of an undisturbed run.
    places = fresh + again
    problems: dict[Picture, str] = {}
    if places:
        on_cpu = classifier.device_.type == "cpu"
        batches = image_batches(
            classifier,
            [paths[place] for place in places],
            size,
            problems,
            "predicting",
            classifier.batch_size if on_cpu else _BATCH,
        )
        batches.ahead = not on_cpu  # as in ``SimpleCNAPSClassifier.predict``
        in_journal = set[Picture]()
        by_place = None if groups is None else [groups[place] for place in places]
        every = skip_errors or journal is not None
        for rows, boxes, answers, proposed in _answered(
            classifier, batches, by_place, transductive, propose, problems, every
        ):
            indices = [places[row] for row in rows]
            found = _labelled(head, answers, threshold, surprise, probabilities)
            for index, pixels, values, new_class in zip(indices, boxes, found, proposed, strict=True):
                image = paths[index]
                box = (pixels if image.normalized else image.box) if isinstance(image, Region) else None
                group = None if groups is None else groups[index]
                predictions[index] = LabelledFile(_file(image), **values, box=box, group=group, new_class=new_class)
            if journal is not None:
                _note_in(journal, problems, in_journal, [(paths[index], predictions[index]) for index in indices])
        if journal is not None:
            _note_in(journal, problems, in_journal)
    _check(problems, len(paths), skip_errors)
    return [predictions[index] for index in sorted(predictions)], problems


def _answered(
    classifier: SimpleCNAPSClassifier,
    batches: ImageBatches,
    groups: Sequence[Any] | None,
    transductive: bool,
    propose: bool,
    problems: Mapping[Any, str],
    every: bool,
) -> Iterator[tuple[list[int], list[Any], Predictions, list[int | None]]]:
    """Answers, with the indices and boxes of their images, and the new classes that are proposed for them.

    They come batch by batch, or all at once where an answer may depend on other images. Without ``every``, there are
    none after the first image that cannot be read: the rest are only read, to find all such images.
    """
    indices, boxes, features, pictures = list[int](), list[Any](), list[Features](), list[Tensor]()
    for batch in batches.decoded():
        if problems and not every:
            continue  # only to find the other images that cannot be read
        if groups is None and not transductive and not propose:
            yield [*batch.indices], [*batch.boxes], classifier.predict_all(batch), [None] * len(batch.indices)
            continue
        indices, boxes = [*indices, *batch.indices], [*boxes, *batch.boxes]
        features.append(classifier.features(batch))
        if propose:
            pictures.append(small_pictures(torch.from_numpy(batch.pixels).permute(0, 3, 1, 2) / 127.5 - 1))
    if features:
        names, every_row = None if groups is None else [groups[index] for index in indices], Features.joined(features)
        answers = classifier.predict_all(every_row, groups=names, transductive=transductive)
        proposed: list[int | None] = [None] * len(indices)
        if propose:
            x = every_row.adapted
            copies = equal_rows(x) if batches.is_narrow else same_pictures(torch.cat(pictures), x)
            found = proposed_classes(classifier.fitted_head_, x, answers.unknown, copies, names)
            proposed = (found + 1).tolist()
        yield indices, boxes, answers, proposed


def _labelled(
    head: FittedHead,
    answers: Predictions,
    threshold: tuple[Any, float] | None,
    surprise: float | None,
    probabilities: bool,
) -> Iterator[dict[str, Any]]:
    """What each answer says: the fields of a :class:`LabelledFile` but path, box, group and new class."""
    classes, labels = head.classes.tolist(), answers.labels.tolist()
    limit = None if head.outliers is None else head.outliers.threshold
    shares = answers.probabilities
    best = shares.argmax(axis=1) if threshold is None else _at_threshold(answers, classes, *threshold)
    with np.errstate(divide="ignore"):
        inside = None if surprise is None else surprises_within(np.log(shares), surprise)
    ranked = (-shares).argsort(axis=1, kind="stable")
    for row, k in enumerate(best.tolist()):
        unknown = bool(answers.unknown[row])
        graded = classes[k], float(answers.outlier_scores[row]), limit, float(answers.doubts[row])
        yield {
            "label": labels[row] if unknown else classes[k],
            "probability": float(shares[row, k]),
            "unknown": unknown,
            "probabilities": dict(zip(classes, shares[row].tolist(), strict=True)) if probabilities else None,
            "grade": None if limit is None else Grade(*graded),  # type: ignore[arg-type]
            "candidates": None if inside is None else tuple(classes[j] for j in ranked[row] if inside[row, j]),
        }


def _file(picture: Path | Region) -> Path:
    return Path(picture.image) if isinstance(picture, Region) else picture


def _note_in(
    journal: Journal,
    problems: Mapping[Picture, str],
    in_journal: set[Picture],
    answers: Iterable[tuple[Picture, LabelledFile]] = (),
) -> None:
    """Add answers to a journal, and those of the ``problems`` that are not ``in_journal``."""
    unreadable = [
        (picture, LabelledFile.unreadable(picture, problems[picture])) for picture in problems.keys() - in_journal
    ]
    journal.add((picture, answer.to_state()) for picture, answer in (*answers, *unreadable))
    in_journal.update(problems)


def with_unreadable(
    pictures: Sequence[Picture], predictions: Iterable[LabelledFile], problems: Mapping[Picture, str]
) -> list[LabelledFile]:
    """What :func:`predict_files` returned as one list in the order of the pictures."""
    answers = iter(predictions)
    return [
        LabelledFile.unreadable(picture, problems[picture]) if picture in problems else next(answers)
        for picture in pictures
    ]


def _at_threshold(answers: Predictions, classes: list[Any], label: Any, threshold: float) -> NDArray[np.int64]:
    """Indices of classes (m,): ``label`` where its probability reaches the threshold, else the best other one."""
    column = classes.index(label)
    ranked = answers.probabilities.copy()
    ranked[:, column] = np.where(ranked[:, column] >= threshold, np.inf, -np.inf)
    return np.where(answers.unknown, answers.probabilities.argmax(axis=1), ranked.argmax(axis=1))


def image_batches(
    classifier: SimpleCNAPSClassifier,
    paths: Sequence[Picture],
    size: int,
    problems: dict[Picture, str],
    progress: str | None,
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
        pages=classifier.pages,
        bands=classifier.bands,
        progress=progress if sys.stderr.isatty() else None,
        memory=remembered_in(classifier.memory),
    )


def _check(problems: Mapping[Any, str], total: int, skip_errors: bool) -> None:
    if problems and (not skip_errors or len(problems) == total):
        remedy = "" if skip_errors else ": mend or remove them, or leave them out with --skip-errors"
        images = "1 image" if total == 1 else f"{total} images"
        raise UnreadableImages(f"{len(problems)} of {images} cannot be read{remedy}", problems)
