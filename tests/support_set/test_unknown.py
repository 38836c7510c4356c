"""Unknown classes: the outlier score, the threshold, and what both classifiers make of them."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from typer.testing import CliRunner

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPS, SimpleCNAPSClassifier, adapted_features
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.gaussians.temperature import fit_temperature
from fewshot_mahalanobis.heads import HEADS, Head, MahalanobisHead
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.support_set.calibration import calibrate
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.unknown import (
    SIMILARITIES,
    CentredCosineHead,
    OutlierScore,
    output_labels,
    rejection_threshold,
    separating_threshold,
)
from tests import reference
from tests.drawn_tasks import make_task
from tests.tiny import LABELS, pictures, tiny_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


def gaussian_task(
    rng: np.random.Generator, way: int = 5, shot: int = 5, d: int = 16, queries: int = 400
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Support features and labels, and queries of the same classes."""
    means = 2 * rng.normal(size=(way, d))
    y = np.arange(way).repeat(shot)
    return means[y] + rng.normal(size=(len(y), d)), y, means[np.arange(queries) % way] + rng.normal(size=(queries, d))


def naive_left_out_logits(X: NDArray[np.float64], y: NDArray[np.int64], beta: float) -> torch.Tensor:
    """Logits of every example by the dense formula fitted to the others; minus infinity for a class without others."""
    rows = []
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        present, labels = np.unique(y[rest], return_inverse=True)
        distance = reference.squared_mahalanobis(*map(torch.tensor, (X[rest], labels, X[i : i + 1])), beta=beta)
        rows.append(torch.full((int(y.max()) + 1,), -torch.inf, dtype=torch.float64))
        rows[-1][present] = -distance[0]
    return torch.stack(rows)


# ---------------------------------------------------------------- score and threshold


def test_the_outlier_score_is_the_distance_to_the_nearest_class() -> None:
    X, y, queries = gaussian_task(np.random.default_rng(0))
    distances = reference.squared_mahalanobis(*map(torch.tensor, (X, y, queries)), beta=0.5)
    classifier = MahalanobisClassifier(head="mahalanobis", beta=0.5).fit(X, y)
    np.testing.assert_allclose(classifier.outlier_score(queries), distances.amin(dim=1), rtol=1e-9)
    assert classifier.threshold_ is None


def test_an_image_far_from_every_class_scores_higher_with_every_metric() -> None:
    X, y, queries = gaussian_task(np.random.default_rng(0))
    features, labels = torch.tensor(X), torch.tensor(y)
    for name in ("mahalanobis", "euclidean", "manhattan", "cosine", "dot_product"):
        head = HEADS[name]()
        known = OutlierScore.head_score(head(features, labels, torch.tensor(queries)))
        away = OutlierScore.head_score(head(features, labels, -torch.tensor(queries)))
        assert float(away.median()) > float(known.median()), name


def test_ranks_of_the_threshold_follow_the_promised_rate() -> None:
    scores = torch.arange(1.0, 20.0)[torch.randperm(19, generator=torch.Generator().manual_seed(0))]  # ranks 1 to 19
    assert rejection_threshold(scores, 0.05) == pytest.approx(19)  # 20 * 0.95
    assert rejection_threshold(scores, 0.1) == pytest.approx(18)
    assert rejection_threshold(scores, 0.125) == pytest.approx(17.5)
    assert rejection_threshold(scores, 0.5) == pytest.approx(10)


def test_a_rate_too_fine_for_the_examples_is_warned_of() -> None:
    scores = torch.arange(10.0)
    with pytest.warns(UserWarning, match=r"10 left-out examples cannot guarantee .* set 0.091 or more"):
        assert rejection_threshold(scores, 0.05) == 9.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rejection_threshold(scores, 1 / 11)


def test_the_warning_points_at_the_line_that_called_fit() -> None:
    X, y, _ = gaussian_task(np.random.default_rng(0), way=2)
    images = SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label="none")
    for classifier, examples, labels in (
        (MahalanobisClassifier(unknown_label=-1), X, y),
        (images, pictures(8, 1), LABELS),
    ):
        with pytest.warns(UserWarning, match="cannot guarantee") as caught:
            classifier.fit(examples, labels)
        # Garbage of earlier tests may be collected meanwhile, and warn of itself.
        assert [w.filename for w in caught if "cannot guarantee" in str(w.message)] == [__file__]


@pytest.mark.parametrize(("shot", "rate"), [(5, 0.05), (5, 0.3), (3, 0.1), (10, 0.05)])
def test_known_queries_are_rejected_at_the_promised_rate(shot: int, rate: float) -> None:
    """On average over tasks of five Gaussian classes, within 3 points; by the default head never more."""
    rejected: dict[str, list[float]] = {"mahalanobis": [], "auto": []}
    for seed in range(60):
        X, y, queries = gaussian_task(np.random.default_rng(seed), shot=shot)
        for head, found in rejected.items():
            classifier = MahalanobisClassifier(head=head, unknown_label=-1, false_rejection_rate=rate).fit(X, y)
            found.append(float(np.mean(classifier.predict(queries) == -1)))
    assert np.mean(rejected["mahalanobis"]) == pytest.approx(rate, abs=0.03)
    assert rate / 2 < np.mean(rejected["auto"]) < rate + 0.01


