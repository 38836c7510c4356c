"""Images and collections of other libraries: bytes, opened files, columns of tables, datasets of pairs."""

from __future__ import annotations

import base64
import io
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, random_split

from fewshot_mahalanobis import Region, SimpleCNAPSClassifier
from fewshot_mahalanobis.images.collection import labelled_pairs
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from tests.tiny import tiny_classifier, tiny_model

SIZE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with three noisy JPEGs each, of different sizes."""
    root, rng = tmp_path_factory.mktemp("folder"), np.random.default_rng(0)
    for label, colour in (("dusk", 60), ("noon", 190)):
        (root / label).mkdir()
        for number in range(3):
            pixels = rng.integers(colour - 50, colour + 50, (40 + 9 * number, 60, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(root / label / f"{number}.jpg")
    return root


@pytest.fixture(scope="module")
def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.jpg"))


def tensor_of(images: Any, **settings: Any) -> torch.Tensor:
    return torch.cat(list(ImageBatches(images, SIZE, **settings)))


class Items:
    """A sequence that has a length and ``[]``, and no more."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.items[index]


def test_bytes_and_opened_files_are_the_same_as_paths(paths: list[Path]) -> None:
    expected = tensor_of(paths)
    contents = [path.read_bytes() for path in paths]
    assert torch.equal(tensor_of(contents), expected)
    assert torch.equal(tensor_of([bytearray(data) for data in contents]), expected)
    buffers = [io.BytesIO(data) for data in contents]
    buffers[0].seek(7)
    assert torch.equal(tensor_of(buffers), expected)
    assert buffers[0].tell() == 7
    assert torch.equal(tensor_of(np.array(contents, dtype=object)), expected)
    opened = [path.open("rb") for path in paths]
    assert torch.equal(tensor_of(opened), expected)
    assert torch.equal(tensor_of([opened[0]] * 20, n_jobs=4), expected[:1].expand(20, -1, -1, -1))
    for file in opened:
        file.close()
    with pytest.raises(ImageError, match=r"image 1 .*its file is closed"):
        ImageBatches([paths[0], opened[0]], SIZE)
    with paths[0].open(encoding="latin-1") as text, pytest.raises(ImageError, match="opened as text"):
        ImageBatches([text], SIZE)


def test_any_sequence_is_read_once_and_little_by_little(paths: list[Path]) -> None:
    items = Items([path.read_bytes() for path in paths])
    iterator = iter(ImageBatches(items, SIZE, batch_size=1, ahead=False))
    next(iterator)
    assert items.asked == [0]
    assert torch.equal(tensor_of(items), tensor_of(paths))
    assert sorted(items.asked) == [0, 0, 1, 2, 3, 4, 5]


def test_a_warning_of_an_item_does_not_read_it_again(paths: list[Path]) -> None:
    buffer = io.BytesIO()
    Image.open(paths[0]).save(buffer, "JPEG", icc_profile=b"junk" * 99)
    items = Items([paths[0].read_bytes(), buffer.getvalue()])
    with pytest.warns(UserWarning, match=r"image 1 \(bytes\): its colour profile is damaged"):
        tensor_of(items)
    assert sorted(items.asked) == [0, 1]


def test_columns_of_polars_and_pyarrow_are_collections(paths: list[Path]) -> None:
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    names, contents, expected = [str(path) for path in paths], [path.read_bytes() for path in paths], tensor_of(paths)
    frame = polars.DataFrame({"path": names, "bytes": contents})
    table = arrow.table({"path": names, "bytes": contents})
    for column in (frame["path"], frame["bytes"], table["path"], table["bytes"], arrow.array(names)):
        assert torch.equal(tensor_of(column), expected)


def test_a_column_of_hugging_face_datasets_is_a_collection(paths: list[Path]) -> None:
    datasets = pytest.importorskip("datasets")
    labels = [path.parent.name for path in paths]
    dataset = datasets.Dataset.from_dict({"image": [str(path) for path in paths], "label": labels})
    dataset = dataset.cast_column("image", datasets.Image())
    assert torch.equal(tensor_of(dataset["image"]), tensor_of(paths))
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(dataset["image"], dataset["label"])
    reference = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(paths, labels)
    assert (classifier.predict_proba(dataset["image"]) == reference.predict_proba(paths)).all()
    with pytest.raises(ImageError, match=r"a row of a table \('image', 'label'\).*dataset\['image'\]"):
        classifier.predict(dataset)


