"""How commands end: Ctrl-C at work leaves nothing half done, and standard output that cannot be written is said.

The commands are processes of their own. Each reports by an audit hook that it has come to a certain operation and waits
there until the signal has been sent to its process group, as a terminal sends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.exit_status import exit_after
from tests.research.training.small import PRETRAIN, draw_colours

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups and pipes of POSIX")

#: Arguments: an audit event, a pattern of its arguments, which of the operations, two pipes; then those of the command.
AT_AN_OPERATION = r"""
import os, re, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background would ignore it
event, pattern, number, come, go = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
del sys.argv[1:6]
def hook(name, arguments):
    global number
    if re.fullmatch(event, name) and re.search(pattern, str(arguments[0])):
        number -= 1
        if number == 0:
            os.write(come, b"!")
            os.read(go, 1)
sys.addaudithook(hook)
runpy.run_module("fewshot_mahalanobis", run_name="__main__", alter_sys=True)
"""


def sent(sign: int, event: str, pattern: str, *command: object, number: int = 1) -> tuple[int, str, str]:
    """Status, output and errors of a command that gets a signal at the n-th operation of a kind."""
    (come, report), (wait, go) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", AT_AN_OPERATION, event, pattern, *map(str, (number, report, wait, *command))],
        pass_fds=(report, wait),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    os.close(report)
    os.close(wait)
    came = os.read(come, 1)
    if came:
        os.killpg(process.pid, sign)
        os.write(go, b"!")
    output, errors = process.communicate(timeout=300)
    os.close(come)
    os.close(go)
    assert came, f"the command ended before the operation: {errors}"
    return process.returncode, output, errors


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(draw_colours(tmp_path_factory.mktemp("sources") / "colours"))


@pytest.fixture(scope="module")
def model(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "model.safetensors"
    paths = sorted(photos.glob("*/[0-3].png"))
    SimpleCNAPSClassifier("resnet18", device="cpu").fit(paths, [path.parent.name for path in paths]).save(file)
    return file


#: Moment -> audit event, pattern, command. {} stands for the folder of outputs, and for an old file in it.
READING = ("open", r"/\d\.png$")
MOMENTS = {
    "the beginning": ("import", r"^typer$", ["--help"]),
    "checkpoints list": ("import", r"evaluation\.tables$", ["checkpoints", "list"]),
    "checkpoints show": ("import", r"evaluation\.tables$", ["checkpoints", "show", "default"]),
    "checkpoints download": ("open", r"config\.json$", ["checkpoints", "download", "resnet18"]),
    "demo, writing": ("os.rename", r"\.saving-old", ["demo", "-o", "{}/old", "--checkpoint", "resnet18"]),
    "fit, reading": (*READING, ["fit", "PHOTOS", "-o", "{}/old", "--checkpoint", "resnet18"]),
    "fit, writing": ("os.rename", r"\.saving-old", ["fit", "PHOTOS", "-o", "{}/old", "--checkpoint", "resnet18"]),
    "predict, reading": (*READING, ["predict", "MODEL", "PHOTOS"]),
    "sort, reading": (*READING, ["sort", "MODEL", "PHOTOS", "-o", "{}/sorted"]),
    "page, writing": ("os.mkdir", r"\.saving-page", ["page", "MODEL", "-o", "{}/page"]),
    "evaluate, reading": (*READING, ["evaluate", "PHOTOS", "--checkpoint", "resnet18", "-o", "{}/old.json"]),
    "pretrain, reading": (*READING, ["pretrain", "PHOTOS", "-o", "{}/run"]),
    "data check": ("import", r"research\.data\.check$", ["data", "check", "PHOTOS"]),
    "data download": ("urllib.Request", "", ["data", "download", "omniglot", "{}"]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_each_command_with_130_and_leaves_what_was_there(
    moment: str, photos: Path, model: Path, tmp_path: Path
) -> None:
    event, pattern, command = MOMENTS[moment]
    (tmp_path / "old").write_text("old")
    named = {"PHOTOS": photos, "MODEL": model}
    arguments = [named.get(part, part.format(tmp_path)) for part in command]
    status, _, errors = sent(signal.SIGINT, event, pattern, *arguments)
    assert status == 130, errors
    assert "Traceback" not in errors
    assert "Aborted" not in errors
    left = {name for name in contents(tmp_path) if name != "run/recipe.json"}  # which a mistaken command may leave
    assert left == {"old"}
    assert (tmp_path / "old").read_text() == "old"
    assert not list(tmp_path.rglob(".saving-*"))


def test_an_error_that_ctrl_c_causes_on_its_way_out_is_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    lock = threading.Condition()

    def interrupted_while_it_waits() -> None:
        with lock:
            try:
                raise KeyboardInterrupt
            finally:
                lock.release()  # so the condition has nothing to release: RuntimeError, as in an interrupted wait()

    with pytest.raises(SystemExit) as stop:
        exit_after(interrupted_while_it_waits)
    assert stop.value.code == 130
    assert not capsys.readouterr().err


def test_an_error_after_a_handled_one_is_no_ctrl_c() -> None:
    def fails() -> None:
        try:
            raise KeyError
        except KeyError:
            raise RuntimeError("of its own") from None

    with pytest.raises(RuntimeError, match="of its own"):
        exit_after(fails)


@pytest.mark.parametrize(
    ("name", "command"),
    [("app", ["app", "--checkpoint", "resnet18"]), ("page", ["review", "MODEL", "PHOTOS", "-o", "TABLE"])],
)
def test_ctrl_c_stops_a_server_with_130(
    name: str, command: list[str], photos: Path, model: Path, tmp_path: Path
) -> None:
    named = {"PHOTOS": str(photos / "c0"), "MODEL": str(model), "TABLE": str(tmp_path / "checked.csv")}
    arguments = [named.get(part, part) for part in command]
    process = subprocess.Popen(
        [sys.executable, "-c", AT_AN_OPERATION, "none", "", "0", "0", "0", *arguments, "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"The {name} is at http"), line
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert output == ""


# ------------------------------------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def training(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Command -> its arguments without the folder: three steps of a second or less."""
    settings = {"tasks": 3, "tasks_per_step": 1, "episodes": "fixed", "shot": 1, "queries": 2, "model.image_size": 32}
    small = {**PRETRAIN, "epochs": 1, "batch_size": 16}
    return {
        "meta-train": ["meta-train", str(photos), "--backbone", "resnet18", "--device", "cpu", *assignments(settings)],
        "pretrain": ["pretrain", str(photos), "--device", "cpu", *assignments(small)],
    }