def test_classes_far_from_all_known_ones_are_rejected() -> None:
    rng = np.random.default_rng(1)
    X, y, _ = gaussian_task(rng)
    strangers = 12 * rng.normal(size=(1, 16)) + rng.normal(size=(50, 16))
    assert set(MahalanobisClassifier(unknown_label=-1).fit(X, y).predict(strangers)) == {-1}


# ---------------------------------------------------------------- against n refits


def test_temperature_and_threshold_are_those_of_n_refits_of_the_dense_formula() -> None:
    features, labels, _ = make_task(3, [4, 1, 5, 2, 6], 12, dtype=torch.float64)
    X, y = features.numpy(), labels.numpy()
    classifier = MahalanobisClassifier(
        beta=0.7, head="mahalanobis", scale=0.5, temperature="auto", unknown_label=9, false_rejection_rate=0.2
    ).fit(X, y)
    logits = 0.5 * naive_left_out_logits(X, y, beta=0.7)
    told = y != 1  # the one example of class 1 has no class when it is left out
    own = np.flatnonzero(told), y[told]
    logits[own] *= torch.tensor(1 - 1 / np.bincount(y)[y[told]] ** 2)  # as near as a query is to a mean of one more
    # 18 examples span all 12 dimensions: nothing of a distance is common to all classes.
    assert classifier.temperature_ == pytest.approx(fit_temperature(logits[told], labels[told]), rel=1e-4)
    ordered = np.sort(-logits.amax(dim=1).numpy()[told])
    assert len(ordered) == 17
    rank = 18 * 0.8  # between the 14th and the 15th
    expected = ordered[13] + (rank - 14) * (ordered[14] - ordered[13])
    assert classifier.threshold_ == pytest.approx(expected, rel=1e-9)


def naive_cosine(x: NDArray[np.float64], mean: NDArray[np.float64]) -> float:
    return float(x @ mean / np.sqrt((x @ x) * (mean @ mean)))


def naive_similarity(
    name: str, x: NDArray[np.float64], support: NDArray[np.float64], labels: NDArray[np.int64]
) -> float:
    """Minus the largest cosine of one image to a class mean."""
    if name == "frozen":
        x, support = np.cbrt(x), np.cbrt(support)
    means = [np.mean(support[labels == label], axis=0) for label in np.unique(labels)]
    centre = np.mean(means, axis=0) if name == "centred" else 0.0
    return -max(naive_cosine(x - centre, mean - centre) for mean in means)


class NaiveOutlierScore:
    """The formulas, one image at a time, with a refit for each image left out."""

    def __init__(self, classifier: SimpleCNAPSClassifier, model: SimpleCNAPS, images: Any, labels: list[str]) -> None:
        self.classifier, self.labels = classifier, np.unique(labels, return_inverse=True)[1]
        self.unadapted = SimpleCNAPSClassifier(model, device="cpu", adapt=False, precision="float32")
        self.unadapted.fit(images, labels)
        self.support = self.features(images)
        left_out = [self.scores(i) for i in range(len(labels)) if np.sum(self.labels == self.labels[i]) > 1]
        self.mean, self.std = np.mean(left_out, axis=0), np.std(left_out, axis=0, ddof=1)
        self.std[3] /= 2  # the weight of the features without adaptation
        n = len(left_out)  # whose units were made of themselves
        self.left_out = np.sum((np.array(left_out) - self.mean) / self.std, axis=1) * np.sqrt((n + 1) / (n - 1))

    def features(self, images: Any) -> dict[str, NDArray[np.float64]]:
        adapted = self.classifier.transform(images).astype(np.float64)
        return {"adapted": adapted, "centred": adapted, "frozen": self.unadapted.transform(images).astype(np.float64)}

    def scores(self, i: int, queries: dict[str, NDArray[np.float64]] | None = None) -> list[float]:
        """Of query i; of support image i left out if there are no queries."""
        rest = np.arange(len(self.labels)) != (i if queries is None else -1)
        labels = np.unique(self.labels[rest], return_inverse=True)[1]
        x = {name: (self.support if queries is None else queries)[name][i] for name in self.support}
        fitted = self.classifier.fitted_head_
        query = torch.from_numpy(x["adapted"])[None].float()
        logits = fitted.head(fitted.support.adapted[rest], torch.from_numpy(labels), query)[0].double().detach().numpy()
        if queries is None and fitted.head.distance_power == 2:
            own = self.labels[i]
            logits[own] *= 1 - 1 / np.sum(self.labels == own) ** 2  # of a mean of one example fewer
        return [-logits.max(), *(naive_similarity(name, x[name], self.support[name][rest], labels) for name in x)]

    def __call__(self, images: Any) -> NDArray[np.float64]:
        queries = self.features(images)
        scores = [self.scores(i, queries) for i in range(len(images))]
        return np.sum((np.array(scores) - self.mean) / self.std, axis=1)


