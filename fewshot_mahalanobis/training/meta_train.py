"""Meta-training: the adaptation networks learn from episodes, the backbone stays frozen.

Bateni et al., CVPR 2020, appendix "Experimental details": Adam at 5e-4, 16 tasks a step, and an L2
penalty of 0.001 on the scales of the FiLM generator. Here the learning rate falls to zero by half a
cosine, and early tasks are seen at a smaller image size: both suit runs far shorter than the paper's
110,000 tasks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from fewshot_mahalanobis.episodes.sampling import draw_episode, draw_training_shots, episode_rng
from fewshot_mahalanobis.episodes.sources import ImageSource, load_source
from fewshot_mahalanobis.evaluation import evaluate_source
from fewshot_mahalanobis.networks.generators import LayerGenerator
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.training.run import RunFolder, autocast, choose_device, image_size_at

#: The name that stands for the source which the project draws itself.
GLYPHS = "glyphs"


@dataclass(frozen=True)
class MetaTrainRecipe:
    """Settings of :func:`meta_train`.

    Tasks come from every entry of ``sources`` equally often: one that is named twice gives twice as many.
    ``model`` holds arguments of :class:`SimpleCNAPS`, ``feature_scale`` is the factor of
    :func:`scale_features_`, ``phases`` are (share of training, image side in pixels). ``init`` is a
    checkpoint of the same ``model`` whose adaptation networks to start from instead of random weights.
    """

    sources: tuple[str, ...]
    backbone: str
    validation: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    feature_scale: float = 1.0
    tasks: int = 16_000
    tasks_per_step: int = 16
    learning_rate: float = 5e-4
    penalty: float = 0.001
    queries: int = 3
    phases: tuple[tuple[float, int], ...] = ((0.5, 64), (0.5, 84))
    seed: int = 0


class Task(NamedTuple):
    """One training episode: images (n, 3, s, s) in [-1, 1], labels 0 to way - 1."""

    support_images: Tensor
    support_labels: Tensor
    query_images: Tensor
    query_labels: Tensor


class TrainingTasks(Dataset[Task]):
    """Task number -> task; a pure function of (seed, number), so any worker may make it."""

    def __init__(self, sources: Sequence[ImageSource], recipe: MetaTrainRecipe) -> None:
        self.sources = sources
        self.recipe = recipe
        self.classes = [source.indices_of_class() for source in sources]
        self.grey = [is_grey(source) for source in sources]

    def __len__(self) -> int:
        return self.recipe.tasks

    def __getitem__(self, number: int) -> Task:
        rng = episode_rng(self.recipe.seed, number)
        which = int(rng.integers(len(self.sources)))
        classes = self.classes[which]
        episode = draw_episode(classes, draw_training_shots(classes, rng), self.recipe.queries, rng)
        chosen = np.concatenate([episode.support, episode.query])
        size = image_size_at(number / len(self), self.recipe.phases)
        images = one_camera(self.sources[which].network_input(chosen), size, self.grey[which], rng)
        support, query = images.split([len(episode.support), len(episode.query)])
        return Task(support, torch.from_numpy(episode.support_labels), query, torch.from_numpy(episode.query_labels))


def is_grey(source: ImageSource) -> bool:
    """Whether a sample of the source's images has three equal channels."""
    sample = source.images[:: max(1, len(source.images) // 64)]
    return bool((sample == sample[..., :1]).all())


def one_camera(images: Tensor, size: int, grey: bool, rng: np.random.Generator) -> Tensor:
    """All images of a task (n, 3, h, w), in [-1, 1], seen through one random camera; -> (n, 3, size, size).

    Every image of the task changes alike (mirror, quarter turn, framing, negative, coarse resolution,
    brightness, contrast), so classes stay what they are while the task becomes one of another domain.
    Turns, framing and negatives are for drawings; photographs lose their colours at times.
    """
    if rng.random() < 0.5:
        images = images.flip(3)
    if grey:
        images = torch.rot90(images, int(rng.integers(4)), dims=(2, 3))
        framing = rng.random()
        if framing < 0.4:  # scanned characters are often cut out one by one
            images = cut_to_ink(images, rng.uniform(0.0, 0.3))
        elif framing < 0.6:
            margin = int(rng.uniform(0, 0.2) * images.shape[2])
            images = images[:, :, margin : images.shape[2] - margin, margin : images.shape[3] - margin]
        if rng.random() < 0.5:
            images = -images
    elif rng.random() < 0.1:
        images = images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    if rng.random() < (0.65 if grey else 0.3):
        coarse = round(math.exp(rng.uniform(math.log(7), math.log(32)))) if grey else int(rng.integers(24, 57))
        images = F.interpolate(images, (coarse, coarse), mode="bilinear", antialias=True)
    if images.shape[2] != size:
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    contrast, brightness = rng.uniform(0.7, 1.2), rng.uniform(-0.2, 0.2)
    return (images * contrast + brightness).clamp(-1, 1).contiguous(memory_format=torch.channels_last)


def cut_to_ink(images: Tensor, margin: float) -> Tensor:
    """Each image (n, 3, h, w) zoomed to the square around what is darker than mid-grey; -> the same shape.

    ``margin`` is left free round it, as a share of the square's side. An image without ink stays whole.
    """
    n, _, height, width = images.shape
    ink = images[:, 0] < 0
    boxes = []
    for marked, length in ((ink.any(2), height), (ink.any(1), width)):
        first, last = marked.byte().argmax(1), length - marked.flip(1).byte().argmax(1)
        boxes.append((torch.where(marked.any(1), first, 0), last))
    (top, bottom), (left, right) = boxes
    side = torch.maximum((bottom - top) / height, (right - left) / width) * (1 + margin)
    # affine_grid takes the source of the result's corners, in coordinates from -1 to 1.
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, 0, 2], theta[:, 1, 2] = (left + right) / width - 1, (top + bottom) / height - 1
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def scale_features_(model: SimpleCNAPS, factor: float) -> None:
    """Multiply the features of the backbone, adapted or not, by ``factor``, exactly, by rescaling layer 4.

    beta I in equation 3 presumes a feature scale, while the scale that supervised training ends at is an
    accident: its classifier adjusts to any.
    """
    first, second = model.feature_extractor.blocks[-1]
    with torch.no_grad():
        for bn in (first.bn2, cast(nn.Sequential, first.downsample)[1], second.bn2):
            cast(Tensor, bn.weight).mul_(factor)
            cast(Tensor, bn.bias).mul_(factor)
        second.conv1.weight.div_(factor)
        if model.film_generator is not None:  # beta is added to what has been scaled
            for scales in cast(LayerGenerator, model.film_generator.layers[-1]).scales:
                cast(nn.ParameterDict, scales)["beta2"].mul_(factor)


def learning_rate(step: int, steps: int, recipe: MetaTrainRecipe) -> float:
    """Half a cosine from the recipe's rate to zero, after a few steps of warm-up."""
    warm = max(1, steps // 20)
    return recipe.learning_rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def meta_train(
    recipe: MetaTrainRecipe,
    output: str | Path,
    *,
    device: str = "auto",
    workers: int = 0,
    save_every: float = 300.0,
    validate_every: int = 200,
    progress: bool = True,
) -> SimpleCNAPS:
    """Meta-train; killed and started again, it continues where it stood.

    Parameters
    ----------
    recipe : MetaTrainRecipe
        A source named "glyphs" is the one that the project draws itself.
    output : path
        Run folder; the checkpoint stands in its sub-folder ``checkpoint`` at the end.
    device : str
        "auto" (CUDA where there is one), or a torch device.
    workers : int
        Processes that prepare tasks; 0 prepares them in this one.
    save_every : float
        Seconds between saved states.
    validate_every : int
        Steps between reports on the validation sources.
    progress : bool
        Show a progress bar.

    Returns
    -------
    SimpleCNAPS
        In evaluation mode.
    """
    from fewshot_mahalanobis.checkpoints import load_checkpoint, save_checkpoint

    place = choose_device(device)
    run = RunFolder(output, asdict(recipe))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = SimpleCNAPS(**recipe.model)
    if model.film_generator is None:
        raise ValueError("a model without adaptation has nothing to meta-train")
    if recipe.init is not None:
        before = load_checkpoint(recipe.init)
        if {**before.config, "scale": model.config["scale"]} != model.config:  # s is no weight
            raise ValueError(f"the checkpoint {recipe.init!r} is of another model: {before.config}, not {model.config}")
        model.load_state_dict(before.state_dict())
    model.feature_extractor.load_state_dict(load_file(recipe.backbone))
    scale_features_(model, recipe.feature_scale)
    size = model.image_size
    loaded = {source: _load(source, size) for source in recipe.sources}
    sources = [loaded[source] for source in recipe.sources]
    validation = [load_source(s, size=size) for s in recipe.validation]
    model.to(place).to(memory_format=torch.channels_last)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=recipe.learning_rate)
    steps, start = recipe.tasks // recipe.tasks_per_step, 0
    if (state := run.load()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    tasks = iter(
        DataLoader(
            TrainingTasks(sources, recipe),
            batch_size=None,
            sampler=range(start * recipe.tasks_per_step, steps * recipe.tasks_per_step),
            num_workers=workers,
            generator=torch.Generator(),  # else the workers' seed is drawn from the global one
        )
    )
    saved = reported = time.monotonic()
    losses: list[Tensor] = []
    right: list[Tensor] = []
    bar = tqdm(range(start, steps), total=steps, initial=start, disable=not progress, desc="meta-train", unit="step")
    for step in bar:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe)
        optimizer.zero_grad(set_to_none=True)
        for _ in range(recipe.tasks_per_step):
            task = Task(*(part.to(place, non_blocking=True) for part in next(tasks)))
            with autocast(place):
                logits = model(task.support_images, task.support_labels, task.query_images)
            loss = F.cross_entropy(logits, task.query_labels)
            (loss / recipe.tasks_per_step).backward()
            losses.append(loss.detach())
            right.append((logits.argmax(1) == task.query_labels).float().mean())
        (recipe.penalty * model.film_generator.penalty()).backward()
        optimizer.step()
        now, last = time.monotonic(), step + 1 == steps
        if last or (step + 1) % 10 == 0:
            mean, accuracy = float(torch.stack(losses).mean()), float(torch.stack(right).mean())
            record: dict[str, Any] = {"step": step + 1, "loss": round(mean, 4), "accuracy": round(accuracy, 4)}
            record["tasks_per_second"] = round(len(losses) / (now - reported), 2)
            if validation and (last or (step + 1) % validate_every == 0):
                record["validation"] = validation_accuracies(model, validation)
            run.log(**record)
            bar.set_postfix(loss=f"{mean:.3f}", accuracy=f"{accuracy:.3f}")
            losses, right, reported = [], [], time.monotonic()
        if last or now - saved > save_every:
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
            saved = time.monotonic()
    model.to("cpu").eval()
    save_checkpoint(model, run.path / "checkpoint", dtype=torch.float16)
    return model


def _load(source: str, size: int) -> ImageSource:
    if source != GLYPHS:
        return load_source(source, size=size)
    try:
        from fewshot_mahalanobis.episodes.glyphs import draw_glyphs
    except ImportError as error:
        raise ImportError(f'drawing glyphs needs {error.name}: pip install "fewshot-mahalanobis[training]"') from error
    return draw_glyphs(size=size)


def validation_accuracies(model: SimpleCNAPS, sources: Sequence[ImageSource]) -> dict[str, float]:
    """5-way 5-shot accuracy on each source, over few episodes: to see where a run stands."""
    model.eval()
    return {
        source.name: round(
            float(np.mean([*evaluate_source(model, source, queries=5, episodes=20, dtype=torch.bfloat16).values()])), 4
        )
        for source in sources
    }
