"""The thirteen data sets of the paper, mini-ImageNet and tieredImageNet, as their authors distribute them.

Each lies in its own folder below a common root; ``docs/data.md`` shows the layouts. Classes are split as in
Meta-Dataset (Triantafillou et al., ICLR 2020, appendix 3); the splits ship with this package. MNIST, CIFAR10 and
CIFAR100 are for testing only, on the images of their test sets (Requeima et al., CNAPS, NeurIPS 2019). Images are
cropped and inverted as in Meta-Dataset.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.research.data import layouts
from fewshot_mahalanobis.research.data.hierarchy import Hierarchy
from fewshot_mahalanobis.research.data.layouts import IS_A, IS_A_URL, Listing, imagenet_hierarchy
from fewshot_mahalanobis.research.data.readers import LazyImages
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source

#: Data sets used for testing only: all their classes, the images of their test sets.
TEST_ONLY = ("mnist", "cifar10", "cifar100")
#: Name of the synthetic source of :mod:`fewshot_mahalanobis.research.data.glyphs`.
GLYPHS = "glyphs"
#: Maximum side of drawn glyphs in pixels: 8,000 of 288 pixels would take five minutes and 2 GB. Tasks enlarge them.
MOST_GLYPH_PIXELS = 160


@dataclass(frozen=True)
class DataSet:
    """A data set that sources can name.

    Attributes
    ----------
    name, title : str
        Name in sources, as in ``omniglot:train``, and name in papers.
    places : tuple of (str, str)
        Folders below the root where it may be, each with a glob pattern that matches its contents.
    splits : dict of str to (int, int)
        Split to its number of classes and of images.
    list_split : callable
        (folder, split) -> :class:`Listing`.
    how_to_get : str
        Instructions for messages.
    torchvision : str
        Class of ``torchvision.datasets`` that downloads it, or "".
    """

    name: str
    title: str
    places: tuple[tuple[str, str], ...]
    splits: Mapping[str, tuple[int, int]]
    list_split: Callable[[Path, str], Listing]
    how_to_get: str
    torchvision: str = ""

    def find(self, root: str | Path) -> Path | None:
        """Return the data set's folder below ``root``, or None."""
        for folder, contents in self.places:
            if next((Path(root) / folder).glob(contents), None) is not None:
                return Path(root) / folder
        return None


def open_source(source: str, *, root: str | Path | None = None, size: int = 84, workers: int = 1) -> ImageSource:
    """Open an image source by path or by name, without decoding images (see :meth:`ImageSource.in_memory`).

    Parameters
    ----------
    source : str
        With ``root``, ``<name>:<split>`` of a data set in :data:`DATA_SETS`; else a path, see :func:`load_source`,
        which may start at ``root``.
    root : path, optional
        Folder that contains the named data sets.
    size : int
        Side of the square to which every image is resized, in pixels.
    workers : int
        Threads that decode a batch.

    Raises
    ------
    FileNotFoundError
        The path does not exist, or the data set is not below ``root``; the message says where to get it.
    ValueError
        The data set has no such split, or fewer than two of its classes have images.

    Warns
    -----
    UserWarning
        Episodes will differ from Meta-Dataset's: classes are missing, or ImageNet's hierarchy is.
    """
    name, _, split = source.partition(":")
    if root is None or name not in DATA_SETS:
        return load_source(_placed(source, root), size=size, workers=workers, lazy=True)
    data_set = DATA_SETS[name]
    if split not in data_set.splits:
        raise ValueError(f"{name} has {' and '.join(data_set.splits)}, not {split!r}: write {name}:<split>")
    folder = data_set.find(root)
    if folder is None:
        places = ", ".join(dict.fromkeys(f"{place}/" for place, _ in data_set.places))
        raise FileNotFoundError(f"no {data_set.title} below {root} (looked in {places}). {data_set.how_to_get}")
    listing = data_set.list_split(folder, split)
    images = {class_name: files for class_name, files in sorted(listing.images.items()) if len(files)}
    held = f"{source}: {folder} holds images of {len(images)} of its {data_set.splits[split][0]} classes"
    if len(images) < 2:
        raise ValueError(f"{held}, and at least 2 are needed. {data_set.how_to_get}")
    if len(images) < data_set.splits[split][0]:
        warnings.warn(f"{held}, so episodes differ from those of the full data set", stacklevel=2)
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
        np.repeat(np.arange(len(images)), [len(files) for files in images.values()]),
        tuple(images),
        hierarchy,
    )


