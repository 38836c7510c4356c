"""Calibration error of every head with temperature="auto", compared with a temperature of 1.

    python -m benchmarks.temperature DATA_DIR

Each head is that of ``SimpleCNAPSClassifier(checkpoint, head=...)``, on 5-way tasks of 2, 3, 5 and 10 shots with 10
queries a class, from validation classes. The features of a task are computed once, for all heads.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from benchmarks.calibration import expected_calibration_error
from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.heads import make_head
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

CHECKPOINTS = ("efficientnet-lite0", "resnet18")
HEADS = ("auto", "mahalanobis", "euclidean", "manhattan", "cosine", "dot_product")
#: Image sets of validation classes, and the seeds of their tasks.
SETS = {"mini_imagenet_val.zip:val": 4, "cub200_2010.zip:valid": 3}
WAY, SHOTS, QUERIES = 5, (2, 3, 5, 10), 10
TEMPERATURES = (1.0, "auto")

#: One task: confidence of each query's label, and whether it is right.
Answers = tuple[NDArray[np.float64], NDArray[np.bool_]]


def draw(source: ImageSource, shot: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the support set (5, shot) and of the queries (5, 10)."""
    of_class = source.indices_of_class()
    classes = rng.choice(len(of_class), WAY, replace=False)
    rows = np.stack([rng.permutation(of_class[index])[: shot + QUERIES] for index in classes])
    return rows[:, :shot], rows[:, shot:]


def answers(
    checkpoint: str, source: ImageSource, shot: int, seed: tuple[int, ...]
) -> Iterator[tuple[str, str, Answers]]:
    """(head, temperature, answers) on one task."""
    support, queries = draw(source, shot, np.random.default_rng(seed))
    labels = np.arange(WAY).repeat(shot)
    classifier = SimpleCNAPSClassifier(checkpoint, precision="float32").fit(
        list(source.images[support.ravel()]), labels
    )
    features = classifier.fitted_head_.support
    query_features = torch.from_numpy(classifier.transform(list(source.images[queries.ravel()])))
    truth = torch.arange(WAY).repeat_interleave(QUERIES)
    for name in HEADS:
        head = make_head(name, classifier.model_.config, classifier.model_.head)
        for temperature in TEMPERATURES:
            fitted = FittedHead.fit(head, features, torch.from_numpy(labels), temperature=temperature)
            p, predicted = fitted.log_probabilities(fitted.logits(query_features)).exp().max(dim=1)
            yield name, str(temperature), (p.double().numpy(), (predicted == truth).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=int, default=20, help="of each set and number of shots")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # that two examples of each class are few
    for checkpoint in CHECKPOINTS:
        errors: dict[tuple[str, int, str], list[float]] = {}
        for name, seed in SETS.items():
            source = load_source(arguments.data / name, size=load_checkpoint(checkpoint).image_size)
            for shot in SHOTS:
                found: dict[tuple[str, str], list[Answers]] = {}
                for task in tqdm(range(arguments.tasks), f"{checkpoint}, {name}, {shot} shots"):
                    for head, temperature, said in answers(checkpoint, source, shot, (task, shot, seed)):
                        found.setdefault((head, temperature), []).append(said)
                for (head, temperature), said_of in found.items():
                    confidence, right = (np.concatenate(parts) for parts in zip(*said_of, strict=True))
                    error = 100 * expected_calibration_error(confidence, right)
                    errors.setdefault((head, shot, temperature), []).append(error)
        rows = [
            [head, *(" → ".join(f"{np.mean(errors[head, shot, str(t)]):.1f}" for t in TEMPERATURES) for shot in SHOTS)]
            for head in HEADS
        ]
        print(f"\n{checkpoint}: expected calibration error in per cent, temperature 1 → auto, mean of the sets\n")
        print(markdown_table(rows, ["head", *(f"{shot} shots" for shot in SHOTS)]), flush=True)


if __name__ == "__main__":
    main()
