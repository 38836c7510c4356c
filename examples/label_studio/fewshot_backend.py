"""A machine-learning backend for Label Studio: it pre-fills the labels of pictures and learns from every saved one.

In a clone of the repository, and in an environment of its own, because label-studio-ml 1.0.9 asks for old versions of
Flask and Jinja2:

    pip install . label-studio-ml redis rq
    label-studio-ml init backend --script examples/label_studio/fewshot_backend.py:FewShotBackend
    MODEL_DIR=labels LABEL_STUDIO_URL=http://127.0.0.1:8080 LABEL_STUDIO_API_KEY=... label-studio-ml start backend

Then add http://127.0.0.1:9090 as a model of the project, and as a webhook http://127.0.0.1:9090/webhook for annotations
that are created, updated and deleted. The project has one <Choices> for one <Image>; each project needs a backend of
its own. Predictions start when there are two classes and one of them has two different pictures.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from label_studio_ml.model import LabelStudioMLBase
from label_studio_ml.utils import get_single_tag_keys

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.checkpoints.files import atomic_replace, locked
from fewshot_mahalanobis.images.picture import read_square

#: The pretrained model.
CHECKPOINT = "default"
#: Label of pictures that belong to no class. They are left unlabelled.
UNKNOWN = "(unknown)"


class FewShotBackend(LabelStudioMLBase):
    """Labels pictures by those that already have a label.

    Everything it knows is in the folder ``MODEL_DIR``: ``state.json`` has the label of each task, and the classifier
    fitted to them is the file with the number of that state.
    """

    TRAIN_EVENTS = ("ANNOTATION_CREATED", "ANNOTATION_UPDATED", "ANNOTATIONS_DELETED")

    def predict(self, tasks: list[dict[str, Any]], **kwargs: Any) -> list[dict[str, Any]]:
        """Predictions of Label Studio's tasks: a choice with its probability, or none for unknown pictures."""
        state, classifier = _state_and_classifier()
        return [
            {**self._prediction(task, classifier), "model_version": f"{len(state['labelled'])} pictures"}
            for task in tasks
        ]

    def _prediction(self, task: dict[str, Any], classifier: SimpleCNAPSClassifier | None) -> dict[str, Any]:
        nothing = {"result": [], "score": 0.0}
        if classifier is None:
            return nothing
        from_name, to_name, value, choices = get_single_tag_keys(self.parsed_label_config, "Choices", "Image")
        try:
            answer = classifier.predict_all([self.get_local_path(task["data"][value])])
        except (OSError, ValueError) as error:  # it cannot be fetched, or it is not a picture
            logging.getLogger(__name__).warning("task %s is left unlabelled: %s", task["id"], error)
            return nothing
        label = str(answer.labels[0])
        if label not in choices:  # unknown, or no longer a choice of this project
            return nothing
        choice = {"from_name": from_name, "to_name": to_name, "type": "choices", "value": {"choices": [label]}}
        return {"result": [choice], "score": float(answer.probabilities.max())}

    def fit(self, tasks: Any, workdir: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Learn from one event of Label Studio's webhook; each event comes in a separate process."""
        with locked(_folder() / "lock"):
            state = _read_state()
            labelled = self._after(kwargs["event"], kwargs["data"], state["labelled"])
            if labelled != state["labelled"]:
                self._learn(state, labelled)
        return {"labelled": len(labelled)}

    def _after(self, event: str, data: dict[str, Any], labelled: dict[str, Any]) -> dict[str, Any]:
        """The label of each task after an event; the last saved annotation of a task counts."""
        if event == "ANNOTATIONS_DELETED":
            deleted = {annotation["id"] for annotation in data["annotations"]}
            return {task: entry for task, entry in labelled.items() if entry["annotation"] not in deleted}
        task, annotation = str(data["task"]["id"]), data["annotation"]
        if task in labelled and labelled[task]["saved"] > annotation["updated_at"]:
            return labelled  # an older event that comes later: processes run side by side
        others = {name: entry for name, entry in labelled.items() if name != task}
        from_name, _, value, _ = get_single_tag_keys(self.parsed_label_config, "Choices", "Image")
        chosen = [
            choice
            for result in annotation["result"]
            if result["from_name"] == from_name
            for choice in result["value"]["choices"]
        ]
        if annotation.get("was_cancelled") or len(chosen) != 1:  # skipped, or not exactly one choice
            return others
        entry = {
            "annotation": annotation["id"],
            "saved": annotation["updated_at"],
            "picture": data["task"]["data"][value],
            "label": chosen[0],
        }
        return {**others, task: entry}

    def _learn(self, state: dict[str, Any], labelled: dict[str, Any]) -> None:
        """Fit the classifier to ``labelled`` and write the next state, completely or not at all."""
        before = {task: entry["label"] for task, entry in state["labelled"].items()}
        after = {task: entry["label"] for task, entry in labelled.items()}
        file, adapted_to = _classifier_file(state["number"]), state["adapted_to"]
        classifier: SimpleCNAPSClassifier | None
        if file.exists() and before.items() <= after.items() and len(after) < 2 * adapted_to:
            classifier = SimpleCNAPSClassifier.load(file)
            pictures = self._pictures(labelled, [task for task in after if task not in before])
            if pictures:
                classifier.partial_fit([*pictures.values()], [after[task] for task in pictures])
        else:  # a label was changed or withdrawn, or there are twice as many pictures for the network to adapt to
            pictures, adapted_to = self._pictures(labelled, after), len(after)
            try:
                classifier = SimpleCNAPSClassifier(CHECKPOINT, unknown_label=UNKNOWN)
                classifier.fit([*pictures.values()], [after[task] for task in pictures])
            except ValueError as error:  # one class, or nothing to tell by what is unknown
                logging.getLogger(__name__).warning("no predictions yet: %s", error)
                classifier = None
        number = state["number"] + 1
        _classifier_file(number).unlink(missing_ok=True)  # of a process that was ended before it wrote its state
        if classifier is not None:
            classifier.save(_classifier_file(number))
        with atomic_replace(_folder() / "state.json") as written:
            written.write_text(json.dumps({"number": number, "adapted_to": adapted_to, "labelled": labelled}))
        _classifier_file(number - 2).unlink(missing_ok=True)  # a prediction may still be reading the last one

    def _pictures(self, labelled: dict[str, Any], tasks: Iterable[str]) -> dict[str, str]:
        """The file of each task's picture. A label whose picture is gone or damaged is kept, in case it comes back."""
        files = {}
        for task in tasks:
            try:
                file = self.get_local_path(labelled[task]["picture"])
                read_square(file, 84)
                files[task] = file
            except (OSError, ValueError) as error:
                logging.getLogger(__name__).warning("task %s is left out: %s", task, error)
        return files


def _folder() -> Path:
    folder = Path(os.environ.get("MODEL_DIR", "labels")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _classifier_file(number: int) -> Path:
    return _folder() / f"{number}.safetensors"


def _read_state() -> dict[str, Any]:
    file = _folder() / "state.json"
    state: dict[str, Any] = {"number": 0, "adapted_to": 0, "labelled": {}}
    return json.loads(file.read_text()) if file.exists() else state


def _state_and_classifier() -> tuple[dict[str, Any], SimpleCNAPSClassifier | None]:
    """The last state and the classifier fitted to it; None if there is none yet."""
    while True:
        state = _read_state()
        try:
            return state, _load(_classifier_file(state["number"]))
        except FileNotFoundError:
            if state["number"] == _read_state()["number"]:  # else two fits have removed the file meanwhile
                return state, None


@functools.lru_cache(maxsize=2)
def _load(file: Path) -> SimpleCNAPSClassifier:
    """Read a classifier once: Label Studio's package makes a new backend for every request."""
    return SimpleCNAPSClassifier.load(file)
