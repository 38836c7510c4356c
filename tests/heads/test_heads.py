"""Every head against its formula, one pair of query and class mean at a time."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis import heads
from fewshot_mahalanobis.gaussians import plda
from fewshot_mahalanobis.gaussians.covariance import CovarianceSettings
from fewshot_mahalanobis.gaussians.leave_out import choose_beta
from fewshot_mahalanobis.gaussians.plda import PldaSettings, choose_plda_settings
from fewshot_mahalanobis.gaussians.support import class_means
from fewshot_mahalanobis.gaussians.temperature import temperature_fit
from fewshot_mahalanobis.heads import HEADS, AutoHead, EuclideanHead, Head, LinearHead, MahalanobisHead, mahalanobis
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance
from fewshot_mahalanobis.testing import HEAD_PROPERTIES, HeadTask
from tests import reference
from tests.drawn_tasks import make_task
from tests.gaussians.test_properties import WITHOUT
from tests.gaussians.test_properties import make_head as head_for_width

COMPARE = {
    "euclidean": lambda x, mu: -((x - mu) ** 2).sum(),
    "manhattan": lambda x, mu: -(x - mu).abs().sum(),
    "cosine": lambda x, mu: (x @ mu) / (x.norm() * mu.norm()),
    "dot_product": lambda x, mu: x @ mu,
}


@pytest.fixture
def task() -> tuple[Tensor, Tensor, Tensor]:
    return make_task(0, [1, 5, 2, 3], 512, queries=6)


#: Settings of ``AutoHead`` where what it would choose is not the point.
FIXED = PldaSettings(beta=0.8, spread=0.3, freedom=4.0, scale=0.7, shared="within")


def make_head(name: str) -> Head[object]:
    if name == "auto":
        return AutoHead(FIXED)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return HEADS[name]()


@pytest.mark.parametrize("name", COMPARE)
def test_metric_heads_follow_their_formula(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    expected = reference.pairwise(*task, COMPARE[name])
    torch.testing.assert_close(make_head(name)(*task).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_mahalanobis_logits_are_minus_the_scaled_distance(scale: float, task: tuple[Tensor, Tensor, Tensor]) -> None:
    head = MahalanobisHead(RegularizedCovariance(beta=0.3), scale=scale)
    expected = -scale * reference.squared_mahalanobis(*task, beta=0.3)
    torch.testing.assert_close(head(*task).double(), expected, rtol=1e-5, atol=0.0)


def test_without_a_scale_mahalanobis_logits_are_minus_the_distance(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    distance = RegularizedCovariance()(features, labels).squared_distance(queries)
    for head in (MahalanobisHead(), heads.make_head("mahalanobis")):
        assert torch.equal(head(features, labels, queries), -distance)


def test_a_head_is_made_by_its_name_with_the_arguments_that_are_its_own() -> None:
    settings = {
        "beta": 0.3,
        "task_covariance": False,
        "one_shot_covariance": "published",
        "scale": 0.5,
        "image_size": 84,
    }
    named = heads.make_head("mahalanobis", settings)
    assert isinstance(named, MahalanobisHead)
    assert named.covariance.settings == CovarianceSettings(0.3, False, "published")
    assert named.scale == 0.5
    linear = LinearHead()
    assert heads.make_head("linear", settings, linear) is linear
    with pytest.raises(ValueError, match="no trained linear head"):
        heads.make_head("linear", settings)
    for name in set(HEADS) - {"mahalanobis", "linear"}:
        assert type(heads.make_head(name, settings)) is HEADS[name]
    names = "auto, mahalanobis, euclidean, manhattan, cosine, dot_product, linear"
    with pytest.raises(ValueError, match=f"head must be one of {names}, got 'nearest'"):
        heads.make_head("nearest")


def test_linear_head_generates_each_row_from_the_class_mean(task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    head = make_head("linear")
    assert isinstance(head, LinearHead)
    w, b = head.weight_generator, head.bias_generator
    columns = []
    for label in range(4):
        m = features[labels == label].mean(dim=0)
        row = w.linear3(F.elu(w.linear2(F.elu(w.linear1(m))))) + m
        bias = b.linear3(F.elu(b.linear2(F.elu(b.linear1(m)))))
        columns.append(queries @ row + bias)
    torch.testing.assert_close(head(*task), torch.stack(columns, dim=1))


def test_linear_head_has_the_parameters_that_simple_cnaps_does_without() -> None:
    assert sum(parameter.numel() for parameter in LinearHead().parameters()) == 788_485
    assert not list(MahalanobisHead().parameters())


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("shots", "width"), [([1, 3], 4), ([1, 5, 2, 3], 6)], ids=str)
def test_every_property_of_heads_holds(name: str, shots: list[int], width: int) -> None:
    """On one task; tests/gaussians/test_properties.py searches for one on which a property does not hold."""
    task = HeadTask(*make_task(1, shots, width, queries=3, dtype=torch.float64))
    for title, holds in HEAD_PROPERTIES.items():
        if title not in WITHOUT.get(name, ()):
            holds(head_for_width(name, width), task)


@pytest.mark.parametrize("name", HEADS)
def test_reduced_precision_features_are_computed_in_float32_outside_autocast(
    name: str, task: tuple[Tensor, Tensor, Tensor]
) -> None:
    head = make_head(name)
    features, labels, queries = task[0].bfloat16(), task[1], task[2].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(features, labels, queries)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, head(features.float(), labels, queries.float()))


@pytest.mark.parametrize("name", ["euclidean", "manhattan"])
def test_the_distance_to_a_one_shot_support_example_is_zero(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, _ = task
    logits = make_head(name)(1e3 * features, labels, 1e3 * features)
    assert logits[labels == 0, 0].item() == 0.0
    assert (logits <= 0).all()


@pytest.mark.parametrize("name", HEADS)
def test_bad_input_is_named(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    head = make_head(name)
    broken = features.clone()
    broken[3, 7] = float("nan")
    with pytest.raises(ValueError, match="row 3 of support features"):
        head.fit(broken, labels)
    with pytest.raises(ValueError, match="class 1 has no support example"):
        head.fit(features, 2 * labels)
    state = head.fit(features, labels)
    with pytest.raises(ValueError, match="100 columns"):
        head.logits(state, queries[:, :100])
    with pytest.raises(ValueError, match="row 0 of query features"):
        head.logits(state, queries / 0.0)


def test_linear_head_names_the_width_it_was_made_for() -> None:
    with pytest.raises(ValueError, match="in_features=512"):
        LinearHead().fit(torch.zeros(2, 64), torch.tensor([0, 1]))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be positive"):
        MahalanobisHead(scale=scale)


@pytest.mark.parametrize("name", HEADS)
def test_left_out_logits_are_those_of_the_head_fitted_to_the_others(
    name: str, task: tuple[Tensor, Tensor, Tensor]
) -> None:
    features, labels, _ = task
    head = make_head(name)
    got = head.leave_one_out_logits(features, labels)
    for i in range(len(labels)):
        rest = torch.arange(len(labels)) != i
        present, renumbered = labels[rest].unique(return_inverse=True)
        expected = torch.full((4,), -torch.inf)
        expected[present] = head(features[rest], renumbered, features[i : i + 1])[0]
        torch.testing.assert_close(got[i], expected, rtol=1e-5, atol=1e-5)
    assert torch.isinf(got).sum() == 1  # class 0 has one example
    torch.testing.assert_close(Head.leave_one_out_logits(head, features, labels), got, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    "groups",
    [
        [0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, 2, 2, 0, 3, 3, 4, 5, 5, 6],
        [0] * 12,
        [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    ],
    ids=["of copies", "of two classes", "of all", "without a class"],
)
def test_groups_are_left_out_as_fitting_to_the_others_says(name: str, groups: list[int]) -> None:
    features, _, _ = make_task(4, [3, 4, 5], 512)
    labels, of = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]), torch.tensor(groups)
    head = make_head(name).settled(features, labels, of)
    expected = torch.full((12, 3), -torch.inf)
    for i in range(12):
        rest = of != of[i]
        present, renumbered = labels[rest].unique(return_inverse=True)
        if len(present):
            expected[i, present] = head.logits(
                head.fit_groups(features[rest], renumbered, of[rest]), features[i : i + 1]
            )[0]
    for leave_out in (head.leave_one_out_logits, functools.partial(Head.leave_one_out_logits, head)):
        torch.testing.assert_close(leave_out(features, labels, of), expected, rtol=1e-4, atol=1e-4)


def test_examples_are_left_out_under_settings_chosen_once_on_all_of_them() -> None:
    features, labels, _ = make_task(4, [4, 3, 5], 8, dtype=torch.float64)
    auto = RegularizedCovariance(beta="auto")
    chosen = auto.with_chosen_settings(features, labels)
    expected = Head.leave_one_out_logits(MahalanobisHead(chosen), features, labels)
    torch.testing.assert_close(MahalanobisHead(auto).leave_one_out_logits(features, labels), expected)


# ---------------------------------------------------------------- exported forms


@pytest.mark.parametrize("name", HEADS)
def test_the_exported_form_gives_the_heads_logits(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    features, labels, queries = task
    head = make_head(name)
    state = head.fit(features, labels)
    graph, logits = head.export(state), head.logits(state, queries).detach()
    assert all(buffer.dtype == torch.float32 for buffer in graph.buffers())
    torch.testing.assert_close(graph(queries), logits, rtol=1e-4, atol=1e-5 * float(logits.abs().max()))


def test_a_head_of_ones_own_is_exported_as_it_is() -> None:
    class Chebyshev(Head[Tensor]):
        def fit(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
            return class_means(support_features, support_labels)

        def logits(self, state: Tensor, query_features: Tensor) -> Tensor:
            return -(query_features[:, None] - state).abs().amax(dim=2)

    features, labels, queries = make_task(0, [3, 2], 5, dtype=torch.float64)
    head = Chebyshev()
    state = head.fit(features, labels)
    graph = head.export(state)(queries)
    assert graph.dtype == torch.float32
    torch.testing.assert_close(graph.double(), head.logits(state, queries), rtol=1e-6, atol=1e-6)
    assert (head.name, head.title) == ("Chebyshev", "Chebyshev")


@pytest.mark.parametrize(
    ("covariance", "everything_from"),
    [
        (RegularizedCovariance(0.3), 12),
        (RegularizedCovariance(0.3, shared="within", prior_shots=math.inf), 12),
        (RegularizedCovariance(0.3, task_covariance=False), 12),
        (RegularizedCovariance(0.3, one_shot_covariance="published"), 0),
    ],
    ids=["task", "shared", "own", "published"],
)
@pytest.mark.parametrize("shots", [[1, 2, 3], [1, 1, 1], [1, 5, 6], [13, 14, 15]], ids=str)
def test_the_exported_distance_is_the_heads_and_as_small_as_the_span_of_the_support_set(
    shots: list[int], covariance: RegularizedCovariance, everything_from: int
) -> None:
    features, labels, queries = make_task(0, shots, 12, dtype=torch.float64)
    head = MahalanobisHead(covariance, scale=0.5)
    state = head.fit(features + 5, labels)
    graph = head.export(state)
    logits = head.logits(state, queries + 5)
    torch.testing.assert_close(
        graph((queries + 5).float()).double(), logits, rtol=1e-4, atol=1e-5 * float(logits.abs().max())
    )
    rank = 12 if len(labels) >= everything_from else len(labels)
    assert graph.roots.shape == (1 if state.is_shared else 3, rank, rank)
    assert all(buffer.dtype == torch.float32 for buffer in graph.buffers())


def test_too_many_classes_to_export_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, _ = make_task(0, [3, 3, 3], 20)
    monkeypatch.setattr(mahalanobis, "MAX_EXPORTED_NUMBERS", 3 * 9**2)  # nine examples
    own, shared = MahalanobisHead(), MahalanobisHead(RegularizedCovariance(shared="within", prior_shots=math.inf))
    assert own.export(own.fit(features, labels)).roots.numel() == 3 * 9**2
    monkeypatch.setattr(mahalanobis, "MAX_EXPORTED_NUMBERS", 3 * 9**2 - 1)
    with pytest.raises(ValueError, match=r"^3 classes need a 9 x 9 matrix each, too much for an ONNX file: fit fewer"):
        own.export(own.fit(features, labels))
    assert shared.export(shared.fit(features, labels)).roots.numel() == 9**2


# ---------------------------------------------------------------- auto


ROOTS = replace(FIXED, power=0.5)


def naive_auto(features: Tensor, labels: Tensor, queries: Tensor, settings: PldaSettings) -> Tensor:
    """The posterior of every class mean and the predictive Gaussian of every class, one at a time."""
    if settings.power == 0.5:
        features, queries = features.sign() * features.abs().sqrt(), queries.sign() * queries.abs().sqrt()
    members = [features[labels == label] for label in range(int(labels.max()) + 1)]
    means = torch.stack([m.mean(dim=0) for m in members])
    centre, pooled = means.mean(dim=0), reference.pooled_covariance(features, labels)
    p = pooled + settings.beta * torch.eye(features.shape[1], dtype=features.dtype)
    columns = []
    for member, mean in zip(members, means):
        precision = 1 / settings.spread + len(member)  # of the posterior, in units of the inverse of P
        posterior, ratio = (centre / settings.spread + len(member) * mean) / precision, 1 + 1 / precision
        difference = queries - posterior
        distance = (difference @ torch.linalg.inv(p) * difference).sum(dim=1)
        columns.append(-settings.scale * (distance / ratio + settings.freedom * math.log(ratio)))
    return torch.stack(columns, dim=1)


SHOTS = [
    ([5] * 5, 40),
    ([1, 2, 3, 7], 30),
    ([1, 2, 3, 7, 12], 6),
    ([2, 2], 5),
    ([3, 1], 2),
    ([2, 1, 1], 4),
    ([9, 1], 1),
]


@pytest.mark.parametrize("settings", [FIXED, ROOTS], ids=["features", "roots"])
@pytest.mark.parametrize(("shots", "d"), SHOTS)
def test_auto_logits_are_those_of_the_predictive_gaussians(shots: list[int], d: int, settings: PldaSettings) -> None:
    features, labels, queries = make_task(1, shots, d, dtype=torch.float64)
    got = AutoHead(settings)(features, labels, queries)
    torch.testing.assert_close(got, naive_auto(features, labels, queries, settings), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("shots", "d"), SHOTS)
def test_auto_leaves_out_exactly(shots: list[int], d: int) -> None:
    features, labels, _ = make_task(1, shots, d, dtype=torch.float64)
    for settings in (FIXED, ROOTS, choose_plda_settings(features, labels)):
        head = AutoHead(settings)
        naive = Head.leave_one_out_logits(head, features, labels)
        torch.testing.assert_close(head.leave_one_out_logits(features, labels), naive, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shared", ["within", "task"])
@pytest.mark.parametrize("shots", [[2, 3, 4], [2, 2], [2, 1, 1], [1, 1, 1], [4], [1, 1]], ids=str)
def test_auto_of_fixed_settings_leaves_out_exactly(shots: list[int], shared: str) -> None:
    """Also where the shortcut does not apply: a covariance of the task, one class, one example of each."""
    features, labels, _ = make_task(1, shots, 6, dtype=torch.float64)
    head = AutoHead(replace(FIXED, shared=shared))
    naive = Head.leave_one_out_logits(head, features, labels)
    torch.testing.assert_close(head.leave_one_out_logits(features, labels), naive, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shots", [[3, 4, 2], [1, 1, 1]], ids=str)
def test_auto_leaves_out_under_the_settings_that_it_chooses(shots: list[int]) -> None:
    features, labels, _ = make_task(2, shots, 6, dtype=torch.float64)
    expected = AutoHead(choose_plda_settings(features, labels)).leave_one_out_logits(features, labels)
    assert torch.equal(AutoHead().leave_one_out_logits(features, labels), expected)


def test_auto_names_the_width_of_its_queries() -> None:
    features, labels, queries = make_task(1, [3, 2], 6)
    head = AutoHead(FIXED)
    with pytest.raises(ValueError, match=r"query features .*6"):
        head.logits(head.fit(features, labels), queries[:, :1])


@pytest.mark.parametrize(("shots", "d"), [*SHOTS, ([1, 1, 1], 4)])
def test_auto_exports_what_it_computes(shots: list[int], d: int) -> None:
    features, labels, queries = make_task(1, shots, d)
    for head in (AutoHead(), AutoHead(ROOTS)):
        state = head.fit(features, labels)
        expected = head.logits(state, queries)
        torch.testing.assert_close(
            head.export(state)(queries), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


def test_auto_takes_square_roots_where_left_out_examples_are_more_probable_so() -> None:
    """Squares of Gaussian features are best told apart by their roots; no root is taken of what may be negative."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat_interleave(10)
    centres = 2 + 0.5 * torch.randn(4, 30, generator=generator)
    support = (centres[labels] + torch.randn(40, 30, generator=generator)) ** 2
    assert choose_plda_settings(support, labels).power == 0.5
    assert choose_plda_settings(support**0.5, labels).power == 1.0
    assert choose_plda_settings(support - 1.0, labels).power == 1.0


