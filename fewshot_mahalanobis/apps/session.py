"""A round of labelling: pictures, the labels that a user gives them, and the classifier that learns from each."""

from __future__ import annotations

import copy
import io
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.apps.active_learning import density, most_useful, typicality
from fewshot_mahalanobis.apps.example import photographs
from fewshot_mahalanobis.apps.label_table import LabelTable, Place, Row, has_a_name_in_tables, place_of, whole_path
from fewshot_mahalanobis.apps.labelling import UnreadableImages, image_batches
from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images.decode import DecodedBatch
from fewshot_mahalanobis.images.pages import Reading, reading_of
from fewshot_mahalanobis.images.picture import read_size, read_within
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.support_set.copies import copies_found, equal_rows
from fewshot_mahalanobis.support_set.estimator import Predictions
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.labels import check_text, folded
from fewshot_mahalanobis.support_set.new_classes import proposed_classes
from fewshot_mahalanobis.support_set.summary import summarise

__all__ = ["UNKNOWN", "Answer", "Neighbour", "Picture", "Session"]

#: The label of pictures that belong to no class.
UNKNOWN = "unknown"
#: Share of the pictures of known classes that are called that by mistake.
_FALSE_REJECTION_RATE = 0.05
#: Share of the labelled pictures that may be new if they are learned under the earlier adaptation.
_FEW = 0.25
#: Pictures of each class with which a network that does not adapt begins.
_FIRST = 2
#: Support images that are shown beside an answer, nearest first.
_NEIGHBOURS = 6
#: Longest side of a thumbnail and of a large picture, in pixels.
_THUMBNAIL, _LARGE = 128, 1280
#: Pictures that are kept at most.
_MOST_PICTURES = 20_000


@dataclass(eq=False)
class Picture:
    """A picture as it was read once."""

    number: int  # by which it is known
    name: str
    source: Path | Region
    thumbnail: bytes  # a JPEG file
    place: Place | None  # in the table of labels; None if it is no picture of a folder
    pixels: NDArray[np.uint8] | None  # (s, s, 3), as the network reads it; None if the network stays as it is
    features: Features | None = None  # one row, under the present adaptation


class Neighbour(NamedTuple):
    """A support image that is near a query."""

    label: str
    distance: float  # Euclidean, between adapted features
    picture: Picture | None  # None where it came with a model file, which keeps no pictures


class Answer(NamedTuple):
    """The classifier's answer for one picture."""

    label: str  # the most probable class, or the label of pictures of no class
    unknown: bool  # whether it is of no class
    probabilities: dict[str, float]  # most probable first
    doubt: float  # from 0 to 1, at the nearest boundary, of classes or of rejection
    outlier_score: float | None  # None by a classifier that rejects none
    outlier_threshold: float | None  # above it a picture is of no class


class _Base(NamedTuple):
    """A classifier under whose adaptation further labels are learned, and the labels that it was fitted to."""

    classifier: SimpleCNAPSClassifier
    labels: dict[int, str]
    settings: Mapping[str, Any] = {}


