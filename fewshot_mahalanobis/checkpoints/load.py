"""The one loader of checkpoints: from a name or a path to a model, or to its backbone's weights."""

from __future__ import annotations

import difflib
import importlib.resources
import os
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS, CheckpointRecord
from fewshot_mahalanobis.checkpoints.errors import CheckpointError, DownloadError
from fewshot_mahalanobis.checkpoints.folder import read_checkpoint, read_tensors
from fewshot_mahalanobis.checkpoints.hub import hub_checkpoint, hub_name
from fewshot_mahalanobis.checkpoints.published import load_published
from fewshot_mahalanobis.cores import one_thread
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS


@one_thread()
def load_checkpoint(
    name_or_path: str | os.PathLike[str],
    backbone: SimpleCNAPS | nn.Module | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> SimpleCNAPS:
    """Load a model by the name or the path of its checkpoint.

    Parameters
    ----------
    name_or_path : str or path
        In this order: a name of :func:`available_checkpoints`; a local folder with ``config.json`` and
        ``model.safetensors`` (``"./default"`` for one that shares its name with a named checkpoint); a
        repository of the Hugging Face Hub, ``"user/repo"`` or ``"user/repo@revision"``.
    backbone : nn.Module, optional
        The network, for a checkpoint of :meth:`SimpleCNAPS.from_backbone` on a module: the checkpoint holds the weights
        of the network, not its code. A copy is used. A model with that network serves too.
    revision : str, optional
        Branch, tag or commit of a repository of the Hub.
    cache_dir, force_download, local_files_only, token : optional
        For a repository of the Hub, as in :func:`huggingface_hub.snapshot_download`.

    Returns
    -------
    SimpleCNAPS
        On the CPU, in float32, in evaluation mode.

    Raises
    ------
    ImportError
        The network is one of timm's, and timm is absent.
    CheckpointError
        The checkpoint cannot be found or is malformed; a network is missing, not needed or another one than was saved.
        A failed connection is a :class:`~fewshot_mahalanobis.checkpoints.DownloadError`.
    ValueError
        The name is none of these, or it is not one of the Hub's and ``revision`` is given.

    Notes
    -----
    ``"default"`` is another name of a checkpoint that comes with the package. The authors' published weights are
    downloaded on first use (``FEWSHOT_MAHALANOBIS_CHECKPOINTS`` may name a folder of local copies instead), verified by
    digest and converted into ``FEWSHOT_MAHALANOBIS_CACHE``; after that they need no connection.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"name_or_path must be a str or a path, not {type(name_or_path).__name__}")
    record = CHECKPOINTS.get(name_or_path) if isinstance(name_or_path, str) else None
    is_local = record is None and (isinstance(name_or_path, os.PathLike) or _names_a_path(name_or_path))
    repository = None if record is not None or is_local else hub_name(str(name_or_path))
    if repository is not None:
        repo_id, named_revision = repository
        folder = hub_checkpoint(
            repo_id,
            revision or named_revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
        )
        return read_checkpoint(folder, backbone)
    if revision is not None:
        raise ValueError(f"{name_or_path!r} is no repository of the Hub, so it has no revision")
    if record is not None:
        return _load_named(record, backbone)
    if is_local:
        return read_checkpoint(_local_folder(Path(name_or_path)), backbone)
    close = difflib.get_close_matches(str(name_or_path), CHECKPOINTS, n=1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown checkpoint {name_or_path!r}.{suggestion} It must be one of {', '.join(CHECKPOINTS)}, "
        "an existing local folder, or a Hub repository 'user/repo' or 'user/repo@revision'. A network of timm is put "
        "under the head by SimpleCNAPS.from_backbone(name)"
    )


def resnet18_weights(backbone: str) -> dict[str, Tensor]:
    """Read the weights of the FiLM ResNet18 from a file that ``pretrain`` wrote, or from a checkpoint."""
    if backbone.endswith(".safetensors"):
        with torch.device("meta"):
            expected = FilmResNet18().state_dict()
        return read_tensors(Path(backbone), expected)
    model = load_checkpoint(backbone)
    network = cast(nn.Module, model.feature_extractor)
    if "backbone" in model.config:
        raise ValueError(f"the backbone of the checkpoint {backbone!r} is no FilmResNet18 but {type(network).__name__}")
    return network.state_dict()


def _names_a_path(name: str) -> bool:
    # os.path.exists says no, where pathlib would raise, to a name that no file can have.
    looks_like_one = name.startswith((".", "~")) or "\\" in name or name.endswith(".safetensors")
    return looks_like_one or Path(name).is_absolute() or os.path.exists(name)  # noqa: PTH110


def _local_folder(path: Path) -> Path:
    path = path.expanduser()
    try:
        path.stat()
    except PermissionError as error:
        raise CheckpointError(f"{path}: no permission to look into the folder that it is in") from error
    except (OSError, ValueError):  # ValueError: no file can have this name
        raise CheckpointError(f"{path}: no such folder") from None
    if path.is_file():
        raise CheckpointError(
            f"{path}: is a file; give the folder that holds config.json and model.safetensors. A saved classifier is "
            "read by its class: SimpleCNAPSClassifier.load"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    return path


def _load_named(record: CheckpointRecord, backbone: SimpleCNAPS | nn.Module | None) -> SimpleCNAPS:
    if backbone is not None:
        raise CheckpointError(f"the checkpoint {record.name!r} comes with its network: it takes no other")
    if record.timm is not None:
        return _load_timm(record)
    if not record.embedded:
        return load_published(record)
    with importlib.resources.as_file(importlib.resources.files(__package__) / record.name) as folder:
        return read_checkpoint(folder)


def _load_timm(record: CheckpointRecord) -> SimpleCNAPS:
    """Make a frozen network of timm under the default head; timm keeps its weights in the Hub's cache."""
    try:
        return SimpleCNAPS.from_backbone(str(record.timm), image_size=record.image_size, head="auto")
    except ValueError as error:
        raise DownloadError(f"the checkpoint {record.name!r} cannot be fetched from {record.url}: {error}") from error
