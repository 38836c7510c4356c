"""Supervised training of the backbone f_theta on folders or zips of class folders.

The network that meta-training later freezes is an ordinary classifier first (Bateni et al., CVPR 2020,
section 5). Image size grows during training, which sees the same number of images in about half the
time of full size throughout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from fewshot_mahalanobis.episodes.sources import ImageSource, load_source
from fewshot_mahalanobis.images import to_network_range
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.training.augment import (
    random_brightness_contrast,
    random_flips,
    random_resized_crops,
)
from fewshot_mahalanobis.training.run import RunFolder, autocast, choose_device, image_size_at

#: (share of training, image side in pixels), in order.
DEFAULT_PHASES = ((0.25, 40), (0.32, 48), (0.35, 64), (0.08, 84))


@dataclass(frozen=True)
class PretrainRecipe:
    """Settings of :func:`pretrain`. All but the sources have defaults that suit ImageNet-like photographs.

    ``init`` is a ``backbone.safetensors`` of an earlier run to start from instead of random weights.
    """

    sources: tuple[str, ...]
    validation: str | None = None
    init: str | None = None
    epochs: int = 8
    batch_size: int = 128
    peak_lr: float = 0.2
    warmup: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    min_crop_area: float = 0.35
    colour_jitter: float = 0.3
    phases: tuple[tuple[float, int], ...] = DEFAULT_PHASES
    image_size: int = 84
    seed: int = 0


class TrainingBatches(Dataset[tuple[Tensor, Tensor]]):
    """Batch number -> augmented batch; a pure function of (seed, number), so any worker may make it."""

    def __init__(self, sources: Sequence[ImageSource], recipe: PretrainRecipe) -> None:
        self.recipe = recipe
        self.images = [source.images for source in sources]
        self.class_names = sorted({name for source in sources for name in source.class_names})
        # Classes of one name are one class: ImageNet subsets share WordNet ids.
        index = {name: i for i, name in enumerate(self.class_names)}
        self.labels = torch.from_numpy(
            np.concatenate([np.array([index[n] for n in s.class_names])[s.labels] for s in sources])
        )
        self.offsets = np.cumsum([0, *(len(s.images) for s in sources)])
        self.per_epoch = len(self.labels) // recipe.batch_size
        if self.per_epoch == 0:
            raise ValueError(f"{len(self.labels)} images are fewer than one batch of {recipe.batch_size}")
        self._permutation: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self.per_epoch * self.recipe.epochs

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        epoch, position = divmod(step, self.per_epoch)
        if self._permutation is None or self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(_seed(recipe.seed, 0, epoch))
            self._permutation = (epoch, torch.randperm(len(self.labels), generator=generator))
        chosen = self._permutation[1][position * recipe.batch_size :][: recipe.batch_size]
        source = np.searchsorted(self.offsets, chosen.numpy(), side="right") - 1
        where = zip(source.tolist(), chosen.tolist(), strict=True)
        raw = [torch.from_numpy(self.images[s][i - int(self.offsets[s])]) for s, i in where]
        generator = torch.Generator().manual_seed(_seed(recipe.seed, 1, step))
        crops = random_resized_crops(
            torch.stack(raw), image_size_at(step / len(self), recipe.phases), recipe.min_crop_area, generator
        )
        images = to_network_range(random_flips(crops, generator))
        if recipe.colour_jitter:
            images = random_brightness_contrast(images, recipe.colour_jitter, generator)
        return images.contiguous(memory_format=torch.channels_last), self.labels[chosen]


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def learning_rate(step: int, steps: int, recipe: PretrainRecipe) -> float:
    """Linear warm-up to the peak, then half a cosine to zero."""
    warm = max(1, round(recipe.warmup * steps))
    if step < warm:
        return recipe.peak_lr * (step + 1) / warm
    return recipe.peak_lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def pretrain(
    recipe: PretrainRecipe,
    output: str | Path,
    *,
    device: str = "auto",
    workers: int = 0,
    save_every: float = 300.0,
    progress: bool = True,
) -> FilmResNet18:
    """Train the backbone; killed and started again, it continues where it stood.

    Parameters
    ----------
    recipe : PretrainRecipe
    output : path
        Run folder; ``backbone.safetensors`` stands there at the end.
    device : str
        "auto" (CUDA where there is one), or a torch device.
    workers : int
        Processes that prepare batches; 0 prepares them in this one.
    save_every : float
        Seconds between saved states.
    progress : bool
        Show a progress bar.

    Returns
    -------
    FilmResNet18
        In evaluation mode.
    """
    place = choose_device(device)
    run = RunFolder(output, asdict(recipe))
    batches = TrainingBatches([load_source(s, size=recipe.image_size) for s in recipe.sources], recipe)
    validation = load_source(recipe.validation, size=recipe.image_size) if recipe.validation else None
    steps = len(batches)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        backbone = FilmResNet18()
        classifier = nn.Linear(backbone.out_features, len(batches.class_names))
    model = (
        nn.ModuleDict({"backbone": backbone, "classifier": classifier}).to(place).to(memory_format=torch.channels_last)
    )
    # Weight decay acts on the matrices; on BatchNorm's scales and shifts it would fight the statistics.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_lr,
        momentum=recipe.momentum,
        nesterov=True,
    )
    start = 0
    if (state := run.load()) is None:
        if recipe.init is not None:
            backbone.load_state_dict(load_file(recipe.init))
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    loader: Iterator[tuple[Tensor, Tensor]] = iter(
        DataLoader(
            batches,
            batch_size=None,
            sampler=range(start, steps),
            num_workers=workers,
            generator=torch.Generator(),  # else the workers' seed is drawn from the global one
        )
    )
    saved = reported = time.monotonic()
    losses: list[Tensor] = []
    bar = tqdm(loader, total=steps, initial=start, disable=not progress, desc="pretrain", unit="batch", mininterval=10)
    for step, (images, labels) in enumerate(bar, start):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe)
        images, labels = images.to(place, non_blocking=True), labels.to(place, non_blocking=True)
        with autocast(place):
            logits = classifier(backbone(images))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=recipe.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        now, last = time.monotonic(), step + 1 == steps
        epoch_ends = (step + 1) % batches.per_epoch == 0
        if epoch_ends or last or (step + 1) % 50 == 0:
            mean = float(torch.stack(losses).mean())
            record = {"step": step + 1, "size": images.shape[-1], "loss": round(mean, 4)}
            record["images_per_second"] = round(len(losses) * recipe.batch_size / (now - reported), 1)
            if epoch_ends and validation is not None:
                record["validation"] = round(nearest_mean_accuracy(backbone, validation, place), 4)
                model.train()
            run.log(**record)
            bar.set_postfix(loss=f"{mean:.3f}", px=images.shape[-1])
            losses, reported = [], time.monotonic()
        if last or now - saved > save_every:
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
            saved = time.monotonic()
    weights = {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}
    save_file(weights, str(run.path / "backbone.safetensors"))
    return backbone.eval()


def nearest_mean_accuracy(
    backbone: FilmResNet18, source: ImageSource, device: torch.device, episodes: int = 400, seed: int = 0
) -> float:
    """5-way 5-shot accuracy of the nearest class mean on ``source``: how well features transfer, in seconds."""
    backbone.eval()
    with torch.no_grad(), autocast(device):
        batches = np.array_split(np.arange(len(source.images)), math.ceil(len(source.images) / 128))
        features = torch.cat([backbone(source.network_input(batch).to(device)).cpu() for batch in batches])
    rng = np.random.default_rng(seed)
    classes = source.indices_of_class()
    correct = []
    for _ in range(episodes):
        ways = rng.choice(len(classes), 5, replace=False)
        drawn = np.stack([rng.permutation(classes[way])[:20] for way in ways])
        means = features[drawn[:, :5]].mean(1)
        distances = torch.cdist(features[drawn[:, 5:]].flatten(0, 1), means)
        truth = torch.arange(5).repeat_interleave(drawn.shape[1] - 5)
        correct.append(float((distances.argmin(1) == truth).float().mean()))
    return float(np.mean(correct))
