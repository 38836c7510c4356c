"""Checkpoints: their format, the table of named ones, and where the others come from.

:mod:`~fewshot_mahalanobis.checkpoints.loading` joins these with the model; nothing else here knows a network.
"""

from fewshot_mahalanobis.checkpoints.errors import CheckpointError, DownloadError, UploadError
from fewshot_mahalanobis.checkpoints.format import read_checkpoint, save_checkpoint
from fewshot_mahalanobis.checkpoints.table import CheckpointRecord, available_checkpoints

__all__ = [
    "CheckpointError",
    "CheckpointRecord",
    "DownloadError",
    "UploadError",
    "available_checkpoints",
    "read_checkpoint",
    "save_checkpoint",
]
