"""The head in JavaScript decides as the one in Python: the same settings, logits, probabilities and rejection."""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fewshot_mahalanobis.heads.auto import AutoHead
from fewshot_mahalanobis.support_set.copies import near_twins
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.learning_curve import learning_curve
from tests.page.head_tasks import head_tasks, write_tasks

NAMES = [task["name"] for task in head_tasks()]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head") / "tasks.json"
    write_tasks(path)
    return path


@pytest.fixture(scope="module")
def results(tasks: Path) -> dict[str, Any]:
    """What JavaScript finds, by the names of the tasks."""
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no node on PATH: install Node.js")
    scripts = [str(files("fewshot_mahalanobis") / "page" / name) for name in ("head.js", "learning_curve.js")]
    command = [node, str(Path(__file__).with_name("head_results.mjs")), *scripts, str(tasks)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(zip(NAMES, json.loads(run.stdout), strict=True))


def fitted_head(task: dict[str, Any]) -> FittedHead:
    support = Features(torch.tensor(task["features"]).double(), torch.tensor(task["unadapted"]).double())
    negatives = None
    if task["negatives"] and task["reject"]:
        rows = (torch.tensor(task[name]).double() for name in ("negatives", "unadapted_negatives"))
        negatives = Features(*rows)
    names = task["groups"] if task["names"] is None else task["names"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot guarantee false_rejection_rate")
        return FittedHead.fit(
            AutoHead(),
            support,
            torch.tensor(task["labels"]),
            temperature=task["temperature"],
            unknown_label=-1 if task["reject"] else None,
            false_rejection_rate=0.2,
            priors=None if task["priors"] is None else np.array(task["priors"]),
            negatives=negatives,
            group_names=names,
            twins=near_twins(support.adapted, torch.tensor(task["labels"])) if task["twins"] else None,
        )


def numbers(rows: list[list[float | str]]) -> np.ndarray:
    return np.array([[float(value) for value in row] for row in rows])


@pytest.mark.parametrize("name", NAMES)
def test_settings_logits_and_rejection_in_javascript_are_those_of_python(
    name: str, tasks: Path, results: dict[str, Any]
) -> None:
    task = next(task for task in json.loads(tasks.read_text()) if task["name"] == name)
    found, fitted = results[name], fitted_head(task)
    wanted = asdict(fitted.settled.settings)
    assert found["settings"].keys() == wanted.keys()
    for setting, value in wanted.items():
        assert found["settings"][setting] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5))
    assert found["temperature"] == pytest.approx(fitted.temperature, rel=1e-5)

    queries = Features(torch.tensor(task["queries"]).double(), torch.tensor(task["unadapted_queries"]).double())
    decisions = fitted.predict(queries)
    np.testing.assert_allclose(numbers(found["logits"]), decisions.logits, rtol=1e-4)
    assert found["labels"] == decisions.logits.argmax(dim=1).tolist()
    probabilities = fitted.log_probabilities(decisions.logits).exp()
    np.testing.assert_allclose(found["probabilities"], probabilities, rtol=1e-4, atol=1e-12)
    left_out = fitted.settled.leave_one_out_logits(fitted.support.adapted, fitted.labels, fitted.groups)
    np.testing.assert_allclose(numbers(found["left_out"]), left_out, rtol=1e-4)

    np.testing.assert_allclose(found["scores"], decisions.outlier_scores, rtol=1e-4)
    rejected = decisions.indices == len(fitted.classes)
    assert found["unknown"] == rejected.tolist()
    np.testing.assert_allclose(found["doubts"], fitted.doubts(decisions), rtol=1e-3, atol=1e-6)
    assert (found["outliers"] is None) == (fitted.outliers is None)
    if fitted.outliers is not None:
        assert found["outliers"]["threshold"] == pytest.approx(fitted.outliers.threshold, rel=1e-4)
        assert found["outliers"]["units"].keys() == fitted.outliers.units.keys()
        for term, unit in fitted.outliers.units.items():
            assert found["outliers"]["units"][term] == pytest.approx(unit, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_learning_curve_in_javascript_is_that_of_python(name: str, tasks: Path, results: dict[str, Any]) -> None:
    fitted = fitted_head(next(task for task in json.loads(tasks.read_text()) if task["name"] == name))
    left_out = fitted.settled.leave_one_out_logits(fitted.support.adapted, fitted.labels, fitted.groups)
    wanted, found = learning_curve(fitted, left_out), results[name]["curve"]
    assert (found is None) == (wanted is None)
    if wanted is None:
        return
    assert found["counts"] == [*wanted.counts.values()]
    assert dict(found["measured"]) == pytest.approx(wanted.measured)
    more = {0: found["now"], **dict(enumerate(found["more"], 1))}
    assert max(more) == found["usual"] == wanted.usual_count
    for extra, expected in more.items():
        assert [*expected.values()] == pytest.approx([*wanted.expected(extra)], rel=1e-5)
    label, images, sure = found["mostUseful"].values()
    assert (fitted.classes[label], images, sure) == wanted.most_useful
    assert found["leftOut"] == wanted.left_out
    assert found["little"] == ("little" in wanted.advice)
    assert (found["little"] and found["narrow"]) == ("would bring little" in wanted.advice)


def test_the_tasks_choose_both_powers_both_covariances_and_reject_some_queries(results: dict[str, Any]) -> None:
    settings = [result["settings"] for result in results.values()]
    assert {one["power"] for one in settings} == {1, 0.5}
    assert {one["shared"] for one in settings} == {"task", "within"}
    assert any(one["freedom"] > 0 for one in settings)
    assert {unknown for result in results.values() for unknown in result["unknown"]} == {True, False}
