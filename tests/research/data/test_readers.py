import pickle
import zipfile

import numpy as np
import pytest
from PIL import Image

from fewshot_mahalanobis.images.memory import PictureMemory
from fewshot_mahalanobis.research.data.readers import Bitmaps, ImageFiles, LazyImages
from fewshot_mahalanobis.research.data.sources import load_source


@pytest.fixture
def zipped(tmp_path):
    """Two classes of three images, each of another grey."""
    path = tmp_path / "greys.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for k, name in enumerate("ab"):
            for i in range(3):
                Image.new("L", (7, 5), 100 * k + 20 * i).save(tmp_path / "one.png")
                archive.write(tmp_path / "one.png", f"{name}/{i}.png")
    return path


@pytest.mark.parametrize("workers", [1, 3])
def test_lazy_images_index_like_the_array_they_stand_for(zipped, workers):
    images = load_source(zipped, size=6, workers=workers, lazy=True).images
    array = load_source(zipped, size=6).images
    assert isinstance(images, LazyImages)
    assert len(images) == len(array)
    assert images.shape == array.shape
    mask = np.array([True, False, True, False, False, True])
    for index in (2, -1, np.int64(4), slice(None), slice(1, 5, 2), slice(3, 0, -1), [3, 0, 3], np.array([-2]), mask):
        assert np.array_equal(images[index], array[index])
    assert images[[]].shape == (0, 6, 6, 3)
    with pytest.raises(IndexError, match="image 6 of 6"):
        images[6]


def test_a_source_that_crossed_to_another_process_reads_on(zipped):
    source = load_source(zipped, size=6, lazy=True)
    before = source.network_input(np.array([1, 4]))  # opens the zip
    again = pickle.loads(pickle.dumps(source))
    assert (again.network_input(np.array([1, 4])) == before).all()


def test_a_forked_process_does_not_share_the_zip_s_position(zipped, monkeypatch):
    source = load_source(zipped, size=6, lazy=True)
    assert isinstance(source.images, LazyImages)
    first = source.images[0]
    reader = source.images.reader
    here = reader._opened[1]
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert np.array_equal(source.images[0], first)
    assert reader._opened[1] is not here


def test_errors_name_the_image(tmp_path, zipped):
    (tmp_path / "torn.png").write_bytes(b"\x89PNG torn")
    files = LazyImages(ImageFiles.of(tmp_path, ["torn.png", "absent.png"]), 4)
    with pytest.raises(ValueError, match=r"cannot read image 'torn\.png' of "):
        files[0]
    with pytest.raises(ValueError, match=r"cannot read image 'absent\.png' of "):
        files[1]
    content = bytearray(zipped.read_bytes())
    content[40:80] = bytes(40)  # inside the first member
    zipped.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read image 'a/0\.png' of .*greys\.zip"):
        load_source(zipped, size=4)


def test_bitmaps_of_several_files_follow_each_other(tmp_path):
    arrays = [np.arange(2 * 9, dtype=np.uint8).reshape(2, 9), np.ones((3, 9), bool)]
    paths = [tmp_path / f"{i}.npy" for i in range(2)]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    images = LazyImages(pickle.loads(pickle.dumps(Bitmaps(paths, [2, 3]))), 3)
    assert len(images) == 5
    assert images[1][..., 0].tolist() == arrays[0][1].reshape(3, 3).tolist()
    assert (images[2:] == 255).all()
    (tmp_path / "1.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"cannot read image row 2 of .*1\.npy"):
        LazyImages(Bitmaps(paths, [2, 3]), 3)[4]


def test_remembered_images_differ_by_crop_colours_and_size(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    memory = PictureMemory(tmp_path / "memory")
    boxes = [None, [(0, 0, 20, 20)], [(5, 5, 25, 25)]]
    readers = [ImageFiles.of(tmp_path, ["a.png"], box, negative) for box in boxes for negative in (False, True)]
    for _ in range(2):
        found = [LazyImages(reader, size, memory=memory)[0] for reader in readers for size in (16, 20)]
        expected = [LazyImages(reader, size)[0] for reader in readers for size in (16, 20)]
        assert all(map(np.array_equal, found, expected))
    assert memory.contents().pictures == 12


def test_what_was_noticed_of_a_remembered_image_is_said_again(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png", icc_profile=b"no profile")
    memory = PictureMemory(tmp_path / "memory")
    for _ in range(2):
        with pytest.warns(UserWarning, match="colour profile"):
            LazyImages(ImageFiles.of(tmp_path, ["a.png"]), 16, memory=memory)[0]
    assert memory.contents().pictures == 1


def test_a_zip_s_images_are_remembered_by_their_bytes(zipped, tmp_path):
    memory = PictureMemory(tmp_path / "memory")
    expected = load_source(zipped, size=6).images
    source = load_source(zipped, size=6, lazy=True).remembering(memory)
    assert np.array_equal(source.in_memory().images, expected)
    assert memory.contents().pictures == len(expected)
    zipped.rename(tmp_path / "renamed.zip")
    again = load_source(tmp_path / "renamed.zip", size=6, lazy=True).remembering(memory)
    assert np.array_equal(again.in_memory().images, expected)
    assert memory.contents().pictures == len(expected)
