import json

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.episodes.sources import ImageSource
from fewshot_mahalanobis.evaluation import Accuracy, Variant, evaluate_source
from fewshot_mahalanobis.evaluation import report as report_module
from fewshot_mahalanobis.evaluation.report import VARIANTS, evaluate, to_markdown


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32)
        for name, parameter in model.named_parameters():
            if ".scales." in name:
                torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.eval()


def colours(classes: int = 4, each: int = 6, noise: float = 40.0) -> ImageSource:
    rng = np.random.default_rng(0)
    means = rng.integers(60, 200, (classes, 1, 1, 1, 3))
    images = np.clip(means + rng.normal(0, noise, (classes, each, 32, 32, 3)), 0, 255).astype(np.uint8)
    labels = np.repeat(np.arange(classes), each)
    return ImageSource("colours", images.reshape(-1, 32, 32, 3), labels, tuple(map(str, range(classes))))


def test_accuracies_equal_a_plain_loop_over_the_episodes(model):
    source, variants = colours(), (Variant(True, "mahalanobis"), Variant(False, "mahalanobis"), Variant(True, "cosine"))
    found = evaluate_source(model, source, variants, way=3, shot=2, queries=3, episodes=4, seed=5)
    for index in range(4):
        episode = draw_episode(source.indices_of_class(), [2, 2, 2], 3, episode_rng(5, index))
        support, query = source.network_input(episode.support), source.network_input(episode.query)
        labels, truth = torch.from_numpy(episode.support_labels), torch.from_numpy(episode.query_labels)
        with torch.no_grad():
            predicted = model(support, labels, query).argmax(1)
        assert found[variants[0]][index] == pytest.approx(float((predicted == truth).double().mean()))
        predicted = model.adapt(support, labels, adapt=False).logits(query).argmax(1)
        assert found[variants[1]][index] == pytest.approx(float((predicted == truth).double().mean()))


def test_intervals_are_1_96_standard_errors():
    values = np.array([0.2, 0.4, 0.9, 0.5])
    accuracy = Accuracy.of(values)
    assert accuracy.mean == pytest.approx(0.5)
    assert accuracy.half_width == pytest.approx(1.96 * np.sqrt(((values - 0.5) ** 2).sum() / 3 / 4))
    assert str(accuracy) == "50.0 ± 28.9"


def test_intervals_cover_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(0)
    draws = rng.binomial(50, 0.7, (400, 100)) / 50
    covered = sum(abs(Accuracy.of(row).mean - 0.7) <= Accuracy.of(row).half_width for row in draws)
    assert 0.90 < covered / 400 < 0.985


def test_a_report_is_written_as_it_goes_and_continued(model, tmp_path, monkeypatch):
    sources = {"a": colours(), "b": colours(classes=3)}
    monkeypatch.setattr(report_module, "load_source", lambda path, size: sources[path])
    file = tmp_path / "results" / "r.json"
    settings = {"way": 4, "queries": 2, "episodes": 3, "progress": False}
    first = evaluate(model, ["a"], (1,), results=file, **settings)
    assert first[0]["way"] == 4
    assert json.loads(file.read_text()) == first

    computed = []
    real = report_module.evaluate_source
    monkeypatch.setattr(report_module, "evaluate_source", lambda *a, **k: computed.append(k["shot"]) or real(*a, **k))
    both = evaluate(model, ["a"], (1, 2), results=file, **settings)
    assert computed == [2]
    assert both[0] == first[0]
    assert [record["shot"] for record in json.loads(file.read_text())] == [1, 2]


def test_a_source_of_fewer_classes_is_evaluated_with_those_and_left_out_of_the_average(model, monkeypatch):
    sources = {"a": colours(), "b": colours(classes=3)}
    sources["b"] = ImageSource("few", sources["b"].images, sources["b"].labels, sources["b"].class_names)
    monkeypatch.setattr(report_module, "load_source", lambda path, size: sources[path])
    records = evaluate(model, ["a", "b"], (1,), way=4, queries=2, episodes=3, progress=False)
    table = to_markdown(records).splitlines()
    assert [record["way"] for record in records] == [4, 3]
    assert table[0].split("|")[2].strip() == "adapted"
    assert "few, 3-way 1-shot" in table[3]
    assert "average of 1, 4-way 1-shot" in table[4]
    means = [f"{records[0]['accuracy'][name][0]:.1f}" for name in VARIANTS]
    assert [cell.strip() for cell in table[4].split("|")[2:-1]] == means
