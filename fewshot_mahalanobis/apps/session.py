"""What the app's page does: classes that grow by pictures, pictures to classify, and the classifier between them."""

from __future__ import annotations

import copy
import io
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.apps.active_learning import most_useful_first
from fewshot_mahalanobis.apps.example import photographs
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import DecodedBatch, ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.labels import folded
from fewshot_mahalanobis.support_set.learning_curve import LearningCurve

__all__ = ["UNKNOWN", "Answer", "Neighbour", "Picture", "Session"]

#: The label of pictures that belong to no class.
UNKNOWN = "unknown"
#: Share of the pictures of known classes that are called that by mistake.
_FALSE_REJECTION_RATE = 0.05
#: Support images that are shown beside an answer, nearest first.
_NEIGHBOURS = 6
#: Side of a thumbnail, in pixels.
_THUMBNAIL = 112


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as it was read once."""

    pixels: NDArray[np.uint8]  # (s, s, 3), as the network reads it
    features: Features | None  # one row, by a network that stays as it is; None if every fit adapts it anew
    number: int = field(default_factory=itertools.count().__next__)  # by which the page names it

    @cached_property
    def thumbnail(self) -> bytes:
        """A JPEG file."""
        file = io.BytesIO()
        Image.fromarray(self.pixels).resize((_THUMBNAIL, _THUMBNAIL)).save(file, "JPEG", quality=80)
        return file.getvalue()


class Neighbour(NamedTuple):
    """A support image that is near a query."""

    label: str
    distance: float  # Euclidean, between adapted features
    picture: Picture | None  # None where it came with a model file, which keeps no pictures


class Answer(NamedTuple):
    """The answer for one picture."""

    label: str  # the most probable class, whether or not the picture is of one
    unknown: bool  # always False where no class has two pictures: the threshold is found by leaving one out
    probabilities: dict[str, float]
    picture: Picture
    features: NDArray[np.floating]  # (d,)


class Session:
    """Classes that grow by pictures, and the classifier of them, fitted anew after every change.

    Every picture is read once. If the network stays as it is, it goes through the network once too, and a change costs
    what the head does.

    Parameters
    ----------
    start : SimpleCNAPS or SimpleCNAPSClassifier
        A pretrained model to fit, or a fitted classifier whose classes are there from the start and whose adaptation
        stays (``partial_fit``).
    device : str
        Where a pretrained model runs.

    Attributes
    ----------
    classifier : SimpleCNAPSClassifier or None
        None as long as there is nothing to tell apart: one class of one picture, or none.
    images : list of Picture
        The pictures that were added.
    names : list of str
        Their classes, or ``none``.
    none : str
        The label of pictures that belong to no class. They teach what to reject.
    drops : list of list of Picture
        The pictures to classify, as they were given together.
    answers : list of Answer
        One for each of ``queries``; empty as long as there is no classifier.
    marks : dict of Picture to str
        What the user says that queries are, to be learned by :meth:`learn`.
    curve : LearningCurve or None
        Of the classifier; None as long as no class has two pictures.
    """

    def __init__(self, start: SimpleCNAPS | SimpleCNAPSClassifier, device: str = "auto") -> None:
        self.start = start
        self.device = device
        self.images: list[Picture] = []
        self.names: list[str] = []
        self.drops: list[list[Picture]] = []
        self.answers: list[Answer] = []
        self.marks: dict[Picture, str] = {}
        self.classifier = start if isinstance(start, SimpleCNAPSClassifier) else None
        self.curve = _curve(self.classifier)
        unknown_label = None if self.classifier is None else self.classifier.unknown_label
        self.none = UNKNOWN if unknown_label is None else str(unknown_label)
        self._folder = tempfile.TemporaryDirectory(prefix="fewshot-app-")

    @property
    def image_size(self) -> int:
        """Side of the square that images are resized to, in pixels."""
        if isinstance(self.start, SimpleCNAPSClassifier):
            return self.start.model_.image_size
        return cast(SimpleCNAPS, self.start).image_size  # the type checker does not exclude what it cannot see through

    @property
    def queries(self) -> list[Picture]:
        """The pictures to classify."""
        return [picture for drop in self.drops for picture in drop]

    @property
    def can_learn_none(self) -> bool:
        """Whether pictures of no class teach anything: a model file without ``unknown_label`` rejects none."""
        return not isinstance(self.start, SimpleCNAPSClassifier) or self.start.unknown_label is not None

    def count_of_none(self) -> int:
        """Pictures of no class, those of the classifier it started from included."""
        started = isinstance(self.start, SimpleCNAPSClassifier)
        of_file = cast(SimpleCNAPSClassifier, self.start).fitted_head_.negatives if started else None
        return self.names.count(self.none) + (0 if of_file is None else len(of_file.adapted))

    def counts(self) -> dict[str, int]:
        """Support images of each class, those of the classifier it started from included."""
        counts = Counter(name for name in self.names if name != self.none)
        if isinstance(self.start, SimpleCNAPSClassifier):
            shots = zip(self.start.classes_, self.start.class_counts_, strict=True)
            counts += Counter({str(label): int(count) for label, count in shots})
        return dict(sorted(counts.items()))

    # ---------------------------------------------------------------- teaching

    def add(self, name: str, files: Sequence[str]) -> dict[str, str]:
        """Add image files to a class, a new one or a known one, or to the pictures of no class.

        Parameters
        ----------
        name : str
            ``none`` for pictures of no class.
        files : sequence of paths

        Returns
        -------
        dict of str to str
            File name to reason, of files that cannot be read. They are left out.

        Raises
        ------
        ValueError
            The name or the files are missing, the name looks like that of another class, no file can be read, or
            pictures of no class cannot be learned. Nothing is added.
        """
        name = self._checked(name)
        if not files:
            what = "no class" if name == self.none else f"“{name}”"
            raise ValueError(f"Choose one or more pictures of {what} first.")
        read, problems = self._read(files)
        self._become(self.images + read, self.names + [name] * len(read))
        return problems

    def remove(self, name: str) -> None:
        """Remove the pictures that were added to a class; those of a model file stay."""
        self._keep([other != name for other in self.names])

    def remove_picture(self, index: int) -> None:
        """Remove one of ``images``."""
        self._keep([other != index for other in range(len(self.images))])

    def pictures(self) -> list[tuple[int, Picture, str]]:
        """The pictures that were added, class by class: index in ``images``, picture, class."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        return [(index, self.images[index], self.names[index]) for index in order]

    def add_example(self) -> None:
        """Add three classes, pieces of two photographs, and ask about seven more pieces."""
        example = photographs()
        pictures = self._pictures(ImageBatches([*example.support, *example.queries, example.sky], self.image_size))
        support, queries = pictures[: len(example.support)], pictures[len(example.support) :]
        self.drops.append(queries)
        self._become(self.images + support, self.names + example.labels)

    def _checked(self, name: str) -> str:
        name = checked_label(name, {**self.counts(), **dict.fromkeys(self.marks.values())}, self.none)
        if name == self.none and not self.can_learn_none:
            raise ValueError(
                "This model file rejects nothing, so pictures of no class teach it nothing. To learn from them, make "
                "the file with an unknown label: fit --unknown-label."
            )
        return name

    def _read(self, files: Sequence[str]) -> tuple[list[Picture], dict[str, str]]:
        """Pictures, and what is wrong with files that are none; ValueError if all are."""
        if not files:
            return [], {}
        files, errors = [*dict.fromkeys(files)], list[ImageError]()
        if isinstance(self.start, SimpleCNAPSClassifier):
            batches = self.start.image_batches(files, on_error=errors.append)
        else:
            batches = ImageBatches(files, self.image_size, on_error=errors.append)
        pictures = self._pictures(batches)
        problems = {Path(files[error.index]).name: error.reason for error in errors if error.index is not None}
        if not pictures:
            raise ValueError("Nothing was added. " + "; ".join(f"{name}: {why}" for name, why in problems.items()))
        return pictures, problems

    def _pictures(self, batches: ImageBatches) -> list[Picture]:
        """Read pictures, and see them by a network that stays as it is."""
        pictures: list[Picture] = []
        for batch in batches.decoded():
            rows: Iterable[Features | None] = [None] * len(batch.indices)
            if isinstance(self.start, SimpleCNAPSClassifier):
                rows = self.start.features(batch).rows()
            pictures += [Picture(pixels, row) for pixels, row in zip(batch.pixels, rows, strict=True)]
        return pictures

    def _keep(self, kept: Sequence[bool]) -> None:
        pairs = [pair for pair, keep in zip(zip(self.images, self.names, strict=True), kept, strict=True) if keep]
        self._become([image for image, _ in pairs], [name for _, name in pairs])

    def _become(self, images: list[Picture], names: list[str]) -> None:
        """Fit to other pictures and answer the queries anew; after an error all is as before."""
        classifier = self._fitted_to(images, names)
        curve = _curve(classifier)
        self.classifier, self.curve, self.images, self.names = classifier, curve, images, names
        self._answer()

    def _fitted_to(self, images: list[Picture], names: list[str]) -> SimpleCNAPSClassifier | None:
        if isinstance(self.start, SimpleCNAPSClassifier):
            if not images:
                return self.start
            return copy.copy(self.start).partial_fit(_seen(images), self._labels(names))
        counts = Counter(name for name in names if name != self.none)
        # The threshold is found on pictures that can be left out; n of them allow no rate below 1 / (n + 1).
        paired = sum(count for count in counts.values() if count > 1)
        if paired:
            rate = max(_FALSE_REJECTION_RATE, 1 / (paired + 1))
            classifier = SimpleCNAPSClassifier(
                self.start, device=self.device, unknown_label=self.none, false_rejection_rate=rate
            )
            with suppress(ValueError):  # all of them are copies: nothing can be left out, so nothing is rejected
                return classifier.fit(_seen(images), names)
        if len(counts) < 2:
            return None
        of_classes = [index for index, name in enumerate(names) if name != self.none]
        classifier = SimpleCNAPSClassifier(self.start, device=self.device)
        return classifier.fit(_seen([images[i] for i in of_classes]), [names[i] for i in of_classes])

    def _labels(self, names: Sequence[str]) -> list[Any]:
        """Names as labels of the model file."""
        start = cast(SimpleCNAPSClassifier, self.start)
        labels = iter(labels_like(start.classes_, [name for name in names if name != self.none]))
        return [start.unknown_label if name == self.none else next(labels) for name in names]

    # ---------------------------------------------------------------- asking

    def ask(self, files: Sequence[str]) -> dict[str, str]:
        """Classify image files: they become ``queries``, with ``answers`` as soon as there is a classifier.

        Returns
        -------
        dict of str to str
            File name to reason, of files that cannot be read. They are left out.

        Raises
        ------
        ValueError
            No file can be read.
        """
        read, problems = self._read(files)
        self.drops.append(read)
        self._answer()
        return problems

    def forget_queries(self) -> None:
        """Remove all queries."""
        self.drops, self.answers, self.marks = [], [], {}

    def _answer(self) -> None:
        """Answer all queries by the classifier as it is now."""
        self.answers = []
        queries = self.queries
        if self.classifier is None or not queries:
            return
        predictions = self.classifier.predict_all(_seen(queries))
        names = [str(label) for label in self.classifier.classes_]
        rows = predictions.probabilities, predictions.unknown, queries, predictions.features
        self.answers = [
            Answer(names[int(row.argmax())], bool(unknown), dict(zip(names, row.tolist(), strict=True)), *rest)
            for row, unknown, *rest in zip(*rows, strict=True)
        ]

    def neighbours(self, answer: Answer) -> list[Neighbour]:
        """Support images whose features are nearest to those of a query, nearest first."""
        assert self.classifier is not None
        fitted = self.classifier.fitted_head_
        distances = np.linalg.norm(fitted.support.adapted.cpu().numpy() - answer.features, axis=1)
        own = [picture for picture, name in zip(self.images, self.names, strict=True) if name != self.none]
        labels, of_file = fitted.support_labels, [None] * (len(distances) - len(own))  # which come first
        pictures: list[Picture | None] = [*of_file, *own]
        nearest = distances.argsort(kind="stable")[:_NEIGHBOURS]
        return [Neighbour(str(labels[i]), float(distances[i]), pictures[i]) for i in nearest]

    # ---------------------------------------------------------------- correcting

    def ranked(self) -> list[Answer]:
        """The answers, those of the last drop first; of each drop those first whose label would teach most."""
        if self.classifier is None:
            return []
        known = self.classifier.fitted_head_.support.adapted.cpu().numpy()
        answers, ranked = iter(self.answers), list[list[Answer]]()
        for drop in filter(None, self.drops):
            of_drop = [next(answers) for _ in drop]
            probabilities = np.array([[*answer.probabilities.values()] for answer in of_drop])
            order = most_useful_first(probabilities, np.stack([answer.features for answer in of_drop]), known)
            ranked.append([of_drop[index] for index in order])
        return [answer for of_drop in reversed(ranked) for answer in of_drop]

    def mark(self, number: int, name: str | None) -> None:
        """Say what a query is, a new class or a known one or ``none``; or with None, say nothing of it any more.

        Raises
        ------
        ValueError
            There is no such query, or the name is missing, looks like that of another class or cannot be learned.
        """
        picture = next((query for query in self.queries if query.number == number), None)
        if picture is None:
            raise ValueError("This picture is not asked about any more.")
        earlier = self.marks.pop(picture, None)
        if name is None:
            return
        try:
            self.marks[picture] = self._checked(name)
        except ValueError:
            if earlier is not None:
                self.marks[picture] = earlier
            raise

    def learn(self) -> None:
        """Add the marked queries to their classes, in one fit; they are no queries any more.

        Raises
        ------
        ValueError
            No query is marked, or a name cannot be learned. Nothing is changed.
        """
        if not self.marks:
            raise ValueError("Press what some of the pictures are first.")
        drops, marks = self.drops, self.marks
        self.drops = [[picture for picture in drop if picture not in marks] for drop in drops]
        try:
            self._become([*self.images, *marks], [*self.names, *marks.values()])
        except BaseException:
            self.drops = drops
            raise
        self.marks = {}

    # ---------------------------------------------------------------- keeping

    def save(self) -> Path | None:
        """Write the classifier to a file of this session; None as long as there is none."""
        if self.classifier is None:
            return None
        path = Path(self._folder.name, "classifier.safetensors")
        self.classifier.save(path)
        return path

    def export_page(self) -> Path:
        """Write the web page that answers in its visitor's browser to a zip file of this session.

        Raises
        ------
        ValueError
            There is no classifier yet, or none that can be exported; ImportError if the extra ``onnx`` is absent.
        """
        if self.classifier is None:
            raise ValueError("Teach a class first.")
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            self.classifier.export_page(Path(folder, "page"))
            return Path(shutil.make_archive(str(Path(self._folder.name, "page")), "zip", folder, "page"))


