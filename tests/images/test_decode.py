"""Every kind of image, from every kind of collection, gives one tensor; what is no image is refused by name."""

from __future__ import annotations

import io
import pickle
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image

from fewshot_mahalanobis.images.decode import ImageBatches, decode_batches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.picture import to_square_array

SIZE = 16


@pytest.fixture
def pictures() -> NDArray[np.uint8]:
    """Five smooth-and-noisy colour pictures, (5, 24, 40, 3)."""
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 200, 40, dtype=np.uint8)[None, None, :, None]
    return (ramp + rng.integers(0, 56, size=(5, 24, 40, 3))).astype(np.uint8)


def tensor_of(images: object, **kwargs: object) -> torch.Tensor:
    return torch.cat(list(ImageBatches(images, SIZE, **kwargs)))  # type: ignore[arg-type]


def write(tmp_path: Path, name: str, image: Image.Image, **options: object) -> Path:
    path = tmp_path / name
    image.save(path, **options)
    return path


def test_output_is_float32_between_minus_one_and_one(pictures: NDArray[np.uint8]) -> None:
    tensor = tensor_of(pictures)
    assert tensor.shape == (5, 3, SIZE, SIZE)
    assert tensor.dtype == torch.float32
    assert tensor.device.type == "cpu"
    black_and_white = np.stack([np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)])
    values = tensor_of(black_and_white)
    assert (values[0] == -1).all()
    assert (values[1] == 1).all()


def test_an_image_of_the_right_size_is_not_altered() -> None:
    image = np.random.default_rng(1).integers(0, 256, size=(1, SIZE, SIZE, 3), dtype=np.uint8)
    expected = torch.from_numpy(image).permute(0, 3, 1, 2).float() / 127.5 - 1
    assert torch.equal(tensor_of(image), expected)


def test_the_same_picture_gives_the_same_tensor_from_every_kind(pictures: NDArray[np.uint8], tmp_path: Path) -> None:
    reference = torch.from_numpy(
        np.stack([np.asarray(Image.fromarray(p).resize((SIZE, SIZE), Image.Resampling.BILINEAR)) for p in pictures])
    )
    reference = reference.permute(0, 3, 1, 2).float() / 127.5 - 1
    pils = [Image.fromarray(p) for p in pictures]
    paths = [write(tmp_path, f"{i}.png", image) for i, image in enumerate(pils)]
    channels_first = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    kinds: dict[str, object] = {
        "paths": paths,
        "strings": [str(p) for p in paths],
        "object array of paths": np.array(paths, dtype=object),
        "array of strings": np.array([str(p) for p in paths]),
        "series of strings": pd.Series([str(p) for p in paths], index=range(10, 15)),
        "tuple of paths": tuple(paths),
        "PIL": pils,
        "uint8 array": pictures,
        "float64 array": pictures / 255,
        "float32 array": (pictures / 255).astype(np.float32),
        "float16 array": (pictures / 255).astype(np.float16),
        "non-contiguous array": np.repeat(pictures, 2, axis=0)[::2],
        "uint8 tensor": channels_first,
        "float32 tensor": channels_first.float() / 255,
        "float64 tensor": (channels_first.double() / 255).requires_grad_(),
        "mixed list": [paths[0], pils[1], pictures[2], pictures[3] / 255, channels_first[4]],
    }
    for kind, images in kinds.items():
        assert torch.equal(tensor_of(images), reference), kind


def test_grey_images_repeat_their_channel_from_every_kind(pictures: NDArray[np.uint8], tmp_path: Path) -> None:
    grey = pictures[..., 0]
    expected = tensor_of(np.repeat(grey[..., None], 3, axis=-1))
    paths = [write(tmp_path, f"{i}.png", Image.fromarray(g)) for i, g in enumerate(grey)]
    stack = torch.from_numpy(grey)[:, None]
    for images in (
        grey,
        grey[..., None],
        grey / 255,
        list(grey),
        paths,
        stack,
        stack / 255,
        list(stack),
        list(stack[:, 0]),
    ):
        assert torch.equal(tensor_of(images), expected)


def test_a_list_may_mix_sizes() -> None:
    rng = np.random.default_rng(2)
    images = [rng.integers(0, 256, size=(h, w, 3), dtype=np.uint8) for h, w in ((5, 9), (40, 3), (1, 1), (17, 16))]
    together = tensor_of(images)
    for index, image in enumerate(images):
        assert torch.equal(together[index : index + 1], tensor_of([image]))


