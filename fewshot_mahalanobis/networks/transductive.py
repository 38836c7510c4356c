"""What Transductive CNAPS adds to Simple CNAPS: the queries describe the task too, and refine its classes.

Bateni, Barber, van de Meent & Wood, "Enhancing Few-Shot Image Classification with Unlabelled Examples", WACV 2022.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.gaussians.support import class_means, full_precision
from fewshot_mahalanobis.networks.set_encoder import TASK_FEATURES, SetEncoder, mean_over_set


class TransductiveSetEncoder(SetEncoder):
    """Support images (n, 3, h, w), labels (n,) and query images (m, 3, h, w) -> task representation z (64,).

    A two-layer LSTM reads the mean over classes of the support set's mean encodings, then the mean of the queries'
    encodings; z is its last output. Support set and queries are encoded apart, each with its own BatchNorm statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(TASK_FEATURES, TASK_FEATURES, num_layers=2)

    def forward(  # type: ignore[override]
        self,
        support_images: Tensor | Iterable[Tensor],
        support_labels: Tensor,
        query_images: Tensor | None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Encode a task. Without queries the support set stands for them."""
        support = self.encodings(support_images, batch_size)
        queries = support if query_images is None else self.encodings(query_images, batch_size)
        with full_precision(support):
            means = class_means(support, support_labels)
            outputs, _ = self.lstm(torch.stack([mean_over_set(means), mean_over_set(queries)]))
        return outputs[-1]
