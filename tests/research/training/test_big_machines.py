"""The page on big machines: its commands parse, its files of settings are recipes, its figures are those measured."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import click
import pytest
import typer.main

from benchmarks.record import Record
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.research.data.datasets import DATA_SETS
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, PretrainRecipe, read_recipe

PAGES = [Path(__file__).parents[3] / "docs" / name for name in ("big_machines.md", "training.md")]


def indented_blocks(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", text, flags=re.MULTILINE)]


def launches():
    blocks = "\n".join(indented_blocks(PAGES[0])).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line.startswith("accelerate launch")]


def test_every_launch_has_options_that_accelerate_and_the_command_know():
    launch = pytest.importorskip("accelerate.commands.launch")
    commands = typer.main.get_command(app).commands
    assert len(launches()) == 3
    for line in launches():
        options = launch.launch_command_parser().parse_args(shlex.split(line)[2:])
        assert options.multi_gpu
        assert options.module
        assert options.training_script == "fewshot_mahalanobis"
        name, *arguments = options.training_script_args
        context = commands[name].make_context(name, list(arguments), parent=click.Context(click.Group()))
        assert context.params["config"] is not None
        assert MetaTrainRecipe.tasks_per_step % options.num_processes == 0


def test_every_file_of_settings_is_a_recipe(tmp_path):
    files = [block for page in PAGES for block in indented_blocks(page) if not block.startswith("accelerate")]
    assert len(files) == 3
    recipes = []
    for text, kind in zip(files, (PretrainRecipe, MetaTrainRecipe, MetaTrainRecipe), strict=True):
        (tmp_path / "recipe.toml").write_text(text)
        recipes.append(read_recipe(kind, tmp_path / "recipe.toml"))
    _, paper, _ = recipes
    for source in paper.sources + paper.validation:
        name, split = source.split(":")
        assert DATA_SETS[name].splits[split]
    assert MetaTrainRecipe(paper.sources, paper.backbone, paper.validation, root=paper.root) == paper


def test_the_costs_on_the_page_are_those_of_the_benchmark():
    tables = {table.title: table.rows for table in Record("meta_training").read().tables}
    [costs] = (rows for title, rows in tables.items() if title.startswith("What an image of a training task costs"))
    [episodes] = (rows for title, rows in tables.items() if title.startswith("Training episodes"))
    page = " ".join(PAGES[0].read_text().split())
    (_, support_flops, support_held), (_, query_flops, query_held) = costs
    assert f"support image of 84 x 84 pixels costs {support_flops} GFLOP" in page
    assert f"holds {support_held} for the gradient" in page
    assert f"One more query image costs {query_flops} GFLOP and {query_held}" in page
    _, ways, support, query = episodes[-1]
    assert f"an episode has on average {ways} ways, {support} support and {query} query images" in page
    assert f"{support} x {support_flops} + {query} x {query_flops} GFLOP" in page
