"""A region is its picture cropped by hand; boxes that are none are refused by name; a picture is decoded once."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from fewshot_mahalanobis import Region
from fewshot_mahalanobis.images import decode, picture
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from tests.images.icc import DISPLAY_P3
from tests.tiny import tiny_classifier

SIZE = 32
BOX = (110, 75, 330, 210)


def photograph(width: int = 640, height: int = 480, seed: int = 0) -> Image.Image:
    """Colour ramps and fine noise, which every other way to decode or resize would change."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    ramp = np.stack([x * 200 // width, y * 200 // height, (x + y) * 200 // (width + height)], axis=-1)
    return Image.fromarray((ramp + rng.integers(0, 56, ramp.shape)).astype(np.uint8))


def tensor_of(images: Any, **settings: Any) -> torch.Tensor:
    return torch.cat(list(ImageBatches(images, SIZE, **settings)))


def by_hand(path: Path, edges: tuple[float, float, float, float]) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).crop(edges)


def turned(path: Path, orientation: int = 6) -> Path:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photograph().save(path, exif=exif)
    return path


def saved(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    (photograph() if image is None else image).save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("camera.jpg", "RGB", {"quality": 90}),
        ("camera.png", "RGB", {}),
        ("camera.jpg", "CMYK", {}),
        ("camera.jpg", "L", {}),
        ("display.jpg", "RGB", {"icc_profile": DISPLAY_P3}),
        ("camera.png", "RGBA", {}),
        ("palette.gif", "P", {}),
        ("camera.tif", "I;16", {}),
        ("camera.webp", "RGB", {"lossless": True}),
    ],
)
def test_a_region_is_the_picture_cropped_by_hand_to_the_bit(
    name: str, mode: str, options: dict[str, Any], tmp_path: Path
) -> None:
    image = photograph()
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    path = saved(tmp_path / name, image if mode == "I;16" else image.convert(mode), **options)
    x, y, width, height = BOX
    expected = tensor_of([by_hand(path, (x, y, x + width, y + height))])
    assert torch.equal(tensor_of([Region(path, BOX)]), expected)
    assert torch.equal(tensor_of([Region(path.read_bytes(), BOX)]), expected)
    assert torch.equal(tensor_of([Region(path.open("rb"), BOX)]), expected)
    with Image.open(path) as opened:
        assert torch.equal(tensor_of([Region(opened, BOX)]), expected)
    shares = (x / 640, y / 480, width / 640, height / 480)
    assert torch.equal(tensor_of([Region(str(path), shares, normalized=True)]), expected)


def test_a_region_of_an_array_or_a_tensor_is_a_slice_of_it() -> None:
    array = np.array(photograph())
    expected = tensor_of([array[75:285, 110:440]])
    for image in (array, array / 255, torch.from_numpy(array).permute(2, 0, 1)):
        assert torch.equal(tensor_of([Region(image, BOX)]), expected)


def test_a_small_region_of_a_large_jpeg_is_not_read_at_a_smaller_scale(tmp_path: Path) -> None:
    path = saved(tmp_path / "large.jpg", photograph(2048, 1536))
    edges = (1000, 700, 1000 + 2 * SIZE, 700 + 2 * SIZE)
    assert torch.equal(tensor_of([Region(path, (1000, 700, 2 * SIZE, 2 * SIZE))]), tensor_of([by_hand(path, edges)]))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_boxes_are_in_the_picture_as_viewers_turn_it(orientation: int, tmp_path: Path) -> None:
    path = turned(tmp_path / "turned.jpg", orientation)
    region = Region(path, (30, 40, 200, 300))
    assert torch.equal(tensor_of([region]), tensor_of([by_hand(path, (30, 40, 230, 340))]))


def test_what_a_file_says_about_its_values_holds_for_its_regions(tmp_path: Path) -> None:
    values = np.asarray(photograph().convert("L")).astype(np.uint16) * 16
    file = io.BytesIO()
    Image.fromarray(values).save(file, "TIFF", tiffinfo={280: 0, 281: 4095})
    whole = Region(file, (0, 0, 640, 480))
    assert torch.equal(tensor_of([whole]), tensor_of([file]))
    assert not torch.equal(tensor_of([whole]), tensor_of([Image.fromarray(values)]))
    array = values[75:285, 110:440]
    given = tensor_of([Region(values, BOX)], value_range=(0, 4095))
    assert torch.equal(given, tensor_of([array], value_range=(0, 4095)))


