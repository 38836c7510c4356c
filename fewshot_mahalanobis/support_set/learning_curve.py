"""How many images are enough: the accuracy with fewer images a class, and what more of them would bring.

With m images of each class, drawn at random from the support set, a head is fitted anew and classifies those that are
left out, but no copy of a drawn one. The mean over draws is the accuracy with m images a class. With all but one it is
that of leave-one-out (``Head.leave_one_out_logits``), exact as ever. The settings of the head stay those chosen on the
whole support set, and the network stays adapted to all of it. On validation classes neither flatters: 65.4, 73.9 and
77.1 % with 1, 2 and 3 of 5 images, where tasks of 1, 2 and 3 images have 65.0, 73.8 and 76.4 %.

More images are extrapolated. Of class k, the share that is classified correctly with m images a class is taken to be

    p_k(m) = 1 / (1 + exp(-eta_k(m))),    eta_k(m) = a_k - b / sqrt(m)

with a limit a_k for each class and one b. Their priors are normal, that of the a_k around a common mean which is itself
uncertain, so that a class of few images borrows from the others. Every image counts once, at however many m it is
tested. Intervals are those of the normal approximation at the mode (Laplace). The priors and the square root were
chosen on validation classes; ``benchmarks/enough.py`` measures what comes of them on others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low
from typing import Any, NamedTuple

import torch
from scipy.optimize import minimize
from torch import Tensor

from fewshot_mahalanobis.support_set.fitted_head import FittedHead

#: Priors (mean, standard deviation) of the common part of the a_k, of each a_k around it, and of b.
_LEVEL, _BETWEEN, _SLOPE = (2.5, 2.0), 0.7, (2.0, 1.0)
#: Numbers m for which the accuracy is measured, at most, and draws for each of them; of a large support set only as
#: many as have so many images together.
_MAX_NUMBERS, _MAX_DRAWS, _MAX_IMAGES = 6, 8, 2000
#: Standard deviations in half of a 95 % interval.
_QUANTILE = 1.96
#: Samples of a_k and b by which classes are compared, and the share of them in which a class must come first.
_SAMPLES, _SURE = 1000, 0.8
#: More images of a class that are recommended at a time, at most.
_MAX_MORE = 10
#: Gain below which more images bring little.
_LITTLE = 0.01


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
        Accuracy on images that were left out, by the number m of images a class that stay; of smaller classes all but
        one. The last is that of leave-one-out, ``SupportSummary.accuracy``.
    measured_by_class : dict of label to dict of int to float
        The same for each class that has two examples.
    noun : str
        What the text calls an example: "image" where they are images.
    """

    counts: dict[Any, int]
    measured: dict[int, float]
    measured_by_class: dict[Any, dict[int, float]]
    _mode: Tensor = field(compare=False, repr=False)  # a_1 to a_k, b
    _covariance: Tensor = field(compare=False, repr=False)  # (k + 1, k + 1), of their normal approximation
    noun: str = "example"

    @property
    def usual_count(self) -> int:
        """Images that a class usually has: the lower median of ``counts``."""
        return median_low(self.counts.values())

    def expected(self, more: int = 0, label: Any = None) -> Expected:
        """Accuracy on new images with ``more`` support images of every class than there are.

        Parameters
        ----------
        more : int, default=0
            At least 0.
        label : label, optional
            Share of the images of this class that is classified correctly; by default the mean over all classes.

        Raises
        ------
        ValueError
            ``more`` is negative, or ``label`` is no class.
        """
        if more < 0:
            raise ValueError(f"more must be at least 0, got {more!r}")
        if label is not None and label not in self.counts:
            raise ValueError(f"{label!r} is no class: there are {', '.join(map(repr, self.counts))}")
        chosen = slice(None) if label is None else slice(place := [*self.counts].index(label), place + 1)
        decay = (self._shots + more).rsqrt()[chosen]
        share = torch.sigmoid(self._mode[:-1][chosen] - self._mode[-1] * decay)
        accuracy = share.mean()
        slope = share * (1 - share) / len(share) / (accuracy * (1 - accuracy))
        gradient = torch.zeros_like(self._mode)  # of the accuracy's log-odds
        gradient[:-1][chosen] = slope
        gradient[-1] = -(slope * decay).sum()
        half_width = _QUANTILE * (gradient @ self._covariance @ gradient).sqrt()
        low, high = (torch.sigmoid(torch.logit(accuracy) + side * half_width) for side in (-1, 1))
        return Expected(float(accuracy), float(low), float(high))

    @cached_property
    def most_useful(self) -> MoreImages:
        """The class of which more images would raise the accuracy over all classes most."""
        shots, more = self._shots, 1
        leader = int(_gain(self._mode[None], shots, 1)[0].argmax())
        added = torch.nn.functional.one_hot(torch.tensor(leader, device="cpu"), len(shots))
        while more < _MAX_MORE and int(_gain(self._mode[None], shots + more * added, 1)[0].argmax()) == leader:
            more += 1
        generator = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(_SAMPLES, len(self._mode), dtype=torch.float64, device="cpu", generator=generator)
        samples = self._mode + noise @ torch.linalg.cholesky(self._covariance).T
        sure = (_gain(samples, shots, more).argmax(dim=1) == leader).double().mean() >= _SURE
        return MoreImages([*self.counts][leader], more, bool(sure))

    @property
    def advice(self) -> str:
        """One sentence: whether more images would help, and of which class."""
        if self.expected(self.usual_count).accuracy - self.expected().accuracy < _LITTLE:
            return f"More {self.noun}s would bring little: {self.usual_count} more of each class, less than 1 point."
        label, number, sure = self.most_useful
        if not sure:
            return f"More {self.noun}s may help, of {label} first, but which class needs them most is uncertain."
        return f"About {number} more {self.noun}{'s' * (number > 1)} of {label} should help most."

    def __str__(self) -> str:
        fewer = ", ".join(f"{m}: {accuracy:.0%}" for m, accuracy in self.measured.items())
        more = f"with {self.usual_count} more of each class {self.expected(self.usual_count)}"
        return (
            f"With fewer {self.noun}s a class: {fewer}\nExpected on new {self.noun}s: {self.expected()}; {more}\n"
            f"{self.advice}"
        )

    @property
    def _shots(self) -> Tensor:
        return torch.tensor([*self.counts.values()], dtype=torch.float64, device="cpu")


