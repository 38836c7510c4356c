"""Draw the picture of docs/chosen_settings.md: ``python docs/gaussians.py`` writes docs/gaussians.png.

A task of handwritten digits, in the two directions that tell its classes apart best: ellipses of the covariance of all
support features and of the one pooled within classes, around each class mean.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from fewshot_mahalanobis import SimpleCNAPSClassifier

PICTURE = Path(__file__).with_name("gaussians.png")
CLASSES, SHOTS, QUERIES = (3, 5, 8, 9), 20, 20
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")

Array = NDArray[Any]


def features() -> tuple[Array, Array, Array, Array]:
    """Adapted features and labels of the support set and of queries."""
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    rows = np.stack([np.flatnonzero(digits.target == label)[: SHOTS + QUERIES] for label in CLASSES])
    support, query = rows[:, :SHOTS].ravel(), rows[:, SHOTS:].ravel()
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(images[support], digits.target[support])
    x, queries = classifier.transform(images[support]), classifier.transform(images[query])
    return x.astype(float), digits.target[support], queries.astype(float), digits.target[query]


def discriminants(x: Array, y: Array) -> Array:
    """The two directions (d, 2) of the largest scatter of class means in units of P = W + beta I, beta = 30 v."""
    within = x - np.stack([x[y == label].mean(axis=0) for label in y])
    p = within.T @ within / (len(x) - len(CLASSES)) + 30 * x.var(axis=0).mean() * np.eye(x.shape[1])
    root = np.linalg.cholesky(p)
    means = np.stack([x[y == label].mean(axis=0) for label in CLASSES])
    whitened = np.linalg.solve(root, (means - means.mean(axis=0)).T)
    return np.linalg.solve(root.T, np.linalg.svd(whitened)[0][:, :2])


def ellipse(mean: Array, covariance: Array, colour: str) -> Ellipse:
    """Two standard deviations."""
    lengths, axes = np.linalg.eigh(covariance)
    angle = np.degrees(np.arctan2(axes[1, 1], axes[0, 1]))
    width, height = 4 * np.sqrt(lengths[::-1])
    return Ellipse(tuple(mean), width, height, angle=angle, facecolor=colour, edgecolor=colour, alpha=0.2)


def draw(path: Path) -> None:
    """Write the picture."""
    x, y, queries, truth = features()
    directions = discriminants(x, y)
    z, q = x @ directions, queries @ directions
    within = z - np.stack([z[y == label].mean(axis=0) for label in y])
    covariances = {
        'task: the covariance of all support features (shared="task")': np.cov(z.T),
        'within: pooled within classes (shared="within")': within.T @ within / (len(z) - len(CLASSES)),
    }
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (title, covariance) in zip(axes, covariances.items(), strict=True):
        for label, colour in zip(CLASSES, COLOURS, strict=True):
            mean = z[y == label].mean(axis=0)
            axis.add_patch(ellipse(mean, covariance, colour))
            axis.scatter(*z[y == label].T, s=14, color=colour, label=f"{label}")
            axis.scatter(*q[truth == label].T, s=16, marker="x", linewidth=1, color=colour)
            axis.scatter(*mean, s=70, marker="D", color=colour, edgecolor="white")
        axis.set_title(title, fontsize=10)
        axis.set_aspect("equal", adjustable="box")
        axis.set(xticks=[], yticks=[])
    axes[0].legend(title="digit", loc="best", fontsize=8)
    rendered = io.BytesIO()
    figure.savefig(rendered, dpi=110)
    Image.open(rendered).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
