"""The head of Simple CNAPS: class Gaussians and Mahalanobis distances.

Equations 1 to 3 of Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020. Equation 3 itself is in
``gaussians/covariance.py``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.gaussians.covariance import ClassGaussians, CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import choose_beta, leave_one_out_distance, squared_distance_to_others
from fewshot_mahalanobis.gaussians.plda import PldaSettings, choose_plda_settings
from fewshot_mahalanobis.gaussians.pool import Pool, PooledGaussians
from fewshot_mahalanobis.gaussians.support import (
    check_support,
    effective_counts,
    full_precision,
    joined_groups,
    working_dtype,
)
from fewshot_mahalanobis.heads.head import Head

#: Largest size of the class matrices of an exported head, in numbers (1 GB): a protobuf file holds 2 GB.
MAX_EXPORTED_NUMBERS = 2**28


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
        scale (:func:`~fewshot_mahalanobis.gaussians.leave_out.choose_beta`).
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
        return ClassGaussians(features, labels, choose_beta(self.settings, features, labels))

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


class MahalanobisHead(Head[ClassGaussians]):
    """Logits = -s (x - mu_k)^T Q_k^-1 (x - mu_k), the head of Simple CNAPS (CVPR 2020, equations 1-3).

    Parameters
    ----------
    covariance : RegularizedCovariance, optional
        How Q_k is estimated; with the paper's settings if left out.
    scale : float
        s > 0: 1/2 is the paper's equation 2; 1 is the published implementation and the paper's numbers.

    Raises
    ------
    ValueError
        If ``scale`` is not positive and finite.
    """

    name = "mahalanobis"
    title = "Mahalanobis"
    paper_title = "Simple CNAPS"
    distance_power = 2
    learns_unlabelled = True

    def __init__(self, covariance: RegularizedCovariance | None = None, scale: float = 1.0) -> None:
        super().__init__()
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"scale must be positive and finite, got {scale!r}")
        self.covariance = RegularizedCovariance() if covariance is None else covariance
        self.scale = float(scale)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> ClassGaussians:
        """Fit a Gaussian to each class of the support features (n, d), labels (n,)."""
        gaussians: ClassGaussians = self.covariance(support_features, support_labels)
        return gaussians

    def fit_groups(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None) -> ClassGaussians:
        """Fit; a beta of "auto" is chosen without whole groups, numbers (n,)."""
        return self.settled(support_features, support_labels, groups).fit(support_features, support_labels)

    def logits(self, state: ClassGaussians, query_features: Tensor) -> Tensor:
        """Minus s times the squared Mahalanobis distance of queries (m, d) to each class: (m, k)."""
        return -self.scale * state.squared_distance(query_features)

    def leave_one_out_logits(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others, exactly, by downdating."""
        settings = self.covariance.with_chosen_settings(support_features, support_labels, groups).settings
        return -self.scale * leave_one_out_distance(settings, support_features, support_labels, groups)

    def settled(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> MahalanobisHead:
        """Return this head with beta as a number."""
        covariance = self.covariance.with_chosen_settings(support_features, support_labels, groups)
        if covariance is self.covariance:
            return self
        settled = copy.deepcopy(self)
        settled.covariance = covariance
        return settled

    def common_distance(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Part (n,) of minus the left-out logits from outside the span of the other examples, where Q_k is beta I."""
        settings = self.covariance.with_chosen_settings(support_features, support_labels, groups).settings
        return self.scale / settings.ridge * squared_distance_to_others(support_features, groups)

    def unlabelled_settings(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None
    ) -> PldaSettings:
        """Settings that the default head would have: its model estimates the classes of unlabelled examples better."""
        with full_precision(support_features):
            return choose_plda_settings(support_features, support_labels, groups)

    def fit_pool(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None, pool: Pool
    ) -> ClassGaussians:
        """Fit means and covariances to both, with the settings of the support set."""
        check_support(support_features, support_labels)
        settled = self.settled(support_features, support_labels, groups)
        with full_precision(support_features):
            counts = effective_counts(support_labels, joined_groups(groups))[0].to(working_dtype(support_features))
            pool = Pool(pool.features.to(counts), pool.memberships.to(counts))
            return PooledGaussians(support_features, support_labels, settled.covariance.settings, pool, counts)

    def describe(self) -> dict[str, Any]:
        """Return the scale and the settings of the covariance."""
        if type(self.covariance) is not RegularizedCovariance:
            raise ValueError(f"a file cannot describe a covariance of class {type(self.covariance).__name__}")
        return {"scale": self.scale, "covariance": vars(self.covariance.settings)}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> MahalanobisHead:
        """Undo :meth:`describe`."""
        return cls(RegularizedCovariance(**description["covariance"]), description["scale"])

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> MahalanobisHead:
        """Make the head with the covariance settings and the scale of a model."""
        names = ("beta", "task_covariance", "one_shot_covariance")
        return cls(RegularizedCovariance(**{name: settings[name] for name in names}), settings["scale"])

    def export(self, state: ClassGaussians) -> nn.Module:
        """Logits as sums of squares in a basis of the support features."""
        return ExportedMahalanobis(state, self.scale)

    def extra_repr(self) -> str:
        """Name the setting in ``repr``."""
        return f"scale={self.scale}"


class ExportedMahalanobis(nn.Module):
    """-s (x - mu_k)^T Q_k^-1 (x - mu_k) as a sum of squares.

    Outside the span of the centred support features every Q_k is beta I (equation 3). So with an orthonormal basis U
    (d, r) of that span, z = U^T (x - c) and c the task mean, which like every mu_k lies in c + span U,

        (x - mu_k)^T Q_k^-1 (x - mu_k) = ||x - c - U z||^2 / beta + ||L_k^T (z - U^T (mu_k - c))||^2,

    where L_k L_k^T is the inverse of U^T Q_k U.
    """

    centre: Tensor
    basis: Tensor
    means: Tensor
    roots: Tensor

    def __init__(self, gaussians: ClassGaussians, scale: float) -> None:
        super().__init__()
        d = gaussians.means.shape[1]
        centre, basis = gaussians.support_basis()
        # The covariance of one shot as published, c in every entry, leaves the span: there the basis is everything.
        self.everything = basis.shape[1] == d or gaussians.settings.one_shot_covariance == "published"
        rank, classes = d if self.everything else basis.shape[1], len(gaussians.counts)
        if (1 if gaussians.is_shared else classes) * rank**2 > MAX_EXPORTED_NUMBERS:
            raise ValueError(
                f"{classes} classes need a {rank} x {rank} matrix each, too much for an ONNX file: fit fewer classes"
            )
        if self.everything:  # in original coordinates, where the variance of a vector's entries has its meaning
            means = gaussians.means - centre
        else:
            gaussians = gaussians.in_coordinates(basis)
            means = gaussians.means
        self.scale, self.beta = scale, gaussians.beta
        self.register_buffer("centre", centre.float())
        self.register_buffer("basis", basis.float().contiguous())
        self.register_buffer("means", means.float()[:, None])  # (k, 1, r)
        precision = gaussians.precision()
        roots = torch.linalg.cholesky((precision[:1] if gaussians.is_shared else precision).to(centre.dtype))
        self.register_buffer("roots", roots.float().contiguous())  # L_k; one for all classes where Q is shared

    def forward(self, x: Tensor) -> Tensor:
        """Features (m, d) -> logits (m, k)."""
        x = x - self.centre
        z = x if self.everything else x @ self.basis
        whitened = (z - self.means) @ self.roots  # (k, m, r)
        distance = whitened.square().sum(dim=2).T
        if not self.everything:
            distance = distance + (x - z @ self.basis.T).square().sum(dim=1, keepdim=True) / self.beta
        return -self.scale * distance
