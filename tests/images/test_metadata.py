"""Damaged metadata stop no picture that viewers show: it is read, upright, and a note says so."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.picture import read_size

_Y, _X = np.mgrid[:20, :32]
PICTURE = Image.fromarray(np.stack([6 * _X, 9 * _Y, 3 * _X + 5 * _Y], axis=-1).astype(np.uint8))
_EXIF = Image.Exif()
_EXIF[0x112] = 6  # to be turned a quarter clockwise
TURNED = _EXIF.tobytes()
FORMATS: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95}, "PNG": {}, "WEBP": {"lossless": True}}


def encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    PICTURE.save(buffer, kind, **FORMATS[kind], **options)
    return buffer.getvalue()


def read(item: Any) -> tuple[NDArray[np.uint8], list[str]]:
    """Pixels, and what this package says; Pillow's own warnings of damage are left out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (batch,) = ImageBatches([item], 20).decoded()
    return batch.pixels[0], [text for text in map(str, (each.message for each in caught)) if text.startswith("image 0")]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def segment(marker: int, data: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def with_chunks(*chunks: bytes) -> bytes:
    data = encoded("PNG")
    return data[:33] + b"".join(chunks) + data[33:]


def with_segments(*segments: bytes) -> bytes:
    data = encoded("JPEG")
    return data[:2] + b"".join(segments) + data[2:]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0no header of a TIFF", b"Exif\0\0" + bytes(40), TURNED[:9], TURNED[:15], TURNED[:21],
     b"Exif\0\0II*\0" + b"\xff" * 60, b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12"],
    ids=["junk", "zeros", "header cut", "count cut", "entry cut", "far away", "big-endian, entry cut"],
)  # fmt: skip
def test_a_picture_with_broken_exif_data_is_read_upright_with_a_note(kind: str, exif: bytes) -> None:
    item = encoded(kind, exif=exif)
    pixels, said = read(item)
    assert (pixels == read(encoded(kind))[0]).all()
    assert ["EXIF data are damaged" in text for text in said] == [True]
    assert read_size(io.BytesIO(item)) == (32, 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FORMATS)
def test_whole_exif_data_still_turn_the_picture(kind: str) -> None:
    pixels, said = read(encoded(kind, exif=TURNED))
    assert said == []
    assert (pixels == read(encoded(kind))[0].swapaxes(0, 1)[:, ::-1]).mean() > 0.99


def test_the_first_of_two_exif_blocks_of_a_jpeg_counts() -> None:
    upright, turned = read(encoded("JPEG"))[0], read(encoded("JPEG", exif=TURNED))[0]
    junk = b"Exif\0\0no header of a TIFF"
    for blocks, expected, notes in (
        ((TURNED, TURNED), turned, 0),
        ((TURNED, junk), turned, 0),
        ((junk, TURNED), upright, 1),
    ):
        pixels, said = read(with_segments(*(segment(0xE1, block) for block in blocks)))
        assert (pixels == expected).all()
        assert len(said) == notes


@pytest.mark.parametrize(
    "item",
    [
        with_chunks(chunk(b"pHYs", b"\0\0")),
        with_chunks(chunk(b"gAMA", b"\0")),
        with_chunks(chunk(b"cHRM", b"123")),
        with_chunks(chunk(b"sRGB", b"")),
        with_chunks(chunk(b"iCCP", b"name\0\7junk")),
        with_chunks(chunk(b"iCCP", b"name")),
        with_chunks(chunk(b"zTXt", b"text\0\5junk")),
        with_chunks(chunk(b"gAMA", b"\0\0\xb1\x8f")[:-1] + b"x"),
        with_chunks(chunk(b"tRNS", b"")),
        with_chunks(chunk(b"tRNS", b"\0\1\0")),
        with_chunks(chunk(b"tRNS", b"\0\1" * 3)[:-1] + b"x"),
        with_segments(segment(0xE0, b"JFIF\0")),
        with_segments(segment(0xE2, b"ICC_PROFILE\0")),
        with_segments(segment(0xE2, b"ICC_PROFILE\0\1\1junk")),
        with_segments(segment(0xEE, b"Adobe")),
        encoded("WEBP", exif=TURNED)[:-8],
        encoded("WEBP", icc_profile=b"junk", exif=b"junk"),
    ],
    ids=["resolution", "gamma", "chromaticities", "intent", "profile's method", "profile cut", "text", "checksum",
         "transparent colour missing", "transparent colour cut", "transparent colour's checksum",
         "JFIF cut", "JPEG's profile cut", "JPEG's profile", "Adobe cut", "WebP's end cut", "WebP's profile and EXIF"],
)  # fmt: skip
def test_other_damaged_metadata_are_ignored_with_a_note(item: bytes) -> None:
    pixels, said = read(item)
    kind = {b"\x89P": "PNG", b"\xff\xd8": "JPEG", b"RI": "WEBP"}[item[:2]]
    assert (pixels == read(encoded(kind))[0]).all()
    assert said
    assert all("damaged and w" in text and "ignored" in text for text in said)


