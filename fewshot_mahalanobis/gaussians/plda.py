"""Gaussians of one covariance whose class means are uncertain: the model of ``AutoHead``.

A class mean of few examples is a noisy one. In a task of unequal shots that noise makes classes of few examples look
far from every query; in any task it makes the lengths of the means count for too much. So the means get a prior:

    mu_k ~ N(c, b P),    x ~ N(mu_k, P),    P = S + beta I

with S the covariance pooled within classes (nu = infinity in equation 3 of Bateni et al., CVPR 2020) and c the mean of
the class means. Given n_k examples with mean m_k, the posterior of mu_k is N(c + s_k (m_k - c), P / (n_k + 1 / b)) with
s_k = n_k b / (n_k b + 1), and a query of class k is distributed as N(c + s_k (m_k - c), r_k P) with
r_k = 1 + 1 / (n_k + 1 / b). Its logit is, with a scale a,

    -a (d_k^2 / r_k + f log r_k),    d_k the Mahalanobis distance under P to the posterior mean,

where f takes the place of the number of dimensions d in the Gaussian's log-determinant. A query's squared distance to
its own mean is t on average, not d, and few directions make most of it; so f is a share of t, often a small one: with
all of t, classes of few examples get too few queries. For equal shots r_k is a constant. Copies count fully in m_k and
S. In s_k and r_k, n_k is the number of independent examples that those of the class are worth (``effective_counts``).

Features that are never negative, as after a ReLU, are skewed: many small entries and a few large ones. Their square
roots are nearer to a Gaussian (Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in
Exemplar-Free Continual Learning", NeurIPS 2023, take powers for this), and replace the features x where they have the
higher leave-one-out likelihood.

This is probabilistic linear discriminant analysis (Ioffe, "Probabilistic Linear Discriminant Analysis", ECCV 2006) with
the covariance between classes proportional to the one within. t is the mean squared distance of a left-out example to
its class mean, b that of the m_k to c, divided by t, both less noise. beta, f and a follow from the leave-one-out
likelihood: see :func:`choose_plda_settings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.covariance import ClassGaussians, CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import NormalPrior, Removal, removal_solve, removals
from fewshot_mahalanobis.gaussians.pool import Pool, PooledGaussians
from fewshot_mahalanobis.gaussians.support import (
    check_support,
    deviations,
    effective_counts,
    joined_groups,
    left_out_weights,
    remaining_examples,
    result_dtype,
    working_dtype,
)
from fewshot_mahalanobis.gaussians.temperature import temperature_fit

#: Prior of log10(beta / v), v the mean variance of a feature. That of ``leave_out.py`` is for class covariances; each
#: was chosen on validation classes for its own model.
_BETA_PRIOR = NormalPrior((-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0), 1.0, 0.35)
#: log10(beta / v), b and the scale where every class has one example; from validation classes.
_ONE_SHOT_CENTRE, _ONE_SHOT_SPREAD, _ONE_SHOT_SCALE = 1.5, 0.1, 14.0
#: Prior of f / t, half a normal. In its likelihood every class counts as so many examples, so that large classes do
#: not decide alone; from validation classes.
_SHARE_PRIOR, _CLASS_EXAMPLES = NormalPrior((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), 0.0, 0.2), 5
#: Bounds of b.
_MIN_SPREAD, _MAX_SPREAD = 1e-2, 1e4
#: Use at most this many left-out examples, evenly from all classes.
_MAX_LEFT_OUT = 250
#: Choose the power on at most this many classes, those of most examples.
_POWER_CLASSES = 10
#: Label smoothing in the leave-one-out likelihood, in pseudo-examples over all classes.
_PSEUDO_EXAMPLES = 0.25


@dataclass(frozen=True)
class PldaSettings:
    """Settings of the model, chosen on a support set by :func:`choose_plda_settings`.

    Attributes
    ----------
    beta : float
        Weight of the identity in P, > 0.
    spread : float
        b > 0: the variance of class means about their mean, in units of P.
    freedom : float
        f >= 0: the weight of log r_k.
    scale : float
        Factor > 0 of the logits.
    shared : {"within", "task"}
        S. Pooled within classes, or where every class has one example, of all support features.
    power : float
        In (0, 1]: the model is one of sign(x) |x|^power of each feature x; 1 leaves features as they are.
    """

    beta: float
    spread: float
    freedom: float
    scale: float
    shared: str
    power: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "spread", "scale"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        if not (math.isfinite(self.freedom) and self.freedom >= 0):
            raise ValueError(f"freedom must be 0 or more and finite, got {self.freedom!r}")
        if self.shared not in ("within", "task"):
            raise ValueError(f'shared must be "within" or "task", got {self.shared!r}')
        if not 0 < self.power <= 1:
            raise ValueError(f"power must be above 0 and at most 1, got {self.power!r}")

    @property
    def covariance(self) -> CovarianceSettings:
        """P as the covariance of every class."""
        return CovarianceSettings(self.beta, shared=self.shared, prior_shots=math.inf)


class Plda:
    """The model fitted to a support set, features (n, d) and labels (n,); made by ``AutoHead``.

    Attributes
    ----------
    gaussians : ClassGaussians
        N(m_k, P), of features to the settings' power.
    settings : PldaSettings
    counts : Tensor of shape (k,)
        n_k; with copies, :func:`~fewshot_mahalanobis.gaussians.support.effective_counts`. With a ``pool`` of unlabelled
        examples, N_k.
    shrink, ratio : Tensor of shape (k,)
        s_k and r_k.
    to_centre : Tensor of shape (k,)
        Squared distances of the m_k to c.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        settings: PldaSettings,
        groups: Tensor | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.settings = settings
        x = to_power(features.to(working_dtype(features)), settings.power)
        self.counts = effective_counts(labels, groups)[0].to(x)
        if pool is None:
            self.gaussians = ClassGaussians(x, labels, settings.covariance)
        else:
            pool = Pool(to_power(pool.features.to(x), settings.power), pool.memberships.to(x))
            self.gaussians = PooledGaussians(x, labels, settings.covariance, pool, self.counts)
            self.counts = self.counts + pool.weights(self.counts).sum(dim=0)
        self.dtype = result_dtype(features)
        self.to_centre = self.gaussians.squared_distance(self.gaussians.means.mean(dim=0, keepdim=True))[0]  # (k,)
        self.shrink, self.ratio = shrinkage(self.counts, settings.spread)

    def logits(self, queries: Tensor) -> Tensor:
        """Logits (m, k) of queries (m, d)."""
        to_means = self.gaussians.squared_distance(to_power(queries.to(working_dtype(queries)), self.settings.power))
        relative = relative_distance(to_means, self.shrink, self.ratio, self.to_centre, self.settings.freedom)
        return (-self.settings.scale * relative).to(torch.promote_types(result_dtype(queries), self.dtype))


