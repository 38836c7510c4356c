"""Pictures and their features, remembered in a folder: what was read once is not read again.

Two things are remembered, each under a digest of everything that it depends on. A *square*, the picture as the network
reads it, under the contents of its file, the box of a region, the size, how files are read, and the versions of what
decodes them. *Features* under the square and the network with its weights, adaptation and precision. So an entry is
never out of date: a changed file has another digest, and a renamed one the same.

The folder holds one SQLite database, which several programs may use at a time and which a killed one leaves whole. Each
entry has a checksum; what is damaged is computed again. Unlike the usual caches of Python objects nothing is unpickled,
so a folder of somebody else's can do no harm.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fewshot_mahalanobis.images.pages import Reading
from fewshot_mahalanobis.images.picture import Square
from fewshot_mahalanobis.images.ranges import Span
from fewshot_mahalanobis.images.region import Region

if TYPE_CHECKING:
    import sqlite3  # imported when it is needed: there are Pythons without it

__all__ = [
    "FEATURES",
    "Contents",
    "PictureMemory",
    "file_contents",
    "is_small",
    "remembered_in",
    "square_key",
    "square_key_of_bytes",
    "square_of",
    "stored",
]

#: What the keys of squares and of features begin with.
SQUARE, FEATURES = b"s", b"f"
#: Most bytes of a database: some ten thousand pictures of 224 pixels.
MOST_BYTES = 2_000_000_000
#: Bytes of the disk that are left to others, such as the model and the table that are written beside the database.
_STAYS_FREE = 100_000_000
#: Entries used within this many seconds stay. Where there is no room beside them, nothing new is remembered: else a
#: collection that is too large would drop its first pictures for its last, and find none of them the next time.
_STAYS = 3600
#: Pictures of fewer bytes, as a share of those of their squares, are read as fast from their files.
_SMALL = 1 / 8
#: Counts the changes of how pictures are read that other versions of this package do not tell.
_VERSION = 1
_NAME, _CHECKSUM = "pictures.sqlite", 16
_TABLE = """
CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB NOT NULL, used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON entries (used);
"""


class Contents(NamedTuple):
    """What a folder remembers.

    Parameters
    ----------
    pictures, features : int
        Numbers of squares, and of feature vectors: one for each picture and network.
    size : int
        Bytes of the database.
    """

    pictures: int
    features: int
    size: int


class PictureMemory:
    """Bytes by key, in a database in a folder, for threads and programs at a time.

    What cannot be remembered (no permission, a disk that is nearly full) is said once in a warning; everything is then
    computed, as without a memory. So is what cannot be read.

    Parameters
    ----------
    folder : path
        Made when something is remembered.
    most_bytes : int
        Size of the database; those entries that have not been used for longest make room, after an hour.
    """

    def __init__(self, folder: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> None:
        self.folder = Path(folder)
        self.most_bytes = most_bytes
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._is_usable = True
        self._said_full = False

    def get(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of the keys that are remembered, with their values."""
        found = dict[bytes, bytes]()

        def read(database: sqlite3.Connection) -> None:
            now, long_ago = int(time.time()), list[bytes]()
            for key in keys:
                row = database.execute("SELECT value, used FROM entries WHERE key = ?", (key,)).fetchone()
                if row is None:
                    continue
                value, used = row
                if isinstance(value, bytes) and value[:_CHECKSUM] == _checksum(key, value[_CHECKSUM:]):
                    found[key] = value[_CHECKSUM:]
                    if used < now - _STAYS / 2:
                        long_ago.append(key)
            if long_ago:
                database.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in long_ago])

        if (self.folder / _NAME).exists():
            self._with_database(read)
        return found

    def put(self, values: Mapping[bytes, bytes]) -> None:
        """Remember values by their keys, where there is room."""
        if not values:
            return
        now = int(time.time())

        def write(database: sqlite3.Connection) -> None:
            if not self._has_room(database, sum(map(len, values.values())), now):
                return
            rows = [(key, _checksum(key, value) + value, now) for key, value in values.items()]
            database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)

        self._with_database(write)

    def contents(self) -> Contents:
        """What is remembered."""
        counts = dict[bytes, int]()
        file = self.folder / _NAME
        if not file.exists():
            return Contents(0, 0, 0)
        query = "SELECT substr(key, 1, 1), count(*) FROM entries GROUP BY 1"
        self._with_database(lambda database: counts.update(database.execute(query).fetchall()))
        return Contents(counts.get(SQUARE, 0), counts.get(FEATURES, 0), file.stat().st_size)

    def clear(self) -> None:
        """Forget everything, and give the room back."""

        def forget(database: sqlite3.Connection) -> None:
            database.execute("PRAGMA journal_mode = OFF")  # for which a full disk has no room
            database.execute("DELETE FROM entries")
            database.commit()
            database.execute("VACUUM")
            database.execute("PRAGMA journal_mode = DELETE")

        if (self.folder / _NAME).exists():
            self._with_database(forget)

    def _has_room(self, database: sqlite3.Connection, more: int, now: int) -> bool:
        """Whether there is room for this many bytes; old entries are dropped to make some."""
        (pages,), (free,), (size,) = (
            database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
        if more > free * size and shutil.disk_usage(self.folder).free < more + _STAYS_FREE:
            if not self._said_full:
                warnings.warn(
                    f"no more pictures are remembered in {self.folder}, whose disk has less than "
                    f"{_STAYS_FREE / 1e6:.0f} MB left. Others are read from their files",
                    stacklevel=2,
                )
            self._said_full = True
            return False
        needed = (pages - free) * size + more - self.most_bytes
        if needed <= 0:
            return True
        oldest = database.execute(
            "SELECT key, length(value) FROM entries WHERE used < ? ORDER BY used", (now - _STAYS,)
        )
        dropped = list[tuple[bytes]]()
        with closing(oldest):
            for key, length in oldest:
                dropped.append((key,))
                needed -= length
                if needed <= 0:
                    break
        database.executemany("DELETE FROM entries WHERE key = ?", dropped)
        return needed <= 0

    def _with_database(self, work: Any, again: bool = False) -> None:
        """Work on the database in one transaction; a damaged one is begun anew."""
        import sqlite3

        with self._lock:
            if not self._is_usable:
                return
            try:
                database = self._opened()
                with database:
                    work(database)
            except (sqlite3.OperationalError, OSError) as error:  # locked for long, no permission, a full disk
                self._is_usable = False
                self._close()
                warnings.warn(
                    f"pictures are not remembered in {self.folder}: {error}. They are read from their files",
                    stacklevel=2,
                )
                return
            except sqlite3.DatabaseError as error:
                self._close()
                self._is_usable = not again
                warnings.warn(f"{self.folder / _NAME} is damaged ({error}): it is begun anew", stacklevel=2)
                with suppress(OSError):
                    (self.folder / _NAME).unlink()
            else:
                return
        if not again:
            self._with_database(work, again=True)

    def _opened(self) -> sqlite3.Connection:
        import sqlite3

        if self._connection is not None and self._process != os.getpid():
            _inherited.append(self._connection)  # SQLite forbids to use or close a connection after a fork
            self._connection = None
        if self._connection is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, text in (
                ("CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n"),
                (".gitignore", "*\n"),
            ):
                if not (self.folder / name).exists():
                    (self.folder / name).write_text(text)
            self._connection = sqlite3.connect(self.folder / _NAME, timeout=30, check_same_thread=False)
            self._process = os.getpid()
            # What a crash of the machine damages is computed again.
            self._connection.execute("PRAGMA synchronous = OFF")
            self._connection.executescript(_TABLE)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PictureMemory, (self.folder, self.most_bytes)


#: Connections that forked processes have inherited.
_inherited: list[sqlite3.Connection] = []


@cache
def _memory_in(folder: str) -> PictureMemory:
    return PictureMemory(folder)


def remembered_in(folder: str | os.PathLike[str] | None) -> PictureMemory | None:
    """The memory in a folder, the same for every caller; None for None. ValueError if it is neither."""
    if folder is None:
        return None
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"memory must be a folder or None, got {folder!r}")
    return _memory_in(os.path.abspath(folder))  # noqa: PTH100 (a string)


