"""A fitted support set at a glance: its classes, leave-one-out accuracy, confusions, and examples to look at again.

Every support example is left out in turn, with its copies, and compared with the others, exactly
(``Head.leave_one_out_logits``). The network stays adapted to all of them. Suspects are

- **wrong labels**: another class is at least four times as probable as their own;
- **near-duplicates**: two examples whose features are equal, or much closer than nearest neighbours usually are;
- **outliers**: unlike the other examples of their class, by the cosine of their features with the mean of the others.

:func:`support_influence` says how much a prediction depends on each example.

The limits were chosen on 5-way 10-shot tasks of ten image sets: ``benchmarks/suspects.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewshot_mahalanobis.gaussians.support import left_out_weights
from fewshot_mahalanobis.gaussians.temperature import fit_temperature
from fewshot_mahalanobis.heads import CosineHead
from fewshot_mahalanobis.support_set.copies import groups_of_several
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.learning_curve import LearningCurve, learning_curve

#: A label is suspect if another class is this many times as probable. On validation classes 4 gives half the
#: false suspicions of 2 (2.4 against 4.3 of 50 images, `head="auto"`) and finds as many wrong labels (86 and 87 %).
MIN_ODDS = 4.0
#: Near-duplicates are closer than this share of the median distance to the second nearest neighbour. On validation
#: classes it finds 99 % of JPEG copies (0.33: 93 %).
DUPLICATE_SHARE = 0.4
#: The cosine distance of an outlier lies this many robust standard deviations above the median, in logarithms. On
#: validation classes one clean set in 30 has a false outlier (2.5: one in 5).
OUTLIER_DEVIATIONS = 3.0
#: Classes of more different sizes than this are mentioned.
MAX_IMBALANCE = 5
#: Most lines of a kind in the text.
MAX_LINES = 10
#: Rows of distances at a time.
_ROWS = 256


@dataclass(frozen=True)
class Confusion:
    """How many support examples of class ``label`` the others put into class ``predicted``."""

    label: Any
    predicted: Any
    images: int


@dataclass(frozen=True)
class Suspect:
    """A support example to look at again.

    Attributes
    ----------
    index : int
        Its place in the support set: that of ``fit``, then those of every ``partial_fit``.
    label : label
    kind : {"wrong label", "near-duplicate", "outlier"}
    predicted : label, optional
        The class that the others make most probable; for wrong labels.
    odds : float, optional
        How many times as probable that class is as the given one; for wrong labels.
    twin : int, optional
        The place of the other example; for near-duplicates.
    """

    index: int
    label: Any
    kind: str
    predicted: Any = None
    odds: float | None = None
    twin: int | None = None


@dataclass(frozen=True)
class SupportSummary:
    """What the support set of a fitted classifier says about itself; ``print`` it to read it.

    Attributes
    ----------
    counts : dict of label to int
        Support examples of each class.
    right, counted : int
        Support examples classified correctly by the others, and those that were left out: all that are not alone in
        their class, copies not counted. 0 of 0 where there is one class, as there is nothing to take an example for.
    confusions : list of Confusion
        Most frequent first.
    suspects : list of Suspect
        Wrong labels, then near-duplicates, then outliers, each most suspect first.
    groups : list of list of int
        The places of the examples of each group of two or more that was left out together: copies, or those of
        a common group given to ``fit``.
    curve : LearningCurve or None
        Accuracy with fewer examples a class, and what more would bring; None where the accuracy is not measured.
    noun : str
        What the text calls an example: "image" where they are images.
    priors : dict of label to float, optional
        Shares of the classes among the queries, if ``fit`` was given any or estimated them from unlabelled examples.
        Nothing else here depends on them.
    of_no_class : int
        Examples of no class, which nothing else here depends on.
    unlabelled, far : int
        Unlabelled examples that were learned from, and those among them that are so far from every class that they
        count for less than half. Nothing else here but ``priors`` depends on them.
    rejected : (float, float), optional
        Interval in which the share of queries of known classes that are rejected lies with probability 0.9.
    calibrated : int
        Examples that the threshold of rejection comes from, where they are not those of the support set.
    names : sequence of n, optional
        Paths of the support images, where they are known. Summaries that differ in them alone are equal.
    """

    counts: dict[Any, int]
    right: int
    counted: int
    confusions: list[Confusion]
    suspects: list[Suspect]
    groups: list[list[int]] = field(default_factory=list)
    curve: LearningCurve | None = None
    noun: str = "example"
    priors: dict[Any, float] | None = None
    of_no_class: int = 0
    unlabelled: int = 0
    far: int = 0
    rejected: tuple[float, float] | None = None
    calibrated: int = 0
    names: Sequence[str | None] | None = field(default=None, compare=False)

    @property
    def copies(self) -> int:
        """Support examples beyond the first of each group."""
        return sum(len(group) - 1 for group in self.groups)

    @property
    def accuracy(self) -> float:
        """Leave-one-out accuracy, from 0 to 1; NaN if no class has two examples, or there is one class."""
        return self.right / self.counted if self.counted else float("nan")

    def __str__(self) -> str:
        return self.describe()

    def describe(self, names: Sequence[Any] | None = None) -> str:
        """The summary as text.

        Parameters
        ----------
        names : sequence of n, optional
            What to call the support examples; by default the paths of images, or "image 0", "image 1"... without one.
        """
        names = self.names if names is None else names
        total = sum(self.counts.values())
        lines = [f"{total} support {self.noun}s of {len(self.counts)} class{'es' * (len(self.counts) > 1)}"]
        lines += [f"  {label}: {number}" for label, number in self.counts.items()]
        fewest, most = min(self.counts, key=self.counts.__getitem__), max(self.counts, key=self.counts.__getitem__)
        if self.counts[most] >= MAX_IMBALANCE * self.counts[fewest]:
            lines.append(f"Very different sizes: {fewest!r} has {self.counts[fewest]}, {most!r} {self.counts[most]}.")
        if self.of_no_class:
            lines.append(f"{self.of_no_class} {self.noun}s of no class, which teach what to reject")
        if self.rejected is not None:
            low, high = (f"{100 * share:.2g}" for share in self.rejected)
            source = f"{self.calibrated} further {self.noun}s" if self.calibrated else f"left-out {self.noun}s"
            lines.append(
                f"Of queries of known classes, {low} to {high} % will be rejected (with probability 0.9; the threshold "
                f"comes from {source})"
            )
        if self.unlabelled and len(self.counts) == 1:
            lines.append(f"{self.unlabelled} unlabelled {self.noun}s, which teach nothing beside one class alone")
        elif self.unlabelled:
            far = f"; {self.far} of them are far from every class and count for little" if self.far else ""
            lines.append(
                f"{self.unlabelled} unlabelled {self.noun}s, which labels of queries follow, and nothing below{far}"
            )
        if self.priors is not None:
            lines.append("Priors, which labels and probabilities of queries follow, and nothing below:")
            lines += [f"  {label}: {share:.3g}" for label, share in self.priors.items()]
        if self.copies:
            lines.append(
                f"Copies: {self.copies} of {total} {self.noun}s are copies of others or of one group with them; in "
                f"leave-one-out they count as {total - self.copies}"
            )
            lines += [f"  {self._listed(group, names)}" for group in self.groups[:MAX_LINES]]
            if len(self.groups) > MAX_LINES:
                lines.append(f"  and {len(self.groups) - MAX_LINES} more groups")
        if self.counted:
            lines.append(f"Leave-one-out accuracy: {self.right} of {self.counted} ({self.accuracy:.0%})")
        elif len(self.counts) == 1:
            lines.append("Leave-one-out accuracy: not measured, as there is one class and nothing to take it for")
        else:
            lines.append(
                f"Leave-one-out accuracy: not measured, as every class has one {self.noun}. A second {self.noun} of "
                "each would show it, and how much more of them would help"
            )
        if self.curve is not None:
            lines.append(str(self.curve))
        if self.confusions:
            lines.append("Most confused:")
            lines += [f"  {c.label} taken for {c.predicted}: {c.images}" for c in self.confusions[:MAX_LINES]]
        for kind in ("wrong label", "near-duplicate", "outlier"):
            found = [self._sentence(suspect, names) for suspect in self.suspects if suspect.kind == kind]
            if found:
                lines += [f"Possible {kind}s:", *(f"  {sentence}" for sentence in found[:MAX_LINES])]
            if len(found) > MAX_LINES:
                lines.append(f"  and {len(found) - MAX_LINES} more")
        return "\n".join(lines)

    def _name(self, index: int, names: Sequence[Any] | None) -> str:
        return f"{self.noun} {index}" if names is None or names[index] is None else str(names[index])

    def _listed(self, group: list[int], names: Sequence[Any] | None) -> str:
        more = f" and {len(group) - MAX_LINES} more" if len(group) > MAX_LINES else ""
        return ", ".join(self._name(index, names) for index in group[:MAX_LINES]) + more

    def _sentence(self, suspect: Suspect, names: Sequence[Any] | None) -> str:
        start = f"{self._name(suspect.index, names)} ({suspect.label})"
        if suspect.odds is not None:
            return f"{start}: {suspect.predicted} is {_times(suspect.odds)} as probable"
        if suspect.twin is not None:
            return f"{start}: almost the same as {self._name(suspect.twin, names)}"
        return f"{start}: unlike the other {self.noun}s of its class"


def summarise(fitted: FittedHead, noun: str = "example") -> SupportSummary:
    """Summarise a fitted support set by exact leave-one-out; ``noun`` is what the text calls an example."""
    labels, features = fitted.labels.cpu(), fitted.support.adapted
    names = fitted.classes.tolist()
    with torch.no_grad():
        logits = fitted.settled.leave_one_out_logits(features, fitted.labels, fitted.groups).double().cpu()
        cosines = CosineHead().leave_one_out_logits(features, fitted.labels, fitted.groups).double().cpu()
    counts = labels.bincount(minlength=len(names))
    weights = left_out_weights(fitted.labels, fitted.groups).cpu()
    counted = weights > 0
    predicted = logits.argmax(dim=1)
    wrong = counted & (predicted != labels)
    compared = counted & (len(names) > 1)
    pairs = Counter(zip(labels[wrong].tolist(), predicted[wrong].tolist(), strict=True))
    mislabelled = _wrong_labels(logits, labels, wrong, weights)
    known = set(mislabelled)
    return SupportSummary(
        dict(zip(names, counts.tolist(), strict=True)),
        int((compared & ~wrong).sum()),
        int(compared.sum()),
        [Confusion(names[true], names[other], number) for (true, other), number in pairs.most_common()],
        [
            *(Suspect(i, names[labels[i]], "wrong label", names[predicted[i]], o) for i, o in mislabelled.items()),
            *(Suspect(i, names[labels[i]], "near-duplicate", twin=j) for i, j in _near_duplicates(features.cpu())),
            *(Suspect(i, names[labels[i]], "outlier") for i in _outliers(cosines, labels, counted) if i not in known),
        ],
        groups_of_several(fitted.groups),
        learning_curve(fitted, logits, noun),
        noun,
        None if fitted.shares is None else dict(zip(names, fitted.shares.tolist(), strict=True)),
        0 if fitted.negatives is None else len(fitted.negatives.adapted),
        0 if fitted.pool is None else len(fitted.pool.features),
        0 if fitted.pool is None else int((fitted.pool.memberships.sum(dim=1) < 0.5).sum()),
        fitted.rate_interval,
        0 if fitted.calibration is None else len(fitted.calibration),
    )


def _wrong_labels(logits: Tensor, labels: Tensor, wrong: Tensor, weights: Tensor) -> dict[int, float]:
    """Examples with another class more probable than their own -> the odds, highest first."""
    if not wrong.any():
        return {}
    own = logits.gather(1, labels[:, None])[:, 0]
    odds = ((logits.amax(dim=1) - own) / fit_temperature(logits, labels, weights)).exp()
    order = odds.argsort(descending=True, stable=True).tolist()
    return {i: float(odds[i]) for i in order if wrong[i] and odds[i] >= MIN_ODDS}


def _near_duplicates(features: Tensor) -> list[tuple[int, int]]:
    """Pairs of examples with almost the same features, closest first."""
    if len(features) < 3:
        return []
    x = features.double()
    (nearest, second), (twins, _) = (part.T for part in _two_nearest(x))
    rounding = 1e-4 * x.norm(dim=1).median()  # copies in another batch may differ by that
    usual = second[second > rounding].median()  # NaN, which nothing is below, if each example is there three times
    close = ((nearest <= rounding) | (nearest < DUPLICATE_SHARE * usual)).nonzero()[:, 0].tolist()
    pairs = {
        (min(i, twin), max(i, twin)): float(nearest[i]) for i, twin in zip(close, twins[close].tolist(), strict=True)
    }
    return sorted(pairs, key=lambda pair: (pairs[pair], pair))


def _two_nearest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Distances (n, 2) of examples (n, d) to the nearest two others, and which these are."""
    found = []
    for start in range(0, len(x), _ROWS):
        distances = torch.cdist(x[start : start + _ROWS], x)
        distances.diagonal(start).fill_(torch.inf)
        found.append(distances.topk(2, largest=False))
    nearest, others = zip(*found, strict=True)
    return torch.cat(nearest), torch.cat(others)