def test_auto_of_roots_has_gradients_also_at_zero() -> None:
    features, labels, queries = make_task(1, [1, 3], 4, queries=3, dtype=torch.float64)
    inputs = features.requires_grad_(), queries.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, q: AutoHead(ROOTS)(x, labels, q), inputs)
    zeros = torch.relu(features.detach()).requires_grad_()
    AutoHead(ROOTS)(zeros, labels, zeros).square().sum().backward()
    assert zeros.grad is not None
    assert zeros.grad.isfinite().all()


def test_a_setting_of_auto_out_of_its_range_is_named() -> None:
    for name, value in (
        ("beta", 0.0),
        ("spread", -1.0),
        ("scale", math.inf),
        ("freedom", -0.1),
        ("power", 1.5),
        ("power", 0.0),
    ):
        with pytest.raises(ValueError, match=f"{name} must be"):
            replace(FIXED, **{name: value})
    with pytest.raises(ValueError, match='shared must be "within" or "task"'):
        replace(FIXED, shared="all")


def test_auto_does_not_depend_on_the_scale_of_features() -> None:
    features, labels, queries = make_task(6, [4, 2, 5], 20, dtype=torch.float64)
    expected = AutoHead()(features, labels, queries)
    for scale in (1e-3, 1e3):
        found = AutoHead()(scale * features, labels, scale * queries)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_auto_serves_what_leaves_nothing_to_choose() -> None:
    """One shot in every class, one class, and equal examples: defined, finite, nearest mean first."""
    features, labels, _ = make_task(6, [1, 1, 1], 8, dtype=torch.float64)
    settings = choose_plda_settings(features, labels)
    assert (settings.shared, settings.freedom) == ("task", 0.0)
    assert AutoHead()(features, labels, features).argmax(dim=1).equal(labels)
    assert AutoHead()(features, 0 * labels, features).isfinite().all()
    assert AutoHead()(torch.ones(4, 3), torch.tensor([0, 0, 1, 1]), torch.zeros(1, 3)).isfinite().all()
    apart = torch.eye(2).repeat(2, 1)  # no variance within
    assert AutoHead()(apart, torch.tensor([0, 1, 0, 1]), apart).argmax(dim=1).tolist() == [0, 1, 0, 1]


