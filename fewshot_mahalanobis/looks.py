"""What a classifier of images looks at to tell foreign ones; rejection.py has the score that the looks make.

The first look is the head's. The others compare features with class means: by their cosine in adapted features and in
those of the network without FiLM, and in adapted features also by the cosine about the centre of the classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.devices import within_memory
from fewshot_mahalanobis.gaussians.inputs import class_means
from fewshot_mahalanobis.heads import CosineHead, Head
from fewshot_mahalanobis.networks.adapted_task import AdaptedTask
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS


class CentredCosineHead(Head[tuple[Tensor, Tensor]]):
    """Logits = cos(x - c, mu_k - c), c the mean of the class means mu_k; float64."""

    def fit(self, support_features: Tensor, support_labels: Tensor) -> tuple[Tensor, Tensor]:
        """M_k = mu_k - c (k, d), and c (d,), of the support features (n, d), labels (n,)."""
        means = class_means(support_features.double(), support_labels)
        return means - means.mean(dim=0), means.mean(dim=0)

    def logits(self, state: tuple[Tensor, Tensor], query_features: Tensor) -> Tensor:
        """Cosines (m, k) of queries (m, d)."""
        means, centre = state
        return F.normalize(query_features.double() - centre, dim=1) @ F.normalize(means, dim=1).T

    def leave_one_out_logits(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others, exactly, without n fits."""
        means, centre = self.fit(support_features, support_labels)
        x, y, k = support_features.double() - centre, support_labels, len(means)
        counts = y.bincount()[y, None].double()
        alone, own = counts == 1, F.one_hot(y, k).bool()
        # Without x its class mean moves by -e v, v = x - M_y, and c by -e v / k; without class y c moves by
        # -M_y / (k - 1). So M_j becomes M_j + g_j w, and x - c becomes x + a w.
        e = 1 / (counts - 1).clamp(min=1)
        w = torch.where(alone, means[y], x - means[y])
        a = torch.where(alone, 1 / max(k - 1, 1), e / k)
        g = torch.where(alone | ~own, a, a - e)
        x = x + a * w
        length = means.square().sum(dim=1) + 2 * g * (w @ means.T) + g.square() * w.square().sum(dim=1, keepdim=True)
        product = x @ means.T + g * (x * w).sum(dim=1, keepdim=True)
        scale = length.clamp(min=0).sqrt().clamp(min=1e-12) * x.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return (product / scale).masked_fill(alone & own, -torch.inf)


def looks_of(head: Head, head_features: Tensor, features: Sequence[Tensor]) -> list[tuple[Head, Tensor]]:
    """The head of each look, and the features (n, d) that it compares: those of the classifier's own head first.

    ``features`` are adapted and, where there are any, unadapted ones.
    """
    adapted, *unadapted = features
    cosines: list[tuple[Head, Tensor]] = [(CosineHead(), adapted), (CentredCosineHead(), adapted)]
    return [(head, head_features), *cosines, *((CosineHead(), x) for x in unadapted)]


def looks_at_support(networks: Sequence[AdaptedTask]) -> list[tuple[Head, Tensor]]:
    """Looks at the support set of the adapted network and, where there is one, the unadapted."""
    task = networks[0]
    features = [network.support_features for network in networks]
    return looks_of(task.head, task.head_features(task.support_features), features)


def looks_at_queries(networks: Sequence[AdaptedTask], features: Sequence[Tensor]) -> list[Tensor]:
    """Of each look its logits (m, k) of queries, by their features (m, d) from each network."""
    task = networks[0]
    pairs = zip(looks_at_support(networks)[1:], looks_of(task.head, features[0], features)[1:], strict=True)
    found = [head(support, task.support_labels, queries) for (head, support), (_, queries) in pairs]
    return [task.head_logits(features[0]), *found]


def with_unadapted(model: SimpleCNAPS, task: AdaptedTask, support_images: Tensor, batch_size: int) -> list[AdaptedTask]:
    """The task and, if it is adapted, the model without FiLM on the same support images (n, 3, h, w)."""
    if task.film is None:
        return [task]
    unadapted = model.with_film(None, CosineHead(), task.dtype)
    features, _ = within_memory(partial(unadapted.features, support_images), batch_size)
    return [task, unadapted.refit(features, task.support_labels)]


def restored_networks(
    model: SimpleCNAPS,
    film: Film | None,
    head: Head,
    dtype: torch.dtype,
    support_features: Iterable[Tensor | None],
    support_labels: Tensor,
) -> list[AdaptedTask]:
    """The adapted network and, if there are support features of it too, the unadapted one, fitted to them."""
    made: list[tuple[Film | None, Head]] = [(film, head), (None, CosineHead())]
    given = [(of, features) for of, features in zip(made, support_features, strict=False) if features is not None]
    return [model.with_film(*of, dtype).refit(features, support_labels) for of, features in given]
