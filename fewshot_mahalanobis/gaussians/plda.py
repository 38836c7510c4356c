"""Gaussians of one covariance whose class means are uncertain: the model of ``AutoHead``.

A class mean of few examples is a noisy one. In a task of unequal shots that noise makes classes of few examples look
far from every query; in any task it makes the lengths of the means count for too much. So the means get a prior:

    mu_k ~ N(c, b P),    x ~ N(mu_k, P),    P = S + beta I

with S the covariance pooled within classes (nu = infinity in equation 3 of Bateni et al., CVPR 2020) and c the mean of
the class means. Of n_k examples with mean m_k the posterior of mu_k is N(c + s_k (m_k - c), P / (n_k + 1 / b)) with
s_k = n_k b / (n_k b + 1), and a query of class k is distributed as N(c + s_k (m_k - c), r_k P) with
r_k = 1 + 1 / (n_k + 1 / b). Its logit is, up to a scale,

    -d_k^2 / r_k - f log r_k,    d_k the Mahalanobis distance under P to the posterior mean,

where f takes the place of the number of dimensions d in the Gaussian's log-determinant. A query's squared distance to
its own mean is t on average, not d, and few directions make most of it; so f is a share of t, often a small one: with
all of t, classes of few examples get too few queries. For equal shots r_k is a constant.

Features that are never negative, as after a ReLU, are skewed: many small entries and a few large ones. Their square
roots are nearer to a Gaussian (Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in
Exemplar-Free Continual Learning", NeurIPS 2023, take powers for this), and x stands for them where the leave-one-out
likelihood is higher so.

This is probabilistic linear discriminant analysis (Ioffe, "Probabilistic Linear Discriminant Analysis", ECCV 2006) with
the covariance between classes proportional to the one within. t and b are moments of leave-one-out distances; beta, f
and the scale maximise the leave-one-out likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.covariance import ClassGaussians, CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import removal_weights
from fewshot_mahalanobis.gaussians.low_rank import MAX_CHUNK_NUMBERS
from fewshot_mahalanobis.gaussians.support import (
    check_support,
    class_means,
    deviations,
    effective_counts,
    examples_left,
    groups_by_size,
    joined_groups,
    left_out_weights,
    result_dtype,
    working_dtype,
)
from fewshot_mahalanobis.gaussians.temperature import temperature_fit

#: Candidates for log10(beta / v), v the mean variance of a feature over the support set.
_GRID = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
#: Prior: log10(beta / v) ~ Normal(CENTRE, SPREAD). From validation classes; so are the two after it.
_CENTRE, _SPREAD = 1.0, 0.35
#: log10(beta / v), b and the scale where every class has one example.
_ONE_SHOT_CENTRE, _ONE_SHOT_SPREAD, _ONE_SHOT_SCALE = 1.5, 0.1, 14.0
#: Candidates for f / t. Its prior is half a normal, and in its likelihood every class counts as so many examples, lest
#: large classes decide alone; both from validation classes.
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_SHARE_SPREAD, _CLASS_EXAMPLES = 0.2, 5
#: Bounds of b.
_MIN_SPREAD, _MAX_SPREAD = 1e-2, 1e4
#: The choice listens to at most so many left-out examples, evenly from all classes.
_MAX_LEFT_OUT = 250
#: The power is chosen on the classes of most examples, at most so many.
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
    means : Tensor of shape (k, d)
        Class means of the features as they are.
    counts : Tensor of shape (k,)
        n_k; with copies, what they are worth (:func:`~fewshot_mahalanobis.gaussians.support.effective_counts`).
    shrink, ratio : Tensor of shape (k,)
        s_k and r_k.
    to_centre : Tensor of shape (k,)
        Squared distances of the m_k to c.
    """

    def __init__(self, features: Tensor, labels: Tensor, settings: PldaSettings, groups: Tensor | None = None) -> None:
        self.settings = settings
        x = to_power(features.to(working_dtype(features)), settings.power)
        self.gaussians = ClassGaussians(x, labels, settings.covariance)
        self.means = self.gaussians.means if settings.power == 1.0 else class_means(features, labels)
        self.dtype = result_dtype(features)
        self.to_centre = self.gaussians.squared_distance(self.gaussians.means.mean(dim=0, keepdim=True))[0]  # (k,)
        counts = self.gaussians.counts if groups is None else effective_counts(labels, groups)[0]
        self.counts = counts.to(self.to_centre.dtype)
        self.ratio = 1 + 1 / (self.counts + 1 / settings.spread)  # r_k
        self.shrink = self.counts * settings.spread / (self.counts * settings.spread + 1)  # s_k

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


