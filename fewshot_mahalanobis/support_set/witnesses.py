"""How many independent witnesses the queries of one group are.

Ten looks at one thing say more about its class than one look, but ten frames of a burst hardly do. The variance of the
mean of n queries of variance s^2, of which a share rho is common to all of them, is s^2 (1 + (n - 1) rho) / n, so they
are worth

    n / (1 + (n - 1) rho)

independent ones: Kish's effective sample size, rho the intraclass correlation ("Survey Sampling", 1965). It is known
from the group itself. The mean squared distance to the nearest class mean is s^2, noise of that mean included, which
all of the group have in common too; about the mean of the group it is (1 - rho) s^2. Distances are those of the default
head's model (``gaussians/plda.py``), whatever the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.covariance import shared_covariance
from fewshot_mahalanobis.gaussians.low_rank import shared_whitening
from fewshot_mahalanobis.gaussians.plda import PldaSettings, choose_plda_settings, to_power
from fewshot_mahalanobis.gaussians.support import class_means, working_dtype
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.support_set.copies import group_means


class ClassMetric:
    """Coordinates about the centre of the classes in which the model's covariance within classes is the identity.

    Attributes
    ----------
    settings : PldaSettings
    means : Tensor of shape (k, r)
        Class means in these coordinates.
    """

    def __init__(self, x: Tensor, labels: Tensor, settings: PldaSettings) -> None:
        x = to_power(x.to(working_dtype(x)), settings.power)
        shared = shared_covariance(x - x.mean(dim=0), labels, labels.bincount(), settings.covariance)
        self.settings, self._whitening = settings, shared_whitening(shared, 1.0, settings.beta)
        means = class_means(x, labels)
        self._centre = means.mean(dim=0)
        self.means = self._whitening(means - self._centre)

    @classmethod
    def of(cls, settled: Head[Any], x: Tensor, labels: Tensor, groups: Tensor | None) -> ClassMetric:
        """By a support set (n, d) and (n,), and the head that was settled on it."""
        choose = settled.unlabelled_settings if settled.learns_unlabelled else choose_plda_settings
        return cls(x, labels, choose(x, labels, groups))

    def __call__(self, features: Tensor) -> Tensor:
        """Coordinates (m, r) of features (m, d)."""
        return self._whitening(to_power(features.to(self._centre), self.settings.power) - self._centre)


def witnesses(x: Tensor, rows: Tensor, means: Tensor) -> Tensor:
    """How many independent queries each of g groups is worth, (g,) from 1 to its size.

    Parameters
    ----------
    x : Tensor of shape (m, r)
        Queries, in coordinates of a :class:`ClassMetric`.
    rows : int64 Tensor of shape (m,)
        Number of each query's group, 0..g-1.
    means : Tensor of shape (k, r)
        Class means.
    """
    n = rows.bincount().to(x)
    centres = group_means(x, rows)
    inside = group_means((x - centres[rows]).square().sum(dim=1), rows)
    nearest = torch.cdist(centres, means).square().amin(dim=1) + inside
    own = inside * n / (n - 1).clamp(min=1) / nearest.clamp(min=torch.finfo(x.dtype).tiny)
    return n / (1 + (n - 1) * (1 - own.clamp(max=1)))
