"""What a support set says about itself: counts, leave-one-out accuracy, confusions, suspect images."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.exceptions import NotFittedError
from torch.utils._python_dispatch import TorchDispatchMode

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import AutoHead, EuclideanHead, Head, MahalanobisHead
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.summary import Confusion, summarise
from tests.tiny import LABELS, pictures, tiny_classifier

CLASSES = np.array(["cat", "dog", "owl"])


def fitted(features: torch.Tensor, labels: torch.Tensor) -> FittedHead:
    return FittedHead.fit(AutoHead(), Features(features), labels, CLASSES[: int(labels.max()) + 1])


def clusters(shots: list[int], spread: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (n, 512) of standard deviation ``spread`` around means about 29 apart."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(len(shots), 512, generator=generator) * 0.9
    labels = torch.arange(len(shots)).repeat_interleave(torch.tensor(shots))
    return means[labels] + torch.randn(len(labels), 512, generator=generator) * spread, labels


def test_accuracy_and_confusions_are_those_of_refitting_without_each_image() -> None:
    features, labels = clusters([6, 1, 9], spread=8.0)
    summary = summarise(fitted(features, labels))
    pairs: Counter[tuple[str, str]] = Counter()
    right = 0
    for i in (labels != 1).nonzero()[:, 0].tolist():  # the only image of a class cannot be left out
        rest = torch.arange(len(labels)) != i
        predicted = int(fitted(features[rest], labels[rest]).logits(features[i : i + 1]).argmax())
        right += predicted == labels[i]
        if predicted != labels[i]:
            pairs[CLASSES[labels[i]], CLASSES[predicted]] += 1
    assert 0 < right < 15
    assert (summary.right, summary.counted, summary.accuracy) == (right, 15, right / 15)
    assert Counter({(c.label, c.predicted): c.images for c in summary.confusions}) == pairs
    assert [c.images for c in summary.confusions] == sorted(pairs.values(), reverse=True)
    assert summary.counts == {"cat": 6, "dog": 1, "owl": 9}


def test_a_clean_support_set_has_no_suspects() -> None:
    summary = summarise(fitted(*clusters([8, 8, 8])))
    assert summary.accuracy == 1.0
    assert (summary.confusions, summary.suspects) == ([], [])
    assert str(summary).splitlines() == [
        "24 support examples of 3 classes",
        *("  cat: 8", "  dog: 8", "  owl: 8"),
        "Leave-one-out accuracy: 24 of 24 (100%)",
        *str(summary.curve).splitlines(),
    ]


def test_a_wrong_label_is_found_with_the_right_one() -> None:
    features, labels = clusters([8, 8, 8])
    labels[3] = 2
    summary = summarise(fitted(features, labels))
    (suspect,) = [found for found in summary.suspects if found.kind == "wrong label"]
    assert (suspect.index, suspect.label, suspect.predicted) == (3, "owl", "cat")
    assert suspect.odds is not None
    assert suspect.odds >= 4
    assert summary.confusions == [Confusion("owl", "cat", 1)]
    assert "Possible wrong labels:\n  example 3 (owl): cat is " in str(summary)
    assert [found.kind for found in summary.suspects if found.index == 3] == ["wrong label"]  # once, not an outlier too
    assert "a/3.png (owl)" in summary.describe([f"a/{i}.png" for i in range(24)])


def test_two_copies_are_one_suspect_and_an_odd_image_another() -> None:
    features, labels = clusters([8, 8, 8])
    features[5] = features[2] + 0.01
    features[20] += 60 * torch.nn.functional.normalize(torch.ones(512), dim=0)
    suspects = summarise(fitted(features, labels)).suspects
    assert [(s.index, s.kind, s.twin) for s in suspects if s.kind == "near-duplicate"] == [(2, "near-duplicate", 5)]
    assert [s.index for s in suspects if s.kind == "outlier"] == [20]
    text = str(summarise(fitted(features, labels)))
    assert "example 2 (cat): almost the same as example 5" in text
    assert "example 20 (owl): unlike the other examples of its class" in text


@pytest.mark.parametrize("copied", [8, 12])
def test_copies_are_found_though_most_images_have_two(copied: int) -> None:
    features, labels = clusters([6, 6])
    again = torch.arange(12)[:copied].repeat(2)
    rounded = features[again] * (1 + 1e-6)  # as in a batch of another size
    task = fitted(torch.cat([features, rounded]), torch.cat([labels, labels[again]]))
    suspects = [s for s in summarise(task).suspects if s.kind == "near-duplicate"]
    assert {s.index for s in suspects} | {s.twin for s in suspects} == {*range(copied), *range(12, 12 + 2 * copied)}


def test_a_long_list_is_cut_in_the_text_alone() -> None:
    features, labels = clusters([30, 30])
    features[30:45] = features[:15]
    summary = summarise(fitted(features, labels))
    assert len([s for s in summary.suspects if s.kind == "near-duplicate"]) == 15
    assert str(summary).count("almost the same as") == 10
    assert "  and 5 more" in str(summary)


def test_single_images_have_no_accuracy() -> None:
    summary = summarise(fitted(*clusters([1, 1, 1])))
    assert math.isnan(summary.accuracy)
    assert summary.suspects == []
    assert "not measured, as every class has one example" in str(summary)


def test_classes_of_very_different_size_are_named() -> None:
    assert "Very different" not in str(summarise(fitted(*clusters([4, 8, 16]))))
    text = str(summarise(fitted(*clusters([2, 8, 40]))))
    assert "Very different sizes: 'cat' has 2, 'owl' 40." in text


def test_a_classifier_summarises_all_images_so_far() -> None:
    classifier = tiny_classifier()
    classifier.partial_fit(pictures(2, 3), ["red", "new"])
    summary = classifier.summary()
    assert summary.counts == {"blue": 3, "green": 3, "new": 1, "red": 3}
    assert summary.counted == 9
    features: NDArray[np.float32] = classifier.transform(pictures(8, 1))
    assert len(features) == len(LABELS)
    with pytest.raises(NotFittedError):
        SimpleCNAPSClassifier().summary()


@pytest.mark.parametrize("shots", [[1, 1, 1], [2, 3, 2], [4, 4, 30], [20, 20, 20]])
def test_the_summary_calls_examples_what_they_are(shots: list[int]) -> None:
    features, labels = clusters(shots)
    features[1] = features[0] + 60
    features[-1] = features[-2] + 0.01
    of_vectors = MahalanobisClassifier().fit(features.numpy(), CLASSES[labels.numpy()]).summary()
    assert "example" in str(of_vectors)
    assert not re.search("image|picture", str(of_vectors))
    images = tiny_classifier().summary()
    assert "8 support images of 3 classes" in str(images)
    assert "With fewer images a class" in str(images)
    assert not re.search("example|picture", str(images))


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers of any tensor that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return found


@pytest.mark.parametrize("head", [AutoHead(), MahalanobisHead(), EuclideanHead()])
@pytest.mark.parametrize("grouped", [False, True])
def test_memory_of_a_summary_does_not_grow_with_the_square_of_the_examples(head: Head, grouped: bool) -> None:
    n, labels = 6000, torch.arange(6000) % 3
    features = 3 * labels[:, None] + torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    groups = [i // 6 for i in range(n)] if grouped else None
    fit = FittedHead.fit(head, Features(features), labels, CLASSES, group_names=groups)
    with LargestTensor() as largest:
        summarise(fit)
    assert largest.numbers < n**2 / 10


def test_near_duplicates_are_those_of_all_distances_at_once() -> None:
    features = torch.randn(700, 3, generator=torch.Generator().manual_seed(1))
    features[300:330] = features[650:680] + 1e-7
    labels = torch.arange(700) % 3
    distances = (features.double()[:, None] - features.double()).norm(dim=2).fill_diagonal_(torch.inf)
    nearest = distances.sort(dim=1)
    limit = 0.4 * nearest.values[:, 1][nearest.values[:, 1] > 1e-4].median()
    close = [(i, int(nearest.indices[i, 0])) for i in range(700) if nearest.values[i, 0] < limit]
    suspects = [s for s in summarise(fitted(features, labels)).suspects if s.kind == "near-duplicate"]
    assert {(s.index, s.twin) for s in suspects} == {(min(pair), max(pair)) for pair in close}
    assert {(s.index, s.twin) for s in suspects} >= {(300 + i, 650 + i) for i in range(30)}