def relative_distance(to_means: Tensor, shrink: Tensor, ratio: Tensor, to_centre: Tensor, freedom: float) -> Tensor:
    """d_k^2 / r_k + f log r_k, (m, k), from squared distances (m, k) of queries to the means m_k.

    Distances to points of a line, and to a centre of gravity, follow from those to the points themselves:
    ||x - c||^2 is the mean of ||x - m_k||^2 less that of ||c - m_k||^2.

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
    left-out example to the mean of its class, less what that mean's own noise adds; b is what is left of the mean
    squared distance of class means to c when their noise is taken away. Where no feature is negative, square roots are
    taken if they are more likely at the prior's centre. If every class has one example, or one group, nothing can be
    left out: S is the task covariance, and all else the prior's. Every group counts as one left-out example.

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
    x = features.detach().to(working_dtype(features))
    variance = float(x.var(dim=0).mean()) if len(x) > 1 else 0.0
    unit, groups = variance or 1.0, joined_groups(groups)
    if variance == 0.0 or int(examples_left(labels, groups).max()) == 0:
        return PldaSettings(unit * 10**_ONE_SHOT_CENTRE, _ONE_SHOT_SPREAD, 0.0, _ONE_SHOT_SCALE, "task")
    if len(counts) == 1:
        return PldaSettings(unit * 10**_CENTRE, _ONE_SHOT_SPREAD, 0.0, 1.0, "within")
    power = _chosen_power(x, labels, counts, groups) if bool((x >= 0).all()) else 1.0
    x = to_power(x, power)
    unit, left_out = float(x.var(dim=0).mean()), _Likelihood(x, labels, counts, groups)
    centre = PldaSettings(unit * 10**_CENTRE, _ONE_SHOT_SPREAD, 0.0, 1.0, "within", power)
    betas = [unit * 10**exponent for exponent in _GRID]
    fits = [left_out.fitted(replace(centre, beta=beta))[1] for beta in betas]
    exponents = _on_cpu(_GRID)
    posterior = _posterior(_on_cpu(fits) * left_out.examples, (exponents - _CENTRE) / _SPREAD)
    settings = replace(centre, beta=unit * 10 ** float(posterior @ exponents))
    worth = counts if groups is None else effective_counts(labels, groups)[0]
    if float(worth.min()) == float(worth.max()):
        return left_out.fitted(settings)[0]
    losses = [left_out.class_loss(settings, share) for share in _SHARES]
    shares = _on_cpu(_SHARES)
    posterior = _posterior(_on_cpu(losses) * _CLASS_EXAMPLES, shares / _SHARE_SPREAD)
    return left_out.fitted(settings, float(posterior @ shares))[0]


def _chosen_power(x: Tensor, labels: Tensor, counts: Tensor, groups: Tensor | None) -> float:
    """1, or 1/2 where the left-out examples are more likely so."""
    few = torch.isin(labels, counts.argsort(descending=True, stable=True)[:_POWER_CLASSES])
    _, labels, counts = labels[few].unique(return_inverse=True, return_counts=True)
    groups, losses = None if groups is None else joined_groups(groups[few]), {}
    if int(examples_left(labels, groups).max()) == 0:
        return 1.0
    for power in (1.0, 0.5):
        powered = to_power(x[few], power)
        beta = float(powered.var(dim=0).mean()) * 10**_CENTRE
        centre = PldaSettings(beta, _ONE_SHOT_SPREAD, 0.0, 1.0, "within", power)
        losses[power] = _Likelihood(powered, labels, counts, groups).fitted(centre)[1]
    return min(losses, key=lambda power: losses[power])


def _on_cpu(numbers: Sequence[float]) -> Tensor:
    """Return numbers as a float64 tensor, whatever type and device are PyTorch's defaults."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _posterior(losses: Tensor, deviations: Tensor) -> Tensor:
    """Posterior of candidates from minus their log-likelihoods, and their distances from a normal prior's centre."""
    return torch.softmax(-losses - deviations.square() / 2, dim=0)


