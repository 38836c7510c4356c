"""One picture of any kind as a square of 8-bit RGB, as the networks read it.

1. A JPEG is decoded at the smallest of the scales 1/8, 1/4, 1/2 and 1 that leaves both sides at least twice as long as
   the square's, which takes a third of the time for a photograph of 12 megapixels.
2. Its EXIF orientation is applied (XMP's is not, as no viewer does it), deeper values become 8 bits, transparent pixels
   become white.
3. Blocks of 2^k x 2^k pixels become their mean, k as large as leaves both sides at least twice as long as the square's.
   Reading a JPEG at a smaller scale gives nearly the same.
4. Its colours are converted to sRGB if it has an ICC profile: late, as this takes time for each pixel, and before the
   last step, which averages the rounding to 8 bits.
5. It is resized by Pillow's antialiased bilinear filter, without keeping its aspect, as in Meta-Dataset (Triantafillou
   et al., ICLR 2020).

Regions are cut out between the second step's turning and its deeper values, from the picture at full size, without the
first step. So a region is what the picture is that was cropped by hand.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageOps

from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.formats import open_image, whole_files
from fewshot_mahalanobis.images.ranges import (
    Span,
    ValueRange,
    declared_range,
    is_white_zero,
    range_of_significant,
    significant_bits,
    sixteen_to_eight_bits,
    span_of,
    to_eight_bits,
    unit_to_eight_bits,
)
from fewshot_mahalanobis.images.region import Region

#: Most pixels of an image (Pillow's own limit, which other code may change for the whole process) and its longest side
#: (JPEG's: the first pass of a resize has the new width and the old height, so a thin image would need much memory).
MAX_PIXELS, MAX_SIDE = 178_956_970, 65_535
#: What is done about a damaged colour profile.
PROFILE_IGNORED = "its colour profile is damaged and was ignored, as viewers do: save it anew if its colours look wrong"

CLOSED = "it was closed before its pixels were read: pass its path, or call load() before closing it"


_File = str | os.PathLike[Any]


class Square(NamedTuple):
    """A picture as the network reads it, and what was noticed."""

    pixels: NDArray[np.uint8]  # (size, size, 3), RGB
    profile_ignored: bool = False
    span: Span | None = None  # of values whose range nothing says
    box: tuple[int, int, int, int] | None = None  # of a region without its margin: x, y, width and height in pixels


def to_square_array(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """One image as uint8 RGB of shape (size, size, 3), by the steps at the top of this module.

    Of a file with several frames the current one is used. 16-bit grey is scaled to 8 bits over its full range. Modes
    are those that Pillow converts to RGB, and I;16 and I (0 to 65535) and F (0 to 1). A lazily opened JPEG is loaded at
    a smaller scale, so its size changes. A damaged colour profile is ignored with a warning.

    ImageError if the image has no pixels or too many, is Encapsulated PostScript, or has values outside its range;
    errors of many types, from Pillow, if the file behind a lazily opened image is damaged.
    """
    square = to_square(image, size)
    if square.profile_ignored:
        warnings.warn(PROFILE_IGNORED, stacklevel=2)
    return square.pixels


def read_square_array(file: str | os.PathLike[Any] | BinaryIO, size: int) -> NDArray[np.uint8]:
    """One image file, by path or opened, as uint8 RGB of shape (size, size, 3).

    The format is recognised by the contents, whatever the name. The first of several frames is used. An opened file
    must be able to seek: a pipe is refused, as it could block. ImageError if the file cannot be read, is no image,
    needs a decoder that is not installed, is damaged or cut short, or is refused by :func:`to_square_array`. The
    message does not name the file.
    """
    square = read_square(file, size)
    if square.profile_ignored:
        warnings.warn(PROFILE_IGNORED, stacklevel=2)
    return square.pixels


@whole_files
def to_square(image: Image.Image, size: int, value_range: ValueRange | None = None) -> Square:
    """Like :func:`to_square_array`, but return what was noticed instead of warning of it.

    ``value_range`` is the range of values of more than 8 bits whose file does not say it.
    """
    check_header(image)
    depth = _depth(image)
    image.draft(None, (2 * size, 2 * size))  # step 1; does nothing to other formats and to a loaded image
    return _square(_upright(image), depth, size, value_range)


@whole_files
def to_squares_of_regions(
    image: Image.Image, regions: Sequence[Region], size: int, value_range: ValueRange | None = None
) -> list[Square | ImageError]:
    """Regions of one image, which is decoded once, as squares; the error in the place of each that is none of it."""
    check_header(image)
    depth = _depth(image)
    whole = _upright(image)

    def square(region: Region) -> Square | ImageError:
        try:
            part = whole.crop(region.edges(*whole.size))
            return _square(part, depth, size, value_range)._replace(box=region.pixels(*whole.size))
        except ImageError as error:
            return error

    return [square(region) for region in regions]


def _upright(image: Image.Image) -> Image.Image:
    """An image with its pixels loaded, turned by its EXIF orientation."""
    if image.format == "TIFF":
        image.info.pop("xmp", None)  # by which Pillow would turn it while it loads
    image.load()  # some formats have the orientation after the pixels
    return ImageOps.exif_transpose(image) if exif_orientation(image) != 1 else image  # exif_transpose always copies


def _square(image: Image.Image, depth: _Depth, size: int, value_range: ValueRange | None) -> Square:
    """What is left to do for an upright image."""
    small, profile_ignored, span = _small(image, depth, size, value_range)
    # Columns before rows, as Pillow did before 13: newer ones choose the order by the shape, and so round differently.
    for shape in ((size, small.height), (size, size)):
        if small.size != shape:
            small = small.resize(shape, Image.Resampling.BILINEAR)
    return Square(np.asarray(small), profile_ignored, span)


def _small(
    image: Image.Image, depth: _Depth, size: int, value_range: ValueRange | None
) -> tuple[Image.Image, bool, Span | None]:
    """An upright image before the last step, with its own aspect, and what :class:`Square` notices."""
    profile = image.info.get("icc_profile")
    described = _profile_mode(profile) if profile else None
    flat, span = (image, None) if image.mode == described == "CMYK" else _to_rgb(image, depth, value_range)
    if described == "L" and (image.mode in ("1", "L", "LA") or image.mode.startswith("I")):
        flat = flat.getchannel(0)
    small, profile_ignored = _halved(flat, size), False
    if profile and described == small.mode:
        try:
            small = _to_srgb(small, profile)
        except _ProfileError:
            profile_ignored = True
    elif profile:  # one of another colour space than the pixels', such as CMYK for RGB, says nothing about them
        profile_ignored = described is None
    return small.convert("RGB"), profile_ignored, span


@whole_files
def read_square(file: str | os.PathLike[Any] | BinaryIO, size: int, value_range: ValueRange | None = None) -> Square:
    """Like :func:`read_square_array`, but return what was noticed instead of warning of it."""
    with _image_errors(), opened(file) as image:
        return to_square(image, size, value_range)


@whole_files
def read_within(picture: _File | Region, side: int, value_range: ValueRange | None = None) -> Image.Image:
    """An image file, or a region of one, as RGB for people to look at: shrunk until no side is longer than ``side``.

    It has its own aspect. ``value_range`` and errors as for :func:`read_square`.
    """
    with _image_errors(), opened(_file(picture)) as image:
        check_header(image)
        depth = _depth(image)
        if not isinstance(picture, Region):  # whose edges are in pixels of the whole picture
            image.draft(None, (side, side))
        part = _upright(image)
        if isinstance(picture, Region):
            part = part.crop(picture.edges(*part.size))
        small, _, _ = _small(part, depth, side // 2, value_range)
    small.thumbnail((side, side))
    return small


def read_size(picture: _File | Region) -> tuple[int, int]:
    """Width and height of an image file, or a region of one, as it is seen; errors as for :func:`read_square`."""
    with _image_errors(), opened(_file(picture)) as image:
        width, height = image.size
        if exif_orientation(image) > 4:
            width, height = height, width
    if not isinstance(picture, Region):
        return width, height
    left, top, right, bottom = picture.edges(width, height)
    return right - left, bottom - top


def _file(picture: _File | Region) -> _File:
    return picture.image if isinstance(picture, Region) else picture


@contextmanager
def _image_errors() -> Iterator[None]:
    """What goes wrong with one image becomes an ImageError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(reason(error)) from error


