"""The thirteen data sets of the paper, and mini- and tieredImageNet, as their authors give them out.

Each lies in a folder of its own below one root; ``docs/data.md`` shows the layouts. Classes are split as
Meta-Dataset splits them (Triantafillou et al., ICLR 2020, appendix 3; the splits are data of this package).
MNIST, CIFAR10 and CIFAR100 are for testing alone, with the images of their test sets (Requeima et al., CNAPS,
NeurIPS 2019). Images are cut and inverted as Meta-Dataset does it.
"""

from __future__ import annotations

import csv
import importlib
import json
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fewshot_mahalanobis.data.hierarchy import Hierarchy, sampling_graph
from fewshot_mahalanobis.data.readers import Bitmaps, ImageFiles, ImageRows, LazyImages, Reader, ZipMembers
from fewshot_mahalanobis.data.sources import ImageSource, class_folders, is_image, load_source


class Listing(NamedTuple):
    """What a folder holds of one split. Nothing is decoded yet.

    Attributes
    ----------
    images : mapping of str to sequence or array
        Class to its images, in order, in whatever form ``reader`` takes them.
    reader : callable
        Such a mapping -> reader of its images, class after class.
    """

    images: Mapping[str, Any]
    reader: Callable[[Mapping[str, Any]], Reader]


@dataclass(frozen=True)
class DataSet:
    """What is known of one data set.

    Attributes
    ----------
    name, title : str
        As in ``omniglot:train``, and as papers write it.
    places : tuple of (str, str)
        Where it may lie below the root: a folder, and a glob pattern for what tells it by its contents.
    splits : dict of str to (int, int)
        The splits that it has: number of classes and of images.
    list_split : callable
        (folder, split) -> :class:`Listing`.
    how_to_get : str
    torchvision : str
        Name of the class of ``torchvision.datasets`` that downloads it, or "".
    """

    name: str
    title: str
    places: tuple[tuple[str, str], ...]
    splits: Mapping[str, tuple[int, int]]
    list_split: Callable[[Path, str], Listing]
    how_to_get: str
    torchvision: str = ""

    def find(self, root: str | Path) -> Path | None:
        """The data set's folder below ``root``, if it is there."""
        for folder, contents in self.places:
            if next((Path(root) / folder).glob(contents), None) is not None:
                return Path(root) / folder
        return None


def open_source(source: str, *, root: str | Path | None = None, size: int = 84, workers: int = 1) -> ImageSource:
    """Open an image source by path or by name. Nothing is decoded; ``.in_memory()`` of the result does that.

    Parameters
    ----------
    source : str
        ``<name>:<split>`` of a data set in :data:`DATA_SETS`, where ``root`` is given; else a path, as
        :func:`load_source` takes it.
    root : path, optional
        Folder of the named data sets.
    size : int
        Side of the square that every image is resized to, in pixels.
    workers : int
        Threads that decode when several images are asked for at once.

    Raises
    ------
    FileNotFoundError
        The path does not exist, or the data set is not below ``root``; the message says how to get it.
    ValueError
        The data set has no such split, or fewer than two of its classes are there.

    Warns
    -----
    UserWarning
        Episodes will differ from Meta-Dataset's: classes are missing, or ImageNet's hierarchy is.
    """
    name, _, split = source.partition(":")
    if root is None or name not in DATA_SETS:
        return load_source(source, size=size, workers=workers, lazy=True)
    data_set = DATA_SETS[name]
    if split not in data_set.splits:
        raise ValueError(f"{name} has {' and '.join(data_set.splits)}, not {split!r}: write {name}:<split>")
    folder = data_set.find(root)
    if folder is None:
        places = ", ".join(dict.fromkeys(f"{place}/" for place, _ in data_set.places))
        raise FileNotFoundError(f"no {data_set.title} below {root} (looked in {places}). {data_set.how_to_get}")
    listing = data_set.list_split(folder, split)
    images = {class_name: found for class_name, found in sorted(listing.images.items()) if len(found)}
    there = f"{source}: {folder} holds images of {len(images)} of its {data_set.splits[split][0]} classes"
    if len(images) < 2:
        raise ValueError(f"{there}, and at least 2 are needed. {data_set.how_to_get}")
    if len(images) < data_set.splits[split][0]:
        warnings.warn(f"{there}, so episodes differ from those of the full data set", stacklevel=2)
    hierarchy = None
    if name == "omniglot":
        hierarchy = Hierarchy.alphabets(tuple(images))
    elif name == "ilsvrc_2012":
        hierarchy = imagenet_hierarchy(folder, split, tuple(images))
        if hierarchy is None:
            warnings.warn(
                f"{source}: without {folder / IS_A} classes are drawn without regard to ImageNet's hierarchy, so "
                f"episodes differ from Meta-Dataset's; get it from {IS_A_URL}",
                stacklevel=2,
            )
    return ImageSource(
        f"{name}/{split}",
        LazyImages(listing.reader(images), size, workers),
        np.repeat(np.arange(len(images)), [len(found) for found in images.values()]),
        tuple(images),
        hierarchy,
    )