def learning_curve(fitted: FittedHead, left_out_logits: Tensor, noun: str = "example") -> LearningCurve | None:
    """Measure the accuracy with fewer images a class, and fit what more would bring.

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
    stay = torch.stack([sets.counts.sub(1).clamp(min=1, max=m) for m in numbers])  # of each class (numbers, k)
    paired = (sets.counts > 1)[sets.labels]
    generator = torch.Generator("cpu").manual_seed(0)
    tallies = [_tally_of_rest(fitted, sets, row, generator) for row in stay[:-1]]
    tallies.append(_tally(left_out_logits[paired.to(left_out_logits.device)], sets.labels[paired], len(sets.counts)))
    right, tests = torch.stack(tallies, dim=1)  # (numbers, k)
    shares, tested = right / tests.clamp(min=1), tests > 0
    mode, covariance = _fit(shares, stay.double().rsqrt(), tested * sets.counts / len(numbers))
    images = tested * tests[-1]  # in leave-one-out
    names = fitted.classes.tolist()
    return LearningCurve(
        dict(zip(names, sets.counts.tolist(), strict=True)),
        dict(zip(numbers, ((shares * images).sum(dim=1) / images.sum(dim=1)).tolist(), strict=True)),
        {
            name: dict(zip(stay[tested[:, k], k].tolist(), shares[tested[:, k], k].tolist(), strict=True))
            for k, name in enumerate(names)
            if sets.counts[k] > 1
        },
        mode,
        covariance,
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

    def draw(self, stay: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of random ``stay`` (k,) sets of each class, and of all images that are in no group of these."""
        order = torch.randperm(len(self._class_of), device="cpu", generator=generator)
        order = order[self._class_of[order].argsort(stable=True)]  # random within each class
        classes, first = self._class_of[order], self.counts.cumsum(dim=0) - self.counts
        chosen = torch.empty_like(order, dtype=torch.bool)
        chosen[order] = torch.arange(len(order), device="cpu") - first[classes] < stay[classes]
        drawn = chosen[self._set_of]
        rest = ~torch.isin(self.groups, self.groups[drawn])
        return drawn.nonzero()[:, 0], rest.nonzero()[:, 0]


