"""Colour profiles of wide colour spaces, and pictures in them."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image, ImageCms

#: XYZ of red, green and blue, adapted to D50, as the spaces' definitions give them.
PRIMARIES = {
    "sRGB": ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141)),
    "Display P3": ((0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841)),
    "Adobe RGB": ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446)),
}
ADOBE_GAMMA = 2.19921875


def _fixed(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def _profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """An ICC profile of version 2 for a display."""
    tags = {b"desc": b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + bytes(79), **tags}
    tags[b"wtpt"] = b"XYZ \0\0\0\0" + _fixed(0.9642, 1, 0.8249)
    table, data, start = b"", b"", 128 + 4 + 12 * len(tags)
    for name, value in tags.items():
        table += name + struct.pack(">II", start + len(data), len(value))
        data += value + bytes(-len(value) % 4)
    header = struct.pack(">I4sI4s4s4s", start + len(data), b"\0\0\0\0", 0x02400000, b"mntr", space, b"XYZ ")
    header += struct.pack(">6H", 2024, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _fixed(0.9642, 1, 0.8249)
    return header.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data


def _gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256))


def _srgb_curve() -> bytes:
    x = np.linspace(0, 1, 1024)
    y = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    return b"curv\0\0\0\0" + struct.pack(">I", 1024) + np.rint(y * 65535).astype(">u2").tobytes()


def _matrix_profile(primaries: tuple[tuple[float, ...], ...], curve: bytes) -> bytes:
    colourants = {b"%cXYZ" % name: b"XYZ \0\0\0\0" + _fixed(*xyz) for name, xyz in zip(b"rgb", primaries, strict=True)}
    return _profile(b"RGB ", {**colourants, **{b"%cTRC" % name: curve for name in b"rgb"}})


SRGB = _matrix_profile(PRIMARIES["sRGB"], _srgb_curve())
DISPLAY_P3 = _matrix_profile(PRIMARIES["Display P3"], _srgb_curve())
ADOBE_RGB = _matrix_profile(PRIMARIES["Adobe RGB"], _gamma(ADOBE_GAMMA))
#: Grey with a gamma of 1.
LINEAR_GREY = _profile(b"GRAY", {b"kTRC": _gamma(1)})


def in_space(image: Image.Image, profile: bytes) -> Image.Image:
    """An sRGB picture with the same look in the colour space of another profile."""
    converted = ImageCms.profileToProfile(
        image,
        ImageCms.ImageCmsProfile(io.BytesIO(SRGB)),
        ImageCms.ImageCmsProfile(io.BytesIO(profile)),
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
    )
    assert converted is not None
    return converted