@contextmanager
def opened(file: str | os.PathLike[Any] | BinaryIO) -> Iterator[Image.Image]:
    """An image file, by path or opened, as a PIL image; errors of many types if it is damaged."""
    if not isinstance(file, str | os.PathLike):
        with open_image(file, MAX_PIXELS) as image:
            yield image
        return
    problem = path_problem(file)
    if problem is not None:
        raise ImageError(problem)
    # Opened here because Pillow memory-maps some files given by name, which hides that a file is cut short.
    with Path(os.fsdecode(file)).open("rb") as binary, open_image(binary, MAX_PIXELS) as image:
        yield image


def path_problem(path: str | os.PathLike[Any]) -> str | None:
    """Why a path is no readable file, or None; without opening it, as a pipe would block."""
    try:
        status = os.stat(path)  # noqa: PTH116 (takes names in bytes too)
    except FileNotFoundError:
        name = os.fsdecode(path)
        if name.startswith(("http:", "https:", "ftp:", "s3:", "gs:", "data:")):
            return "an address, not a file: download it, and pass the path or the bytes"
        if name.startswith("file:"):
            return "an address, not a path: pass the path alone, without file://"
        if name.startswith("~"):
            return f"no such file: Python does not expand ~; os.path.expanduser gives {Path(name).expanduser()}"
        return "a link to nothing" if os.path.islink(path) else f"no such file (looked in {Path.cwd()})"  # noqa: PTH114
    except (OSError, ValueError) as error:  # a folder that may not be entered, a name too long or with a null
        return f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(status.st_mode):
        return "it is a folder, not an image file"
    if not stat.S_ISREG(status.st_mode):
        return "it is a pipe, a socket or a device, not an image file"
    return None if status.st_size else "the file is empty"


