"""Gradient steps on the support set: how far to follow the generated FiLM parameters.

One forward pass generates gamma and beta for each position j of the network. On images unlike those of meta-training
they may go too far or not far enough. So each of the two vectors gets a gate, a single number:

    gamma_j' = 1 + a_j (gamma_j - 1),    beta_j' = b_j beta_j,

1 for what was generated, 0 for the network as pretrained. Gradient steps move the gates to where support images are
most likely under the head fitted to the others. A few dozen numbers cannot learn a hundred images by heart. The
thousands of entries of gamma and beta can, and so can a linear map of the features: their likelihood of left-out
support images rises while that of queries falls (docs/guide.md has the figures). FiT (Shysheya et al., ICLR 2023) and
URL (Li et al., ICCV 2021) take such steps on those.
"""

from __future__ import annotations

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
from fewshot_mahalanobis.temperature import temperature_fit

#: Steps of "auto", and the least gain that it accepts, in nats over the support set. From validation classes.
AUTO_STEPS, MIN_GAIN = 10, 4.0
#: "auto" goes on after so many steps only where they have brought half of that.
_TRIAL_STEPS = 4
#: Of Adam.
_LEARNING_RATE = 0.15
#: Each support image is left out with a fifth of its class.
_FOLDS = 5
#: Images that gradients pass through in one step.
_MAX_IMAGES = 100
#: Label smoothing of the temperature, in pseudo-examples over all classes.
_PSEUDO_EXAMPLES = 0.25


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
        The task of the step at which left-out support images are most likely is returned, so this is the most steps
        that count. "auto" gives up early where the first ones bring little, and returns ``task`` itself unless
        the support set as a whole becomes ``MIN_GAIN`` nats more likely.
    batch_size : int
        Images in work at a time; it bounds memory.
    progress : bool
        Show a bar.

    Raises
    ------
    ValueError
        ``steps`` is out of its range, or positive where there is nothing to refine or to leave out: no FiLM
        parameters, or no class of two images.
    """
    check_steps(steps)
    automatic = steps == "auto"
    labels = task.support_labels
    film, most = task.film, AUTO_STEPS if automatic else int(steps)
    if most == 0 or (automatic and (film is None or int(labels.bincount().max()) < 2)):
        return task
    if film is None:
        raise ValueError('refine needs FiLM parameters: adapt=True and a checkpoint that adapts, or refine="auto"')
    if int(labels.bincount().max()) < 2:
        raise ValueError('refine needs a class of at least two support images: add images, or take refine="auto"')

    folds = _folds(labels)
    first, slopes = _held_out_loss(task, folds)
    best, least, now = task, first, task
    gates = torch.ones(len(film), 2, device=labels.device, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=_LEARNING_RATE)
    every = -(-len(labels) // _MAX_IMAGES)
    for step in tqdm(range(most), desc="refine", unit="step", leave=False, disable=not progress):
        wanted = MIN_GAIN / 2 if step >= _TRIAL_STEPS else 0.0
        if automatic and (first < MIN_GAIN or first - least < wanted):
            break
        rows = slice(step % every, None, every)
        gates.grad = _gradient(model, film, gates, images[rows], slopes[rows], task.dtype, batch_size)
        optimiser.step()
        now = model.with_film(gated(film, gates.detach()), task.head, task.dtype)
        now = now.refit(now.features(images, batch_size), labels)
        loss, slopes = _held_out_loss(now, folds)
        if loss < least:
            best, least = now, loss
    return task if automatic and first - least < MIN_GAIN else best


def gated(film: Film, gates: Tensor) -> Film:
    """FiLM parameters of p positions behind gates (p, 2): 0 changes nothing, 1 is ``film``."""
    pairs = zip(film.items(), gates, strict=True)
    return Film({name: (1 + a * (gamma - 1), b * beta) for (name, (gamma, beta)), (a, b) in pairs})


def _folds(labels: Tensor) -> Tensor:
    """Fold 0 to _FOLDS - 1 of each image (n,), -1 for one that is alone in its class and cannot be left out.

    Classes start at different folds, so that folds are of nearly one size, and none has a whole class.
    """
    folds = torch.empty_like(labels)
    for k, count in enumerate(labels.bincount().tolist()):
        members = torch.arange(count, device=labels.device)
        folds[labels == k] = (members + k) % _FOLDS if count > 1 else -1
    return folds


def _held_out_loss(task: AdaptedTask, folds: Tensor) -> tuple[float, Tensor]:
    """Minus the log-likelihood of the support set, in nats, and its gradient by the support features (n, d).

    Each fold is classified by the head fitted to the others, with the settings that it chose on all and at the
    temperature that suits best.
    """
    features, labels = task.support_features.detach().requires_grad_(), task.support_labels
    with torch.enable_grad():
        x = task.head_features(features)
        head = _with_fixed_settings(task.head, x.detach(), labels)
        out = [folds == fold for fold in folds.unique().tolist() if fold >= 0]
        logits = torch.cat([head(x[~fold], labels[~fold], x[fold]) for fold in out])
        targets = torch.cat([labels[fold] for fold in out])
        temperature = temperature_fit(logits, targets, _PSEUDO_EXAMPLES / logits.shape[1]).temperature
        loss = F.cross_entropy(logits / temperature, targets, reduction="sum")
        (slopes,) = torch.autograd.grad(loss, features)
    return float(loss), slopes


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
