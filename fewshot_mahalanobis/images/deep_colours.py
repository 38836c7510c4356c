"""Files of 16 bits a colour. Pillow has no such images, and keeps the upper eight bits of each colour.

For the full range that is enough. Where a range is known, all bits are needed, and the file is decoded once more:
under the other byte order, what Pillow takes for the upper byte of a colour is the lower one.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

UPPER_BITS = (
    "of its 16 bits a colour only the upper eight can be read, so the range of values that was given has few steps: "
    "save it as a TIFF or PNG of plain RGB"
)
WHITE_AS_BLACK = (
    "a JPEG 2000 of more than 8 bits a colour, of which Pillow reads white as black: save it as PNG or TIFF, or read "
    "it with imagecodecs.imread and pass the array"
)
#: Stands for the raw mode of a PPM of 16 bits a colour, which has a decoder of its own.
DEEP_PPM = "PPM;16"
#: End of a raw mode -> that of the other byte order.
_OTHER_ORDER = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
#: TIFF tags.
_BITS, _PLANES = 258, 284


def deep_colours(image: Image.Image, raw_mode: str, remarks: list[str]) -> NDArray[np.uint16]:
    """Colours (h, w, c) without opacity, of 16 bits, of an image that is not loaded and will be.

    A remark is added if the lower eight bits cannot be had, which are then in their middle.
    """
    if raw_mode == "LA;16B":  # four bytes a pixel, as RGBA has
        grey_and_opacity = _decoded(image, "RGBA").astype(np.uint16)
        return grey_and_opacity[..., :1] * 256 + grey_and_opacity[..., 1:2]
    if raw_mode == DEEP_PPM:
        upper = _decoded(image, "RGB;16B", "raw").astype(np.uint16)
        return upper * 256 + _decoded(image, "RGB;16L", "raw")
    lower: Any = 128
    if raw_mode[:-1] in ("RGB;16", "RGBA;16", "RGBX;16") and image.format in ("PNG", "TIFF") and not deep_planes(image):
        lower = _decoded(image, raw_mode[:-1] + _OTHER_ORDER[raw_mode[-1]])[..., :3]
    else:
        remarks.append(UPPER_BITS)
    values = np.asarray(image)
    values = values[..., None] if values.ndim == 2 else values[..., : len(image.getbands()) - image.mode.endswith("A")]
    return values.astype(np.uint16) * 256 + lower


def deep_planes(image: Image.Image) -> bool:
    """Whether an image that is not loaded is a TIFF with 16 bits a colour and a plane for each of them."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS, ())
    return tags.get(_PLANES) == 2 and isinstance(bits, tuple) and 16 in bits and bool(getattr(image, "tile", None))


def is_deep_ppm(image: Image.Image) -> bool:
    """Whether an image that is not loaded is a PPM with colours from 0 to 65535: Pillow scales them to 8 bits."""
    tile: Any = getattr(image, "tile", None)
    return image.format == "PPM" and bool(tile) and tile[0][0] == "ppm" and tile[0][3] == ("RGB", 65535)


def is_deep_jpeg_2000(image: Image.Image) -> bool:
    """Whether an image that is not loaded is a JPEG 2000 of several bands, one of them of more than 8 bits."""
    if image.format != "JPEG2000" or len(image.getbands()) == 1 or not getattr(image, "tile", None):
        return False
    file = image.fp  # type: ignore[attr-defined]
    place = file.tell()
    file.seek(0)
    _, found, sizes = file.read(4096).partition(b"\xff\x4f\xff\x51")  # the code stream begins with its sizes
    file.seek(place)
    count = int.from_bytes(sizes[36:38], "big")
    return bool(found) and any((bits & 127) + 1 > 8 for bits in sizes[38 : 38 + 3 * count : 3])


def _decoded(image: Image.Image, raw_mode: str, codec: str | None = None) -> NDArray[np.uint8]:
    """Pixels of the file of an image, decoded as another raw mode; the image is not changed."""
    file = image.fp  # type: ignore[attr-defined]
    place = file.tell()
    file.seek(0)
    again = Image.open(io.BytesIO(file.read()))
    file.seek(place)
    assert isinstance(again, ImageFile.ImageFile)
    again.seek(image.tell())
    again.tile = [_as_raw_mode(tile, raw_mode, codec) for tile in again.tile]
    again.load()
    return np.asarray(again)


def _as_raw_mode(tile: Any, raw_mode: str, codec: str | None) -> Any:
    """A tile of Pillow (codec, extents, offset, arguments), which before Pillow 11 is a plain tuple."""
    arguments = raw_mode if isinstance(tile[3], str) else (raw_mode, *tile[3][1:])
    parts = (tile[0], *tile[1:3], arguments) if codec is None else (codec, *tile[1:3], (raw_mode, 0, 1))
    return type(tile)(*parts) if hasattr(tile, "_replace") else parts
