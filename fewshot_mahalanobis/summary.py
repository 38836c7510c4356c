"""A fitted support set at a glance: images a class, leave-one-out accuracy, confusions, and images to look at again.

Every support image is left out in turn and classified by the others, exactly (``Head.leave_one_out_logits``). The
network stays adapted to all of them. Suspect images are

- **wrong labels**: the others give another class at least half of the probability;
- **near-duplicates**: the features of two images differ by less than a fraction of the usual distance to the nearest
  other image, so that leaving one out tests nothing;
- **outliers**: far from every class, compared with the rest of the support set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_mahalanobis.networks.adapted_task import AdaptedTask
from fewshot_mahalanobis.rejection import outlier_score
from fewshot_mahalanobis.temperature import fit_temperature

#: Two images are near-duplicates if their features are closer than this share of the median distance to the nearest
#: other image.
DUPLICATE_SHARE = 0.3
#: An outlier's score lies this many robust standard deviations above the median of all scores.
OUTLIER_DEVIATIONS = 4.0
#: A class of so many times the images of another makes it worth a word.
MAX_IMBALANCE = 5


@dataclass(frozen=True)
class Confusion:
    """Support images of one class that the others put into another."""

    label: Any
    predicted: Any
    images: int


@dataclass(frozen=True)
class Suspect:
    """A support image to look at again.

    Attributes
    ----------
    index : int
        Its place in the support set: that of ``fit``, then those of every ``partial_fit``.
    label : label
    kind : {"wrong label", "near-duplicate", "outlier"}
    predicted : label, optional
        Of a wrong label: the class that the others give it.
    probability : float, optional
        Of a wrong label: that class's probability.
    twin : int, optional
        Of a near-duplicate: the place of the other image.
    """

    index: int
    label: Any
    kind: str
    predicted: Any = None
    probability: float | None = None
    twin: int | None = None


@dataclass(frozen=True)
class SupportSummary:
    """What the support set of a fitted classifier says about itself; ``print`` it to read it.

    Attributes
    ----------
    counts : dict of label to int
        Support images of each class.
    right, counted : int
        Support images classified correctly by the others, and images that were left out: those that are not alone in
        their class.
    confusions : list of Confusion
        Most frequent first.
    suspects : list of Suspect
        Wrong labels first, the most certain ones ahead; then near-duplicates, then outliers.
    """

    counts: dict[Any, int]
    right: int
    counted: int
    confusions: list[Confusion]
    suspects: list[Suspect]

    @property
    def accuracy(self) -> float:
        """Leave-one-out accuracy, from 0 to 1; NaN if no class has two images."""
        return self.right / self.counted if self.counted else float("nan")

    def __str__(self) -> str:
        return self.describe()

    def describe(self, names: Sequence[Any] | None = None) -> str:
        """The summary as text.

        Parameters
        ----------
        names : sequence of n, optional
            What to call the support images, such as their paths; by default "image 0", "image 1"...
        """
        lines = [f"{sum(self.counts.values())} support images of {len(self.counts)} classes"]
        lines += [f"  {label}: {number}" for label, number in self.counts.items()]
        fewest, most = min(self.counts, key=self.counts.__getitem__), max(self.counts, key=self.counts.__getitem__)
        if self.counts[most] >= MAX_IMBALANCE * self.counts[fewest]:
            lines.append(f"Very different sizes: {fewest!r} has {self.counts[fewest]}, {most!r} {self.counts[most]}.")
        if self.counted:
            lines.append(f"Leave-one-out accuracy: {self.right} of {self.counted} ({self.accuracy:.0%})")
        else:
            lines.append("Leave-one-out accuracy: not measured, as every class has one image")
        if self.confusions:
            lines.append("Most confused:")
            lines += [f"  {c.label} taken for {c.predicted}: {c.images}" for c in self.confusions[:5]]
        if self.suspects:
            lines.append("Look at these again:")
            lines += [f"  {_sentence(suspect, names)}" for suspect in self.suspects]
        return "\n".join(lines)


def summarise(task: AdaptedTask, classes: NDArray[Any]) -> SupportSummary:
    """Summary of a fitted task, by exact leave-one-out.

    Parameters
    ----------
    task : AdaptedTask
    classes : ndarray of shape (k,)
        The labels.
    """
    labels = task.support_labels.cpu()
    names = classes.tolist()
    with torch.no_grad():
        logits = task.head.leave_one_out_logits(task.head_features(task.support_features), task.support_labels)
    logits = logits.double().cpu()
    counted = labels.bincount(minlength=len(names))[labels] > 1
    predicted = logits.argmax(dim=1)
    wrong = counted & (predicted != labels)
    pairs = Counter(zip(labels[wrong].tolist(), predicted[wrong].tolist(), strict=True))
    return SupportSummary(
        dict(zip(names, labels.bincount(minlength=len(names)).tolist(), strict=True)),
        int((counted & ~wrong).sum()),
        int(counted.sum()),
        [Confusion(names[true], names[other], number) for (true, other), number in pairs.most_common()],
        [
            *_wrong_labels(logits, labels, wrong, names),
            *_near_duplicates(task.support_features.cpu(), labels, names),
            *_outliers(logits, labels, counted, names),
        ],
    )


def _wrong_labels(logits: Tensor, labels: Tensor, wrong: Tensor, names: list[Any]) -> list[Suspect]:
    if not wrong.any():
        return []
    probabilities, predicted = torch.softmax(logits / fit_temperature(logits, labels), dim=1).max(dim=1)
    found = [
        Suspect(i, names[labels[i]], "wrong label", names[predicted[i]], float(probabilities[i]))
        for i in wrong.nonzero()[:, 0].tolist()
        if probabilities[i] >= 0.5
    ]
    return sorted(found, key=lambda suspect: -(suspect.probability or 0))


def _near_duplicates(features: Tensor, labels: Tensor, names: list[Any]) -> list[Suspect]:
    if len(features) < 3:
        return []
    distances = torch.cdist(features.double(), features.double()).fill_diagonal_(torch.inf)
    nearest, twin = distances.min(dim=1)
    close = nearest < DUPLICATE_SHARE * nearest.median()
    return [
        Suspect(i, names[labels[i]], "near-duplicate", twin=int(twin[i]))
        for i in close.nonzero()[:, 0].tolist()
        if not (twin[twin[i]] == i and twin[i] < i)  # one word for a pair
    ]


def _outliers(logits: Tensor, labels: Tensor, counted: Tensor, names: list[Any]) -> list[Suspect]:
    scores = outlier_score(logits)
    if counted.sum() < 3:
        return []
    median = scores[counted].median()
    deviation = 1.4826 * (scores[counted] - median).abs().median()  # of a normal distribution, its standard deviation
    far = counted & (scores > median + OUTLIER_DEVIATIONS * deviation)
    order = sorted(far.nonzero()[:, 0].tolist(), key=lambda i: -float(scores[i]))
    return [Suspect(i, names[labels[i]], "outlier") for i in order]


def _sentence(suspect: Suspect, names: Sequence[Any] | None) -> str:
    def name(index: int) -> str:
        return f"image {index}" if names is None else str(names[index])

    start = f"{name(suspect.index)} ({suspect.label})"
    if suspect.kind == "wrong label":
        return f"{start}: the others say {suspect.predicted} ({suspect.probability:.0%}); is its label right?"
    if suspect.kind == "near-duplicate":
        return f"{start}: almost the same picture as {name(suspect.twin or 0)}"
    return f"{start}: unlike every class"
