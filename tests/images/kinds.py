"""Kinds of image files and arrays by pages, bands, depth and colour, and what becomes of them.

``python -m tests.images.kinds`` prints the table of docs/scientific_images.md, which tests/images/test_pages.py checks.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

_Y, _X = np.mgrid[:16, :24]
#: Seven different grey pictures, from 20 to 219.
GREY = [((_X * (k + 1) * 5 + _Y * (3 + 4 * k)) % 200 + 20).astype(np.uint8) for k in range(7)]
#: A fourth band that is opacity, and the first three pictures as colours laid on white by it.
OPACITY = np.where(_X < 8, 0, 255).astype(np.uint8)
ON_WHITE = np.where(OPACITY[..., None] == 0, 255, np.stack(GREY[:3], axis=-1))
_GEO_KEYS = (34735, 3, 4, (1, 1, 0, 0), True)


class Kind(NamedTuple):
    """One row of the table. ``alone`` is "read", "read, with a note" or a part of the error's message."""

    name: str
    item: Any
    pages: int
    bands: int
    bits: str
    alone: str
    settings: dict[str, Any]  # of a choice
    wanted: NDArray[Any]  # (16, 24, 3), what the choice gives, or the item alone without one
    tolerance: float = 0.51


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tiff(values: NDArray[Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, values, **{"photometric": "minisblack", **options})
    return buffer.getvalue()


def bands(*numbers: int, scale: float = 1, dtype: Any = np.uint8, axis: int = -1) -> NDArray[Any]:
    return np.stack([(GREY[number].astype(float) * scale).astype(dtype) for number in numbers], axis=axis)


def grey(values: NDArray[Any]) -> NDArray[Any]:
    return np.repeat(values[..., None], 3, axis=-1)


def _pyramid() -> bytes:
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        writer.write(bands(0, 1, 2), photometric="rgb")
        writer.write(bands(0, 1, 2)[::2, ::2], photometric="rgb", subfiletype=1)
    return buffer.getvalue()


def _fits(planes: int) -> bytes:
    cards = {"SIMPLE": "T", "BITPIX": 8, "NAXIS": 3, "NAXIS1": 24, "NAXIS2": 16, "NAXIS3": planes}
    header = "".join(f"{name:8}= {value:>20}".ljust(80) for name, value in cards.items()) + "END".ljust(80)
    data = bands(*range(planes), axis=0)[:, ::-1].tobytes()
    return header.ljust(2880).encode() + data.ljust(2880, b"\0")


def _animation(kind: str, **options: Any) -> bytes:
    frames = [Image.fromarray(grey(picture)) for picture in GREY[:3]]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def kinds() -> list[Kind]:
    rgb, stack = bands(0, 1, 2), bands(0, 1, 2, axis=0)
    rgba, unlike = np.dstack([rgb, OPACITY]), bands(0, 1, 2, 3)
    spread = {"planarconfig": "contig", "compression": "lzw"}
    unspecified: dict[str, Any] = {"photometric": "rgb", "extrasamples": ["unspecified"]}
    said = {"photometric": "rgb", "extrasamples": ["unassalpha"]}
    chosen, most = bands(3, 2, 1), grey(stack.max(axis=0))
    return [
        Kind("PNG, BMP, JPEG", saved(Image.fromarray(rgb), "PNG"), 1, 3, "8", "read", {}, rgb),
        Kind("PNG, WebP with opacity", saved(Image.fromarray(rgba), "PNG"), 1, 4, "8", "read", {}, ON_WHITE),
        Kind("GIF, WebP, PNG, AVIF with frames", _animation("WEBP", lossless=True), 3, 3, "8", "read, with a note",
             {"pages": 2}, grey(GREY[2])),
        Kind("MPO with several pictures", _animation("MPO", quality=100), 3, 3, "8", "read, with a note",
             {"pages": "first"}, grey(GREY[0]), 3),
        Kind("TIFF: slices", tiff(stack), 3, 1, "8", "a stack of several pages", {"pages": "max"}, most),
        Kind("TIFF: slices", tiff(bands(0, 1, 2, scale=16, dtype=np.uint16, axis=0)), 3, 1, "12 in 16",
             "a stack of several pages", {"pages": "mean", "value_range": (0, 4080)}, grey(stack.mean(axis=0)), 1),
        Kind("TIFF: slices", tiff(bands(0, 1, 2, scale=1 / 255, dtype=np.float32, axis=0)), 3, 1, "float",
             "a stack of several pages", {"pages": 1}, grey(GREY[1])),
        Kind("OME-TIFF: channels", tiff(bands(0, 1, 2, 3, axis=0), ome=True, metadata={"axes": "CYX"}), 4, 1, "8",
             "a stack of several pages", {"pages": (2, 0, 3)}, bands(2, 0, 3)),
        Kind("ImageJ: slices and channels", tiff(bands(0, 1, 2, 3, axis=0)[None].repeat(2, axis=0), imagej=True,
             metadata={"axes": "ZCYX"}), 8, 1, "8", "a stack of several pages", {"pages": 5}, grey(GREY[1])),
        Kind("TIFF: the picture and smaller versions", _pyramid(), 1, 3, "8", "read", {}, rgb),
        Kind("TIFF with opacity", tiff(rgba, **said), 1, 4, "8", "read", {}, ON_WHITE),
        Kind("TIFF, opacity that does not look like it", tiff(unlike, **said), 1, 4, "8", "read, with a note",
             {"bands": (0, 1, 2)}, rgb),
        Kind("TIFF: colours and infrared", tiff(unlike, **unspecified), 1, 4, "8", "4 bands, and nothing says",
             {"bands": (3, 0, 1)}, bands(3, 0, 1)),
        Kind("TIFF, a plane for each band", tiff(bands(0, 1, 2, 3, axis=0), planarconfig="separate", **unspecified), 1,
             4, "8", "4 bands, and nothing says", {"bands": (3, 2, 1)}, chosen),
        Kind("GeoTIFF, the fourth band called opacity", tiff(unlike, extratags=[_GEO_KEYS], **said), 1, 4, "8",
             "does not look like opacity", {"bands": (3, 2, 1)}, chosen),
        Kind("GeoTIFF of a satellite", tiff(np.dstack([bands(*range(7), scale=10, dtype=np.uint16)] * 2)[..., :13],
             extratags=[_GEO_KEYS], **spread), 1, 13, "16", "13 bands, and nothing says",
             {"bands": (3, 2, 1), "value_range": (0, 2550)}, chosen),
        Kind("TIFF of measurements", tiff(bands(*range(5), scale=1 / 255, dtype=np.float32), **spread), 1, 5, "float",
             "5 bands, and nothing says", {"bands": 4}, grey(GREY[4])),
        Kind("TIFF: colours", tiff(rgb / np.float32(255), photometric="rgb"), 1, 3, "float", "read", {}, rgb),
        Kind("PNG, TIFF: colours", tiff(bands(0, 1, 2, scale=16, dtype=np.uint16), photometric="rgb"), 1, 3, "12 in 16",
             "read, with a note", {"value_range": (0, 4080)}, rgb),
        Kind("TIFF, a plane for each colour", tiff(bands(0, 1, 2, scale=257, dtype=np.uint16, axis=0),
             photometric="rgb", planarconfig="separate"), 1, 3, "16", "read", {}, rgb),
        Kind("TIFF: slices of several bands", tiff(np.stack([unlike, unlike[::-1]]), **unspecified), 2, 4, "8",
             "a stack of several pages", {"pages": 1, "bands": (3, 2, 1)}, chosen[::-1]),
        Kind("JPEG 2000: colours and infrared", saved(Image.fromarray(unlike), "JPEG2000"), 1, 4, "8",
             "does not look like opacity", {"bands": (3, 2, 1)}, chosen),
        Kind("FITS: a cube", _fits(3), 3, 1, "8", "a stack of 3 planes", {}, grey(GREY[0])),
        Kind("Array (h, w, 4) with opacity", rgba, 1, 4, "8", "read", {}, ON_WHITE),
        Kind("Array (h, w, 4) of measurements", unlike / 255, 1, 4, "float", "does not look like opacity",
             {"bands": (3, 2, 1)}, chosen),
        Kind("Array (h, w, 13)", np.dstack([bands(*range(7), scale=16, dtype=np.uint16)] * 2)[..., :13], 1, 13,
             "12 in 16", r"\(16, 24, 13\) is not \(h, w, 3\)", {"bands": (3, 2, 1), "value_range": (0, 4080)}, chosen),
    ]  # fmt: skip


def table(rows: list[Kind]) -> str:
    """The table of the page, in Markdown."""

    def choice(kind: Kind) -> str:
        return ", ".join(f"`{name}={value!r}`".replace("'", '"') for name, value in kind.settings.items())

    def alone(kind: Kind) -> str:
        return kind.alone if kind.alone.startswith("read") else "an error"

    head = "| kind | pages | bands | bits | without a choice | a choice |\n| --- | --- | --- | --- | --- | --- |\n"
    return head + "".join(
        f"| {kind.name} | {kind.pages} | {kind.bands} | {kind.bits} | {alone(kind)} | {choice(kind)} |\n"
        for kind in rows
    )


if __name__ == "__main__":
    print(table(kinds()))
