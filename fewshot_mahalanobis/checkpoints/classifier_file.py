"""A fitted classifier <-> one safetensors file.

The file has these tensors:

=======================  =====================================================================================
``model.<name>``         Weights of the pretrained model, named as in its ``state_dict``
``film.<position>.*``    FiLM parameters ``gamma`` and ``beta``, if the network was adapted
``support_features``     Features of the support images, float32 (n, d)
``unadapted_features``   Features without adaptation, if the outlier score compares them
``support_labels``       Their classes, int64 (n,), as indices into the sorted labels
``support_groups``       Groups that are left out together, int64 (n,), if there are any
=======================  =====================================================================================

Weights and FiLM parameters are float16 where that is lossless. The metadata has ``format`` and, as JSON in
``classifier``, a :class:`Header`: the constructor's arguments, and what :meth:`FittedHead.kept` returns beside tensors.

To change the format after 0.1.0, raise ``VERSION`` and read the earlier one too.

Nothing is unpickled, and what a file claims is compared with what the model needs before memory is spent on it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
from fewshot_mahalanobis.heads import describe_head, make_head
from fewshot_mahalanobis.images.ranges import checked_range
from fewshot_mahalanobis.networks.devices import check_precision, choose_device
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.support_set.calibration import check_settings
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.labels import checked_labels

FORMAT, VERSION = "fewshot_mahalanobis.SimpleCNAPSClassifier", 1
#: Limit on the memory that a file's labels take as an array: a hostile file can claim a dtype of any width.
MAX_LABEL_BYTES = 2**28


@dataclass(frozen=True)
class ClassifierState:
    """Everything that a fitted classifier consists of, for a file or a pickle.

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
    """

    parameters: dict[str, Any]
    model: SimpleCNAPS
    film: Film | None
    precision: str
    fitted_head: FittedHead


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the records of a header: a missing, unknown or wrongly typed field is an error that names it."""


class Parameters(_Record):
    """Constructor arguments; a head object by its description."""

    head: str | dict[str, Any]
    adapt: bool
    precision: str
    batch_size: int
    temperature: str | float
    unknown_label: str | int | float | None
    false_rejection_rate: float
    n_jobs: int | None
    verbose: int
    value_range: tuple[float, float] | None
    image_size: int | None


class Labels(_Record):
    """The sorted labels and their NumPy dtype."""

    dtype: str
    classes: list[Any]


class Fitted(_Record):
    """What :meth:`FittedHead.kept` returns beside tensors and labels.

    A name as ``head`` stands for the head that the model has or makes. ``settled`` is None if it is ``head`` itself.
    ``group_names`` is None if the user named no group.
    """

    head: str | dict[str, Any]
    settled: dict[str, Any] | None
    temperature: float
    unknown_label: str | int | float | None
    threshold: float | None
    units: dict[str, tuple[float, float]] | None
    group_names: list[str | int | float | None] | None


class Header(_Record):
    """What a saved classifier has beside tensors.

    ``checkpoint`` is None for a model given as a module. ``parameters`` may have been set after ``fit``; ``precision``
    and ``fitted`` were not.
    """

    version: Annotated[int, msgspec.Meta(ge=1)]
    digest: str
    model: dict[str, Any]
    checkpoint: str | None
    parameters: Parameters
    labels: Labels
    precision: str
    fitted: Fitted


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
    kept = state.fitted_head.kept()
    tensors = {f"model.{name}": tensor for name, tensor in stored_weights(state.model).items()}
    tensors |= {} if state.film is None else state.film.tensors()
    tensors = {name: _smallest_lossless(tensor.detach().cpu()) for name, tensor in tensors.items()}
    support: Features = kept["support"]
    tensors["support_features"] = support.adapted.contiguous()
    tensors["support_labels"] = kept["labels"].contiguous()
    if support.unadapted is not None:
        tensors["unadapted_features"] = support.unadapted.contiguous()
    if kept["groups"] is not None:
        tensors["support_groups"] = kept["groups"].contiguous()
    parameters, head, settled = state.parameters, state.fitted_head.head, state.fitted_head.settled
    header = Header(
        version=VERSION,
        digest=_digest(tensors),
        model=state.model.config,
        checkpoint=None if isinstance(parameters["checkpoint"], SimpleCNAPS) else os.fspath(parameters["checkpoint"]),
        parameters=Parameters(
            head=parameters["head"] if isinstance(parameters["head"], str) else describe_head(parameters["head"]),
            adapt=bool(parameters["adapt"]),
            precision=parameters["precision"],
            batch_size=int(parameters["batch_size"]),
            temperature=_number_or_auto(parameters["temperature"]),
            unknown_label=parameters["unknown_label"],
            false_rejection_rate=float(parameters["false_rejection_rate"]),
            n_jobs=None if parameters["n_jobs"] is None else int(parameters["n_jobs"]),
            verbose=int(parameters["verbose"]),
            value_range=checked_range(parameters["value_range"]),
            image_size=None if parameters["image_size"] is None else int(parameters["image_size"]),
        ),
        labels=Labels(kept["classes"].dtype.str, kept["classes"].tolist()),
        precision=state.precision,
        fitted=Fitted(
            head=state.model.config["head"] if head is state.model.head else describe_head(head),
            settled=None if settled is head else describe_head(settled),
            group_names=None if set(kept["group_names"]) == {None} else kept["group_names"],
            **{name: kept[name] for name in ("temperature", "unknown_label", "threshold", "units")},
        ),
    )
    check_settings(header.parameters.temperature, header.parameters.false_rejection_rate)  # the checks of reading
    check_precision(header.parameters.precision)
    metadata = {"format": FORMAT, "classifier": json.dumps(msgspec.to_builtins(header))}
    with atomic_replace(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # raised by the library on a full disk
            raise OSError(f"{path} cannot be written: {error}") from error


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
    if not readable_file(path):
        raise FileNotFoundError(f"no saved classifier at {path}")
    target = choose_device(device)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            shots = file.get_slice("support_labels").get_shape() if "support_labels" in names else [0]
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged or cut short: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is a safetensors file, but not one that SimpleCNAPSClassifier.save wrote")
    header = _read_header(path, metadata.get("classifier", ""))
    model = model_without_weights(header.model, str(path), backbone)
    try:
        with torch.device("meta"):  # expected tensors take no memory
            adapted = any(name.startswith("film.") for name in names)
            expected = {f"model.{name}": tensor for name, tensor in stored_weights(model).items()}
            expected |= Film.identity(model.feature_extractor.film_positions if adapted else {}).tensors()
            expected["support_features"] = torch.empty(*shots[:1], model.feature_extractor.out_features)
            expected["support_labels"] = torch.empty(*shots[:1], dtype=torch.int64)
            if "support_groups" in names:
                expected["support_groups"] = expected["support_labels"]
            if "unadapted_features" in names:
                expected["unadapted_features"] = expected["support_features"]
        tensors = read_tensors(path, expected)
        if header.digest != _digest(tensors):
            raise ValueError("its contents do not match their digest")
        check_finite(path, tensors)
        return _state(model, header, tensors, device, target)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} is incomplete, damaged or does not fit together: {error}") from error


