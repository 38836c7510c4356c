"""A fitted classifier as a page that classifies in its visitor's browser: a folder of files for any web server.

The graph is the one of :mod:`~fewshot_mahalanobis.export.graph` that reads pixels. ONNX Runtime Web runs it; its
files come from a public server, or from the folder itself. They are used only if they have the digests below.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import os
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.export.graph import write_onnx
from fewshot_mahalanobis.images.decode import ImageBatches, to_network_range
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedTask
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

__all__ = ["RUNTIME", "RUNTIME_VERSION", "write_web_page"]

#: The npm package onnxruntime-web, where a public server has its files, and the SHA-384 of those that a page needs.
RUNTIME_VERSION = "1.30.0"
RUNTIME_ADDRESS = f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{RUNTIME_VERSION}/dist/"
RUNTIME = {
    "script": ("ort.wasm.bundle.min.mjs", "PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG"),
    "wasm": ("ort-wasm-simd-threaded.wasm", "vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM"),
}
#: Their sizes in bytes, for what the page says while it loads.
RUNTIME_BYTES = 73_054 + 14_239_897
#: What every page names as its maker, before the version.
_MADE_BY = "fewshot-mahalanobis"
#: Side of a support picture on the page, in pixels.
THUMBNAIL = 84
#: Relative distance of features below which a picture is the one that a support feature came from.
SAME_PICTURE = 0.1

_STATIC = ("app.js", "pictures.js", "worker.js", "style.css")
_GRAPH, _PAGE, _SERVICE_WORKER, _ICONS = "classifier.onnx", "page.json", "service-worker.js", (192, 512)


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
    folder = Path(folder)
    earlier = _earlier_files(folder)
    scripts = None if runtime is None else _runtime_files(Path(runtime))
    pictures = None if support is None else _thumbnails(support, task)
    with TemporaryDirectory(prefix=".saving-page-", dir=folder.absolute().parent) as name:
        temporary = Path(name)
        write_onnx(model, task, temporary / _GRAPH, pixels=True, distances=pictures is not None, float16=True)
        graph = _large_file(_GRAPH, _sha384(temporary / _GRAPH))
        for kind, path in (scripts or {}).items():
            shutil.copyfile(path, temporary / RUNTIME[kind][0])
        server = RUNTIME_ADDRESS if scripts is None else None
        addresses = {kind: _large_file(name, digest, server) for kind, (name, digest) in RUNTIME.items()}
        _write(temporary, _Page(model, task.fitted_head, title, pictures, server, graph, addresses))
        _put_in_place(temporary, folder, earlier)


def _put_in_place(written: Path, folder: Path, earlier: set[str]) -> None:
    """Move the files of a page into its folder, in place of those of an earlier one."""
    folder.mkdir(exist_ok=True)
    names = {file.name for file in written.iterdir()}
    # The service worker last: a visitor's browser that sees it keeps the other files as they are then.
    for name in sorted(names, key=_SERVICE_WORKER.__eq__):
        with atomic_replace(folder / name) as temporary:
            shutil.move(written / name, temporary)
    for name in earlier - names:
        (folder / name).unlink(missing_ok=True)


def _earlier_files(folder: Path) -> set[str]:
    """Names of the files of the page that is in the folder; none if the folder is absent or empty.

    FileNotFoundError or ValueError if no page can be written there.
    """
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise FileNotFoundError(f"cannot write {folder}: there is no folder {parent}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot write to {folder}: it is no folder")
    if not folder.exists() or not any(folder.iterdir()):
        return set()
    try:
        page = json.loads((folder / _PAGE).read_text(encoding="utf-8"))
        if not page["made_by"].startswith(_MADE_BY):
            raise ValueError(page["made_by"])
        return {Path(name).name for name in page["files"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{folder} has other files: name a new folder for the page, or one with an earlier page"
        ) from None


# -------------------------------------------------------------------- what goes in


def _runtime_files(folder: Path) -> dict[str, Path]:
    """The runtime's files in a local installation, of the version that the page is written for."""
    remedy = f"npm install onnxruntime-web@{RUNTIME_VERSION}"
    found = {}
    for kind, (name, digest) in RUNTIME.items():
        places = [folder / name, folder / "dist" / name, folder / "node_modules" / "onnxruntime-web" / "dist" / name]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"there is no {name} in {folder}: run `{remedy}` and name its folder node_modules/onnxruntime-web/dist"
            )
        if _sha384(path) != digest:
            raise ValueError(f"{path} is not that of onnxruntime-web {RUNTIME_VERSION}: run `{remedy}`")
        found[kind] = path
    return found


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


# -------------------------------------------------------------------- writing


class _Page(NamedTuple):
    """What the files of a page say."""

    model: SimpleCNAPS
    fitted: FittedHead
    title: str
    pictures: Sequence[NDArray[np.uint8] | None] | None  # of the support examples
    server: str | None  # that has the runtime; None if the page's folder has it
    graph: dict[str, str]  # address and integrity of the graph, and those of the runtime's files
    runtime: dict[str, dict[str, str]]

    @property
    def classes(self) -> list[str]:
        return [str(label) for label in self.fitted.classes.tolist()]


