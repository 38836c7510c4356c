"""Stacks and files of many bands: an error that says how to choose, and what each choice gives."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis import Region, SimpleCNAPSClassifier
from fewshot_mahalanobis.images import formats, picture
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from tests.tiny import tiny_model, unadapted_model

pytest.importorskip("tifffile")

from tests.images.kinds import GREY, ON_WHITE, OPACITY, Kind, bands, grey, kinds, saved, table, tiff

DOCS = Path(__file__).parents[2] / "docs"
KINDS = kinds()


def read(item: Any, **settings: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Pixels (24, 24, 3), and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (batch,) = ImageBatches([item], 24, **settings).decoded()
    return batch.pixels[0].astype(int), [str(warning.message) for warning in caught]


def square(values: NDArray[Any]) -> NDArray[np.int64]:
    """What is read of the pixels (h, w, 3) of a picture, which need not be whole."""
    return read(np.rint(values).astype(np.uint8))[0]


@pytest.mark.parametrize("kind", KINDS, ids=[f"{index} {kind.name}" for index, kind in enumerate(KINDS)])
def test_each_kind_is_read_as_the_page_says(kind: Kind) -> None:
    tolerance = 1 + kind.tolerance
    if kind.alone.startswith("read"):
        pixels, said = read(kind.item)
        assert [bool(said)] == [kind.alone.endswith("note")], said
        if not kind.settings:
            assert np.abs(pixels - square(kind.wanted)).max() <= tolerance
    else:
        with pytest.raises(ImageError, match=kind.alone) as error:
            read(kind.item)
        assert not kind.settings or "pages" in str(error.value) or "bands" in str(error.value)
    if kind.settings:
        pixels, said = read(kind.item, **kind.settings)
        assert said == []
        assert np.abs(pixels - square(kind.wanted)).max() <= tolerance


def test_the_page_has_the_table_of_kinds() -> None:
    assert table(KINDS) in (DOCS / "scientific_images.md").read_text()


def test_a_stack_of_which_nothing_is_chosen_is_an_error_that_names_it_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "cells.tif"
    path.write_bytes(tiff(bands(0, 1, axis=0)))
    for item in (path, path.read_bytes(), io.BytesIO(path.read_bytes()), Image.open(path), Region(path, (0, 0, 8, 8))):
        with pytest.raises(ImageError, match=r"image 0 .*a stack of several pages.*pages.*fit --pages"):
            read(item)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"pages": "first"}, grey(GREY[0])),
        ({"pages": np.int64(2)}, grey(GREY[2])),
        ({"pages": [2, 2, 0]}, bands(2, 2, 0)),
        ({"pages": "mean"}, grey(bands(0, 1, 2).mean(axis=-1))),
    ],
)
def test_a_choice_of_pages_is_that_of_files_regions_and_pil_images(
    settings: dict[str, Any], wanted: NDArray[Any], tmp_path: Path
) -> None:
    path = tmp_path / "cells.tif"
    path.write_bytes(tiff(bands(0, 1, 2, axis=0)))
    expected = square(wanted)
    lazy, loaded = Image.open(path), Image.open(path)
    loaded.load()
    for item in (path, lazy, loaded):
        assert np.abs(read(item, **settings)[0] - expected).max() <= 1
    assert lazy.tell() == loaded.tell() == 0
    part = read(Region(path, (4, 2, 16, 12)), **settings)[0]
    assert np.abs(part - square(wanted[2:14, 4:20])).max() <= 1


def test_a_pil_image_that_was_moved_or_edited_is_read_as_it_stands() -> None:
    data = tiff(bands(0, 1, 2, axis=0))
    image = Image.open(io.BytesIO(data))
    image.seek(2)
    assert (read(image)[0] == square(grey(GREY[2]))).all()
    assert (read(image.copy())[0] == square(grey(GREY[2]))).all()
    image = Image.open(io.BytesIO(data))
    image.paste(7, (0, 0, *image.size))
    assert (read(image, pages="first")[0] == 7).all()
    assert (read(image, pages=1)[0] == square(grey(GREY[1]))).all()
    assert image.getpixel((3, 3)) == 7


@pytest.mark.parametrize(
    ("item", "settings", "message"),
    [
        (tiff(bands(0, 1, axis=0)), {"pages": 2}, "it has 2 pages, and there is none of number 2, counted from 0"),
        (saved(Image.fromarray(GREY[0]), "PNG"), {"pages": 1}, "it has 1 page, and"),
        (saved(Image.fromarray(GREY[0]), "PNG"), {"bands": (0, 1, 2)}, "it has 1 band, and there is none of number 2"),
        (tiff(bands(0, 1, 2, 3, 4), planarconfig="contig"), {"bands": 5}, "it has 5 bands, and"),
        (bands(0, 1, 2, 3, 4), {"bands": 5}, "it has 5 bands, and"),
        (bands(0, 1, 2, 3, 4, axis=0), {"bands": (3, 2, 1)}, "5 bands at the other end.*np.moveaxis"),
        (torch.from_numpy(bands(0, 1, 2, 3, 4)), {"bands": (3, 2, 1)}, "5 bands at the other end.*movedim"),
        (saved(Image.fromarray(GREY[0]), "TIFF", save_all=True, append_images=[Image.fromarray(GREY[1][:8])]),
         {"pages": "max"}, "different sizes"),
        (tiff(np.stack([bands(0, 1, 2)] * 2), photometric="rgb"), {"pages": (0, 1, 1)}, "its pages have colours"),
        (np.dstack([bands(0, 1, 2), OPACITY // 2]), {}, "does not look like opacity.*bands="),
        (np.dstack([bands(0, 1, 2), 0 * OPACITY]), {}, "does not look like opacity"),
        (torch.from_numpy(bands(0, 1, 2, 3, axis=0)) / 255, {}, "does not look like opacity"),
    ],
)  # fmt: skip
def test_what_a_choice_cannot_give_is_named(item: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ImageError, match=message):
        read(item, **settings)


@pytest.mark.parametrize(
    "settings",
    [{"pages": value} for value in ("each", -1, True, (0, 1), 1.0, (0, "1", 2), ())]
    + [{"bands": value} for value in ("rgb", (0, 1), -2, False, (0, 1, 2, 3, 4), {0: 1})],
    ids=str,
)
def test_a_choice_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be None"):
        SimpleCNAPSClassifier(tiny_model(), device="cpu", **settings).fit([GREY[0], GREY[1]], [0, 1])


def test_four_bands_with_the_fourth_as_opacity_are_laid_on_white() -> None:
    rgba = np.dstack([bands(0, 1, 2), OPACITY])
    for item in (rgba, rgba / 255, torch.from_numpy(np.moveaxis(rgba, -1, 0)), tiff(rgba, photometric="rgb")):
        assert (read(item, bands=(0, 1, 2, 3))[0] == square(ON_WHITE)).all()
        assert (read(item, bands=(0, 1, 2))[0] == square(bands(0, 1, 2))).all()


def test_sixteen_bits_a_colour_take_the_range_beside_opacity_too() -> None:
    values = bands(0, 1, 2, scale=16, dtype=np.uint16)
    deep = tiff(np.dstack([values, OPACITY * np.uint16(257)]), photometric="rgb", extrasamples=["unassalpha"])
    assert "value_range=" in read(deep)[1][0]
    assert (read(deep, value_range=(0, 4080))[0] == square(ON_WHITE)).all()


def test_a_file_of_many_bands_that_is_cut_short_is_refused_or_right() -> None:
    data = tiff(bands(0, 1, 2, 3, 4), planarconfig="contig", compression="zlib")
    expected, refused = read(data, bands=(3, 2, 1))[0], 0
    for end in np.linspace(1, len(data) - 1, 30).astype(int):
        try:
            found = read(data[:end], bands=(3, 2, 1))[0]
        except ImageError:
            refused += 1
        else:
            assert (found == expected).all()
    assert refused >= 25


def test_without_tifffile_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (formats, picture):
        monkeypatch.setattr(module, "tiff_decoder", lambda: None)
    many = tiff(bands(0, 1, 2, 3, 4), planarconfig="contig")
    unspecified = tiff(bands(0, 1, 2, 3), photometric="rgb", extrasamples=["unspecified"])
    for item, settings in ((many, {}), (many, {"bands": 1}), (unspecified, {"bands": 3})):
        with pytest.raises(ImageError, match=r"Pillow does not read.*\[tiff\]"):
            read(item, **settings)
    assert (read(unspecified, bands=(2, 1, 0))[0] == square(bands(2, 1, 0))).all()


def test_a_loaded_classifier_reads_stacks_as_the_fitted_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stacks = rng.integers(0, 256, (6, 2, 16, 24, 5), dtype=np.uint8)
    files = [tiff(stack, planarconfig="contig") for stack in stacks]
    classifier = SimpleCNAPSClassifier(unadapted_model(), device="cpu", pages="max", bands=(4, 2, 0))
    classifier.fit(files, list("aabbcc")).save(tmp_path / "saved")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "saved", device="cpu")
    assert (loaded.pages, loaded.bands) == ("max", (4, 2, 0))
    arrays = list(stacks.max(axis=1)[..., [4, 2, 0]])
    expected = SimpleCNAPSClassifier(unadapted_model(), device="cpu").fit(arrays, list("aabbcc")).predict_proba(arrays)
    assert (loaded.predict_proba(files) == expected).all()


def test_pictures_that_are_read_as_nearly_one_shade_are_no_copies() -> None:
    dark = [(picture.astype(np.uint16) * 2) for picture in GREY[:6]]
    with pytest.warns(UserWarning, match="value_range") as caught:
        classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(
            [Image.fromarray(values) for values in dark], list("aaabbb")
        )
    assert ["value_range" in str(warning.message) for warning in caught] == [True]
    with pytest.warns(UserWarning, match="value_range") as caught:
        classifier.partial_fit([Image.fromarray(values) for values in dark[:2]], list("ab"))
    assert ["value_range" in str(warning.message) for warning in caught] == [True]
