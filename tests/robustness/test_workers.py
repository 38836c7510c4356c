"""Workers that run beside each other: each keeps to the one thread that it was given, and answers as its parent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import joblib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from tests.forked import forked_pool, needs_fork
from tests.interrupt import one_interrupt
from tests.tiny import LABELS, adapting_model, pictures, tiny_classifier

QUERIES = pictures(24, seed=2)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """The parent has used three threads before it starts workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def classifier_of_batches() -> SimpleCNAPSClassifier:
    """Fitted with the network of an adapting model, which takes the queries in several batches."""
    return SimpleCNAPSClassifier(adapting_model(), device="cpu", precision="float32", batch_size=4).fit(
        pictures(len(LABELS), seed=1), LABELS
    )


class Seen:
    """What one worker saw: its number of threads, the names of those in which the network ran, and the features."""

    def __init__(self, classifier: SimpleCNAPSClassifier) -> None:
        names, extracted = set[str](), AdaptedNetwork._extracted

        def watched(network: AdaptedNetwork, images: torch.Tensor) -> torch.Tensor:
            names.add(threading.current_thread().name)
            return extracted(network, images)

        with mock.patch.object(AdaptedNetwork, "_extracted", watched):
            self.features: NDArray[np.float32] = classifier.transform(QUERIES)
        self.threads, self.names, self.own = torch.get_num_threads(), names, threading.current_thread().name


def assert_alone(seen: Seen, expected: NDArray[np.float32]) -> None:
    assert (seen.threads, seen.names) == (1, {seen.own})
    np.testing.assert_array_equal(seen.features, expected)


def test_without_workers_the_network_runs_in_threads_of_its_own() -> None:
    seen = Seen(classifier_of_batches())
    assert (seen.threads, seen.own in seen.names) == (3, False)


def seen_with(classifier: SimpleCNAPSClassifier | Path) -> Seen:
    return Seen(joblib.load(classifier) if isinstance(classifier, Path) else classifier)


@pytest.mark.process
@pytest.mark.slow
def test_joblib_workers_keep_to_their_thread_and_take_a_pickle_or_a_file_of_joblib(tmp_path: Path) -> None:
    classifier = classifier_of_batches()
    expected = classifier.transform(QUERIES)
    joblib.dump(classifier, tmp_path / "classifier.joblib")
    given = [classifier, tmp_path / "classifier.joblib"]
    with joblib.parallel_config("loky", inner_max_num_threads=1):
        for seen in joblib.Parallel(n_jobs=2)(joblib.delayed(seen_with)(one) for one in given):
            assert_alone(seen, expected)


class InWorkers(Dataset[Seen]):
    """A data set whose items are computed by a classifier, as when features are made while a network trains."""

    def __init__(self, classifier: SimpleCNAPSClassifier) -> None:
        self.classifier = classifier

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Seen:
        return Seen(self.classifier)


@needs_fork
def test_forked_workers_of_a_data_loader_keep_to_their_thread_and_end() -> None:
    classifier = classifier_of_batches()
    expected = classifier.transform(QUERIES)
    loader: Any = DataLoader(
        InWorkers(classifier),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=120,
    )
    for seen in loader:
        assert_alone(seen, expected)


@needs_fork
def test_a_forked_worker_with_one_thread_fits_and_predicts_as_its_parent() -> None:
    classifier = classifier_of_batches()
    expected = classifier.transform(QUERIES)
    with forked_pool(1) as pool:
        assert_alone(pool.apply_async(Seen, (classifier,)).get(timeout=120), expected)
        fitted = pool.apply_async(classifier_of_batches).get(timeout=120)
    np.testing.assert_array_equal(fitted.predict(QUERIES), classifier.predict(QUERIES))


@pytest.mark.parametrize("method", ["predict", "transform", "partial_fit", "fit"])
def test_an_error_in_the_network_leaves_the_threads_as_they_were(method: str) -> None:
    classifier = tiny_classifier(batch_size=4)
    expected, threads = classifier.predict(QUERIES), threading.enumerate()
    labels = [LABELS * 3] if "fit" in method else []
    with (
        mock.patch.object(AdaptedNetwork, "_extracted", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        getattr(classifier, method)(QUERIES, *labels)
    assert (threading.enumerate(), torch.get_num_threads()) == (threads, 3)
    np.testing.assert_array_equal(classifier.predict(QUERIES), expected)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs a signal to one thread")
def test_ctrl_c_in_the_network_leaves_the_threads_as_they_were() -> None:
    classifier = tiny_classifier(batch_size=4)
    expected, threads = classifier.predict(QUERIES), threading.enumerate()
    with one_interrupt() as interrupt:

        def interrupted(network: AdaptedNetwork, images: torch.Tensor) -> torch.Tensor:
            interrupt()
            return torch.zeros(len(images), network.out_features)

        with mock.patch.object(AdaptedNetwork, "_extracted", interrupted), pytest.raises(KeyboardInterrupt):
            classifier.predict(QUERIES)
    assert (threading.enumerate(), torch.get_num_threads()) == (threads, 3)
    np.testing.assert_array_equal(classifier.predict(QUERIES), expected)
