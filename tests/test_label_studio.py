"""The example of a backend for Label Studio, by the requests that Label Studio sends."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

api = pytest.importorskip(
    "label_studio_ml.api",
    reason="label-studio-ml asks for old versions of Flask and Jinja2: it has an environment apart",
)
EXAMPLE = Path(__file__).parents[1] / "examples" / "label_studio"
CONFIG = """<View>
  <Image name="image" value="$photo"/>
  <Choices name="kind" toName="image"><Choice value="blue"/><Choice value="red"/><Choice value="green"/></Choices>
</View>"""
PROJECT = {"id": 1, "label_config": CONFIG}
COLOURS = {"blue": (30, 40, 220), "red": (220, 40, 30), "green": (30, 200, 50)}


class LabelStudio:
    """What Label Studio sends to a backend and reads from it."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.saved = 0

    def post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            response: dict[str, Any] = json.load(answer)
        return response

    def task(self, number: int) -> dict[str, Any]:
        return {"id": number, "data": {"photo": f"/data/local-files/?d={self.folder.name}/{number}.png"}}

    def draw(self, number: int, colour: str) -> None:
        """Blotches of a colour, other ones for each number."""
        blotches = np.random.default_rng(number).uniform(0.2, 1, (6, 6, 1)) * np.array(COLOURS[colour])
        Image.fromarray(blotches.astype(np.uint8)).resize((84, 84)).save(self.folder / f"{number}.png")

    def annotate(self, number: int, *choices: str, action: str = "ANNOTATION_CREATED", **fields: Any) -> None:
        """Save an annotation; its identifier is ten times the task's."""
        self.saved += 1
        value = {"choices": list(choices)}
        result = {"from_name": "kind", "to_name": "image", "type": "choices", "value": value}
        saved = f"2026-01-01T00:00:{self.saved:02}.000000Z"
        annotation = {"id": 10 * number, "result": [result] if choices else [], "updated_at": saved} | fields
        content = {"action": action, "project": PROJECT, "task": self.task(number), "annotation": annotation}
        assert "job_id" in self.post("/webhook", content)

    def delete(self, *numbers: int) -> None:
        deleted = [{"id": 10 * number} for number in numbers]
        self.post("/webhook", {"action": "ANNOTATIONS_DELETED", "project": PROJECT, "annotations": deleted})

    def predictions(self, *numbers: int) -> list[tuple[str | None, float]]:
        tasks = [self.task(number) for number in numbers]
        request = {"tasks": tasks, "project": "1.1700000000", "label_config": CONFIG, "params": {"context": None}}
        found = []
        for prediction in self.post("/predict", request)["results"]:
            choices = [result["value"]["choices"] for result in prediction["result"]]
            for result in prediction["result"]:
                assert (result["from_name"], result["to_name"], result["type"]) == ("kind", "image", "choices")
            found.append((choices[0][0] if choices else None, prediction["score"]))
            self.version = prediction["model_version"]
        return found


@pytest.fixture
def label_studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LabelStudio]:
    """The package's own server on this machine, whose backend learns in this process."""
    from label_studio_ml.model import SimpleJobManager
    from label_studio_tools.core.utils import io
    from werkzeug.serving import make_server

    if not EXAMPLE.exists():
        pytest.skip("the tests are away from the repository")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "labels"))
    monkeypatch.setattr(io, "LOCAL_FILES_DOCUMENT_ROOT", str(tmp_path))
    # Without a process for each event, which would import PyTorch first.
    monkeypatch.setattr(SimpleJobManager, "run_job", lambda self, model_class, event: self.job(model_class, *event))
    import fewshot_backend

    monkeypatch.setattr(fewshot_backend, "CHECKPOINT", "resnet18")  # the quicker one
    app = api.init_app(fewshot_backend.FewShotBackend, model_dir=str(tmp_path / "labels"))
    server = make_server("127.0.0.1", 0, app)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield LabelStudio(f"http://127.0.0.1:{server.server_port}", pictures)
    server.shutdown()
    thread.join()


