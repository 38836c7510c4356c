"""Layouts of the data sets on disk: each is a function from a folder and a split to the classes and their images."""

from __future__ import annotations

import importlib
import json
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.images.folders import class_folders_in, is_image_name
from fewshot_mahalanobis.images.tables import labelled_rows
from fewshot_mahalanobis.research.data.hierarchy import Hierarchy, sampling_graph
from fewshot_mahalanobis.research.data.readers import Bitmaps, ImageFiles, ImageRows, Reader, ZipMembers
from fewshot_mahalanobis.research.data.sources import class_folders


class Listing(NamedTuple):
    """The images of one split that a folder holds, not decoded.

    ``images`` has those of each class, in order, in the form that ``reader`` takes; the reader reads them class by
    class.
    """

    images: Mapping[str, Any]
    reader: Callable[[Mapping[str, Any]], Reader]


@cache
def class_split(name: str) -> dict[str, tuple[str, ...]]:
    """Meta-Dataset's split of a data set: "train", "valid" and "test" to names of classes (Omniglot: alphabets)."""
    text = (files(__package__) / "splits" / f"{name}.json").read_text(encoding="utf-8")
    return {split: tuple(names) for split, names in json.loads(text).items()}


# ImageNet's hierarchy ----------------------------------------------------------------------------------

#: File beside the class folders with WordNet's is-a relations: one line "parent child" each.
IS_A = "wordnet.is_a.txt"
IS_A_URL = "https://www.image-net.org/data/wordnet.is_a.txt"
#: Root synset of each split: Meta-Dataset validates on carnivores and tests on devices.
SPLIT_ROOTS = {"train": None, "valid": "n02075296", "test": "n03183080"}


def imagenet_hierarchy(folder: Path, split: str, class_names: Sequence[str]) -> Hierarchy | None:
    """Return the hierarchy of a split of ILSVRC-2012, from WordNet's is-a file; None without that file."""
    if not (folder / IS_A).is_file():
        return None
    graph: dict[str, set[str]] = {}
    for line in (folder / IS_A).read_text().splitlines():
        parent, child = line.split()
        graph.setdefault(parent, set()).add(child)
    splits = class_split("ilsvrc_2012")
    whole = sampling_graph(graph, chain(*splits.values()))
    return Hierarchy.subtrees(sampling_graph(whole, splits[split], SPLIT_ROOTS[split]), class_names)


# One function a layout -----------------------------------------------------------------------------------


def _names_in(folder: Path) -> list[str]:
    """Names of the image files in a folder; none if there is no such folder."""
    return sorted(entry.name for entry in folder.iterdir() if is_image_name(entry.name)) if folder.is_dir() else []


def _class_folders_in(folder: Path) -> list[Path]:
    folders, note = class_folders_in(folder)
    if note:
        warnings.warn(f"{folder}: {note}", stacklevel=2)
    return folders


def _as_files(folder: Path, images: Mapping[str, Sequence[str]], *, negative: bool = False) -> ImageFiles:
    return ImageFiles.of(folder, list(chain(*images.values())), negative=negative)


def _as_boxes(folder: Path, images: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]) -> ImageFiles:
    names, boxes = zip(*chain(*images.values()), strict=True)
    return ImageFiles.of(folder, names, boxes)


def class_folder_layout(name: str, base: str, to_folder: Callable[[str], str], folder: Path, split: str) -> Listing:
    """``<folder>/<base>/<to_folder(class)>/<image>``."""
    directories = {class_name: base + to_folder(class_name) for class_name in class_split(name)[split]}
    images = {c: [f"{d}/{file}" for file in _names_in(folder / d)] for c, d in directories.items()}
    return Listing(images, partial(_as_files, folder))


def imagenet(folder: Path, split: str) -> Listing:
    """``<synset>/<image>``, without the images that the lists of duplicates name."""
    listing = class_folder_layout("ilsvrc_2012", "", str, folder, split)
    # Meta-Dataset leaves out images that other data sets hold too; its lists have lines "<synset>/<file>  # <other>".
    duplicates = {
        line.split("#")[0].strip()
        for path in folder.glob("ImageNet_*_duplicates.txt")
        for line in path.read_text().splitlines()
    }
    return listing._replace(
        images={c: [name for name in names if name not in duplicates] for c, names in listing.images.items()}
    )


