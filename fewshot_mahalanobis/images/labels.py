"""Class labels: strings or whole numbers, all of one type."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def checked_labels(y: ArrayLike, n_images: int) -> NDArray[Any]:
    """Labels as an array (n_images,) of strings or of numbers of one type: integers, Booleans or whole floats.

    ValueError if ``y`` is None or has another shape, a label is missing or of a type that cannot be used, or two labels
    differ in type. The message names the label.
    """
    if y is None:
        raise ValueError("there are no labels: y is None")
    values = np.asarray(y, dtype=object)
    if values.ndim != 1:
        raise ValueError(f"y must have one dimension, a label for each image; its shape is {values.shape}")
    if len(values) != n_images:
        raise ValueError(f"there are {n_images} images but {len(values)} labels: each image needs one")
    first = label_kind(values[0])
    for index, value in enumerate(values):
        kind = label_kind(value)
        if kind is None:
            raise ValueError(
                f"y[{index}] is {value!r}: every label must be a string or a whole number, with none missing"
            )
        if kind != first:
            raise ValueError(f"y[{index}] is {value!r}, a {kind}, but y[0] is {values[0]!r}, a {first}: use one type")
    labels = np.asarray(y)
    # Objects other than strings (pandas' nullable integers, say) become numbers, and NumPy's StringDType, which cannot
    # be saved, becomes plain strings.
    usable = labels.dtype.kind in "Ubiuf" or (labels.dtype.kind == "O" and first == "string")
    return labels if usable else np.array(values.tolist())


def label_kind(value: Any) -> str | None:
    """Name of a label's type: "string", "Boolean", "whole number" or "float"; None if it cannot be a label."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool | np.bool_):
        return "Boolean"
    if isinstance(value, Integral):
        return "whole number"
    if isinstance(value, Real) and float(value).is_integer():
        return "float"
    return None
