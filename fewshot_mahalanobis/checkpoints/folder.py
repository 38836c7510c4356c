"""The checkpoint format: a folder of ``config.json``, ``model.safetensors`` and ``README.md``.

``config.json`` holds the arguments of :class:`~fewshot_mahalanobis.SimpleCNAPS` and ``format_version``;
``model.safetensors`` holds its weights; ``README.md`` is the model card. A repository on the Hugging Face Hub with
these files is a checkpoint too. Nothing is unpickled, and what a file claims is compared with what the model needs
before any memory is spent on it. For a backbone other than the FiLM ResNet18 the folder has the weights and a
description; the code is timm's or the user's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.checkpoints.files import atomic_replace, readable_file
from fewshot_mahalanobis.checkpoints.restore import checked_settings, fill, model_without_weights, stored_weights
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

FORMAT_VERSION = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
#: A fitted classifier in a Hub repository.
CLASSIFIER = "classifier.safetensors"

#: A real config.json has a few hundred bytes; a larger file is not one.
MAX_CONFIG_BYTES = 2**16
#: Types that weights may be stored in, by their name in a safetensors header.
_STORAGE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Added to the name of a weight in int8: what each of its output channels is multiplied by.
_SCALE = ".scale"
#: Integers are stored in their own type, and so is what has to be float64.
_ITSELF = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class _Version(msgspec.Struct):
    format_version: int


_DEFAULT_CARD = """\
---
library_name: fewshot-mahalanobis
pipeline_tag: image-classification
tags:
- few-shot-learning
- simple-cnaps
---

# A few-shot image classifier ({kind})

It learns its classes from a few images each, in one forward pass (Bateni et al., *Improved Few-Shot Visual
Classification*, CVPR 2020). After {install}, for the name of this repository or folder:

```python
from fewshot_mahalanobis import SimpleCNAPSClassifier

classifier = SimpleCNAPSClassifier("user/repo").fit(support_images, labels)
classifier.predict(query_images)
```

{backbone}| setting | value |
|---|---|
{settings}

