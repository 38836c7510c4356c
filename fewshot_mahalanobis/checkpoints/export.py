"""A fitted classifier as one graph, ONNX or torch.export: images in, logits out. It runs without this package."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedTask


def write_onnx(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], classes: list[Any]) -> None:
    """Write an adapted task as an ONNX file, replacing any file at ``path``, whole or not at all.

    The labels ``classes`` are written into the file's properties as JSON. ImportError if onnx or onnxscript is absent;
    ValueError if the head or the backbone has no form as a graph, or the head's matrices are too large for a file.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch's exporter imports it)
    except ImportError as error:
        raise ImportError("the ONNX export needs more packages: pip install fewshot-mahalanobis[onnx]") from error
    graph, example, shapes = _graph_and_example(model, task)
    try:
        program = torch.onnx.export(
            graph,
            example,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"torch's exporter cannot make a graph of this backbone: {error}") from error
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, _properties(model, classes))
    with atomic_replace(path) as temporary:
        onnx.save(proto, temporary)


def write_program(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], classes: list[Any]) -> None:
    """Write an adapted task as a ``torch.export`` program, with the labels as its extra file "classes".

    ValueError as :func:`write_onnx`.
    """
    graph, example, shapes = _graph_and_example(model, task)
    try:
        program = torch.export.export(graph, example, dynamic_shapes=shapes)
    except RuntimeError as error:  # torch's own are subclasses
        raise ValueError(f"torch.export cannot make a program of this backbone: {error}") from error
    with atomic_replace(path) as temporary:
        torch.export.save(program, temporary, extra_files=_properties(model, classes))


def _graph_and_example(model: SimpleCNAPS, task: AdaptedTask) -> tuple[nn.Module, tuple[Tensor], tuple[Any]]:
    """The graph as a module, an example of its input, and which sizes of the input may vary."""
    example = torch.zeros(2, 3, model.image_size, model.image_size)
    return _Graph(model, task).cpu().eval(), (example,), ({0: torch.export.Dim("n")},)


def _properties(model: SimpleCNAPS, classes: list[Any]) -> dict[str, str]:
    """Properties of the file, by name."""
    size = model.image_size
    return {
        "classes": json.dumps(classes),
        "input": f"images (n, 3, {size}, {size}), RGB, float32: value / 127.5 - 1",
        "output": "logits (n, k), a column for each entry of 'classes'; their softmax gives probabilities",
    }


class _Graph(nn.Module):
    """Folded network, projection, head."""

    def __init__(self, model: SimpleCNAPS, task: AdaptedTask) -> None:
        super().__init__()
        self.extractor = model.feature_extractor.for_inference(task.network.film)
        self.projection = copy.deepcopy(model.projection) if model.projection is not None else nn.Identity()
        with torch.no_grad():
            self.head = task.fitted_head.settled.export(task.fitted_head.state)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.projection(self.extractor(images)))
