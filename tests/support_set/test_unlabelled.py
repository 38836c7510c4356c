"""Classifiers that learn from unlabelled examples too: what they answer, keep, refuse and write."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.support_set import estimator
from fewshot_mahalanobis.support_set.copies import once_each
from fewshot_mahalanobis.support_set.summary import support_influence
from tests.tiny import LABELS, adapting_model, pictures, tiny_classifier

CENTRES = np.random.default_rng(0).normal(size=(3, 40))
NAMES = np.array(["ash", "elm", "oak"])


def drawn(seed: int, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    return 0.6 * CENTRES[labels] + np.random.default_rng(seed).normal(size=(len(labels), 40))


#: Two examples of each class, and unlabelled ones of unequal shares.
Y = np.arange(3).repeat(2)
X = drawn(1, Y)
OF = np.arange(3).repeat([40, 15, 5])
UNLABELLED, QUERIES = drawn(2, OF), drawn(3, OF)


def fitted(**settings: Any) -> MahalanobisClassifier:
    return MahalanobisClassifier(**settings).fit(X, NAMES[Y], unlabelled=UNLABELLED)


@pytest.mark.parametrize("head", ["auto", "mahalanobis"])
def test_unlabelled_examples_raise_the_accuracy_of_others(head: str) -> None:
    alone = MahalanobisClassifier(head=head).fit(X, NAMES[Y])
    assert fitted(head=head).score(QUERIES, NAMES[OF]) > alone.score(QUERIES, NAMES[OF])


def test_priors_are_the_shares_among_the_unlabelled_examples_unless_some_are_given() -> None:
    estimated = fitted().priors_
    assert estimated.sum() == pytest.approx(1)
    assert estimated[0] > 0.45 > 0.35 > estimated[1] > estimated[2]
    assert fitted(priors="equal").priors_.tolist() == [1 / 3] * 3
    given = fitted(priors={"ash": 0.1, "elm": 0.1, "oak": 0.8})
    assert given.priors_.tolist() == pytest.approx([0.1, 0.1, 0.8])
    memberships = [each.fitted_head_.pool.memberships.sum(dim=0) for each in (given, fitted(priors="equal"))]
    assert memberships[0][2] > memberships[1][2]  # known shares guide what is learned


def test_transductive_prediction_is_a_fit_with_the_queries_as_unlabelled_examples() -> None:
    classifier, expected = fitted(), MahalanobisClassifier().fit(X, NAMES[Y], unlabelled=QUERIES)
    before = classifier.predict_proba(QUERIES)
    probabilities = classifier.predict_proba(QUERIES, transductive=True)
    np.testing.assert_allclose(probabilities, expected.predict_proba(QUERIES), rtol=1e-6)
    assert not np.allclose(probabilities, before)
    labels = classifier.predict(QUERIES, transductive=True)
    assert labels.tolist() == classifier.classes_[probabilities.argmax(axis=1)].tolist()
    everything = classifier.predict_all(QUERIES, transductive=True)
    assert everything.labels.tolist() == labels.tolist()
    np.testing.assert_allclose(everything.probabilities, probabilities, rtol=1e-12)
    np.testing.assert_array_equal(classifier.predict_proba(QUERIES), before)  # for that call alone


def test_labels_of_the_support_set_and_what_is_rejected_and_left_out_stay() -> None:
    settings: dict[str, Any] = {"unknown_label": "none", "false_rejection_rate": 0.2}
    alone, classifier = MahalanobisClassifier(**settings).fit(X, NAMES[Y]), fitted(**settings)
    far = np.concatenate([QUERIES, QUERIES + 9])
    assert classifier.threshold_ == alone.threshold_
    assert classifier.outlier_score(far).tolist() == alone.outlier_score(far).tolist()
    assert (classifier.predict(far) == "none").tolist() == (alone.predict(far) == "none").tolist()
    assert classifier.class_counts_.tolist() == [2, 2, 2]
    summary, without = classifier.summary(), alone.summary()
    assert (summary.right, summary.suspects, summary.curve) == (without.right, without.suspects, without.curve)
    assert summary.unlabelled == 60
    assert "60 unlabelled examples" in str(summary)
    assert summary.priors == dict(zip(NAMES.tolist(), classifier.priors_.tolist()))


def test_the_summary_counts_the_examples_that_are_far_from_every_class() -> None:
    among = np.concatenate([UNLABELLED, UNLABELLED[:7] + 9])
    classifier = MahalanobisClassifier().fit(X, NAMES[Y], unlabelled=among)
    of_classes = classifier.fitted_head_.pool.memberships.sum(dim=1)
    assert (of_classes[60:] < 0.5).all()
    summary = classifier.summary()
    assert summary.far == sum(of_each < 0.5 for of_each in of_classes.tolist())
    assert f"67 unlabelled examples, which labels of queries follow, and nothing below; {summary.far} of them" in str(
        summary
    )


@pytest.mark.parametrize("head", ["auto", "mahalanobis"])
@pytest.mark.parametrize("unknown_label", [None, "none"])
def test_file_pickle_clone_and_graph_of_features(head: str, unknown_label: Any, tmp_path: Any) -> None:
    classifier = fitted(head=head, unknown_label=unknown_label)
    expected = classifier.predict_proba(QUERIES)
    classifier.save(tmp_path / "fitted")
    for again in (MahalanobisClassifier.load(tmp_path / "fitted"), pickle.loads(pickle.dumps(classifier))):
        np.testing.assert_array_equal(again.predict_proba(QUERIES), expected)
        np.testing.assert_array_equal(again.priors_, classifier.priors_)
        assert again.priors is None
        again.partial_fit(UNLABELLED[:1], ["ash"])
        assert len(again.fitted_head_.pool.features) == 59
    assert not hasattr(clone(classifier), "_fitted")
    classifier.export_onnx(tmp_path / "graph.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "graph.onnx")
    probabilities, label, score = session.run(None, {"features": QUERIES.astype(np.float32)})
    np.testing.assert_allclose(probabilities, expected, atol=1e-4)
    np.testing.assert_allclose(score, classifier.outlier_score(QUERIES), rtol=1e-3, atol=1e-3)
    names = [*classifier.classes_.tolist(), unknown_label]
    sure = np.sort(expected, axis=1)[:, -1] - np.sort(expected, axis=1)[:, -2] > 1e-3
    assert [names[i] for i in label[sure]] == classifier.predict(QUERIES)[sure].tolist()


def test_labelling_an_example_takes_it_from_the_unlabelled_ones_and_equals_a_fit() -> None:
    labelled = [0, 45, 59]
    step = fitted().partial_fit(UNLABELLED[labelled], NAMES[OF[labelled]], unlabelled=QUERIES[:4])
    rest = np.delete(UNLABELLED, labelled, axis=0)
    whole = MahalanobisClassifier().fit(
        np.concatenate([X, UNLABELLED[labelled]]),
        NAMES[np.concatenate([Y, OF[labelled]])],
        unlabelled=np.concatenate([rest, QUERIES[:4]]),
    )
    np.testing.assert_allclose(step.predict_proba(QUERIES), whole.predict_proba(QUERIES), rtol=1e-6)


def test_copies_count_once() -> None:
    x = torch.arange(5.0)[:, None]
    assert once_each(x, 2, np.array([[0, 3], [4, 5], [5, 6]])).ravel().tolist() == [0, 2]
    assert once_each(x[:3], 2, np.empty((0, 2), np.int64)).ravel().tolist() == [0, 1, 2]
    doubled = MahalanobisClassifier().fit(X, NAMES[Y], unlabelled=np.concatenate([UNLABELLED, UNLABELLED[:20], X[:3]]))
    assert len(doubled.fitted_head_.pool.features) == 60
    np.testing.assert_allclose(doubled.predict_proba(QUERIES), fitted().predict_proba(QUERIES), rtol=1e-6)


#: Four unlabelled bursts of unequal lengths, not in order; one has a labelled example among its frames.
BURSTS = ["b", "a", 2, "a", "b", "b", "labelled", "a", 2, "labelled", "alone"]


def burst_frames() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Frames, and the mean of each burst that has no label, one after another."""
    frames = np.concatenate([UNLABELLED[:9], X[:1], UNLABELLED[9:10]])
    means = [np.mean([x for x, name in zip(frames, BURSTS) if name == of], axis=0) for of in ("b", "a", 2, "alone")]
    return frames, np.array(means)


