"""A fitted classifier in ONNX Runtime's own format, which its small builds for phones read."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.export.graph import write_onnx
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedTask


def write_ort(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], *, pixels: bool) -> None:
    """Write an adapted task as an ``.ort`` file, replacing any file at ``path``, whole or not at all.

    ImportError without onnxruntime, onnx or onnxscript; ValueError as :func:`write_onnx`.
    """
    import onnxruntime

    with TemporaryDirectory() as folder, atomic_replace(path) as temporary:
        graph = Path(folder, "graph.onnx")
        write_onnx(model, task, graph, pixels=pixels)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # for any processor
        options.optimized_model_filepath = str(temporary)
        options.add_session_config_entry("session.save_model_format", "ORT")
        onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
