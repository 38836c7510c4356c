"""Threads that share a classifier: a call sees one fitted state, with its settings, from beginning to end.

A fit in another thread can land between any two lines. Here it does: each call is repeated with the fit before its
first line, its second, and so on, and its result has to be that of the classifier before the fit or after it.
"""

from __future__ import annotations

import copy
import operator
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import ImageFile
from torch import Tensor

from fewshot_mahalanobis import EuclideanHead, MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis import adapted_features as adapted_features_module
from fewshot_mahalanobis import classifier as classifier_module
from fewshot_mahalanobis import feature_classifier as feature_classifier_module
from fewshot_mahalanobis.apps.session import Session
from fewshot_mahalanobis.checkpoints import card, classifier_file
from fewshot_mahalanobis.checkpoints.classifier_file import ClassifierState
from fewshot_mahalanobis.export import graph, web_page
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.networks.task import AdaptedTask
from fewshot_mahalanobis.support_set import estimator as estimator_module
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.summary import SupportSummary
from fewshot_mahalanobis.switches import SwitchedOff
from tests.tiny import LABELS, pictures, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Estimator = MahalanobisClassifier | SimpleCNAPSClassifier

#: Where an estimator reads what it has learned.
FILES = {
    module.__file__
    for module in (adapted_features_module, classifier_module, feature_classifier_module, estimator_module)
}
#: Public names that have nothing to do with what is fitted.
SETTINGS = {"get_params", "set_params", "get_metadata_routing", "set_output", "load", "from_pretrained"}
#: scikit-learn's: a call of ``fit``, and then one of ``transform``.
TWO_CALLS = {"fit_transform"}
QUERIES = ("predict", "predict_proba", "predict_log_proba", "decision_function", "outlier_score", "predict_all")


def vectors(n: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(n, 3))


def two_states(kind: type[Estimator]) -> tuple[Estimator, Estimator]:
    """Two classifiers with labels of other numbers and types, rejection or none, and other settings."""
    few, more = [0, 1, 0, 1], LABELS
    settings: dict[str, Any] = {"unknown_label": "?", "false_rejection_rate": 0.3, "temperature": 2.0}
    if kind is MahalanobisClassifier:
        before = MahalanobisClassifier(head="mahalanobis").fit(vectors(4, 1), few)
        return before, MahalanobisClassifier(head="euclidean", **settings).fit(vectors(8, 2), more)
    of_pictures: dict[str, Any] = {"device": "cpu", "precision": "float32", "n_jobs": 1}
    network, other_network = tiny_model(), tiny_model()
    other_network.feature_extractor.conv1.weight.data.mul_(2)  # type: ignore[operator, union-attr]
    one = SimpleCNAPSClassifier(network, head="mahalanobis", batch_size=2, **of_pictures).fit(pictures(4, 1), few)
    other = SimpleCNAPSClassifier(other_network, head="euclidean", batch_size=3, **settings, **of_pictures)
    return one, other.fit(pictures(8, 2), more)


def plain(value: Any) -> Any:
    """What ``==`` compares: numbers and labels, and which network."""
    if isinstance(value, Tensor | np.ndarray):
        array = np.asarray(value)
        return array.dtype.kind, array.shape, str(array.tolist())
    if isinstance(value, MahalanobisClassifier | SimpleCNAPSClassifier):
        return plain(value.fitted_head_)
    if isinstance(value, FittedHead):
        return plain((value.classes, value.support.adapted, value.labels, value.temperature, value.unknown_label))
    if isinstance(value, AdaptedTask):
        return plain((value.fitted_head, value.network))
    if isinstance(value, ClassifierState):
        return plain((value.fitted_head, value.model, value.parameters))
    if isinstance(value, ImageBatches):
        return value.batch_size
    if isinstance(value, dict):
        return plain((*value.items(),))
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    return str(value) if isinstance(value, str | int | float | SupportSummary | torch.device) else id(value)


def outcome(call: Callable[[Any], Any], classifier: Estimator) -> Any:
    """The result of a call, or its error."""
    try:
        return plain(call(classifier))
    except Exception as error:
        return type(error), str(error)


