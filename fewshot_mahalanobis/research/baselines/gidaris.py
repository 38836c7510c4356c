"""Cosine classifier whose weights are generated with attention over the weights of the training classes.

Gidaris & Komodakis, "Dynamic Few-Shot Visual Learning without Forgetting", CVPR 2018, equations 4, 7 and 8, on a frozen
network as in the paper's second stage. Its first stage learns the weights of the training classes as a cosine
classifier; here they are the classes' mean unit features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.support import check_features, check_support, class_means, full_precision
from fewshot_mahalanobis.research.baselines.method import Method


class Gidaris(Method[Tensor]):
    """Logits = tau cos(x, w_k), equation 4.

    Parameters
    ----------
    in_features : int
        Feature width d.
    base_classes : int
        Training classes b; ``imprint`` gives them their weights.

    Attributes
    ----------
    hidden : int64 Tensor, optional
        Training classes that a training task plays as new ones: their weights get no attention.
    """

    name, title, paper_title = "gidaris", "Gidaris & Komodakis", "Gidaris et al."
    needs_training, trains_network = True, False
    base_weights: Tensor
    hidden: Tensor | None = None

    def __init__(self, in_features: int, base_classes: int = 0) -> None:
        super().__init__()
        self.imprint(torch.zeros(base_classes, in_features))
        self.query = nn.Linear(in_features, in_features)
        nn.init.eye_(self.query.weight)
        nn.init.zeros_(self.query.bias)
        self.average_factor, self.attention_factor = (nn.Parameter(torch.ones(in_features)) for _ in range(2))
        self.scale, self.attention_scale = (nn.Parameter(torch.tensor(10.0)) for _ in range(2))

    @classmethod
    def for_model(cls, settings: Mapping[str, Any], in_features: int) -> Gidaris:
        """Make the method with zero weights for the ``base_classes`` training classes of the settings."""
        return cls(in_features, settings.get("base_classes", 0))

    @property
    def base_classes(self) -> int:
        """Number of training classes b."""
        return len(self.base_weights)

    def prepare(self, classes: Iterable[Tensor]) -> None:
        """Take the mean unit features of each training class as its weights."""
        means = [F.normalize(features, dim=1).mean(dim=0) for features in classes]
        self.imprint(F.normalize(torch.stack(means), dim=1))

    def training_logits(
        self, support_features: Tensor, support_labels: Tensor, query_features: Tensor, classes: Tensor | None
    ) -> Tensor:
        """Logits (m, k) of a training task, whose ``classes`` (k,) get no attention."""
        self.hidden = classes
        logits = self(support_features, support_labels, query_features)
        self.hidden = None
        return logits

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Classification weights (k, d) from support features (n, d) and labels (n,): equations 6 to 8."""
        check_support(support_features, support_labels)
        with full_precision(support_features):
            features = F.normalize(support_features.to(self.query.weight.dtype), dim=1)
            cosine = F.normalize(self.query(features), dim=1) @ F.normalize(self.keys, dim=1).T
            attention = self.attention_scale * cosine
            if self.hidden is not None:
                attention = attention.index_fill(1, self.hidden, torch.finfo(attention.dtype).min)
            attended = class_means(attention.softmax(dim=1) @ self.base_weights, support_labels)  # equation 7
            average = class_means(features, support_labels)  # equation 6
            return self.average_factor * average + self.attention_factor * attended  # equation 8

    def logits(self, state: Tensor, query_features: Tensor) -> Tensor:
        """Scaled cosines (m, k) of queries (m, d), equation 4."""
        check_features(query_features, "query features", width=state.shape[1])
        with full_precision(query_features):
            return self.scale * F.normalize(query_features.to(state.dtype), dim=1) @ F.normalize(state, dim=1).T

    def imprint(self, weights: Tensor) -> None:
        """Take these weights (b, d) of the training classes, and begin with them as their keys."""
        self.register_buffer("base_weights", weights)
        self.keys = nn.Parameter(weights.clone())
