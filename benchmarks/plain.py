"""Simple CNAPS by its equations, for comparison: eager, NCHW, float32, a loop over classes with a d x d inverse.

This is how the published implementation computes: BatchNorm and FiLM as separate operations, the support set through
every network as one batch, and for each class the inverse of its covariance matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.heads import MahalanobisHead
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.resnet import FilmResNet18


def sample_covariance(features: Tensor) -> Tensor:
    difference = features - features.mean(dim=0)
    return difference.T @ difference / max(len(features) - 1, 1)


def logits(features: Tensor, labels: Tensor, queries: Tensor, beta: float = 1.0, scale: float = 1.0) -> Tensor:
    """Equations 1 to 3 for support features (n, d), labels (n,) and queries (m, d): (m, k)."""
    task_covariance = sample_covariance(features)
    identity = torch.eye(features.shape[1], dtype=features.dtype)
    columns = []
    for label in range(int(labels.max()) + 1):
        members = features[labels == label]
        weight = len(members) / (len(members) + 1)
        q = weight * sample_covariance(members) + (1 - weight) * task_covariance + beta * identity
        difference = queries - members.mean(dim=0)
        columns.append(-scale * ((difference @ torch.inverse(q)) * difference).sum(dim=1))
    return torch.stack(columns, dim=1)


def task_representation(model: SimpleCNAPS, support: Tensor) -> Tensor:
    assert model.set_encoder is not None
    x = support
    for conv, norm in zip(model.set_encoder.convs, model.set_encoder.norms):
        x = F.max_pool2d(F.relu(norm(conv(x))), 2)
    return x.mean(dim=(2, 3)).mean(dim=0)


def features(network: FilmResNet18, images: Tensor, film: Film | None) -> Tensor:
    def modulated(x: Tensor, position: str) -> Tensor:
        if film is None:
            return x
        gamma, beta = film[position]
        return gamma[:, None, None] * x + beta[:, None, None]

    x = F.relu(network.bn1(network.conv1(images)))
    for index, blocks in enumerate(network.blocks):
        for number, block in enumerate(blocks):
            out = F.relu(modulated(block.bn1(block.conv1(x)), f"layers.{index}.{number}.bn1"))
            out = modulated(block.bn2(block.conv2(out)), f"layers.{index}.{number}.bn2")
            x = F.relu(out + block.downsample(x))
    return x.mean(dim=(2, 3))


@torch.no_grad()
def task(model: SimpleCNAPS, support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Logits (m, k) of query images, support and query images (n, 3, s, s) in [-1, 1]."""
    assert model.film_generator is not None
    assert isinstance(model.feature_extractor, FilmResNet18)
    assert isinstance(model.head, MahalanobisHead)
    covariance: RegularizedCovariance = model.head.covariance
    film = model.film_generator(task_representation(model, support), [support], model.feature_extractor)
    support_features = features(model.feature_extractor, support, film)
    query_features = features(model.feature_extractor, queries, film)
    return logits(support_features, labels, query_features, covariance.settings.ridge, model.head.scale)
