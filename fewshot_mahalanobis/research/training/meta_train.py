"""Meta-training: the adaptation networks learn from episodes, the backbone stays frozen.

Bateni et al., CVPR 2020, appendix "Experimental details": 110,000 tasks, 16 a step, Adam at 5e-4, and an L2 penalty of
0.001 on the scales of the FiLM generator. Checkpoints are validated every 10,000 tasks, and the best one is saved.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm

from fewshot_mahalanobis.networks.devices import choose_dtype, precision_name, without_cudnn
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedNetwork, is_separable
from fewshot_mahalanobis.research.baselines.baseline import Baseline, EpisodicModel
from fewshot_mahalanobis.research.training.best_checkpoint import better_on_most, validate, validation_due
from fewshot_mahalanobis.research.training.learner import BaselineLearner, CNAPSLearner
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe
from fewshot_mahalanobis.research.training.run import (
    RunFolder,
    autocast,
    remaining,
    shared_out,
    start_processes,
    stopped_between_steps,
)
from fewshot_mahalanobis.research.training.starting_learner import starting_learner
from fewshot_mahalanobis.research.training.tasks import Task, open_tasks
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

if TYPE_CHECKING:
    from accelerate import Accelerator


def learning_rate(step: int, steps: int, recipe: MetaTrainRecipe) -> float:
    """Learning rate of a step: constant, or half a cosine to zero after a short warm-up."""
    if recipe.schedule == "constant":
        return recipe.learning_rate
    warm = max(1, steps // 20)
    return recipe.learning_rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def _frozen_logits(model: EpisodicModel, task: Task, dtype: torch.dtype) -> Tensor:
    """Logits (m, k) of a task's queries from the network without adaptation."""
    network = AdaptedNetwork(model.feature_extractor, None, dtype, model.projection)
    fitted = FittedHead.fit(model.head, Features(network.features(task.support_images)), task.support_labels)
    return fitted.logits(network.features(task.query_images))


def meta_train(
    recipe: MetaTrainRecipe,
    output: str | Path,
    *,
    device: str = "auto",
    workers: int = 0,
    lazy: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
) -> SimpleCNAPS | Baseline:
    """Meta-train. A killed run continues when started again, with identical results on a CPU.

    With ``accelerate launch`` every process calls this function and does its share of each step. The tasks of a step do
    not depend on the number of processes or workers.

    Parameters
    ----------
    recipe : MetaTrainRecipe
    output : path
        Run folder, the same in every process. The results are the checkpoints in its sub-folders ``checkpoint`` (last
        weights) and, with validation sources, ``best``.
    device, workers, lazy, tensorboard, progress
        As for :func:`~fewshot_mahalanobis.research.training.pretrain.pretrain`.

    Returns
    -------
    SimpleCNAPS, or Baseline if the recipe has a method
        With the last weights, in evaluation mode, on the CPU.

    Raises
    ------
    ValueError
        The recipe does not fit the sources or the backbone, or the folder holds a run with another recipe.
    """
    accelerator = start_processes(device)
    recipe = recipe.on_device(accelerator.device.type)
    per_step = cast(int, recipe.tasks_per_step)
    share = shared_out(per_step, "tasks_per_step", accelerator)
    learner = starting_learner(recipe).to(accelerator.device)
    model = learner.model
    dtype = choose_dtype(recipe.precision, model.feature_extractor)
    recorded = asdict(recipe) | {"precision": precision_name(dtype)}
    run = RunFolder(output, recorded, main=accelerator.is_main_process, tensorboard=tensorboard)
    saved = run.resume()
    progress = progress and accelerator.is_main_process
    training, validation = open_tasks(recipe, model.image_size, lazy=lazy)
    model.to(memory_format=torch.channels_last)
    learner.prepare(training.each_source)
    state = _State(learner, recipe, saved)
    network = accelerator.prepare_model(learner)
    accelerator.wait_for_everyone()

    steps, start = recipe.tasks // per_step, state.step
    numbers = (start * per_step, steps * per_step)
    loading = remaining(training, *numbers, accelerator, workers=workers)
    reported = time.monotonic()
    bar = tqdm(range(start, steps), total=steps, initial=start, disable=not progress, desc="meta-train", unit="step")
    kernels = without_cudnn(accelerator.device) if is_separable(model.feature_extractor) else nullcontext()
    with loading as loaded, stopped_between_steps(accelerator) as stop, kernels:
        tasks = _announced(loaded, share, steps - start) if progress else loaded
        for step in bar:
            state.optimizer.zero_grad(set_to_none=True)
            means = _back_propagate(network, learner, islice(tasks, share), share, recipe, accelerator, dtype)
            state.advance(steps)
            loss, accuracy = accelerator.reduce(means, "mean").tolist()
            record: dict[str, Any] = {"loss": loss, "accuracy": accuracy}
            record["tasks_per_second"] = round(per_step / (time.monotonic() - reported), 3)
            bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}")
            last = step + 1 == steps
            if validation and (last or validation_due(step, recipe)):
                accuracies = validate(model, validation, accelerator, dtype, workers=workers, progress=progress)
                record["validation"] = accuracies
                if better_on_most(accuracies, state.best):
                    state.best = accuracies
                    if accelerator.is_main_process:
                        learner.save(run.path / "best")
            run.log(step + 1, **record)
            reported, stopped = time.monotonic(), stop()
            run.save(state.saved, now=last or stopped)
            if stopped:
                raise KeyboardInterrupt
    model.to("cpu").eval()
    if accelerator.is_main_process:
        learner.save(run.path / "checkpoint")
    accelerator.wait_for_everyone()
    return model


