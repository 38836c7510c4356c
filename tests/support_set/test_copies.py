"""Copies in the support set: they are recognised, left out together, and counted once."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits, load_iris

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.heads import AutoHead, MahalanobisHead
from fewshot_mahalanobis.support_set import copies
from fewshot_mahalanobis.support_set.copies import (
    checked_groups,
    equal_rows,
    joined,
    near_twins,
    number_of_copies,
    within_classes,
)
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.summary import summarise, support_influence
from tests.drawn_tasks import make_task
from tests.tiny import LABELS, adapting_model, pictures

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

NO_PAIRS = np.empty((0, 2), np.int64)


@pytest.fixture(scope="module")
def task() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Support set of 5 classes of 5, 400 queries and the queries' classes: digits in a random basis, plus noise."""
    digits = load_digits()
    x = torch.from_numpy(digits.data[digits.target < 5] / 16)
    y = torch.from_numpy(digits.target[digits.target < 5])
    x = x @ torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([(y == label).nonzero()[:5, 0] for label in range(5)])
    rest = torch.tensor([i for i in range(len(y)) if i not in {*rows.tolist()}])[:400]
    return x[rows], y[rows], x[rest], y[rest]


def copied(x: torch.Tensor, y: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    """A support set with copies, and the pairs of them."""
    everyone, one_class = torch.arange(len(x)), (y == 0).nonzero()[:, 0]
    noise = 0.01 * torch.randn(3 * len(x), x.shape[1], generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    copies = {
        "doubles": (x, everyone),
        "three near-copies each": (x.repeat(3, 1) + noise, everyone.repeat(3)),
        "one class four times": (x[y == 0].repeat(3, 1), one_class.repeat(3)),
    }[how]
    pairs = torch.stack([copies[1], len(x) + torch.arange(len(copies[1]))], dim=1).numpy()
    return torch.cat([x, copies[0]]), torch.cat([y, y[copies[1]]]), pairs


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["doubles", "three near-copies each", "one class four times"])
@pytest.mark.parametrize("head", [AutoHead(), MahalanobisHead()], ids=["auto", "mahalanobis"])
def test_known_queries_are_not_rejected_for_copies(
    how: str, head: Any, task: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    x, y, queries, truth = task

    def rejected_and_right(x: torch.Tensor, y: torch.Tensor, copies: Any) -> tuple[float, float]:
        fitted = FittedHead.fit(head, Features(x), y, unknown_label=-1, false_rejection_rate=0.05, copies=copies)
        prediction = fitted.predict(Features(queries))
        right = prediction.logits.argmax(dim=1) == truth
        return float((prediction.indices == 5).double().mean()), float(right.double().mean())

    without, with_copies = rejected_and_right(x, y, NO_PAIRS), rejected_and_right(*copied(x, y, how))
    assert with_copies[0] <= without[0] + 0.05
    assert with_copies[1] >= without[1] - 0.02
    if how != "one class four times":
        assert rejected_and_right(*copied(x, y, how)[:2], None)[0] > with_copies[0] + 0.2  # what was wrong without


def altered(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A support set, and an altered copy of each example: half as far from it as others of the class are."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    usual = torch.stack([torch.pdist(x[y == label]).median() for label in y.unique()]).median()
    return torch.cat([x, x + 0.5 * usual * noise / noise.norm(dim=1, keepdim=True)]), y.repeat(2), torch.arange(len(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_known_queries_are_not_rejected_for_altered_copies_which_are_no_groups(
    task: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    x, y, queries, _ = task
    with_copies, labels, originals = altered(x, y)
    twins = near_twins(with_copies, labels)
    of_copies = {*zip(originals.tolist(), (originals + len(x)).tolist(), strict=True)}
    assert len(of_copies & {*map(tuple, twins.tolist())}) >= 0.8 * len(x)

    def rejected(x: torch.Tensor, y: torch.Tensor, **settings: Any) -> float:
        fitted = FittedHead.fit(AutoHead(), Features(x), y, unknown_label=-1, false_rejection_rate=0.05, **settings)
        assert fitted.groups is None or "group_names" in settings
        return float((fitted.predict(Features(queries)).indices == 5).double().mean())

    once, trusted = rejected(x, y), rejected(with_copies, labels)
    assert trusted > once + 0.1  # what was wrong
    assert rejected(with_copies, labels, twins=twins) <= once + 0.03
    assert rejected(with_copies, labels, twins=twins, group_names=[*range(len(labels))]) == trusted  # the user knows


def test_twins_are_clusters_far_nearer_than_the_rest_of_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    angles = torch.tensor([0.0, 2.0, 3.0, 20.0, 21.0, 40.0, 60.0, 80.0, 0.0, 1.0, 20.0, 0.5]).deg2rad()
    x, y = torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([0] * 8 + [1] * 3 + [2])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, torch.arange(1, 13)[:, None]):  # lengths say nothing
        assert joined(12, near_twins(scale * x, y), [None] * 12).tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8]  # type: ignore[union-attr]
    moved = {frozenset(order[pair].tolist()) for pair in torch.from_numpy(near_twins(x[order], y[order]))}
    assert frozenset((3, 4)) in moved
    assert {i for pair in moved for i in pair} == {0, 1, 2, 3, 4}  # classes of fewer than four have none
    evenly = torch.tensor([0.0, 9.0, 20.0, 29.0]).deg2rad()
    x = torch.stack([evenly.cos(), evenly.sin()], dim=1)
    assert len(near_twins(x, torch.zeros(4, dtype=torch.int64))) == 0  # 9 degrees are not within 0.8 of 11
    assert len(near_twins(torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64))) == 0
    near = torch.tensor([0.0, 1.0, 20.0, 40.0, 60.0]).deg2rad()
    x, y = torch.stack([near.cos(), near.sin()], dim=1), torch.zeros(5, dtype=torch.int64)
    assert near_twins(x, y).tolist() == [[0, 1]]
    monkeypatch.setattr(copies, "_MOST_OF_CLASS", 4)
    assert len(near_twins(x, y)) == 0  # a large class is not searched


def test_without_copies_nothing_is_found_and_everything_is_as_before(
    task: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    x, y, queries, _ = task
    found = equal_rows(x)
    assert len(found) == 0
    fits = [FittedHead.fit(AutoHead(), Features(x), y, unknown_label=-1, copies=copies) for copies in (None, found)]
    scores = [fitted.outlier_score(Features(queries)) for fitted in fits]
    assert torch.equal(*scores)
    assert fits[0].groups is fits[1].groups is None


def test_a_class_of_copies_is_worth_what_its_pictures_are(
    task: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    x, y, _, _ = task
    groups = torch.cat([torch.arange(25), torch.arange(25)[y == 0].repeat(3)])
    x, y, _ = copied(x, y, "one class four times")
    state = AutoHead().fit_groups(x, y, groups)
    assert state.counts.tolist() == [5.0] * 5
    assert state.shrink.unique().numel() == state.ratio.unique().numel() == 1


def test_equal_rows_are_copies_where_they_cannot_be_equal_by_chance() -> None:
    digits, iris = load_digits(), load_iris()
    X, y = torch.from_numpy(digits.data[:60]) + torch.rand(60, 1).double(), torch.from_numpy(digits.target[:60])
    X = X @ torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = X[:3] * (1 + 1e-7)
    pairs = equal_rows(torch.cat([X, rounded]))
    assert sorted(map(sorted, pairs.tolist())) == [[0, 60], [1, 61], [2, 62]]
    classes = torch.cat([y, torch.tensor([y[0], y[1] + 1, y[2]])])
    assert sorted(map(sorted, within_classes(pairs, classes.numpy()).tolist())) == [[0, 60], [2, 62]]
    assert len(equal_rows(torch.from_numpy(iris.data))) == 0  # two flowers measure the same
    binary = torch.randint(0, 2, (400, 12), generator=torch.Generator().manual_seed(0)).double()
    assert len(equal_rows(binary)) == 0
    of_one_sum = X - X.mean(dim=1, keepdim=True)
    assert equal_rows(torch.cat([of_one_sum, of_one_sum[7:8]])).tolist() == [[7, 60]]


def test_groups_join_directly_and_through_others() -> None:
    assert joined(4, NO_PAIRS, [None] * 4) is None
    assert joined(3, NO_PAIRS, ["a", "b", "c"]) is None
    chain = joined(5, np.array([[0, 1], [3, 1]]), [None] * 5)
    assert chain is not None
    assert chain.tolist() == [0, 0, 1, 0, 2]
    mixed = joined(6, np.array([[0, 1], [2, 3], [4, 5]]), ["a", "b", "a", None, None, None])
    assert mixed is not None
    assert mixed.tolist() == [0, 1, 0, 0, 2, 2]  # a and b are not joined: the user has named both
    assert number_of_copies(mixed) == 3
    assert number_of_copies(None) == 0


@pytest.mark.parametrize(
    ("groups", "message"),
    [([1, 2], "3 examples but 2 groups"), ("abc", "sequence"), ([1, None, 2], "group 1 is None"),
     ([1, 2, float("nan")], "group 2 is nan"), (5, "sequence")],
)  # fmt: skip
def test_groups_that_are_no_names_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_groups(groups, 3)
    classifier = MahalanobisClassifier()
    with pytest.raises(ValueError, match=message):
        classifier.fit(np.eye(3), [0, 1, 1], groups)
    assert not hasattr(classifier, "fitted_head_")


def test_groups_of_any_sequence_are_names() -> None:
    for groups in (["a", "b"], np.array(["a", "b"]), ("a", "b"), iter("ab")):
        assert checked_groups(groups, 2) == ["a", "b"]
    assert checked_groups(np.arange(2), 2) == [0, 1]
    assert checked_groups(None, 2) == [None, None]


def test_features_twice_are_said_once_and_reject_no_more() -> None:
    digits = load_digits()
    X, y = digits.data[:100] @ np.random.default_rng(0).normal(size=(64, 64)), digits.target[:100]
    queries = digits.data[300:600] @ np.random.default_rng(0).normal(size=(64, 64))
    settings = {"unknown_label": -1, "false_rejection_rate": 0.05, "temperature": "auto"}
    once = MahalanobisClassifier(**settings).fit(X, y)
    with pytest.warns(UserWarning, match="100 of 200 support examples are copies .* counts all as 100"):
        twice = MahalanobisClassifier(**settings).fit(np.tile(X, (2, 1)), np.tile(y, 2))
    with pytest.warns(UserWarning, match="100 of 200") as caught:
        added = MahalanobisClassifier(**settings).fit(X, y).partial_fit(X, y)
    assert [warning.filename for warning in caught] == [__file__]
    assert added.threshold_ == twice.threshold_
    assert (twice.predict(queries) == -1).mean() <= (once.predict(queries) == -1).mean() + 0.03
    assert twice.temperature_ == pytest.approx(once.temperature_, rel=0.3)
    assert (twice.summary().copies, once.summary().copies) == (100, 0)
    assert "Copies: 100 of 200 examples" in str(twice.summary())
    assert abs(twice.summary().accuracy - once.summary().accuracy) <= 0.02
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = MahalanobisClassifier(**settings).fit(np.tile(X, (2, 1)), np.tile(y, 2), groups=range(200))
        added.partial_fit(queries[:5], digits.target[300:305])  # no new copies: nothing is said again
        named = MahalanobisClassifier(**settings).fit(np.tile(X, (2, 1)), np.tile(y, 2), np.tile(np.arange(100), 2))
    assert named.threshold_ == twice.threshold_
    assert alone.fitted_head_.groups is None
    assert (alone.predict(queries) == -1).mean() > (once.predict(queries) == -1).mean() + 0.2  # what was wrong


def test_one_class_of_copies_is_left_without_another() -> None:
    x = np.random.default_rng(0).normal(size=(4, 12))
    X, y = np.repeat(x, [3, 1, 1, 1], axis=0), np.array([0, 0, 0, 1, 1, 1])
    with pytest.warns(UserWarning, match="2 of 6"):
        classifier = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.3).fit(X, y)
    assert classifier.summary().counted == 3  # class 0 is gone without its picture
    with pytest.raises(ValueError, match="two examples that are not copies"):
        MahalanobisClassifier(unknown_label=-1).fit(np.tile(x[:2], (3, 1)), [0, 1] * 3)


def test_a_group_may_have_examples_of_two_classes() -> None:
    X = np.random.default_rng(0).normal(size=(8, 12))
    classifier = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.25)
    classifier.fit(X, [0, 0, 0, 0, 1, 1, 1, 1], groups=["a", "a", "b", "c", "b", "d", "e", "f"])
    head = classifier.fitted_head_
    assert classifier.summary().copies == 2
    logits = head.settled.leave_one_out_logits(head.support.adapted, head.labels, head.groups)
    rest = torch.tensor([0, 1, 3, 5, 6, 7])
    state = head.settled.fit_groups(head.support.adapted[rest], head.labels[rest], head.groups[rest])
    of_b = head.settled.logits(state, head.support.adapted[[2, 4]])
    torch.testing.assert_close(logits[[2, 4]], of_b, rtol=1e-8, atol=1e-8)


def test_the_influence_of_an_example_is_that_of_its_group() -> None:
    features, labels, queries = make_task(1, [4, 3], 20, dtype=torch.float64)
    groups = ["a", "b", "b", "c", "d", "e", "e"]
    fitted = FittedHead.fit(AutoHead(), Features(features), labels, group_names=groups)
    influence = support_influence(fitted, queries[:3])
    assert torch.equal(influence[:, 1], influence[:, 2])
    rest = torch.tensor([0, 3, 4, 5, 6])
    without = FittedHead.fit(
        AutoHead(), Features(features[rest]), labels[rest], group_names=[groups[i] for i in rest.tolist()]
    )
    log_p = fitted.logits(queries[:3]).log_softmax(dim=1)
    change = (log_p - without.logits(queries[:3]).log_softmax(dim=1)).gather(1, log_p.argmax(dim=1, keepdim=True))
    torch.testing.assert_close(influence[:, [1]], change)


def test_images_again_by_partial_fit_are_recognised_kept_and_saved(tmp_path: Path) -> None:
    model = adapting_model()
    settings: dict[str, Any] = {"device": "cpu", "unknown_label": "none", "false_rejection_rate": 0.2}
    images = pictures(8, 1)
    classifier = SimpleCNAPSClassifier(model, **settings).fit(images, LABELS)
    with pytest.warns(UserWarning, match="8 of 16 support examples are copies") as caught:
        classifier.partial_fit(images, LABELS)
    assert [warning.filename for warning in caught] == [__file__]
    assert classifier.summary().copies == 8
    threshold, groups = classifier.threshold_, classifier.fitted_head_.groups
    with pytest.warns(UserWarning, match="8 of 16"):
        again = SimpleCNAPSClassifier(model, **settings).fit(np.concatenate([images, images]), LABELS + LABELS)
    assert again.threshold_ == pytest.approx(threshold, rel=1e-5)
    classifier.partial_fit(pictures(2, 5), ["red", "blue"], groups=["film", "film"])
    assert classifier.summary().copies == 9
    classifier.save(tmp_path / "classifier")
    for kept in (
        SimpleCNAPSClassifier.load(tmp_path / "classifier"),
        pickle.loads(pickle.dumps(classifier)),
    ):
        assert kept.fitted_head_.group_names == [None] * 16 + ["film", "film"]
        assert kept.fitted_head_.groups[:16].tolist() == groups.tolist()
        assert kept.summary() == classifier.summary()
        kept.partial_fit(pictures(1, 6), ["red"], groups=["film"])
        assert kept.summary().copies == 10


def test_summary_leaves_whole_groups_out() -> None:
    features, labels, _ = make_task(2, [5, 5], 4, dtype=torch.float64)
    groups = torch.arange(10) // 2
    fitted = FittedHead.fit(AutoHead(), Features(features), labels, group_names=groups.tolist())
    right = 0
    for i in range(10):
        rest = groups != groups[i]
        state = fitted.settled.fit_groups(features[rest], labels[rest], groups[rest])
        right += int(fitted.settled.logits(state, features[i : i + 1]).argmax()) == int(labels[i])
    assert (summarise(fitted).right, summarise(fitted).counted) == (right, 10)


def contradictions(said: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in said if "different classes" in str(warning.message)]


@pytest.mark.parametrize("how", ["the same file", "a copy", "a link", "mirrored", "compressed"])
def test_a_picture_in_two_classes_is_named_with_its_files(how: str, tmp_path: Path) -> None:
    files = []
    for i, pixels in enumerate(pictures(8, 1)):
        files.append(tmp_path / f"{i}.png")
        Image.fromarray(pixels).resize((60, 60)).save(files[-1])
    again = tmp_path / "again.png"
    if how == "a copy":
        again.write_bytes(files[1].read_bytes())
    elif how == "a link":
        again.symlink_to(files[1])
    elif how == "mirrored":
        ImageOps.mirror(Image.open(files[1])).save(again)
    elif how == "compressed":
        Image.open(files[1]).save(again, "JPEG", quality=90)
    else:
        again = files[1]
    with pytest.warns(UserWarning, match="different classes") as said:
        SimpleCNAPSClassifier(adapting_model(), device="cpu").fit([*files, again], [*LABELS, "red"])
    (message,) = contradictions(list(said))
    assert f"image 1 ('{files[1]}') in green and image 8 ('{again}') in red" in message
    assert [warning.filename for warning in said] == [__file__]


def test_pictures_in_two_classes_are_named_up_to_five_pairs_and_said_once() -> None:
    images, model = pictures(8, 1), adapting_model()
    classifier = SimpleCNAPSClassifier(model, device="cpu").fit(images, LABELS)
    others = ["red" if label != "red" else "blue" for label in LABELS]
    with pytest.warns(UserWarning, match="different classes") as said:
        classifier.partial_fit(images, others)
    (message,) = contradictions(list(said))
    assert message.count(" and ") == 5 + 1
    assert "and 3 more pairs" in message
    assert "earlier image 0 in blue and image 0 in red" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier.partial_fit(pictures(2, 5), ["red", "blue"])
    assert classifier.fitted_head_.groups is None  # contradictions are no groups


def test_contradictions_are_said_whatever_the_groups() -> None:
    images = pictures(8, 1)
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu")
    with pytest.warns(UserWarning, match="different classes") as said:
        classifier.fit(np.concatenate([images, images[:1]]), [*LABELS, "red"], groups=range(9))
    assert len(contradictions(list(said))) == 1


@pytest.mark.parametrize("copy", ["the same", "rounded", "added later"])
def test_vectors_in_two_classes_are_named(copy: str) -> None:
    X = np.random.default_rng(0).normal(size=(8, 12))
    y = ["a", "b"] * 4
    again = X[2:3] * (1 + 1e-8 if copy == "rounded" else 1)
    parts = [(X, y), (again, ["b"])] if copy == "added later" else [(np.concatenate([X, again]), [*y, "b"])]
    classifier = MahalanobisClassifier()
    for examples, labels in parts[:-1]:
        classifier.partial_fit(examples, labels)
    with pytest.warns(UserWarning, match="different classes") as said:
        classifier.partial_fit(*parts[-1])
    (message,) = contradictions(list(said))
    assert "example 2 in a and example 8 in b" in message


def test_a_loaded_classifier_keeps_its_groups_and_recognises_the_same_picture(tmp_path: Path) -> None:
    images = pictures(8, 1)
    with pytest.warns(UserWarning, match="2 of 10"):
        classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu").fit(
            np.concatenate([images, images[:2, :, ::-1]]), LABELS + LABELS[:2]
        )
    classifier.save(tmp_path / "classifier")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "classifier", device="cpu")
    with pytest.warns(UserWarning, match="4 of 13"):
        loaded.partial_fit(np.concatenate([images[3:4], pictures(1, 7), pictures(1, 7)[:, :, ::-1]]), ["green"] * 3)
    groups = loaded.fitted_head_.groups.tolist()
    assert [groups.index(number) for number in groups] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 3, 11, 11]


def test_the_summary_lists_groups_by_name() -> None:
    X, y = np.random.default_rng(0).normal(size=(40, 12)), ["a", "b"] * 20
    groups = [*"pqpqr", *range(35)]
    classifier = MahalanobisClassifier().fit(X, y, groups)
    summary = classifier.summary()
    assert summary.groups == [[0, 2], [1, 3]]
    assert summary.copies == 2
    assert "they count as 38\n  0.png, 2.png\n  1.png, 3.png\n" in summary.describe([f"{i}.png" for i in range(40)])
    many = MahalanobisClassifier().fit(X, y, [0] * 13 + [1 + i // 2 for i in range(27)]).summary()
    assert "example 9 and 3 more\n" in str(many)
    assert "  and 4 more groups\n" in str(many)
