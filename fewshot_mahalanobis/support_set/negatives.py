"""Examples of no class, and what they teach the outlier score.

They need not look alike, so they are no class of their own. To the head each is a class of one: its distance has the
metric of the task and allows for its being alone. The term that they add to the outlier score is

    a(x) = max_i l_i(x) - max_k l_k(x),

by how much the nearest of them, i, is nearer to a query than the nearest class, k, in logits l of the head. Where the
head's logits are logarithms of probabilities, it is the log-odds of the two. It counts as at least what it is for a
support example and the nearest class but its own, at the median: of examples farther away it would measure noise alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.support_set.calibration import as_far_as_queries, left_out_shrinkage
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.unknown import HEAD, NEGATIVES, Similarity

#: Weight of the term, of which the head's own has 1 and all others 4; from validation classes.
_WEIGHT = 3.0


def similarity_to_negatives(
    head: Head[Any], negatives: Features, support: Features, labels: Tensor, groups: Tensor | None
) -> Similarity:
    """Term of the outlier score that examples of no class add, given the support set and its settled head."""
    margin = Similarity(
        NEGATIVES, MarginHead(head, negatives.adapted, groups), lambda features: features.adapted, _WEIGHT
    )
    if _ways(labels) == 1:
        return margin
    with torch.no_grad():
        logits = head.logits(head.fit_groups(support.adapted, labels, groups), support.adapted).double()
    best = logits.topk(2, dim=1).values
    return margin._replace(most=float((best[:, 0] - best[:, 1]).median()))


def left_out_negatives(
    head: Head[Any],
    negatives: Features,
    support: Features,
    labels: Tensor,
    groups: Tensor | None,
    similarities: Sequence[Similarity],
) -> dict[str, Tensor]:
    """Logits of examples of no class by each term of the outlier score, float64 on the CPU, as if they were new."""
    found = {HEAD: head.logits(head.fit_groups(support.adapted, labels, groups), negatives.adapted)}
    for term in similarities:
        x = term.of(support)
        if isinstance(term.head, MarginHead):
            found[term.name] = term.head.left_out_negatives(x, labels)
        else:
            found[term.name] = term.head.logits(term.head.fit(x, labels), term.of(negatives))
    return {name: logits.cpu().double() for name, logits in found.items()}


class MarginHead(Head[Any]):
    """One logit, -a(x): that of the nearest class less that of the nearest example of no class.

    Parameters
    ----------
    head : Head
        Its settings are chosen.
    negatives : Tensor of shape (m, d)
        Features of m >= 1 examples of no class.
    groups : int64 Tensor of shape (n,), optional
        Copies in the support set.
    """

    def __init__(self, head: Head[Any], negatives: Tensor, groups: Tensor | None = None) -> None:
        super().__init__()
        self.head, self.negatives, self.groups = head, negatives, groups

    def fit(self, support_features: Tensor, support_labels: Tensor) -> tuple[Any, int]:
        """Return the state of the head on both kinds of examples, and the number k of classes."""
        return self.head.fit_groups(*self._both(support_features, support_labels, self.groups)), _ways(support_labels)

    def logits(self, state: tuple[Any, int], query_features: Tensor) -> Tensor:
        """Logits (m, 1) of queries (m, d)."""
        return _margins(self.head.logits(state[0], query_features), state[1])

    def left_out_negatives(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Logits (m, 1) of the examples of no class, each left out; infinite where there is one alone."""
        logits = self.head.leave_one_out_logits(*self._both(support_features, support_labels, self.groups))
        return _margins(logits[len(support_labels) :], _ways(support_labels))

    def leave_one_out_logits(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> Tensor:
        """Logits (n, 1) of left-out support examples, which are as far from their class as queries are."""
        both = self._both(support_features, support_labels, groups)
        logits = self.head.leave_one_out_logits(*both)[: len(support_labels)]
        if self.head.distance_power == 2:
            shrink = left_out_shrinkage(support_labels, groups).to(logits.device)
            logits = as_far_as_queries(logits.double(), support_labels, shrink, torch.zeros_like(shrink))
        return _margins(logits, _ways(support_labels))

    def export(self, state: tuple[Any, int]) -> nn.Module:
        """Return the logit as a module, in float32."""
        return _ExportedMargin(self.head.export(state[0]), state[1])

    def _both(self, features: Tensor, labels: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Support examples, then those of no class: each is a class, and a group, of its own."""
        own = torch.arange(len(self.negatives), device=labels.device)
        return (
            torch.cat([features, self.negatives.to(features)]),
            torch.cat([labels, own + _ways(labels)]),
            None if groups is None else torch.cat([groups, own + groups.max() + 1]),
        )


class _ExportedMargin(nn.Module):
    def __init__(self, head: nn.Module, ways: int) -> None:
        super().__init__()
        self.head, self.ways = head, ways

    def forward(self, features: Tensor) -> Tensor:
        return _margins(self.head(features), self.ways)


def _ways(labels: Tensor) -> int:
    return int(labels.max()) + 1


def _margins(logits: Tensor, ways: int) -> Tensor:
    """Logits of classes and of single examples (m, k + m') -> (m, 1)."""
    return logits[:, :ways].amax(dim=1, keepdim=True) - logits[:, ways:].amax(dim=1, keepdim=True)
