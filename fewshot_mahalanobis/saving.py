"""A fitted classifier <-> one safetensors file.

The file has these tensors:

==========================  ===========================================================================
``model.<name>``            Weights of the pretrained model, named as in its ``state_dict``
``film.<position>.gamma``   FiLM parameters, if the network was adapted; ``beta`` likewise
``support_features``        Adapted features of the support images, float32 (n, d)
``frozen_features``         Features without FiLM, where outlier scores look at them
``support_labels``          Their classes, int64 (n,), as indices into the sorted labels
==========================  ===========================================================================

Weights and FiLM parameters are float16 where that is lossless. The metadata has ``format`` and, as JSON in
``classifier``, a :class:`Header`. Version 1 differs in the names of FiLM parameters, ``film.<layer>.<block>.gamma1``
and so on, and in the settings of a head.

Nothing is unpickled, and what a file claims is compared with what the model needs before memory is spent on it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshot_mahalanobis.calibration import Calibration, check_settings
from fewshot_mahalanobis.checkpoints.folder import check_finite, read_tensors
from fewshot_mahalanobis.checkpoints.model import fill, model_without_weights, stored_weights
from fewshot_mahalanobis.devices import choose_device
from fewshot_mahalanobis.files import atomic_replace
from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance
from fewshot_mahalanobis.gaussians.settings import CovarianceSettings
from fewshot_mahalanobis.gaussians.uncertain_means import MeansSettings
from fewshot_mahalanobis.heads import HEADS, LinearHead, MahalanobisHead
from fewshot_mahalanobis.labels import checked_labels
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.refine import check_steps

Classifier = TypeVar("Classifier")

FORMAT, VERSION = "fewshot_mahalanobis.SimpleCNAPSClassifier", 2
#: Limit on the memory that a file's labels take as an array: a hostile file can claim a dtype of any width.
MAX_LABEL_BYTES = 2**28


@dataclass(frozen=True)
class FittedState:
    """What a fitted classifier consists of.

    Attributes
    ----------
    parameters : dict
        Constructor arguments.
    model : SimpleCNAPS
        The pretrained model.
    film : Film, optional
        Its FiLM parameters for the task; None without adaptation.
    support_features : float32 Tensor of shape (n, d)
    support_labels : int64 Tensor of shape (n,)
    classes : ndarray of shape (k,)
    calibration : Calibration
    means : MeansSettings, optional
        What ``AutoHead`` chose.
    frozen_features : float32 Tensor of shape (n, d), optional
        Of the support images by the network without FiLM, where the outlier score looks at them.
    """

    parameters: dict[str, Any]
    model: SimpleCNAPS
    film: Film | None
    support_features: Tensor
    support_labels: Tensor
    classes: NDArray[Any]
    calibration: Calibration
    means: MeansSettings | None = None
    frozen_features: Tensor | None = None


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """Base of what the header holds: a missing, unknown or wrongly typed field is an error that names it."""


class HeadSettings(_Record):
    """A Mahalanobis head given as an object. Version 1 has the first three settings of its covariance as a list."""

    scale: float
    covariance: CovarianceSettings | tuple[float | str, bool, str]


class Parameters(_Record):
    """Constructor arguments."""

    head: str | HeadSettings
    adapt: bool
    precision: str
    batch_size: int
    temperature: str | float
    unknown_label: str | int | float | None
    false_rejection_rate: float
    n_jobs: int | None
    verbose: int
    refine: int | str = 0


class Labels(_Record):
    """The sorted labels and their NumPy dtype."""

    dtype: str
    classes: list[Any]


class FittedCalibration(_Record):
    """As :class:`~fewshot_mahalanobis.calibration.Calibration`."""

    temperature: float
    threshold: float | None
    units: tuple[tuple[float, float], ...] | None = None


class Header(_Record):
    """What a saved classifier has beside tensors. ``checkpoint`` is None for a model given as a module."""

    version: int
    digest: str
    model: dict[str, Any]
    checkpoint: str | None
    parameters: Parameters
    labels: Labels
    calibration: FittedCalibration
    means: MeansSettings | None = None


# -------------------------------------------------------------------- writing


def save_classifier(state: FittedState, path: str | os.PathLike[str]) -> None:
    """Write a fitted classifier to a file, which appears whole or not at all.

    Raises
    ------
    ValueError
        The head is an object that the file cannot describe.
    OSError
        The file cannot be written.
    """
    tensors = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    tensors |= {} if state.film is None else state.film.tensors()
    tensors = {name: _smallest_lossless(tensor.detach().cpu()) for name, tensor in tensors.items()}
    tensors["support_features"] = state.support_features.cpu().contiguous()
    tensors["support_labels"] = state.support_labels.cpu().contiguous()
    if state.frozen_features is not None:
        tensors["frozen_features"] = state.frozen_features.cpu().contiguous()
    given = state.parameters
    header = Header(
        version=VERSION,
        digest=_digest(tensors),
        model=state.model.config,
        checkpoint=None if isinstance(given["checkpoint"], SimpleCNAPS) else os.fspath(given["checkpoint"]),
        parameters=Parameters(
            head=_describe_head(given["head"]),
            adapt=bool(given["adapt"]),
            precision=given["precision"],
            batch_size=int(given["batch_size"]),
            temperature=given["temperature"] if given["temperature"] == "auto" else float(given["temperature"]),
            unknown_label=given["unknown_label"],
            false_rejection_rate=float(given["false_rejection_rate"]),
            n_jobs=None if given["n_jobs"] is None else int(given["n_jobs"]),
            verbose=int(given["verbose"]),
            refine=given["refine"] if given["refine"] == "auto" else int(given["refine"]),
        ),
        labels=Labels(state.classes.dtype.str, state.classes.tolist()),
        calibration=FittedCalibration(*state.calibration),
        means=state.means,
    )
    _calibration(header)  # the checks of reading: a setting that cannot be read is not written
    metadata = {"format": FORMAT, "classifier": json.dumps(msgspec.to_builtins(header))}
    with atomic_replace(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # the library's form of a full disk
            raise OSError(f"{path} cannot be written: {error}") from error


def _describe_head(head: str | nn.Module) -> str | HeadSettings:
    """Name of a head, or the settings of a Mahalanobis head."""
    if isinstance(head, str):
        return head
    if type(head) is MahalanobisHead and type(head.covariance) is RegularizedCovariance:
        return HeadSettings(head.scale, head.covariance.settings)
    if type(head) in HEADS.values() and not isinstance(head, LinearHead):
        return str(head.name)
    raise ValueError(
        f"a {type(head).__name__} object as head cannot be written to a file: name one of {sorted(HEADS)}, "
        "or pickle the classifier"
    )


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


def load_classifier(
    restore: Callable[[FittedState], Classifier],
    path: str | os.PathLike[str],
    device: str | torch.device,
    backbone: SimpleCNAPS | nn.Module | None = None,
) -> Classifier:
    """Read a file that :func:`save_classifier` wrote.

    Parameters
    ----------
    restore : callable
        Makes the classifier; a ValueError or TypeError that it raises is reported as the file's fault.
    path : path
    device : str or torch.device
        Where the classifier is to run.
    backbone : nn.Module or SimpleCNAPS, optional
        The network, where its code is the user's own.

    Raises
    ------
    FileNotFoundError
    ValueError
        The file is of another kind, of a newer version, damaged or incomplete; ``backbone`` is missing, not needed or
        another network; or there is no such device.
    ImportError
        The network is one of timm, and timm is absent.
    """
    path = Path(path)
    if not path.is_file():
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
        with torch.device("meta"):  # what the file is compared with takes no memory
            adapted = any(name.startswith("film.") for name in names)
            expected = {f"model.{name}": tensor for name, tensor in stored_weights(model, header.model).items()}
            expected |= Film.identity(model.feature_extractor.film_positions if adapted else {}).tensors()
            expected["support_features"] = torch.empty(*shots[:1], model.feature_extractor.out_features)
            expected["support_labels"] = torch.empty(*shots[:1], dtype=torch.int64)
            if "frozen_features" in names:
                expected["frozen_features"] = expected["support_features"]
        stored = {_name_in_file(name, header.version): name for name in expected}
        found = read_tensors(path, {in_file: expected[name] for in_file, name in stored.items()})
        if header.digest != _digest(found):
            raise ValueError("its contents do not match their digest")
        check_finite(path, found)
        tensors = {name: found[in_file] for in_file, name in stored.items()}
        return restore(_state(model, header, tensors, device, target))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} is incomplete, damaged or does not fit together: {error}") from error


def _read_header(path: Path, text: str) -> Header:
    try:
        # By the standard library, which reads what it wrote: NaN, and names of files that are not valid Unicode.
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
) -> FittedState:
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    model = fill(model, weights).to(target)
    parameters = msgspec.structs.asdict(header.parameters)
    if isinstance(header.parameters.head, HeadSettings):
        head = header.parameters.head
        settings = head.covariance
        if isinstance(settings, tuple):
            settings = CovarianceSettings(*settings)
        parameters["head"] = MahalanobisHead(RegularizedCovariance.of(settings), head.scale)
    parameters["checkpoint"] = model if header.checkpoint is None else header.checkpoint
    parameters["device"] = device
    labels = tensors["support_labels"]
    classes = _classes(header.labels)
    if len(classes) != int(labels.max()) + 1:
        raise ValueError(f"{len(classes)} labels for {int(labels.max()) + 1} classes")
    unknown = header.parameters.unknown_label  # NumPy pads every string to the longest
    if isinstance(unknown, str) and 4 * len(unknown) * (len(classes) + 1) > MAX_LABEL_BYTES:
        raise ValueError(f"an unknown_label of {len(unknown)} characters")
    return FittedState(
        parameters,
        model,
        Film.from_tensors(tensors).to(target) or None,
        tensors["support_features"],
        labels,
        classes,
        _calibration(header),
        header.means,
        tensors.get("frozen_features"),
    )


def _classes(labels: Labels) -> NDArray[Any]:
    dtype, classes = np.dtype(labels.dtype), labels.classes
    if dtype.kind not in "OUbiuf" or dtype.itemsize * len(classes) > MAX_LABEL_BYTES:
        raise ValueError(f"labels of type {labels.dtype!r}")
    array = np.array(classes, dtype=dtype)
    if checked_labels(array, len(classes)).tolist() != classes or np.unique(array).tolist() != classes:
        raise ValueError(f"labels that are not sorted, not different or not of type {labels.dtype!r}")
    return array


def _calibration(header: Header) -> Calibration:
    check_settings(header.parameters.temperature, header.parameters.false_rejection_rate)
    check_steps(header.parameters.refine)
    temperature, threshold = header.calibration.temperature, header.calibration.threshold
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"a temperature of {temperature}")
    unknown = header.parameters.unknown_label
    if (threshold is None) != (unknown is None) or (threshold and not math.isfinite(threshold)):
        raise ValueError(f"a threshold of {threshold} with unknown_label={unknown!r}")
    units = header.calibration.units  # none in a file from before, whose score was the head's
    if units is not None and (
        threshold is None or len(units) != 4 or not all(math.isfinite(m) and 0 < s < math.inf for m, s in units)
    ):
        raise ValueError(f"an outlier score with units {units}")
    return Calibration(temperature, threshold, units)


def _name_in_file(name: str, version: int) -> str:
    """Name of a tensor in a file; "film.layers.0.1.bn2.gamma" was "film.0.1.gamma2" in version 1."""
    return re.sub(r"^film\.layers\.(.*)\.bn(\d)\.(.*)$", r"film.\1.\3\2", name) if version == 1 else name
