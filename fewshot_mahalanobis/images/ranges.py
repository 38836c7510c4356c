"""Numbers of other depths than 8 bits as 0 to 255: which value is black and which is white.

A file may say it: PNG by its chunk sBIT, TIFF by BitsPerSample, MinSampleValue, MaxSampleValue and their signed and
float kind, PGM by its largest value. Otherwise 16-bit grey runs from 0 to 65535 and floats from 0 to 1, unless the user
gives a range. A camera of 12 bits that writes its values into a file of 16 bits is then nearly black, which
:func:`narrow_range` notices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.images.errors import ImageError

#: Tolerance for floats just outside [0, 1].
_ROUNDING = 1e-6
#: TIFF tags.
_BITS, _PHOTOMETRIC, _MIN, _MAX, _SIGNED_MIN, _SIGNED_MAX = 258, 262, 280, 281, 340, 341
#: What numbers are called in messages, by the value that is white by default.
_KINDS = {255: "8-bit array", 65535: "16-bit image", 1: "float image"}


class ValueRange(NamedTuple):
    """The values that are black and white."""

    low: float
    high: float


class Span(NamedTuple):
    """Smallest and largest value of an image without a declared value range."""

    white: float  # what was taken for white: 255, 65535 or 1
    low: float
    high: float


def checked_range(value: Any) -> ValueRange | None:
    """A ``value_range`` that a user gives; ValueError if it is not None and not two finite numbers, low before high."""
    if value is None:
        return None
    try:
        low, high = value
        if not all(isinstance(number, Real | np.number) and math.isfinite(number) for number in (low, high)):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(f"value_range must be None or a pair of finite numbers (low, high), got {value!r}") from None
    if not low < high:
        raise ValueError(f"value_range must be (low, high) with low < high, got {value!r}")
    return ValueRange(float(low), float(high))


def declared_range(image: Image.Image) -> ValueRange | None:
    """The range that the file of a grey image of more than 8 bits states, or None. Before its pixels are loaded."""
    tags = getattr(image, "tag_v2", None)
    if tags is not None:
        return range_of_tags(tags, image.mode == "F")
    tile = getattr(image, "tile", None)
    if image.format == "PPM" and tile and tile[0][0].startswith("ppm") and tile[0][3][-1] < 65535:
        return ValueRange(0, 65535)  # Pillow has scaled it
    return None


def range_of_tags(tags: Mapping[int, Any], is_float: bool) -> ValueRange | None:
    """The range that the tags of a TIFF of more than 8 bits state, or None."""
    white, black, bits = (
        number[0] if isinstance(number, tuple) and number else number
        for number in (
            tags.get(_SIGNED_MAX, tags.get(_MAX)),
            tags.get(_SIGNED_MIN, tags.get(_MIN, 0)),
            tags.get(_BITS, 16),
        )
    )
    full = is_float or white is None or white >= 65535
    if not full and black < white:
        return ValueRange(float(black), float(white))
    return ValueRange(0, 2**bits - 1) if 8 < bits < 16 else None


def significant_bits(image: Image.Image) -> int | None:
    """The significant bits of a grey PNG of 16 bits, by its chunk sBIT, or None. Before its pixels are loaded."""
    file = getattr(image, "fp", None)
    if image.format != "PNG" or file is None:
        return None
    place = file.tell()
    file.seek(8)
    bits = None
    while len(header := file.read(8)) == 8 and (kind := header[4:]) != b"IDAT":
        length = int.from_bytes(header[:4], "big")
        if kind == b"sBIT" and length == 1:
            bits = file.read(1)[0]
            break
        file.seek(length + 4, 1)
    file.seek(place)
    return bits if bits is not None and 8 <= bits < 16 else None


def range_of_significant(values: NDArray[Any], bits: int) -> ValueRange:
    """The range of 16-bit values of which ``bits`` are significant.

    The PNG standard scales them to 16 bits: by a shift, by repeating the upper bits, or by a multiplication. Values
    that none of these gives and that fit into ``bits`` were stored as they were.
    """
    if values.max() >= 1 << bits:
        return ValueRange(0, 65535)
    high = values.astype(np.int64) >> (16 - bits)
    repeated = (high << (16 - bits)) | (high >> (2 * bits - 16))
    nearest = np.rint(values * ((2**bits - 1) / 65535))
    multiplied = np.rint(nearest * (65535 / (2**bits - 1)))
    scaled = any((values == way).all() for way in (high << (16 - bits), repeated, multiplied))
    return ValueRange(0, 65535 if scaled else 2**bits - 1)


def is_white_zero(image: Image.Image) -> bool:
    """Whether a TIFF of more than 8 bits says that its zero is white. Pillow inverts 8 bits itself."""
    tags = getattr(image, "tag_v2", None)
    return tags is not None and tags.get(_PHOTOMETRIC) == 0


def to_eight_bits(values: NDArray[Any], span: ValueRange) -> NDArray[np.uint8]:
    """Values from black to white -> 0 to 255, rounded; those outside are clipped. ImageError for NaN or infinity."""
    if values.dtype.kind == "f" and not np.isfinite([float(values.min()), float(values.max())]).all():
        raise ImageError("it contains NaN or infinity")
    scaled = (values.astype(np.float32) - np.float32(span.low)) * np.float32(255 / (span.high - span.low))
    return np.rint(np.clip(scaled, 0, 255, out=scaled)).astype(np.uint8)


def unit_to_eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Floats in [0, 1] -> 0 to 255, rounded: k / 255 gives k."""
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(low) or not np.isfinite(high):
        raise ImageError("it contains NaN or infinity")
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        remedy = "map them back with (x + 1) / 2" if -1 <= low < 0 and high <= 1 else "divide by 255"
        raise ImageError(
            f"its values run from {low:g} to {high:g}, but floats must lie in [0, 1]: "
            f"{remedy}, or by whatever spans [0, 1], or give value_range"
        )
    return np.rint(np.clip(values, 0, 1).astype(np.float32) * 255).astype(np.uint8)


