"""Class Gaussians with a regularised covariance (Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020).

Equation 3 of the paper, and with other settings the family around it:

    Q_k = lambda_k Sigma_k + (1 - lambda_k) S + beta I,    lambda_k = n_k / (n_k + nu)

Sigma_k is the covariance of the n_k support features of class k. S is the covariance Sigma of all n support features
(the paper's), or the covariance pooled within classes (that of linear discriminant analysis). nu is the number of shots
that S is worth: 1 in the paper, infinite in linear discriminant analysis. Covariances are unbiased, and zero where no
degree of freedom is left: Sigma_k of one example, the pooled one if every class has one example.

``ClassGaussians.covariance()`` computes it as written; distances never need that matrix (``low_rank.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.gaussians.checks import (
    check_features,
    check_support,
    full_precision,
    result_dtype,
    working_dtype,
)
from fewshot_mahalanobis.gaussians.choose import choose_beta
from fewshot_mahalanobis.gaussians.low_rank import (
    MAX_CHUNK_NUMBERS,
    ClassGroup,
    Metric,
    SharedCovariance,
    by_class,
    cholesky,
    class_groups,
    dense_covariance,
    make_metric,
)
from fewshot_mahalanobis.gaussians.settings import CovarianceSettings


class RegularizedCovariance(nn.Module):
    """Class Gaussians with the regularised covariance Q_k of equation 3 (Bateni et al., CVPR 2020).

    Q_k = lambda_k Sigma_k + (1 - lambda_k) S + beta I with lambda_k = n_k / (n_k + nu). Sigma_k is the covariance of
    the n_k support features of class k and S that of all n support features, both unbiased (n - 1), and zero for a
    single example. The last two settings lead beyond the paper.

    Parameters
    ----------
    beta : float or "auto"
        Weight of the identity, > 0, in squared feature units. The default suits the features that the Simple CNAPS
        checkpoints were trained to have; "auto" chooses it on each support set by leave-one-out, for features of any
        scale (:func:`~fewshot_mahalanobis.gaussians.choose.choose_beta`).
    task_covariance : bool
        False leaves S out, Q_k = Sigma_k + beta I: the ablation "-TR" (lambda_k = 1) of the paper.
    one_shot_covariance : {"zero", "published"}
        Sigma_k of a class with one example: zero as in the paper, or the published implementation's, which its weights
        expect: the variance c of the d entries of that feature vector (d - 1), in every entry of Sigma_k.
    shared : {"task", "within"}
        S: "task", the covariance of all support features (the paper), or "within", the covariance pooled within classes
        with divisor n - k, which is zero if every class has one example.
    prior_shots : float
        nu >= 0: how many shots S is worth. 1 is the paper's; ``math.inf`` gives every class S + beta I, as linear
        discriminant analysis does.

    Attributes
    ----------
    settings : CovarianceSettings

    Raises
    ------
    ValueError
        A setting is out of its range.
    """

    def __init__(
        self,
        beta: float | str = 1.0,
        task_covariance: bool = True,
        one_shot_covariance: str = "zero",
        shared: str = "task",
        prior_shots: float = 1.0,
    ) -> None:
        super().__init__()
        self.settings = CovarianceSettings(beta, task_covariance, one_shot_covariance, shared, prior_shots)

    @classmethod
    def of(cls, settings: CovarianceSettings) -> RegularizedCovariance:
        """Make the module with these settings."""
        return cls(**vars(settings))

    def forward(self, features: Tensor, labels: Tensor) -> ClassGaussians:
        """Fit the Gaussian of each class; differentiable with respect to the features.

        Parameters
        ----------
        features : Tensor of shape (n, d)
            Any floating-point dtype, finite. Arithmetic is in float64 (float32 on devices without it), outside
            autocast. Results come back in the features' dtype, float32 at least.
        labels : int64 Tensor of shape (n,)
            0..k-1, every class with at least one example.

        Returns
        -------
        ClassGaussians

        Raises
        ------
        ValueError
            On a wrong shape or dtype, NaN or infinity (the row is named), an empty support set, a class without an
            example (the class is named), or features so large that ``beta`` is lost to rounding.
        """
        counts = check_support(features, labels)
        with full_precision(features):
            return ClassGaussians(features, labels, counts, choose_beta(self.settings, features, labels))

    def with_chosen_settings(
        self, features: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> RegularizedCovariance:
        """Return the module with a beta of "auto" replaced by the one chosen on the support set.

        For features (n, d), labels (n,), and ``groups`` (n,) that are left out together.
        """
        return self.of(choose_beta(self.settings, features, labels, groups)) if self.settings.beta == "auto" else self

    def extra_repr(self) -> str:
        """Name the settings in ``repr``; those beyond the paper where they are not the paper's."""
        s = self.settings
        paper = f"beta={s.beta!r}, task_covariance={s.task_covariance}, one_shot_covariance={s.one_shot_covariance!r}"
        beyond = f", shared={s.shared!r}, prior_shots={s.prior_shots!r}"
        return paper if (s.shared, s.prior_shots) == ("task", 1.0) else paper + beyond


