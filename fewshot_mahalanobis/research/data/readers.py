"""Readers give the images of a source on demand, for sources that do not fit into memory.

A reader gives image ``i`` of a list. :class:`LazyImages` gives it the interface of a uint8 array. Pickled readers hold
no open files: each process opens its own.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fewshot_mahalanobis.images.decode import decode_batches
from fewshot_mahalanobis.images.formats import open_image, whole_files
from fewshot_mahalanobis.images.memory import PictureMemory, is_small, square_key_of_bytes, square_of, stored
from fewshot_mahalanobis.images.picture import MAX_PIXELS, Square, check_header, chosen, to_square

#: Maximum size of a zip member in bytes: the largest accepted image, uncompressed (178,956,970 pixels x 3).
_MAX_MEMBER_SIZE = 2**29
#: Images that are decoded before they are copied into one array, to bound memory.
_BATCH = 256


class EncodedImage(NamedTuple):
    """An image as a file has it.

    Attributes
    ----------
    contents : bytes
        Of the file.
    box : tuple of four int, optional
        Crop: left, top, right and bottom, in pixels.
    negative : bool
        Invert the colours.
    """

    contents: bytes
    box: tuple[int, int, int, int] | None = None
    negative: bool = False

    def opened(self) -> Image.Image:
        """As a PIL image; decoded if it is cropped or inverted."""
        image = open_image(io.BytesIO(self.contents), MAX_PIXELS, [])
        check_header(image)
        if self.box is not None:
            image = image.crop(self.box)
        return ImageOps.invert(image.convert("RGB")) if self.negative else image


class Reader(Protocol):
    """Index -> image."""

    def __len__(self) -> int:
        """Number of images."""

    def __call__(self, index: int) -> EncodedImage | Image.Image:
        """Image ``index``; a PIL image is decoded."""

    def describe(self, index: int) -> str:
        """Name of image ``index`` in messages."""


class LazyImages:
    """Images of a reader, resized to squares, with the interface of a uint8 array (n, size, size, 3).

    Every access decodes, several images in ``workers`` threads, unless a ``memory`` has the squares of their files. The
    index is an int, a slice, or an array of ints or bools.
    """

    def __init__(self, reader: Reader, size: int, workers: int = 1, memory: PictureMemory | None = None) -> None:
        self.reader = reader
        self.size = size
        self.workers = workers
        self.memory = memory

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n, size, size, 3)."""
        return len(self), self.size, self.size, 3

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        """Decode images.

        Raises
        ------
        ValueError
            An image cannot be read. The message names it.
        """
        if isinstance(index, int | np.integer):
            return self[[int(index)]][0]
        if isinstance(index, slice):
            indices: Sequence[int] = range(*index.indices(len(self)))
        else:
            index = np.asarray(index)
            indices = (np.flatnonzero(index) if index.dtype == bool else index).tolist()
        decoded = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        batches = [indices[start : start + _BATCH] for start in range(0, len(indices), _BATCH)]
        start, new = 0, deque[tuple[bytes, bytes]]()
        for images in decode_batches(partial(self._decode, new), batches, threads=min(self.workers, len(indices))):
            decoded[start : start + len(images)] = images
            start += len(images)
            if self.memory is not None:
                self.memory.put(dict(new.popleft() for _ in range(len(new))))
        return decoded

    def _decode(self, new: deque[tuple[bytes, bytes]], index: int) -> NDArray[np.uint8]:
        """Decode an image; what is to be remembered is added to ``new``."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        try:
            square = self._square(self.reader(index), new)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders and zipfile raise a dozen unrelated types on damaged data
            raise ValueError(f"cannot read image {self.reader.describe(index)}: {error}") from error
        for remark in square.remarks:
            warnings.warn(remark, stacklevel=3)
        return square.pixels

    @whole_files
    def _square(self, image: EncodedImage | Image.Image, new: deque[tuple[bytes, bytes]]) -> Square:
        if not isinstance(image, EncodedImage):
            return to_square(chosen(image), self.size)
        if self.memory is None or is_small(len(image.contents), self.size):
            return to_square(chosen(image.opened()), self.size)
        key = square_key_of_bytes(image.contents, image.box, self.size, image.negative)
        if key in (known := self.memory.get([key])):
            return square_of(known[key], self.size)
        square = to_square(chosen(image.opened()), self.size)
        new.append((key, stored(square)))
        return square


@dataclass(frozen=True)
class ImageFiles:
    """Image files below one folder, optionally cropped or inverted.

    Attributes
    ----------
    root : Path
    names : bytes array of shape (n,)
        Paths relative to ``root``. They are one array because every worker process would copy a million path objects.
    boxes : int32 array of shape (n, 4), optional
        Crop of each image: left, top, right and bottom, in pixels.
    negative : bool
        Invert the colours.
    """

    root: Path
    names: NDArray[np.bytes_]
    boxes: NDArray[np.int32] | None = None
    negative: bool = False

    @classmethod
    def of(
        cls, root: Path, names: Sequence[str], boxes: Sequence[Sequence[int]] | None = None, negative: bool = False
    ) -> ImageFiles:
        """A reader made of lists."""
        return cls(
            root,
            np.array([os.fsencode(name) for name in names], dtype=np.bytes_),
            None if boxes is None else np.array(boxes, np.int32).reshape(-1, 4),
            negative,
        )

    def __len__(self) -> int:
        return len(self.names)

    def __call__(self, index: int) -> EncodedImage:
        """Image ``index``."""
        contents = (self.root / os.fsdecode(self.names[index])).read_bytes()
        if self.boxes is None:
            return EncodedImage(contents, None, self.negative)
        left, top, right, bottom = self.boxes[index].tolist()
        return EncodedImage(contents, (left, top, right, bottom), self.negative)

    def describe(self, index: int) -> str:
        """Location of image ``index``, for messages."""
        return f"{os.fsdecode(self.names[index])!r} of {self.root}"


class ZipMembers:
    """Image files in a zip."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self.names = np.array([name.encode() for name in names], dtype=np.bytes_)
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __call__(self, index: int) -> EncodedImage:
        """Image ``index``."""
        if self._opened is None or self._opened[0] != os.getpid():  # forked processes share the file position
            self._opened = os.getpid(), zipfile.ZipFile(self.path)
        return EncodedImage(_member(self._opened[1], self.names[index].decode()))

    def describe(self, index: int) -> str:
        """Location of image ``index``, for messages."""
        return f"{self.names[index].decode()!r} of {self.path}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a member, allocating no more bytes than its header declares, whatever it expands to."""
    claim = archive.getinfo(name)
    if claim.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its compression (method {claim.compress_type}) can expand without bound: deflate it")
    if claim.file_size > _MAX_MEMBER_SIZE:
        raise ValueError(f"it claims {claim.file_size} bytes uncompressed; at most {_MAX_MEMBER_SIZE} are read")
    with archive.open(claim) as file:
        return file.read(claim.file_size)  # zipfile passes the limit to the decompressor


