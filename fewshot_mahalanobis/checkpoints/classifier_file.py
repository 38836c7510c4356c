"""A fitted classifier, of images or of features <-> one safetensors file.

The file has these tensors, that of a ``MahalanobisClassifier`` none of a network:

=======================  =====================================================================================
``model.<name>``         Weights of the pretrained model, named as in its ``state_dict``
``film.<position>.*``    FiLM parameters ``gamma`` and ``beta``, if the network was adapted
``support_features``     Features of the support examples (n, d): float32 of images, float64 as given
``unadapted_features``   Features without adaptation, if the outlier score compares them
``support_labels``       Their classes, int64 (n,), as indices into the sorted labels
``support_groups``       Groups that are left out together, int64 (n,), if there are any
``groups_with_twins``    The same with near twins, for settings and calibration, if there are any
``negative_features``    Features of examples of no class (m, d), if there are any
``unadapted_negatives``  The same without adaptation, with ``unadapted_features``
``unlabelled_features``  Features of unlabelled examples (m, d), if ``fit`` learned from any
``memberships``          The classes that they belong to, float32 (m, k)
``calibration_scores``   Outlier scores that ``calibrate`` set the threshold from, float64 (c,), if it did
=======================  =====================================================================================

Weights and FiLM parameters are float16 where that is lossless. The metadata has ``format`` and, as JSON in
``classifier``, a :class:`Header` or :class:`FeatureHeader`: the constructor's arguments, and what
:meth:`FittedHead.to_state` returns beside tensors.

To change the format after 0.1.0, raise ``VERSION`` and read the earlier one too.

Nothing is unpickled, and what a file claims is compared with what the model needs before memory is spent on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.files import atomic_replace, readable_file
from fewshot_mahalanobis.checkpoints.folder import check_finite, read_tensors
from fewshot_mahalanobis.checkpoints.restore import fill, model_without_weights, stored_weights
from fewshot_mahalanobis.cores import one_thread
from fewshot_mahalanobis.heads import Head, describe_head, make_head
from fewshot_mahalanobis.images.pages import checked_reading
from fewshot_mahalanobis.networks.devices import check_precision, choose_device
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.support_set.calibration import check_settings
from fewshot_mahalanobis.support_set.fitted_head import FittedHead, Values, expected_tensors
from fewshot_mahalanobis.support_set.labels import checked_labels

#: What may be in a file, by the name of its class, and the version of both.
OF_IMAGES, OF_FEATURES = "SimpleCNAPSClassifier", "MahalanobisClassifier"
VERSION = 1
#: Limit on the memory that a file's labels take as an array: a hostile file can claim a dtype of any width.
MAX_LABEL_BYTES = 2**28


@dataclass(frozen=True)
class ClassifierState:
    """Everything that a fitted classifier of images consists of, for a file.

    Attributes
    ----------
    parameters : dict
        Constructor arguments.
    model : SimpleCNAPS
        The pretrained model.
    film : Film or None
        FiLM parameters of the task; None without adaptation.
    precision : {"auto", "float32", "bfloat16"}
        Precision of the convolutions, as asked for when the classifier was fitted.
    fitted_head : FittedHead
    allowed : ndarray or None
        Every label that may occur, sorted, if ``partial_fit`` named them.
    """

    parameters: dict[str, Any]
    model: SimpleCNAPS
    film: Film | None
    precision: str
    fitted_head: FittedHead
    allowed: NDArray[Any] | None


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the records of a header: a missing, unknown or wrongly typed field is an error that names it."""


class _HeadParameters(_Record):
    """Constructor arguments of both classifiers; a head object by its description.

    ``priors`` are not among them: those that ``fit`` was given are in ``Fitted``.
    """

    head: str | dict[str, Any]
    temperature: str | float
    unknown_label: str | int | float | None
    false_rejection_rate: float

    def check(self) -> None:
        """Raise ValueError if one cannot be used, when a file is written or read."""
        check_settings(self.temperature, self.false_rejection_rate)


class Parameters(_HeadParameters):
    """Constructor arguments of the classifier of images."""

    adapt: bool
    precision: str
    batch_size: int
    n_jobs: int | None
    verbose: int
    value_range: tuple[float, float] | None
    image_size: int | None
    pages: str | int | tuple[int, ...] | None = None  # files of earlier versions have neither
    bands: int | tuple[int, ...] | None = None

    def check(self) -> None:
        """Raise ValueError if one cannot be used, when a file is written or read."""
        super().check()
        check_precision(self.precision)
        checked_reading(self.value_range, self.pages, self.bands)


