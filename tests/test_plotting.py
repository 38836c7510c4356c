"""What the pictures show, read back from their axes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from fewshot_mahalanobis import EuclideanHead, RegularizedCovariance, SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.plotting import (
    plot_accuracy,
    plot_class_gaussians,
    plot_decision_regions,
    plot_learning_curve,
    plot_support_influence,
    plot_task,
    plot_ways_and_shots,
    support_influence,
)
from fewshot_mahalanobis.research.episodes.sampling import Episode
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Result

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

COLOURS = {"blue": (40, 60, 220), "green": (50, 190, 60), "red": (210, 50, 50)}


def drawn(labels: list[str], seed: int) -> NDArray[np.uint8]:
    """Noisy patches of the colour that the label names, (n, 24, 24, 3)."""
    rng = np.random.default_rng(seed)
    colours = np.array([COLOURS[label] for label in labels])[:, None, None, :]
    return (colours + rng.integers(-35, 36, size=(len(labels), 24, 24, 3))).clip(0, 255).astype(np.uint8)


SUPPORT_LABELS = ["red", "green", "blue", "green", "red", "red", "blue", "green"]


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
    return SimpleCNAPSClassifier(model).fit(drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS)


def gaussian_task(shape: tuple[int, int, int] = (3, 8, 2), seed: int = 0) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Features (k n, d) of k elongated classes, and their names."""
    ways, shots, width = shape
    rng = np.random.default_rng(seed)
    means, roots = 4 * rng.normal(size=(ways, width)), rng.normal(size=(ways, width, width))
    features = np.concatenate([rng.normal(size=(shots, width)) @ root + mean for mean, root in zip(means, roots)])
    return features, np.repeat(["ant", "bee", "cow"][:ways], shots)


def colour_of(axis: Any) -> str:
    """Name of the colour of the image that an axes shows."""
    shown = np.asarray(axis.images[0].get_array())
    mean = shown.mean((0, 1)) * (1 if shown.dtype == np.uint8 else 255)
    return min(COLOURS, key=lambda name: np.abs(mean - COLOURS[name]).sum())


# -------------------------------------------------------------------- images


def test_a_task_shows_each_image_once_in_the_row_of_its_class(classifier: SimpleCNAPSClassifier) -> None:
    truth = ["green", "red", "red", "red", "blue"]
    support, queries = plot_task(
        classifier, drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS, drawn(truth, 2), truth, figure=Figure()
    )
    assert support.shape == queries.shape == (3, 3)
    for axes, labels in ((support, SUPPORT_LABELS), (queries, truth)):
        for row, name in zip(axes, ["blue", "green", "red"], strict=True):
            shown = [axis for axis in row if axis.images]
            assert [colour_of(axis) for axis in shown] == [name] * labels.count(name)
            assert [axis.get_visible() for axis in row[1:]] == [bool(axis.images) for axis in row[1:]]
    assert [row[0].texts[0].get_text() for row in support] == ["blue", "green", "red"]


def test_titles_are_the_predictions_with_their_probabilities_and_wrong_ones_are_red(
    classifier: SimpleCNAPSClassifier,
) -> None:
    images, called = drawn(["green", "red", "blue"], 2), ["green", "blue", "blue"]  # the red one is called blue
    _, queries = plot_task(classifier, drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS, images, called, figure=Figure())
    order = [2, 1, 0]  # by row and, within a row, as given: blue row has queries 1 and 2
    titles = {axis.get_title(): to_rgb(axis.title.get_color()) for axis in queries.flat if axis.images}
    predicted, probabilities = classifier.predict(images), classifier.predict_proba(images).max(axis=1)
    for index in order:
        colour = titles[f"{predicted[index]} ({probabilities[index]:.0%})"]
        assert colour == to_rgb("black" if predicted[index] == called[index] else "crimson")
    assert sum(colour == to_rgb("crimson") for colour in titles.values()) == 1


def test_queries_without_labels_stand_in_the_row_of_their_prediction(classifier: SimpleCNAPSClassifier) -> None:
    images = drawn(["red", "red", "blue"], 2)
    _, queries = plot_task(classifier, drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS, images, figure=Figure())
    predicted = classifier.predict(images).tolist()
    assert [sum(bool(axis.images) for axis in row) for row in queries] == [
        predicted.count(name) for name in ("blue", "green", "red")
    ]
    assert all(to_rgb(axis.title.get_color()) == to_rgb("black") for axis in queries.flat)


def test_a_query_of_no_class_gets_a_row_of_its_own(classifier: SimpleCNAPSClassifier) -> None:
    support, queries = plot_task(
        classifier, drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS, drawn(["red"], 2), ["purple"], figure=Figure()
    )
    assert support.shape == (4, 3)
    assert support[3, 0].texts[0].get_text() == "purple"
    assert not support[3, 0].images
    assert queries[3, 0].images


