"""Draw the picture of the README and the start page: ``python docs/first_task.py`` writes docs/first_task.png.

A 5-way 5-shot task of pieces of the two photographs that scikit-learn ships. No query shares a pixel with a support
image.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_images

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.plotting import plot_task

PICTURE = Path(__file__).with_name("first_task.png")


# Square pieces: number of the photograph (0 is a pagoda by a lake, 1 a dahlia), left, top and side in pixels.
SUPPORT = {
    "columns": [(0, 106, 188, 50), (0, 212, 188, 50), (0, 266, 188, 50), (0, 140, 286, 50), (0, 250, 286, 50)],
    "dahlia": [(1, 186, 112, 64), (1, 322, 100, 64), (1, 250, 164, 64), (1, 378, 228, 58), (1, 204, 270, 64)],
    "lake": [(0, 352, 222, 48), (0, 448, 218, 50), (0, 400, 270, 48), (0, 500, 238, 46), (0, 14, 262, 40)],
    "roof": [(0, 122, 68, 56), (0, 212, 62, 54), (0, 190, 238, 46), (0, 72, 240, 44), (0, 262, 346, 48)],
    "trees": [(0, 5, 332, 90), (0, 380, 322, 80), (0, 470, 310, 80), (0, 556, 262, 80), (0, 0, 180, 66)],
}
QUERIES = {
    "columns": [(0, 160, 188, 50), (0, 195, 286, 50), (0, 86, 286, 44)],
    "dahlia": [(1, 314, 228, 64), (1, 258, 100, 60), (1, 300, 292, 60)],
    "lake": [(0, 402, 221, 46), (0, 352, 272, 44), (0, 452, 270, 40)],
    "roof": [(0, 252, 142, 44), (0, 130, 238, 46), (0, 212, 348, 48)],
    "trees": [(0, 110, 342, 80), (0, 562, 170, 75), (0, 560, 345, 78)],
}


def pieces(squares: dict[str, list[tuple[int, int, int, int]]]) -> tuple[list[Image.Image], list[str]]:
    """Cut the pieces out of the photographs; return them with their labels."""
    photographs = [Image.fromarray(photograph) for photograph in load_sample_images().images]
    images, labels = [], []
    for label, of_class in squares.items():
        for number, left, top, side in of_class:
            images.append(photographs[number].crop((left, top, left + side, top + side)))
            labels.append(label)
    return images, labels


def draw(path: Path) -> SimpleCNAPSClassifier:
    """Fit the task, write the picture, return the fitted classifier."""
    support, labels = pieces(SUPPORT)
    queries, truth = pieces(QUERIES)
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(support, labels)
    figure = Figure()  # plot_task sets its size
    plot_task(classifier, support, labels, queries, truth, figure=figure)
    rendered = io.BytesIO()
    figure.savefig(rendered, dpi=108)
    Image.open(rendered).convert("RGB").quantize(96).save(path, optimize=True)  # a third of the bytes
    return classifier


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
