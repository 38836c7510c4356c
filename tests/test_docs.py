"""The documentation: its code runs, its commands exist, and every public name is documented."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pydoc
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import hypothesis
import numpy as np
import pytest
import timm
import typer.main
import yaml
from PIL import Image
from safetensors.torch import save
from typer.testing import CliRunner

import fewshot_mahalanobis
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.research.data.layouts import class_split
from fewshot_mahalanobis.research.evaluation.paper_figures import published_figure
from fewshot_mahalanobis.research.evaluation.result import Result
from fewshot_mahalanobis.support_set.unknown import SIMILARITIES
from tests.checkpoints.checkpoint_server import hub_on_this_machine
from tests.research.data import trees

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in BLOCK.findall(page.read_text()) if name == language]


def commands() -> Iterator[tuple[Path, str]]:
    """Every shell command of every page, but those with typing errors, which tests/apps/test_trial.py runs."""
    for page in PAGES:
        if page.stem == "messy_folders":
            continue
        for block in blocks(page, "sh"):
            yield from ((page, line) for line in block.replace("\\\n", " ").splitlines() if line.strip())
        for block in blocks(page, "console"):
            yield from ((page, line[2:]) for line in block.splitlines() if line.startswith("$ "))


@pytest.fixture
def folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the pages speak of: two classes in ``support``, and ``new``."""
    rng = np.random.default_rng(0)
    for name, colour in {"support/cat": (200, 120, 40), "support/dog": (40, 80, 200), "new": (190, 120, 60)}.items():
        (tmp_path / name).mkdir(parents=True)
        for index in range(3):
            pixels = np.clip(np.array(colour) + rng.normal(0, 30, (60, 80, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return tmp_path


def build_data_sets(folder: Path) -> None:
    """What the page on data sets opens: a zip of two classes, and two data sets in their real layouts."""
    shutil.make_archive(str(folder / "photos" / "cats"), "zip", folder / "support")
    trees.cu_birds(folder / "data")
    classes = list(class_split("ilsvrc_2012")["train"])
    trees.class_folders(folder / "data" / "ILSVRC2012_img_train", classes, "{name}_{i}.JPEG")


@pytest.fixture
def the_same_examples_every_time() -> Iterator[None]:
    """A page's search for counterexamples is the same in every run: long random ones are test_properties' business."""
    hypothesis.settings.register_profile("before", hypothesis.settings())
    hypothesis.settings.register_profile("pages", derandomize=True, max_examples=10)
    hypothesis.settings.load_profile("pages")
    yield
    hypothesis.settings.load_profile("before")


@pytest.fixture
def the_terms_of_the_outlier_score() -> Iterator[None]:
    """Those of the package, again after a page has added one."""
    kept = SIMILARITIES[:]
    yield
    SIMILARITIES[:] = kept


@pytest.mark.usefixtures("the_same_examples_every_time", "the_terms_of_the_outlier_score")
@pytest.mark.filterwarnings("ignore:.*wordnet:UserWarning")  # ImageNet's hierarchy, which the page tells of
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, folder_of_a_user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.stem == "data":
        build_data_sets(folder_of_a_user)
    names: dict[str, Any] = {}
    with hub_on_this_machine(monkeypatch, folder_of_a_user / "cache") as hub:
        if page.stem == "backbones":  # random weights for the network of timm that the page names
            weights = save(timm.create_model("resnet18").state_dict())
            hub.commit("timm/resnet18.a1_in1k", {"model.safetensors": weights})
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("heading", ["Add a head", "Add a backbone", "Add an outlier score", "Add a data source"])
def test_each_way_to_extend_the_package_takes_about_ten_lines(heading: str) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    code = BLOCK.findall(section)[0][1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_the_head_of_the_contributing_page_has_the_properties_of_heads() -> None:
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "CONTRIBUTING.md", "python")[0], names)
    few = hypothesis.settings(max_examples=5, derandomize=True, deadline=None)
    names["check_head"](lambda width: names["ChebyshevHead"](), without=["rotation_changes_nothing"], settings=few)


def test_the_first_picture_is_what_its_script_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    script = importlib.import_module("first_task")
    classifier = script.draw(tmp_path / "drawn.png")
    queries, truth = script.pieces(script.QUERIES)
    assert classifier.predict(queries).tolist() == truth
    drawn, kept = (
        np.asarray(Image.open(path).convert("L"), float) for path in (tmp_path / "drawn.png", script.PICTURE)
    )
    assert drawn.shape == kept.shape
    assert np.abs(drawn - kept).mean() < 2  # of 255: probabilities in the titles may differ in a digit
    assert script.PICTURE.stat().st_size < 100_000


def test_no_query_of_the_first_picture_shares_a_pixel_with_a_support_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    script = importlib.import_module("first_task")
    support, queries = (
        [script.Square(*square) for of_class in squares.values() for square in of_class]
        for squares in (script.SUPPORT, script.QUERIES)
    )
    assert len(support) == 25
    for one in support:
        for other in queries:
            apart = max(other.left - one.left - one.side, one.left - other.left - other.side)
            below = max(other.top - one.top - one.side, one.top - other.top - other.side)
            assert one.photograph != other.photograph or max(apart, below) >= 0, (one, other)


def test_the_papers_table_is_what_the_command_prints_beside_ones_own() -> None:
    table = (ROOT / "docs" / "table_1.md").read_text().split("<!-- paper -->")[1].split("<!-- end of paper -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if "±" in line]
    (block,) = blocks(ROOT / "docs" / "table_1.md", "sh")
    assert [name.replace("/", ":") for name, *_ in rows] == re.findall(r"\w+:test", block)
    for source, *shown in rows:
        row = Result(source=source, way=None, shot=None, protocol="variable")
        figures = [published_figure(method, row) for method in ("Simple CNAPS", "Simple AR-CNAPS")]
        assert [str(figure) for figure in figures] == shown


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fewshot_mahalanobis.__version__
    assert citation["preferred-citation"]["title"] == "Improved Few-Shot Visual Classification"


def test_every_link_to_a_file_of_the_repository_leads_to_one() -> None:
    """The site's builder checks the links between its own pages; records and README have links of their own."""
    pages = [*PAGES, *(ROOT / "benchmarks" / "results").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text())]
    for page, link in links:
        if not link.startswith("auto_examples/"):  # made when the site is built
            assert (page.parent / link).exists(), f"{page}: {link}"
    assert {page for page, _ in links} >= {ROOT / "README.md", ROOT / "benchmarks" / "results" / "README.md"}


def test_what_pages_install_is_in_the_clone_and_its_extras_exist() -> None:
    """Nothing is on the package index yet, so ``pip install fewshot-mahalanobis`` finds nothing."""
    transcript = ROOT / "docs" / "messy_folders.md"  # shows messages, which name both ways
    known = set(metadata.metadata("fewshot-mahalanobis").get_all("Provides-Extra") or ())
    named = set()
    for page in PAGES:
        commands_of_page = re.findall(r"pip install ([^`\n&]*)", page.read_text())
        if page != transcript:
            assert not [command for command in commands_of_page if "fewshot-mahalanobis" in command], page
        for command in commands_of_page:
            named |= {extra for extras in re.findall(r"\.\[([\w,]+)\]", command) for extra in extras.split(",")}
    assert {"demo", "test", "hub"} <= named <= known


def test_pages_hold_no_code_of_a_language_that_is_not_tested() -> None:
    known = {"python", "sh", "console"}
    for page in PAGES:
        assert {name for name, _ in BLOCK.findall(page.read_text())} <= known, page


def test_every_command_and_option_on_a_page_exists() -> None:
    """Parsed as click parses them, without running them."""
    root = typer.main.get_command(app)
    seen = set()
    for page, line in commands():
        line = re.split(r"\s[>|]\s", line)[0].split("&&")[-1].strip()
        program, *words = shlex.split(line)
        if Path(program).name != "fewshot-mahalanobis":
            assert program in ("pip", "python3") or program.endswith("python"), f"{page}: {line}"
            continue
        command, context = root, click.Context(root, info_name="fewshot-mahalanobis")
        while hasattr(command, "commands"):
            name, *words = words
            assert name in command.commands, f"{page}: there is no command {name!r}"
            command = command.commands[name]
        try:
            command.make_context(command.name, list(words), parent=context)
        except Exception as error:
            raise AssertionError(f"{page}: {line}: {error}") from error
        seen.add(command.name)
    assert {"demo", "fit", "predict", "pretrain", "meta-train", "evaluate", "list", "show"} <= seen


@pytest.mark.filterwarnings("ignore:6 left-out examples")  # the folder has as few images
@pytest.mark.parametrize("name", ["cli", "unknown_classes"])
def test_commands_that_fit_predict_and_tell_of_checkpoints_run_as_they_stand(name: str, folder_of_a_user: Path) -> None:
    Path("more").mkdir()
    shutil.copy("new/0.jpg", "more/cat.jpg")
    Path("labels.csv").write_text("path,label\nsupport/cat/0.jpg,cat\nsupport/dog/0.jpg,dog\n")
    ran = []
    for page, line in commands():
        program, command, *_ = words = shlex.split(line)
        if page.stem != name or program != "fewshot-mahalanobis" or command not in ("fit", "predict", "checkpoints"):
            continue
        (*arguments, last), file = words[1:], None
        if ">" in arguments:
            arguments, file = arguments[: arguments.index(">")], last
            last = ""
        result = CliRunner().invoke(app, [*arguments, *([last] if last else [])])
        assert result.exit_code == 0, f"{line}: {result.output}"
        if file is not None:
            Path(file).write_text(result.stdout)
        ran.append(command)
    assert {"fit", "predict"} <= set(ran)
    assert len(Path("labels.csv").read_text().splitlines()) >= 4  # as `predict` wrote it


def test_every_command_is_in_the_page_of_the_command_line() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"`{name}" in page


def test_first_steps_go_from_a_folder_to_a_table_of_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transcript of the page, in an empty folder; numbers in what is printed may differ."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "start.md"
    exec(blocks(page, "python")[0], {})
    transcripts = "".join(blocks(page, "console"))
    steps = re.findall(r"^\$ fewshot-mahalanobis (.*)\n((?:(?!\$ ).*\n)*)", transcripts, re.MULTILINE)
    assert len(steps) <= 5
    for command, shown in steps:
        arguments, *file = command.split(" > ")
        result = CliRunner().invoke(app, shlex.split(arguments))
        assert result.exit_code == 0, result.output
        if file:
            Path(file[0]).write_text(result.stdout)
        else:
            number = re.compile(r"\d+")
            assert number.sub("#", result.stdout) == number.sub("#", shown)
    table = Path("labels.csv").read_text().split()
    assert table[0] == "path,label"
    assert len(table) == 1 + len(list(Path("new").iterdir()))
    notebook = blocks(page, "python")[1]
    assert len([line for line in notebook.splitlines() if line.strip()]) <= 8


def public_names() -> list[str]:
    """Every exported name, and every method and property that an exported class itself defines."""
    plotting = pytest.importorskip("fewshot_mahalanobis.plotting")
    names = []
    for module in (fewshot_mahalanobis, plotting):
        for name in module.__all__:
            names.append(f"{module.__name__}.{name}")
            if inspect.isclass(value := getattr(module, name)):
                # set_..._request are scikit-learn's, made for its metadata routing and documented there
                own = (m for m in vars(value) if not m.startswith("_") and not m.endswith("_request"))
                members = (m for m in own if callable(getattr(value, m)))
                names += [f"{module.__name__}.{name}.{member}" for member in members]
    return names


def reference_names() -> list[str]:
    """What the page of the reference lists."""
    names, module = [], ""
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if found := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
            module = found[1]
        elif found := re.fullmatch(r"   (\w[\w.]*)", line):
            names.append(f"{module}.{found[1]}")
    return names


def test_numpydoc_finds_every_public_name_documented() -> None:
    validate = pytest.importorskip("numpydoc.validate").validate
    # Not asked for: sections that repeat what stands elsewhere (extended summary, See Also, examples), an imperative
    # first word ("Class means (k, d) of ..." says more than "Return ..."), a capital where a symbol comes first.
    style = {"ES01", "SA01", "SA03", "EX01", "SS05", "PR08"}
    # A method may say all in one sentence that gives shapes: "Logits (m, k) of query features (m, d)."
    short = {"PR01", "PR07", "RT01", "RT03", "YD01"}
    assert set(reference_names()) - set(public_names())  # functions of modules that are imported by name
    for name in dict.fromkeys([*public_names(), *reference_names()]):
        is_method = name.rsplit(".", 1)[0].rsplit(".", 1)[-1][:1].isupper()
        # nn.Module's own (*args, **kwargs), where a class without parameters inherits the constructor
        found = [(code, text) for code, text in validate(name)["errors"] if "*args" not in text]
        allowed = style | short if is_method else style | {"PR07"}
        if dataclasses.is_dataclass(pydoc.locate(name)):
            allowed |= {"PR01"}  # its attributes are its parameters
        assert not [error for error in found if error[0] not in allowed], name


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name in public_names():
        if name.rsplit(".", 1)[0] in ("fewshot_mahalanobis", "fewshot_mahalanobis.plotting"):
            assert re.search(rf"^   {name.rsplit('.', 1)[1]}$", page, re.MULTILINE), name


def test_every_page_and_every_gallery_script_is_in_the_site() -> None:
    toctrees = [
        toctree
        for page in (ROOT / "docs").glob("*.md")
        for toctree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= set(" ".join(toctrees).split())
    for script in (ROOT / "examples").glob("*.py"):
        assert script.name.startswith("plot_"), f"{script.name}: sphinx-gallery runs plot_*.py alone"
        compile(script.read_text(), script, "exec")