def test_a_group_of_unlabelled_examples_counts_once_by_its_mean() -> None:
    frames, means = burst_frames()
    found = MahalanobisClassifier().fit(X, NAMES[Y], unlabelled=frames, unlabelled_groups=iter(BURSTS))
    np.testing.assert_allclose(found.fitted_head_.pool.features, means, rtol=1e-12)
    expected = MahalanobisClassifier().fit(X, NAMES[Y], unlabelled=means)
    np.testing.assert_allclose(found.predict_proba(QUERIES), expected.predict_proba(QUERIES), rtol=1e-9)
    # They are groups of their own: a support example called "a" is in none of them.
    named = MahalanobisClassifier().fit(X, NAMES[Y], ["a", "b", *"cdef"], frames, BURSTS)
    assert len(named.fitted_head_.pool.features) == 4
    step = fitted().partial_fit(QUERIES[:1], NAMES[OF[:1]], unlabelled=frames, unlabelled_groups=BURSTS)
    np.testing.assert_allclose(step.fitted_head_.pool.features[60:], means[:3], rtol=1e-12)  # "alone" was there before
    queries = MahalanobisClassifier().fit(X, NAMES[Y]).predict_proba(frames, transductive=True, groups=BURSTS)
    np.testing.assert_allclose(queries, expected.predict_proba(frames, groups=BURSTS), rtol=1e-9)