To be added: what it was trained on, the licence of that data and of these weights, and measured accuracies.
"""


def save_checkpoint(
    model: SimpleCNAPS, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, card: str | None = None
) -> None:
    """Write a model as a checkpoint.

    Parameters
    ----------
    model : SimpleCNAPS
        On any device, in any precision.
    folder, dtype, card
        As in :func:`write_folder`. Without a card, the folder's own is kept, or a plain one is written.

    Raises
    ------
    CheckpointError
        A setting is of the wrong type, a weight is NaN, infinite or outside the range of ``dtype``, or the folder
        cannot be written.
    """
    settings = checked_settings(model.config, "model.config")
    if card is None and not (Path(folder) / CARD).exists():
        card = _default_card(settings)
    write_folder(folder, settings, stored_weights(model), dtype=dtype, card=card)


def write_folder(
    folder: str | os.PathLike[str],
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    card: str | None = None,
) -> None:
    """Write settings and weights as a checkpoint's files.

    Every file is written under a temporary name and renamed, so a failure leaves what was there before.

    Parameters
    ----------
    folder : path
        Made if absent; a checkpoint in it is replaced.
    settings : mapping
        What ``config.json`` holds beside the version of the format.
    weights : mapping of str to Tensor
    dtype : {torch.float32, torch.float16, torch.bfloat16, torch.int8}, optional
        How convolution kernels and matrices are stored; float32 by default, int8 with a scale for each output channel.
        Vectors (biases, BatchNorm, FiLM scales) stay float32: they are under one per cent of the bytes, and rounding
        them costs accuracy.
    card : str, optional
        Markdown of ``README.md``. By default the folder's own is kept.

    Raises
    ------
    ValueError
        ``dtype`` is another type.
    CheckpointError
        A weight is NaN, infinite or outside the range of ``dtype``, or the folder cannot be written.
    """
    folder = Path(folder)
    dtype = torch.float32 if dtype is None else dtype
    types = (*_STORAGE.values(), torch.int8)
    if dtype not in types:
        raise ValueError(f"dtype must be one of {', '.join(map(str, types))}, not {dtype}")
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        # In int8 the features of a pretrained network may leave its fingerprint.
        pretrained = dtype == torch.int8 and name.startswith("feature_extractor.network.")
        tensors |= _to_storage(name, tensor, torch.float16 if pretrained else dtype)
    config = json.dumps({"format_version": FORMAT_VERSION, **settings}, indent=2, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_replace(folder / CONFIG) as new_config, atomic_replace(folder / WEIGHTS) as new_weights:
            save_file(tensors, new_weights, metadata={"format": "pt"})
            new_config.write_text(config, encoding="utf-8")
            if card is not None:
                with atomic_replace(folder / CARD) as new_card:
                    new_card.write_text(card, encoding="utf-8")
            # New weights must never be read under old settings: if the settings differ, the old ones go
            # first, so that an interruption leaves a folder without config.json, which is an error to read.
            if (folder / CONFIG).is_file() and (folder / CONFIG).read_bytes() != config.encode():
                (folder / CONFIG).unlink()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the checkpoint cannot be written: {error}") from error


def _default_card(settings: Mapping[str, Any]) -> str:
    """A model card with the settings alone."""
    backbone, extra, kind = settings.get("backbone"), "hub", "Simple CNAPS"
    about = ""
    if backbone is not None:
        kind = (
            "Simple CNAPS on another backbone" if "positions" in backbone else "Mahalanobis head on a frozen backbone"
        )
        about = "The backbone is a custom network: `load_checkpoint(name, backbone=network)`.\n\n"
        if "network" in backbone:
            about = f"The backbone is `{backbone['network']}`; the terms of its weights apply.\n\n"
        elif backbone["origin"] is not None:
            extra = "backbones"
            about = f"The backbone is timm's `{backbone['origin']}`; the terms of those weights apply.\n\n"
    rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    return _DEFAULT_CARD.format(kind=kind, install=install_command(extra), backbone=about, settings=rows)


def read_checkpoint(folder: str | os.PathLike[str], backbone: SimpleCNAPS | nn.Module | None = None) -> SimpleCNAPS:
    """Read a checkpoint from a local folder; see :func:`~fewshot_mahalanobis.load_checkpoint`.

    Raises
    ------
    CheckpointError
        A file is missing or malformed, was written by a newer version, or does not hold exactly the tensors that the
        settings ask for, with their shapes, in a storable type and finite; or ``backbone`` is missing, not needed or
        another network.
    """
    folder = Path(folder)
    config = read_config(folder)
    model = model_without_weights(config, str(folder / CONFIG), backbone)
    weights = read_tensors(folder / WEIGHTS, stored_weights(model))
    check_finite(folder / WEIGHTS, weights)
    try:
        return fill(model, weights)
    except ValueError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the settings of a checkpoint, their types yet unchecked, from its ``config.json``.

    Raises
    ------
    CheckpointError
        A file of the checkpoint is missing, or ``config.json`` is malformed or was written by a newer version.
    """
    for name in (CONFIG, WEIGHTS):
        if not _readable(folder / name):
            raise CheckpointError(
                f"{folder / name}: no such file. A checkpoint is a folder with {CONFIG} and {WEIGHTS}. If it is a "
                "fitted classifier, use SimpleCNAPSClassifier.from_pretrained"
            )
    path = folder / CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes, so not a checkpoint's configuration")
    try:
        version = msgspec.json.decode(content, type=_Version).format_version
        config: dict[str, Any] = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a checkpoint's configuration: {error}. Save or download the checkpoint again"
        ) from error
    if version < 1:
        raise CheckpointError(f"{path}: 'format_version' must be a whole number from 1, not {version!r}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: 'format_version' is {version} and this version of fewshot_mahalanobis reads up to "
            f"{FORMAT_VERSION}: upgrade fewshot_mahalanobis"
        )
    del config["format_version"]
    return config