def adapting_model() -> SimpleCNAPS:
    """Untrained, with FiLM parameters far from the identity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "scales" in name:
                parameter.mul_(300)
    return model.eval()


@pytest.mark.parametrize("head", ["mahalanobis", "euclidean", "cosine"])
@pytest.mark.parametrize("adapt", [True, False])
def test_the_outlier_score_of_images_is_the_sum_of_its_standardised_terms(head: str, adapt: bool) -> None:
    """One class has one image: it is a neighbour of the others, and never left out."""
    model = adapting_model()
    settings: dict[str, Any] = {"adapt": adapt, "precision": "float32", "device": "cpu"}
    classifier = SimpleCNAPSClassifier(
        model, head=head, temperature="auto", unknown_label="none of these", false_rejection_rate=0.25, **settings
    )
    images, labels, queries = pictures(9, 1), [*LABELS, "alone"], pictures(5, 2)
    naive = NaiveOutlierScore(classifier.fit(images, labels), model, images, labels)
    assert np.allclose(naive.support["adapted"], naive.support["frozen"], rtol=0.01) != adapt
    np.testing.assert_allclose(classifier.outlier_score(queries), naive(queries), rtol=2e-3, atol=2e-3)
    assert classifier.threshold_ == pytest.approx(np.quantile(naive.left_out, 0.75, method="weibull"), rel=1e-2)
    rejected = naive(queries) > classifier.threshold_
    assert (classifier.predict(queries) == "none of these").tolist() == rejected.tolist()
    without = SimpleCNAPSClassifier(model, head=head, **settings).fit(images, labels)
    np.testing.assert_allclose(without.outlier_score(queries), -without.task_.logits(batch_of(queries)).amax(dim=1))


def batch_of(images: NDArray[np.uint8]) -> torch.Tensor:
    (batch,) = ImageBatches(images, 32)
    return batch


def test_centred_cosines_without_refits_are_those_of_n_refits() -> None:
    features, labels, queries = make_task(3, [4, 1, 5, 2, 1], 12, dtype=torch.float64)
    head = CentredCosineHead()
    expected = Head.leave_one_out_logits(head, features, labels)
    torch.testing.assert_close(head.leave_one_out_logits(features, labels), expected, rtol=1e-10, atol=1e-10)
    of_copies = torch.arange(13) // 2 * 10 + labels
    of_classes = torch.arange(13) // 3
    for groups in (of_copies, of_classes, labels):
        expected = Head.leave_one_out_logits(head, features, labels, groups)
        torch.testing.assert_close(head.leave_one_out_logits(features, labels, groups), expected, rtol=1e-9, atol=1e-9)
    x, y = features.numpy(), labels.numpy()
    scores = [naive_similarity("centred", query, x, y) for query in queries.numpy()]
    np.testing.assert_allclose(-head(features, labels, queries).amax(dim=1), scores, rtol=1e-10)


def test_copies_of_one_picture_for_each_class_leave_a_finite_score() -> None:
    images = np.repeat(pictures(2, 1), 2, axis=0)
    with pytest.raises(ValueError, match="that are not copies"):  # what would be left out stays
        rejecting_images(temperature=1.0).fit(images, ["a", "a", "b", "b"])
    with pytest.warns(UserWarning, match="copies"):
        classifier = rejecting_images(temperature=1.0).fit([*images, *pictures(2, 3)], [*"aabbcc"])
    assert np.isfinite(classifier.outlier_score(pictures(3, 2))).all()
    assert classifier.predict(images[::2]).tolist() == ["a", "b"]


def test_an_unknown_label_set_after_the_fit_is_warned_about_and_uses_adapted_features_alone() -> None:
    images = pictures(8, 1)
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", precision="float32").fit(images, LABELS)
    classifier.set_params(unknown_label="none", false_rejection_rate=0.3)
    with pytest.warns(UserWarning, match="unknown_label was set after fit"):
        classifier.partial_fit(images[:3], LABELS[:3])
    assert classifier.fitted_head_.support.unadapted is None
    assert np.isfinite(classifier.outlier_score(images)).all()
    assert classifier.fit(images, LABELS).fitted_head_.support.unadapted is not None
    classifier.set_params(unknown_label=None).partial_fit(images[:3], LABELS[:3])
    assert (classifier.threshold_, classifier.task_.unadapted) == (None, None)
    expected = -classifier.task_.logits(batch_of(images)).amax(dim=1)
    np.testing.assert_allclose(classifier.outlier_score(images), expected, rtol=1e-6)


def test_adapted_classifiers_keep_their_score_in_files_and_pickles_and_add_images_to_it(tmp_path: Path) -> None:
    images = pictures(8, 1)
    classifier = rejecting_images(adapting_model()).fit(images, LABELS)
    classifier.save(tmp_path / "model.safetensors")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "model.safetensors", device="cpu")
    queries = pictures(6, 3)
    for again in (loaded, pickle.loads(pickle.dumps(classifier))):
        assert_same_decisions(again, classifier, queries)
    more = pictures(4, 5), ["red", "blue", "pink", "pink"]
    assert_same_decisions(loaded.partial_fit(*more), classifier.partial_fit(*more), queries)


def test_probabilities_are_the_softmax_of_the_logits_over_the_temperature() -> None:
    X, y, queries = gaussian_task(np.random.default_rng(0))
    images = pictures(6, 2)
    of_features = MahalanobisClassifier(temperature=3.0).fit(X, y)
    of_images = SimpleCNAPSClassifier(tiny_model(), device="cpu", temperature=3.0).fit(pictures(8, 1), LABELS)
    for classifier, items in ((of_features, queries), (of_images, images)):
        expected = (torch.from_numpy(classifier.decision_function(items)).double() / 3).softmax(dim=1)
        np.testing.assert_allclose(classifier.predict_proba(items), expected, rtol=1e-6)
        np.testing.assert_allclose(np.exp(classifier.predict_log_proba(items)), expected, rtol=1e-6)
        assert classifier.temperature_ == 3.0


def test_where_nothing_can_be_left_out_the_temperature_is_one() -> None:
    assert MahalanobisClassifier(temperature="auto").fit([[0.0], [1.0]], ["a", "b"]).temperature_ == 1.0


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("classes", "unknown", "dtype"),
    [
        (np.array(["a", "bb"]), "a long name", "<U11"),
        (np.array(["a long name", "b"]), "?", "<U11"),
        (np.array(["a", "b"], dtype=object), "unknown", "O"),
        (np.array([0, 1]), -1, "int64"),
        (np.array([0, 1], dtype=np.uint8), -1, "int16"),
        (np.array([0, 1], dtype=np.int8), 300, "int32"),
        (np.array([0.0, 1.0]), -1.0, "float64"),
        (np.array([0, 1]), None, "int64"),
    ],
)
def test_the_output_labels_hold_the_unknown_one(classes: NDArray[Any], unknown: Any, dtype: str) -> None:
    labels = output_labels(classes, unknown)
    assert labels.dtype == dtype
    assert labels.tolist() == [*classes.tolist(), *([] if unknown is None else [unknown])]


@pytest.mark.parametrize(
    ("classes", "unknown", "message"),
    [
        (["a", "b"], -1, "unknown_label=-1 is not of the type of the labels, such as 'a': give a string"),
        ([0, 1], "unknown", "unknown_label='unknown' is not of the type of the labels, such as 0: give an integer"),
        ([0, 1], True, "give an integer"),
        ([0, 1], 0.5, "give an integer"),
        ([0.0, 1.0], float("nan"), "give a number"),
        ([False, True], 2, "fit to integers or strings"),
        (["a", "b"], "b", "unknown_label='b' is the label of a class: choose another"),
        (np.array([0, 1], dtype=np.uint64), -1, "no integer type holds"),
        ([0, 1], 2**70, "no integer type holds"),
    ],
)
def test_an_unknown_label_that_does_not_fit_is_refused(classes: Any, unknown: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        output_labels(np.asarray(classes), unknown)


@pytest.mark.parametrize(("names", "unknown"), [([0, 1, 2], -1), (["ox", "cat", "dog"], "none of these animals")])
def test_predictions_are_those_without_rejection_where_nothing_is_rejected(names: list[Any], unknown: Any) -> None:
    X, y, queries = gaussian_task(np.random.default_rng(4), way=3, shot=8)
    queries = np.concatenate([queries, 3 * queries])
    labels = np.array(names)[y]
    plain = MahalanobisClassifier().fit(X, labels)
    rejecting = MahalanobisClassifier(unknown_label=unknown).fit(X, labels)
    predicted = rejecting.predict(queries)
    rejected = rejecting.outlier_score(queries) > rejecting.threshold_
    assert 0 < rejected.mean() < 1
    assert set(predicted[rejected].tolist()) == {unknown}
    assert np.array_equal(predicted[~rejected], plain.predict(queries)[~rejected])
    assert np.array_equal(rejecting.predict_proba(queries), plain.predict_proba(queries))
    assert np.array_equal(rejecting.decision_function(queries), plain.decision_function(queries))
    assert np.array_equal(rejecting.classes_, plain.classes_)
    assert rejecting.score(queries, predicted) == 1.0


def test_without_a_threshold_no_query_is_rejected() -> None:
    class Logits(Head[None]):
        def fit(self, support_features: torch.Tensor, support_labels: torch.Tensor) -> None:
            return None

        def logits(self, state: None, query_features: torch.Tensor) -> torch.Tensor:
            return query_features

    queries = Features(torch.tensor([[-1e9, -2e9], [-3.0, -1.0]]))
    fitted = FittedHead.fit(Logits(), queries, torch.tensor([0, 1]))
    assert fitted.predict(queries).indices.tolist() == [0, 1]
    for threshold in (2.0, 1.0):  # a score at the threshold is not above it
        state = fitted.to_state()
        state["values"] = msgspec.structs.replace(state["values"], unknown_label=-1, threshold=threshold)
        assert FittedHead.from_state(state).predict(queries).indices.tolist() == [2, 1]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("inf")}, "temperature must be positive"),
        ({"temperature": "automatic"}, "temperature must be positive and finite, or"),
        ({"false_rejection_rate": 0.0}, "false_rejection_rate must lie between 0 and 1"),
        ({"false_rejection_rate": 5}, "false_rejection_rate must lie between 0 and 1"),
        ({"unknown_label": 3}, "give a string"),
    ],
)
def test_a_refused_setting_leaves_the_fitted_state(parameters: dict[str, Any], message: str) -> None:
    images, names = pictures(8, 1), np.array(LABELS)
    features = images.reshape(8, -1) / 255.0
    classifiers = MahalanobisClassifier(), SimpleCNAPSClassifier(tiny_model(), device="cpu")
    for classifier, X in zip(classifiers, (features, images)):
        classifier.fit(X[:4], names[:4])
        before = classifier.decision_function(X)
        with pytest.raises(ValueError, match=message):
            classifier.set_params(**parameters).fit(X, names)
        with pytest.raises(ValueError, match=message):
            classifier.partial_fit(X[4:], names[4:])
        assert np.array_equal(classifier.decision_function(X), before)
        assert classifier.class_counts_.sum() == 4


def test_settings_that_do_not_fit_are_refused_before_the_network_runs() -> None:
    model = tiny_model()
    settings: list[dict[str, Any]] = [
        {"unknown_label": -1},
        {"false_rejection_rate": 2.0},
        {"temperature": "hot"},
    ]
    for setting in settings:
        classifier = SimpleCNAPSClassifier(model, device="cpu", **setting)
        with (
            patch.object(adapted_features, "adapted_network", side_effect=AssertionError("the network ran")),
            pytest.raises(ValueError, match=next(iter(setting))),
        ):
            classifier.fit(pictures(8, 1), LABELS)
    fitted = SimpleCNAPSClassifier(model, device="cpu", unknown_label="none", false_rejection_rate=0.4)
    fitted.fit(pictures(8, 1), LABELS).set_params(unknown_label=LABELS[0])
    with (
        patch.object(AdaptedNetwork, "features", side_effect=AssertionError("the network ran")),
        pytest.raises(ValueError, match="is the label of a class"),
    ):
        fitted.partial_fit(pictures(1, 2), [LABELS[0]])


def test_one_pass_through_the_network_gives_all_answers() -> None:
    classifier = SimpleCNAPSClassifier(
        tiny_model(), device="cpu", temperature="auto", unknown_label="none", false_rejection_rate=0.4
    ).fit(pictures(8, 1), LABELS)
    images = pictures(20, 3)
    seen = classifier.task_.network.extractor.batches  # type: ignore[union-attr,operator]
    before = sum(seen)
    said = classifier.predict_all(images)
    assert sum(seen) - before == len(images)
    assert said.labels.tolist() == classifier.predict(images).tolist()
    np.testing.assert_allclose(said.probabilities, classifier.predict_proba(images), rtol=1e-6)
    assert said.unknown.tolist() == (classifier.outlier_score(images) > classifier.threshold_).tolist()
    assert 0 < said.unknown.sum() < len(images)
    np.testing.assert_array_equal(said.features, classifier.transform(images))
    np.testing.assert_allclose(said.outlier_scores, classifier.outlier_score(images), rtol=1e-6)


def test_classes_of_one_example_each_leave_no_threshold_to_find() -> None:
    with pytest.raises(ValueError, match="needs a class of at least two examples"):
        MahalanobisClassifier(unknown_label="?").fit([[0.0], [1.0]], ["a", "b"])
    with pytest.raises(ValueError, match="needs a class of at least two examples"):
        SimpleCNAPSClassifier(tiny_model(), device="cpu", unknown_label="?").fit(pictures(2, 1), ["a", "b"])


def test_a_class_may_not_become_the_unknown_one() -> None:
    features = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.5).fit([[0.0], [0.1], [1.0]], [0, 0, 1])
    images = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), LABELS)
    for classifier, X, label in ((features, [[2.0]], 1), (images, pictures(1, 2), "red")):
        before = classifier.classes_.tolist()
        with pytest.raises(ValueError, match="label of a class"):
            classifier.set_params(unknown_label=label).partial_fit(X, [label])
        assert classifier.classes_.tolist() == before


# ---------------------------------------------------------------- as an estimator


def rejecting_images(model: SimpleCNAPS | None = None, **arguments: Any) -> SimpleCNAPSClassifier:
    settings = {"temperature": "auto", "unknown_label": "none of these", "false_rejection_rate": 0.3}
    return SimpleCNAPSClassifier(model or tiny_model(), device="cpu", **{**settings, **arguments})


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    """An untrained one of a real network, as files hold no other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SimpleCNAPS(adaptation="none", image_size=32).eval()


