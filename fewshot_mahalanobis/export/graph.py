"""A fitted classifier as one graph, ONNX or torch.export, which runs without this package.

It reads images as the network does and gives logits, or it reads the pixels of a picture of any size and gives
probabilities, the index of the label and the outlier score.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.export.network import FilmedNetwork, film_vector
from fewshot_mahalanobis.export.pixels import PixelsToSquare, add_pixels_to_square
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedTask
from fewshot_mahalanobis.networks.template import (
    FLOAT32,
    OPSET,
    UINT8,
    Graph,
    add_network,
    as_array,
    film_layers,
    has_template,
)
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
    decisions = _answers(task) if pixels else _Logits(task.fitted_head)
    properties = _properties(model, task.fitted_head, pixels)
    _write_task(model, task, decisions, path, pixels=pixels, batches=not pixels, properties=properties)


def write_page_onnx(model: SimpleCNAPS, task: AdaptedTask, path: str | os.PathLike[str], *, distances: bool) -> None:
    """Write an adapted task as the ONNX file of a web page: one image (1, 3, s, s) to answers.

    With ``distances`` they have the distances (n,) of the image to the support images, between adapted features. The
    file has the network's weights, not the head's, as float16; it computes in float32 all the same. Errors as
    :func:`write_onnx`.
    """
    _write_task(model, task, _answers(task, distances=distances), path, float16="network.")


def _write_task(
    model: SimpleCNAPS,
    task: AdaptedTask,
    decisions: _Decisions,
    path: str | os.PathLike[str],
    *,
    pixels: bool = False,
    batches: bool = False,
    properties: Mapping[str, str] | None = None,
    float16: str | None = None,
) -> None:
    """Write the graph of pictures, the network and what follows it as one.

    PyTorch's exporter makes what follows the network, and the network too if it is none of those that have a template.
    """
    size, count = model.image_size, 2 if batches else 1
    graph = Graph()
    if pixels:
        images = add_pixels_to_square(graph, graph.input("pixels", UINT8, ["h", "w", "c"]), size)
    else:
        images = graph.input("images", FLOAT32, ["n" if batches else 1, 3, size, size])
    folded = model.feature_extractor.for_inference(None if decisions.reads_both else task.network.film)
    varies = {0: torch.export.Dim("n")} if batches else dict[int, Any]()
    known = has_template(folded)
    if known:
        made = {"features": add_network(graph, folded, images, (size, size))}
        if decisions.reads_both:
            made = {"features": _add_adapted(graph, model, task, folded, images), "unadapted": made["features"]}
        rest: nn.Module = _AfterNetwork(model, decisions)
        inputs = {name: (torch.zeros(count, model.feature_extractor.out_features), varies) for name in made}
    else:
        made = {"images": images}
        rest = _Whole(nn.Identity(), _network(model, task, decisions), decisions)
        inputs = {"images": (torch.zeros(count, 3, size, size), varies)}
    before = (graph, made) if known or pixels else None
    save_onnx(rest.cpu().eval(), inputs, decisions.names, path, properties, float16=float16, before=before)


def _add_adapted(graph: Graph, model: SimpleCNAPS, task: AdaptedTask, folded: nn.Module, images: str) -> str:
    """Add the adapted network, which shares the weights of the network as pretrained, ``folded``."""
    assert task.network.film is not None
    layers = film_layers(model.feature_extractor, folded)
    film = {
        layers[position]: (graph.constant(as_array(gamma)), graph.constant(as_array(beta)))
        for position, (gamma, beta) in task.network.film.items()
    }
    return add_network(graph, folded, images, (model.image_size, model.image_size), film)


def write_head_onnx(fitted_head: FittedHead, path: str | os.PathLike[str]) -> None:
    """Write a fitted head alone as an ONNX file, features (n, d) to answers, with the errors of :func:`write_onnx`."""
    support = fitted_head.support.adapted
    properties = {
        "input": f"features (n, {support.shape[1]}), float32",
        "output": "probabilities (n, k), a column for each entry of 'classes'; label (n,), indices into 'labels'; "
        "outlier_score (n,), above 'threshold' for features of no class",
        **_answer_properties(fitted_head),
    }
    examples = support[:1].float().repeat(2, 1).cpu(), {0: torch.export.Dim("n")}
    save_onnx(_HeadAnswers(fitted_head).cpu().eval(), {"features": examples}, _ANSWERS, path, properties)


def save_onnx(
    module: nn.Module,
    inputs: Mapping[str, tuple[Tensor, dict[int, Any]]],
    outputs: Sequence[str],
    path: str | os.PathLike[str],
    properties: Mapping[str, str] | None = None,
    *,
    float16: str | None = None,
    before: tuple[Graph, Mapping[str, str]] | None = None,
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
    before : (Graph, mapping of str to str), optional
        A graph in front of the module, and the names of its values for the module's inputs.
    """
    onnx = _onnx()
    examples, shapes = zip(*inputs.values(), strict=True)
    try:
        program = torch.onnx.export(
            module,
            examples,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=[*inputs],
            output_names=[*outputs],
            opset_version=OPSET,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise _not_exported("graph", error) from error
    assert program is not None
    proto = program.model_proto
    for node in proto.graph.node:
        node.ClearField("metadata_props")  # where in the code it comes from, by paths of this machine
    if before is not None:
        proto = _joined(*before, proto)
    onnx.helper.set_model_props(proto, dict(properties or {}))
    _write(proto, path, float16)


def save_graph(graph: Graph, path: str | os.PathLike[str], *, float16: str | None = None) -> None:
    """Write a graph as an ONNX file, as :func:`save_onnx`."""
    onnx = _onnx()
    _write(onnx.load_from_string(graph.model(with_weights=True)), path, float16)


def _onnx() -> Any:
    """Import the package; ImportError with the remedy if it, or what PyTorch's exporter needs beside it, is absent."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch's exporter imports it)
    except ImportError as error:
        raise ImportError(f"the ONNX export needs more packages: {install_command('onnx')}") from error
    return onnx


def _write(proto: Any, path: str | os.PathLike[str], float16: str | None) -> None:
    if float16 is not None:
        _store_as_float16(proto, float16)
    with atomic_replace(path) as temporary:
        _onnx().save(proto, temporary)


def _joined(graph: Graph, made: Mapping[str, str], proto: Any) -> Any:
    """One graph of two: values of the first, by the names of the second's inputs, go into that."""
    from onnx import compose, load_from_string

    for name, value in made.items():
        graph.output(f"network.{name}", value, FLOAT32, ["n", "d"])
    first = load_from_string(graph.model(with_weights=True))
    first.ir_version = proto.ir_version
    return compose.merge_models(first, proto, io_map=[(f"network.{name}", name) for name in made])


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
    size, varies = model.image_size, torch.export.Dim
    decisions: _Decisions
    square: nn.Module
    if pixels:
        decisions, square = _answers(task), PixelsToSquare(size)
        example = torch.zeros(2 * size + 1, 2 * size + 3, 4, dtype=torch.uint8)
        shape = {0: varies("h", min=2), 1: varies("w", min=2), 2: varies("c", min=3, max=4)}
    else:
        decisions, square = _Logits(task.fitted_head), nn.Identity()
        example, shape = torch.zeros(2, 3, size, size), {0: varies("n")}
    module = _Whole(square, _network(model, task, decisions), decisions).cpu().eval()
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=(shape,))
    except RuntimeError as error:  # torch's own are subclasses
        raise _not_exported("program", error) from error
    properties = _properties(model, task.fitted_head, pixels)
    with atomic_replace(path) as temporary:
        torch.export.save(program, temporary, extra_files=properties)


