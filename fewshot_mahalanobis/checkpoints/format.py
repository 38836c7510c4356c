"""The one checkpoint format: a folder of ``config.json``, ``model.safetensors`` and ``README.md``.

``config.json`` holds the arguments of :class:`~fewshot_mahalanobis.SimpleCNAPS` and ``format_version``;
``model.safetensors`` its weights; ``README.md`` is the model card. A repository on the Hugging Face Hub
with these files is a checkpoint too. Nothing is unpickled, and what a file claims is compared with what
the model needs before any memory is spent on it. Of a backbone other than the FiLM ResNet18 the folder
has the weights and a description; its code is timm's or the user's.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.files import atomic_replace
from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

FORMAT_VERSION = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
#: A fitted classifier in a Hub repository.
CLASSIFIER = "classifier.safetensors"

#: A real config.json has a few hundred bytes; a larger file is not one.
_LARGEST_CONFIG = 2**16
#: Nor does a network have a wider feature vector.
_MOST_FEATURES = 2**20
#: Types that weights may be stored in, by their name in a safetensors header.
_STORAGE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: And of whole numbers, which are stored as what they are.
_WHOLE = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

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
Classification*, CVPR 2020). With `pip install {packages}`, for the name of this repository or folder:

```python
from fewshot_mahalanobis import SimpleCNAPSClassifier

classifier = SimpleCNAPSClassifier("user/repo").fit(support_images, labels)
classifier.predict(query_images)
```

{backbone}| setting | value |
|---|---|
{settings}

Still to be told here: what it was trained on, the licence of that data and of these weights, and
measured accuracies.
"""


def save_checkpoint(
    model: SimpleCNAPS, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, card: str | None = None
) -> None:
    """Write a model as a checkpoint.

    Every file is written under a temporary name and renamed, so a failure leaves what was there before.

    Parameters
    ----------
    model : SimpleCNAPS
        On any device, in any precision.
    folder : path
        Made if absent; a checkpoint in it is replaced.
    dtype : {torch.float32, torch.float16, torch.bfloat16}, optional
        How convolution kernels and matrices are stored; float32 by default. Vectors (biases, BatchNorm,
        FiLM scales), under one per cent of the weights, stay float32: their rounding would be felt and
        their bytes are not.
    card : str, optional
        Markdown of ``README.md``. By default the folder's own is kept, or a plain one is written.

    Raises
    ------
    CheckpointError
        A weight is NaN, infinite or outside the range of ``dtype``, or the folder cannot be written.
    """
    folder = Path(folder)
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in _STORAGE.values():
        raise ValueError(f"dtype must be one of {sorted(map(str, _STORAGE.values()))}, not {dtype}")
    settings = checked_settings(model.config, "model.config")
    tensors = {name: _to_storage(name, tensor, dtype) for name, tensor in model.state_dict().items()}
    config = json.dumps({"format_version": FORMAT_VERSION, **settings}, indent=2, allow_nan=False) + "\n"
    if card is None and not (folder / CARD).exists():
        card = _default_card(settings)
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
    """What can be said of a model without knowing where it came from."""
    backbone, packages, kind = settings.get("backbone"), "fewshot-mahalanobis", "Simple CNAPS"
    about = ""
    if backbone is not None:
        kind = "Mahalanobis head on a frozen backbone"
        about = "The backbone is of its author's own: `SimpleCNAPS.from_pretrained(name, backbone=network)`.\n\n"
        if backbone["timm"] is not None:
            packages = "'fewshot-mahalanobis[backbones]'"
            about = f"The backbone is timm's `{backbone['timm']}`; the terms of those weights apply.\n\n"
    rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    return _DEFAULT_CARD.format(kind=kind, packages=packages, backbone=about, settings=rows)


