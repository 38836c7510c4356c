"""A network from its description, as files have it, and its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.efficientnet import LITE0, EfficientNet, lite0_weights
from fewshot_mahalanobis.networks.extractor import FeatureExtractor
from fewshot_mahalanobis.networks.pooling import read_statistics
from fewshot_mahalanobis.networks.pretrained import is_timm_name, timm_network


def described_network(
    description: Mapping[str, Any], image_size: int, network: nn.Module | None = None
) -> Backbone | EfficientNet:
    """Make what a description describes, its weights yet to be loaded; a copy of ``network`` is used.

    ValueError if timm has no such network, or the description does not fit it.
    """
    positions = description.get("positions", ())
    if "network" in description:
        statistics = {
            name: read_statistics(description[name]) for name in ("pooling", "frozen_pooling") if name in description
        }
        with torch.device("meta"):
            return EfficientNet(
                description["network"], image_size, positions, length=description.get("length"), **statistics
            )
    origin = description["origin"]
    if network is not None:
        network = copy.deepcopy(network).float()
    elif not is_timm_name(origin):  # a file could name "hf-hub:..." or "local-dir:...", which timm would fetch and read
        raise ValueError(f"this version of timm has no network {origin!r}: upgrade timm")
    else:
        with torch.device("meta"):
            network = timm_network(origin, image_size, pretrained=False)
    return Backbone(
        network,
        description["features"],
        image_size=image_size,
        mean=description["mean"],
        std=description["std"],
        origin=origin,
        positions=positions,
    )


def is_brought(extractor: FeatureExtractor) -> bool:
    """Whether a dependency brings the weights of a network, so that files leave them out."""
    return isinstance(extractor, EfficientNet) and extractor.name == LITE0


@contextmanager
def filled_network(extractor: FeatureExtractor) -> Iterator[dict[str, Tensor]]:
    """A block in which a network of :func:`described_network` gets its weights, after which it is frozen and checked.

    Yields those that a dependency brings, by name. ValueError if the network computes other features than the one that
    was saved.
    """
    if isinstance(extractor, Backbone) and any(parameter.is_meta for parameter in extractor.network.parameters()):
        network = timm_network(str(extractor.origin), extractor.image_size, pretrained=False)  # now with memory
        extractor.network = network.requires_grad_(False).eval()
    # By position; the surplus weights are those of a classification layer.
    names = cast(nn.Module, extractor).state_dict() if is_brought(extractor) else {}
    yield (dict(zip(names, lite0_weights().values(), strict=False)) if names else {})
    cast(nn.Module, extractor).requires_grad_(False)
    if isinstance(extractor, Backbone):
        extractor.check_fingerprint()