def to_power(x: Tensor, power: float) -> Tensor:
    """sign(x) |x|^power of each entry. Its gradient at zero, infinite for a power below 1, is taken as zero."""
    if power == 1.0:
        return x
    return x.sign() * x.abs().clamp(min=torch.finfo(x.dtype).tiny).pow(power)


def shrinkage(counts: Tensor, spread: float) -> tuple[Tensor, Tensor]:
    """s_k = n_k b / (n_k b + 1) and r_k = 1 + 1 / (n_k + 1 / b) of numbers of examples ``counts``, b = ``spread``."""
    return counts * spread / (counts * spread + 1), 1 + 1 / (counts + 1 / spread)


def relative_distance(to_means: Tensor, shrink: Tensor, ratio: Tensor, to_centre: Tensor, freedom: float) -> Tensor:
    """d_k^2 / r_k + f log r_k, (m, k), from squared distances (m, k) of queries to the means m_k.

    d_k^2 = (1 - s_k) ||x - c||^2 + s_k ||x - m_k||^2 - s_k (1 - s_k) ||m_k - c||^2, as its mean lies on the line from c
    to m_k; and ||x - c||^2 is the mean over k of ||x - m_k||^2 less that of ||m_k - c||^2, as c is the mean of the m_k.

    Parameters
    ----------
    to_means : Tensor of shape (m, k)
    shrink, ratio : Tensor of shape (k,)
        s_k and r_k.
    to_centre : Tensor of shape (k,)
        Squared distances of the m_k to c.
    freedom : float
        f.
    """
    query_to_centre = to_means.mean(dim=1, keepdim=True) - to_centre.mean()
    distance = (1 - shrink) * query_to_centre + shrink * to_means - shrink * (1 - shrink) * to_centre
    return distance / ratio + freedom * ratio.log()


