"""The folder of a page that runs in its visitor's browser: what all such pages have, and how it takes its place.

ONNX Runtime Web runs the graphs of a page; its files come from a public server, or from the folder itself. They are
used only if they have the digests below.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image, ImageDraw

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.checkpoints.files import atomic_replace, naming_a_full_disk

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
_PAGE, _SERVICE_WORKER, _ICONS = "page.json", "service-worker.js", (192, 512)
#: What every page has beside its own files.
_COMMON = ("page.js", "loading.js", "pictures.js", "network.js", "classifier_file.js", "worker.js", "style.css")


@contextmanager
def page_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder for the files of a page, which replace those of an earlier page when the block ends.

    The folder of the page is made if it is absent. ValueError if it has other files; FileNotFoundError if the folder
    that it is in is absent.
    """
    folder = Path(folder)
    earlier = _earlier_files(folder)
    parent = folder.absolute().parent
    with naming_a_full_disk(folder), TemporaryDirectory(prefix=".saving-page-", dir=parent) as name:
        yield Path(name)
        _put_in_place(Path(name), folder, earlier)


def _put_in_place(written: Path, folder: Path, earlier: set[str]) -> None:
    """Move the files of a page into its folder, in place of those of an earlier one."""
    folder.mkdir(exist_ok=True)
    names = {file.name for file in written.iterdir()}
    # The service worker last: a visitor's browser that sees it keeps the other files as they are then.
    for name in sorted(names, key=_SERVICE_WORKER.__eq__):
        with atomic_replace(folder / name) as temporary:
            shutil.copyfile(written / name, temporary)
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


def runtime_files(folder: Path) -> dict[str, Path]:
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


# -------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Page:
    """One kind of page.

    Attributes
    ----------
    title : str
    templates : mapping of str to (str, mapping of str to str)
        Files by their names, "index.html" among them: a template of the package, and what it says at its places.
    scripts : sequence of str
        Files of the package beside the common ones.
    large : mapping of str to str
        Files of the folder that the script loads and checks, by the names that it knows.
    description : mapping of str to JSON values
        What the script reads beside.
    engine : sequence of str
        Those of the scripts that a document loads first.
    runtime : mapping of str to Path, optional
        The runtime's files, from :func:`runtime_files`; by default browsers load them from the public server.
    asked_for : set of str
        Files of the folder that a browser loads when the visitor asks for them, and never keeps.
    """

    title: str
    templates: Mapping[str, tuple[str, Mapping[str, str]]]
    scripts: Sequence[str]
    large: Mapping[str, str]
    description: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Path] | None = None
    engine: Sequence[str] = ()
    asked_for: Set[str] = frozenset()


def write_page(folder: Path, page: Page) -> None:
    """Write everything but the large files, which are there."""
    for kind, path in (page.runtime or {}).items():
        shutil.copyfile(path, folder / RUNTIME[kind][0])
    server = RUNTIME_ADDRESS if page.runtime is None else None
    runtime = {kind: _large_file(name, digest, server) for kind, (name, digest) in RUNTIME.items()}
    large = {kind: _large_file(name, _sha384(folder / name)) for kind, name in page.large.items()}
    size = sum((folder / name).stat().st_size for name in page.large.values()) + RUNTIME_BYTES
    _write_manifest(folder, page.title)
    for name in (*_COMMON, *page.scripts):
        (folder / name).write_text(_asset(name), encoding="utf-8")
    for name, (template, text) in page.templates.items():
        places = {"version": __version__, "policy": _policy(server), **text}
        escaped = {place: html.escape(value) for place, value in places.items()}
        scripts = "".join(f'<script src="{script}" defer></script>\n' for script in page.engine)
        filled = _filled(template, {"head": _asset("head.html"), "scripts": scripts, **escaped})
        (folder / name).write_text(filled, encoding="utf-8")
    description = {
        "made_by": f"{_MADE_BY} {__version__}",
        "bytes": size,
        "runtime_bytes": RUNTIME_BYTES,
        "runtime": runtime,
        **large,
        **page.description,
        "files": sorted({_PAGE, _SERVICE_WORKER, *(file.name for file in folder.iterdir())}),
    }
    (folder / _PAGE).write_text(json.dumps(description), encoding="utf-8")
    checked = {one["address"]: one["integrity"] for one in (*large.values(), *runtime.values())}
    _write_service_worker(folder, checked, page.asked_for)


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


def _large_file(name: str, digest: str, server: str | None = None) -> dict[str, str]:
    """Address and integrity of a file. In the page's folder its address has the digest, as its name stays."""
    address = f"{name}?{digest[:16]}" if server is None else server + name
    return {"address": address, "integrity": f"sha384-{digest}"}


def _write_service_worker(folder: Path, integrities: dict[str, str], asked_for: Set[str]) -> None:
    """Write the script that keeps the files of a folder and the large ones, of which it checks the integrity."""
    paths = sorted(path for path in folder.iterdir() if path.name not in asked_for)
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
            "img-src 'self' data: blob:",
            "media-src 'self' blob:",
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _asset(name: str) -> str:
    return (files("fewshot_mahalanobis") / "page" / name).read_text(encoding="utf-8")


def _filled(name: str, values: dict[str, Any]) -> str:
    text = _asset(name)
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text


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
