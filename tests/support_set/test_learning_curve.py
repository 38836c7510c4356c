"""The accuracy with fewer images a class, and what more would bring."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import MahalanobisClassifier
from fewshot_mahalanobis.heads import AutoHead, EuclideanHead, Head
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.learning_curve import LearningCurve
from fewshot_mahalanobis.support_set.summary import summarise

CLASSES = np.array(["cat", "dog", "owl"])


def task(shots: list[int], spread: float = 6.0, d: int = 30, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(shots)).repeat_interleave(torch.tensor(shots))
    means = 2 * torch.randn(len(shots), d, generator=generator)
    return means[labels] + spread * torch.randn(len(labels), d, generator=generator), labels


def fitted(
    features: torch.Tensor, labels: torch.Tensor, groups: list[int] | None = None, head: Head | None = None
) -> FittedHead:
    return FittedHead.fit(head or AutoHead(), Features(features), labels, CLASSES, group_names=groups)


def curve_of(of: FittedHead) -> LearningCurve:
    curve = summarise(of).curve
    assert curve is not None
    return curve


class Recorder(EuclideanHead):
    """Keeps the support sets it is fitted to, and the queries of each."""

    def __init__(self) -> None:
        super().__init__()
        self.fits: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.of_fit: tuple[torch.Tensor, torch.Tensor] = torch.empty(0), torch.empty(0)

    def fit(self, support_features: torch.Tensor, support_labels: torch.Tensor) -> torch.Tensor:
        self.of_fit = support_features, support_labels
        return super().fit(support_features, support_labels)

    def logits(self, state: torch.Tensor, query_features: torch.Tensor) -> torch.Tensor:
        self.fits.append((*self.of_fit, query_features))
        return super().logits(state, query_features)


def rows_of(some: torch.Tensor, features: torch.Tensor) -> set[int]:
    return {int((features == row).all(dim=1).nonzero()[0, 0]) for row in some}


@pytest.mark.parametrize("head", [AutoHead(), EuclideanHead()], ids=lambda head: head.name)
def test_with_two_of_three_images_it_is_the_mean_over_all_choices(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws approach the plain loop over every way to keep one image of each class."""
    monkeypatch.setattr("fewshot_mahalanobis.support_set.learning_curve._MAX_DRAWS", 400)
    monkeypatch.setattr("fewshot_mahalanobis.support_set.learning_curve._MAX_IMAGES", 10_000)
    features, labels = task([3, 3, 3])
    whole = fitted(features, labels, head=head)
    right = []
    for kept in itertools.product(range(3), range(3, 6), range(6, 9)):
        drawn, rest = torch.tensor(kept), torch.tensor([i for i in range(9) if i not in kept])
        state = whole.settled.fit(features[drawn], labels[drawn])
        right.append((whole.settled.logits(state, features[rest]).argmax(dim=1) == labels[rest]).double().mean())
    expected = float(torch.stack(right).mean())
    assert 0.3 < expected < 0.95
    assert curve_of(whole).measured[1] == pytest.approx(expected, abs=0.03)  # 400 of 27 choices


def test_the_last_point_is_leave_one_out_to_the_bit() -> None:
    for shots in ([5, 5, 5], [2, 7, 1], [2, 2, 1], [30, 12, 9]):
        features, labels = task(shots)
        summary = summarise(fitted(features, labels))
        assert summary.curve is not None
        *_, (images, accuracy) = summary.curve.measured.items()
        assert images == max(shots) - 1
        assert accuracy == pytest.approx(summary.accuracy, abs=1e-12)
        logits = AutoHead().settled(features, labels).leave_one_out_logits(features, labels)
        right = (logits.argmax(dim=1) == labels).double()
        for k, (label, n) in enumerate(zip(CLASSES.tolist(), shots, strict=True)):
            by_class = summary.curve.measured_by_class
            if n == 1:
                assert label not in by_class
            else:
                assert by_class[label][n - 1] == pytest.approx(float(right[labels == k].mean()))
                assert max(by_class[label]) == n - 1


def test_each_head_is_fitted_to_equal_classes_and_asked_about_all_others() -> None:
    features, labels = task([4, 4, 2])
    whole = fitted(features, labels, head=(recorder := Recorder()))
    recorder.fits.clear()
    settled = whole.settled
    assert settled is recorder
    curve_of(whole)
    sizes = set()
    for support, of_support, queries in recorder.fits:
        drawn, asked = rows_of(support, features), rows_of(queries, features)
        assert drawn | asked == {*range(10)}
        assert not drawn & asked
        sizes.add(tuple(of_support.bincount().tolist()))
    assert sizes == {(1, 1, 1), (2, 2, 1)}
    assert len(recorder.fits) == 16


