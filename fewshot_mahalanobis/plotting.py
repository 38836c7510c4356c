"""Pictures of few-shot tasks, with matplotlib (the extra ``demo``).

Every function returns the axes it drew on. Those that need one axes take ``ax``, those that need several take
``figure``; without it, pyplot makes a new figure, which a notebook shows by itself.

Features of d dimensions are drawn on the plane of their first two principal components, P (d, 2) with orthonormal
columns, and a class Gaussian N(mu_k, Q_k) as its exact marginal on that plane, N(P^T mu_k, P^T Q_k P). Because
P^T P = I, P^T Q_k P is equation 3 applied to the projected features.

For a confusion matrix use scikit-learn's ``ConfusionMatrixDisplay.from_predictions``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.decomposition import PCA
from torch import Tensor

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.heads import EuclideanHead, Head, MahalanobisHead
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.research.episodes.sampling import Episode
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Result
from fewshot_mahalanobis.support_set.labels import label_array
from fewshot_mahalanobis.support_set.learning_curve import LearningCurve
from fewshot_mahalanobis.support_set.summary import support_influence

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Ellipse
    from matplotlib.ticker import MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError(f"pictures need matplotlib: {install_command('demo')}") from error

__all__ = [
    "plot_accuracy",
    "plot_class_gaussians",
    "plot_decision_regions",
    "plot_learning_curve",
    "plot_support_influence",
    "plot_task",
    "plot_ways_and_shots",
    "support_influence",
]

#: Side of drawn images, in pixels.
THUMBNAIL = 84
#: Decision regions are computed on GRID x GRID points.
GRID = 300
_WRONG = "crimson"

# -------------------------------------------------------------------- images


def plot_task(
    classifier: Any,
    support_images: Any,
    support_labels: ArrayLike,
    query_images: Any,
    query_labels: ArrayLike | None = None,
    *,
    figure: Figure | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Draw support images on the left, query images on the right, each with its predicted label and probability.

    There is one row for each class. A query is in the row of its true label, with a red title if the prediction is
    wrong; without ``query_labels`` it is in the row of its predicted label. Images are squares of 84 x 84 pixels.

    Parameters
    ----------
    classifier : fitted classifier of images
        A ``SimpleCNAPSClassifier``, or any scikit-learn classifier of images with ``predict_proba``.
    support_images : collection of n images
    support_labels : array-like of shape (n,)
    query_images : collection of m images
    query_labels : array-like of shape (m,), optional
        True labels. A label that is no class gets a row of its own.
    figure : Figure, optional
        An empty one to draw on; its size is set.

    Returns
    -------
    support_axes : array of Axes of shape (rows, most shots)
        Those without an image are invisible.
    query_axes : array of Axes of shape (rows, most queries in a row)
        Likewise.

    Raises
    ------
    ValueError
        Images and labels differ in number, or an image cannot be used.
    """
    classifier = copy.copy(classifier)  # no other thread fits it meanwhile
    support_labels = _labels_of(support_labels, support_images, "support")
    shown = None if query_labels is None else _labels_of(query_labels, query_images, "query")
    if isinstance(classifier, SimpleCNAPSClassifier):
        answers = classifier.predict_all(query_images)
        predicted, probabilities = answers.labels, answers.probabilities
    else:
        predicted, probabilities = classifier.predict(query_images), classifier.predict_proba(query_images)
    shown = predicted if shown is None else shown
    probabilities = probabilities.max(axis=1)
    classes = classifier.classes_.tolist()
    rows = [*classes, *sorted({*shown.tolist()} - {*classes})]
    support_rows = [np.flatnonzero(support_labels == label) for label in rows]
    query_rows = [np.flatnonzero(shown == label) for label in rows]
    shots, most = (max(map(len, indices)) for indices in (support_rows, query_rows))

    longest = max(len(str(label)) for label in [*rows, *predicted.tolist()])
    margin, cell = 0.3 + 0.1 * longest, max(0.75, 0.065 * (longest + 7))  # inches
    left_width, right_width, height = margin + shots * cell, 0.2 + most * cell, len(rows) * 0.82 + 0.6
    figure = _new_figure() if figure is None else figure
    figure.set_size_inches(left_width + right_width, height)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(left_width, right_width))[0]
    place = {"top": 1 - 0.55 / height, "bottom": 0.1 / height, "hspace": 0.3, "wspace": 0.08}
    support_axes = left.subplots(len(rows), shots, squeeze=False)
    left.subplots_adjust(left=margin / left_width, right=0.99, **place)
    query_axes = right.subplots(len(rows), most, squeeze=False)
    right.subplots_adjust(left=0.1 / right_width, right=1 - 0.1 / right_width, **place)
    left.suptitle("support", y=1 - 0.08 / height, va="top", fontsize=11)
    right.suptitle("queries", y=1 - 0.08 / height, va="top", fontsize=11)

    for axes, indices_of_row, images in (
        (support_axes, support_rows, _thumbnails(classifier, support_images)),
        (query_axes, query_rows, _thumbnails(classifier, query_images)),
    ):
        for row, indices in zip(axes, indices_of_row, strict=True):
            for axis in row[len(indices) :]:
                axis.set_visible(False)
            for axis, index in zip(row, indices):
                _show(axis, images[index])
    for axis, label in zip(support_axes[:, 0], rows, strict=True):
        axis.text(-0.12, 0.5, str(label), transform=axis.transAxes, ha="right", va="center", fontsize=10)
        if not axis.get_visible():  # a label without support keeps its name
            axis.set_visible(True)
            axis.set_axis_off()
    for row, indices in zip(query_axes, query_rows, strict=True):
        for axis, index in zip(row, indices):
            wrong = predicted[index] != shown[index]
            title = f"{predicted[index]} ({probabilities[index]:.0%})"
            axis.set_title(title, fontsize=7.5, pad=2, color=_WRONG if wrong else "black")
    return support_axes, query_axes


