"""What the app's page does: classes that grow by pictures, pictures to classify, and the classifier between them."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.apps.active_learning import density, most_useful, typicality
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
        None as long as there are fewer than two classes.
    images : list of Picture
        The pictures that were added.
    names : list of str
        Their classes.
    queries : list of Picture
        The pictures to classify.
    answers : list of Answer
        One for each query; empty as long as there is no classifier.
    curve : LearningCurve or None
        Of the classifier; None as long as no class has two pictures.
    """

    def __init__(self, start: SimpleCNAPS | SimpleCNAPSClassifier, device: str = "auto") -> None:
        self.start = start
        self.device = device
        self.images: list[Picture] = []
        self.names: list[str] = []
        self.queries: list[Picture] = []
        self.answers: list[Answer] = []
        self.classifier = start if isinstance(start, SimpleCNAPSClassifier) else None
        self.curve = _curve(self.classifier)
        self._passed: set[Picture] = set()  # queries that the user does not want to label
        self._folder = tempfile.TemporaryDirectory(prefix="fewshot-app-")

    @property
    def image_size(self) -> int:
        """Side of the square that images are resized to, in pixels."""
        if isinstance(self.start, SimpleCNAPSClassifier):
            return self.start.model_.image_size
        return cast(SimpleCNAPS, self.start).image_size  # the type checker does not exclude what it cannot see through

    def counts(self) -> dict[str, int]:
        """Support images of each class, those of the classifier it started from included."""
        counts = Counter(self.names)
        if isinstance(self.start, SimpleCNAPSClassifier):
            shots = zip(self.start.classes_, self.start.class_counts_, strict=True)
            counts += Counter({str(label): int(count) for label, count in shots})
        return dict(sorted(counts.items()))

    # ---------------------------------------------------------------- teaching

    def add(self, name: str, files: Sequence[str]) -> dict[str, str]:
        """Add image files to a class, a new one or a known one.

        Parameters
        ----------
        name : str
        files : sequence of paths

        Returns
        -------
        dict of str to str
            File name to reason, of files that cannot be read. They are left out.

        Raises
        ------
        ValueError
            The name or the files are missing, the name looks like that of another class, or no file can be read.
            Nothing is added.
        """
        name = checked_name(name, self.counts())
        if not files:
            raise ValueError(f"Choose one or more pictures of “{name}” first.")
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
        self.queries += queries
        self._become(self.images + support, self.names + example.labels)

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
        if isinstance(self.start, SimpleCNAPSClassifier):
            classifier = self.start
            if images:
                labels = labels_like(self.start.classes_, names)
                classifier = copy.copy(self.start).partial_fit(_seen(images), labels)
        elif len(set(names)) < 2:
            classifier = None
        else:
            # The threshold is found on pictures that can be left out; n of them allow no rate below 1 / (n + 1).
            paired = sum(count for count in Counter(names).values() if count > 1)
            rejection: dict[str, Any] = {}
            if paired:
                rate = max(_FALSE_REJECTION_RATE, 1 / (paired + 1))
                rejection = {"unknown_label": UNKNOWN, "false_rejection_rate": rate}
            classifier = SimpleCNAPSClassifier(self.start, device=self.device, **rejection)
            classifier.fit(_seen(images), names)
        curve = _curve(classifier)
        self.classifier, self.curve, self.images, self.names = classifier, curve, images, names
        self._answer()

    # ---------------------------------------------------------------- asking

    def ask(self, files: Sequence[str]) -> dict[str, str]:
        """Classify image files: they become ``queries``, with ``answers`` as soon as there are two classes.

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
        self.queries += read
        self._answer()
        return problems

    def forget_queries(self) -> None:
        """Remove all queries."""
        self.queries, self.answers = [], []
        self._passed.clear()

    def _answer(self) -> None:
        """Answer all queries by the classifier as it is now."""
        self.answers = []
        if self.classifier is None or not self.queries:
            return
        predictions = self.classifier.predict_all(_seen(self.queries))
        names = [str(label) for label in self.classifier.classes_]
        rows = predictions.probabilities, predictions.unknown, self.queries, predictions.features
        self.answers = [
            Answer(names[int(row.argmax())], bool(unknown), dict(zip(names, row.tolist(), strict=True)), *rest)
            for row, unknown, *rest in zip(*rows, strict=True)
        ]

    def neighbours(self, answer: Answer) -> list[Neighbour]:
        """Support images whose features are nearest to those of a query, nearest first."""
        assert self.classifier is not None
        fitted = self.classifier.fitted_head_
        distances = np.linalg.norm(fitted.support.adapted.cpu().numpy() - answer.features, axis=1)
        labels, of_file = fitted.support_labels, [None] * (len(distances) - len(self.images))  # which come first
        pictures: list[Picture | None] = [*of_file, *self.images]
        nearest = distances.argsort(kind="stable")[:_NEIGHBOURS]
        return [Neighbour(str(labels[i]), float(distances[i]), pictures[i]) for i in nearest]

    # ---------------------------------------------------------------- reviewing

    def most_useful_query(self) -> int | None:
        """Index of the query whose label would teach most; None if there is no answer or all were passed over."""
        free = [index for index, query in enumerate(self.queries) if query not in self._passed]
        if self.classifier is None or not free:
            return None
        probabilities = np.array([[*answer.probabilities.values()] for answer in self.answers])[free]
        features = np.stack([answer.features for answer in self.answers])
        known = self.classifier.fitted_head_.support.adapted.cpu().numpy()
        return free[most_useful(probabilities, typicality(features[free], density(features)[free], known))]

    def label_query(self, index: int, name: str) -> None:
        """Add a query to a class, a new one or a known one; it is no query any more.

        Raises
        ------
        ValueError
            The name is missing, or looks like that of another class. Nothing is changed.
        """
        name = checked_name(name, self.counts())
        picture, before = self.queries[index], self.queries
        self.queries = [query for other, query in enumerate(before) if other != index]
        try:
            self._become([*self.images, picture], [*self.names, name])
        except BaseException:
            self.queries = before
            raise

    def pass_over(self, index: int) -> None:
        """Do not offer a query for labelling any more."""
        self._passed.add(self.queries[index])

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
            raise ValueError("Teach two classes first.")
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            self.classifier.export_page(Path(folder, "page"))
            return Path(shutil.make_archive(str(Path(self._folder.name, "page")), "zip", folder, "page"))


def _curve(classifier: SimpleCNAPSClassifier | None) -> LearningCurve | None:
    return None if classifier is None else classifier.summary().curve


def checked_name(name: str, known: Iterable[str]) -> str:
    """The name of a class without white space around it; ValueError if it is none, or like that of another."""
    name = name.strip()
    if not name:
        raise ValueError("Give the class a name first.")
    if folded(name) == UNKNOWN:
        raise ValueError(f"“{UNKNOWN}” is the answer for pictures of no class: choose another name.")
    alike = [other for other in known if folded(other) == folded(name)]
    if alike and name not in alike:
        raise ValueError(f"There is a class “{alike[0]}”: write it like that, or choose another name.")
    return name


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
