"""Pretrained networks by name: EfficientNet-Lite0, whose weights are a dependency, and those of timm."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.networks.backbone import Backbone, check_image_size
from fewshot_mahalanobis.networks.efficientnet import LITE0, MEANS, EfficientNet
from fewshot_mahalanobis.networks.pooling import Statistic

#: Sides of images, in pixels, above which a size that nobody asked for deserves a warning.
_LARGE = 300
#: Seconds that the Hub has to answer.
_PATIENCE = 10.0


def pretrained_extractor(
    name: str,
    *,
    image_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    positions: Sequence[str] | None = (),
    pooling: Sequence[Statistic] | None = None,
    length: float | None = None,
    frozen_pooling: Sequence[Statistic] | None = None,
) -> Backbone | EfficientNet:
    """Make a pretrained network without its classification layer.

    Parameters
    ----------
    name : str
        "efficientnet-lite0", or a name of timm, which fetches the weights.
    image_size, mean, std
        As in :meth:`SimpleCNAPS.from_backbone <fewshot_mahalanobis.SimpleCNAPS.from_backbone>`.
    positions : sequence of str, optional
        Normalisation layers that FiLM follows; none by default, and None finds them by rule.
    pooling, length, frozen_pooling
        As in :class:`~fewshot_mahalanobis.networks.efficientnet.EfficientNet`, for "efficientnet-lite0" alone.

    Warns
    -----
    UserWarning
        No size is given, and the network reads images of more than 300 pixels.

    Raises
    ------
    ImportError
        timm, or the package with the weights of EfficientNet-Lite0, is absent.
    ValueError
        timm has no such network or cannot fetch it, or an argument does not fit the network.
    """
    if image_size is not None:
        check_image_size(image_size)
    if name == LITE0:
        if mean is not None or std is not None:
            raise ValueError(f"{name!r} has a known normalisation of its images: leave out mean and std")
        pooling = MEANS if pooling is None else pooling
        return EfficientNet.pretrained(image_size or 224, positions, pooling, length, frozen_pooling)
    for setting, value in {"pooling": pooling, "length": length, "frozen_pooling": frozen_pooling}.items():
        if value is not None:
            raise ValueError(f"{setting} is for {LITE0!r}: {name!r} pools its maps itself")
    network = timm_network(name, image_size, pretrained=True)
    from timm.data import resolve_model_data_config

    data, made = resolve_model_data_config(network), network.pretrained_cfg
    full_name = ".".join(filter(None, (made.get("architecture"), made.get("tag"))))
    if image_size is None:
        image_size = int(data["input_size"][-1])
        if image_size > _LARGE:
            warnings.warn(
                f"{name!r} reads images of {image_size} pixels, at {(image_size / 224) ** 2:.0f} times the cost of "
                "224: image_size=224 may do as well",
                stacklevel=3,
            )
    return Backbone.wrap(
        network.float(),
        image_size=image_size,
        mean=data["mean"] if mean is None else mean,
        std=data["std"] if std is None else std,
        # In full, as the weights that a bare name stands for may change from one version of timm to the next.
        origin=full_name if is_timm_name(name) else None,
        positions=positions,
    )


def is_pretrained_name(name: str) -> bool:
    """Whether :func:`pretrained_extractor` knows the name; no error where timm is absent."""
    try:
        return name == LITE0 or is_timm_name(name)
    except ImportError:
        return False


def is_timm_name(name: str) -> bool:
    """Whether timm has a network of this name, by itself. ImportError if timm is absent."""
    # timm's names have no slash, so a path is recognised without importing timm, which takes seconds.
    return "/" not in name and bool(_timm().is_model(name))


def timm_network(name: str, image_size: int | None, *, pretrained: bool) -> Any:
    """Make a network of timm without classification layer, so that it gives pooled features."""
    timm = _timm()
    try:
        settings = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
        size = {}
        if settings is not None and settings.fixed_input_size and image_size not in (None, settings.input_size[-1]):
            size = {"img_size": image_size}  # position embeddings fix it; timm resamples them
        if pretrained and settings is not None and settings.hf_hub_id:
            _check_connection(settings.hf_hub_id, settings.hf_hub_filename, "model.safetensors", "pytorch_model.bin")
        if name.startswith("hf-hub:"):
            _check_connection(name.removeprefix("hf-hub:"), "config.json")
        with torch.random.fork_rng(devices=[]):  # for initial weights, soon replaced
            return timm.create_model(name, pretrained=pretrained, num_classes=0, **size).float()
    except ConnectionError as error:
        import huggingface_hub

        raise ValueError(
            f"timm could not make {name!r}: {error}. For a machine without a connection, copy the folder "
            f"'models--timm--{name}' from the cache of another machine to {huggingface_hub.constants.HF_HUB_CACHE} "
            "(HF_HUB_CACHE names another folder)"
        ) from error
    except Exception as error:  # timm lets those of its transports through
        raise ValueError(
            f"timm could not make {name!r}: {error}. timm.list_models(pretrained=True) lists the names; weights are "
            "downloaded when first used"
        ) from error


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"this backbone is made by timm: {install_command('backbones')}") from error
    return timm


def _check_connection(repository: str, *files: str | None) -> None:
    """Raise ConnectionError unless the Hub answers soon, or one of the files is in its cache.

    timm's own requests repeat for most of a minute where there is no network. Behind a firewall that answers nothing,
    each of the Hub's addresses would be waited for in turn.
    """
    import huggingface_hub

    cached = (huggingface_hub.try_to_load_from_cache(repository, file) for file in files if file)
    if any(isinstance(path, str) for path in cached):
        return
    answer = SimpleQueue[Exception | None]()

    def ask() -> None:
        try:
            huggingface_hub.HfApi().model_info(repository, timeout=_PATIENCE)
            answer.put(None)
        except Exception as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        problem = answer.get(timeout=_PATIENCE)
    except Empty:
        problem = TimeoutError(f"no answer in {_PATIENCE:g} s")
    if isinstance(problem, huggingface_hub.errors.HfHubHTTPError):
        raise problem  # it answers, and says why not
    if problem is not None:  # the transport's, which varies
        raise ConnectionError(f"no connection to {huggingface_hub.constants.ENDPOINT} ({problem})") from problem