def test_auto_favours_no_class_for_its_number_of_examples() -> None:
    """In many dimensions a class of two examples among classes of thirty keeps its queries, and takes no others'."""
    generator = torch.Generator().manual_seed(0)
    centres = 0.5 * torch.randn(5, 200, generator=generator)
    shots = torch.tensor([2, 30, 30, 30, 30])
    labels, truth = torch.arange(5).repeat_interleave(shots), torch.arange(5).repeat_interleave(40)
    support = centres[labels] + torch.randn(len(labels), 200, generator=generator)
    queries = centres[truth] + torch.randn(200, 200, generator=generator)
    predicted = AutoHead()(support, labels, queries).argmax(dim=1)
    recall = [float((predicted[truth == label] == label).double().mean()) for label in range(5)]
    precision = float((truth[predicted == 0] == 0).double().mean())
    assert min(recall) > 0.7
    assert precision > 0.8


def naive_choice(features: Tensor, labels: Tensor, most: int = 500) -> PldaSettings:
    """What ``choose_plda_settings`` promises, by refitting without each example."""
    counts = labels.bincount()
    order = labels.argsort(stable=True)
    paired = order[counts[labels[order]] > 1]
    rows = paired[:: max(1, math.ceil(len(paired) / most))]

    def inverse(x: Tensor, y: Tensor, beta: float) -> Tensor:
        p = reference.pooled_covariance(x, y) + beta * torch.eye(x.shape[1], dtype=x.dtype)
        return torch.linalg.inv(p)

    def fitted(power: float, beta: float, share: float = 0.0) -> tuple[PldaSettings, float, float]:
        x, own = features**power, []
        for i in paired.tolist():
            rest = torch.arange(len(x)) != i
            others = x[rest & (labels == labels[i])]
            z = x[i] - others.mean(dim=0)
            own.append(float(z @ inverse(x[rest], labels[rest], beta) @ z) * len(others) / (len(others) + 1))
        freedom, k = sum(own) / len(own), len(counts)
        means = torch.stack([x[labels == label].mean(dim=0) for label in range(k)])
        centred = means - means.mean(dim=0)
        between = float((centred @ inverse(x, labels, beta) * centred).sum(dim=1).mean()) * k / (k - 1)
        spread = (between - freedom * float((1 / counts).mean())) / freedom
        settings = PldaSettings(beta, min(max(spread, 0.01), 1e4), share * freedom, 1.0, "within", power)
        logits = Head.leave_one_out_logits(AutoHead(settings), features, labels)[rows]
        fit = temperature_fit(logits, labels[rows], 0.25 / k)
        of_each = torch.nn.functional.cross_entropy(logits / fit.temperature, labels[rows], reduction="none")
        of_class = [of_each[labels[rows] == label].mean() for label in labels[rows].unique().tolist()]
        return replace(settings, scale=1 / fit.temperature), fit.loss * len(rows), float(sum(of_class))

    def unit(power: float) -> float:
        return float((features**power).var(dim=0).mean())

    power = min((1.0, 0.5), key=lambda power: fitted(power, 10 * unit(power))[1])
    exponents = torch.linspace(-1, 2, 7, dtype=torch.float64)
    losses = [fitted(power, unit(power) * 10**exponent)[1] for exponent in exponents.tolist()]
    prior = torch.distributions.Normal(1.0, 0.35).log_prob(exponents)
    posterior = torch.softmax(prior - torch.tensor(losses), dim=0)
    beta = unit(power) * 10 ** float(posterior @ exponents)
    if counts.min() == counts.max():
        return fitted(power, beta)[0]
    shares = torch.linspace(0, 1, 6, dtype=torch.float64)
    likelihood = torch.tensor([-5 * fitted(power, beta, share)[2] for share in shares.tolist()])
    prior = torch.distributions.HalfNormal(torch.tensor(0.2, dtype=torch.float64)).log_prob(shares)
    return fitted(power, beta, float(torch.softmax(prior + likelihood, dim=0) @ shares))[0]


