"""How many images are enough: the accuracy with fewer images a class, and what more of them would bring.

With m images of each class, drawn at random from the support set, a head is fitted anew and classifies those that are
left out, but no copy of a drawn one. The mean over draws is the accuracy with m images a class. With all but one it is
that of leave-one-out (``Head.leave_one_out_logits``), exactly. The settings of the head stay those chosen on the
whole support set, and the network stays adapted to all of it. On validation classes neither biases the estimate
upwards: 65.4, 73.9 and 77.1 % with 1, 2 and 3 of 5 images, where tasks of 1, 2 and 3 images have 65.0, 73.8 and 76.4 %.

More images are extrapolated by a line: the accuracy against the mean of 1 / sqrt(m) over the classes, by least squares
through what was measured and one more point, all correct with endlessly many images. The 95 % interval is Wilson's, for
as many trials as images were left out (Wilson, "Probable Inference, the Law of Succession, and Statistical Inference",
JASA 1927). ``benchmarks/enough.py`` measures both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, linear_regression, median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewshot_mahalanobis.support_set.fitted_head import FittedHead

#: Numbers m for which the accuracy is measured, at most, and draws for each of them; of a large support set only as
#: many as have so many images together.
_MAX_NUMBERS, _MAX_DRAWS, _MAX_IMAGES = 6, 8, 2000
#: Standard deviations in half of a 95 % interval.
_QUANTILE = 1.96
#: Images that are added to those of each class to find the one that needs more, and how many of these are wrong; from
#: validation classes.
_PRIOR_IMAGES, _PRIOR_WRONG = 20, 4
#: A class is sure to need images most if it needs them by this factor more than the next one.
_SURE = 2.0
#: More images of a class that are recommended at a time, at most.
_MAX_MORE = 10
#: Gain below which more images bring little, and the width of the interval up to which that can be said.
_LITTLE, _NARROW = 0.01, 0.1


class Expected(NamedTuple):
    """A share of images that is expected to be classified correctly.

    Parameters
    ----------
    accuracy : float
        From 0 to 1.
    low, high : float
        95 % interval.
    """

    accuracy: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.accuracy:.0%} ({self.low:.0%} to {self.high:.0%})"


class MoreImages(NamedTuple):
    """The class of which more images would help most.

    Parameters
    ----------
    label : label
    images : int
        How many more of it, until another class needs them as much.
    sure : bool
        Whether the support set is large enough to say so: False where another class may need them more.
    """

    label: Any
    images: int
    sure: bool


@dataclass(frozen=True)
class LearningCurve:
    """Accuracy against the number of support images a class; made by ``classifier.summary()``.

    Images that were left out together, such as copies, count as one.

    Attributes
    ----------
    counts : dict of label to int
        Support images of each class.
    measured : dict of int to float
        Accuracy on images that were left out, by the number m of images a class that the head is fitted to; of
        smaller classes all but one. The last is that of leave-one-out, ``SupportSummary.accuracy``.
    measured_by_class : dict of label to dict of int to float
        The same for each class that has two examples.
    noun : str
        What the text calls an example: "image" where they are images.
    """

    counts: dict[Any, int]
    measured: dict[int, float]
    measured_by_class: dict[Any, dict[int, float]]
    noun: str = "example"

    @property
    def usual_count(self) -> int:
        """Images that a class usually has: the lower median of ``counts``."""
        return median_low(self.counts.values())

    @property
    def left_out(self) -> int:
        """Images that were left out, those of classes that have another one."""
        return sum(count for count in self.counts.values() if count > 1)

    def expected(self, more: int = 0) -> Expected:
        """Accuracy on new images with ``more`` support images of every class than there are.

        Parameters
        ----------
        more : int, default=0
            At least 0.

        Raises
        ------
        ValueError
            ``more`` is negative.
        """
        if more < 0:
            raise ValueError(f"more must be at least 0, got {more!r}")
        counts = self.counts.values()
        x = [*(_decay(min(max(count - 1, 1), m) for count in counts) for m in self.measured), 0.0]
        y = [*self.measured.values(), 1.0]
        slope = min(linear_regression(x, y).slope, 0.0)
        accuracy = min(fmean(y) + slope * (_decay(count + more for count in counts) - fmean(x)), 1.0)
        return Expected(accuracy, *_wilson(accuracy, self.left_out))

    @property
    def most_useful(self) -> MoreImages:
        """The class of which more images would raise the accuracy over all classes most.

        Its share of errors falls as 1 / sqrt(n) of its n images, so one more takes off about a share of 1 / (2 n).
        """
        errors = {label: self._errors(label) for label in self.counts}
        needs = {label: errors[label] / count for label, count in self.counts.items()}
        first, second = sorted(needs, key=lambda label: -needs[label])[:2]
        more = math.ceil(errors[first] / needs[second]) - self.counts[first]
        return MoreImages(first, min(max(more, 1), _MAX_MORE), needs[first] >= _SURE * needs[second])

    def _errors(self, label: Any) -> float:
        """Share of left-out images of a class that are classified wrongly, and of the prior's."""
        images, share = 0, 0.0
        if label in self.measured_by_class:
            images, share = self.counts[label], [*self.measured_by_class[label].values()][-1]
        return (images * (1 - share) + _PRIOR_WRONG) / (images + _PRIOR_IMAGES)

    @property
    def advice(self) -> str:
        """One sentence: whether more images would help, and of which class."""
        now, noun = self.expected(), self.noun
        if self.expected(self.usual_count).accuracy - now.accuracy < _LITTLE:
            if now.high - now.low <= _NARROW:
                return f"More {noun}s would bring little: {self.usual_count} more of each class, less than 1 point."
            return f"More {noun}s may bring little, but {self.left_out} are too few to tell: the accuracy is {now}."
        label, number, sure = self.most_useful
        if not sure:
            return f"More {noun}s may help, of {label} first, but which class needs them most is uncertain."
        return f"About {number} more {noun}{'s' * (number > 1)} of {label} should help most."

    def __str__(self) -> str:
        fewer = ", ".join(f"{m}: {accuracy:.0%}" for m, accuracy in self.measured.items())
        more = f"with {self.usual_count} more of each class {self.expected(self.usual_count)}"
        return (
            f"With fewer {self.noun}s a class: {fewer}\nExpected on new {self.noun}s: {self.expected()}; {more}\n"
            f"{self.advice}"
        )


