"""Weights that others have published: their names turned into ours, downloads converted once and kept in a cache.

The authors of Simple CNAPS published PyTorch files of Simple CNAPS and Simple AR-CNAPS; the authors of LITE
(Bronskill et al., NeurIPS 2021) published Simple CNAPS on EfficientNet-B0.

The cache is the folder in the environment variable ``FEWSHOT_MAHALANOBIS_CACHE``, by default the platform's cache
folder. It holds one checkpoint folder per file, named after the file's digest and the number of the conversion; the
download itself is deleted after its conversion, whose weights are the same.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewshot_mahalanobis.checkpoints.catalogue import CheckpointRecord
from fewshot_mahalanobis.checkpoints.download import LOCAL_COPIES_VARIABLE, blob_id, download
from fewshot_mahalanobis.checkpoints.errors import CheckpointError
from fewshot_mahalanobis.checkpoints.files import atomic_replace, locked, remove_leftovers
from fewshot_mahalanobis.checkpoints.folder import read_checkpoint, save_checkpoint
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.networks.efficientnet import LITE_B0, EfficientNet
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

#: Environment variable: the folder for converted checkpoints.
CACHE_VARIABLE = "FEWSHOT_MAHALANOBIS_CACHE"
#: Part of the names of cached folders; to be raised when weights are converted in another way.
CONVERSION = 1

_CARD = """\
---
license: mit
library_name: fewshot-mahalanobis
pipeline_tag: image-classification
---

# {name}

Converted from {url}
(git blob {blob_id}). Trained on {trained_on}.
"""

#: The authors' names -> ours, applied in order to every key.
_RENAMES = (
    (r"^set_encoder\.pre_pooling_fn\.layer(\d)\.0\.", lambda m: f"set_encoder.convs.{int(m[1]) - 1}."),
    (r"^set_encoder\.pre_pooling_fn\.layer(\d)\.1\.", lambda m: f"set_encoder.norms.{int(m[1]) - 1}."),
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

#: LITE's names.
_ENCODER = re.compile(r"set_encoder\.pre_pooling_fn\.layer(\d)\.([01])\.(weight|bias)")
_GENERATOR = re.compile(
    r"feature_adaptation_network\.layers\.(\d+)\.(gamma|beta)_"
    r"(?:generators\.0\.(linear1|layernorm|linear2)\.(weight|bias)|regularizers\.0)"
)
_LAYERS = {"linear1": 0, "layernorm": 1, "linear2": 3}
_NETWORK = "feature_extractor."


# -------------------------------------------------------------------- names


def model_from_published_state_dict(state_dict: Mapping[str, Any], image_size: int = 224) -> SimpleCNAPS:
    """Make a model of published weights; see :meth:`SimpleCNAPS.from_published_state_dict`."""
    if "feature_extractor._conv_stem.weight" in state_dict:
        settings, weights = _converted_lite(state_dict, image_size)
    else:
        settings, weights = _converted(state_dict)
    with torch.random.fork_rng(devices=[]):  # initial weights, soon replaced
        model = SimpleCNAPS(**settings)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"these are not weights of the published implementation: {error}") from error
    return model.eval()


def _converted(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of the :class:`SimpleCNAPS` for the authors' weights; their keys tell which model it is.

    ValueError if the keys are those of no model that is supported.
    """
    if "state_dict" in state_dict:
        state_dict = state_dict["state_dict"]
    if "conv1.weight" in state_dict or "module.conv1.weight" in state_dict:  # a bare pretrained network
        state_dict = {
            "feature_extractor." + key.removeprefix("module."): value
            for key, value in state_dict.items()
            if _RESNET_KEY.match(key)  # without its ImageNet classifier
        }
    if "feature_extractor.conv1.weight" not in state_dict:
        raise ValueError("no published model has these keys: 'feature_extractor.conv1.weight' is not among them")
    adapts = any(key.startswith("feature_adaptation_network.layers.") for key in state_dict)
    autoregressive = "feature_adaptation_network.layers.0.shared_layer_post.0.weight" in state_dict
    linear = any(key.startswith("classifier_adaptation_network.") for key in state_dict)
    config = {
        "adaptation": "auto-regressive" if autoregressive else "film" if adapts else "none",
        "head": "linear" if linear else "mahalanobis",
        "scale": 1.0,
        "one_shot_covariance": "published",
    }
    weights: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        if key.startswith(_SECOND_COPY):
            continue
        # Without adaptation the set encoder is unused; with it, its BatchNorm never reads running statistics.
        unused = not adapts or key.endswith(("running_mean", "running_var", "num_batches_tracked"))
        if key.startswith("set_encoder.") and unused:
            continue
        for pattern, name in _RENAMES:
            key = re.sub(pattern, name, key)
        weights[key] = value
    return config, weights