def omniglot(folder: Path, split: str) -> Listing:
    """``images_<part>/<alphabet>/<character>/<image>``; inverted to white strokes on black, as in Meta-Dataset."""
    part = "images_evaluation" if split == "test" else "images_background"
    images = {
        f"{alphabet}.{character.name}": [f"{part}/{alphabet}/{character.name}/{f}" for f in _names_in(character)]
        for alphabet in class_split("omniglot")[split]
        if (path := folder / part / alphabet).is_dir()
        for character in _class_folders_in(path)
    }
    return Listing(images, partial(_as_files, folder, negative=True))


def aircraft(folder: Path, split: str) -> Listing:
    """Path and bounding box of each image; the box also cuts off the line of text below the picture."""
    boxes = {}
    for line in (folder / "data" / "images_box.txt").read_text().splitlines():
        name, *box = line.split()
        boxes[name] = tuple(map(int, box))
    images: dict[str, list[tuple[str, tuple[int, ...]]]] = {name: [] for name in class_split("aircraft")[split]}
    for part in ("trainval", "test"):
        for line in (folder / "data" / f"images_variant_{part}.txt").read_text().splitlines():
            name, variant = line.strip().split(maxsplit=1)
            if variant in images:
                images[variant].append((f"data/images/{name}.jpg", boxes[name]))
    return Listing({name: sorted(files) for name, files in images.items()}, partial(_as_boxes, folder))


def quickdraw(folder: Path, split: str) -> Listing:
    """``<class>.npy``, an array (n, 784) of bitmaps, white strokes on black."""
    names = [name for name in class_split("quickdraw")[split] if (folder / f"{name}.npy").is_file()]
    rows = {name: range(len(np.load(folder / f"{name}.npy", mmap_mode="r"))) for name in names}
    return Listing(rows, lambda images: Bitmaps([folder / f"{n}.npy" for n in images], [*map(len, images.values())]))


def fungi(folder: Path, split: str) -> Listing:
    """Paths from the annotations of the 2018 competition, whose test set has no labels."""
    images: dict[str, list[str]] = {name: [] for name in class_split("fungi")[split]}
    for part in ("train.json", "val.json"):
        notes = json.loads((folder / part).read_text(encoding="utf-8"))
        # Two category numbers can share a species name, so the number is part of the class name.
        names = {category["id"]: f"{category['id']:04d}.{category['name']}" for category in notes["categories"]}
        paths = {image["id"]: image["file_name"] for image in notes["images"]}
        for note in notes["annotations"]:
            if names[note["category_id"]] in images:
                images[names[note["category_id"]]].append(paths[note["image_id"]])
    return Listing({name: sorted(paths) for name, paths in images.items()}, partial(_as_files, folder))


def flowers(folder: Path, split: str) -> Listing:
    """``jpg/image_<number>.jpg``; imagelabels.mat gives the class of each, both counted from 1."""
    from scipy.io import loadmat

    images: dict[str, list[str]] = {name: [] for name in class_split("vgg_flower")[split]}
    by_number = {int(name[:3]): name for name in images}
    for number, label in enumerate(loadmat(folder / "imagelabels.mat")["labels"].ravel().tolist(), start=1):
        if label in by_number:
            images[by_number[label]].append(f"jpg/image_{number:05d}.jpg")
    return Listing(images, partial(_as_files, folder))


def coco(folder: Path, split: str) -> Listing:
    """Path and box of each annotated object: one image per object, several of one picture."""
    notes = json.loads(next(folder.glob("**/instances_train2017.json")).read_text())
    images: dict[str, list[tuple[str, tuple[int, ...]]]] = {name: [] for name in class_split("mscoco")[split]}
    names = {category["id"]: category["name"] for category in notes["categories"]}
    pictures = {picture["id"]: picture for picture in notes["images"]}
    for note in notes["annotations"]:
        picture, name = pictures[note["image_id"]], names[note["category_id"]]
        box = coco_box(note["bbox"], picture["width"], picture["height"])
        if name in images and box[0] < box[2] and box[1] < box[3]:
            images[name].append((f"train2017/{picture['file_name']}", box))
    return Listing(images, partial(_as_boxes, folder))


