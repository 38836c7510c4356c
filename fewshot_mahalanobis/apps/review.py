"""A collection of pictures that is labelled by a classifier and its user: the page of ``review``, without the page."""

from __future__ import annotations

import copy
import csv
import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.apps.active_learning import density, most_useful, typicality
from fewshot_mahalanobis.apps.labelling import UnreadableImages, image_batches
from fewshot_mahalanobis.apps.session import UNKNOWN, checked_label, labels_like
from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.boxes import BOX_COLUMNS, read_boxes
from fewshot_mahalanobis.images.folders import labelled_rows
from fewshot_mahalanobis.images.picture import read_size
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.support_set.features import Features

__all__ = ["Answer", "Page", "Review"]

#: Longest side of a thumbnail, in pixels.
_THUMBNAIL = 128
#: Answers of a page of the wall.
_PER_PAGE = 60
#: What a row of the table is about: the whole path of a file, and the box if it is about a region.
_Place = tuple[Any, ...]


class Answer(NamedTuple):
    """What is known about one picture."""

    picture: int
    label: str  # the user's, else the classifier's, which may be the one for pictures of no class
    probability: float  # of the most probable class
    labelled: bool  # by the user


class Page(NamedTuple):
    """Some of the answers with one label."""

    answers: list[Answer]  # those of the classifier first, the least sure before the others
    first: int  # place of the first of them among all with this label
    total: int
    likely: list[str]  # classes, the most probable of these pictures first