def plot_support_influence(
    classifier: SimpleCNAPSClassifier,
    support_images: Any,
    query_image: Any,
    *,
    most: int = 5,
    figure: Figure | None = None,
) -> NDArray[Any]:
    """Draw the support images that support the prediction for one query, and those that oppose it.

    Upper row: the query, then the support images of the greatest positive influence; lower row: of the most negative.
    Titles are labels and influences in nats (:func:`support_influence`).

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted.
    support_images : collection of n images
        Those it was fitted to, in that order.
    query_image : image
    most : int, default=5
        Most support images in a row.
    figure : Figure, optional
        An empty one to draw on; its size is set.

    Returns
    -------
    array of Axes of shape (2, most + 1)
        Those without an image are invisible.

    Raises
    ------
    ValueError
        The number of support images is not that of the fit, or every class has one only.
    """
    classifier = copy.copy(classifier)  # no other thread fits it meanwhile
    images, fitted = _thumbnails(classifier, support_images), classifier.fitted_head_
    if len(images) != len(fitted.labels):
        raise ValueError(f"the classifier was fitted to {len(fitted.labels)} images, but {len(images)} are given")
    answers = classifier.predict_all([query_image])
    influence = support_influence(fitted, torch.from_numpy(answers.features))[0].cpu().numpy()
    if np.isnan(influence).all():
        raise ValueError("every class has one support image: without it there would be no such class")
    (probabilities,) = answers.probabilities
    labels = classifier.classes_[fitted.labels.cpu().numpy()]

    order = np.argsort(-influence, kind="stable")  # NaN comes last
    order = order[~np.isnan(influence[order])]
    rows = [i for i in order if influence[i] > 0][:most], [i for i in order[::-1] if influence[i] < 0][:most]
    figure = _new_figure() if figure is None else figure
    figure.set_size_inches(1.25 * (most + 1) + 0.4, 3.4)
    axes: NDArray[Any] = figure.subplots(2, most + 1, squeeze=False)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.84, bottom=0.03, hspace=0.32, wspace=0.1)
    for axis in axes.flat:
        axis.set_visible(False)
    _show(axes[0, 0], _thumbnails(classifier, [query_image])[0])
    axes[0, 0].set_title(f"{classifier.classes_[probabilities.argmax()]} ({probabilities.max():.0%})", fontsize=9)
    for row, indices, colour in zip(axes[:, 1:], rows, ("black", _WRONG), strict=True):
        for axis, index in zip(row, indices):
            _show(axis, images[index])
            axis.set_title(f"{labels[index]}  {influence[index]:+.2f}", fontsize=9, color=colour)
    figure.suptitle("query, then support images for (above) and against (below) its label, in nats", fontsize=10)
    return axes