def test_downscaling_averages_rather_than_skips_pixels() -> None:
    checkerboard = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    assert tensor_of([checkerboard]).abs().max() < 0.02


def test_opacity_is_laid_on_white() -> None:
    rgba = np.zeros((SIZE, SIZE, 4), np.uint8)
    rgba[:, : SIZE // 2] = (255, 0, 0, 255)
    rgba[:, SIZE // 2 :] = (0, 0, 255, 0)
    image = Image.fromarray(rgba)
    grey = Image.new("LA", (SIZE, SIZE), (0, 0))
    square = to_square_array(image, SIZE)
    assert (square[:, : SIZE // 2] == (255, 0, 0)).all()
    assert (square[:, SIZE // 2 :] == 255).all()
    assert (to_square_array(grey, SIZE) == 255).all()
    half = to_square_array(Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 128)), SIZE)
    assert (half == 127).all()
    assert torch.equal(tensor_of([rgba]), tensor_of([image]))


def test_a_palette_with_a_transparent_entry_is_laid_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (SIZE, SIZE), 0)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.paste(1, (0, 0, SIZE // 2, SIZE))
    for path in (
        write(tmp_path, "transparent.png", image, transparency=0),
        write(tmp_path, "transparent.gif", image, transparency=0),
    ):
        with Image.open(path) as read:
            assert read.mode == "P"
            square = to_square_array(read, SIZE)
        assert (square[:, : SIZE // 2] == (10, 200, 30)).all()
        assert (square[:, SIZE // 2 :] == 255).all()
    with Image.open(write(tmp_path, "opaque.png", image)) as read:
        assert (to_square_array(read, SIZE)[:, SIZE // 2 :] == 0).all()


@pytest.mark.parametrize(
    ("mode", "name", "colour", "expected"),
    [
        ("1", "a.png", 1, (255, 255, 255)),
        ("1", "a.tif", 0, (0, 0, 0)),
        ("L", "a.png", 100, (100, 100, 100)),
        ("L", "a.bmp", 100, (100, 100, 100)),
        ("LA", "a.png", (100, 255), (100, 100, 100)),
        ("RGB", "a.ppm", (10, 20, 30), (10, 20, 30)),
        ("RGBA", "a.png", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", "a.webp", (10, 20, 30, 0), (255, 255, 255)),
        ("CMYK", "a.tif", (0, 255, 0, 0), (255, 0, 255)),
        ("CMYK", "a.jpg", (0, 0, 0, 255), (0, 0, 0)),
        ("I;16", "a.png", 257 * 77, (77, 77, 77)),
        ("I;16", "a.tif", 65535, (255, 255, 255)),
        ("I", "a.tif", 257 * 200, (200, 200, 200)),
        ("F", "a.tif", 0.2, (51, 51, 51)),
    ],
)
def test_a_file_of_every_mode_keeps_its_colour(
    mode: str, name: str, colour: object, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    image = Image.new(mode, (20, 12), colour)  # type: ignore[arg-type]
    options = {"lossless": True, "exact": True} if name.endswith("webp") else {}
    path = write(tmp_path, name, image, **options)
    with Image.open(path) as read:
        assert read.mode == mode or (mode, read.mode, name) == ("I;16", "I", "a.png")  # as older Pillows read it
    wanted = torch.tensor(expected).float()[:, None, None].expand(1, 3, SIZE, SIZE) / 127.5 - 1
    assert torch.equal(tensor_of([path]), wanted)
    assert torch.equal(tensor_of([image]), wanted)


def test_sixteen_bits_are_scaled_over_their_full_range() -> None:
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.rint(deep / 257).astype(np.uint8)
    assert (to_square_array(Image.fromarray(deep), 256)[..., 0] == expected).all()
    assert (to_square_array(Image.fromarray(deep.astype(np.int32)), 256)[..., 1] == expected).all()


def test_exif_orientation_is_applied_for_all_eight_values(pictures: NDArray[np.uint8], tmp_path: Path) -> None:
    upright = pictures[0]
    # What a camera stores so that a viewer, obeying the tag, shows ``upright``.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }
    expected = tensor_of([upright])
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        path = write(tmp_path, f"{orientation}.png", Image.fromarray(np.ascontiguousarray(pixels)), exif=exif)
        assert torch.equal(tensor_of([path]), expected), orientation
        with Image.open(path) as opened:
            assert torch.equal(tensor_of([opened]), expected), orientation


def test_exif_orientation_is_applied_to_jpeg(tmp_path: Path) -> None:
    image = Image.new("RGB", (32, 16), "white")
    image.paste("black", (0, 0, 16, 16))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # turn clockwise to see it: the left half becomes the top half
    square = to_square_array(Image.open(write(tmp_path, "a.jpg", image, quality=95, exif=exif)), SIZE)
    assert (square[:6] < 20).all()
    assert (square[-6:] > 235).all()


def test_batches_are_the_same_whatever_their_size_and_threads(pictures: NDArray[np.uint8], tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{i}.png", Image.fromarray(p)) for i, p in enumerate(pictures)]
    whole = tensor_of(paths)
    for batch_size in (1, 2, 5, 100):
        for n_jobs in (1, 3, -1):
            batches = ImageBatches(paths, SIZE, batch_size=batch_size, n_jobs=n_jobs)
            assert batches.n_images == 5
            sizes = [len(batch) for batch in batches]
            assert sizes == [min(batch_size, 5 - start) for start in range(0, 5, batch_size)]
            assert torch.equal(torch.cat(list(batches)), whole)


def test_the_same_lazily_opened_image_may_stand_in_a_list_often(tmp_path: Path) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, size=(200, 200, 3), dtype=np.uint8)
    with Image.open(write(tmp_path, "a.png", Image.fromarray(pixels))) as opened:
        tensor = tensor_of([opened] * 32, n_jobs=4)
    assert torch.equal(tensor, tensor_of([pixels]).expand_as(tensor))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_than_the_batch_in_use_and_the_next_are_decoded(ahead: bool, threads: int) -> None:
    decoded: list[int] = []

    def decode(item: int) -> int:
        decoded.append(item)
        return item * 2

    batches = [range(start, start + 5) for start in range(0, 50, 5)]
    for number, results in enumerate(decode_batches(decode, batches, threads=threads, ahead=ahead)):
        assert results == [2 * item for item in batches[number]]
        assert len(decoded) <= 5 * (number + 1 + ahead)
    assert sorted(decoded) == list(range(50))


def test_an_error_of_decoding_is_raised_where_its_batch_is_due() -> None:
    def decode(item: int) -> float:
        return 1 / item

    results = decode_batches(decode, [[1, 2], [4, 0], [5]], threads=2, ahead=True)
    assert next(results) == [1, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_images_that_cannot_be_used_are_left_out_on_request(
    batch_size: int, pictures: NDArray[np.uint8], tmp_path: Path
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not an image")
    collection = [pictures[0], text, tmp_path / "gone.png", pictures[1], np.zeros((4, 4), int), 3, pictures[2] / 255.0]
    errors: list[ImageError] = []
    batches = ImageBatches(collection, SIZE, batch_size=batch_size, on_error=errors.append)
    assert torch.equal(torch.cat(list(batches)), tensor_of(pictures[:3]))
    assert [error.index for error in errors] == [1, 2, 4, 5]
    for error, reason in zip(errors, ("not an image file", "no such file", "dtype int64", "not an image"), strict=True):
        assert reason in error.reason
        assert str(error).startswith(f"image {error.index} (")
        assert str(error).endswith(error.reason)
    assert [index for batch in batches.decoded() for index in batch.indices] == [0, 3, 6]
    assert list(ImageBatches([text], SIZE, on_error=errors.append)) == []


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ImageError("it is damaged", 3, "'a.png'")))
    assert (str(error), error.reason, error.index) == ("image 3 ('a.png'): it is damaged", "it is damaged", 3)


def test_leaving_the_loop_early_ends_the_threads() -> None:
    before = threading.active_count()
    iterator = iter(ImageBatches(np.zeros((500, 6, 6), np.uint8), SIZE, batch_size=5))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_the_images_given_are_not_changed(pictures: NDArray[np.uint8]) -> None:
    before = pictures.copy()
    image = Image.new("RGBA", (9, 7), (1, 2, 3, 4))
    tensor_of(pictures)
    tensor_of([image])
    assert (pictures == before).all()
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGBA", (9, 7), (1, 2, 3, 4))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of a cut TIFF before it raises
@pytest.mark.parametrize(
    ("suffix", "options"),
    [(".jpg", {}), (".jpg", {"progressive": True}), (".png", {}), (".gif", {}), (".bmp", {}), (".webp", {}),
     (".tif", {}), (".tif", {"compression": "tiff_deflate"}), (".ppm", {}), (".jp2", {}), (".tga", {})],
)  # fmt: skip
def test_a_truncated_file_never_passes_for_a_picture(
    suffix: str, options: dict[str, object], pictures: NDArray[np.uint8], tmp_path: Path
) -> None:
    whole = write(tmp_path, f"whole{suffix}", Image.fromarray(pictures[0]), **options)
    expected, data = tensor_of([whole]), whole.read_bytes()
    cut = tmp_path / f"cut{suffix}"
    refused = 0
    for keep in np.linspace(0, len(data) - 1, 40).astype(int):
        cut.write_bytes(data[:keep])
        try:
            tensor = tensor_of([pictures[1], cut])
        except ImageError as error:
            refused += 1
            assert f"image 1 ({str(cut)!r})" in str(error)  # noqa: PT017
        else:  # nothing but a trailer is missing
            assert torch.equal(tensor[1:], expected), f"cut at {keep} of {len(data)} bytes"
    assert refused >= 30


def test_a_png_damaged_anywhere_is_refused_or_right(pictures: NDArray[np.uint8], tmp_path: Path) -> None:
    data = write(tmp_path, "whole.png", Image.fromarray(pictures[0])).read_bytes()
    expected, start = tensor_of([data]), data.index(b"IDAT") + 4
    refused = 0
    for place in np.linspace(start, len(data) - 20, 30).astype(int):
        damaged = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        try:
            tensor = tensor_of([damaged])
        except ImageError:
            refused += 1
        else:
            assert torch.equal(tensor, expected), place
    assert refused >= 28


def test_a_jpeg_damaged_in_the_middle_is_a_picture_or_an_error(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    data = write(tmp_path, "whole.jpg", Image.fromarray(noise)).read_bytes()
    outcomes = list[bool]()
    for place in np.linspace(len(data) // 3, len(data) - 40, 30).astype(int):
        damaged = data[:place] + bytes(8) + data[place + 8 :]
        try:
            tensor = tensor_of([damaged])
        except ImageError:
            continue
        outcomes.append(torch.equal(tensor, tensor_of([data])))
    assert not all(outcomes)  # as docs/trust.md says: nobody can tell


def test_errors_in_files_name_index_and_path(pictures: NDArray[np.uint8], tmp_path: Path) -> None:
    good = write(tmp_path, "good.png", Image.fromarray(pictures[0]))
    text = tmp_path / "notes.txt"
    text.write_text("not an image")
    with pytest.raises(ImageError, match=r"image 1 \('.*notes.txt'\): not an image file"):
        tensor_of([good, text, good])
    with pytest.raises(ImageError, match=r"image 2 \('.*gone.png'\): no such file"):
        ImageBatches([good, good, tmp_path / "gone.png"], SIZE)
    with pytest.raises(ImageError, match=r"image 1 .*it is a folder"):
        ImageBatches([good, tmp_path], SIZE)
    with pytest.raises(ImageError, match=r"image 0 \('a\\x00b'\)"):
        ImageBatches(["a\0b"], SIZE)
    with pytest.raises(ImageError, match="is a folder: pass the list of its image files"):
        ImageBatches(tmp_path, SIZE)


def test_a_closed_image_is_named() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    with Image.open(buffer) as image:
        pass
    with pytest.raises(ImageError, match=r"image 0 .* closed before its pixels were read"):
        tensor_of([image])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "there are no images"),
        ((), "there are no images"),
        (np.zeros((0, 8, 8, 3), np.uint8), "there are no images"),
        (torch.zeros(0, 3, 8, 8), "there are no images"),
        ("photo.png", "single image .*wrap it in a list"),
        (Path("photo.png"), "single image .*wrap it in a list"),
        (Image.new("L", (8, 8)), "single image .*wrap it in a list"),
        (np.zeros((8, 8, 3), np.uint8), r"shape \(8, 8, 3\) is a single image: wrap it in a list"),
        (torch.zeros(3, 8, 8), r"shape \(3, 8, 8\) is a single image: wrap it in a list"),
        (torch.zeros(5, 8, 8), "unsqueeze"),
        (torch.zeros(64, 64, 3), r"single image with its channels last: pass x.movedim\(-1, -3\)\[None\]"),
        (np.ma.masked_less(np.zeros((4, 8, 8)), 1), "masked array.*filled"),
        ([np.ma.masked_less(np.zeros((8, 8)), 1)], "image 0 .*masked array.*filled"),
        (b"bytes of a file", "single image .*wrap it in a list"),
        (io.BytesIO(b"bytes of a file"), "single image .*wrap it in a list"),
        ({"a": "a.png"}, "got dict"),
        ([b""], "image 0 .*it is empty"),
        ([{"image": 3, "label": 0}], r"a row of a table \('image', 'label'\).*pass the column"),
        ([(np.zeros((8, 8), np.uint8), 1)], "a pair of an image and its label"),
        (["~/no such photo.png"], "Python does not expand ~"),
        (["file:///tmp/a.png"], "without file://"),
        (["https://example.org/a.png"], "an address, not a file: download it"),
        (np.zeros((8, 8), np.uint8), "no stack of images"),
        (np.zeros((2, 8, 8, 3, 1), np.uint8), "no stack of images"),
        (np.zeros((4, 3, 8, 8), np.uint8), "move the channels to the last axis"),
        (torch.zeros(4, 8, 8, 3), "move the channels to the first axis"),
        (np.zeros((4, 8, 8, 7), np.uint8), r"\(8, 8, 7\) is not \(h, w, 3\)"),
        (np.zeros((4, 0, 8, 3), np.uint8), "no pixels"),
        (np.zeros((4, 8, 8), np.int64), "dtype int64"),
        (np.zeros((4, 8, 8), np.uint16), "dtype uint16"),
        (np.zeros((4, 8, 8), complex), "dtype complex128"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.int64), "dtype torch.int64"),
        ([np.zeros((8, 8), np.uint8), np.zeros(8, np.uint8)], r"image 1 .*shape \(8,\)"),
        ([np.zeros((8, 8), np.uint8), np.zeros((0, 8), np.uint8)], "image 1 .*no pixels"),
        ([np.zeros((8, 8), np.uint8), 3], r"image 1 \(int\): not an image"),
        ([[[0, 0], [0, 0]]], r"image 0 \(list\): not an image"),
        ([None], r"image 0 \(NoneType\): not an image"),
        (None, "got NoneType"),
        ({"a.png"}, "got set"),
        (iter([np.zeros((8, 8))]), "into a list"),
        (np.array([["a.png"]]), "pass one column of it"),
        (np.array([[None]], dtype=object), "pass one column of it"),
    ],
)
def test_what_is_no_collection_of_images_is_refused_before_any_work(images: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        ImageBatches(images, SIZE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "image 1 .*NaN"),
        (np.inf, "image 1 .*infinity"),
        (255.0, "image 1 .*from 0 to 255.*divide by 255"),
        (1.01, "image 1 .*divide by 255"),
        (-1.0, r"image 1 .*from -1 to 0.*\(x \+ 1\) / 2"),
    ],
)
def test_floats_outside_zero_to_one_are_refused_by_index(value: float, message: str) -> None:
    images = np.zeros((3, 8, 8, 3))
    images[1, 2, 2, 0] = value
    for collection in (images, list(images), torch.from_numpy(images).permute(0, 3, 1, 2)):
        with pytest.raises(ImageError, match=message):
            tensor_of(collection)


def test_floats_outside_by_rounding_alone_are_accepted() -> None:
    images = np.full((1, 8, 8), 1 + 1e-7)
    assert (tensor_of(images) == 1).all()


def test_images_without_a_meaning_in_eight_bits_are_refused() -> None:
    with pytest.raises(ImageError, match=r"image 0 .*no pixels"):
        tensor_of([Image.new("RGB", (0, 5))])
    with pytest.raises(ImageError, match=r"image 0 .*from 70000 to 70000"):
        tensor_of([Image.new("I", (5, 5), 70000)])
    with pytest.raises(ImageError, match=r"image 0 .*from 200 to 200.*divide by 255"):
        tensor_of([Image.new("F", (5, 5), 200)])


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, None])
def test_a_batch_size_that_is_no_positive_integer_is_refused(batch_size: object) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        ImageBatches(np.zeros((1, 4, 4), np.uint8), SIZE, batch_size=batch_size)  # type: ignore[arg-type]
