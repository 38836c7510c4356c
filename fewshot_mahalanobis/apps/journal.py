"""The answers of a long job, written to a file as they are computed: after an interruption the next run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fewshot_mahalanobis.images.region import Region

__all__ = ["Journal"]

#: Counts the changes of the file's format: a file of another format is begun anew.
_FORMAT = 1


class Journal:
    """Answers by picture, in a file of one line of JSON for each batch.

    Parts of lines, left by a killed program, a full disk or a second program at work, are not read. An answer counts as
    long as its picture has the same size and the same times of change; a picture that was changed is asked about anew.

    Parameters
    ----------
    file : Path
        It is read here, and written by :meth:`add`. Its folder is made if it is absent.
    about : mapping of str to JSON values
        What the answers depend on: the model, the settings. A file that is about something else is begun anew.

    Attributes
    ----------
    begun_anew : bool
        Whether the file has answers about something else.
    """

    def __init__(self, file: Path, about: Mapping[str, Any]) -> None:
        self.file = file
        self._header = json.loads(json.dumps({"format": _FORMAT, **about}))
        self._known: dict[str, tuple[list[int], Any]] = {}
        self._stamps: dict[str, list[int] | None] = {}
        self._header_is_written = self.begun_anew = False
        lines = file.read_bytes().splitlines() if file.is_file() else []
        for number, line in enumerate(lines):
            try:
                content = json.loads(line)
            except ValueError:  # a part of a line
                continue
            if number == 0:
                self._header_is_written = content == self._header
                self.begun_anew = not self._header_is_written
            elif self._header_is_written:
                self._known.update({key: (stamp, answer) for key, stamp, answer in content})

    def find(self, picture: Path | Region) -> Any:
        """The answer about a picture, as :meth:`add` was given it, in types of JSON; None if there is none."""
        key = _key(picture)
        stamp = self._stamps[key] = _stamp(picture)
        known = self._known.get(key)
        return None if known is None or known[0] != stamp else known[1]

    def add(self, answers: Iterable[tuple[Path | Region, Any]]) -> None:
        """Write answers about pictures that :meth:`find` was asked for before they were read.

        Raises
        ------
        OSError
            The file cannot be written. What was added before stays.
        """
        keyed = [(_key(picture), answer) for picture, answer in answers]
        batch = [(key, self._stamps[key], answer) for key, answer in keyed if self._stamps[key] is not None]
        if not batch:
            return
        try:
            self.file.parent.mkdir(exist_ok=True)
            with self.file.open("ab" if self._header_is_written else "wb") as stream:
                if not self._header_is_written:
                    stream.write(_line(self._header))
                elif _ends_within_a_line(self.file):
                    stream.write(b"\n")
                stream.write(_line(batch))
        except OSError as error:
            raise OSError(
                f"cannot write {self.file}: {error.strerror}. It has the answers so far: mend that (a full disk needs "
                "room), then repeat the command to go on"
            ) from error
        self._header_is_written = True

    def remove(self) -> None:
        """Delete the file, when the answers are elsewhere."""
        with suppress(OSError):
            self.file.unlink()


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"  # names that are no text are escaped


def _ends_within_a_line(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def _key(picture: Path | Region) -> str:
    """What a picture is known by: its absolute path, and the box of a region."""
    if isinstance(picture, Region):
        return json.dumps([os.path.abspath(picture.image), picture.box, picture.margin, picture.normalized])  # noqa: PTH100
    return os.path.abspath(picture)  # noqa: PTH100 (20,000 strings in a tenth of the time)


def _stamp(picture: Path | Region) -> list[int] | None:
    """Size and times of change of a picture's file; None if there is no file."""
    try:
        status = os.stat(picture.image if isinstance(picture, Region) else picture)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
