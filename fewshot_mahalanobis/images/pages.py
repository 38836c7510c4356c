"""Which page of a file, and which of its bands, are the picture.

Microscopes write a slice or a channel a page, satellites more bands than three. What such a file shows is its user's
choice: ``pages`` and ``bands`` say it, and without them a stack, or bands that are no colours, are an error.

Pages are counted from 0, as arrays are. Smaller versions of a page and masks (TIFF's NewSubfileType) are not counted.
Animations and the several pictures of one shot (GIF, WebP, PNG, AVIF, MPO, HEIC) show their first frame, which is in
HEIC the one that the file calls the main picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.ranges import ValueRange, checked_range

#: A page by its number, all by their largest or mean values, or three as red, green and blue.
Pages: TypeAlias = str | int | tuple[int, ...]

_WORDS = ("first", "max", "mean")
#: Formats whose later frames belong to an animation, or to the same shot.
_ANIMATED = {"AVIF", "FLI", "GIF", "HEIF", "MPO", "PNG", "WEBP"}
FRAMES_LEFT = (
    'it has several frames, and its first one (of HEIC the main one) is used: pages="first" if that is right, else '
    'pages="max", "mean" or a number'
)
#: TIFF tags, and the bits of NewSubfileType: a smaller version, a mask.
_SUBFILE, _PHOTOMETRIC, _DESCRIPTION, _SAMPLES, _EXTRA, _GEO_KEYS = 254, 262, 270, 277, 338, 34735
_SMALLER_OR_MASK = 0b101
#: PhotometricInterpretation -> number of bands that are colours, of the kinds in which others may be measurements.
_COLOURS = {0: 1, 1: 1, 2: 3}
#: Values of ExtraSamples for opacity; the last one is Corel Draw's.
_OPACITY = {1, 2, 999}
#: Least share of an opacity's values that are the least or the greatest. Measurements are rarely either.
_CLEAR_OR_OPAQUE = 0.9
OPACITY_DOUBTED = (
    "its last band is read as opacity, as the file says, but does not look like it: bands=(0, 1, 2) leaves it out, "
    "bands=(0, 1, 2, 3) says that it is"
)
_HOW_PAGES = (
    'Choose with pages: "first", a number counted from 0, "max" or "mean" of all, or three grey ones for red, green '
    "and blue, pages=(0, 1, 2). In the terminal: fit --pages"
)
_HOW_BANDS = (
    "Choose with bands, counted from 0: those for red, green and blue, bands=(3, 2, 1) say, or one, bands=0. In the "
    "terminal: fit --bands 3,2,1"
)
_IF_OPACITY = "bands=(0, 1, 2, 3) if the fourth is opacity"


class Reading(NamedTuple):
    """The user's settings for reading images."""

    value_range: ValueRange | None = None
    pages: Pages | None = None
    bands: tuple[int, ...] | None = None


#: As the files themselves say it.
AS_DECLARED = Reading()


def checked_reading(value_range: Any = None, pages: Any = None, bands: Any = None) -> Reading:
    """The settings of an estimator; ValueError if one is invalid."""
    numbers = _numbers(pages)
    if pages is not None and pages not in _WORDS and (numbers is None or len(numbers) not in (1, 3)):
        raise ValueError(
            f'pages must be None, "first", "max", "mean", a number counted from 0, or three of them, got {pages!r}'
        )
    chosen = _numbers(bands)
    if bands is not None and (chosen is None or len(chosen) not in (1, 3, 4)):
        raise ValueError(
            "bands must be None, a number counted from 0, three for red, green and blue, or four with opacity, got "
            f"{bands!r}"
        )
    if numbers is None:
        return Reading(checked_range(value_range), pages, chosen)
    return Reading(checked_range(value_range), numbers[0] if len(numbers) == 1 else numbers, chosen)


def reading_of(estimator: Any) -> Reading:
    """The settings of an estimator of images, checked."""
    return checked_reading(estimator.value_range, estimator.pages, estimator.bands)


def _numbers(value: Any) -> tuple[int, ...] | None:
    """Numbers from 0 on, given as one or as a sequence; None if it is neither."""
    numbers = [value] if isinstance(value, Integral) else value
    if isinstance(numbers, str | bytes | Mapping) or not hasattr(numbers, "__iter__"):
        return None
    numbers = list(numbers)
    whole = all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers)
    found = tuple(map(int, numbers)) if whole else ()
    return found if found and min(found) >= 0 else None


# -------------------------------------------------------------------- pages


def chosen_pages(image: Image.Image, pages: Pages | None, remarks: list[str]) -> list[int]:
    """Frames of an image that is not loaded, by their place in the file. A remark if others are left out.

    ImageError if it is a stack of which nothing is chosen, or lacks a page that is.
    """
    first = image.tell()
    if first != 0 and not image.info.get("primary"):  # its user has moved it there; of PSD frame 1 is all layers
        return [first]
    several = bool(getattr(image, "is_animated", False))
    if pages is None and several and image.format in _ANIMATED:
        remarks.append(FRAMES_LEFT)
    if not several:
        _check_planes(image)
    if pages == "first" or (pages is None and image.format in _ANIMATED):
        return [first]
    return picked_pages(_pages(image) if several else iter([0]), pages)


