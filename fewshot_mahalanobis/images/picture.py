"""One picture of any kind as a square of 8-bit RGB, as the networks read it.

1. A JPEG is decoded at the smallest of the scales 1/8, 1/4, 1/2 and 1 that leaves both sides at least twice as long as
   the square's, which takes a third of the time for a photograph of 12 megapixels.
2. Its EXIF orientation is applied (XMP's is not, as no viewer does it), deeper values become 8 bits, transparent pixels
   become white. Where pages or bands are chosen, this is done to each, and one picture is made of them.
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

import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError

from fewshot_mahalanobis.images.deep_colours import (
    DEEP_PPM,
    WHITE_AS_BLACK,
    deep_colours,
    deep_planes,
    is_deep_jpeg_2000,
    is_deep_ppm,
)
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.formats import TIFF_REMEDY, is_unread_tiff, open_image, tiff_decoder, whole_files
from fewshot_mahalanobis.images.metadata import (
    METADATA_IGNORED,
    PROFILE_IGNORED,
    RANGE_IGNORED,
    TURNS,
    exif_orientation,
    ignoring_damage,
    profile_mode,
    to_srgb,
)
from fewshot_mahalanobis.images.pages import (
    AS_DECLARED,
    OPACITY_DOUBTED,
    Reading,
    bands_problem,
    check_bands,
    check_opacity,
    chosen_pages,
    is_geographic,
    opacity_in_doubt,
    picked_pages,
    reduced,
)
from fewshot_mahalanobis.images.ranges import (
    Span,
    ValueRange,
    declared_range,
    eight_bits,
    is_white_zero,
    joined_spans,
    range_of_significant,
    range_of_tags,
    significant_bits,
    to_eight_bits,
)
from fewshot_mahalanobis.images.region import Region

#: Most pixels of an image (Pillow's own limit, which other code may change for the whole process) and its longest side
#: (JPEG's: the first pass of a resize has the new width and the old height, so a thin image would need much memory).
MAX_PIXELS, MAX_SIDE = 178_956_970, 65_535
#: TIFF tags.
_PHOTOMETRIC, _ORIENTATION, _SAMPLES, _PROFILE = 262, 274, 277, 34675

CLOSED = "it was closed before its pixels were read: pass its path, or call load() before closing it"

#: How the text of an image in base64 begins: as a data URI, or as JPEG, PNG, GIF or WebP.
_BASE64 = ("data:", "/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
_ENCODED = "an image in base64, not a path: pass its bytes, base64.b64decode(text.partition(',')[2] or text)"

_File = str | os.PathLike[Any]


class Chosen(NamedTuple):
    """The page and the bands of an image that are read: one picture. And what was noticed."""

    image: Image.Image
    value_range: ValueRange | None = None  # of values that are still to be made 8 bits
    span: Span | None = None  # of values without a declared range that were made 8 bits
    remarks: tuple[str, ...] = ()


class Square(NamedTuple):
    """A picture as the network reads it, and what was noticed."""

    pixels: NDArray[np.uint8]  # (size, size, 3), RGB
    span: Span | None = None  # of values without a declared range
    remarks: tuple[str, ...] = ()
    box: tuple[int, int, int, int] | None = None  # of a region without its margin: x, y, width and height in pixels


def to_square_array(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """One image as uint8 RGB of shape (size, size, 3), by the steps at the top of this module.

    Of a file with several frames the one is used that the image was moved to. 16-bit grey is scaled to 8 bits over its
    full range. Modes are those that Pillow converts to RGB, and I;16 and I (0 to 65535) and F (0 to 1). A lazily opened
    JPEG is loaded at a smaller scale, so its size changes. Damaged metadata are ignored with a warning.

    ImageError if the image has no pixels or too many, is Encapsulated PostScript, a stack or of too many bands, or has
    values outside its range; errors of many types, from Pillow, if the file behind a lazily opened image is damaged.
    """
    return _warned(to_square(chosen(image), size))


def read_square_array(file: str | os.PathLike[Any] | BinaryIO, size: int) -> NDArray[np.uint8]:
    """One image file, by path or opened, as uint8 RGB of shape (size, size, 3).

    The format is recognised by the contents, whatever the name. The first frame of an animation is used. An opened file
    must be able to seek: a pipe is refused, as it could block. ImageError if the file cannot be read, is no image,
    needs a decoder that is not installed, is damaged or cut short, or is refused by :func:`to_square_array`. The
    message does not name the file.
    """
    return _warned(read_square(file, size))


def _warned(square: Square) -> NDArray[np.uint8]:
    for remark in square.remarks:
        warnings.warn(remark, stacklevel=3)
    return square.pixels


@whole_files
def to_square(picture: Chosen, size: int) -> Square:
    """Like :func:`to_square_array`, but return what was noticed instead of warning of it."""
    image, remarks = picture.image, [*picture.remarks]
    depth = _depth(image, remarks)
    _scale_jpeg(image, 2 * size)  # step 1
    upright = _upright(image, depth, picture.value_range, remarks)
    square = _square(upright, depth, size, picture.value_range, remarks)
    return square if picture.span is None else square._replace(span=picture.span)


@whole_files
def to_squares_of_regions(picture: Chosen, regions: Sequence[Region], size: int) -> list[Square | ImageError]:
    """Regions of one image, which is decoded once, as squares; an error in the place of each that lies outside it."""
    remarks = [*picture.remarks]
    depth = _depth(picture.image, remarks)
    whole = _upright(picture.image, depth, picture.value_range, remarks)

    def square(region: Region) -> Square | ImageError:
        try:
            part = whole.crop(region.edges(*whole.size))
            made = _square(part, depth, size, picture.value_range, [*remarks])
            span = made.span if picture.span is None else picture.span
            return made._replace(box=region.pixels(*whole.size), span=span)
        except ImageError as error:
            return error

    return [square(region) for region in regions]


def _scale_jpeg(image: Image.Image, side: int) -> None:
    """Have a JPEG that is not loaded decoded at the smallest scale that leaves both sides at least ``side`` long."""
    if image.format in ("JPEG", "MPO"):  # of HEIC it would be the file's own small version
        image.draft(None, (side, side))


def _upright(
    image: Image.Image,
    depth: _Depth,
    value_range: ValueRange | None,
    remarks: list[str],
    bands: tuple[int, ...] | None = None,
) -> Image.Image:
    """An image with its pixels loaded, turned by its EXIF orientation, deep colours over their range.

    ImageError if its opacity may be none.
    """
    if image.format == "TIFF":
        image.info.pop("xmp", None)  # by which Pillow would turn it while it loads
    known = depth.declared or value_range
    deep = None if depth.upper_bytes is None or known is None else deep_colours(image, depth.upper_bytes, remarks)
    image.load()  # some formats have the orientation after the pixels
    if bands is None and opacity_in_doubt(image):
        try:
            check_opacity(np.asarray(image.getchannel("A")), 0, 255)
        except ImageError:
            if is_geographic(image):
                raise
            remarks.append(OPACITY_DOUBTED)
    orientation = exif_orientation(image, remarks)
    if deep is not None and known is not None:
        image = _over_range(image, deep, known)
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image


def _over_range(image: Image.Image, colours: NDArray[np.uint16], known: ValueRange) -> Image.Image:
    """A loaded image with its colours of 16 bits (h, w, c) as 8 bits over their range; its opacity stays."""
    info = {**image.info}
    transparent = info.pop("transparency", None)
    bands = [*to_eight_bits(colours, known).transpose(2, 0, 1)]
    if image.mode.endswith("A"):
        bands.append(np.asarray(image.getchannel("A")))
    elif transparent is not None:
        bands.append(np.where((colours == transparent).all(axis=-1), np.uint8(0), np.uint8(255)))
    made = Image.merge({1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[len(bands)], [Image.fromarray(band) for band in bands])
    made.info = info
    return made


def _square(image: Image.Image, depth: _Depth, size: int, value_range: ValueRange | None, remarks: list[str]) -> Square:
    """The remaining steps for an upright image."""
    small, span = _small(image, depth, size, value_range, remarks)
    # Columns before rows, as Pillow did before 13: newer ones choose the order by the shape, and so round differently.
    for shape in ((size, small.height), (size, size)):
        if small.size != shape:
            small = small.resize(shape, Image.Resampling.BILINEAR)
    return Square(np.asarray(small), span, tuple(remarks))


def _small(
    image: Image.Image, depth: _Depth, size: int, value_range: ValueRange | None, remarks: list[str]
) -> tuple[Image.Image, Span | None]:
    """An upright image before the last step, with its own aspect, and the span of its values."""
    profile, described = image.info.get("icc_profile"), None
    if profile:
        with ignoring_damage(PROFILE_IGNORED, remarks):
            described = profile_mode(profile)
            if described is None:
                raise ValueError("its colour space is none of pixels")
    flat, span = (image, None) if image.mode == described == "CMYK" else _to_rgb(image, depth, value_range)
    if described == "L" and (image.mode in ("1", "L", "LA") or image.mode.startswith("I")):
        flat = flat.getchannel(0)
    small = _halved(flat, size)
    if profile and described == small.mode:  # one of another colour space, such as CMYK for RGB, says nothing of pixels
        with ignoring_damage(PROFILE_IGNORED, remarks):
            small = to_srgb(small, profile)
    return small.convert("RGB"), span


@whole_files
def read_square(file: str | os.PathLike[Any] | BinaryIO, size: int, reading: Reading = AS_DECLARED) -> Square:
    """Like :func:`read_square_array`, but return what was noticed instead of warning of it."""
    with _image_errors(), opened(file, reading) as picture:
        return to_square(picture, size)


@whole_files
def read_within(picture: _File | Region, side: int, reading: Reading = AS_DECLARED) -> Image.Image:
    """An image file, or a region of one, as RGB for people to look at: shrunk until no side is longer than ``side``.

    It has its own aspect. Errors as for :func:`read_square`.
    """
    remarks = list[str]()
    with _image_errors(), opened(_file(picture), reading) as found:
        image = found.image
        depth = _depth(image, remarks)
        if not isinstance(picture, Region):  # whose edges are in pixels of the whole picture
            _scale_jpeg(image, side)
        part = _upright(image, depth, found.value_range, remarks)
        if isinstance(picture, Region):
            part = part.crop(picture.edges(*part.size))
        small, _ = _small(part, depth, side // 2, found.value_range, remarks)
    small.thumbnail((side, side))
    return small


def read_size(picture: _File | Region, reading: Reading = AS_DECLARED) -> tuple[int, int]:
    """Width and height of an image file, or a region of one, as it is seen; errors as for :func:`read_square`."""
    with _image_errors(), opened(_file(picture), reading) as found:
        width, height = found.image.size
        if exif_orientation(found.image, []) > 4:
            width, height = height, width
    if not isinstance(picture, Region):
        return width, height
    left, top, right, bottom = picture.edges(width, height)
    return right - left, bottom - top


def _file(picture: _File | Region) -> _File:
    return picture.image if isinstance(picture, Region) else picture


@contextmanager
def _image_errors() -> Iterator[None]:
    """Raise any error of reading one image as an ImageError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(reason(error)) from error


