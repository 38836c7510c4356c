"""docs/label_correct_repeat.md and label_unknown.md: their code and commands run in order and print what is shown.

``python -m tests.apps.test_label_correct_repeat`` runs them and writes what they print into the pages.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.session import Session
from fewshot_mahalanobis.images.folders import read_labels
from fewshot_mahalanobis.networks import devices

pytestmark = pytest.mark.docs

PAGE, UNKNOWN = (
    Path(__file__).parents[2] / "docs" / f"{name}.md" for name in ("label_correct_repeat", "label_unknown")
)
#: A part of the page that runs: code and the lines that it prints, commands, answers to `review` and in the app.
PART = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?P<printed>(?:\n(?: {4}[^\n]*\n)+)?)"
    r"|^```console\n(?P<commands>.*?)^```\n"
    r"|^<!-- review -->\n(?P<review>.*?)^<!-- end of review -->\n"
    r"|^<!-- app -->\n(?P<app>.*?)^<!-- end of app -->\n",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"\d+")
#: Counts may differ by so many pictures where a processor rounds otherwise.
ROUNDING = 3


def run_code(code: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), names)
    return printed.getvalue()


def run_command(line: str) -> str:
    """What a command leaves on the screen; standard output may go to a file."""
    arguments, _, file = line.removeprefix("$ fewshot-mahalanobis ").partition(" > ")
    result = CliRunner().invoke(app, shlex.split(arguments))
    assert result.exit_code == 0, result.output
    if file:
        Path(file).write_text(result.stdout)
    return result.stderr if file else result.output


def shown(session: Session) -> dict[str, str]:
    """File -> the label that the page shows: the user's, else the classifier's."""
    found = {}
    for number, picture in session.pictures.items():
        answer = session.answer(number)
        if (label := session.labels.get(number, answer and answer.label)) is not None:
            found[picture.name] = label
    return found


def right_labels(names: dict[str, Any], session: Session) -> int:
    return sum(label == names["right_label"](file) for file, label in shown(session).items() if "-is-" in file)


def answer_review(names: dict[str, Any], sentence: str) -> str:
    """What `review` says about the folder."""
    start = SimpleCNAPSClassifier.load("round-1.safetensors", device="cpu")
    session = Session(start, sorted(Path("unlabelled").iterdir()), Path("checked.csv"))
    return answered(names, sentence, session)


def press_in_the_app(names: dict[str, Any], sentence: str) -> str:
    """What the app says about pictures that were dropped."""
    session = Session(load_checkpoint("default"), device="cpu")
    for folder in sorted(Path("digits").iterdir()):
        session.add([(file, file.name) for file in folder.iterdir()], folder.name)
    session.add([(file, str(file)) for file in sorted(Path("unlabelled").iterdir())])
    return answered(names, sentence, session)


def answered(names: dict[str, Any], sentence: str, session: Session) -> str:
    """Answer thirty questions; the sentence with the numbers of right labels before, after fifteen, and after all."""
    right = [right_labels(names, session)]
    for _ in range(2):
        for _ in range(15):
            asked = session.next_picture()
            assert asked is not None
            session.label([asked], names["right_label"](session.pictures[asked].name))
        right.append(right_labels(names, session))
    return with_counts(sentence, right)


def with_counts(sentence: str, counts: list[int]) -> str:
    numbers = iter(counts)
    return re.sub(r"\d+(?= of 100|,|\.)", lambda _: str(next(numbers)), sentence)


def as_it_runs(page: Path) -> str:
    """A page, with what everything on it prints; works in the current folder."""
    names: dict[str, Any] = {}

    def run(part: re.Match[str]) -> str:
        if part["review"] is not None:
            return part[0].replace(part["review"], answer_review(names, part["review"]))
        if part["app"] is not None:
            return part[0].replace(part["app"], press_in_the_app(names, part["app"]))
        if part["code"] is not None:
            printed = "".join(f"    {line}\n" for line in run_code(part["code"], names).splitlines())
            return f"```python\n{part['code']}```\n" + (f"\n{printed}" if printed else "")
        lines = [line for line in part["commands"].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"{line}\n{run_command(line)}" for line in lines) + "```\n"

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(devices, "native_bfloat16", lambda device: False)
        warnings.simplefilter("ignore")  # as on a screen, the commands say themselves what there is to remark
        return PART.sub(run, page.read_text())


def as_shown(page: Path) -> str:
    """A page as it runs, once it is sure that it shows the same but for roundings; works in the current folder."""
    shown, found = page.read_text(), as_it_runs(page)
    assert NUMBER.sub("#", found) == NUMBER.sub("#", shown), "python -m tests.apps.test_label_correct_repeat mends it"
    difference = np.array(NUMBER.findall(found), int) - np.array(NUMBER.findall(shown), int)
    assert np.abs(difference).max() <= ROUNDING
    return found


def test_three_rounds_go_as_the_page_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = as_shown(PAGE)
    for way in (
        r"labels-\d.csv: (\d+) of 100 right",
        r"round \d: (\d+) of",
        r"answer (\d+) of .* fifteen (\d+), after thirty (\d+)",
    ):
        right = [int(count) for match in re.finditer(way, found) for count in match.groups()]
        assert len(right) == (6 if "answer" in way else 3)  # in review and in the app
        for before, one, two in zip(right[::3], right[1::3], right[2::3], strict=True):
            assert before + 10 < one < two  # a round is worth it


def test_rounds_with_unknown_pictures_go_as_their_page_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    right = [int(count) for count in re.findall(r"doubts-\d.csv: (\d+) right", as_shown(UNKNOWN))]
    assert len(right) == 4
    assert right[0] + 10 < right[1] < right[2] < right[3]


def test_the_code_that_checks_a_table_looks_at_rejected_pictures_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = [part["code"] for part in PART.finditer(PAGE.read_text()) if part["code"] and "def check" in part["code"]]
    names: dict[str, Any] = {"Path": Path}
    exec(compile(code.rpartition("check(")[0], str(PAGE), "exec"), names)
    rows = [f"{i}-is-7.png,7,,7,0.{10 + i}" for i in range(20)] + [f"{i}-is-8.png,none,,none," for i in (20, 21)]
    Path("labels.csv").write_text("path,label,checked,predicted,probability\n" + "\n".join(rows) + "\n")
    names["check"]("labels.csv")
    Path("0-is-7.png").touch()  # for a table of which nothing is there is refused
    read = read_labels(Path("labels.csv"), rows="checked")
    assert [path.name for path in read.images] == [f"{i}-is-7.png" for i in range(13)] + ["20-is-8.png", "21-is-8.png"]
    assert read.labels == ["7"] * 13 + ["8"] * 2


if __name__ == "__main__":
    for page in (PAGE, UNKNOWN):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            text = as_it_runs(page)
        page.write_text(text)