class _State:
    """What a run continues from: what was learned, the optimizer, the best validation, the number of steps."""

    def __init__(
        self, learner: CNAPSLearner | BaselineLearner, recipe: MetaTrainRecipe, saved: Mapping[str, Any] | None
    ) -> None:
        self.learner, self.recipe = learner, recipe
        self.optimizer = torch.optim.Adam(learner.parameter_groups(), lr=recipe.learning_rate)
        self.best: dict[str, float] | None = None
        self.step = 0
        if saved is not None:
            learner.load_state_dict(saved["model"])
            learner.store()
            self.optimizer.load_state_dict(saved["optimizer"])
            self.best, self.step = saved["best"], saved["step"]
        self.averaged = AveragedModel(learner) if recipe.average else None
        if self.averaged is not None and saved is not None:
            self.averaged.load_state_dict(saved["averaged"])

    def advance(self, steps: int) -> None:
        """Take the step of the optimizer, one of ``steps``."""
        rate = learning_rate(self.step, steps, self.recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("factor", 1.0) * rate
        self.optimizer.step()
        if self.averaged is not None and steps - self.step <= self.recipe.average * steps:
            self.averaged.update_parameters(self.learner)
            if self.step + 1 == steps:
                self.learner.load_state_dict(self.averaged.module.state_dict())
        self.learner.store()
        self.step += 1

    def saved(self) -> dict[str, Any]:
        """Return what the constructor takes."""
        return {
            "model": self.learner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "step": self.step,
            "averaged": None if self.averaged is None else self.averaged.state_dict(),
        }


def _announced(tasks: Iterable[Task], share: int, steps: int) -> Iterator[Task]:
    """Yield the tasks; after the first, say how long a step of ``share`` tasks and all ``steps`` will take."""
    start = time.monotonic()
    for number, task in enumerate(tasks):
        if number == 1:
            step = share * (time.monotonic() - start)
            tqdm.write(
                f"A step of {share} tasks will take about {step:,.0f} s, {steps:,} steps {step * steps / 3600:,.1f} "
                "hours. The first step is saved, then one every five minutes: the same command goes on from there. "
                "--set tasks_per_step=1 takes shorter steps, --set tasks=1000 fewer",
                file=sys.stderr,
            )
        yield task


def _back_propagate(
    network: nn.Module,
    learner: CNAPSLearner | BaselineLearner,
    tasks: Iterable[Task],
    count: int,
    recipe: MetaTrainRecipe,
    accelerator: Accelerator,
    dtype: torch.dtype,
) -> Tensor:
    """Add up the gradients of this process's ``count`` tasks of a step; return mean loss and accuracy, shape (2,).

    Gradients accumulate in every process and are averaged between processes with the last task.
    """
    means = torch.zeros(2, device=accelerator.device)
    for number, task in enumerate(tasks, 1):
        task = task.to(accelerator.device)
        with nullcontext() if number == count else accelerator.no_sync(network):
            with autocast(accelerator.device, dtype):
                logits = network(task.support_images, task.support_labels, task.query_images, task.classes)
            loss = learner.loss(logits, task.query_labels)
            accuracy = (logits.argmax(1) == task.query_labels).float().mean()
            means += torch.stack([loss.detach(), accuracy]) / count
            objective = loss / count
            if recipe.floor:
                frozen = learner.loss(_frozen_logits(learner.model, task, dtype), task.query_labels)
                objective = objective + recipe.floor * F.relu(loss - frozen) / count
            if number == count:  # the penalty counts once per step
                objective = objective + recipe.penalty * learner.penalty()
            objective.backward()
    return means
