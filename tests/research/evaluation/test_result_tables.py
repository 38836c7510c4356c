"""Averages, the paper's figures beside one's own, and the forms of the table."""

import json
import math

import pytest

from fewshot_mahalanobis.research.evaluation import Variant
from fewshot_mahalanobis.research.evaluation.averages import averages, check_in_domain, data_set_of
from fewshot_mahalanobis.research.evaluation.paper_figures import (
    IN_DOMAIN,
    _published,
    published_figure,
    published_method,
)
from fewshot_mahalanobis.research.evaluation.result import Accuracy, Result
from fewshot_mahalanobis.research.evaluation.result_tables import to_json, to_latex, to_markdown

INSIDE = ["ilsvrc_2012", "omniglot", "aircraft", "cu_birds", "dtd", "quickdraw", "fungi", "vgg_flower"]
OUTSIDE = ["traffic_sign", "mscoco", "mnist", "cifar10", "cifar100"]


FOUR = ["adapted", "not adapted", "adapted, Euclidean", "not adapted, Euclidean"]


def record(source: str, mean: float = 50.0, half_width: float = 1.0, *, way=None, shot=None, queries=10) -> Result:
    """A result whose accuracies in per cent are ``mean``, ``mean`` + 1, ..."""
    accuracies = [Accuracy((mean + i) / 100, half_width / 100, 600) for i in range(4)]
    return Result(
        source=source,
        protocol="variable" if shot is None else "fixed",
        way=way,
        shot=shot,
        queries=queries,
        episodes=600,
        seed=0,
        precision="float32",
        model="",
        scores=dict(zip(FOUR, accuracies, strict=True)),
    )


def markdown(results, in_domain=None, methods=None) -> str:
    return to_markdown(results, averages(results, in_domain), (), methods)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_averages_are_of_the_domains_and_their_intervals_those_of_a_mean_of_independent_means():
    records = [record("omniglot/test", 90, 1), record("dtd/test", 60, 2), record("mnist/test", 30, 2)]
    found = averages(records, ["omniglot", "dtd", "fungi"])
    assert [(a.source, a.sources) for a in found] == [
        ("in-domain average of 2", ("omniglot/test", "dtd/test")),
        ("out-of-domain average of 1", ("mnist/test",)),
        ("average of 3", ("omniglot/test", "dtd/test", "mnist/test")),
    ]
    assert found[0].scores["adapted"][:3] == pytest.approx((0.75, math.sqrt(1 + 4) / 200, 1200))
    assert found[2].scores["not adapted"][:3] == pytest.approx((0.61, math.sqrt(1 + 4 + 4) / 300, 1800))
    assert [a.source for a in averages(records)] == ["average of 3"]


def test_sources_of_fewer_ways_are_not_averaged_and_protocols_not_mixed():
    records = [record("a", way=5, shot=1), record("b", way=3, shot=1), record("a", way=5, shot=5)]
    records += [record("a"), record("c"), record("b", way=3)]
    assert [(a.source, a.shot, a.sources) for a in averages(records)] == [
        ("average of 1", 1, ("a",)),
        ("average of 1", 5, ("a",)),
        ("average of 2", None, ("a", "c")),
    ]
    titles = [cells(line)[0] for line in markdown(records).splitlines()[2:]]
    assert titles == [
        "a, 5-way 1-shot", "b, 3-way 1-shot", "a, 5-way 5-shot", "a", "c", "b, 3-way",
        "average of 1, 5-way 1-shot", "average of 1, 5-way 5-shot", "average of 2",
    ]  # fmt: skip


def test_a_source_is_split_into_data_set_and_split():
    assert data_set_of("omniglot/test") == ("omniglot", "test")
    assert data_set_of("mini_imagenet_test") == ("mini_imagenet", "test")
    assert data_set_of("gtsrb") == ("gtsrb", None)
    with pytest.raises(ValueError, match="no source is called 'omniglott'"):
        check_in_domain(["omniglott"], ["omniglot/test"])
    check_in_domain(["omniglot", "omniglot/test"], ["omniglot/test"])


def config(**settings) -> dict:
    return {"adaptation": "film", "head": "mahalanobis", "task_covariance": True, "projection": False, **settings}


@pytest.mark.parametrize(
    ("settings", "variant", "method"),
    [
        ({}, Variant(True, "mahalanobis"), "Simple CNAPS"),
        ({}, Variant(False, "mahalanobis"), "Simple CNAPS, not adapted"),
        ({}, Variant(False, "euclidean"), "squared Euclidean, not adapted"),
        ({}, Variant(True, "euclidean"), None),
        ({"head": "euclidean"}, Variant(True, "euclidean"), "squared Euclidean"),
        ({"head": "linear"}, Variant(True, "linear"), "CNAPS"),
        ({"head": "linear", "adaptation": "auto-regressive"}, Variant(True, "linear"), "AR-CNAPS"),
        ({"adaptation": "auto-regressive"}, Variant(True, "mahalanobis"), "Simple AR-CNAPS"),
        ({"adaptation": "auto-regressive", "head": "cosine"}, Variant(True, "cosine"), None),
        ({"task_covariance": False}, Variant(True, "mahalanobis"), "Simple CNAPS -TR"),
        ({}, Variant(True, "mahalanobis", task_covariance=False), None),
        ({}, Variant(False, "mahalanobis", task_covariance=False), "Simple CNAPS -TR, not adapted"),
        ({"projection": True}, Variant(True, "mahalanobis"), "Simple CNAPS +P"),
        ({"adaptation": "none"}, Variant(False, "mahalanobis"), "Simple CNAPS, not adapted"),
    ],
)
def test_a_variant_is_compared_with_what_the_paper_measured(settings, variant, method):
    assert published_method(config(**settings), variant) == method


