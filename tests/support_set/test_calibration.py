"""What is chosen on left-out support examples: the temperature and beta."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn import functional as F

from fewshot_mahalanobis import MahalanobisClassifier
from fewshot_mahalanobis.gaussians.covariance import CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import BETA_PRIOR, choose_beta
from fewshot_mahalanobis.gaussians.temperature import fit_temperature
from fewshot_mahalanobis.heads import MahalanobisHead
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from tests.drawn_tasks import make_task

BETA_FACTORS = [10.0**exponent for exponent in BETA_PRIOR.candidates]
AUTO = CovarianceSettings("auto")


def chosen_beta(features: torch.Tensor, labels: torch.Tensor) -> float:
    return choose_beta(CovarianceSettings("auto"), features, labels).ridge


def drawn(true_temperature: float, n: int = 20_000, k: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels drawn from their softmax at a temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, k, generator=generator)
    labels = torch.multinomial(torch.softmax(logits / true_temperature, dim=1), 1, generator=generator)[:, 0]
    return logits, labels


@pytest.mark.parametrize("temperature", [0.25, 1.0, 8.0])
def test_the_temperature_that_made_the_labels_is_found(temperature: float) -> None:
    assert fit_temperature(*drawn(temperature)) == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_temperature_scales_with_the_logits(scale: float) -> None:
    logits, labels = drawn(3.0, n=500)
    assert fit_temperature(scale * logits, labels) == pytest.approx(scale * fit_temperature(logits, labels), rel=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_another_temperature_than_one_has_to_save_a_nat(seed: int) -> None:
    """Against a naive search, on ten examples whose labels were drawn at a temperature of 1, 1.5 or 4."""
    generator = torch.Generator().manual_seed(seed)
    logits = (1.0, 1.5, 4.0)[seed % 3] * 3 * torch.randn(10, 4, generator=generator).double()
    labels = torch.multinomial(torch.softmax(logits / (1.0, 1.5, 4.0)[seed % 3], dim=1), 1, generator=generator)[:, 0]
    targets = (F.one_hot(labels, 4).double() * 10 + 0.25 / 4) / 10.25

    def cross_entropy(temperature: float) -> float:
        return -float((targets * torch.log_softmax(logits / temperature, dim=1)).sum())

    temperatures = np.exp(np.linspace(-5, 5, 4001))
    losses = [cross_entropy(temperature) for temperature in temperatures]
    best = float(temperatures[int(np.argmin(losses))])
    expected = best if min(losses) < cross_entropy(1.0) - 1 else 1.0
    assert fit_temperature(logits, labels) == pytest.approx(expected, rel=5e-3)


def test_faultless_examples_give_no_certainty() -> None:
    """With N examples all right, their probability is that of N and a quarter, the quarter spread over the classes."""
    logits = 100.0 * F.one_hot(torch.arange(3).repeat_interleave(4)).float()
    labels = logits.argmax(dim=1)
    probability = torch.softmax(logits / fit_temperature(logits, labels), dim=1)[0, 0]
    assert float(probability) == pytest.approx((12 + 1 / 12) / 12.25, rel=1e-3)


def test_examples_alone_in_their_class_are_left_out() -> None:
    logits, labels = drawn(2.0, n=300)
    alone = torch.cat([logits, torch.tensor([[0.0, -torch.inf, 0.0, 0.0]])])
    assert fit_temperature(alone, torch.cat([labels, torch.tensor([1])])) == pytest.approx(
        fit_temperature(logits, labels), rel=1e-6
    )
    with pytest.raises(ValueError, match="at least one class needs two"):
        fit_temperature(alone[-1:], torch.tensor([1]))


@pytest.mark.parametrize("classes_gone", [(3,), (1, 3), (0,)])
def test_classes_that_went_with_an_example_are_no_classes_of_it(classes_gone: tuple[int, ...]) -> None:
    """Against a naive search over the classes that stay, each with its own pseudo-examples."""
    logits, labels = drawn(4.0, n=60)
    logits = logits.double()
    for i in range(0, 60, 2):
        logits[i, [label for label in classes_gone if label != labels[i]]] = -torch.inf

    def cross_entropy(temperature: float) -> float:
        total = 0.0
        for row, label in zip(logits, labels, strict=True):
            present = row > -torch.inf
            targets = (60 * F.one_hot(label, 4)[present].double() + 0.25 / 4) / (60 + 0.25 / 4 * int(present.sum()))
            total -= float((targets * torch.log_softmax(row[present] / temperature, dim=0)).sum())
        return total

    search = minimize_scalar(lambda exponent: cross_entropy(math.exp(exponent)), bounds=(0, 3), method="bounded")
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(search.x), rel=0.01)


@pytest.mark.parametrize("head", ["auto", "mahalanobis", "euclidean", "cosine"])
@pytest.mark.parametrize(
    ("labels", "groups"),
    [
        ("aaabb", [0, 1, 2, 0, 0]),
        ("aaaabbccc", [0, 1, 2, 3, 1, 1, 4, 5, 6]),
        ("aaaabbbbc", [0, 1, 2, 0, 3, 4, 5, 0, 0]),
        ("aabbcc", [0, 1, 0, 0, 1, 1]),
    ],
)
def test_a_group_may_hold_a_whole_class_and_part_of_another(head: str, labels: str, groups: list[int]) -> None:
    centres = 8 * np.eye(6)[["abc".index(label) for label in labels]]
    X = centres + np.random.default_rng(0).normal(size=centres.shape)
    beta = "auto" if head == "mahalanobis" else None
    classifier = MahalanobisClassifier(beta, head=head, temperature="auto", unknown_label="?", false_rejection_rate=0.4)
    classifier.fit(X, [*labels], groups=groups)
    assert 0 < classifier.temperature_ < np.inf
    assert classifier.threshold_ is not None
    assert np.isfinite(classifier.predict_proba(X)).all()
    assert classifier.predict(X[:1]).tolist() == ["a"]


def test_logits_that_say_nothing_leave_the_temperature_at_one() -> None:
    assert fit_temperature(torch.zeros(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])) == 1.0


def improbabilities(
    features: torch.Tensor,
    labels: torch.Tensor,
    settings: CovarianceSettings = AUTO,
) -> list[float]:
    """What ``choose_beta`` minimises, for each beta: refits, a fine grid of temperatures, and the prior of beta.

    An example that is alone in its class cannot be left out.
    """
    variance, k = float(features.var(dim=0).mean()), int(labels.max()) + 1
    rest = ~torch.eye(len(labels), dtype=torch.bool)[labels.bincount()[labels] > 1]
    told = labels[(~rest).nonzero()[:, 1]]
    n = len(told)
    targets = torch.full((n, k), 1 / (n + k), dtype=torch.float64).scatter(1, told[:, None], (n + 1) / (n + k))
    found = []
    for factor in BETA_FACTORS:
        head = MahalanobisHead(RegularizedCovariance.of(replace(settings, beta=factor * variance)))
        logits = torch.cat([head(features[r], labels[r], features[~r]) for r in rest])
        temperatures = float(logits.std(dim=1).mean()) * torch.logspace(-3, 3, 600, dtype=torch.float64)
        losses = [-(targets * torch.log_softmax(logits / t, dim=1)).sum() for t in temperatures]
        prior = torch.distributions.Normal(torch.tensor(1.0), torch.tensor(0.5)).log_prob(torch.tensor(factor).log10())
        found.append(float(torch.stack(losses).min() - prior))
    return found


@pytest.mark.parametrize("seed", [5, 8])
def test_beta_is_what_left_out_examples_and_the_prior_make_most_probable(seed: int) -> None:
    features, labels, _ = make_task(seed, [4, 3, 5], 12, dtype=torch.float64)
    variance = float(features.var(dim=0).mean())
    expected = BETA_FACTORS[int(np.argmin(improbabilities(features, labels)))] * variance
    assert chosen_beta(features, labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings",
    [
        CovarianceSettings("auto", shared="task", prior_shots=5.0),
        CovarianceSettings("auto", shared="within", prior_shots=1.0),
        CovarianceSettings("auto", shared="within", prior_shots=np.inf),
        CovarianceSettings("auto", task_covariance=False),
        CovarianceSettings("auto"),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("seed", "shots"), [(5, [4, 3, 5]), (8, [4, 3, 5]), (11, [1, 2, 3]), (13, [2, 1, 1, 2])])
def test_beta_is_chosen_for_the_other_settings_which_are_kept(
    settings: CovarianceSettings, seed: int, shots: list[int]
) -> None:
    features, labels, _ = make_task(seed, shots, 12, scale=0.7, dtype=torch.float64)
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    features = features + 2 * noise
    losses = improbabilities(features, labels, settings)
    beta = BETA_FACTORS[int(np.argmin(losses))] * float(features.var(dim=0).mean())
    chosen = choose_beta(settings, features, labels)
    assert chosen == replace(settings, beta=chosen.ridge)
    assert chosen.ridge == pytest.approx(beta)


@pytest.mark.parametrize("n", [1, 2])
def test_one_example_of_a_class_or_in_all_gives_the_mean_variance(n: int) -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 8.0]], dtype=torch.float64)[:n]
    variance = {1: 1.0, 2: (2.0 + 18.0) / 2}[n]
    chosen = choose_beta(CovarianceSettings("auto"), features, torch.arange(n))
    assert chosen == CovarianceSettings(variance)


def test_a_mean_variance_of_one_is_like_any_other() -> None:
    features, labels, _ = make_task(5, [4, 3, 5], 12, dtype=torch.float64)
    features = features * (features.var(dim=0).mean()).rsqrt()
    features = features / float(features.var(dim=0).mean()) ** 0.5
    best = BETA_FACTORS[int(np.argmin(improbabilities(features, labels)))]
    assert float(features.var(dim=0).mean()) == pytest.approx(1.0, rel=1e-12)
    assert chosen_beta(features, labels) == pytest.approx(best)


def test_many_examples_outvote_the_prior() -> None:
    """Two classes that differ where they vary least: a large beta, as the prior has it, hides that."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([10.0, 10.0, 10.0, 1.0], dtype=torch.float64)
    features = torch.randn(120, 4, generator=generator, dtype=torch.float64) * spread
    labels = torch.arange(120) % 2
    features[:, 3] += 3 * labels
    factors = [chosen_beta(features[:n], labels[:n]) / float(features[:n].var(dim=0).mean()) for n in (4, 120)]
    assert factors[1] < factors[0] / 10


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_beta_auto_makes_predictions_free_of_the_scale_of_features(scale: float) -> None:
    features, labels, queries = make_task(6, [4, 2, 5], 20, dtype=torch.float64)
    head = MahalanobisHead(RegularizedCovariance(beta="auto"))
    small = head(scale * features, labels, scale * queries)
    torch.testing.assert_close(small, head(features, labels, queries), rtol=1e-6, atol=0)