def open_training_source(source: str, *, root: str | None, size: int, lazy: bool) -> ImageSource:
    """Open a source by path or name, or draw "glyphs"; in memory unless ``lazy``."""
    if source != GLYPHS:
        opened = open_source(source, root=root, size=size, workers=1 if lazy else 2)
        return opened if lazy else opened.in_memory()
    try:
        from fewshot_mahalanobis.research.data.glyphs import draw_glyphs
    except ImportError as error:
        raise ImportError(f"drawing glyphs needs {error.name}: {install_command('training')}") from error
    return draw_glyphs(size=min(size, MOST_GLYPH_PIXELS))


def _placed(source: str, root: str | Path | None) -> str | Path:
    """Path of a source, which may end with a split: below ``root`` if it is there, else as it is."""
    if root is None:
        return source
    folder = source if Path(root, source).exists() else source.rpartition(":")[0]
    return Path(root, source) if folder and Path(root, folder).exists() else source


def download(name: str, root: str | Path) -> None:
    """Download a data set with torchvision to the folder below ``root`` where :func:`open_source` looks for it.

    It appears there whole or not at all: torchvision takes a half unpacked folder for a whole one. Nothing is done if
    it is there already. ValueError if there is no such data set or torchvision does not download it, ImportError
    without torchvision, OSError if the download failed or part of the data set is in the way; each names the remedy.
    """
    if name not in DATA_SETS:
        raise ValueError(f"no data set {name!r}; there are {', '.join(DATA_SETS)}")
    if not DATA_SETS[name].torchvision:
        raise ValueError(f"torchvision does not download {DATA_SETS[name].title}. {DATA_SETS[name].how_to_get}")
    data_set = layouts.torchvision_class(DATA_SETS[name].torchvision)
    if name == "omniglot":
        parts: list[dict[str, Any]] = [{"background": True}, {"background": False}]
    else:
        parts = [{"train": False} if name in TEST_ONLY else {}]
    root, title = Path(root), DATA_SETS[name].title
    root.mkdir(parents=True, exist_ok=True)
    with suppress(RuntimeError):  # raised by torchvision if it finds nothing
        for part in parts:
            data_set(root, **part)
        return
    with TemporaryDirectory(prefix=".saving-", dir=root) as folder:
        try:
            for part in parts:
                data_set(folder, **part, download=True)
        except RuntimeError as error:  # raised by torchvision for a failed download
            raise OSError(f"{title} could not be downloaded: {error}") from error
        made = sorted(Path(folder).iterdir())
        for place in (root / path.name for path in made):
            if place.exists():
                raise FileExistsError(f"{place} is there and is not the whole of {title}: move it away first")
        for path in made:
            path.rename(root / path.name)


# The data sets --------------------------------------------------------------------------------------------


def _places(*folders: str, contents: str) -> tuple[tuple[str, str], ...]:
    return tuple((folder, contents) for folder in folders)


