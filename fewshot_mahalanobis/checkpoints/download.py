"""Downloads that leave either the right file or none."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from tqdm import tqdm

from fewshot_mahalanobis.checkpoints.errors import DownloadError
from fewshot_mahalanobis.checkpoints.files import atomic_replace

#: Environment variable: a folder that holds published files, by their base names, for use without a network.
LOCAL_COPIES_VARIABLE = "FEWSHOT_MAHALANOBIS_CHECKPOINTS"

#: Seconds to connect, and seconds without a byte after which the server counts as stalled.
TIMEOUT = (10.0, 30.0)
#: How often a transfer that breaks off is resumed, as long as it gets further each time.
_RESUMPTIONS = 10
#: GitHub takes no git blob above 100 MiB, so a longer answer is not one of the published files.
LARGEST_FILE = 100 * 2**20
_CHUNK = 2**18


def blob_id(path: Path) -> str:
    """Return git's name for the contents of a file: the SHA-1 of a header with its size and of its bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def download(url: str, destination: Path, expected_blob_id: str) -> None:
    """Download one file to ``destination``, verified before it gets its name.

    A transfer that breaks off is resumed where it broke, if the server supports that.

    Parameters
    ----------
    url : str
    destination : Path
        In an existing folder.
    expected_blob_id : str
        Digest of the file, as :func:`blob_id` computes it.

    Raises
    ------
    DownloadError
        There is no connection, the server answers with an error or stalls, the transfer breaks, or the bytes are not
        those expected. ``destination`` is unchanged.
    OSError
        ``destination`` cannot be written.
    """
    with atomic_replace(destination) as temporary:
        content_type = _stream(url, temporary, destination)
        digest = blob_id(temporary)
        if digest != expected_blob_id:
            raise _failure(
                url,
                destination,
                f"the server's {temporary.stat().st_size} bytes ({content_type}) are not the published file: "
                f"git blob id {digest}, expected {expected_blob_id}",
            )


def _stream(url: str, temporary: Path, destination: Path) -> str:
    """Write the body of ``url`` to ``temporary``; return its content type."""
    import requests  # of the extra `hub`, which the caller has asked for

    attempts = 0
    with (
        temporary.open("wb") as file,
        # disable=None: a bar on a terminal, silence in logs.
        tqdm(desc=destination.name, unit="B", unit_scale=True, disable=sys.stderr is None or None) as bar,
    ):
        while True:
            attempts, before = attempts + 1, file.tell()
            # Without compression, so that the bytes counted are those of the file.
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={before}-"} if before else {})
            problem = "no connection: is this machine offline?"
            try:
                with requests.get(url, stream=True, timeout=TIMEOUT, headers=headers) as response:
                    problem = "the server refused"
                    response.raise_for_status()
                    problem = "the transfer broke off or stalled"
                    if not response.headers.get("Content-Range", "").startswith(f"bytes {before}-"):
                        file.seek(0)  # this is the whole file, whatever was asked for
                        file.truncate()
                    length = response.headers.get("Content-Length", "")
                    known = length.isdecimal() and len(length) < 19
                    bar.n, bar.total = file.tell(), file.tell() + int(length) if known else None
                    for chunk in response.iter_content(_CHUNK):
                        file.write(chunk)
                        bar.update(len(chunk))
                        if file.tell() > LARGEST_FILE:
                            raise _failure(url, destination, f"the answer is longer than {LARGEST_FILE} bytes")
                    return response.headers.get("Content-Type", "no content type")
            except requests.RequestException as error:
                if attempts > _RESUMPTIONS or file.tell() <= before:
                    raise _failure(url, destination, f"{problem} ({error})") from error


def _failure(url: str, destination: Path, reason: str) -> DownloadError:
    name = url.rsplit("/", 1)[-1]
    return DownloadError(
        f"could not download {url} to {destination}: {reason}. Try again with a connection; or fetch the file by "
        f"other means, keep its name {name}, and set the environment variable {LOCAL_COPIES_VARIABLE} to its folder"
    )