class ClassGaussians:
    """A Gaussian N(mu_k, Q_k) for each class; made by ``RegularizedCovariance``.

    It holds thin factors of Q_k, in all O(n d) numbers; only ``covariance`` and ``precision`` build (k, d, d).

    Attributes
    ----------
    means : Tensor of shape (k, d)
        Class means mu_k.
    counts : int64 Tensor of shape (k,)
        Support examples n_k.
    settings : CovarianceSettings
        Beta is a number.
    """

    def __init__(self, features: Tensor, labels: Tensor, counts: Tensor, settings: CovarianceSettings) -> None:
        self.counts = counts
        self.settings = settings
        self._support = features.clone(), labels.clone()  # for the dense matrices
        # Distances do not change when everything moves by the task mean, and products of centred features are exact
        # where those of uncentred ones cancel.
        self._centre = features.mean(dim=0, dtype=working_dtype(features))
        groups, shared = self._parts()
        self._metrics: list[Metric] = [make_metric(group, shared, settings.ridge) for group in groups]
        # Column j of the groups' concatenated results belongs to another class; this puts class 0 first.
        self._columns = by_class(groups)
        means = torch.cat([group.means for group in groups])[self._columns]
        self.means = (means + self._centre).to(result_dtype(features))

    @property
    def beta(self) -> float:
        """Weight of the identity in Q_k."""
        return self.settings.ridge

    def squared_distance(self, queries: Tensor) -> Tensor:
        """Squared Mahalanobis distance (x - mu_k)^T Q_k^-1 (x - mu_k): equation 2 without its factor 1/2.

        Parameters
        ----------
        queries : Tensor of shape (m, d)
            Finite; any floating-point dtype.

        Returns
        -------
        Tensor of shape (m, k)
            Never negative, in the dtype of the queries, float32 at least. Queries are served in chunks of bounded
            memory, and a query's distances do not depend on the others' but for rounding.

        Raises
        ------
        ValueError
            On a wrong shape or dtype, NaN or infinity.
        """
        check_features(queries, "query features", width=self.means.shape[1])
        with full_precision(queries):
            numbers = max(metric.numbers_per_query() for metric in self._metrics)
            distances = []
            for chunk in queries.split(max(1, MAX_CHUNK_NUMBERS // numbers)):
                x = chunk - self._centre
                distance = torch.cat([metric.squared_distance(x) for metric in self._metrics], dim=1)
                if len(self._metrics) > 1:
                    distance = distance[:, self._columns]
                distances.append(distance.to(result_dtype(queries)))
            return torch.cat(distances)

    def covariance(self) -> Tensor:
        """Q_k of every class, dense, shape (k, d, d)."""
        with full_precision(self.means):
            return self._covariance().to(self.means.dtype)

    def precision(self) -> Tensor:
        """Inverse of Q_k of every class, dense, shape (k, d, d)."""
        with full_precision(self.means):
            q = self._covariance()
            if self.is_shared:
                return torch.cholesky_inverse(cholesky(q[0])).to(self.means.dtype).expand_as(q)
            return torch.cholesky_inverse(cholesky(q)).to(self.means.dtype)

    @property
    def is_shared(self) -> bool:
        """Whether all classes have the same covariance."""
        return self.settings.class_weight(1) == 0.0

    def in_coordinates(self, basis: Tensor) -> ClassGaussians:
        """The same Gaussians with U^T (x - c) in the place of x, c the task mean and U = ``basis`` (d, r)."""
        features, labels = self._support
        return ClassGaussians((features - self._centre) @ basis, labels, self.counts, self.settings)

    def support_basis(self) -> tuple[Tensor, Tensor]:
        """Task mean c (d,), and an orthonormal basis (d, r) of the span of the support features less c."""
        x = self._support[0] - self._centre
        return self._centre, torch.linalg.qr(x.T).Q

    def _parts(self) -> tuple[list[ClassGroup], SharedCovariance]:
        features, labels = self._support
        x = features - self._centre
        groups = class_groups(x, labels, self.counts, self._centre, self.settings)
        return groups, SharedCovariance.of(x, labels, self.counts, self.settings)

    def _covariance(self) -> Tensor:
        """Q_k of every class, dense (k, d, d), in the working precision."""
        groups, shared = self._parts()
        if self.is_shared:
            groups = [ClassGroup(groups[0].classes[:1], groups[0].means[:1], groups[0].roots[:1], 1.0)]
        dense = torch.cat([dense_covariance(group, shared, self.beta) for group in groups])
        dense = (dense + dense.mT) / 2  # a product A^T A is symmetric but for its last bits
        return dense.expand(len(self.counts), -1, -1) if self.is_shared else dense[by_class(groups)]
