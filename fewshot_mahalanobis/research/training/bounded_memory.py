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

import torch
from torch import Tensor

from fewshot_mahalanobis.networks.set_encoder import recomputed
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS, film_parameters


def lite_logits(
    model: SimpleCNAPS, support_images: Tensor, support_labels: Tensor, query_images: Tensor, subset_size: int
) -> Tensor:
    """Logits (m, k) of ``model(support_images, support_labels, query_images)``, with LITE's gradient.

    Images are (n, 3, h, w) and (m, 3, h, w) in [-1, 1], the support set in random order: its first
    ``subset_size`` are the subset H. Other images are processed in batches of that size. The gradient is exact if H is
    the whole support set.
    """
    extractor = model.feature_extractor
    film = film_parameters(model, support_images, subset_size)
    subset = extractor(support_images[:subset_size], film)
    scale = len(support_images) / len(subset)
    subset = subset.detach() + scale * (subset - subset.detach())
    with torch.no_grad():
        rest = [extractor(batch, film) for batch in support_images[subset_size:].split(subset_size) if len(batch)]
    queries = [recomputed(extractor, batch, film) for batch in query_images.split(subset_size)]
    support_features, query_features = torch.cat([subset, *rest]), torch.cat(queries)
    if model.projection is not None:
        support_features, query_features = model.projection(support_features), model.projection(query_features)
    return model.head(support_features, support_labels, query_features)
