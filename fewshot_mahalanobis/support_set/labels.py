"""Class labels: strings or whole numbers, all of one type."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_DOWN, ROUND_HALF_UP, Context, Decimal
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.multiclass import unique_labels
from torch import Tensor

from fewshot_mahalanobis.plain import plain, quoted
from fewshot_mahalanobis.support_set.caller_warnings import warn_caller


def checked_labels(y: ArrayLike | None, n_images: int) -> NDArray[Any]:
    """Labels as an array (n_images,) of strings or of numbers of one type: integers, Booleans or whole floats.

    ValueError if ``y`` is None or has another shape, a label is missing or of a type that cannot be used, or two labels
    differ in type. The message names the label.
    """
    if y is None:
        raise ValueError("there are no labels: y is None")
    y = _plain_labels(y)
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
                f"y[{index}] is {quoted(value)}: a label must be a string or a whole number. To predict a number for "
                "each image: make_pipeline(AdaptedFeatures(), Ridge())"
            )
        if kind is None:
            raise ValueError(
                f"y[{index}] is {quoted(value)}: every label must be a string or a whole number, with none missing"
            )
        if kind != first:
            raise ValueError(
                f"y[{index}] is {quoted(value)}, a {kind}, but y[0] is {quoted(values[0])}, a {first}: use one type"
            )
    labels = label_array(y)
    usable = labels.dtype.kind in "Ubiuf" or (labels.dtype.kind == "O" and first == "string")
    return labels if usable else label_array(values.tolist())


def label_array(y: ArrayLike) -> NDArray[Any]:
    """Return labels as ``np.asarray`` does, but for three types that would lose something.

    Strings of a class of their own, such as members of an enumeration, and tensors become plain. Whole numbers stay
    whole: NumPy's own choice for int64 and uint64 together is float64, which merges numbers above 2^53. NumPy's
    StringDType, which neither scikit-learn nor files know, becomes plain strings. ValueError if no
    integer type holds all of the whole numbers.
    """
    y = _plain_labels(y)
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


def _plain_labels(y: Any) -> Any:
    """Labels from which an array can be made, each element plain."""
    if isinstance(y, Tensor):
        return y.numpy(force=True)  # from any device
    if isinstance(y, Sequence) and not isinstance(y, str):
        return [value if isinstance(value, np.generic) else plain(value) for value in y]  # NumPy's keep their type
    labels = np.asarray(y)
    return np.asarray(np.frompyfunc(plain, 1, 1)(labels)) if labels.dtype == object else y


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
        raise ValueError(
            f"classes are {quoted(named.tolist())}, but an earlier partial_fit named {quoted(before.tolist())}"
        )
    return named


def check_allowed(labels: NDArray[Any], allowed: NDArray[Any] | None) -> None:
    """ValueError if a label is not among those allowed, if any are named."""
    if allowed is not None and (unknown := {*labels.tolist()} - {*allowed.tolist()}):
        raise ValueError(f"label {quoted(min(unknown))} is not among the classes {quoted(allowed.tolist())}")


def check_text(labels: Iterable[Any]) -> None:
    """ValueError if a label is no valid text, as a folder's name in Latin-1, which no page and table can show."""
    for label in map(str, labels):
        if label.encode("utf-8", "replace").decode() != label:
            shown = label.encode("utf-8", "backslashreplace").decode()
            raise ValueError(f"the class {shown!r} has a name that is not valid UTF-8: rename its folder and fit again")


#: Quotes and dashes that programs put in place of the typed ones.
_TYPED = str.maketrans(dict.fromkeys("‘’‚‛`´ʼ", "'") | dict.fromkeys("“”„‟", '"') | dict.fromkeys("‐‑‒–—―−", "-"))  # noqa: RUF001
#: Encodings that programs take UTF-8 for, most frequent first.
_WRONG_ENCODINGS = ("cp1252", "mac_roman", "cp437", "cp850")
#: A number as a spreadsheet writes it. "1,000" is none, as it may be 1 or 1000.
_NUMBER = re.compile(r"[+-]?(?!\d{1,3}(?:,\d{3})+$)(\d+)(?:[.,](\d+))?(e[+-]?\d{1,3})?")
#: Spreadsheets shorten numbers of 12 digits and more, and keep 15.
_SHORTENED_FROM, _DIGITS = Decimal(10) ** 11, 15


def folded(label: str) -> str:
    """A label without what hardly shows: two labels that differ in nothing else are equal when folded.

    That is case, white space, the Unicode form of its characters, quotes and dashes, and characters without a width.
    """
    text = unicodedata.normalize("NFKC", label.translate(_TYPED)).casefold()
    return " ".join("".join(c for c in text if unicodedata.category(c) != "Cf" and c not in "\ufe0e\ufe0f").split())