class Review:
    """Answers for pictures, corrected by their user, from whom the classifier learns.

    Each picture is read once and goes through the network once. Labels are in the table before a method returns.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted; its adaptation stays (``partial_fit``). It is not changed.
    paths : sequence of Path or Region
        All of one kind. Those that cannot be read are left out.
    table : Path
        CSV file with the columns path and label, and between them x, y, width and height for regions, as ``fit`` reads
        it. What it says about these pictures is taken as given before; its rows about others stay.

    Attributes
    ----------
    classifier : SimpleCNAPSClassifier
        What it has learned so far.
    paths : list of Path or Region
        A picture's place in it is what the methods know it by.
    labels : dict of int to str
        Those that the user has given.
    none : str
        The label of pictures that belong to no class. They teach what to reject if the classifier has an
        ``unknown_label``, and else nothing.
    problems : dict of Path or Region to str
        Pictures that were left out, and why.
    other_rows : int
        Rows of the table about other pictures.

    Raises
    ------
    UnreadableImages
        No picture can be read.
    ValueError
        The table is not one that a review wrote, or has a label that cannot be learned.
    """

    def __init__(self, classifier: SimpleCNAPSClassifier, paths: Sequence[Path | Region], table: Path) -> None:
        self.start = classifier
        self.table = table
        self.none = UNKNOWN if classifier.unknown_label is None else str(classifier.unknown_label)
        kinds = {isinstance(path, Region) for path in paths}
        if len(kinds) > 1:
            raise ValueError("there are boxes and whole images: review either the ones or the others")
        self._columns = ["path", *(BOX_COLUMNS if True in kinds else ()), "label"]
        earlier = _read_table(table, self._columns)
        self._read([*{_place(path): path for path in paths}.values()])
        by_place = {place: picture for picture, place in enumerate(self._places)}
        self._other_rows = {place: label for place, label in earlier.items() if place not in by_place}
        self._changes: list[dict[int, str | None]] = []  # what each answer has replaced
        self._passed: list[int] = []
        self.labels: dict[int, str] = {}
        here = {by_place[place]: label for place, label in earlier.items() if place in by_place}
        try:
            self._learn({picture: self._checked(label) for picture, label in here.items()})
        except ValueError as error:
            raise ValueError(f"{table}: {error}") from error

    @property
    def other_rows(self) -> int:
        """Rows of the table about other pictures."""
        return len(self._other_rows)

    # ---------------------------------------------------------------- looking

    def classes(self) -> dict[str, int]:
        """Number of answers of each class, and of pictures of no class where there are any."""
        known = dict.fromkeys([*map(str, self.classifier.classes_.tolist()), *self.labels.values()], 0)
        return known | Counter(self._answers)

    def answer(self, picture: int) -> Answer:
        """The answer for one picture."""
        probability = float(self._probabilities[picture].max())
        return Answer(picture, self._answers[picture], probability, picture in self.labels)

    def likely(self, pictures: Sequence[int]) -> list[tuple[str, float]]:
        """Classes with their mean probabilities for some pictures, the most probable first."""
        mean = self._probabilities[pictures].mean(axis=0)
        names = self.classifier.classes_.tolist()
        return [(str(names[place]), float(mean[place])) for place in (-mean).argsort(kind="stable")]

    def page(self, label: str, first: int = 0) -> Page:
        """The page of the answers with a label that has the one at the place ``first``."""
        answers = [self.answer(picture) for picture, other in enumerate(self._answers) if other == label]
        answers.sort(key=lambda answer: (answer.labelled, answer.probability))
        first = max(0, min(first, len(answers) - 1)) // _PER_PAGE * _PER_PAGE
        likely = self.likely([answer.picture for answer in answers] or [*range(len(self.paths))])
        shown = answers[first : first + _PER_PAGE]
        return Page(shown, first, len(answers), [name for name, _ in likely])

    def next_picture(self) -> int | None:
        """The picture whose label would teach most; None if all have one. Those passed over come last."""
        passed, without = set(self._passed), [i for i in range(len(self.paths)) if i not in self.labels]
        fresh = [picture for picture in without if picture not in passed]
        if not fresh:
            return next((picture for picture in self._passed if picture not in self.labels), None)
        nothing = [picture for picture, label in self.labels.items() if label == self.none]
        known = np.concatenate([self.classifier.fitted_head_.support.adapted.cpu().numpy(), self._adapted[nothing]])
        typical = typicality(self._adapted[fresh], self._densities[fresh], known)
        return fresh[most_useful(self._probabilities[fresh], typical)]

    # ---------------------------------------------------------------- answering

    def label(self, pictures: Sequence[int], label: str) -> None:
        """Label pictures, with a known class, a new one or ``none``, and learn from it.

        Raises
        ------
        ValueError
            The label cannot be used, or there is no picture. OSError if the table cannot be written. Nothing is
            changed.
        """
        if not pictures:
            raise ValueError("Select one or more pictures first.")
        label = self._checked(label)
        changed = {picture: self.labels.get(picture) for picture in pictures if self.labels.get(picture) != label}
        if changed:
            self._become({**self.labels, **dict.fromkeys(changed, label)})
            self._changes.append(changed)

    def undo(self) -> list[int]:
        """Take the last answer back; return its pictures, none if there is no answer left."""
        if not self._changes:
            return []
        labels: dict[int, str | None] = {**self.labels, **self._changes[-1]}
        self._become({picture: label for picture, label in labels.items() if label is not None})
        return [*self._changes.pop()]

    def pass_over(self, picture: int) -> None:
        """Ask about a picture later."""
        self._passed = [other for other in self._passed if other != picture] + [picture]

    @property
    def can_undo(self) -> bool:
        """Whether :meth:`undo` would change anything."""
        return bool(self._changes)

    # ---------------------------------------------------------------- inside

    def _read(self, paths: list[Path | Region]) -> None:
        """Read the pictures: paths, places, thumbnails, features, and what is wrong with the others."""
        self.problems: dict[Path | Region, str] = {}
        self.thumbnails: list[bytes] = []
        self.paths: list[Path | Region] = []
        self._places: list[_Place] = []
        features, size = list[Features](), self.start.model_.image_size
        readable = [path for path in paths if _is_text(path, self.problems)]
        if readable:
            batches = image_batches(self.start, readable, size, self.problems, "reading", self.start.batch_size)
            for batch in batches.decoded():
                features.append(self.start.features(batch))
                found = [readable[index] for index in batch.indices]
                self.thumbnails += map(_thumbnail, batch.pixels, found)
                self.paths += found
                self._places += map(_place, found, batch.boxes)
        if not self.paths:
            raise UnreadableImages(f"none of the {len(paths)} images can be read", self.problems)
        self._features = Features.joined(features)
        self._rows = self._features.rows()
        self._adapted = self._features.adapted.cpu().numpy()
        self._densities = density(self._adapted)

    def _checked(self, label: str) -> str:
        known = {*map(str, self.start.classes_.tolist()), *self.labels.values()}
        return checked_label(label, known, self.none)

    def _become(self, labels: dict[int, str]) -> None:
        """Take other labels; after an error all is as before."""
        before = self.labels
        self._learn(labels)
        try:
            self._write_table()
        except OSError:
            self._learn(before)
            raise

    def _learn(self, labels: dict[int, str]) -> None:
        """Fit to the support set and to labelled pictures, and answer for all pictures."""
        classifier = self.start
        of_none = [picture for picture, label in labels.items() if label == self.none]
        of_classes = [picture for picture in labels if picture not in of_none]
        names = labels_like(classifier.classes_, [labels[picture] for picture in of_classes])
        if classifier.unknown_label is not None:
            of_classes, names = [*of_classes, *of_none], [*names, *[classifier.unknown_label] * len(of_none)]
        if of_classes:
            shots = Features.joined(self._rows[picture] for picture in of_classes)
            # The regions of one photograph are left out together, as in `fit`.
            photographs = [self._places[picture][0] for picture in of_classes] if len(self._columns) > 2 else None
            classifier = copy.copy(classifier).partial_fit(shots, names, groups=photographs)
        predictions = classifier.predict_all(self._features)
        classes = [str(label) for label in classifier.classes_.tolist()]
        best = predictions.probabilities.argmax(axis=1)
        answers = [self.none if no else classes[k] for no, k in zip(predictions.unknown, best, strict=True)]
        for picture, label in labels.items():
            answers[picture] = label
        self.classifier, self.labels, self._answers = classifier, labels, answers
        self._probabilities = predictions.probabilities

    def table_text(self, folder: Path | None = None) -> str:
        """The table of labels as CSV, with whole paths; below ``folder``, paths from there."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        given = {self._places[picture]: label for picture, label in self.labels.items()}
        rows = {**self._other_rows, **given}.items()
        writer.writerow(self._columns)
        writer.writerows((_relative(path, folder), *box, label) for (path, *box), label in rows)
        return file.getvalue()

    def _write_table(self) -> None:
        text = self.table_text(Path(_absolute(self.table.parent)))
        with atomic_replace(self.table) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")


def _read_table(table: Path, columns: list[str]) -> dict[_Place, str]:
    """Place and label of each row that an earlier review has written; none if there was no review."""
    if not table.exists():
        return {}
    first, _, rest = table.read_text(encoding="utf-8-sig", errors="replace").partition("\n")
    if first.strip() != ",".join(columns):
        of_boxes = " of boxes" if len(columns) > 2 else ""
        raise ValueError(
            f"{table} is no table that a review{of_boxes} wrote, whose first line is {','.join(columns)}: name another "
            "file with -o"
        )
    if not rest.strip():
        return {}
    if len(columns) > 2:
        boxes = read_boxes(table)
        return dict(zip(map(_place, boxes.regions), boxes.labels or [], strict=True))
    return {_place(table.parent / path): label for path, label in labelled_rows(table, "path", "label")}


def _place(path: Path | Region, pixels: tuple[int, int, int, int] | None = None) -> _Place:
    """What a row about a picture begins with; ``pixels`` is the box of a region that is not in pixels."""
    if isinstance(path, Region):
        return (_absolute(path.image), *(pixels if path.normalized and pixels else path.box))
    return (_absolute(path),)


def _absolute(path: Path) -> str:
    """A file's one absolute path; links stay."""
    return os.path.abspath(path)  # noqa: PTH100 ("a/../b.jpg" is "b.jpg")


def _relative(path: str, folder: Path | None) -> str:
    """A path from a folder that it is in, else the whole."""
    if folder is None or not Path(path).is_relative_to(folder):
        return path
    inside = str(Path(path).relative_to(folder))
    return inside if inside == inside.lstrip() else path  # readers drop white space around a cell


def _is_text(path: Path | Region, problems: dict[Path | Region, str]) -> bool:
    """Whether a table can have the name of a file; if not, it is entered in ``problems``."""
    name = str(path.image if isinstance(path, Region) else path)
    if name.encode("utf-8", "replace").decode() == name and name == name.rstrip():
        return True
    problems[path] = "its name is not valid UTF-8, or ends with a space: rename it"
    return False


def _thumbnail(square: NDArray[np.uint8], path: Path | Region) -> bytes:
    """A JPEG file of a picture as the network reads it, with the aspect of its file or region."""
    sides = np.array(read_size(path))
    width, height = np.maximum(1, np.round(_THUMBNAIL * sides / sides.max()).astype(int))
    file = io.BytesIO()
    Image.fromarray(square).resize((width, height)).save(file, "JPEG", quality=80)
    return file.getvalue()
