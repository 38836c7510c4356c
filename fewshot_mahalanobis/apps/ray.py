"""Label a very large collection of images with one fitted classifier, on a Ray cluster.

On a machine of the cluster, or by ``ray job submit``:

    python -m fewshot_mahalanobis.apps.ray pets.safetensors s3://bucket/photos s3://bucket/labels

Only the classifier's file (once for each machine) and rows of text travel between machines: every worker reads and
decodes images itself, as ``predict`` does. A worker that dies is replaced, and the rows it had not returned are
computed again. Only the process that was started writes results, each row once, in files that appear whole or not at
all. So no image is lost or labelled twice, and a killed command continues where it stopped when it is repeated.

The module needs the extra ``ray``. Importing it does not import Ray.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from fewshot_mahalanobis.apps.answer_files import as_text
from fewshot_mahalanobis.apps.cli_options import clear_errors
from fewshot_mahalanobis.apps.exit_status import exit_after
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.images.decode import DecodedBatch, decode_batches
from fewshot_mahalanobis.images.folders import find_images, image_names
from fewshot_mahalanobis.images.pages import reading_of
from fewshot_mahalanobis.images.picture import read_square
from fewshot_mahalanobis.support_set.answers import GRADE_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa
    import ray
    from pyarrow.fs import FileSystem

#: Images that a worker gets at a time. While the network works on some of them, others are decoded.
_BATCH = 256
#: Rows of a Parquet file. A killed worker, or each worker of a killed run, has to label at most this many images again.
IMAGES_PER_FILE = 4096
#: Key of the classifier's digest in the metadata of every Parquet file.
_CLASSIFIER = b"classifier"


class Labelled(NamedTuple):
    """Counts of one run of :func:`label_collection`.

    Attributes
    ----------
    labelled : int
        Images with a new label.
    unreadable : int
        Images that could not be read.
    known : int
        Images of an earlier run.
    """

    labelled: int
    unreadable: int
    known: int


def label_collection(
    classifier: str | os.PathLike[str],
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    workers: int | None = None,
    cpus_per_worker: int = 1,
    gpus_per_worker: float = 0,
) -> Labelled:
    r"""Label a collection on the Ray cluster that this process is connected to, or on this machine.

    Parameters
    ----------
    classifier : path
        File that :meth:`SimpleCNAPSClassifier.save` wrote, on this machine.
    images : path, URI or list of paths
        A folder, searched with its sub-folders, or a list of image files, which every machine of the cluster must see
        at the same place; or the URI of a folder in a storage that Arrow knows (s3://, gs://, hdfs://). Parquet holds
        text: bytes of a name that are not UTF-8 are written as in ``caf\xe9.jpg``.
    output : path or URI
        Folder of Parquet files, made if absent. Images that have a row in it are not read again. Only one run at a time
        may write to it. Columns: "path" (absolute; for a URI bucket and key), "label" (that of ``predict``),
        "probability" (of the most probable class), "error" (null, or why the image could not be read; all others are
        null then), and, null if the classifier rejects nothing, "class" (the most probable one), "outlier_score",
        "outlier_threshold" (above it an image gets the unknown label) and "doubt" (from 0 to 1, to rank answers by).
    workers : int, optional
        Default: as many as the cluster has room for.
    cpus_per_worker : int
        Threads of each worker.
    gpus_per_worker : float
        0 runs the network on the CPU.

    Returns
    -------
    Labelled
        Numbers of images.

    Raises
    ------
    FileNotFoundError
        There is no such classifier or folder.
    ValueError
        ``classifier`` is no saved classifier, there is no image, a number is not positive, ``output`` has labels of
        another classifier, or two names look alike as text.
    ImportError
        Ray is not installed.
    """
    _require_ray()
    _check_numbers(workers, cpus_per_worker)
    import pyarrow.compute as pc

    content = _checked_content(classifier)
    digest = hashlib.sha256(content).hexdigest().encode()
    filesystem, paths = _list_images(images)
    column = pc.unique(_path_column(paths))
    texts = _texts(column)
    store, folder = _storage(output)
    store.create_dir(folder)
    known = _known_paths(store, folder, digest)
    to_do = column.filter(pc.invert(pc.is_in(texts, value_set=known)))
    labelled = unreadable = 0
    if len(to_do):
        rows = _labelled(content, to_do, filesystem, workers, cpus_per_worker, gpus_per_worker, IMAGES_PER_FILE)
        run = uuid.uuid4().hex
        tables = cast("Iterable[pa.Table]", rows.iter_batches(batch_size=None, batch_format="pyarrow"))
        for number, table in enumerate(tables):
            _write(table.replace_schema_metadata({_CLASSIFIER: digest}), store, folder, f"{run}-{number:06d}.parquet")
            unreadable += len(table) - table["error"].null_count
            labelled += table["error"].null_count
    return Labelled(labelled, unreadable, len(column) - len(to_do))


def label_images(
    classifier: str | os.PathLike[str],
    paths: Sequence[str | os.PathLike[str]] | pa.Array,
    *,
    filesystem: FileSystem | None = None,
    workers: int | None = None,
    cpus_per_worker: int = 1,
    gpus_per_worker: float = 0,
    images_per_block: int = 4096,
) -> ray.data.Dataset:
    """Label images as a Ray data set, for your own pipelines. :func:`label_collection` writes files.

    Parameters
    ----------
    classifier : path
        File that :meth:`SimpleCNAPSClassifier.save` wrote, on this machine.
    paths : list of paths or Arrow array of strings
        Image files.
    filesystem : pyarrow.fs.FileSystem, optional
        Where the paths are. Default: files that every machine of the cluster sees.
    workers, cpus_per_worker, gpus_per_worker
        As for :func:`label_collection`.
    images_per_block : int
        Images that one worker labels as one block.

    Returns
    -------
    ray.data.Dataset
        A row for each path, in any order, with the columns of :func:`label_collection`. It is lazy: nothing is
        labelled until rows are requested.

    Raises
    ------
    FileNotFoundError
        There is no such classifier.
    ValueError
        ``classifier`` is no saved classifier, or a number is not positive.
    ImportError
        Ray is not installed.
    """
    _require_ray()
    import pyarrow as pa

    _check_numbers(workers, cpus_per_worker, images_per_block=images_per_block)
    content = _checked_content(classifier)
    column = paths.cast(pa.binary()) if isinstance(paths, pa.Array) else _path_column(paths)
    return _labelled(content, column, filesystem, workers, cpus_per_worker, gpus_per_worker, images_per_block)


def _labelled(
    content: bytes,
    paths: pa.Array,
    filesystem: FileSystem | None,
    workers: int | None,
    cpus_per_worker: int,
    gpus_per_worker: float,
    images_per_block: int,
) -> ray.data.Dataset:
    """The data set of :func:`label_images`, for the bytes of a classifier's file and of paths."""
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy

    # Small enough blocks for every worker to have some.
    size = min(images_per_block, max(1, -(-len(paths) // (2 * workers)))) if workers else images_per_block
    table = pa.table({"path": paths})
    blocks = [table.slice(start, size) for start in range(0, max(len(table), 1), size)]
    return ray.data.from_arrow(blocks).map_batches(
        _Worker,
        fn_constructor_args=(
            ray.put(content),
            cpus_per_worker,
            "cuda" if gpus_per_worker else "cpu",
            filesystem,
        ),
        batch_size=min(_BATCH, size),  # Ray joins blocks until a worker has as many rows
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=cpus_per_worker,
        num_gpus=gpus_per_worker or None,
        compute=ActorPoolStrategy(size=workers) if workers else ActorPoolStrategy(min_size=1),
    )


class _Worker:
    """An actor: loads the classifier once from the cluster's object store, then labels batch after batch."""

    def __init__(self, file: ray.ObjectRef, cpus: int, device: str, filesystem: FileSystem | None) -> None:
        import pyarrow as pa
        import ray

        torch.set_num_threads(cpus)  # this process is Ray's and does nothing else
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "classifier.safetensors"
            path.write_bytes(ray.get(file))
            self.classifier = SimpleCNAPSClassifier.load(path, device=device).set_params(n_jobs=1, verbose=0)
        self.filesystem = filesystem
        self.threads = cpus
        labels = pa.array([as_text(label) for label in self.classifier.classes_.tolist()]).type
        self.schema = pa.schema(
            [
                ("path", pa.string()),
                ("label", labels),
                ("probability", pa.float64()),
                ("error", pa.string()),
                ("class", labels),
                *((name, pa.float64()) for name in GRADE_COLUMNS[1:]),
            ]
        )

    def __call__(self, batch: pa.Table) -> pa.Table:
        import pyarrow as pa

        paths, size = [os.fsdecode(path) for path in batch["path"].to_pylist()], self.classifier.batch_size
        chunks = [paths[start : start + size] for start in range(0, len(paths), size)]
        rows = []
        # Beside the network where a worker waits for a GPU or for files from elsewhere; a CPU has enough to do.
        ahead = self.classifier.device_.type != "cpu" or self.filesystem is not None
        decoded = decode_batches(self._read, chunks, threads=self.threads, ahead=ahead)
        for chunk, images in zip(chunks, decoded, strict=True):
            answers = iter(self._answers([image for image in images if not isinstance(image, str)]))
            for path, image in zip(chunk, images, strict=True):
                row = {"error": image} if isinstance(image, str) else next(answers)
                rows.append({name: as_text(value) for name, value in {"path": path, **row}.items()})
        return pa.Table.from_pylist(rows, schema=self.schema)

    def _read(self, path: str) -> NDArray[np.uint8] | str:
        """One image as uint8 (size, size, 3), or why it cannot be read."""
        size, reading = self.classifier.model_.image_size, reading_of(self.classifier)
        try:
            if self.filesystem is None:
                return read_square(path, size, reading).pixels
            with self.filesystem.open_input_file(path) as file:
                return read_square(file, size, reading).pixels
        except (OSError, ValueError) as error:
            return str(error)

    def _answers(self, images: list[NDArray[np.uint8]]) -> list[dict[str, Any]]:
        """Label of each image, the probability of its most probable class, and how near that is to rejection."""
        if not images:
            return []
        answers = self.classifier.predict_all(DecodedBatch([*range(len(images))], np.stack(images)))
        columns = {"label": answers.labels, "probability": answers.probabilities.max(axis=1)}
        if self.classifier.threshold_ is not None:
            best = self.classifier.classes_[answers.probabilities.argmax(axis=1)]
            limits = np.full(len(images), self.classifier.threshold_)
            grades = best, answers.outlier_scores, limits, answers.doubts
            columns |= dict(zip(GRADE_COLUMNS, grades, strict=True))
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


def _require_ray() -> None:
    try:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}: {install_command('ray')}") from error


def _check_numbers(workers: int | None, cpus_per_worker: int, **images: int) -> None:
    for name, number in {"workers": workers, "cpus_per_worker": cpus_per_worker, **images}.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be positive, got {number!r}")


def _checked_content(classifier: str | os.PathLike[str]) -> bytes:
    """Bytes of the classifier's file, after loading it here: Ray would for ever restart workers that cannot do it."""
    SimpleCNAPSClassifier.load(classifier, device="cpu")
    return Path(classifier).read_bytes()


def _path_column(paths: Sequence[str | os.PathLike[str]]) -> pa.Array:
    """Paths as bytes: not every name of a file is text."""
    import pyarrow as pa

    return pa.array([os.fsencode(path) for path in paths], pa.binary())


def _texts(paths: pa.Array) -> pa.Array:
    """What stands for each path in the results; ValueError if two different ones would look alike there."""
    import pyarrow as pa

    texts = pa.array([as_text(os.fsdecode(path)) for path in paths.to_pylist()], pa.string())
    if len(texts.unique()) < len(texts):
        twice = Counter(texts.to_pylist()).most_common(1)[0][0]
        raise ValueError(f"two files would be called {twice} in the results: rename the one that is not in UTF-8")
    return texts


def _list_images(
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[FileSystem | None, list[str]]:
    """File system of a collection (None: local files) and the absolute paths of its images."""
    from pyarrow.fs import FileSelector, FileType

    if isinstance(images, str) and "://" in images:
        filesystem, folder = _storage(images)
        entries = filesystem.get_file_info(FileSelector(folder, recursive=True))
        files_below = {
            entry.path.removeprefix(folder).lstrip("/"): entry.path for entry in entries if entry.type == FileType.File
        }
        names, note = image_names(files_below)
        if not names:
            raise ValueError(f"{images} holds no image. {note}".rstrip())
        _warn_of_left_out(images, note)
        return filesystem, sorted(files_below[name] for name in names)
    files: Sequence[str | os.PathLike[str]]
    if isinstance(images, str | os.PathLike):
        found = find_images(Path(images))
        _warn_of_left_out(images, found.note())
        files = found.paths
    else:
        files = images
    if not len(files):
        raise ValueError("there are no images: the list is empty")
    return None, [os.path.abspath(file) for file in files]  # noqa: PTH100 (keeps a million strings strings)


def _warn_of_left_out(images: str | os.PathLike[str], note: str) -> None:
    if note:
        warnings.warn(f"{os.fspath(images)}: {note}", stacklevel=4)


def _storage(place: str | os.PathLike[str]) -> tuple[FileSystem, str]:
    """File system and folder of a path or URI."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    if isinstance(place, str) and "://" in place:
        filesystem, folder = FileSystem.from_uri(place)
        return filesystem, folder
    folder = str(Path(place).resolve())
    if as_text(folder) != folder:
        raise ValueError(f"the name of the folder {as_text(folder)} is not in UTF-8, which Arrow needs: rename it")
    return LocalFileSystem(), folder


def _known_paths(store: FileSystem, folder: str, digest: bytes) -> pa.ChunkedArray:
    """Paths that have a row in an output folder. Half-written files of a killed run are deleted."""
    import pyarrow as pa
    import pyarrow.dataset
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSelector

    entries = store.get_file_info(FileSelector(folder, allow_not_found=True))
    files = [entry for entry in entries if entry.extension == "parquet"]
    for entry in files:
        if entry.base_name.startswith("_"):
            store.delete_file(entry.path)
    parts = sorted(entry.path for entry in files if not entry.base_name.startswith("_"))
    for part in parts:
        if (pq.read_schema(part, filesystem=store).metadata or {}).get(_CLASSIFIER) != digest:
            raise ValueError(f"{part} has labels of another classifier: write to another folder")
    if not parts:
        return pa.chunked_array([], pa.string())
    known = pyarrow.dataset.dataset(parts, filesystem=store, format="parquet")
    return known.to_table(columns=["path"])["path"]


def _write(table: pa.Table, store: FileSystem, folder: str, name: str) -> None:
    """Write a file that appears whole: readers of Parquet folders skip names that begin with ``_``."""
    import pyarrow.parquet as pq

    try:
        pq.write_table(table, f"{folder}/_{name}", filesystem=store)
        store.move(f"{folder}/_{name}", f"{folder}/{name}")
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            store.delete_file(f"{folder}/_{name}")
        raise


def main(
    classifier: Annotated[Path, typer.Argument(help="File written by `fit` or `save`.")],
    images: Annotated[str, typer.Argument(help="Folder that every machine sees, or a URI such as s3://bucket/photos.")],
    output: Annotated[
        str, typer.Argument(help="Folder or URI for Parquet files. Images that have a row in it are skipped.")
    ],
    workers: Annotated[int | None, typer.Option(min=1, help="Default: as many as the cluster has room for.")] = None,
    cpus_per_worker: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    gpus_per_worker: Annotated[float, typer.Option(min=0, help="0 runs on the CPU.")] = 0,
) -> None:
    """Label every image of a folder with a fitted classifier, on a Ray cluster or on this machine."""
    with clear_errors():
        counts = label_collection(
            classifier,
            images,
            output,
            workers=workers,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
        )
    known = f", {counts.known} known from earlier runs" * bool(counts.known)
    typer.echo(f"{output}: {counts.labelled} images labelled, {counts.unreadable} unreadable{known}")


if __name__ == "__main__":
    # Workers unpickle objects of this module by its name, which __main__ is not.
    from fewshot_mahalanobis.apps.ray import main as command

    exit_after(lambda: typer.run(command))
