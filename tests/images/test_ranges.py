"""Depths of 10 to 16 bits: the range that a file says, the range that the user gives, a warning where neither does."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.picture import read_square_array
from tests.images.depths import deep_files, png, tiff
from tests.tiny import tiny_classifier

SIZE = 32


@pytest.fixture(scope="module")
def grey() -> NDArray[np.float64]:
    """A smooth picture from 0 to 1, (48, 64), whose white is a disc."""
    y, x = np.mgrid[:48, :64]
    values = (np.sin(x / 9) + np.cos(y / 7 + x / 20) + 2) / 4 * 0.97
    values[(y - 20) ** 2 + (x - 40) ** 2 < 60] = 1
    values[0, 0] = 0
    return values


def read(items: list[Any], **settings: Any) -> tuple[torch.Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (tensor,) = ImageBatches(items, SIZE, **settings)
    return tensor, [str(warning.message) for warning in caught]


def test_every_file_gives_the_true_picture_or_a_warning(grey: NDArray[np.float64], tmp_path: Path) -> None:
    files = deep_files(grey)
    assert len(files) == 40
    classifier = tiny_classifier()
    (true,) = classifier.transform([grey])
    for file in files:
        path = tmp_path / file.name
        path.write_bytes(file.data)
        for item in (path, Image.open(path)):
            tensor, said = read([item])
            if not file.says:
                assert len(said) == 1, file.name
                assert "value_range=" in said[0]
                continue
            assert said == [], file.name
            assert (tensor - read([grey])[0]).abs().max() * 127.5 <= 2, file.name
            (features,) = classifier.transform([item])
            assert np.linalg.norm(features - true) < 0.05 * np.linalg.norm(true), file.name


def test_the_range_that_the_warning_proposes_gives_the_true_picture(grey: NDArray[np.float64]) -> None:
    true, _ = read([grey])
    for values, proposal in (
        (np.rint(grey * 1023), (0, 1023)),
        (np.rint(grey * 4095), (0, 4095)),
        (np.rint(grey * 16383), (0, 16383)),
        (np.rint(51241 + grey * 940), (51241, 52181)),
    ):
        image = Image.fromarray(values.astype(np.uint16))
        _, (said,) = read([image, image])
        assert f"value_range=({proposal[0]}, {proposal[1]})" in said
        assert "all 2 16-bit images" in said
        for item in (image, values.astype(np.uint16), values, torch.from_numpy(values)):
            tensor, said_now = read([item], value_range=proposal)
            assert said_now == []
            assert (tensor - true).abs().max() * 127.5 <= 1.01


@pytest.fixture(scope="module")
def colours() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


#: Kelvin in hundredths, as thermal cameras write them: the upper bytes have four values.
THERMAL = (27_000, 28_020)


def sixteen(eight: NDArray[np.uint8], span: tuple[int, int] = THERMAL) -> NDArray[np.uint16]:
    return (span[0] + eight.astype(np.uint32) * (span[1] - span[0]) // 255).astype(np.uint16)


def whole(values: NDArray[np.uint16], **options: Any) -> bytes:
    """A TIFF of RGB, of 16 bits a colour."""
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, values, photometric="rgb", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "lzw", "zlib"])
@pytest.mark.parametrize(
    "options", [{}, {"planarconfig": "separate"}, {"tile": (16, 16)}], ids=["strips", "planes", "tiles"]
)
def test_all_bits_of_a_tiff_of_deep_colours_are_used(
    options: dict[str, Any], compression: str | None, order: str, colours: NDArray[np.uint8]
) -> None:
    values = sixteen(colours)
    if "planarconfig" in options:
        values = np.ascontiguousarray(np.moveaxis(values, -1, 0))
    data = whole(values, compression=compression, byteorder=order, **options)
    tensor, said = read([data], value_range=THERMAL)
    assert said == []
    torch.testing.assert_close(tensor, read([colours])[0], rtol=0, atol=0)
    full = whole((values - 27_000) // 4 * 257, compression=compression, byteorder=order, **options)
    torch.testing.assert_close(read([full])[0], read([colours])[0], rtol=0, atol=0)


def test_all_bits_of_a_png_of_deep_colours_are_used_beside_opacity_too(colours: NDArray[np.uint8]) -> None:
    imagecodecs = pytest.importorskip("imagecodecs")
    opacity = np.where(np.arange(SIZE) < 9, 0, 65535).astype(np.uint16) + np.zeros((SIZE, SIZE), np.uint16)
    on_white = np.where(opacity[..., None] == 0, 255, colours)
    grey = colours[..., :1]
    for eight, deep in (
        (colours, sixteen(colours)),
        (on_white, np.dstack([sixteen(colours), opacity])),
        (np.where(opacity[..., None] == 0, 255, grey).repeat(3, -1), np.dstack([sixteen(grey), opacity])),
    ):
        data = imagecodecs.png_encode(np.ascontiguousarray(deep))
        for item in (data, Image.open(io.BytesIO(data))):
            tensor, said = read([item], value_range=THERMAL)
            assert said == []
            torch.testing.assert_close(tensor, read([eight.astype(np.uint8)])[0], rtol=0, atol=0)


def test_a_tiff_of_deep_colours_that_says_its_range_needs_no_other(colours: NDArray[np.uint8]) -> None:
    data = whole(colours.astype(np.uint16) * 16, extratags=[(281, 3, 3, (4080, 4080, 4080), True)])
    tensor, said = read([data], value_range=(0, 9))
    assert said == []
    torch.testing.assert_close(tensor, read([colours])[0], rtol=0, atol=0)


def test_all_bits_of_a_ppm_are_used(colours: NDArray[np.uint8]) -> None:
    data = f"P6 {SIZE} {SIZE} 65535\n".encode() + sixteen(colours).astype(">u2").tobytes()
    tensor, said = read([data], value_range=THERMAL)
    assert said == []
    torch.testing.assert_close(tensor, read([colours])[0], rtol=0, atol=0)
    (said,) = read([data])[1]
    assert "value_range=" in said


def test_a_range_does_not_make_opacity_of_the_black_of_deep_cmyk(colours: NDArray[np.uint8]) -> None:
    tifffile = pytest.importorskip("tifffile")
    deep, eight, inks = io.BytesIO(), io.BytesIO(), np.dstack([colours, colours[..., :1]])
    tifffile.imwrite(deep, inks.astype(np.uint16) * 257, photometric="separated")
    Image.fromarray(inks, "CMYK").save(eight, "TIFF")
    for settings in ({}, {"value_range": (0, 65535)}):
        torch.testing.assert_close(read([deep], **settings)[0], read([eight])[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("bits", "bands", "refused"), [(8, 3, False), (12, 3, True), (16, 3, True), (16, 4, True), (16, 1, False)]
)
@pytest.mark.parametrize("container", ["jp2", "j2k"])
def test_a_jpeg_2000_of_which_pillow_reads_white_as_black_is_refused(
    container: str, bits: int, bands: int, refused: bool
) -> None:
    imagecodecs = pytest.importorskip("imagecodecs")
    values = np.full((SIZE, SIZE, bands), 2**bits - 1, np.uint8 if bits == 8 else np.uint16).squeeze()
    data = imagecodecs.jpeg2k_encode(values, level=0, reversible=True, bitspersample=bits, codecformat=container)
    if refused:
        with pytest.raises(ImageError, match=r"image 0 .*of which Pillow reads white as black: save it as PNG"):
            read([data])
    else:
        assert (read([data])[0] == 1).all()


def test_where_only_upper_bytes_can_be_had_a_note_says_so(colours: NDArray[np.uint8]) -> None:
    values = np.dstack([sixteen(colours), np.full((SIZE, SIZE), 65535, np.uint16)])
    tensor, (said,) = read([whole(values, extrasamples=["assocalpha"])], value_range=THERMAL)
    assert "only the upper eight can be read" in said
    assert (tensor - read([colours])[0]).abs().max() * 127.5 <= 33  # half of the four steps


def test_one_picture_with_the_full_range_keeps_a_dark_collection_from_warning(grey: NDArray[np.float64]) -> None:
    dark = Image.fromarray(np.rint(grey * 4095).astype(np.uint16))
    bright = Image.fromarray(np.rint(grey * 65535).astype(np.uint16))
    assert read([dark, bright, dark])[1] == []


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (lambda grey: np.rint(grey * 16).astype(np.uint8), r"8-bit array.* 0 to 16, .*value_range=\(0, 16\)"),
        (lambda grey: torch.from_numpy(np.rint(grey * 16).astype(np.uint8)), r"value_range=\(0, 16\)"),
        (lambda grey: grey / 255, r"float image.*divided by 255 twice.*value_range=\(0, 0.00392157\)"),
        (lambda grey: (grey / 255).astype(np.float32), "divided by 255 twice"),
    ],
    ids=["digits", "tensor of digits", "divided twice", "divided twice, float32"],
)
def test_numbers_that_use_a_small_part_of_their_range_are_warned_of(
    images: Any, message: str, grey: NDArray[np.float64]
) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        list(ImageBatches([images(grey)] * 5, SIZE, batch_size=2))
    assert len(caught) == 1


def test_a_classifier_fitted_right_and_queried_dark_warns(grey: NDArray[np.float64]) -> None:
    classifier = tiny_classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier.predict([grey])
    with pytest.warns(UserWarning, match="divided by 255 twice"):
        classifier.predict([grey / 255])


def test_ordinary_and_constant_pictures_are_not_warned_of(grey: NDArray[np.float64]) -> None:
    for item in (grey, np.rint(grey * 255).astype(np.uint8), np.zeros((8, 8, 3)), np.full((8, 8), 3, np.uint8)):
        assert read([item])[1] == []


def test_the_files_word_goes_before_the_users_and_eight_bits_stay(grey: NDArray[np.float64]) -> None:
    true, _ = read([grey])
    raw = np.rint(grey * 1023).astype(np.uint16)
    for item in (
        io.BytesIO(tiff(raw, tags=[(281, 1023)])),
        io.BytesIO(png(raw, sbit=10)),
        Image.fromarray(np.rint(grey * 255).astype(np.uint8)),
    ):
        tensor, _ = read([item], value_range=(0, 4095))
        assert (tensor - true).abs().max() * 127.5 <= 1.01


def test_the_range_is_an_argument_that_is_kept(grey: NDArray[np.float64], tmp_path: Path) -> None:
    images = [np.rint(np.roll(grey, 5 * shift, 1) * 4095).astype(np.uint16) for shift in range(6)]
    model = load_checkpoint("default")
    classifier = SimpleCNAPSClassifier(model, device="cpu", value_range=(0, 4095)).fit(images, list("aabbcc"))
    reference = SimpleCNAPSClassifier(model, device="cpu").fit([image / 4095 for image in images], list("aabbcc"))
    expected = reference.predict_proba([image / 4095 for image in images])
    assert np.allclose(classifier.predict_proba(images), expected, atol=1e-3)
    classifier.save(tmp_path / "saved")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "saved", device="cpu")
    assert loaded.get_params()["value_range"] == (0, 4095)
    assert (loaded.predict_proba(images) == classifier.predict_proba(images)).all()
    with pytest.raises(ImageError, match=r"dtype uint16 is not used.*or give value_range"):
        reference.predict(images)


@pytest.mark.parametrize("value", [4095, (0,), (1, 0), (0, 0), (0, float("nan")), "ab", (0, "1"), (0, 1, 2)])
def test_a_range_that_is_none_is_refused(value: Any, grey: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="value_range must be"):
        SimpleCNAPSClassifier(tiny_classifier().model_, device="cpu", value_range=value).fit([grey, grey], [0, 1])


@pytest.mark.parametrize("colours", [1, 3])
def test_a_transparent_value_of_sixteen_bits_is_white(colours: int) -> None:
    values = np.full((8, 8), 30_000, np.uint16)
    values[:, :4] = 12_345
    square = read_square_array(io.BytesIO(png(values, transparent=12_345, colours=colours)), 8)
    assert (square[:, :4] == 255).all()
    assert np.abs(square[:, 4:].astype(int) - 117).max() <= 1
    (tensor,), _ = read([png(values, transparent=12_345, colours=colours)], value_range=(0, 60_000))
    pixels = (tensor + 1) * 127.5
    assert (pixels[..., :14] == 255).all()  # those between are resized from both
    assert ((pixels[..., 18:] - 127.5).abs() <= 0.5).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_a_transparent_value_of_few_bits_is_white(bits: int) -> None:
    # By hand: Pillow writes grey of 1, 8 and 16 bits alone.
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    top = 2**bits - 1
    row = [top] * 4 + [1] * 4
    packed = int("".join(f"{value:0{bits}b}" for value in row), 2).to_bytes(bits, "big")
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, bits, 0, 0, 0, 0))
    data += chunk(b"tRNS", struct.pack(">H", 1)) + chunk(b"IDAT", zlib.compress((b"\0" + packed) * 8))
    square = read_square_array(io.BytesIO(data + chunk(b"IEND", b"")), 8)
    assert (square == 255).all()