class Session:
    """Pictures that are labelled by a classifier and its user, from whom the classifier learns.

    A method that raises an error changes nothing. Any thread may call any method: changes are made one at a time, and
    :meth:`classify` waits for none of them.

    Parameters
    ----------
    start : SimpleCNAPS or SimpleCNAPSClassifier
        A fitted classifier, whose classes are there from the start and whose adaptation stays (``partial_fit``); or a
        pretrained model. It adapts to the labelled pictures, and again when more than a quarter of them are new; until
        then new ones are learned under the earlier adaptation. With ``paths`` it stays as it is, so that each picture
        goes through the network once.
    paths : sequence of Path or Region
        Pictures to be labelled, all of one kind. Those that cannot be read are left out. They teach where the classes
        lie even without a label, if the head learns from unlabelled ones (page "Unlabelled pictures").
    table : Path, optional
        CSV file of the labels of ``paths``, with the columns path and label, and between them x, y, width and height
        for regions, as ``fit`` reads it. It is written before a method returns. Its labels for these pictures count
        as given. Others may write into it meanwhile, another session or a person in an editor: rows about other
        pictures are kept, and what they say about these is learned with the next label.
    device : str
        Where a pretrained model runs.
    groups : sequence of str or number, optional
        Of each of the ``paths``, the thing that it shows. Pictures of one thing are listed once, share an answer, and a
        label of one is a label of all. They are left out together.

    Attributes
    ----------
    classifier : SimpleCNAPSClassifier or None
        What it has learned. None as long as there is nothing to tell apart: one class of one picture, or none.
    pictures : dict of int to Picture
        By their numbers.
    labels : dict of int to str
        Those that the user has given, in the order of the answers.
    none : str
        The label of pictures that belong to no class. They teach what to reject.
    problems : dict of Path or Region to str
        Pictures of ``paths`` that were left out, and why.
    version : int
        Grows with every change.

    Raises
    ------
    UnreadableImages
        No picture of ``paths`` can be read.
    ValueError
        The table is not one that a session wrote, or has a label that cannot be learned.
    """

    def __init__(
        self,
        start: SimpleCNAPS | SimpleCNAPSClassifier,
        paths: Sequence[Path | Region] = (),
        table: Path | None = None,
        *,
        device: str = "auto",
        groups: Sequence[Any] | None = None,
    ) -> None:
        kinds = {isinstance(path, Region) for path in paths}
        if len(kinds) > 1:
            raise ValueError("there are boxes and whole images: give either the ones or the others")
        self._lock = RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="fewshot-app-")
        self._device = device
        self.table = None if table is None else LabelTable(table, regions=True in kinds)
        self.problems: dict[Path | Region, str] = {}
        self.version = 0
        self.pictures: dict[int, Picture] = {}
        self._next_number = 0
        self._group_of: dict[int, str] = {}  # what a picture shows, by its number
        self._members: dict[str | None, list[int]] = {}
        self._begin(start, whole=not paths)
        earlier = {} if self.table is None else self.table.read()
        if paths:
            distinct = [*{place_of(path): path for path in reversed(paths)}.values()][::-1]
            named = [path for path in distinct if self._is_named(path)]
            read = self._read([(path, str(path)) for path in named], self.problems, on_disk=True, progress="reading")
            if not read:
                raise UnreadableImages(f"none of the {len(paths)} images can be read", self.problems)
            self.pictures = {picture.number: picture for picture in read}
            if groups is not None:
                shows = dict(zip(paths, map(str, groups), strict=True))
                self._group_of = {number: shows[picture.source] for number, picture in self.pictures.items()}
                for number, group in self._group_of.items():
                    self._members.setdefault(group, []).append(number)
        self._by_place = {picture.place: number for number, picture in self.pictures.items()}
        self._other_rows = {place: row for place, row in earlier.items() if place not in self._by_place}
        try:
            self._learn(self._labels_in(earlier))
        except ValueError as error:
            raise ValueError(f"{table}: {error}") from error

    def _begin(self, start: SimpleCNAPS | SimpleCNAPSClassifier, *, whole: bool) -> None:
        """Begin with a classifier, or with a model that adapts as a ``whole``, and without pictures."""
        self._start: SimpleCNAPSClassifier | None = None
        self._reader: SimpleCNAPSClassifier | None = None  # computes features, if the network stays as it is
        self._base: _Base | None = None
        self._memory: Any = None
        if isinstance(start, SimpleCNAPSClassifier):
            check_text(start.classes_.tolist())
            # Its owner may fit it anew; and pictures that are sent are not remembered.
            self._settings, self._memory = copy.copy(start).set_params(memory=None), start.memory
            self._start = self._reader = self._settings
        else:
            self._settings = SimpleCNAPSClassifier(start, adapt=whole, device=self._device)
            self._reader = None if whole else _of_noise(self._settings)
        unknown = None if self._start is None else self._start.unknown_label
        self.none = UNKNOWN if unknown is None else str(unknown)
        self.run = secrets.token_hex(4)  # browsers keep thumbnails, but must not take them for those of another start
        self.pictures = {}
        self.labels: dict[int, str] = {}
        self.classifier = self._start
        self._rows: list[int | None] = []  # number of the picture of each row of the support set
        self._answered: dict[int, int] = {}  # number of a picture -> row of the predictions
        self._predictions: Predictions | None = None
        self._by_labels: NDArray[np.floating] | None = None  # their probabilities, by the labelled pictures alone
        self._changes: list[dict[int, str | None]] = []  # what each answer has replaced
        self._passed: list[int] = []
        self._densities: tuple[Any, dict[int, float]] = None, {}  # of pictures by their numbers, and what they hold for

    # ---------------------------------------------------------------- looking

    @property
    def learns_none(self) -> bool:
        """Whether pictures of no class teach anything: a model file without ``unknown_label`` rejects none."""
        return self._start is None or self._start.unknown_label is not None

    @property
    def other_rows(self) -> int:
        """Rows of the table about other pictures."""
        return len(self._other_rows)

    @property
    def can_undo(self) -> bool:
        """Whether :meth:`undo` would change anything."""
        return bool(self._changes)

    def counts(self) -> dict[str, int]:
        """Labelled pictures of each class, those of the classifier it started from included."""
        counts = Counter(label for label in self.labels.values() if label != self.none)
        return dict(sorted((counts + Counter(self._known())).items()))

    def _known(self) -> dict[str, int]:
        if self._start is None:
            return {}
        shots = zip(self._start.classes_.tolist(), self._start.class_counts_.tolist(), strict=True)
        return {str(label): count for label, count in shots}

    def answer(self, number: int) -> Answer | None:
        """The classifier's answer for a picture, whatever its label; None as long as there is none."""
        with self._lock:
            row = self._answered.get(number)
            if row is None or self._predictions is None or self.classifier is None:
                return None
            return _answers(self.classifier, self._predictions, self.none, [row])[0]

    def shown(self) -> list[int]:
        """Numbers of the pictures that are listed: of each group the first without a label, or the first one."""
        first: dict[tuple[str | None, int], int] = {}
        for number in self.pictures:
            group = self._group_of.get(number)
            key = group, number if group is None else -1
            if key not in first or (first[key] in self.labels and number not in self.labels):
                first[key] = number
        return [*first.values()]

    def _whole(self, numbers: Iterable[int]) -> list[int]:
        """Pictures and the others of their groups."""
        every = (self._members.get(self._group_of.get(number), [number]) for number in numbers)
        return [*dict.fromkeys(number for members in every for number in members)]

    def heaps(self) -> tuple[int, list[list[int]]]:
        """Pictures without a label that are of no class and look like one another, as ``propose_classes`` finds them.

        Returns
        -------
        version : int
            The :attr:`version` that they hold for.
        heaps : list of list of int
            Numbers of the pictures of each heap, the largest first, of equally large ones the tightest.
        """
        with self._lock:
            version, classifier, predictions = self.version, self.classifier, self._predictions
            if classifier is None or predictions is None:
                return version, []
            numbers = [n for n in self.shown() if n not in self.labels and n in self._answered]
            numbers = [n for n in numbers if predictions.unknown[self._answered[n]]]
            if not numbers:
                return version, []
            features = self._features(classifier, numbers).adapted
        every = np.ones(len(numbers), dtype=bool)  # from here on, answers need not wait
        found = proposed_classes(classifier.fitted_head_, features, every, equal_rows(features))
        of_each = [np.flatnonzero(found == heap).tolist() for heap in range(found.max() + 1)]
        return version, [[numbers[place] for place in heap] for heap in sorted(of_each, key=len, reverse=True)]

    def state(self) -> dict[str, Any]:
        """Everything that a page shows, for JSON."""
        with self._lock:
            known, none_known = self._known(), 0
            if self._start is not None and (negatives := self._start.fitted_head_.negatives) is not None:
                none_known = len(negatives.adapted)
            names = [*self.counts()]
            return {
                "version": self.version,
                "run": self.run,
                "none": self.none,
                "learns_none": self.learns_none,
                "none_known": none_known,
                "classes": [{"name": name, "known": known.get(name, 0)} for name in names],
                "pictures": self._listed(names),
                "learned": self.classifier is not None,
                "outlier_threshold": None if self.classifier is None else self.classifier.threshold_,
                "sentences": self._sentences(names),
                "undo": self.can_undo,
                "next": self.next_picture(),
                "table": None if self.table is None else str(self.table.path),
            }

    def _listed(self, names: list[str]) -> list[list[Any]]:
        """The rows of ``pictures`` of a state, which ``page/openapi.json`` describes."""
        best: list[list[list[float]] | None] = []
        grades: list[list[float | None]] = []
        if self._predictions is not None and self.classifier is not None:
            places = [names.index(str(label)) for label in self.classifier.classes_.tolist()]
            every = self._predictions.probabilities
            order = (-every).argsort(axis=1, kind="stable")[:, :9]
            ordered = np.take_along_axis(every, order, axis=1).round(4)
            best = [
                [[places[k], share] for k, share in zip(*row, strict=True)]
                for row in zip(order.tolist(), ordered.tolist(), strict=True)
            ]
            grades = _grades(self.classifier, self._predictions)
        listed = []
        for number in self.shown():
            picture, row = self.pictures[number], self._answered.get(number)
            unknown = row is not None and self._predictions is not None and bool(self._predictions.unknown[row])
            shares = None if row is None else best[row]
            grade = [None, None] if row is None else grades[row]
            label, size = self.labels.get(number), len(self._whole([number]))
            listed.append([number, picture.name, label, shares, unknown, *grade, size])
        return listed

    def _sentences(self, names: list[str]) -> list[str]:
        if self.classifier is None:
            return ["Two classes with a picture each are enough to begin, or two pictures of one class."]
        said = [f"It tells “{names[0]}” from everything else."] if len(names) == 1 else []
        counts = self.classifier.class_counts_
        if len(names) > 1 and counts.max() == 1:
            said.append(
                "Give each class a second picture: then it measures how well it does, and tells pictures of no class."
            )
        fitted = self.classifier.fitted_head_
        if copies := copies_found(fitted.groups, fitted.group_names):
            said.append(
                f"{copies} of the pictures {'is a copy of another' if copies == 1 else 'are copies of others'}, the "
                "same again, compressed, mirrored or cropped: copies are left out together and count once."
            )
        return said

    def curve(self) -> dict[str, Any] | None:
        """How well it does with fewer and more pictures, for JSON; None where that is not measured."""
        classifier = self.classifier
        curve = None if classifier is None else summarise(classifier.fitted_head_, "picture").curve
        if curve is None:
            return None
        return {
            "counts": [*curve.counts.values()],
            "measured": [*curve.measured.items()],
            "usual": curve.usual_count,
            "now": curve.expected()._asdict(),
            "more": [curve.expected(more)._asdict() for more in range(1, curve.usual_count + 1)],
            "advice": curve.advice,
        }

    def next_picture(self) -> int | None:
        """The picture whose label would teach most; None if all have one. Those passed over come last."""
        with self._lock:
            without = [number for number in self.shown() if number not in self.labels]
            fresh = [number for number in without if number not in set(self._passed)]
            if not fresh:
                return next((number for number in self._passed if number in without), None)
            rows = [features for number in fresh if (features := self.pictures[number].features) is not None]
            if len(rows) < len(fresh):
                return fresh[0]
            adapted = _numbers(Features.joined(rows))
            known = [_numbers(self._own_features(number)) for number in self.labels if self._has_features(number)]
            if self.classifier is not None:
                known.append(_numbers(self.classifier.fitted_head_.support))
            if not known:
                return fresh[int(density(adapted).argmax())]
            typical = typicality(adapted, self._density_of(fresh), np.concatenate(known))
            if self._by_labels is None:
                return fresh[int(typical.argmax())]
            return fresh[most_useful(self._by_labels[[self._answered[number] for number in fresh]], typical)]

    def _has_features(self, number: int) -> bool:
        return self.pictures[number].features is not None

    def _own_features(self, number: int) -> Features:
        features = self.pictures[number].features
        assert features is not None
        return features

    def _density_of(self, numbers: list[int]) -> NDArray[np.float32]:
        """How many others are like each of some pictures, among all whose features are known."""
        key = self.run, tuple(number for number in self.pictures if self._has_features(number)), id(self._base)
        if self._densities[0] != key:
            rows = Features.joined(self._own_features(number) for number in key[1])
            self._densities = key, dict(zip(key[1], density(_numbers(rows)), strict=True))
        return np.array([self._densities[1][number] for number in numbers], np.float32)

    def neighbours(self, number: int) -> list[Neighbour]:
        """Support images whose features are nearest to those of a picture, nearest first."""
        with self._lock:
            picture = self._picture(number)
            if self.classifier is None or picture.features is None:
                return []
            fitted = self.classifier.fitted_head_
            distances = np.linalg.norm(_numbers(fitted.support) - _numbers(picture.features), axis=1)
            labels, found = fitted.support_labels, list[Neighbour]()
            for index in distances.argsort(kind="stable")[:_NEIGHBOURS]:
                own = self._rows[index]
                known = None if own is None else self.pictures.get(own)
                found.append(Neighbour(str(labels[index]), float(distances[index]), known))
            return found

    def large(self, number: int) -> bytes:
        """A picture as a JPEG file for people to look at. ValueError if it can no longer be read."""
        file = io.BytesIO()
        read_within(self._picture(number).source, _LARGE, reading_of(self._settings)).save(file, "JPEG", quality=88)
        return file.getvalue()

    def thumbnail(self, number: int) -> bytes:
        """A picture as a small JPEG file."""
        return self._picture(number).thumbnail

    def _picture(self, number: Any) -> Picture:
        if type(number) is not int or number not in self.pictures:
            raise ValueError(f"there is no picture {number!r}")
        return self.pictures[number]

    # ---------------------------------------------------------------- pictures

    def classify(self, files: Sequence[tuple[Path, str]]) -> list[Answer]:
        """Answer for image files, each with the name by which messages call it; they are not kept.

        Raises
        ------
        ValueError
            There is no classifier yet, or a file cannot be read: all of these are named.
        """
        with self._lock:
            classifier, none, settings = self.classifier, self.none, self._settings
        if classifier is None:
            raise ValueError("There is no class yet: add examples first.")
        problems: dict[Path | Region, str] = {}
        paths, names = [path for path, _ in files], dict(files)
        batches = image_batches(classifier, paths, _size(settings), problems, None, classifier.batch_size)
        predictions = [classifier.predict_all(batch) for batch in batches.decoded()]
        if problems:
            listed = "; ".join(f"{names[Path(str(path))]}: {why}" for path, why in problems.items())
            raise ValueError(f"Nothing was classified. {listed}")
        return [
            answer
            for some in predictions
            for answer in _answers(classifier, some, none, range(len(some.probabilities)))
        ]

    def add(self, files: Sequence[tuple[Path, str]], label: str | None = None) -> dict[str, str]:
        """Take in image files, each with its name: as examples of a class or of ``none``, or to be asked about.

        Parameters
        ----------
        files : sequence of (Path, str)
            They are copied.
        label : str, optional
            Without one they are asked about.

        Returns
        -------
        dict of str to str
            Name to reason, of files that cannot be read. They are left out.

        Raises
        ------
        ValueError
            There is no file, none can be read, there would be too many, or the label cannot be used.
        """
        with self._lock:
            label = None if label is None else self._checked(label)
            if not files:
                raise ValueError("Choose one or more pictures first.")
            if len(self.pictures) + len(files) > _MOST_PICTURES:
                raise ValueError(f"There are {len(self.pictures):,} pictures already: no more than {_MOST_PICTURES:,}.")
            kept = [(self._kept(path), name) for path, name in files]
            problems: dict[Path | Region, str] = {}
            added = self._read(kept, problems, on_disk=False)
            names = dict(kept)
            reasons = {names[Path(str(path))]: why for path, why in problems.items()}
            if not added:
                raise ValueError("Nothing was added. " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))
            self._become(added, dict.fromkeys([picture.number for picture in added], label) if label else {})
            return reasons

    def add_example(self) -> None:
        """Add three classes, pieces of two photographs, and ask about seven more pieces."""
        pieces = photographs().pieces()
        folder = Path(self._folder.name)
        with self._lock:
            files = []
            for number, (piece, label) in enumerate(pieces, start=1):
                path = folder / f"example-{secrets.token_hex(4)}.png"
                piece.save(path)
                files.append((path, f"{label or 'piece'} {number}"))
            added = self._read(files, {}, on_disk=False)
            named = {picture.number: label for picture, (_, label) in zip(added, pieces, strict=True)}
            self._become(added, {number: self._checked(label) for number, label in named.items() if label})

    def _become(self, added: list[Picture], labels: Mapping[int, str]) -> None:
        """Take in pictures, some with labels."""
        before = self.pictures
        self.pictures = {**before, **{picture.number: picture for picture in added}}
        try:
            self._learn({**self.labels, **labels})
        except BaseException:
            self.pictures = before
            raise

    def remove(self, numbers: Sequence[int]) -> None:
        """Forget pictures; those of the table lose their label instead."""
        with self._lock:
            gone = [self._picture(number).number for number in numbers]
            on_disk = [number for number in gone if self.pictures[number].place is not None]
            if unlabelled := [number for number in on_disk if number in self.labels]:
                self.label(unlabelled, None)
            own = {*gone} - {*on_disk}
            if not own:
                return
            before = self.pictures
            self.pictures = {number: picture for number, picture in before.items() if number not in own}
            try:
                self._learn({number: label for number, label in self.labels.items() if number not in own})
            except BaseException:
                self.pictures = before
                raise
            rest = [{number: was for number, was in change.items() if number not in own} for change in self._changes]
            self._changes = [change for change in rest if change]
            for number in own:
                source = before[number].source
                if isinstance(source, Path):
                    source.unlink(missing_ok=True)

    def open_model(self, path: Path) -> None:
        """Go on from a file that ``save`` or a page wrote, in place of the classes and labelled pictures.

        ValueError if it is no such file, or the session is about a folder.
        """
        with self._lock:
            if self.table is not None:
                raise ValueError("To label this folder with another model, start the command with that one.")
            opened = SimpleCNAPSClassifier.load(path, device=self._device)
            waiting = [picture for number, picture in self.pictures.items() if number not in self.labels]
            before = self.__dict__.copy()
            try:
                self._begin(opened, whole=False)
                files = [(Path(str(picture.source)), picture.name) for picture in waiting]
                self.pictures = {picture.number: picture for picture in self._read(files, {}, on_disk=False)}
                self._learn({})
            except BaseException:
                self.__dict__.update(before)
                raise

    def _kept(self, path: Path) -> Path:
        """A copy of a file, for as long as the session lives."""
        kept = Path(self._folder.name, secrets.token_hex(8) + path.suffix)
        shutil.copyfile(path, kept)
        return kept

    def _is_named(self, path: Path | Region) -> bool:
        if self.table is None or has_a_name_in_tables(path):
            return True
        self.problems[path] = "its name is not valid UTF-8, or ends with a space: rename it"
        return False

    def _read(
        self,
        files: Sequence[tuple[Path | Region, str]],
        problems: dict[Path | Region, str],
        *,
        on_disk: bool,
        progress: str | None = None,
    ) -> list[Picture]:
        """Read pictures, and compute their features if the network stays as it is."""
        settings, reader, paths = self._settings, self._reader, [path for path, _ in files]
        if on_disk and self._memory is not None:
            settings = reader = copy.copy(settings).set_params(memory=self._memory)
        read = list[Picture]()
        if not paths:
            return read
        size = _size(settings)
        reading = reading_of(settings)
        batches = image_batches(settings, paths, size, problems, progress, settings.batch_size)
        for batch in batches.decoded():
            rows: Iterable[Features | None] = [None] * len(batch.indices)
            if reader is not None:
                rows = reader.features(batch).rows()
            boxes = batch.boxes or [None] * len(batch.indices)
            for index, pixels, row, box in zip(batch.indices, batch.pixels, rows, boxes, strict=True):
                path, name = files[index]
                place = place_of(path, box) if on_disk else None
                thumbnail = _thumbnail(pixels, path, reading)
                kept = pixels if row is None else None
                read.append(Picture(self._next_number, name, path, thumbnail, place, kept, row))
                self._next_number += 1
        return read

    # ---------------------------------------------------------------- labelling

    def label(self, numbers: Sequence[int], label: str | None, before: Mapping[int, str | None] | None = None) -> None:
        """Label pictures and their groups, with a class or ``none``, or take their labels back, and learn from it.

        Parameters
        ----------
        numbers : sequence of int
        label : str, optional
            Without one the pictures are asked about again.
        before : mapping of int to str or None, optional
            The labels that the user saw. If one has another by now, this is an error.

        Raises
        ------
        ValueError
            The label cannot be used, or there is no picture; or somebody else has labelled one of them otherwise
            meanwhile. What others wrote into the table is then learned in its place. OSError if the table cannot be
            written. Nothing else is changed.
        """
        with self._lock:
            if not numbers:
                raise ValueError("Select one or more pictures first.")
            for number in numbers:
                self._picture(number)
                if before is not None and self.labels.get(number) != before.get(number, self.labels.get(number)):
                    raise ValueError(
                        f"{self.pictures[number].name} has another label meanwhile, by somebody else: "
                        f"{self.labels.get(number, 'none')}. Answer again if it is not right."
                    )
            label = None if label is None else self._checked(label)
            whole = self._whole(numbers)
            changed = {number: self.labels.get(number) for number in whole if self.labels.get(number) != label}
            if changed:
                self._change(dict.fromkeys(changed, label))
                self._changes.append(changed)

    def undo(self) -> list[int]:
        """Take the last answer back; return its pictures, none if there is no answer left."""
        with self._lock:
            if not self._changes:
                return []
            self._change(self._changes[-1])
            return [*self._changes.pop()]

    def pass_over(self, number: int) -> None:
        """Ask about a picture later."""
        with self._lock:
            self._picture(number)
            self._passed = [other for other in self._passed if other != number] + [number]
            self.version += 1

    def _checked(self, label: str) -> str:
        """A label without white space around it: a class, a new one or a known one, or ``none``."""
        label = label.strip()
        if not label:
            raise ValueError("Give the class a name first.")
        if folded(label) in (folded(self.none), UNKNOWN):
            if not self.learns_none and self.table is None:
                raise ValueError(
                    "This model file rejects nothing, so pictures of no class teach it nothing. To learn from them, "
                    "make the file with an unknown label: fit --unknown-label."
                )
            return self.none
        known = {*self._known(), *self.labels.values()} - {self.none}
        alike = [other for other in known if folded(other) == folded(label)]
        if alike and label not in alike:
            raise ValueError(f"There is a class “{alike[0]}”: write it like that, or choose another name.")
        return label

    def _labels_in(self, rows: Mapping[Place, Row]) -> dict[int, str]:
        """Labels of pictures in rows of the table."""
        here = {self._by_place[place]: row.label for place, row in rows.items() if place in self._by_place}
        return {number: self._checked(label) for number, label in here.items()}

    def _change(self, wanted: Mapping[int, str | None]) -> None:
        """Give pictures other labels, or none, here and in the table; after an error all is as before.

        What others have written into the table since is taken over. Where it is about the same pictures, nothing else
        is, and a ValueError says so.
        """
        before = self.labels, self._other_rows
        differ: list[int] = []
        with nullcontext() if self.table is None else self.table.alone():
            theirs = dict(before[0])
            if self.table is not None and self.table.path.exists():
                rows = self.table.read()
                own = {n: label for n, label in before[0].items() if self.pictures[n].place is None}
                theirs = {**own, **self._labels_in(rows)}
                self._other_rows = {place: row for place, row in rows.items() if place not in self._by_place}
            differ = [n for n in wanted if theirs.get(n) not in (before[0].get(n), wanted[n])]
            # In the order of the answers, those of others last.
            labels = {**{n: theirs.get(n) for n in before[0]}, **theirs, **({} if differ else wanted)}
            try:
                self._learn({n: label for n, label in labels.items() if label is not None})
                if self.table is not None and not differ:
                    self.table.write(self._table_rows())
            except BaseException:
                self._other_rows = before[1]
                self._learn(before[0])
                raise
        if differ:
            where = "" if self.table is None else f" in {self.table.path}"
            raise ValueError(
                f"{self.pictures[differ[0]].name} has another label{where} meanwhile, by another program or by hand. "
                "It is taken over: answer again if it is not right."
            )

    def _table_rows(self) -> dict[Place, Row]:
        given = {
            picture.place: Row(whole_path(picture.source), label)
            for number, label in self.labels.items()
            if (picture := self.pictures[number]).place is not None
        }
        return {**self._other_rows, **given}

    def table_text(self) -> str:
        """The table of labels as CSV, with whole paths. ValueError if there is none."""
        with self._lock:
            if self.table is None:
                raise ValueError("There is no table of labels: it is for the pictures of a folder.")
            return self.table.text(self._table_rows())

    # ---------------------------------------------------------------- learning

    def _learn(self, labels: dict[int, str]) -> None:
        """Fit to labelled pictures, and answer for the others."""
        base, kept = self._base, {number: picture.features for number, picture in self.pictures.items()}
        try:
            classifier, rows = self._fitted_to(labels)
            self._answer(classifier, labels)
        except BaseException:
            self._base = base
            for number, features in kept.items():
                if number in self.pictures:
                    self.pictures[number].features = features
            raise
        self.classifier, self._rows, self.labels = classifier, rows, labels
        self.version += 1

    def _answer(self, classifier: SimpleCNAPSClassifier | None, labels: Mapping[int, str]) -> None:
        asked = [n for n, picture in self.pictures.items() if picture.place is not None or n not in labels]
        if classifier is None or not asked:
            self._answered, self._predictions, self._by_labels = {}, None, None
            return
        features = self._features(classifier, asked)
        # All pictures of a folder teach where the classes lie. Which one to ask about is chosen by the probabilities
        # without them, which gained more (benchmarks/results/which_next.md).
        transductive = any(self.pictures[n].place is not None for n in asked)
        transductive = transductive and classifier.fitted_head_.head.learns_unlabelled
        groups = self._names_of_groups(asked) if self._group_of else None
        predictions = classifier.predict_all(features, transductive=transductive, groups=groups)
        by_labels = classifier.predict_proba(features, groups=groups) if transductive else predictions.probabilities
        self._answered = {n: row for row, n in enumerate(asked)}
        self._predictions, self._by_labels = predictions, by_labels

    def _fitted_to(self, labels: Mapping[int, str]) -> tuple[SimpleCNAPSClassifier | None, list[int | None]]:
        """A classifier that has learned these labels, and the pictures of the rows of its support set."""
        if self._start is not None:
            if not self.learns_none:
                labels = {n: label for n, label in labels.items() if label != self.none}
            before: list[int | None] = [None] * len(self._start.fitted_head_.labels)
            return self._going_on(_Base(self._start, {}), labels, before)
        counts = Counter(label for label in labels.values() if label != self.none)
        # The threshold is found on pictures that can be left out; n of them allow no rate below 1 / (n + 1).
        paired = sum(count for count in counts.values() if count > 1)
        if paired:
            rate = max(_FALSE_REJECTION_RATE, 1 / (paired + 1))
            try:
                return self._fitted_anew(labels, {"unknown_label": self.none, "false_rejection_rate": rate})
            except _NothingLeftOut:
                pass  # all of them are copies, so nothing is rejected
        of_classes = {n: label for n, label in labels.items() if label != self.none}
        return self._fitted_anew(of_classes, {}) if len(counts) > 1 else (None, [])

    def _fitted_anew(
        self, labels: Mapping[int, str], settings: Mapping[str, Any]
    ) -> tuple[SimpleCNAPSClassifier, list[int | None]]:
        """Go on from the base if few labels are new, else from a new one."""
        base = self._base
        if base is not None:
            new = len(labels) - len(base.labels)
            holds = all(labels.get(n) == label for n, label in base.labels.items())
            same = base.settings == settings if new == 0 else bool(base.settings) == bool(settings)
            if not (holds and same and (self._reader is not None or new <= _FEW * len(labels))):
                base = None
        if base is None:
            base = self._new_base(labels, settings)
            if self._reader is None:
                for picture in self.pictures.values():
                    picture.features = None
            self._base = base
        base = base._replace(classifier=copy.copy(base.classifier).set_params(**settings))
        return self._going_on(base, labels, [n for n, label in base.labels.items() if label != self.none])

    def _new_base(self, labels: Mapping[int, str], settings: Mapping[str, Any]) -> _Base:
        """Fit a network that adapts to all, one that does not to a few: learning the others later is the same."""
        chosen = dict(labels)
        if self._reader is not None:
            seen = Counter[str]()
            chosen = {}
            for number, label in labels.items():
                seen[label] += 1
                if seen[label] <= _FIRST and label != self.none:
                    chosen[number] = label
        some = [self.pictures[n] for n in chosen]
        images = [picture.source for picture in some] if self._reader is not None else _decoded(some)
        classifier = copy.copy(self._settings).set_params(**settings)
        try:
            classifier.fit(images, [*chosen.values()], groups=self._groups(chosen))
        except ValueError as error:
            if settings:
                raise _NothingLeftOut from error
            raise
        return _Base(classifier, chosen, settings)

    def _going_on(
        self, base: _Base, labels: Mapping[int, str], rows: list[int | None]
    ) -> tuple[SimpleCNAPSClassifier, list[int | None]]:
        """Learn the labels that a base has not learned, under its adaptation."""
        new = {n: label for n, label in labels.items() if n not in base.labels}
        if not new:
            return base.classifier, rows
        names = labels_like(base.classifier.classes_, [label for label in new.values() if label != self.none])
        given = iter(names)
        y = [base.classifier.unknown_label if label == self.none else next(given) for label in new.values()]
        features = self._features(base.classifier, [*new])
        classifier = copy.copy(base.classifier).partial_fit(features, y, groups=self._groups(new))
        return classifier, [*rows, *(n for n, label in new.items() if label != self.none)]

    def _groups(self, numbers: Iterable[int]) -> list[str] | None:
        """Pictures of one group, or regions of one photograph as in ``fit``, are left out together."""
        if self._group_of:
            return self._names_of_groups(numbers)
        if self.table is None or len(self.table.columns) == 2:
            return None
        places = [self.pictures[n].place for n in numbers]
        return [str(n) if place is None else place[0] for n, place in zip(numbers, places, strict=True)]

    def _names_of_groups(self, numbers: Iterable[int]) -> list[str]:
        """A name for each picture, which those of one group share."""
        return [f"of {self._group_of[n]}" if n in self._group_of else f"picture {n}" for n in numbers]

    def _features(self, classifier: SimpleCNAPSClassifier, numbers: Sequence[int]) -> Features:
        """Features of pictures, which are computed where they are not known."""
        missing = [self.pictures[n] for n in numbers if self.pictures[n].features is None]
        if missing:
            for picture, row in zip(missing, classifier.features(_decoded(missing)).rows(), strict=True):
                picture.features = row
        rows = [self._own_features(n) for n in numbers]
        if classifier.unknown_label is None:  # which compares with no features of the network as pretrained
            rows = [Features(row.adapted) for row in rows]
        return Features.joined(rows)

    # ---------------------------------------------------------------- keeping

    def save(self, path: Path) -> None:
        """Write the classifier to a file. ValueError as long as there is none."""
        classifier = self.classifier
        if classifier is None:
            raise ValueError("Teach a class first.")
        classifier.save(path)

    def export_page(self, path: Path, title: str = "Picture classifier") -> None:
        """Write the web page that answers in its visitor's browser, with a heading, to a zip file.

        Raises
        ------
        ValueError
            There is no classifier yet, or none that can be exported; ImportError if the extra ``onnx`` is absent.
        """
        classifier = self.classifier
        if classifier is None:
            raise ValueError("Teach a class first.")
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder, atomic_replace(path) as temporary:
            classifier.export_page(Path(folder, "page"), title=title)
            shutil.copyfile(shutil.make_archive(str(Path(folder, "page")), "zip", folder, "page"), temporary)


