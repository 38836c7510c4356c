"""What the tests of both pages share: the runtime's files and a browser."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from fewshot_mahalanobis.export.web_page import RUNTIME, RUNTIME_VERSION
from tests.browser import chromium


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime's files, of the version that pages name."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm on PATH, which has the files of ONNX Runtime Web: install Node.js")
    folder = tmp_path_factory.mktemp("npm")
    package = f"onnxruntime-web@{RUNTIME_VERSION}"
    packed = subprocess.run(["npm", "pack", package], cwd=folder, capture_output=True, text=True, check=False)
    if packed.returncode:
        pytest.skip(f"npm has no {package} here: {packed.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        for name, _ in RUNTIME.values():
            file = archive.extractfile(f"package/dist/{name}")
            assert file is not None
            (folder / name).write_bytes(file.read())
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one