def test_where_nothing_can_be_left_out_beta_is_the_mean_variance() -> None:
    features, labels, _ = make_task(6, [1, 1, 1], 20, dtype=torch.float64)
    gaussians = RegularizedCovariance(beta="auto")(features, labels)
    assert gaussians.beta == pytest.approx(float(features.var(dim=0).mean()))
    assert RegularizedCovariance(beta="auto")(torch.ones(2, 3), torch.tensor([0, 1])).beta == 1.0


def test_the_classifier_of_features_chooses_beta_when_asked_to() -> None:
    features, labels, queries = make_task(7, [4, 3, 5], 12, dtype=torch.float64)
    chosen = chosen_beta(features, labels)
    auto = MahalanobisClassifier(head="mahalanobis", beta="auto").fit(features.numpy(), labels.numpy())
    assert auto.beta == "auto"
    assert auto.beta_ == pytest.approx(chosen)
    fixed = MahalanobisClassifier(head="mahalanobis", beta=chosen).fit(features.numpy(), labels.numpy())
    np.testing.assert_allclose(auto.decision_function(queries.numpy()), fixed.decision_function(queries.numpy()))


@pytest.mark.parametrize("beta", ["automatic", 0.0, -1.0, float("nan"), float("inf")])
def test_another_beta_is_refused(beta: object) -> None:
    with pytest.raises(ValueError, match="beta must be positive and finite, or"):
        RegularizedCovariance(beta=beta)  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ["euclidean", "manhattan", "mahalanobis"])
def test_probabilities_of_two_examples_a_class_are_as_honest_as_with_many(head: str) -> None:
    """In 200 dimensions most of a distance is common to all classes; a left-out example lies farther from its own."""
    generator = torch.Generator().manual_seed(0)
    confidence, right = [], []
    for _ in range(40):
        means = 0.6 * torch.randn(5, 200, generator=generator)
        labels = torch.arange(5).repeat_interleave(2)
        support = means[labels] + torch.randn(10, 200, generator=generator)
        truth = torch.arange(5).repeat(10)
        queries = means[truth] + torch.randn(50, 200, generator=generator)
        beta = {"beta": 0.3} if head == "mahalanobis" else {}
        classifier = MahalanobisClassifier(head=head, temperature="auto", **beta).fit(support.numpy(), labels.numpy())
        probabilities = classifier.predict_proba(queries.numpy())
        confidence.append(probabilities.max(axis=1).mean())
        right.append((probabilities.argmax(axis=1) == truth.numpy()).mean())
    assert abs(np.mean(confidence) - np.mean(right)) < 0.1
