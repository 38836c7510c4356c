"""The default head: probabilistic linear discriminant analysis, its settings chosen on the support set.

The model is in ``gaussians/plda.py`` (Ioffe, ECCV 2006; Prince & Elder, ICCV 2007).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from fewshot_mahalanobis.gaussians.plda import (
    Plda,
    PldaSettings,
    choose_plda_settings,
    leave_one_out_plda_logits,
    relative_distance,
    to_power,
)
from fewshot_mahalanobis.gaussians.pool import Pool
from fewshot_mahalanobis.gaussians.support import (
    check_features,
    check_support,
    full_precision,
    joined_groups,
)
from fewshot_mahalanobis.heads.head import Head
from fewshot_mahalanobis.heads.mahalanobis import ExportedMahalanobis


class AutoHead(Head[Plda]):
    """Probabilistic linear discriminant analysis whose settings are chosen on the support set: the default head.

    All classes share the covariance pooled within classes, regularised by beta I. Class means have a Gaussian prior
    whose covariance is proportional to it, so that a class of few examples is neither put at a disadvantage nor
    preferred. The leave-one-out likelihood chooses beta, the scale of the logits, and whether features that are never
    negative are replaced by their square roots. Gradients do not flow through these choices.

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
    learns_unlabelled = True

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

    def unlabelled_settings(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None
    ) -> PldaSettings:
        """Return its own settings."""
        with full_precision(support_features):
            return self._settings(support_features, support_labels, groups)

    def fit_pool(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None, pool: Pool) -> Plda:
        """Fit the means and the covariance to both; all settings are those of the support set."""
        check_support(support_features, support_labels)
        with full_precision(support_features):
            settings = self._settings(support_features, support_labels, groups)
            return Plda(support_features, support_labels, settings, joined_groups(groups), pool)

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
