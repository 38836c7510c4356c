"""The same picture is recognised by its aligned pixels; pictures that are only alike are not."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits, load_sample_images

from fewshot_mahalanobis.images import same_picture
from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.images.same_picture import same_pictures, small_pictures


def photographs(seed: int = 0) -> list[Image.Image]:
    """Pieces of scikit-learn's two photographs that do not overlap."""
    pieces = []
    for photograph in load_sample_images().images:
        image = Image.fromarray(photograph)
        pieces += [image.crop((x, y, x + 200, y + 200)) for x in (0, 210, 420) for y in (0, 210)]
    return pieces


def solar_cells(seed: int = 0) -> list[Image.Image]:
    """Cells with the same fingers and bus bars, and each its own cracks, shades and noise."""
    rng, cells = np.random.default_rng(seed), []
    for _ in range(12):
        bright = np.full((200, 200), 150.0)
        bright[(np.arange(200) % 10) < 2] -= 12
        image = Image.fromarray(bright.astype(np.uint8))
        draw = ImageDraw.Draw(image)
        for x in (50, 100, 150):
            draw.rectangle((x - 3, 0, x + 3, 200), fill=70)
        crack = np.cumsum(np.vstack([rng.uniform(20, 180, (1, 2)), rng.normal(0, 18, (6, 2))]), axis=0)
        draw.line([*map(tuple, crack)], fill=60, width=3)
        clouds = np.asarray(Image.fromarray(rng.integers(0, 256, (6, 6), np.uint8)).resize((200, 200)), float) - 128
        cell = np.asarray(image) + 0.12 * clouds + rng.normal(0, 4, (200, 200))
        cells.append(Image.fromarray(cell.clip(0, 255).astype(np.uint8)).convert("RGB"))
    return cells


def handwriting(seed: int = 0) -> list[Image.Image]:
    """Ones and sevens, 28 pixels wide."""
    digits = load_digits()
    chosen = np.isin(digits.target, (1, 7)).nonzero()[0][:24]
    images = [Image.fromarray((16 * digits.images[i]).clip(0, 255).astype(np.uint8)) for i in chosen]
    return [image.resize((28, 28), Image.Resampling.BICUBIC).convert("RGB") for image in images]


def letters(seed: int = 0) -> list[Image.Image]:
    """Small capitals, which differ by a stroke."""
    font, glyphs = ImageFont.load_default(22), []
    for letter in "EFBPRCGOQ":
        image = Image.new("RGB", (28, 28), "white")
        ImageDraw.Draw(image).text((6, 1), letter, fill="black", font=font)
        glyphs.append(image)
    return glyphs


