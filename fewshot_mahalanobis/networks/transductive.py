"""What Transductive CNAPS adds to Simple CNAPS: the queries describe the task too, and refine its classes.

Bateni, Barber, van de Meent & Wood, "Enhancing Few-Shot Image Classification with Unlabelled Examples", WACV 2022.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.inputs import (
    check_features,
    class_means,
    full_precision,
    result_dtype,
    working_dtype,
)
from fewshot_mahalanobis.heads import Head, MahalanobisHead
from fewshot_mahalanobis.networks.set_encoder import TASK_FEATURES, SetEncoder, mean_over_set
from fewshot_mahalanobis.transduction import soft_k_means, weighted_distance, weighted_refinement

#: Refinements of the classes: at least, and at most.
MIN_STEPS, MAX_STEPS = 2, 4


class TransductiveSetEncoder(SetEncoder):
    """Support images (n, 3, h, w), labels (n,) and query images (m, 3, h, w) -> task representation z (64,).

    A two-layer LSTM reads the mean over classes of the support set's mean encodings, then the mean of the queries'
    encodings; z is its last output. Support set and queries are encoded apart, each with its own BatchNorm statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(TASK_FEATURES, TASK_FEATURES, num_layers=2)

    def forward(  # type: ignore[override]
        self, support_images: Tensor, support_labels: Tensor, query_images: Tensor | None, batch_size: int | None = None
    ) -> Tensor:
        """Encode a task. Without queries the support set stands for them."""
        support = self.encodings(support_images, batch_size)
        queries = support if query_images is None else self.encodings(query_images, batch_size)
        with full_precision(support):
            means = class_means(support, support_labels)
            outputs, _ = self.lstm(torch.stack([mean_over_set(means), mean_over_set(queries)]))
        return outputs[-1]


class TransductiveHead(Head[tuple[Tensor, Tensor]]):
    """Class Gaussians refined by all queries of an episode: soft k-means with Mahalanobis distances.

    An example belongs to class k with weight w_ik: 1 or 0 for the support set, softmax of the logits for queries. With
    N_k the sum of the weights of a class, mu_k and Sigma_k are the weighted mean and covariance (divisor N_k) and
    Q_k = N_k / (N_k + 1) Sigma_k + 1 / (N_k + 1) Sigma + beta I, Sigma the covariance of all examples. Logits are those
    of the Mahalanobis head. Starting from the support set alone, the classes are refined until no query changes its
    class, at least twice and at most four times.

    Parameters
    ----------
    head : MahalanobisHead
        Its beta and scale are used.
    """

    name = "transductive"
    title = "transductive"
    paper_title = "Transductive CNAPS"
    is_squared_distance = True

    def __init__(self, head: MahalanobisHead) -> None:
        super().__init__()
        self.settings, self.scale = head.covariance.settings, head.scale

    def fit(self, support_features: Tensor, support_labels: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the support set: every set of queries refines it anew."""
        class_means(support_features, support_labels)  # checks them
        return support_features, support_labels

    def logits(self, state: tuple[Tensor, Tensor], query_features: Tensor) -> Tensor:
        """Logits (m, k) of the queries (m, d) of an episode, which depend on one another."""
        support, labels = state
        check_features(query_features, "query features", width=support.shape[1])
        with full_precision(query_features):
            x, queries = (f.to(working_dtype(f)) for f in (support, query_features))
            one_hot = F.one_hot(labels).to(x.dtype)
            start = -self.scale * weighted_distance(x, one_hot, queries, self.settings)
            probabilities = partial(torch.softmax, dim=1)
            refined = weighted_refinement(self.settings, self.scale, x, one_hot, queries, probabilities)
            return soft_k_means(start, refined, MIN_STEPS, MAX_STEPS).to(result_dtype(query_features))
