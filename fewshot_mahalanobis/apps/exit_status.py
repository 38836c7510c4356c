"""How a command begins and ends, whatever its streams are. Imports nothing that takes time: Ctrl-C counts at once."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

#: Exit status after Ctrl-C, as shells count it: 128 and the number of the signal.
INTERRUPTED = 130


def exit_after(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit with its status.

    After Ctrl-C it is 130, without a traceback. If standard output cannot be written (a full disk, say) it is 1, with
    one line on standard error, or none if the reader has gone, as ``head`` does. A stream that the caller has closed
    leads nowhere, and so does standard error where it cannot be written.
    """
    _open_streams()
    status: str | int | None = 0
    problem: OSError | None = None
    try:
        command()
    except SystemExit as stop:
        status = stop.code
    except Exception as error:
        if _interrupted(error):
            status = INTERRUPTED
        elif isinstance(error, OSError) and error.errno is not None and error.filename is None:
            problem = error  # of standard output: a file would have a name
        else:
            raise
    except KeyboardInterrupt:
        status = INTERRUPTED
    try:
        sys.stdout.flush()
    except OSError as error:
        problem = problem or error
    if problem is not None:
        if not isinstance(problem, BrokenPipeError):
            print(f"error: standard output cannot be written: {problem.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries once more when it ends
        status = status or 1
    gc.freeze()  # Python would search all modules for cycles as it ends, which takes 0.5 s
    sys.exit(status)


def _interrupted(error: BaseException | None) -> bool:
    """Whether an error arose from Ctrl-C: Python's own locks raise one if it comes while they are being taken."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _open_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file that is opened would get its number
            descriptor = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if sys.stderr is sys.__stderr__ or sys.__stderr__ is None:
        raw = io.BufferedWriter(_Dispensable(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)


class _Dispensable(io.FileIO):
    """A stream that never fails: a note is not worth the result."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)