@pytest.mark.parametrize(("shots", "d", "most"), [([4, 2, 5, 1], 12, 500), ([6, 9, 3], 3, 500), ([8, 8], 5, 7)])
@pytest.mark.parametrize("squared", [False, True])
def test_auto_chooses_what_refitting_without_each_example_says(
    shots: list[int], d: int, most: int, squared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plda, "_MAX_LEFT_OUT", most)
    features, labels, _ = make_task(3, shots, d, dtype=torch.float64)
    features = (features + 1.0).relu() ** (2 if squared else 1)
    found, expected = choose_plda_settings(features, labels), naive_choice(features, labels, most)
    assert (found.shared, found.power) == (expected.shared, expected.power)
    for name in ("beta", "spread", "freedom", "scale"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5), name


def test_auto_chooses_the_power_on_the_classes_of_most_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, _ = make_task(7, [3, 12, 1, 12, 2], 10, dtype=torch.float64)
    features = features.abs() + 0.1
    large = (labels == 1) | (labels == 3)
    features[large] = features[large] ** 4  # of these alone the roots are Gaussian
    monkeypatch.setattr(plda, "_POWER_CLASSES", 2)
    of_large = choose_plda_settings(features[large], (labels[large] == 3).long())
    assert choose_plda_settings(features, labels).power == of_large.power == 0.5
    features[large] = features[large] ** 0.25
    features[~large] = features[~large] ** 4
    of_large = choose_plda_settings(features[large], (labels[large] == 3).long())
    assert choose_plda_settings(features, labels).power == of_large.power == 1.0


