"""docs/label_correct_repeat.md: its code and its commands run in their order and print what the page shows.

``python -m tests.apps.test_label_correct_repeat`` runs them and writes what they print into the page.
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
from fewshot_mahalanobis.apps.review import Review
from fewshot_mahalanobis.apps.session import Session
from fewshot_mahalanobis.networks import devices

PAGE = Path(__file__).parents[2] / "docs" / "label_correct_repeat.md"
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


def answer_review(names: dict[str, Any], sentence: str) -> str:
    """Answer thirty questions; the sentence with the numbers of right labels."""
    review = Review(
        SimpleCNAPSClassifier.load("round-1.safetensors", device="cpu"),
        sorted(Path("unlabelled").iterdir()),
        Path("checked.csv"),
    )
    right = []
    for answered in range(31):
        if answered % 15 == 0:
            labels = [review.answer(picture).label for picture in range(len(review.paths))]
            truth = [names["right_label"](str(path)) for path in review.paths]
            right.append(sum(map(str.__eq__, labels, truth)))
        if answered < 30:
            asked = review.next_picture()
            assert asked is not None
            review.label([asked], names["right_label"](str(review.paths[asked])))
    return with_counts(sentence, right)


def press_in_the_app(names: dict[str, Any], sentence: str) -> str:
    """Press what fifteen pictures are and learn, twice; the sentence with the numbers of right labels."""
    session = Session(load_checkpoint("default"), device="cpu")
    for folder in sorted(Path("digits").iterdir()):
        session.add(folder.name, [str(file) for file in folder.iterdir()])
    files = sorted(map(str, Path("unlabelled").iterdir()))
    session.ask(files)
    truth = {picture: names["right_label"](file) for picture, file in zip(session.queries, files, strict=True)}
    right = list[int]()
    for known in (0, 15, 30):
        assert len(session.answers) == 100 - known
        answers = [(answer.label, answer.unknown, truth[answer.picture]) for answer in session.answers]
        right.append(known + sum(label == true and not unknown for label, unknown, true in answers))
        for answer in session.ranked()[:15]:
            session.mark(answer.picture.number, truth[answer.picture])
        session.learn()
    return with_counts(sentence, right)


def with_counts(sentence: str, counts: list[int]) -> str:
    numbers = iter(counts)
    return re.sub(r"\d+(?= of 100|,|\.)", lambda _: str(next(numbers)), sentence)


def page_as_it_runs() -> str:
    """The page, with what everything on it prints; works in the current folder."""
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
        return PART.sub(run, PAGE.read_text())


def test_three_rounds_go_as_the_page_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown, found = PAGE.read_text(), page_as_it_runs()
    assert NUMBER.sub("#", found) == NUMBER.sub("#", shown), "python -m tests.apps.test_label_correct_repeat mends it"
    difference = np.array(NUMBER.findall(found), int) - np.array(NUMBER.findall(shown), int)
    assert np.abs(difference).max() <= ROUNDING
    for way in (
        r"labels-\d.csv: (\d+) of 100 right",
        r"round \d: (\d+) of",
        r"answer (\d+) of .* fifteen (\d+), after thirty (\d+)",
        r"press (\d+) of .* fifteen (\d+), after thirty (\d+)",
    ):
        right = [int(count) for match in re.finditer(way, found) for count in match.groups()]
        assert len(right) == 3
        assert right[0] + 10 < right[1] < right[2]  # a round is worth it


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        page = page_as_it_runs()
    PAGE.write_text(page)
