"""Gaussians of a support set and of unlabelled examples that belong to its classes by degrees.

With memberships R_ik of m unlabelled examples u_i, found as in ``unlabelled.py``, the classes are estimated again:

    pi_k = (sum_i R_ik / R + a / k) / (1 + a),                     R the sum of all memberships;
    m_k  = (n_k mu_k + sum_i W_ik u_i) / N_k,                      N_k = n_k + sum_i W_ik;
    S'   = (f S + rho sum_ik R_ik (u_i - m_k)(u_i - m_k)^T) / (f + rho R),

mu_k, n_k and S as of the support set alone, S with f degrees of freedom. W_ik = w_k R_ik: an unlabelled example counts
w_k <= 0.3 of a labelled one, 0.15 if that is alone, and all of a class at most 1.5 times its labelled ones. Of many
examples each counts less, so that a class with less than half of an even share does not reach that: classes that the
unlabelled examples lack stay where their labels put them. The shares have a prior, so none vanishes. S' is S unless
every class has one labelled example, which says nothing of the spread within a class. Where some have two, estimates of
it from unlabelled examples gained nothing, so Sigma_k stays too. All constants were chosen on validation classes
(docs/unlabelled.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.covariance import (
    ClassBatch,
    ClassGaussians,
    CovarianceSettings,
    shared_covariance,
)
from fewshot_mahalanobis.gaussians.low_rank import SharedCovariance
from fewshot_mahalanobis.gaussians.support import exact_class_means

#: w_k is at most 0.3, 0.15 n_k, and 3 n_k over the number of unlabelled examples that a class has on average.
MAX_EACH, OF_LABELLED, OF_EVEN_SHARE = 0.3, 0.15, 3.0
#: Largest weight of all unlabelled examples of a class, in its labelled ones.
MAX_OF_CLASS = 1.5
#: rho: what an unlabelled example counts in the shared covariance, in labelled ones.
_RHO = 0.02
#: a: weight of even shares, beside the unlabelled examples.
EVEN = 0.7
#: A sum of memberships that counts as none.
_LEAST = 1e-9


@dataclass(frozen=True, eq=False)
class Pool:
    """Unlabelled examples and the classes that they belong to.

    Attributes
    ----------
    features : Tensor of shape (m, d)
    memberships : Tensor of shape (m, k)
        R_ik >= 0. Those of an example sum to 1, or to less if it counts for less.
    temperature : float
        T >= 1: with them, probabilities are softmax(logits / T).
    """

    features: Tensor
    memberships: Tensor
    temperature: float = 1.0

    def to(self, device: torch.device) -> Pool:
        """Move to a device."""
        return replace(self, features=self.features.to(device), memberships=self.memberships.to(device))

    def shares(self) -> Tensor:
        """pi_k (k,), which sum to one."""
        totals = self.memberships.sum(dim=0)
        even = torch.full_like(totals, 1 / len(totals))
        return (totals / totals.sum() + EVEN * even) / (1 + EVEN) if totals.any() else even

    def weights(self, counts: Tensor) -> Tensor:
        """W_ik (m, k), in labelled examples, beside ``counts`` n_k (k,) of these."""
        even = self.memberships.sum() / len(counts)
        each = (OF_EVEN_SHARE / even.clamp(min=_LEAST)).clamp(max=OF_LABELLED) * counts
        weights = each.clamp(max=MAX_EACH) * self.memberships
        return weights * (MAX_OF_CLASS * counts / weights.sum(dim=0).clamp(min=_LEAST)).clamp(max=1.0)

    def moved_means(self, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Means m_k (k, d) and numbers N_k (k,) of all examples, from those of the labelled ones."""
        weights = self.weights(counts)
        total = counts + weights.sum(dim=0)
        return (counts[:, None] * means + weights.T @ self.features) / total[:, None], total

    def scatter(self, means: Tensor) -> Tensor:
        """Rows whose products sum to sum_ik R_ik (u_i - m_k)(u_i - m_k)^T: (m + k, d), about the ``means`` m_k (k, d).

        The scatter is that of the examples about what is expected of each, sum_k R_ik m_k / sum_k R_ik, and that of the
        means about these expectations.
        """
        own = self.memberships.sum(dim=1, keepdim=True)
        expected = self.memberships / own.clamp(min=_LEAST)
        values, vectors = torch.linalg.eigh(self.memberships.sum(dim=0).diag() - self.memberships.T @ expected)
        about_means = own.sqrt() * (self.features - expected @ means)
        return torch.cat([about_means, (vectors * values.clamp(min=0).sqrt()).T @ means])


class PooledGaussians(ClassGaussians):
    """The Gaussians of a support set, features (n, d) and labels (n,), and of the unlabelled examples of a ``pool``.

    Parameters
    ----------
    features, labels, settings
        As for :class:`ClassGaussians`.
    pool : Pool
    counts : Tensor of shape (k,)
        n_k, which may be effective counts.
    """

    def __init__(
        self, features: Tensor, labels: Tensor, settings: CovarianceSettings, pool: Pool, counts: Tensor
    ) -> None:
        self.pool, self.labelled = pool, counts
        super().__init__(features, labels, settings)

    def in_coordinates(self, basis: Tensor) -> PooledGaussians:
        """The same Gaussians with U^T (x - c) in the place of x, c the task mean and U = ``basis`` (d, r)."""
        (features, labels), pool = self._support, self._centred_pool()
        pool = replace(pool, features=pool.features @ basis)
        return PooledGaussians((features - self._centre) @ basis, labels, self.settings, pool, self.labelled)

    def _points(self) -> Tensor:
        return torch.cat([super()._points(), self._centred_pool().features])

    def _centred_pool(self) -> Pool:
        return replace(self.pool, features=self.pool.features - self._centre)

    def _estimates(self) -> tuple[list[ClassBatch], SharedCovariance]:
        (features, labels), pool = self._support, self._centred_pool()
        batches, _ = super()._estimates()
        x = features - self._centre
        means, _ = pool.moved_means(exact_class_means(x, labels, self.counts), self.labelled)
        shared = pooled_covariance(x, labels, self.counts, self.settings, pool, means)
        return [replace(batch, means=means[batch.classes]) for batch in batches], shared


def pooled_covariance(
    x: Tensor, labels: Tensor, counts: Tensor, settings: CovarianceSettings, pool: Pool, means: Tensor
) -> SharedCovariance:
    """S' of features (n, d) less the task mean, and of a pool about the ``means`` m_k (k, d)."""
    shared, total = shared_covariance(x, labels, counts, settings), float(pool.memberships.sum())
    if settings.without_shared or total == 0 or counts.max() > 1:
        return shared
    freedom = 0 if settings.shared == "within" else len(x) - 1
    rows = [math.sqrt(shared.scale * freedom) * shared.rows, math.sqrt(_RHO) * pool.scatter(means)]
    return SharedCovariance(torch.cat(rows), 1 / (freedom + _RHO * total))
