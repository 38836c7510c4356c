"""Tables of results: Markdown, LaTeX and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.research.evaluation.paper_figures import published_figure
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Result, to_record

try:
    from tabulate import SEPARATING_LINE, tabulate
except ImportError as error:
    raise ImportError(f"tables need tabulate: {install_command('cli')}") from error

_NOTES = {
    "*": "The paper's episodes have variable ways and shots and at most 10 queries per class; these do not.",
    "†": "Not the paper's images, but others of the same domain.",
}


def to_markdown(
    results: Sequence[Result],
    averages: Sequence[Result] = (),
    differences: Sequence[Result] = (),
    published: Mapping[str, str] | None = None,
    *,
    by_method: bool = False,
) -> str:
    """Make a Markdown table of accuracies in per cent with 95 % intervals.

    Parameters
    ----------
    results : sequence of Result
    averages, differences : sequences of Result
        From :func:`~fewshot_mahalanobis.research.evaluation.averages.averages` and
        :func:`~fewshot_mahalanobis.research.evaluation.compare.differences`.
    published : mapping of str to str, optional
        Heading of a column to the paper's name of that method
        (:func:`~fewshot_mahalanobis.research.evaluation.paper_figures.published_method`), whose figures are shown
        beside.
    by_method : bool
        One row for each method, with the paper's figures below it, as in the paper's table 1; else one column.
    """
    header, above, below = _cells(results, averages, differences, published or {}, by_method)
    notes = [f"\\{mark} {note}" if mark == "*" else f"{mark} {note}" for mark, note in _notes([*above, *below])]
    return "\n\n".join([markdown_table([*above, *below], header), *notes])


def to_latex(
    results: Sequence[Result],
    averages: Sequence[Result] = (),
    differences: Sequence[Result] = (),
    published: Mapping[str, str] | None = None,
    *,
    by_method: bool = False,
) -> str:
    """Make the same table for LaTeX, with the rules of the package booktabs."""
    header, above, below = _cells(results, averages, differences, published or {}, by_method)
    rows = [*above, SEPARATING_LINE, *below] if below else above
    table = tabulate(rows, header, tablefmt="latex_booktabs", disable_numparse=True)
    notes = [rf"\par{{\footnotesize {mark} {note}}}" for mark, note in _notes([*above, *below])]
    return "\n".join([table, *notes])


def to_json(
    results: Sequence[Result],
    averages: Sequence[Result] = (),
    differences: Sequence[Result] = (),
    published: Mapping[str, str] | None = None,
    *,
    by_method: bool = False,
) -> str:
    """Write the same as JSON, accuracies as shares of 1."""
    content = {
        "results": [to_record(result) for result in results],
        "averages": [_average_record(average) for average in averages],
        "differences": [_average_record(difference) for difference in differences],
        "methods": published or {},
        "by_method": by_method,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode()


def _average_record(average: Result) -> dict[str, Any]:
    return {
        "name": average.source,
        "way": average.way,
        "shot": average.shot,
        "accuracy": {method: accuracy[:3] for method, accuracy in average.scores.items()},
        "protocol": average.protocol,
        "queries": average.queries,
        "sources": average.sources,
    }


def markdown_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A Markdown table of text."""
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def _cells(
    results: Sequence[Result],
    averages: Sequence[Result],
    differences: Sequence[Result],
    published: Mapping[str, str],
    by_method: bool,
) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Header, rows of single sources, and rows of averages and differences."""
    single = sorted(results, key=lambda row: (row.shot is None, row.shot or 0))
    methods = list(dict.fromkeys(method for row in single for method in row.scores))
    lines = [*single, *averages]
    columns = {
        method: [_cell(row.scores.get(method)) for row in lines]
        + [_cell(row.scores.get(method), sign="+") for row in differences]
        for method in methods
    }
    papers = {}
    for method, name in published.items():
        figures = [published_figure(name, row) if method in row.scores else None for row in lines]
        if any(figures):
            cells = ["" if figure is None else str(figure) for figure in figures]
            papers[method] = f"paper: {name}", cells + [""] * len(differences)
    titles = [row.title for row in (*lines, *differences)]
    if by_method:
        pairs = [[(method, columns[method]), papers.get(method, ())] for method in methods]
        return ["method", *titles], [[pair[0], *pair[1]] for both in pairs for pair in both if pair], []
    columns |= dict(papers.values())
    rows = [list(cells) for cells in zip(titles, *columns.values(), strict=True)]
    return ["source", *columns], rows[: len(single)], rows[len(single) :]


def _cell(accuracy: Accuracy | None, sign: str = "") -> str:
    return "" if accuracy is None else f"{100 * accuracy.mean:{sign}.1f} ± {100 * accuracy.half_width:.1f}"


def _notes(rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Marks that the paper's figures carry, and what they mean."""
    return [(mark, note) for mark, note in _NOTES.items() if any(mark in cell for _, *row in rows for cell in row)]