def test_an_image_folder_is_fitted_without_labels_and_decoded_once(folder: Path, paths: list[Path]) -> None:
    torchvision = pytest.importorskip("torchvision")
    opened = list[str]()

    def load(path: str) -> Image.Image:
        opened.append(path)
        return torchvision.datasets.folder.pil_loader(path)

    dataset = torchvision.datasets.ImageFolder(folder, loader=load)
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(dataset)
    assert sorted(opened) == [str(path) for path in paths]
    reference = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(paths, [path.parent.name for path in paths])
    assert classifier.classes_.tolist() == ["dusk", "noon"]
    assert (classifier.predict_proba(paths) == reference.predict_proba(paths)).all()
    with pytest.raises(ImageError, match=r"a pair of an image and its label.*dataset.samples"):
        classifier.predict(dataset)


def test_a_dataset_of_pairs_without_targets_is_read_for_its_labels(paths: list[Path]) -> None:
    dataset = Items([(path, int(path.parent.name == "noon")) for path in paths])
    dataset.classes = ["dusk", "noon"]  # type: ignore[attr-defined]
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(dataset)
    assert classifier.class_counts_.tolist() == [3, 3]
    with pytest.raises(ValueError, match="y is None"):
        SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(paths)


def labels_of(dataset: Any) -> list[Any]:
    found = labelled_pairs(dataset)
    assert found is not None
    images, labels = found
    assert len(images) == len(labels) == len(dataset)
    return labels


def test_the_pairs_of_an_image_folder_count_and_not_its_targets(folder: Path) -> None:
    torchvision = pytest.importorskip("torchvision")

    def other(code: int) -> int:
        return 1 - code

    shuffled, stale, shortened = (torchvision.datasets.ImageFolder(folder) for _ in range(3))
    shuffled.samples = shuffled.samples[::2] + shuffled.samples[1::2]
    stale.targets = [0] * 6
    shortened.samples = shortened.samples[2:]
    swapped = torchvision.datasets.ImageFolder(folder, target_transform=other)
    named = torchvision.datasets.ImageFolder(folder, target_transform=["night", "day"].__getitem__)
    for dataset in (shuffled, stale, shortened, swapped):
        assert labels_of(dataset) == [dataset.classes[dataset[index][1]] for index in range(len(dataset))]
    assert labels_of(named) == ["night"] * 3 + ["day"] * 3
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(shuffled)
    assert classifier.fitted_head_.support_labels.tolist() == ["dusk", "dusk", "noon", "dusk", "noon", "noon"]


def test_an_image_folder_whose_pairs_are_not_its_samples_is_refused(folder: Path) -> None:
    torchvision = pytest.importorskip("torchvision")

    class Reversed(torchvision.datasets.ImageFolder):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(len(self) - 1 - index)

    with pytest.raises(ImageError, match=r"image 0 .*its label was 'dusk' and is 'noon'.*pass images and labels apart"):
        SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(Reversed(folder))


def test_a_subset_has_the_classes_of_its_dataset_and_is_decoded_once(folder: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    opened = list[str]()

    def load(path: str) -> Image.Image:
        opened.append(path)
        return torchvision.datasets.folder.pil_loader(path)

    whole = torchvision.datasets.ImageFolder(folder, loader=load)
    part = Subset(whole, [5, 0, 4, 1])
    assert labels_of(part) == ["noon", "dusk", "noon", "dusk"]
    assert labels_of(Subset(part, [1, 0])) == ["dusk", "noon"]
    assert labels_of(Subset(part, torch.tensor([2, 3]))) == ["noon", "dusk"]
    random, _ = random_split(whole, [4, 2], torch.Generator().manual_seed(0))
    assert labels_of(random) == [whole.classes[whole.samples[index][1]] for index in random.indices]
    assert not opened
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(part)
    assert sorted(opened) == sorted(whole.samples[index][0] for index in (0, 1, 4, 5))
    assert classifier.class_counts_.tolist() == [2, 2]


def test_a_subset_of_any_dataset_with_classes_is_read_for_its_labels(paths: list[Path]) -> None:
    dataset = Items([(path, torch.tensor(int(path.parent.name == "noon"))) for path in paths])
    dataset.classes = ["dusk", "noon"]  # type: ignore[attr-defined]
    assert labels_of(Subset(dataset, [3, 0])) == ["noon", "dusk"]  # type: ignore[arg-type]
    assert labelled_pairs(Subset(Items(paths), [0])) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [2, -1, 0.5, float("nan"), [0, 1], None])
