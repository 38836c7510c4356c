"""One picture as a square: scaled decoding of JPEG, halving, colour profiles, what stays of a caller's image."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

from fewshot_mahalanobis.images import picture
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.picture import read_size, read_square_array, read_within, to_square_array
from fewshot_mahalanobis.images.region import Region
from tests.images.icc import ADOBE_RGB, DISPLAY_P3, LINEAR_GREY, SRGB, in_space

SIZE = 32


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """Smooth shapes with fine noise, 600 x 440, without symmetry."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(20, 236, (5, 7, 3), np.uint8)).resize((600, 440), Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse) + rng.normal(0, 6, (440, 600, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 95, **options})
    return buffer.getvalue()


def square(data: bytes, size: int = SIZE) -> NDArray[np.int64]:
    return read_square_array(io.BytesIO(data), size).astype(int)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("size", [32, 60, 160, 288])
def test_a_jpeg_and_its_own_pixels_give_nearly_the_same(
    mode: str, progressive: bool, size: int, photograph: Image.Image
) -> None:
    data = jpeg(photograph.convert(mode), progressive=progressive)
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    difference = np.abs(square(data, size) - to_square_array(Image.fromarray(pixels), size))
    scaled = min(photograph.size) >= 4 * size
    assert difference.mean() < (1 if scaled else 1e-9)
    assert difference.max() <= (8 if scaled else 0)


@pytest.mark.parametrize("suffix", ["JPEG", "MPO"])
def test_a_jpeg_is_decoded_at_the_smallest_scale_of_twice_the_size(
    suffix: str, photograph: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    photograph.save(buffer, suffix)
    loaded = list[tuple[int, int]]()
    # Called once the pixels are there.
    monkeypatch.setattr(picture, "exif_orientation", lambda image, _: (loaded.append(image.size), 1)[1])
    for size in (20, 32, 60, 111, 221):
        read_square_array(io.BytesIO(buffer.getvalue()), size)
    assert loaded == [(75, 55), (150, 110), (300, 220), (600, 440), (600, 440)]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_is_turned_back_at_every_scale(orientation: int, photograph: Image.Image) -> None:
    turns = {
        1: (), 2: ("FLIP_LEFT_RIGHT",), 3: ("ROTATE_180",), 4: ("FLIP_TOP_BOTTOM",), 5: ("TRANSPOSE",),
        6: ("ROTATE_90",), 7: ("TRANSVERSE",), 8: ("ROTATE_270",),
    }[orientation]  # fmt: skip
    stored = photograph
    for turn in turns:
        stored = stored.transpose(Image.Transpose[turn])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    difference = np.abs(square(jpeg(stored, exif=exif)) - square(jpeg(photograph)))
    assert difference.mean() < 1.5
    assert difference.max() <= 10


XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def with_xmp(kind: str) -> dict[str, object]:
    """What ``save`` needs to write that XMP into a file."""
    if kind == "TIFF":
        return {"tiffinfo": {700: XMP.encode()}}
    if kind == "PNG":
        text = PngImagePlugin.PngInfo()
        text.add_itxt("XML:com.adobe.xmp", XMP)
        return {"pnginfo": text}
    return {"xmp": XMP.encode()}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_orientation_in_xmp_alone_turns_nothing(kind: str, photograph: Image.Image) -> None:
    def written(**options: object) -> bytes:
        buffer = io.BytesIO()
        photograph.save(buffer, kind, **options)
        return buffer.getvalue()

    marked = written(**with_xmp(kind))
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(marked))).size == photograph.size[::-1]  # Pillow turns it
    expected = square(written())
    assert np.array_equal(square(marked), expected)
    opened = Image.open(io.BytesIO(marked))
    assert np.array_equal(next(ImageBatches([opened], SIZE).decoded()).pixels[0], expected)
    if kind != "TIFF":  # which Pillow turns while it loads
        opened.load()
        opened.getexif()
        pixels = Image.fromarray(np.asarray(opened))
        assert np.array_equal(to_square_array(opened, SIZE), to_square_array(pixels, SIZE))


