"""The service of the app: its interface as programs use it, and who is let in."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps import server as server_module
from fewshot_mahalanobis.apps.server import Server
from fewshot_mahalanobis.apps.session import Session
from tests.tiny import LABELS, pictures, tiny_classifier

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


@contextmanager
def served(session: Session, **options: Any) -> Iterator[str]:
    """Host and port of a server, until the block ends."""
    server = Server(session, **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield re.sub(r"^http://([^/]*)/.*", r"\1", server.address).replace("0.0.0.0", "127.0.0.1")
    finally:
        server.stop()
        thread.join()


def call(place: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and answer of a request; JSON as what it says."""
    connection = http.client.HTTPConnection(place, timeout=60)
    if isinstance(body, dict):
        body, headers = json.dumps(body), {"Content-Type": "application/json", **headers}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    content, kind = response.read(), response.headers.get("content-type", "")
    connection.close()
    return response.status, json.loads(content) if kind == "application/json" else content


def send(place: str, path: str, given: Sequence[Path], fields: Mapping[str, str] = {}, **headers: str) -> Any:
    """Status and answer of a form with pictures."""
    mark, parts = uuid.uuid4().hex, list[bytes]()
    for name, value in fields.items():
        parts.append(f'--{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode())
    for file in given:
        described = f'Content-Disposition: form-data; name="pictures"; filename="{file.name}"'
        parts.append(f"--{mark}\r\n{described}\r\n\r\n".encode() + file.read_bytes() + b"\r\n")
    body = b"".join(parts) + f"--{mark}--\r\n".encode()
    return call(place, "POST", path, body, **{"Content-Type": f"multipart/form-data; boundary={mark}", **headers})


def classifier_of_a_file(**settings: Any) -> SimpleCNAPSClassifier:
    """One that can be saved and loaded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
    return SimpleCNAPSClassifier(model, device="cpu", **settings).fit(pictures(8, 1), LABELS)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for index, image in enumerate(pictures(6, 5)):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    return [tmp_path / f"{index}.png" for index in range(6)]


def test_a_program_asks_teaches_corrects_and_takes_the_model(paths: list[Path], tmp_path: Path) -> None:
    start = classifier_of_a_file(unknown_label="other", false_rejection_rate=0.2)
    with served(Session(start)) as place:
        status, found = send(place, "/api/classify", paths[:3])
        assert status == 200
        assert [answer["name"] for answer in found["answers"]] == ["0.png", "1.png", "2.png"]
        assert [answer["label"] for answer in found["answers"]] == start.predict(paths[:3]).tolist()
        wanted = start.predict_all(paths[:3])
        for name, values in (("doubt", wanted.doubts), ("outlier_score", wanted.outlier_scores)):
            assert [answer[name] for answer in found["answers"]] == pytest.approx([*values], rel=1e-4, abs=1e-6)
        assert {answer["outlier_threshold"] for answer in found["answers"]} == {start.threshold_}
        for answer, row in zip(found["answers"], start.predict_proba(paths[:3]), strict=True):
            assert answer["probabilities"] == pytest.approx(dict(zip(start.classes_, row, strict=True)), abs=1e-6)
        assert call(place, "GET", "/api/state")[1]["pictures"] == []

        status, added = send(place, "/api/examples", paths[:2], {"label": "purple"})
        assert (status, added["problems"]) == (200, {})
        start.partial_fit(paths[:2], ["purple"] * 2)
        numbers = [row[0] for row in added["state"]["pictures"]]
        status, state = call(place, "POST", "/api/labels", {"pictures": numbers[:1], "label": "pink"})
        assert [one["name"] for one in state["classes"]] == ["blue", "green", "pink", "purple", "red"]
        status, undone = call(place, "POST", "/api/undo")
        assert undone["pictures"] == numbers[:1]
        status, model = call(place, "GET", "/api/model")
        (tmp_path / "taught.safetensors").write_bytes(model)
        taught = SimpleCNAPSClassifier.load(tmp_path / "taught.safetensors", device="cpu")
        np.testing.assert_allclose(taught.predict_proba(paths), start.predict_proba(paths), rtol=1e-4, atol=1e-6)
        _, answered = send(place, "/api/classify", paths[2:3])
        assert answered["answers"][0]["probabilities"] == pytest.approx(
            dict(zip(taught.classes_, taught.predict_proba(paths[2:3])[0], strict=True)), abs=1e-6
        )
        status, state = call(place, "DELETE", "/api/examples", {"pictures": numbers})
        assert state["pictures"] == []
        status, state = call(place, "PUT", "/api/model", model)
        assert {one["name"]: one["known"] for one in state["classes"]}["purple"] == 2


def test_the_curl_lines_of_the_page_on_shipping_do_what_it_says(paths: list[Path], tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on PATH")
    for name, path in zip(("cat.jpg", "dog.jpg", "1.jpg", "2.jpg"), paths, strict=False):
        path.rename(tmp_path / name)
    page = (Path(__file__).parents[2] / "docs" / "shipping.md").read_text()
    said = []
    with served(Session(classifier_of_a_file())) as place:
        for line in re.findall(r"^curl .*", page, re.MULTILINE):
            command = [*shlex.split(line.replace("127.0.0.1:8000", place)), "--silent", "--show-error", "--fail"]
            run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert run.returncode == 0, (line, run.stderr)
            said.append(run.stdout)
    classified, added, state, removed, _ = said
    assert [answer["name"] for answer in json.loads(classified)["answers"]] == ["cat.jpg", "dog.jpg"]
    assert json.loads(added)["state"]["pictures"] == json.loads(state)["pictures"] != []
    assert json.loads(removed)["pictures"] == []
    taught = SimpleCNAPSClassifier.load(tmp_path / "pets-2.safetensors", device="cpu")
    assert taught.classes_.tolist() == ["blue", "green", "red"]


def test_what_is_wrong_is_a_sentence_that_names_it_and_changes_nothing(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.png").write_text("hello")
    session = Session(tiny_classifier())
    with served(session) as place:
        monkeypatch.setattr(server_module, "_MOST_JSON", 1000)
        for (status, answer), code, message in (
            (send(place, "/api/classify", [*paths[:2], tmp_path / "notes.png"]), 400, "notes.png: not an image file"),
            (send(place, "/api/classify", []), 400, "no picture in the form"),
            (send(place, "/api/examples", paths[:1], {"label": " "}), 400, "name first"),
            (call(place, "POST", "/api/labels", {"pictures": [7], "label": "red"}), 400, "there is no picture 7"),
            (call(place, "POST", "/api/labels", {"pictures": ["0"], "label": "red"}), 400, "there is no picture '0'"),
            (call(place, "POST", "/api/labels", {"label": "red"}), 400, '"pictures" is a list'),
            (call(place, "POST", "/api/labels", {"pictures": [7], "label": 3}), 400, '"label" is a text'),
            (call(place, "POST", "/api/labels", "[", **{"Content-Type": "application/json"}), 400, "Expecting value"),
            (call(place, "POST", "/api/labels", "x", **{"Content-Type": "text/plain"}), 415, "Send JSON"),
            (call(place, "POST", "/api/labels", {"pictures": [0] * 1000}), 413, "too much at once"),
            (call(place, "PUT", "/api/model", b"none"), 400, "model.safetensors"),
            (call(place, "GET", "/api/thumbnail/run/9"), 400, "there is no picture 9"),
            (call(place, "GET", "/api/labels"), 400, "no table of labels"),
        ):
            assert status == code
            assert message in answer["error"]
    assert (session.version, session.pictures) == (1, {})


def test_other_sites_can_neither_read_nor_change_anything(paths: list[Path]) -> None:
    with served(Session(tiny_classifier())) as place:
        assert call(place, "GET", "/api/state")[0] == 200
        assert call(place, "GET", "/api/state", Host="evil.example")[0] == 400
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert send(place, "/api/examples", paths[:1], {"label": "red"}, **headers)[0] == 403
        assert call(place, "GET", "/api/state")[1]["pictures"] == []
        of_proxy = {"Origin": "http://a.proxy:8080"}
        refused = send(place, "/api/examples", paths[:1], {"label": "red"}, **of_proxy)
        assert (refused[0], "X-Forwarded-Host" in refused[1]["error"]) == (403, True)
        for headers in (
            {"Origin": f"http://{place}"},
            {"Sec-Fetch-Site": "same-origin", "Origin": "https://a.proxy"},
            {**of_proxy, "X-Forwarded-Host": "a.proxy:8080"},
        ):
            assert send(place, "/api/examples", paths[:1], {"label": "red"}, **headers)[0] == 200


def test_whoever_is_on_another_machine_needs_the_token() -> None:
    with served(Session(tiny_classifier()), host="0.0.0.0", token="secret") as place:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "fewshot-1=secret"}):
            status, answer = call(place, "GET", "/api/state", **headers)
            assert (status, "token" in answer["error"]) == (401, True)
        assert call(place, "GET", "/")[0] == call(place, "GET", "/?token=wrong")[0] == 401
        assert call(place, "GET", "/api/state", Authorization="Bearer secret")[0] == 200
        connection = http.client.HTTPConnection(place)
        connection.request("GET", "/?token=secret")
        response = connection.getresponse()
        cookie = response.headers["set-cookie"]
        connection.close()
        assert (response.status, response.headers["location"]) == (303, "./")
        assert "HttpOnly" in cookie
        assert call(place, "GET", "/", Cookie=cookie.partition(";")[0])[0] == 200
    address = Server(Session(tiny_classifier()), host="0.0.0.0").address
    assert len(address.partition("?token=")[2]) > 20
    assert "token" not in Server(Session(tiny_classifier())).address


def test_the_interface_is_the_one_that_is_described(paths: list[Path]) -> None:
    described = json.loads((files("fewshot_mahalanobis") / "page" / "openapi.json").read_text())
    with served(Session(tiny_classifier())) as place:
        assert call(place, "GET", "/openapi.json")[1] == described
        for path, methods in described["paths"].items():
            for method in methods:
                assert call(place, method.upper(), path)[0] not in (404, 405), (method, path)
        schemas = described["components"]["schemas"]
        state = send(place, "/api/examples", paths[:1])[1]["state"]
        assert {*schemas["State"]["required"]} <= state.keys()
        (answer,) = send(place, "/api/classify", paths[:1])[1]["answers"]
        assert answer.keys() == {*schemas["Answer"]["required"]} == schemas["Answer"]["properties"].keys()


def test_the_page_asks_for_nothing_from_elsewhere_and_by_addresses_below_its_own() -> None:
    with served(Session(tiny_classifier())) as place:
        page = call(place, "GET", "/")[1].decode()
        addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert "{{" not in page
        assert len(addresses) > 5
        for address in addresses:
            assert address == "data:," or call(place, "GET", f"/{address}")[0] == 200
            assert not address.startswith(("/", "http"))


def test_eight_programs_ask_while_another_adds_a_class(paths: list[Path]) -> None:
    start = tiny_classifier()
    before = start.predict_proba(paths[2:3])[0]
    wrong, labels = list[Any](), list[set[str]]()
    with served(Session(start)) as place:

        def ask() -> None:
            for _ in range(4):
                status, found = send(place, "/api/classify", paths[2:3])
                (answer,) = found["answers"]
                shares = answer["probabilities"]
                labels.append({*shares})
                known = "purple" in shares or [shares[name] for name in start.classes_] == pytest.approx(
                    before, abs=1e-5
                )
                if status != 200 or not known:
                    wrong.append((status, found))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert send(place, "/api/examples", paths[:2], {"label": "purple"})[0] == 200
        for thread in threads:
            thread.join()
        assert "purple" in send(place, "/api/classify", paths[:1])[1]["answers"][0]["probabilities"]
    assert not wrong
    assert len(labels) == 32
