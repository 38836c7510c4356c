"""Class labels: strings or whole numbers, all of one type."""

from __future__ import annotations

import math
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.multiclass import unique_labels

from fewshot_mahalanobis.support_set.warn import warn_caller


def checked_labels(y: ArrayLike | None, n_images: int) -> NDArray[Any]:
    """Labels as an array (n_images,) of strings or of numbers of one type: integers, Booleans or whole floats.

    ValueError if ``y`` is None or has another shape, a label is missing or of a type that cannot be used, or two labels
    differ in type. The message names the label.
    """
    if y is None:
        raise ValueError("there are no labels: y is None")
    values = np.asarray(y, dtype=object)
    if values.ndim != 1:
        raise ValueError(
            f"y must have one dimension, a label for each image; its shape is {values.shape}. For several labels on "
            "one image: make_pipeline(AdaptedFeatures(), MultiOutputClassifier(MahalanobisClassifier()))"
        )
    if len(values) != n_images:
        raise ValueError(f"there are {n_images} images but {len(values)} labels: each image needs one")
    first = label_kind(values[0])
    for index, value in enumerate(values):
        kind = label_kind(value)
        if kind is None and isinstance(value, float | np.floating) and math.isfinite(value):
            raise ValueError(
                f"y[{index}] is {value!r}: a label must be a string or a whole number. To predict a number for each "
                "image: make_pipeline(AdaptedFeatures(), Ridge())"
            )
        if kind is None:
            raise ValueError(
                f"y[{index}] is {value!r}: every label must be a string or a whole number, with none missing"
            )
        if kind != first:
            raise ValueError(f"y[{index}] is {value!r}, a {kind}, but y[0] is {values[0]!r}, a {first}: use one type")
    labels = label_array(y)
    usable = labels.dtype.kind in "Ubiuf" or (labels.dtype.kind == "O" and first == "string")
    return labels if usable else label_array(values.tolist())


def label_array(y: ArrayLike) -> NDArray[Any]:
    """Return labels as ``np.asarray`` does, but for two types that would lose something.

    Whole numbers stay whole: NumPy's own choice for int64 and uint64 together is float64, which merges numbers above
    2^53. NumPy's StringDType, which neither scikit-learn nor files know, becomes plain strings. ValueError if no
    integer type holds all of the whole numbers.
    """
    labels = np.asarray(y)
    if labels.dtype.kind == "T":
        return np.array(labels.tolist())
    values = np.asarray(y, dtype=object).ravel().tolist() if labels.dtype.kind in "fO" else []
    if not values or not all(isinstance(value, Integral) and not isinstance(value, bool) for value in values):
        return labels
    numbers = [int(value) for value in values]
    for dtype in (np.int64, np.uint64):
        if np.iinfo(dtype).min <= min(numbers) and max(numbers) <= np.iinfo(dtype).max:
            return np.array(numbers, dtype).reshape(labels.shape)
    raise ValueError(f"no integer type holds the labels {min(numbers)} and {max(numbers)}: use strings")


def joined_labels(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Concatenate labels of one kind; whole numbers stay whole whatever their types."""
    whole = first.dtype.kind in "iu" and second.dtype.kind in "iu"
    return label_array([*first.tolist(), *second.tolist()]) if whole else np.concatenate([first, second])


def allowed_classes(classes: ArrayLike | None, before: NDArray[Any] | None) -> NDArray[Any] | None:
    """Every label that ``partial_fit`` may meet: those of this call or of an earlier one; None if none names them.

    ValueError if the two differ.
    """
    if classes is None:
        return before
    named: NDArray[Any] = unique_labels(label_array(classes))
    if before is not None and named.tolist() != before.tolist():
        raise ValueError(f"classes are {named.tolist()}, but an earlier partial_fit named {before.tolist()}")
    return named


def check_allowed(labels: NDArray[Any], allowed: NDArray[Any] | None) -> None:
    """ValueError if a label is not among those allowed, if any are named."""
    if allowed is not None and (unknown := {*labels.tolist()} - {*allowed.tolist()}):
        raise ValueError(f"label {min(unknown)!r} is not among the classes {allowed.tolist()}")


def folded(label: str) -> str:
    """What labels have in common that differ only in case, white space or the Unicode form of their characters."""
    return " ".join(unicodedata.normalize("NFKC", label).casefold().split())


def warn_of_similar_labels(labels: Iterable[Any]) -> None:
    """Warn if some labels differ only in case, white space or the Unicode form of their characters."""
    alike: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        if isinstance(label, str):
            alike[folded(label)].append(label)
    groups = [group for group in alike.values() if len(group) > 1]
    if groups:
        named = "; ".join(" and ".join(map(_shown(group), group)) for group in groups)
        warn_caller(
            f"these labels look alike and are different classes: {named}. If they mean the same, write them in one way"
        )


def _shown(group: list[str]) -> Callable[[str], str]:
    """``ascii`` for labels that would look the same on a screen, else ``repr``."""
    composed = {unicodedata.normalize("NFC", label) for label in group}
    return repr if len(composed) == len(group) else ascii


def label_kind(value: Any) -> str | None:
    """Name of a label's type: "string", "Boolean", "whole number" or "float"; None if it cannot be a label."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool | np.bool_):
        return "Boolean"
    if isinstance(value, Integral):
        return "whole number"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return "float"
    return None