@dataclass(frozen=True)
class ImageRows:
    """Rows of an array that the file at ``path`` holds, in order.

    ``data`` are decoded images, uint8 (n, h, w) or (n, h, w, 3), or a list of uint8 arrays with the bytes of image
    files.
    """

    path: Path
    data: NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, index: int) -> Image.Image:
        """Image ``index``, decoded."""
        row = self.data[self.rows[index]]
        return Image.fromarray(row) if isinstance(self.data, np.ndarray) else Image.open(io.BytesIO(row.tobytes()))

    def describe(self, index: int) -> str:
        """Location of image ``index``, for messages."""
        return f"row {self.rows[index]} of {self.path}"


class Bitmaps:
    """Memory-mapped ``.npy`` files of flattened square bitmaps (n_k, side^2), one after the other."""

    def __init__(self, paths: Sequence[Path], counts: Sequence[int]) -> None:
        self.paths = tuple(paths)
        self.ends = np.cumsum(counts)
        self._mapped: dict[int, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __call__(self, index: int) -> Image.Image:
        """Image ``index``, decoded."""
        file, row = self._place(index)
        if file not in self._mapped:
            self._mapped[file] = np.load(self.paths[file], mmap_mode="r", allow_pickle=False)
        bitmap = self._mapped[file][row]
        if bitmap.dtype == bool:
            bitmap = bitmap * np.uint8(255)
        side = round(bitmap.size**0.5)
        return Image.fromarray(np.ascontiguousarray(bitmap).reshape(side, side))

    def describe(self, index: int) -> str:
        """Location of image ``index``, for messages."""
        file, row = self._place(index)
        return f"row {row} of {self.paths[file]}"

    def _place(self, index: int) -> tuple[int, int]:
        """File and row of an image."""
        file = int(np.searchsorted(self.ends, index, side="right"))
        return file, index - (int(self.ends[file - 1]) if file else 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}
