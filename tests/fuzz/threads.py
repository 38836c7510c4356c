"""Threads that share a classifier: what they are told, while another thread fits it over and over.

    python -m tests.fuzz.threads 10

For so many seconds, half for each of the two classifiers, one thread fits to one of three support sets after the other,
by ``fit`` and by ``partial_fit``, and four threads call every method that predicts, describes, copies or saves. Each
answer has to be that of one of the states; the counts are of answers, and of those that are of none or errors.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from tests.tiny import pictures, unadapted_model

ASKING = 4
#: Labels of the support sets: other numbers of classes, and other types.
LABELS = ([0, 1, 0, 1], ["a", "b", "c", "a", "b", "c"], ["m", "n", "m", "n"])
#: Labels that ``partial_fit`` adds to the last.
MORE = ["k", "l", "k"]
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "outlier_score", "predict_all")


def vectors(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(n, 3))


def asked(classifier: Any, some: Callable[[int, int], Any], folder: Path) -> dict[str, Callable[[], Any]]:
    """Every method that reads what was fitted."""
    queries = some(7, 9)

    def saved() -> Any:
        file = folder / f"{threading.get_ident()}.safetensors"
        classifier.save(file)
        return type(classifier).load(file).predict_all(queries)

    def scored() -> Any:
        try:
            return classifier.score(queries, ["a", "m", "k", "b", "n", "c", "l"])
        except (TypeError, ValueError) as error:  # the state's labels are numbers
            return str(error)

    calls: dict[str, Callable[[], Any]] = {
        name: lambda name=name: getattr(classifier, name)(queries) for name in METHODS
    }  # type: ignore[misc]
    calls |= {
        "score": scored,
        "summary": lambda: str(classifier.summary()),
        "pickle": lambda: pickle.loads(pickle.dumps(classifier)).predict_all(queries),
        "deepcopy": lambda: copy.deepcopy(classifier).predict_all(queries),
        "save": saved,
        "classes_": lambda: classifier.classes_,
        "class_counts_": lambda: classifier.class_counts_,
        "priors_": lambda: classifier.priors_,
    }
    if isinstance(classifier, SimpleCNAPSClassifier):
        calls |= {name: lambda name=name: getattr(classifier, name)(queries) for name in ("transform", "features")}  # type: ignore[misc]
    else:
        calls["means_"] = lambda: classifier.means_
    return calls


def plain(value: Any) -> str:
    """What two answers are compared by; batches of other threads do not change a bit."""
    parts = value if isinstance(value, tuple) else (value,)
    return " ".join(str(np.asarray(part).tolist()) for part in parts)


def stress(classifier: Any, some: Callable[[int, int], Any], seconds: float) -> Counter[str]:
    """Answers of each method, and under "wrong" those that are of no state, and errors."""

    def fit(number: int) -> None:
        if number < len(LABELS):
            classifier.fit(some(len(LABELS[number]), number), LABELS[number])
        else:
            classifier.partial_fit(some(len(MORE), number), MORE)

    counts, states = Counter[str](), len(LABELS) + 1
    with tempfile.TemporaryDirectory() as folder:
        calls = asked(classifier, some, Path(folder))
        right: dict[str, set[str]] = {name: set() for name in calls}
        for number in range(states):
            fit(number)
            for name, call in calls.items():
                right[name].add(plain(call()))
        end, lock = time.monotonic() + seconds, threading.Lock()

        def ask(seed: int) -> None:
            chosen = random.Random(seed)
            while time.monotonic() < end:
                name = chosen.choice([*calls])
                try:
                    answer = plain(calls[name]())
                except Exception as error:
                    answer = f"{type(error).__name__}: {error}"
                with lock:
                    counts[name] += 1
                    counts["wrong"] += answer not in right[name]

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(ASKING)]
        for thread in threads:
            thread.start()
        for number in itertools.cycle(range(states)):
            if time.monotonic() >= end:
                break
            fit(number)
            counts["fits meanwhile"] += 1
        for thread in threads:
            thread.join()
    return counts


def main(seconds: float) -> int:
    warnings.simplefilter("ignore", UserWarning)  # that there are few examples
    of_pictures: dict[str, Any] = {"device": "cpu", "batch_size": 2, "n_jobs": 1}
    wrong = 0
    for classifier, some in (
        (MahalanobisClassifier(head="mahalanobis"), vectors),
        (SimpleCNAPSClassifier(unadapted_model(), head="mahalanobis", **of_pictures), pictures),
    ):
        counts = stress(classifier, some, seconds / 2)
        wrong += counts["wrong"]
        print(f"{type(classifier).__name__}: {counts.pop('wrong')} wrong;", end=" ")
        print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10))
