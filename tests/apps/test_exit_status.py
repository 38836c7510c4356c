"""How commands end: Ctrl-C at work leaves nothing half done, and standard output that cannot be written is said.

Most commands are forks of this process, which spares each the import of PyTorch. Those that train are forks of a server
that has computed nothing: PyTorch refuses gradients in a child of a process that has computed some. Each reports by an
audit hook that it has come to a certain operation, and waits there until the signal has been sent to its process group,
as a terminal sends it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.__main__ import main
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.exit_status import exit_after
from fewshot_mahalanobis.research.training.run import stopped_between_steps
from tests.research.training.small import PRETRAIN, draw_colours

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="forks, process groups and pipes of POSIX"),
    pytest.mark.process,
    pytest.mark.slow,
]

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload([__name__, "torch._dynamo"])  # which the first step of a process imports


def forked(command: list[object], output: int, errors: int, prepare: Callable[[], None] = lambda: None) -> int:
    """Run a command in a fork of this process with its own session and standard files; return its number."""
    number = os.fork()
    if number == 0:
        _run(command, output, errors, prepare)
    return number


def _run(command: list[object], output: int, errors: int, prepare: Callable[[], None]) -> NoReturn:
    status: object = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)  # a fork has none of its parent's OpenMP threads and would wait for them
        sys.argv = ["fewshot-mahalanobis", *map(str, command)]
        prepare()
        main()
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(status, str):
            print(status, file=sys.stderr)
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


def stop_at(event: str, pattern: str, number: int, pipe: Connection) -> None:
    """Report the n-th operation of a kind, from now on, to the other end of a pipe, and wait for its answer."""

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal number
        if number > 0 and name == event and re.search(pattern, str(arguments[0])):
            number -= 1
            if number == 0:
                pipe.send(None)
                pipe.recv()

    for name in [name for name in sys.modules if event == "import" and re.search(pattern, name)]:
        del sys.modules[name]
    sys.addaudithook(hook)


def interrupted(event: str, pattern: str, *command: object) -> tuple[int, str]:
    """Status and errors of a command that gets Ctrl-C at an operation."""
    ours, its = multiprocessing.Pipe()
    with tempfile.TemporaryFile("w+") as errors, Path(os.devnull).open("w") as nowhere:
        number = forked(
            [*command], nowhere.fileno(), errors.fileno(), lambda: (ours.close(), stop_at(event, pattern, 1, its))
        )
        its.close()
        said = signalled(number, signal.SIGINT, ours)
        status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        errors.seek(0)
        assert said, f"the command ended before the operation: {errors.read()}"
        errors.seek(0)
        return status, errors.read()


def signalled(number: int, sign: int, pipe: Connection) -> bool:
    """Send a signal to the group of a process once it has come to its operation; False if it has ended before."""
    with pipe:
        try:
            pipe.recv()
        except EOFError:
            return False
        os.killpg(number, sign)
        with suppress(BrokenPipeError):
            pipe.send(None)
    return True


def _train(command: list[str], pattern: str, number: int, pipe: Connection, errors: Path) -> NoReturn:
    with errors.open("w") as file, Path(os.devnull).open("w") as nowhere:
        _run([*command], nowhere.fileno(), file.fileno(), lambda: stop_at("open", pattern, number, pipe))


def training_that_gets(sign: int, command: list[str], number: int, errors: Path) -> tuple[int, str]:
    """Status and errors of a training that gets a signal when it opens its log for the n-th time."""
    ours, its = server.Pipe()
    process = server.Process(target=_train, args=(command, r"log\.jsonl$", number, its, errors))
    process.start()
    its.close()
    came = signalled(process.pid or 0, sign, ours)
    process.join(300)
    assert came, f"the training ended before: {errors.read_text()}"
    return process.exitcode or 0, errors.read_text()


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
MOMENTS = {
    "checkpoints list": ("import", r"evaluation\.result_tables$", ["checkpoints", "list"]),
    "fit, reading": ("open", r"/\d\.png$", ["fit", "PHOTOS", "-o", "{}/old", "--checkpoint", "resnet18"]),
    "fit, writing": (
        "os.rename",
        r"\.saving-old",
        ["fit", "PHOTOS", "-o", "{}/old", "--no-cache", "--checkpoint", "resnet18"],
    ),
    "page, writing": ("os.mkdir", r"\.saving-page", ["page", "MODEL", "-o", "{}/page"]),
}


def test_ctrl_c_while_a_command_starts_ends_it_with_130() -> None:
    assert interrupted("import", r"^(typer|fewshot_mahalanobis\.apps\.cli)$", "--help") == (130, "")


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_each_command_with_130_and_leaves_what_was_there(
    moment: str, photos: Path, model: Path, tmp_path: Path
) -> None:
    event, pattern, command = MOMENTS[moment]
    (tmp_path / "old").write_text("old")
    named = {"PHOTOS": photos, "MODEL": model}
    arguments = [named.get(part, part.format(tmp_path)) for part in command]
    status, errors = interrupted(event, pattern, *arguments)
    assert status == 130, errors
    assert "Traceback" not in errors
    assert "Aborted" not in errors
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "old"}


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


@pytest.mark.parametrize(
    "command",
    [["app", "--checkpoint", "resnet18"], ["review", "MODEL", "PHOTOS", "-o", "TABLE"]],
    ids=["app", "review"],
)
def test_ctrl_c_stops_a_server_with_130(command: list[str], photos: Path, model: Path, tmp_path: Path) -> None:
    named = {"PHOTOS": str(photos / "c0"), "MODEL": str(model), "TABLE": str(tmp_path / "checked.csv")}
    arguments = [named.get(part, part) for part in command]
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+") as errors, os.fdopen(reader) as output:
        number = forked([*arguments, "--no-browser"], writer, errors.fileno())
        os.close(writer)
        line = output.readline()
        assert line.startswith("The page is at http"), line
        os.killpg(number, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 130
        errors.seek(0)
        assert "Traceback" not in errors.read()
        assert output.read() == ""


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
    """Where processes load images, they get the signal too."""
    arguments = [*training[command], "-o", str(tmp_path / "run"), "--workers", "1" if command == "pretrain" else "0"]
    number = 2 if command == "meta-train" else 1  # written before it is asked whether to stop, or after
    ended, errors = training_that_gets(sign, arguments, number, tmp_path / "errors")
    assert ended == status, errors
    assert "Traceback" not in errors
    assert saved_step(tmp_path / "run") == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"recipe.json", "log.jsonl", "state.pt"}
    done = CliRunner().invoke(app, [*arguments[:-1], "0"])
    assert done.exit_code == 0, done.output
    assert saved_step(tmp_path / "run") == 3
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_for_the_end_of_a_step_however_often_they_come(sign: int) -> None:
    one = SimpleNamespace(num_processes=1, is_main_process=False)
    came, before = list[int](), signal.signal(sign, lambda number, _: came.append(number))
    try:
        with stopped_between_steps(one) as stop:
            assert not stop()
            for _ in range(3):  # a launcher passes on what the terminal has sent
                signal.raise_signal(sign)
            assert stop()
            assert came == []
        assert came == [sign]
        signal.signal(sign, signal.SIG_IGN)  # by nohup, say
        with stopped_between_steps(one) as stop:
            signal.raise_signal(sign)
            assert not stop()
        with ThreadPoolExecutor(1) as pool:  # which may set no handlers
            assert pool.submit(lambda: stopped_between_steps(one).__enter__()()).result() is False
    finally:
        signal.signal(sign, before)


@pytest.mark.parametrize("command", ["meta-train", "pretrain"])
def test_a_training_that_is_killed_after_its_first_step_keeps_it(
    command: str, training: dict[str, list[str]], tmp_path: Path
) -> None:
    arguments = [*training[command], "-o", str(tmp_path / "run")]
    ended, _ = training_that_gets(signal.SIGKILL, arguments, 2, tmp_path / "errors")
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


ONE_LINE = "error: standard output cannot be written: No space left on device"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_one_line_and_status_1(unbuffered: str) -> None:
    command = [sys.executable, "-m", "fewshot_mahalanobis", "--version"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with full_disk() as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr.splitlines()) == (1, [ONE_LINE])


@pytest.mark.parametrize("command", [["checkpoints", "list"], ["predict", "MODEL", "PHOTOS"]], ids=" ".join)
def test_a_full_disk_behind_what_a_command_prints_in_the_end_is_said_likewise(
    command: list[str], photos: Path, model: Path
) -> None:
    named = {"PHOTOS": photos, "MODEL": model}
    with full_disk() as output, tempfile.TemporaryFile("w+") as errors:
        number = forked([named.get(part, part) for part in command], output, errors.fileno())
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 1
        errors.seek(0)
        assert [line for line in errors.read().splitlines() if not line.startswith("note: ")] == [ONE_LINE]


#: A command like ``predict``: notes on one stream, the answer on the other, and a file.
COMMAND = """\
import sys, warnings
from fewshot_mahalanobis.apps.exit_status import exit_after
def command():
    with open("file", "w") as file:
        warnings.warn("a note")
        print("a note", file=sys.stderr, flush=True)
        sys.stdin.read()
        file.write("content")
    sys.__stdout__ is None and sys.exit("nowhere to write to")
    print("answer")
exit_after(command)
"""
#: Redirection -> status of the command.
REDIRECTED = {
    "2>&-": 0,
    "2>/dev/full": 0,
    "<&-": 0,
    "<&- 2>&-": 0,
    ">&-": 1,
    "<&- >&- 2>&-": 1,
    ">/dev/full 2>&-": 1,
    ">/dev/full 2>/dev/full": 1,
}


@pytest.mark.parametrize("redirected", REDIRECTED)
def test_a_stream_that_is_closed_or_full_costs_a_command_no_more_than_what_goes_there(
    redirected: str, tmp_path: Path
) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no device that is always full")
    (tmp_path / "command.py").write_text(COMMAND)
    command = ["sh", "-c", f'"{sys.executable}" command.py {redirected}']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, input="", check=False)
    status = REDIRECTED[redirected]
    assert (done.returncode, done.stdout) == (status, "" if status else "answer\n")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "content"


def test_a_reader_that_has_gone_is_no_error_to_speak_of() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with tempfile.TemporaryFile("w+") as errors:
        number = forked(["checkpoints", "list"], writer, errors.fileno())
        os.close(writer)
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 1
        errors.seek(0)
        assert errors.read() == ""


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