def exif_orientation(image: Image.Image) -> int:
    """Orientation of a loaded image, 1 to 8, by its EXIF data alone.

    Pillow's ``getexif`` takes one from XMP or a text of ImageMagick's too, which browsers and most viewers do not.
    """
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    orientation: int = exif.get(ExifTags.Base.Orientation, 1)
    return orientation


def check_header(image: Image.Image) -> None:
    """Refuse an image by its header, before its pixels cost memory or time."""
    if image.format == "EPS":
        raise ImageError("Encapsulated PostScript is a program, to be run by Ghostscript: convert it to PNG first")
    problem = size_problem(*image.size)
    if problem is not None:
        raise ImageError(problem)


def size_problem(width: int, height: int) -> str | None:
    """What is wrong with the size of an image, or None."""
    if width == 0 or height == 0:
        return f"it has no pixels (size {width} x {height})"
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        return (
            f"{width} x {height} pixels are too many: at most {MAX_PIXELS}, with sides of up to {MAX_SIDE}, "
            "are read. Scale it down first"
        )
    return None


def reason(error: Exception) -> str:
    """Message for the user about an error of reading one image."""
    if isinstance(error, ImageError):
        return str(error)
    if isinstance(error, Image.UnidentifiedImageError):
        return str(error)
    if isinstance(error, Image.DecompressionBombError):
        return f"it has too many pixels: {error} Scale it down first"
    if isinstance(error, PermissionError):
        return f"it cannot be read: {error.strerror}"
    if isinstance(error, ValueError) and "closed image" in str(error):
        return CLOSED
    # Pillow's decoders raise a dozen unrelated types on a damaged file, some without a message.
    return f"it cannot be decoded, is it damaged? {str(error) or type(error).__name__}"


class _Depth(NamedTuple):
    """What the file of an image says about its values, known before its pixels are loaded."""

    declared: ValueRange | None = None
    significant: int | None = None  # bits, of 16
    white_zero: bool = False
    transparent: int | tuple[int, ...] | None = None  # the value or colour that is transparent
    upper_bytes: bool = False  # of 16 bits a colour, Pillow reads the upper eight


