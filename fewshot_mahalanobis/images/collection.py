"""A collection of images: what is one, what is wrong with its items, and one item of it as a square.

A collection is any of

- a list of file paths (``str`` or ``Path``), bytes of image files, opened binary files, PIL images, arrays (h, w, 3) or
  (h, w), tensors (3, h, w) or (1, h, w), regions of any of these, or a mixture, each of its own size; a one-dimensional
  array or a pandas Series of such items too, and any other sequence with a length and ``[]`` (a column of Hugging Face
  ``datasets``, of polars or of pyarrow), whose items are read one at a time. Such columns may hold what ``datasets``
  stores of an image, a mapping {"bytes": ..., "path": ...} with at least one of the two;
- an array (n, h, w, 3) or (n, h, w), or a tensor (n, 3, h, w) or (n, 1, h, w): uint8, bool, or float
  in [0, 1].
"""

from __future__ import annotations

import inspect
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile
from torch import Tensor
from torch.utils.data import Subset

from fewshot_mahalanobis.images.errors import ImageError, shortened
from fewshot_mahalanobis.images.formats import whole_files
from fewshot_mahalanobis.images.pages import AS_DECLARED, Reading, check_bands, check_opacity, chosen_pages
from fewshot_mahalanobis.images.picture import (
    CLOSED,
    Chosen,
    Square,
    check_header,
    chosen,
    opened,
    path_problem,
    reason,
    size_problem,
    to_square,
    to_squares_of_regions,
)
from fewshot_mahalanobis.images.ranges import span_of, to_eight_bits, unit_to_eight_bits
from fewshot_mahalanobis.images.region import Region
from fewshot_mahalanobis.plain import quoted

#: Channels of an array image: grey, RGB, or RGB with opacity.
_CHANNELS = (1, 3, 4)
#: Columns of a table that a message proposes, the first that is there.
_COLUMNS = ("image", "path", "file", "filename", "file_name", "img")
_TEXT = "it is a file opened as text: open it with mode 'rb'"
_MASKED = "a masked array has pixels without a value: choose one with .filled(value)"


def checked_collection(images: Any, reading: Reading = AS_DECLARED) -> Sequence[Any]:
    """Return a collection of images as a sequence; ImageError if it is none, or empty."""
    single = Image.Image | Region | str | os.PathLike | bytes | bytearray | memoryview
    if isinstance(images, single) or _is_binary_file(images) or _is_encoded(images):
        if isinstance(images, str | os.PathLike) and os.path.isdir(images):  # noqa: PTH112 (pathlib raises for some)
            raise ImageError(f"{str(images)!r} is a folder: pass the list of its image files")
        raise ImageError(f"got a single image ({describe(images)}): wrap it in a list")
    if (columns := _columns(images)) is not None:
        raise ImageError(
            f"a table with the columns {', '.join(map(repr, columns[:5]))}: pass the one of its images, "
            f"df[{next((name for name in _COLUMNS if name in columns), columns[0] if columns else 'image')!r}] say"
        )
    if hasattr(images, "iloc"):  # a pandas Series of paths, say
        images = images.to_numpy()
    if isinstance(images, np.ndarray) and images.dtype.kind in "OSUT" and images.ndim == 1:
        images = images.tolist()
    if isinstance(images, np.ma.MaskedArray):
        raise ImageError(_MASKED)
    if isinstance(images, np.ndarray) and images.dtype.kind in "OSUT" and images.ndim > 1:
        raise ImageError(
            f"the array of shape {images.shape} has no numbers but {images.dtype} values: pass one column of it, "
            "x[:, 0] say"
        )
    if isinstance(images, np.ndarray | Tensor):
        _check_stack(images, reading)
    elif isinstance(images, Mapping) or not (hasattr(images, "__len__") and hasattr(images, "__getitem__")):
        raise ImageError(
            f"images must be a list, an array or a tensor of images, or another sequence with len and [], got "
            f"{type(images).__name__}: turn other collections into a list first"
        )
    if len(images) == 0:
        raise ImageError("there are no images: the collection is empty")
    sequence: Sequence[Any] = images
    return sequence


def _columns(table: Any) -> list[Any] | None:
    """Names of the columns of a table of pandas, polars or pyarrow; None if it is none."""
    if not hasattr(table, "columns") or not hasattr(table, "shape") or isinstance(table, np.ndarray | Tensor):
        return None
    return list(getattr(table, "column_names", table.columns))


