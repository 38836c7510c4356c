"""Checkpoints in repositories of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from fewshot_mahalanobis.checkpoints.errors import DownloadError
from fewshot_mahalanobis.checkpoints.format import CARD, CONFIG, WEIGHTS


def hub_checkpoint(
    repo_id: str,
    revision: str | None = None,
    *,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Path:
    """Download a checkpoint from the Hub into ``huggingface_hub``'s own cache.

    Without a connection, a snapshot of that revision in the cache serves.

    Parameters
    ----------
    repo_id : str
        ``"user/repo"``.
    revision : str, optional
        Branch, tag or commit; the default branch if not given.
    cache_dir, token, force_download, local_files_only
        As in :func:`huggingface_hub.snapshot_download`.

    Returns
    -------
    Path
        Folder for :func:`read_checkpoint`.

    Raises
    ------
    DownloadError
        No such repository or revision, no permission, or no connection and nothing in the cache.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=[CONFIG, WEIGHTS, CARD],
            cache_dir=cache_dir,
            token=token,
            force_download=force_download,
            local_files_only=local_files_only,
        )
    except Exception as error:  # the client lets its transport's errors through, and the transport varies
        at = "" if revision is None else f" at revision {revision!r}"
        raise DownloadError(
            f"could not download {repo_id!r}{at} from {huggingface_hub.constants.ENDPOINT} to "
            f"{cache_dir or huggingface_hub.constants.HF_HUB_CACHE}: {error}. Check the name and the connection "
            "(a private repository needs `hf auth login`), or give the path of a folder with a copy"
        ) from error
    return Path(folder)