def test_exif_goes_before_xmp(photograph: Image.Image) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    assert np.array_equal(square(jpeg(photograph, exif=exif, **with_xmp("JPEG"))), square(jpeg(photograph, exif=exif)))


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_picture_to_look_at_has_its_own_aspect_and_no_longer_side(
    orientation: int, photograph: Image.Image, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = tmp_path / "photograph.jpg"
    file.write_bytes(jpeg(photograph, exif=exif))
    upright = ImageOps.exif_transpose(Image.open(file))
    assert read_size(file) == upright.size == ((600, 440) if orientation == 1 else (440, 600))
    for side, expected in ((300, (300, 220)), (5000, (600, 440))):
        shown = read_within(file, side)
        assert shown.size == (expected if orientation == 1 else expected[::-1])
        assert np.abs(np.asarray(shown).astype(int) - upright.resize(shown.size, Image.Resampling.BICUBIC)).mean() < 2
    region = Region(file, (100, 50, 200, 120), margin=0.25)
    cropped = upright.crop((50, 20, 350, 200))
    assert read_size(region) == cropped.size == (300, 180)
    shown = read_within(region, 100)
    assert shown.size == (100, 60)
    assert np.abs(np.asarray(shown).astype(int) - cropped.resize((100, 60), Image.Resampling.BICUBIC)).mean() < 4
    for read in (read_size, lambda region: read_within(region, 100)):
        with pytest.raises(ImageError, match="reaches beyond the picture"):
            read(Region(file, (500, 300, 200, 200)))
    (tmp_path / "cut.jpg").write_bytes(file.read_bytes()[:2000])
    for read in (read_size, lambda path: read_within(path, 300)):
        with pytest.raises(ImageError):
            read(tmp_path / "missing.jpg")
    with pytest.raises(ImageError, match="damaged"):
        read_within(tmp_path / "cut.jpg", 300)


def test_blocks_are_averaged_as_a_plain_loop_does(photograph: Image.Image) -> None:
    pixels = np.asarray(photograph)[:352, :480]  # 11 x 32 and 15 x 32: means of 4 x 4 pixels leave 88 x 120
    means = pixels.reshape(88, 4, 120, 4, 3).mean(axis=(1, 3))
    expected = Image.fromarray(np.floor(means + 0.5).astype(np.uint8)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    assert np.abs(to_square_array(Image.fromarray(pixels), SIZE).astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize("profile", [DISPLAY_P3, ADOBE_RGB], ids=["Display P3", "Adobe RGB"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_the_same_look_in_another_colour_space_is_the_same_picture(
    kind: str, profile: bytes, photograph: Image.Image
) -> None:
    options = {"JPEG": {"quality": 98, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    versions = []
    for image, icc in (
        (photograph, SRGB),
        (in_space(photograph, profile), profile),
        (in_space(photograph, profile), None),
    ):
        buffer = io.BytesIO()
        image.save(buffer, kind, icc_profile=icc, **options)
        versions.append(square(buffer.getvalue()))
    srgb, wide, unlabelled = versions
    assert np.abs(wide - srgb).max() <= 3
    assert np.abs(unlabelled - srgb).max() > 10  # so the profile is what does it


def test_an_srgb_profile_changes_no_pixel(photograph: Image.Image) -> None:
    assert (square(jpeg(photograph, icc_profile=SRGB)) == square(jpeg(photograph))).all()


def test_a_grey_profile_is_applied_to_grey_alone(photograph: Image.Image) -> None:
    grey = Image.new("L", (40, 40), 55)  # a linear value of 0.216, which is 128 in sRGB
    buffer = io.BytesIO()
    grey.save(buffer, "PNG", icc_profile=LINEAR_GREY)
    assert np.abs(square(buffer.getvalue()) - 128).max() <= 1
    assert (square(jpeg(photograph, icc_profile=LINEAR_GREY)) == square(jpeg(photograph))).all()


def test_a_damaged_profile_is_ignored_with_one_warning_a_call(photograph: Image.Image, tmp_path: Path) -> None:
    small = photograph.resize((40, 30))
    damaged = [b"junk" * 99, b"", DISPLAY_P3[:200], b"x", DISPLAY_P3[:128]]
    paths = [tmp_path / f"{index}.png" for index in range(len(damaged))]
    for path, profile in zip(paths, damaged, strict=True):
        small.save(path, icc_profile=profile)
    with pytest.warns(UserWarning, match=r"image 0 .*0.png'\) \(and 3 more\): its colour profile is damaged") as caught:
        (tensor,) = ImageBatches(paths, SIZE)
    assert len(caught) == 1
    assert torch.equal(tensor, next(iter(ImageBatches([np.asarray(small)] * 5, SIZE))))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "BMP"])
def test_a_lazily_opened_image_is_not_left_loaded_or_changed(
    kind: str, photograph: Image.Image, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    photograph.save(path, kind)
    with Image.open(path) as image:
        (tensor,) = ImageBatches([image], SIZE)
        assert image.tile  # Pillow forgets where the pixels are once it has read them
        assert image.size == photograph.size
        assert torch.equal(tensor, next(iter(ImageBatches([path], SIZE))))
        image.load()
        assert np.asarray(image).shape == (440, 600, 3)


def test_what_the_caller_did_to_an_opened_image_holds(photograph: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photograph.save(path, quality=95)
    with Image.open(path) as image:
        image.draft("L", (100, 100))
        (tensor,) = ImageBatches([image], SIZE)
        assert torch.equal(tensor[0, 0], tensor[0, 1])  # grey, as it was asked for
    with Image.open(path) as image:
        image.load()
        image.paste((255, 255, 255), (0, 0, *image.size))
        (tensor,) = ImageBatches([image], SIZE)
        assert (tensor == 1).all()


def test_reading_well_formed_photographs_warns_of_nothing(photograph: Image.Image) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for profile in (None, SRGB, DISPLAY_P3, ADOBE_RGB):
            read_square_array(io.BytesIO(jpeg(photograph, icc_profile=profile)), SIZE)
