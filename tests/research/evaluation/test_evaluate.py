import copy
import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import MahalanobisHead, ManhattanHead, RegularizedCovariance, SimpleCNAPS
from fewshot_mahalanobis.networks.simple_cnaps import adapted_network
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.meta_dataset import VariableEpisodes
from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng
from fewshot_mahalanobis.research.evaluation import Accuracy, Variant, evaluate_source
from fewshot_mahalanobis.research.evaluation import report as report_module
from fewshot_mahalanobis.research.evaluation.accuracy import UnadaptedFeatures
from fewshot_mahalanobis.research.evaluation.averages import averages
from fewshot_mahalanobis.research.evaluation.report import Settings, evaluate, variants_of
from fewshot_mahalanobis.research.evaluation.result import Result, read_results, write_results
from fewshot_mahalanobis.research.evaluation.result_tables import to_markdown
from fewshot_mahalanobis.research.evaluation.shots_and_ways import plot_curves, pooled_curve
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

FOUR = ["adapted", "not adapted", "adapted, Euclidean", "not adapted, Euclidean"]


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
    found = evaluate_source(model, source, variants, way=3, shot=2, queries=3, episodes=4, seed=5, precision="float32")
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
    monkeypatch.setattr(report_module, "open_source", lambda path, root, size: sources[path])
    file = tmp_path / "results" / "r.json"
    one_shot = Settings(shots=(1,), way=4, queries=2, episodes=3)
    first = evaluate(model, ["a"], one_shot, file=file, progress=False)
    assert first[0].way == 4
    assert read_results(file) == first

    computed = []
    real = report_module.evaluate_episodes

    def counted(model, source, variants, *rest, **options):
        computed.append([variant.title for variant in variants])
        return real(model, source, variants, *rest, **options)

    monkeypatch.setattr(report_module, "evaluate_episodes", counted)
    both = evaluate(model, ["a"], replace(one_shot, shots=(1, 2)), file=file, progress=False)
    assert computed == [FOUR]
    assert both[0] == first[0]
    assert [result.shot for result in read_results(file)] == [1, 2]

    # another variant is added to the same episodes; another model has a result of its own
    variants = variants_of(model, ["euclidean", "cosine"], True)
    more = evaluate(model, ["a"], one_shot, variants=variants, file=file, progress=False)
    assert computed[1:] == [["adapted, cosine"]]
    assert list(more[0].scores) == ["adapted, Euclidean", "adapted, cosine"]
    assert more[0].scores["adapted, Euclidean"] == first[0].scores["adapted, Euclidean"]
    assert list(read_results(file)[0].scores) == [*FOUR, "adapted, cosine"]
    other = copy.deepcopy(model)
    other.feature_extractor.conv1.weight.data *= -1
    evaluate(other, ["a"], one_shot, file=file, progress=False)
    assert computed[2:] == [FOUR]
    assert len({result.model for result in read_results(file)}) == 2

    # another set of the same name is another source
    sources["a"] = colours(each=5)
    evaluate(model, ["a"], one_shot, file=file, progress=False)
    assert computed[3:] == [FOUR]


def test_a_number_of_shots_given_twice_counts_once(model, monkeypatch):
    monkeypatch.setattr(report_module, "open_source", lambda path, root, size: colours())
    settings = Settings(shots=(2, 1, 2), way=2, queries=1, episodes=2)
    assert [result.shot for result in evaluate(model, ["a"], settings, progress=False)] == [2, 1]


def test_too_small_a_source_is_refused_before_any_work(model, tmp_path, monkeypatch):
    sources = {"a": colours(), "b": replace(colours(each=5), name="small")}
    monkeypatch.setattr(report_module, "open_source", lambda path, root, size: sources[path])
    with pytest.raises(ValueError, match=r"small: a 4-way 5-shot episode needs .* smaller --shot"):
        evaluate(model, ["a", "b"], Settings(way=4, episodes=2), file=tmp_path / "r.json", progress=False)
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("shot", [0, -1])
def test_numbers_of_shots_below_one_are_refused(shot):
    with pytest.raises(ValueError, match="shots must be 1 or more"):
        Settings(shots=(1, shot))


def test_plots_without_matplotlib_are_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "fewshot_mahalanobis.plotting", raising=False)
    monkeypatch.setattr(report_module, "load_checkpoint", lambda name: pytest.fail("work was begun"))
    with pytest.raises(ImportError, match="pip install"):
        report_module.evaluate_checkpoints(report_module.Compared(["resnet18"]), ["a"], plots=tmp_path / "plots")