def _is_encoded(item: Any) -> bool:
    """Whether an item is what Hugging Face ``datasets`` stores of an image: its bytes, its path, or both."""
    return isinstance(item, Mapping) and len(item) > 0 and set(item) <= {"bytes", "path"}


def _unpacked(item: Any) -> Any:
    """The bytes or else the path of such an item; any other as it is."""
    if not _is_encoded(item):
        return item
    return item["path"] if item.get("bytes") is None else item["bytes"]


def item_of(images: Sequence[Any], index: int, lock: Lock) -> Any:
    """An item of a checked collection; ImageError if it fails to give one. Others' sequences are read in turn."""
    if isinstance(images, list | tuple | np.ndarray | Tensor):
        return images[index]
    with lock, _naming(images.dataset if isinstance(images, _ImagesOfPairs) else images, index):
        item = images[index]
        return item.as_py() if hasattr(item, "as_py") else item  # pyarrow's scalars


@contextmanager
def _naming(collection: Any, index: int) -> Iterator[None]:
    """Name the item in the error of a collection that cannot give it, such as a dataset that opens a damaged file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        kind, sample = type(collection).__name__, None
        with suppress(Exception):
            sample = _sample(collection, index)
        name = describe(sample[0]) if sample else f"of {kind}"
        raise ImageError(f"{kind} raised {type(error).__name__}: {shortened(error)}", index, name) from error


def labelled_pairs(dataset: Any) -> tuple[Sequence[Any], list[Any]] | None:
    """Images and labels of a map-style dataset of (image, label) pairs with ``classes``, such as torchvision's.

    None if it is none. A ``torch.utils.data.Subset`` has the classes of its dataset. The label of a pair is an index of
    ``classes``, or a string, which is taken as it is. ImageError if it is neither, or if a pair cannot be read.

    A dataset with ``samples``, pairs of a file and a label, and without a ``target_transform`` has its labels there, so
    nothing is decoded for a label alone. Of any other, each pair is read for its label, and later for its image. Either
    way the label must be the same when the image is read: a subclass whose pairs are not its ``samples`` is refused.
    """
    classes = _classes_of(dataset)
    if classes is None or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return None
    labels = []
    for index in range(len(dataset)):
        with _naming(dataset, index):
            labels.append(_label((_sample(dataset, index) or dataset[index])[1], classes))
    return _ImagesOfPairs(dataset, classes, labels), labels


class _ImagesOfPairs(Sequence[Any]):
    """The images of a dataset of pairs, whose labels are checked again; nothing is kept."""

    def __init__(self, dataset: Any, classes: Sequence[Any], labels: list[Any]) -> None:
        self.dataset = dataset
        self.classes = classes
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        pair = self.dataset[index]
        label = _label(pair[1], self.classes)
        if label != self.labels[index]:
            raise ValueError(
                f"its label was {quoted(self.labels[index])} and is {quoted(label)} when its image is read: pass "
                "images and labels apart, fit(images, labels)"
            )
        return pair[0]


def _classes_of(dataset: Any) -> Sequence[Any] | None:
    while isinstance(dataset, Subset) and not hasattr(dataset, "classes"):
        dataset = dataset.dataset
    return getattr(dataset, "classes", None)


def _sample(dataset: Any, index: int) -> tuple[Any, Any] | None:
    """File and label of a pair by ``samples``, or None without them."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    if not hasattr(dataset, "samples") or getattr(dataset, "target_transform", None) is not None:
        return None
    sample = dataset.samples[index]
    return sample if isinstance(sample, tuple) and len(sample) == 2 else None


def _label(target: Any, classes: Sequence[Any]) -> Any:
    """The label that a pair's second part stands for."""
    if isinstance(target, str):
        return target
    try:
        code = int(target)
        if code == target and 0 <= code < len(classes):
            return classes[code]
    except (TypeError, ValueError, OverflowError):  # one-hot, nan, infinite
        pass
    raise ValueError(
        f"its label {quoted(target)} is no index of the {len(classes)} classes: pass images and labels apart, "
        "fit(images, labels)"
    )


def check_items(images: Sequence[Any], reading: Reading = AS_DECLARED) -> None:
    """Refuse items that are no images, as far as that shows without pixels."""
    if isinstance(images, list | tuple):
        for index, item in enumerate(images):
            problem = item_problem(item, reading)
            if problem is not None:
                raise ImageError(problem, index, describe(item))