def test_auto_of_one_shot_everywhere_has_the_priors_settings() -> None:
    features, labels, _ = make_task(6, [1, 1, 1], 8, dtype=torch.float64)
    variance = float(features.var(dim=0).mean())
    assert choose_plda_settings(features, labels) == PldaSettings(variance * 10**1.5, 0.1, 0.0, 14.0, "task")
    assert choose_plda_settings(features, 0 * labels) == PldaSettings(variance * 10.0, 0.1, 0.0, 1.0, "within")
    assert choose_plda_settings(torch.ones(4, 3), labels.new_tensor([0, 0, 1, 1])).beta == 10**1.5


def copied() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three classes that overlap, of six examples, each four times but for noise; groups of the four; queries."""
    generator = torch.Generator().manual_seed(2)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    labels, centres = torch.arange(3).repeat_interleave(6), 0.5 * draw(3, 24)
    distinct, queries = draw(18, 24) + centres[labels], draw(5, 24)
    x = distinct.repeat_interleave(4, dim=0) + 0.05 * draw(72, 24)
    return x, labels.repeat_interleave(4), torch.arange(18).repeat_interleave(4), queries


def test_the_mahalanobis_head_chooses_beta_without_whole_groups() -> None:
    x, y, groups, queries = copied()
    head = MahalanobisHead(RegularizedCovariance(beta="auto"), scale=0.5)
    beta, alone = (choose_beta(head.covariance.settings, x, y, g).beta for g in (groups, None))
    assert beta > 3 * alone  # alone, copies find one another where little is smoothed
    fixed = MahalanobisHead(RegularizedCovariance(beta=beta), scale=0.5)
    expected = fixed(x, y, queries)
    for found in (
        head.settled(x, y, groups)(x, y, queries),
        head.logits(head.fit_groups(x, y, groups), queries),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for name in ("leave_one_out_logits", "common_distance"):
        found, expected = (getattr(one, name)(x, y, groups) for one in (head, fixed))
        assert expected.abs().max() > 0.1  # with more entries than examples, so that something is common
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_default_head_chooses_its_settings_without_whole_groups() -> None:
    x, y, groups, queries = copied()
    settings, alone = (choose_plda_settings(x, y, g) for g in (groups, None))
    assert settings.beta > 1.5 * alone.beta
    head, fixed = AutoHead(), AutoHead(settings)
    assert head.settled(x, y, groups).settings == settings
    for found, expected in (
        (head.logits(head.fit_groups(x, y, groups), queries), fixed.logits(fixed.fit_groups(x, y, groups), queries)),
        (head.leave_one_out_logits(x, y, groups), fixed.leave_one_out_logits(x, y, groups)),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_settling_leaves_the_head_as_it_was() -> None:
    x, y, _ = make_task(0, [4, 3], 6)
    head = MahalanobisHead(RegularizedCovariance(beta="auto"))
    assert head.settled(x, y).covariance.settings.beta != "auto"
    assert head.covariance.settings.beta == "auto"


def test_the_common_distance_is_that_to_the_span_of_the_other_groups_over_beta() -> None:
    x, y, _ = make_task(2, [3, 4], 16, dtype=torch.float64)
    groups, first = torch.tensor([0, 0, 1, 2, 2, 3, 4]), [0, 2, 3, 5, 6]  # the first of a group stands for it
    common = MahalanobisHead(RegularizedCovariance(beta=0.3), scale=0.5).common_distance(x, y, groups)
    for i, group in enumerate(groups.tolist()):
        others = x[[row for number, row in enumerate(first) if number != group]]
        span, offset = (others - others[0]).T, x[first[group]] - others[0]
        outside = offset - span @ torch.linalg.lstsq(span, offset[:, None], driver="gelsd").solution[:, 0]
        torch.testing.assert_close(common[i], 0.5 / 0.3 * outside.square().sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "head",
    [
        AutoHead(),
        AutoHead(FIXED),
        MahalanobisHead(RegularizedCovariance(0.3, shared="within", prior_shots=2.0), scale=0.5),
        EuclideanHead(),
    ],
)
def test_a_description_makes_the_same_head(task, head):
    description = json.loads(json.dumps(heads.describe_head(head)))
    again = heads.make_head(description)
    assert type(again) is type(head)
    assert heads.describe_head(again) == description
    torch.testing.assert_close(again(*task), head(*task), rtol=0, atol=0)


class OtherCovariance(RegularizedCovariance):
    """No file has its code."""


def test_what_no_description_makes_is_refused_by_name():
    names = r"name one of auto, mahalanobis, .*, or pickle the classifier"
    with pytest.raises(ValueError, match=rf"a LinearHead object as head cannot be written: .*{names}"):
        heads.describe_head(LinearHead())
    with pytest.raises(ValueError, match="cannot describe a covariance of class OtherCovariance"):
        heads.describe_head(MahalanobisHead(OtherCovariance(1.0)))
    with pytest.raises(ValueError, match=r"head must be one of auto, .*, got 'nearest'"):
        heads.make_head({"name": "nearest"})


def test_a_head_object_is_copied_with_its_weights():
    given = LinearHead()
    copied = heads.make_head(given)
    for ours, theirs in zip(copied.parameters(), given.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours is not theirs


def test_repr_names_settings_beyond_the_paper_where_they_are_used():
    assert "shared" not in repr(RegularizedCovariance(2.0))
    text = repr(RegularizedCovariance(2.0, shared="within", prior_shots=3.0))
    for part in ("beta=2.0", "shared='within'", "prior_shots=3.0"):
        assert part in text