def test_a_pair_whose_label_is_no_index_of_the_classes_is_named(target: Any, paths: list[Path]) -> None:
    dataset = Items([(paths[0], 0), (paths[1], target)])
    dataset.classes = ["dusk", "noon"]  # type: ignore[attr-defined]
    with pytest.raises(
        ImageError, match=r"image 1 \(of Items\): .* is no index of the 2 classes.*fit\(images, labels\)"
    ):
        SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(dataset)


def test_a_pair_whose_label_changes_between_two_readings_is_named(paths: list[Path]) -> None:
    class Moody(Items):
        classes = ("dusk", "noon")

        def __getitem__(self, index: int) -> Any:
            self.asked.append(index)
            return self.items[index], len(self.asked) > len(self) if index == 3 else index % 2

    with pytest.raises(ImageError, match=r"image 3 \(of Moody\): .*its label was 'dusk' and is 'noon'"):
        SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(Moody(paths))


def test_an_item_that_its_collection_cannot_give_is_named_and_may_be_left_out(folder: Path, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    shutil.copytree(folder, tmp_path / "photos")
    for number, contents in enumerate((b"", b"no picture", (folder / "dusk" / "0.jpg").read_bytes()[:300])):
        bad = tmp_path / "photos" / "dusk" / f"{number}.jpg"
        good = bad.read_bytes()
        bad.write_bytes(contents)
        dataset = torchvision.datasets.ImageFolder(tmp_path / "photos")
        for collection, index in ((dataset, number), (Subset(dataset, [5, 4, number]), 2)):
            with pytest.raises(ImageError, match=rf"image {index} \('.*dusk.{number}\.jpg'\): \w+ raised \w+Error"):
                SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(collection)
        images, _ = labelled_pairs(dataset) or ([], [])
        problems = list[ImageError]()
        assert len(tensor_of(images, on_error=problems.append)) == 5
        assert [problem.index for problem in problems] == [number]
        bad.write_bytes(good)


@pytest.mark.parametrize("error", [KeyError("key"), OSError("lost"), StopIteration(), ZeroDivisionError()])
def test_any_sequence_that_fails_at_an_item_is_named_and_the_item_may_be_left_out(
    error: Exception, paths: list[Path]
) -> None:
    class Failing(Items):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise error
            return self.items[index]

    with pytest.raises(ImageError, match=rf"image 2 \(of Failing\): Failing raised {type(error).__name__}"):
        tensor_of(Failing(paths))
    problems = list[ImageError]()
    assert torch.equal(tensor_of(Failing(paths), on_error=problems.append, n_jobs=3), tensor_of(paths[:2] + paths[3:]))
    assert [problem.index for problem in problems] == [2]


def test_an_image_that_was_closed_is_called_closed(paths: list[Path]) -> None:
    unread, read = Image.open(paths[0]), Image.open(paths[0])
    read.load()
    for image in (unread, read):
        image.close()
        with pytest.raises(ImageError, match=r"image 0 .*closed before its pixels were read: pass its path"):
            tensor_of([image])


def test_the_device_meta_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'meta' computes nothing"):
        tiny_classifier().set_params(device="meta").fit([np.zeros((8, 8))] * 2, [0, 1])


class Spooled:
    """Has what a SpooledTemporaryFile has in Python 3.10, where it does not say that it can seek."""

    def __init__(self, data: Any) -> None:
        self.data, self.place, self.closed = data, 0, False

    def read(self, size: int = -1) -> Any:
        start, self.place = self.place, len(self.data) if size < 0 else self.place + size
        return self.data[start : self.place]

    def seek(self, place: int, whence: int = 0) -> None:
        self.place = place

    def tell(self) -> int:
        return self.place


class Upload:
    """Reads as the uploads of FastAPI and Starlette do."""

    def __init__(self, file: Any) -> None:
        self.file = file

    async def read(self, size: int = -1) -> bytes:
        return self.file.read(size)

    async def seek(self, offset: int) -> None:
        self.file.seek(offset)


def test_uploads_are_read_or_refused_by_name(paths: list[Path]) -> None:
    data, expected = paths[0].read_bytes(), tensor_of(paths[:1])
    file = Spooled(data)
    file.seek(5)
    assert torch.equal(tensor_of([file]), expected)
    assert file.tell() == 5
    with tempfile.SpooledTemporaryFile(max_size=10) as rolled:  # on the disk by now
        rolled.write(data)
        assert torch.equal(tensor_of([rolled]), expected)
    uploads = [Upload(file)]
    with suppress(ImportError):
        from starlette.datastructures import UploadFile

        uploads.append(UploadFile(io.BytesIO(data), filename="a.jpg"))
    for upload in uploads:
        assert torch.equal(tensor_of([upload.file]), expected)
        with pytest.raises(ImageError, match=r"image 1 \(Upload.*asynchronously: pass upload.file"):
            tensor_of([paths[0], upload])
    with pytest.raises(ImageError, match=r"image 0 \(Spooled\): it is a file opened as text"):
        tensor_of([Spooled("text")])


def test_a_column_of_encoded_images_is_a_collection(paths: list[Path]) -> None:
    pandas, polars, arrow = map(pytest.importorskip, ("pandas", "polars", "pyarrow"))
    expected = tensor_of(paths)
    both = [{"bytes": path.read_bytes(), "path": "elsewhere.jpg"} for path in paths]
    here = [{"bytes": None, "path": str(path)} for path in paths]
    for column in (
        both,
        here,
        [{"bytes": path.read_bytes()} for path in paths],
        pandas.DataFrame({"image": both})["image"],
        pandas.DataFrame({"image": np.array(here, dtype=object)}, index=range(9, 15))["image"].to_numpy(),
        pandas.Series(arrow.array(both).to_pandas(types_mapper=pandas.ArrowDtype)),
        polars.DataFrame({"image": both})["image"],
        polars.Series(here),
        arrow.table({"image": both})["image"],
        arrow.array(here),
        [{"bytes": both[0]["bytes"]}, *paths[1:]],
    ):
        assert torch.equal(tensor_of(column), expected)
    with pytest.raises(ImageError, match=r"image 1 \('gone.jpg'\): no such file"):
        tensor_of([both[0], {"bytes": None, "path": "gone.jpg"}])
    with pytest.raises(ImageError, match=r"image 0 .*neither bytes nor a path"):
        tensor_of([{"bytes": None, "path": None}])
    with pytest.raises(ImageError, match=r"single image \('elsewhere.jpg'\): wrap it in a list"):
        tensor_of(both[0])
    box = Region(both[0], (1, 2, 30, 30))
    assert torch.equal(tensor_of([box]), tensor_of([Region(paths[0], (1, 2, 30, 30))]))


def test_a_table_in_place_of_its_column_gets_the_column_to_pass(paths: list[Path]) -> None:
    pandas, polars, arrow = map(pytest.importorskip, ("pandas", "polars", "pyarrow"))
    rows = {"label": ["a"] * len(paths), "path": [str(path) for path in paths]}
    for table in (pandas.DataFrame(rows), polars.DataFrame(rows), arrow.table(rows)):
        with pytest.raises(ImageError, match=r"a table with the columns 'label', 'path'.*df\['path'\]"):
            tensor_of(table)
    with pytest.raises(ImageError, match=r"columns 'where': .*df\['where'\]"):
        tensor_of(pandas.DataFrame({"where": rows["path"]})[["where"]])
    with pytest.raises(ImageError, match=r"shape \(6, 1\).*pass one column"):
        tensor_of(pandas.DataFrame(rows)[["path"]].to_numpy())


@pytest.mark.parametrize("prefix", ["", "data:image/jpeg;base64,"])
@pytest.mark.parametrize("length", [150, None])
def test_a_picture_in_base64_is_not_repeated_in_the_message(prefix: str, length: int | None, paths: list[Path]) -> None:
    text = prefix + base64.b64encode(paths[0].read_bytes()).decode()[:length]
    items: list[Any] = [text, {"bytes": None, "path": text}, Region(text, (0, 0, 5, 5))]
    for item in items:
        with pytest.raises(ImageError, match=r"an image in base64, not a path: pass its bytes") as error:
            tensor_of([item])
        assert len(str(error.value)) < 700


def test_an_item_whose_error_repeats_it_is_named_shortly() -> None:
    class Broken(Items):
        def __getitem__(self, index: int) -> Any:
            raise ValueError(f"cannot read {'x' * 100_000}")

    with pytest.raises(ImageError, match="Broken raised ValueError: cannot read xxx") as error:
        tensor_of(Broken([0]))
    assert len(str(error.value)) < 1000
