"""A model from its settings and its weights: what a checkpoint folder and a saved classifier have in common.

A model is first made without memory for its weights (on PyTorch's "meta" device). So a file is compared with what the
model needs before any memory is spent on it, and no random number is drawn for weights that are replaced at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.networks.described import described_network, filled_network, is_brought
from fewshot_mahalanobis.networks.pooling import Statistic
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

#: What names of the network's weights begin with in a model.
_NETWORK = "feature_extractor."

Colours = Annotated[list[float], msgspec.Meta(min_length=3, max_length=3)]
Positions = Annotated[list[str], msgspec.Meta(min_length=1)]
Statistics = Annotated[list[Statistic], msgspec.Meta(min_length=1)]
Description = TypeVar("Description")


class BackboneSettings(msgspec.Struct, forbid_unknown_fields=True):
    """``Backbone.description``."""

    origin: Annotated[str, msgspec.Meta(max_length=200)] | None
    features: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    mean: Colours
    std: Colours
    positions: Positions | msgspec.UnsetType = msgspec.UNSET


class EfficientNetSettings(msgspec.Struct, forbid_unknown_fields=True):
    """``EfficientNet.description``."""

    network: Literal["efficientnet-lite0", "lite-efficientnet-b0"]
    positions: Positions | msgspec.UnsetType = msgspec.UNSET
    pooling: Statistics | msgspec.UnsetType = msgspec.UNSET
    length: Annotated[float, msgspec.Meta(gt=0, le=1000)] | msgspec.UnsetType = msgspec.UNSET
    frozen_pooling: Statistics | msgspec.UnsetType = msgspec.UNSET


class ModelSettings(msgspec.Struct, Generic[Description], forbid_unknown_fields=True):
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
    frozen_features: bool | msgspec.UnsetType = msgspec.UNSET
    backbone: Description | msgspec.UnsetType = msgspec.UNSET


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
    backbone = config.get("backbone")
    kind = EfficientNetSettings if isinstance(backbone, Mapping) and "network" in backbone else BackboneSettings
    try:
        settings: dict[str, Any] = msgspec.to_builtins(msgspec.convert(config, ModelSettings[kind]))  # type: ignore[valid-type]
    except (msgspec.ValidationError, OverflowError) as error:
        remedy = ""
        if "unknown field" in str(error):
            remedy = ". If another version of fewshot_mahalanobis wrote it, fit or train with this one and save again"
        raise CheckpointError(f"{source}: {error}{remedy}") from error
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
        backbone = backbone.feature_extractor.network
    any_network = description is not None and "origin" in description
    if backbone is not None and not any_network:
        raise CheckpointError(f"{source}: this is Simple CNAPS on its own network: it takes no other")
    if backbone is None and any_network and description["origin"] is None:
        raise CheckpointError(
            f"{source}: the backbone is a custom network, whose code is in no file: pass it as backbone=network"
        )
    try:
        if description is not None:
            settings["backbone"] = described_network(description, settings["image_size"], backbone)
        with torch.device("meta"):
            model = SimpleCNAPS(**settings)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
    return model.float()  # whatever PyTorch's default is


def stored_weights(model: SimpleCNAPS) -> dict[str, Tensor]:
    """Weights by name, as files hold them: all but those of EfficientNet-Lite0, which a dependency brings."""
    brought = is_brought(model.feature_extractor)
    return {name: weight for name, weight in model.state_dict().items() if not (brought and name.startswith(_NETWORK))}


def fill(model: SimpleCNAPS, weights: Mapping[str, Tensor]) -> SimpleCNAPS:
    """Give a model of :func:`model_without_weights` its weights, and set evaluation mode.

    Parameters
    ----------
    model : SimpleCNAPS
    weights : mapping of str to Tensor
        Those of :func:`stored_weights`, in their shapes. The model takes the tensors themselves, floating-point ones in
        float32.

    Raises
    ------
    ValueError
        The backbone computes other features than the one that was saved.
    """
    weights = {name: weight.float() if weight.is_floating_point() else weight for name, weight in weights.items()}
    with filled_network(model.feature_extractor) as brought:
        weights |= {f"{_NETWORK}{name}": weight for name, weight in brought.items()}
        model.load_state_dict(weights, assign=True)
    return model.eval()