def test_a_classifier_that_is_not_ours_is_drawn_by_what_it_predicts(classifier: SimpleCNAPSClassifier) -> None:
    class Blind:
        classes_ = classifier.classes_

        def predict(self, images: NDArray[np.uint8]) -> NDArray[Any]:
            return np.repeat("green", len(images))

        def predict_proba(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
            return np.tile([0.2, 0.5, 0.3], (len(images), 1))

    images = drawn(["red", "blue"], 2)
    _, queries = plot_task(Blind(), drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS, images, figure=Figure())
    assert [axis.get_title() for axis in queries[1]] == ["green (50%)"] * 2


def test_one_label_too_few_is_refused(classifier: SimpleCNAPSClassifier) -> None:
    with pytest.raises(ValueError, match="8 support images need as many labels"):
        plot_task(classifier, drawn(SUPPORT_LABELS, 1), SUPPORT_LABELS[1:], drawn(["red"], 2), figure=Figure())


def test_influence_is_the_loss_of_log_probability_when_an_example_is_left_out(
    classifier: SimpleCNAPSClassifier,
) -> None:
    queries = torch.from_numpy(classifier.transform(drawn(["red", "blue"], 3)))
    influence = support_influence(classifier.fitted_head_, queries)
    assert influence.shape == (2, 8)
    features, labels = classifier.fitted_head_.support.adapted, classifier.fitted_head_.labels
    head = classifier.fitted_head_.head
    log_p = head(features, labels, queries).double().log_softmax(1)
    for i in (0, 2, 7):
        rest = [j for j in range(8) if j != i]
        without = head(features[rest], labels[rest], queries).double().log_softmax(1)
        for q, y in enumerate(log_p.argmax(1)):
            assert float(influence[q, i]) == pytest.approx(float(log_p[q, y] - without[q, y]), abs=1e-5)


def test_the_only_example_of_a_class_has_no_influence_to_speak_of(classifier: SimpleCNAPSClassifier) -> None:
    labels = ["red", "red", "blue"]
    one_blue = SimpleCNAPSClassifier(classifier.model_).fit(drawn(labels, 1), labels)
    influence = support_influence(one_blue.fitted_head_, one_blue.fitted_head_.support.adapted)
    assert influence.isnan().all(0).tolist() == [False, False, True]
    single = SimpleCNAPSClassifier(classifier.model_).fit(drawn(labels[1:], 1), labels[1:])
    with pytest.raises(ValueError, match="every class has one support image"):
        plot_support_influence(single, drawn(labels[1:], 1), drawn(["red"], 2)[0], figure=Figure())


def test_the_picture_of_influences_orders_them_by_what_they_say(classifier: SimpleCNAPSClassifier) -> None:
    """A green image that is called red speaks against every green query."""
    images, called = drawn([*SUPPORT_LABELS, "green"], 1), [*SUPPORT_LABELS, "red"]
    misled = SimpleCNAPSClassifier(classifier.model_).fit(images, called)
    query = drawn(["green"], 4)
    axes = plot_support_influence(misled, images, query[0], most=3, figure=Figure())
    influence = support_influence(misled.fitted_head_, torch.from_numpy(misled.transform(query)))[0].numpy()
    assert misled.predict(query).tolist() == ["green"]
    assert axes[0, 0].get_title().startswith("green")
    assert influence.argmin() == 8
    for row, expected, sign in zip(axes[:, 1:], (np.sort(influence)[::-1], np.sort(influence)), (1, -1), strict=True):
        shown = [axis for axis in row if axis.get_visible()]
        assert 0 < len(shown) == min(3, int((np.sign(influence) == sign).sum()))
        values = [float(re.search(r"[+-]\d+\.\d+$", axis.get_title())[0]) for axis in shown]  # type: ignore[index]
        assert values == pytest.approx(expected[: len(shown)], abs=0.006)
        order = np.argsort(-sign * influence, kind="stable")[: len(shown)]
        assert [axis.get_title().split()[0] for axis in shown] == [called[i] for i in order]
        assert [colour_of(axis) for axis in shown] == [[*SUPPORT_LABELS, "green"][i] for i in order]
    with pytest.raises(ValueError, match="fitted to 9 images, but 8"):
        plot_support_influence(misled, images[1:], query[0], figure=Figure())


# -------------------------------------------------------------------- features


def contour(ellipse: Ellipse) -> NDArray[np.float64]:
    """Points on an ellipse, in data coordinates."""
    angles = np.linspace(0, 2 * np.pi, 50)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    turn = np.deg2rad(ellipse.angle)
    rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return np.asarray(ellipse.center) + (circle * (ellipse.width / 2, ellipse.height / 2)) @ rotation


@pytest.mark.parametrize("width", [2, 30])
def test_ellipses_are_the_contours_of_the_marginals_of_the_class_gaussians(width: int) -> None:
    """Against the dense Q_k of all dimensions, projected."""
    features, labels = gaussian_task((3, 8, width))
    covariance = RegularizedCovariance(beta=0.3)
    ax = plot_class_gaussians(features, labels, covariance=covariance, ax=Figure().subplots())
    codes = np.unique(labels, return_inverse=True)[1]
    gaussians = covariance(torch.from_numpy(features), torch.from_numpy(codes))
    if width > 2:
        centred = features - features.mean(0)
        plane = np.linalg.svd(centred, full_matrices=False)[2][:2].T  # up to the sign of each column
        signs = np.sign(ax.collections[0].get_offsets()[0] / (centred[0] @ plane))
        plane = plane * np.asarray(signs)
    else:
        centred, plane = features, np.eye(2)
    shift = features[0] - centred[0]
    points = np.concatenate([c.get_offsets() for c in ax.collections[::2]])  # every other: the marks of the means
    np.testing.assert_allclose(points, centred @ plane, atol=1e-9)
    ellipses = [patch for patch in ax.patches if isinstance(patch, Ellipse)]
    assert len(ellipses) == 6
    for index, ellipse in enumerate(ellipses):
        k, distance = divmod(index, 2)
        mean = (gaussians.means[k].numpy() - shift) @ plane
        q = plane.T @ gaussians.covariance()[k].numpy() @ plane
        z = contour(ellipse) - mean
        lengths = np.sqrt(np.einsum("ni,ij,nj->n", z, np.linalg.inv(q), z))
        np.testing.assert_allclose(lengths, distance + 1, rtol=1e-6)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ant", "bee", "cow"]


def test_a_beta_that_is_to_be_chosen_is_chosen_on_all_dimensions() -> None:
    features, labels = gaussian_task((3, 8, 30))
    codes = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
    chosen = RegularizedCovariance("auto").with_chosen_settings(torch.from_numpy(features), codes)
    sizes = []
    for covariance in (RegularizedCovariance("auto"), chosen):
        ax = plot_class_gaussians(features, labels, covariance=covariance, ax=Figure().subplots())
        sizes.append([(ellipse.width, ellipse.height) for ellipse in ax.patches])
    assert sizes[0] == sizes[1]


def test_regions_are_the_answers_of_the_two_heads() -> None:
    features, labels = gaussian_task()
    covariance = RegularizedCovariance(beta=0.2)
    axes = plot_decision_regions(features, labels, queries=features[:2] + 0.1, covariance=covariance, figure=Figure())
    codes = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
    gaussians = covariance(torch.from_numpy(features), codes)
    for ax, title in zip(axes, ("Euclidean", "Mahalanobis"), strict=True):
        assert ax.get_title() == title
        image, (left, right, bottom, top) = np.asarray(ax.images[0].get_array()), ax.images[0].get_extent()
        rows, columns = np.arange(5, 300, 41), np.arange(3, 300, 37)
        at = np.stack(np.meshgrid(np.linspace(left, right, 300)[columns], np.linspace(bottom, top, 300)[rows]), -1)
        places = torch.from_numpy(at.reshape(-1, 2))
        if title == "Euclidean":
            nearest = EuclideanHead()(torch.from_numpy(features), codes, places).argmax(1)
        else:
            nearest = gaussians.squared_distance(places).argmin(1)
        colours = [c.get_facecolor()[0][:3] for c in ax.collections[:6:2]]  # of the points of each class
        expected = np.array([colours[k] for k in nearest]).reshape(len(rows), len(columns), 3)
        np.testing.assert_allclose(image[np.ix_(rows, columns)], expected)
        queries = next(c for c in ax.collections if c.get_label() == "query")
        np.testing.assert_allclose(queries.get_offsets(), features[:2] + 0.1)
    assert not np.array_equal(axes[0].images[0].get_array(), axes[1].images[0].get_array())


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.zeros((4, 1)), list("aabb"), "d >= 2"),
        (np.zeros(4), list("aabb"), r"\(n, d\)"),
        (np.zeros((4, 2)), list("aaaa"), "at least two"),
    ],
)
def test_features_without_a_plane_or_regions_are_refused(features: Any, labels: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_decision_regions(features, labels, figure=Figure())


def test_a_published_one_shot_covariance_has_no_marginal_to_draw() -> None:
    covariance = RegularizedCovariance(one_shot_covariance="published")
    with pytest.raises(ValueError, match="one example"):
        plot_class_gaussians(*gaussian_task((3, 1, 5)), covariance=covariance, ax=Figure().subplots())


# -------------------------------------------------------------------- evaluation


def row(name: str, way: int, shot: int, **accuracy: float) -> Result:
    """Accuracies in per cent, each with an interval of 1.5."""
    return Result(source=name, way=way, shot=shot, scores={m: Accuracy(a / 100, 0.015, 9) for m, a in accuracy.items()})


def test_accuracies_stand_over_their_shots_with_their_intervals() -> None:
    rows = [row("mnist", 5, shot, adapted=50 + shot, plain=40 + shot) for shot in (10, 1, 5)]
    ax = plot_accuracy(rows, ax=Figure().subplots())
    assert [c.get_label() for c in ax.containers] == ["adapted", "plain"]
    for container, base in zip(ax.containers, (50, 40), strict=True):
        line, _, (bars,) = container
        np.testing.assert_allclose(line.get_xydata(), [[shot, base + shot] for shot in (1, 5, 10)])
        ends = [(segment[0, 1], segment[1, 1]) for segment in bars.get_segments()]
        np.testing.assert_allclose(ends, [(base + shot - 1.5, base + shot + 1.5) for shot in (1, 5, 10)])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "5", "10"]
    assert "shots" in ax.get_xlabel()


