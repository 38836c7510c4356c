"""Several checkpoints on the same episodes: a column for each, and what each gains over the first, episode by episode.

Episodes of a source differ far more than the accuracies of two checkpoints on one of them, so the interval of a
difference is narrower than those of the two accuracies suggest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.research.evaluation.accuracy import Variant
from fewshot_mahalanobis.research.evaluation.averages import averaged_groups, over
from fewshot_mahalanobis.research.evaluation.paper_figures import published_method
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Result


def headings(
    models: Mapping[str, SimpleCNAPS], variants: Mapping[str, Mapping[str, Variant]]
) -> dict[str, dict[str, str]]:
    """Return the headings of the columns of several checkpoints, by checkpoint and title of the variant.

    They are the paper's names of the variants, if it names all of them and each differently. Otherwise they are the
    name of the checkpoint: alone for the variant that was trained (its own head, adapted if it adapts), and with the
    variant's title for others. ``variants`` are those of
    :func:`~fewshot_mahalanobis.research.evaluation.report.variants_of`, by checkpoint.
    """
    methods = {
        name: {title: published_method(model.config, variant) for title, variant in variants[name].items()}
        for name, model in models.items()
    }
    named = [method for by_title in methods.values() for method in by_title.values()]
    if None not in named and len(set(named)) == len(named):
        return cast("dict[str, dict[str, str]]", methods)
    own = {name: Variant(model.config["adaptation"] != "none", model.config["head"]) for name, model in models.items()}
    return {
        name: {title: name if variant == own[name] else f"{name}, {title}" for title, variant in by_title.items()}
        for name, by_title in variants.items()
    }


def joined(results: Mapping[str, Sequence[Result]], columns: Mapping[str, Mapping[str, str]]) -> list[Result]:
    """Join the columns of all checkpoints: one result for each source and number of shots.

    Parameters
    ----------
    results : mapping of str to list of Result
        Checkpoint to its results, all for the same sources and settings.
    columns : mapping of str to mapping of str to str
        From :func:`headings`.

    Returns
    -------
    list of Result
        Their ``model`` is empty.
    """
    rows = []
    for same_source in zip(*results.values(), strict=True):
        scores = {
            columns[name][title]: score
            for name, result in zip(results, same_source, strict=True)
            for title, score in result.scores.items()
        }
        rows.append(replace(same_source[0], model="", scores=scores))
    return rows


def differences(results: Sequence[Result], base: str, in_domain: Iterable[str] | None = None) -> list[Result]:
    """Return how much more accurate than the column ``base`` each column is, for each of the averages.

    Parameters
    ----------
    results : list of Result
    base : str
    in_domain : iterable of str, optional
        As for :func:`~fewshot_mahalanobis.research.evaluation.averages.averages`.

    Returns
    -------
    list of Result
        Mean differences with 95 % intervals, from the differences within each episode.
    """
    rows = []
    for title, group in averaged_groups(results, in_domain):
        shared = [m for m in group[0].scores if m != base and all(m in r.scores and base in r.scores for r in group)]
        gains = {method: Accuracy.averaged([_gain(result, method, base) for result in group]) for method in shared}
        rows.append(over(group, f"{title}, less {base}", gains))
    return rows


def _gain(result: Result, method: str, base: str) -> Accuracy:
    return Accuracy.of(np.subtract(result.scores[method].by_episode, result.scores[base].by_episode))