def _curve(classifier: SimpleCNAPSClassifier | None) -> LearningCurve | None:
    return None if classifier is None else classifier.summary().curve


def checked_label(label: str, known: Iterable[str], none: str) -> str:
    """A label that the user gave, without white space around it: a class, a new one or a known one, or ``none``.

    ValueError if it is empty or looks like another class.
    """
    label = label.strip()
    if not label:
        raise ValueError("Give the class a name first.")
    if folded(label) in (folded(none), UNKNOWN):
        return none
    alike = [other for other in known if folded(other) == folded(label)]
    if alike and label not in alike:
        raise ValueError(f"There is a class “{alike[0]}”: write it like that, or choose another name.")
    return label


def _seen(pictures: Sequence[Picture]) -> Features | DecodedBatch:
    """What a classifier takes of pictures: their features, or their squares where the network is adapted anew."""
    rows = [picture.features for picture in pictures if picture.features is not None]
    if rows:
        return Features.joined(rows)
    return DecodedBatch([*range(len(pictures))], np.stack([picture.pixels for picture in pictures]))


def labels_like(classes: NDArray[Any], names: Sequence[str]) -> list[Any]:
    """Names as labels of the type that a fitted classifier has."""
    known = {str(label): label for label in classes.tolist()}
    if all(isinstance(label, str) for label in known.values()):
        return list(names)
    try:
        return [known[name] if name in known else int(name) for name in names]
    except ValueError as error:
        raise ValueError("The classes of this model are numbers: name new ones by whole numbers.") from error
