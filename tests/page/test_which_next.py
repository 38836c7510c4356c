"""The picture that the page in the browser asks about next is the one that Python asks about."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from fewshot_mahalanobis.apps.active_learning import density, doubt, most_useful, typicality


def test_which_picture_is_next_in_javascript_is_that_of_python(tmp_path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no node on PATH: install Node.js")
    rng, tasks = np.random.default_rng(0), []
    for m, k, n in ((1, 2, 1), (3, 1, 4), (7, 2, 3), (40, 5, 12), (60, 3, 5), (60, 3, 5)):
        features, known = rng.normal(size=(m, 8)) + 0.5, rng.normal(size=(n, 8)) + 0.5
        probabilities = rng.dirichlet(np.full(k, 0.3), m)
        tasks.append((features.astype(np.float32), probabilities, known.astype(np.float32)))
    written = [{"features": x.tolist(), "probabilities": p.tolist(), "known": known.tolist()} for x, p, known in tasks]
    (tmp_path / "tasks.json").write_text(json.dumps(written))
    script = str(files("fewshot_mahalanobis") / "page" / "which_next.js")
    command = [node, str(Path(__file__).with_name("which_next_results.mjs")), script, str(tmp_path / "tasks.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for (features, probabilities, known), found in zip(tasks, json.loads(run.stdout), strict=True):
        np.testing.assert_allclose(found["density"], density(features), atol=1e-5)
        np.testing.assert_allclose(found["doubt"], doubt(probabilities), atol=1e-12)
        typical = typicality(features, density(features), known)
        assert found["next"] == most_useful(probabilities, typical)