def download(name: str, root: str | Path) -> None:
    """Download a data set with torchvision, to where it is looked for below ``root``.

    Raises
    ------
    ValueError
        There is no such data set, or torchvision has no download of it; the message says how to get it.
    ImportError
        torchvision is not installed.
    OSError
        The download failed.
    """
    if name not in DATA_SETS:
        raise ValueError(f"no data set {name!r}; there are {', '.join(DATA_SETS)}")
    if not DATA_SETS[name].torchvision:
        raise ValueError(f"torchvision does not download {DATA_SETS[name].title}. {DATA_SETS[name].how_to_get}")
    data_set = _torchvision(DATA_SETS[name].torchvision)
    if name == "omniglot":
        parts: list[dict[str, Any]] = [{"background": True}, {"background": False}]
    else:
        parts = [{"train": False} if name in TEST_ONLY else {}]
    try:
        for part in parts:
            data_set(root, **part, download=True)
    except RuntimeError as error:  # torchvision's form of a failed download
        raise OSError(f"{DATA_SETS[name].title} could not be downloaded: {error}") from error


@cache
def class_split(name: str) -> dict[str, tuple[str, ...]]:
    """Meta-Dataset's split of the classes of one of its data sets (of Omniglot: of the alphabets).

    Returns
    -------
    dict of str to tuple of str
        "train", "valid" and "test" to class names.
    """
    text = (files(__package__) / "splits" / f"{name}.json").read_text(encoding="utf-8")
    return {split: tuple(names) for split, names in json.loads(text).items()}


# ImageNet's hierarchy ----------------------------------------------------------------------------------

#: WordNet's is-a relations, one "parent child" a line, beside the class folders.
IS_A = "wordnet.is_a.txt"
IS_A_URL = "https://www.image-net.org/data/wordnet.is_a.txt"
#: Meta-Dataset validates on the carnivores and tests on the devices.
SPLIT_ROOTS = {"train": None, "valid": "n02075296", "test": "n03183080"}


def imagenet_hierarchy(folder: Path, split: str, class_names: Sequence[str]) -> Hierarchy | None:
    """The hierarchy of a split of ILSVRC-2012 from WordNet's is-a file, or None where there is no such file."""
    if not (folder / IS_A).is_file():
        return None
    graph: dict[str, set[str]] = {}
    for line in (folder / IS_A).read_text().splitlines():
        parent, child = line.split()
        graph.setdefault(parent, set()).add(child)
    splits = class_split("ilsvrc_2012")
    whole = sampling_graph(graph, chain(*splits.values()))
    return Hierarchy.subtrees(sampling_graph(whole, splits[split], SPLIT_ROOTS[split]), class_names)


# What a folder holds, one function a layout --------------------------------------------------------------


