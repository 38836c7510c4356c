"""Meta-Dataset's sampler against plain loops, its published parameters, and what they imply on average."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pytest

from fewshot_mahalanobis.research.data.hierarchy import Hierarchy, sampling_graph
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.meta_dataset import (
    EVALUATION,
    MAX_LEAVES,
    TRAINING,
    EpisodeLimits,
    VariableEpisodes,
    draw_classes,
    draw_shots,
    queries_per_class,
)
from fewshot_mahalanobis.research.episodes.sampling import (
    FixedEpisodes,
    SmallEpisodes,
    draw_episode,
    episode_rng,
    evaluation_episodes,
)


def source_of(sizes: Sequence[int], hierarchy: Hierarchy | None = None, name: str = "drawn/test") -> ImageSource:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = tuple(f"{k:03d}" for k in range(len(sizes)))
    return ImageSource(name, np.zeros((len(labels), 1, 1, 3), np.uint8), labels, names, hierarchy)


def naive_shots(sizes, queries, limits, beta, alphas):
    """Steps 2b and 2c as the paper prints them, one class at a time."""
    total = 0
    for size in sizes:
        total += math.ceil(beta * min(limits.max_share, size - queries))
    total = min(limits.max_support, total)
    denominator = sum(math.exp(alpha) * size for alpha, size in zip(alphas, sizes, strict=True))
    shots = []
    for alpha, size in zip(alphas, sizes, strict=True):
        share = math.exp(alpha) * size / denominator
        shots.append(min(math.floor(share * (total - len(sizes))) + 1, size - queries))
    return shots


class Recorder:
    """A generator that remembers what it gave."""

    def __init__(self, rng):
        self.rng, self.given = rng, []

    def uniform(self, *args, **kwargs):
        self.given.append(self.rng.uniform(*args, **kwargs))
        return self.given[-1]


def test_the_parameters_are_the_published_ones():
    assert (EVALUATION.min_way, EVALUATION.max_way, EVALUATION.max_queries) == (5, 50, 10)
    assert (EVALUATION.max_support, EVALUATION.max_share) == (500, 100)
    assert np.exp(EVALUATION.log_weights) == pytest.approx([0.5, 2.0])
    assert (TRAINING.max_way, TRAINING.max_support) == (40, 400)
    assert (TRAINING.min_way, TRAINING.max_queries, TRAINING.max_share) == (5, 10, 100)
    assert MAX_LEAVES == 392


@pytest.mark.parametrize("seed", range(40))
def test_shots_equal_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, rng.choice([5, 40, 1500]), size=rng.integers(5, 51))
    queries = queries_per_class(sizes, EVALUATION)
    assert queries == min(10, *(size // 2 for size in sizes.tolist()))
    recorder = Recorder(rng)
    shots = draw_shots(sizes, queries, EVALUATION, recorder)
    beta, alphas = recorder.given
    # floor(beta x) + 1 for beta in [0, 1) is ceil(beta x) for beta in (0, 1], but for beta x whole, of probability 0.
    assert shots.tolist() == naive_shots(sizes.tolist(), queries, EVALUATION, beta, alphas.tolist())


@pytest.mark.parametrize("limits", [EVALUATION, TRAINING, EpisodeLimits(3, 7, 2, 30, 8)])
def test_every_episode_keeps_the_limits(limits):
    sizes = np.random.default_rng(7).integers(2, 300, 80)
    source = source_of(sizes)
    episodes = VariableEpisodes(source, limits, seed=3)
    for index in range(100):
        episode = episodes.draw(index)
        shots = np.bincount(episode.support_labels, minlength=episode.way)
        queries = np.bincount(episode.query_labels, minlength=episode.way)
        assert limits.min_way <= episode.way <= limits.max_way
        assert len(episode.support) <= limits.max_support
        assert shots.min() >= 1
        assert len(set(queries.tolist())) == 1
        own = source.labels[episode.support]
        classes = [np.unique(own[episode.support_labels == way]) for way in range(episode.way)]
        assert all(len(found) == 1 for found in classes)
        of_way = np.concatenate(classes)
        assert len(np.unique(of_way)) == episode.way
        assert (source.labels[episode.query] == of_way[episode.query_labels]).all()
        assert queries[0] == min(limits.max_queries, *(sizes[of_way] // 2).tolist())
        assert (shots + queries <= sizes[of_way]).all()
        everything = np.concatenate([episode.support, episode.query])
        assert len(np.unique(everything)) == len(everything)


def test_the_way_is_uniform_from_5_to_the_number_of_classes_or_50():
    for classes, most in ((12, 12), (90, 50)):
        episodes = VariableEpisodes(source_of([4] * classes))
        ways = np.array([episodes.draw(index).way for index in range(1500)])
        values = most - 4
        assert (ways.min(), ways.max()) == (5, most)
        # The mean of n draws has the standard deviation sqrt((values^2 - 1) / 12 n).
        assert abs(ways.mean() - (5 + most) / 2) < 4 * math.sqrt((values**2 - 1) / 12 / len(ways))
        counts = np.bincount(ways)[5:]
        expected = len(ways) / values
        # Pearson's statistic has mean values - 1 and variance 2 (values - 1).
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < values - 1 + 4 * math.sqrt(2 * (values - 1))


def test_the_support_size_follows_one_uniform_beta():
    """5 classes of 1,000: the sum is 5 ceil(100 beta), 252.5 on average, and rounding the shares takes less than 5."""
    sizes = np.full(5, 1000)
    rng = np.random.default_rng(0)
    shots = np.array([draw_shots(sizes, 10, EVALUATION, rng) for _ in range(3000)])
    totals = shots.sum(1)
    deviation = 5 * math.sqrt((100**2 - 1) / 12)  # of one total
    error = 4 * deviation / math.sqrt(len(totals))
    assert 252.5 - 5 - error < totals.mean() < 252.5 + error
    # One beta for all: totals spread like 5 times one uniform variable, not like a sum of five.
    assert totals.std() > 0.9 * deviation
    # 100 a class limits the sum, not the class, as in the published code.
    assert 100 < shots.max() < 500


def test_shares_follow_class_size_times_a_log_uniform_weight():
    """E[share_c] is the same for classes of one size; a class twice as large has about twice the share."""
    limits = EpisodeLimits(max_support=500, max_share=10_000)
    sizes = np.array([1000, 1000, 2000, 2000, 2000])
    rng = np.random.default_rng(1)
    shots = np.array([draw_shots(sizes, 10, limits, rng) for _ in range(4000)])
    shots = shots[shots.sum(1) > 480]  # the sum is 500 in nearly all episodes
    means, errors = shots.mean(0), shots.std(0) / math.sqrt(len(shots))
    assert abs(means[0] - means[1]) < 4 * math.hypot(errors[0], errors[1])
    assert means[2] / means[0] == pytest.approx(2, rel=0.15)
    weights = shots[:, 0] / shots[:, 1]  # exp(alpha_0 - alpha_1), between 1/4 and 4
    assert 0.24 < weights.min() < 0.4
    assert 2.5 < weights.max() < 4.2


def test_every_class_and_image_can_be_drawn_about_equally_often():
    episodes = VariableEpisodes(source_of([6] * 10), EpisodeLimits(5, 5), seed=2)
    drawn = np.zeros(60)
    times = 1200
    for index in range(times):
        episode = episodes.draw(index)
        drawn[episode.query] += 1  # 3 of the 6 images of 5 of the 10 classes: each with probability 1/4
    assert np.abs(drawn - times / 4).max() < 4.5 * math.sqrt(times * 3 / 16)


def test_an_episode_depends_on_data_set_split_seed_and_index_alone():
    sizes = list(range(4, 40))
    base = VariableEpisodes(source_of(sizes), seed=1)
    episode = base.draw(9)
    for index in (3, 9, 2):  # any order, another instance
        again = VariableEpisodes(source_of(sizes), seed=1)
        again.draw(index)
    assert same(episode, again.draw(9))
    for other in (
        base.draw(10),
        VariableEpisodes(source_of(sizes), seed=2).draw(9),
        VariableEpisodes(source_of(sizes, name="drawn/train"), seed=1).draw(9),
        VariableEpisodes(source_of(sizes, name="other/test"), seed=1).draw(9),
    ):
        assert not same(episode, other)


def same(one, other):
    return np.array_equal(one.support, other.support) and np.array_equal(one.query, other.query)


def test_names_enter_the_seed_by_a_digest_that_every_process_shares():
    digest = int(hashlib.sha256(b"drawn/test").hexdigest(), 16)
    expected = np.random.default_rng(np.random.SeedSequence([digest, 3, 4])).integers(2**62)
    assert episode_rng("drawn/test", 3, 4).integers(2**62) == expected


def test_fixed_episodes_have_the_same_ways_and_shots_and_are_repeatable():
    source = source_of([20] * 9)
    episodes = FixedEpisodes(source, way=5, shot=3, queries=4, seed=1)
    episode = episodes.draw(6)
    assert np.bincount(episode.support_labels).tolist() == [3] * 5
    assert np.bincount(episode.query_labels).tolist() == [4] * 5
    assert same(episode, FixedEpisodes(source, 5, 3, 4, seed=1).draw(6))
    assert not same(episode, episodes.draw(7))
    assert not same(episode, FixedEpisodes(source_of([20] * 9, name="other"), 5, 3, 4, seed=1).draw(6))


def test_fixed_episodes_of_evaluation_depend_on_seed_and_index_alone():
    """As drawn for the published accuracies: one generator for (seed, index), whatever the source's name."""
    for name in ("drawn/test", "other"):
        source = source_of([20] * 9, name=name)
        episode = evaluation_episodes(source, 5, 3, 4, seed=1)(6)
        expected = draw_episode(source.indices_of_class(), [3] * 5, 4, np.random.default_rng([1, 6]))
        assert same(episode, expected)


