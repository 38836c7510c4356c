"""Image formats: one list, for files given by name and for files in folders.

Pillow reads most of them. HEIC is read by pillow-heif where that is installed (the extra ``formats``), and TIFF that
Pillow does not read by tifffile (the extra ``tiff``); they are not registered with Pillow, so other code sees no
difference.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.images.metadata import METADATA_IGNORED, lost_tags, without_metadata
from fewshot_mahalanobis.switches import SwitchedOff

#: Formats that Pillow registers but does not decode: programs, films, containers whose decoder it lacks.
_UNREADABLE = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
_HEIF_SUFFIXES = {".heic", ".heif", ".hif"}
#: Formats that are recognised by their first bytes where a file has no known extension.
_SNIFFED = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000", "AVIF")
#: Brand in the header of an ISO media file -> format.
_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
#: What Pillow says of a TIFF with its tags whole: other depths, more than six bands, a plane for each of many.
_UNREAD_TIFF = ("unknown pixel mode", "samples per pixel", "index out of range")
_EXPORT = "export them as JPEG"
_DECODER = f"{install_command('formats')}, or {_EXPORT}"
#: Extension, in capitals and without its dot -> what to do if images of this kind cannot be read.
REMEDIES = {
    **dict.fromkeys(("HEIC", "HEIF", "HIF", "AVIF"), _DECODER),
    **dict.fromkeys(("ARW", "CR2", "CR3", "DNG", "NEF", "ORF", "RAF", "RW2", "JXL", "EPS", "PS", "SVG"), _EXPORT),
}
#: What to do about a TIFF of which Pillow does not read all.
TIFF_REMEDY = f"{install_command('tiff')}, or read it yourself and pass the array"
#: Context and decorator of all decoding. Other code may have set this switch, with which Pillow decodes what it can of
#: files that are cut short or damaged; in the context it refuses them.
whole_files = SwitchedOff(ImageFile, "LOAD_TRUNCATED_IMAGES")


@cache
def image_suffixes() -> frozenset[str]:
    """Extensions of the formats that can be read, in lower case with their dots."""
    readable = {*_pillow_formats(), "MPO"} - _UNREADABLE  # MPO is opened as JPEG
    suffixes = {suffix for suffix, name in Image.registered_extensions().items() if name in readable}
    return frozenset(suffixes | (_HEIF_SUFFIXES if heif_decoder() else set()))


def starts_as_image(file: Path) -> bool:
    """Whether the first bytes of a file are those of a common format that can be read."""
    known = [name for name in _SNIFFED if name in _pillow_formats()]
    try:
        with file.open("rb") as opened:
            if _media_format(opened) == "HEIC":
                return heif_decoder() is not None
            Image.open(opened, formats=known)
            return True
    except Exception:  # Pillow's readers raise a dozen unrelated types
        return False


def open_image(file: BinaryIO, max_pixels: int, remarks: list[str]) -> Image.Image:
    """Open a binary image file that can seek. Its contents tell its format, and no pixels are decoded.

    A file that Pillow does not open for its metadata is opened without them, and a remark is added.

    PIL.UnidentifiedImageError if it is no image or needs a decoder that is not installed, which the message names;
    PIL.Image.DecompressionBombError if it is HEIC of more than ``max_pixels`` or Pillow refuses its size; errors of
    many types if it is damaged.
    """
    try:
        return _opened_softly(file, remarks)
    except UnidentifiedImageError as error:
        name = _media_format(file)
        decoder = heif_decoder()
        if name == "HEIC" and decoder is not None:
            image: Image.Image = decoder.HeifImageFile(file)
            if image.width * image.height > max_pixels:
                raise Image.DecompressionBombError(f"{image.width} x {image.height}.") from None
            return image
        if name is None and is_unread_tiff(file):
            raise UnidentifiedImageError(
                f"a TIFF that Pillow does not read, of many bands or colours in floats: {TIFF_REMEDY}"
            ) from error
        if name is None and _starts_as_tiff(file):
            raise UnidentifiedImageError("it cannot be decoded, is it damaged? It begins as a TIFF") from error
        if name is None:
            raise UnidentifiedImageError("not an image file of a known format") from error
        raise UnidentifiedImageError(f"{name} images need a decoder: {REMEDIES[name]}") from error


def _opened_softly(file: BinaryIO, remarks: list[str]) -> Image.Image:
    try:
        image = Image.open(file)
        if image.format != "TIFF" or not lost_tags(file, image):
            return image
        failed: Exception = ValueError("its tags are damaged")
    except (Image.DecompressionBombError, MemoryError):
        raise
    except Exception as error:
        failed = error
    for pixels in without_metadata(file):
        try:
            image = Image.open(io.BytesIO(pixels))
        except Exception:
            continue
        remarks.append(METADATA_IGNORED)
        return image
    raise failed


def tiff_decoder() -> ModuleType | None:
    """``tifffile`` if it is installed."""
    try:
        import tifffile
    except ImportError:
        return None
    return tifffile


def heif_decoder() -> ModuleType | None:
    """``pillow_heif`` if it is installed."""
    try:
        import pillow_heif
    except ImportError:
        return None
    return pillow_heif


def _pillow_formats() -> list[str]:
    Image.init()
    return list(Image.ID)


def _media_format(file: BinaryIO) -> str | None:
    """HEIC or AVIF by the brand in a file's first box; the file is left at its start."""
    file.seek(0)
    start = file.read(12)
    file.seek(0)
    return _BRANDS.get(start[8:12]) if start[4:8] == b"ftyp" else None


def is_unread_tiff(file: BinaryIO) -> bool:
    """Whether a file is a TIFF with its tags whole, of a kind that Pillow does not read."""
    if not _starts_as_tiff(file):
        return False
    try:
        TiffImagePlugin.TiffImageFile(file)
    except Exception as error:
        return any(text in str(error) for text in _UNREAD_TIFF)
    finally:
        file.seek(0)
    return False


def _starts_as_tiff(file: BinaryIO) -> bool:
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    return start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