def _outliers(cosines: Tensor, labels: Tensor, counted: Tensor) -> list[int]:
    """Examples unlike the others of their class, most unlike first."""
    if counted.sum() < 3:
        return []
    distance = (1 - cosines.gather(1, labels[:, None])[:, 0]).clamp(min=1e-12).log()
    median = distance[counted].median()
    deviation = 1.4826 * (distance[counted] - median).abs().median()  # the standard deviation, if they are normal
    far = counted & (distance > median + OUTLIER_DEVIATIONS * deviation)
    return sorted(far.nonzero()[:, 0].tolist(), key=lambda i: -float(distance[i]))


def _times(odds: float) -> str:
    return "over 1,000 times" if odds > 1000 else f"{odds:.0f} times"


@torch.no_grad()
def support_influence(fitted: FittedHead, query_features: Tensor) -> Tensor:
    """Influence of each support example on each prediction: log p(y | S) - log p(y | S without example i), in nats.

    y is the class predicted with the whole support set S, and p is equation 1 of Bateni et al., CVPR 2020. The head is
    fitted again without each example in turn, so the influence is exact for every head; the network stays adapted as it
    was. Copies of example i, and all others of its group, are left out with it, and have the same influence. A positive
    influence supports the prediction, a negative one opposes it. Removing an example with an influence of 0.69 halves a
    small probability.

    Parameters
    ----------
    fitted : FittedHead
        ``classifier.fitted_head_``.
    query_features : Tensor of shape (m, d)
        Adapted features, as ``classifier.transform`` gives them.

    Returns
    -------
    Tensor of shape (m, n)
        NaN where no example of its class stays: without it there is no such class.
    """
    features, labels = fitted.support.adapted, fitted.labels
    log_p = fitted.logits(query_features).double().log_softmax(1)
    predicted = log_p.argmax(1, keepdim=True)
    influence = log_p.new_full((len(query_features), len(labels)), torch.nan)
    groups = torch.arange(len(labels), device=labels.device) if fitted.groups is None else fitted.groups
    for group in groups.unique().tolist():
        rest = groups != group
        if len(labels[rest].unique()) < len(fitted.classes):
            continue
        kept = features[rest], labels[rest]
        rest_groups = None if fitted.groups is None else groups[rest]
        if fitted.pool is None:
            state = fitted.head.fit_groups(*kept, rest_groups)
        else:
            state = fitted.head.fit_pool(*kept, rest_groups, fitted.pool)
        logits = fitted.with_priors(fitted.head.logits(state, query_features.to(features.device)))
        group_influence = (log_p - logits.double().log_softmax(1)).gather(1, predicted)
        influence[:, ~rest] = group_influence.expand(-1, int((~rest).sum()))
    return influence
