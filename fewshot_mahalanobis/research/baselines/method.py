"""What the methods of this package have in common: the interface of the heads, and what training needs to know."""

from __future__ import annotations

from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.checks import check_features, check_support, full_precision, result_dtype
from fewshot_mahalanobis.heads import Head

State = TypeVar("State")


class Fitted(NamedTuple, Generic[State]):
    """What a method keeps of a support set."""

    width: int
    state: State


class Method(Head[Fitted[State]]):
    """A method to compare with, as a head on features.

    A subclass has its formulas in ``fit_features`` and ``compare``, which get checked features, float32 at least and
    outside autocast.

    Parameters
    ----------
    in_features : int, optional
        Feature width d, for a method with weights. Without it there are none.

    Attributes
    ----------
    needs_training : bool
        Whether it is of no use on the features of a network that was not trained for it.
    trains_network : bool
        Whether meta-training changes the network's weights too. A method that neither has weights of its own nor
        changes the network's has nothing to train.
    adaptation : {"none", "film", "gradients"}
        How the network adapts to a task: not at all, by FiLM as that of Simple CNAPS, or by gradient steps.
    """

    needs_training: ClassVar[bool] = False
    trains_network: ClassVar[bool] = True
    adaptation: ClassVar[str] = "none"

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__()

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Fitted[State]:
        """Fit to support features (n, d) and labels (n,)."""
        check_support(support_features, support_labels)
        with full_precision(support_features):
            state = self.fit_features(support_features.to(self._dtype(support_features)), support_labels)
        return Fitted(support_features.shape[1], state)

    def logits(self, state: Fitted[State], query_features: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d)."""
        check_features(query_features, "query features", width=state.width)
        with full_precision(query_features):
            return self.compare(state.state, query_features.to(self._dtype(query_features)))

    def fit_features(self, features: Tensor, labels: Tensor) -> State:
        """What ``compare`` needs of support features (n, d) and labels (n,)."""
        raise NotImplementedError

    def compare(self, state: State, queries: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d)."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Training loss of the logits (m, k) of queries with labels (m,)."""
        return F.cross_entropy(logits, labels)

    def _dtype(self, features: Tensor) -> torch.dtype:
        weight = next(self.parameters(), None)
        return result_dtype(features) if weight is None else weight.dtype