def assignments(settings: dict[str, object]) -> list[str]:
    def text(value: object) -> str:
        return str(value).replace("(", "[").replace(")", "]") if isinstance(value, tuple) else str(value)

    return [part for name, value in settings.items() for part in ("--set", f"{name}={text(value)}")]


def saved_step(run: Path) -> int:
    return int(torch.load(run / "state.pt", weights_only=True)["step"])


@pytest.mark.parametrize(
    ("command", "sign", "status"),
    [
        ("meta-train", signal.SIGINT, 130),
        ("meta-train", signal.SIGTERM, -signal.SIGTERM),
        ("pretrain", signal.SIGINT, 130),
    ],
)
def test_a_training_that_is_asked_to_stop_ends_its_step_saves_and_goes_on_from_there(
    command: str, sign: int, status: int, training: dict[str, list[str]], tmp_path: Path
) -> None:
    """The processes that load images get the signal too."""
    arguments = [*training[command], "-o", str(tmp_path / "run"), "--workers", "1"]
    number = 2 if command == "meta-train" else 1  # written before it is asked whether to stop, or after
    ended, _, errors = sent(sign, "open", r"log\.jsonl$", *arguments, number=number)
    assert ended == status, errors
    assert "Traceback" not in errors
    assert saved_step(tmp_path / "run") == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"recipe.json", "log.jsonl", "state.pt"}
    done = subprocess.run([sys.executable, "-m", "fewshot_mahalanobis", *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert saved_step(tmp_path / "run") == 3
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("command", ["meta-train", "pretrain"])
def test_a_training_that_is_killed_after_its_first_step_keeps_it(
    command: str, training: dict[str, list[str]], tmp_path: Path
) -> None:
    arguments = [*training[command], "-o", str(tmp_path / "run")]
    ended, _, _ = sent(signal.SIGKILL, "open", r"log\.jsonl$", *arguments, number=2)
    assert ended == -signal.SIGKILL
    assert saved_step(tmp_path / "run") == 1


# ------------------------------------------------------------------------------------------ standard output


@contextmanager
def full_disk() -> Iterator[int]:
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("no device that is always full")
    with full.open("wb") as file:
        yield file.fileno()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [
        ["--version"],
        ["checkpoints", "list"],
        ["predict", "MODEL", "PHOTOS"],
    ],
)
def test_a_full_disk_behind_standard_output_is_one_line_and_status_1(
    command: list[str], unbuffered: str, photos: Path, model: Path, tmp_path: Path
) -> None:
    named = {"PHOTOS": str(photos), "MODEL": str(model), "OUT": str(tmp_path / "demo.png")}
    arguments = [named.get(part, part) for part in command]
    with full_disk() as output:
        done = subprocess.run(
            [sys.executable, "-m", "fewshot_mahalanobis", *arguments],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert lines == ["error: standard output cannot be written: No space left on device"]
    assert done.returncode == 1


def test_a_reader_that_has_gone_is_no_error_to_speak_of() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fewshot_mahalanobis", "checkpoints", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_errors_that_have_nothing_to_do_with_standard_output_are_not_hidden() -> None:
    def broken() -> None:
        raise OSError("a fault of the program")

    with pytest.raises(OSError, match="a fault of the program"):
        exit_after(broken)
    for end, status in ((SystemExit(3), 3), (KeyboardInterrupt(), 130), (None, 0)):

        def ending(end: BaseException | None = end) -> None:
            if end is not None:
                raise end

        with pytest.raises(SystemExit) as stop:
            exit_after(ending)
        assert stop.value.code == status
