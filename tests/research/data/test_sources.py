import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewshot_mahalanobis.research.data.glyphs import draw_glyphs
from fewshot_mahalanobis.research.data.sources import load_source


def write_tree(root: Path, layout: dict[str, int]) -> Path:
    """Image i of a class is a plain square of grey level 10 * i."""
    for folder, count in layout.items():
        (root / folder).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (12, 9), 10 * i).save(root / folder / f"{i}.png")
    return root


def zipped(root: Path) -> Path:
    path = root.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(root.rglob("*.png")):
            archive.write(file, file.relative_to(root))
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_folder_and_zip_give_the_same_source(tmp_path, packed):
    root = write_tree(tmp_path / "set", {"b": 12, "a": 2, "c": 1})
    source = load_source(zipped(root) if packed else root, size=8)
    assert source.name == "set"
    assert source.class_names == ("a", "b", "c")
    assert np.bincount(source.labels).tolist() == [2, 12, 1]
    assert source.images.shape == (15, 8, 8, 3)
    assert source.images.dtype == np.uint8
    # 2.png comes before 10.png
    assert [int(image[0, 0, 0]) for image in source.images[source.labels == 1]] == [10 * i for i in range(12)]
    assert [indices.tolist() for indices in source.indices_of_class()] == [[0, 1], list(range(2, 14)), [14]]


def test_a_split_is_chosen_by_argument_or_after_a_colon(tmp_path):
    root = write_tree(tmp_path / "set", {"train/a": 1, "train/b": 1, "test/c": 2, "test/d": 1})
    path = zipped(root)
    assert load_source(f"{path}:test", size=8).class_names == ("c", "d")
    assert load_source(path, split="train", size=8).class_names == ("a", "b")
    assert load_source(path, split="train", size=8).name == "set/train"
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\]; name one"):
        load_source(path)
    with pytest.raises(ValueError, match=r"split 'valid' .* its splits are \['test', 'train'\]"):
        load_source(f"{path}:valid")


def test_errors_name_the_path_and_the_image(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.zip"):
        load_source(tmp_path / "nowhere.zip")
    (tmp_path / "text.zip").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.zip is neither a folder nor a zip"):
        load_source(tmp_path / "text.zip")
    root = write_tree(tmp_path / "set", {"a": 1, "b": 1})
    (root / "b" / "0.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(ValueError, match=r"'b/0\.png'"):
        load_source(root)
    with pytest.raises(ValueError, match="has 1 class folders"):
        load_source(write_tree(tmp_path / "one", {"a": 1}))


def test_glyphs_are_repeatable_distinct_and_without_digits():
    source = draw_glyphs(images_per_class=2, size=24, seed=3)
    again = draw_glyphs(images_per_class=2, size=24, seed=3)
    assert np.array_equal(source.images, again.images)
    assert len(source.class_names) > 300
    assert len(source.images) == 2 * len(source.class_names)
    assert not {f"U+{ord(digit):04X}" for digit in "0123456789"} & set(source.class_names)
    ink = 255 - source.images.astype(float).mean(axis=(1, 2, 3))
    assert (ink > 0.2).mean() > 0.99  # nearly every picture shows something
    assert not np.array_equal(source.images[0], source.images[1])