def _checksum(key: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(value, key=key[:64], digest_size=_CHECKSUM).digest()


# -------------------------------------------------------------------- squares


class FileContents(NamedTuple):
    """The contents of a file at one time."""

    digest: bytes
    stamp: tuple[int, ...]  # changes with them

    def hold(self, path: str | os.PathLike[Any]) -> bool:
        """Whether the file has not been changed since."""
        return _stamp(path) == self.stamp


def file_contents(path: str | os.PathLike[Any], size: int) -> FileContents | None:
    """Digest of a file's contents; None if there is none to read, or if it is read as fast as its square would be."""
    try:
        stamp = _stamp(path)
        if is_small(stamp[0], size) or not os.path.isfile(path):  # noqa: PTH113 (not a pipe, which blocks)
            return None
        digest = hashlib.sha256()
        with open(path, "rb") as file:  # noqa: PTH123
            while part := file.read(1 << 20):
                digest.update(part)
    except (OSError, ValueError):
        return None
    return FileContents(digest.digest(), stamp)


def is_small(n_bytes: int, size: int) -> bool:
    """Whether a file of ``n_bytes`` is read as fast as its square would be."""
    return n_bytes < _SMALL * size * size * 3


def _stamp(path: str | os.PathLike[Any]) -> tuple[int, ...]:
    status = os.stat(path)  # noqa: PTH116
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def square_key(contents: FileContents, item: Any, size: int, reading: Reading) -> bytes:
    """Key of the square of a file or of a region of it."""
    region = (item.box, item.margin, item.normalized, item.picture_size) if isinstance(item, Region) else None
    return _square_key(contents.digest, region, size, reading)


def square_key_of_bytes(contents: bytes, box: tuple[int, ...] | None, size: int, negative: bool) -> bytes:
    """Key of the square of a part of the bytes of a file, as data sets are read: its colours may be inverted."""
    return _square_key(hashlib.sha256(contents).digest(), box, size, negative)


def _square_key(digest: bytes, part: Any, size: int, how: Reading | bool) -> bytes:
    depends_on = (_VERSION, _decoders(), digest, part, size, how)
    return SQUARE + hashlib.sha256(repr(depends_on).encode()).digest()


@cache
def _decoders() -> tuple[str, ...]:
    """Versions of what decodes pictures."""
    versions = list[str]()
    for name in ("fewshot-mahalanobis", "pillow", "pillow-heif", "tifffile", "imagecodecs"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return tuple(versions)


class _Stored(msgspec.Struct, array_like=True):
    """A :class:`Square` as bytes."""

    pixels: bytes
    span: Span | None
    remarks: tuple[str, ...]
    box: tuple[int, int, int, int] | None


def stored(square: Square) -> bytes:
    """A square as bytes."""
    return msgspec.msgpack.encode(_Stored(square.pixels.tobytes(), square.span, square.remarks, square.box))


def square_of(value: bytes, size: int) -> Square:
    """Undo :func:`stored`."""
    found = msgspec.msgpack.decode(value, type=_Stored)
    return Square(np.frombuffer(found.pixels, np.uint8).reshape(size, size, 3), found.span, found.remarks, found.box)