def with_a_fit_in_line(
    number: int, call: Callable[[Any], Any], before: Estimator, after: Estimator
) -> tuple[Any, bool]:
    """The outcome of a call of a copy of ``before`` that becomes ``after`` in that line, and whether it came to it."""
    shared, lines = copy.copy(before), 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                vars(shared).update(vars(after))
                sys.settrace(None)  # the rest is quicker without
                return None
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        found = outcome(call, shared)
    finally:
        sys.settrace(earlier)
    return found, lines >= number


def calls(kind: type[Estimator]) -> dict[str, Callable[[Any], Any]]:
    """A call of each public method and attribute."""
    some = vectors if kind is MahalanobisClassifier else pictures
    queries, support, labels = some(3, 7), some(4, 8), [5, 6, 5, 6]
    attributes = [name for name in dir(kind) if not name.startswith("_") and name.endswith("_")]
    found: dict[str, Callable[[Any], Any]] = {
        **{name: operator.attrgetter(name) for name in attributes},
        **{name: operator.methodcaller(name, queries) for name in QUERIES},
        "score": operator.methodcaller("score", queries, [1, 0, 1]),
        "summary": operator.methodcaller("summary"),
        "fit": operator.methodcaller("fit", support, labels),
        "partial_fit": operator.methodcaller("partial_fit", support, labels),
        "save": operator.methodcaller("save", "file"),
        "export_onnx": operator.methodcaller("export_onnx", "file"),
        "pickle": lambda c: pickle.loads(pickle.dumps(c)),
        "predict_set": operator.methodcaller("predict_set", queries, coverage=0.5),
        "calibrate": operator.methodcaller("calibrate", queries),
        "propose_classes": operator.methodcaller("propose_classes", queries),
        "transductive predict": operator.methodcaller("predict", queries, transductive=True),
    }
    if kind is SimpleCNAPSClassifier:
        found |= {
            **{name: operator.methodcaller(name, queries) for name in ("transform", "features", "image_batches")},
            "get_feature_names_out": operator.methodcaller("get_feature_names_out"),
            "export_program": operator.methodcaller("export_program", "file"),
            "export_page": operator.methodcaller("export_page", "folder", support=queries),
            "push_to_hub": operator.methodcaller("push_to_hub", "user/repo"),
        }
    return found


