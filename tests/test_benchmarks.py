"""The benchmarks: what they compare is the same computation, and their page holds what was measured."""

from __future__ import annotations

import json
import mmap
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression

from benchmarks import __main__ as command
from benchmarks import calibration, inspection, plain, scaling, startup, timing, which_next
from benchmarks.feature_peers import in_support_span, lda_scores
from benchmarks.feature_tasks import Features, measure
from benchmarks.record import Record, Table
from benchmarks.tasks import drawn_features
from fewshot_mahalanobis import MahalanobisHead, SimpleCNAPS
from fewshot_mahalanobis.research.episodes.sampling import Episode
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from tests.drawn_tasks import make_task


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


def test_a_benchmark_rewrites_its_own_tables_alone(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    blocks = [f"{begin}\nold of {name}\n{end}\n" for name in ("a", "b") for begin, end in [command.markers(name)]]
    page.write_text(f"before\n{blocks[0]}between\n{blocks[1]}after\n")
    record = Record("a", None, tables=[Table("Title", ["way", "time"], [["here", "1 s"]], "Note.")], machine="Of a")
    command.write_tables(page, record)
    text = page.read_text()
    begin, end = command.markers("a")
    assert text.startswith(f"before\n{begin}\n\nOf a.\n\n### Title\n")
    assert text.endswith(f"Note.\n\n{end}\nbetween\n{blocks[1]}after\n")
    assert re.search(r"^\| here +\| 1 s +\|$", text, re.MULTILINE)
    assert "old of a" not in text


@pytest.mark.parametrize("page", command.PAGES)
def test_a_page_has_a_place_for_each_of_its_benchmarks_in_their_order(page: str) -> None:
    text = (command.RESULTS / page).read_text()
    assert re.findall(r"<!-- (?:end of )?(\w+) -->", text) == [name for name in command.PAGES[page] for _ in range(2)]


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


def test_a_quick_run_prints_a_table_and_leaves_the_record_alone(capsys: pytest.CaptureFixture[str]) -> None:
    page = command.RESULTS / "speed.md"
    before = page.read_text()
    command.main(["--quick", "head"])
    output = capsys.readouterr().out
    assert "5-way 5-shot, 75 queries" in output
    assert "ratio" in output
    assert page.read_text() == before


def test_the_time_to_start_is_split_by_package() -> None:
    seconds = startup.imports(("-c", "import fewshot_mahalanobis, json.decoder"))
    assert {"fewshot_mahalanobis", "json"} <= set(seconds)
    assert "torch" not in seconds
    assert 0 < sum(seconds.values()) < 60
    assert 0 < startup.processor_seconds(("-c", "pass")) < 60


@pytest.mark.parametrize(("shots", "d"), [([3, 5, 4], 40), ([2, 9, 30], 7), ([1, 6, 2], 30)])
def test_lda_of_few_examples_is_that_of_scikit_learn(shots: list[int], d: int) -> None:
    x, y, queries = (part.numpy() for part in make_task(0, shots, d, queries=20))
    x[:, 0] = 1.0  # a constant feature
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one example's covariance
        peer = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(x.astype(np.float64), y)
    np.testing.assert_allclose(lda_scores(x, y, queries), peer.decision_function(queries), rtol=1e-6, atol=1e-6)


def test_logistic_regression_needs_the_span_of_the_support_set_alone() -> None:
    x, y, queries = (part.double().numpy() for part in make_task(0, [3, 5, 4], 40, queries=20))
    reduced = in_support_span(x, queries)
    assert reduced[0].shape == (12, 12)
    for c in (0.01, 1.0, 100.0):
        peer = LogisticRegression(C=c, tol=1e-10, max_iter=10_000)
        expected = peer.fit(x, y).predict_proba(queries)
        np.testing.assert_allclose(peer.fit(reduced[0], y).predict_proba(reduced[1]), expected, atol=1e-6)


class Counted:
    """Features that are indices of images; counts the episodes it was asked for."""

    name, size = "counted", 84

    def __init__(self) -> None:
        self.episodes = 0

    def __call__(self, source: object, episode: Episode) -> Features:
        self.episodes += 1
        support, query = (part[:, None].astype(np.float32) for part in (episode.support, episode.query))
        return Features(support, episode.support_labels, query, episode.query_labels)

    def done(self, source: object) -> None:
        pass


def test_episodes_are_measured_in_blocks_and_more_of_them_later(tmp_path: Path) -> None:
    extractor, source = Counted(), SimpleNamespace(name="set/test")

    def drawn(index: int) -> list[Episode]:
        return [Episode(np.array([index]), np.array([0]), np.array([index]), np.array([0]))]

    def measured(episodes: int) -> dict[str, list[float]]:
        record = Record("a", tmp_path, episodes=episodes).read()
        return measure(record, extractor, source, "task", drawn, lambda e: {"index": float(e[0].query[0, 0])})

    assert measured(20) == {"index": [float(i) for i in range(20)]}
    assert extractor.episodes == 20
    assert measured(30) == {"index": [float(i) for i in range(30)]}
    assert extractor.episodes == 30
    assert measured(10) == {"index": [float(i) for i in range(10)]}


def test_a_pool_to_choose_from_has_unequal_classes_and_strangers_and_nothing_twice() -> None:
    labels = np.repeat(np.arange(12), 100)
    task = which_next.draw(labels, np.random.default_rng(0), way=8, shot=5, tests=15)
    rows = np.concatenate([task.support, task.pool, task.test])
    assert len(set(rows)) == len(rows)
    known = task.labels[task.pool]
    counts = np.bincount(known[known >= 0], minlength=8)
    assert (np.diff(counts) < 0).all()
    assert (known < 0).mean() == pytest.approx(which_next.STRANGERS, abs=0.01)
    assert len(known) == pytest.approx(which_next.POOL, abs=10)
    for part, each in ((task.support, 5), (task.test, 15)):
        assert np.bincount(task.labels[part]).tolist() == [each] * 8


def test_the_calibration_error_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    confidence, correct = rng.uniform(0.2, 1, 500), rng.uniform(size=500) < 0.7
    expected = 0.0
    for low in range(calibration.BINS):
        inside = (confidence >= low / calibration.BINS) & (confidence < (low + 1) / calibration.BINS)
        if inside.any():
            expected += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    assert calibration.expected_calibration_error(confidence, correct) == pytest.approx(expected)


def test_the_record_of_good_against_defect_has_the_tables_of_what_was_measured() -> None:
    record = command.RESULTS / "inspection.md"
    assert inspection.tables(json.loads(record.with_suffix(".json").read_text())) in record.read_text()


def test_the_page_on_good_against_defect_has_the_figures_of_the_record() -> None:
    results = json.loads((command.RESULTS / "inspection.json").read_text())
    page = (Path(__file__).parents[1] / "docs" / "inspection.md").read_text(encoding="utf-8")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    ways = {
        "good pictures alone, 5 % promised": "good pictures alone",
        "both, threshold of left-out good pictures, 5 % promised": "both, the threshold of left-out good pictures",
        "both, the more probable label": "both, the more probable",
        "both, tuned to a cost of 10 to 1": "both, tuned to a cost of 10 to 1",
    }
    sets = table[0][1:]
    assert sets == [*results]
    for title, *cells in table[2:]:
        for name, cell in zip(sets, cells, strict=True):
            both = (Accuracy.of(np.array([task[ways[title]][column] for task in results[name]])) for column in (0, 1))
            assert cell == " / ".join(f"{100 * share.mean:.1f} ± {100 * share.half_width:.1f}" for share in both)
    assert len(table) == 2 + len(ways)


def test_good_and_bad_cells_are_read_from_their_table(tmp_path: Path) -> None:
    rows = ("a.png 0.0 mono", "b.png 1.0 poly", "c.png 0.3333333333333333 mono", "d.png  1.0   mono")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    assert inspection.cells(tmp_path) == {
        "solar cells, monocrystalline": {"good": [tmp_path / "a.png"], "defect": [tmp_path / "d.png"]},
        "solar cells, polycrystalline": {"good": [], "defect": [tmp_path / "b.png"]},
    }


def test_a_missed_defect_costs_as_many_false_alarms_as_is_said() -> None:
    truth, predicted = np.array(["good", "good", "defect", "defect"]), np.array(["good", "defect", "good", "defect"])
    assert inspection.cost(truth, predicted, "defect") == (1 + inspection.COST) / 4