def _write(folder: Path, page: _Page) -> None:
    """Write everything but the graph and the runtime, which are there."""
    _write_manifest(folder, page.title)
    for name in _STATIC:
        (folder / name).write_text(_asset(name), encoding="utf-8")
    _write_index(folder, page)
    _write_description(folder, page)
    _write_service_worker(folder, {file["address"]: file["integrity"] for file in (page.graph, *page.runtime.values())})


def _write_manifest(folder: Path, title: str) -> None:
    """Write what a browser needs to install the page as an app."""
    manifest = {
        "name": title,
        "short_name": title,
        "start_url": "./",
        "scope": "./",
        "display": "standalone",
        "background_color": "#ffffff",
        "theme_color": "#1f5fbf",
        "icons": [
            {"src": f"icon-{side}.png", "sizes": f"{side}x{side}", "type": "image/png", "purpose": "any maskable"}
            for side in _ICONS
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for side in _ICONS:
        _icon(side).save(folder / f"icon-{side}.png")


def _write_index(folder: Path, page: _Page) -> None:
    """Write the page itself, which says what it tells apart."""
    fitted, classes = page.fitted, page.classes
    learned = f"It has learned from {len(fitted.labels)} pictures. "
    if fitted.outliers is None:
        learned += "It knows these classes alone: a picture of anything else gets one of them too."
    else:
        learned += f"A picture that is unlike all of them gets “{fitted.output_labels[-1]}”."
    text = {
        "title": page.title,
        "about": f"Tells pictures of these {len(classes)} classes apart: {_listed(classes)}.",
        "learned": learned,
        "version": __version__,
        "policy": _policy(page.server),
    }
    index = _filled("index.html", {name: html.escape(value) for name, value in text.items()})
    (folder / "index.html").write_text(index, encoding="utf-8")


def _write_description(folder: Path, page: _Page) -> None:
    """Write what the page's script reads; it names all files, for who writes another page into the folder."""
    support = None
    if page.pictures is not None:
        of_examples = zip(page.fitted.labels.tolist(), page.pictures, strict=True)
        support = [{"label": page.classes[label], "picture": _data(picture)} for label, picture in of_examples]
    description = {
        "made_by": f"{_MADE_BY} {__version__}",
        "side": page.model.image_size,
        "labels": [str(label) for label in page.fitted.output_labels.tolist()],
        "bytes": (folder / _GRAPH).stat().st_size + RUNTIME_BYTES,
        "graph": page.graph,
        "runtime": page.runtime,
        "support": support,
        "files": sorted({_PAGE, _SERVICE_WORKER, *(file.name for file in folder.iterdir())}),
    }
    (folder / _PAGE).write_text(json.dumps(description), encoding="utf-8")


def _large_file(name: str, digest: str, server: str | None = None) -> dict[str, str]:
    """Address and integrity of a file. In the page's folder its address has the digest, as its name stays."""
    address = f"{name}?{digest[:16]}" if server is None else server + name
    return {"address": address, "integrity": f"sha384-{digest}"}


def _write_service_worker(folder: Path, integrities: dict[str, str]) -> None:
    """Write the script that keeps the files of a folder and the large ones, of which it checks the integrity."""
    paths = sorted(folder.iterdir())
    large = {address.partition("?")[0] for address in integrities}
    kept = {path.name: "" for path in paths if path.name not in large} | integrities
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
    worker = _filled(_SERVICE_WORKER, {"digest": digest, "files": json.dumps([*kept.items()], indent=2)})
    (folder / _SERVICE_WORKER).write_text(worker, encoding="utf-8")


def _policy(runtime: str | None) -> str:
    """Content-Security-Policy: the page connects to its own folder's server and to the runtime's address alone."""
    return "; ".join(
        [
            "default-src 'none'",
            "script-src 'self' blob: 'wasm-unsafe-eval'",
            "worker-src 'self' blob:",
            f"connect-src 'self'{'' if runtime is None else ' ' + runtime}",
            "style-src 'self'",
            "img-src 'self' data:",
            "media-src 'self' blob:",
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _listed(classes: Sequence[str], most: int = 20) -> str:
    """Return "cat, dog and bird"; of many classes the first."""
    if len(classes) > most:
        return f"{', '.join(classes[:most])} and {len(classes) - most} more"
    return f"{', '.join(classes[:-1])} and {classes[-1]}"


def _asset(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def _filled(name: str, values: dict[str, Any]) -> str:
    text = _asset(name)
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text


def _data(picture: NDArray[np.uint8] | None) -> str | None:
    """A picture as an address that has it whole, without what a file says about it."""
    if picture is None:
        return None
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _icon(side: int) -> Image.Image:
    """Three classes as ellipses, and a query among them; what matters is inside the circle that a phone may cut out."""
    icon = Image.new("RGB", (512, 512), "#1f5fbf")
    draw = ImageDraw.Draw(icon)
    for box, colour in (
        ((110, 150, 270, 250), "#ffd166"),
        ((280, 130, 390, 270), "#ff8c7a"),
        ((160, 280, 370, 380), "#8fe3b0"),
    ):
        draw.ellipse(box, fill=colour)
    draw.ellipse((246, 236, 286, 276), fill="white")
    return icon.resize((side, side), Image.Resampling.LANCZOS)


def _sha384(path: Path) -> str:
    return base64.b64encode(hashlib.sha384(path.read_bytes()).digest()).decode()
