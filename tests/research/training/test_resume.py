"""Killed at any moment and started again, both trainings end with the bits of a run that was not killed.

The runs are processes of one thread, killed with SIGKILL: nothing of theirs is left but their folder. They are forked
from a server that has computed nothing: PyTorch refuses gradients in a child of a process that has computed some.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from fewshot_mahalanobis.research.training import run
from fewshot_mahalanobis.research.training.meta_train import meta_train
from fewshot_mahalanobis.research.training.pretrain import pretrain
from fewshot_mahalanobis.research.training.recipes import PretrainRecipe
from tests.research.training.small import PRETRAIN, draw_colours, meta_recipe
from tests.tiny import narrow

pytestmark = [pytest.mark.training, pytest.mark.process, pytest.mark.slow]

KILLS = 3
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload([__name__, "torch._dynamo"])  # which the first step of a process imports


def in_one_thread(train, recipe, output):
    torch.set_num_threads(1)
    run.SAVE_EVERY = 0.0  # in this process alone
    with narrow():
        train(recipe, output, device="cpu", progress=False)


def start(train, recipe, output):
    process = server.Process(target=in_one_thread, args=(train, recipe, output))
    process.start()
    return process


def steps_logged(output):
    log = output / "log.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def run_unbroken(train, recipe, output):
    """-> seconds a report."""
    since = time.monotonic()
    process = start(train, recipe, output)
    process.join()
    assert process.exitcode == 0
    return (time.monotonic() - since) / steps_logged(output)


def run_with_kills(train, recipe, output, pace, seed):
    """Kill the run three times, each at a random moment within two reports of when it went on, then let it end."""
    rng, killed = random.Random(seed), 0
    for _ in range(KILLS):
        process = start(train, recipe, output)
        before = steps_logged(output)
        further, moment = rng.randrange(2), rng.random()
        while process.is_alive() and steps_logged(output) < before + further:
            time.sleep(0.005)
        until, reported = time.monotonic() + pace * moment, steps_logged(output)
        while time.monotonic() < until and steps_logged(output) == reported:  # it may be faster than the unbroken run
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed == KILLS, "the run ended before it was killed"
    process = start(train, recipe, output)
    process.join()
    assert process.exitcode == 0


def reports(output):
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if "per_second" not in k} for record in records]


def assert_same_bits(file, other):
    left, right = load_file(file), load_file(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def pretrain_recipe(folder):
    return PretrainRecipe((folder,), folder, **{**PRETRAIN, "epochs": 4, "phases": ((1.0, 24),), "image_size": 24})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draw_colours(tmp_path_factory.mktemp("sources") / "colours")


@pytest.fixture(scope="module")
def unbroken(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "backbone"
    return output, run_unbroken(pretrain, pretrain_recipe(folder), output)


def test_a_pretraining_killed_three_times_ends_with_the_same_bits(folder, unbroken, tmp_path):
    unbroken_backbone, pace = unbroken
    run_with_kills(pretrain, pretrain_recipe(folder), tmp_path / "run", pace, seed=1)
    assert_same_bits(tmp_path / "run" / "backbone.safetensors", unbroken_backbone / "backbone.safetensors")
    assert reports(tmp_path / "run") == reports(unbroken_backbone)


def test_a_meta_training_killed_three_times_ends_with_the_same_bits(folder, unbroken, tmp_path):
    recipe = meta_recipe(
        folder,
        unbroken[0],
        tasks=8,
        tasks_per_step=1,
        validation=(folder,),
        validate_every=3,
        augment=True,
        lite=3,
        learn_scale=True,
    )
    pace = run_unbroken(meta_train, recipe, tmp_path / "unbroken")
    run_with_kills(meta_train, recipe, tmp_path / "run", pace, seed=2)
    for checkpoint in ("checkpoint", "best"):
        name = f"{checkpoint}/model.safetensors"
        assert_same_bits(tmp_path / "run" / name, tmp_path / "unbroken" / name)
    assert reports(tmp_path / "run") == reports(tmp_path / "unbroken")
