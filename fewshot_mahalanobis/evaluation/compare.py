"""Several checkpoints on the same episodes: a column for each, and what each gains over the first, episode by episode.

The episodes of a source differ far more from each other than the accuracies of two checkpoints on one of them, so the
interval of a difference is narrower than those of the two accuracies let expect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from fewshot_mahalanobis.evaluation.accuracy import Accuracy, Variant
from fewshot_mahalanobis.evaluation.paper_figures import published_method
from fewshot_mahalanobis.evaluation.tables import averages
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS


def headings(
    models: Mapping[str, SimpleCNAPS], variants: Mapping[str, Mapping[str, Variant]]
) -> dict[str, dict[str, str]]:
    """Headings of the columns of several checkpoints.

    What the paper calls each variant, where it has a name for all of them and no two share one. Otherwise the
    checkpoint's own name, alone where it is as trained, with its own head and adapted if it adapts, else with the
    variant's title.

    Parameters
    ----------
    models : mapping of str to SimpleCNAPS
    variants : mapping of str to mapping of str to Variant
        For each of them, as :func:`~fewshot_mahalanobis.evaluation.tables.variants_of` gives them.

    Returns
    -------
    dict of str to dict of str to str
        Checkpoint to title of a variant to heading.
    """
    methods = {
        name: {title: published_method(model.config, variant) for title, variant in variants[name].items()}
        for name, model in models.items()
    }
    called = [method for of in methods.values() for method in of.values()]
    if None not in called and len(set(called)) == len(called):
        return cast("dict[str, dict[str, str]]", methods)
    own = {name: Variant(model.config["adaptation"] != "none", model.config["head"]) for name, model in models.items()}
    return {
        name: {title: name if variant == own[name] else f"{name}, {title}" for title, variant in of.items()}
        for name, of in variants.items()
    }


def joined(
    evaluations: Mapping[str, Sequence[Mapping[str, Any]]], columns: Mapping[str, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """One record a source and number of shots with the columns of all checkpoints.

    Parameters
    ----------
    evaluations : mapping of str to list of dict
        Checkpoint to the records of :func:`~fewshot_mahalanobis.evaluation.tables.evaluate`, all for the same sources
        and settings.
    columns : mapping of str to mapping of str to str
        From :func:`headings`.

    Returns
    -------
    list of dict
        Records as those of :func:`~fewshot_mahalanobis.evaluation.tables.evaluate`, without "model".
    """
    found: list[dict[str, Any]] = []
    for records in zip(*evaluations.values(), strict=True):
        record = {key: value for key, value in records[0].items() if key != "model"}
        for table in [key for key, value in record.items() if isinstance(value, dict)]:
            record[table] = {
                columns[name][title]: value
                for name, one in zip(evaluations, records, strict=True)
                for title, value in one.get(table, {}).items()
            }
        found.append(record)
    return found


def differences(
    records: Sequence[Mapping[str, Any]], base: str, in_domain: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """How much more accurate each column is than the column ``base``, for each of the averages.

    Parameters
    ----------
    records : list of dict
        From :func:`joined` or :func:`~fewshot_mahalanobis.evaluation.tables.evaluate`.
    base : str
    in_domain : iterable of str, optional
        As for :func:`~fewshot_mahalanobis.evaluation.tables.averages`.

    Returns
    -------
    list of dict
        The averages, their "accuracy" a column's mean difference in per cent and the half-width of its 95 % interval,
        from the differences within each episode. Columns whose episodes are not all on record are left out.
    """
    found = []
    for average in averages(records, in_domain):
        settings = [average.get(name) for name in ("protocol", "way", "shot")]
        chosen = [
            r.get("by_episode", {})
            for r in records
            if r["source"] in average["sources"] and [r.get(name) for name in ("protocol", "way", "shot")] == settings
        ]
        gains: dict[str, list[float]] = {}
        for title in average["accuracy"]:
            if title != base and all(title in episodes and base in episodes for episodes in chosen):
                sources = [Accuracy.of(np.subtract(episodes[title], episodes[base])) for episodes in chosen]
                spread = math.hypot(*(one.half_width for one in sources)) / len(sources)
                gains[title] = [float(np.mean([one.mean for one in sources])), spread]
        found.append(average | {"source": f"{average['source']}, less {base}", "accuracy": gains})
    return found
