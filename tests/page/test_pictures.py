"""Files as pixels in the browser: turned, and of the same colours, as Python reads them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin
from playwright.sync_api import Page

from fewshot_mahalanobis.images.picture import read_square_array, to_square_array
from tests.browser import chromium
from tests.images.test_picture import with_xmp

pytestmark = pytest.mark.browser

SIZE = 24
TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90", 7: "TRANSVERSE",
    8: "ROTATE_270",
}  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser:
        page = browser.new_page()
        page.add_script_tag(content=(files("fewshot_mahalanobis") / "page" / "pictures.js").read_text(encoding="utf-8"))
        yield page


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    """Smooth shapes without symmetry, 20 x 300, which the page reads in several strips whichever way it is turned."""
    coarse = np.random.default_rng(0).integers(0, 256, (20, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((20, 300), Image.Resampling.BILINEAR)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **{"WEBP": {"lossless": True}, "JPEG": {"quality": 98}}.get(kind, {}), **options)
    return buffer.getvalue()


def square_by_page(page: Page, data: bytes, size: int) -> NDArray[np.uint8]:
    """The square (size, size, 3) that the network reads of a file."""
    planes = page.evaluate(
        """async ([data, size]) => {
            const picture = await openPicture(new Blob([Uint8Array.from(atob(data), one => one.charCodeAt(0))]));
            return Array.from(squareOf(picture, size));
        }""",
        [base64.b64encode(data).decode(), size],
    )
    return np.array(planes, np.uint8).reshape(3, size, size).transpose(1, 2, 0)


def read_by_page(page: Page, data: bytes) -> NDArray[np.uint8]:
    """Pixels (h, w, 3) of a file in its full size."""
    pixels, height, width = page.evaluate(
        """async data => {
            const picture = await openPicture(new Blob([Uint8Array.from(atob(data), one => one.charCodeAt(0))]));
            const {pixels, height, width} = pixelsOf(picture, 1);
            return [Array.from(pixels), height, width];
        }""",
        base64.b64encode(data).decode(),
    )
    return np.array(pixels, np.uint8).reshape(height, width, 3)


def assert_read_as_in_python(page: Page, data: bytes, most: int = 0) -> None:
    by_page, in_python = square_by_page(page, data, SIZE), read_square_array(io.BytesIO(data), SIZE)
    assert np.abs(by_page.astype(int) - in_python).max() <= most


@pytest.mark.parametrize("size", [7, 24, 33])
@pytest.mark.parametrize(
    ("width", "height"), [(24, 24), (2, 5), (20, 50), (33, 24), (64, 63), (129, 128), (300, 1000), (1003, 397)]
)
def test_a_square_is_the_one_that_pillow_makes(width: int, height: int, size: int, page: Page) -> None:
    noise = np.random.default_rng([width, height]).integers(0, 256, (height, width, 3), np.uint8)
    square = square_by_page(page, encoded(Image.fromarray(noise), "PNG"), size)
    assert np.array_equal(square, to_square_array(Image.fromarray(noise), size))


def with_chunk(png: bytes, kind: bytes, contents: bytes) -> bytes:
    """A PNG file with one more chunk behind its header."""
    chunk = struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))
    return png[:33] + chunk + png[33:]


@pytest.mark.parametrize("orientation", [1, *TURNS])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_turned_by_its_exif_orientation(
    kind: str, orientation: int, page: Page, picture: Image.Image
) -> None:
    stored = picture.transpose(Image.Transpose[TURNS[orientation]]) if orientation > 1 else picture
    exif = Image.Exif()
    exif[0x010E] = "a description"
    exif[0x0112] = orientation
    data = encoded(stored, kind, exif=exif)
    upright = read_by_page(page, data)
    assert upright.shape == (300, 20, 3)
    by_pillow = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.abs(upright.astype(int) - by_pillow).mean() <= (1 if kind == "JPEG" else 0)
    assert_read_as_in_python(page, data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_other_exif_than_a_cameras_is_read_as_in_python(kind: str, page: Page, picture: Image.Image) -> None:
    directory = struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, 6, 0, 0)
    for exif in (
        b"Exif\0\0MM\0*" + struct.pack(">I", 8) + directory,  # big-endian
        b"Exif\0\0MM\0*" + struct.pack(">I", 20) + bytes(12) + directory,  # not at once
        b"Exif\0\0MM\0*" + struct.pack(">I", 8) + directory.replace(b"\0\6", b"\0\x0b", 1),  # no such orientation
        b"Exif\0\0II*\0" + struct.pack("<I", 8) + bytes(6),  # empty
    ):
        assert_read_as_in_python(page, encoded(picture, kind, exif=exif))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_orientation_in_xmp_alone_turns_nothing(kind: str, page: Page, picture: Image.Image) -> None:
    data = encoded(picture, kind, **with_xmp(kind))
    assert read_by_page(page, data).shape == (300, 20, 3)
    assert_read_as_in_python(page, data)


def test_the_exif_that_older_programs_put_into_a_text_of_a_png_turns_nothing(page: Page, picture: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", f"\nexif\n{len(exif.tobytes()):8}\n{exif.tobytes().hex()}\n")
    assert_read_as_in_python(page, encoded(picture, "PNG", pnginfo=text))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1"])
def test_the_gamma_of_a_png_is_not_used(mode: str, page: Page, picture: Image.Image) -> None:
    png = encoded(picture.convert(mode), "PNG")
    dark = with_chunk(png, b"gAMA", struct.pack(">I", 100_000))
    assert np.array_equal(read_by_page(page, dark), read_by_page(page, png))
    assert_read_as_in_python(page, dark)


@pytest.mark.parametrize("default_image", [False, True])
def test_an_animated_png_is_the_picture_that_it_shows_where_it_is_not_animated(
    default_image: bool, page: Page, picture: Image.Image
) -> None:
    frames = [Image.new("RGB", picture.size, colour) for colour in ("red", "blue")]
    data = encoded(picture, "PNG", save_all=True, append_images=frames, default_image=default_image)
    assert np.array_equal(read_by_page(page, data), np.asarray(picture))
    assert_read_as_in_python(page, data)


def test_a_file_that_ends_early_is_for_the_browser_to_judge(page: Page, picture: Image.Image) -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encoded(picture, kind)
        for length in (1, 10, 30):
            outcome = page.evaluate(
                """data => openPicture(new Blob([Uint8Array.from(atob(data), one => one.charCodeAt(0))])).then(
                    () => "read", error => error.name)""",
                base64.b64encode(data[:length]).decode(),
            )
            assert outcome == "InvalidStateError", (kind, length)
