"""Averages over sources: all of them, and those within and outside the domains that a model was trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fewshot_mahalanobis.research.evaluation.result import Accuracy, Protocol, Result

_SPLIT = re.compile(r"(?P<name>.+?)(?:[/_](?P<split>train|valid|val|test))?")


def data_set_of(source: str) -> tuple[str, str | None]:
    """Split the name of a source ("omniglot/test", "cifar100_test") into data set and split, which may be None."""
    match = _SPLIT.fullmatch(source)
    return (match["name"], match["split"]) if match else (source, None)


def check_in_domain(names: Iterable[str], sources: Sequence[str]) -> None:
    """Raise ValueError if no source has one of these names."""
    known = dict.fromkeys([*(data_set_of(source)[0] for source in sources), *sources])
    for name in names:
        if name not in known:
            raise ValueError(f"no source is called {name!r}: the domains here are {', '.join(known)}")


def averages(results: Sequence[Result], in_domain: Iterable[str] | None = None) -> list[Result]:
    """Average over sources for each number of shots, with 95 % intervals.

    Parameters
    ----------
    results : list of Result
        Sources of fewer classes than the others have ways are left out.
    in_domain : iterable of str, optional
        Data sets that the model was trained on (their training classes), by name: "omniglot" for the source
        "omniglot/test". The averages are then over those, over the others and over all, as in the paper's tables.

    Returns
    -------
    list of Result
        One for each number of shots and domain.
    """
    rows = []
    for title, group in averaged_groups(results, in_domain):
        methods = [method for method in group[0].scores if all(method in result.scores for result in group)]
        scores = {m: Accuracy.averaged([result.scores[m] for result in group]) for m in methods}
        rows.append(over(group, title, scores))
    return rows


def over(group: Sequence[Result], title: str, scores: Mapping[str, Accuracy]) -> Result:
    """Make the result of a group of sources, in their setting."""
    return replace(group[0], source=title, scores=scores, sources=tuple(result.source for result in group))


def averaged_groups(
    results: Sequence[Result], in_domain: Iterable[str] | None = None
) -> list[tuple[str, list[Result]]]:
    """Return the title of each average, and the results that it averages."""
    inside = None if in_domain is None else set(in_domain)
    groups: list[tuple[str, list[Result]]] = []
    for protocol, way, shot in _settings(results):
        everything = [r for r in results if (r.protocol, r.way, r.shot) == (protocol, way, shot)]
        if inside is not None and len(everything) > 1:  # else all averages are the same
            known = [r for r in everything if {r.source, data_set_of(r.source)[0]} & inside]
            groups.append(("in-domain average", known))
            groups.append(("out-of-domain average", [r for r in everything if r not in known]))
        groups.append(("average", everything))
    return [(f"{title} of {len(group)}", group) for title, group in groups if group]


def _settings(results: Sequence[Result]) -> list[tuple[Protocol, int | None, int | None]]:
    """Return protocol, way and shot of each average: full-way fixed episodes by shots, then variable episodes."""
    fixed = [r for r in results if r.protocol == "fixed"]
    full = max((r.way for r in fixed if r.way is not None), default=None)
    shots = sorted({r.shot for r in fixed if r.way == full and r.shot is not None})
    variable = any(r.protocol == "variable" and r.way is None for r in results)
    settings: list[tuple[Protocol, int | None, int | None]] = [("fixed", full, shot) for shot in shots]
    return [*settings, ("variable", None, None)] if variable else settings
