"""What files say beside their pixels: EXIF orientation, colour profile, range of values.

One rule holds for all of it, that of viewers: damaged metadata are ignored, and a remark says so.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import BinaryIO, Literal

import numpy as np
from PIL import ExifTags, Image, ImageCms

#: Remarks about damaged metadata.
PROFILE_IGNORED = "its colour profile is damaged and was ignored, as viewers do: save it anew if its colours look wrong"
EXIF_IGNORED = "its EXIF data are damaged and were ignored, as viewers do: it is read as it is stored, not turned"
RANGE_IGNORED = "what its file says about its range of values is damaged and was ignored"
METADATA_IGNORED = (
    "its metadata (EXIF, colour profile, resolution, gamma or the like) are damaged and were ignored, as viewers do"
)

#: EXIF orientation -> what turns the stored picture upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@contextmanager
def ignoring_damage(remark: str, remarks: list[str]) -> Iterator[None]:
    """Ignore any error of reading metadata, and add the remark."""
    try:
        yield
    except MemoryError:
        raise
    except Exception:  # Pillow raises a dozen unrelated types
        if remark not in remarks:
            remarks.append(remark)


def exif_orientation(image: Image.Image, remarks: list[str]) -> int:
    """Orientation of a loaded image, 1 to 8, by its EXIF data alone; 1 if they are damaged.

    Pillow's ``getexif`` takes one from XMP or a text of ImageMagick's too, which browsers and most viewers do not.
    """
    exif = Image.Exif()
    with ignoring_damage(EXIF_IGNORED, remarks):
        data = image.info.get("exif") or b""
        exif.load(data)
        directory = data.removeprefix(b"Exif\0\0")
        order: Literal["little", "big"] = "little" if directory.startswith(b"II") else "big"
        place = int.from_bytes(directory[4:8], order)
        if directory and len(exif) == 0 and directory[place : place + 2] != b"\0\0":
            raise ValueError("it has entries, and none is whole")
    orientation = exif.get(ExifTags.Base.Orientation)
    return orientation if orientation in TURNS else 1


# -------------------------------------------------------------------- ICC colour profiles: other colour spaces as sRGB

#: Colour space of a profile's header -> mode of the pixels that it describes.
_PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
#: Largest difference, in levels of 255, of a profile that is sRGB but for rounding.
_PROFILE_ROUNDING = 2


def profile_mode(profile: bytes) -> str | None:
    """Mode of the pixels that a profile describes ("RGB", "L", "CMYK"), by its header, or None."""
    return _PROFILE_MODES.get(profile[16:20].decode("latin-1").strip())


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image in the mode of its profile to sRGB; errors of many types if the profile is damaged.

    A profile that is sRGB but for rounding changes nothing.
    """
    transform = _profile_transform(profile, image.mode)
    return image.convert("RGB") if transform is None else transform.apply(image)


@lru_cache(maxsize=32)  # the pictures of a camera have one profile, and setting up takes longer than a small picture
def _profile_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Conversion from a profile to sRGB by relative colorimetry; None if it changes no colour."""
    transform = ImageCms.buildTransform(
        ImageCms.getOpenProfile(io.BytesIO(profile)),
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    if mode == "CMYK":
        return transform
    steps = np.arange(0, 256, 15, dtype=np.uint8)
    colours = np.stack(np.meshgrid(*[steps] * len(mode), indexing="ij"), axis=-1).reshape(1, -1, len(mode))
    palette = Image.fromarray(colours if mode == "RGB" else colours[..., 0])
    change = np.asarray(transform.apply(palette), int) - np.asarray(palette.convert("RGB"), int)
    return None if np.abs(change).max() <= _PROFILE_ROUNDING else transform


# -------------------------------------------------------------------- files without their metadata


def without_metadata(file: BinaryIO) -> Iterator[bytes]:
    """Yield versions of a JPEG, PNG, WebP or TIFF, each with its pixels and less of the rest than the one before.

    Nothing for a file of another format, which is not read.
    """
    file.seek(0)
    start = file.read(12)
    if start.startswith(b"\xff\xd8"):
        yield b"".join(_jpeg_without_metadata(start + file.read()))
    elif start.startswith(b"\x89PNG\r\n\x1a\n"):
        data = start + file.read()
        yield b"".join(_png_without_metadata(data, keep=(b"tRNS", b"sBIT")))
        yield b"".join(_png_without_metadata(data))
    elif start[:4] == b"RIFF" and start[8:] == b"WEBP":
        yield b"".join(_webp_without_metadata(start + file.read()))
    elif start[:4] in _CLASSIC_TIFF:
        data = start + file.read()
        yield _tiff_without_metadata(data, {*_PIXEL_TAGS, *_MEANING_TAGS})
        yield _tiff_without_metadata(data, _PIXEL_TAGS)


def _jpeg_without_metadata(data: bytes) -> Iterator[bytes]:
    """Without application segments, but for Adobe's, which says how colours are stored; and without comments."""
    yield data[:2]
    place = 2
    while (place := data.find(b"\xff", place)) >= 0 and place + 4 <= len(data):
        marker = data[place + 1]
        if marker == 0xDA:  # the pixels
            yield data[place:]
            return
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:  # of no length, or none
            place += 1
            continue
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        if (marker == 0xEE and end - place >= 16) or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            yield data[place:end]
        place = end