def warn_of_similar_labels(labels: Iterable[Any], counts: Sequence[int] = ()) -> None:
    """Warn of labels that may mean the same, as spreadsheets change labels and people mistype them.

    They look alike if they differ only as :func:`folded` says, are one number ("007", "7", "7.0", or shortened to
    "7.61E+12"), or if one is the other in a wrong encoding. A label may be a slip if it is one letter away from another
    that has at least three times as many examples; ``counts[i]`` are those of label i.
    """
    labels = [*labels]
    names = [label for label in labels if isinstance(label, str)]
    if groups := _alike(names):
        named = "; ".join(" and ".join(map(_shown(group), group)) for group in groups)
        warn_caller(
            f"these labels look alike and are different classes: {named}. If they mean the same, write them in one way"
        )
    if shortened := [name for name in names if _kept_digits(name) not in (None, _DIGITS)]:
        warn_caller(
            f"a spreadsheet has shortened {', '.join(map(repr, shortened))}: long numbers that begin alike become one "
            "label. Take the labels from where they come from, and format their column as text"
        )
    if slips := _slips([(label, count) for label, count in zip(labels, counts) if isinstance(label, str)]):
        asked = "; ".join(f"{rare!r}: did you mean {common!r}?" for rare, common in slips)
        warn_caller(f"some labels have few examples and are one letter away from one with many. {asked}")


def _alike(names: list[str]) -> list[list[str]]:
    """Groups of labels that look alike."""
    by_meaning: dict[str | Decimal, list[str]] = defaultdict(list)
    for name in names:
        by_meaning[_meaning(name)].append(name)
    groups = [group for group in by_meaning.values() if len(group) > 1]
    for name in names:  # of what has lost something, others can be the original
        digits, pattern = _kept_digits(name), _lost_characters(name)
        if digits is not None:
            groups += [[name, other] for other in names if _is_shortened(_number(name), _number(other), digits)]
        if pattern is not None:
            groups += [[name, other] for other in names if other != name and pattern.fullmatch(folded(other))]
    return groups


def _meaning(label: str) -> str | Decimal:
    """The number that a label is, else the label :func:`folded` and in its right encoding."""
    text = _in_utf8(label)
    number = _number(text)
    return folded(text) if number is None else number


def _number(label: str) -> Decimal | None:
    text = folded(label)
    return Decimal(text.replace(",", ".")) if _NUMBER.fullmatch(text) else None


def _kept_digits(label: str) -> int | None:
    """How many digits a spreadsheet has left of a long number; None if the label does not look like one."""
    number, parts = _number(label), _NUMBER.fullmatch(folded(label))
    if number is None or parts is None or abs(number) < _SHORTENED_FROM:
        return None
    if parts[3]:
        return len(parts[1].lstrip("0") + (parts[2] or "")) or 1
    return _DIGITS if len(parts[1]) > _DIGITS and not parts[2] and not parts[1][_DIGITS:].strip("0") else None


def _is_shortened(number: Decimal | None, original: Decimal | None, digits: int) -> bool:
    """Whether a number is another one, rounded or cut off after a number of digits."""
    if original is None or original == number:
        return False
    return any(Context(digits, rounding).plus(original) == number for rounding in (ROUND_HALF_UP, ROUND_DOWN))


def _in_utf8(label: str) -> str:
    """The label that was written in UTF-8 and read in another encoding, once or more; else the label itself."""
    for encoding in () if label.isascii() else _WRONG_ENCODINGS:
        try:  # bytes that an encoding leaves open stay as they are
            read = b"".join(c.encode("latin-1" if "\x80" <= c <= "\x9f" else encoding) for c in label).decode("utf-8")
        except UnicodeError:
            continue
        return _in_utf8(read)
    return label


def _lost_characters(label: str) -> re.Pattern[str] | None:
    """What a label may have been whose characters outside ASCII became question marks; None if none did."""
    parts = re.split(r"[?\ufffd]+", folded(label))
    if len(parts) == 1 or sum(map(str.isalpha, "".join(parts))) < 2:
        return None
    return re.compile(r"[^\x00-\x7f]+".join(map(re.escape, parts)))


def _slips(counted: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """Rare labels with the common ones that they are one slip away from."""
    known = [(label, folded(label), count) for label, count in counted if count > 0]
    return [
        (rare, common)
        for rare, rare_text, few in known
        for common, common_text, many in known
        if many >= 3 * few and abs(len(rare_text) - len(common_text)) <= 1 and _one_slip_apart(rare_text, common_text)
    ]


def _one_slip_apart(one: str, other: str) -> bool:
    """Whether a letter of a long word was added, left out or replaced, or two changed places.

    The first letter is seldom mistyped, and more often makes another word (typical, atypical). So does a replaced
    letter in a word of medium length (nitrite, nitrate).
    """
    words = [re.split(r"([\W\d_]+)", text) for text in (one, other)]
    different = [pair for pair in zip(*words) if pair[0] != pair[1]]
    if len(words[0]) != len(words[1]) or len(different) != 1 or not "".join(different[0]).isalpha():
        return False
    a, b = different[0]
    start = len(os.path.commonprefix([a, b]))  # noqa: RUF071 (of letters)
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix([a[::-1], b[::-1]]))  # noqa: RUF071
    changed, shortest = (a[: len(a) - end], b[: len(b) - end]), start + min(len(a), len(b))
    if not start or max(map(len, changed)) > 2:
        return False
    if len(changed[0]) == len(changed[1]):
        return shortest >= 8 if len(changed[0]) == 1 else shortest >= 6 and changed[0] == changed[1][::-1]
    return shortest >= 6 and max(map(len, changed)) == 1


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
