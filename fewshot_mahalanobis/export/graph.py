"""A fitted classifier as one graph, ONNX or torch.export, which runs without this package.

It reads images as the network does and gives logits, or it reads the pixels of a picture of any size and gives
probabilities, the index of the label and the outlier score.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.export.network import FilmedNetwork, film_vector
from fewshot_mahalanobis.export.pixels import PixelsToSquare
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedTask
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

#: Names of the outputs of a graph that decides on labels.
_ANSWERS = ["probabilities", "label", "outlier_score"]


def write_onnx(
    model: SimpleCNAPS,
    task: AdaptedTask,
    path: str | os.PathLike[str],
    *,
    pixels: bool,
) -> None:
    """Write an adapted task as an ONNX file, replacing any file at ``path``, whole or not at all.

    Labels and what else a user of the file needs are in its properties. ImportError if onnx or onnxscript is absent;
    ValueError if the head or the backbone has no form as a graph, or the head's matrices are too large for a file.
    """
    _write_onnx(_graph_of(model, task, pixels), path)


def write_page_onnx(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], *, distances: bool) -> None:
    """Write an adapted task as the ONNX file of a web page: one image (1, 3, s, s) to answers.

    With ``distances`` they have the distances (n,) of the image to the support images, between adapted features. The
    file has the network's weights, not the head's, as float16; it computes in float32 all the same. Errors as
    :func:`write_onnx`.
    """
    size = model.image_size
    answers = _Answers(model, task, nn.Identity(), distances=distances).cpu().eval()
    inputs = {"images": (torch.zeros(1, 3, size, size), dict[int, Any]())}
    save_onnx(answers, inputs, _ANSWERS + ["distances"] * distances, path, float16="network.")


def write_head_onnx(fitted_head: FittedHead, path: str | os.PathLike[str]) -> None:
    """Write a fitted head alone as an ONNX file, features (n, d) to answers, with the errors of :func:`write_onnx`."""
    _write_onnx(_graph_of_head(fitted_head), path)


def _write_onnx(graph: _Graph, path: str | os.PathLike[str]) -> None:
    inputs = {graph.input_name: (graph.example, graph.shape)}
    save_onnx(graph.module, inputs, graph.output_names, path, graph.properties)


def save_onnx(
    module: nn.Module,
    inputs: Mapping[str, tuple[Tensor, dict[int, Any]]],
    outputs: Sequence[str],
    path: str | os.PathLike[str],
    properties: Mapping[str, str] | None = None,
    *,
    float16: str | None = None,
) -> None:
    """Write a module as an ONNX file, replacing any file at ``path``, whole or not at all.

    Parameters
    ----------
    module : nn.Module
    inputs : mapping of str to (Tensor, dict)
        Names of the inputs, in order: an example, and which of its sizes may vary.
    outputs : sequence of str
        Names of the outputs.
    path : path
    properties : mapping of str to str, optional
        What the file says about itself.
    float16 : str, optional
        Store the weights whose names begin so as float16.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch's exporter imports it)
    except ImportError as error:
        raise ImportError(f"the ONNX export needs more packages: {install_command('onnx')}") from error
    examples, shapes = zip(*inputs.values(), strict=True)
    try:
        program = torch.onnx.export(
            module,
            examples,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=[*inputs],
            output_names=[*outputs],
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise _not_exported("graph", error) from error
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, dict(properties or {}))
    for node in proto.graph.node:
        node.ClearField("metadata_props")  # where in the code it comes from, by paths of this machine
    if float16 is not None:
        _store_as_float16(proto, float16)
    with atomic_replace(path) as temporary:
        onnx.save(proto, temporary)


def _store_as_float16(proto: Any, prefix: str) -> None:
    """Store the float32 weights of a graph whose names begin so as float16; it casts them as it is loaded."""
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for weight in proto.graph.initializer:
        if weight.data_type != TensorProto.FLOAT or not weight.name.startswith(prefix):
            continue
        name, values = weight.name, numpy_helper.to_array(weight)
        weight.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}.float16"))
        casts.append(helper.make_node("Cast", [weight.name], [name], to=TensorProto.FLOAT))
    for cast in reversed(casts):
        proto.graph.node.insert(0, cast)


def write_program(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], *, pixels: bool) -> None:
    """Write an adapted task as a ``torch.export`` program, with the properties of :func:`write_onnx` as extra files.

    ValueError as :func:`write_onnx`.
    """
    graph = _graph_of(model, task, pixels)
    try:
        program = torch.export.export(graph.module, (graph.example,), dynamic_shapes=(graph.shape,))
    except RuntimeError as error:  # torch's own are subclasses
        raise _not_exported("program", error) from error
    with atomic_replace(path) as temporary:
        torch.export.save(program, temporary, extra_files=graph.properties)


def _not_exported(what: str, error: Exception) -> ValueError:
    return ValueError(
        f"torch {torch.__version__} cannot make a {what} of this backbone. "
        f"Those that read pixels need torch 2.9 or newer: {error}"
    )


class _Graph(NamedTuple):
    """What the exporters need."""

    module: nn.Module
    example: Tensor
    shape: dict[int, Any]  # which sizes of the input may vary
    input_name: str
    output_names: list[str]
    properties: dict[str, str]