def _png_without_metadata(data: bytes, keep: Collection[bytes] = ()) -> Iterator[bytes]:
    """Critical chunks, and those ancillary ones that are to be kept, if they are whole."""
    yield data[:8]
    place = 8
    while place + 8 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4], "big")
        name, chunk = data[place + 4 : place + 8], data[place:end]
        whole = zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big")
        if name[:1].isupper() or (name in keep and whole):
            yield chunk
        place = end


def _webp_without_metadata(data: bytes) -> Iterator[bytes]:
    """Without EXIF, XMP and colour profile, and without the flags in the header that announce them."""
    kept, place = [], 12
    while place + 8 <= len(data):
        end = place + 8 + (size := int.from_bytes(data[place + 4 : place + 8], "little")) + size % 2
        name, chunk = data[place : place + 4], data[place:end]
        if name == b"VP8X" and len(chunk) > 8:
            chunk = chunk[:8] + bytes([chunk[8] & ~0b101100]) + chunk[9:]
        if name not in (b"EXIF", b"XMP ", b"ICCP"):
            kept.append(chunk)
        place = end
    yield b"RIFF" + (4 + sum(map(len, kept))).to_bytes(4, "little") + b"WEBP"
    yield from kept


_CLASSIC_TIFF: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
#: TIFF tags without which pixels are not found, of the baseline and its extensions: size, bits, compression, colours,
#: strips and tiles, planes, predictor, palette, smaller versions, opacity, kind of numbers, JPEG's tables, YCbCr.
_PIXEL_TAGS = frozenset(
    [*range(254, 260), 262, 266, 273, 277, 278, 279, 284, 292, 293, 317, 320, *range(322, 326), 330, 338, 339, 347]
)
_PIXEL_TAGS |= {*range(512, 522), *range(529, 533)}
#: Tags that say what the picture means: ImageJ's description of a stack, orientation, range, keys of satellites.
_MEANING_TAGS = frozenset([270, 274, 280, 281, 340, 341, 34735])


def lost_tags(file: BinaryIO, image: Image.Image) -> bool:
    """Whether Pillow lacks tags of a TIFF's pixels: at an entry that lies outside the file it stops reading them."""
    place = file.tell()
    file.seek(0)
    start = file.read(8)
    if start[:4] not in _CLASSIC_TIFF:
        file.seek(place)
        return False
    order: Literal["little", "big"] = _CLASSIC_TIFF[start[:4]]
    file.seek(int.from_bytes(start[4:], order))
    entries = file.read(12 * int.from_bytes(file.read(2), order))
    file.seek(place)
    found = {int.from_bytes(entries[place : place + 2], order) for place in range(0, len(entries), 12)}
    return not found & _PIXEL_TAGS <= {*getattr(image, "tag_v2", found)}


def _tiff_without_metadata(data: bytes, keep: Collection[int]) -> bytes:
    """Each directory with only the entries whose tags are to be kept."""
    changed, order, seen = bytearray(data), _CLASSIC_TIFF[data[:4]], set[int]()
    place = int.from_bytes(data[4:8], order)
    while place and place not in seen and place + 2 <= len(data):
        seen.add(place)
        end = place + 2 + 12 * int.from_bytes(data[place : place + 2], order)
        entries = [data[start : start + 12] for start in range(place + 2, min(end, len(data)), 12)]
        kept = [entry for entry in entries if int.from_bytes(entry[:2], order) in keep]
        following = data[end : end + 4]
        directory = len(kept).to_bytes(2, order) + b"".join(kept) + following
        changed[place : place + len(directory)] = directory
        place = int.from_bytes(following, order)
    return bytes(changed)
