"""Rejecting unknown classes: the outlier score of a query, and a conformal threshold.

The score of a query is a sum of standardised terms,

    a(x) = sum_j w_j (a_j(x) - m_j) / s_j,    a_j(x) = -max_k l_jk(x),

where l_jk is the similarity of the query to class k in term j. The first term is the head's, whose logits are minus
distances (Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks",
NeurIPS 2018). The second and the third are cosines of adapted features to the class means, about zero and about the
centre of the classes. Adapted features separate the classes of a task, and lose what tells other images apart. The
fourth term keeps it: the cosine of cube roots of the features without adaptation. Examples of no class add a fifth
(``negatives.py``).

Mean m_j, standard deviation s_j and the threshold come from the support set: each example, left out of the fit, is a
query of a known class. The threshold is the order statistic of conformal prediction (Vovk et al., "Algorithmic
Learning in a Random World", 2005), with leave-one-out in place of a split. Corrected labels are of examples that were
in doubt, which are farther from their classes than queries are, and such a threshold finds little. Examples of no
class, left out, show what it would accept. With them the threshold may be lower, as far as that of twice the rate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.leave_out import MeansWithout
from fewshot_mahalanobis.gaussians.support import class_means, group_weights
from fewshot_mahalanobis.heads import CosineHead, Head
from fewshot_mahalanobis.support_set.caller_warnings import warn_caller
from fewshot_mahalanobis.support_set.features import Features

#: Type of the unknown label, and its name in messages, by the kind of the classes' dtype. By default a string.
_WANTED: dict[str, tuple[type, str]] = {
    "i": (Integral, "an integer"),
    "u": (Integral, "an integer"),
    "f": (Real, "a number"),
}

#: m_j and s_j / w_j of each term by its name: ``HEAD`` or that of a :class:`Similarity`.
Units = dict[str, tuple[float, float]]
#: Names of the head's own term, and of the one that examples of no class add (``negatives.py``).
HEAD, NEGATIVES = "head", "negatives"


class CentredCosineHead(Head[tuple[Tensor, Tensor]]):
    """Logits = cos(x - c, mu_k - c), c the mean of the class means mu_k; float64."""

    def fit(self, support_features: Tensor, support_labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return M_k = mu_k - c (k, d), and c (d,), for support features (n, d) and labels (n,)."""
        means = class_means(support_features.double(), support_labels)
        return means - means.mean(dim=0), means.mean(dim=0)

    def logits(self, state: tuple[Tensor, Tensor], query_features: Tensor) -> Tensor:
        """Cosines (m, k) of queries (m, d)."""
        means, centre = state
        return F.normalize(query_features.double() - centre, dim=1) @ F.normalize(means, dim=1).T

    def export(self, state: tuple[Tensor, Tensor]) -> nn.Module:
        """Return the cosines as a module, in float32."""
        return _ExportedCentredCosine(*state)

    def leave_one_out_logits(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others, exactly, without n fits."""
        x = support_features.double()
        means, centre = self.fit(x, support_labels)
        x = x - centre
        without = MeansWithout.of(x, support_labels, groups)
        moves = without.centres(means, len(x))  # of the centre
        x = x - moves
        # Cosines with classes whose mean does not move, from products of matrices.
        product = x @ means.T - (x * moves).sum(dim=1, keepdim=True)
        terms = means.square().sum(dim=1) + moves.square().sum(dim=1, keepdim=True)
        length = terms - 2 * moves @ means.T
        scale = length.clamp(min=1e-24).sqrt() * x.norm(dim=1, keepdim=True).clamp(min=1e-12)
        cosines = (product / scale).where(length > 1e-12 * terms, 0.0)  # a class that remains alone is the centre
        moved = F.cosine_similarity(x[without.rows], without.means - moves[without.rows], dim=1, eps=1e-12)
        return without.put(cosines, moved)


class _ExportedCentredCosine(nn.Module):
    directions: Tensor
    centre: Tensor

    def __init__(self, means: Tensor, centre: Tensor) -> None:
        super().__init__()
        self.register_buffer("directions", F.normalize(means, dim=1).float())
        self.register_buffer("centre", centre.float())

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features - self.centre, dim=1) @ self.directions.T


class Similarity(NamedTuple):
    """One term of the outlier score: the cosine of an example and the class means, in some features."""

    name: str  # as files have it, so no other term may ever have it
    head: Head[Any]
    of: Callable[[Features], Tensor]
    weight: float  # w_j
    most: float = math.inf  # larger similarities count as this

    def limited(self, similarities: Tensor) -> Tensor:
        """Similarities as they count."""
        return similarities if self.most == math.inf else similarities.clamp(max=self.most)


def _cube_roots(features: Features) -> Tensor:
    """Cube roots of the features without adaptation, so that a few large ones do not decide the cosine."""
    return features.pretrained.sign() * features.pretrained.abs().pow(1 / 3)


#: The terms of the outlier score beside the head's own. The last weight was chosen on validation classes.
SIMILARITIES = (
    Similarity("adapted_cosine", CosineHead(), lambda features: features.adapted, 1.0),
    Similarity("centred_cosine", CentredCosineHead(), lambda features: features.adapted, 1.0),
    Similarity("pretrained_cosine", CosineHead(), _cube_roots, 2.0),
)


class OutlierScore:
    """The outlier score of queries and the threshold above which they belong to no class, fitted to a support set.

    Parameters
    ----------
    threshold : float
    units : dict of str to (float, float), optional
        m_j and s_j / w_j of each term, by its name: "head", and any of ``similarities``. By default the score is the
        head's term alone.
    support : Features
        Support examples, with which queries are compared.
    labels : int64 Tensor of shape (n,)
    similarities : sequence of Similarity
        The terms that there are beside the head's.

    Raises
    ------
    ValueError
        A unit or the threshold is not finite, a unit is not positive, or there is no such term.
    """

    def __init__(
        self,
        threshold: float,
        units: Units | None,
        support: Features,
        labels: Tensor,
        similarities: Sequence[Similarity] = SIMILARITIES,
    ) -> None:
        if not math.isfinite(threshold):
            raise ValueError(f"the threshold of the outlier score must be finite, got {threshold!r}")
        self.threshold, self.units = float(threshold), units
        self.left_out: LeftOutScores | None = None  # of the support set, where this was fitted to one
        self._terms: list[tuple[Similarity, Any]] = []
        if units is not None:
            known = {term.name: term for term in similarities}
            if missing := units.keys() - known.keys() - {HEAD}:
                raise ValueError(f"the outlier score has terms that this version lacks, {sorted(missing)}: upgrade")
            if HEAD not in units or not all(math.isfinite(m) and 0 < s < math.inf for m, s in units.values()):
                raise ValueError(f"the outlier score cannot have the units {units}")
            terms = [known[name] for name in units if name != HEAD]
            with torch.no_grad():
                self._terms = [(term, term.head.fit(term.of(support), labels)) for term in terms]

    @torch.no_grad()
    def __call__(self, logits: Tensor, features: Features) -> Tensor:
        """Score (m,) of queries by the head's logits (m, k) and their features; larger is farther from all classes."""
        if self.units is None:
            return self.head_score(logits)
        device = logits.device
        terms = {
            term.name: term.limited(term.head.logits(state, term.of(features).to(device)))
            for term, state in self._terms
        }
        return standardised_sum({HEAD: logits, **terms}, self.units)

    def export(self) -> nn.Module:
        """Return the score as a module, logits (m, k) and features -> (m,), in float32, for ONNX and torch.export."""
        return _ExportedScore(self.threshold, self.units, self._terms)

    @staticmethod
    def head_score(logits: Tensor) -> Tensor:
        """Score (m,) by one term alone: minus the largest logit, a_j(x), float64."""
        return -logits.double().amax(dim=1)

    @classmethod
    def fit(
        cls,
        left_out: Mapping[str, Tensor],
        support: Features,
        labels: Tensor,
        false_rejection_rate: float,
        groups: Tensor | None = None,
        similarities: Sequence[Similarity] = SIMILARITIES,
        negatives: Mapping[str, Tensor] | None = None,
    ) -> OutlierScore:
        """Fit units and threshold to left-out examples.

        Parameters
        ----------
        left_out : mapping of str to Tensor of shape (n', k)
            Logits of left-out examples by each term of the score, by its name.
        support : Features
        labels : int64 Tensor of shape (n,)
        false_rejection_rate : float
        groups : int64 Tensor of shape (n',), optional
            Left-out examples of equal number count as one.
        similarities : sequence of Similarity
            The terms beside the head's.
        negatives : mapping of str to Tensor of shape (m, k), optional
            Logits of left-out examples of no class by each term.
        """
        if len(left_out) == 1:
            found = LeftOutScores(cls.head_score(left_out[HEAD]), groups)
            fitted = cls(found.threshold(false_rejection_rate), None, support, labels)
            fitted.left_out = found
            return fitted
        one_each = left_out[HEAD].new_ones(len(left_out[HEAD]), dtype=torch.float64)
        weights = one_each if groups is None else group_weights(groups)
        units, n = score_units(left_out, similarities, weights), float(weights.sum())

        def score(logits: Mapping[str, Tensor]) -> Tensor:
            limited = {term.name: term.limited(logits[term.name]) for term in similarities}
            return standardised_sum({HEAD: logits[HEAD], **limited}, units)

        # The units come from the left-out examples themselves: their squared deviations from the mean are
        # (1 - 1 / n) s_j^2 on average, those of queries (1 + 1 / n) s_j^2.
        scores = score(left_out) * math.sqrt((n + 1) / (n - 1))
        found = LeftOutScores(scores, groups, None if negatives is None else score(negatives))
        fitted = cls(found.threshold(false_rejection_rate), units, support, labels, similarities)
        fitted.left_out = found
        return fitted

    def with_threshold(self, threshold: float) -> OutlierScore:
        """The same score with another threshold."""
        other = copy.copy(self)
        other.threshold = threshold
        return other


class LeftOutScores(NamedTuple):
    """Scores of examples that were left out, from which the threshold follows.

    Parameters
    ----------
    scores : float64 Tensor of shape (n,)
        Of examples of known classes.
    groups : int64 Tensor of shape (n,), optional
        Scores of equal number count as one.
    negatives : float64 Tensor of shape (m,), optional
        Of examples of no class.
    """

    scores: Tensor
    groups: Tensor | None = None
    negatives: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """Weight of each score, (n,): those of a group sum to 1."""
        return torch.ones_like(self.scores) if self.groups is None else group_weights(self.groups)

    def threshold(self, false_rejection_rate: float) -> float:
        """Threshold for a rate, with the warning of :func:`rejection_threshold`."""
        most = rejection_threshold(self.scores, false_rejection_rate, self.groups)
        if self.negatives is None:
            return most
        least = rejection_threshold(self.scores, min(2 * false_rejection_rate, 1.0), self.groups)
        return separating_threshold(self.scores, self.negatives, self.weights, least, most)

    def rate_interval(self, threshold: float) -> tuple[float, float]:
        """Interval in which the share of queries above a threshold lies with probability 0.9.

        If n + 1 scores are exchangeable, the share above the j-th smallest of n is Beta(n + 1 - j, j) distributed,
        whatever the distribution of scores (Wilks, "Determination of sample sizes for setting tolerance limits", 1941).
        A threshold between two scores has a rank between theirs.
        """
        order, weights = self.scores.argsort(), self.weights
        ranks, n = weights[order].cumsum(0).numpy(), float(weights.sum())
        j = float(np.interp(threshold, self.scores[order].numpy(), ranks, left=0.0))
        if j == 0:  # below all of them
            return 1 - 0.1 ** (1 / (n + 1)), 1.0
        low, high = beta.ppf([0.05, 0.95], n + 1 - j, j)
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """Standard deviation of the scores of known classes; 1 where they are all equal."""
        weights = self.weights / self.weights.sum()
        spread = float((weights @ (self.scores - weights @ self.scores).square()).sqrt())
        return spread if spread > 0 else 1.0


class _ExportedScore(nn.Module):
    """:class:`OutlierScore` without checks, in float32."""

    def __init__(self, threshold: float, units: Units | None, terms: Sequence[tuple[Similarity, Any]]) -> None:
        super().__init__()
        self.threshold, self.units = threshold, units
        self.terms = [term for term, _ in terms]
        with torch.no_grad():
            self.heads = nn.ModuleList(term.head.export(state) for term, state in terms)

    def forward(self, logits: Tensor, features: Features) -> Tensor:
        if self.units is None:
            return -logits.amax(dim=1)
        terms = {
            term.name: term.limited(head(term.of(features))) for head, term in zip(self.heads, self.terms, strict=True)
        }
        terms[HEAD] = logits
        return torch.stack([(-terms[name].amax(dim=1) - m) / s for name, (m, s) in self.units.items()]).sum(0)


def standardised_sum(logits: Mapping[str, Tensor], units: Units) -> Tensor:
    """Sum (m,) of the standardised terms by the logits (m, k) of each."""
    parts = [(OutlierScore.head_score(logits[name]) - mean) / unit for name, (mean, unit) in units.items()]
    return torch.stack(parts).sum(dim=0)


def score_units(left_out: Mapping[str, Tensor], similarities: Sequence[Similarity], weights: Tensor) -> Units:
    """m_j and s_j / w_j of every term, from its logits (n, k) of n >= 2 left-out examples with ``weights`` (n,).

    s_j is 1 if all scores are equal but for rounding, as cosines of copies are. The mean is that of scores as they
    count, the deviation that of all: where nearly all are at the limit, the others say nothing of how scores vary.
    """
    units, terms, n = Units(), {term.name: term for term in similarities}, float(weights.sum())
    for name, logits in left_out.items():
        limited, factor = (logits, 1.0) if name == HEAD else (terms[name].limited(logits), terms[name].weight)
        score = OutlierScore.head_score(logits)
        mean = float(weights @ score) / n
        std = math.sqrt(float(weights @ (score - mean).square()) / (n - 1))
        unit = std if std > 1e-6 * abs(mean) else 1.0
        units[name] = float(weights @ OutlierScore.head_score(limited)) / n, unit / factor
    return units


def rejection_threshold(scores: Tensor, false_rejection_rate: float, groups: Tensor | None = None) -> float:
    """Score that a query of a known class exceeds with the promised probability.

    If n + 1 scores are exchangeable, the last exceeds the j-th smallest of the others with probability 1 - j / (n + 1),
    whatever their distribution. The threshold is the score of rank j = (n + 1) (1 - rate), interpolated if that is not
    whole. With groups, the groups are exchangeable: n is their number, the weights of the scores of a group sum to 1,
    and the rank of a score is the sum of the weights up to it.

    Parameters
    ----------
    scores : Tensor of shape (n',)
        Scores of examples of known classes, each by a classifier that has not seen the example.
    false_rejection_rate : float
        Between 0 and 1.
    groups : int64 Tensor of shape (n',), optional
        Scores of equal number count as one. By default each is a group.

    Returns
    -------
    float

    Warns
    -----
    UserWarning
        The rate is below 1 / (n + 1), the smallest that n groups can guarantee. The threshold is the largest score.
    """
    n, unit = (len(scores), "examples") if groups is None else (len(groups.unique()), "groups of examples")
    finest = 1 / (n + 1)
    if false_rejection_rate < finest * (1 - 1e-9):
        warn_caller(
            f"{n} left-out {unit} cannot guarantee false_rejection_rate={false_rejection_rate:g}: about {finest:.2g} "
            f"of the queries of known classes will be rejected. Add examples, or set {finest:.2g} or more"
        )
    if groups is None:
        return float(np.quantile(scores.numpy(), 1 - false_rejection_rate, method="weibull"))
    order = scores.argsort()
    ranks = group_weights(groups)[order].cumsum(0)
    return float(np.interp((n + 1) * (1 - false_rejection_rate), ranks.numpy(), scores[order].numpy()))


def separating_threshold(scores: Tensor, negatives: Tensor, weights: Tensor, least: float, most: float) -> float:
    """Threshold from ``least`` to ``most`` that best separates examples of classes from those of none.

    It minimises the share of the scores (n,) with ``weights`` (n,) above it, plus that of the scores of examples of no
    class (m,) up to it. It lies in the middle between two scores, and is the highest such.
    """
    both = torch.cat([scores, negatives])
    edges = torch.cat([both[(both > least) & (both < most)], both.new_tensor([least, most])]).sort().values
    middles = (edges[1:] + edges[:-1]) / 2
    rejected = (scores > middles[:, None]).to(weights) @ weights / weights.sum()
    losses = rejected + (negatives <= middles[:, None]).double().mean(dim=1)
    return float(middles[losses <= losses.min() + 1e-9][-1])


def output_labels(classes: NDArray[Any], unknown_label: Any) -> NDArray[Any]:
    """Every label that can be predicted: the classes (k,), and after them the unknown label if there is one.

    The type is that of ``classes``, wider where the unknown label needs that. ValueError if the unknown label is a
    class, or of another type than the classes.
    """
    if unknown_label is None:
        return classes
    kind = classes.dtype.kind
    if kind == "b":
        raise ValueError("True and False leave no value for unknown_label: fit to integers or strings instead")
    wanted, name = _WANTED.get(kind, (str, "a string"))
    fits = isinstance(unknown_label, wanted) and not isinstance(unknown_label, bool)
    if not fits or unknown_label != unknown_label:  # NaN is not itself
        raise ValueError(
            f"unknown_label={unknown_label!r} is not of the type of the labels, such as {classes.tolist()[0]!r}: "
            f"give {name}"
        )
    if unknown_label in classes.tolist():
        raise ValueError(f"unknown_label={unknown_label!r} is the label of a class: choose another")
    dtype = np.promote_types(classes.dtype, np.min_scalar_type(unknown_label))
    if kind in "iu" and dtype.kind not in "iu":
        raise ValueError(f"no integer type holds unknown_label={unknown_label!r} and labels of type {classes.dtype}")
    labels = np.empty(len(classes) + 1, dtype)
    labels[:-1], labels[-1] = classes, unknown_label
    return labels
