"""Run tests and count what they try: the figures of hostile files and faults in benchmarks/results/checks.md.

    python -m tests.fuzz.tally tests/robustness/test_hostile_files.py tests/checkpoints

prints for each test how many of its cases passed, and how many errors those met where they said that one must come
(``pytest.raises``). Arguments are those of pytest.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest


class Tally:
    """A plugin of pytest that counts by test function."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._raises = pytest.raises
        self._expected = 0

    def counted(self, *arguments: Any, **options: Any) -> Any:
        self._expected += 1
        return self._raises(*arguments, **options)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._expected = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:  # so every expected error came
            name = report.nodeid.partition("[")[0]
            self.cases[name] += 1
            self.errors[name] += self._expected

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, cases in self.cases.items():
            terminalreporter.write_line(f"{cases:5d} cases {self.errors[name]:5d} errors as promised  {name}")
        total = sum(self.cases.values()), sum(self.errors.values())
        terminalreporter.write_line(f"{total[0]:5d} cases {total[1]:5d} errors as promised  in all")


def main(arguments: list[str]) -> int:
    tally = Tally()
    pytest.raises = tally.counted  # type: ignore[assignment]
    return pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[tally])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
