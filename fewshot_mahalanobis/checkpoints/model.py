"""A model from its settings and its weights: what a checkpoint folder and a saved classifier have in common.

A model is first made without memory for its weights (on PyTorch's "meta" device). So a file is compared with what the
model needs before any memory is spent on it, and no random number is drawn for weights that are replaced at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

Colours = Annotated[list[float], msgspec.Meta(min_length=3, max_length=3)]


class BackboneSettings(msgspec.Struct, forbid_unknown_fields=True):
    """``Backbone.description``."""

    timm: Annotated[str, msgspec.Meta(max_length=200)] | None
    features: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    mean: Colours
    std: Colours
    positions: Annotated[list[str], msgspec.Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET


class ModelSettings(msgspec.Struct, forbid_unknown_fields=True):
    """``SimpleCNAPS.config``: the arguments of the model, the backbone by its description."""

    adaptation: str
    head: str
    scale: float
    beta: float | str
    task_covariance: bool
    one_shot_covariance: str
    projection: bool
    image_size: int
    encoder_size: int | msgspec.UnsetType = msgspec.UNSET
    task_encoder: str | msgspec.UnsetType = msgspec.UNSET
    backbone: BackboneSettings | msgspec.UnsetType = msgspec.UNSET


def checked_settings(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a model if every one is there, of its type, and nothing else is.

    Parameters
    ----------
    config : mapping
        ``SimpleCNAPS.config``, or what a file has in its place.
    source : str
        Where it comes from, for the message.

    Raises
    ------
    CheckpointError
        A setting is missing, unknown or of another type. Whether its value is in range is for the model to say.
    """
    try:
        settings: dict[str, Any] = msgspec.to_builtins(msgspec.convert(config, ModelSettings))
    except (msgspec.ValidationError, OverflowError) as error:
        raise CheckpointError(f"{source}: {error}") from error
    return settings


def model_without_weights(
    config: Mapping[str, Any], source: str, backbone: SimpleCNAPS | nn.Module | None = None
) -> SimpleCNAPS:
    """Make the model that settings describe; :func:`fill` gives it weights and memory.

    Parameters
    ----------
    config : mapping
        As for :func:`checked_settings`.
    source : str
        Where it comes from, for the message.
    backbone : nn.Module, optional
        The network of a checkpoint whose backbone is the user's own, or a model with that backbone. A copy is used.

    Raises
    ------
    CheckpointError
        The settings are not those of a model, the network is missing or not needed, or timm does not know it.
    ImportError
        The backbone is one of timm's, and timm is absent.
    """
    settings = checked_settings(config, source)
    description = settings.pop("backbone", None)
    if isinstance(backbone, SimpleCNAPS):
        extractor: Any = backbone.feature_extractor
        backbone = getattr(extractor, "network", extractor)
    if description is None and backbone is not None:
        raise CheckpointError(f"{source}: this is Simple CNAPS on its own network: it takes no other")
    if description is not None and description["timm"] is None and backbone is None:
        raise CheckpointError(
            f"{source}: the backbone is a custom network, whose code is in no file: pass it as backbone=network"
        )
    try:
        if description is not None:
            settings["backbone"] = Backbone.described(description, settings["image_size"], backbone)
        with torch.device("meta"):
            return SimpleCNAPS(**settings)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def fill(model: SimpleCNAPS, weights: Mapping[str, Tensor]) -> SimpleCNAPS:
    """Give a model of :func:`model_without_weights` its weights, and set evaluation mode.

    Parameters
    ----------
    model : SimpleCNAPS
    weights : mapping of str to Tensor
        All of ``model.state_dict()``, in its shapes. The model takes the tensors themselves, floating-point ones in
        float32.

    Raises
    ------
    ValueError
        The backbone computes other features than the one that was saved.
    """
    backbone = model.feature_extractor
    if isinstance(backbone, Backbone):
        backbone.materialise()
    weights = {name: weight.float() if weight.is_floating_point() else weight for name, weight in weights.items()}
    model.load_state_dict(weights, assign=True)
    if isinstance(backbone, Backbone):
        backbone.requires_grad_(False)
        backbone.check_fingerprint()
    return model.eval()