def test_more_opacities_than_a_palette_has_colours_are_ignored_with_a_note() -> None:
    buffer = io.BytesIO()
    PICTURE.quantize(16).save(buffer, "PNG")
    data = buffer.getvalue()
    place = data.index(b"IDAT") - 4
    pixels, said = read(data[:place] + chunk(b"tRNS", bytes(300)) + data[place:])
    assert (pixels == read(data)[0]).all()
    assert ["damaged and were ignored" in text for text in said] == [True]


#: What takes the place of an entry (tag, type, count, value or offset) of a TIFF's directory.
BROKEN_ENTRIES = {
    "text": lambda tag, kind, count, value: (tag, 2, count, value),
    "empty": lambda tag, kind, count, value: (tag, kind, 0, 0),
    "outside the file": lambda tag, kind, count, value: (tag, 5, 1, 2**31),
    "longer than the file": lambda tag, kind, count, value: (tag, kind, 2**30, value),
    "unknown type": lambda tag, kind, count, value: (tag, 99, count, value),
    "number in place of a fraction": lambda tag, kind, count, value: (tag, 3, 1, 7),
    "not a number": lambda tag, kind, count, value: (tag, 11, 1, 0x7FC00000),
}
DESCRIPTION, RESOLUTION, SOFTWARE, DATE = 270, 282, 305, 306


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "I;16", "1"])
@pytest.mark.parametrize("tag", [DESCRIPTION, RESOLUTION, SOFTWARE, DATE])
def test_a_tiff_with_a_damaged_tag_that_says_nothing_of_pixels_is_read(tag: int, mode: str) -> None:
    deep = Image.fromarray(np.asarray(PICTURE.convert("L")).astype(np.uint16) * 257)
    picture, buffer = deep if mode == "I;16" else PICTURE.convert(mode), io.BytesIO()
    texts = {"description": "a long description", "software": "a program", "date_time": "2020:01:01 00:00:00"}
    picture.save(buffer, "TIFF", dpi=(300, 300), **texts)
    data = bytearray(buffer.getvalue())
    expected = read(bytes(data))[0]
    directory = struct.unpack_from("<I", data, 4)[0] + 2
    (place,) = (
        entry
        for entry in range(directory, directory + 12 * struct.unpack_from("<H", data, directory - 2)[0], 12)
        if struct.unpack_from("<H", data, entry)[0] == tag
    )
    entry = struct.unpack_from("<HHII", data, place)
    for change in BROKEN_ENTRIES.values():
        struct.pack_into("<HHII", data, place, *change(*entry))
        assert (read(bytes(data))[0] == expected).all()


def test_a_damaged_tag_does_not_hide_that_colours_lie_in_planes() -> None:
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    planes = np.ascontiguousarray(np.moveaxis(np.asarray(PICTURE), -1, 0))
    tifffile.imwrite(buffer, planes, photometric="rgb", planarconfig="separate", resolution=(300, 300))
    data = bytearray(buffer.getvalue())
    expected = read(PICTURE)[0]
    assert (read(bytes(data))[0] == expected).all()
    directory = struct.unpack_from("<I", data, 4)[0] + 2
    for place in range(directory, directory + 12 * struct.unpack_from("<H", data, directory - 2)[0], 12):
        if struct.unpack_from("<H", data, place)[0] == RESOLUTION:
            struct.pack_into("<HHII", data, place, RESOLUTION, 5, 1, 2**31)
    pixels, said = read(bytes(data))
    assert (pixels == expected).all()
    assert ["metadata" in text for text in said] == [True]


def test_a_tiff_whose_tags_of_its_range_are_damaged_is_read_over_the_full_range() -> None:
    values = (np.arange(32 * 20, dtype=np.uint16) * 100).reshape(20, 32)
    buffer, tags = io.BytesIO(), TiffImagePlugin.ImageFileDirectory_v2()
    tags.tagtype[281] = 2  # text
    tags[281] = "white"
    Image.fromarray(values).save(buffer, "TIFF", tiffinfo=tags)
    pixels, said = read(buffer.getvalue())
    assert (pixels == read(Image.fromarray(values))[0]).all()
    assert ["range of values is damaged" in text for text in said] == [True]


def test_one_note_a_kind_of_damage_names_the_first_picture_and_counts_the_others() -> None:
    junk = encoded("PNG", exif=b"Exif\0\0no header of a TIFF")
    with pytest.warns(UserWarning, match=r"image 1 \(bytes\) \(and 2 more\): its EXIF data are damaged") as caught:
        list(ImageBatches([encoded("PNG"), junk, junk, junk], 20))
    assert len(caught) == 1
