"""A fitted classifier as a page that classifies in its visitor's browser: a folder of files for any web server.

The graph is that of :func:`~fewshot_mahalanobis.export.graph.write_page_onnx`.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.export.graph import write_page_onnx
from fewshot_mahalanobis.export.web_page.page_files import (
    RUNTIME,
    RUNTIME_VERSION,
    Page,
    page_folder,
    runtime_files,
    write_page,
)
from fewshot_mahalanobis.images.decode import ImageBatches, to_network_range
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedTask
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.labels import check_text

__all__ = ["RUNTIME", "RUNTIME_VERSION", "write_web_page"]

#: Side of a support picture on the page, in pixels.
THUMBNAIL = 84
#: Largest relative distance between the features of a picture and those of its support example.
SAME_PICTURE = 0.1

_GRAPH = "classifier.onnx"


def write_web_page(
    folder: str | os.PathLike[str],
    model: SimpleCNAPS,
    task: AdaptedTask,
    *,
    title: str,
    support: ImageBatches | None,
    runtime: str | os.PathLike[str] | None,
) -> None:
    """Write the page's files into a folder, which is made if it is absent; they replace those of an earlier page.

    Raises
    ------
    ValueError
        The folder has other files, a picture of ``support`` is none of the support set, or a file of ``runtime`` is of
        another version. FileNotFoundError if one is missing, or the folder that ``folder`` is in.
    """
    with page_folder(folder) as temporary:
        copied = None if runtime is None else runtime_files(Path(runtime))
        pictures = None if support is None else _thumbnails(support, task)
        graph = temporary / _GRAPH
        write_page_onnx(model, task, graph, distances=pictures is not None)
        fitted, classes = task.fitted_head, [str(label) for label in task.fitted_head.classes.tolist()]
        check_text([*fitted.output_labels.tolist()])
        examples = None
        if pictures is not None:
            labelled = zip(fitted.labels.tolist(), pictures, strict=True)
            examples = [{"label": classes[label], "picture": _data(picture)} for label, picture in labelled]
        description = {
            "side": model.image_size,
            "labels": [str(label) for label in fitted.output_labels.tolist()],
            "support": examples,
        }
        text = {
            "title": title,
            "about": f"Tells pictures of these {len(classes)} classes apart: {_listed(classes)}.",
            "learned": _learned(fitted),
        }
        templates = {"index.html": ("answers.html", text)}
        write_page(temporary, Page(title, templates, ("answers.js",), {"graph": _GRAPH}, description, copied))


def _thumbnails(support: ImageBatches, task: AdaptedTask) -> list[NDArray[np.uint8] | None]:
    """Picture (t, t, 3) of each support example, found by its features; None where none was given."""
    fitted = task.fitted_head
    known = fitted.support.adapted
    thumbnails: list[NDArray[np.uint8] | None] = [None] * len(known)
    for batch in support.decoded():
        images = to_network_range(torch.from_numpy(batch.pixels).permute(0, 3, 1, 2))
        distances = torch.cdist(task.features(images).to(known), known) / known.norm(dim=1)
        for index, picture, row in zip(batch.indices, batch.pixels, distances, strict=True):
            same = (row < SAME_PICTURE).nonzero()[:, 0].tolist()
            if not same:
                raise ImageError(
                    "it is none of the images that the classifier was fitted to: give those alone as support",
                    index,
                    support.name_of(index),
                )
            small = Image.fromarray(picture).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
            thumbnails[min(same, key=row.__getitem__)] = np.asarray(small)
    return thumbnails


def _learned(fitted: FittedHead) -> str:
    """How many pictures it has learned from, and whether it rejects others."""
    learned = f"It has learned from {len(fitted.labels)} pictures. "
    if fitted.outliers is None:
        return learned + "It knows these classes alone: a picture of anything else gets one of them too."
    return learned + f"A picture that is unlike all of them gets “{fitted.output_labels[-1]}”."


def _listed(classes: Sequence[str], most: int = 20) -> str:
    """Return "cat, dog and bird"; of many classes the first."""
    if len(classes) > most:
        return f"{', '.join(classes[:most])} and {len(classes) - most} more"
    return f"{', '.join(classes[:-1])} and {classes[-1]}"


def _data(picture: NDArray[np.uint8] | None) -> str | None:
    """A picture as a data URL, without its file's metadata."""
    if picture is None:
        return None
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
