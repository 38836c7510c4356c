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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.checkpoints.load import resnet18_weights
from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.networks.devices import native_dtype, precision_name
from fewshot_mahalanobis.networks.pretrained import pretrained_extractor
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.research.data.datasets import open_training_source
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
from fewshot_mahalanobis.research.training.recipes import PretrainRecipe, image_size_at
from fewshot_mahalanobis.research.training.run import (
    RunFolder,
    autocast,
    remaining,
    shared_out,
    start_processes,
    stopped_between_steps,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

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
    images, validation = _images(recipe, dtype, lazy=lazy, main=accelerator.is_main_process)
    model, objective = _model(recipe, len(images.class_names), accelerator, dtype)
    optimizer = _optimizer(model, recipe)
    start = 0
    if (state := run.resume()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    elif recipe.init is not None:
        model.backbone.load_state_dict(resnet18_weights(recipe.init))
    network = accelerator.prepare_model(model)
    accelerator.wait_for_everyone()

    first = start * recipe.batch_size
    loading = remaining(images, first, len(images), accelerator, workers=workers, batch_size=share)
    hidden = not progress or not accelerator.is_main_process
    reported, losses = time.monotonic(), list[Tensor]()
    with loading as batches, stopped_between_steps(accelerator) as stop:
        bar = tqdm(batches, total=images.steps, initial=start, disable=hidden, unit="batch", desc="pretrain")
        for step, batch in enumerate(bar, start):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, images.steps, recipe)
            losses.append(_train(network, objective, optimizer, batch, place, dtype))
            size = batch[0].shape[-1]
            last, stopped = step + 1 == images.steps, stop()
            epoch_ends = (step + 1) % images.steps_per_epoch == 0
            if step == 0 or last or stopped or epoch_ends or (step + 1) % REPORT_EVERY == 0:
                mean = float(accelerator.reduce(torch.stack(losses).mean(), "mean"))
                speed = len(losses) * recipe.batch_size / (time.monotonic() - reported)
                record: dict[str, Any] = {"loss": mean, "size": size, "images_per_second": round(speed, 1)}
                if epoch_ends and validation is not None:
                    record["validation"] = validation.accuracy(model.backbone, place)
                    model.train()
                run.log(step + 1, **record)
                bar.set_postfix(loss=f"{mean:.3f}", px=size)
                losses, reported = [], time.monotonic()
                run.save(partial(_state, model, optimizer, step + 1), now=last or stopped)
                if stopped:
                    raise KeyboardInterrupt
    trained = _finished(model.backbone, output)
    if accelerator.is_main_process:
        with atomic_replace(run.path / "backbone.safetensors") as temporary:
            save_file(trained.state_dict(), temporary)
    accelerator.wait_for_everyone()
    return trained


def _images(
    recipe: PretrainRecipe, dtype: torch.dtype, *, lazy: bool, main: bool
) -> tuple[TrainingImages, NearestMean | None]:
    """Open the training images and, in the main process, those to validate on."""
    opened = partial(open_training_source, root=recipe.root, size=recipe.image_size, lazy=lazy)
    images = TrainingImages([opened(source) for source in recipe.sources], recipe)
    if recipe.validation is None or not main:
        return images, None
    return images, NearestMean(opened(recipe.validation), dtype)


def _model(
    recipe: PretrainRecipe, classes: int, accelerator: Accelerator, dtype: torch.dtype
) -> tuple[PositionClassifier, Objective]:
    """Make the network with its classifier, from the recipe's seed, and the loss; both on the device."""
    place = accelerator.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        backbone = FilmResNet18()
        teacher = None
        if recipe.teacher is not None:
            teacher = Teacher(recipe.teacher, recipe.teacher_size, dtype).to(place)
        objective = Objective(recipe, classes, teacher)
        model = PositionClassifier(backbone, sum(objective.sizes))
    if accelerator.num_processes > 1:
        if place.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        else:
            share = recipe.batch_size // accelerator.num_processes
            warnings.warn(
                f"BatchNorm statistics are shared between GPUs only: each of the {accelerator.num_processes} processes "
                f"normalises with its own {share} of {recipe.batch_size} images",
                stacklevel=3,
            )
    return model.to(place).to(memory_format=torch.channels_last), objective


def _optimizer(model: nn.Module, recipe: PretrainRecipe) -> torch.optim.Optimizer:
    # Weight decay only for matrices: the scales and shifts of BatchNorm would fight it.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.SGD(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_lr,
        momentum=recipe.momentum,
        nesterov=True,
    )


def _train(
    network: nn.Module,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Tensor],
    place: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Take a step on a batch of images, labels and quarter turns; return its loss."""
    images, labels, turns = (part.to(place, non_blocking=True) for part in batch)
    images = images.contiguous(memory_format=torch.channels_last)
    with autocast(place, dtype):
        outputs = network(images).float()
    loss = objective(outputs, images, labels, turns)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a run continues from after ``step`` steps."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def _finished(backbone: FilmResNet18, output: str | Path) -> FilmResNet18:
    """Copy a trained network to the CPU, with ordinary BatchNorm; ValueError unless its weights are finite."""
    weights = {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise ValueError(f"the weights are NaN or infinite: try another folder than {output}, and a smaller peak_lr")
    with torch.device("meta"):
        trained = FilmResNet18()
    trained.load_state_dict(weights, assign=True)
    return trained.eval()


class Objective:
    """The loss of a batch: of its labels, its quarter turns, and the teacher's features.

    Attributes
    ----------
    sizes : list of int
        Outputs of the linear classifier for classes, turns and the teacher's features.
    """

    def __init__(self, recipe: PretrainRecipe, classes: int, teacher: Teacher | None) -> None:
        self.recipe, self.teacher = recipe, teacher
        self.sizes = [classes, TURNS if recipe.rotation else 0, 0 if teacher is None else teacher.out_features]

    def __call__(self, outputs: Tensor, images: Tensor, labels: Tensor, turns: Tensor) -> Tensor:
        """Loss of the outputs (n, positions, outputs) for images (n, 3, h, w), labels (n,) and quarter turns (n,)."""
        classes = self.sizes[0]
        loss = class_loss(outputs[..., :classes], labels, self.recipe)
        # The classifier is linear: the mean of its outputs is its output for the mean, the features.
        turn_logits, teacher_features = outputs[..., classes:].mean(1).split(self.sizes[1:], dim=1)
        if self.recipe.rotation:
            loss = loss + F.cross_entropy(turn_logits, turns)
        if self.teacher is not None:
            loss = loss + TEACHER_WEIGHT * F.mse_loss(teacher_features, self.teacher(images))
        return loss


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
