"""Warnings that point at the line that called this package."""

from __future__ import annotations

import inspect
import warnings


def warn_caller(message: str) -> None:
    """Issue a UserWarning at the first line outside this package."""
    package, level = __name__.partition(".")[0], 1
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level += 1
    warnings.warn(message, stacklevel=level + 1)
