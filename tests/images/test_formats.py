"""Which files are images, the same for a file given by name and for files in folders; HEIC and AVIF."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, features

from fewshot_mahalanobis import load_folder
from fewshot_mahalanobis.images import formats
from fewshot_mahalanobis.images import picture as images
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.formats import image_suffixes, starts_as_image
from fewshot_mahalanobis.images.picture import read_square_array

needs_heif = pytest.mark.skipif(formats.heif_decoder() is None, reason="needs pillow-heif")
needs_avif = pytest.mark.skipif(not features.check("avif"), reason="needs a Pillow with AVIF")


def red_corner() -> NDArray[np.uint8]:
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:20, :30] = 255, 0, 0
    return pixels


def encoded(suffix: str, picture: Image.Image | None = None, **options: Any) -> bytes:
    picture = Image.fromarray(red_corner()) if picture is None else picture
    buffer = io.BytesIO()
    if suffix == ".heic":
        import pillow_heif

        pillow_heif.from_pillow(picture).save(buffer, **options)
    else:
        picture.save(buffer, suffix[1:], **options)
    return buffer.getvalue()


def test_every_extension_in_the_list_is_of_a_format_with_a_decoder() -> None:
    Image.init()
    of_pillow = {suffix for suffix, name in Image.registered_extensions().items() if name in {*Image.OPEN, "MPO"}}
    assert image_suffixes() - {".heic", ".heif", ".hif"} <= of_pillow
    assert {".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm"} <= image_suffixes()
    assert (".heic" in image_suffixes()) == (formats.heif_decoder() is not None)
    assert not {".eps", ".mpg", ".h5", ".pdf"} & image_suffixes()
    assert all(suffix == suffix.lower() for suffix in image_suffixes())


@pytest.mark.parametrize(
    "suffix", [pytest.param(".heic", marks=needs_heif), pytest.param(".avif", marks=needs_avif), ".webp"]
)
def test_a_format_is_read_alike_by_name_without_a_name_and_in_a_folder(suffix: str, tmp_path: Path) -> None:
    data = encoded(suffix, quality=95)
    for name in (f"cat/1{suffix}", f"cat/2{suffix.upper()}", "dog/no extension"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    paths, labels = load_folder(tmp_path)
    assert labels == ["cat", "cat", "dog"]
    corner = read_square_array(io.BytesIO(data), 32)
    assert np.abs(corner[4, 4].astype(int) - (255, 0, 0)).max() < 12
    assert corner[28, 28].max() < 12
    (batch,) = ImageBatches(paths, 32)
    for image in batch:
        assert (((image + 1) * 127.5).round().permute(1, 2, 0).numpy() == corner).all()


@needs_heif
def test_heic_is_turned_upright_and_laid_on_white() -> None:
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned a quarter clockwise
    upright = read_square_array(io.BytesIO(encoded(".heic", exif=exif.tobytes(), quality=95)), 32)
    assert upright[4, 28, 0] > 240  # red, at the upper right
    assert upright[4, 4].max() < 12
    clear = Image.fromarray(np.dstack([red_corner(), np.zeros((40, 60), np.uint8)]), "RGBA")
    assert read_square_array(io.BytesIO(encoded(".heic", clear)), 32).min() > 240


@needs_heif
def test_a_damaged_or_too_large_heic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(".heic")
    for end in (len(data) - 1, len(data) // 2, 40, 12):
        with pytest.raises(ImageError, match="damaged"):
            read_square_array(io.BytesIO(data[:end]), 32)
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(ImageError, match="too many pixels: 60 x 40"):
        read_square_array(io.BytesIO(data), 32)


@needs_heif
def test_reading_heic_leaves_pillow_as_it_is() -> None:
    Image.init()
    before = dict(Image.OPEN), dict(Image.registered_extensions())
    read_square_array(io.BytesIO(encoded(".heic")), 32)
    assert (Image.OPEN, Image.registered_extensions()) == before


@pytest.mark.parametrize(("brand", "name"), [(b"heic", "HEIC"), (b"mif1", "HEIC"), (b"avif", "AVIF")])
def test_without_a_decoder_the_message_says_what_to_install(
    brand: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "heif_decoder", lambda: None)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "AVIF"])
    file = tmp_path / "IMG_1"
    file.write_bytes(b"\0\0\0\x18ftyp" + brand + bytes(12))
    assert not starts_as_image(file)
    with pytest.raises(ImageError, match=rf"{name} images need a decoder: pip install .*\[formats\].* JPEG"):
        read_square_array(file, 32)


@needs_heif
def test_heic_without_exif_data_is_read_without_a_note_and_of_several_pictures_with_one() -> None:
    import pillow_heif

    file = pillow_heif.from_pillow(Image.fromarray(red_corner()))
    one, two = io.BytesIO(), io.BytesIO()
    file.save(one, quality=95)
    file.add_from_pillow(Image.new("RGB", (60, 40), "blue"))
    file.save(two, quality=95)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corner = read_square_array(one, 32)
    with pytest.warns(UserWarning, match="several frames"):
        assert np.abs(read_square_array(two, 32).astype(int) - corner).max() <= 2


@needs_heif
@pytest.mark.parametrize("main", [0, 1, 2])
def test_a_picture_of_a_heic_of_several_is_chosen_as_a_page_is(main: int, tmp_path: Path) -> None:
    import pillow_heif

    greys = [40, 120, 200]
    file = pillow_heif.from_pillow(Image.new("L", (64, 48), greys[0]))
    for grey in greys[1:]:
        file.add_from_pillow(Image.new("L", (64, 48), grey))
    path = tmp_path / "burst.heic"
    file.save(path, quality=-1, primary_index=main)

    def read(**settings: Any) -> list[int]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (batch,) = ImageBatches([path, path.read_bytes()], 32, **settings).decoded()
        assert (batch.pixels == batch.pixels[:1, :1, :1]).all()
        return [int(value) for value in batch.pixels[0, 0, 0]]

    assert read(pages="first") == [greys[main]] * 3
    for number, grey in enumerate(greys):
        assert read(pages=number) == [grey] * 3
    assert read(pages="max") == [200] * 3
    assert read(pages="mean") == [120] * 3
    assert read(pages=(2, 0, 1)) == [200, 40, 120]
    with pytest.raises(ImageError, match="it has 3 pages, and there is none of number 3"):
        read(pages=3)


@needs_heif
def test_a_small_version_in_a_heic_does_not_stand_for_it(tmp_path: Path) -> None:
    import pillow_heif

    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    path = tmp_path / "thumbnail.heic"
    pillow_heif.from_pillow(Image.fromarray(noise)).save(path, quality=90, thumbnails=[128])
    plain = tmp_path / "plain.heic"
    pillow_heif.from_pillow(Image.fromarray(noise)).save(plain, quality=90)
    lazy = pillow_heif.HeifImageFile(path)
    (batch,) = ImageBatches([plain, path, lazy], 32).decoded()
    assert (batch.pixels == batch.pixels[0]).all()
