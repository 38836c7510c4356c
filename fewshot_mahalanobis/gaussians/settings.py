"""The settings of a regularised covariance: which member of the family Q_k is estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

_ONE_SHOT = ("zero", "published")
_SHARED = ("task", "within")


@dataclass(frozen=True)
class CovarianceSettings:
    """Settings of Q_k = lambda_k Sigma_k + (1 - lambda_k) S + beta I with lambda_k = n_k / (n_k + nu).

    The defaults are equation 3 of Bateni et al., CVPR 2020.

    Parameters
    ----------
    beta : float or "auto"
        Weight of the identity, > 0, in squared feature units. "auto" is replaced on each support set by
        :func:`~fewshot_mahalanobis.gaussians.choose.choose_beta`.
    task_covariance : bool
        False leaves S out, Q_k = Sigma_k + beta I: the paper's ablation "-TR" (lambda_k = 1).
    one_shot_covariance : {"zero", "published"}
        Sigma_k of a class with one example; see :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    shared : {"task", "within"}
        S: the covariance of all support features, or the one pooled within classes.
    prior_shots : float
        nu >= 0, the number of shots that S is worth. 1 is the paper's; infinity trusts S alone, as linear discriminant
        analysis does; 0 leaves S out.

    Raises
    ------
    ValueError
        A setting is out of its range.
    """

    beta: float | str = 1.0
    task_covariance: bool = True
    one_shot_covariance: str = "zero"
    shared: str = "task"
    prior_shots: float = 1.0

    def __post_init__(self) -> None:
        if self.beta != "auto" and (isinstance(self.beta, str) or not (self.beta > 0 and math.isfinite(self.beta))):
            raise ValueError(f'beta must be positive and finite, or "auto", got {self.beta!r}')
        if self.one_shot_covariance not in _ONE_SHOT:
            raise ValueError(f'one_shot_covariance must be "zero" or "published", got {self.one_shot_covariance!r}')
        if self.shared not in _SHARED:
            raise ValueError(f'shared must be "task" or "within", got {self.shared!r}')
        if not (isinstance(self.prior_shots, Real) and self.prior_shots >= 0):
            raise ValueError(f"prior_shots must be 0 or more, got {self.prior_shots!r}")
        for name in ("beta", "prior_shots"):
            if not isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, float(value))

    @property
    def ridge(self) -> float:
        """Beta as a number; ValueError while it is "auto"."""
        return float(self.beta)

    @property
    def without_shared(self) -> bool:
        """Whether S is left out."""
        return not self.task_covariance or self.prior_shots == 0

    def class_weight(self, shots: int) -> float:
        """lambda_k of a class of that many examples."""
        if self.without_shared:
            return 1.0
        return 0.0 if math.isinf(self.prior_shots) else shots / (shots + self.prior_shots)
