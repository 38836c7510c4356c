"""Images of any kind as the tensors that the network reads, in batches.

:mod:`~fewshot_mahalanobis.images.collection` says what a collection of images is, and
:mod:`~fewshot_mahalanobis.images.picture` how one of them is read. The same picture gives the same tensor as a path, as
an opened file and as a lazily opened PIL image. Its pixels, as a loaded PIL image, an array or a tensor, give the same
tensor too, except for a JPEG at least four times as large as the network's input, which the decoder has scaled, and a
picture with a colour profile, which an array has not.

All decoding of the package goes through :func:`decode_batches`: in threads, in order, a bounded number ahead.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from fewshot_mahalanobis.cores import one_thread
from fewshot_mahalanobis.images.collection import (
    check_items,
    checked_collection,
    describe,
    item_of,
    photographs,
    read_item,
    read_regions,
    regions_together,
)
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.memory import PictureMemory, file_contents, square_key, square_of, stored
from fewshot_mahalanobis.images.pages import Reading, checked_reading
from fewshot_mahalanobis.images.picture import Square
from fewshot_mahalanobis.images.ranges import Span, narrow_range
from fewshot_mahalanobis.images.region import Region

__all__ = [
    "DecodedBatch",
    "ImageBatches",
    "decode_batches",
    "decoding_threads",
    "to_network_range",
]

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Most decoding threads for ``n_jobs=None``.
MAX_DEFAULT_THREADS = 4
#: Tasks per thread and batch. With one task per image, submitting takes a quarter of the time of a small image; with
#: few, threads wait for the last one of a batch of large images.
_TASKS_PER_THREAD = 8
#: Images of at most this many batches stay in memory where they are read several times.
KEPT_BATCHES = 4
#: Regions of one picture are read together, and the later ones kept as squares, unless this many images are between.
#: At most as many squares wait, 0.3 GB of 224 pixels.
MOST_APART = 2048


@one_thread()
def to_network_range(images: Tensor) -> Tensor:
    """Pixels from 0 to 255, of any type and shape -> float32 in [-1, 1]."""
    return images.to(torch.float32, copy=True).div_(127.5).sub_(1)


def decoding_threads(n_jobs: int | None) -> int:
    """Number of threads for ``n_jobs``, counted as scikit-learn does; None is the usable cores, at most 4."""
    return min(joblib.cpu_count(), MAX_DEFAULT_THREADS) if n_jobs is None else joblib.effective_n_jobs(n_jobs)


def decode_batches(
    decode: Callable[[Item], Result], batches: Iterable[Sequence[Item]], *, threads: int, ahead: bool = False
) -> Generator[list[Result], None, None]:
    """Decode batches of items in threads, in order. Closing the generator ends the threads.

    Parameters
    ----------
    decode : callable
        Called once for each item. What it raises is raised here when the batch is due.
    batches : iterable of sequences
        Advanced when the decoding of a batch starts.
    threads : int
    ahead : bool, default=False
        Decode the next batch, and no more, while the caller works on one.

    Yields
    ------
    list
        Results of one batch, in the order of its items.
    """
    if threads < 2 and not ahead:
        for batch in batches:
            yield [decode(item) for item in batch]
        return

    def decode_all(items: Sequence[Item]) -> list[Result]:
        return [decode(item) for item in items]

    waiting: deque[list[Future[list[Result]]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    try:
        for batch in batches:
            length = max(1, -(-len(batch) // (_TASKS_PER_THREAD * threads)))
            parts = [batch[start : start + length] for start in range(0, len(batch), length)]
            waiting.append([pool.submit(decode_all, part) for part in parts])
            if len(waiting) > ahead:
                yield [result for task in waiting.popleft() for result in task.result()]
        while waiting:
            yield [result for task in waiting.popleft() for result in task.result()]
    finally:
        pool.shutdown(cancel_futures=True)


class DecodedBatch(NamedTuple):
    """Decoded images; accepted as a collection without further processing."""

    indices: list[int]  # (b,), their positions in the collection
    pixels: NDArray[np.uint8]  # (b, size, size, 3), RGB
    paths: Sequence[Any] = ()  # (b,), what messages call them
    boxes: Sequence[tuple[int, int, int, int] | None] = ()  # (b,), of regions: x, y, width and height in pixels


class ImageBatches:
    """A collection of images as float32 batches (b, 3, size, size) in [-1, 1], decoded in threads.

    Types, shapes and the existence of files are checked at once, the rest when an image is decoded. At most two batches
    are in memory, the one in use and the next. They are channels_last and on the CPU. Each iteration decodes anew.

    Parameters
    ----------
    images : collection of images
        As listed at the top of :mod:`~fewshot_mahalanobis.images.collection`.
    size : int
        Side of the squares, in pixels.
    batch_size : int, default=64
    n_jobs : int, optional
        Decoding threads, counted as scikit-learn does (-1: all cores). Default: the usable cores, at
        most 4.
    ahead : bool, default=True
        Decode the next batch while one is in use. False is faster where the caller keeps all cores busy.
    on_error : callable, optional
        Called with the :class:`ImageError` of each image that cannot be used, which is then left out of its batch.
        By default the first such error is raised.
    value_range : (float, float), optional
        Black and white in arrays and tensors of numbers, and in files and PIL images of more than 8 bits that do not
        declare it. By default 0 and 255 (integers), 65535 (files of 16 bits) or 1 (floats); a warning says so once
        if a collection uses less than a quarter of that.
    pages : {"first", "max", "mean"}, int or (int, int, int), optional
        Which page of a file of several is the picture: one, by its number from 0 on; the largest or mean values of all;
        or three grey ones as red, green and blue. By default a stack is an error; of an animation and of the several
        pictures of one shot (GIF, WebP, PNG, AVIF, MPO) the first frame is used, and a warning says so once.
    bands : int, (int, int, int) or (int, int, int, int), optional
        Which bands of files, PIL images, arrays and tensors are red, green and blue, or one that is grey, by their
        numbers from 0 on; the fourth is opacity. By default one band is grey and three are colours. A fourth is opacity
        where the file says so, or in an array looks like it; other bands are an error.
    progress : str, optional
        Show a progress bar of this name.
    memory : PictureMemory, optional
        Where files that were read before are looked up, and others remembered.

    Attributes
    ----------
    n_images : int
        Length of the collection, including images that are left out.
    is_narrow : bool
        After an iteration: whether its images kept to so small a part of their range that a warning asked for it.
        Then pictures that look alike cannot be distinguished.

    Raises
    ------
    ImageError
        From the constructor: not a collection, or an empty one; without ``on_error`` also an item that is no image, a
        missing file, a wrong shape or dtype. From the iteration: a file that cannot be decoded to its end, NaN, a float
        outside [0, 1]. The message names the item.
    """

    def __init__(
        self,
        images: Any,
        size: int,
        *,
        batch_size: int = 64,
        n_jobs: int | None = None,
        ahead: bool = True,
        on_error: Callable[[ImageError], object] | None = None,
        value_range: tuple[float, float] | None = None,
        pages: str | int | Sequence[int] | None = None,
        bands: int | Sequence[int] | None = None,
        progress: str | None = None,
        memory: PictureMemory | None = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
        if n_jobs is not None and not isinstance(n_jobs, int | np.integer):
            raise ValueError(f"n_jobs must be a whole number or None, got {n_jobs!r}")
        self.reading = checked_reading(value_range, pages, bands)
        self._final = isinstance(images, DecodedBatch)
        self._paths = images.paths if isinstance(images, DecodedBatch) else ()
        self._images = checked_collection(
            *((images.pixels,) if isinstance(images, DecodedBatch) else (images, self.reading))
        )
        if on_error is None and not self._final:
            check_items(self._images, self.reading)
        self.n_images = len(self._images)
        self.size = size
        self.batch_size = int(batch_size)
        self.ahead = ahead
        self.on_error = on_error
        self.progress = progress
        self.memory = memory
        self.n_threads = decoding_threads(n_jobs)
        self.is_narrow = False
        self._remarked = False

    @property
    def images(self) -> Any:
        """The collection, as it was checked."""
        return self._images

    def name(self, index: int) -> str:
        """What to call an image in a message: its place, and its path if it has one."""
        named = self._paths or self._images
        item = named[index] if isinstance(named, list | tuple) else None
        path = describe(item)
        return f"image {index}" + (f" ({path})" if path.startswith(("'", '"')) else "")

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.decoded():
            yield to_network_range(torch.from_numpy(batch.pixels).permute(0, 3, 1, 2))

    def decoded(self) -> Iterator[DecodedBatch]:
        """Iterate over the batches as uint8, with the positions of their images. A batch is never empty."""
        lock, remarks, new = Lock(), dict[str, dict[int, str]](), deque[tuple[bytes, bytes]]()

        def read(indices: list[int]) -> list[Square | ImageError]:
            """Images that are read together, which is one, or the regions of one."""
            try:
                images = [item_of(self._images, index, lock) for index in indices]
                if self._final and images[0].shape == (self.size, self.size, 3):
                    return [Square(images[0])]
                reading = checked_reading() if self._final else self.reading

                def read_anew() -> list[Square | ImageError]:
                    if isinstance(images[0], Region):
                        return read_regions(images, indices, self.size, lock, reading)
                    return [read_item(images[0], indices[0], self.size, lock, reading)]

                squares = (
                    read_anew()
                    if self.memory is None
                    else _remembered(self.memory, images, self.size, reading, read_anew, new)
                )
            except ImageError as error:
                if self.on_error is None:
                    raise
                return [error]
            for index, image, square in zip(indices, images, squares, strict=True):
                for remark in square.remarks if isinstance(square, Square) else ():
                    remarks.setdefault(remark, {})[index] = describe(image)
            return squares

        starts = range(0, self.n_images, self.batch_size)
        batches = [range(start, min(start + self.batch_size, self.n_images)) for start in starts]
        together: list[list[list[int]]] = [[] for _ in batches]
        for indices in regions_together(self._images, MOST_APART):
            together[indices[0] // self.batch_size].append(indices)
        hidden = self.progress is None or sys.stderr is None  # as under pythonw
        spans, read_before = list[Span](), dict[int, Square | ImageError]()
        with (
            closing(decode_batches(read, together, threads=self.n_threads, ahead=self.ahead)) as results_of_batches,
            tqdm(total=self.n_images, desc=self.progress, unit="image", disable=hidden) as bar,
        ):
            for batch, read_together, results in zip(batches, together, results_of_batches, strict=True):
                for indices, squares in zip(read_together, results, strict=True):
                    read_before.update(zip(indices, squares, strict=True))
                if self.memory is not None:
                    self.memory.put(dict(new.popleft() for _ in range(len(new))))
                usable = dict[int, Square]()
                for index in batch:
                    result = read_before.pop(index)
                    if isinstance(result, ImageError):
                        if self.on_error is None:
                            raise result
                        self.on_error(result)
                        continue
                    usable[index] = result
                    if result.span is not None:
                        spans.append(result.span)
                if usable:
                    pixels, boxes = zip(*((square.pixels, square.box) for square in usable.values()), strict=True)
                    yield DecodedBatch([*usable], np.stack(pixels), boxes=boxes)
                bar.update(len(batch))
        narrow = narrow_range(spans)
        self.is_narrow = narrow is not None
        if self._remarked:
            return
        self._remarked = True
        for remark, named in remarks.items():
            first = min(named)
            others = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
            warnings.warn(f"image {first} ({named[first]}){others}: {remark}", stacklevel=2)
        if narrow:
            warnings.warn(narrow, stacklevel=2)

    def name_of(self, index: int) -> str:
        """Name of an image in a message: its path if it has one, else its type."""
        return describe(item_of(self._images, index, Lock()))

    def names(self) -> list[str | None] | None:
        """Path, with a region's box, of each image that is a file by name, else None; None if none is."""
        images = self._images if isinstance(self._images, list | tuple) else []
        paths = [_name(item) for item in images]
        return paths if any(paths) else None

    def photographs(self, first: int = 0) -> list[str | None]:
        """A name for those images that are regions of one photograph, by the number that its first has; else None."""
        return photographs(self._images, first)

    def several_times(self, dtype: torch.dtype) -> Iterable[Tensor]:
        """Batches to iterate over several times: up to four are decoded once and kept in ``dtype``, more each time."""
        if self.n_images > KEPT_BATCHES * self.batch_size:
            return self
        return [batch.to(dtype) for batch in self]


def _remembered(
    memory: PictureMemory,
    images: Sequence[Any],
    size: int,
    reading: Reading,
    read_anew: Callable[[], list[Square | ImageError]],
    new: deque[tuple[bytes, bytes]],
) -> list[Square | ImageError]:
    """Squares of images that are read together, one file or regions of one, from memory or read anew.

    Those that are not in memory are added to ``new``, by their keys.
    """
    file = images[0].image if isinstance(images[0], Region) else images[0]
    contents = file_contents(file, size) if isinstance(file, str | os.PathLike) else None
    if contents is None:
        return read_anew()
    keys = [square_key(contents, image, size, reading) for image in images]
    found = memory.get(keys)
    if len(found) == len({*keys}):
        return [square_of(found[key], size) for key in keys]
    squares = read_anew()
    if contents.hold(file):
        for key, square in zip(keys, squares, strict=True):
            if isinstance(square, Square) and key not in found:
                new.append((key, stored(square)))
    return squares


def _name(item: Any) -> str | None:
    if isinstance(item, Region):
        return None if item.path is None else str(item)
    return os.fsdecode(item) if isinstance(item, str | os.PathLike) else None
