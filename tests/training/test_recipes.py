"""Recipes from TOML files and the command line: what wins, and what is refused by name."""

from __future__ import annotations

import dataclasses
import inspect

import click
import pytest
import typer.main
from typer.testing import CliRunner

from fewshot_mahalanobis.cli import _MODEL_OPTIONS, app
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.training import recipes
from fewshot_mahalanobis.training.recipes import MetaTrainRecipe, PretrainRecipe, read_settings

COMMANDS = {"pretrain": PretrainRecipe, "meta-train": MetaTrainRecipe}


@pytest.fixture
def asked(monkeypatch):
    """What the commands would train, in place of training."""
    recipes_seen = []
    for name in ("pretrain", "meta_train"):
        module = __import__(f"fewshot_mahalanobis.training.{name}", fromlist=[name])
        monkeypatch.setattr(module, name, lambda recipe, output, **options: recipes_seen.append((recipe, options)))
    return recipes_seen


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_file_sets_what_the_command_line_does_not(tmp_path, asked):
    (tmp_path / "paper.toml").write_text(
        """
        sources = ["a.zip", "b.zip"]
        backbone = "backbone.safetensors"
        tasks = 320
        learning_rate = 1
        phases = [[0.5, 64], [0.5, 84]]
        lite = 40

        [model]
        head = "euclidean"
        scale = 0.5
        """
    )
    options = ("--tasks", 110_000, "--scale", 2, "--episodes", "fixed", "--seed", 0)  # a default, given, wins too
    result = run("meta-train", "--config", tmp_path / "paper.toml", "-o", tmp_path, *options)
    assert result.exit_code == 0, result.output
    [(recipe, _)] = asked
    assert recipe == MetaTrainRecipe(
        ("a.zip", "b.zip"),
        "backbone.safetensors",
        model={"head": "euclidean", "scale": 2.0},
        learning_rate=1.0,
        episodes="fixed",
        phases=((0.5, 64), (0.5, 84)),
        lite=40,
    )


def test_without_a_file_all_is_on_the_command_line(tmp_path, asked):
    arguments = ("a.zip", "glyphs", "glyphs", "--validation", "v.zip", "--validation", "w.zip", "--backbone", "b")
    options = ("--no-task-covariance", "--precision", "float32", "--workers", 3, "--lazy", "--tensorboard")
    result = run("meta-train", *arguments, "-o", tmp_path, *options)
    assert result.exit_code == 0, result.output
    [(recipe, settings)] = asked
    sources = ("a.zip", "glyphs", "glyphs")
    model = {"task_covariance": False}
    assert recipe == MetaTrainRecipe(sources, "b", ("v.zip", "w.zip"), model, precision="float32")
    assert settings == {"device": "auto", "workers": 3, "lazy": True, "tensorboard": True}
    assert result.stdout.split() == [str(tmp_path / "best")]
    run("pretrain", "a.zip", "-o", tmp_path, "--peak-lr", 0.3)
    assert asked[1][0] == PretrainRecipe(("a.zip",), peak_lr=0.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = 3", "unknown key 'task', did you mean 'tasks'?"),
        ("whatever = 3", "unknown key 'whatever' (keys are sources, "),
        ("tasks = '3'", "tasks must be of type int, not '3'"),
        ("tasks = true", "tasks must be of type int, not True"),
        ("learning_rate = [1]", "learning_rate must be of type float, not [1]"),
        ("phases = [[0.5, 64.0]]", "phases must be of type int, not 64.0"),
        ("sources = 'a.zip'", "sources must be of type tuple[str, ...], not 'a.zip'"),
        ("lite = 'a'", "lite must be of type int | None, not 'a'"),
        ("tasks = ", "is not TOML"),
        ("sources = ['a']", "no backbone given"),
        ("sources = []\nbackbone = 'b'", "sources is empty"),
        ("sources = ['a']\nbackbone = 'b'\nschedule = 'linear'", "schedule must be 'constant' or 'cosine'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_name_of_the_key(text, message, tmp_path, asked):
    (tmp_path / "recipe.toml").write_text(text)
    result = run("meta-train", "--config", tmp_path / "recipe.toml", "-o", tmp_path / "run")
    assert result.exit_code == 1
    assert message in result.stderr
    assert "recipe.toml" in result.stderr or message.split()[0] in ("no", "sources", "schedule")
    assert not asked


def test_every_option_of_the_commands_has_the_default_of_the_recipe_or_model():
    model = inspect.signature(SimpleCNAPS).parameters
    for command, recipe in COMMANDS.items():
        context = click.Context(typer.main.get_command(app).commands[command])
        options = {p.name: p.get_default(context) for p in context.command.params}
        fields = {f.name: f.default for f in dataclasses.fields(recipe)}
        for name, default in options.items():
            if name in _MODEL_OPTIONS and command == "meta-train":
                assert default == model[name].default, name
            elif name in fields and default is not None:
                assert getattr(default, "value", default) == fields[name], name
        known = {*fields, *_MODEL_OPTIONS} | {"output", "config", "device", "workers", "lazy", "tensorboard"}
        assert set(options) - known == set()


def test_choices_on_the_command_line_are_those_of_the_recipe():
    from fewshot_mahalanobis import cli

    for choices, known in (
        (cli.EpisodeKind, recipes.EPISODES),
        (cli.Schedule, recipes.SCHEDULES),
        (cli.Precision, recipes.PRECISIONS),
    ):
        assert {choice.value for choice in choices} == set(known)


def test_a_recipe_s_keys_are_its_fields(tmp_path):
    (tmp_path / "recipe.toml").write_text('sources = ["a"]\nepochs = 3\npeak_lr = 1')
    assert read_settings(tmp_path / "recipe.toml", PretrainRecipe) == {"sources": ("a",), "epochs": 3, "peak_lr": 1.0}