def assert_same_decisions(first: Any, second: Any, X: Any) -> None:
    assert (first.temperature_, first.threshold_) == (second.temperature_, second.threshold_)
    assert np.array_equal(first.predict(X), second.predict(X))
    assert first.predict(X).dtype == second.predict(X).dtype
    assert np.array_equal(first.predict_proba(X), second.predict_proba(X))
    assert np.array_equal(first.outlier_score(X), second.outlier_score(X))


def test_partial_fit_calibrates_on_all_examples_so_far() -> None:
    X, y, queries = gaussian_task(np.random.default_rng(2))
    settings = {"temperature": "auto", "unknown_label": -1, "false_rejection_rate": 0.2}
    parts, whole = MahalanobisClassifier(**settings), MahalanobisClassifier(**settings).fit(X, y)
    for part in np.array_split(np.arange(len(y)), 3):  # later ones bring new classes
        parts.partial_fit(X[part], y[part])
    assert_same_decisions(parts, whole, queries)

    images, names = pictures(8, 1), LABELS
    in_parts = rejecting_images().fit(images[:5], names[:5]).partial_fit(images[5:], names[5:])
    at_once = rejecting_images().fit(images, names)
    assert in_parts.threshold_ == pytest.approx(at_once.threshold_, rel=1e-5)
    assert in_parts.temperature_ == pytest.approx(at_once.temperature_, rel=1e-4)