def _converted_lite(state_dict: Mapping[str, Any], image_size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of the :class:`SimpleCNAPS` for LITE's weights, its backbone among them, and the weights."""
    network = {key: value for key, value in state_dict.items() if key.startswith(_NETWORK)}
    backbone = EfficientNet.from_weights(network, LITE_B0, image_size, positions=None)
    weights: dict[str, Tensor] = {_NETWORK + name: tensor for name, tensor in backbone.state_dict().items()}
    for key, value in state_dict.items():
        if match := _ENCODER.fullmatch(key):
            part = "convs" if match[2] == "0" else "norms"
            weights[f"set_encoder.{part}.{int(match[1]) - 1}.{match[3]}"] = value
        elif match := _GENERATOR.fullmatch(key):
            vector = 2 * int(match[1]) + (match[2] == "beta")
            name = f"processors.{vector}.{_LAYERS[match[3]]}.{match[4]}" if match[3] else f"scales.{vector}"
            weights[f"film_generator.{name}"] = value
    config = {"adaptation": "film", "scale": 1.0, "one_shot_covariance": "published", "image_size": image_size}
    return {**config, "backbone": backbone}, weights


# -------------------------------------------------------------------- downloads


def cache_folder() -> Path:
    """Where converted checkpoints are kept."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("fewshot_mahalanobis", appauthor=False))


def load_published(record: CheckpointRecord) -> SimpleCNAPS:
    """Load a published checkpoint; only its first use needs a connection.

    DownloadError if the file is neither cached nor in ``FEWSHOT_MAHALANOBIS_CHECKPOINTS`` and cannot be downloaded;
    CheckpointError if a local copy has the wrong digest, or the cache cannot be written or has been damaged;
    ImportError without the packages of the extra ``hub``.
    """
    try:
        import platformdirs  # noqa: F401
        import requests  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{record.name!r} is no part of the package: to download it and keep it needs {error.name}, "
            f"{install_command('hub')}"
        ) from error
    cache = cache_folder()
    folder = cache / f"{record.name}-{str(record.blob_id)[:12]}-v{CONVERSION}"
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f"{record.name}.lock"):
                if not folder.is_dir():  # another process may have made it while this one waited
                    _convert(record, folder)
        except OSError as error:
            raise CheckpointError(
                f"{cache}: the cache for {record.name!r} cannot be written: {error}. Make room or set the "
                f"environment variable {CACHE_VARIABLE} to another folder"
            ) from error
    try:
        return read_checkpoint(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. The cached copy is damaged: delete the folder {folder} and try again"
        ) from error


def _convert(record: CheckpointRecord, folder: Path) -> None:
    """Make ``folder`` the checkpoint of a published file, whole or not at all."""
    local = _local_copy(record)
    source = folder.parent / _base_name(record) if local is None else local
    remove_leftovers(folder)
    if local is None:
        remove_leftovers(source)
    # A download that was verified before an interruption serves again, once its digest is checked again.
    if local is None and not (source.is_file() and blob_id(source) == record.blob_id):
        download(str(record.url), source, str(record.blob_id))
    try:
        state_dict = torch.load(source, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{source}: cannot be read without unpickling arbitrary objects: {error}") from error
    # The authors' mini-ImageNet script keeps the network's weights under this key.
    state_dict = state_dict.get("resnet_dict", state_dict)
    model = model_from_published_state_dict(state_dict, record.image_size)
    with atomic_replace(folder) as temporary:
        save_checkpoint(model, temporary, card=_CARD.format(**vars(record)))
    if local is None:
        source.unlink()


def _local_copy(record: CheckpointRecord) -> Path | None:
    """Find the published file in the user's own folder of copies, its digest checked."""
    folder = os.environ.get(LOCAL_COPIES_VARIABLE)
    if not folder:
        return None
    if not Path(folder).expanduser().is_dir():
        raise CheckpointError(f"{LOCAL_COPIES_VARIABLE} is {folder!r}, which is not a folder")
    path = Path(folder).expanduser() / _base_name(record)
    if not path.is_file():
        return None
    digest = blob_id(path)
    if digest != record.blob_id:
        raise CheckpointError(
            f"{path} (found through {LOCAL_COPIES_VARIABLE}) is not the published file: git blob id {digest}, "
            f"expected {record.blob_id}. Fetch it again from {record.url}"
        )
    return path


def _base_name(record: CheckpointRecord) -> str:
    return str(record.url).rsplit("/", 1)[-1]
