"""Delay signals while something is done that must not be left half done."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Within so many seconds a second signal counts as the first: a launcher repeats what the terminal has sent.
_SAME = 1.0


@contextmanager
def held_signals(*numbers: int) -> Iterator[list[int]]:
    """Let signals wait until the block has ended; a second one does not wait.

    Parameters
    ----------
    *numbers : int
        Such as ``signal.SIGINT``. One that is ignored stays ignored.

    Yields
    ------
    list of int
        The signals that have come. Always empty in another thread than the main one, which gets them all.
    """
    came = list[int]()
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield came
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    since = 0.0

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if not came:
            since = time.monotonic()
            came.append(number)
        elif time.monotonic() - since > _SAME:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, wait)
    try:
        yield came
    finally:
        restore()
        if came:
            signal.raise_signal(came[0])
