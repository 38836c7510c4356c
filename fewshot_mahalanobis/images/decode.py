"""Images of any kind as the tensors that the network reads.

A collection of images is any of

- a list of file paths (``str`` or ``Path``), PIL images, arrays (h, w, 3) or (h, w), tensors (3, h, w) or
  (1, h, w), or a mixture, each of its own size; a one-dimensional array or a pandas Series of such items too;
- an array (n, h, w, 3) or (n, h, w), or a tensor (n, 3, h, w) or (n, 1, h, w): uint8, bool, or float
  in [0, 1].

Every image is converted to 8-bit RGB and resized to a square by Pillow's antialiased bilinear filter, without keeping
its aspect, as in Meta-Dataset (Triantafillou et al., ICLR 2020). So the same picture gives the same tensor as a path,
a PIL image, an array or a tensor. Floats are rounded to the 8 bits that the network was trained on. Colour profiles are
not applied, as in its training.

All decoding of the package goes through :func:`decode_batches`: in threads, in order, a bounded number ahead.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, TypeVar

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from tqdm.auto import tqdm

from fewshot_mahalanobis.images.formats import open_image

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Channels of an array image: grey, RGB, or RGB with opacity.
_CHANNELS = (1, 3, 4)
#: Most decoding threads for ``n_jobs=None``.
MAX_DEFAULT_THREADS = 4
#: Tasks per thread and batch. With one task per image, submitting takes a quarter of the time of a small image.
_TASKS_PER_THREAD = 4
#: Most pixels of an image (Pillow's own limit, which other code may change for the whole process) and its longest side
#: (JPEG's: the first pass of a resize has the new width and the old height, so a thin image would need much memory).
MAX_PIXELS, MAX_SIDE = 178_956_970, 65_535
#: Tolerance for floats just outside [0, 1].
_ROUNDING = 1e-6


class ImageError(ValueError):
    """An image, or a collection of images, cannot be used. The message names it and the remedy.

    Attributes
    ----------
    reason : str
        The message without the name of the image.
    index : int or None
        Position of the image in its collection.
    """

    def __init__(self, reason: str, index: int | None = None, name: str = "") -> None:
        super().__init__(reason if index is None else f"image {index} ({name}): {reason}")
        self.reason = reason
        self.index = index


def to_square_array(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """One image as uint8 RGB of shape (size, size, 3).

    The EXIF orientation is applied, transparent pixels become white, and 16-bit grey is scaled to 8 bits over its full
    range. Of a file with several frames the current one is used. Modes are those that Pillow converts to RGB, and I;16
    and I (0 to 65535) and F (0 to 1).

    ImageError if the image has no pixels or too many, is Encapsulated PostScript, or has values outside its range;
    errors of many types, from Pillow, if the file behind a lazily opened image is damaged.
    """
    check_header(image)
    image.load()  # some formats have the orientation after the pixels
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # exif_transpose always copies
        image = ImageOps.exif_transpose(image)
    rgb = _to_rgb(image)
    if rgb.size != (size, size):
        rgb = rgb.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(rgb)


def read_square_array(file: str | os.PathLike[Any] | BinaryIO, size: int) -> NDArray[np.uint8]:
    """One image file, by path or opened, as uint8 RGB of shape (size, size, 3).

    The format is recognised by the contents, whatever the name. The first of several frames is used. An opened file
    must be able to seek: a pipe is refused, as it could block. ImageError if the file cannot be read, is no image,
    needs a decoder that is not installed, is damaged or cut short, or is refused by :func:`to_square_array`. The
    message does not name the file.
    """
    try:
        if isinstance(file, str | os.PathLike):
            problem = _path_problem(file)
            if problem is not None:
                raise ImageError(problem)
            # Opened here because Pillow memory-maps some files given by name, which hides that a file is cut short.
            with Path(os.fsdecode(file)).open("rb") as opened:
                return read_square_array(opened, size)
        with open_image(file, MAX_PIXELS) as image:
            return to_square_array(image, size)
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(_reason(error)) from error


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
    """Decoded images of a collection."""

    indices: list[int]  # (b,), their positions in the collection
    pixels: NDArray[np.uint8]  # (b, size, size, 3), RGB


class ImageBatches:
    """A collection of images as float32 batches (b, 3, size, size) in [-1, 1], decoded in threads.

    Types, shapes and the existence of files are checked at once, the rest when an image is decoded. At most two batches
    are in memory, the one in use and the next. They are channels_last and on the CPU. Each iteration decodes anew.

    Parameters
    ----------
    images : collection of images
        As listed at the top of this module.
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
    progress : str, optional
        Show a progress bar of this name.

    Attributes
    ----------
    n_images : int
        Length of the collection, including images that are left out.

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
        progress: str | None = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
        if n_jobs is not None and not isinstance(n_jobs, int | np.integer):
            raise ValueError(f"n_jobs must be a whole number or None, got {n_jobs!r}")
        self._images = _checked_collection(images)
        if on_error is None:
            _check_items(self._images)
        self.n_images = len(self._images)
        self.size = size
        self.batch_size = int(batch_size)
        self.ahead = ahead
        self.on_error = on_error
        self.progress = progress
        self.n_threads = decoding_threads(n_jobs)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.decoded():
            yield to_network_range(torch.from_numpy(batch.pixels).permute(0, 3, 1, 2))

    def decoded(self) -> Iterator[DecodedBatch]:
        """Iterate over the batches as uint8, with the positions of their images. A batch is never empty."""
        lock = Lock()

        def decode(index: int) -> NDArray[np.uint8] | ImageError:
            try:
                return _decode_item(self._images[index], index, self.size, lock)
            except ImageError as error:
                if self.on_error is None:
                    raise
                return error

        starts = range(0, self.n_images, self.batch_size)
        batches = [range(start, min(start + self.batch_size, self.n_images)) for start in starts]
        with (
            closing(decode_batches(decode, batches, threads=self.n_threads, ahead=self.ahead)) as results_of_batches,
            tqdm(total=self.n_images, desc=self.progress, unit="image", disable=self.progress is None) as bar,
        ):
            for batch, results in zip(batches, results_of_batches, strict=True):
                usable = dict[int, NDArray[np.uint8]]()
                for index, result in zip(batch, results, strict=True):
                    if not isinstance(result, ImageError):
                        usable[index] = result
                    elif self.on_error is not None:
                        self.on_error(result)
                if usable:
                    yield DecodedBatch([*usable], np.stack([*usable.values()]))
                bar.update(len(batch))

    def stacked(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All images (n, 3, size, size) in ``dtype``, channels_last; each decoded batch is freed once it is copied."""
        shape = (self.n_images, 3, self.size, self.size)
        images = torch.empty(shape, dtype=dtype, device="cpu", memory_format=torch.channels_last)
        start = 0
        for batch in self:
            images[start : start + len(batch)] = batch
            start += len(batch)
        return images[:start]


def _checked_collection(images: Any) -> Sequence[Any]:
    """Return a collection of images as a sequence; ImageError if it is none, or empty."""
    if isinstance(images, Image.Image | str | os.PathLike):
        if isinstance(images, str | os.PathLike) and os.path.isdir(images):  # noqa: PTH112 (pathlib raises for some)
            raise ImageError(f"{str(images)!r} is a folder: pass the list of its image files")
        raise ImageError(f"got a single image ({_describe(images)}): wrap it in a list")
    if hasattr(images, "to_numpy"):  # a pandas Series of paths, say
        images = images.to_numpy()
    if isinstance(images, np.ndarray) and images.dtype.kind in "OUT" and images.ndim == 1:
        images = images.tolist()
    if isinstance(images, np.ndarray | Tensor):
        _check_stack(images)
    elif not isinstance(images, list | tuple):
        raise ImageError(
            f"images must be a list, an array or a tensor of images, got {type(images).__name__}: "
            "turn other collections into a list first"
        )
    if len(images) == 0:
        raise ImageError("there are no images: the collection is empty")
    return images


def _check_items(images: Sequence[Any]) -> None:
    """Refuse items that are no images, as far as that shows without pixels."""
    if isinstance(images, list | tuple):
        for index, item in enumerate(images):
            problem = _item_problem(item)
            if problem is not None:
                raise ImageError(problem, index, _describe(item))


def _check_stack(images: NDArray[Any] | Tensor) -> None:
    """Refuse an array that is not (n, h, w[, c]) and a tensor that is not (n, c, h, w)."""
    is_tensor = isinstance(images, Tensor)
    what = f"the {'tensor' if is_tensor else 'array'} of shape {tuple(images.shape)}"
    wanted = "(n, 3, h, w) or (n, 1, h, w)" if is_tensor else "(n, h, w, 3) or (n, h, w)"
    if images.ndim == 3 and images.shape[0 if is_tensor else -1] in _CHANNELS:
        raise ImageError(f"{what} is a single image: wrap it in a list")
    if images.ndim == 3 and is_tensor:
        raise ImageError(f"{what} lacks the channel axis of {wanted}: add it with unsqueeze(1)")
    if images.ndim not in (3, 4):
        raise ImageError(f"{what} is no stack of images: expected {wanted}")
    if len(images):
        problem = _array_problem(tuple(images.shape[1:]), images.dtype, is_tensor)
        if problem is not None:
            raise ImageError(f"{what}: {problem}")


def _item_problem(item: Any) -> str | None:
    """Why an item of a collection is no image, as far as that shows without its pixels, or None."""
    if isinstance(item, Image.Image):
        return None
    if isinstance(item, str | os.PathLike):
        return _path_problem(item)
    if isinstance(item, np.ndarray | Tensor):
        return _array_problem(tuple(item.shape), item.dtype, isinstance(item, Tensor))
    return "not an image: expected a path, a PIL image, an array (h, w, 3) or (h, w), or a tensor (3, h, w)"


def _path_problem(path: str | os.PathLike[Any]) -> str | None:
    """Why a path is no readable file, or None; without opening it, as a pipe would block."""
    try:
        status = os.stat(path)  # noqa: PTH116 (takes names in bytes too)
    except FileNotFoundError:
        return "a link to nothing" if os.path.islink(path) else f"no such file (looked in {Path.cwd()})"  # noqa: PTH114
    except (OSError, ValueError) as error:  # a folder that may not be entered, a name too long or with a null
        return f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(status.st_mode):
        return "it is a folder, not an image file"
    if not stat.S_ISREG(status.st_mode):
        return "it is a pipe, a socket or a device, not an image file"
    return None if status.st_size else "the file is empty"


def check_header(image: Image.Image) -> None:
    """Refuse an image by its header, before its pixels cost memory or time."""
    if image.format == "EPS":
        raise ImageError("Encapsulated PostScript is a program, to be run by Ghostscript: convert it to PNG first")
    problem = _size_problem(*image.size)
    if problem is not None:
        raise ImageError(problem)


def _size_problem(width: int, height: int) -> str | None:
    if width == 0 or height == 0:
        return f"it has no pixels (size {width} x {height})"
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        return (
            f"{width} x {height} pixels are too many: at most {MAX_PIXELS}, with sides of up to {MAX_SIDE}, "
            "are read. Scale it down first"
        )
    return None


def _array_problem(shape: tuple[int, ...], dtype: np.dtype[Any] | torch.dtype, channels_first: bool) -> str | None:
    """What is wrong with the shape or dtype of one image, or None."""
    wanted = "(3, h, w) or (1, h, w)" if channels_first else "(h, w, 3) or (h, w)"
    if len(shape) not in (2, 3):
        return f"an image of shape {shape} is not {wanted}"
    if len(shape) == 3 and shape[0 if channels_first else -1] not in _CHANNELS:
        elsewhere = shape[-1 if channels_first else 0] in _CHANNELS
        move = (
            "to the first axis, with x.movedim(-1, -3)"
            if channels_first
            else "to the last axis, with np.moveaxis(x, -3, -1)"
        )
        remedy = f": move the channels {move}"
        return f"an image of shape {shape} is not {wanted}{remedy if elsewhere else ''}"
    height, width = shape[1:] if channels_first and len(shape) == 3 else shape[:2]
    problem = _size_problem(width, height)
    if problem is not None:
        return problem
    if isinstance(dtype, torch.dtype):
        fine = dtype.is_floating_point or dtype in (torch.uint8, torch.bool)
    else:
        fine = dtype.kind in "fb" or dtype == np.uint8
    if not fine:
        return f"dtype {dtype} is not used: convert to uint8 (0 to 255) or to float in [0, 1]"
    return None


def _describe(item: Any) -> str:
    """Name of an item in a message: its path if it has one, else its type."""
    if isinstance(item, str | os.PathLike):
        return repr(os.fspath(item))
    name = getattr(item, "filename", "") if isinstance(item, Image.Image) else ""
    return repr(os.fspath(name)) if name else type(item).__name__


def _decode_item(item: Any, index: int, size: int, lock: Lock) -> NDArray[np.uint8]:
    """Item ``index`` of a collection as uint8 RGB (size, size, 3); ImageError names it."""
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.shape == (size, size, 3):
        return item  # resizing would not change it
    try:
        if isinstance(item, str | os.PathLike):
            return read_square_array(item, size)
        problem = _item_problem(item)
        if problem is not None:
            raise ImageError(problem)
        if isinstance(item, Image.Image):
            check_header(item)
            with lock:  # the same lazily opened image may be in the list twice, and loading is not thread-safe
                item.load()
            return to_square_array(item, size)
        return to_square_array(_array_to_pil(item), size)
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(_reason(error), index, _describe(item)) from error


def _reason(error: Exception) -> str:
    """Message for the user about an error of reading one image."""
    if isinstance(error, ImageError):
        return str(error)
    if isinstance(error, Image.UnidentifiedImageError):
        return str(error)
    if isinstance(error, Image.DecompressionBombError):
        return f"it has too many pixels: {error} Scale it down first"
    if isinstance(error, PermissionError):
        return f"it cannot be read: {error.strerror}"
    # Pillow's decoders raise a dozen unrelated types on a damaged file, some without a message.
    return f"it cannot be decoded, is it damaged? {str(error) or type(error).__name__}"


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray(_sixteen_to_eight_bits(np.asarray(image)))
    elif image.mode == "F":
        image = Image.fromarray(_unit_to_eight_bits(np.asarray(image)))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _array_to_pil(image: NDArray[Any] | Tensor) -> Image.Image:
    """One array (h, w[, c]) or tensor ([c, ]h, w) of a checked shape and dtype."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        if image.ndim == 3:
            image = image.permute(1, 2, 0)
        array = image.float().numpy() if image.is_floating_point() else image.numpy()
    else:
        array = image
    if array.dtype.kind == "f":
        array = _unit_to_eight_bits(array)
    elif array.dtype.kind == "b":
        array = array * np.uint8(255)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def _unit_to_eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Floats in [0, 1] -> 0 to 255, rounded: k / 255 gives k."""
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(low) or not np.isfinite(high):
        raise ImageError("it contains NaN or infinity")
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        remedy = "map them back with (x + 1) / 2" if -1 <= low < 0 and high <= 1 else "divide by 255"
        raise ImageError(
            f"its values run from {low:g} to {high:g}, but floats must lie in [0, 1]: "
            f"{remedy}, or by whatever spans [0, 1]"
        )
    return np.rint(np.clip(values, 0, 1).astype(np.float32) * 255).astype(np.uint8)


def _sixteen_to_eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Integers from 0 to 65535 -> 0 to 255, rounded: 257 k gives k."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ImageError(f"its values run from {low} to {high}, but integer grey must lie in 0 to 65535: rescale it")
    return np.rint(values / 257).astype(np.uint8)