@pytest.mark.parametrize("labels", [LABELS, [len(name) for name in LABELS]])
def test_saved_and_pickled_classifiers_keep_threshold_and_temperature_to_the_bit(
    labels: list[Any], model: SimpleCNAPS, tmp_path: Path
) -> None:
    unknown = "none of these" if isinstance(labels[0], str) else -7
    classifier = rejecting_images(model, unknown_label=unknown).fit(pictures(8, 1), labels)
    classifier.save(tmp_path / "model.safetensors")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "model.safetensors", device="cpu")
    queries = np.concatenate([pictures(6, 3), 0 * pictures(2, 4)])
    assert unknown in classifier.predict(queries).tolist()
    assert loaded.get_params()["unknown_label"] == unknown
    for again in (loaded, pickle.loads(pickle.dumps(classifier))):
        assert_same_decisions(again, classifier, queries)
    more = pictures(3, 5), labels[:3]
    assert_same_decisions(loaded.partial_fit(*more), classifier.partial_fit(*more), queries)

    of_features = MahalanobisClassifier(temperature="auto", unknown_label=-1, false_rejection_rate=0.2)
    X, y, queries = gaussian_task(np.random.default_rng(2))
    of_features.fit(X, y)
    assert_same_decisions(pickle.loads(pickle.dumps(of_features)), of_features, queries)