def test_saved_annotations_teach_and_predictions_fill_in_labels(label_studio: LabelStudio) -> None:
    for number, colour in enumerate(["blue", "red", "blue", "red", "blue", "red", "blue", "red", "green"]):
        label_studio.draw(number, colour)
    setup = {"project": "1.1700000000", "schema": CONFIG, "hostname": "http://127.0.0.1", "access_token": "secret"}
    assert label_studio.post("/setup", setup)["model_version"] == "INITIAL"
    assert label_studio.predictions(6, 7) == [(None, 0.0)] * 2
    for number, colour in enumerate(["blue", "red", "blue", "red", "blue", "red"]):
        label_studio.annotate(number, colour)
    (blue, sure), (red, _), (unknown, score) = label_studio.predictions(6, 7, 8)
    assert (blue, red) == ("blue", "red")
    assert 0.5 < sure <= 1
    assert (unknown, score) == (None, 0.0)  # green belongs to no class yet
    assert label_studio.version == "6 pictures"


def labels_and_counts(folder: Path) -> tuple[dict[str, str], dict[str, int]]:
    """What the backend keeps in its folder: the label of each task, and the counts of the classifier beside."""
    from fewshot_mahalanobis import SimpleCNAPSClassifier

    state = json.loads((folder / "state.json").read_text())
    labels = {task: entry["label"] for task, entry in state["labelled"].items()}
    classifier = SimpleCNAPSClassifier.load(folder / f"{state['number']}.safetensors")
    return labels, dict(zip(classifier.classes_.tolist(), classifier.class_counts_.tolist(), strict=True))


def test_an_annotation_that_is_changed_skipped_or_deleted_leaves_nothing_of_the_old_one(
    label_studio: LabelStudio, tmp_path: Path
) -> None:
    colours = ["blue", "red", "blue", "red", "blue", "green"]
    for number, colour in enumerate(colours):
        label_studio.draw(number, colour)
        label_studio.annotate(number, "red" if number == 5 else colour)
    assert labels_and_counts(tmp_path / "labels")[1] == {"blue": 3, "red": 3}

    label_studio.annotate(4, "blue", action="ANNOTATION_UPDATED")  # saved again as it was: not a second picture
    assert labels_and_counts(tmp_path / "labels")[1] == {"blue": 3, "red": 3}
    label_studio.annotate(5, "green", action="ANNOTATION_UPDATED")
    assert labels_and_counts(tmp_path / "labels")[1] == {"blue": 3, "green": 1, "red": 2}
    label_studio.annotate(5, "red", updated_at="2025-01-01T00:00:00.000000Z")  # an older event comes late
    assert labels_and_counts(tmp_path / "labels")[1] == {"blue": 3, "green": 1, "red": 2}
    label_studio.annotate(4, action="ANNOTATION_UPDATED", was_cancelled=True)
    label_studio.delete(5)
    labels, counts = labels_and_counts(tmp_path / "labels")
    assert labels == {"0": "blue", "1": "red", "2": "blue", "3": "red"}
    assert counts == {"blue": 2, "red": 2}


def test_what_was_learned_is_there_after_a_restart_and_a_missing_picture_is_left_unlabelled(
    label_studio: LabelStudio,
) -> None:
    import fewshot_backend

    for number, colour in enumerate(["blue", "red", "blue", "red", "blue"]):
        label_studio.draw(number, colour)
        if number < 4:
            label_studio.annotate(number, colour)
    before = label_studio.predictions(4)
    fewshot_backend._load.cache_clear()  # all that the process remembers
    (label_studio.folder / "5.png").write_text("no picture")
    assert label_studio.predictions(4, 5, 6) == [*before, (None, 0.0), (None, 0.0)]
    assert before[0][0] == "blue"
