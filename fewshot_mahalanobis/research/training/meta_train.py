"""Meta-training: the adaptation networks learn from episodes, the backbone stays frozen.

Bateni et al., CVPR 2020, appendix "Experimental details": 110,000 tasks, 16 a step, Adam at 5e-4, and an L2 penalty of
0.001 on the scales of the FiLM generator. Checkpoints are validated every 10,000 tasks, and the best one is saved.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm

from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS
from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.checkpoints.restore import checked_settings
from fewshot_mahalanobis.networks.devices import choose_dtype, precision_name, without_cudnn
from fewshot_mahalanobis.networks.efficientnet import LITE0, EfficientNet
from fewshot_mahalanobis.networks.generators import LayerGenerator
from fewshot_mahalanobis.networks.pooling import read_statistics
from fewshot_mahalanobis.networks.pretrained import is_pretrained_name, pretrained_extractor
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.research.baselines.baseline import Baseline, EpisodicModel, checked_baseline_settings
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.training.best_checkpoint import better_on_most, validate, validation_due
from fewshot_mahalanobis.research.training.learner import BaselineLearner, CNAPSLearner
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe
from fewshot_mahalanobis.research.training.run import (
    RunFolder,
    autocast,
    open_training_source,
    remaining,
    resnet18_weights,
    shared_out,
    start_processes,
    stopped_between_steps,
)
from fewshot_mahalanobis.research.training.tasks import Task, TrainingTasks, ValidationTasks
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

if TYPE_CHECKING:
    from accelerate import Accelerator

Made = TypeVar("Made", SimpleCNAPS, Baseline)


def scale_features_(model: SimpleCNAPS | Baseline, factor: float) -> None:
    """Multiply the backbone's features, adapted or not, by ``factor``, by rescaling layer 4.

    Equation 3 adds beta I, which presumes a feature scale. The scale of a supervised backbone is arbitrary, because its
    linear classifier adjusts to any.
    """
    first, second = cast(FilmResNet18, model.feature_extractor).blocks[-1]
    with torch.no_grad():
        for bn in (first.bn2, cast(nn.Sequential, first.downsample)[1], second.bn2):
            cast(Tensor, bn.weight).mul_(factor)
            cast(Tensor, bn.bias).mul_(factor)
        second.conv1.weight.div_(factor)
        if model.film_generator is not None:  # FiLM's beta is added after scaling
            for scales in cast(LayerGenerator, cast(nn.ModuleList, model.film_generator.layers)[-1]).scales:
                cast(nn.ParameterDict, scales)["beta2"].mul_(factor)


def learning_rate(step: int, steps: int, recipe: MetaTrainRecipe) -> float:
    """Learning rate of a step: constant, or half a cosine to zero after a short warm-up."""
    if recipe.schedule == "constant":
        return recipe.learning_rate
    warm = max(1, steps // 20)
    return recipe.learning_rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def starting_learner(recipe: MetaTrainRecipe) -> CNAPSLearner | BaselineLearner:
    """Make the model that a recipe trains, Simple CNAPS or a method, with random or given adaptation networks.

    The backbone is trained too if the method does so. ValueError if ``model`` has an unknown setting or nothing to
    train, or ``init`` is a checkpoint of another model.
    """
    # A name in CHECKPOINTS always means that checkpoint, even if timm has a network of the same name.
    by_name = recipe.backbone == LITE0 or (recipe.backbone not in CHECKPOINTS and is_pretrained_name(recipe.backbone))
    if recipe.method is not None:
        if by_name or recipe.init is not None or recipe.lite is not None:
            raise ValueError("a method is trained on the FiLM ResNet18 of a checkpoint or file, without init and lite")
        settings = {**recipe.model, "head": recipe.method}
        baseline = _made(Baseline, settings, recipe, _arguments(Baseline, "head"))
        checked_baseline_settings(baseline.config, "model")
        _load_resnet18(baseline, recipe)
        return BaselineLearner(baseline)
    if recipe.model.get("adaptation") == "none":
        raise ValueError("a model without adaptation has nothing to meta-train")
    make: Callable[..., SimpleCNAPS] = SimpleCNAPS
    names = _arguments(SimpleCNAPS, "backbone")
    if by_name:
        make = functools.partial(_on_pretrained_network, recipe.backbone)
        names = [*dict.fromkeys(_arguments(pretrained_extractor, "name") + names)]
    model = _made(make, recipe.model, recipe, names)
    checked_settings(model.config, "model")
    if not by_name:
        _load_resnet18(model, recipe)
    elif recipe.feature_scale != 1:
        raise ValueError("feature_scale is for the FiLM ResNet18; for another network set model.beta")
    if recipe.init is not None:
        before = load_checkpoint(recipe.init)
        known = _parts(before)
        if _of_adaptation(before) != _of_adaptation(model) or _parts(model)[: len(known)] != known:
            raise ValueError(
                f"the checkpoint {recipe.init!r} belongs to another model: {before.config}, not {model.config}"
            )
        start = {name: x for name, x in before.state_dict().items() if not name.startswith("feature_extractor.")}
        if before.feature_encoder is not None and model.feature_encoder is not None:
            # Its columns are means, then deviations, of the features; those of further statistics come last.
            weight = before.feature_encoder.weight.detach().unflatten(1, (2, -1))
            further = model.feature_encoder.in_features // 2 - weight.shape[2]
            start["feature_encoder.weight"] = F.pad(weight, (0, further)).flatten(1)
        model.load_state_dict({**model.state_dict(), **start})
    return CNAPSLearner(model, recipe.lite, recipe.learn_scale, recipe.learn_pooling)


def _on_pretrained_network(
    name: str,
    *,
    image_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    positions: Sequence[str] | None = None,
    pooling: Sequence[Mapping[str, Any]] | None = None,
    length: float | None = None,
    frozen_pooling: Sequence[Mapping[str, Any]] | None = None,
    **settings: Any,
) -> SimpleCNAPS:
    """Put untrained adaptation networks on a pretrained network; without ``positions``, FiLM follows the usual ones."""
    extractor = pretrained_extractor(
        name,
        image_size=image_size,
        mean=mean,
        std=std,
        positions=positions,
        pooling=None if pooling is None else read_statistics(pooling),
        length=length,
        frozen_pooling=None if frozen_pooling is None else read_statistics(frozen_pooling),
    )
    return SimpleCNAPS(image_size=extractor.image_size, backbone=extractor, **settings)


def _arguments(function: Callable[..., Any], other_than: str) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != other_than]


def _made(make: Callable[..., Made], settings: Mapping[str, Any], recipe: MetaTrainRecipe, known: list[str]) -> Made:
    """Make a model with random weights of the recipe's seed; ValueError if it has no such setting."""
    if unknown := sorted(set(recipe.model) - set(known)):
        raise ValueError(f"model has no setting {unknown[0]!r} (settings are {', '.join(known)})")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return make(**settings)


