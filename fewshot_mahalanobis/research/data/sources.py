"""Image sources: folders or zips of class folders, in memory or decoded on demand.

A source is any of

- a folder ``ROOT/<class>/<image>``;
- a folder ``ROOT/<split>/<class>/<image>``, with ``split`` named;
- a zip of either layout;
- a data set of :mod:`fewshot_mahalanobis.research.data.datasets`, by name.

All images are resized to the same square, as in Meta-Dataset (Triantafillou et al., ICLR 2020), so a source in memory
is one uint8 array: 21 kB per image at 84 x 84.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.images.folders import find_images, image_names, natural_key
from fewshot_mahalanobis.images.memory import PictureMemory
from fewshot_mahalanobis.research.data.hierarchy import Hierarchy
from fewshot_mahalanobis.research.data.readers import ImageFiles, LazyImages, Reader, ZipMembers


@dataclass(frozen=True)
class ImageSource:
    """The images and labels of one source.

    Attributes
    ----------
    name : str
        ``<data set>`` or ``<data set>/<split>``.
    images : uint8 array of shape (n, size, size, 3), or LazyImages
        Both have a length and a ``shape``, and give a uint8 array when indexed by an int, a slice or an int array.
    labels : int64 array of shape (n,)
        Index into ``class_names``; images of one class are consecutive.
    class_names : tuple of str
        Sorted.
    hierarchy : Hierarchy, optional
        Classes that Meta-Dataset draws together in an episode.
    """

    name: str
    images: NDArray[np.uint8] | LazyImages
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    hierarchy: Hierarchy | None = None

    def network_input(self, indices: NDArray[np.int64]) -> Tensor:
        """Return images by index (n,) as input of the network: float32 (n, 3, size, size) in [-1, 1]."""
        return to_network_range(torch.from_numpy(self.images[indices]).permute(0, 3, 1, 2))

    def indices_of_class(self) -> list[NDArray[np.int64]]:
        """Return the image indices of each class, in class order."""
        order = np.argsort(self.labels, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.labels, minlength=len(self.class_names)))[:-1])

    def remembering(self, memory: PictureMemory | None) -> ImageSource:
        """Return the same source; squares of its files are looked up in a memory, and those that are new put there."""
        images = self.images
        if isinstance(images, LazyImages):
            images = LazyImages(images.reader, images.size, images.workers, memory)
        return replace(self, images=images)

    def in_memory(self) -> ImageSource:
        """Return the same source with all images decoded, size^2 x 3 bytes each."""
        return replace(self, images=self.images[:])


def load_source(
    path: str | Path, *, split: str | None = None, size: int = 84, workers: int = 2, lazy: bool = False
) -> ImageSource:
    """Open a folder or zip of class folders.

    A source named ``omniglot`` with classes ``<alphabet>.<character>`` gets the hierarchy of alphabets.

    Parameters
    ----------
    path : path
        A folder or a ``.zip`` of ``[<split>/]<class>/<image>``. The suffix ``:<split>`` also names the split
        ("omniglot.zip:train").
    split : str, optional
        Keep only images below the folder of this name; required if there are several splits.
    size : int
        Side of the square to which every image is resized, in pixels.
    workers : int
        Decoding threads.
    lazy : bool
        Decode images on demand, not now.

    Returns
    -------
    ImageSource
        Classes and images are in natural order, 2 before 10.

    Raises
    ------
    FileNotFoundError
        ``path`` does not exist.
    ValueError
        There are fewer than two class folders, or an image cannot be read.

    Warns
    -----
    UserWarning
        Files or folders were left out.
    """
    path, split = split_from_path(path, split)
    by_split, note = class_folders(path)
    if note:
        warnings.warn(f"{path}: {note}", stacklevel=2)
    by_class = classes_of_split(path, by_split, split)
    names = tuple(sorted(by_class, key=natural_key))
    members = [member for name in names for member in sorted(by_class[name], key=natural_key)]
    reader: Reader = ZipMembers(path, members) if path.is_file() else ImageFiles.of(path, members)
    has_alphabets = path.stem == "omniglot" and all("." in name for name in names)
    source = ImageSource(
        path.stem + (f"/{split}" if split else ""),
        LazyImages(reader, size, workers),
        np.repeat(np.arange(len(names)), [len(by_class[name]) for name in names]),
        names,
        Hierarchy.alphabets(names) if has_alphabets else None,
    )
    return source if lazy else source.in_memory()


#: Split (None without splits) -> class -> paths of its images.
BySplit = Mapping[str | None, Mapping[str, list[str]]]


def classes_of_split(path: Path, by_split: BySplit, split: str | None) -> dict[str, list[str]]:
    """Classes and images of one split of a folder or zip; of all if it is None.

    ValueError if there are fewer than two, or if a split has to be named.
    """
    known = sorted(filter(None, by_split))
    if split is None and len(known) > 1:
        raise ValueError(f"{path} has the splits {known}; name one, as in '{path}:{known[0]}'")
    by_class: dict[str, list[str]] = {}
    for key in [split] if split is not None else by_split:
        for name, members in by_split.get(key, {}).items():
            by_class.setdefault(name, []).extend(members)
    if len(by_class) < 2:
        where = f"split {split!r} of {path}" if split is not None else str(path)
        raise ValueError(
            f"{where} has {len(by_class)} class folders with images; at least 2 are needed "
            f"(expected [<split>/]<class>/<image>{f'; its splits are {known}' if known else ''})"
        )
    return by_class


def class_folders(path: Path) -> tuple[BySplit, str]:
    """List the images of a folder or zip, as paths below it, by split and class; and a sentence about what is left out.

    ValueError if ``path`` is a file but not a zip.
    """
    images: dict[str | None, dict[str, list[str]]] = {}
    members, note = _zip_members(path) if path.is_file() else _folder_members(path)
    for member in members:
        folders = [part for part in member.split("/")[:-1] if part]
        if folders:
            split = folders[-2] if len(folders) > 1 else None
            images.setdefault(split, {}).setdefault(folders[-1], []).append(member)
    return images, note


def split_from_path(path: str | Path, split: str | None = None) -> tuple[Path, str | None]:
    """Separate "path:split"; an existing path may contain a colon."""
    text = str(path)
    if not Path(text).exists() and ":" in text:
        text, _, suffix = text.rpartition(":")
        split = split or suffix
    if not Path(text).exists():
        raise FileNotFoundError(f"no image source at {text!r}: expected a folder of class folders or a .zip of them")
    return Path(text), split


def _folder_members(root: Path) -> tuple[list[str], str]:
    found = find_images(root, allow_empty=True)
    return [file.relative_to(root).as_posix() for file in found.paths], found.note()


def _zip_members(path: Path) -> tuple[list[str], str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is neither a folder nor a zip: {error}") from error
    return image_names(sorted(names))