class _Likelihood:
    """The leave-one-out likelihood of settings, by examples from all classes of which something stays."""

    def __init__(self, x: Tensor, labels: Tensor, counts: Tensor, groups: Tensor | None) -> None:
        order = labels.argsort(stable=True)
        order = order[examples_left(labels, groups)[order] > 0]
        if groups is None:
            self.rows = order[:: max(1, math.ceil(len(order) / _MAX_LEFT_OUT))]
        else:  # whole groups
            chosen = torch.tensor([*dict.fromkeys(groups[order].tolist())], device=groups.device)
            chosen = chosen[:: max(1, math.ceil(len(chosen) / _MAX_LEFT_OUT))]
            self.rows = order[torch.isin(groups[order], chosen)]
        self.left_out = LeftOut(x, labels, counts, groups)
        self.labels = labels[self.rows]
        self.weights = left_out_weights(labels, groups)[self.rows].to(x)
        self.examples = float(self.weights.sum())

    def fitted(self, settings: PldaSettings, share: float = 0.0) -> tuple[PldaSettings, float]:
        """Settings with f, b and the scale that suit their beta, and the leave-one-out loss per example."""
        at_beta = self.left_out.at(settings.beta)
        distance, spread = at_beta.moments()
        settings = replace(settings, freedom=share * distance, spread=spread, scale=1.0)
        logits = at_beta.logits(settings, self.rows)
        fit = temperature_fit(logits, self.labels, _PSEUDO_EXAMPLES / logits.shape[1], self.weights)
        return replace(settings, scale=1.0 / fit.temperature), fit.loss

    def class_loss(self, settings: PldaSettings, share: float) -> float:
        """Sum over classes of the mean leave-one-out loss of their examples."""
        settings, _ = self.fitted(settings, share)
        logits = self.left_out.at(settings.beta).logits(settings, self.rows)
        losses = self.weights * F.cross_entropy(logits, self.labels, reduction="none")
        return float((losses / self.labels.bincount(self.weights)[self.labels]).sum())


