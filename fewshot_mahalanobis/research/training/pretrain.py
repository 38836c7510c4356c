"""Supervised training of the backbone f_theta on folders or zips of class folders.

The network that meta-training freezes is trained as an ordinary classifier first (Bateni et al., CVPR 2020, section 5).
The image size grows during training, which about halves the time of an epoch. With a teacher the network also learns
the features that a stronger network has of the same crops (Romero et al., "FitNets", ICLR 2015).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.networks.devices import native_dtype, precision_name
from fewshot_mahalanobis.networks.pretrained import pretrained_extractor
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.training.augment import (
    is_grey,
    random_brightness_contrast,
    random_flips,
    random_resized_crops,
    random_turns,
    to_other_domains,
)
from fewshot_mahalanobis.research.training.recipes import PretrainRecipe
from fewshot_mahalanobis.research.training.run import (
    RunFolder,
    autocast,
    ignore_stop_signals,
    image_size_at,
    open_training_source,
    resnet18_weights,
    shared_out,
    start_processes,
    stopped_between_steps,
)

#: Steps between reports; states are saved with reports.
REPORT_EVERY = 10
#: Number of possible rotations, in quarter turns.
TURNS = 4
#: Weight of the teacher's features in the loss, beside that of the labels. It was not tuned.
TEACHER_WEIGHT = 4.0


class TrainingImages(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Augmented images, labels and quarter turns, by number.

    Each is a pure function of (recipe, number), so that any worker can prepare it. Step ``i`` begins with number
    ``i * batch_size``. Every epoch is a permutation of all images, without those that do not fill a batch.
    """

    def __init__(self, sources: Sequence[ImageSource], recipe: PretrainRecipe) -> None:
        self.recipe = recipe
        self.images = [source.images for source in sources]
        self.grey = [recipe.other_domains > 0 and is_grey(source) for source in sources]
        self.class_names = sorted({name for source in sources for name in source.class_names})
        # Classes of the same name are one class: subsets of ImageNet share WordNet ids.
        index = {name: i for i, name in enumerate(self.class_names)}
        self.labels = torch.from_numpy(
            np.concatenate([np.array([index[n] for n in s.class_names])[s.labels] for s in sources])
        )
        self.offsets = np.cumsum([0, *(len(s.images) for s in sources)])
        self.steps_per_epoch = len(self.labels) // recipe.batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(f"{len(self.labels)} images are fewer than one batch of batch_size = {recipe.batch_size}")
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
        if recipe.other_domains:
            image = to_other_domains(image, recipe.other_domains, self.grey[source], generator)
        image, turns = random_turns(image, recipe.rotation, generator)
        return image[0], self.labels[chosen], turns[0]


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def learning_rate(step: int, steps: int, recipe: PretrainRecipe) -> float:
    """Return the learning rate of a step: linear warm-up to the peak, then half a cosine to zero."""
    warm = max(1, round(recipe.warmup * steps))
    if step < warm:
        return recipe.peak_lr * (step + 1) / warm
    return recipe.peak_lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def class_loss(outputs: Tensor, labels: Tensor, recipe: PretrainRecipe) -> Tensor:
    """Cross-entropy of outputs (n, positions, classes) averaged over positions; if dense, mean over all positions."""
    if recipe.dense:
        labels = labels[:, None].expand(-1, outputs.shape[1])
        return F.cross_entropy(outputs.mT, labels, label_smoothing=recipe.label_smoothing)
    return F.cross_entropy(outputs.mean(1), labels, label_smoothing=recipe.label_smoothing)


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
    """Train the backbone. A killed run continues when started again, with identical results on a CPU.

    With ``accelerate launch`` every process calls this function and does its share of each batch. On GPUs the processes
    share BatchNorm statistics.

    Parameters
    ----------
    recipe : PretrainRecipe
    output : path
        Run folder, the same in every process. The result is its ``backbone.safetensors``.
    device : {"auto", "cpu"}
        "auto": a GPU if there is one.
    workers : int
        Processes that prepare images, per process of the run; 0: the process itself.
    lazy : bool
        Decode images on demand instead of keeping them in memory (21 kB per image and process).
    tensorboard : bool
        Also write logs for TensorBoard, in the run folder.
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
        The recipe does not fit the sources, the folder holds a run with another recipe, or training diverges.

    Warns
    -----
    UserWarning
        Several processes train on CPUs: BatchNorm then uses the statistics of each process's share of the batch.
    """
    accelerator = start_processes(device)
    place = accelerator.device
    share = shared_out(recipe.batch_size, "batch_size", accelerator)
    dtype = native_dtype(recipe.precision, place)
    recorded = asdict(recipe) | {"precision": precision_name(dtype)}
    run = RunFolder(output, recorded, main=accelerator.is_main_process, tensorboard=tensorboard)
    settings: dict[str, Any] = {"root": recipe.root, "size": recipe.image_size, "lazy": lazy}
    images = TrainingImages([open_training_source(source, **settings) for source in recipe.sources], recipe)
    validation = None
    if recipe.validation is not None and accelerator.is_main_process:
        validation = NearestMean(open_training_source(recipe.validation, **settings), dtype)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        backbone = FilmResNet18()
        classes = len(images.class_names)
        turns_end = classes + (TURNS if recipe.rotation else 0)
        teacher = None
        if recipe.teacher is not None:
            teacher = Teacher(recipe.teacher, recipe.teacher_size, dtype).to(place)
        outputs = turns_end + (0 if teacher is None else teacher.out_features)
        model: nn.Module = PositionClassifier(backbone, outputs)
    if accelerator.num_processes > 1:
        if place.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        else:
            warnings.warn(
                f"BatchNorm statistics are shared between GPUs only: each of the {accelerator.num_processes} processes "
                f"normalises with its own {share} of {recipe.batch_size} images",
                stacklevel=2,
            )
    model.to(place).to(memory_format=torch.channels_last)
    # Weight decay only for matrices: the scales and shifts of BatchNorm would fight it.
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
        backbone.load_state_dict(resnet18_weights(recipe.init))
    network = accelerator.prepare_model(model)
    accelerator.wait_for_everyone()

    steps = images.steps
    numbers = range(start * recipe.batch_size, len(images))
    loader = DataLoader(
        images,
        batch_size=share,
        sampler=numbers[accelerator.process_index :: accelerator.num_processes],
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        pin_memory=place.type == "cuda",
        generator=torch.Generator(),  # else workers would be seeded by the global generator
    )
    reported, saved = time.monotonic(), -math.inf  # the first step is saved: it may have come late
    losses: list[Tensor] = []
    bar = tqdm(
        loader, total=steps, initial=start, disable=not progress or not accelerator.is_main_process, unit="batch"
    )
    bar.set_description("pretrain")
    with stopped_between_steps(accelerator) as stop:
        for step, (batch, labels, turns) in enumerate(bar, start):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, recipe)
            batch = batch.to(place, memory_format=torch.channels_last, non_blocking=True)
            with autocast(place, dtype):
                at_positions = network(batch).float()
            # The classifier is linear: the mean of its outputs is its output for the mean, the features.
            of_turns, of_teacher = at_positions[..., classes:].mean(1).tensor_split([turns_end - classes], dim=1)
            loss = class_loss(at_positions[..., :classes], labels.to(place, non_blocking=True), recipe)
            if recipe.rotation:
                loss = loss + F.cross_entropy(of_turns, turns.to(place, non_blocking=True))
            if teacher is not None:
                loss = loss + TEACHER_WEIGHT * F.mse_loss(of_teacher, teacher(batch))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            first, last, stopped = step == 0, step + 1 == steps, stop()
            epoch_ends = (step + 1) % images.steps_per_epoch == 0
            if first or last or stopped or epoch_ends or (step + 1) % REPORT_EVERY == 0:
                mean = float(accelerator.reduce(torch.stack(losses).mean(), "mean"))
                speed = len(losses) * recipe.batch_size / (time.monotonic() - reported)
                record: dict[str, Any] = {"loss": mean, "size": batch.shape[-1], "images_per_second": round(speed, 1)}
                if epoch_ends and validation is not None:
                    record["validation"] = validation.accuracy(backbone, place)
                    model.train()
                run.log(step + 1, **record)
                bar.set_postfix(loss=f"{mean:.3f}", px=batch.shape[-1])
                losses, reported = [], time.monotonic()
                if accelerator.is_main_process and (last or stopped or reported - saved > save_every):
                    run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
                    saved = time.monotonic()
                if stopped:
                    raise KeyboardInterrupt
    weights = {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise ValueError(f"the weights are NaN or infinite: try another folder than {output}, and a smaller peak_lr")
    if accelerator.is_main_process:
        with atomic_replace(run.path / "backbone.safetensors") as temporary:
            save_file(weights, temporary)
    accelerator.wait_for_everyone()
    with torch.device("meta"):
        trained = FilmResNet18()  # with ordinary BatchNorm again
    trained.load_state_dict(weights, assign=True)
    return trained.eval()


class PositionClassifier(nn.Module):
    """A linear classifier at every position of the backbone's last maps."""

    def __init__(self, backbone: FilmResNet18, outputs: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.linear = nn.Linear(backbone.out_features, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, h, w) -> outputs (n, positions, outputs)."""
        return cast("Tensor", self.linear(self.backbone.maps(images).flatten(2).mT))


class Teacher(nn.Module):
    """A frozen pretrained network; its features, standardised over the batch, are to be predicted linearly."""

    def __init__(self, name: str, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        extractor = pretrained_extractor(name, image_size=size)
        self.image_size, self.out_features = extractor.image_size, extractor.out_features
        self.network = extractor.for_inference(dtype=self.dtype)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> features (n, d) of mean 0 and variance 1, float32."""
        size = (self.image_size, self.image_size)
        resized = F.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
        return F.batch_norm(self.network(resized.to(self.dtype)), None, None, training=True)


class NearestMean:
    """5-way 5-shot accuracy of nearest class means on one source: a quick measure of how well features transfer.

    Classes with fewer than 20 images give fewer than 15 queries; those with fewer than 6 are not drawn. ValueError if
    fewer than 5 classes have 6.
    """

    WAY, SHOT, QUERIES = 5, 5, 15

    def __init__(self, source: ImageSource, dtype: torch.dtype, episodes: int = 400) -> None:
        self._source = source
        self._dtype = dtype
        sampler = FixedEpisodes(source, self.WAY, self.SHOT, self.QUERIES)
        self._episodes = [sampler.draw(index) for index in range(episodes)]

    def accuracy(self, backbone: FilmResNet18, device: torch.device) -> float:
        """Return the mean accuracy over the episodes, as a share of 1. Leaves the backbone in evaluation mode."""
        features = self._features(backbone.eval(), device)
        correct = []
        for episode in self._episodes:
            means = features[episode.support].view(self.WAY, self.SHOT, -1).mean(1)
            nearest = torch.cdist(features[episode.query], means).argmin(1).numpy()
            correct.append(float((nearest == episode.query_labels).mean()))
        return float(np.mean(correct))

    def _features(self, backbone: FilmResNet18, device: torch.device) -> Tensor:
        n = len(self._source.images)
        batches = map(self._source.network_input, np.array_split(np.arange(n), math.ceil(n / 128)))
        with torch.no_grad(), autocast(device, self._dtype):
            return torch.cat([backbone(batch.to(device)).float().cpu() for batch in batches])
