"""A model by the name of its checkpoint."""

from __future__ import annotations

import difflib
import importlib.resources
import os
from pathlib import Path

from fewshot_mahalanobis import checkpoints
from fewshot_mahalanobis.checkpoints.authors_weights import load_published
from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.checkpoints.format import read_checkpoint
from fewshot_mahalanobis.checkpoints.hub import hub_checkpoint, hub_name
from fewshot_mahalanobis.checkpoints.table import CHECKPOINTS
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS


def load_checkpoint(name_or_path: str | os.PathLike[str]) -> SimpleCNAPS:
    """Load a model by the name of its checkpoint.

    Parameters
    ----------
    name_or_path : str or path
        In this order: a name of :func:`available_checkpoints`; a local folder with ``config.json`` and
        ``model.safetensors`` (``"./default"`` for one that shares its name with a named checkpoint); a
        repository of the Hugging Face Hub, ``"user/repo"`` or ``"user/repo@revision"``.

    Returns
    -------
    SimpleCNAPS
        On the CPU, in float32, in evaluation mode.

    Raises
    ------
    CheckpointError
        The checkpoint cannot be found or is malformed; as :class:`DownloadError` where a connection failed.
    ValueError
        The name is none of these.

    Notes
    -----
    ``"default"`` is another name of a checkpoint that comes with the package. The authors' published weights are
    downloaded on first use (``FEWSHOT_MAHALANOBIS_CHECKPOINTS`` may name a folder of local copies instead), verified by
    digest and converted into ``FEWSHOT_MAHALANOBIS_CACHE``; after that they need no connection.
    """
    if isinstance(name_or_path, os.PathLike):
        return _read_local(Path(name_or_path))
    if not isinstance(name_or_path, str):
        raise TypeError(f"a checkpoint is given by a str or a path, not {type(name_or_path).__name__}")
    record = CHECKPOINTS.get(name_or_path)
    if record is not None:
        return _read_embedded(record.name) if record.embedded else load_published(record, SimpleCNAPS)
    if _looks_like_path(name_or_path) or os.path.exists(name_or_path):  # noqa: PTH110
        return _read_local(Path(name_or_path))
    repository = hub_name(name_or_path)
    if repository is not None:
        return read_checkpoint(hub_checkpoint(*repository), SimpleCNAPS)
    close = difflib.get_close_matches(name_or_path, CHECKPOINTS, n=1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown checkpoint {name_or_path!r}.{suggestion} It must be one of {', '.join(CHECKPOINTS)}, "
        "an existing local folder, or a Hub repository 'user/repo' or 'user/repo@revision'"
    )


def _looks_like_path(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~")) or "\\" in name or name.endswith(".safetensors")


def _read_local(path: Path) -> SimpleCNAPS:
    path = path.expanduser()
    # os.path says no, where pathlib would raise, to a name that no file can have.
    if os.path.isfile(path):  # noqa: PTH113
        raise CheckpointError(
            f"{path}: is a file; give the folder that holds config.json and model.safetensors. A saved classifier is "
            "read by its class: SimpleCNAPSClassifier.load"
        )
    if not os.path.isdir(path):  # noqa: PTH112
        raise CheckpointError(f"{path}: no such folder")
    return read_checkpoint(path, SimpleCNAPS)


def _read_embedded(name: str) -> SimpleCNAPS:
    with importlib.resources.as_file(importlib.resources.files(checkpoints) / name) as folder:
        return read_checkpoint(folder, SimpleCNAPS)
