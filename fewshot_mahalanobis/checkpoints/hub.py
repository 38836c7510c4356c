"""Checkpoints and fitted classifiers in repositories of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewshot_mahalanobis.checkpoints.errors import DownloadError, UploadError
from fewshot_mahalanobis.checkpoints.folder import CARD, CLASSIFIER, CONFIG, WEIGHTS, save_checkpoint
from fewshot_mahalanobis.extras import install_command

if TYPE_CHECKING:
    from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def hub_name(name: str) -> tuple[str, str | None] | None:
    """Repository and revision of "user/repo" or "user/repo@revision"; None if it is neither."""
    match = _NAME.fullmatch(name)
    return None if match is None or ".." in name else (match["repo"], match["revision"])


def hub_checkpoint(repo_id: str, revision: str | None = None, **options: Any) -> Path:
    """Download a checkpoint into ``huggingface_hub``'s own cache and return its folder.

    Parameters
    ----------
    repo_id : str
        "user/repo".
    revision : str, optional
        Branch, tag or commit.
    **options
        Other arguments of :func:`huggingface_hub.snapshot_download`. Without a connection, a snapshot of that revision
        in the cache serves.

    Raises
    ------
    DownloadError
        There is no such repository or revision, no permission, or no connection and nothing in the cache.
    """
    return _snapshot(repo_id, revision, [CONFIG, WEIGHTS, CARD], **options)


def _client(repo_id: str) -> Any:
    """The module ``huggingface_hub``, of the extra ``hub``."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{repo_id!r} is the name of a repository of the Hugging Face Hub, which needs huggingface_hub: "
            f"{install_command('hub')}"
        ) from error
    return huggingface_hub


def _snapshot(repo_id: str, revision: str | None, files: Sequence[str], **options: Any) -> Path:
    huggingface_hub = _client(repo_id)
    try:
        folder = huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(files), **options)
    except Exception as error:  # the client lets its transport's errors through, and the transport varies
        at = "" if revision is None else f" at revision {revision!r}"
        cache = options.get("cache_dir") or huggingface_hub.constants.HF_HUB_CACHE
        raise DownloadError(
            f"could not download {repo_id!r}{at} from {huggingface_hub.constants.ENDPOINT} to {cache}: {error}. Check "
            "the name and the connection (a private repository needs `hf auth login`), or give the path of a copy"
        ) from error
    return Path(folder)


def pretrained_classifier(name: str | os.PathLike[str], *, token: str | bool | None = None) -> Path:
    """Return the file of a fitted classifier in a folder or, downloaded, in a repository ("user/repo@revision").

    DownloadError as for :func:`hub_checkpoint`, or if there is no fitted classifier.
    """
    folder = Path(name)
    if not folder.is_dir():
        repository, revision = hub_name(str(name)) or (str(name), None)
        folder = _snapshot(repository, revision, [CLASSIFIER, CARD], token=token)
    if not (folder / CLASSIFIER).is_file():
        raise DownloadError(
            f"{str(name)!r} holds no fitted classifier, which would be the file {CLASSIFIER}. If it is a checkpoint, "
            f"SimpleCNAPSClassifier({str(name)!r}).fit(images, labels) makes a classifier of it"
        )
    return folder / CLASSIFIER


def upload(folder: Path, repo_id: str, *, private: bool | None, token: str | bool | None, message: str) -> str:
    """Push the files of ``folder`` to a repository in one commit and return the address of the commit.

    The repository is created if it does not exist. UploadError without permission or connection, or if ``repo_id`` is
    not a valid name; nothing is committed then.
    """
    huggingface_hub = _client(repo_id)
    try:
        api = huggingface_hub.HfApi(token=token)
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # as above
        raise UploadError(
            f"could not push to {repo_id!r} on {huggingface_hub.constants.ENDPOINT}: {error}. Check the name and the "
            "connection; it needs a token with write permission, by token= or `hf auth login`"
        ) from error
    return str(commit.commit_url)


def upload_checkpoint(model: SimpleCNAPS, repo_id: str, *, private: bool | None, token: str | bool | None) -> str:
    """Push a model as a checkpoint, with the errors of :func:`save_checkpoint` and :func:`upload`."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, folder)
        return upload(Path(folder), repo_id, private=private, token=token, message="Push checkpoint")