def choose_plda_settings(features: Tensor, labels: Tensor, groups: Tensor | None = None) -> PldaSettings:
    """Choose all settings of the model on a support set.

    log10(beta / v), v the mean variance of a feature, has a normal prior; on a coarse grid of it the leave-one-out
    likelihood is exact, and beta is the mean of log beta under the posterior. t is the mean squared distance of a
    left-out example to the mean of its class, less what that mean's own noise adds; b is the mean squared distance
    of class means to c, less what their noise adds, divided by t. The scale is the most likely one. f is 0 if all
    classes are worth equally many examples; otherwise it is a share of t with a prior, the mean under the posterior by
    a likelihood in which every class counts the same. Where no feature is negative, square roots are taken if they are
    more likely at the prior's centre. If every class has one example, or one group, nothing can be left out: S is the
    task covariance, beta / v, b and the scale are constants, and f is 0. Every group counts as one left-out example.

    Parameters
    ----------
    features : Tensor of shape (n, d)
    labels : int64 Tensor of shape (n,)
        0..k-1, every class with at least one example.
    groups : int64 Tensor of shape (n,), optional
        Examples of equal number are left out together.

    Raises
    ------
    ValueError
        As :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    """
    counts = check_support(features, labels)
    x, groups = features.detach().to(working_dtype(features)), joined_groups(groups)
    variance = float(x.var(dim=0).mean()) if len(x) > 1 else 0.0
    unit = variance or 1.0
    if variance == 0.0 or int(remaining_examples(labels, groups).max()) == 0:
        return PldaSettings(unit * 10**_ONE_SHOT_CENTRE, _ONE_SHOT_SPREAD, 0.0, _ONE_SHOT_SCALE, "task")
    if len(counts) == 1:
        return _at_centre(unit)
    power, likelihood = _chosen_power(x, labels, groups) if bool((x >= 0).all()) else (1.0, None)
    x = to_power(x, power)
    unit = float(x.var(dim=0).mean())
    if likelihood is None or len(counts) > _POWER_CLASSES:
        likelihood = _Likelihood(x, labels, groups)
    settings = _at_centre(unit, power)
    fits = [likelihood.fitted(replace(settings, beta=unit * 10**exponent))[1] for exponent in _BETA_PRIOR.candidates]
    settings = replace(settings, beta=unit * 10 ** _BETA_PRIOR.mean([loss * likelihood.examples for loss in fits]))
    worth = likelihood.left_out.worth
    if float(worth.min()) == float(worth.max()):
        return likelihood.fitted(settings)[0]
    losses = [likelihood.class_loss(settings, share) * _CLASS_EXAMPLES for share in _SHARE_PRIOR.candidates]
    return likelihood.fitted(settings, _SHARE_PRIOR.mean(losses))[0]


def _at_centre(variance: float, power: float = 1.0) -> PldaSettings:
    """Settings with beta at the centre of its prior, for features of this mean variance."""
    return PldaSettings(variance * 10**_BETA_PRIOR.centre, _ONE_SHOT_SPREAD, 0.0, 1.0, "within", power)


def _chosen_power(x: Tensor, labels: Tensor, groups: Tensor | None) -> tuple[float, _Likelihood | None]:
    """1, or 1/2 if left-out examples are more likely then, and the likelihood that says so if there is one."""
    few = torch.isin(labels, labels.bincount().argsort(descending=True, stable=True)[:_POWER_CLASSES])
    labels, groups = labels[few].unique(return_inverse=True)[1], None if groups is None else joined_groups(groups[few])
    if int(remaining_examples(labels, groups).max()) == 0:
        return 1.0, None
    likelihoods, losses = {}, {}
    for power in (1.0, 0.5):
        powered = to_power(x[few], power)
        settings = _at_centre(float(powered.var(dim=0).mean()), power)
        likelihoods[power] = _Likelihood(powered, labels, groups)
        losses[power] = likelihoods[power].fitted(settings)[1]
    chosen = min(losses, key=lambda power: losses[power])
    return chosen, likelihoods[chosen]