def test_edges_are_rounded_as_pillow_rounds_them_and_a_margin_ends_with_the_picture() -> None:
    image = photograph()
    for box in ((10.5, 20.4, 100.2, 50.6), (0.5, 1.5, 60, 61.5)):
        x, y, width, height = box
        cropped = image.crop((x, y, x + width, y + height))
        assert torch.equal(tensor_of([Region(image, box)]), tensor_of([cropped]))
    assert Region(image, (100, 50, 40, 80), margin=0.25).edges(640, 480) == (90, 30, 150, 150)
    assert Region(image, (5, 450, 100, 30), margin=0.5).edges(640, 480) == (0, 435, 155, 480)
    assert Region(image, (100, 50, 40, 80), margin=0.25).pixels(640, 480) == (100, 50, 40, 80)


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ((0, 0, 642, 10), "reaches beyond the picture, which has 640 x 480 pixels"),
        ((-2, 0, 20, 10), "reaches beyond"),
        ((0, 470, 20, 12), "reaches beyond"),
        ((700, 500, 20, 10), "reaches beyond"),
        ((10, 10, 0, 20), "is empty: its width is 0"),
        ((10, 10, 20, -5), "is empty"),
        ((10.1, 10, 0.3, 20), "is empty: it is narrower than a pixel"),
        ((0.25, 0.5, 0.5, 0.25), "no larger than a pixel, and boxes are in pixels"),
        ((0, 0, 1, 1), "no larger than a pixel"),
    ],
)
def test_a_box_that_is_none_is_refused_with_picture_row_and_box(
    box: tuple[float, ...], message: str, tmp_path: Path
) -> None:
    good = saved(tmp_path / "good.jpg")
    errors = list[ImageError]()
    regions = [Region(good, BOX), Region(good, box, name="line 3 of boxes.csv")]  # type: ignore[arg-type]
    with pytest.raises(ImageError, match=message) as caught:
        tensor_of(regions)
    for part in ("image 1 (", "good.jpg", f"box ({', '.join(map(str, box))})", "line 3 of boxes.csv"):
        assert part in str(caught.value)
    assert torch.equal(tensor_of(regions, on_error=errors.append), tensor_of(regions[:1]))
    assert [error.index for error in errors] == [1]


def test_shares_that_are_pixels_are_refused_and_their_rounding_is_not() -> None:
    image = photograph()
    with pytest.raises(ImageError, match="from 0 to 1: is it in pixels"):
        tensor_of([Region(image, BOX, normalized=True)])
    whole = Region(image, (0, 0.0004, 1, 1), normalized=True)  # four digits, rounded
    assert whole.edges(640, 480) == (0, 0, 640, 480)
    assert Region(image, (0, 0, 640.7, 480.2)).edges(640, 480) == (0, 0, 640, 480)
    with pytest.raises(ImageError, match="reaches beyond"):
        Region(image, (0.5, 0, 0.6, 1), normalized=True).edges(640, 480)


def test_a_box_that_was_drawn_in_another_picture_is_refused(tmp_path: Path) -> None:
    path = turned(tmp_path / "turned.jpg")  # 640 x 480 in the file, 480 x 640 as viewers show it
    with pytest.raises(ImageError, match=r"a picture of 640 x 480 pixels, .* has 480 x 640: was it drawn before"):
        tensor_of([Region(path, BOX, picture_size=(640, 480))])
    with pytest.raises(ImageError, match=r"a picture of 320 x 240 pixels, and this one has 480 x 640$"):
        tensor_of([Region(path, (1, 1, 50, 50), picture_size=(320, 240))])
    assert len(tensor_of([Region(path, (1, 1, 50, 50), picture_size=(480, 640))])) == 1


