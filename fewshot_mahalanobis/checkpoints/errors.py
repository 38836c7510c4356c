"""What can go wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is missing, malformed or cannot be read or written; the message names the file and the remedy."""


class DownloadError(CheckpointError):
    """A checkpoint could not be downloaded; the message names the address, the destination and the remedy."""


class UploadError(CheckpointError):
    """A model could not be pushed to the Hub; the message names the repository, the address and the remedy."""