def picked_pages(found: Iterator[int], pages: Pages | None) -> list[int]:
    """Those of the full pages of a file that are chosen; ImageError as :func:`chosen_pages`."""
    if pages is None:
        first = next(found)
        if next(found, None) is not None:
            raise ImageError(f"it is a stack of several pages. {_HOW_PAGES}")
        return [first]
    if pages == "first":
        return [next(found)]
    numbers = list(found)
    if isinstance(pages, str):
        return numbers
    wanted = (pages,) if isinstance(pages, int) else pages
    if max(wanted) >= len(numbers):
        has = "1 page" if len(numbers) == 1 else f"{len(numbers)} pages"
        raise ImageError(f"it has {has}, and there is none of number {max(wanted)}, counted from 0. {_HOW_PAGES}")
    return [numbers[number] for number in wanted]


def _pages(image: Image.Image) -> Iterator[int]:
    """Frames of a file, without smaller versions and masks; the image is at its frame again in the end."""
    number = 0
    while True:
        try:
            image.seek(number)
        except EOFError:
            break
        except SyntaxError:  # a page that Pillow does not read counts
            pass
        tags = getattr(image, "tag_v2", {})
        if number == 0 or not int(tags.get(_SUBFILE, 0)) & _SMALLER_OR_MASK:
            image.seek(0)
            yield number
        number += 1
    image.seek(0)


def _check_planes(image: Image.Image) -> None:
    """ImageError if a file of one page is a stack of which Pillow reads the first plane: a FITS cube, or ImageJ's."""
    planes, reader = None, "astropy"
    if image.format == "FITS" and (file := getattr(image, "fp", None)) is not None:
        place = file.tell()
        file.seek(0)
        planes = re.search(r"NAXIS3  = *(\d+)", file.read(2880).decode("latin-1"))
        file.seek(place)
    elif image.format == "TIFF":
        text = str(getattr(image, "tag_v2", {}).get(_DESCRIPTION))
        planes, reader = re.search(r"\AImageJ=.*?^images=(\d+)", text, re.MULTILINE | re.DOTALL), "tifffile"
    if planes is not None and int(planes[1]) > 1:
        raise ImageError(f"it is a stack of {int(planes[1])} planes: read it with {reader} and pass one as an array")


def reduced(pages: Iterator[NDArray[np.uint8]], how: Pages | None) -> NDArray[np.uint8]:
    """Pages (h, w, 3) as one picture of that shape: their largest or mean values, or a colour of each."""
    most: NDArray[np.uint8] | None = None
    colours, total, count = [], None, 0
    for page in pages:
        if most is not None and page.shape != most.shape:
            raise ImageError(f"its pages have different sizes. {_HOW_PAGES}")
        if how == "mean":
            total = page.astype(np.float32) if total is None else total + page
        elif isinstance(how, tuple):
            if (page != page[..., :1]).any():
                raise ImageError(f"its pages have colours, and pages={how} makes one colour of each grey page")
            colours.append(page[..., 0])
        most = page if most is None or how == "mean" else np.maximum(most, page)
        count += 1
    assert most is not None
    if total is not None:
        return np.rint(total / count).astype(np.uint8)
    return np.stack(colours, axis=-1) if colours else most


# -------------------------------------------------------------------- bands


def bands_problem(tags: Mapping[int, Any]) -> str | None:
    """Why a TIFF has bands that are neither colours nor opacity, by its tags; or None."""
    photometric, samples = int(tags.get(_PHOTOMETRIC, 0)), int(tags.get(_SAMPLES, 1))
    extra = samples - _COLOURS.get(photometric, samples)
    meaning = tags.get(_EXTRA, ())
    opacity = extra == 1 and (meaning if isinstance(meaning, int) else next(iter(meaning), 0)) in _OPACITY
    return None if extra <= 0 or opacity else _too_many(samples)


def _too_many(samples: int) -> str:
    opacity = f", or {_IF_OPACITY}" if samples == 4 else ""
    return f"it has {samples} bands, and nothing says which are its colours. {_HOW_BANDS}{opacity}"


def check_bands(bands: Sequence[int], count: int) -> None:
    """ImageError if an image of ``count`` bands lacks one that is chosen."""
    if max(bands) >= count:
        has = "1 band" if count == 1 else f"{count} bands"
        raise ImageError(f"it has {has}, and there is none of number {max(bands)}, counted from 0. {_HOW_BANDS}")


def opacity_in_doubt(image: Image.Image) -> bool:
    """Whether the last band of a file may be a measurement although it counts as opacity.

    GDAL and tifffile call the fourth of four 8-bit bands so, whatever it is, and of JPEG 2000 Pillow does not tell.
    """
    return image.format in ("TIFF", "JPEG2000") and image.mode in ("RGBA", "LA")


def is_geographic(image: Image.Image) -> bool:
    """Whether a file is of the kind in which four bands are more often measurements than colours with opacity."""
    return _GEO_KEYS in getattr(image, "tag_v2", {}) or image.format == "JPEG2000"


def check_opacity(fourth: NDArray[Any], black: float, white: float) -> None:
    """ImageError if the values of a fourth band do not look like opacity: nearly all black or white, and some white."""
    opaque, clear = np.mean(fourth == white), np.mean(fourth == black)
    if opaque == 0 or opaque + clear < _CLEAR_OR_OPAQUE:
        raise ImageError(
            f"its last band does not look like opacity, which is {black:g} or {white:g} nearly everywhere. {_HOW_BANDS}"
            f", or {_IF_OPACITY}"
        )
