"""Measure, print the tables, and write them into the pages in benchmarks/results.

Each benchmark takes several minutes on an idle machine, and rewrites its own tables alone. Measured values are kept, so
that an interrupted run resumes; ``--again`` measures anew.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from benchmarks.record import RESULTS, Record, Table, machine
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

#: The page of each benchmark's tables, in benchmarks/results.
PAGES = {
    "speed.md": (
        "startup",
        "task",
        "cores",
        "checkpoints",
        "head",
        "streaming",
        "photographs",
        "regions",
        "scaling",
        "export",
        "shipping",
        "pixel_graph",
        "compile",
        "precision",
        "ray_labelling",
        "meta_training",
    ),
    "heads.md": ("peers", "unbalanced", "calibration", "unlabelled"),
    "methods.md": ("methods",),
}
NAMES = sum(PAGES.values(), ())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is given")
    parser.add_argument("--data", type=Path, help="folder of image sets, for benchmarks of accuracy", default=_data())
    parser.add_argument("--episodes", type=int, help="of each set and task, for benchmarks of heads", default=100)
    parser.add_argument("--checkpoint", help="whose adapted features, for benchmarks of heads", default="default")
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--quick", action="store_true", help="the smallest of each, once: shows that it works")
    chosen = parser.parse_args(arguments)
    names = chosen.names or list(NAMES)
    if unknown := set(names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    print(machine())
    for name in names:
        folder = None if chosen.quick else RESULTS
        record = Record(name, folder, chosen.quick, chosen.data, chosen.episodes, chosen.checkpoint)
        if not chosen.again:
            record.read()
        record.tables = importlib.import_module(f"benchmarks.{name}").run(record)
        print("\n" + markdown(record.tables))
        if not chosen.quick:
            write_tables(RESULTS / next(page for page, of in PAGES.items() if name in of), record)


def _data() -> Path | None:
    folder = os.environ.get("FEWSHOT_MAHALANOBIS_DATA")
    return Path(folder) if folder else None


def markdown(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        if table.rows:
            parts.append(f"### {table.title}\n\n{markdown_table(table.rows, table.header)}")
            parts.extend(fill(paragraph, 120) for paragraph in table.note.split("\n\n") if paragraph)
    return "\n\n".join(parts)


def write_tables(page: Path, record: Record) -> None:
    """Write the tables of one benchmark, and the machine, between its markers in the page."""
    begin, end = markers(record.name)
    before, rest = page.read_text().split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{record.machine}.\n\n{markdown(record.tables)}\n\n{end}{after}")


def markers(name: str) -> tuple[str, str]:
    """What stands before and after the tables of a benchmark in its page."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


if __name__ == "__main__":
    main()
