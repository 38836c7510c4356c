"""Copies that the page in the browser finds are those that Python finds."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from PIL import Image

from fewshot_mahalanobis.images.same_picture import same_pictures
from tests.images.test_same_picture import COPIES, KINDS, described


def sets() -> dict[str, list[Image.Image]]:
    """Different pictures alone, beside copies of each kind, and all together: few, as every pair is aligned."""
    originals = {kind: make()[:7] for kind, make in KINDS.items()}
    found = dict(originals)
    for kind, images in originals.items():
        found |= {f"{kind}, {copy}": [*images, *map(change, images)] for copy, change in COPIES.items()}
    found["all kinds"] = [image for images in originals.values() for image in images]
    even = [Image.new("RGB", (50, 50), colour) for colour in ("red", "blue", "#0000f0", "blue", "white")]
    return found | {"even": even, "one": even[:1]}


def test_copies_in_javascript_are_those_of_python(tmp_path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no node on PATH: install Node.js")
    wanted, written = {}, []
    for name, images in sets().items():
        pictures, features = described(images)
        if ", " in name:  # a network finds the copy nearest
            features = torch.eye(len(images) // 2).repeat(2, 1)
        wanted[name] = same_pictures(pictures, features).tolist()
        written.append({"pictures": pictures.flatten(1).tolist(), "features": features.tolist()})
    (tmp_path / "sets.json").write_text(json.dumps(written))
    script = files("fewshot_mahalanobis") / "page" / "same_picture.js"
    command = [node, str(Path(__file__).with_name("same_results.mjs")), str(script), str(tmp_path / "sets.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = {name: sorted(pairs) for name, pairs in zip(wanted, json.loads(run.stdout), strict=True)}
    assert found == wanted
    assert sum(map(len, wanted.values())) > 100