_DATA_SETS = (
    DataSet(
        "ilsvrc_2012",
        "ILSVRC-2012",
        _places("ILSVRC2012_img_train", "ilsvrc_2012", "ILSVRC/Data/CLS-LOC/train", contents="n[0-9]*/"),
        {"train": (712, 915_249), "valid": (158, 199_833), "test": (130, 165_682)},
        layouts.imagenet,
        "Register at https://www.image-net.org, download ILSVRC2012_img_train.tar, unpack it to ILSVRC2012_img_train/ "
        f"and each n????????.tar in it to a folder of its name; put {IS_A_URL} and the lists ImageNet_*_duplicates.txt "
        "of https://github.com/google-research/meta-dataset (meta_dataset/dataset_conversion) beside them.",
    ),
    DataSet(
        "omniglot",
        "Omniglot",
        _places("omniglot", "omniglot-py", contents="images_*/"),
        {"train": (883, 17_660), "valid": (81, 1_620), "test": (659, 13_180)},
        layouts.omniglot,
        "Run `fewshot-mahalanobis data download omniglot ROOT`, or unpack images_background.zip and "
        "images_evaluation.zip of https://github.com/brendenlake/omniglot (python/) to omniglot/.",
        "Omniglot",
    ),
    DataSet(
        "aircraft",
        "Aircraft",
        _places("fgvc-aircraft-2013b", "aircraft", contents="data/images_box.txt"),
        {"train": (70, 7_000), "valid": (15, 1_500), "test": (15, 1_500)},
        layouts.aircraft,
        "Run `fewshot-mahalanobis data download aircraft ROOT`, or unpack fgvc-aircraft-2013b.tar.gz of "
        "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/.",
        "FGVCAircraft",
    ),
    DataSet(
        "cu_birds",
        "Birds",
        _places("CUB_200_2011", "cu_birds", contents="images/"),
        {"train": (140, 8_239), "valid": (30, 1_779), "test": (30, 1_770)},
        partial(layouts.class_folder_layout, "cu_birds", "images/", str),
        "Unpack CUB_200_2011.tgz of https://data.caltech.edu/records/65de6-vp158 (Caltech-UCSD Birds-200-2011).",
    ),
    DataSet(
        "dtd",
        "DTD",
        _places("dtd", "dtd/dtd", contents="images/"),
        {"train": (33, 3_960), "valid": (7, 840), "test": (7, 840)},
        partial(layouts.class_folder_layout, "dtd", "images/", str),
        "Run `fewshot-mahalanobis data download dtd ROOT`, or unpack dtd-r1.0.1.tar.gz of "
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/.",
        "DTD",
    ),
    DataSet(
        "quickdraw",
        "QuickDraw",
        _places("quickdraw", contents="*.npy"),
        {"train": (241, 34_776_331), "valid": (52, 7_939_640), "test": (52, 7_710_295)},
        layouts.quickdraw,
        "Copy the 345 files gs://quickdraw_dataset/full/numpy_bitmap/*.npy to quickdraw/ "
        "(`gsutil -m cp`; https://github.com/googlecreativelab/quickdraw-dataset).",
    ),
    DataSet(
        "fungi",
        "Fungi",
        _places("fungi", contents="train.json"),
        {"train": (994, 64_449), "valid": (200, 12_195), "test": (200, 13_116)},
        layouts.fungi,
        "Unpack fungi_train_val.tgz and train_val_annotations.tgz of https://github.com/visipedia/fgvcx_fungi_comp "
        "to fungi/.",
    ),
    DataSet(
        "vgg_flower",
        "VGG Flower",
        _places("vgg_flower", "flowers-102", contents="imagelabels.mat"),
        {"train": (71, 5_655), "valid": (15, 1_109), "test": (16, 1_425)},
        layouts.flowers,
        "Run `fewshot-mahalanobis data download vgg_flower ROOT`, or put imagelabels.mat and the unpacked "
        "102flowers.tgz of https://www.robots.ox.ac.uk/~vgg/data/flowers/102/ in vgg_flower/.",
        "Flowers102",
    ),
    DataSet(
        "traffic_sign",
        "Traffic Signs",
        _places("GTSRB", "traffic_sign", contents="Final_Training/Images/"),
        {"test": (43, 39_209)},
        partial(layouts.class_folder_layout, "traffic_sign", "Final_Training/Images/", lambda name: f"000{name[:2]}"),
        "Unpack GTSRB_Final_Training_Images.zip of https://benchmark.ini.rub.de (it makes GTSRB/). torchvision's "
        "download is an earlier set of 26,640 images.",
    ),
    DataSet(
        "mscoco",
        "MSCOCO",
        _places("mscoco", "coco", contents="**/instances_train2017.json"),
        {"valid": (40, 513_021), "test": (40, 346_980)},
        layouts.coco,
        "Unpack train2017.zip and annotations_trainval2017.zip of https://cocodataset.org to mscoco/.",
    ),
    DataSet(
        "mnist",
        "MNIST",
        _places(".", contents="MNIST/raw/t10k-images-idx3-ubyte"),
        {"test": (10, 10_000)},
        partial(layouts.torchvision_test_set, "MNIST"),
        "Run `fewshot-mahalanobis data download mnist ROOT`.",
        "MNIST",
    ),
    *(
        DataSet(
            f"cifar{classes}",
            f"CIFAR{classes}",
            _places(".", contents=file),
            {"test": (classes, 10_000)},
            partial(layouts.torchvision_test_set, f"CIFAR{classes}"),
            f"Run `fewshot-mahalanobis data download cifar{classes} ROOT`, or unpack cifar-{classes}-python.tar.gz of "
            "https://www.cs.toronto.edu/~kriz/cifar.html.",
            f"CIFAR{classes}",
        )
        for classes, file in ((10, "cifar-10-batches-py/test_batch"), (100, "cifar-100-python/test"))
    ),
    DataSet(
        "mini_imagenet",
        "mini-ImageNet",
        (*_places("mini_imagenet", "mini-imagenet", "miniImageNet", contents="*"), (".", "mini_imagenet_*.zip")),
        {"train": (64, 38_400), "valid": (16, 9_600), "test": (20, 12_000)},
        layouts.mini_imagenet,
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
        layouts.tiered_imagenet,
        "Make tiered_imagenet/ with train/, val/ and test/ of class folders, or put there *_images_png.pkl and "
        "*_labels.pkl of https://github.com/renmengye/few-shot-ssl-public.",
    ),
)
#: The data sets by name.
DATA_SETS: dict[str, DataSet] = {data_set.name: data_set for data_set in _DATA_SETS}
