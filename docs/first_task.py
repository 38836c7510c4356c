"""Draw the picture of the README and the start page: ``python docs/first_task.py`` writes docs/first_task.png.

The photographs are the two that scikit-learn ships. Each class is a motif; its pictures are different crops of it.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_image

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.plotting import plot_task

PICTURE = Path(__file__).with_name("first_task.png")
#: Photograph, and the left and top of the region that the crops are taken from.
MOTIFS = {"temple": ("china", 150, 90), "trees": ("china", 20, 320), "flower": ("flower", 220, 120)}
#: Offsets of the crops in their region, in pixels: support first, then queries.
SUPPORT, QUERIES = [(0, 0), (120, 5), (30, 10), (150, 8)], [(60, 0), (90, 12)]
SIDE = 95


def crops(offsets: list[tuple[int, int]]) -> tuple[list[Image.Image], list[str]]:
    """Crops of every motif, and their labels."""
    images, labels = [], []
    for name, (photograph, left, top) in MOTIFS.items():
        photo = Image.fromarray(load_sample_image(f"{photograph}.jpg"))
        for dx, dy in offsets:
            images.append(photo.crop((left + dx, top + dy, left + dx + SIDE, top + dy + SIDE)))
            labels.append(name)
    return images, labels


def draw(path: Path) -> SimpleCNAPSClassifier:
    """Fit one task, write the picture, return the fitted classifier."""
    support, labels = crops(SUPPORT)
    queries, truth = crops(QUERIES)
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(support, labels)
    figure = Figure()  # plot_task sets its size
    plot_task(classifier, support, labels, queries, truth, figure=figure)
    rendered = io.BytesIO()
    figure.savefig(rendered, dpi=120)
    Image.open(rendered).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the bytes
    return classifier


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
