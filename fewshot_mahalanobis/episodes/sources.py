"""Image sources: folders or zips of class folders, decoded once into memory.

A source is any of

- a folder ``ROOT/<class>/<image>``;
- a folder ``ROOT/<split>/<class>/<image>``, with ``split`` named;
- a zip of either layout.

Every image is resized to one square size, as Meta-Dataset does (Triantafillou et al., ICLR 2020), so a
source is one uint8 array: 21 kB an image at 84 x 84.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fewshot_mahalanobis.images import to_network_range, to_square_array

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})


@dataclass(frozen=True)
class ImageSource:
    """Every image of one source, decoded.

    Attributes
    ----------
    name : str
    images : uint8 array of shape (n, size, size, 3)
    labels : int64 array of shape (n,)
        Index into ``class_names``; images of one class are consecutive.
    class_names : tuple of str
        Sorted.
    """

    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def network_input(self, indices: NDArray[np.int64]) -> Tensor:
        """Images by their indices (n,) as the network reads them: float32 (n, 3, size, size) in [-1, 1]."""
        return to_network_range(torch.from_numpy(self.images[indices]).permute(0, 3, 1, 2))

    def indices_of_class(self) -> list[NDArray[np.int64]]:
        """The image indices of each class, in class order."""
        order = np.argsort(self.labels, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.labels, minlength=len(self.class_names)))[:-1])


def load_source(path: str | Path, *, split: str | None = None, size: int = 84, workers: int = 2) -> ImageSource:
    """Decode a folder or zip of class folders.

    Parameters
    ----------
    path : path
        A folder or a ``.zip``; members are ``[<split>/]<class>/<image>``. A suffix ``:<split>`` on the
        path names the split too ("omniglot.zip:train").
    split : str, optional
        Keep only images below the folder of this name. Needed where the layout has one.
    size : int
        Side of the square that every image is resized to, in pixels.
    workers : int
        Decoding threads.

    Raises
    ------
    FileNotFoundError
        ``path`` does not exist.
    ValueError
        There is no class folder, fewer than two classes, or an image that cannot be read.
    """
    path, split = split_from_path(path, split)
    members = _zip_members(path) if path.is_file() else _folder_members(path)
    by_class: dict[str, list[tuple[str, Callable[[], bytes]]]] = {}
    splits: set[str] = set()
    for parts, read in members:
        folders = parts[:-1]
        if len(folders) >= 2:
            splits.add(folders[-2])
        if split is not None and (len(folders) < 2 or folders[-2] != split):
            continue
        if folders:
            by_class.setdefault(folders[-1], []).append(("/".join(parts), read))
    if split is None and len(splits) > 1:
        raise ValueError(f"{path} has the splits {sorted(splits)}; name one, as in '{path}:{sorted(splits)[0]}'")
    if len(by_class) < 2:
        where = f"split {split!r} of {path}" if split is not None else str(path)
        known = f"; its splits are {sorted(splits)}" if splits else ""
        raise ValueError(
            f"{where} has {len(by_class)} class folders with images; at least 2 are needed "
            f"(expected [<split>/]<class>/<image>{known})"
        )
    names = tuple(sorted(by_class, key=_natural))
    items = [
        (label, item)
        for label, name in enumerate(names)
        for item in sorted(by_class[name], key=lambda i: _natural(i[0]))
    ]

    def decode(entry: tuple[int, tuple[str, Callable[[], bytes]]]) -> NDArray[np.uint8]:
        member, read = entry[1]
        try:
            with Image.open(io.BytesIO(read())) as image:
                return to_square_array(image, size)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"cannot read image {member!r} of {path}: {error}") from error

    images = np.empty((len(items), size, size, 3), dtype=np.uint8)
    with ThreadPoolExecutor(workers) as pool:
        for index, array in enumerate(pool.map(decode, items)):
            images[index] = array
    labels = np.fromiter((label for label, _ in items), dtype=np.int64, count=len(items))
    return ImageSource(path.stem + (f"/{split}" if split else ""), images, labels, names)


def image_files(root: str | Path) -> tuple[list[Path], list[str]]:
    """Paths and labels of a folder of class folders, ``ROOT/<class>/<image>``.

    Raises
    ------
    FileNotFoundError
        ``root`` is no folder.
    ValueError
        It has fewer than two class folders with images.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {str(root)!r}: expected one with a sub-folder of images for each class")
    paths = [file for folder in sorted(root.iterdir()) if folder.is_dir() for file in images_below(folder, empty=True)]
    labels = [path.relative_to(root).parts[0] for path in paths]
    if len(set(labels)) < 2:
        raise ValueError(
            f"{root} has {len(set(labels))} sub-folders with images; at least 2 are needed, one for each class"
        )
    return paths, labels


def images_below(path: str | Path, *, empty: bool = False) -> list[Path]:
    """The image files in a folder and its sub-folders, or the one file that ``path`` is.

    Raises
    ------
    FileNotFoundError
        There is nothing at ``path``.
    ValueError
        A folder holds no image, unless ``empty`` allows that.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no image file or folder {str(path)!r}")
    files = [
        file
        for file in sorted(path.rglob("*"), key=lambda f: _natural(str(f)))
        if _is_image(file.name) and file.is_file()
    ]
    if not files and not empty:
        raise ValueError(f"folder {str(path)!r} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return files


def split_from_path(path: str | Path, split: str | None = None) -> tuple[Path, str | None]:
    """Separate "folder_or_zip:split"; an existing path wins over the colon."""
    text = str(path)
    if not Path(text).exists() and ":" in text:
        text, _, suffix = text.rpartition(":")
        split = split or suffix
    if not Path(text).exists():
        raise FileNotFoundError(f"no image source at {text!r}: expected a folder of class folders or a .zip of them")
    return Path(text), split


def _natural(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key under which "2.png" comes before "10.png"."""
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", text))


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES and not Path(name).name.startswith("._")


def _folder_members(root: Path) -> Iterator[tuple[tuple[str, ...], Callable[[], bytes]]]:
    for file in images_below(root, empty=True):
        yield file.relative_to(root).parts, file.read_bytes


def _zip_members(path: Path) -> Iterator[tuple[tuple[str, ...], Callable[[], bytes]]]:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is neither a folder nor a zip: {error}") from error
    for name in sorted(archive.namelist()):
        if _is_image(name) and not name.startswith("__MACOSX/"):
            yield tuple(name.strip("/").split("/")), partial(archive.read, name)