@pytest.mark.parametrize("negatives", [0, 6])
def test_another_rate_is_in_force_without_a_fit_and_is_that_of_a_fit_with_it(negatives: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    X, y, queries = gaussian_task(rng, way=3)
    X, y = np.concatenate([X, 3 * rng.normal(size=(negatives, 16))]), np.append(y, [-1] * negatives)
    fitted = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.1).fit(X, y)
    before = fitted.threshold_
    fitted.save(tmp_path / "fitted")
    for same in (fitted, pickle.loads(pickle.dumps(fitted)), MahalanobisClassifier.load(tmp_path / "fitted")):
        assert same.threshold_ == before
        same.set_params(false_rejection_rate=0.4)
        other = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.4).fit(X, y)
        assert same.threshold_ == pytest.approx(other.threshold_, rel=1e-12)
        assert (same.predict(queries) == other.predict(queries)).all()
        same.save(tmp_path / "again")
        assert MahalanobisClassifier.load(tmp_path / "again").threshold_ == same.threshold_
        assert same.set_params(false_rejection_rate=0.1).threshold_ == before
        with pytest.raises(ValueError, match="false_rejection_rate must lie between 0 and 1, got 2"):
            same.set_params(false_rejection_rate=2).predict(queries)


def test_a_rate_that_is_set_for_images_leaves_near_twins_out_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    twins = np.repeat(rng.normal(size=(24, 512)), 2, axis=0) + 1e-3 * rng.normal(size=(48, 512))
    labels, found = torch.arange(48) // 16, {}
    pairs = np.arange(48).reshape(-1, 2)
    for rate in (0.1, 0.3):
        settings: dict[str, Any] = {"unknown_label": -1, "false_rejection_rate": rate, "twins": pairs}
        found[rate] = FittedHead.fit(HEADS["auto"](), Features(torch.from_numpy(twins)), labels, **settings)
    again = FittedHead.from_state(found[0.1].to_state())
    assert found[0.1].outliers is not None
    assert found[0.3].outliers is not None
    assert found[0.1].at_rate(0.3).outliers.threshold == found[0.3].outliers.threshold  # type: ignore[union-attr]
    assert again.at_rate(0.3).outliers.threshold == pytest.approx(found[0.3].outliers.threshold)  # type: ignore[union-attr]


@pytest.mark.parametrize("way", [1, 2, 4])
def test_doubt_is_that_of_the_nearest_boundary(way: int) -> None:
    X, y, queries = gaussian_task(np.random.default_rng(3), way=way, queries=60)
    queries = np.concatenate([queries, 2 * queries])
    classifier = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.2).fit(X, y)
    said, spread = classifier.predict_all(queries), classifier.fitted_head_.left_out_scores.scores.std(correction=0)
    for label, shares, score, doubt in zip(
        said.labels, said.probabilities, said.outlier_scores, said.doubts, strict=True
    ):
        of_rejection = 2 / (1 + np.exp(abs(score - classifier.threshold_) / (float(spread) / 4)))
        best = [*sorted(shares), 1.0][:way][::-1]
        of_classes = 0 if label == -1 or way == 1 else 1 - (best[0] - best[1])
        assert doubt == pytest.approx(max(of_rejection, of_classes), rel=1e-6, abs=1e-12)
    assert {*said.unknown.tolist()} == {True, False}
    at_the_threshold = classifier.fitted_head_.left_out_scores.threshold(0.2)
    assert at_the_threshold == pytest.approx(classifier.threshold_)