def _numbers(most: int) -> list[int]:
    """Images a class that stay: 1 to ``most``, the smaller ones closer together if they are many."""
    if most <= _MAX_NUMBERS:
        return [*range(1, most + 1)]
    return sorted({round(most ** (i / (_MAX_NUMBERS - 1))) for i in range(_MAX_NUMBERS)})


@torch.no_grad()
def _tally_of_rest(fitted: FittedHead, sets: _Sets, stay: Tensor, generator: torch.Generator) -> Tensor:
    """Images (2, k) of each class that heads fitted to random ``stay`` (k,) sets of each classify right, and all."""
    features, total = fitted.support.adapted, torch.zeros(2, len(stay), dtype=torch.float64, device="cpu")
    for _ in range(max(1, min(_MAX_DRAWS, _MAX_IMAGES // len(features)))):
        drawn, rest = sets.draw(stay, generator)
        if len(rest):
            groups = None if fitted.groups is None else fitted.groups[drawn]
            state = fitted.settled.fit_groups(features[drawn], fitted.labels[drawn], groups)
            total += _tally(fitted.settled.logits(state, features[rest]), sets.labels[rest], len(stay))
    return total


def _tally(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Images (2, k) of each class that are classified right, and all."""
    right = labels[logits.argmax(dim=1).cpu() == labels]
    return torch.stack([right.bincount(minlength=classes), labels.bincount(minlength=classes)]).double()


def _fit(shares: Tensor, decay: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mode (k + 1,) and covariance of the a_k and b.

    Parameters
    ----------
    shares : Tensor of shape (numbers, k)
        Shares that are right.
    decay : Tensor of shape (numbers, k)
        1 / sqrt(m).
    weights : Tensor of shape (numbers, k)
        How many images each share counts as.
    """
    k = shares.shape[1]
    covariance = torch.full((k + 1, k + 1), _LEVEL[1] ** 2, dtype=torch.float64, device="cpu")
    covariance[-1] = covariance[:, -1] = 0
    covariance += torch.diag(torch.tensor([_BETWEEN**2] * k + [_SLOPE[1] ** 2], dtype=torch.float64, device="cpu"))
    centre = torch.tensor([_LEVEL[0]] * k + [_SLOPE[0]], dtype=torch.float64, device="cpu")
    precision = torch.linalg.inv(covariance)

    def parts(theta: Any) -> tuple[Tensor, Tensor, Tensor]:
        theta = torch.as_tensor(theta, device="cpu")
        eta = theta[:-1] - theta[-1] * decay
        return theta - centre, eta, torch.sigmoid(eta)

    def loss(theta: Any) -> float:
        off, eta, _ = parts(theta)
        likelihood = weights * (shares * eta - torch.nn.functional.softplus(eta))
        return float(off @ precision @ off / 2 - likelihood.sum())

    def gradient(theta: Any) -> Any:
        off, _, p = parts(theta)
        residual = weights * (p - shares)
        return (precision @ off + torch.cat([residual.sum(dim=0), -(residual * decay).sum()[None]])).numpy()

    def hessian(theta: Any) -> Any:
        _, _, p = parts(theta)
        spread = weights * p * (1 - p)
        found = precision.clone()
        found[:-1, :-1] += torch.diag(spread.sum(dim=0))
        found[:-1, -1] -= (spread * decay).sum(dim=0)
        found[-1, :-1] = found[:-1, -1]
        found[-1, -1] += (spread * decay.square()).sum()
        return found.numpy()

    mode = minimize(loss, centre.numpy(), jac=gradient, hess=hessian, method="trust-exact").x
    return torch.as_tensor(mode, device="cpu"), torch.linalg.inv(torch.as_tensor(hessian(mode), device="cpu"))


def _gain(samples: Tensor, shots: Tensor, more: int) -> Tensor:
    """Gain (s, k) in the share of each class with ``more`` images of it than ``shots`` (k,), for samples (s, k + 1)."""
    limits, slope = samples[:, :-1], samples[:, -1:]
    return torch.sigmoid(limits - slope * (shots + more).rsqrt()) - torch.sigmoid(limits - slope * shots.rsqrt())