class LeftOut:
    """What leave-one-out needs of a support set for every beta: S's eigenvectors, and the support set in their basis.

    With v_i = x_i - m_k for the class k of i, and M_j = m_j - c, all inner products under P without example i follow
    from v_i^T B^-1 v_i, v_i^T B^-1 M_j and M_j^T B^-1 M_l, where B is P with divisor n - k - 1 (``leave_out.py``).
    """

    def __init__(self, x: Tensor, labels: Tensor, counts: Tensor, groups: Tensor | None = None) -> None:
        x = x - x.mean(dim=0)
        v = deviations(x, labels, counts)
        means = x.new_zeros(len(counts), x.shape[1]).index_copy(0, labels, x - v)
        centred = means - means.mean(dim=0)
        thin = len(x) < x.shape[1]
        eigenvalues, vectors = torch.linalg.eigh(v @ v.T if thin else v.T @ v)
        kept = eigenvalues > 1e-12 * eigenvalues[-1]
        self.eigenvalues, vectors = eigenvalues[kept], vectors[:, kept]  # of the scatter within classes
        self.labels, self.counts, self.groups = labels, counts, groups
        if groups is not None:
            self.squares = counts.square() / effective_counts(labels, groups)[0]  # sum of g^2 over the groups, (k,)
        if thin:  # the basis is v^T vectors / roots, which is never formed
            roots = self.eigenvalues.sqrt()
            self.v, self.means = vectors * roots, centred @ v.T @ vectors / roots
        else:
            self.v, self.means = v @ vectors, centred @ vectors
        # Inner products (k, k) of what of the M_j lies outside the span of the v_i, where P is beta I.
        self.outside = centred @ centred.T - self.means @ self.means.T

    @property
    def freedom(self) -> int:
        """Divisor n - k of the pooled covariance."""
        return len(self.labels) - len(self.counts)

    def at(self, beta: float) -> _AtBeta | _GroupsAtBeta:
        """Inner products for one beta."""
        return _AtBeta(self, beta) if self.groups is None else _GroupsAtBeta(self, self.groups, beta)

    def weights(self, beta: float, freedom: int) -> Tensor:
        """Eigenvalues of (S + beta I)^-1, S with divisor ``freedom`` and zero without any."""
        return 1 / (self.eigenvalues / freedom + beta) if freedom > 0 else torch.full_like(self.eigenvalues, 1 / beta)

    def products(self, beta: float, freedom: int) -> Tensor:
        """M_j^T (S + beta I)^-1 M_l, (k, k), S with that divisor."""
        return (self.means * self.weights(beta, freedom)) @ self.means.T + self.outside / beta

    def spread(self, lengths: Tensor, distance: float, counts: Tensor) -> float:
        """Estimate b by the lengths (k,) of M_j, the mean squared distance t, and the examples (k,) of each mean."""
        k = len(lengths)
        between = float(lengths.mean()) * k / (k - 1)
        noise = distance * float((1 / counts).mean())
        spread = (between - noise) / distance if distance > 0 else _MAX_SPREAD
        return min(max(spread, _MIN_SPREAD), _MAX_SPREAD)