def _check_stack(images: NDArray[Any] | Tensor, reading: Reading) -> None:
    """Refuse an array that is not (n, h, w[, c]) and a tensor that is not (n, c, h, w)."""
    is_tensor = isinstance(images, Tensor)
    what = f"the {'tensor' if is_tensor else 'array'} of shape {tuple(images.shape)}"
    wanted = "(n, 3, h, w) or (n, 1, h, w)" if is_tensor else "(n, h, w, 3) or (n, h, w)"
    if images.ndim == 3 and (images.shape[0 if is_tensor else -1] in _CHANNELS or len(reading.bands or ()) > 1):
        raise ImageError(f"{what} is a single image: wrap it in a list")
    if images.ndim == 3 and is_tensor and images.shape[-1] in (3, 4):
        raise ImageError(
            f"{what} is a single image with its channels last: pass x.movedim(-1, -3)[None], as a tensor is {wanted}"
        )
    if images.ndim == 3 and is_tensor:
        raise ImageError(f"{what} lacks the channel axis of {wanted}: add it with unsqueeze(1)")
    if images.ndim not in (3, 4):
        raise ImageError(f"{what} is no stack of images: expected {wanted}")
    if len(images):
        problem = _array_problem(tuple(images.shape[1:]), images.dtype, is_tensor, reading)
        if problem is not None:
            raise ImageError(f"{what}: {problem}")


def item_problem(item: Any, reading: Reading = AS_DECLARED) -> str | None:
    """Why an item of a collection is no image, as far as that shows without its pixels, or None."""
    if _is_encoded(item):
        item = _unpacked(item)
        if item is None:
            return "it has neither bytes nor a path"
    if isinstance(item, Image.Image):
        return None
    if isinstance(item, str | os.PathLike):
        return path_problem(item)
    if isinstance(item, Region):
        return item.problem() or item_problem(item.image, reading)
    if isinstance(item, np.ma.MaskedArray):
        return _MASKED
    if isinstance(item, np.ndarray | Tensor):
        return _array_problem(tuple(item.shape), item.dtype, isinstance(item, Tensor), reading)
    if isinstance(item, bytes | bytearray | memoryview):
        return None if len(item) else "it is empty: no bytes of an image file"
    if _is_binary_file(item):
        if getattr(item, "closed", False):
            return "its file is closed: open it again, or pass its path"
        if inspect.iscoroutinefunction(item.read):
            return "an upload that is read asynchronously: pass upload.file, or what await upload.read() gives"
        # Python 3.10's SpooledTemporaryFile can seek and has no method that says so.
        return None if getattr(item, "seekable", lambda: True)() else "it is a pipe: read it into a BytesIO first"
    if isinstance(item, io.TextIOBase):
        return _TEXT
    if isinstance(item, Mapping):
        names = ", ".join(map(repr, list(item)[:5]))
        return f"a row of a table ({names}), not an image: pass the column of its images, dataset['image'] say"
    if isinstance(item, tuple) and len(item) == 2 and item_problem(item[0], reading) is None:
        return (
            "a pair of an image and its label: pass the images alone, [image for image, _ in dataset] say, or for an "
            "ImageFolder [path for path, _ in dataset.samples]. Only fit takes a dataset of pairs, in place of X and y"
        )
    return (
        "not an image: expected a path, the bytes of a file or an opened file, a PIL image, an array (h, w, 3) or "
        "(h, w), a tensor (3, h, w), or a Region of one of these"
    )


