"""Small work and batches on the cores of a processor: in order, one intra-op thread each, and nothing of it stays."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from fewshot_mahalanobis.cores import cores, map_in_threads, one_thread, one_thread_if_small
from tests.interrupt import one_interrupt


@pytest.fixture(autouse=True)
def three_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def numbered(count: int) -> list[Tensor]:
    return [torch.tensor(float(number)) for number in range(count)]


def test_one_thread_is_the_callers_alone_and_ends_with_the_block() -> None:
    seen = list[int]()
    with one_thread():
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), cores(), seen) == (1, 3, [3])
    assert (torch.get_num_threads(), cores()) == (3, 3)


def test_one_thread_within_another_ends_with_the_outer_one_and_after_an_error() -> None:
    @one_thread()
    def failing() -> None:
        with one_thread():
            assert (torch.get_num_threads(), cores()) == (1, 3)
        assert (torch.get_num_threads(), cores()) == (1, 3)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        failing()
    assert (torch.get_num_threads(), cores()) == (3, 3)


def test_few_features_have_one_thread_and_many_have_all() -> None:
    with one_thread_if_small(torch.empty(2**10, 2**10)):
        assert torch.get_num_threads() == 1
    with one_thread_if_small(torch.empty(2**10 + 1, 2**10)):
        assert torch.get_num_threads() == 3


def test_batches_have_all_cores_within_one_thread_and_share_no_further() -> None:
    together = threading.Barrier(3)

    def meeting(batch: Tensor) -> int:
        together.wait(timeout=60)
        return cores()

    with one_thread():
        assert map_in_threads(meeting, numbered(3)) == [1, 1, 1]


@pytest.mark.parametrize("count", [1, 3])
def test_batches_have_the_autocast_of_the_caller(count: int) -> None:
    weight = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        results = map_in_threads(lambda batch: weight @ weight, numbered(count))
    assert [result.dtype for result in results] == [torch.bfloat16] * count


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

    assert map_in_threads(named, numbered(count)) == [1] * count
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
