"""Checkpoints: their format, the catalogue of named ones, and how they are loaded.

:func:`~fewshot_mahalanobis.load_checkpoint` in :mod:`~fewshot_mahalanobis.checkpoints.load` is the one door. It stands
above the networks, which know no file.
"""

from fewshot_mahalanobis.checkpoints.catalogue import CheckpointRecord, available_checkpoints
from fewshot_mahalanobis.checkpoints.errors import CheckpointError, DownloadError, UploadError
from fewshot_mahalanobis.checkpoints.folder import save_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointRecord",
    "DownloadError",
    "UploadError",
    "available_checkpoints",
    "save_checkpoint",
]
