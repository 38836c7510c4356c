"""A fitted classifier as one graph, ONNX or torch.export: images in, logits out, this package not needed to run it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance
from fewshot_mahalanobis.heads import (
    CosineHead,
    DotProductHead,
    EuclideanHead,
    Head,
    LinearHead,
    MahalanobisHead,
    ManhattanHead,
)
from fewshot_mahalanobis.networks.simple_cnaps import AdaptedTask, SimpleCNAPS

#: Most numbers in the class matrices of a graph (1 GB): a protobuf file holds 2 GB.
_MOST_NUMBERS = 2**28


def write_onnx(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], classes: list[Any]) -> None:
    """Write an adapted task as an ONNX file.

    Parameters
    ----------
    model : SimpleCNAPS
        The model that was adapted.
    task : AdaptedTask
    path : path
        An existing file is replaced, whole or not at all.
    classes : list of k strings, integers, floats or Booleans
        Labels, written into the file's properties as JSON.

    Raises
    ------
    ImportError
        The packages onnx and onnxscript are absent.
    ValueError
        The head or the backbone has no form as a graph, or the head's matrices are too large for a file.
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
    with _replaced(path) as temporary:
        onnx.save(proto, temporary)


def write_program(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], classes: list[Any]) -> None:
    """Write an adapted task as a ``torch.export`` program.

    Parameters
    ----------
    model, task, path, classes
        As for :func:`write_onnx`; the labels are an extra file of the program.

    Raises
    ------
    ValueError
        As :func:`write_onnx` raises it.
    """
    graph, example, shapes = _graph_and_example(model, task)
    try:
        program = torch.export.export(graph, example, dynamic_shapes=shapes)
    except RuntimeError as error:  # torch's own are subclasses
        raise ValueError(f"torch.export cannot make a program of this backbone: {error}") from error
    with _replaced(path) as temporary:
        torch.export.save(program, temporary, extra_files=_properties(model, classes))


def _graph_and_example(model: SimpleCNAPS, task: AdaptedTask) -> tuple[nn.Module, tuple[Tensor], tuple[Any]]:
    """The graph as a module, what it is called with, and which of its sizes may be any."""
    example = torch.zeros(2, 3, model.image_size, model.image_size)
    return _Graph(model, task).cpu().eval(), (example,), ({0: torch.export.Dim("n")},)


def _properties(model: SimpleCNAPS, classes: list[Any]) -> dict[str, str]:
    """What a file says of itself."""
    size = model.image_size
    return {
        "classes": json.dumps(classes),
        "input": f"images (n, 3, {size}, {size}), RGB, float32: value / 127.5 - 1",
        "output": "logits (n, k), a column for each entry of 'classes'; their softmax gives probabilities",
    }


@contextlib.contextmanager
def _replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write that takes the place of ``path`` once it is whole."""
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as folder:
        yield Path(folder) / path.name
        os.replace(Path(folder) / path.name, path)


class _Graph(nn.Module):
    """Folded network, projection, head."""

    def __init__(self, model: SimpleCNAPS, task: AdaptedTask) -> None:
        super().__init__()
        self.extractor = model.feature_extractor.folded(task.film)
        self.projection = copy.deepcopy(model.projection) if model.projection is not None else nn.Identity()
        with torch.no_grad():
            self.head = _head_graph(task.head, self.projection(task.support_features), task.support_labels)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.projection(self.extractor(images)))


def _head_graph(head: Head, features: Tensor, labels: Tensor) -> nn.Module:
    """Fit a head, and return it as a module without checks or data-dependent control flow."""
    if isinstance(head, MahalanobisHead):
        return _MahalanobisGraph(head, features, labels)
    if isinstance(head, LinearHead):
        weight, bias = head.fit(features, labels)
        return _LinearGraph(weight, bias)
    if isinstance(head, EuclideanHead | ManhattanHead):
        return _DifferenceGraph(head.fit(features, labels), squared=isinstance(head, EuclideanHead))
    if isinstance(head, CosineHead | DotProductHead):
        return _PrototypeGraph(head, head.fit(features, labels))
    raise ValueError(f"a {type(head).__name__} as head has no form as an ONNX graph: use one of the package's heads")


class _LinearGraph(nn.Module):
    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _DifferenceGraph(nn.Module):
    """Euclidean and Manhattan heads; the exporter has no form of ``torch.cdist``."""

    means: Tensor

    def __init__(self, means: Tensor, squared: bool) -> None:
        super().__init__()
        self.register_buffer("means", means.float())
        self.squared = squared

    def forward(self, x: Tensor) -> Tensor:
        difference = x[:, None] - self.means  # (m, k, d)
        return -(difference.square() if self.squared else difference.abs()).sum(dim=2)


class _PrototypeGraph(nn.Module):
    means: Tensor

    def __init__(self, head: CosineHead | DotProductHead, means: Tensor) -> None:
        super().__init__()
        self.compare = head.compare
        self.register_buffer("means", means.float())

    def forward(self, x: Tensor) -> Tensor:
        return self.compare(x, self.means)


class _MahalanobisGraph(nn.Module):
    """-s (x - mu_k)^T Q_k^-1 (x - mu_k) as a sum of squares.

    Outside the span of the centred support features every Q_k is beta I (equation 3). So with an orthonormal basis U
    (d, r) of that span, z = U^T (x - c) and c the task mean, which like every mu_k lies in c + span U,

        (x - mu_k)^T Q_k^-1 (x - mu_k) = ||x - c - U z||^2 / beta + ||L_k^T (z - U^T (mu_k - c))||^2,

    where L_k L_k^T is the inverse of U^T Q_k U, of r x r numbers a class, r at most the support's size.
    """

    centre: Tensor
    basis: Tensor
    means: Tensor
    roots: Tensor

    def __init__(self, head: MahalanobisHead, features: Tensor, labels: Tensor) -> None:
        super().__init__()
        features = features.double()
        covariance: RegularizedCovariance = head.covariance.on(features, labels)
        centre = features.mean(dim=0)
        n, d = features.shape
        # The covariance of one shot as published, c in every entry, leaves the span: there the basis is everything.
        everything = n >= d or covariance.one_shot_covariance == "published"
        basis = torch.eye(d, dtype=features.dtype, device=features.device)
        if not everything:
            basis = torch.linalg.qr((features - centre).T).Q
        rank, classes = basis.shape[1], int(labels.max()) + 1
        if classes * rank**2 > _MOST_NUMBERS:
            raise ValueError(
                f"{classes} classes need a {rank} x {rank} matrix each, too much for an ONNX file: fit fewer classes"
            )
        if everything:  # in original coordinates, where the variance of a vector's entries has its meaning
            gaussians = covariance(features, labels)
            means = gaussians.means - centre
        else:
            gaussians = covariance((features - centre) @ basis, labels)
            means = gaussians.means
        self.scale, self.beta, self.everything = head.scale, float(covariance.beta), everything
        self.register_buffer("centre", centre.float())
        self.register_buffer("basis", basis.float().contiguous())
        self.register_buffer("means", means.float()[:, None])  # (k, 1, r)
        self.register_buffer("roots", torch.linalg.cholesky(gaussians.precision()).float().contiguous())  # L_k

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.centre
        z = x if self.everything else x @ self.basis
        whitened = (z - self.means) @ self.roots  # (k, m, r)
        distance = whitened.square().sum(dim=2).T
        if not self.everything:
            distance = distance + (x - z @ self.basis.T).square().sum(dim=1, keepdim=True) / self.beta
        return -self.scale * distance