def test_the_papers_averages_follow_from_its_figures():
    """Ours of all data sets are the means that the paper prints, to the rounding of its figures."""
    records = [record(f"{name}/test") for name in INSIDE + OUTSIDE]
    for method in ("Simple CNAPS", "Simple AR-CNAPS", "CNAPS", "squared Euclidean", "dot product"):
        for average, title in zip(averages(records, INSIDE), ("in-domain", "out-of-domain", "overall"), strict=True):
            figure = published_figure(method, average)
            singly = [published_figure(method, record(source)).mean for source in average.sources]
            assert figure.mean == pytest.approx(sum(singly) / len(singly))
            assert figure.mean == pytest.approx(_published()["methods"][method][title][0], abs=0.1)
            assert figure.marks == ""


def test_without_adaptation_the_paper_has_averages_alone():
    records = [record(f"{name}/test") for name in INSIDE + OUTSIDE]
    method = "Simple CNAPS, not adapted"
    assert all(published_figure(method, r) is None for r in records)
    assert [str(published_figure(method, average)) for average in averages(records, INSIDE)] == [
        "{:.1f} ± {:.1f}".format(*_published()["methods"][method][title])
        for title in ("in-domain", "out-of-domain", "overall")
    ]
    assert published_figure(method, averages(records[:3])[0]) is None


def test_what_differs_from_the_papers_protocol_is_marked():
    assert published_figure("Simple CNAPS", record("omniglot/test")).marks == ""
    assert published_figure("Simple CNAPS", record("omniglot/test", way=5, shot=1)).marks == "*"
    assert published_figure("Simple CNAPS", record("omniglot/test", queries=5)).marks == "*"
    assert published_figure("Simple CNAPS", record("gtsrb")).marks == "†"
    assert published_figure("Simple CNAPS", record("dtd10/test", way=3, shot=5)).marks == "*†"
    assert published_figure("Simple CNAPS", record("omniglot/train")) is None
    assert published_figure("Simple CNAPS", record("photos")) is None
    clean = published_figure("Simple CNAPS", record("mini_imagenet_test", way=5, shot=1))
    assert (clean.marks, published_figure("Simple CNAPS", record("mini_imagenet_test", way=5, shot=2))) == (
        "",
        None,
    )


def test_the_papers_figures_stand_beside_and_notes_below():
    records = [record("omniglot/test", way=5, shot=1), record("gtsrb", way=5, shot=1), record("photos", way=5, shot=1)]
    table = markdown(records, IN_DOMAIN["resnet18"], {"adapted": "Simple CNAPS", "not adapted": "dot product"})
    lines = table.splitlines()
    assert cells(lines[0]) == ["source", *FOUR, "paper: Simple CNAPS", "paper: dot product"]
    omniglot, signs, photos, inside, outside, overall = map(cells, lines[2:8])
    assert omniglot[5].endswith("*")
    assert signs[5].endswith("*†")
    assert photos[5] == ""
    assert inside[0] == "in-domain average of 1, 5-way 1-shot"
    assert inside[5] == omniglot[5]
    assert (outside[5], overall[5]) == ("", "")  # the paper has no photos
    assert [line[:2] for line in lines[8:] if line] == ["\\*", "† "]
    assert "paper" not in markdown(records[2:], None, {"adapted": "Simple CNAPS"})


def test_the_latex_table_has_the_rows_of_the_markdown_table():
    records = [record("mini_imagenet_test", way=5, shot=1), record("gtsrb", way=5, shot=1)]
    report = records, averages(records), (), {"adapted": "Simple CNAPS"}
    latex = to_latex(*report).splitlines()
    assert latex[0] == r"\begin{tabular}{llllll}"
    rows = [
        [cell.strip() for cell in line.removesuffix(r" \\").replace(r"\_", "_").split(" & ")]
        for line in latex
        if " & " in line
    ]
    assert rows == [cells(line) for line in to_markdown(*report).splitlines() if line.startswith(("| ", "|a"))]
    assert latex.count(r"\midrule") == 2
    assert sum(r"\footnotesize" in line for line in latex) == 2


def test_json_holds_results_averages_and_the_paper_s_names():
    records = [record("mini_imagenet_test", way=5, shot=1)]
    found = json.loads(to_json(records, averages(records), (), {"adapted": "Simple CNAPS"}))
    assert found["results"][0]["scores"]["adapted"]["accuracy"] == [0.5, 0.01, 600]
    assert found["averages"][0]["sources"] == ["mini_imagenet_test"]
    assert found["methods"] == {"adapted": "Simple CNAPS"}