def _names_in(folder: Path) -> list[str]:
    """Image files of one folder, none where it does not exist."""
    return sorted(entry.name for entry in folder.iterdir() if is_image(entry.name)) if folder.is_dir() else []


def _as_files(folder: Path, images: Mapping[str, Sequence[str]], *, negative: bool = False) -> ImageFiles:
    return ImageFiles.of(folder, list(chain(*images.values())), negative=negative)


def _as_boxes(folder: Path, images: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]) -> ImageFiles:
    names, boxes = zip(*chain(*images.values()), strict=True)
    return ImageFiles.of(folder, names, boxes)


def _folder_a_class(name: str, base: str, to_folder: Callable[[str], str], folder: Path, split: str) -> Listing:
    """``<folder>/<base>/<to_folder(class)>/<image>``."""
    directories = {class_name: base + to_folder(class_name) for class_name in class_split(name)[split]}
    images = {c: [f"{d}/{file}" for file in _names_in(folder / d)] for c, d in directories.items()}
    return Listing(images, partial(_as_files, folder))


def _imagenet(folder: Path, split: str) -> Listing:
    listing = _folder_a_class("ilsvrc_2012", "", str, folder, split)
    # Meta-Dataset leaves out what other data sets hold too; its lists have lines "<synset>/<file>  # <the other>".
    duplicates = {
        line.split("#")[0].strip()
        for path in folder.glob("ImageNet_*_duplicates.txt")
        for line in path.read_text().splitlines()
    }
    return listing._replace(
        images={c: [name for name in names if name not in duplicates] for c, names in listing.images.items()}
    )


def _omniglot(folder: Path, split: str) -> Listing:
    """``images_<part>/<alphabet>/<character>/<image>``; Meta-Dataset shows the strokes white on black."""
    part = "images_evaluation" if split == "test" else "images_background"
    images = {
        f"{alphabet}.{character.name}": [f"{part}/{alphabet}/{character.name}/{f}" for f in _names_in(character)]
        for alphabet in class_split("omniglot")[split]
        if (path := folder / part / alphabet).is_dir()
        for character in path.iterdir()
    }
    return Listing(images, partial(_as_files, folder, negative=True))


def _aircraft(folder: Path, split: str) -> Listing:
    """Path and box of each image of a variant. The box also cuts off the line of text below the picture."""
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
    return Listing({name: sorted(found) for name, found in images.items()}, partial(_as_boxes, folder))


def _quickdraw(folder: Path, split: str) -> Listing:
    """``<class>.npy``, an array (n, 784) of bitmaps each; strokes are white on black."""
    names = [name for name in class_split("quickdraw")[split] if (folder / f"{name}.npy").is_file()]
    rows = {name: range(len(np.load(folder / f"{name}.npy", mmap_mode="r"))) for name in names}
    return Listing(rows, lambda images: Bitmaps([folder / f"{n}.npy" for n in images], [*map(len, images.values())]))


def _fungi(folder: Path, split: str) -> Listing:
    """Paths from the annotations of 2018's competition; its test set has no labels."""
    images: dict[str, list[str]] = {name: [] for name in class_split("fungi")[split]}
    for part in ("train.json", "val.json"):
        notes = json.loads((folder / part).read_text(encoding="utf-8"))
        # Some species of two numbers have one name, so the number belongs to the class name.
        names = {category["id"]: f"{category['id']:04d}.{category['name']}" for category in notes["categories"]}
        paths = {image["id"]: image["file_name"] for image in notes["images"]}
        for note in notes["annotations"]:
            if names[note["category_id"]] in images:
                images[names[note["category_id"]]].append(paths[note["image_id"]])
    return Listing({name: sorted(paths) for name, paths in images.items()}, partial(_as_files, folder))