def test_what_is_saved_is_what_was_fitted_whatever_was_set_since(model: SimpleCNAPS, tmp_path: Path) -> None:
    classifier = rejecting_images(model).fit(pictures(8, 1), LABELS)
    images = np.concatenate([pictures(6, 3), 0 * pictures(2, 4)])
    before = classifier.predict(images).tolist()
    assert "none of these" in before
    classifier.set_params(unknown_label="something else", head="cosine").save(tmp_path / "model.safetensors")
    loaded = SimpleCNAPSClassifier.load(tmp_path / "model.safetensors")
    assert loaded.predict(images).tolist() == before
    assert (loaded.unknown_label, loaded.head) == ("something else", "cosine")  # in effect from the next fit


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("fitted", "temperature", 0.0, "temperature of 0.0"),
        ("fitted", "temperature", float("nan"), "temperature of nan"),
        ("fitted", "temperature", "1", r"fitted\.temperature"),
        ("fitted", "threshold", float("inf"), "must be finite, got inf"),
        ("fitted", "threshold", None, "threshold of None with unknown_label='none of these'"),
        ("fitted", "threshold", True, r"fitted\.threshold"),
        ("fitted", "extra", 1.0, "unknown field `extra`"),
        ("fitted", "units", {"adapted_cosine": [0.0, 1.0]}, "cannot have the units"),
        ("fitted", "units", {"head": [0.0, 0.0]}, "cannot have the units"),
        ("fitted", "units", {"head": [0.0, 1.0], "adapted_cosine": [float("nan"), 1.0]}, "cannot have the units"),
        ("fitted", "units", {"head": [0.0, 1.0], "depth": [0.0, 1.0]}, r"terms that this version lacks, \['depth'\]"),
        ("fitted", "unknown_label", None, "with unknown_label=None"),
        ("fitted", "unknown_label", 3, "give a string"),
        ("fitted", "unknown_label", "red", "label of a class"),
        ("fitted", "unknown_label", ["?"], r"fitted\.unknown_label"),
        ("fitted", "head", {"name": "none"}, "head must be one of"),
        ("fitted", "head", {"name": "mahalanobis", "scale": -1.0, "covariance": {}}, "scale must be positive"),
        ("fitted", "settled", {"name": "auto", "settings": {"beta": 1.0}}, "missing 4 required"),
        ("parameters", "unknown_label", ["?"], r"parameters\.unknown_label"),
        ("parameters", "temperature", "hot", "temperature must be"),
        ("parameters", "false_rejection_rate", 2.0, "false_rejection_rate must"),
        ("fitted", "false_rejection_rate", 2.0, "a false_rejection_rate of 2.0"),
    ],
)
def test_a_file_whose_calibration_cannot_be_is_refused(
    part: str, name: str, value: Any, message: str, saved: Path, tmp_path: Path
) -> None:
    def forge(header: dict[str, Any]) -> None:
        header[part][name] = value

    rewrite(saved, tmp_path / "forged", forge)
    with pytest.raises(ValueError, match=message):
        SimpleCNAPSClassifier.load(tmp_path / "forged", device="cpu")