def _array_problem(
    shape: tuple[int, ...],
    dtype: np.dtype[Any] | torch.dtype,
    channels_first: bool,
    reading: Reading,
) -> str | None:
    """What is wrong with the shape or dtype of one image, or None."""
    wanted = "(3, h, w) or (1, h, w)" if channels_first else "(h, w, 3) or (h, w)"
    if len(shape) not in (2, 3):
        return f"an image of shape {shape} is not {wanted}"
    channels, other = (1, 1) if len(shape) == 2 else (shape[0], shape[-1]) if channels_first else (shape[-1], shape[0])
    move = (
        ": move the channels to the first axis, with x.movedim(-1, -3)"
        if channels_first
        else ": move the channels to the last axis, with np.moveaxis(x, -3, -1)"
    )
    if reading.bands is not None:
        if len(shape) == 3 and other < min(shape[1], channels) and abs(shape[1] - channels) < abs(shape[1] - other):
            return f"an image of shape {shape} seems to have its {other} bands at the other end{move}"
        try:
            check_bands(reading.bands, channels)
        except ImageError as error:
            return str(error)
    elif channels not in _CHANNELS:
        remedy = (
            ". Of a stack pass one picture, x[0] or x.max(axis=0) say; of more bands choose some, bands=(3, 2, 1) say"
        )
        return f"an image of shape {shape} is not {wanted}{move if other in _CHANNELS else remedy}"
    height, width = shape[1:] if channels_first and len(shape) == 3 else shape[:2]
    problem = size_problem(width, height)
    if problem is not None:
        return problem
    if isinstance(dtype, torch.dtype):
        number = not dtype.is_complex
        fine = dtype.is_floating_point or dtype in (torch.uint8, torch.bool)
    else:
        number = dtype.kind in "fbiu"
        fine = dtype.kind in "fb" or dtype == np.uint8
    if not fine and not (number and reading.value_range):
        remedy = ", or give value_range=(black, white)" if number else ""
        return f"dtype {dtype} is not used: convert to uint8 (0 to 255) or to float in [0, 1]{remedy}"
    return None


def describe(item: Any) -> str:
    """Name of an item in a message: its path if it has one, else its type; the box too of a region."""
    if isinstance(item, Region):
        return f"{describe(item.image)}, {item.place}"
    if _is_encoded(item) and item.get("path") is not None:
        return quoted(item["path"])
    if isinstance(item, str | os.PathLike):
        return quoted(os.fspath(item))
    name = getattr(item, "filename", "") if isinstance(item, Image.Image) else ""
    return quoted(os.fspath(name)) if name else type(item).__name__


@whole_files
def read_item(item: Any, index: int, size: int, lock: Lock, reading: Reading = AS_DECLARED) -> Square:
    """Item ``index`` of a collection, no region, as a square; ImageError names it.

    ``lock`` guards images that others may share.
    """
    try:
        with _picture(item, lock, reading) as picture:
            return to_square(picture, size)
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(reason(error), index, describe(item)) from error


@whole_files
def read_regions(
    regions: Sequence[Region], indices: Sequence[int], size: int, lock: Lock, reading: Reading = AS_DECLARED
) -> list[Square | ImageError]:
    """Regions of one image, items ``indices`` of a collection, as squares; an error that names it in place of one."""
    try:
        with _picture(regions[0].image, lock, reading) as picture:
            squares = to_squares_of_regions(picture, regions, size)
    except MemoryError:
        raise
    except Exception as error:
        squares = [ImageError(reason(error))] * len(regions)

    def named(square: Square | ImageError, index: int, region: Region) -> Square | ImageError:
        if isinstance(square, ImageError):
            return ImageError(square.reason, index, describe(region))
        return square

    return [named(*each) for each in zip(squares, indices, regions, strict=True)]


def regions_together(images: Sequence[Any], most_apart: int) -> list[list[int]]:
    """Indices of a checked collection that are read together: the regions of one image, each other item alone.

    In the order of their first indices, from which none is ``most_apart`` or farther. The items of other people's
    sequences are not looked at before they are due.
    """
    if not isinstance(images, list | tuple):
        return [[index] for index in range(len(images))]
    together, latest = list[list[int]](), dict[Any, list[int]]()
    for index, item in enumerate(images):
        photograph = _photograph_of(item)
        if photograph is not None and photograph in latest and index - latest[photograph][0] < most_apart:
            latest[photograph].append(index)
        else:
            together.append([index])
            latest[photograph] = together[-1]
    return together


def photographs(images: Sequence[Any], first: int = 0) -> list[str | None]:
    """A name for those images of a checked collection that are regions of one photograph, None for each other one.

    ``first`` is the number of the first image, so that collections added to each other do not share a name.
    """
    if not isinstance(images, list | tuple):
        return [None] * len(images)
    found = [_photograph_of(item) for item in images]
    number, earliest = Counter(found), dict[Any, int]()
    return [
        None if each is None or number[each] == 1 else f"photograph {earliest.setdefault(each, index)}"
        for index, each in enumerate(found, start=first)
    ]