def _not_exported(what: str, error: Exception) -> ValueError:
    return ValueError(
        f"torch {torch.__version__} cannot make a {what} of this backbone. "
        f"Those that read pixels need torch 2.9 or newer: {error}"
    )


def _properties(model: SimpleCNAPS, fitted: FittedHead, pixels: bool) -> dict[str, str]:
    """The properties of a task's file."""
    size, classes = model.image_size, {"classes": json.dumps(fitted.classes.tolist())}
    if not pixels:
        return classes | {
            "input": f"images (n, 3, {size}, {size}), RGB, float32: value / 127.5 - 1",
            "output": "logits (n, k), a column for each entry of 'classes'; the softmax of logits / "
            f"{fitted.temperature_of_all:g} gives probabilities",
        }
    return classes | {
        "input": "pixels (h, w, 3) or (h, w, 4), RGB or RGBA, uint8, of any size, upright: the orientation that a file "
        "states (EXIF) is applied before",
        "output": "probabilities (k,) of 'classes'; label, the index into 'labels'; outlier_score, above 'threshold' "
        "for a picture of no class",
        "image_size": json.dumps(size),
        **_answer_properties(fitted),
    }


def _answer_properties(fitted: FittedHead) -> dict[str, str]:
    return {
        "classes": json.dumps(fitted.classes.tolist()),
        "labels": json.dumps(fitted.output_labels.tolist()),
        "threshold": json.dumps(None if fitted.outliers is None else fitted.outliers.threshold),
        "version": __version__,
    }


