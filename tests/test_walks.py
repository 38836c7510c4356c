"""From ``fit`` to a label, and from a file to a model: no module is entered while it waits for another that it called.

A walk is the sequence of the package's modules on the call stack of the main thread. A module is entered twice if one
of its functions is called by another module while it is lower on the same stack: A calls B, B calls A. A reader who
follows the calls then has two places of A in mind at once. Calls within a module, and a module that is left and called
again later, are no re-entry. Work in other threads, such as decoding, is not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.checkpoints import save_checkpoint
from tests.tiny import LABELS, adapting_model, pictures

PACKAGE = "fewshot_mahalanobis"


def reentries(action: Callable[[], Any], package: str = PACKAGE) -> set[tuple[str, str, str]]:
    """Run ``action``; return (module, module that it waits for, function that is called) of every re-entry."""
    stack: list[str] = []
    found: set[tuple[str, str, str]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] != package or frame.f_code.co_name == "<module>":
            return
        if event == "call":
            if stack and stack[-1] != name and name in stack:
                found.add((name, stack[-1], frame.f_code.co_name))
            stack.append(name)
        elif event == "return" and stack:
            stack.pop()

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return found


def module(name: str, code: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    exec(code, made.__dict__)
    return made


def test_a_walk_that_comes_back_is_detected() -> None:
    low = module("walked.low", "def work(x): return x + 1\ndef call(back, x): return back(x)")
    high = module("walked.high", "def start(x): return low.call(detail, low.work(x))\ndef detail(x): return x", low=low)
    found = reentries(lambda: high.start(1), "walked")
    assert [(name, waiting) for name, waiting, _ in found] == [("walked.high", "walked.low")]
    straight = module(
        "walked.high", "def start(x): return inner(low.work(low.work(x)))\ndef inner(x): return x", low=low
    )
    assert reentries(lambda: straight.start(1), "walked") == set()


#: What is entered twice: batches in threads, which is seen where there is one thread, as others are not followed.
IN_THREADS = {(f"{PACKAGE}.networks.{name}", f"{PACKAGE}.cores") for name in ("task", "set_encoder")}


def pairs(action: Callable[[], Any]) -> set[tuple[str, str]]:
    action()  # imports and caches of the first run
    return {(name, waiting) for name, waiting, _ in reentries(action)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"head": "mahalanobis"},
        {"head": "euclidean", "temperature": "auto"},
        {"unknown_label": "?", "false_rejection_rate": 0.2},
    ],
    ids=str,
)
def test_from_fit_to_a_label_no_module_is_entered_twice(settings: dict[str, Any]) -> None:
    model, support, queries = adapting_model(), pictures(8, 1), pictures(4, 2)
    labels = []

    def fit_and_label() -> None:
        classifier = SimpleCNAPSClassifier(model, device="cpu", **settings).fit(support, LABELS)
        labels.append(classifier.predict(queries))

    assert pairs(fit_and_label) <= IN_THREADS
    assert all(len(each) == 4 for each in labels)


def test_loading_enters_no_module_twice(tmp_path: Path) -> None:
    model = adapting_model()
    save_checkpoint(model, tmp_path / "checkpoint")
    SimpleCNAPSClassifier(model, device="cpu").fit(pictures(8, 1), LABELS).save(tmp_path / "classifier")
    assert pairs(lambda: load_checkpoint(tmp_path / "checkpoint")) == set()
    assert pairs(lambda: SimpleCNAPSClassifier.load(tmp_path / "classifier", device="cpu")) == set()