class FeatureParameters(_HeadParameters):
    """Constructor arguments of the classifier of features."""

    beta: float | str | None
    task_covariance: bool | None
    scale: float | None


class Labels(_Record):
    """The sorted labels and their NumPy dtype, and all that may occur, sorted too, if ``partial_fit`` named them."""

    dtype: str
    classes: list[Any]
    allowed: list[Any] | None = None


class Fitted(Values, kw_only=True, forbid_unknown_fields=True):
    """What :meth:`FittedHead.to_state` returns beside tensors and labels.

    A name as ``head`` stands for the head that the model has or makes. ``settled`` is None if it is ``head`` itself.
    """

    head: str | dict[str, Any]
    settled: dict[str, Any] | None


class _Header(_Record):
    """What a saved classifier has beside tensors. The parameters of both may have been set after ``fit``."""

    version: Annotated[int, msgspec.Meta(ge=1)]
    digest: str
    labels: Labels
    fitted: Fitted
    parameters: Any


class Header(_Header):
    """The same of a classifier of images.

    ``checkpoint`` is None for a model given as a module. ``precision`` is that of ``fit``.
    """

    model: dict[str, Any]
    checkpoint: str | None
    parameters: Parameters
    precision: str


class FeatureHeader(_Header):
    """The same of a classifier of features."""

    columns: list[str] | None
    parameters: FeatureParameters


_AnyHeader = TypeVar("_AnyHeader", bound=_Header)


# -------------------------------------------------------------------- writing


def write_classifier(state: ClassifierState, path: str | os.PathLike[str]) -> None:
    """Write a fitted classifier to a file, which appears whole or not at all.

    Raises
    ------
    ValueError
        The head is an object that the file cannot describe.
    OSError
        The file cannot be written.
    """
    tensors = _network_tensors(state.model, state.film)
    tensors = {name: _smallest_lossless(tensor.detach().cpu()) for name, tensor in tensors.items()}
    kept, own_head = state.fitted_head.to_state(), state.fitted_head.head is state.model.head
    tensors |= kept["tensors"]
    parameters = state.parameters
    reading = checked_reading(parameters["value_range"], parameters["pages"], parameters["bands"])
    header = Header(
        version=VERSION,
        digest=_digest(tensors),
        labels=_labels(state.fitted_head, state.allowed),
        fitted=_fitted(kept, state.model.config["head"] if own_head else None),
        model=state.model.config,
        checkpoint=None if isinstance(parameters["checkpoint"], SimpleCNAPS) else os.fspath(parameters["checkpoint"]),
        parameters=Parameters(
            **_head_parameters(parameters),
            adapt=bool(parameters["adapt"]),
            precision=parameters["precision"],
            batch_size=int(parameters["batch_size"]),
            n_jobs=None if parameters["n_jobs"] is None else int(parameters["n_jobs"]),
            verbose=int(parameters["verbose"]),
            value_range=reading.value_range,
            image_size=None if parameters["image_size"] is None else int(parameters["image_size"]),
            pages=reading.pages,
            bands=reading.bands[0] if reading.bands and len(reading.bands) == 1 else reading.bands,
        ),
        precision=state.precision,
    )
    _write(path, OF_IMAGES, header, tensors)


def write_feature_classifier(
    parameters: Mapping[str, Any],
    columns: list[str] | None,
    fitted_head: FittedHead,
    allowed: NDArray[Any] | None,
    path: str | os.PathLike[str],
) -> None:
    """Write a fitted classifier of features to a file, as :func:`write_classifier` does.

    Parameters
    ----------
    parameters : mapping
        Constructor arguments.
    columns : list of str or None
        Names of the features, if they have any.
    fitted_head : FittedHead
    allowed : ndarray or None
        Every label that may occur, sorted, if ``partial_fit`` named them.
    path : path
    """
    kept = fitted_head.to_state()
    tensors = kept["tensors"]
    scale, task_covariance = parameters["scale"], parameters["task_covariance"]
    header = FeatureHeader(
        version=VERSION,
        digest=_digest(tensors),
        labels=_labels(fitted_head, allowed),
        fitted=_fitted(kept),
        columns=columns,
        parameters=FeatureParameters(
            **_head_parameters(parameters),
            beta=None if parameters["beta"] is None else _number_or_auto(parameters["beta"]),
            task_covariance=None if task_covariance is None else bool(task_covariance),
            scale=None if scale is None else float(scale),
        ),
    )
    _write(path, OF_FEATURES, header, tensors)


def _labels(fitted_head: FittedHead, allowed: NDArray[Any] | None) -> Labels:
    classes = fitted_head.classes
    return Labels(classes.dtype.str, classes.tolist(), None if allowed is None else allowed.tolist())