def test_small_episodes_have_5_to_10_ways_and_1_to_6_shots():
    episodes = SmallEpisodes(source_of([20] * 12), 3, seed=1)
    drawn = [episodes.draw(index) for index in range(300)]
    shots = [np.bincount(episode.support_labels) for episode in drawn]
    assert {episode.way for episode in drawn} == set(range(5, 11))
    assert {shot for found in shots for shot in found.tolist()} == set(range(1, 7))
    even = sum(len(set(found.tolist())) == 1 for found in shots)
    assert abs(even - 150) < 4 * math.sqrt(300 / 4) + 5  # half, and few of the others by chance
    assert same(drawn[7], SmallEpisodes(source_of([20] * 12), 3, seed=1).draw(7))


def test_small_episodes_fit_small_sources_or_are_an_error():
    episodes = SmallEpisodes(source_of([5] * 4 + [2] * 3), 3)
    for index in range(50):
        episode = episodes.draw(index)
        assert episode.way <= 4
        assert np.bincount(episode.support_labels).max() <= 3
    assert {SmallEpisodes(source_of([3, 20]), 3).draw(index).way for index in range(9)} == {2}
    with pytest.raises(ValueError, match=r"drawn/test: half of the classes have fewer than 3 images; leave them out"):
        SmallEpisodes(source_of([9, 2, 2, 2]), 3)