def coco_box(box: Sequence[float], width: int, height: int) -> tuple[int, int, int, int]:
    """Crop of an object in Meta-Dataset, (left, top, right, bottom): its box enlarged 1.2 times, in whole pixels.

    ``box`` is (x, y, w, h) as annotated, where pixel centres have integer coordinates; right and bottom are one past
    the last pixel.
    """
    x, y, w, h = box
    x, y, w, h = x - 0.1 * w, y - 0.1 * h, 1.2 * w, 1.2 * h
    return (
        max(round(x - 0.5), 0),
        max(round(y - 0.5), 0),
        min(round(x + w - 0.5) + 1, width),
        min(round(y + h - 0.5) + 1, height),
    )


def torchvision_test_set(torchvision: str, folder: Path, split: str) -> Listing:
    """Rows of each class in the test set that torchvision reads."""
    try:
        data_set = torchvision_class(torchvision)(folder, train=False)
    except RuntimeError as error:  # raised by torchvision for a missing or altered file
        raise ValueError(f"{torchvision} in {folder} is incomplete or damaged: {error}") from error
    targets, data = np.asarray(data_set.targets), np.asarray(data_set.data)
    # torchvision's names of MNIST's classes are "7 - seven" and so on.
    rows = {name.split(" - ")[0]: np.flatnonzero(targets == k) for k, name in enumerate(data_set.classes)}
    return Listing(rows, lambda images: ImageRows(folder / torchvision, data, np.concatenate([*images.values()])))


def torchvision_class(name: str) -> Any:
    """Class of ``torchvision.datasets``, by its name; ImportError with the remedy if torchvision is not installed."""
    try:
        return getattr(importlib.import_module("torchvision.datasets"), name)
    except ImportError as error:
        raise ImportError(f"{name} needs torchvision: {install_command('training')}") from error


def mini_imagenet(folder: Path, split: str) -> Listing:
    """Class folders or a zip of them, the lists of Ravi & Larochelle (2017), or the arrays of Ren et al. (2018)."""
    short = "val" if split == "valid" else split
    if (table := folder / f"{short}.csv").is_file():
        images: dict[str, list[str]] = {}
        for name, label in labelled_rows(table, "filename", "label"):
            images.setdefault(label, []).append(f"images/{name}")
        return Listing(images, partial(_as_files, folder))
    if (array := folder / f"mini-imagenet-cache-{short}.pkl").is_file():
        held = _unpickle(array)
        rows = {name: np.asarray(indices) for name, indices in held["class_dict"].items()}
        return Listing(rows, lambda i: ImageRows(array, held["image_data"], np.concatenate([*i.values()])))
    return _split_folders("mini_imagenet", folder, split)


def tiered_imagenet(folder: Path, split: str) -> Listing:
    """Class folders or a zip of them, or the encoded images of Ren et al. (2018)."""
    short = "val" if split == "valid" else split
    if (encoded := folder / f"{short}_images_png.pkl").is_file():
        data, labels = _unpickle(encoded), _unpickle(folder / f"{short}_labels.pkl")
        numbers = np.asarray(labels["label_specific"])
        rows = {str(n): np.flatnonzero(numbers == k) for k, n in enumerate(labels["label_specific_str"])}
        return Listing(rows, lambda images: ImageRows(encoded, list(data), np.concatenate([*images.values()])))
    return _split_folders("tiered_imagenet", folder, split)


def _split_folders(name: str, folder: Path, split: str) -> Listing:
    """``<split>/<class>/<image>`` or ``<name>_<split>.zip`` with such members; "valid" may be "val"."""
    for part in ("valid", "val") if split == "valid" else (split,):
        if (folder / part).is_dir():
            images = {c.name: [f"{c.name}/{f}" for f in _names_in(c)] for c in _class_folders_in(folder / part)}
            return Listing(images, partial(_as_files, folder / part))
        if (archive := folder / f"{name}_{part}.zip").is_file():
            members = next(iter(class_folders(archive)[0].values()), {})
            return Listing(members, lambda images: ZipMembers(archive, list(chain(*images.values()))))
    return Listing({}, partial(_as_files, folder))


class _ArraysOnly(pickle.Unpickler):
    """Unpickles only numbers, strings, lists, dicts and NumPy arrays: other pickles can run arbitrary code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module.startswith("numpy."):
            return np.empty(0).__reduce__()[0]
        if name == "scalar" and module.startswith("numpy."):
            return np.int64(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes the bytes of an array for Python 2
            return str.encode
        raise pickle.UnpicklingError(f"it holds {module}.{name}, where only arrays are expected")


def _unpickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="latin1").load()  # Python 2 wrote the published files
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