class _Likelihood:
    """The leave-one-out likelihood of settings, by examples from all classes of which something remains."""

    def __init__(self, x: Tensor, labels: Tensor, groups: Tensor | None) -> None:
        self.left_out = PldaWithout(x, labels, groups)
        order = labels.argsort(stable=True)
        order = order[self.left_out.weights[order] > 0]
        self.rows, self.chosen = order, self.left_out.all
        if len(order) > _MAX_LEFT_OUT:
            numbers = torch.arange(len(labels), device=labels.device) if groups is None else groups
            chosen = torch.tensor([*dict.fromkeys(numbers[order].tolist())], device=labels.device)
            chosen = chosen[:: math.ceil(len(chosen) / _MAX_LEFT_OUT)]  # whole groups
            self.rows = order[torch.isin(numbers[order], chosen)]
            self.chosen = self.left_out.without(
                [removal.select(torch.isin(numbers[removal.rows[:, 0]], chosen)) for removal in self.left_out.groups]
            )
        self.labels, self.weights = labels[self.rows], self.left_out.weights[self.rows].to(x)
        self.examples = float(self.weights.sum())

    def fitted(self, settings: PldaSettings, share: float = 0.0) -> tuple[PldaSettings, float]:
        """Settings with f, b and the scale that suit their beta, and the leave-one-out loss per example."""
        distance, spread = self.left_out.moments(settings.beta)
        settings = replace(settings, freedom=share * distance, spread=spread, scale=1.0)
        logits = self.left_out.logits(settings, self.chosen)[self.rows]
        fit = temperature_fit(logits, self.labels, _PSEUDO_EXAMPLES / logits.shape[1], self.weights)
        return replace(settings, scale=1.0 / fit.temperature), fit.loss

    def class_loss(self, settings: PldaSettings, share: float) -> float:
        """Sum over classes of the mean leave-one-out loss of their examples."""
        settings, _ = self.fitted(settings, share)
        logits = self.left_out.logits(settings, self.chosen)[self.rows]
        losses = self.weights * F.cross_entropy(logits, self.labels, reduction="none")
        return float((losses / self.labels.bincount(self.weights)[self.labels]).sum())


class PldaWithout:
    """The model without each group of a support set, for any beta, from features (n, d), labels and groups (n,).

    With v_i = x_i - m_k for the class k of i, and M_j = m_j - c, all inner products under P without a group follow from
    those of the v_i in it and the M_j under B, which is P with another divisor of S (``leave_out.py``). In the basis of
    S's eigenvectors B is diagonal for every beta.
    """

    def __init__(self, x: Tensor, labels: Tensor, groups: Tensor | None = None) -> None:
        counts = labels.bincount()
        x = x - x.mean(dim=0)
        v = deviations(x, labels, counts)
        means = x.new_zeros(len(counts), x.shape[1]).index_copy(0, labels, x - v)
        centred = means - means.mean(dim=0)
        thin = len(x) < x.shape[1]
        eigenvalues, vectors = torch.linalg.eigh(v @ v.T if thin else v.T @ v)
        positive = eigenvalues > 1e-12 * eigenvalues[-1]
        self.eigenvalues, vectors = eigenvalues[positive], vectors[:, positive]  # of the scatter within classes
        if thin:  # the basis is v^T vectors / roots, which is never formed
            roots = self.eigenvalues.sqrt()
            self.v, self.means = vectors * roots, centred @ v.T @ vectors / roots
        else:
            self.v, self.means = v @ vectors, centred @ vectors
        # Inner products (k, k) of the parts of the M_j outside the span of the v_i, where P is beta I.
        self.outside = centred @ centred.T - self.means @ self.means.T
        self.counts, self.divisor = counts, len(labels) - len(counts)  # n_k, n - k
        self.worth, self.worth_of_others = effective_counts(labels, groups)
        self.weights = left_out_weights(labels, groups)
        self.groups = removals(labels, counts, groups)
        self.all = self.without(self.groups)

    def without(self, groups: Sequence[Removal]) -> list[_DowndatedProducts]:
        """The model without each of these groups, in chunks of bounded memory."""
        width = len(self.counts)
        return [
            _DowndatedProducts(self, some)
            for removal in groups
            for some in removal.split(width + removal.rows.shape[1])
        ]

    def moments(self, beta: float) -> tuple[float, float]:
        """Mean squared distance t of an example to its class mean, and spread b of the means, both less noise."""
        # Left out, an example is t (1 + 1 / n_k) from the mean of n_k others.
        weights = self.weights / (1 + 1 / self.worth_of_others) / self.weights.sum()
        distance = sum(float((weights[part.removal.rows] * part.own_distances(beta)).sum()) for part in self.all)
        k = len(self.counts)
        between = float(self.squared_lengths(self.inverse(beta, self.divisor), beta).mean()) * k / (k - 1)
        noise = distance * float((1 / self.worth).mean())
        spread = (between - noise) / distance if distance > 0 else _MAX_SPREAD
        return distance, min(max(spread, _MIN_SPREAD), _MAX_SPREAD)

    def logits(self, settings: PldaSettings, chosen: Sequence[_DowndatedProducts]) -> Tensor:
        """Exact logits (n, k) of the examples of ``chosen`` groups; minus infinity where nothing remains.

        Rows of other examples have any value.
        """
        found = self.v.new_empty(len(self.v), len(self.counts))
        for without in chosen:
            found[without.removal.rows] = without.logits(settings)
        return found

    def inverse(self, beta: float, divisor: int) -> Tensor:
        """Eigenvalues of (S + beta I)^-1, S with this divisor and zero without any."""
        return 1 / (self.eigenvalues / divisor + beta) if divisor > 0 else torch.full_like(self.eigenvalues, 1 / beta)

    def products(self, classes: Tensor, inverse: Tensor, beta: float) -> Tensor:
        """M_y^T (S + beta I)^-1 M_j (k', k) of ``classes`` y (k',) with all j, by the eigenvalues of the inverse."""
        return (self.means[classes] * inverse) @ self.means.T + self.outside[classes] / beta

    def squared_lengths(self, inverse: Tensor, beta: float) -> Tensor:
        """M_j^T (S + beta I)^-1 M_j (k,), by the eigenvalues of the inverse."""
        return self.means.square() @ inverse + self.outside.diagonal() / beta