# Omniglot: within one alphabet ---------------------------------------------------------------------------


def test_alphabets_are_the_class_names_up_to_the_last_full_stop():
    names = ["Greek.character01", "Latin.character01", "Greek.character02", "N.Ko.character01"]
    hierarchy = Hierarchy.alphabets(names)
    assert hierarchy.groups == ((0, 2), (1,), (3,))
    assert not hierarchy.whole
    with pytest.raises(ValueError, match="'cat' names no alphabet"):
        Hierarchy.alphabets(["Greek.character01", "cat"])


def test_omniglot_episodes_stay_in_one_alphabet_and_alphabets_are_equally_likely():
    sizes = [5, 8, 30, 60]
    ends = np.cumsum(sizes)
    groups = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    source = source_of([4] * sum(sizes), Hierarchy(groups, whole=False))
    episodes = VariableEpisodes(source)
    alphabets, ways = [], []
    for index in range(800):
        episode = episodes.draw(index)
        found = np.unique(np.searchsorted(ends, source.labels[episode.support], side="right"))
        assert len(found) == 1
        alphabets.append(int(found[0]))
        ways.append(episode.way)
    counts = np.bincount(alphabets, minlength=4)
    assert np.abs(counts - 200).max() < 4 * math.sqrt(800 * 3 / 16)
    for alphabet, size in enumerate(sizes):
        here = {way for way, a in zip(ways, alphabets, strict=True) if a == alphabet}
        assert max(here) <= min(size, 50)
        assert min(here) >= 5
        assert len(here) > 0.7 * (min(size, 50) - 4)


def test_an_alphabet_of_too_few_characters_is_an_error():
    source = source_of([4] * 9, Hierarchy(((0, 1, 2, 3), (4, 5, 6, 7, 8)), whole=False))
    with pytest.raises(ValueError, match=r"drawn/test: a group of its classes has 4 classes, fewer than min_way = 5"):
        VariableEpisodes(source)
    assert VariableEpisodes(source, EpisodeLimits(min_way=4)).draw(0).way in (4, 5)