def _depth(image: Image.Image) -> _Depth:
    tile = getattr(image, "tile", None)
    raw = tile[0][3] if tile else ""
    raw = raw[0] if isinstance(raw, tuple) and raw else raw
    transparent = image.info.get("transparency")
    if _is_deep(image):
        return _Depth(declared_range(image), significant_bits(image), is_white_zero(image), transparent)
    upper_bytes = isinstance(raw, str) and ";16" in raw
    # Pillow leaves a transparent value at the depth of the file and scales the pixels.
    if isinstance(transparent, tuple) and upper_bytes:
        transparent = tuple(value >> 8 for value in transparent)
    elif isinstance(transparent, int) and image.mode == "L":
        transparent = min(255, transparent * {"L;2": 85, "L;4": 17}.get(str(raw), 1))
    return _Depth(transparent=transparent, upper_bytes=upper_bytes)


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def _to_rgb(image: Image.Image, depth: _Depth, value_range: ValueRange | None) -> tuple[Image.Image, Span | None]:
    if _is_deep(image):
        return _deep_to_rgb(np.asarray(image), depth, value_range)
    span = None
    if depth.upper_bytes and value_range is None:
        low, high = zip(*image.getextrema(), strict=True)
        span = Span(65535, 257 * min(low), 257 * max(high))
    elif depth.upper_bytes and value_range is not None and image.mode == "RGB":
        middle = np.asarray(image).astype(np.uint16) * 256 + 128  # of what the upper byte leaves open
        image = Image.fromarray(to_eight_bits(middle, value_range))
    if image.has_transparency_data:
        if depth.transparent is not None and depth.transparent != image.info.get("transparency"):
            image = image.copy()
            image.info["transparency"] = depth.transparent
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB"), span


def _deep_to_rgb(
    values: NDArray[Any], depth: _Depth, value_range: ValueRange | None
) -> tuple[Image.Image, Span | None]:
    """Grey of more than 8 bits; the file's word goes before the user's."""
    known = depth.declared
    if known is None and depth.significant is not None:
        known = range_of_significant(values, depth.significant)
    known = known or value_range
    span = None
    if known is not None:
        grey = to_eight_bits(values, known)
    elif values.dtype.kind == "f":
        grey, span = unit_to_eight_bits(values), span_of(values, 1)
    else:
        grey, span = sixteen_to_eight_bits(values), span_of(values, 65535)
    if depth.white_zero:
        grey = 255 - grey
    if isinstance(depth.transparent, int):
        grey = np.where(values == depth.transparent, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB"), span


def _halved(image: Image.Image, size: int) -> Image.Image:
    """Step 3 of the module."""
    times = min(image.size) // (2 * size)
    return image.reduce(1 << (times.bit_length() - 1)) if times > 1 else image


# -------------------------------------------------------------------- ICC colour profiles: other colour spaces as sRGB

#: Colour space of a profile's header -> mode of the pixels that it describes.
_PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
#: Largest difference, in levels of 255, of a profile that is sRGB but for rounding.
_PROFILE_ROUNDING = 2


class _ProfileError(ValueError):
    """A colour profile is damaged."""


def _profile_mode(profile: bytes) -> str | None:
    """Mode of the pixels that a profile describes ("RGB", "L", "CMYK"), by its header, or None."""
    return _PROFILE_MODES.get(profile[16:20].decode("latin-1").strip())


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image in the mode of its profile to sRGB; _ProfileError if the profile is damaged.

    A profile that is sRGB but for rounding changes nothing.
    """
    transform = _profile_transform(profile, image.mode)
    return image.convert("RGB") if transform is None else transform.apply(image)


@lru_cache(maxsize=32)  # the pictures of a camera have one profile, and setting up takes longer than a small picture
def _profile_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Conversion from a profile to sRGB by relative colorimetry; None if it changes no colour."""
    try:
        transform = ImageCms.buildTransform(
            ImageCms.getOpenProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError) as error:
        raise _ProfileError(str(error)) from error
    if mode == "CMYK":
        return transform
    steps = np.arange(0, 256, 15, dtype=np.uint8)
    colours = np.stack(np.meshgrid(*[steps] * len(mode), indexing="ij"), axis=-1).reshape(1, -1, len(mode))
    palette = Image.fromarray(colours if mode == "RGB" else colours[..., 0])
    change = np.asarray(transform.apply(palette), int) - np.asarray(palette.convert("RGB"), int)
    return None if np.abs(change).max() <= _PROFILE_ROUNDING else transform
