"""What the app's page does: classes that grow by pictures, pictures to classify, and the classifier between them."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.apps.example import photographs
from fewshot_mahalanobis.apps.review import most_useful
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.picture import to_square_array
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.support_set.learning_curve import LearningCurve

__all__ = ["UNKNOWN", "Answer", "Bench", "Neighbour"]

#: The label of pictures that belong to no class.
UNKNOWN = "unknown"
#: Share of the pictures of known classes that are called that by mistake.
_FALSE_REJECTION_RATE = 0.05
#: Support images that are shown beside an answer, nearest first.
_NEIGHBOURS = 6


class Neighbour(NamedTuple):
    """A support image that is near a query."""

    label: str
    distance: float  # Euclidean, between adapted features
    picture: NDArray[np.uint8] | None  # (s, s, 3); None where it came with a model file, which keeps no pictures


class Answer(NamedTuple):
    """The answer for one picture."""

    label: str  # the most probable class, whether or not the picture is of one
    unknown: bool  # always False where no class has two pictures: the threshold is found by leaving one out
    probabilities: dict[str, float]
    picture: NDArray[np.uint8]  # (s, s, 3), as the network reads it
    neighbours: list[Neighbour]


class Bench:
    """Classes that grow by pictures, and the classifier of them, fitted anew after every change.

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
    images : list of uint8 ndarray of shape (s, s, 3)
        The pictures that were added, as the network reads them.
    names : list of str
        Their classes.
    queries : list of uint8 ndarray of shape (s, s, 3)
        The pictures to classify.
    answers : list of Answer
        One for each query; empty as long as there is no classifier.
    curve : LearningCurve or None
        Of the classifier; None as long as no class has two pictures.
    """

    def __init__(self, start: SimpleCNAPS | SimpleCNAPSClassifier, device: str = "auto") -> None:
        self.start = start
        self.device = device
        self.images: list[NDArray[np.uint8]] = []
        self.names: list[str] = []
        self.queries: list[NDArray[np.uint8]] = []
        self.answers: list[Answer] = []
        self.classifier = start if isinstance(start, SimpleCNAPSClassifier) else None
        self.curve = _curve(self.classifier)
        self._passed: set[int] = set()  # ids of queries that the user does not want to label
        self._usefulness: list[int] = []  # indices of queries, most useful first
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
            The name or the files are missing, or no file can be read. Nothing is added.
        """
        name = self._checked_name(name)
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

    def pictures(self) -> list[tuple[int, NDArray[np.uint8], str]]:
        """The pictures that were added, class by class: index in ``images``, picture, class."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        return [(index, self.images[index], self.names[index]) for index in order]

    def add_example(self) -> None:
        """Add three classes, pieces of two photographs, and ask about seven more pieces."""
        example = photographs()
        self.queries += [to_square_array(picture, self.image_size) for picture in [*example.queries, example.sky]]
        support = [to_square_array(picture, self.image_size) for picture in example.support]
        self._become(self.images + support, self.names + example.labels)

    def _checked_name(self, name: str) -> str:
        name = name.strip()
        if not name:
            raise ValueError("Give the class a name first.")
        if name == UNKNOWN:
            raise ValueError(f"“{UNKNOWN}” is the answer for pictures of no class: choose another name.")
        return name

    def _read(self, files: Sequence[str]) -> tuple[list[NDArray[np.uint8]], dict[str, str]]:
        """Pictures, and what is wrong with files that are none; ValueError if all are."""
        if not files:
            return [], {}
        files, errors = [*dict.fromkeys(files)], list[ImageError]()
        batches = ImageBatches(files, self.image_size, on_error=errors.append)
        pictures = [picture for batch in batches.decoded() for picture in batch.pixels]
        problems = {Path(files[error.index]).name: error.reason for error in errors if error.index is not None}
        if not pictures:
            raise ValueError("Nothing was added. " + "; ".join(f"{name}: {why}" for name, why in problems.items()))
        return pictures, problems

    def _keep(self, kept: Sequence[bool]) -> None:
        pairs = [pair for pair, keep in zip(zip(self.images, self.names, strict=True), kept, strict=True) if keep]
        self._become([image for image, _ in pairs], [name for _, name in pairs])

    def _become(self, images: list[NDArray[np.uint8]], names: list[str]) -> None:
        """Fit to other pictures and answer the queries anew; after an error all is as before."""
        if isinstance(self.start, SimpleCNAPSClassifier):
            classifier = self.start
            if images:
                labels = _labels_like(self.start.classes_, names)
                classifier = copy.deepcopy(self.start).partial_fit(images, labels)
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
            classifier.fit(images, names)
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

    def take_queries(self, other: Bench) -> None:
        """Start with the queries and answers of another bench with the same ``start``."""
        self.queries, self.answers = [*other.queries], [*other.answers]
        self._usefulness = other._usefulness

    def forget_queries(self) -> None:
        """Remove all queries."""
        self.queries, self.answers, self._usefulness = [], [], []
        self._passed.clear()

    def _answer(self) -> None:
        """Answer all queries by the classifier as it is now."""
        if self.classifier is None or not self.queries:
            self.answers, self._usefulness = [], []
            return
        predictions = self.classifier.predict_all(self.queries)
        names = [str(label) for label in self.classifier.classes_]
        self.answers = [
            Answer(
                names[int(row.argmax())],
                bool(unknown),
                dict(zip(names, row.tolist(), strict=True)),
                picture,
                self._neighbours(self.classifier, features),
            )
            for row, unknown, features, picture in zip(
                predictions.probabilities, predictions.unknown, predictions.features, self.queries, strict=True
            )
        ]
        self._usefulness = most_useful(predictions.probabilities, predictions.features, len(self.queries)).tolist()

    def _neighbours(self, classifier: SimpleCNAPSClassifier, query: NDArray[np.float32]) -> list[Neighbour]:
        """Support images whose features are nearest to those of the query (d,)."""
        support = classifier.fitted_head_.support.adapted.cpu().numpy()
        distances = np.linalg.norm(support - query, axis=1)
        labels = classifier.classes_[classifier.fitted_head_.labels.cpu().numpy()]
        first = len(support) - len(self.images)  # the images of a model file come before
        return [
            Neighbour(str(labels[i]), float(distances[i]), self.images[i - first] if i >= first else None)
            for i in distances.argsort(kind="stable")[:_NEIGHBOURS]
        ]

    # ---------------------------------------------------------------- reviewing

    def most_useful_query(self) -> int | None:
        """Index of the query whose label would teach most; None if there is no answer or all were passed over."""
        return next((index for index in self._usefulness if id(self.queries[index]) not in self._passed), None)

    def label_query(self, index: int, name: str) -> None:
        """Add a query to a class, a new one or a known one; it is no query any more.

        Raises
        ------
        ValueError
            The name is missing. Nothing is changed.
        """
        name = self._checked_name(name)
        picture, before = self.queries[index], self.queries
        self.queries = [query for other, query in enumerate(before) if other != index]
        try:
            self._become([*self.images, picture], [*self.names, name])
        except BaseException:
            self.queries = before
            raise

    def pass_over(self, index: int) -> None:
        """Do not offer a query for labelling any more."""
        self._passed.add(id(self.queries[index]))

    # ---------------------------------------------------------------- keeping

    def save(self) -> Path | None:
        """Write the classifier to a file of this bench; None as long as there is none."""
        if self.classifier is None:
            return None
        path = Path(self._folder.name, "classifier.safetensors")
        self.classifier.save(path)
        return path


def _curve(classifier: SimpleCNAPSClassifier | None) -> LearningCurve | None:
    return None if classifier is None else classifier.summary().curve


def _labels_like(classes: NDArray[Any], names: Sequence[str]) -> list[Any]:
    """Names as labels of the type that a fitted classifier has."""
    known = {str(label): label for label in classes.tolist()}
    if all(isinstance(label, str) for label in known.values()):
        return list(names)
    try:
        return [known[name] if name in known else int(name) for name in names]
    except ValueError as error:
        raise ValueError("The classes of this model are numbers: name new ones by whole numbers.") from error