def test_a_group_of_unlabelled_images_counts_once_by_its_mean() -> None:
    support, more = pictures(8, 0), pictures(6, 1)
    alone = SimpleCNAPSClassifier(adapting_model(), device="cpu").fit(support, LABELS)
    frames, names = [*more, support[0]], ["a", "b", "a", "c", "b", "labelled", "labelled"]
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", batch_size=4)
    classifier.fit(support, LABELS, unlabelled=frames, unlabelled_groups=names)
    x = alone.transform(more)
    means = [x[[0, 2]].mean(axis=0), x[[1, 4]].mean(axis=0), x[3]]
    np.testing.assert_allclose(classifier.fitted_head_.pool.features, means, rtol=1e-4, atol=1e-5)
    step = alone.partial_fit(more[:1], ["red"], unlabelled=alone.features(more[1:]), unlabelled_groups=names[1:6])
    x = alone.transform(more)
    means = [x[[1, 4]].mean(axis=0), x[2], x[3], x[5]]
    np.testing.assert_allclose(step.fitted_head_.pool.features, means, rtol=1e-4, atol=1e-5)


def test_groups_of_unlabelled_examples_that_do_not_fit_are_refused() -> None:
    images, support = SimpleCNAPSClassifier(adapting_model(), device="cpu"), pictures(8, 0)
    for groups, message in (
        (["a"], "unlabelled_groups: {} examples but 1 groups: give each example a group"),
        ("burst", "unlabelled_groups: groups must be a sequence of strings or numbers"),
    ):
        with pytest.raises(ValueError, match=message.format(60)):
            MahalanobisClassifier().fit(X, NAMES[Y], unlabelled=UNLABELLED, unlabelled_groups=groups)
        with pytest.raises(ValueError, match=message.format(3)):
            images.fit(support, LABELS, unlabelled=pictures(3, 1), unlabelled_groups=groups)
    for nothing, message in (
        (lambda: MahalanobisClassifier().fit(X, NAMES[Y], unlabelled_groups=["a"]), "give the examples that they are"),
        (lambda: images.fit(support, LABELS, unlabelled_groups=["a"]), "give the images that they are of"),
    ):
        with pytest.raises(ValueError, match=f"unlabelled_groups without unlabelled: {message}"):
            nothing()


def test_more_examples_than_are_used_are_sampled_evenly_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "MAX_UNLABELLED", 13)
    with pytest.warns(UserWarning, match="60 unlabelled examples: 13 of them, evenly spread"):
        pool = fitted().fitted_head_.pool
    np.testing.assert_array_equal(pool.features, UNLABELLED[np.linspace(0, 59, 13).round().astype(int)])
    model, images = adapting_model(), pictures(8, 0)
    with pytest.warns(UserWarning, match="20 unlabelled images: 13 of them"):
        classifier = SimpleCNAPSClassifier(model, device="cpu").fit(images, LABELS, unlabelled=[*pictures(20, 1)])
    chosen = pictures(20, 1)[np.linspace(0, 19, 13).round().astype(int)]
    np.testing.assert_allclose(
        classifier.fitted_head_.pool.features, classifier.transform(chosen), rtol=1e-3, atol=1e-5
    )


def test_probabilities_of_one_shot_classes_are_as_sure_as_alone_and_a_quarter_of_the_rest() -> None:
    far = 0.5 * np.random.default_rng(0).normal(size=(3, 200))
    more = far[OF] + np.random.default_rng(1).normal(size=(60, 200))
    alone = MahalanobisClassifier().fit(far, NAMES)
    classifier = MahalanobisClassifier().fit(far, NAMES, unlabelled=more)
    before, after = (each.predict_proba(more).max(axis=1).mean() for each in (alone, classifier))
    assert classifier.temperature_ > alone.temperature_ == 1
    assert after == pytest.approx(before + 0.25 * (1 - before), abs=1e-5)
    assert fitted().temperature_ == 1  # with two examples of a class


def test_the_influence_of_an_example_is_on_what_was_learned_with_the_unlabelled_ones() -> None:
    head, queries = fitted().fitted_head_, torch.from_numpy(QUERIES[:5])
    without = MahalanobisClassifier().fit(np.delete(X, 1, 0), np.delete(NAMES[Y], 1)).fitted_head_
    without = replace(without, pool=head.pool, temperature=head.temperature)
    log_p = head.logits(queries).log_softmax(dim=1)
    change = (log_p - without.logits(queries).log_softmax(dim=1)).gather(1, log_p.argmax(dim=1, keepdim=True))
    torch.testing.assert_close(support_influence(head, queries)[:, [1]], change)