class _AtBeta:
    def __init__(self, parts: LeftOut, beta: float) -> None:
        self.parts, self.beta = parts, beta
        self.weights = self._weights(parts.freedom - 1)
        self.length = parts.v.square() @ self.weights  # v_i^T B^-1 v_i, (n,)
        shots = parts.counts[parts.labels].to(self.length.dtype)
        self.shots = shots
        # P without i is B less removed[i] v_i v_i^T; for inner products under its inverse add factor[i] times those
        # with v_i.
        freedom = parts.freedom - 1
        removed = shots / (shots - 1).clamp(min=1) / freedom if freedom > 0 else torch.zeros_like(shots)
        self.factor = removed / (1 - removed * self.length)

    def _weights(self, freedom: int) -> Tensor:
        return self.parts.weights(self.beta, freedom)

    def _products(self, classes: Tensor, freedom: int) -> Tensor:
        """M_j^T (S + beta I)^-1 M_l (m, k) of ``classes`` (m,) with all; S with that divisor, n - k - 1 for B."""
        means = self.parts.means
        unique, index = classes.unique(return_inverse=True)
        products = (means[unique] * self._weights(freedom)) @ means.T + self.parts.outside[unique] / self.beta
        return products[index]

    def _lengths(self, freedom: int) -> Tensor:
        """M_j^T (S + beta I)^-1 M_j of every class, (k,)."""
        return self.parts.means.square() @ self._weights(freedom) + self.parts.outside.diagonal() / self.beta

    def moments(self) -> tuple[float, float]:
        """Mean squared distance t of an example to its class mean, and spread b of the means, both less noise."""
        paired = self.shots > 1
        shots, length = self.shots[paired], self.length[paired]
        # Left out, an example is n_k / (n_k - 1) v_i from the mean of the others: that is t (1 + 1 / (n_k - 1)).
        own = (shots / (shots - 1)).square() * (length + self.factor[paired] * length.square())
        distance = float((own * (shots - 1) / shots).mean())
        return distance, self.parts.spread(self._lengths(self.parts.freedom), distance, self.parts.counts.to(own.dtype))

    def logits(self, settings: PldaSettings, rows: Tensor) -> Tensor:
        """Exact leave-one-out logits (len(rows), k) of examples whose class has others."""
        parts, k = self.parts, len(self.parts.counts)
        y, own = parts.labels[rows], torch.zeros(len(rows), k, dtype=torch.bool, device=rows.device)
        own[torch.arange(len(rows), device=rows.device), y] = True
        v_means = (parts.v[rows] * self.weights) @ parts.means.T  # v_i^T B^-1 M_j; the v_i lie in the span
        length, factor = self.length[rows, None], self.factor[rows, None]
        # Without i its class mean moves by -e v_i and c by -e v_i / k: so M_j becomes M_j + g_j v_i.
        e = 1 / (self.shots[rows, None] - 1)
        g = torch.where(own, e / k - e, e / k)
        a = 1 + e / k  # x_i - c = a v_i + M_y
        gram_y, at_y = self._products(y, parts.freedom - 1), v_means.gather(1, y[:, None])
        x_x = a.square() * length + 2 * a * at_y + gram_y.gather(1, y[:, None])
        x_m = a * v_means + gram_y + g * (a * length + at_y)
        m_m = self._lengths(parts.freedom - 1) + 2 * g * v_means + g.square() * length
        x_v, m_v = a * length + at_y, v_means + g * length
        x_x, x_m, m_m = x_x + factor * x_v.square(), x_m + factor * x_v * m_v, m_m + factor * m_v.square()
        shots = parts.counts.to(length.dtype) - own.to(length.dtype)
        return _logits(settings, shots, x_x, x_m, m_m)

    def logits_without_class(self, settings: PldaSettings, rows: Tensor) -> Tensor:
        """Exact leave-one-out logits of examples that are alone in their class; minus infinity for that class."""
        y, k = self.parts.labels[rows], len(self.parts.counts)
        gram_y = self._products(y, self.parts.freedom)
        own = gram_y.gather(1, y[:, None])
        # Without class y the centre c moves by -M_y / (k - 1), and S stays.
        a = k / (k - 1)
        x_m = a * (gram_y + own / (k - 1))
        m_m = self._lengths(self.parts.freedom) + 2 * gram_y / (k - 1) + own / (k - 1) ** 2
        found = _logits(settings, self.parts.counts.to(own.dtype), a**2 * own, x_m, m_m)
        return found.scatter(1, y[:, None], -torch.inf)


