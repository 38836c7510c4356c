"""Meta-training in bounded memory: gradients through a random subset of the support set.

LITE: Bronskill, Massiceti, Patacchiola, Hofmann, Nowozin & Turner, "Memory Efficient Meta-Learning with Large Images",
NeurIPS 2021. The logits of a task, and the derivative of the loss with respect to every support feature, use the whole
support set. Only a random subset H of the n support images is back-propagated through the network, with its gradient
multiplied by n / |H|. The gradient is a sum over images, so its expectation over uniform subsets H is exact.

This argument holds for one sum over the support set. Here sums are nested: the mean that gives the task representation,
the batch statistics in every layer of the set encoder, and the activations that condition an auto-regressive generator.
Their gradients are computed exactly, with checkpointing: activations are not stored but recomputed in the backward
pass, |H| images at a time (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). Queries are treated
alike. Memory holds the activations of |H| images, and per support image only the small maps between the layers of the
set encoder (and between those of the network, for an auto-regressive generator).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.set_encoder import SetEncoder
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

Result = TypeVar("Result")


def lite_logits(
    model: SimpleCNAPS, support_images: Tensor, support_labels: Tensor, query_images: Tensor, size: int
) -> Tensor:
    """Logits of ``model(support_images, support_labels, query_images)``, with LITE's gradient.

    Parameters
    ----------
    model : SimpleCNAPS
        With adaptation networks.
    support_images : Tensor of shape (n, 3, h, w)
        In [-1, 1], in random order: the first ``size`` are the subset H.
    support_labels : int64 Tensor of shape (n,)
    query_images : Tensor of shape (m, 3, h, w)
    size : int
        |H|, and the chunk size elsewhere. With n or more the gradient is exact.

    Returns
    -------
    Tensor of shape (m, k)
        Logits.
    """
    extractor = cast(FilmResNet18, model.feature_extractor)
    film = film_parameters(model, support_images, size)
    subset = extractor(support_images[:size], film)
    scale = len(support_images) / len(subset)
    subset = subset.detach() + scale * (subset - subset.detach())
    with torch.no_grad():
        rest = [extractor(chunk, film) for chunk in support_images[size:].split(size) if len(chunk)]
    queries = [_recomputed(extractor, chunk, film) for chunk in query_images.split(size)]
    support_features, query_features = torch.cat([subset, *rest]), torch.cat(queries)
    if model.projection is not None:
        support_features, query_features = model.projection(support_features), model.projection(query_features)
    return model.head(support_features, support_labels, query_features)


def film_parameters(model: SimpleCNAPS, support_images: Tensor, chunk_size: int) -> Film:
    """``model.film_parameters`` with an exact gradient, storing activations of ``chunk_size`` images at a time."""
    if model.set_encoder is None or model.film_generator is None:
        raise ValueError("a model without adaptation has no FiLM parameters")
    z = _encode(model.set_encoder, support_images, chunk_size)
    extractor = cast(FilmResNet18, _Recomputing(cast(FilmResNet18, model.feature_extractor)))
    return model.film_generator(z, support_images, extractor, chunk_size)


class _Recomputing:
    """The layers of a feature extractor, for an auto-regressive generator, without stored activations."""

    def __init__(self, extractor: FilmResNet18) -> None:
        self._extractor = extractor

    def stem(self, images: Tensor) -> Tensor:
        return self._extractor.stem(images)

    def layer(self, index: int, x: Tensor, film: Film) -> Tensor:
        return _recomputed(self._extractor.layer, index, x, film)


def _encode(encoder: SetEncoder, images: Tensor, chunk_size: int) -> Tensor:
    """Task representation (64,) of images (n, 3, h, w), layer by layer with the statistics of the whole set."""
    if len(images) <= chunk_size:
        return encoder(images)
    x = images
    for conv, norm in zip(encoder.convs, encoder.norms, strict=True):
        chunks = x.split(chunk_size)
        share = torch.tensor([len(chunk) / len(x) for chunk in chunks], device=x.device)[:, None]
        moments = [_recomputed(_moments, conv, chunk) for chunk in chunks]
        variances, means = (torch.stack(part) for part in zip(*moments, strict=True))
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean) ** 2)).sum(0)
        x = torch.cat([_recomputed(_layer, conv, norm, chunk, mean, variance) for chunk in chunks])
    return x.float().mean(dim=(0, 2, 3))


def _moments(conv: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Biased variance and mean of each channel of a convolution's output, both (C,)."""
    return torch.var_mean(conv(images).float(), dim=(0, 2, 3), correction=0)


def _layer(conv: nn.Module, norm: nn.BatchNorm2d, images: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """One layer of the set encoder with given statistics, differentiable in them, unlike F.batch_norm."""
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    shift = norm.bias - mean * scale
    y = conv(images)
    return F.max_pool2d(F.relu(y * scale[:, None, None] + shift[:, None, None]).to(y.dtype), 2)


def _recomputed(function: Callable[..., Result], *arguments: object) -> Result:
    """Call ``function(*arguments)``; its activations are recomputed in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
