"""The published implementation's weights under our names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

#: Published names -> ours, applied in order to every key.
_RENAMES = (
    (r"^set_encoder\.pre_pooling_fn\.layer(\d)\.0\.", lambda m: f"set_encoder.convs.{int(m[1]) - 1}."),
    (r"^set_encoder\.pre_pooling_fn\.layer(\d)\.1\.", lambda m: f"set_encoder.norms.{int(m[1]) - 1}."),
    (r"^set_encoder\.sequential_encoder\.", lambda m: "set_encoder.lstm."),
    (r"^feature_extractor\.layer(\d)\.", lambda m: f"feature_extractor.layers.{int(m[1]) - 1}."),
    (r"^feature_adaptation_network\.", lambda m: "film_generator."),
    (r"\.shared_layer_post\.", lambda m: ".shared_post."),
    (r"\.shared_layer\.", lambda m: ".shared."),
    (r"\.(gamma[12]|beta[12])_processors\.(\d)\.", lambda m: f".processors.{m[2]}.{m[1]}."),
    (r"\.(gamma[12]|beta[12])_regularizers\.(\d)$", lambda m: f".scales.{m[2]}.{m[1]}"),
    # Their residual dense layer wraps a Linear; ours is one.
    (r"^(film_generator\..*)\.linear\.(weight|bias)$", lambda m: f"{m[1]}.{m[2]}"),
    (r"^classifier_adaptation_network\.weight_means_processor\.", lambda m: "head.weight_generator."),
    (r"^classifier_adaptation_network\.bias_means_processor\.", lambda m: "head.bias_generator."),
)
_RESNET_KEY = re.compile(r"^(module\.)?(conv1|bn1|layer[1-4]\.\d)\.")
#: The auto-regressive models list the feature extractor a second time under this prefix.
_SECOND_COPY = "feature_adaptation_network.feature_extractor."


def model_from_state_dict(model_class: type[Model], config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Model:
    """Make a model of converted weights; see :meth:`SimpleCNAPS.from_published_state_dict`."""
    with torch.random.fork_rng(devices=[]):  # initial weights, soon replaced
        model = model_class(**config)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"these are not weights of the published implementation: {error}") from error
    return model.eval()


def convert_published_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Tell the model from its keys and rename its weights: arguments of :class:`SimpleCNAPS`, and weights by name.

    ValueError if the keys are those of no model that is supported.
    """
    if "state_dict" in state_dict:
        state_dict = state_dict["state_dict"]
    if "conv1.weight" in state_dict or "module.conv1.weight" in state_dict:  # a bare pretrained network
        state_dict = {
            "feature_extractor." + key.removeprefix("module."): value
            for key, value in state_dict.items()
            if _RESNET_KEY.match(key)  # its ImageNet classifier is left behind
        }
    if "feature_extractor.conv1.weight" not in state_dict:
        raise ValueError("no published model has these keys: 'feature_extractor.conv1.weight' is not among them")
    adapts = any(key.startswith("feature_adaptation_network.layers.") for key in state_dict)
    autoregressive = "feature_adaptation_network.layers.0.shared_layer_post.0.weight" in state_dict
    linear = any(key.startswith("classifier_adaptation_network.") for key in state_dict)
    transductive = "set_encoder.sequential_encoder.weight_ih_l0" in state_dict
    config = {
        "adaptation": "auto-regressive" if autoregressive else "film" if adapts else "none",
        "head": "linear" if linear else "mahalanobis",
        "scale": 1.0,
        # Weighted covariances have no other divisor than N_k, and that of one example is zero.
        **({"task_encoder": "transductive"} if transductive else {"one_shot_covariance": "published"}),
    }
    weights: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        if key.startswith(_SECOND_COPY):
            continue
        # Without adaptation the set encoder has no use; with it, its BatchNorm never reads running statistics.
        unused = not adapts or key.endswith(("running_mean", "running_var", "num_batches_tracked"))
        if key.startswith("set_encoder.") and unused:
            continue
        for pattern, name in _RENAMES:
            key = re.sub(pattern, name, key)
        weights[key] = value
    return config, weights
