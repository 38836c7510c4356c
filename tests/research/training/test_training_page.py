"""The page on training: its commands parse, its files of settings are recipes, its costs are those measured."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import click
import pytest
import typer.main

from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.research.data.datasets import DATA_SETS
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, PretrainRecipe, read_recipe

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "training.md"


def indented_blocks(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", text, flags=re.MULTILINE)]


def launches():
    blocks = "\n".join(indented_blocks(PAGE)).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line.startswith("accelerate launch")]


def test_the_launches_have_options_that_accelerate_and_the_command_know():
    launch = pytest.importorskip("accelerate.commands.launch")
    commands = typer.main.get_command(app).commands
    page = " ".join(PAGE.read_text().split())
    (one,) = launches()
    (more,) = re.findall(r"`(--num_processes 16 .*?)`", page)
    several = re.sub(r"--num_processes \d+ --num_machines 1", more, one)
    for line, processes in ((one, 8), (several, 16)):
        options = launch.launch_command_parser().parse_args(shlex.split(line)[2:])
        assert options.multi_gpu
        assert options.module
        assert options.num_processes == processes
        assert options.training_script == "fewshot_mahalanobis"
        name, *arguments = options.training_script_args
        context = commands[name].make_context(name, list(arguments), parent=click.Context(click.Group()))
        assert (ROOT / context.params["config"]).is_file()
        assert MetaTrainRecipe(("a",), "b").on_device("cuda").tasks_per_step % options.num_processes == 0


def rows_below(text: str, title: str) -> list[list[str]]:
    """Cells of the table whose title starts so, without the header."""
    _, section = re.split(rf"^### {title}.*\n\n", text, flags=re.MULTILINE)
    table = section[: section.index("\n\n")].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_file_of_settings_is_a_recipe(tmp_path):
    (file,) = [block for block in indented_blocks(PAGE) if not block.startswith("accelerate")]
    (tmp_path / "recipe.toml").write_text(file)
    read_recipe(MetaTrainRecipe, tmp_path / "recipe.toml")


def test_the_recipe_for_meta_dataset_has_the_papers_settings_and_names_data_sets():
    paper = read_recipe(MetaTrainRecipe, ROOT / "recipes" / "meta_dataset" / "2_adaptation.toml")
    backbone = read_recipe(PretrainRecipe, ROOT / "recipes" / "meta_dataset" / "1_backbone.toml")
    for source in (*paper.sources, *paper.validation, *backbone.sources, backbone.validation):
        name, split = source.split(":")
        assert DATA_SETS[name].splits[split]
    assert MetaTrainRecipe(paper.sources, paper.backbone, paper.validation, root=paper.root) == paper


def test_the_extrapolated_costs_are_computed_from_those_of_the_benchmark():
    text = (ROOT / "benchmarks" / "results" / "speed.md").read_text()
    costs, episodes = rows_below(text, "What an image of a training task costs"), rows_below(text, "Training episodes")
    (_, support_flops, support_held), (_, query_flops, query_held) = costs
    _, _, support, query = episodes[-1]
    record = " ".join(text.split())
    assert f"costs {support_flops} GFLOP in a training step and holds {support_held} for the gradient" in record
    assert f"one more query image costs {query_flops} GFLOP and {query_held}" in record
    assert f"an episode has on average {support} support and {query} query images" in record
    of_a_task = 1e9 * (int(support) * float(support_flops) + int(query) * float(query_flops))
    assert f"{support} x {support_flops} + {query} x {query_flops} GFLOP | {of_a_task / 1e12:.1f} TFLOP |" in record
    of_all = MetaTrainRecipe.tasks * of_a_task
    assert f"{MetaTrainRecipe.tasks:,} tasks | | {of_all / 1e17:.1f} x 10^17 |" in record
    hours = 1.1 * of_all / 30e12 / 3600  # with validations
    page = " ".join(PAGE.read_text().split())
    assert f"{MetaTrainRecipe.tasks:,} tasks take about {hours:.1f} hours of computing" in page