def test_there_is_a_line_for_each_source_variant_and_other_number() -> None:
    rows = [row(source, way, 5, a=50, b=40) for source in ("mnist", "gtsrb") for way in (5, 10)]
    labels = [c.get_label() for c in plot_accuracy(rows, against="way", ax=Figure().subplots()).containers]
    assert labels == ["mnist, a", "mnist, b", "gtsrb, a", "gtsrb, b"]
    labels = [c.get_label() for c in plot_accuracy(rows, against="shot", ax=Figure().subplots()).containers]
    assert len(labels) == 8
    assert "gtsrb, 10-way, b" in labels


def test_rows_that_cannot_share_a_line_are_refused() -> None:
    with pytest.raises(ValueError, match="two results of 'mnist'"):
        plot_accuracy([row("mnist", 5, 1, a=50)] * 2, ax=Figure().subplots())
    with pytest.raises(ValueError, match='must be "shot" or "way"'):
        plot_accuracy([row("mnist", 5, 1, a=50)], against="episodes")
    with pytest.raises(ValueError, match="no results"):
        plot_accuracy([])


def test_the_boxes_of_episodes_reach_from_the_fewest_to_the_most_ways_images_and_shots() -> None:
    def episode(*shots: int) -> Episode:
        n, none = sum(shots), np.array([], dtype=np.int64)
        return Episode(np.arange(n), np.repeat(np.arange(len(shots)), shots), none, none)

    episodes = {"a": [episode(1, 1), episode(2, 3, 4)], "b": [episode(5, 5, 5, 5)]}
    axes = plot_ways_and_shots(episodes, figure=Figure())
    assert [ax.get_ylabel() for ax in axes] == ["ways", "support images", "shots per class"]
    assert [tick.get_text() for tick in axes[-1].get_xticklabels()] == ["a", "b"]
    for ax, ends in zip(axes, ([(2, 3), (4, 4)], [(2, 9), (20, 20)], [(1, 4), (5, 5)]), strict=True):
        drawn = [(line.get_xdata().mean(), line.get_ydata()) for line in ax.lines if len(line.get_xdata())]
        for place, (fewest, most) in enumerate(ends, 1):
            heights = np.concatenate([y for x, y in drawn if x == pytest.approx(place)])
            assert (heights.min(), heights.max()) == (fewest, most)


