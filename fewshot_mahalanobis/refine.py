"""Gradient steps on the support set: how far to follow the generated FiLM parameters.

One forward pass generates gamma and beta for each position j of the network. On images unlike those of meta-training
they may go too far or not far enough. So each of the two vectors gets a gate, a single number:

    gamma_j' = 1 + a_j (gamma_j - 1),    beta_j' = b_j beta_j,

1 for what was generated, 0 for the network as pretrained. Gradient steps move the gates to where support images are
more likely under the head fitted to others. Even a few dozen numbers can learn a support set by heart that way, and the
thousands of entries of gamma and beta, or of a linear map of the features, all the more (FiT, Shysheya et al., ICLR
2023, and URL, Li et al., ICCV 2021, take steps on those; docs/guide.md has our figures). So the steps follow every
other image of a class, and the rest, whose likelihood no step follows, say when to stop and whether to accept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from fewshot_mahalanobis.heads import AutoHead, Head, MahalanobisHead
from fewshot_mahalanobis.networks.adapted_task import MAX_CPU_PIXELS, AdaptedTask, channels_last
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.temperature import fit_temperature

#: Steps of "auto".
AUTO_STEPS = 10
#: Least gain that "auto" accepts, in nats over the images that check, and in its standard errors.
MIN_GAIN, MIN_ERRORS = 3.0, 2.0
#: "auto" gives up after so many steps without a gain.
_TRIAL_STEPS = 4
#: Of Adam.
_LEARNING_RATE = 0.1
#: Each support image is left out with a fifth of its class.
_FOLDS = 5
#: Images that gradients pass through in one step.
_MAX_IMAGES = 100


def check_steps(steps: int | str) -> None:
    """Raise ValueError unless it is "auto" or a number of steps."""
    counted = isinstance(steps, Integral) and not isinstance(steps, bool) and steps >= 0
    if not counted and not (isinstance(steps, str) and steps == "auto"):
        raise ValueError(f'refine must be "auto" or a number of gradient steps, 0 or more, got {steps!r}')


def refined(
    model: SimpleCNAPS,
    task: AdaptedTask,
    images: Tensor,
    *,
    steps: int | str,
    batch_size: int = 64,
    progress: bool = False,
) -> AdaptedTask:
    """Refine the FiLM parameters of a task by gradient steps on its support set.

    Parameters
    ----------
    model : SimpleCNAPS
        That ``task`` was adapted from.
    task : AdaptedTask
    images : Tensor of shape (n, 3, h, w)
        The support set, in the order of ``task.support_features``, in [-1, 1].
    steps : int or "auto"
        The task returned is that of the step at which the images that check are most likely. "auto" takes up to ten,
        gives up after four without a gain, and returns ``task`` itself unless the gain is clear.
    batch_size : int
        Images in work at a time, to bound memory.
    progress : bool
        Show a bar.

    Returns
    -------
    AdaptedTask
        Refined, or ``task``.

    Raises
    ------
    ValueError
        ``steps`` is out of its range, or positive without FiLM parameters or a class of two images.
    """
    check_steps(steps)
    automatic, labels, film = steps == "auto", task.support_labels, task.film
    most = AUTO_STEPS if automatic else int(steps)
    one_shot = int(labels.bincount().max()) == 1
    if most == 0 or (automatic and (film is None or one_shot)):
        return task
    if film is None or one_shot:
        missing = "a class of two support images" if one_shot else "adapt=True and a checkpoint that adapts"
        raise ValueError(f'refine={steps!r} needs {missing}; refine="auto" goes without')
    trajectory = _trajectory(model, task, images, batch_size)
    _, first = next(trajectory)
    best, gain = task, torch.zeros_like(first)
    for step in tqdm(range(most), desc="refine", unit="step", leave=False, disable=not progress):
        if automatic and (float(first.sum()) < MIN_GAIN or (step == _TRIAL_STEPS and best is task)):
            break
        now, losses = next(trajectory)
        if (first - losses).sum() > gain.sum():
            best, gain = now, first - losses
    total, error = float(gain.sum()), math.sqrt(len(gain)) * float(gain.std(correction=0))
    return task if automatic and total < max(MIN_GAIN, MIN_ERRORS * error) else best


def _trajectory(
    model: SimpleCNAPS, task: AdaptedTask, images: Tensor, batch_size: int
) -> Iterator[tuple[AdaptedTask, Tensor]]:
    """The task as it is and after each step, with the losses of the images that check."""
    film, labels = task.film, task.support_labels
    assert film is not None
    gates = torch.ones(len(film), 2, device=labels.device, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=_LEARNING_RATE)
    every = -(-len(labels) // _MAX_IMAGES)
    for step in itertools.count():
        losses, slopes = _held_out_losses(task)
        yield task, losses
        rows = slice(step % every, None, every)
        gates.grad = _gradient(model, film, gates, images[rows], slopes[rows], task.dtype, batch_size)
        optimiser.step()
        task = model.with_film(gated(film, gates.detach()), task.head, task.dtype)
        task = task.refit(task.features(images, batch_size), labels)


def gated(film: Film, gates: Tensor) -> Film:
    """FiLM parameters of p positions behind gates (p, 2): 0 changes nothing, 1 is ``film``."""
    pairs = zip(film.items(), gates, strict=True)
    return Film({name: (1 + a * (gamma - 1), b * beta) for (name, (gamma, beta)), (a, b) in pairs})


def _places(labels: Tensor) -> Tensor:
    """Place of each image (n,) among those of its class, from 0; -1 for one that is alone in it."""
    places = torch.empty_like(labels)
    for k, count in enumerate(labels.bincount().tolist()):
        places[labels == k] = torch.arange(count, device=labels.device) if count > 1 else -1
    return places


def _held_out_losses(task: AdaptedTask) -> tuple[Tensor, Tensor]:
    """Losses in nats of left-out images that check, and the gradient of the sum of the others by all features (n, d).

    Each fold is classified by the head fitted to the others, with the settings that it chose on all and at the
    temperature that suits best. Classes start at different folds, for folds of nearly one size.
    """
    features, labels = task.support_features.detach().requires_grad_(), task.support_labels
    places = _places(labels)
    folds = torch.where(places < 0, -1, (places + labels) % _FOLDS)
    with torch.enable_grad():
        x = task.head_features(features)
        head = _with_fixed_settings(task.head, x.detach(), labels)
        rows = [(folds == fold).nonzero()[:, 0] for fold in folds.unique().tolist() if fold >= 0]
        logits = torch.cat([head(x[folds != folds[out[0]]], labels[folds != folds[out[0]]], x[out]) for out in rows])
        order = torch.cat(rows)
        targets, checks = labels[order], places[order] % 2 == 1
        losses = F.cross_entropy(logits / fit_temperature(logits, targets), targets, reduction="none")
        (slopes,) = torch.autograd.grad(losses[~checks].sum(), features)
    return losses[checks].detach(), slopes


def _with_fixed_settings(head: Head[Any], features: Tensor, labels: Tensor) -> Head[Any]:
    if isinstance(head, AutoHead):
        return AutoHead(head.fit(features, labels).settings)
    if isinstance(head, MahalanobisHead):
        return MahalanobisHead(head.covariance.with_chosen_settings(features, labels), head.scale)
    return head


def _gradient(
    model: SimpleCNAPS, film: Film, gates: Tensor, images: Tensor, slopes: Tensor, dtype: torch.dtype, batch_size: int
) -> Tensor:
    """Gradient by the gates, given that by the features (m, d) of images; few images in work at a time."""
    if gates.device.type == "cpu":
        batch_size = min(batch_size, max(1, MAX_CPU_PIXELS // images[0, 0].numel()))
    total = torch.zeros_like(gates)
    with torch.enable_grad(), torch.autocast(gates.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        for chunk, slope in zip(images.split(batch_size), slopes.split(batch_size), strict=True):
            features = model.feature_extractor(channels_last(chunk.to(gates.device, dtype)), gated(film, gates))
            total += torch.autograd.grad(features, gates, slope)[0]
    return total
