"""What the backend for Label Studio learns and answers, without Label Studio's package, of which it needs two names."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.tiny import unadapted_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

EXAMPLE = Path(__file__).parents[1] / "examples" / "label_studio"
COLOURS = {"blue": (30, 40, 220), "red": (220, 40, 30)}


class Base:
    """As much of ``LabelStudioMLBase`` as the backend uses."""

    parsed_label_config: dict[str, Any] = {}  # noqa: RUF012
    folder: Path

    def get_local_path(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if not EXAMPLE.exists():
        pytest.skip("the tests are away from the repository")
    model, utils = types.ModuleType("label_studio_ml.model"), types.ModuleType("label_studio_ml.utils")
    model.LabelStudioMLBase = Base  # type: ignore[attr-defined]
    utils.get_single_tag_keys = lambda *_: ("kind", "image", "photo", [*COLOURS])  # type: ignore[attr-defined]
    for name, module in (("", types.ModuleType("label_studio_ml")), (".model", model), (".utils", utils)):
        monkeypatch.setitem(sys.modules, f"label_studio_ml{name}", module)
    monkeypatch.delitem(sys.modules, "fewshot_backend", raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "labels"))
    import fewshot_backend

    monkeypatch.setattr(fewshot_backend, "CHECKPOINT", unadapted_model())
    Base.folder = tmp_path / "pictures"
    Base.folder.mkdir()
    yield fewshot_backend.FewShotBackend()
    sys.modules.pop("fewshot_backend")


def annotate(backend: Any, number: int, colour: str, *, draw: bool = True) -> dict[str, Any]:
    """Draw a picture and save its label; returns the task."""
    task = {"id": number, "data": {"photo": f"{number}.png"}}
    if draw:
        noise = np.random.default_rng(number).normal(0, 20, (40, 40, 3))
        pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(backend.folder / f"{number}.png")
    annotation = {"id": 10 * number, "updated_at": f"2026-01-01T00:00:{number:02}Z"}
    annotation["result"] = [{"from_name": "kind", "value": {"choices": [colour]}}]
    backend.fit(None, event="ANNOTATION_CREATED", data={"task": task, "annotation": annotation})
    return task


def counts(tmp_path: Path) -> dict[str, int]:
    """Examples of each class that the last classifier has learned."""
    from fewshot_mahalanobis import SimpleCNAPSClassifier

    number = json.loads((tmp_path / "labels" / "state.json").read_text())["number"]
    classifier = SimpleCNAPSClassifier.load(tmp_path / "labels" / f"{number}.safetensors")
    return dict(zip(classifier.classes_.tolist(), classifier.class_counts_.tolist(), strict=True))


def _folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "lose",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("<html>404 Not Found</html>"),
        lambda path: path.write_bytes(path.read_bytes()[:-200]),
        _folder_in_its_place,
        _link_to_itself,
    ],
    ids=["gone", "empty", "a page in its place", "cut short", "a folder", "a link in a circle"],
)
def test_a_picture_that_is_lost_costs_no_other_label(lose: Callable[[Path], Any], backend: Any, tmp_path: Path) -> None:
    for number, colour in enumerate(["blue", "red", "blue"]):
        annotate(backend, number, colour)
    kept = (backend.folder / "0.png").read_bytes()
    lose(backend.folder / "0.png")
    for number, colour in ((3, "red"), (4, "blue"), (5, "red")):  # with the last it is fitted anew, to twice as many
        annotate(backend, number, colour)
    assert counts(tmp_path) == {"blue": 2, "red": 3}
    labels = json.loads((tmp_path / "labels" / "state.json").read_text())["labelled"]
    assert len(labels) == 6
    task = {"id": 11, "data": {"photo": "4.png"}}
    assert backend.predict([task])[0]["result"][0]["value"]["choices"] == ["blue"]

    lost = backend.folder / "0.png"
    lost.rmdir() if lost.is_dir() else lost.unlink(missing_ok=True)
    lost.write_bytes(kept)  # it comes back, and counts with the next fit from the beginning
    annotate(backend, 4, "red", draw=False)
    assert counts(tmp_path) == {"blue": 2, "red": 4}


def test_all_pictures_of_a_class_may_be_lost_and_another_takes_their_place(backend: Any, tmp_path: Path) -> None:
    for number, colour in enumerate(["blue", "red"]):
        annotate(backend, number, colour)
    (backend.folder / "0.png").unlink()
    for number, colour in ((2, "red"), (3, "red"), (4, "blue")):
        annotate(backend, number, colour)
    assert counts(tmp_path) == {"blue": 1, "red": 3}


def test_answers_while_it_learns_are_those_of_a_state_that_it_has_written(backend: Any) -> None:
    task = annotate(backend, 0, "blue")
    annotate(backend, 1, "red")
    found, done = list[Any](), threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                found.extend(backend.predict([task]))
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    right = {"2 pictures": backend.predict([task])[0]}
    for number in range(2, 5):
        annotate(backend, number, ["blue", "red"][number % 2])
        right[f"{number + 1} pictures"] = backend.predict([task])[0]
    done.set()
    for thread in threads:
        thread.join()
    assert len(found) >= len(right)
    for answer in found:
        assert isinstance(answer, dict), answer
        assert answer == right[answer["model_version"]]
