"""A page that is taught in its visitor's browser: the whole method in a folder of files for any web server.

The network is in graphs that are made once for a checkpoint (:mod:`~fewshot_mahalanobis.export.network`), the head in
``head.js``. A saved classifier is in the folder too: the one from which the page goes on, or one of noise, as a model
of the files that the page writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from fewshot_mahalanobis.export.graph import save_graph, save_onnx
from fewshot_mahalanobis.export.network import FilmParameters, SupportGraph, film_vector, support_graph
from fewshot_mahalanobis.export.web_page.page_files import Page, page_folder, runtime_files, write_page
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

_LARGE = {"features": "features.onnx", "classifier": "classifier.safetensors"}
_EXAMPLE = "example.jpg"
#: Scripts of the document in their order, and those that run in its worker.
_ENGINE = ("store.js", "answering_page.js", "browser.js")
_PAGE = ("learn.js", "correct.js", "answers.js")
_WORKER = ("head.js", "learning_curve.js", "same_picture.js", "which_next.js")
_WORDS = {
    "where": ", in this browser",
    "kept": "What you teach is still here at your next visit.",
    "promise": "Your pictures stay on this device. The page sends nothing.",
}


def write_teaching_page(
    folder: str | os.PathLike[str],
    model: SimpleCNAPS,
    save: Callable[[Path], None],
    *,
    goes_on: bool,
    title: str,
    runtime: str | os.PathLike[str] | None,
    example: tuple[Image.Image, list[str | None]],
) -> None:
    """Write the page's files into a folder, which is made if it is absent; they replace those of an earlier page.

    Parameters
    ----------
    folder : path
    model : SimpleCNAPS
    save : callable
        Writes a classifier on this model to a path.
    goes_on : bool
        Whether the page begins with that classifier's classes, and keeps its adaptation.
    title : str
    runtime : path, optional
        As for ``export_page``.
    example : (Image, list)
        Squares in a row, and their classes: None of those that are asked about.

    Raises
    ------
    ValueError
        As ``export_page``, or the model's FiLM parameters have no graph.
    """
    positions = dict(model.feature_extractor.film_positions) if model.film_generator is not None else {}
    with page_folder(folder) as temporary:
        copied = None if runtime is None else runtime_files(Path(runtime))
        large = dict(_LARGE)
        _write_graphs(temporary, model, adapts=bool(positions))
        if positions:
            large["film"] = "film.onnx"
        save(temporary / _LARGE["classifier"])
        pieces, classes = example
        pieces.save(temporary / _EXAMPLE, quality=90)
        description = {"side": model.image_size, "positions": [*positions.items()], "goes_on": goes_on}
        description["example"] = classes
        templates = {
            "index.html": ("learn.html", {"title": title, **_WORDS}),
            "answers.html": ("answers.html", dict[str, str]()),
        }
        scripts = (*_ENGINE, *_PAGE, *_WORKER)
        write_page(temporary, Page(title, templates, scripts, large, description, copied, _ENGINE, {_EXAMPLE}))


def _write_graphs(folder: Path, model: SimpleCNAPS, *, adapts: bool) -> None:
    side, vary = model.image_size, torch.export.Dim
    network = SupportGraph(model).cpu().eval()
    inputs = {"images": (torch.zeros(1, 3, side, side), dict[int, object]())}
    film = film_vector(Film.identity(model.feature_extractor.film_positions)) if adapts else None
    if film is not None:
        inputs["film"] = film, {}
    path = folder / _LARGE["features"]
    graph = support_graph(model, adapts=adapts)
    if graph is None:
        save_onnx(network, inputs, ["features", "small", "read"], path, float16="network.")
    else:
        save_graph(graph, path, float16="network.")
    if film is None:
        return
    with torch.no_grad():
        _, small, read = (
            example.repeat(3, *[1] * (example.ndim - 1)) for example in network(inputs["images"][0], film)
        )
    examples = {"images": (small, {0: vary.DYNAMIC}), "read": (read, {0: vary.DYNAMIC})}
    save_onnx(FilmParameters(model).cpu().eval(), examples, ["film"], folder / "film.onnx", float16="film_generator.")
