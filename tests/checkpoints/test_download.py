"""Downloads leave the right file or none, whatever the server does."""

from __future__ import annotations

import pytest

from fewshot_mahalanobis.checkpoints import DownloadError
from fewshot_mahalanobis.checkpoints import download as download_module
from fewshot_mahalanobis.checkpoints.download import LOCAL_COPIES_VARIABLE, blob_id, download
from tests.checkpoints.checkpoint_server import Server, git_blob_id, send, send_and_drop

FILE = bytes(range(256)) * 4096  # a megabyte


@pytest.fixture
def destination(tmp_path):
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder / "weights.pt"


def test_right_file_arrives_whole(destination):
    with Server(lambda handler: send(handler, FILE)) as server:
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert destination.read_bytes() == FILE
    assert list(destination.parent.iterdir()) == [destination]


def test_blob_id_is_the_one_git_computes(tmp_path):
    (tmp_path / "file").write_bytes(b"what is up, doc?")
    # The example of the book Pro Git, "Git Objects".
    assert blob_id(tmp_path / "file") == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"


def test_redirect_to_another_host_is_followed(destination):
    with (
        Server(lambda handler: send(handler, FILE)) as other,
        Server(lambda handler: send(handler, b"", 302, Location=f"{other.url}/x")) as server,
    ):
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert destination.read_bytes() == FILE


def stall(handler):
    send(handler, FILE[:1000], length=len(FILE))
    handler.wfile.flush()
    handler.rfile.read(1)  # until the client gives up


def unannounced_then_cut(handler):
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(FILE[:1000])


def wrong_part(handler):
    """Drops the first connection, then sends the beginning again as if it were the rest."""
    if "Range" in handler.headers:
        send(handler, FILE[:-1000], 206, Content_Range=f"bytes 1000-{len(FILE) - 1}/{len(FILE)}")
    else:
        send(handler, FILE[:1000], length=len(FILE))


HTML = b"<!DOCTYPE html><html><body>rate limit</body></html>"
FAULTS = {
    "truncated": (lambda handler: send(handler, FILE[: len(FILE) // 2], length=len(FILE)), "broke off or stalled"),
    "truncated without a length": (unannounced_then_cut, "are not the published file"),
    "stalled": (stall, "broke off or stalled"),
    "forbidden": (lambda handler: send(handler, b"", 403), "403"),
    "not found": (lambda handler: send(handler, HTML, 404), "404"),
    "server error": (lambda handler: send(handler, b"", 500), "500"),
    "web page": (lambda handler: send(handler, HTML, content_type="text/html"), "text/html"),
    "wrong bytes": (lambda handler: send(handler, FILE[::-1]), "git blob id"),
    "empty": (lambda handler: send(handler, b""), "0 bytes"),
    "drops every connection": (lambda handler: send_and_drop(handler, FILE, after=1000, ranges=False), "broke off"),
    "gives a byte at a time": (lambda handler: send_and_drop(handler, FILE, after=1), "broke off"),
    "another part than asked for": (wrong_part, "broke off|git blob id"),
    "closed at once": (lambda handler: handler.connection.close(), "offline"),
    "too long": (lambda handler: send(handler, FILE * 4), "longer than"),
    "redirected to a file": (lambda handler: send(handler, b"", 302, Location="file:///etc/passwd"), "No connection"),
    "redirected for ever": (lambda handler: send(handler, b"", 302, Location="/again"), "redirects"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_download_is_one_clear_error_and_leaves_no_file_and_a_second_try_succeeds(
    fault, destination, monkeypatch
):
    monkeypatch.setattr(download_module, "TIMEOUT", (1.0, 0.2))
    monkeypatch.setattr(download_module, "LARGEST_FILE", 2 * len(FILE))
    answer, message = FAULTS[fault]
    with Server(answer) as server:
        url = f"{server.url}/weights.pt"
        with pytest.raises(DownloadError, match=message) as caught:
            download(url, destination, git_blob_id(FILE))
        assert all(part in str(caught.value) for part in (url, str(destination), LOCAL_COPIES_VARIABLE))
        assert list(destination.parent.iterdir()) == []
        server.answer = lambda handler: send(handler, FILE)
        download(url, destination, git_blob_id(FILE))
    assert destination.read_bytes() == FILE


@pytest.mark.parametrize("after", [len(FILE) // 3, len(FILE) - 1])
def test_download_that_drops_is_taken_up_where_it_broke(after, destination):
    with Server(lambda handler: send_and_drop(handler, FILE, after)) as server:
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
        assert len(server.requests) == -(-len(FILE) // after)
    assert destination.read_bytes() == FILE
    assert list(destination.parent.iterdir()) == [destination]


def test_redirect_to_another_host_that_serves_other_bytes_is_refused(destination):
    with (
        Server(lambda handler: send(handler, HTML, content_type="text/html")) as other,
        Server(lambda handler: send(handler, b"", 302, Location=f"{other.url}/login")) as server,
        pytest.raises(DownloadError, match="text/html"),
    ):
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert list(destination.parent.iterdir()) == []


def test_failed_download_leaves_an_older_file_as_it_was(destination):
    destination.write_bytes(b"older")
    with Server(lambda handler: send(handler, HTML)) as server, pytest.raises(DownloadError):
        download(f"{server.url}/weights.pt", destination, git_blob_id(FILE))
    assert destination.read_bytes() == b"older"


def test_refused_connection_says_offline_and_names_address_destination_and_variable(destination):
    with Server(lambda handler: None) as server:
        url = f"{server.url}/weights.pt"
    with pytest.raises(DownloadError, match="offline") as caught:
        download(url, destination, git_blob_id(FILE))
    assert all(part in str(caught.value) for part in (url, str(destination), LOCAL_COPIES_VARIABLE))