def test_what_is_no_box_is_refused_at_once() -> None:
    for box in ((1, 2, 3), (1, 2, 3, float("nan")), (1, 2, 3, "4"), "1234", 7, None, (True, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"four finite numbers \(x, y, width, height\), got .*\(a\.jpg, line 2\)"):
            Region("a.jpg", box, name="line 2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="margin must be"):
        Region("a.jpg", BOX, margin=-0.1)
    with pytest.raises(ValueError, match="a region of a region"):
        Region(Region("a.jpg", BOX), BOX)
    assert Region("a.jpg", np.array(BOX)) == Region("a.jpg", torch.tensor(BOX)) == Region("a.jpg", [*BOX])  # type: ignore[arg-type]


def test_a_single_region_and_one_of_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="a single image"):
        ImageBatches(Region(tmp_path / "a.jpg", BOX), SIZE)
    with pytest.raises(ImageError, match=r"image 0 \('.*a\.jpg', box \(110, 75, 330, 210\)\): no such file"):
        ImageBatches([Region(tmp_path / "a.jpg", BOX)], SIZE)
    (tmp_path / "a.jpg").write_bytes(saved(tmp_path / "b.jpg").read_bytes()[:5000])
    errors = list[ImageError]()
    damaged = [Region(tmp_path / "a.jpg", (10 * i, 0, 50, 50)) for i in range(1, 4)]
    assert list(ImageBatches(damaged, SIZE, on_error=errors.append)) == []
    assert [error.index for error in errors] == [0, 1, 2]
    assert "box (20, 0, 50, 50)" in str(errors[1])


@pytest.fixture
def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose pixels are decoded."""
    found, open_image = list[str](), picture.open_image

    def counted(file: Any, *settings: Any) -> Image.Image:
        found.append(Path(file.name).name)
        return open_image(file, *settings)

    monkeypatch.setattr(picture, "open_image", counted)
    return found


@pytest.mark.parametrize("n_jobs", [1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_file_is_decoded_once_whatever_the_order_of_its_regions(
    n_jobs: int, ahead: bool, opened_files: list[str], tmp_path: Path
) -> None:
    paths = [saved(tmp_path / f"{i}.jpg", photograph(120, 90, seed=i)) for i in range(7)]
    regions = [Region(path, (5 * i, 4 * i, 60, 50)) for i in range(10) for path in paths]
    order = np.random.default_rng(0).permutation(len(regions))
    mixed = [*(regions[i] for i in order), paths[0]]
    alone = torch.cat([tensor_of([item]) for item in mixed])
    opened_files.clear()
    assert torch.equal(tensor_of(mixed, batch_size=4, n_jobs=n_jobs, ahead=ahead), alone)
    assert sorted(opened_files) == ["0.jpg", *(f"{i}.jpg" for i in range(7))]  # once for its regions, once whole


def test_regions_far_apart_do_not_wait_in_memory(
    opened_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MOST_APART", 3)
    paths = [saved(tmp_path / f"{i}.jpg", photograph(90, 60, seed=i)) for i in range(2)]
    regions = [Region(paths[i], (j, j, 40, 40)) for j, i in enumerate((0, 0, 0, 0, 1, 0, 1))]
    alone = torch.cat([tensor_of([item]) for item in regions])
    opened_files.clear()
    assert torch.equal(tensor_of(regions, batch_size=2, n_jobs=1), alone)
    assert opened_files == ["0.jpg", "0.jpg", "1.jpg"]


def test_a_sequence_that_gives_regions_one_at_a_time_is_read() -> None:
    class Regions:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Region:
            return Region(image, (index, index, 50, 50))

    image = photograph()
    assert torch.equal(tensor_of(Regions()), tensor_of([Region(image, (i, i, 50, 50)) for i in range(3)]))


def test_a_classifier_learns_regions_and_names_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    regions, labels, crops = list[Region](), list[str](), list[Image.Image]()
    for number in range(3):
        canvas = photograph(200, 100, seed=number)
        for left, (label, colour) in zip((0, 100), (("red", (200, 40, 40)), ("blue", (40, 40, 200))), strict=True):
            pixels = np.clip(np.array(colour) + rng.normal(0, 25, (60, 50, 3)), 0, 255).astype(np.uint8)
            canvas.paste(Image.fromarray(pixels), (left + 10, 15))
            regions.append(Region(tmp_path / f"{number}.png", (left + 10, 15, 50, 60)))
            labels.append(label)
            crops.append(Image.fromarray(pixels))
        canvas.save(tmp_path / f"{number}.png")
    classifier = tiny_classifier().fit(regions, labels)
    assert classifier.predict(regions).tolist() == labels
    same = tiny_classifier().fit(crops, labels, groups=[0, 0, 1, 1, 2, 2])
    assert np.array_equal(classifier.transform(regions), same.transform(crops))
    assert np.array_equal(classifier.predict_proba(regions), same.predict_proba(crops))
    assert classifier.summary().names == [str(region) for region in regions]


def test_regions_of_one_photograph_are_left_out_together_unless_groups_say_otherwise(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{i}.png", photograph(120, 90, seed=i)) for i in range(4)]
    regions = [Region(path, (50 * j, 10, 40, 50)) for path in paths[:3] for j in range(2)]
    regions.append(Region(paths[3], (0, 0, 60, 60)))
    labels = ["left", "right"] * 3 + ["left"]
    classifier = tiny_classifier().fit(regions, labels)
    named = tiny_classifier().fit(regions, labels, groups=[0, 0, 1, 1, 2, 2, 3])
    assert classifier.summary().groups == named.summary().groups == [[0, 1], [2, 3], [4, 5]]
    assert classifier.fitted_head_.group_names == [f"photograph {i}" for i in (0, 0, 2, 2, 4, 4)] + [None]
    assert tiny_classifier().fit(regions, labels, groups=range(7)).summary().groups == []
    assert tiny_classifier().fit([paths[0], *regions[::2]], ["a", "b", "b", "b", "a"]).summary().groups == []
    opened = photograph(120, 90, seed=9)
    classifier.partial_fit([Region(opened, (50 * j, 10, 40, 50)) for j in range(2)], labels[:2])
    assert classifier.summary().groups == [[0, 1], [2, 3], [4, 5], [7, 8]]