# ImageNet: below one synset --------------------------------------------------------------------------------


def test_imagenet_episodes_take_all_leaves_of_a_node_or_max_way_of_them():
    small, large, hopeless, whole = tuple(range(7)), tuple(range(60)), (0, 1, 2, 3), tuple(range(393))
    source = source_of([4] * 393, Hierarchy((small, large, hopeless, whole), whole=True))
    episodes = VariableEpisodes(source)
    ways = []
    for index in range(300):
        episode = episodes.draw(index)
        classes = np.unique(source.labels[episode.support])
        assert classes.max() < 60  # nodes of 4 and of 393 leaves are not eligible
        if episode.way == 7:
            assert classes.tolist() == list(small)
        else:
            assert episode.way == 50
        ways.append(episode.way)
    assert abs(ways.count(7) - 150) < 4 * math.sqrt(300 / 4)


def test_draw_classes_subsamples_large_groups_evenly():
    group = np.arange(10)
    counts = np.zeros(10)
    rng = np.random.default_rng(5)
    for _ in range(1000):
        counts[draw_classes([group], True, EpisodeLimits(2, 4), rng)] += 1
    assert np.abs(counts - 400).max() < 4.5 * math.sqrt(1000 * 0.24)


def naive_collapse(graph, classes, root):
    """Remove one inner node of a single child at a time, as long as there is one."""

    def ancestors(node):
        return {node}.union(*(ancestors(p) for p, children in graph.items() if node in children))

    kept = set().union(*map(ancestors, classes))
    if root is not None:
        kept = {node for node in kept if root in ancestors(node)} | set(classes)
    children = {node: {c for c in graph.get(node, ()) if c in kept} for node in kept}
    while True:
        single = next((n for n in sorted(children) if len(children[n]) == 1), None)
        if single is None:
            return children
        (child,) = children.pop(single)
        children = {n: {child if c == single else c for c in cs} for n, cs in children.items()}


def test_the_sampling_graph_equals_removing_single_children_one_by_one():
    rng = np.random.default_rng(0)
    for _ in range(30):
        # A random tree whose inner nodes are 0 to 19, so no two ways lead to one leaf and collapsing is unambiguous.
        graph = {}
        for node in range(1, 60):
            graph.setdefault(f"{int(rng.integers(0, min(node, 20))):02d}", set()).add(f"{node:02d}")
        leaves = sorted({c for cs in graph.values() for c in cs} - graph.keys())
        classes = rng.choice(leaves, 15, replace=False).tolist()
        assert sampling_graph(graph, classes) == naive_collapse(graph, classes, None)


def test_the_sampling_graph_keeps_nodes_of_several_parents_and_respects_the_root():
    graph = {
        "entity": {"thing", "animal"},
        "thing": {"device"},
        "device": {"drum", "lamp", "robot dog"},
        "animal": {"dog"},
        "dog": {"robot dog", "poodle"},
    }
    classes = ["drum", "lamp", "poodle", "robot dog"]
    assert sampling_graph(graph, classes) == {
        "entity": {"device", "dog"},
        "device": {"drum", "lamp", "robot dog"},
        "dog": {"robot dog", "poodle"},
        **{name: set() for name in classes},
    }
    below_device = sampling_graph(graph, ["drum", "lamp", "robot dog"], root="device")
    assert below_device.keys() == {"device", "drum", "lamp", "robot dog"}
    hierarchy = Hierarchy.subtrees(sampling_graph(graph, classes), classes)
    assert hierarchy.whole
    assert hierarchy.groups == ((0, 1, 3), (2, 3), (0, 1, 2, 3))  # device, dog, entity
    assert Hierarchy.subtrees(sampling_graph(graph, classes), ["drum", "lamp"]).groups == ((0, 1), (0, 1))


# Errors and the figure ---------------------------------------------------------------------------------------


def test_sources_without_an_episode_are_errors_that_say_why():
    with pytest.raises(ValueError, match=r"1 classes have fewer than 2 images.*'003'; leave them out"):
        VariableEpisodes(source_of([4, 4, 4, 1, 4, 4]))
    with pytest.raises(ValueError, match=r"drawn/test: it has 4 classes, fewer than min_way = 5"):
        VariableEpisodes(source_of([4] * 4))
    with pytest.raises(ValueError, match="min_way <= max_way"):
        EpisodeLimits(min_way=6, max_way=5)
    with pytest.raises(ValueError, match="must be positive"):
        EpisodeLimits(max_queries=0)