@pytest.fixture(autouse=True)
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file would be made of is returned instead."""
    for module, name in (
        (classifier_file, "write_classifier"),
        (classifier_file, "write_feature_classifier"),
        (graph, "write_onnx"),
        (graph, "write_program"),
        (graph, "write_head_onnx"),
        (web_page, "write_web_page"),
        (card, "push_classifier"),
    ):
        monkeypatch.setattr(module, name, lambda *made_of, **options: written.append((*made_of, *options.values())))
    written.clear()


written: list[tuple[Any, ...]] = []


def result_or_file(call: Callable[[Any], Any], classifier: Any) -> Any:
    written.clear()
    result = call(classifier)
    return written[0] if written else result


@pytest.mark.parametrize("kind", [MahalanobisClassifier, pytest.param(SimpleCNAPSClassifier, marks=pytest.mark.slow)])
def test_a_call_is_of_the_state_before_a_fit_or_after_it_wherever_the_fit_lands(kind: type[Estimator]) -> None:
    before, after = two_states(kind)
    for name, method in calls(kind).items():
        call = partial(result_or_file, method)
        allowed = [outcome(call, copy.copy(before)), outcome(call, copy.copy(after))]
        if name in ("fit", "partial_fit"):  # the last one wins, whole
            allowed.append(plain(after))
        number, landed, found = 1, True, list[Any]()
        while landed:
            result, landed = with_a_fit_in_line(number, call, before, after)
            assert result in allowed, f"{name}: a fit in its line {number}"
            found.append(result)
            number += 1
        assert found[-1] == allowed[0], name  # no fit


@pytest.mark.parametrize("kind", [MahalanobisClassifier, SimpleCNAPSClassifier])
def test_the_calls_are_all_that_a_classifier_has(kind: type[Estimator]) -> None:
    public = {name for name in dir(kind) if not name.startswith("_") and not name.endswith("_request")}
    assert public - SETTINGS - TWO_CALLS - set(calls(kind)) == set()


def test_a_method_that_reads_the_state_twice_is_detected() -> None:
    before, after = two_states(MahalanobisClassifier)
    queries = torch.from_numpy(vectors(5, 7))

    def reads_twice(c: Any) -> Any:
        logits = c.fitted_head_.logits(queries)
        return c.fitted_head_.log_probabilities(logits)

    allowed = [outcome(reads_twice, before), outcome(reads_twice, after)]
    assert any(with_a_fit_in_line(number, reads_twice, before, after)[0] not in allowed for number in range(1, 9))


# ---------------------------------------------------------------------- real threads


REACHED, GO_ON = threading.Event(), threading.Event()


class WaitingHead(EuclideanHead):
    """In a thread called "asking" it waits before it answers."""

    def logits(self, *arguments: Any) -> Tensor:
        if threading.current_thread().name == "asking":
            REACHED.set()
            assert GO_ON.wait(60)
        return super().logits(*arguments)


@pytest.mark.parametrize("kind", [MahalanobisClassifier, SimpleCNAPSClassifier])
@pytest.mark.parametrize("method", ["predict_all", "predict_log_proba", "decision_function", "outlier_score"])
def test_a_class_that_another_thread_adds_meanwhile_is_not_in_an_answer(kind: type[Estimator], method: str) -> None:
    REACHED.clear(), GO_ON.clear()
    some = vectors if kind is MahalanobisClassifier else pictures
    classifier: Any = kind(head=WaitingHead())
    if kind is SimpleCNAPSClassifier:
        classifier.set_params(checkpoint=tiny_model(), device="cpu", batch_size=2)
    classifier.fit(some(4, 1), ["m", "n", "m", "n"])
    ask, answers = operator.methodcaller(method, some(5, 7)), list[Any]()
    expected = plain(ask(classifier))
    thread = threading.Thread(target=lambda: answers.append(plain(ask(classifier))), name="asking")
    thread.start()
    assert REACHED.wait(60)
    classifier.partial_fit(some(3, 2), ["a", "b", "a"])
    GO_ON.set()
    thread.join()
    assert answers == [expected]
    assert classifier.classes_.tolist() == ["a", "b", "m", "n"]


class FitsWhenPickled:
    """An attribute of an estimator, which is fitted for the first time when its pickling has come to it."""

    def __init__(self, fit: Callable[[], object]) -> None:
        self.fit = fit

    def __reduce__(self) -> Any:
        self.fit()
        return str, ("pickled",)


@pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("kind", [MahalanobisClassifier, SimpleCNAPSClassifier])
def test_a_first_fit_while_an_estimator_is_copied_disturbs_nothing(
    kind: type[Estimator], copied: Callable[[Any], Any]
) -> None:
    some = vectors if kind is MahalanobisClassifier else pictures
    classifier: Any = kind()
    if kind is SimpleCNAPSClassifier:
        classifier.set_params(checkpoint=tiny_model(), device="cpu")
    classifier.first = FitsWhenPickled(lambda: classifier.fit(some(4, 1), [0, 1, 0, 1]))
    other = copied(classifier)
    assert other.first == "pickled"
    assert not other.__sklearn_is_fitted__()
    assert classifier.classes_.tolist() == [0, 1]


def test_a_session_keeps_the_classifier_that_it_started_from() -> None:
    start = two_states(SimpleCNAPSClassifier)[0]
    session = Session(start)  # type: ignore[arg-type]
    start.fit(pictures(4, 3), ["x", "y", "x", "y"])
    assert session.counts() == {"0": 2, "1": 2}


# ---------------------------------------------------------------------- switches of the process


@pytest.mark.parametrize(
    ("module", "name"),
    [(torch.backends.cudnn, "enabled"), (ImageFile, "LOAD_TRUNCATED_IMAGES")],
    ids=["cudnn", "Pillow"],
)
@pytest.mark.parametrize("was", [True, False])
def test_a_switch_is_off_until_the_last_thread_has_left(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, was: bool
) -> None:
    monkeypatch.setattr(module, name, was)
    switched_off, steps = SwitchedOff(module, name), threading.Barrier(2, timeout=60)

    def first_in_first_out() -> None:
        with switched_off:
            steps.wait()  # 1: it is in
            steps.wait()  # 2: so is the other
        steps.wait()  # 3: it has left

    thread = threading.Thread(target=first_in_first_out)
    thread.start()
    steps.wait()
    assert not getattr(module, name)
    with switched_off:
        steps.wait()
        steps.wait()
        assert not getattr(module, name)
    thread.join()
    assert getattr(module, name) is was