@pytest.mark.parametrize("text", ["", "{}", '[{"source": "a"}]', '[{"source": "a", "way": "five"}]'])
def test_a_file_that_holds_no_results_is_refused_by_name_and_stays(model, tmp_path, monkeypatch, text):
    monkeypatch.setattr(report_module, "open_source", lambda path, root, size: colours())
    (tmp_path / "notes.json").write_text(text)
    with pytest.raises(ValueError, match=r"notes\.json is no file of results"):
        evaluate(model, ["a"], Settings(shots=(1,)), file=tmp_path / "notes.json", progress=False)
    assert (tmp_path / "notes.json").read_text() == text


def test_results_are_the_same_after_writing_and_reading(tmp_path):
    rng = np.random.default_rng(0)
    scores = Accuracy.from_classes(
        rng.uniform(size=9), rng.integers(2, 5, 9), rng.uniform(size=30), rng.integers(1, 9, 30)
    )
    results = [
        Result(source="a", protocol="fixed", way=5, shot=1, queries=10, episodes=9, seed=0, precision="float32",
               model="0", scores={"adapted": scores}),
        Result(source="b", protocol="variable", way=None, shot=None, queries=10, episodes=9, seed=0,
               precision="bfloat16", model="0"),
    ]  # fmt: skip
    write_results(tmp_path / "r.json", results)
    assert read_results(tmp_path / "r.json") == results


def test_a_source_of_fewer_classes_is_evaluated_with_those_and_left_out_of_the_average(model, monkeypatch):
    sources = {"a": colours(), "b": colours(classes=3)}
    sources["b"] = ImageSource("few", sources["b"].images, sources["b"].labels, sources["b"].class_names)
    monkeypatch.setattr(report_module, "open_source", lambda path, root, size: sources[path])
    settings = Settings(shots=(1,), way=4, queries=2, episodes=3)
    results = evaluate(model, ["a", "b"], settings, progress=False)
    table = to_markdown(results, averages(results)).splitlines()
    assert [result.way for result in results] == [4, 3]
    assert table[0].split("|")[2].strip() == "adapted"
    assert "few, 3-way 1-shot" in table[3]
    assert "average of 1, 4-way 1-shot" in table[4]
    means = [str(results[0].scores[name]) for name in FOUR]
    assert [cell.strip() for cell in table[4].split("|")[2:-1]] == means


def test_variants_are_what_their_names_say(model):
    """Each against the model's parts put together by hand, on the same episode."""
    source = colours()
    variants = [
        Variant(True, "mahalanobis", task_covariance=False),
        Variant(True, "mahalanobis", projection=False),
        Variant(False, "manhattan"),
    ]
    projecting = copy.deepcopy(model)
    projecting.projection = torch.nn.Linear(64, 64)
    torch.nn.init.normal_(projecting.projection.weight, generator=torch.Generator().manual_seed(1))
    torch.nn.init.zeros_(projecting.projection.bias)
    found = evaluate_source(projecting, source, variants, way=4, shot=3, queries=3, episodes=3, precision="float32")
    for index in range(3):
        episode = draw_episode(source.indices_of_class(), [3] * 4, 3, episode_rng(0, index))
        support, query = source.network_input(episode.support), source.network_input(episode.query)
        labels = torch.from_numpy(episode.support_labels)
        networks = (adapted_network(projecting, support, adapt=adapt) for adapt in (True, False))
        (adapted, of_queries), (plain, plain_of_queries) = (
            (network.unprojected_features(support), network.unprojected_features(query)) for network in networks
        )
        no_task = MahalanobisHead(RegularizedCovariance(task_covariance=False))
        with torch.no_grad():
            space = projecting.projection
            logits = [
                no_task(space(adapted), labels, space(of_queries)),
                model.head(adapted, labels, of_queries),
                ManhattanHead()(space(plain), labels, space(plain_of_queries)),
            ]
        for variant, of_variant in zip(variants, logits, strict=True):
            right = of_variant.argmax(1).numpy() == episode.query_labels
            assert found[variant][index] == pytest.approx(right.mean())
    assert [v.title for v in variants] == ["adapted, -TR", "adapted, no projection", "not adapted, Manhattan"]


def test_variants_that_a_model_does_not_have_are_refused(model):
    with pytest.raises(ValueError, match="no trained linear head"):
        variants_of(model, ["linear"])
    with pytest.raises(ValueError, match=r"head must be one of .*, got 'nearest'"):
        variants_of(model, ["nearest"])
    with pytest.raises(ValueError, match="no projection to leave out"):
        variants_of(model, projection=False)
    with pytest.raises(ValueError, match="the checkpoint has no adaptation"):
        variants_of(tiny_model(), adapt=True)
    with pytest.raises(ValueError, match="'cosine' has no task covariance"):
        evaluate_source(model, colours(), [Variant(True, "cosine", task_covariance=False)], episodes=1)
    assert list(variants_of(tiny_model())) == ["not adapted", "not adapted, Euclidean"]
    assert list(variants_of(model, ["mahalanobis", "cosine"], True, task_covariance=False)) == [
        "adapted", "adapted, -TR", "adapted, cosine",
    ]  # fmt: skip


