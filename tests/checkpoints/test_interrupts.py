"""Signals that wait for the end of a block."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.checkpoints.interrupts import held_signals
from tests.tiny import tiny_model


@pytest.fixture
def python_answers_ctrl_c() -> Iterator[None]:
    """A process that was started in the background ignores the signal."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


def interrupted_twice() -> list[str]:
    """What is done of a block that gets two signals at its beginning."""
    done = []
    try:
        with held_signals(signal.SIGINT) as came:
            assert came == []
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT]
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("all")
    except KeyboardInterrupt:
        done.append("interrupted")
    return done


@pytest.mark.usefixtures("python_answers_ctrl_c")
def test_a_signal_waits_until_the_block_has_ended_although_a_launcher_passes_it_on():
    assert interrupted_twice() == ["first", "all", "interrupted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("python_answers_ctrl_c")
def test_a_second_signal_does_not_wait(monkeypatch):
    clock = iter([0.0, 5.0])
    monkeypatch.setattr("fewshot_mahalanobis.checkpoints.interrupts.time.monotonic", lambda: next(clock))
    assert interrupted_twice() == ["first", "interrupted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("python_answers_ctrl_c")
def test_an_error_in_the_block_is_not_hidden_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="broken"), held_signals(signal.SIGINT, signal.SIGTERM):
        raise ValueError("broken")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_signals(signal.SIGINT) as came:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == []


def test_other_threads_hold_no_signals():
    results: list[list[int]] = []

    def hold() -> None:
        with held_signals(signal.SIGINT) as came:
            results.append(came)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert results == [[]]


@pytest.mark.usefixtures("python_answers_ctrl_c")
@pytest.mark.parametrize("step", [1, 2, 3])
def test_ctrl_c_at_any_step_of_saving_a_checkpoint_leaves_a_whole_one(step, tmp_path, monkeypatch):
    model = tiny_model()
    save_checkpoint(model, tmp_path, card="old")
    model.config["beta"] = 2.0
    replace, numbers = os.replace, itertools.count(1)

    def interrupted(*paths):
        if next(numbers) == step:
            signal.raise_signal(signal.SIGINT)
        replace(*paths)

    monkeypatch.setattr("fewshot_mahalanobis.checkpoints.files.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(model, tmp_path, card="new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["beta"] == 2.0
    assert (tmp_path / "README.md").read_text() == "new"
