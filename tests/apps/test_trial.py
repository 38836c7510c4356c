"""A session of a new user, through the installed command: docs/messy_folders.md shows it, and every line says enough.

``python -m tests.apps.test_trial`` runs it and writes what the commands say into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.example import photographs
from fewshot_mahalanobis.networks import devices

pytestmark = [pytest.mark.docs, pytest.mark.process]

PAGE = Path(__file__).parents[2] / "docs" / "messy_folders.md"
COMMAND = Path(sysconfig.get_path("scripts"), "fewshot-mahalanobis")

#: Each command of the page: its exit status, and what it must say.
SESSION: dict[str, tuple[int, list[str]]] = {
    "fit motifs -o motifs.safetensors --unknown-label unknown": (
        0,
        [
            "Left out: 1 CSV file, 1 MP4 file, 1 TXT file, 1 __MACOSX folder.",
            "No image in class folder 'cloud'.",
            "note: ",
            "motifs.safetensors: 3 classes (flower 5, pagoda 5, trees 5)",
        ],
    ),
    "fit iphone -o iphone.safetensors": (
        1,
        [
            "iphone has no sub-folder with images; at least two are needed, one for each class.",
            '6 HEIC files (pip install "fewshot-mahalanobis[formats]", in a clone pip install ".[formats]", or export',
        ],
    ),
    "fit one -o one.safetensors": (1, ["one has one sub-folder with images, 'flower'; at least two are needed"]),
    "fit damaged -o damaged.safetensors": (
        1,
        ["damaged/trees/5.jpg: ", "1 of 10 images cannot be read", "leave them out with --skip-errors"],
    ),
    "fit damaged -o damaged.safetensors --skip-errors": (
        3,
        ["2 classes (flower 5, trees 4)", "damaged/trees/5.jpg: ", "skipped 1 of 10 images, which cannot be read"],
    ),
    "fti motifs -o motifs.safetensors": (2, ["No such command 'fti'. Did you mean 'fit'?"]),
    "fit motifs -o motifs.safetensors --chekpoint default": (2, ["No such option: --chekpoint", "--checkpoint"]),
    "fit motifs -o motifs.safetensors --checkpoint defualt": (1, ["'defualt'. Did you mean 'default'?"]),
    "fit motifs -o motifs.safetensors --head mahalanobsi": (1, ["one of auto, mahalanobis, ", "got 'mahalanobsi'"]),
    "fit motfis -o motifs.safetensors": (1, ["no folder 'motfis'", "a sub-folder of images for each class"]),
    "fit motifs -o models/motifs.safetensors": (1, ["there is no folder models. Make it first"]),
    "predict motfis.safetensors new": (1, ["motfis.safetensors"]),
    "fit motifs/motifs.csv -o table.safetensors": (0, ["3 classes (flower 5, pagoda 5, trees 5)"]),
    "fit moved/motifs.csv -o table.safetensors": (
        1,
        [
            "none of the 15 files that moved/motifs.csv lists is there",
            "Relative paths start at its folder",
        ],
    ),
    "fit uneven -o uneven.safetensors --report": (
        0,
        [
            "Very different sizes: 'flower' has 3, 'trees' 40.",
            "Leave-one-out accuracy: 42 of 43",
            "Possible wrong labels:\n  uneven/trees/40.jpg (trees): flower is ",
        ],
    ),
    "predict motifs.safetensors new": (
        0,
        ["path,label,checked,", *(f"{kind}.jpg,{kind},,{kind}," for kind in ("flower", "trees"))],
    ),
    "predict motifs.safetensors films": (1, ["folder 'films' holds no image. Left out: 2 MP4 files."]),
    "sort motifs.safetensors new foreign -o sorted": (
        0,
        ["16 images sorted (flower 2, pagoda 2, trees 2, unknown 10)"],
    ),
}


def make_folders(root: Path) -> None:
    """The folders that the page speaks of."""
    heif = pytest.importorskip("pillow_heif", reason="needs the extra formats")
    example = photographs()

    def put(picture: Image.Image, file: str) -> None:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".heic":
            heif.from_pillow(picture).save(path, quality=90)
        else:
            picture.save(path)

    suffixes = {"flower": [".jpg", ".jpeg", ".png", ".webp", ".heic"], "trees": [".jpg"] * 4 + [".avif"]}
    lines = []
    for index, (picture, name) in enumerate(zip(example.support, example.labels, strict=True)):
        number = index % 5 + 1
        file = f"{name}/{number}{suffixes.get(name, ['.JPG'] * 5)[number - 1]}"
        put(picture, f"motifs/{file}")
        lines.append(f"{file};{name}")
        if name == "flower":
            put(picture, f"one/{name}/{number}.jpg")
        if name != "pagoda":
            put(picture, f"damaged/{name}/{number}.jpg")
        if number <= 3 and name != "flower":
            put(picture, f"iphone/{name}/IMG_{number}.HEIC")
    for junk in ("flower/.DS_Store", "flower/._1.jpg", "pagoda/Thumbs.db", "desktop.ini", "__MACOSX/flower/._1.jpg"):
        (root / "motifs" / junk).parent.mkdir(parents=True, exist_ok=True)
        (root / "motifs" / junk).write_bytes(b"junk")
    (root / "motifs" / "trees" / "walk.MP4").write_bytes(b"film")
    (root / "motifs" / "trees" / "notes.txt").write_text("oaks")
    (root / "motifs" / "cloud").mkdir()
    (root / "one" / "trees").mkdir()
    broken = root / "damaged" / "trees" / "5.jpg"
    broken.write_bytes(broken.read_bytes()[:700])
    table = "path;label\r\n" + "\r\n".join(lines)
    (root / "moved").mkdir()
    for folder in ("motifs", "moved"):
        (root / folder / "motifs.csv").write_text(table, encoding="utf-8-sig")
    (root / "films").mkdir()
    for number in (1, 2):
        (root / "films" / f"{number}.mp4").write_bytes(b"film")

    for index, (picture, name) in enumerate(zip(example.queries, example.truth, strict=True)):
        put(picture, f"new/{name}{'-2' * (index % 2)}.jpg")
    digits = load_digits()
    for number in range(10):
        digit = Image.fromarray(np.uint8(255 - 15 * digits.images[number])).resize((96, 96), Image.Resampling.BICUBIC)
        put(digit, f"foreign/{number}.png")
    kinds = dict(zip(example.labels[::-1], example.support[::-1], strict=True))  # the first of each class
    places = [(left, top) for left in range(0, 50, 8) for top in range(0, 50, 8)]  # too far apart to be copies
    for name, chosen in (("flower", places[::20]), ("trees", places[:39])):
        for index, (left, top) in enumerate(chosen):
            put(kinds[name].crop((left, top, left + 60, top + 60)), f"uneven/{name}/{index + 1}.jpg")
    put(Image.open(root / "foreign" / "0.png").convert("RGB"), "uneven/trees/40.jpg")


def run_session(root: Path) -> dict[str, tuple[int, str]]:
    """Exit status and output of every command of the page, in its order.

    Four are processes of their own, as users start them. The others are run here, where PyTorch is imported already, in
    float32, so that every processor gives the same answers.
    """
    make_folders(root)
    (root / "without" / "pillow_heif").mkdir(parents=True)
    (root / "without" / "pillow_heif" / "__init__.py").write_text("raise ImportError('not installed')")
    (root / "home").mkdir()
    environment = {
        "COLUMNS": "80",
        "PYTHONUTF8": "1",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "HF_HOME": str(root / "home"),
    }

    def as_process(arguments: list[str], **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [COMMAND, *arguments],
            cwd=root,
            env={**os.environ, **environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        return done.returncode, done.stdout

    def here(arguments: list[str]) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.chdir(root)
            patch.setattr(devices, "native_bfloat16", lambda device: False)
            warnings.resetwarnings()
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)  # as Python does outside tests
            result = CliRunner(env=environment).invoke(app, arguments)
        return result.exit_code, result.output

    found = {}
    for line in re.findall(r"^\$ fewshot-mahalanobis (.*)", PAGE.read_text(), re.MULTILINE):
        arguments = shlex.split(line)
        if "iphone" in line:
            status, said = as_process(arguments, PYTHONPATH=str(root / "without"))
        elif not found or SESSION.get(line, (0, []))[0] == 2:
            status, said = as_process(arguments)
        else:
            status, said = here(arguments)
        found[line] = status, said.replace(f"{root}{os.sep}", "")
    return found


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    return run_session(tmp_path_factory.mktemp("trial"))


def test_the_page_has_the_whole_session(session: dict[str, tuple[int, str]]) -> None:
    assert list(session) == list(SESSION)


@pytest.mark.parametrize("command", SESSION)
def test_a_command_says_what_its_user_needs(session: dict[str, tuple[int, str]], command: str) -> None:
    (status, said), (expected, sentences) = session[command], SESSION[command]
    assert status == expected, said
    for sentence in sentences:
        assert sentence in said
    assert "Traceback" not in said
    assert "Warning" not in said


def test_the_page_shows_what_the_commands_say(session: dict[str, tuple[int, str]]) -> None:
    """But for figures that differ between machines, other suspects, and typing errors, which another library words."""

    def bare(text: str) -> str:
        text = re.sub(r"\n  uneven/(?!trees/40).*", "", text)  # which crops are a little odd depends on rounding
        text = re.sub(r"\d+ of 43 (?=support|images)|(?<=count as )\d+|(?<=counts all as )\d+", "#", text)  # likewise
        return re.sub(r"\d\.\d+|\d+%|\d+ bytes|\d+ times|must be one of .*", "#", text)

    ours = {command: found for command, found in session.items() if found[0] != 2}
    assert bare(with_output(PAGE.read_text(), ours)) == bare(PAGE.read_text()), (
        "python -m tests.apps.test_trial mends it"
    )


def with_output(page: str, session: dict[str, tuple[int, str]]) -> str:
    """The page with what each command says below it."""
    for command, (_, said) in session.items():
        line = f"$ fewshot-mahalanobis {command}\n"
        shown = "".join(f"{part.rstrip()}\n" for part in said.splitlines())
        pattern = re.compile(re.escape(line) + r"(?:(?!\$ |```).*\n)*")
        page = pattern.sub(lambda _, text=line + shown: text, page)
    return page


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    PAGE.write_text(with_output(PAGE.read_text(), run_session(folder)))
    shutil.rmtree(folder)
