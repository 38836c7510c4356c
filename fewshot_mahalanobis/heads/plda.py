"""The default head: probabilistic linear discriminant analysis, its settings chosen on the support set.

The model is in ``gaussians/plda.py`` (Ioffe, ECCV 2006; Prince & Elder, ICCV 2007).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.gaussians.plda import (
    Plda,
    PldaSettings,
    choose_plda_settings,
    leave_one_out_plda_logits,
    relative_distance,
    shrinkage,
    to_power,
)
from fewshot_mahalanobis.gaussians.support import (
    check_features,
    check_support,
    full_precision,
    joined_groups,
    working_dtype,
)
from fewshot_mahalanobis.heads.head import Head
from fewshot_mahalanobis.heads.mahalanobis import ExportedMahalanobis
from fewshot_mahalanobis.heads.transduction import refined_by_queries


class AutoHead(Head[Plda]):
    """Probabilistic linear discriminant analysis whose settings are chosen on the support set: the default head.

    All classes share the covariance pooled within classes, regularised by beta I. Class means have a Gaussian prior
    whose covariance is proportional to it, so that a class of few examples is neither put at a disadvantage nor
    preferred. Beta and the scale of the logits maximise the leave-one-out likelihood, and so does the choice between
    features that are never negative and their square roots. Gradients do not flow through these choices.

    Parameters
    ----------
    settings : PldaSettings, optional
        Fixed settings. By default each fit chooses its own.

    References
    ----------
    Ioffe: Probabilistic Linear Discriminant Analysis. ECCV 2006.

    Prince, Elder: Probabilistic Linear Discriminant Analysis for Inferences About Identity. ICCV 2007.
    """

    name = "auto"
    title = "auto"

    def __init__(self, settings: PldaSettings | None = None) -> None:
        super().__init__()
        self.settings = settings

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Plda:
        """Choose the settings and fit to support features (n, d), labels (n,)."""
        return self.fit_groups(support_features, support_labels, None)

    def fit_groups(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None) -> Plda:
        """Choose the settings and fit. n_k are effective counts: the copies of one group (n,) count together."""
        check_support(support_features, support_labels)
        with full_precision(support_features):
            settings = self._settings(support_features, support_labels, groups)
            return Plda(support_features, support_labels, settings, joined_groups(groups))

    def logits(self, state: Plda, query_features: Tensor) -> Tensor:
        """Logits (m, k) of queries (m, d)."""
        check_features(query_features, "query features", width=state.gaussians.means.shape[1])
        with full_precision(query_features):
            return state.logits(query_features)

    def leave_one_out_logits(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> Tensor:
        """Logits (n, k) of each support example by the head with the same settings fitted to the others, exactly."""
        counts = check_support(support_features, support_labels)
        with full_precision(support_features):
            settings = self._settings(support_features, support_labels, groups)
            if settings.shared == "within" and counts.max() > 1 and len(counts) > 1:
                return leave_one_out_plda_logits(settings, support_features, support_labels, groups)
            return Head.leave_one_out_logits(AutoHead(settings), support_features, support_labels, groups)

    def settled(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None) -> AutoHead:
        """Return the head with the settings that it chooses on this support set."""
        with full_precision(support_features):
            return AutoHead(self._settings(support_features, support_labels, groups))

    def transductive_logits(
        self,
        state: Plda,
        support_features: Tensor,
        support_labels: Tensor,
        query_features: Tensor,
        temperature: float = 1.0,
    ) -> Tensor:
        """Logits (m, k) of queries by class means in which the queries (m, d) have weights; all settings stay."""
        power = state.settings.power
        support, queries = (to_power(f.to(working_dtype(f)), power) for f in (support_features, query_features))
        start = self.logits(state, query_features)
        return refined_by_queries(start, partial(_moved_means, state), support, support_labels, queries, temperature)

    def describe(self) -> dict[str, Any]:
        """Return the fixed settings, if there are any."""
        return {} if self.settings is None else {"settings": asdict(self.settings)}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> AutoHead:
        """Undo :meth:`describe`."""
        return cls(**{name: PldaSettings(**value) for name, value in description.items()})

    def export(self, state: Plda) -> nn.Module:
        """Distances as sums of squares, and logits from them."""
        return _ExportedPlda(state)

    def _settings(self, features: Tensor, labels: Tensor, groups: Tensor | None = None) -> PldaSettings:
        return choose_plda_settings(features, labels, groups) if self.settings is None else self.settings


def _moved_means(
    state: Plda, x: Tensor, one_hot: Tensor, queries: Tensor, weights: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return the refinement of :func:`refined_by_queries`: weighted means m_k and counts n_k under the same P."""
    settings, counts = state.settings, state.counts.to(x.dtype)
    of_support = one_hot.T @ x / one_hot.sum(dim=0)[:, None]
    within = settings.shared == "within"
    centred = x - (of_support[one_hot.argmax(dim=1)] if within else x.mean(dim=0))
    scatter = centred.T @ centred / max(len(x) - (len(counts) if within else 1), 1)
    root = torch.linalg.cholesky(scatter + settings.beta * torch.eye(x.shape[1], dtype=x.dtype, device=x.device))  # P
    at_means, at_queries = (torch.linalg.solve_triangular(root, z.T, upper=False).T for z in (of_support, queries))

    def refined(logits: Tensor) -> Tensor:
        w = weights(logits)
        n = counts + w.sum(dim=0)
        means = (counts[:, None] * at_means + w.T @ at_queries) / n[:, None]
        shrink, ratio = shrinkage(n, settings.spread)
        to_means = torch.cdist(at_queries, means, compute_mode="donot_use_mm_for_euclid_dist").square()
        to_centre = (means - means.mean(dim=0)).square().sum(dim=1)
        return -settings.scale * relative_distance(to_means, shrink, ratio, to_centre, settings.freedom)

    return refined


class _ExportedPlda(nn.Module):
    """Logits of ``AutoHead`` from the exported distances to class means."""

    shrink: Tensor
    ratio: Tensor
    to_centre: Tensor

    def __init__(self, state: Plda) -> None:
        super().__init__()
        self.distances = ExportedMahalanobis(state.gaussians, -1.0)
        self.scale, self.freedom, self.power = state.settings.scale, state.settings.freedom, state.settings.power
        self.register_buffer("shrink", state.shrink.float())
        self.register_buffer("ratio", state.ratio.float())
        self.register_buffer("to_centre", state.to_centre.float())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.shrink, self.ratio, self.to_centre
        return -self.scale * relative_distance(self.distances(to_power(x, self.power)), *parts, self.freedom)
