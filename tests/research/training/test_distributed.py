"""Two processes train as one process does with the same batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.research.training.meta_train import meta_train
from tests.research.training.small import draw_colours, meta_recipe

pytestmark = [pytest.mark.training, pytest.mark.process, pytest.mark.slow]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_two_processes_have_the_loss_curve_of_one(tmp_path):
    """Through the command line and a config file, with penalty, validation, LITE and variable episodes."""
    pytest.importorskip("accelerate")
    folder = draw_colours(tmp_path / "colours")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_file(FilmResNet18().state_dict(), tmp_path / "backbone.safetensors")
    settings = {"tasks": 12, "tasks_per_step": 4, "precision": "float32", "episodes": "variable", "max_support": 8}
    settings |= {"max_way": 5, "queries": 2, "lite": 3, "validate_every": 8, "validation_episodes": 1, "seed": 5}
    recipe = meta_recipe(folder, tmp_path, validation=(folder,), **settings)
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    lines += [f'backbone = "{recipe.backbone}"', f'sources = ["{folder}"]', f'validation = ["{folder}"]', "shot = 1"]
    (tmp_path / "recipe.toml").write_text("\n".join([*lines, "[model]", "image_size = 32"]))

    # What ``accelerate launch`` sets for each process; to start the launcher too would take seconds.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "fewshot_mahalanobis", "meta-train"]
    command += ["--config", str(tmp_path / "recipe.toml"), "-o", str(tmp_path / "two")]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    for process in processes:
        said, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert said.strip() == str(tmp_path / "two" / "best")

    meta_train(recipe, tmp_path / "one", device="cpu", progress=False)
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [record["step"] for record in two] == [1, 2, 3]
    for expected, found in zip(one, two, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found.get("validation") == pytest.approx(expected.get("validation"), abs=0.11)  # one query of ten
    assert one[0]["loss"] != pytest.approx(one[-1]["loss"], rel=1e-2)
    ends = [load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("one", "two")]
    start = (tmp_path / "one" / "recipe.json").read_text()
    assert start == (tmp_path / "two" / "recipe.json").read_text()
    for name, value in ends[0].items():
        # Adam moves a weight by its rate whatever its gradient's size, so where that is noise its sign may differ.
        torch.testing.assert_close(ends[1][name], value, rtol=2e-3, atol=2 * 3 * 5e-4, msg=name)


def test_a_step_that_cannot_be_divided_between_the_processes_is_refused():
    from types import SimpleNamespace

    from fewshot_mahalanobis.research.training.run import shared_out

    assert shared_out(16, "tasks_per_step", SimpleNamespace(num_processes=8)) == 2
    with pytest.raises(ValueError, match="tasks_per_step = 16 cannot be divided between 3 processes"):
        shared_out(16, "tasks_per_step", SimpleNamespace(num_processes=3))