def _photograph_of(item: Any) -> Any:
    """Key of the photograph that a region is of; None for an item that is no region."""
    if not isinstance(item, Region):
        return None
    return id(item.image) if item.path is None else item.path


@contextmanager
def _picture(item: Any, lock: Lock, reading: Reading) -> Iterator[Chosen]:
    """What is read of an item, as a PIL image."""
    item = _unpacked(item)
    if isinstance(item, str | os.PathLike):
        with opened(item, reading) as picture:
            yield picture
        return
    problem = item_problem(item, reading)
    if problem is not None:
        raise ImageError(problem)
    if isinstance(item, Image.Image):
        check_header(item)
        if getattr(item, "tile", None) and getattr(item, "fp", None) is None:
            raise ImageError(CLOSED)
        with lock:  # the same lazily opened image may be in the list twice, and loading is not thread-safe
            image, numbers = _opened_anew(item), None
            if image is item:
                image.load()
                image, numbers = _loaded(image, reading)
        yield chosen(image, reading, numbers)
    elif isinstance(item, np.ndarray | Tensor):
        yield _array_to_pil(item, reading)
    else:
        with lock:  # the same file may be in the list twice
            contents = item if isinstance(item, bytes | bytearray | memoryview) else _contents(item)
        with opened(io.BytesIO(contents), reading) as picture:
            yield picture


def _is_binary_file(item: Any) -> bool:
    return hasattr(item, "read") and hasattr(item, "seek") and not isinstance(item, io.TextIOBase)


def _contents(file: Any) -> bytes:
    """The bytes of an opened file, from its start; its position stays."""
    place = file.tell()
    file.seek(0)
    contents = file.read()
    file.seek(place)
    if not isinstance(contents, bytes):
        raise ImageError(_TEXT)
    return contents


def _opened_anew(image: Image.Image) -> Image.Image:
    """Open an image again from the bytes of its file, so that the caller's is neither loaded nor changed.

    The image itself if it is loaded, or is not the first of several, whose file would be read for each of them.
    """
    if not isinstance(image, ImageFile.ImageFile) or not image.tile or image.fp is None or image.tell() != 0:
        return image
    again = Image.open(io.BytesIO(_contents(image.fp)))
    if (again.mode, again.size) != (image.mode, image.size):  # the caller has set a scale or a frame
        return image
    again.filename = image.filename
    again.info = dict(image.info)
    return again


def _loaded(image: Image.Image, reading: Reading) -> tuple[Image.Image, list[int] | None]:
    """An image with its pixels loaded and the page that it stands for; or its file anew, if another page is chosen."""
    is_first = reading.pages == "first" or (reading.pages is None and image.format != "TIFF")
    if image.tell() != 0 or is_first or not getattr(image, "is_animated", False):
        return image, [image.tell()]
    file = getattr(image, "_fp", None)
    if not _is_binary_file(file) or getattr(file, "closed", False):
        raise ImageError("its file has several pages and is closed: pass its path, or image.copy() if this is the page")
    again = Image.open(io.BytesIO(_contents(file)))  # to look for pages moves an image, which loses what was done to it
    numbers = chosen_pages(again, reading.pages, [])
    return (image if numbers == [0] else again), numbers


def _array_to_pil(image: NDArray[Any] | Tensor, reading: Reading) -> Chosen:
    """One array (h, w[, c]) or tensor ([c, ]h, w) of a checked shape and dtype."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        if image.ndim == 3:
            image = image.permute(1, 2, 0)
        array = image.float().numpy() if image.is_floating_point() else image.numpy()
    else:
        array = image
    span, value_range = None, reading.value_range
    if reading.bands is not None and array.ndim == 3:
        array = array[..., list(reading.bands)]
    elif array.ndim == 3 and array.shape[-1] == 4:
        black, white = value_range or (0, 255 if array.dtype.kind == "u" else 1)
        check_opacity(array[..., 3], black, white)
    if array.dtype.kind == "b":
        array = array * np.uint8(255)
    elif value_range is not None:
        array = to_eight_bits(array, value_range)
    elif array.dtype.kind == "f":
        array, span = unit_to_eight_bits(array), span_of(array, 1)
    else:
        span = span_of(array, 255)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[:, :, 0]
    return Chosen(Image.fromarray(np.ascontiguousarray(array)), span=span)
