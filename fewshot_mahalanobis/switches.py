"""Switches of other libraries that hold for the whole process, though one call needs them."""

from __future__ import annotations

from contextlib import ContextDecorator
from threading import Lock
from typing import Any


class SwitchedOff(ContextDecorator):
    """While any thread is in this context, an attribute of a module is False.

    It is for switches that the module offers for the whole process alone. What was set returns when the last thread has
    left. Meanwhile it is not in force for other code either.

    Parameters
    ----------
    module : module
    name : str
        Of a Boolean attribute.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name
        self._lock = Lock()
        self._entered = 0
        self._set_by_others = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._set_by_others = False
            if getattr(self._module, self._name):
                self._set_by_others = True
                setattr(self._module, self._name, False)
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and self._set_by_others:
                setattr(self._module, self._name, True)