def _flowers(folder: Path, split: str) -> Listing:
    """``jpg/image_<number>.jpg``; the labels' file has the class, from 1, of each number, from 1."""
    from scipy.io import loadmat

    images: dict[str, list[str]] = {name: [] for name in class_split("vgg_flower")[split]}
    by_number = {int(name[:3]): name for name in images}
    for number, label in enumerate(loadmat(folder / "imagelabels.mat")["labels"].ravel().tolist(), start=1):
        if label in by_number:
            images[by_number[label]].append(f"jpg/image_{number:05d}.jpg")
    return Listing(images, partial(_as_files, folder))


def _coco(folder: Path, split: str) -> Listing:
    """Path and box of each annotated object; a picture counts once for every object in it."""
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
    """What Meta-Dataset cuts out for an object: its box made 1.2 times as large, in whole pixels.

    Parameters
    ----------
    box : (x, y, w, h)
        As annotated: pixel centres have whole coordinates.
    width, height : int
        Of the picture.

    Returns
    -------
    (int, int, int, int)
        Left, top, right and bottom; the latter two are one beyond the last pixel.
    """
    x, y, w, h = box
    x, y, w, h = x - 0.1 * w, y - 0.1 * h, 1.2 * w, 1.2 * h
    return (
        max(round(x - 0.5), 0),
        max(round(y - 0.5), 0),
        min(round(x + w - 0.5) + 1, width),
        min(round(y + h - 0.5) + 1, height),
    )


#: Data sets of which only the test images are used, all classes of them.
TEST_ONLY = ("mnist", "cifar10", "cifar100")


def _test_images(torchvision: str, folder: Path, split: str) -> Listing:
    """The rows of each class in torchvision's array of the test set."""
    try:
        data_set = _torchvision(torchvision)(folder, train=False)
    except RuntimeError as error:  # what it says of a missing or altered file
        raise ValueError(f"{torchvision} in {folder} is incomplete or damaged: {error}") from error
    targets, data = np.asarray(data_set.targets), np.asarray(data_set.data)
    # torchvision calls MNIST's classes "7 - seven" and so on.
    rows = {name.split(" - ")[0]: np.flatnonzero(targets == k) for k, name in enumerate(data_set.classes)}
    return Listing(rows, lambda images: ImageRows(folder / torchvision, data, np.concatenate([*images.values()])))


def _torchvision(name: str) -> Any:
    try:
        return getattr(importlib.import_module("torchvision.datasets"), name)
    except ImportError as error:
        raise ImportError(f'{name} needs torchvision: pip install "fewshot-mahalanobis[training]"') from error


def _mini_imagenet(folder: Path, split: str) -> Listing:
    """Class folders or zips of them; the lists of Ravi & Larochelle (2017); or the arrays of Ren et al. (2018)."""
    short = "val" if split == "valid" else split
    if (table := folder / f"{short}.csv").is_file():
        images: dict[str, list[str]] = {}
        with table.open(newline="") as file:
            for row in csv.DictReader(file):
                images.setdefault(row["label"], []).append(f"images/{row['filename']}")
        return Listing(images, partial(_as_files, folder))
    if (array := folder / f"mini-imagenet-cache-{short}.pkl").is_file():
        held = _unpickle(array)
        rows = {name: np.asarray(indices) for name, indices in held["class_dict"].items()}
        return Listing(rows, lambda i: ImageRows(array, held["image_data"], np.concatenate([*i.values()])))
    return _split_folders("mini_imagenet", folder, split)


def _tiered_imagenet(folder: Path, split: str) -> Listing:
    """Class folders or zips of them, or the encoded images of Ren et al. (2018)."""
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
            images = {c.name: [f"{c.name}/{f}" for f in _names_in(c)] for c in (folder / part).iterdir()}
            return Listing(images, partial(_as_files, folder / part))
        if (archive := folder / f"{name}_{part}.zip").is_file():
            members = next(iter(class_folders(archive).values()), {})
            return Listing(members, lambda images: ZipMembers(archive, list(chain(*images.values()))))
    return Listing({}, partial(_as_files, folder))