def _read_header(path: Path, text: str) -> Header:
    try:
        # The standard library reads what it wrote: NaN, and file names that are not valid Unicode.
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from error
    version = values.get("version") if isinstance(values, dict) else None
    if type(version) is int and version > VERSION:
        raise ValueError(
            f"{path} was written by a newer version (format {version}, this one reads up to {VERSION}): "
            "upgrade fewshot_mahalanobis"
        )
    try:
        return msgspec.convert(values, Header)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is incomplete or damaged, its header is wrong: {error}") from error


def _state(
    model: SimpleCNAPS, header: Header, tensors: Mapping[str, Tensor], device: str | torch.device, target: torch.device
) -> ClassifierState:
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    model = fill(model, weights).to(target)
    parameters, fitted = msgspec.structs.asdict(header.parameters), header.fitted
    check_settings(header.parameters.temperature, header.parameters.false_rejection_rate)
    check_precision(header.parameters.precision)
    check_precision(header.precision)
    checked_range(header.parameters.value_range)
    if isinstance(header.parameters.head, dict):
        parameters["head"] = make_head(header.parameters.head)
    parameters |= {"checkpoint": model if header.checkpoint is None else header.checkpoint, "device": device}
    labels, classes = tensors["support_labels"], _classes(header.labels)
    if labels.numel() == 0 or int(labels.min()) < 0 or int(labels.max()) + 1 != len(classes):
        raise ValueError(f"{len(classes)} labels for the classes of {labels.numel()} support images")
    if not (fitted.temperature > 0 and math.isfinite(fitted.temperature)):
        raise ValueError(f"a temperature of {fitted.temperature}")
    if (fitted.threshold is None) != (fitted.unknown_label is None) or (fitted.units and fitted.threshold is None):
        raise ValueError(f"a threshold of {fitted.threshold} with unknown_label={fitted.unknown_label!r}")
    unknown = fitted.unknown_label  # NumPy pads every string to the longest
    if isinstance(unknown, str) and 4 * len(unknown) * (len(classes) + 1) > MAX_LABEL_BYTES:
        raise ValueError(f"an unknown_label of {len(unknown)} characters")
    group_names = [None] * len(labels) if fitted.group_names is None else fitted.group_names
    groups = tensors.get("support_groups")
    if len(group_names) != len(labels):
        raise ValueError(f"{len(group_names)} names of groups of {len(labels)} support images")
    head = make_head(fitted.head, model.config, model.head).to(target)
    support = Features(tensors["support_features"], tensors.get("unadapted_features")).to(target)
    if fitted.settled is None:
        settled = head.settled(support.adapted, labels.to(target), None if groups is None else groups.to(target))
    else:
        settled = make_head(fitted.settled).to(target)
    fitted_head = FittedHead.from_kept(
        {
            "head": head,
            "settled": settled,
            "support": support,
            "labels": labels.to(target),
            "classes": classes,
            "temperature": fitted.temperature,
            "unknown_label": fitted.unknown_label,
            "threshold": fitted.threshold,
            "units": fitted.units,
            "groups": None if groups is None else groups.to(target),
            "group_names": group_names,
        }
    )
    film = Film.from_tensors(tensors).to(target) or None
    return ClassifierState(parameters, model, film, header.precision, fitted_head)


def _classes(labels: Labels) -> NDArray[Any]:
    dtype, classes = np.dtype(labels.dtype), labels.classes
    if dtype.kind not in "OUbiuf" or dtype.itemsize * len(classes) > MAX_LABEL_BYTES:
        raise ValueError(f"labels of type {labels.dtype!r}")
    array = np.array(classes, dtype=dtype)
    if checked_labels(array, len(classes)).tolist() != classes or np.unique(array).tolist() != classes:
        raise ValueError(f"labels that are not sorted, not different or not of type {labels.dtype!r}")
    return array