def test_unadapted_features_go_through_the_network_once_and_equal_those_of_all_images():
    model, source = tiny_model(), colours(classes=5, each=4)
    with torch.no_grad():
        whole = model.feature_extractor(source.network_input(np.arange(20)))
    features = UnadaptedFeatures(model, source, batch_size=3)
    network = features._network.extractor
    network.batches.clear()
    for indices in ([3, 1, 1, 7], [7, 3], [], [0, 1, 2, 3, 19]):
        torch.testing.assert_close(features[np.array(indices, dtype=np.int64)], whole[indices], rtol=1e-5, atol=1e-6)
    assert network.batches == [3, 3]  # 1, 3, 7, then 0, 2, 19


def test_variable_episodes_are_those_of_meta_dataset_and_grouped_by_ways_and_shots(monkeypatch):
    model, source = tiny_model(), colours(classes=7, each=9, noise=120)
    monkeypatch.setattr(report_module, "open_source", lambda path, root, size: source)
    (result,) = evaluate(model, ["a"], Settings(protocol="variable", episodes=12, seed=3), progress=False)
    assert (result.way, result.shot, result.protocol) == (None, None, "variable")
    ways, shots, accuracies = {}, {}, []
    for index in range(12):
        episode = VariableEpisodes(source, seed=3).draw(index)
        labels = torch.from_numpy(episode.support_labels)
        task = model.adapt(source.network_input(episode.support), labels)
        right = task.logits(source.network_input(episode.query)).argmax(1).numpy() == episode.query_labels
        accuracies.append(right.mean())
        ways.setdefault(episode.way, []).append(right.mean())
        for k in range(episode.way):
            of_class = right[episode.query_labels == k]
            shots.setdefault(int((labels == k).sum()), []).append(of_class.mean())
    scores = result.scores["not adapted"]
    assert scores.mean == pytest.approx(np.mean(accuracies))
    assert scores.half_width == pytest.approx(1.96 * np.std(accuracies, ddof=1) / np.sqrt(12))
    assert scores.by_episode == pytest.approx(accuracies)
    for naive, groups in ((ways, scores.by_way), (shots, scores.by_shot)):
        rows = {number: rest for number, *rest in groups}
        assert rows.keys() == naive.keys()
        for number, values in naive.items():
            spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
            assert rows[number] == pytest.approx([len(values), np.mean(values), spread])


def test_curves_pool_sources_as_if_their_classes_were_one_list(tmp_path):
    rng = np.random.default_rng(0)
    numbers = [rng.integers(1, 40, 200) for _ in range(2)]
    values = [rng.uniform(0, 1, 200) for _ in range(2)]
    results = [
        Result(source=name, protocol="variable", way=None, shot=None, queries=10, episodes=200, seed=0,
               precision="float32", model="", scores={"adapted": Accuracy.from_classes(v, n, v, n)})
        for name, n, v in zip("ab", numbers, values, strict=True)
    ]  # fmt: skip
    all_numbers, all_values = np.concatenate(numbers), np.concatenate(values)
    curve = pooled_curve(results, "shot")
    edges = [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 19, 23, 29, 36, 45]
    groups = [(all_numbers >= low) & (all_numbers < high) for low, high in itertools.pairwise(edges)]
    for point, group in zip(curve, groups, strict=True):
        chosen = all_values[group]
        assert point.shot == round(all_numbers[group].mean())
        half_width = 1.96 * chosen.std(ddof=1) / np.sqrt(len(chosen))
        assert point.scores["adapted"][:3] == pytest.approx((chosen.mean(), half_width, len(chosen)))
    files = plot_curves(results, tmp_path / "plots")
    assert [file.name for file in files] == ["accuracy_by_shot.png", "accuracy_by_way.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_two_sources_of_one_name_and_unknown_protocols_are_refused(model, monkeypatch):
    monkeypatch.setattr(report_module, "open_source", lambda path, root, size: colours())
    with pytest.raises(ValueError, match="two sources are called 'colours'"):
        evaluate(model, ["a", "b"], Settings(shots=(1,), way=2, queries=1, episodes=2), progress=False)
    with pytest.raises(ValueError, match='protocol must be "fixed" or "variable"'):
        Settings(protocol="random")