def sixteen_to_eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Integers from 0 to 65535 -> 0 to 255, rounded: 257 k gives k."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ImageError(
            f"its values run from {low} to {high}, but integer grey must lie in 0 to 65535: rescale it, or give "
            "value_range"
        )
    return to_eight_bits(values, ValueRange(0, 65535))


def eight_bits(values: NDArray[Any], known: ValueRange | None) -> tuple[NDArray[np.uint8], Span | None]:
    """Values of a file as 0 to 255, by their range if it is known; else by that of their type, and their span."""
    if values.dtype == np.uint8:
        return values, None
    if values.dtype.kind == "b":
        return values * np.uint8(255), None
    if known is not None:
        return to_eight_bits(values, known), None
    if values.dtype.kind == "f":
        return unit_to_eight_bits(values), span_of(values, 1)
    return sixteen_to_eight_bits(values), span_of(values, 65535)


def joined_spans(spans: Sequence[Span]) -> Span | None:
    """The span of several pages of one image."""
    if not spans:
        return None
    return Span(spans[0].white, min(span.low for span in spans), max(span.high for span in spans))


def span_of(values: NDArray[Any], white: float) -> Span:
    """Span of an image's values."""
    return Span(white, float(values.min()), float(values.max()))


def narrow_range(spans: Iterable[Span]) -> str | None:
    """A remark if all images of a kind use less than a quarter of their range, or None; constant ones do not count."""
    by_kind: dict[float, list[Span]] = {}
    for span in spans:
        by_kind.setdefault(span.white, []).append(span)
    for white, images in by_kind.items():
        low, high = min(span.low for span in images), max(span.high for span in images)
        if not low < high or high - low >= white / 4:
            continue
        if white == 65535 and high < white / 4:
            proposal = f"(0, {2 ** max(8, math.ceil(math.log2(high + 1))) - 1})"
        elif high <= white / 4:
            proposal = f"(0, {high:.6g})"
        else:
            proposal = f"({low:.6g}, {high:.6g})"
        count = f"all {len(images)} {_KINDS[int(white)]}s" if len(images) > 1 else f"the only {_KINDS[int(white)]}"
        twice = " (divided by 255 twice?)" if white == 1 and high <= 1.001 / 255 else ""
        return (
            f"{count} here keep to values from {low:.6g} to {high:.6g}{twice}, a small part of 0 to {white:g}, and are "
            f"read as nearly one shade. If their range is smaller, give it: value_range={proposal}, say, the same for "
            "fit and predict"
        )
    return None
