"""Ctrl-C while the main thread waits for other threads."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def one_interrupt() -> Iterator[Callable[[], None]]:
    """Yield a function for other threads, the first call of which interrupts the main thread; calls return after that.

    The handler takes no lock: it may run while the main thread is inside that lock. Nothing is collected meanwhile:
    Python drops an exception raised in the callbacks of weak references, which a collection calls.
    """
    sent, arrived = threading.Lock(), list[bool]()

    def handler(*_: object) -> None:
        arrived.append(True)
        raise KeyboardInterrupt

    def interrupt() -> None:
        if sent.acquire(blocking=False):
            time.sleep(0.5)  # a signal while batches are handed out may land in a lock of Python's own
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        for _ in range(6000):
            if arrived:
                return
            time.sleep(0.01)
        raise AssertionError("the main thread was not interrupted within a minute")

    before = signal.signal(signal.SIGINT, handler)
    gc.disable()
    try:
        yield interrupt
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)
