"""What the commands share: options, exit statuses, and errors as one line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

#: Exit status if the work is done but images were left out.
SKIPPED = 3

Device = Annotated[str, typer.Option(help='"auto" (CUDA where there is one, else the CPU) or a torch device.')]
Checkpoint = Annotated[str, typer.Option(help="Name, folder or Hub repository.")]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="FEWSHOT_MAHALANOBIS_PICTURES",
        help="Folder in which pictures and features are remembered, so that they are read once. Default: "
        ".fewshot-mahalanobis beside the model, or the results.",
    ),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Remember nothing, and read every picture anew.")]
SkipErrors = Annotated[
    bool, typer.Option("--skip-errors", help="Leave out images that cannot be read, list them, and exit with status 3.")
]


class Precision(str, Enum):
    """Precision of the convolutions."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def cache_beside(file: Path) -> Path:
    """Folder in which a command that reads or writes a file remembers pictures."""
    return file.parent / ".fewshot-mahalanobis"


def check_output(path: Path, *, folder: bool = False) -> None:
    """Raise OSError if a command could not write its output, before any work is done."""
    from fewshot_mahalanobis.checkpoints.files import check_writable

    if not folder and path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder. Name a file in it")
    if folder and path.exists() and not path.is_dir():
        raise NotADirectoryError(f"cannot write to {path}: it is no folder")
    check_writable(path / "file" if path.is_dir() else path)


def numbers_in(text: str | None) -> Any:
    """Return the numbers of a text such as "3,2,1"; the text itself if it is something else."""
    parts = (text or "").split(",")
    return tuple(map(int, parts)) if all(part.strip().isdecimal() for part in parts) else text


def number_of(count: int, noun: str) -> str:
    """Return "1 image" or "2 images"."""
    return f"{count:,} {noun}" + "s" * (count != 1)


class clear_errors:
    """One line on standard error for a warning, and for an error about the user's input, with exit status 1."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.showwarning = _show_warning

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._warnings.__exit__(None, None, None)
        if isinstance(error, OSError):
            sys.stdout.flush()  # if it cannot be written, ``exit_after`` reports that instead
        if isinstance(error, (ValueError, OSError, ImportError)):
            _list_problems(getattr(error, "problems", {}))
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Without the place in the code, which tells a user of the command nothing."""
    typer.echo(f"note: {message}", err=True)


def report_skipped(problems: Mapping[Any, str], total: int) -> None:
    """List the images that were left out and exit with status 3; nothing if there are none."""
    if problems:
        _list_problems(problems)
        typer.echo(f"skipped {len(problems)} of {number_of(total, 'image')}, which cannot be read", err=True)
        raise typer.Exit(SKIPPED)


def _list_problems(problems: Mapping[Any, str]) -> None:
    for path, problem in problems.items():
        typer.echo(f"{path}: {problem}", err=True)
