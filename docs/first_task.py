"""Draw the picture of the README and the start page: ``python docs/first_task.py`` writes docs/first_task.png."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.example import photographs
from fewshot_mahalanobis.plotting import plot_task

PICTURE = Path(__file__).with_name("first_task.png")


def draw(path: Path) -> SimpleCNAPSClassifier:
    """Fit the example task, write the picture, return the fitted classifier."""
    support, labels, queries, truth, _ = photographs()
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(support, labels)
    figure = Figure()  # plot_task sets its size
    plot_task(classifier, support, labels, queries, truth, figure=figure)
    rendered = io.BytesIO()
    figure.savefig(rendered, dpi=120)
    Image.open(rendered).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the bytes
    return classifier


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