class _GroupsAtBeta:
    """What :class:`_AtBeta` does where whole groups are left out, which may have members in several classes.

    Without a group G, of which g_k < n_k members have class k, the mean m_k moves by -1 / (n_k - g_k) times the sum of
    their v_i, and classes that are gone do not count for c. So x_i - c and m_j - c are sums of M_j and of v_i in G, and
    their inner products under P without G follow from those under B, P with divisor n - g - (k - gone), by the identity
    of ``leave_out.py``.
    """

    def __init__(self, parts: LeftOut, groups: Tensor, beta: float) -> None:
        self.parts, self.groups, self.beta = parts, groups, beta

    def moments(self) -> tuple[float, float]:
        """Mean squared distance t of an example to its class mean, and spread b of the means, both less noise."""
        parts, distance, total = self.parts, 0.0, 0.0
        of_all, of_others = effective_counts(parts.labels, self.groups)
        weights = left_out_weights(parts.labels, self.groups)
        for left in self._left(self.groups):
            stays = of_others[left.rows] > 0
            rows, own = left.rows[stays], left.own_distances()[stays]
            # Left out, an example is t (1 + 1 / n_k) from the mean of n_k others.
            distance += float((weights[rows] * own / (1 + 1 / of_others[rows])).sum())
            total += float(weights[rows].sum())
        lengths = parts.products(self.beta, parts.freedom).diagonal()
        return distance / total, parts.spread(lengths, distance / total, of_all)

    def logits(self, settings: PldaSettings, rows: Tensor) -> Tensor:
        """Exact logits (len(rows), k) of examples without their groups; minus infinity where nothing stays."""
        found = self.parts.v.new_empty(len(self.parts.labels), len(self.parts.counts))
        for left in self._left(self.groups[rows]):
            found[left.rows.flatten()] = left.logits(settings).flatten(0, 1)
        return found[rows]

    def _left(self, chosen: Tensor) -> Iterator[_LeftGroups]:
        """All groups of ``chosen`` numbers; together some of one size without which S has the same divisor."""
        counts, labels = self.parts.counts, self.parts.labels
        of_chosen = torch.isin(self.groups, chosen).nonzero()[:, 0]
        for places in groups_by_size(self.groups[of_chosen]):
            size = places.shape[1]
            for rows in of_chosen[places].split(max(1, MAX_CHUNK_NUMBERS // (size * (len(counts) + size)))):
                gone = (F.one_hot(labels[rows], len(counts)).sum(dim=1) == counts).sum(dim=1)
                for lost in gone.unique().tolist():
                    freedom = len(labels) - size - (len(counts) - lost)
                    yield _LeftGroups(self.parts, self.beta, rows[gone == lost], freedom)


class _LeftGroups:
    """Inner products without each of G groups of g members, in rows (G, g), where S has the divisor ``freedom``."""

    def __init__(self, parts: LeftOut, beta: float, rows: Tensor, freedom: int) -> None:
        self.parts, self.rows, self.labels = parts, rows, parts.labels[rows]
        self.of_class = F.one_hot(self.labels, len(parts.counts)).to(parts.v)  # (G, g, k)
        lost = self.of_class.sum(dim=1)  # g_j (G, k)
        self.stay = parts.counts - lost  # n_j - g_j
        self.worth = self.stay.square() / (parts.squares - lost.square()).clamp(min=1)  # in examples
        v = parts.v[rows]
        weighted = v * parts.weights(beta, freedom)
        self.means, self.v_means = parts.products(beta, freedom), weighted @ parts.means.T  # (k, k), (G, g, k)
        self.gram = weighted @ v.mT  # (G, g, g)
        self.removed = 1 / freedom if freedom > 0 else 0.0
        # A^-1 - V B^-1 V^T over the divisor
        rest = removal_weights(self.labels, parts.counts) - self.removed * self.gram
        self.root = torch.linalg.cholesky(rest) if freedom > 0 else self._identity()

    def own_distances(self) -> Tensor:
        """Squared distances (G, g) of the members to the means of those of their classes that stay."""
        same = self.labels[:, :, None] == self.labels[:, None]
        moved = self._identity() + same / self._stay_in_own()[..., None]  # x less the mean, of v_i
        v_x = self.gram @ moved.mT
        return (moved * v_x.mT).sum(dim=2) + self._along(v_x).square().sum(dim=1)

    def logits(self, settings: PldaSettings) -> Tensor:
        """Logits (G, g, k) of the members; minus infinity where nothing stays."""
        stays = (self.stay > 0).to(self.gram)
        classes = stays.sum(dim=1).clamp(min=1)[:, None]
        # N_j, the M_j less their mean s over the classes that stay: zero, if all do.
        to_s = stays @ self.means / classes  # (G, k)
        s_s = (stays * to_s).sum(dim=1, keepdim=True) / classes
        n_n = self.means.diagonal() - 2 * to_s + s_s  # (G, k)
        n_y = self.means[self.labels] - to_s[:, None] - to_s.gather(1, self.labels)[..., None] + s_s[..., None]
        v_n = self.v_means - (self.v_means * stays[:, None]).sum(dim=2, keepdim=True) / classes[..., None]
        v_y = v_n.gather(
            2, self.labels[:, None].expand(-1, self.labels.shape[1], -1)
        )  # v_a^T N_y of example i (G, a, i)
        # m_j - c = N_j + sum_a f_aj v_a and x_i - c = N_y + sum_a h_ai v_a
        f = -self.of_class / self._stay_in_own()[..., None] * stays[:, None]
        of_centre = f.sum(dim=2, keepdim=True) / classes[..., None]  # (G, g, 1)
        f, h = f - of_centre, self._identity() - of_centre
        v_f, v_h = self.gram @ f, self.gram @ h
        x_x = n_y.gather(2, self.labels[..., None]) + (h * (2 * v_y + v_h)).sum(dim=1)[..., None]
        x_m = n_y + h.mT @ (v_n + v_f) + v_y.mT @ f
        m_m = (n_n + (f * (2 * v_n + v_f)).sum(dim=1))[:, None]
        along_x, along_m = self._along(v_y + v_h), self._along(v_n + v_f)
        x_x = x_x + along_x.square().sum(dim=1)[..., None]
        x_m = x_m + along_x.mT @ along_m
        m_m = m_m + along_m.square().sum(dim=1)[:, None]
        found = _logits(settings, self.worth[:, None], x_x, x_m, m_m)
        return found.masked_fill(stays[:, None] == 0, -torch.inf)

    def _along(self, products: Tensor) -> Tensor:
        """What inner products (G, g, m) with the v_i add under P without the group: to be squared and summed."""
        return math.sqrt(self.removed) * torch.linalg.solve_triangular(self.root, products, upper=False)

    def _identity(self) -> Tensor:
        return torch.eye(self.rows.shape[1], dtype=self.gram.dtype, device=self.gram.device)

    def _stay_in_own(self) -> Tensor:
        """n_k - g_k of each member's class (G, g), 1 where it is gone."""
        return self.stay.gather(1, self.labels).clamp(min=1)


def _logits(settings: PldaSettings, shots: Tensor, x_x: Tensor, x_m: Tensor, m_m: Tensor) -> Tensor:
    """Logits from inner products of x - c (m, 1) and m_k - c (m, k) under the inverse of P."""
    shrink = shots * settings.spread / (shots * settings.spread + 1)
    ratio = 1 + 1 / (shots + 1 / settings.spread)
    distance = x_x - 2 * shrink * x_m + shrink.square() * m_m
    return -settings.scale * (distance / ratio + settings.freedom * ratio.log())


def leave_one_out_plda_logits(
    settings: PldaSettings, features: Tensor, labels: Tensor, groups: Tensor | None = None
) -> Tensor:
    """Exact logits (n, k) of each support example by the model with these settings fitted to the others.

    ``groups`` (n,) are left out together, if there are any. Minus infinity where a class has no other example.
    ``settings.shared`` must be "within".
    """
    counts = check_support(features, labels)
    x = to_power(features.detach().to(working_dtype(features)), settings.power)
    if (groups := joined_groups(groups)) is not None:
        everything = torch.arange(len(x), device=x.device)
        at_beta = LeftOut(x, labels, counts, groups).at(settings.beta)
        return at_beta.logits(settings, everything).to(result_dtype(features))
    at_beta = _AtBeta(LeftOut(x, labels, counts), settings.beta)
    found = x.new_empty(len(x), len(counts))
    alone = counts[labels] == 1
    for rows in (~alone).nonzero()[:, 0].split(_MAX_LEFT_OUT):
        found[rows] = at_beta.logits(settings, rows)
    if alone.any():
        rows = alone.nonzero()[:, 0]
        found[rows] = at_beta.logits_without_class(settings, rows)
    return found.to(result_dtype(features))
