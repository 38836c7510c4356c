"""Files and folders that appear whole or not at all. Everything that the package writes goes through here."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

#: What file systems say that lack an operation: mounted buckets, shares, a file that is mounted by itself.
_LACKING = {
    *(errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM),
    *(errno.EXDEV, errno.EBUSY, errno.ENOLCK),
}

#: What a full disk says, and a quota that is used up.
_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def atomic_replace(path: str | os.PathLike[str], *, mode: int | None = None) -> Iterator[Path]:
    """Write a file or folder under a temporary name, then rename it to ``path``.

    Readers, and a process killed at any moment, see the old contents or the new ones. Two writers do not disturb each
    other: the last one wins. Where the file system cannot rename over a file, its contents are copied over it instead.

    Parameters
    ----------
    path : path
        In an existing folder. Links are followed: what they lead to is written, and they stay. A folder can only take
        the place of an empty one.
    mode : int, optional
        Permissions of the file. By default it has those of the file that it replaces; a new file has 0666 without the
        bits of the umask. A file system without permissions keeps its own.

    Yields
    ------
    Path
        What to write instead of ``path``: in the same file system, with the same name. Nothing stands there yet. If the
        block raises, it is deleted and ``path`` stays as it was.

    Raises
    ------
    OSError
        As for :func:`check_writable`, or the disk is full.
    """
    path = Path(path)
    target = _target(path)
    with naming_a_full_disk(path), _temporary_folder(path, target) as folder:
        temporary = folder / path.name
        temporary.touch(0o666)  # reads the umask; asking for it would change it in other threads
        if mode is None:
            mode = stat.S_IMODE((target if target.is_file() else temporary).stat().st_mode)
        temporary.unlink()
        yield temporary
        if not temporary.is_dir():
            if target.is_dir():
                raise IsADirectoryError(f"cannot write {path}: it is a folder. Name a file in it")
            with suppress(OSError):
                temporary.chmod(mode)
        _rename(temporary, target)


@contextmanager
def naming_a_full_disk(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name in the error of a full disk the ``path`` that could not be written, and the remedy.

    Of nested blocks the outermost names its path: it is the one that the user gave.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        full = OSError(f"cannot write {path}: {os.strerror(error.errno)}. Make room there, and try again")
        full.errno = error.errno
        raise full from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` during a block, which runs without it where the file system has no locks."""
    from filelock import FileLock

    with ExitStack() as held:
        try:
            held.enter_context(FileLock(path))
        except NotImplementedError:  # of filelock before 3.21, for ENOSYS
            pass
        except OSError as error:
            if error.errno not in _LACKING:
                raise
        yield


def check_writable(path: Path) -> None:
    """Raise OSError if :func:`atomic_replace` could not write to ``path``; the message names the remedy.

    Its folder is missing or cannot be written to, the file is write-protected, or something else than a file or folder
    stands there, such as a device or a pipe.
    """
    with naming_a_full_disk(path), _temporary_folder(path, _target(path)):
        pass


def readable_file(path: Path) -> bool:
    """Whether ``path`` is a file; PermissionError if it may not be read (libraries would call it missing).

    ValueError if its name is not valid UTF-8, which the library that reads such files would call damage.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # neither a folder nor a pipe, which would block
            return False
        path.open("rb").close()
    except PermissionError as error:
        raise PermissionError(f"no permission to read {path}") from error
    except (OSError, ValueError):  # ValueError: no file can have this name
        return False
    name = str(path)
    if name.encode("utf-8", "replace").decode() != name:
        shown = name.encode("utf-8", "backslashreplace").decode()
        raise ValueError(f"{shown} cannot be opened, as its name is not valid UTF-8: rename the file or its folder")
    return True


def remove_leftovers(path: Path) -> None:
    """Delete what writers of ``path`` that were killed have left; the caller holds a lock against living ones."""
    for folder in path.parent.glob(f"{glob.escape(_prefix(path))}*"):
        shutil.rmtree(folder, ignore_errors=True)


def shortened(name: str, most_bytes: int) -> str:
    """Return the beginning of a file name that has at most this many bytes, without half a character."""
    return os.fsencode(name)[:most_bytes].decode("utf-8", "ignore") if len(os.fsencode(name)) > most_bytes else name


def _target(path: Path) -> Path:
    """Return where a path leads; OSError if that is no place for a file or folder."""
    target = Path(os.path.realpath(path))  # follows a dangling link too
    try:
        old = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no folder {target.parent}. Make it first") from None
        return target
    except PermissionError as error:
        raise PermissionError(f"cannot write {path}: no permission to look into its folder") from error
    if not stat.S_ISREG(old.st_mode) and not stat.S_ISDIR(old.st_mode):
        raise OSError(f"cannot write {path}: it is {_kind(old)}, which must not be replaced. Name a file")
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(f"cannot write {path}: it is write-protected. Name another file, or unprotect it")
    return target


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")


@contextmanager
def _temporary_folder(path: Path, target: Path) -> Iterator[Path]:
    """A folder beside the target, deleted when the block ends."""
    try:
        made = tempfile.TemporaryDirectory(prefix=_prefix(target), dir=target.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise type(error)(f"cannot write {path} in the folder {target.parent}: {error.strerror}") from error
    with made as folder:
        yield Path(folder)


def _rename(temporary: Path, target: Path) -> None:
    """Rename a file or folder, over an old file if there is one; copy it where that cannot be done."""
    try:
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        if temporary.is_dir():
            shutil.copytree(temporary, target, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(temporary, target)


def _prefix(path: Path) -> str:
    return f".saving-{shortened(path.name, 60)}-"  # file names have a maximum length