@contextmanager
def opened(file: str | os.PathLike[Any] | BinaryIO, reading: Reading = AS_DECLARED) -> Iterator[Chosen]:
    """The page and bands of an image file, by path or opened, that are read; errors of many types if it is damaged."""
    if isinstance(file, str | os.PathLike):
        problem = path_problem(file)
        if problem is not None:
            raise ImageError(problem)
        # Opened here because Pillow memory-maps some files given by name, which hides that a file is cut short.
        with Path(os.fsdecode(file)).open("rb") as binary, opened(binary, reading) as picture:
            yield picture
        return
    remarks = list[str]()
    try:
        image = open_image(file, MAX_PIXELS, remarks)
    except UnidentifiedImageError:
        if tiff_decoder() is None or not is_unread_tiff(file):
            raise
        yield _read_tiff(file, reading)
        return
    with image:
        picture = chosen(image, reading)
        yield picture._replace(remarks=(*remarks, *picture.remarks))


# -------------------------------------------------------------------- pages and bands


def chosen(image: Image.Image, reading: Reading = AS_DECLARED, numbers: Sequence[int] | None = None) -> Chosen:
    """The page and bands of an image that are read, checked by its header; pixels cost no memory or time before.

    The image is moved to its page. If several pages or some bands are chosen, they are decoded and become one picture
    of 8 bits. ``numbers`` are the pages if they are known.
    """
    check_header(image)
    if is_deep_jpeg_2000(image):
        raise ImageError(WHITE_AS_BLACK)
    remarks, bands = list[str](), reading.bands
    numbers = chosen_pages(image, reading.pages, remarks) if numbers is None else numbers
    if image.tell() != numbers[0]:
        image.seek(numbers[0])
        check_header(image)
    tags = getattr(image, "tag_v2", None)
    if tags is not None and bands is None and (problem := bands_problem(tags)) is not None:
        raise ImageError(problem)
    if isinstance(image, ImageFile.ImageFile) and deep_planes(image):
        uncompressed = image.tile[0][0] == "raw"  # which Pillow reads as noise
        if uncompressed or tiff_decoder() is not None:
            return _read_tiff(image.fp, reading)
    named = tags is not None and tags.get(_PHOTOMETRIC, 0) not in (0, 1, 2)  # colours that Pillow converts to RGB
    if bands is not None and tags is not None and not named and isinstance(image, ImageFile.ImageFile) and image.tile:
        check_bands(bands, tags.get(_SAMPLES, 1))
        if max(bands) >= len(image.getbands()):  # Pillow leaves the others out
            return _read_tiff(image.fp, reading)
    if len(numbers) == 1 and (bands is None or (_is_deep(image) and bands == (0,))):
        return Chosen(image, reading.value_range, remarks=tuple(remarks))
    spans, modes = list[Span](), set[str]()

    def page(number: int) -> NDArray[np.uint8]:
        if image.tell() != number:
            image.seek(number)
            check_header(image)
        depth = _depth(image, remarks)
        upright = _upright(image, depth, reading.value_range, remarks, bands)
        picked = upright if bands is None else _picked(upright, bands)
        modes.add("L" if _is_deep(picked) or picked.mode in ("1", "L", "LA") else "RGB")
        flat, span = _to_rgb(picked, depth if bands is None else depth._replace(transparent=None), reading.value_range)
        spans.extend([] if span is None else [span])
        return np.array(flat)

    picture = Image.fromarray(reduced(map(page, numbers), reading.pages))
    picture = picture.getchannel(0) if modes == {"L"} and not isinstance(reading.pages, tuple) else picture
    if bands is None:
        picture.info["icc_profile"] = image.info.get("icc_profile")
    return Chosen(picture, None, joined_spans(spans), tuple(remarks))