def _decay(counts: Iterable[int]) -> float:
    """Mean of 1 / sqrt(m) over the classes."""
    return fmean(1 / math.sqrt(count) for count in counts)


def _wilson(share: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share in a number of trials."""
    ratio = _QUANTILE**2 / trials
    centre, half = share + ratio / 2, math.sqrt(ratio * share * (1 - share) + ratio**2 / 4)
    return (centre - half) / (1 + ratio), (centre + half) / (1 + ratio)


def learning_curve(fitted: FittedHead, left_out_logits: Tensor, noun: str = "example") -> LearningCurve | None:
    """Measure the accuracy with fewer images a class.

    Parameters
    ----------
    fitted : FittedHead
    left_out_logits : Tensor of shape (n, k)
        ``Head.leave_one_out_logits`` of its support set.
    noun : str
        What the text calls an example.

    Returns
    -------
    LearningCurve or None
        None if no class has two examples, copies not counted, or there is one class.
    """
    sets = _Sets(fitted)
    if sets.counts.max() == 1 or len(sets.counts) == 1:
        return None
    numbers = _numbers(int(sets.counts.max()) - 1)
    sizes = torch.stack([sets.counts.sub(1).clamp(min=1, max=m) for m in numbers])  # of each class (numbers, k)
    paired = (sets.counts > 1)[sets.labels]
    generator = torch.Generator("cpu").manual_seed(0)
    tallies = [_tally_of_rest(fitted, sets, row, generator) for row in sizes[:-1]]
    tallies.append(_tally(left_out_logits[paired.to(left_out_logits.device)], sets.labels[paired], len(sets.counts)))
    right, tests = torch.stack(tallies, dim=1)  # (numbers, k)
    shares, tested = right / tests.clamp(min=1), tests > 0
    images = tested * tests[-1]  # in leave-one-out
    names = fitted.classes.tolist()
    return LearningCurve(
        dict(zip(names, sets.counts.tolist(), strict=True)),
        dict(zip(numbers, ((shares * images).sum(dim=1) / images.sum(dim=1)).tolist(), strict=True)),
        {
            name: dict(zip(sizes[tested[:, k], k].tolist(), shares[tested[:, k], k].tolist(), strict=True))
            for k, name in enumerate(names)
            if sets.counts[k] > 1
        },
        noun,
    )


class _Sets:
    """The images of each class that are left out together: sets, each of one class and one group.

    Attributes
    ----------
    labels, groups : int64 Tensors of shape (n,)
        On the CPU.
    counts : Tensor of shape (k,)
        Sets of each class.
    """

    def __init__(self, fitted: FittedHead) -> None:
        self.labels = fitted.labels.cpu()
        self.groups = torch.arange(len(self.labels), device="cpu") if fitted.groups is None else fitted.groups.cpu()
        (self._class_of, _), self._set_of = torch.stack([self.labels, self.groups]).unique(dim=1, return_inverse=True)
        self.counts = self._class_of.bincount()

    def draw(self, sizes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of random ``sizes`` (k,) sets of each class, and of all images that are in no group of these."""
        order = torch.randperm(len(self._class_of), device="cpu", generator=generator)
        order = order[self._class_of[order].argsort(stable=True)]  # random within each class
        classes, first = self._class_of[order], self.counts.cumsum(dim=0) - self.counts
        chosen = torch.empty_like(order, dtype=torch.bool)
        chosen[order] = torch.arange(len(order), device="cpu") - first[classes] < sizes[classes]
        drawn = chosen[self._set_of]
        rest = ~torch.isin(self.groups, self.groups[drawn])
        return drawn.nonzero()[:, 0], rest.nonzero()[:, 0]


def _numbers(most: int) -> list[int]:
    """Images a class to fit a head to: 1 to ``most``, the smaller ones closer together if they are many."""
    if most <= _MAX_NUMBERS:
        return [*range(1, most + 1)]
    return sorted({round(most ** (i / (_MAX_NUMBERS - 1))) for i in range(_MAX_NUMBERS)})


@torch.no_grad()
def _tally_of_rest(fitted: FittedHead, sets: _Sets, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """Images (2, k) of each class that heads fitted to random ``sizes`` (k,) sets of each classify right, and all."""
    features, total = fitted.support.adapted, torch.zeros(2, len(sizes), dtype=torch.float64, device="cpu")
    for _ in range(max(1, min(_MAX_DRAWS, _MAX_IMAGES // len(features)))):
        drawn, rest = sets.draw(sizes, generator)
        if len(rest):
            groups = None if fitted.groups is None else fitted.groups[drawn]
            state = fitted.settled.fit_groups(features[drawn], fitted.labels[drawn], groups)
            total += _tally(fitted.settled.logits(state, features[rest]), sets.labels[rest], len(sizes))
    return total


def _tally(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Images (2, k) of each class that are classified right, and all."""
    right = labels[logits.argmax(dim=1).cpu() == labels]
    return torch.stack([right.bincount(minlength=classes), labels.bincount(minlength=classes)]).double()