def jpeg(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=75)
    return Image.open(file)


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "the same": lambda image: image,
    "compressed": jpeg,
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop((0, round(0.06 * image.height), round(0.92 * image.width), image.height)),
    "smaller": lambda image: image.resize((image.width * 3 // 4, image.height * 3 // 4)),
    "cropped, mirrored and compressed": lambda image: jpeg(COPIES["cropped"](COPIES["mirrored"](image))),
}
KINDS = {"photographs": photographs, "solar cells": solar_cells, "handwriting": handwriting, "letters": letters}


def described(images: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Small pictures, and features that hardly change when a picture is mirrored: coarse colours of both halves."""
    pixels = [torch.from_numpy(np.array(image.convert("RGB").resize((96, 96)))) for image in images]
    x = to_network_range(torch.stack(pixels).permute(0, 3, 1, 2))
    coarse = torch.nn.functional.adaptive_avg_pool2d(x, 8)
    return small_pictures(x), (coarse + coarse.flip(3)).flatten(1)


def same(images: list[Image.Image]) -> list[list[int]]:
    pairs: list[list[int]] = same_pictures(*described(images)).tolist()
    return pairs


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_that_are_only_alike_are_not_the_same(kind: str) -> None:
    assert same(KINDS[kind]()) == []


@pytest.mark.parametrize("kind", ["photographs", "solar cells", "handwriting"])
@pytest.mark.parametrize("copy", COPIES)
def test_every_copy_is_recognised_and_nothing_else(kind: str, copy: str) -> None:
    images = KINDS[kind]()
    n = len(images)
    pictures, _ = described(images + [COPIES[copy](image) for image in images])
    features = torch.eye(n).repeat(2, 1)  # a network finds the copy nearest
    assert same_pictures(pictures, features).tolist() == [[i, i + n] for i in range(n)]


def test_cells_that_differ_by_a_mark_are_told_apart_in_a_mixed_support_set_too() -> None:
    rng, cells = np.random.default_rng(1), []
    for i in range(8):
        bright = np.full((200, 200), 170.0) + rng.normal(0, 3, (200, 200))
        image = Image.fromarray(bright.astype(np.uint8))
        draw = ImageDraw.Draw(image)
        for x in (50, 100, 150):
            draw.rectangle((x - 3, 0, x + 3, 200), fill=60)
        x, y = 10 + 22 * i, 20 + 40 * (i % 4)
        draw.rectangle((x, y, x + 9, y + 21), fill=70)
        cells.append(image.convert("RGB"))
    images = [*cells, *photographs(), *letters()]
    assert same(images) == []
    copies = [jpeg(cells[0]), COPIES["mirrored"](cells[1])]
    assert same([*images, *copies]) == [[0, len(images)], [1, len(images) + 1]]


def test_few_pictures_that_are_not_alike_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    aligned, pairs = same_picture._aligned, 0

    def counted(a: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal pairs
        pairs += len(a)
        return aligned(a, *rest)

    monkeypatch.setattr(same_picture, "_aligned", counted)
    noise = torch.rand(60, 3, 12, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1
    pictures = small_pictures(torch.nn.functional.interpolate(noise, (96, 96), mode="bicubic").clamp(-1, 1))
    assert same_pictures(pictures, torch.eye(60)).shape == (0, 2)
    assert pairs < 6


def test_symmetric_letters_are_their_own_mirror_images_and_others_are_found_by_theirs() -> None:
    image = Image.new("RGB", (28, 28), "white")
    ImageDraw.Draw(image).line((4, 24, 14, 4, 24, 24), fill="black", width=2)
    assert same([image, COPIES["mirrored"](image), *letters()]) == [[0, 1]]


def test_colour_and_brightness_tell_pictures_apart() -> None:
    image = photographs()[0]
    red, green, blue = image.split()
    turned = Image.merge("RGB", (blue, red, green))
    darker = image.point(lambda value: value * 3 // 4)
    assert same([image, turned, darker]) == []
    even = [Image.new("RGB", (50, 50), colour) for colour in ("red", "blue", "#0000f0", "blue", "white")]
    assert same(even) == [[1, 3]]


def test_copies_in_different_classes_are_found_as_labels_play_no_part() -> None:
    images = photographs()
    pairs = same([*images, images[3], COPIES["mirrored"](images[3])])
    assert {tuple(pair) for pair in pairs} == {(3, 12), (3, 13), (12, 13)}


def test_many_copies_of_one_picture_are_joined() -> None:
    images = handwriting()[:4]
    pairs = same([*images, *[images[0]] * 40])
    reached = {0}
    for _ in range(44):
        reached |= {j for pair in pairs if reached & {*pair} for j in pair}
    assert reached == {0, *range(4, 44)}
    assert len(pairs) <= 44 * 6


def test_parts_find_what_the_whole_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photographs() + [COPIES["cropped"](image) for image in photographs()[:5]]
    pairs = same(images)
    assert len(pairs) == 5
    monkeypatch.setattr(same_picture, "_ROWS", 3)
    monkeypatch.setattr(same_picture, "_PAIRS", 2)
    assert same(images) == pairs


def test_one_picture_and_none_have_no_copies() -> None:
    pictures, features = described(photographs()[:1])
    assert same_pictures(pictures, features).shape == (0, 2)
    assert same_pictures(pictures[:0], features[:0]).shape == (0, 2)
    assert pictures.dtype == torch.uint8
    assert pictures[0].numel() == 6912
