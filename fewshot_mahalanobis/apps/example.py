"""The example task of the app, the demo and the docs: pieces of the two photographs that scikit-learn ships."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image
from sklearn.datasets import load_sample_images

__all__ = ["Example", "photographs", "sheet"]

#: Side of a piece in pixels, and the pieces of each class: (photograph, left, top), support before queries.
_SIDE = 110
_SUPPORT = {
    "pagoda": [(0, 105, 40), (0, 200, 60), (0, 95, 140), (0, 215, 150), (0, 150, 215)],
    "trees": [(0, 380, 310), (0, 450, 290), (0, 0, 310), (0, 535, 190), (0, 530, 310)],
    "flower": [(1, 175, 110), (1, 255, 95), (1, 325, 130), (1, 190, 215), (1, 300, 235)],
}
_QUERIES = {
    "pagoda": [(0, 150, 130), (0, 250, 210)],
    "trees": [(0, 70, 317), (0, 480, 250)],
    "flower": [(1, 245, 240), (1, 230, 165)],
}
_SKY = (0, 420, 30)


class Example(NamedTuple):
    """Three classes of five pictures, two queries of each, and a picture of no class: the sky."""

    support: list[Image.Image]
    labels: list[str]
    queries: list[Image.Image]
    truth: list[str]
    sky: Image.Image

    def pieces(self) -> list[tuple[Image.Image, str | None]]:
        """All pieces, each with its class; None for those that are asked about."""
        asked = [(piece, None) for piece in (*self.queries, self.sky)]
        return [*zip(self.support, self.labels, strict=True), *asked]


def photographs() -> Example:
    """Cut the example task out of the photographs."""
    whole = [Image.fromarray(photograph) for photograph in load_sample_images().images]

    def piece(photograph: int, left: int, top: int) -> Image.Image:
        return whole[photograph].crop((left, top, left + _SIDE, top + _SIDE))

    def task(pieces: dict[str, list[tuple[int, int, int]]]) -> tuple[list[Image.Image], list[str]]:
        named = [(piece(*place), name) for name, places in pieces.items() for place in places]
        return [picture for picture, _ in named], [name for _, name in named]

    return Example(*task(_SUPPORT), *task(_QUERIES), piece(*_SKY))


def sheet() -> tuple[Image.Image, list[str | None]]:
    """All pieces in a row, and their classes: None for those that are asked about."""
    pieces = photographs().pieces()
    row = Image.new("RGB", (_SIDE * len(pieces), _SIDE))
    for place, (piece, _) in enumerate(pieces):
        row.paste(piece, (_SIDE * place, 0))
    return row, [label for _, label in pieces]
