"""Files in, files out: fit a classifier to labelled image files, and label others, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.images import read_or_reason

#: Images decoded and classified at a time, which bounds memory.
_CHUNK = 256


class UnreadableImages(ValueError):
    """Images cannot be read.

    Attributes
    ----------
    problems : dict of Path to str
        What is wrong with each.
    """

    def __init__(self, message: str, problems: dict[Path, str]) -> None:
        super().__init__(message)
        self.problems = problems


class Chunk(NamedTuple):
    """Files that could be read, their images (size, size, 3), and what is wrong with the others."""

    paths: list[Path]
    images: list[NDArray[np.uint8]]
    problems: dict[Path, str]


@dataclass(frozen=True)
class Prediction:
    """What a classifier says of one file; probabilities by class, where asked for."""

    path: Path
    label: Any
    probabilities: dict[Any, float] | None = None

    def top(self, k: int) -> list[tuple[Any, float]]:
        """The ``k`` most probable classes with their probabilities, best first."""
        return sorted((self.probabilities or {}).items(), key=lambda pair: -pair[1])[:k]


def fit_files(
    classifier: SimpleCNAPSClassifier, paths: Sequence[Path], labels: Sequence[str], *, skip_errors: bool = False
) -> dict[Path, str]:
    """Fit a classifier to image files, ``labels[i]`` for ``paths[i]``; returns what was left out, and why.

    With ``skip_errors`` images that cannot be read are left out; otherwise, or if none can be read, UnreadableImages.
    ValueError if no image of a class can be read.
    """
    # Only to find what cannot be read: a support set is small, and `fit` knows the size that its network wants.
    problems = {path: why for chunk in read_chunks(paths, 84, "reading") for path, why in chunk.problems.items()}
    _check(problems, len(paths), skip_errors)
    readable = [(path, label) for path, label in zip(paths, labels, strict=True) if path not in problems]
    if lost := sorted(set(labels) - {label for _, label in readable}):
        raise UnreadableImages(f"no image of class {lost[0]!r} can be read: nothing was fitted", problems)
    classifier.fit([path for path, _ in readable], [label for _, label in readable])
    return problems


def predict_files(
    classifier: SimpleCNAPSClassifier, paths: Sequence[Path], *, probabilities: bool = False, skip_errors: bool = False
) -> tuple[list[Prediction], dict[Path, str]]:
    """Label image files by a fitted classifier; returns the predictions, and what was left out and why.

    ``probabilities`` keeps those of every class. With ``skip_errors`` images that cannot be read are left out;
    otherwise, or if none can be read, UnreadableImages.
    """
    classes = classifier.classes_.tolist()
    predictions: list[Prediction] = []
    problems: dict[Path, str] = {}
    for chunk in read_chunks(paths, classifier.model_.image_size, "predicting"):
        problems |= chunk.problems
        if not chunk.images or (problems and not skip_errors):
            continue  # only to find the other images that cannot be read
        found = classifier.predict_all(chunk.images)
        shares = found.probabilities.tolist() if probabilities else [None] * len(chunk.paths)
        for path, label, row in zip(chunk.paths, found.labels.tolist(), shares, strict=True):
            predictions.append(Prediction(path, label, None if row is None else dict(zip(classes, row, strict=True))))
    _check(problems, len(paths), skip_errors)
    return predictions, problems


def read_chunks(paths: Sequence[Path], size: int, description: str) -> Iterator[Chunk]:
    """Decode image files to squares chunk by chunk, the next one while the caller works on this one.

    ``description`` is the text of a progress bar on the standard error of a terminal.
    """
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    read = partial(read_or_reason, size=size)
    with (
        ThreadPoolExecutor(min(joblib.cpu_count(), 4)) as pool,
        tqdm(total=len(paths), desc=description, unit="image", leave=False, disable=None) as progress,
    ):
        ahead = pool.map(read, chunks[0]) if chunks else iter(())
        for chunk, following in zip(chunks, [*chunks[1:], []], strict=True):
            found, ahead = list(zip(chunk, ahead, strict=True)), pool.map(read, following)
            good = [(path, image) for path, image in found if not isinstance(image, str)]
            bad = {path: reason for path, reason in found if isinstance(reason, str)}
            yield Chunk([path for path, _ in good], [image for _, image in good], bad)
            progress.update(len(chunk))


def _check(problems: dict[Path, str], total: int, skip_errors: bool) -> None:
    if problems and (not skip_errors or len(problems) == total):
        remedy = "" if skip_errors else ": mend or remove them, or leave them out with --skip-errors"
        images = "1 image" if total == 1 else f"{total} images"
        raise UnreadableImages(f"{len(problems)} of {images} cannot be read{remedy}", problems)
