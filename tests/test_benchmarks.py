"""The benchmarks: what they compare is the same computation, and their page holds what was measured."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import plain, scaling, startup, timing
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_features
from fewshot_mahalanobis import MahalanobisHead, SimpleCNAPS


def test_the_plain_loop_over_classes_gives_the_logits_of_the_head() -> None:
    for task in (drawn_features(4, 3, 6, d=20), drawn_features(3, 1, 6, d=5)):
        torch.testing.assert_close(plain.logits(*task), MahalanobisHead()(*task), rtol=1e-4, atol=1e-4)


def test_the_published_way_gives_the_logits_of_the_model() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32).eval()
        support, queries = torch.rand(6, 3, 32, 32) * 2 - 1, torch.rand(3, 3, 32, 32) * 2 - 1
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        expected = model(support, labels, queries)
    found = plain.task(model, support, labels, queries)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_value_is_measured_once_and_a_cut_off_run_goes_on(tmp_path: Path) -> None:
    Record("a", tmp_path).value("x", lambda: [1.0])
    record = Record("a", tmp_path).read()
    assert record.value("x", lambda: pytest.fail("measured again")) == [1.0]
    with pytest.raises(KeyboardInterrupt):
        record.value("y", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert Record("a", tmp_path).read().values == {"x": [1.0]}


def test_the_page_keeps_its_text_around_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text(f"before\n{command.BEGIN}\nold\n{command.END}\nafter\n")
    record = Record("a", None, tables=[Table("Title", ["way", "time"], [["here", "1 s"]], "Note.")])
    command.write_page(page, [record, Record("nothing measured", None)])
    text = page.read_text()
    assert text.startswith(f"before\n{command.BEGIN}\n")
    assert text.endswith(f"{command.END}\nafter\n")
    assert "### Title" in text
    assert re.search(r"^\| here +\| 1 s +\|$", text, re.MULTILINE)
    assert "old" not in text


def test_the_page_of_the_docs_has_the_markers() -> None:
    text = command.PAGE.read_text()
    assert text.index(command.BEGIN) < text.index(command.END)


def test_ratios_are_taken_round_by_round() -> None:
    assert timing.ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == "3 (2 to 4)"
    assert timing.show([0.002, 0.001, 0.003]) == "2 ms (1 to 3)"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_extra_memory_is_the_peak_of_the_call_and_not_of_what_was_before() -> None:
    def hold(megabytes: int) -> None:
        with mmap.mmap(-1, megabytes * 1_000_000) as memory:  # new pages, whatever the allocator has kept
            np.frombuffer(memory, np.uint8)[:] = 1

    hold(300)
    assert timing.extra_megabytes(lambda: hold(100)) == pytest.approx(100, abs=20)


def test_exponents_are_slopes_on_log_axes() -> None:
    cubic = {str(x): {"head": 5.0 * x**3} for x in (1, 10, 100, 1000)}
    assert scaling.exponent(cubic, "head") == pytest.approx(3.0)


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["haed"])
    assert "no benchmark haed" in capsys.readouterr().err


def test_a_quick_run_prints_a_table_and_leaves_the_page_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = command.PAGE.read_text()
    command.main(["--quick", "head"])
    output = capsys.readouterr().out
    assert "5-way 5-shot, 75 queries" in output
    assert "ratio" in output
    assert command.PAGE.read_text() == before


def test_the_time_to_start_is_split_by_package() -> None:
    seconds = startup.imports(("-c", "import fewshot_mahalanobis, json.decoder"))
    assert {"fewshot_mahalanobis", "json"} <= set(seconds)
    assert "torch" not in seconds
    assert 0 < sum(seconds.values()) < 60
    assert 0 < startup.processor_seconds(("-c", "pass")) < 60