def test_a_copy_of_a_tested_image_is_never_among_its_support() -> None:
    features, labels = task([3, 3, 3])
    copied, of_copied = torch.cat([features, features + 1e-6]), labels.repeat(2)
    groups = torch.arange(9).repeat(2)
    groups[17] = 0  # a copy with another label
    whole = fitted(copied, of_copied, groups.tolist(), head=(recorder := Recorder()))
    recorder.fits.clear()
    curve = curve_of(whole)
    assert recorder.fits
    for support, _, queries in recorder.fits:
        drawn, asked = rows_of(support, copied), rows_of(queries, copied)
        assert not {int(groups[i]) for i in drawn} & {int(groups[i]) for i in asked}
    assert curve.counts == {"cat": 3, "dog": 3, "owl": 4}


def test_copies_leave_the_curve_as_it_is() -> None:
    features, labels = task([5, 5, 5])
    alone = curve_of(fitted(features, labels, head=EuclideanHead()))
    again = curve_of(fitted(features.repeat(2, 1), labels.repeat(2), [*range(15), *range(15)], head=EuclideanHead()))
    assert again.measured == pytest.approx(alone.measured)
    assert again.expected(5) == pytest.approx(alone.expected(5))


def test_it_is_the_same_every_time_and_leaves_the_global_generator_alone() -> None:
    whole = fitted(*task([5, 5, 5]))
    state = torch.get_rng_state()
    first, second = curve_of(whole), curve_of(whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first.measured, first.measured_by_class) == (second.measured, second.measured_by_class)
    assert (first.expected(5), first.most_useful) == (second.expected(5), second.most_useful)


def test_one_image_a_class_gives_no_curve_and_says_why() -> None:
    summary = summarise(fitted(*task([1, 1, 1])))
    assert summary.curve is None
    assert "A second example of each would show it" in str(summary)


def test_the_line_and_its_interval_are_those_of_plain_formulas() -> None:
    """Least squares by NumPy, and Wilson's bounds as the shares at which the measured one is 1.96 deviations off."""
    for shots in ([5, 5, 5], [2, 7, 1], [2, 2, 1]):
        curve = curve_of(fitted(*task(shots)))
        stay = [[min(max(n - 1, 1), m) for n in shots] for m in curve.measured]
        x, y = [np.mean(np.power(row, -0.5)) for row in stay], [*curve.measured.values()]
        slope, limit = np.polyfit([*x, 0.0], [*y, 1.0], 1)
        trials = sum(n for n in shots if n > 1)
        assert slope < 0
        assert curve.left_out == trials
        for more in (0, 3, 50):
            accuracy, low, high = curve.expected(more)
            assert accuracy == pytest.approx(limit + slope * np.mean(np.power(np.array(shots) + more, -0.5)))
            for bound in (low, high):
                assert abs(accuracy - bound) == pytest.approx(1.96 * math.sqrt(bound * (1 - bound) / trials))


def test_more_images_are_expected_to_help_and_certainty_grows_with_their_number() -> None:
    few, many = (curve_of(fitted(*task([n] * 3))) for n in (4, 40))
    for curve in (few, many):
        expected = [curve.expected(more) for more in (0, 5, 50)]
        assert expected[0].accuracy < expected[1].accuracy < expected[2].accuracy
        assert all(0 < low < accuracy < high < 1 for accuracy, low, high in expected)
    assert many.expected().high - many.expected().low < 0.7 * (few.expected().high - few.expected().low)


def test_a_small_class_is_what_needs_more() -> None:
    curve = curve_of(fitted(*task([12, 2, 12])))
    assert curve.most_useful.label == "dog"
    assert curve.most_useful.sure
    assert 2 <= curve.most_useful.images <= 10
    assert curve.advice == f"About {curve.most_useful.images} more examples of dog should help most."


def test_equal_classes_of_few_images_are_not_told_apart() -> None:
    curve = curve_of(fitted(*task([4, 4, 4])))
    assert not curve.most_useful.sure
    assert curve.advice.startswith("More examples may help, of ")
    assert curve.advice.endswith("which class needs them most is uncertain.")


@pytest.mark.parametrize(
    ("shots", "advice"),
    [
        (20, "More examples would bring little: 20 more of each class, less than 1 point."),
        (4, "More examples may bring little, but 12 are too few to tell: the accuracy is 100% (76% to 100%)."),
    ],
)
def test_where_all_is_right_more_would_bring_little_if_enough_were_left_out_to_tell(shots: int, advice: str) -> None:
    assert curve_of(fitted(*task([shots] * 3, spread=0.1))).advice == advice


def test_the_summary_of_features_has_it_too() -> None:
    features, labels = task([5, 5, 5])
    summary = MahalanobisClassifier().fit(features.numpy(), CLASSES[labels.numpy()]).summary()
    assert summary.curve is not None
    assert str(summary.curve) in str(summary)
    assert "With fewer examples a class: 1: " in str(summary)


def test_what_cannot_be_asked_is_refused() -> None:
    curve = curve_of(fitted(*task([3, 3, 3])))
    with pytest.raises(ValueError, match="more must be at least 0, got -1"):
        curve.expected(-1)
