"""Recipes: from files, assignments and options, which of them wins, and what is refused by name."""

from __future__ import annotations

import json
import runpy
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, PretrainRecipe, read_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def asked(monkeypatch):
    """What the commands would train, in place of training."""
    recipes_seen = []
    for name in ("pretrain", "meta_train"):
        module = __import__(f"fewshot_mahalanobis.research.training.{name}", fromlist=[name])
        monkeypatch.setattr(module, name, lambda recipe, output, **options: recipes_seen.append((recipe, options)))
    return recipes_seen


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_options_win_over_assignments_and_these_over_the_file(tmp_path, asked):
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
    options = ("--set", "model.scale=2", "--set", "episodes=fixed", "--set", "tasks=7", "--tasks", 110_000)
    result = run("meta-train", "--config", tmp_path / "paper.toml", "-o", tmp_path, *options, "--seed", 0)
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
    options = ("--set", "model.task_covariance=false", "--precision", "float32", "--workers", 3, "--lazy")
    result = run("meta-train", *arguments, "-o", tmp_path, *options, "--tensorboard")
    assert result.exit_code == 0, result.output
    [(recipe, settings)] = asked
    sources = ("a.zip", "glyphs", "glyphs")
    model = {"task_covariance": False}
    assert recipe == MetaTrainRecipe(sources, "b", ("v.zip", "w.zip"), model, precision="float32")
    assert settings == {"device": "auto", "workers": 3, "lazy": True, "tensorboard": True}
    assert result.stdout.split() == [str(tmp_path / "best")]
    run("pretrain", "a.zip", "-o", tmp_path, "--set", "peak_lr=0.3")
    assert asked[1][0] == PretrainRecipe(("a.zip",), peak_lr=0.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = 3", "unknown setting 'task', did you mean 'tasks'?"),
        ("whatever = 3", "unknown setting 'whatever' (settings are sources, "),
        ("tasks = '3'", "tasks = '3': Expected `int`, got `str`"),
        ("tasks = true", "tasks = True: Expected `int`, got `bool`"),
        ("tasks = 0", "tasks = 0: Expected `int` >= 1"),
        ("learning_rate = [1]", "learning_rate = [1]: Expected `float`, got `array`"),
        ("phases = [[0.5, 64.5]]", "Expected `int`, got `float` - at `$[0][1]`"),
        ("lite = 'a'", "lite = 'a': Expected `int | null`, got `str`"),
        ("tasks = ", "recipe.toml is not TOML"),
        ("schedule = 'linear'", "schedule must be 'constant' or 'cosine', not 'linear'"),
        ("tasks = 2\ntasks_per_step = 16", "tasks = 2 is less than one step of tasks_per_step = 16"),
    ],
)
def test_a_wrong_file_is_refused_with_the_name_of_the_setting(text, message, tmp_path, asked):
    (tmp_path / "recipe.toml").write_text(text)
    options = ("--backbone", "b", "-o", tmp_path / "run")
    result = run("meta-train", "a.zip", "--config", tmp_path / "recipe.toml", *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not asked


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rotation": 1.5}, r"rotation = 1\.5: Expected `float` <= 1\.0"),
        ({"sources": ()}, r"sources = \(\): Expected `array` of length >= 1"),
        ({"sources": "a.zip"}, "sources = 'a.zip': Expected `array`, got `str`"),
        ({"phases": ()}, r"phases = \(\): Expected `array` of length >= 1"),
        ({"precision": "half"}, "precision must be 'auto' or 'float32' or 'bfloat16', not 'half'"),
    ],
)
def test_a_recipe_made_in_python_is_checked_too(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainRecipe(**{"sources": ("a",), **settings})


def test_lists_and_whole_numbers_are_converted():
    recipe = PretrainRecipe(["a"], peak_lr=1, phases=[[1, 32]])
    assert recipe == PretrainRecipe(("a",), peak_lr=1.0, phases=((1.0, 32),))
    assert isinstance(recipe.peak_lr, float)
    assert isinstance(recipe.phases[0], tuple)


def test_values_of_assignments_are_json_or_text():
    assignments = ('sources=["a"]', "backbone=b.safetensors", "augment=true", "lite=null", "phases=[[1, 84]]")
    recipe = read_recipe(MetaTrainRecipe, None, assignments)
    assert recipe == MetaTrainRecipe(("a",), "b.safetensors", augment=True, phases=((1.0, 84),))
    for wrong in ("tasks", "=3"):
        with pytest.raises(ValueError, match=f"'{wrong}' is not a setting: expected name=value"):
            read_recipe(MetaTrainRecipe, None, (wrong,))


def test_what_a_recipe_needs_is_asked_for_by_name():
    with pytest.raises(ValueError, match="backbone is missing"):
        read_recipe(MetaTrainRecipe, None, (), {"sources": ("a",)})


def test_the_recipe_of_a_run_can_be_read_again(tmp_path):
    recipe = MetaTrainRecipe(("a",), "b", model={"head": "cosine"}, phases=((1.0, 84),), lite=3)
    (tmp_path / "recipe.json").write_text(json.dumps(asdict(recipe)))
    assert read_recipe(MetaTrainRecipe, tmp_path / "recipe.json") == recipe
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no settings by name"):
        read_recipe(MetaTrainRecipe, tmp_path / "list.json")


@pytest.mark.parametrize("file", sorted(RECIPES.glob("**/*.toml")), ids=lambda file: file.stem)
def test_recipes_of_the_repository_can_be_read(file):
    kind = PretrainRecipe if "backbone" in file.stem else MetaTrainRecipe
    assert read_recipe(kind, file).sources


def test_the_second_stage_on_lite0_continues_the_first_on_the_same_images():
    first, second = (
        read_recipe(MetaTrainRecipe, RECIPES / f"efficientnet_lite0{which}.toml") for which in ("", "_longer")
    )
    assert (first.backbone, first.sources, first.validation) == (second.backbone, second.sources, second.validation)
    assert first.init is None
    assert second.init == "runs/lite0/checkpoint"


def test_silhouettes_are_padded_to_squares_in_class_folders(tmp_path):
    Image.fromarray(np.full((20, 40), 255, np.uint8)).save(tmp_path / "Bone-7.gif")
    prepare = runpy.run_path(str(RECIPES / "mpeg7.py"))["prepare"]
    assert prepare(tmp_path, tmp_path / "mpeg7.zip") == 1
    with zipfile.ZipFile(tmp_path / "mpeg7.zip") as archive, archive.open("train/bone/bone-7.png") as file:
        pixels = np.asarray(Image.open(file))
    assert pixels.shape == (112, 112)
    assert pixels[56].min() == 255
    assert pixels[[0, -1]].max() == 0
