import numpy as np
import pytest

from fewshot_mahalanobis.research.episodes.sampling import draw_episode, episode_rng


def classes(*sizes: int) -> list[np.ndarray]:
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def test_an_episode_has_the_shots_and_queries_asked_for_and_no_image_twice():
    sizes = [20] * 8
    episode = draw_episode(classes(*sizes), [1, 5, 3], 4, episode_rng(0, 0))
    assert episode.way == 3
    assert np.bincount(episode.support_labels).tolist() == [1, 5, 3]
    assert np.bincount(episode.query_labels).tolist() == [4, 4, 4]
    everything = np.concatenate([episode.support, episode.query])
    assert len(np.unique(everything)) == len(everything)


def test_labels_are_consistent_with_the_source_s_classes():
    episode = draw_episode(classes(*[12] * 9), [2] * 5, 3, episode_rng(3, 1))
    of_image = episode.support // 12
    for way in range(5):
        source_class = np.unique(of_image[episode.support_labels == way])
        assert len(source_class) == 1
        assert set(episode.query[episode.query_labels == way] // 12) == set(source_class.tolist())


def test_an_episode_is_a_function_of_seed_and_index():
    def draw(*parts):
        return draw_episode(classes(*[30] * 10), [5] * 5, 5, episode_rng(*parts))

    assert np.array_equal(draw(0, 7).support, draw(0, 7).support)
    assert not np.array_equal(draw(0, 7).support, draw(0, 8).support)
    assert not np.array_equal(draw(0, 7).support, draw(1, 7).support)


def test_every_class_and_image_is_drawn_about_equally_often():
    seen, images = np.zeros(6), np.zeros(60)
    for index in range(600):
        episode = draw_episode(classes(*[10] * 6), [2, 2], 1, episode_rng(0, index))
        seen[np.unique(episode.support // 10)] += 1
        images[episode.support] += 1
    # 600 draws of 2 in 6: mean 200 a class, standard deviation 11.5; 40 an image, standard deviation 6.1.
    assert np.abs(seen - 200).max() < 5 * 11.5
    assert np.abs(images - 40).max() < 5 * 6.1


def test_classes_too_small_for_the_shots_are_not_drawn():
    for index in range(50):
        episode = draw_episode(classes(3, 10, 10, 2), [4, 1], 5, episode_rng(0, index))
        assert set((np.searchsorted([3, 13, 23, 25], episode.support, side="right")).tolist()) == {1, 2}


def test_too_few_large_classes_are_an_error_that_counts_them():
    with pytest.raises(ValueError, match=r"3-way 4-shot .* this source has 2"):
        draw_episode(classes(3, 10, 10, 2), [4, 1, 1], 5, episode_rng(0, 0))