def test_one_class_alone_learns_nothing_until_there_are_two() -> None:
    settings: dict[str, Any] = {"unknown_label": "none", "false_rejection_rate": 0.3}
    x = X[Y == 0]
    one = MahalanobisClassifier(**settings).fit(x, ["ash"] * 2, unlabelled=UNLABELLED)
    alone = MahalanobisClassifier(**settings).fit(x, ["ash"] * 2)
    assert one.predict(QUERIES).tolist() == alone.predict(QUERIES).tolist()
    assert "60 unlabelled examples, which teach nothing beside one class alone" in str(one.summary())
    one.partial_fit(X[Y == 1], ["elm"] * 2)
    two = MahalanobisClassifier(**settings).fit(X[Y < 2], NAMES[Y[Y < 2]], unlabelled=UNLABELLED)
    np.testing.assert_allclose(one.predict_proba(QUERIES), two.predict_proba(QUERIES), rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: tiny_classifier(head="euclidean"), None])
def test_heads_that_do_not_learn_from_them_say_so(make: Any) -> None:
    if make is None:
        classifier, x, y, more = MahalanobisClassifier(head="cosine").fit(X, NAMES[Y]), X, NAMES[Y], UNLABELLED
    else:
        classifier, x, y, more = make(), pictures(8, 0), LABELS, pictures(4, 1)
    before = classifier._fitted
    for call in (
        lambda: classifier.fit(x, y, unlabelled=more),
        lambda: classifier.partial_fit(x, y, unlabelled=more),
        lambda: classifier.predict(more, transductive=True),
        lambda: classifier.predict_proba(more, transductive=True),
    ):
        with pytest.raises(
            ValueError, match=r'"auto" and "mahalanobis" learn from unlabelled examples, \w+Head does not'
        ):
            call()
    assert classifier._fitted is before


def test_bad_unlabelled_examples_are_named_and_nothing_is_fitted(tmp_path: Any) -> None:
    classifier = MahalanobisClassifier()
    for bad, message in (
        (UNLABELLED[:, :3], "unlabelled: X has 3 features"),
        (np.where(UNLABELLED > 0, np.inf, UNLABELLED), "unlabelled: .*inf"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier.fit(X, NAMES[Y], unlabelled=bad)
    images = SimpleCNAPSClassifier(adapting_model(), device="cpu")
    (tmp_path / "cut.png").write_bytes(b"no picture")
    for bad, message in (
        ([tmp_path / "cut.png"], r"unlabelled: image 0 \('.*cut.png'\)"),
        ([pictures(1, 0)[0], tmp_path / "none.png"], r"unlabelled: image 1 .*none.png"),
        ([], "unlabelled: there are no images"),
    ):
        with pytest.raises(ValueError, match=message):
            images.fit(pictures(8, 0), LABELS, unlabelled=bad)
    assert not hasattr(images, "_fitted")
    assert not hasattr(classifier, "_fitted")


def test_images_teach_as_their_features_do(tmp_path: Any) -> None:
    support, more, queries = pictures(8, 0), pictures(15, 1), pictures(6, 2)
    alone = SimpleCNAPSClassifier(adapting_model(), device="cpu", unknown_label="none").fit(support, LABELS)
    classifier = SimpleCNAPSClassifier(adapting_model(), device="cpu", unknown_label="none", batch_size=4)
    classifier.fit(support, LABELS, unlabelled=[*more, support[0], more[0]])
    assert len(classifier.fitted_head_.pool.features) == 15  # neither the labelled one again nor a copy
    np.testing.assert_allclose(classifier.transform(queries), alone.transform(queries), rtol=1e-4, atol=1e-5)
    expected = alone.fitted_head_.with_unlabelled(torch.from_numpy(alone.transform(more)))
    logits = expected.logits(torch.from_numpy(alone.transform(queries)))
    np.testing.assert_allclose(classifier.predict_proba(queries), expected.log_probabilities(logits).exp(), rtol=1e-3)
    classifier.save(tmp_path / "fitted")
    for again in (SimpleCNAPSClassifier.load(tmp_path / "fitted"), pickle.loads(pickle.dumps(classifier))):
        np.testing.assert_allclose(again.predict_proba(queries), classifier.predict_proba(queries), rtol=1e-6)
    step = again.partial_fit(more[:1], ["red"], unlabelled=again.features(pictures(3, 5)))
    assert len(step.fitted_head_.pool.features) == 15 - 1 + 3