# -------------------------------------------------------------------- features


def plot_class_gaussians(
    features: ArrayLike | Tensor,
    labels: ArrayLike,
    *,
    covariance: RegularizedCovariance | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw support features as points and each class's N(mu_k, Q_k) as ellipses, on a plane.

    Features of more than two dimensions are projected on their first two principal components. The ellipses have
    Mahalanobis distance 1 and 2 in the Gaussian's exact marginal on that plane.

    Parameters
    ----------
    features : array-like of shape (n, d), d >= 2
        Support features, ``classifier.transform(support_images)`` say.
    labels : array-like of shape (n,)
    covariance : RegularizedCovariance, optional
        How Q_k is estimated; by default with the paper's settings.
    ax : Axes, optional

    Returns
    -------
    Axes
        In units of the features, equal on both axes.

    Raises
    ------
    ValueError
        Shapes do not fit, or a class has one example and ``covariance`` has ``one_shot_covariance="published"``, which
        has no such marginal.
    """
    plane = _Plane(features)
    names, codes = np.unique(label_array(labels), return_inverse=True)
    points = plane.project(features)
    covariance = _settings(covariance, features, codes)
    if covariance.settings.one_shot_covariance == "published" and (np.bincount(codes) == 1).any():
        raise ValueError('a class of one example with one_shot_covariance="published" cannot be drawn on a plane')
    gaussians = covariance(torch.from_numpy(points), torch.from_numpy(codes))
    ax = _new_axes() if ax is None else ax
    for k, (mean, q, colour) in enumerate(
        zip(gaussians.means.numpy(), gaussians.covariance().numpy(), _colours(len(names)), strict=True)
    ):
        _draw_class(ax, points[codes == k], mean, q, colour, str(names[k]))
    _finish(ax, plane)
    return ax


def plot_decision_regions(
    features: ArrayLike | Tensor,
    labels: ArrayLike,
    queries: ArrayLike | Tensor | None = None,
    *,
    covariance: RegularizedCovariance | None = None,
    figure: Figure | None = None,
) -> NDArray[Any]:
    """Draw the decision regions of the Euclidean head (left) and the Mahalanobis head (right) on the same features.

    These are the paper's figures 1 and 3 for your own features. Features of more than two dimensions are projected on
    their first two principal components, and both heads are fitted to the projected features: the regions are not a
    section of those in d dimensions. The ellipses have distance 1 and 2; on the left, where every class is
    N(mu_k, I), they are circles.

    Parameters
    ----------
    features : array-like of shape (n, d), d >= 2
    labels : array-like of shape (n,)
        At least two different ones.
    queries : array-like of shape (m, d), optional
        Drawn in grey, projected like the support features.
    covariance : RegularizedCovariance, optional
        How Q_k is estimated; by default with the paper's settings.
    figure : Figure, optional
        An empty one to draw on.

    Returns
    -------
    array of Axes of shape (2,)
        Euclidean, Mahalanobis.

    Raises
    ------
    ValueError
        As :func:`plot_class_gaussians`, or there is one class only.
    """
    plane = _Plane(features)
    points = plane.project(features)
    names, codes = np.unique(label_array(labels), return_inverse=True)
    if len(names) < 2:
        raise ValueError("one class has no decision regions: at least two are needed")
    drawn = points if queries is None else np.concatenate([points, plane.project(queries)])
    low, high = drawn.min(0), drawn.max(0)
    margin = 0.25 * (high - low).max()
    x, y = (np.linspace(low[i] - margin, high[i] + margin, GRID) for i in (0, 1))
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2))

    covariance = _settings(covariance, features, codes)
    figure = _new_figure((11, 5)) if figure is None else figure
    axes: NDArray[Any] = figure.subplots(1, 2, sharex=True, sharey=True)
    colours = _colours(len(names))
    heads: tuple[Head[Any], ...] = (EuclideanHead(), MahalanobisHead(covariance))
    for ax, head, title in zip(axes, heads, ("Euclidean", "Mahalanobis"), strict=True):
        logits = head(torch.from_numpy(points), torch.from_numpy(codes), grid)
        regions = logits.argmax(1).numpy().reshape(GRID, GRID)
        image = np.array([mpl.colors.to_rgb(colour) for colour in colours])[regions]
        extent = (x[0], x[-1], y[0], y[-1])
        ax.imshow(image, extent=extent, origin="lower", alpha=0.25, interpolation="nearest", aspect="equal")
        if head is heads[1]:
            plot_class_gaussians(points, names[codes], covariance=covariance, ax=ax)
        else:
            for k, colour in enumerate(colours):
                class_points = points[codes == k]
                _draw_class(ax, class_points, class_points.mean(0), np.eye(2), colour, str(names[k]))
        if queries is not None:
            ax.scatter(
                *plane.project(queries).T, s=28, c="0.45", marker="D", edgecolors="white", label="query", zorder=4
            )
        _finish(ax, plane)
        ax.set_title(title)
        ax.set_xlim(x[0], x[-1])
        ax.set_ylim(y[0], y[-1])
    axes[0].get_legend().remove()  # one will do
    return axes


class _Plane:
    """Plane of the first two principal components of features (n, d); for d = 2 the features themselves."""

    def __init__(self, features: ArrayLike | Tensor) -> None:
        x = _matrix(features)
        if x.shape[1] < 2 or len(x) < 2:
            raise ValueError(f"features must have shape (n, d) with n >= 2 and d >= 2, got {x.shape}")
        self.pca = PCA(2, svd_solver="full").fit(x) if x.shape[1] > 2 else None
        self.axis_names = ["feature 1", "feature 2"]
        if self.pca is not None:
            shares = self.pca.explained_variance_ratio_
            self.axis_names = [
                f"principal component {i + 1} ({share:.0%} of the variance)" for i, share in enumerate(shares)
            ]

    def project(self, features: ArrayLike | Tensor) -> NDArray[np.float64]:
        """P^T (x - mean) of features (m, d) -> (m, 2)."""
        x = _matrix(features)
        return x if self.pca is None else self.pca.transform(x)


def _settings(
    covariance: RegularizedCovariance | None, features: ArrayLike | Tensor, codes: NDArray[np.int64]
) -> RegularizedCovariance:
    """How Q_k is estimated. Settings that are "auto" are chosen in all d dimensions, not on the plane."""
    covariance = RegularizedCovariance() if covariance is None else covariance
    return covariance.with_chosen_settings(torch.from_numpy(_matrix(features)), torch.from_numpy(codes))


def _matrix(features: ArrayLike | Tensor) -> NDArray[np.float64]:
    x = np.asarray(features.detach().cpu() if isinstance(features, Tensor) else features, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"features must have shape (n, d), got {x.shape}")
    return x


# -------------------------------------------------------------------- evaluation


def plot_accuracy(results: Sequence[Result], against: str = "shot", *, ax: Axes | None = None) -> Axes:
    """Accuracy against the number of shots or of ways, with 95 % intervals (figures 5 and 6 of the paper).

    One line for each name, method and setting of the other number.

    Parameters
    ----------
    results : list of Result
        The points, from :func:`~fewshot_mahalanobis.research.evaluation.report.evaluate` or
        :func:`~fewshot_mahalanobis.research.evaluation.shots_and_ways.pooled_curve`.
    against : {"shot", "way"}, default="shot"
        What the horizontal axis is; logarithmic.
    ax : Axes, optional

    Returns
    -------
    Axes
        With a legend of the lines.

    Raises
    ------
    ValueError
        ``against`` is something else, there are no results, or two of them give one line two values at one place
        (from different seeds, say).
    """
    if against not in ("shot", "way"):
        raise ValueError(f'against must be "shot" or "way", got {against!r}')
    if not results:
        raise ValueError("there are no results to draw")
    other = "way" if against == "shot" else "shot"
    lines: dict[tuple[str, int | None, str], dict[int, Accuracy]] = {}
    for result in results:
        place, number = (result.shot, result.way) if against == "shot" else (result.way, result.shot)
        if place is None:
            raise ValueError(f"{result.source!r} has no one number of {against}s")
        for method, accuracy in result.scores.items():
            line = lines.setdefault((result.source, number, method), {})
            if place in line:
                raise ValueError(
                    f"two results of {result.source!r} have {place} {against}s and {number} {other}s: draw one of them"
                )
            line[place] = accuracy

    series = list(dict.fromkeys((source, number) for source, number, _ in lines))
    variants = list(dict.fromkeys(variant for _, _, variant in lines))
    several_sources, several_numbers = (len({s[i] for s in series}) > 1 for i in (0, 1))
    colours = _colours(len(series) if len(series) > 1 else len(variants))
    ax = _new_axes() if ax is None else ax
    for (source, number, variant), line in lines.items():
        at = series.index((source, number)) if len(series) > 1 else variants.index(variant)
        style = ("-", "--", ":", "-.")[variants.index(variant) % 4] if len(series) > 1 else "-"
        parts = (
            source * several_sources,
            f"{number}-{other}" * several_numbers,
            variant * (len(variants) > 1 or len(series) == 1),
        )
        places = sorted(line)
        means = [100 * line[place].mean for place in places]
        half_widths = [100 * line[place].half_width for place in places]
        ax.errorbar(
            places, means, half_widths, color=colours[at], ls=style, marker="o", ms=4, capsize=2,
            label=", ".join(part for part in parts if part),
        )  # fmt: skip
    places = sorted({place for line in lines.values() for place in line})
    ax.set_xscale("log")
    ax.set_xticks(places, [str(place) for place in places])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("support images a class (shots)" if against == "shot" else "classes (ways)")
    ax.set_ylabel("accuracy, %")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax


def plot_learning_curve(curve: LearningCurve, *, more: int | None = None, ax: Axes | None = None) -> Axes:
    """Accuracy against the number of support images a class: measured with fewer, expected with more.

    Solid lines are measured on images that were left out, a thin one for each of up to ten classes. The dashed line is
    expected of all classes, with its 95 % interval. The advice is the title.

    Parameters
    ----------
    curve : LearningCurve
        ``classifier.summary().curve``.
    more : int, optional
        Images of each class beyond those at hand, at least 1; by default as many as a class usually has.
    ax : Axes, optional

    Returns
    -------
    Axes
        With a legend of the classes.

    Raises
    ------
    ValueError
        ``more`` is below 1.
    """
    if more is not None and more < 1:
        raise ValueError(f"more must be at least 1, got {more!r}")
    now = max(curve.counts.values())
    further = [*range((curve.usual_count if more is None else more) + 1)]
    ax = _new_axes() if ax is None else ax

    lines = [("all classes", curve.measured, "black", 2.0)]
    if len(curve.counts) <= 10:
        colours = zip(curve.counts, _colours(len(curve.counts)), strict=True)
        lines = [(str(name), curve.measured_by_class.get(name, {}), colour, 0.9) for name, colour in colours] + lines
    for title, measured, colour, width in lines:
        ax.plot(
            [*measured], [100 * accuracy for accuracy in measured.values()],
            color=colour, lw=width, marker="o", ms=2 * width, label=title,
        )  # fmt: skip
    intervals = [curve.expected(extra) for extra in further]
    accuracies = [100 * expected.accuracy for expected in intervals]
    ax.plot([now + extra for extra in further], accuracies, color="black", lw=2.0, ls="--")
    ax.fill_between(
        [now + extra for extra in further],
        [100 * expected.low for expected in intervals],
        [100 * expected.high for expected in intervals],
        color="black",
        alpha=0.1,
        lw=0,
        label="95 % interval",
    )
    ax.set_xlabel("support images a class")
    ax.set_ylabel("accuracy, %")
    ax.set_ylim(0, 102)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small", loc="lower right")
    ax.set_title(curve.advice, fontsize=9, wrap=True)
    return ax


def plot_ways_and_shots(episodes: Mapping[str, Sequence[Episode]], *, figure: Figure | None = None) -> NDArray[Any]:
    """Draw the distribution of ways, support images and shots per class over the episodes of each source.

    A box shows the quartiles, its whiskers the extremes.

    Parameters
    ----------
    episodes : mapping of str to list of Episode
        Source to its episodes.
    figure : Figure, optional
        An empty one to draw on; its size is set.

    Returns
    -------
    array of Axes of shape (3,)
        Ways, support images and shots per class; logarithmic.
    """
    measures = {
        "ways": lambda episode: [episode.way],
        "support images": lambda episode: [len(episode.support)],
        "shots per class": lambda episode: np.bincount(episode.support_labels).tolist(),
    }
    figure = _new_figure() if figure is None else figure
    figure.set_size_inches(2 + 0.5 * len(episodes), 2.5 * len(measures))
    figure.set_layout_engine("constrained")
    axes: NDArray[Any] = figure.subplots(len(measures), sharex=True)
    for ax, (title, measure) in zip(axes, measures.items(), strict=True):
        values = [[value for episode in drawn for value in measure(episode)] for drawn in episodes.values()]
        ax.boxplot(values, whis=(0, 100))
        ax.set_ylabel(title)
        ax.set_yscale("log")
    axes[-1].set_xticks(range(1, len(episodes) + 1), list(episodes), rotation=90)
    return axes


# -------------------------------------------------------------------- shared


def _new_figure(size: tuple[float, float] | None = None) -> Figure:
    import matplotlib.pyplot as plt  # chooses a backend, so not when this module is imported

    return plt.figure(figsize=size)


def _new_axes() -> Axes:
    return _new_figure().subplots()


def _labels_of(labels: ArrayLike, images: Any, what: str) -> NDArray[Any]:
    values = label_array(labels)
    if values.shape != (len(images),):
        raise ValueError(f"{len(images)} {what} images need as many labels, not shape {values.shape}")
    return values


def _thumbnails(classifier: Any, images: Any) -> NDArray[np.uint8]:
    """Images of any kind (n, 84, 84, 3), as the classifier reads them."""
    own = isinstance(classifier, SimpleCNAPSClassifier)
    batches = classifier.image_batches(images, THUMBNAIL) if own else ImageBatches(images, THUMBNAIL)
    return np.concatenate([batch.pixels for batch in batches.decoded()])


def _show(axis: Axes, image: NDArray[np.uint8]) -> None:
    axis.imshow(image)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_visible(True)


def _colours(n: int) -> list[Any]:
    """N distinct colours."""
    if n <= 10:
        return list(mpl.colormaps["tab10"].colors[:n])  # type: ignore[attr-defined]
    return [mpl.colormaps["turbo"](i / (n - 1)) for i in range(n)]


def _draw_class(
    ax: Axes, points: NDArray[np.float64], mean: NDArray[np.float64], q: NDArray[np.float64], colour: Any, name: str
) -> None:
    """Points (n, 2) of a class, its mean (2,), and the ellipses of distance 1 and 2 under covariance ``q`` (2, 2)."""
    variances, directions = np.linalg.eigh(q)
    angle = np.degrees(np.arctan2(directions[1, 1], directions[0, 1]))
    for distance in (1, 2):
        long, short = 2 * distance * np.sqrt(variances[::-1])
        ax.add_patch(Ellipse(tuple(mean), long, short, angle=angle, fill=False, edgecolor=colour, lw=2 / distance))
    ax.scatter(points[:, 0], points[:, 1], s=26, color=colour, edgecolors="white", linewidths=0.6, label=name, zorder=3)
    ax.scatter(mean[0], mean[1], s=70, color=colour, marker="X", edgecolors="black", linewidths=0.8, zorder=5)


def _finish(ax: Axes, plane: _Plane) -> None:
    ax.set_aspect("equal", adjustable="datalim" if not ax.images else "box")
    ax.set_xlabel(plane.axis_names[0])
    ax.set_ylabel(plane.axis_names[1])
    ax.legend(fontsize="small", loc="best")