def _load_resnet18(model: SimpleCNAPS | Baseline, recipe: MetaTrainRecipe) -> None:
    cast(FilmResNet18, model.feature_extractor).load_state_dict(resnet18_weights(recipe.backbone))
    scale_features_(model, recipe.feature_scale)


@torch.no_grad()
def _frozen_logits(model: EpisodicModel, task: Task, dtype: torch.dtype) -> Tensor:
    """Logits (m, k) of a task's queries from the network without adaptation."""
    network = AdaptedNetwork(model.feature_extractor, None, dtype, model.projection)
    fitted = FittedHead.fit(model.head, Features(network.features(task.support_images)), task.support_labels)
    return fitted.logits(network.features(task.query_images))


def _of_adaptation(model: SimpleCNAPS) -> dict[str, Any]:
    """Return the settings that determine the shapes of the weights that ``init`` provides.

    A feature encoder that the checkpoint lacks starts from zero, and so do its columns for further statistics of maps.
    """
    others = {"head", "scale", "beta", "image_size", "frozen_features"}
    settings = {name: value for name, value in model.config.items() if name not in others}
    if isinstance(network := settings.get("backbone"), dict):
        pooling = {"pooling", "length", "frozen_pooling"}
        settings["backbone"] = {name: value for name, value in network.items() if name not in pooling}
    return settings


def _parts(model: SimpleCNAPS) -> list[str]:
    """Return the maps of each statistic that the set encoder reads of the frozen network."""
    backbone = model.config.get("backbone", {})
    pooling = backbone.get("frozen_pooling", backbone.get("pooling", [{"maps": "final"}]))
    return [part["maps"] for part in pooling]


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
    progress = progress and accelerator.is_main_process
    sources = _opened(recipe, model.image_size, lazy=lazy)
    training = TrainingTasks([sources[name] for name in recipe.sources], recipe, model.image_size)
    validation = {name: ValidationTasks(sources[name], recipe, model.image_size) for name in recipe.validation}
    model.to(memory_format=torch.channels_last)
    learner.prepare([sources[name] for name in dict.fromkeys(recipe.sources)])
    state = _State(learner, recipe, run.resume())
    network = accelerator.prepare_model(learner)
    accelerator.wait_for_everyone()

    steps, start = recipe.tasks // per_step, state.step
    numbers = (start * per_step, steps * per_step)
    loading = remaining(training, *numbers, accelerator, workers=workers)
    reported = time.monotonic()
    bar = tqdm(range(start, steps), total=steps, initial=start, disable=not progress, desc="meta-train", unit="step")
    separable = isinstance(model.feature_extractor, EfficientNet)
    kernels = without_cudnn(accelerator.device) if separable else nullcontext()
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


def _opened(recipe: MetaTrainRecipe, image_size: int, *, lazy: bool) -> dict[str, ImageSource]:
    """Open every source of a recipe once, for its largest images."""
    largest = max(image_size, *recipe.sizes, 0)
    return {
        source: open_training_source(source, root=recipe.root, size=largest, lazy=lazy)
        for source in dict.fromkeys(recipe.sources + recipe.validation)
    }


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
    """Tasks; after the first one it says what a step of ``share`` tasks and all ``steps`` will take."""
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
