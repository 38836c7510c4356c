"""How a command ends, whatever ends it. Imports nothing that takes time: Ctrl-C counts from the first moment on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

#: Exit status after Ctrl-C, as shells count it: 128 and the number of the signal.
INTERRUPTED = 130


def exit_after(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit with its status.

    After Ctrl-C it is 130, without a traceback. If standard output cannot be written (a full disk, say) it is 1, with
    one line on standard error, or none if the reader has gone, as ``head`` does.
    """
    status: str | int | None = 0
    problem: OSError | None = None
    try:
        command()
    except SystemExit as stop:
        status = stop.code
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        if _interrupted(error):
            status = INTERRUPTED
        elif isinstance(error, OSError) and error.errno is not None and error.filename is None:
            problem = error  # of standard output: a file would have a name
        else:
            raise
    problem = problem or _output_problem()
    if problem is not None:
        if not isinstance(problem, BrokenPipeError):
            print(f"error: standard output cannot be written: {problem.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries once more when it ends
        status = INTERRUPTED if status == INTERRUPTED else 1
    sys.exit(status)


def _interrupted(error: BaseException | None) -> bool:
    """Whether an error arose from Ctrl-C: Python's own locks raise one if it comes while they are being taken."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _output_problem() -> OSError | None:
    """Why what was printed cannot be written, if it cannot: it stays in the buffer then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None