def rewrite(saved: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with safe_open(saved, "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    header = json.loads(metadata["classifier"])
    change(header)
    save_file(tensors, path, metadata={**metadata, "classifier": json.dumps(header)})


def test_a_file_from_before_a_term_was_added_answers_as_it_did(saved: Path, tmp_path: Path) -> None:
    rewrite(saved, tmp_path / "before", lambda header: header["fitted"]["units"].pop("centred_cosine"))
    before = SimpleCNAPSClassifier.load(tmp_path / "before", device="cpu")
    outliers, queries = before.fitted_head_.outliers, pictures(4, 2)
    assert outliers is not None
    assert outliers.units is not None
    terms = {term.name: term for term in SIMILARITIES if term.name in outliers.units}
    assert [*outliers.units] == ["head", "adapted_cosine", "pretrained_cosine"]
    features, fitted = before.features(queries), before.fitted_head_
    logits = {"head": fitted.logits(features.adapted)}
    for name, term in terms.items():
        logits[name] = term.head(term.of(fitted.support), fitted.labels, term.of(features))
    expected = sum((-logits[name].double().amax(1) - m) / s for name, (m, s) in outliers.units.items())
    np.testing.assert_allclose(before.outlier_score(queries), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def saved(model: SimpleCNAPS, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    rejecting_images(model).fit(pictures(8, 1), LABELS).save(path)
    return path


def test_cross_validation_searches_over_rates_and_temperatures() -> None:
    X, y, _ = gaussian_task(np.random.default_rng(5), shot=8)
    estimator = MahalanobisClassifier(unknown_label=-1, false_rejection_rate=0.1)
    assert np.isfinite(cross_val_score(estimator, X, y, cv=4, error_score="raise")).all()
    grid = {"false_rejection_rate": [0.05, 0.5], "temperature": [1.0, "auto"]}
    search = GridSearchCV(estimator, grid, cv=4, error_score="raise").fit(X, y)
    assert search.best_params_["false_rejection_rate"] == 0.05  # every query here is of a known class
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()


def test_beta_is_chosen_once_for_the_fit_and_for_the_examples_left_out() -> None:
    X, y, _ = gaussian_task(np.random.default_rng(6), way=3)
    settings: dict[str, Any] = {"head": "mahalanobis", "unknown_label": -1, "false_rejection_rate": 0.1}
    classifier = MahalanobisClassifier(beta="auto", **settings).fit(X, y)
    assert classifier.threshold_ == MahalanobisClassifier(beta=classifier.beta_, **settings).fit(X, y).threshold_


def test_nothing_is_left_out_where_nothing_is_asked_for() -> None:
    class Unasked(MahalanobisHead):
        def leave_one_out_logits(self, support_features: torch.Tensor, support_labels: torch.Tensor) -> torch.Tensor:
            raise AssertionError("leaving out costs as much as two fits")

    features, labels, _ = make_task(3, [2, 2], 4)
    settings = {"temperature": 2.0, "false_rejection_rate": 0.05, "reject": False}
    assert calibrate(Unasked(), Features(features), labels, **settings) == (2.0, None)


def test_the_command_line_rejects_and_keeps_probabilities_of_known_classes(model: SimpleCNAPS, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path / "checkpoint")
    rng = np.random.default_rng(0)
    for name, colour in {"blue": (40, 60, 220), "red": (210, 50, 50)}.items():
        (tmp_path / "support" / name).mkdir(parents=True)
        for index in range(10):
            pixels = (np.array(colour) + rng.integers(-30, 31, (24, 24, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "support" / name / f"{index}.png")
    Image.fromarray(np.full((24, 24, 3), 255, np.uint8)).save(tmp_path / "white.png")
    file, where = str(tmp_path / "model.safetensors"), ["--device", "cpu"]
    settings = ["--checkpoint", str(tmp_path / "checkpoint"), "--unknown-label", "neither", *where]
    fitted = CliRunner().invoke(
        app, ["fit", str(tmp_path / "support"), "-o", file, "--false-rejection-rate", "0.1", *settings]
    )
    assert fitted.exit_code == 0, fitted.output
    for options in ([], ["--proba"]):
        result = CliRunner().invoke(app, ["predict", file, str(tmp_path / "white.png"), *where, *options])
        assert result.exit_code == 0, result.output
        header, row = result.stdout.splitlines()
        assert row.split(",")[1] == "neither"
        grade = ",class,outlier_score,outlier_threshold,doubt"
        assert header == "path,label,checked,predicted,probability" + grade + (",blue,red" if options else "")
    cells = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(cells["blue"]) + float(cells["red"]) == pytest.approx(1.0, abs=1e-5)
    assert cells["probability"] == cells[cells["class"]] == max(cells["blue"], cells["red"])
    classifier = SimpleCNAPSClassifier.load(file, device="cpu")
    white = classifier.predict_all([tmp_path / "white.png"])
    assert float(cells["outlier_score"]) == pytest.approx(white.outlier_scores[0], abs=1e-5)
    assert float(cells["outlier_threshold"]) == pytest.approx(classifier.threshold_, abs=1e-5)
    assert float(cells["doubt"]) == pytest.approx(white.doubts[0], abs=1e-5)

    lower = [*where, "--false-rejection-rate", "0.5", "--json"]
    (answer,) = json.loads(CliRunner().invoke(app, ["predict", file, str(tmp_path / "white.png"), *lower]).stdout)
    assert answer["outlier_threshold"] == classifier.set_params(false_rejection_rate=0.5).threshold_
    assert answer["outlier_threshold"] < float(cells["outlier_threshold"])
    assert (answer["label"], answer["class"]) == ("neither", cells["class"])


@pytest.mark.parametrize("shot", [3, 5])
def test_a_chosen_temperature_does_not_destroy_probabilities_in_many_dimensions(shot: int) -> None:
    """Most of a distance is outside the span of the support set, and common to all classes."""
    losses: dict[Any, list[float]] = {1.0: [], "auto": []}
    y, truth = np.arange(5).repeat(shot), np.arange(100) % 5
    for seed in range(8):
        rng = np.random.default_rng(seed)
        means = 1.6 * rng.normal(size=(5, 200))  # beta = 1 is small beside the variances
        X, queries = (means[of] + 5 * rng.normal(size=(len(of), 200)) for of in (y, truth))
        for temperature, of_temperature in losses.items():
            classifier = MahalanobisClassifier(head="mahalanobis", temperature=temperature).fit(X, y)
            of_temperature.append(-float(classifier.predict_log_proba(queries)[np.arange(100), truth].mean()))
    assert np.mean(losses["auto"]) < np.mean(losses[1.0]) + 0.02


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weighted", [False, True])
def test_the_separating_threshold_makes_the_fewest_mistakes_in_its_range(seed: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    known, none = np.round(rng.normal(size=20), 2), np.round(rng.normal(1.0, 1.0, size=7), 2)
    weights = rng.choice([0.5, 1.0], 20) if weighted else np.ones(20)
    least, most = np.sort(known)[[12, 18]]

    def mistakes(threshold: float) -> float:
        return float(weights[known > threshold].sum() / weights.sum() + (none <= threshold).mean())

    found = separating_threshold(*map(torch.from_numpy, (known, none, weights)), least, most)
    assert least <= found <= most
    assert mistakes(found) <= min(map(mistakes, np.linspace(least, most, 5000)[1:-1])) + 1e-9


def test_the_separating_threshold_is_the_highest_of_equals_and_stays_in_its_range() -> None:
    known, ones = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.ones(4)
    far, inside = torch.tensor([9.0, -torch.inf]), torch.tensor([2.5])
    assert separating_threshold(known, far, ones, 1.5, 3.0) == 2.5  # nothing is gained lower down
    assert separating_threshold(known, inside, ones, 2.0, 3.0) == 2.25
    assert separating_threshold(known, inside, ones, 3.0, 3.0) == 3.0
