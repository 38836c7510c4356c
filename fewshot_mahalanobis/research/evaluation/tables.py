"""Tables of results: Markdown, LaTeX and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from tabulate import SEPARATING_LINE, tabulate

from fewshot_mahalanobis.research.evaluation.paper_figures import published_figure
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Result, Row

_NOTES = {
    "*": "The paper's episodes have variable ways and shots and at most 10 queries per class; these do not.",
    "†": "Not the paper's images, but others of the same domain.",
}


@dataclass(frozen=True)
class Report:
    """Results of an evaluation and what is computed from them.

    Attributes
    ----------
    results : sequence of Result
    averages : sequence of Row
        From :func:`~fewshot_mahalanobis.research.evaluation.averages.averages`.
    differences : sequence of Row
        From :func:`~fewshot_mahalanobis.research.evaluation.compare.differences`.
    methods : mapping of str to str
        Heading of a column to the paper's name of that method
        (:func:`~fewshot_mahalanobis.research.evaluation.paper_figures.published_method`): the paper's figures are shown
        beside.
    by_method : bool
        A row for each method, the paper's figures below it, as in the paper's table 1; else a column.
    """

    results: Sequence[Result]
    averages: Sequence[Row] = ()
    differences: Sequence[Row] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    by_method: bool = False


def to_markdown(report: Report) -> str:
    """A Markdown table of a report: accuracies in per cent with 95 % intervals."""
    header, above, below = _cells(report)
    notes = [f"\\{mark} {note}" if mark == "*" else f"{mark} {note}" for mark, note in _notes([*above, *below])]
    return "\n\n".join([markdown_table([*above, *below], header), *notes])


def to_latex(report: Report) -> str:
    """The same table for LaTeX, with the rules of the package booktabs."""
    header, above, below = _cells(report)
    rows = [*above, SEPARATING_LINE, *below] if below else above
    table = tabulate(rows, header, tablefmt="latex_booktabs", disable_numparse=True)
    notes = [rf"\par{{\footnotesize {mark} {note}}}" for mark, note in _notes([*above, *below])]
    return "\n".join([table, *notes])


def to_json(report: Report) -> str:
    """The report as JSON, accuracies as shares of 1."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def markdown_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A Markdown table of text."""
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def _cells(report: Report) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Header, rows of single sources, and rows of averages and differences."""
    single = sorted((result.row for result in report.results), key=lambda row: (row.shot is None, row.shot or 0))
    methods = list(dict.fromkeys(method for row in single for method in row.accuracy))
    lines = [*single, *report.averages]
    columns = {
        method: [_cell(row.accuracy.get(method)) for row in lines]
        + [_cell(row.accuracy.get(method), sign="+") for row in report.differences]
        for method in methods
    }
    papers = {}
    for method, name in report.methods.items():
        figures = [published_figure(name, row) if method in row.accuracy else None for row in lines]
        if any(figures):
            cells = ["" if figure is None else str(figure) for figure in figures]
            papers[method] = f"paper: {name}", cells + [""] * len(report.differences)
    titles = [row.title for row in (*lines, *report.differences)]
    if report.by_method:
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
