"""A synthetic image source: characters of many scripts, distorted as if written by hand.

Each class is a character. Each image is a rendering in one of several typefaces, warped by a random affine map and a
random smooth displacement field. Decimal digits of all scripts are excluded, so that digits stay an unseen domain. The
typefaces are those that matplotlib ships.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter, map_coordinates

from fewshot_mahalanobis.research.data.sources import ImageSource

#: First and last code points of each script: Latin, Greek, Cyrillic, Armenian, Georgian, symbols.
SCRIPTS = (
    (0x21, 0x7E),
    (0x391, 0x3C9),
    (0x402, 0x45F),
    (0x531, 0x587),
    (0x10D0, 0x10F5),
    (0x2190, 0x2199),
    (0x25A0, 0x25FF),
)
TYPEFACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "DejaVuSansMono",
)


def draw_glyphs(images_per_class: int = 24, size: int = 84, seed: int = 0) -> ImageSource:
    """The image source: characters in black on white, of ``size`` pixels a side."""
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    rng = np.random.default_rng(seed)
    faces = [ImageFont.truetype(str(fonts / f"{name}.ttf"), int(size * 0.7)) for name in TYPEFACES]
    shapes: set[bytes] = {_render("\uffff", faces[0], size).tobytes()}  # the placeholder for a missing character
    characters = []
    for first, last in SCRIPTS:
        for character in map(chr, range(first, last + 1)):
            if unicodedata.category(character)[0] not in "LS" or not character.isprintable():
                continue
            shape = _render(character, faces[0], size).tobytes()
            if shape not in shapes:  # Latin A, Greek Alpha and Cyrillic A look alike: one class
                shapes.add(shape)
                characters.append(character)
    images = np.empty((len(characters) * images_per_class, size, size, 3), np.uint8)
    for index in range(len(images)):
        face = faces[int(rng.integers(len(faces)))]
        glyph = _warp(_render(characters[index // images_per_class], face, size), rng)
        images[index] = (255 - glyph)[:, :, None]
    labels = np.repeat(np.arange(len(characters)), images_per_class)
    return ImageSource("glyphs", images, labels, tuple(f"U+{ord(c):04X}" for c in characters))


def _render(character: str, face: ImageFont.FreeTypeFont, size: int) -> NDArray[np.uint8]:
    """Draw a character centred, white on black."""
    canvas = Image.new("L", (size, size))
    ImageDraw.Draw(canvas).text((size / 2, size / 2), character, fill=255, font=face, anchor="mm")
    return np.asarray(canvas)


def _warp(glyph: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Apply a random affine map (rotation, shear, scale, shift), displacement field and stroke width."""
    size = len(glyph)
    turn, shear = np.deg2rad(rng.uniform(-15, 15)), rng.uniform(-0.25, 0.25)
    stretch = np.diag(rng.uniform(0.6, 1.2, 2))
    matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ [[1, shear], [0, 1]] @ stretch
    grid = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij")).reshape(2, -1) - (size - 1) / 2
    field = gaussian_filter(rng.standard_normal((2, size, size)), (0, size / 12, size / 12))
    field *= rng.uniform(0, 0.035) * size / field.std()
    where = matrix @ grid + (size - 1) / 2 + rng.uniform(-0.06, 0.06, (2, 1)) * size + field.reshape(2, -1)
    blurred = gaussian_filter(glyph.astype(np.float32), rng.uniform(0.5, 2.5))
    warped = map_coordinates(blurred, where, order=1).reshape(size, size)
    threshold = rng.uniform(0.25, 0.6) * max(warped.max(), 1)
    return (255 / (1 + np.exp(np.clip((threshold - warped) / 12, -20, 20)))).astype(np.uint8)