def _readable(path: Path) -> bool:
    """Whether a file is there; CheckpointError if it may not or cannot be read."""
    try:
        return readable_file(path)
    except (PermissionError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def _to_storage(name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """CPU copies of one weight in the type it is stored in, and of its scales if that is int8."""
    if not tensor.is_floating_point():
        return {name: tensor.detach().to("cpu", copy=True).contiguous()}
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"the weight {name!r} is NaN or infinite: the model cannot be saved")
    if tensor.ndim <= 1:
        dtype = torch.float32
    stored = tensor.detach().to("cpu", torch.float32 if dtype == torch.int8 else dtype, copy=True)
    if not torch.isfinite(stored).all():
        raise CheckpointError(f"the weight {name!r} does not fit into {stored.dtype}: save it with dtype=torch.float32")
    if dtype == torch.int8:
        mantissa, exponent = torch.frexp((stored.flatten(1).abs().amax(1) / 127).clamp_min(2**-21))
        scale = torch.ldexp((16 * mantissa).ceil(), exponent - 4)  # of 4 bits: float16 holds its products with int8
        return {name: (stored / _per_channel(scale, stored)).round_().to(dtype).contiguous(), name + _SCALE: scale}
    return {name: stored.contiguous()}


def _per_channel(scale: Tensor, weight: Tensor) -> Tensor:
    """One number for each output channel, (c,), in the shape that multiplies a weight (c, ...)."""
    return scale.view(-1, *[1] * (weight.ndim - 1))


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file: exactly those ``expected``, of these shapes, in a type that fits.

    Floating-point tensors keep their stored type: float32, float16, bfloat16, or float64 where that is expected; those
    in int8 become float32.
    CheckpointError on anything else; the header is checked before any tensor is read.
    """
    remedy = "Save or download it again"
    _readable(path)
    try:
        # The library compares the header's sizes with the file's before it allocates anything.
        with safe_open(path, framework="pt", device="cpu") as file:
            stored_names = set(file.keys())
            types = {name: file.get_slice(name).get_dtype() for name in stored_names}
            weights = {name: tensor for name, tensor in expected.items() if tensor.is_floating_point()}
            quantised = [name for name, weight in weights.items() if weight.ndim > 1 and types.get(name) == "I8"]
            scales = {name + _SCALE: weights[name].new_empty(len(weights[name])) for name in quantised}
            expected = {**expected, **scales}
            for kind, names in (
                ("missing", expected.keys() - stored_names),
                ("unexpected", stored_names - expected.keys()),
            ):
                if names:
                    raise CheckpointError(
                        f"{path}: {len(names)} tensors are {kind} for the settings that come with them, {min(names)!r} "
                        f"first. Either may belong to another checkpoint. {remedy}"
                    )
            for name, tensor in expected.items():
                shape, stored = tuple(file.get_slice(name).get_shape()), types[name]
                if shape != tuple(tensor.shape):
                    raise CheckpointError(
                        f"{path}: tensor {name!r} has shape {shape}, not {tuple(tensor.shape)}. {remedy}"
                    )
                fits = {*(_STORAGE if tensor.is_floating_point() else ()), _ITSELF.get(tensor.dtype)}
                if stored not in fits and name not in quantised:
                    raise CheckpointError(f"{path}: tensor {name!r} has type {stored}, which does not fit. {remedy}")
            # Copies: the library's tensors may be views of the file, which can change or vanish under them.
            tensors = {name: file.get_tensor(name).clone() for name in expected}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}. {remedy}") from error
    for name in quantised:
        tensors[name] = tensors[name] * _per_channel(tensors.pop(name + _SCALE).float(), tensors[name])
    return tensors


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a tensor from ``path`` has NaN or infinite entries."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: tensor {name!r} has NaN or infinite entries. Save or download it again")
