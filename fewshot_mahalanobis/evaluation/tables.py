"""Evaluation of one model on many sources: tables, and a JSON file that a killed run continues."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from fewshot_mahalanobis.data.datasets import open_source
from fewshot_mahalanobis.episodes.meta_dataset import EVALUATION, VariableEpisodes
from fewshot_mahalanobis.episodes.sampling import Episode, draw_episode, episode_rng
from fewshot_mahalanobis.data.sources import ImageSource
from fewshot_mahalanobis.evaluation.accuracy import (
    Accuracy,
    Scores,
    UnadaptedFeatures,
    Variant,
    evaluate_episodes,
    head_of,
    markdown_table,
)
from fewshot_mahalanobis.evaluation.paper_figures import data_set_of, published_figure
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

#: The variants that a report compares, with the heading of their columns.
VARIANTS = {
    variant.title: variant
    for variant in (
        Variant(True, "mahalanobis"),
        Variant(False, "mahalanobis"),
        Variant(True, "euclidean"),
        Variant(False, "euclidean"),
    )
}
#: A source of no more images is decoded once into memory: 21 kB an image of 84 x 84 pixels.
_IN_MEMORY = 100_000


def variants_of(
    model: SimpleCNAPS,
    heads: Sequence[str] = (),
    adapt: bool | None = None,
    *,
    task_covariance: bool = True,
    projection: bool = True,
) -> dict[str, Variant]:
    """The variants of a model to compare, by their titles.

    Parameters
    ----------
    model : SimpleCNAPS
    heads : sequence of str
        Default: the model's own, "mahalanobis" and "euclidean".
    adapt : bool, optional
        Only with or only without adaptation; by default both, where the model adapts.
    task_covariance : bool
        False adds the Mahalanobis head without the task's covariance ("-TR").
    projection : bool
        False adds every variant without the model's projection.

    Raises
    ------
    ValueError
        The model has no such head, no adaptation or no projection.
    """
    if adapt and model.config["adaptation"] == "none":
        raise ValueError("the checkpoint has no adaptation: leave out --adapt")
    if not projection and model.projection is None:
        raise ValueError("the checkpoint has no projection to leave out")
    heads = heads or (model.config["head"], "mahalanobis", "euclidean")
    adapts = (adapt,) if adapt is not None else (True, False) if model.config["adaptation"] != "none" else (False,)
    variants = [
        Variant(adapted, head, with_task, projected)
        for projected in ((True,) if projection else (True, False))
        for head in heads
        for with_task in ((True,) if task_covariance or head != "mahalanobis" else (True, False))
        for adapted in adapts
    ]
    for variant in variants:
        head_of(model, variant)
    return {variant.title: variant for variant in variants}


def evaluate(
    model: SimpleCNAPS,
    sources: Sequence[str],
    shots: Sequence[int] = (1, 5),
    *,
    variants: Mapping[str, Variant] | None = None,
    protocol: str = "fixed",
    root: str | Path | None = None,
    results: str | Path | None = None,
    way: int = 5,
    queries: int = 10,
    episodes: int = 600,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate on every source, at every number of shots or with Meta-Dataset's variable ways and shots.

    Parameters
    ----------
    model : SimpleCNAPS
    sources : list of str
        As :func:`~fewshot_mahalanobis.data.datasets.open_source` takes them. A source of fewer than ``way`` classes
        is evaluated with the ways it has, and says so.
    shots : list of int
        Of the fixed protocol.
    variants : mapping of str to Variant, optional
        What to compare on the same episodes; by default what :func:`variants_of` gives.
    protocol : {"fixed", "variable"}
        Episodes of ``way`` classes with one number of support images; or as in the paper's tables, 5 to 50 ways and up
        to 500 support images (Triantafillou et al., ICLR 2020).
    root : path, optional
        Folder of the data sets that are given by name.
    results : path, optional
        JSON file that is written after every source and read at the start: what it holds of this model for the same
        settings is not computed again.
    way : int
        Of the fixed protocol.
    queries : int
        Query images a class; at most so many in the variable protocol.
    episodes, seed : int
        As for :func:`evaluate_source`.
    dtype : torch.dtype
        Likewise.
    progress : bool
        Likewise.

    Returns
    -------
    list of dict
        One record a source and shot: "source", "way", "shot", "queries", "episodes", "seed", "precision", "protocol",
        "model" (digest of settings and weights), "accuracy", which maps a variant to [mean, half-width of the 95 %
        interval] in per cent, and "by_episode", variant to the accuracy of each episode. In the variable protocol
        "shot" is None, "way" is None or, of a source of fewer than 5 classes, their number, and there are "by_way" and
        "by_shot": variant to rows of ways or shots, number of episodes or classes, mean and standard deviation of their
        accuracies in per cent.

    Raises
    ------
    ValueError
        ``protocol`` is something else, two sources have one name, a source has too few classes or images or one that
        cannot be read, or a variant cannot be had.
    FileNotFoundError
        A source does not exist.
    """
    if protocol not in ("fixed", "variable"):
        raise ValueError(f'protocol must be "fixed" or "variable", got {protocol!r}')
    variants = variants_of(model) if variants is None else variants
    file = Path(results) if results is not None else None
    records: list[dict[str, Any]] = json.loads(file.read_text()) if file is not None and file.exists() else []
    settings = {
        "queries": queries,
        "episodes": episodes,
        "seed": seed,
        "precision": str(dtype).removeprefix("torch."),
        "protocol": protocol,
        "model": _digest(model),
    }
    numbers: Sequence[int | None] = shots if protocol == "fixed" else (None,)
    wanted: list[dict[str, Any]] = []
    for source in tqdm(open_sources(sources, root, model.image_size), desc="sources", disable=not progress):
        features: UnadaptedFeatures | None = None
        for shot in numbers:
            key = {"source": source.name, "way": _ways(source, way, protocol), "shot": shot, **settings}
            record = next((r for r in records if _is(r, key)), None)
            if record is None:
                record = {**key, "accuracy": {}}
                records.append(record)
            missing = {title: v for title, v in variants.items() if title not in record["accuracy"]}
            if missing:
                if features is None:
                    if len(source.images) <= _IN_MEMORY:
                        source = source.in_memory()
                    features = UnadaptedFeatures(model, source, dtype=dtype)
                scores = _scores(model, source, missing, key, dtype, features, progress)
                for name, values in _summary(scores, missing, protocol).items():
                    record[name] = {**record.get(name, {}), **values}
                if file is not None:
                    _write(file, records)
            tables = [name for name in ("accuracy", "by_episode", "by_way", "by_shot") if name in record]
            chosen = {
                name: {title: record[name][title] for title in variants if title in record[name]} for name in tables
            }
            wanted.append(record | chosen)
    return wanted


