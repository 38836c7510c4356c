"""LITE's Simple CNAPS: its published weights under our names (Bronskill et al., NeurIPS 2021)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.efficientnet import LITE_B0

_ENCODER = re.compile(r"set_encoder\.pre_pooling_fn\.layer(\d)\.([01])\.(weight|bias)")
_GENERATOR = re.compile(
    r"feature_adaptation_network\.layers\.(\d+)\.(gamma|beta)_"
    r"(?:generators\.0\.(linear1|layernorm|linear2)\.(weight|bias)|regularizers\.0)"
)
_LAYERS = {"linear1": 0, "layernorm": 1, "linear2": 3}
_NETWORK = "feature_extractor."


def is_lite(state_dict: Mapping[str, Any]) -> bool:
    """Whether these are LITE's keys."""
    return "feature_extractor._conv_stem.weight" in state_dict


def convert_lite_state_dict(state_dict: Mapping[str, Any], image_size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of :class:`SimpleCNAPS`, the backbone with its weights among them, and the weights of the model."""
    network = {key: value for key, value in state_dict.items() if key.startswith(_NETWORK)}
    backbone = Backbone.own(LITE_B0, image_size, network)
    weights: dict[str, Tensor] = {_NETWORK + name: tensor for name, tensor in backbone.state_dict().items()}
    for key, value in state_dict.items():
        if found := _ENCODER.fullmatch(key):
            part = "convs" if found[2] == "0" else "norms"
            weights[f"set_encoder.{part}.{int(found[1]) - 1}.{found[3]}"] = value
        elif found := _GENERATOR.fullmatch(key):
            vector = 2 * int(found[1]) + (found[2] == "beta")
            name = f"processors.{vector}.{_LAYERS[found[3]]}.{found[4]}" if found[3] else f"scales.{vector}"
            weights[f"film_generator.{name}"] = value
    config = {"adaptation": "film", "scale": 1.0, "one_shot_covariance": "published", "image_size": image_size}
    return {**config, "backbone": backbone}, weights