def _fitted(state: Mapping[str, Any], name: str | None = None) -> Fitted:
    """What was fitted, beside tensors; ``name`` is that of the head if it is the model's own."""
    settled = state["settled"]
    return Fitted(
        head=describe_head(state["head"]) if name is None else name,
        settled=None if settled is None else describe_head(settled),
        **msgspec.structs.asdict(state["values"]),
    )


def _head_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    head = parameters["head"]
    return {
        "head": head if isinstance(head, str) else describe_head(head),
        "temperature": _number_or_auto(parameters["temperature"]),
        "unknown_label": parameters["unknown_label"],
        "false_rejection_rate": float(parameters["false_rejection_rate"]),
    }


def _network_tensors(model: SimpleCNAPS, film: Film | None) -> dict[str, Tensor]:
    """Weights and FiLM parameters by their names in a file."""
    weights = {f"model.{name}": tensor for name, tensor in stored_weights(model).items()}
    return weights | ({} if film is None else film.tensors())


def _write(path: str | os.PathLike[str], kind: str, header: _Header, tensors: dict[str, Tensor]) -> None:
    """Write a file, which appears whole or not at all."""
    header.parameters.check()
    metadata = {"format": _format(kind), "classifier": json.dumps(msgspec.to_builtins(header))}
    with atomic_replace(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # raised by the library on a full disk
            raise OSError(f"{path} cannot be written: {error}. Make room there, and try again") from error


def _format(kind: str) -> str:
    return f"fewshot_mahalanobis.{kind}"


def _number_or_auto(value: Any) -> float | str:
    return "auto" if value == "auto" else float(value)


def _smallest_lossless(tensor: Tensor) -> Tensor:
    """Copy in float16 if every value survives that, else in its own type."""
    half = tensor.to(torch.float16)
    lossless = tensor.dtype == torch.float32 and torch.equal(half.float(), tensor)
    return half.contiguous() if lossless else tensor.contiguous().clone()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and bytes of tensors on the CPU."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -------------------------------------------------------------------- reading


@one_thread()
def read_classifier(
    path: str | os.PathLike[str], device: str | torch.device, backbone: SimpleCNAPS | nn.Module | None = None
) -> ClassifierState:
    """Read a file that :func:`write_classifier` wrote.

    Parameters
    ----------
    path : path
    device : str or torch.device
        Where the classifier is to run.
    backbone : nn.Module or SimpleCNAPS, optional
        The network, where its code is the user's own.

    Raises
    ------
    FileNotFoundError
    PermissionError
        The file may not be read.
    ValueError
        The file is of another kind, of a newer version, damaged or incomplete; ``backbone`` is missing, not needed or
        another network; or there is no such device.
    ImportError
        The network comes from timm, and timm is absent.
    """
    path = Path(path)
    header, shapes = _header_and_shapes(path, OF_IMAGES, Header)
    target = choose_device(device)
    model = model_without_weights(header.model, str(path), backbone)
    with _named(path):
        tensors = _read_tensors(path, header, _expected(model, header, shapes))
        weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        model = fill(model, weights).to(target)
        film = Film.from_tensors(tensors).to(target) or None
        fitted_head = _fitted_head(header, tensors, make_head(header.fitted.head, model.config, model.head), target)
        parameters = _parameters(header.parameters, fitted_head)
        check_precision(header.precision)
        parameters |= {"checkpoint": model if header.checkpoint is None else header.checkpoint, "device": device}
        return ClassifierState(parameters, model, film, header.precision, fitted_head, _allowed(header.labels))


def _expected(model: SimpleCNAPS, header: Header, shapes: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """What the file of a classifier with this model must have; the tensors take no memory."""
    extractor = model.feature_extractor
    with torch.device("meta"):
        adapted = any(name.startswith("film.") for name in shapes)
        expected = _network_tensors(model, Film.identity(extractor.film_positions) if adapted else None)
        classes = len(header.labels.classes)
        return expected | expected_tensors(shapes, extractor.out_features, classes, torch.float32, images=True)


@one_thread()
def read_feature_classifier(
    path: str | os.PathLike[str],
) -> tuple[dict[str, Any], list[str] | None, FittedHead, NDArray[Any] | None]:
    """Read what :func:`write_feature_classifier` was given, with the errors of :func:`read_classifier`."""
    path = Path(path)
    header, shapes = _header_and_shapes(path, OF_FEATURES, FeatureHeader)
    with _named(path):
        width, classes = (shapes.get("support_features") or [0])[-1], len(header.labels.classes)
        expected = expected_tensors(shapes, width, classes, torch.float64, images=False)
        tensors = _read_tensors(path, header, expected)
        for name in {"support_features", "unlabelled_features"} & tensors.keys():
            tensors[name] = tensors[name].double()  # a shorter type fits too
        if header.columns is not None and len(header.columns) != width:
            raise ValueError(f"{len(header.columns)} names of {width} features")
        fitted_head = _fitted_head(header, tensors, make_head(header.fitted.head), torch.device("cpu"))
        return _parameters(header.parameters, fitted_head), header.columns, fitted_head, _allowed(header.labels)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors about its contents."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} is incomplete, damaged or does not fit together: {error}") from error


def _header_and_shapes(path: Path, kind: str, header_type: type[_AnyHeader]) -> tuple[_AnyHeader, dict[str, list[int]]]:
    """The header of a file of this kind, and the shapes that its tensors claim to have."""
    if not readable_file(path):
        raise FileNotFoundError(f"no saved classifier at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged or cut short: {error}") from error
    if metadata.get("format") != _format(kind):
        written = metadata.get("format", "").removeprefix(_format(""))
        other = f": {written}.load reads it" if written in (OF_IMAGES, OF_FEATURES) else ""
        raise ValueError(f"{path} is a safetensors file, but not one that {kind}.save wrote{other}")
    return _read_header(path, metadata.get("classifier", ""), header_type), shapes


def _read_tensors(path: Path, header: _Header, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = read_tensors(path, expected)
    if header.digest != _digest(tensors):
        raise ValueError("its contents do not match their digest")
    check_finite(path, tensors)
    return tensors


def _read_header(path: Path, text: str, header_type: type[_AnyHeader]) -> _AnyHeader:
    try:
        # The standard library reads what it wrote: NaN, and file names that are not valid Unicode.
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from error
    version = values.get("version") if isinstance(values, dict) else None
    if type(version) is int and version > VERSION:
        raise ValueError(
            f"{path} was written by a newer version, or by one from before 0.1.0 (format {version}, this one reads up "
            f"to {VERSION}): upgrade fewshot_mahalanobis, or fit and save again"
        )
    try:
        return msgspec.convert(values, header_type)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is incomplete or damaged, its header is wrong: {error}") from error


def _parameters(record: _HeadParameters, fitted_head: FittedHead) -> dict[str, Any]:
    """Constructor arguments; ``priors`` as they are in force, in the order of the classes."""
    record.check()
    parameters = msgspec.structs.asdict(record)
    if isinstance(record.head, dict):
        parameters["head"] = make_head(record.head)
    return {**parameters, "priors": None if fitted_head.priors is None else fitted_head.priors.tolist()}


def _fitted_head(header: _Header, tensors: Mapping[str, Tensor], head: Head[Any], target: torch.device) -> FittedHead:
    fitted, classes = header.fitted, _classes(header.labels)
    if fitted.false_rejection_rate is None:  # in files of earlier versions, where the parameter was in force
        fitted.false_rejection_rate = header.parameters.false_rejection_rate
    unknown = fitted.unknown_label  # NumPy pads every string to the longest
    if isinstance(unknown, str) and 4 * len(unknown) * (len(classes) + 1) > MAX_LABEL_BYTES:
        raise ValueError(f"an unknown_label of {len(unknown)} characters")
    settled = None if fitted.settled is None else make_head(fitted.settled)
    state = {"head": head, "settled": settled, "classes": classes, "values": fitted, "tensors": tensors}
    return FittedHead.from_state(state, target)


def _classes(labels: Labels) -> NDArray[Any]:
    dtype, classes = np.dtype(labels.dtype), labels.classes
    if dtype.kind not in "OUbiuf" or dtype.itemsize * len(classes) > MAX_LABEL_BYTES:
        raise ValueError(f"labels of type {labels.dtype!r}")
    array = np.array(classes, dtype=dtype)
    if checked_labels(array, len(classes)).tolist() != classes or np.unique(array).tolist() != classes:
        raise ValueError(f"labels that are not sorted, not different or not of type {labels.dtype!r}")
    return array


def _allowed(labels: Labels) -> NDArray[Any] | None:
    """Every label that may occur, of the kind of the classes, which are among them; None if the file names none."""
    if labels.allowed is None:
        return None
    if not {*labels.classes} <= {*labels.allowed}:
        raise ValueError(f"the labels that may occur, {labels.allowed}, lack some of {labels.classes}")
    allowed = checked_labels(labels.allowed, len(labels.allowed))
    if sorted({*allowed.tolist()}) != labels.allowed:
        raise ValueError(f"labels that may occur which are not sorted or not different: {labels.allowed}")
    return allowed
