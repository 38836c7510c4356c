"""Evaluation of one model on many sources: a table, and a JSON file that a killed run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from fewshot_mahalanobis.episodes.sources import load_source
from fewshot_mahalanobis.evaluation.evaluate import (
    Accuracy,
    Variant,
    evaluate_source,
    markdown_table,
    unadapted_features,
)
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

#: The variants that a report compares, with the heading of their columns.
VARIANTS = {
    "adapted": Variant(True, "mahalanobis"),
    "not adapted": Variant(False, "mahalanobis"),
    "adapted, Euclidean": Variant(True, "euclidean"),
    "not adapted, Euclidean": Variant(False, "euclidean"),
}


def evaluate(
    model: SimpleCNAPS,
    sources: Sequence[str],
    shots: Sequence[int] = (1, 5),
    *,
    results: str | Path | None = None,
    way: int = 5,
    queries: int = 10,
    episodes: int = 600,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate on every source at every number of shots.

    Parameters
    ----------
    model : SimpleCNAPS
    sources : list of str
        Paths as :func:`load_source` takes them. A source of fewer than ``way`` classes is evaluated with
        the ways it has, and says so.
    shots : list of int
    results : path, optional
        JSON file that is written after every source and read at the start: what it holds for the same
        settings is not computed again.
    way, queries, episodes, seed, dtype, progress
        As for :func:`evaluate_source`.

    Returns
    -------
    list of dict
        One record a source and shot: "source", "way", "shot", "queries", "episodes", "seed", "precision"
        and "accuracy", which maps a variant to [mean, half-width of the 95 % interval] in percent.
    """
    file = Path(results) if results is not None else None
    records: list[dict[str, Any]] = json.loads(file.read_text()) if file is not None and file.exists() else []
    settings = {"queries": queries, "episodes": episodes, "seed": seed, "precision": str(dtype).removeprefix("torch.")}
    wanted: list[dict[str, Any]] = []
    for path in tqdm(sources, desc="sources", disable=not progress):
        source = load_source(path, size=model.image_size)
        ways = min(way, len(source.class_names))
        plain: Tensor | None = None
        for shot in shots:
            key = {"source": source.name, "way": ways, "shot": shot, **settings}
            record = next((r for r in records if key.items() <= r.items()), None)
            if record is None:
                if plain is None:
                    plain = unadapted_features(model, source, dtype=dtype, progress=progress)
                found = evaluate_source(
                    model,
                    source,
                    VARIANTS.values(),
                    way=ways,
                    shot=shot,
                    queries=queries,
                    episodes=episodes,
                    seed=seed,
                    dtype=dtype,
                    plain_features=plain,
                    progress=progress,
                )
                accuracies = {name: Accuracy.of(found[variant]) for name, variant in VARIANTS.items()}
                record = {**key, "accuracy": {n: [100 * a.mean, 100 * a.half_width] for n, a in accuracies.items()}}
                records.append(record)
                if file is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    temporary = file.with_name(file.name + ".part")
                    temporary.write_text(json.dumps(records, indent=1) + "\n")
                    os.replace(temporary, file)
            wanted.append(record)
    return wanted


def _averaged(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Mean over the sources of full way, for each number of shots."""
    full = max(record["way"] for record in records)
    for shot in sorted({record["shot"] for record in records}):
        chosen = [r["accuracy"] for r in records if r["shot"] == shot and r["way"] == full]
        means = {name: float(np.mean([accuracy[name][0] for accuracy in chosen])) for name in VARIANTS}
        yield f"average of {len(chosen)}, {full}-way {shot}-shot", means


def to_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The records of :func:`evaluate` as a Markdown table, accuracies in percent with 95 % intervals."""
    rows = [
        [f"{r['source']}, {r['way']}-way {r['shot']}-shot", *(f"{m:.1f} ± {h:.1f}" for m, h in r["accuracy"].values())]
        for r in sorted(records, key=lambda r: r["shot"])
    ]
    rows += [[title, *(f"{means[name]:.1f}" for name in VARIANTS)] for title, means in _averaged(records)]
    return markdown_table(rows, ["source", *VARIANTS])
