"""Supervised training of the backbone f_theta on folders or zips of class folders.

The network that meta-training later freezes is an ordinary classifier first (Bateni et al., CVPR 2020, section 5).
Image size grows during training, which sees the same number of images in about half the time of full size throughout.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.images import to_network_range
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.training.augment import (
    random_brightness_contrast,
    random_flips,
    random_resized_crops,
    random_turns,
)
from fewshot_mahalanobis.training.recipes import PretrainRecipe
from fewshot_mahalanobis.training.run import (
    RunFolder,
    autocast,
    image_size_at,
    open_training_source,
    shared_out,
    start_processes,
)

#: Steps between reports; a state is saved with a report.
REPORT_EVERY = 10
#: Quarter turns that an image may stand in.
TURNS = 4


class TrainingImages(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Number -> augmented image, label and quarter turns.

    A pure function of (seed, number), so any worker of any process may make it. The numbers of step
    ``i`` are those from ``i * batch_size``; every epoch is a permutation of all images, of which those that fill no
    batch are left out.
    """

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
        self.steps_per_epoch = len(self.labels) // recipe.batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(f"{len(self.labels)} images are fewer than one batch of {recipe.batch_size}")
        self.steps = self.steps_per_epoch * recipe.epochs
        self._permutation: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self.steps * self.recipe.batch_size

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        recipe = self.recipe
        epoch, position = divmod(number, self.steps_per_epoch * recipe.batch_size)
        if self._permutation is None or self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(_seed(recipe.seed, 0, epoch))
            self._permutation = (epoch, torch.randperm(len(self.labels), generator=generator))
        chosen = int(self._permutation[1][position])
        source = int(np.searchsorted(self.offsets, chosen, side="right")) - 1
        raw = torch.from_numpy(self.images[source][[chosen - int(self.offsets[source])]])
        size = image_size_at(number // recipe.batch_size / self.steps, recipe.phases)
        generator = torch.Generator().manual_seed(_seed(recipe.seed, 1, number))
        crop = random_resized_crops(raw, size, recipe.min_crop_area, generator)
        image = to_network_range(random_flips(crop, generator))
        if recipe.colour_jitter:
            image = random_brightness_contrast(image, recipe.colour_jitter, generator)
        image, turns = random_turns(image, recipe.rotation, generator)
        return image[0], self.labels[chosen], turns[0]


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
    lazy: bool = False,
    tensorboard: bool = False,
    save_every: float = 300.0,
    progress: bool = True,
) -> FilmResNet18:
    """Train the backbone; killed and started again, it continues where it stood, to the bit on a CPU.

    Called in every process that ``accelerate launch`` started, it does this process's share of every batch. On GPUs
    the processes share the statistics of BatchNorm.

    Parameters
    ----------
    recipe : PretrainRecipe
    output : path
        Run folder, the same in every process; ``backbone.safetensors`` stands there at the end.
    device : {"auto", "cpu"}
        "auto": a GPU where there is one.
    workers : int
        Processes that prepare images, for each process of the run; 0 prepares them in this one.
    lazy : bool
        Decode images when they are asked for, not once into memory (21 kB an image, in every process of the run).
    tensorboard : bool
        Write logs for TensorBoard, in the run folder.
    save_every : float
        Seconds between saved states.
    progress : bool
        Show a progress bar.

    Returns
    -------
    FilmResNet18
        In evaluation mode, on the CPU.

    Raises
    ------
    ValueError
        The recipe cannot be followed, or the folder holds a run with another one.

    Warns
    -----
    UserWarning
        Several processes train on CPUs: BatchNorm then normalises with each process's share of the batch.
    """
    accelerator = start_processes(device)
    place = accelerator.device
    share = shared_out(recipe.batch_size, "batch_size", accelerator)
    run = RunFolder(output, asdict(recipe), main=accelerator.is_main_process, tensorboard=tensorboard)
    settings: dict[str, Any] = {"root": recipe.root, "size": recipe.image_size, "lazy": lazy}
    images = TrainingImages([open_training_source(source, **settings) for source in recipe.sources], recipe)
    validation = None
    if recipe.validation is not None and accelerator.is_main_process:
        validation = open_training_source(recipe.validation, **settings)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        backbone = FilmResNet18()
        classes = len(images.class_names)
        outputs = classes + TURNS if recipe.rotation else classes
        model: nn.Module = nn.Sequential(backbone, nn.Linear(backbone.out_features, outputs))
    if accelerator.num_processes > 1:
        if place.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        else:
            warnings.warn(
                f"PyTorch shares BatchNorm's statistics between GPUs alone: each of {accelerator.num_processes} "
                f"processes normalises with its own {share} of {recipe.batch_size} images",
                stacklevel=2,
            )
    model.to(place).to(memory_format=torch.channels_last)
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
    if (state := run.resume()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    elif recipe.init is not None:
        backbone.load_state_dict(load_file(recipe.init))
    network = accelerator.prepare_model(model)
    accelerator.wait_for_everyone()

    steps = images.steps
    numbers = range(start * recipe.batch_size, len(images))
    loader = DataLoader(
        images,
        batch_size=share,
        sampler=numbers[accelerator.process_index :: accelerator.num_processes],
        num_workers=workers,
        pin_memory=place.type == "cuda",
        generator=torch.Generator(),  # else the workers' seed is drawn from the global one
    )
    saved = reported = time.monotonic()
    losses: list[Tensor] = []
    bar = tqdm(
        loader, total=steps, initial=start, disable=not progress or not accelerator.is_main_process, unit="batch"
    )
    bar.set_description("pretrain")
    for step, (batch, labels, turns) in enumerate(bar, start):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe)
        batch = batch.to(place, memory_format=torch.channels_last, non_blocking=True)
        with autocast(place, recipe.precision):
            logits = network(batch)
        of_classes, of_turns = logits.float().tensor_split([classes], dim=1)
        loss = F.cross_entropy(of_classes, labels.to(place, non_blocking=True), label_smoothing=recipe.label_smoothing)
        if recipe.rotation:
            loss = loss + F.cross_entropy(of_turns, turns.to(place, non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        last, epoch_ends = step + 1 == steps, (step + 1) % images.steps_per_epoch == 0
        if last or epoch_ends or (step + 1) % REPORT_EVERY == 0:
            mean = float(accelerator.reduce(torch.stack(losses).mean(), "mean"))
            speed = len(losses) * recipe.batch_size / (time.monotonic() - reported)
            record: dict[str, Any] = {"loss": mean, "size": batch.shape[-1], "images_per_second": round(speed, 1)}
            if epoch_ends and validation is not None:
                record["validation"] = nearest_mean_accuracy(backbone, validation, place)
                model.train()
            run.log(step + 1, **record)
            bar.set_postfix(loss=f"{mean:.3f}", px=batch.shape[-1])
            losses, reported = [], time.monotonic()
            if accelerator.is_main_process and (last or reported - saved > save_every):
                run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
                saved = time.monotonic()
    weights = {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}
    if accelerator.is_main_process:
        save_file(weights, str(run.path / "backbone.safetensors"))
    accelerator.wait_for_everyone()
    with torch.device("meta"):
        trained = FilmResNet18()  # with the BatchNorm that adaptation knows
    trained.load_state_dict(weights, assign=True)
    return trained.eval()


def nearest_mean_accuracy(
    backbone: FilmResNet18, source: ImageSource, device: torch.device, episodes: int = 400, seed: int = 0
) -> float:
    """5-way 5-shot accuracy of the nearest class mean on ``source``: how well features transfer, in seconds."""
    backbone.eval()
    with torch.no_grad(), autocast(device, "bfloat16"):
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