class _ArraysOnly(pickle.Unpickler):
    """Reads pickled numbers, strings, lists, dicts and numpy arrays; a pickle can run any code otherwise."""

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


# The data sets --------------------------------------------------------------------------------------------


def _places(*folders: str, contents: str) -> tuple[tuple[str, str], ...]:
    return tuple((folder, contents) for folder in folders)


_DATA_SETS = (
    DataSet(
        "ilsvrc_2012",
        "ILSVRC-2012",
        _places(
            "ILSVRC2012_img_train",
            "ilsvrc_2012",
            "ILSVRC/Data/CLS-LOC/train",
            contents="n[0-9]*/",
        ),
        {"train": (712, 915_249), "valid": (158, 199_833), "test": (130, 165_682)},
        _imagenet,
        "Register at https://www.image-net.org, download ILSVRC2012_img_train.tar, unpack it to ILSVRC2012_img_train/ "
        f"and each n????????.tar in it to a folder of its name; put {IS_A_URL} and the lists ImageNet_*_duplicates.txt "
        "of https://github.com/google-research/meta-dataset (meta_dataset/dataset_conversion) beside them.",
    ),
    DataSet(
        "omniglot",
        "Omniglot",
        _places("omniglot", "omniglot-py", contents="images_*/"),
        {"train": (883, 17_660), "valid": (81, 1_620), "test": (659, 13_180)},
        _omniglot,
        "Run `fewshot-mahalanobis data download omniglot ROOT`, or unpack images_background.zip and "
        "images_evaluation.zip of https://github.com/brendenlake/omniglot (python/) to omniglot/.",
        "Omniglot",
    ),
    DataSet(
        "aircraft",
        "Aircraft",
        _places("fgvc-aircraft-2013b", "aircraft", contents="data/images_box.txt"),
        {"train": (70, 7_000), "valid": (15, 1_500), "test": (15, 1_500)},
        _aircraft,
        "Run `fewshot-mahalanobis data download aircraft ROOT`, or unpack fgvc-aircraft-2013b.tar.gz of "
        "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/.",
        "FGVCAircraft",
    ),
    DataSet(
        "cu_birds",
        "Birds",
        _places("CUB_200_2011", "cu_birds", contents="images/"),
        {"train": (140, 8_239), "valid": (30, 1_779), "test": (30, 1_770)},
        partial(_folder_a_class, "cu_birds", "images/", str),
        "Unpack CUB_200_2011.tgz of https://data.caltech.edu/records/65de6-vp158 (Caltech-UCSD Birds-200-2011).",
    ),
    DataSet(
        "dtd",
        "DTD",
        _places("dtd", "dtd/dtd", contents="images/"),
        {"train": (33, 3_960), "valid": (7, 840), "test": (7, 840)},
        partial(_folder_a_class, "dtd", "images/", str),
        "Run `fewshot-mahalanobis data download dtd ROOT`, or unpack dtd-r1.0.1.tar.gz of "
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/.",
        "DTD",
    ),
    DataSet(
        "quickdraw",
        "QuickDraw",
        _places("quickdraw", contents="*.npy"),
        {"train": (241, 34_776_331), "valid": (52, 7_939_640), "test": (52, 7_710_295)},
        _quickdraw,
        "Copy the 345 files gs://quickdraw_dataset/full/numpy_bitmap/*.npy to quickdraw/ "
        "(`gsutil -m cp`; https://github.com/googlecreativelab/quickdraw-dataset).",
    ),
    DataSet(
        "fungi",
        "Fungi",
        _places("fungi", contents="train.json"),
        {"train": (994, 64_449), "valid": (200, 12_195), "test": (200, 13_116)},
        _fungi,
        "Unpack fungi_train_val.tgz and train_val_annotations.tgz of https://github.com/visipedia/fgvcx_fungi_comp "
        "to fungi/.",
    ),
    DataSet(
        "vgg_flower",
        "VGG Flower",
        _places("vgg_flower", "flowers-102", contents="imagelabels.mat"),
        {"train": (71, 5_655), "valid": (15, 1_109), "test": (16, 1_425)},
        _flowers,
        "Run `fewshot-mahalanobis data download vgg_flower ROOT`, or put imagelabels.mat and the unpacked "
        "102flowers.tgz of https://www.robots.ox.ac.uk/~vgg/data/flowers/102/ in vgg_flower/.",
        "Flowers102",
    ),
    DataSet(
        "traffic_sign",
        "Traffic Signs",
        _places("GTSRB", "traffic_sign", contents="Final_Training/Images/"),
        {"test": (43, 39_209)},
        partial(_folder_a_class, "traffic_sign", "Final_Training/Images/", lambda name: f"000{name[:2]}"),
        "Unpack GTSRB_Final_Training_Images.zip of https://benchmark.ini.rub.de (it makes GTSRB/). torchvision's "
        "download is an earlier set of 26,640 images.",
    ),
    DataSet(
        "mscoco",
        "MSCOCO",
        _places("mscoco", "coco", contents="**/instances_train2017.json"),
        {"valid": (40, 513_021), "test": (40, 346_980)},
        _coco,
        "Unpack train2017.zip and annotations_trainval2017.zip of https://cocodataset.org to mscoco/.",
    ),
    DataSet(
        "mnist",
        "MNIST",
        _places(".", contents="MNIST/raw/t10k-images-idx3-ubyte"),
        {"test": (10, 10_000)},
        partial(_test_images, "MNIST"),
        "Run `fewshot-mahalanobis data download mnist ROOT`.",
        "MNIST",
    ),
    DataSet(
        "cifar10",
        "CIFAR10",
        _places(".", contents="cifar-10-batches-py/test_batch"),
        {"test": (10, 10_000)},
        partial(_test_images, "CIFAR10"),
        "Run `fewshot-mahalanobis data download cifar10 ROOT`, or unpack cifar-10-python.tar.gz of "
        "https://www.cs.toronto.edu/~kriz/cifar.html.",
        "CIFAR10",
    ),
    DataSet(
        "cifar100",
        "CIFAR100",
        _places(".", contents="cifar-100-python/test"),
        {"test": (100, 10_000)},
        partial(_test_images, "CIFAR100"),
        "Run `fewshot-mahalanobis data download cifar100 ROOT`, or unpack cifar-100-python.tar.gz of "
        "https://www.cs.toronto.edu/~kriz/cifar.html.",
        "CIFAR100",
    ),
    DataSet(
        "mini_imagenet",
        "mini-ImageNet",
        (*_places("mini_imagenet", "mini-imagenet", "miniImageNet", contents="*"), (".", "mini_imagenet_*.zip")),
        {"train": (64, 38_400), "valid": (16, 9_600), "test": (20, 12_000)},
        _mini_imagenet,
        "Make mini_imagenet/ with train/, val/ and test/ of class folders; or put there images/ and the lists "
        "train.csv, val.csv and test.csv of Ravi & Larochelle (2017), or mini-imagenet-cache-*.pkl of "
        "https://github.com/renmengye/few-shot-ssl-public.",
    ),
    DataSet(
        "tiered_imagenet",
        "tieredImageNet",
        (
            *_places("tiered_imagenet", "tiered-imagenet", "tieredImageNet", contents="*"),
            (".", "tiered_imagenet_*.zip"),
        ),
        {"train": (351, 448_695), "valid": (97, 124_261), "test": (160, 206_209)},
        _tiered_imagenet,
        "Make tiered_imagenet/ with train/, val/ and test/ of class folders, or put there *_images_png.pkl and "
        "*_labels.pkl of https://github.com/renmengye/few-shot-ssl-public.",
    ),
)
#: The data sets by name.
DATA_SETS: dict[str, DataSet] = {data_set.name: data_set for data_set in _DATA_SETS}