class _DowndatedProducts:
    """Inner products under P^-1 without each of G groups of g members.

    Without a group, of which g_k < n_k members have class k, the mean m_k moves by -1 / (n_k - g_k) times the sum of
    their v_i, and the e classes without an example do not count for c. So x_i - c and m_j - c are sums of M_j and of
    v_i in the group, and their inner products under P without it follow from those under B, which is P with divisor
    n - g - (k - e), by the identity of ``leave_out.py``.
    """

    def __init__(self, parts: PldaWithout, removal: Removal) -> None:
        self.parts, self.removal = parts, removal
        size, remaining = removal.rows.shape[1], removal.remaining.to(parts.v)
        self.divisor = parts.divisor - size + removal.emptied
        self.removed = 1 / self.divisor if self.divisor > 0 else 0.0
        self.v, self.remain, self.remaining = parts.v[removal.rows], remaining > 0, remaining.clamp(min=1)
        self.classes, self.class_of = removal.labels.unique(return_inverse=True)
        self.inverse_weights = removal.inverse_weights()
        self.identity = torch.eye(size, dtype=remaining.dtype, device=remaining.device)

    def own_distances(self, beta: float) -> Tensor:
        """Squared distances (G, g) of the members to the means of what remains of their classes."""
        moved = self._moves_from_own
        gram = (self.v * self.parts.inverse(beta, self.divisor)) @ self.v.mT
        v_x = gram @ moved.mT
        return (moved * v_x.mT).sum(dim=2) + self._along(v_x, gram).square().sum(dim=1)

    def logits(self, settings: PldaSettings) -> Tensor:
        """Logits (G, g, k) of the members; minus infinity where nothing remains."""
        labels, beta = self.removal.labels, settings.beta
        members = labels[:, None].expand(-1, labels.shape[1], -1)
        inverse = self.parts.inverse(beta, self.divisor)
        weighted = self.v * inverse
        gram = weighted @ self.v.mT  # v_a^T B^-1 v_b (G, g, g)
        v_n = weighted @ self.parts.means.T  # v_a^T B^-1 M_j (G, g, k)
        m_y = self.parts.products(self.classes, inverse, beta)
        n_y = m_y[self.class_of]  # M_y^T B^-1 M_j of each member's class y (G, g, k)
        n_n = self.parts.squared_lengths(inverse, beta).expand(len(labels), -1)  # (G, k)
        if self.removal.emptied:  # N_j, the M_j less their mean s over the classes that remain, in place of the M_j
            shares = self._emptied_shares  # s = -sum shares M
            s_n = -(shares @ n_y)[:, 0]  # s^T M_j (G, k)
            s_y = s_n.gather(1, labels)[:, None]  # (G, 1, g)
            s_s = -(shares * s_y).sum(dim=2)  # (G, 1)
            v_n = v_n + v_n.gather(2, members) @ shares.mT
            n_y = n_y - s_n[:, None] - s_y.mT + s_s[..., None]
            n_n = n_n - 2 * s_n + s_s
        v_y = v_n.gather(2, members)  # v_a^T N_y of member i (G, a, i)
        # The m_j - c beside the x_i - c: their products with the v_a (G, g, k + g), and what the moves add to lengths.
        moves, sizes = self._moves, (v_n.shape[2], v_y.shape[2])
        v_before = torch.cat([v_n, v_y], dim=2)
        v_after = v_before + gram @ moves
        along = self._along(v_after, gram)
        added_m, added_x = ((moves * (v_before + v_after)).sum(dim=1) + along.square().sum(dim=1)).split(sizes, dim=1)
        m_m = (n_n + added_m)[:, None]
        x_x = n_y.gather(2, labels[..., None]) + added_x[..., None]
        (f, h), (along_m, along_x) = moves.split(sizes, dim=2), along.split(sizes, dim=2)
        x_m = n_y + h.mT @ v_after[..., : sizes[0]] + v_y.mT @ f + along_x.mT @ along_m
        shrink, ratio = shrinkage(self._worth, settings.spread)
        distance = x_x - 2 * shrink * x_m + shrink.square() * m_m
        logits = -settings.scale * (distance / ratio + settings.freedom * ratio.log())
        return logits.masked_fill(self._worth == 0, -torch.inf) if self.removal.emptied else logits

    @property
    def _classes(self) -> int:
        """Classes that remain; 1 if none do, as they are divided by."""
        return max(len(self.parts.counts) - self.removal.emptied, 1)

    @cached_property
    def _emptied_shares(self) -> Tensor:
        """Weights (G, 1, g) of the members' class means in minus the mean over the classes that remain."""
        taken = self.removal.shots - self.removal.remaining
        return ((~self.remain).to(self.v) / taken)[:, None] / self._classes

    @cached_property
    def _moves_from_own(self) -> Tensor:
        """Weights (G, g, g) of the v_a in each member less the mean of what remains of its class."""
        same = self.removal.labels[:, :, None] == self.removal.labels[:, None]
        return self.identity + same / self.remaining[..., None]

    @cached_property
    def _moves(self) -> Tensor:
        """F and h (G, g, k + g): m_j - c = N_j + sum_a f_aj v_a and x_i - c = N_y + sum_a h_ai v_a."""
        shares = (self.remain / self.remaining)[..., None]
        centre_shift = shares / self._classes  # minus what c moves by, of v_a (G, g, 1)
        f = centre_shift.repeat(1, 1, len(self.parts.counts)).scatter_add(2, self.removal.labels[..., None], -shares)
        return torch.cat([f, self.identity + centre_shift], dim=2)

    @cached_property
    def _worth(self) -> Tensor:
        """Effective number of examples (G, 1, k) that remain of each class."""
        others = self.parts.worth_of_others[self.removal.rows]
        return self.parts.worth.repeat(len(others), 1).scatter(1, self.removal.labels, others)[:, None]

    def _along(self, products: Tensor, gram: Tensor) -> Tensor:
        """What inner products (G, g, m) with the v_i add under P without the group: to be squared and summed."""
        if not self.removed:
            return torch.zeros_like(products)
        rest = self.inverse_weights - self.removed * gram  # A^-1 - V B^-1 V^T over the divisor
        return removal_solve(rest, math.sqrt(self.removed) * products)


def leave_one_out_plda_logits(
    settings: PldaSettings, features: Tensor, labels: Tensor, groups: Tensor | None = None
) -> Tensor:
    """Exact logits (n, k) of each support example by the model with these settings fitted to the others.

    ``groups`` (n,) are left out together, if there are any. Minus infinity where a class has no other example.
    ``settings.shared`` must be "within".
    """
    check_support(features, labels)
    x = to_power(features.detach().to(working_dtype(features)), settings.power)
    left_out = PldaWithout(x, labels, joined_groups(groups))
    return left_out.logits(settings, left_out.all).to(result_dtype(features))