def read_checkpoint(folder: str | os.PathLike[str], backbone: nn.Module | None = None) -> SimpleCNAPS:
    """Read a checkpoint from a local folder.

    Parameters
    ----------
    folder : path
        With ``config.json`` and ``model.safetensors``.
    backbone : nn.Module, optional
        The network of a checkpoint whose backbone is neither the FiLM ResNet18 nor timm's. A copy is used.

    Returns
    -------
    SimpleCNAPS
        On the CPU, in float32 however it was stored, in evaluation mode.

    Raises
    ------
    CheckpointError
        A file is missing or malformed, was written by a newer version, or does not hold exactly the
        tensors that the settings ask for, with their shapes, in a storable type and finite.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():  # neither a folder nor a pipe, which would be waited on
            raise CheckpointError(
                f"{folder / name}: no such file. A checkpoint is a folder with {CONFIG} and {WEIGHTS}. If it is a "
                "fitted classifier, use SimpleCNAPSClassifier.from_pretrained"
            )
    settings = _read_settings(folder / CONFIG)
    check_network(str(folder / CONFIG), settings, backbone, "SimpleCNAPS.from_pretrained(..., backbone=network)")
    try:
        model = empty_model(settings, backbone)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    expected = model.state_dict()
    tensors = read_tensors(folder / WEIGHTS, expected)
    check_finite(folder / WEIGHTS, tensors)
    try:
        return filled_model(model, {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()})
    except ValueError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: {error}") from error


def check_network(source: str, settings: Mapping[str, Any], network: nn.Module | None, how: str) -> None:
    """Raise CheckpointError where a network is wanted and not given, or given and not wanted."""
    backbone = settings.get("backbone")
    if isinstance(backbone, Mapping) and backbone.get("timm") is None and network is None:
        raise CheckpointError(f"{source}: its backbone is a network of its author's own, so give that network: {how}")
    if backbone is None and network is not None:
        raise CheckpointError(f"{source}: this is Simple CNAPS with its own network: it takes no other")


def empty_model(settings: Mapping[str, Any], network: nn.Module | None = None) -> SimpleCNAPS:
    """The model of checked settings, its weights yet to come: mere shapes, but for a copy of the user's ``network``.

    Neither memory nor the global random generator is spent on what a file is first compared with.
    """
    arguments = dict(settings)
    description = arguments.pop("backbone", None)
    if description is not None:
        return SimpleCNAPS(**arguments, backbone=Backbone.described(description, settings["image_size"], network))
    with torch.device("meta"):
        return SimpleCNAPS(**arguments)


def filled_model(model: SimpleCNAPS, weights: Mapping[str, Tensor]) -> SimpleCNAPS:
    """``model`` from :func:`empty_model`, filled with the weights that were saved; in evaluation mode."""
    backbone = model.feature_extractor
    if isinstance(backbone, Backbone):
        backbone.materialise()
    model.load_state_dict(weights, assign=True)
    if isinstance(backbone, Backbone):
        backbone.requires_grad_(False)
        backbone.check_fingerprint()
    return model.eval()


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the arguments of ``SimpleCNAPS`` from a ``config.json``."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_CONFIG + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if len(content) > _LARGEST_CONFIG:
        raise CheckpointError(f"{path}: larger than {_LARGEST_CONFIG} bytes, so not a checkpoint's configuration")
    try:
        config = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}. Save or download the checkpoint again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(config).__name__}")
    version = config.pop("format_version", None)
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{path}: 'format_version' must be a whole number from 1, not {version!r}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: 'format_version' is {version} and this version of fewshot_mahalanobis reads up to "
            f"{FORMAT_VERSION}: upgrade fewshot_mahalanobis"
        )
    return checked_settings(config, str(path))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def checked_settings(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``config`` if it has every argument of ``SimpleCNAPS``, each of its type, no more; or CheckpointError."""
    fields = [name for name in inspect.signature(SimpleCNAPS).parameters if name != "backbone"]
    hints = get_type_hints(SimpleCNAPS.__init__)
    unknown = sorted(config.keys() - {*fields, "backbone"})
    if unknown:
        raise CheckpointError(f"{source}: unknown field {unknown[0]!r}; the fields are {', '.join(fields)}")
    for name in fields:
        if name not in config:
            raise CheckpointError(f"{source}: the field {name!r} is missing")
        value, wanted = config[name], get_args(hints[name]) or (hints[name],)
        # bool is a subclass of int, and JSON writes 1.0 as 1 in other people's tools.
        number = float in wanted and type(value) in (int, float) and abs(value) <= sys.float_info.max
        if not number and (type(value) not in wanted or type(value) is float):
            types = " or ".join(kind.__name__ for kind in wanted)
            raise CheckpointError(f"{source}: the field {name!r} must be of type {types}, not {value!r}")
    settings = {name: config[name] for name in fields}
    if "backbone" in config:
        settings["backbone"] = _checked_description(config["backbone"], source)
    return settings


