"""Examples of no class: what the outlier score learns of them, and that they are no class."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.heads import HEADS, AutoHead, CosineHead
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.negatives import MarginHead, left_out_negatives, similarity_to_negatives
from fewshot_mahalanobis.support_set.unknown import SIMILARITIES
from tests.tiny import LABELS, adapting_model, pictures, tiny_model, unadapted_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

NONE = "none of these"
Task = dict[str, NDArray[Any]]


def gaussian_task(seed: int) -> Task:
    """Five classes, and three kinds of other examples, near and far, in 16 dimensions."""
    rng = np.random.default_rng(seed)
    means, near = 1.2 * rng.normal(size=(5, 16)), 1.2 * rng.normal(size=(3, 16))
    far = 30 + 5 * rng.normal(size=(3, 16))

    def drawn(centres: NDArray[np.float64], n: int) -> NDArray[np.float64]:
        return centres[np.arange(n) % len(centres)] + rng.normal(size=(n, 16))

    y = np.arange(25) % 5
    return {"X": drawn(means, 25), "y": y, "like": drawn(near, 9), "far": drawn(far, 9)} | {
        "known": drawn(means, 200),
        "unknown": drawn(near, 200),
    }


def fitted(task: Task, negatives: str | None, **settings: Any) -> MahalanobisClassifier:
    X, y = task["X"], task["y"]
    if negatives is not None:
        X, y = np.concatenate([X, task[negatives]]), np.concatenate([y, np.full(len(task[negatives]), -1)])
    return MahalanobisClassifier(unknown_label=-1, **settings).fit(X, y)


def shares_rejected(negatives: str | None, **settings: Any) -> NDArray[np.float64]:
    """Of known and of unknown queries, in 30 tasks."""
    found = []
    for task in map(gaussian_task, range(30)):
        classifier = fitted(task, negatives, **settings)
        found.append([np.mean(classifier.predict(task[kind]) == -1) for kind in ("known", "unknown")])
    return np.mean(found, axis=0)


# ---------------------------------------------------------------- what they teach


@pytest.mark.parametrize("head", ["auto", "mahalanobis", "cosine"])
def test_examples_like_the_queries_find_more_of_them_at_the_same_price(head: str) -> None:
    without, taught = shares_rejected(None, head=head), shares_rejected("like", head=head)
    assert taught[1] > without[1] + 0.1
    assert taught[0] < 0.065


def test_examples_of_quite_another_kind_cost_at_most_a_point_at_the_same_price() -> None:
    found = {}
    for negatives in (None, "far"):
        shares = []
        for task in map(gaussian_task, range(30)):
            known, unknown = (fitted(task, negatives).outlier_score(task[kind]) for kind in ("known", "unknown"))
            shares.append(np.mean(unknown > np.quantile(known, 0.95)))
        found[negatives] = np.mean(shares)
    assert found["far"] > found[None] - 0.01
    assert shares_rejected("far")[0] < 0.065


def test_one_class_and_examples_of_none_are_told_apart() -> None:
    found = []
    for task in map(gaussian_task, range(30)):
        own, queries = task["X"][task["y"] == 0], task["known"][::5]
        task = {**task, "X": np.concatenate([own, queries[:20]]), "y": np.zeros(25, int)}
        of_both = [
            [x.predict(q) == -1 for q in (queries[20:], task["unknown"])]
            for x in (fitted(task, None), fitted(task, "like"))
        ]
        found.append([[each.mean() for each in of_one] for of_one in of_both])
    without, taught = np.mean(found, axis=0)
    assert taught[1] > without[1] + 0.01
    assert taught[0] < 2 * 0.05  # as far as the threshold may go for the examples of no class


@pytest.mark.parametrize("head", ["auto", "mahalanobis", "euclidean"])
def test_they_are_no_class_and_change_no_logits(head: str) -> None:
    task = gaussian_task(0)
    without, taught = fitted(task, None, head=head), fitted(task, "like", head=head)
    assert taught.classes_.tolist() == [0, 1, 2, 3, 4]
    assert taught.class_counts_.tolist() == [5] * 5
    assert np.array_equal(taught.decision_function(task["known"]), without.decision_function(task["known"]))
    assert np.array_equal(taught.predict_proba(task["known"]), without.predict_proba(task["known"]))
    assert taught.threshold_ != without.threshold_


@pytest.mark.parametrize("name", ["auto", "cosine"])
@pytest.mark.parametrize("groups", [None, torch.arange(25) // 10 * 5 + torch.arange(25) % 5])
def test_their_term_of_left_out_examples_is_that_of_refits(name: str, groups: torch.Tensor | None) -> None:
    task = gaussian_task(1)
    X, y, negatives = (torch.tensor(task[part]) for part in ("X", "y", "like"))
    settled = HEADS[name]().settled(X, y, groups)
    found = MarginHead(settled, negatives, groups).leave_one_out_logits(X, y, groups)
    for i in range(25):
        rest = torch.arange(25) != i if groups is None else groups != groups[i]
        head = MarginHead(settled, negatives, None if groups is None else groups[rest])
        expected = head.logits(head.fit(X[rest], y[rest]), X[i : i + 1])
        torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("head", [AutoHead(), CosineHead()], ids=["auto", "cosine"])
def test_left_out_examples_of_no_class_score_as_queries_of_a_refit(head: Any, number: int) -> None:
    task = gaussian_task(2)
    X, y, rows = (torch.tensor(task[part]) for part in ("X", "y", "like"))
    settled, negatives = head.settled(X, y), rows[:number]
    terms = (*SIMILARITIES, similarity_to_negatives(settled, Features(negatives), Features(X), y, None))
    found = left_out_negatives(settled, Features(negatives), Features(X), y, None, terms)
    assert found.keys() == {"head", *(term.name for term in terms)}
    torch.testing.assert_close(found["head"], settled.logits(settled.fit(X, y), negatives).double())
    assert number > 1 or found["negatives"].tolist() == [[np.inf]]  # nothing is left that it could be like
    for i in range(number if number > 1 else 0):
        others = MarginHead(settled, torch.cat([negatives[:i], negatives[i + 1 :]]))
        expected = others.logits(others.fit(X, y), negatives[i : i + 1]).double()
        torch.testing.assert_close(found["negatives"][i : i + 1], expected, rtol=1e-6, atol=1e-8)


def test_a_round_of_doubtful_labels_costs_nothing() -> None:
    """Two classes against anything else; ten labels of images in doubt between them, five of none."""
    gains, rejected = [], []
    for task in map(gaussian_task, range(30)):
        known = task["known"][np.arange(200) % 5 < 2]
        truth = np.concatenate([np.arange(80) % 2, np.full(200, -1)])
        pool, (X, y) = np.concatenate([known, task["unknown"]]), (task["X"][task["y"] < 2], task["y"][task["y"] < 2])
        first = MahalanobisClassifier(unknown_label=-1).fit(X, y)
        doubt = first.predict_proba(pool).max(axis=1).argsort()
        asked = np.concatenate([doubt[truth[doubt] >= 0][:10], doubt[truth[doubt] < 0][:5]])
        second = MahalanobisClassifier(unknown_label=-1).fit(
            np.concatenate([X, pool[asked]]), np.concatenate([y, truth[asked]])
        )
        before, after = (classifier.predict(pool) for classifier in (first, second))
        gains.append((after == truth).mean() - (before == truth).mean())
        rejected.append((after[:80] == -1).mean())
    assert np.mean(gains) - 1.96 * np.std(gains, ddof=1) / 30**0.5 > 0
    assert np.mean(rejected) < 0.065


@pytest.mark.parametrize("groups", [None, [i // 10 * 5 + i % 5 for i in range(25)]])
@pytest.mark.parametrize("negatives", ["like", "far"])
def test_their_term_is_limited_and_its_unit_is_that_of_all_left_out_examples(
    negatives: str, groups: list[int] | None
) -> None:
    task = gaussian_task(7)
    X, y = np.concatenate([task["X"], task[negatives]]), np.concatenate([task["y"], np.full(9, -1)])
    names = None if groups is None else [*groups, *range(100, 109)]
    classifier = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.1).fit(X, y, groups=names)
    head = classifier.fitted_head_
    margin = MarginHead(head.settled, torch.tensor(task[negatives]), head.groups)
    left_out = -margin.leave_one_out_logits(head.support.adapted, head.labels, head.groups)[:, 0].numpy()
    logits = np.sort(head.logits(head.support.adapted).numpy())
    least = -np.sort(logits[:, -1] - logits[:, -2])[12]
    assert negatives == "like" or (left_out < least).any()
    weights = np.ones(25) if groups is None else 1 / np.bincount(groups)[groups]
    n = weights.sum()
    deviation = np.sqrt(weights @ (left_out - weights @ left_out / n) ** 2 / (n - 1))
    assert head.outliers is not None
    assert head.outliers.units is not None
    mean, unit = head.outliers.units["negatives"]
    np.testing.assert_allclose(unit, deviation / 3, rtol=1e-6)
    np.testing.assert_allclose(mean, weights @ left_out.clip(least) / n, rtol=1e-6)


# ---------------------------------------------------------------- as an estimator


def rejecting(**settings: Any) -> SimpleCNAPSClassifier:
    checkpoint = settings.pop("checkpoint", None) or tiny_model()
    return SimpleCNAPSClassifier(checkpoint, device="cpu", unknown_label=NONE, false_rejection_rate=0.3, **settings)


def assert_same_answers(first: Any, second: Any, X: Any, **tolerance: float) -> None:
    np.testing.assert_allclose(first.threshold_, second.threshold_, **tolerance)
    np.testing.assert_allclose(first.outlier_score(X), second.outlier_score(X), **tolerance)
    assert np.array_equal(first.predict(X), second.predict(X))


def mixed(order: NDArray[np.int64]) -> tuple[list[Any], list[str]]:
    """Eight images of classes and five of none."""
    images, labels = [*pictures(8, 1), *pictures(5, 2)], [*LABELS, *[NONE] * 5]
    return [images[i] for i in order], [labels[i] for i in order]


def test_partial_fit_adds_them_in_any_order_and_keeps_the_earlier_ones() -> None:
    task = gaussian_task(2)
    whole, parts = fitted(task, "like"), MahalanobisClassifier(unknown_label=-1)
    parts.fit(np.concatenate([task["like"][:2], task["X"][:20]]), np.concatenate([[-1, -1], task["y"][:20]]))
    parts.partial_fit(task["like"][2:], [-1] * 7).partial_fit(task["X"][20:], task["y"][20:])
    assert_same_answers(parts, whole, task["unknown"], rtol=1e-9)

    queries = pictures(6, 3)
    at_once = rejecting(checkpoint=adapting_model()).fit(*mixed(np.random.default_rng(0).permutation(13)))
    later = rejecting(checkpoint=adapting_model()).fit(*mixed(np.arange(8)))
    later.partial_fit(*mixed(np.arange(8, 10))).partial_fit(*mixed(np.arange(10, 13)))
    assert later.classes_.tolist() == at_once.classes_.tolist() == ["blue", "green", "red"]
    assert later.class_counts_.tolist() == at_once.class_counts_.tolist() == [3, 3, 2]
    assert_same_answers(later, at_once, queries, rtol=1e-3)


def test_the_network_adapts_to_images_of_classes_alone() -> None:
    model = adapting_model()
    for batch_size in (64, 2):  # two are more batches than are kept
        without = rejecting(checkpoint=model, batch_size=batch_size).fit(*mixed(np.arange(8)))
        taught = rejecting(checkpoint=model, batch_size=batch_size).fit(*mixed(np.arange(13)[::-1]))
        np.testing.assert_allclose(taught.transform(pictures(4, 3)), without.transform(pictures(4, 3)), rtol=1e-3)


def test_images_keep_their_paths_where_some_are_of_no_class(tmp_path: Path) -> None:
    images, labels = mixed(np.array([8, 0, 1, 9, 2, 3, 4, 5, 6, 7]))
    paths = [tmp_path / f"{place}.png" for place in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    summary = rejecting().fit(paths[:6], labels[:6]).partial_fit(paths[6:], labels[6:]).summary()
    assert summary.names == [str(path) for path, label in zip(paths, labels, strict=True) if label != NONE]
    assert sum(summary.counts.values()) == 8


def test_a_copy_of_an_image_of_a_class_is_named() -> None:
    images, labels = mixed(np.arange(13))
    with pytest.warns(UserWarning, match=f"image 2 in red and image 9 in {NONE}"):
        rejecting().fit([*images[:9], images[2]], [*labels[:9], NONE])
    with pytest.warns(UserWarning, match=f"earlier image 8 in {NONE} and image 1 in red"):
        rejecting().fit(images[:9], labels[:9]).partial_fit([images[9], images[8]], [NONE, "red"])


def test_files_pickles_and_clones_keep_them(tmp_path: Path) -> None:
    images, labels = mixed(np.arange(13))
    of_images = rejecting(checkpoint=unadapted_model()).fit(images, labels)
    adapted = rejecting(checkpoint=adapting_model()).fit(images, labels)
    task = gaussian_task(3)
    for classifier, X, more in (
        (of_images, pictures(6, 3), pictures(2, 4)),
        (adapted, pictures(6, 3), pictures(2, 4)),
        (fitted(task, "like"), task["unknown"], task["far"][:2]),
    ):
        classifier.save(tmp_path / "model.safetensors")
        loaded = type(classifier).load(tmp_path / "model.safetensors")
        unpickled = pickle.loads(pickle.dumps(classifier))
        none = [classifier.unknown_label] * 2
        for again in (loaded, unpickled):
            assert_same_answers(again, classifier, X, rtol=0)
        classifier.partial_fit(more, none)
        for again in (loaded, unpickled):
            assert_same_answers(again.partial_fit(more, none), classifier, X, rtol=1e-9)
    again = clone(classifier).fit(np.concatenate([task["X"], task["like"]]), [*task["y"], *[-1] * 9])
    assert_same_answers(again, fitted(task, "like"), task["unknown"], rtol=0)


@pytest.mark.slow
def test_an_exported_file_rejects_as_predict_does(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    task = gaussian_task(4)
    features = fitted(task, "like")
    features.export_onnx(tmp_path / "features.onnx")
    run = onnxruntime.InferenceSession(tmp_path / "features.onnx").run
    _, indices, scores = run(None, {"features": task["unknown"].astype(np.float32)})
    np.testing.assert_allclose(scores, features.outlier_score(task["unknown"]), rtol=1e-3, atol=1e-3)
    assert np.array_equal(np.append(features.classes_, -1)[indices], features.predict(task["unknown"]))
    assert np.mean(indices == 5) > np.mean(fitted(task, None).predict(task["unknown"]) == -1)


def test_the_module_that_graphs_have_inside_rejects_as_predict_does() -> None:
    digits = load_digits()
    chosen = np.concatenate([np.flatnonzero(digits.target == digit)[:5] for digit in range(7)])
    labels = np.where(digits.target[chosen] < 5, digits.target[chosen], -1)
    images = SimpleCNAPSClassifier(device="cpu", unknown_label=-1, image_size=64)
    images.fit(digits.images[chosen] / 16, labels)
    features = images.features(digits.images[100:140] / 16)
    with torch.no_grad():
        _, indices, scores = images.fitted_head_.export()(features)
    np.testing.assert_allclose(scores, images.outlier_score(features), rtol=1e-3, atol=1e-3)
    assert np.array_equal(np.append(images.classes_, -1)[indices], images.predict(features))


def test_the_command_takes_them_in_a_folder_of_the_unknown_label(tmp_path: Path) -> None:
    save_checkpoint(unadapted_model(), tmp_path / "model")
    images, labels = mixed(np.arange(13))
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "support" / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "support" / label / f"{place}.png")
    output = tmp_path / "colours.safetensors"
    options = ["--checkpoint", str(tmp_path / "model"), "-o", str(output), "--unknown-label", NONE]
    result = CliRunner().invoke(
        app, ["fit", str(tmp_path / "support"), *options, "--false-rejection-rate", "0.3", "--report"]
    )
    assert result.exit_code == 0, result.output
    assert "3 classes (blue 3, green 3, red 2), and 5 images of no class" in result.output
    assert "8 support images of 3 classes" in result.output
    assert "5 images of no class, which teach what to reject" in result.output
    negatives = SimpleCNAPSClassifier.load(output).fitted_head_.negatives
    assert negatives is not None
    assert len(negatives.adapted) == 5


# ---------------------------------------------------------------- errors


def test_examples_of_no_class_alone_are_refused() -> None:
    for classifier, X in (
        (MahalanobisClassifier(unknown_label="none"), np.eye(3)),
        (SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label="none"), pictures(3, 1)),
    ):
        for method in (classifier.fit, classifier.partial_fit):
            with pytest.raises(ValueError, match="every label is unknown_label='none'"):
                method(X, ["none"] * 3)
        assert not hasattr(classifier, "_fitted")


def test_they_are_no_class_among_those_allowed() -> None:
    task = gaussian_task(5)
    classifier = MahalanobisClassifier(unknown_label=-1)
    classifier.partial_fit(task["X"], task["y"], classes=[0, 1, 2, 3, 4]).partial_fit(task["like"], [-1] * 9)
    assert_same_answers(classifier, fitted(task, "like"), task["unknown"], rtol=1e-9)


def test_they_are_left_out_with_a_warning_where_nothing_is_unknown_any_more() -> None:
    task = gaussian_task(6)
    of_images = rejecting().fit(*mixed(np.arange(13)))
    for classifier, more, noun, n in (
        (fitted(task, "like"), (task["X"][:2], task["y"][:2]), "examples", 9),
        (of_images, mixed(np.arange(2)), "images", 5),
    ):
        with pytest.warns(UserWarning, match=f"{n} {noun} of no class are left out"):
            classifier.set_params(unknown_label=None).partial_fit(*more)
        assert classifier.threshold_ is None
        assert classifier.fitted_head_.negatives is None