# -------------------------------------------------------------------- enough images


def test_a_learning_curve_goes_on_where_the_images_end(classifier: SimpleCNAPSClassifier) -> None:
    curve = classifier.summary().curve
    assert curve is not None
    ax = plot_learning_curve(curve, more=4, ax=Figure().subplots())
    lines = {str(line.get_label()): line for line in ax.lines if not str(line.get_label()).startswith("_")}
    assert [*lines] == ["blue", "green", "red", "all classes"]
    points = dict(zip(*lines["all classes"].get_data(), strict=True))
    assert points == pytest.approx({m: 100 * accuracy for m, accuracy in curve.measured.items()})
    assert dict(zip(*lines["blue"].get_data(), strict=True)).keys() == {1}  # of two images
    expected = ax.lines[-1]
    assert expected.get_linestyle() == "--"
    assert dict(zip(*expected.get_data(), strict=True)) == pytest.approx(
        {3 + more: 100 * curve.expected(more).accuracy for more in range(5)}
    )
    (band,) = ax.collections
    corners = band.get_paths()[0].vertices
    last = curve.expected(4)
    assert {100 * last.low, 100 * last.high} <= {*corners[corners[:, 0] == 7, 1].tolist()}
    assert ax.get_title() == curve.advice


def test_a_learning_curve_of_no_more_images_is_refused(classifier: SimpleCNAPSClassifier) -> None:
    curve = classifier.summary().curve
    assert curve is not None
    with pytest.raises(ValueError, match="more must be at least 1, got 0"):
        plot_learning_curve(curve, more=0)
