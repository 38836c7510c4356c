"""The authors' published weights: downloaded when first asked for, converted once, kept in the cache.

The cache is the folder in the environment variable ``FEWSHOT_MAHALANOBIS_CACHE``, by default the
platform's cache folder. It holds one checkpoint folder per file, named after the file's digest and the
format's version; the download itself is deleted after its conversion, whose weights are the same.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import platformdirs
import torch
from filelock import FileLock

from fewshot_mahalanobis.checkpoints.download import LOCAL_COPIES_VARIABLE, blob_id, download
from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.checkpoints.format import Model, read_checkpoint, save_checkpoint
from fewshot_mahalanobis.checkpoints.table import CheckpointRecord
from fewshot_mahalanobis.files import atomic_replace, remove_leftovers

#: Environment variable: the folder for converted checkpoints.
CACHE_VARIABLE = "FEWSHOT_MAHALANOBIS_CACHE"
#: In the names of cached folders; another number if weights are converted in another way.
CONVERSION = 1

_CARD = """\
---
license: mit
library_name: fewshot-mahalanobis
pipeline_tag: image-classification
---

# {name}

Converted from {url}
(git blob {blob_id}). Trained on {trained_on}.
"""


def cache_folder() -> Path:
    """Where converted checkpoints are kept."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return (
        Path(chosen).expanduser()
        if chosen
        else Path(platformdirs.user_cache_dir("fewshot_mahalanobis", appauthor=False))
    )


def load_published(record: CheckpointRecord, model_class: type[Model]) -> Model:
    """Load a checkpoint of the authors as a ``model_class``; only its first use needs a connection.

    DownloadError if the file is neither cached nor in ``FEWSHOT_MAHALANOBIS_CHECKPOINTS`` and cannot be downloaded;
    CheckpointError if a local copy has the wrong digest, or the cache cannot be written or has been damaged.
    """
    cache = cache_folder()
    folder = cache / f"{record.name}-{str(record.blob_id)[:12]}-v{CONVERSION}"
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{record.name}.lock"):
                if not folder.is_dir():  # another process may have made it while this one waited
                    _convert(record, folder, model_class)
        except OSError as error:
            raise CheckpointError(
                f"{cache}: the cache for {record.name!r} cannot be written: {error}. Make room or set the "
                f"environment variable {CACHE_VARIABLE} to another folder"
            ) from error
    try:
        return read_checkpoint(folder, model_class)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. The cached copy is damaged: delete the folder {folder} and try again"
        ) from error


def _convert(record: CheckpointRecord, folder: Path, model_class: type[Model]) -> None:
    """Make ``folder`` the checkpoint of a published file, whole or not at all."""
    local = _local_copy(record)
    source = folder.parent / _base_name(record) if local is None else local
    remove_leftovers(folder)
    if local is None:
        remove_leftovers(source)
    # A download that was verified before an interruption serves again, after another look at it.
    if local is None and not (source.is_file() and blob_id(source) == record.blob_id):
        download(str(record.url), source, str(record.blob_id))
    try:
        state_dict = torch.load(source, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{source}: cannot be read without unpickling arbitrary objects: {error}") from error
    # The authors' mini-ImageNet script keeps the network's weights under this key.
    state_dict = state_dict.get("resnet_dict", state_dict)
    model = model_class.from_published_state_dict(state_dict, image_size=record.image_size)
    with atomic_replace(folder) as temporary:
        save_checkpoint(model, temporary, card=_CARD.format(**vars(record)))
    if local is None:
        source.unlink()


def _local_copy(record: CheckpointRecord) -> Path | None:
    """Find the published file in the user's own folder of copies, its digest checked."""
    folder = os.environ.get(LOCAL_COPIES_VARIABLE)
    if not folder:
        return None
    if not Path(folder).expanduser().is_dir():
        raise CheckpointError(f"{LOCAL_COPIES_VARIABLE} is {folder!r}, which is not a folder")
    path = Path(folder).expanduser() / _base_name(record)
    if not path.is_file():
        return None
    found = blob_id(path)
    if found != record.blob_id:
        raise CheckpointError(
            f"{path} (found through {LOCAL_COPIES_VARIABLE}) is not the published file: git blob id {found}, "
            f"expected {record.blob_id}. Fetch it again from {record.url}"
        )
    return path


def _base_name(record: CheckpointRecord) -> str:
    return str(record.url).rsplit("/", 1)[-1]