def _checked_description(backbone: Any, source: str) -> dict[str, Any]:
    """What ``Backbone.description`` gives, or CheckpointError."""

    def colours(value: Any) -> bool:
        numbers = isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) for v in value)
        return numbers and all(abs(v) <= sys.float_info.max and math.isfinite(v) for v in value)

    checks = {
        "timm": lambda value: value is None or (isinstance(value, str) and len(value) <= 200),
        "features": lambda value: type(value) is int and 1 <= value <= _MOST_FEATURES,
        "mean": colours,
        "std": colours,
    }
    if not isinstance(backbone, dict) or backbone.keys() != checks.keys():
        raise CheckpointError(f"{source}: 'backbone' must have the fields {', '.join(checks)}")
    for name, check in checks.items():
        if not check(backbone[name]):
            raise CheckpointError(f"{source}: {name!r} of 'backbone' cannot be {backbone[name]!r}")
    return dict(backbone)


def _to_storage(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a CPU copy of one weight in the type it is stored in."""
    if not tensor.is_floating_point():
        return tensor.detach().to("cpu", copy=True).contiguous()
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"the weight {name!r} is NaN or infinite: the model cannot be saved")
    stored = tensor.detach().to("cpu", dtype if tensor.ndim > 1 else torch.float32, copy=True)
    if not torch.isfinite(stored).all():
        raise CheckpointError(f"the weight {name!r} does not fit into {dtype}: save it with dtype=torch.float32")
    return stored.contiguous()


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file: exactly those ``expected``, of these shapes, in a type that fits.

    Floating ones come as they are stored, in float32, float16 or bfloat16. CheckpointError on anything else; what the
    file claims is compared before any tensor is read.
    """
    remedy = "Save or download it again"
    try:
        # The library holds the header's sizes against the file's before it allocates anything.
        with safe_open(path, framework="pt", device="cpu") as file:
            found = set(file.keys())
            for kind, names in (("missing", expected.keys() - found), ("unexpected", found - expected.keys())):
                if names:
                    raise CheckpointError(
                        f"{path}: {len(names)} tensors are {kind} for the settings that come with them, {min(names)!r} "
                        f"first. Either may belong to another checkpoint. {remedy}"
                    )
            for name, tensor in expected.items():
                entry = file.get_slice(name)
                shape, stored = tuple(entry.get_shape()), entry.get_dtype()
                if shape != tuple(tensor.shape):
                    raise CheckpointError(
                        f"{path}: tensor {name!r} has shape {shape}, not {tuple(tensor.shape)}. {remedy}"
                    )
                if stored not in (_STORAGE if tensor.is_floating_point() else (_WHOLE.get(tensor.dtype),)):
                    raise CheckpointError(f"{path}: tensor {name!r} has type {stored}, which does not fit. {remedy}")
            # Copies: the library's tensors may be views of the file, which can change or vanish under them.
            return {name: file.get_tensor(name).clone() for name in expected}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}. {remedy}") from error


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a tensor from ``path`` has NaN or infinite entries."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: tensor {name!r} has NaN or infinite entries. Save or download it again")