class _NothingLeftOut(Exception):
    """No threshold can be found: the pictures of each class are copies."""


def _size(settings: SimpleCNAPSClassifier) -> int:
    """Side of the square that images are resized to, in pixels."""
    model = settings.model_ if hasattr(settings, "model_") else settings.checkpoint
    assert isinstance(model, SimpleCNAPS)
    return model.image_size


def labels_like(classes: NDArray[Any], names: Sequence[str]) -> list[Any]:
    """Names as labels of the type that a fitted classifier has."""
    known = {str(label): label for label in classes.tolist()}
    if all(isinstance(label, str) for label in known.values()):
        return list(names)
    try:
        return [known[name] if name in known else int(name) for name in names]
    except ValueError as error:
        raise ValueError("The classes of this model are numbers: name new ones by whole numbers.") from error


def _of_noise(settings: SimpleCNAPSClassifier) -> SimpleCNAPSClassifier:
    """A classifier whose network computes the features of any picture, as it does not adapt."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    return copy.copy(settings).fit(noise, ["a", "b"])


def _answers(
    classifier: SimpleCNAPSClassifier, predictions: Predictions, none: str, rows: Iterable[int]
) -> list[Answer]:
    names, threshold = [str(label) for label in classifier.classes_.tolist()], classifier.threshold_
    found = []
    for row in rows:
        shares, unknown = predictions.probabilities[row], bool(predictions.unknown[row])
        ordered = {names[k]: float(shares[k]) for k in (-shares).argsort(kind="stable")}
        score = None if threshold is None else float(predictions.outlier_scores[row])
        label = none if unknown else next(iter(ordered))
        found.append(Answer(label, unknown, ordered, float(predictions.doubts[row]), score, threshold))
    return found


def _grades(classifier: SimpleCNAPSClassifier, predictions: Predictions) -> list[list[float | None]]:
    """Doubt, and outlier score or None by a classifier that rejects none, of each picture, as a page shows them."""
    scores: list[float | None] = predictions.outlier_scores.round(4).tolist()
    if classifier.threshold_ is None:
        scores = [None] * len(scores)
    return [[doubt, score] for doubt, score in zip(predictions.doubts.round(4).tolist(), scores, strict=True)]


def _numbers(features: Features) -> NDArray[np.floating]:
    return np.asarray(features.adapted.cpu().to(torch.float32).numpy())


def _decoded(pictures: Sequence[Picture]) -> DecodedBatch:
    squares = [picture.pixels for picture in pictures if picture.pixels is not None]
    return DecodedBatch([*range(len(squares))], np.stack(squares))


def _thumbnail(square: NDArray[np.uint8], path: Path | Region, reading: Reading) -> bytes:
    """A JPEG file of a picture as the network reads it, with the aspect of its file or region."""
    sides = np.array(read_size(path, reading))
    width, height = np.maximum(1, np.round(_THUMBNAIL * sides / sides.max()).astype(int))
    file = io.BytesIO()
    Image.fromarray(square).resize((width, height)).save(file, "JPEG", quality=80)
    return file.getvalue()