def open_sources(sources: Sequence[str], root: str | Path | None, size: int) -> list[ImageSource]:
    """Open sources, as :func:`open_source` takes them, without decoding an image; no two may have one name."""
    opened: dict[str, ImageSource] = {}
    for path in sources:
        source = open_source(path, root=root, size=size)
        if source.name in opened:
            raise ValueError(f"two sources are called {source.name!r}: rename one of them")
        opened[source.name] = source
    return list(opened.values())


def _ways(source: ImageSource, way: int, protocol: str) -> int | None:
    """Ways of every episode of a source; None where they vary."""
    classes = len(source.class_names)
    if protocol == "fixed":
        return min(way, classes)
    return None if classes >= EVALUATION.min_way else classes


def _is(record: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Whether a record of the results file is of these settings."""
    # Files of the first version are of the fixed protocol and do not tell the model.
    return all(
        record.get(name, {"protocol": "fixed", "model": value}.get(name)) == value for name, value in key.items()
    )


def _digest(model: SimpleCNAPS) -> str:
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _scores(
    model: SimpleCNAPS,
    source: ImageSource,
    variants: Mapping[str, Variant],
    key: Mapping[str, Any],
    dtype: torch.dtype,
    features: UnadaptedFeatures,
    progress: bool,
) -> Scores:
    return evaluate_episodes(
        model,
        source,
        variants.values(),
        _drawing(source, key),
        key["episodes"],
        dtype=dtype,
        plain_features=None if all(v.adapt for v in variants.values()) else features,
        description=_title(key) if progress else None,
    )


def _drawing(source: ImageSource, key: Mapping[str, Any]) -> Callable[[int], Episode]:
    """Index -> episode, for the settings of a record."""
    if key["protocol"] == "variable":
        fewest = min(EVALUATION.min_way, len(source.class_names))
        limits = replace(EVALUATION, min_way=fewest, max_queries=key["queries"])
        return VariableEpisodes(source, limits, seed=key["seed"]).draw
    classes, shots = source.indices_of_class(), [key["shot"]] * key["way"]
    # By seed and index alone, not by the source's name, as in the files of the first version.
    return lambda index: draw_episode(classes, shots, key["queries"], episode_rng(key["seed"], index))


def _summary(scores: Scores, variants: Mapping[str, Variant], protocol: str) -> dict[str, dict[str, Any]]:
    """What a record holds of scores, by variant."""
    found: dict[str, dict[str, Any]] = {"accuracy": {}, "by_episode": {}}
    for title, variant in variants.items():
        accuracy = Accuracy.of(scores.accuracies[variant])
        found["accuracy"][title] = [100 * accuracy.mean, 100 * accuracy.half_width]
        found["by_episode"][title] = [round(100 * share, 4) for share in scores.accuracies[variant].tolist()]
        if protocol == "variable":
            found.setdefault("by_way", {})[title] = _grouped(scores.ways, scores.accuracies[variant])
            found.setdefault("by_shot", {})[title] = _grouped(scores.shots, scores.class_accuracies[variant])
    return found


def _grouped(numbers: NDArray[np.int64], accuracies: NDArray[np.float64]) -> list[tuple[int, int, float, float]]:
    """Rows of number, how often it came, mean and standard deviation (0 of one) of its accuracies in per cent."""
    rows = []
    for number in np.unique(numbers):
        chosen = 100 * accuracies[numbers == number]
        spread = float(chosen.std(ddof=1)) if len(chosen) > 1 else 0.0
        rows.append((int(number), len(chosen), float(chosen.mean()), spread))
    return rows


def _write(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".part")
    temporary.write_text(json.dumps(records, indent=1) + "\n")
    os.replace(temporary, file)


def averages(records: Sequence[Mapping[str, Any]], in_domain: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Means over sources, for each number of shots, and the intervals of these means.

    Parameters
    ----------
    records : list of dict
        From :func:`evaluate`. Sources of fewer classes than the others have ways are left out.
    in_domain : iterable of str, optional
        Data sets that the model was trained on (their training classes), by name: "omniglot" for the source
        "omniglot/test". There are then averages of those, of the others, and of all, as in the paper's tables.

    Returns
    -------
    list of dict
        Records as those of :func:`evaluate`, with the names of the sources as "sources".
    """
    inside = None if in_domain is None else set(in_domain)
    full = max((r["way"] for r in records if r.get("protocol", "fixed") == "fixed"), default=None)
    found = []
    for protocol, way, shot in _protocols(records, full):
        group = [r for r in records if (r.get("protocol", "fixed"), r["way"], r["shot"]) == (protocol, way, shot)]
        parts = {"average": group}
        if inside is not None:
            there = [r for r in group if {r["source"], data_set_of(r["source"])[0]} & inside]
            parts = {
                "in-domain average": there,
                "out-of-domain average": [r for r in group if r not in there],
                "average": group,
            }
        for title, chosen in parts.items():
            if chosen:
                found.append(_average(f"{title} of {len(chosen)}", chosen))
    return found


def _protocols(records: Sequence[Mapping[str, Any]], full: int | None) -> list[tuple[str, int | None, int | None]]:
    """Protocol, way and shot of every average: the fixed ones of full way, by shots, then the variable one."""
    shots = sorted({r["shot"] for r in records if r.get("protocol", "fixed") == "fixed" and r["way"] == full})
    variable = any(r.get("protocol") == "variable" and r["way"] is None for r in records)
    return [("fixed", full, shot) for shot in shots] + [("variable", None, None)] * variable


def _average(title: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    accuracies = [record["accuracy"] for record in records]
    shared = [name for name in accuracies[0] if all(name in accuracy for accuracy in accuracies)]
    n = len(records)
    return {
        **{name: value for name, value in records[0].items() if name not in ("by_episode", "by_way", "by_shot")},
        "source": title,
        "sources": [record["source"] for record in records],
        # The sources' episodes are drawn independently, so the variances of their means add.
        "accuracy": {
            name: [float(np.mean([a[name][0] for a in accuracies])), math.hypot(*(a[name][1] for a in accuracies)) / n]
            for name in shared
        },
    }


def _title(record: Mapping[str, Any]) -> str:
    if record.get("protocol") == "variable":
        return record["source"] + f", {record['way']}-way" * (record["way"] is not None)
    return f"{record['source']}, {record['way']}-way {record['shot']}-shot"


def _table(
    records: Sequence[Mapping[str, Any]],
    in_domain: Iterable[str] | None,
    published: Mapping[str, str] | None,
    gains: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes of a report."""
    ordered = sorted(records, key=lambda r: (r["shot"] is None, r["shot"] or 0))
    lines = [*ordered, *averages(records, in_domain)]
    variants = list(dict.fromkeys(name for record in records for name in record["accuracy"]))
    columns = {
        name: [_cell(line["accuracy"].get(name)) for line in lines]
        + [_cell(line["accuracy"].get(name), sign="+") for line in gains]
        for name in variants
    }
    for name, method in (published or {}).items():
        figures = [published_figure(method, line) if name in line["accuracy"] else None for line in lines]
        if any(figures):
            cells = ["" if figure is None else str(figure) for figure in figures]
            columns[f"paper: {method}"] = [*cells, *[""] * len(gains)]
    rows = [[_title(line), *cells] for line, *cells in zip([*lines, *gains], *columns.values(), strict=True)]
    marks = "".join(cell for title, cells in columns.items() if title.startswith("paper: ") for cell in cells)
    notes = []
    if "*" in marks:
        notes.append(
            "* The paper's episodes have variable ways and shots and at most 10 queries a class; these have not."
        )
    if "†" in marks:
        notes.append("† Other images of the same domain than the paper's.")
    return ["source", *columns], rows, notes


def _cell(accuracy: Sequence[float] | None, sign: str = "") -> str:
    return "" if accuracy is None else f"{accuracy[0]:{sign}.1f} ± {accuracy[1]:.1f}"


def to_markdown(
    records: Sequence[Mapping[str, Any]],
    in_domain: Iterable[str] | None = None,
    published: Mapping[str, str] | None = None,
    gains: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The records of :func:`evaluate` as a Markdown table, accuracies in per cent with 95 % intervals.

    Parameters
    ----------
    records : list of dict
    in_domain : iterable of str, optional
        As for :func:`averages`.
    published : mapping of str to str, optional
        Variant to what the paper calls it
        (:func:`~fewshot_mahalanobis.evaluation.paper_figures.published_method`): the paper's figures stand beside.
    gains : list of dict
        Last rows, from :func:`~fewshot_mahalanobis.evaluation.compare.differences`.
    """
    header, rows, notes = _table(records, in_domain, published, gains)
    # At the start of a line a * would begin a list.
    return "\n\n".join([markdown_table(rows, header), *(note.replace("*", "\\*") for note in notes)])


def to_latex(
    records: Sequence[Mapping[str, Any]],
    in_domain: Iterable[str] | None = None,
    published: Mapping[str, str] | None = None,
    gains: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The same table for LaTeX, with the rules of the package booktabs."""
    header, rows, notes = _table(records, in_domain, published, gains)
    n = len(records)
    body = [" & ".join(map(_latex, row)) + r" \\" for row in rows]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(map(_latex, header)) + r" \\",
            r"\midrule",
            *body[:n],
            r"\midrule",
            *body[n:],
            r"\bottomrule",
            *(rf"\multicolumn{{{len(header)}}}{{l}}{{\footnotesize {_latex(note)}}} \\" for note in notes),
            r"\end{tabular}",
        ]
    )


def _latex(text: str) -> str:
    for special in "&%_#$":
        text = text.replace(special, "\\" + special)
    return text.replace("±", r"$\pm$").replace("†", r"$^\dagger$").replace("*", "$^*$")