def _graph_of(model: SimpleCNAPS, task: AdaptedTask, pixels: bool) -> _Graph:
    size, fitted = model.image_size, task.fitted_head
    properties = {"classes": json.dumps(fitted.classes.tolist())}
    if not pixels:
        properties |= {
            "input": f"images (n, 3, {size}, {size}), RGB, float32: value / 127.5 - 1",
            "output": "logits (n, k), a column for each entry of 'classes'; the softmax of logits / "
            f"{fitted.temperature:g} gives probabilities",
        }
        example = torch.zeros(2, 3, size, size)
        shape = {0: torch.export.Dim("n")}
        return _Graph(_Logits(model, task).cpu().eval(), example, shape, "images", ["logits"], properties)
    properties |= {
        "input": "pixels (h, w, 3) or (h, w, 4), RGB or RGBA, uint8, of any size, upright: the orientation that a file "
        "states (EXIF) is applied before",
        "output": "probabilities (k,) of 'classes'; label, the index into 'labels'; outlier_score, above 'threshold' "
        "for a picture of no class",
        "image_size": json.dumps(size),
        **_answer_properties(fitted),
    }
    example = torch.zeros(2 * size + 1, 2 * size + 3, 4, dtype=torch.uint8)
    sides = {0: torch.export.Dim("h", min=2), 1: torch.export.Dim("w", min=2), 2: torch.export.Dim("c", min=3, max=4)}
    answers = _Answers(model, task, PixelsToSquare(size)).cpu().eval()
    return _Graph(answers, example, sides, "pixels", _ANSWERS, properties)


def _graph_of_head(fitted: FittedHead) -> _Graph:
    properties = {
        "input": f"features (n, {fitted.support.adapted.shape[1]}), float32",
        "output": "probabilities (n, k), a column for each entry of 'classes'; label (n,), indices into 'labels'; "
        "outlier_score (n,), above 'threshold' for features of no class",
        **_answer_properties(fitted),
    }
    example, shape = fitted.support.adapted[:1].float().repeat(2, 1).cpu(), {0: torch.export.Dim("n")}
    return _Graph(_HeadAnswers(fitted).cpu().eval(), example, shape, "features", _ANSWERS, properties)


def _answer_properties(fitted: FittedHead) -> dict[str, str]:
    return {
        "classes": json.dumps(fitted.classes.tolist()),
        "labels": json.dumps(fitted.output_labels.tolist()),
        "threshold": json.dumps(None if fitted.outliers is None else fitted.outliers.threshold),
        "version": __version__,
    }


class _HeadAnswers(nn.Module):
    """Features (n, d) -> probabilities (n, k), indices of labels (n,), outlier scores (n,)."""

    def __init__(self, fitted: FittedHead) -> None:
        super().__init__()
        self.fitted_head = fitted.export()

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        answers: tuple[Tensor, Tensor, Tensor] = self.fitted_head(Features(features))
        return answers


class _Logits(nn.Module):
    """Images (n, 3, s, s) -> logits (n, k): folded network, projection, head."""

    def __init__(self, model: SimpleCNAPS, task: AdaptedTask) -> None:
        super().__init__()
        self.network = _AdaptedNetwork(model, task)
        self.fitted_head = task.fitted_head.export()

    def forward(self, images: Tensor) -> Tensor:
        return self.fitted_head.with_priors(self.fitted_head.head(self.network(images).adapted))


class _Answers(nn.Module):
    """A picture -> probabilities (k,), index of the label, outlier score, and distances (n,) if wanted.

    ``square`` makes an image (1, 3, s, s) of the picture.
    """

    support: Tensor | None

    def __init__(self, model: SimpleCNAPS, task: AdaptedTask, square: nn.Module, *, distances: bool = False) -> None:
        super().__init__()
        fitted = task.fitted_head
        self.square = square
        both = task.unadapted is not None and fitted.outliers is not None
        self.network = _BothNetworks(model, task) if both else _AdaptedNetwork(model, task)
        self.fitted_head = fitted.export()
        self.register_buffer("support", fitted.support.adapted.float() if distances else None)

    def forward(self, picture: Tensor) -> tuple[Tensor, ...]:
        features = self.network(self.square(picture))
        probabilities, label, score = self.fitted_head(features)
        distances = () if self.support is None else (torch.linalg.vector_norm(self.support - features.adapted, dim=1),)
        return probabilities[0], label[0], score[0], *distances


class _AdaptedNetwork(nn.Module):
    """Images (n, 3, s, s) -> adapted features (n, d), FiLM inside the convolutions."""

    def __init__(self, model: SimpleCNAPS, task: AdaptedTask) -> None:
        super().__init__()
        self.extractor = model.feature_extractor.for_inference(task.network.film)
        self.projection = nn.Identity() if model.projection is None else copy.deepcopy(model.projection)

    def forward(self, images: Tensor) -> Features:
        return Features(self.projection(self.extractor(images)))


class _BothNetworks(nn.Module):
    """Images (n, 3, s, s) -> features (n, d), adapted and as pretrained, by two networks that share their weights."""

    film: Tensor

    def __init__(self, model: SimpleCNAPS, task: AdaptedTask) -> None:
        super().__init__()
        assert task.network.film is not None
        self.network = FilmedNetwork(model)
        self.register_buffer("film", film_vector(task.network.film))

    def forward(self, images: Tensor) -> Features:
        return Features(self.network(images, self.film), self.network(images))