def _picked(image: Image.Image, bands: Sequence[int]) -> Image.Image:
    """Bands of an image as grey, RGB or RGBA; those of a palette, CMYK and the like are bands of its RGB."""
    if image.mode == "1":
        image = image.convert("L")
    elif not _is_deep(image) and image.mode not in ("L", "LA", "RGB", "RGBA"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    channels = image.split()
    check_bands(bands, len(channels))
    if _is_deep(image):
        raise ImageError(
            f"it has one band of more than 8 bits, and bands={tuple(bands)} asks for it {len(bands)} times"
        )
    return Image.merge({1: "L", 3: "RGB", 4: "RGBA"}[len(bands)], [channels[band] for band in bands])


def _read_tiff(file: Any, reading: Reading) -> Chosen:
    """Pages and bands of a TIFF that Pillow does not read: of more bands than colours, of colours in floats."""
    tifffile = tiff_decoder()
    if tifffile is None:
        raise ImageError(f"Pillow does not read all of its bands: {TIFF_REMEDY}")
    spans, profiles = list[Span](), list[bytes | None]()
    file.seek(0)
    with tifffile.TiffFile(file) as tiff:

        def page(number: int) -> NDArray[np.uint8]:
            found = tiff.pages[number]
            tags = {tag.code: tag.value for tag in found.tags}
            problem = size_problem(found.imagewidth, found.imagelength * -(-found.samplesperpixel // 4))
            problem = problem or (bands_problem(tags) if reading.bands is None else None)
            if problem is None and found.photometric not in (0, 1, 2):
                problem = "its colours are neither grey nor red, green and blue: convert it first"
            if problem is not None:
                raise ImageError(problem)
            ends = (start + n for start, n in zip(found.dataoffsets, found.databytecounts, strict=True))
            if max(ends, default=0) > tiff.filehandle.size:
                raise ImageError("it cannot be decoded: it is cut short")
            profiles.append(tags.get(_PROFILE))
            values = found.asarray(maxworkers=1)
            if found.samplesperpixel == 1:
                values = values.reshape(*values.shape[:2], 1) if values.ndim == 2 else values
            elif found.planarconfig == 2:
                values = np.moveaxis(values, 0, -1)
            bands = reading.bands or tuple(range(values.shape[-1]))
            check_bands(bands, values.shape[-1])
            values = values[..., bands]
            declared = None
            with ignoring_damage(RANGE_IGNORED, []):
                declared = range_of_tags(tags, values.dtype.kind == "f")
            eight, span = eight_bits(values, declared or reading.value_range)
            spans.extend([] if span is None else [span])
            eight = 255 - eight if found.photometric == 0 else eight
            picture = Image.fromarray(eight[..., 0] if eight.shape[-1] == 1 else eight)
            orientation = tags.get(_ORIENTATION)
            picture = picture.transpose(TURNS[orientation]) if orientation in TURNS else picture
            return np.array(_to_rgb(picture, _Depth(), None)[0])

        full = (number for number, found in enumerate(tiff.pages) if number == 0 or not found.subfiletype & 5)
        picture = Image.fromarray(reduced(map(page, picked_pages(full, reading.pages)), reading.pages))
    if reading.bands is None:
        picture.info["icc_profile"] = profiles[0]
    return Chosen(picture, None, joined_spans(spans))


def path_problem(path: str | os.PathLike[Any]) -> str | None:
    """Why a path is no readable file, or None; without opening it, as a pipe would block."""
    try:
        status = os.stat(path)  # noqa: PTH116 (takes names in bytes too)
    except FileNotFoundError:
        name = os.fsdecode(path)
        if name.startswith(_BASE64):
            return _ENCODED
        if name.startswith(("http:", "https:", "ftp:", "s3:", "gs:")):
            return "an address, not a file: download it, and pass the path or the bytes"
        if name.startswith("file:"):
            return "an address, not a path: pass the path alone, without file://"
        if name.startswith("~"):
            return f"no such file: Python does not expand ~; os.path.expanduser gives {Path(name).expanduser()}"
        return "a link to nothing" if os.path.islink(path) else f"no such file (looked in {Path.cwd()})"  # noqa: PTH114
    except (OSError, ValueError) as error:  # a folder that may not be entered, a name too long or with a null
        if os.fsdecode(path).startswith(_BASE64):
            return _ENCODED
        return f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(status.st_mode):
        return "it is a folder, not an image file"
    if not stat.S_ISREG(status.st_mode):
        return "it is a pipe, a socket or a device, not an image file"
    return None if status.st_size else "the file is empty"


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
    upper_bytes: str | None = None  # the raw mode of 16 bits a colour, of which Pillow reads the upper eight


def _depth(image: Image.Image, remarks: list[str]) -> _Depth:
    tile = getattr(image, "tile", None)
    raw = tile[0][3] if tile else ""
    raw = raw[0] if isinstance(raw, tuple) and raw else raw
    transparent = image.info.get("transparency")
    if isinstance(transparent, bytes) and len(transparent) > 256:  # more than a palette has colours
        image.info.pop("transparency")
        remarks.append(METADATA_IGNORED)
    if _is_deep(image):
        declared = significant = None
        with ignoring_damage(RANGE_IGNORED, remarks):
            declared, significant = declared_range(image), significant_bits(image)
        return _Depth(declared, significant, is_white_zero(image), transparent)
    upper_bytes = raw if isinstance(raw, str) and ";16" in raw and image.mode in ("L", "LA", "RGB", "RGBA") else None
    upper_bytes = DEEP_PPM if is_deep_ppm(image) else upper_bytes
    declared = None
    # Pillow leaves a transparent value at the depth of the file and scales the pixels.
    if upper_bytes is not None:
        with ignoring_damage(RANGE_IGNORED, remarks):
            declared = declared_range(image)
        if isinstance(transparent, tuple):
            transparent = tuple(value >> 8 for value in transparent)
    elif isinstance(transparent, int) and image.mode == "L":
        transparent = min(255, transparent * {"L;2": 85, "L;4": 17}.get(str(raw), 1))
    return _Depth(declared, transparent=transparent, upper_bytes=upper_bytes)


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def _to_rgb(image: Image.Image, depth: _Depth, value_range: ValueRange | None) -> tuple[Image.Image, Span | None]:
    if _is_deep(image):
        return _deep_to_rgb(np.asarray(image), depth, value_range)
    span = None
    colours = len(image.getbands()) - image.mode.endswith("A")
    if depth.upper_bytes and depth.declared is None and value_range is None:
        low, high = zip(*[image.getchannel(index).getextrema() for index in range(colours)], strict=True)
        span = Span(65535, 257 * min(low), 257 * max(high))
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
    """Grey of more than 8 bits; a range that the file declares takes precedence over the user's."""
    known = depth.declared
    if known is None and depth.significant is not None:
        known = range_of_significant(values, depth.significant)
    grey, span = eight_bits(values, known or value_range)
    if depth.white_zero:
        grey = 255 - grey
    if isinstance(depth.transparent, int):
        grey = np.where(values == depth.transparent, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB"), span


def _halved(image: Image.Image, size: int) -> Image.Image:
    """Step 3 at the top of this module."""
    times = min(image.size) // (2 * size)
    return image.reduce(1 << (times.bit_length() - 1)) if times > 1 else image