# -------------------------------------------------------------------- modules


class _HeadAnswers(nn.Module):
    """Features (n, d) -> probabilities (n, k), indices of labels (n,), outlier scores (n,)."""

    def __init__(self, fitted: FittedHead) -> None:
        super().__init__()
        self.fitted_head = fitted.export()

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        answers: tuple[Tensor, Tensor, Tensor] = self.fitted_head(Features(features))
        return answers


class _Decisions(nn.Module):
    """What follows the network.

    Attributes
    ----------
    names : sequence of str
        What it gives.
    reads_both : bool
        Whether it compares features of the network as pretrained too.
    """

    names: Sequence[str]
    reads_both = False


class _Logits(_Decisions):
    """Features (n, d) -> logits (n, k)."""

    names = ("logits",)

    def __init__(self, fitted: FittedHead) -> None:
        super().__init__()
        self.fitted_head = fitted.export()

    def forward(self, features: Features) -> Tensor:
        return self.fitted_head.with_priors(self.fitted_head.head(features.adapted))


class _Answers(_Decisions):
    """Features (1, d) -> probabilities (k,), index of the label, outlier score, and distances (n,) if wanted."""

    support: Tensor | None

    def __init__(self, fitted: FittedHead, *, reads_both: bool, distances: bool) -> None:
        super().__init__()
        self.reads_both, self.names = reads_both, _ANSWERS + ["distances"] * distances
        self.fitted_head = fitted.export()
        self.register_buffer("support", fitted.support.adapted.float() if distances else None)

    def forward(self, features: Features) -> tuple[Tensor, ...]:
        probabilities, label, score = self.fitted_head(features)
        distances = () if self.support is None else (torch.linalg.vector_norm(self.support - features.adapted, dim=1),)
        return probabilities[0], label[0], score[0], *distances


def _answers(task: AdaptedTask, *, distances: bool = False) -> _Answers:
    fitted = task.fitted_head
    return _Answers(fitted, reads_both=task.unadapted is not None and fitted.outliers is not None, distances=distances)


class _AfterNetwork(nn.Module):
    """Features (n, d) before the projection, adapted and perhaps as pretrained -> decisions."""

    def __init__(self, model: SimpleCNAPS, decisions: _Decisions) -> None:
        super().__init__()
        self.projection = nn.Identity() if model.projection is None else copy.deepcopy(model.projection)
        self.decisions = decisions

    def forward(self, features: Tensor, unadapted: Tensor | None = None) -> Any:
        frozen = None if unadapted is None else self.projection(unadapted)
        return self.decisions(Features(self.projection(features), frozen))


class _Whole(nn.Module):
    """A picture -> decisions. ``square`` makes images (n, 3, s, s) of it."""

    def __init__(self, square: nn.Module, network: nn.Module, decisions: _Decisions) -> None:
        super().__init__()
        self.square, self.network, self.decisions = square, network, decisions

    def forward(self, picture: Tensor) -> Any:
        return self.decisions(self.network(self.square(picture)))


def _network(model: SimpleCNAPS, task: AdaptedTask, decisions: _Decisions) -> nn.Module:
    return _BothNetworks(model, task) if decisions.reads_both else _AdaptedNetwork(model, task)


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
