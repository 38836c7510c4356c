"""Batches on the cores of a processor: in order, one intra-op thread each, and nothing of it stays."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from fewshot_mahalanobis.networks.threads import map_in_threads
from tests.interrupt import one_interrupt


@pytest.fixture(autouse=True)
def three_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def numbered(count: int) -> list[Tensor]:
    return [torch.tensor(float(number)) for number in range(count)]


def test_results_are_in_the_order_of_the_batches() -> None:
    first_waits = threading.Event()

    def negated(batch: Tensor) -> Tensor:
        if batch == 0:
            assert first_waits.wait(timeout=60)
        if batch == 4:
            first_waits.set()
        return -batch

    assert map_in_threads(negated, numbered(5)) == [0.0, -1.0, -2.0, -3.0, -4.0]


def test_as_many_batches_run_at_once_as_the_caller_has_threads() -> None:
    together = threading.Barrier(3)  # raises where fewer than three meet

    def meeting(batch: Tensor) -> Tensor:
        together.wait(timeout=60)
        return torch.tensor(torch.get_num_threads())

    assert map_in_threads(meeting, numbered(3)) == [1, 1, 1]


def test_the_number_of_threads_stays_for_the_caller_and_for_new_threads() -> None:
    seen = list[int]()
    map_in_threads(lambda batch: batch, numbered(4))
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), seen) == (3, [3])


@pytest.mark.parametrize(("threads", "count"), [(3, 1), (1, 4)])
def test_one_batch_or_one_thread_stays_in_the_calling_thread(threads: int, count: int) -> None:
    torch.set_num_threads(threads)
    names = list[str]()

    def named(batch: Tensor) -> Tensor:
        names.append(threading.current_thread().name)
        return torch.tensor(torch.get_num_threads())

    assert map_in_threads(named, numbered(count)) == [threads] * count
    assert names == [threading.current_thread().name] * count


@pytest.mark.parametrize("count", [1, 4])
def test_no_batch_keeps_gradients(count: int) -> None:
    weight = torch.ones((), requires_grad=True)
    assert not any(result.requires_grad for result in map_in_threads(lambda batch: weight * batch, numbered(count)))


def test_an_error_of_one_batch_is_raised_and_the_threads_end() -> None:
    before = threading.active_count()

    def failing(batch: Tensor) -> Tensor:
        if batch == 1:
            raise ValueError("batch 1")
        return batch

    with pytest.raises(ValueError, match="batch 1"):
        map_in_threads(failing, numbered(6))
    assert (threading.active_count(), torch.get_num_threads()) == (before, 3)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs a signal to one thread")
def test_ctrl_c_leaves_the_batches_that_wait_and_the_threads_end() -> None:
    before, begun = threading.active_count(), list[int]()

    with one_interrupt() as interrupt:

        def waiting(batch: Tensor) -> Tensor:
            begun.append(int(batch))
            interrupt()
            time.sleep(0.01)
            return batch

        with pytest.raises(KeyboardInterrupt):
            map_in_threads(waiting, numbered(400))
    assert len(begun) < 400
    assert (threading.active_count(), torch.get_num_threads()) == (before, 3)
