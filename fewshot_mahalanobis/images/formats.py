"""Image formats: one list, for files given by name and for files in folders.

Pillow reads most of them. HEIC is read by pillow-heif where that is installed (the extra ``formats``); it is not
registered with Pillow, so other code sees no difference.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import BinaryIO

from PIL import Image, ImageFile, UnidentifiedImageError

from fewshot_mahalanobis.extras import install_command

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
_EXPORT = "export them as JPEG"
_DECODER = f"{install_command('formats')}, or {_EXPORT}"
#: Extension, in capitals and without its dot -> what to do if images of this kind cannot be read.
REMEDIES = {
    **dict.fromkeys(("HEIC", "HEIF", "HIF", "AVIF"), _DECODER),
    **dict.fromkeys(("ARW", "CR2", "CR3", "DNG", "NEF", "ORF", "RAF", "RW2", "JXL", "EPS", "PS", "SVG"), _EXPORT),
}


class _WholeFiles(ContextDecorator):
    """While any thread is in this context, Pillow refuses files that are cut short or damaged.

    Pillow decodes what it can of them if other code has set ``ImageFile.LOAD_TRUNCATED_IMAGES``, which holds for the
    whole process; it takes no such setting for one image. What was set returns when the last thread has left. Meanwhile
    it is not in force for other code either.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entered = 0
        self._set_by_others = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._set_by_others = False
            if ImageFile.LOAD_TRUNCATED_IMAGES:
                self._set_by_others, ImageFile.LOAD_TRUNCATED_IMAGES = True, False
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and self._set_by_others:
                ImageFile.LOAD_TRUNCATED_IMAGES = True


#: Context and decorator of all decoding.
whole_files = _WholeFiles()


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


def open_image(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Open a binary image file that can seek. Its contents tell its format. Only HEIC is decoded at once.

    PIL.UnidentifiedImageError if it is no image or needs a decoder that is not installed, which the message names;
    PIL.Image.DecompressionBombError if it is HEIC of more than ``max_pixels`` or Pillow refuses its size; errors of
    many types if it is damaged.
    """
    try:
        return Image.open(file)
    except UnidentifiedImageError as error:
        name = _media_format(file)
        decoder = heif_decoder()
        if name == "HEIC" and decoder is not None:
            heif = decoder.open_heif(file)
            width, height = heif.size
            if width * height > max_pixels:
                raise Image.DecompressionBombError(f"{width} x {height}.") from None
            image: Image.Image = heif.to_pillow()
            return image
        if name is None and _starts_as_tiff(file):
            raise UnidentifiedImageError(
                "it cannot be decoded: a damaged TIFF, or one that Pillow does not read, such as colours in floats. "
                "Convert it to 8 bits a colour, or read it with tifffile and pass the array"
            ) from error
        if name is None:
            raise UnidentifiedImageError("not an image file of a known format") from error
        raise UnidentifiedImageError(f"{name} images need a decoder: {REMEDIES[name]}") from error


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


def _starts_as_tiff(file: BinaryIO) -> bool:
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    return start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
