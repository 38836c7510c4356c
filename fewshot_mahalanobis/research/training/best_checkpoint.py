"""Validation in meta-training: a checkpoint becomes the best one if it is better on at least half of the sources.

Bateni et al., CVPR 2020, appendix "Experimental details"; the rule is the published code's, after CNAPS (Requeima et
al., NeurIPS 2019). Accuracies of different data sets are not comparable, so sources vote instead of being averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from tqdm.auto import tqdm

from fewshot_mahalanobis.networks.devices import device_of
from fewshot_mahalanobis.research.baselines.baseline import EpisodicModel
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe
from fewshot_mahalanobis.research.training.run import remaining
from fewshot_mahalanobis.research.training.tasks import ValidationTasks

if TYPE_CHECKING:
    from accelerate import Accelerator


def validation_due(step: int, recipe: MetaTrainRecipe) -> bool:
    """Whether step ``step`` (from 0) completes a multiple of ``validate_every`` tasks."""
    per_step = cast(int, recipe.tasks_per_step)
    before = step * per_step
    return (before + per_step) // recipe.validate_every > before // recipe.validate_every


def better_on_most(accuracies: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
    """Whether at least half of the sources have a higher accuracy than in the best validation so far."""
    if best is None:
        return True
    return 2 * sum(accuracy > best[source] for source, accuracy in accuracies.items()) >= len(accuracies)


def validate(
    model: EpisodicModel,
    tasks: Mapping[str, ValidationTasks],
    accelerator: Accelerator,
    dtype: torch.dtype,
    *,
    workers: int = 0,
    progress: bool = True,
) -> dict[str, float]:
    """Return the mean accuracy on every source, by name, as a share of 1; the processes share the episodes.

    ``model`` must be identical in every process; the result does not depend on their number. ``workers`` processes
    decode images, per process of the run.
    """
    means, training = {}, model.training
    model.train(False)  # the relation module has batch normalisation
    for name, episodes in tasks.items():
        accuracies = torch.zeros(len(episodes), dtype=torch.float32, device=accelerator.device)
        mine = range(len(episodes))[accelerator.process_index :: accelerator.num_processes]
        with remaining(episodes, 0, len(episodes), accelerator, workers=workers) as loaded:
            bar = tqdm(loaded, total=len(mine), desc=name, disable=not progress, leave=False)
            for number, task in zip(mine, bar, strict=True):
                labels = task.support_labels.to(device_of(model))
                adapted = model.adapt(task.support_images, labels, dtype=dtype)
                right = adapted.logits(task.query_images).argmax(1).cpu() == task.query_labels
                accuracies[number] = right.float().mean()
        means[name] = float(accelerator.reduce(accuracies, "sum").double().mean())
    model.train(training)
    return means
