"""The model that a recipe of meta-training starts from, made, loaded and checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS
from fewshot_mahalanobis.checkpoints.load import load_checkpoint, resnet18_weights
from fewshot_mahalanobis.checkpoints.restore import checked_settings
from fewshot_mahalanobis.networks.efficientnet import LITE0
from fewshot_mahalanobis.networks.generators import LayerGenerator
from fewshot_mahalanobis.networks.pooling import read_statistics
from fewshot_mahalanobis.networks.pretrained import is_pretrained_name, pretrained_extractor
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.research.baselines.baseline import Baseline, checked_baseline_settings
from fewshot_mahalanobis.research.training.learner import BaselineLearner, CNAPSLearner
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe

Made = TypeVar("Made", SimpleCNAPS, Baseline)


def starting_learner(recipe: MetaTrainRecipe) -> CNAPSLearner | BaselineLearner:
    """Make the model that a recipe trains, Simple CNAPS or a method, with random or given adaptation networks.

    The backbone is trained too if the method does so. ValueError if ``model`` has an unknown setting or nothing to
    train, or ``init`` is a checkpoint of another model.
    """
    # A name in CHECKPOINTS always means that checkpoint, even if timm has a network of the same name.
    by_name = recipe.backbone == LITE0 or (recipe.backbone not in CHECKPOINTS and is_pretrained_name(recipe.backbone))
    if recipe.method is not None:
        if by_name or recipe.init is not None or recipe.lite is not None:
            raise ValueError("a method is trained on the FiLM ResNet18 of a checkpoint or file, without init and lite")
        baseline = _made(functools.partial(Baseline, head=recipe.method), recipe, _arguments(Baseline, "head"))
        checked_baseline_settings(baseline.config, "model")
        _load_resnet18(baseline, recipe)
        return BaselineLearner(baseline)
    if recipe.model.get("adaptation") == "none":
        raise ValueError("a model without adaptation has nothing to meta-train")
    make: Callable[..., SimpleCNAPS] = SimpleCNAPS
    names = _arguments(SimpleCNAPS, "backbone")
    if by_name:
        make = functools.partial(_on_pretrained_network, recipe.backbone)
        names = [*dict.fromkeys(_arguments(pretrained_extractor, "name") + names)]
    model = _made(make, recipe, names)
    checked_settings(model.config, "model")
    if not by_name:
        _load_resnet18(model, recipe)
    elif recipe.feature_scale != 1:
        raise ValueError("feature_scale is for the FiLM ResNet18; for another network set model.beta")
    if recipe.init is not None:
        _load_adaptation(model, recipe.init)
    return CNAPSLearner(model, recipe.lite, recipe.learn_scale, recipe.learn_pooling)


def _on_pretrained_network(name: str, **settings: Any) -> SimpleCNAPS:
    """Put untrained adaptation networks on a pretrained network; without ``positions``, FiLM follows the usual ones."""
    of_network = {argument: settings.pop(argument, None) for argument in _arguments(pretrained_extractor, "name")}
    for statistics in ("pooling", "frozen_pooling"):
        if of_network[statistics] is not None:
            of_network[statistics] = read_statistics(of_network[statistics])
    extractor = pretrained_extractor(name, **of_network)
    return SimpleCNAPS(image_size=extractor.image_size, backbone=extractor, **settings)


def _arguments(function: Callable[..., Any], other_than: str) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != other_than]


def _made(make: Callable[..., Made], recipe: MetaTrainRecipe, known: list[str]) -> Made:
    """Make a model with random weights of the recipe's seed; ValueError if it has no such setting."""
    if unknown := sorted(set(recipe.model) - set(known)):
        raise ValueError(f"model has no setting {unknown[0]!r} (settings are {', '.join(known)})")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return make(**recipe.model)


def _load_resnet18(model: SimpleCNAPS | Baseline, recipe: MetaTrainRecipe) -> None:
    cast(FilmResNet18, model.feature_extractor).load_state_dict(resnet18_weights(recipe.backbone))
    scale_features_(model, recipe.feature_scale)


def scale_features_(model: SimpleCNAPS | Baseline, factor: float) -> None:
    """Multiply the backbone's features, adapted or not, by ``factor``, by rescaling layer 4.

    Equation 3 adds beta I, which presumes a feature scale. The scale of a supervised backbone is arbitrary, because its
    linear classifier adjusts to any.
    """
    first, second = cast(FilmResNet18, model.feature_extractor).blocks[-1]
    with torch.no_grad():
        for bn in (first.bn2, cast(nn.Sequential, first.downsample)[1], second.bn2):
            cast(Tensor, bn.weight).mul_(factor)
            cast(Tensor, bn.bias).mul_(factor)
        second.conv1.weight.div_(factor)
        if model.film_generator is not None:  # FiLM's beta is added after scaling
            for scales in cast(LayerGenerator, cast(nn.ModuleList, model.film_generator.layers)[-1]).scales:
                cast(nn.ParameterDict, scales)["beta2"].mul_(factor)


def _load_adaptation(model: SimpleCNAPS, checkpoint: str) -> None:
    """Take the adaptation networks of a checkpoint; ValueError if it is of another model."""
    before = load_checkpoint(checkpoint)
    known = _parts(before)
    if _adaptation_settings(before) != _adaptation_settings(model) or _parts(model)[: len(known)] != known:
        raise ValueError(f"the checkpoint {checkpoint!r} belongs to another model: {before.config}, not {model.config}")
    start = {name: x for name, x in before.state_dict().items() if not name.startswith("feature_extractor.")}
    if before.feature_encoder is not None and model.feature_encoder is not None:
        # Its columns are means, then deviations, of the features; those of further statistics come last.
        weight = before.feature_encoder.weight.detach().unflatten(1, (2, -1))
        further = model.feature_encoder.in_features // 2 - weight.shape[2]
        start["feature_encoder.weight"] = F.pad(weight, (0, further)).flatten(1)
    model.load_state_dict({**model.state_dict(), **start})


def _adaptation_settings(model: SimpleCNAPS) -> dict[str, Any]:
    """Return the settings that determine the shapes of the weights that ``init`` provides.

    A feature encoder that the checkpoint lacks starts from zero, and so do its columns for further statistics of maps.
    """
    others = {"head", "scale", "beta", "image_size", "frozen_features"}
    settings = {name: value for name, value in model.config.items() if name not in others}
    if isinstance(network := settings.get("backbone"), dict):
        pooling = {"pooling", "length", "frozen_pooling"}
        settings["backbone"] = {name: value for name, value in network.items() if name not in pooling}
    return settings


def _parts(model: SimpleCNAPS) -> list[str]:
    """Return the maps of each statistic that the set encoder reads of the frozen network."""
    backbone = model.config.get("backbone", {})
    pooling = backbone.get("frozen_pooling", backbone.get("pooling", [{"maps": "final"}]))
    return [part["maps"] for part in pooling]
