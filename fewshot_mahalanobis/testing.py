"""Properties that every head should have, searched for counterexamples by hypothesis.

They serve your own heads as they serve the package's:

    from fewshot_mahalanobis.testing import check_head

    check_head(lambda width: MyHead(width), without=["translation_changes_nothing"])

A property is a function ``(head, task)`` that raises AssertionError where it does not hold: write more of your own over
the tasks of ``tasks()``, with hypothesis as usual. What the properties here are made of (a task ``moved`` or
``rotated``, comparison to within a bound) serves others too. The package needs hypothesis in this module alone.

How equal is equal? Two correct algorithms differ by rounding, and how much is a matter of the task. Logits must agree
within the change that random perturbations of every example, by 2^-30 of its largest entry, make; and float32 logits
with float64 ones within that of 2^-16, 256 times the roundoff of float32, plus what c operations below its normal
numbers lose, c s / 2, for the smallest number s and c of the order of n + d.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshot_mahalanobis.extras import install_command

try:
    import hypothesis
    from hypothesis import strategies as st
    from hypothesis.extra.numpy import arrays
except ImportError as error:
    raise ImportError(f"fewshot_mahalanobis.testing needs hypothesis: {install_command('test')}") from error

# ---------------------------------------------------------------- tasks

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, repr=False)
class HeadTask:
    """Features of a few-shot task. Its ``repr`` is Python that makes it again.

    Attributes
    ----------
    support_features : Tensor of shape (n, d)
    support_labels : int64 Tensor of shape (n,)
        0..k-1, each at least once.
    query_features : Tensor of shape (m, d)
        In the support features' dtype.
    """

    support_features: Tensor
    support_labels: Tensor
    query_features: Tensor

    def __repr__(self) -> str:
        tensors = (
            f"{name}=torch.tensor({tensor.tolist()}, dtype={tensor.dtype})" for name, tensor in vars(self).items()
        )
        return f"HeadTask({', '.join(tensors)})"


def tasks(
    *,
    classes: tuple[int, int] = (1, 5),
    shots: tuple[int, int] = (1, 6),
    width: tuple[int, int] = (1, 10),
    scale: tuple[float, float] = (1e-6, 1e6),
    dtypes: Collection[torch.dtype] = _DTYPES,
) -> st.SearchStrategy[HeadTask]:
    """Strategy of few-shot tasks, easy and awkward: a hypothesis strategy for ``@given``.

    Entries are small integers, floats in [-1, 1] or Gaussian; then features may become constant or linear combinations
    of others, examples (queries too) copies of others, and all may move far from the origin.

    Parameters
    ----------
    classes, shots, width : (int, int)
        Least and greatest k, n_k and d. Every class has its own number of shots.
    scale : (float, float)
        Least and greatest factor, drawn log-uniformly, on entries of the order of 1. Where the dtype cannot hold the
        product it is cut off at a quarter of the largest number.
    dtypes : collection of torch.dtype
        Types of the features.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of HeadTask
        With one to four queries.
    """
    return _draw_task(classes, shots, width, scale, tuple(dtypes))


@st.composite
def _draw_task(
    draw: st.DrawFn,
    classes: tuple[int, int],
    shots: tuple[int, int],
    width: tuple[int, int],
    scale: tuple[float, float],
    dtypes: tuple[torch.dtype, ...],
) -> HeadTask:
    counts = draw(st.lists(st.integers(*shots), min_size=classes[0], max_size=classes[1]))
    n, d = sum(counts), draw(st.integers(*width))
    rows = n + draw(st.integers(1, 4))
    integers = arrays(np.int8, (rows, d), elements=st.integers(-4, 4))
    floats = arrays(np.float64, (rows, d), elements=st.floats(-1, 1))
    gaussian = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).standard_normal((rows, d)))
    x = draw(st.one_of(integers, floats, gaussian)).astype(np.float64)

    row, column = st.integers(0, rows - 1), st.integers(0, d - 1)
    for target, first, second in draw(st.lists(st.tuples(column, column, column), max_size=2)):
        x[:, target] = 2 * x[:, first] - x[:, second]
    for target in draw(st.lists(column, max_size=2)):
        x[:, target] = x[0, target]
    for target, source in draw(st.lists(st.tuples(row, row), max_size=4)):
        x[target] = x[source]
    x += draw(st.sampled_from([0.0, 0.0, 100.0]))

    x *= 10.0 ** draw(st.floats(*np.log10(scale).tolist()))
    dtype = draw(st.sampled_from(dtypes))
    largest = torch.finfo(dtype).max / 4
    features = torch.from_numpy(x).clamp(-largest, largest).to(dtype)
    labels = np.random.default_rng(draw(st.integers(0, 2**16))).permutation(np.repeat(np.arange(len(counts)), counts))
    return HeadTask(features[:n], torch.from_numpy(labels), features[n:])


def in_float64(task: HeadTask) -> HeadTask:
    """The task in float64."""
    return HeadTask(task.support_features.double(), task.support_labels, task.query_features.double())


def at_unit_scale(task: HeadTask) -> HeadTask:
    """The task in float64, its largest entry 1."""
    task = in_float64(task)
    factor = 1 / max(largest_entry(task), torch.finfo(torch.float64).tiny)
    return HeadTask(factor * task.support_features, task.support_labels, factor * task.query_features)


def shuffled(task: HeadTask) -> HeadTask:
    """The task with its examples in another order."""
    order = torch.randperm(len(task.support_labels), generator=_fixed_generator())
    return HeadTask(task.support_features[order], task.support_labels[order], task.query_features)


def renamed_labels(task: HeadTask) -> tuple[HeadTask, Tensor]:
    """The task with class j called names[j], and ``names`` (k,)."""
    names = torch.randperm(len(task.support_labels.unique()), generator=_fixed_generator())
    return HeadTask(task.support_features, names[task.support_labels], task.query_features), names


def moved(task: HeadTask) -> HeadTask:
    """The task moved by one vector, as long as its features."""
    shift = largest_entry(task) * torch.randn(
        task.query_features.shape[1], dtype=torch.float64, generator=_fixed_generator()
    )
    return HeadTask(task.support_features + shift, task.support_labels, task.query_features + shift)


def rotated(task: HeadTask) -> HeadTask:
    """The task turned by one orthogonal matrix."""
    d = task.query_features.shape[1]
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=_fixed_generator())).Q
    return HeadTask(task.support_features @ rotation, task.support_labels, task.query_features @ rotation)


def largest_entry(task: HeadTask) -> float:
    """Largest entry of a feature, M."""
    return max(float(task.support_features.abs().max()), float(task.query_features.abs().max()))


def _fixed_generator() -> torch.Generator:
    """Random numbers that are the same for every example, so that counterexamples stay ones."""
    return torch.Generator().manual_seed(0)


# ---------------------------------------------------------------- properties

__all__ = ["HEAD_PROPERTIES", "HeadTask", "check_head", "tasks"]

#: Relative perturbations of examples by whose effect float64 logits may differ, and float32 ones from float64.
_NUDGE, _NUDGE_FLOAT32 = 2.0**-30, 2.0**-16
_PROBES = 4

Property = Callable[[Any, HeadTask], None]


def check_head(
    make: Callable[[int], Any],
    *,
    without: Collection[str] = (),
    strategy: st.SearchStrategy[HeadTask] | None = None,
    settings: hypothesis.settings | None = None,
) -> None:
    """Search a head for counterexamples to each of ``HEAD_PROPERTIES``.

    Parameters
    ----------
    make : callable
        Feature width d -> a module of the interface of ``fewshot_mahalanobis.heads.Head``, with the same parameters
        every time.
    without : collection of str
        Names of properties that the head is not meant to have. Few have ``translation_changes_nothing`` and
        ``rotation_changes_nothing``.
    strategy : hypothesis strategy of HeadTask, optional
        Where to search; by default scales from 1e-6 to 1e3. An error is a counterexample, so leave out what the head
        refuses.
    settings : hypothesis.settings, optional
        How long to search; by default as the current profile. Nothing is written to hypothesis's database.

    Raises
    ------
    AssertionError
        Naming the property and the smallest task found for which it fails.
    ValueError
        If ``without`` names something else than a property.
    """
    search(make, HEAD_PROPERTIES, without, strategy, settings)


def search(
    make: Callable[[int], Any],
    properties: Mapping[str, Property],
    without: Collection[str],
    strategy: st.SearchStrategy[HeadTask] | None,
    settings: hypothesis.settings | None,
) -> None:
    """Search for counterexamples to each property, by name, of ``make(d)``; the arguments of :func:`check_head`."""
    if unknown := sorted(set(without) - set(properties)):
        raise ValueError(f"there is no property {unknown[0]!r}: they are {', '.join(properties)}")
    parent = hypothesis.settings(settings)
    # Explaining an example would replace the simplest one by the shortest to draw.
    phases = [phase for phase in parent.phases if phase is not hypothesis.Phase.explain]
    # A machine that is busy with something else draws tasks slowly; that is no property's failure.
    unchecked = {*parent.suppress_health_check, hypothesis.HealthCheck.too_slow}
    settings = hypothesis.settings(
        parent,
        phases=phases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=tuple(unchecked),
    )
    for name in properties:
        if name not in without:
            settings(hypothesis.given(task=strategy or tasks(scale=(1e-6, 1e3)))(_test_of(make, name, properties)))()


def _test_of(make: Callable[[int], Any], name: str, properties: Mapping[str, Property]) -> Callable[..., None]:
    def test(task: HeadTask) -> None:
        try:
            properties[name](make(task.support_features.shape[1]), task)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{name} does not hold: {reason}\nfor {task!r}") from error

    return test


# ---------------------------------------------------------------- heads


def _head_one_call_equals_two_steps(head: Any, task: HeadTask) -> None:
    """``head(...)`` gives the same bits as ``fit`` and ``logits``: finite (m, k), in float32 at least."""
    whole = head(task.support_features, task.support_labels, task.query_features)
    state = head.fit(task.support_features, task.support_labels)
    steps = head.logits(state, task.query_features)
    shape = (len(task.query_features), len(task.support_labels.unique()))
    _assert(whole.shape == shape, f"logits have shape {tuple(whole.shape)}, not {shape}")
    _assert(whole.dtype in (torch.float32, torch.float64), f"logits are {whole.dtype}")
    _assert(torch.isfinite(whole).all(), "a logit is not finite")
    _assert(torch.equal(whole, steps), f"one call and two steps differ by {(whole - steps).abs().max():.3g}")


def _head_calls_leave_no_trace(head: Any, task: HeadTask) -> None:
    """A second call gives the same bits; features, labels, parameters and torch's random state stay as they were."""
    before, parameters, state = copy.deepcopy(task), copy.deepcopy(head.state_dict()), torch.get_rng_state()
    first, second = (head(task.support_features, task.support_labels, task.query_features) for _ in range(2))
    _assert(torch.equal(first, second), f"logits differ by {(first - second).abs().max():.3g}")
    assert_untouched(task, before, state)
    for name, value in head.state_dict().items():
        _assert(torch.equal(value, parameters[name]), f"{name} was changed")


def _head_support_order_does_not_matter(head: Any, task: HeadTask) -> None:
    _assert_same_logits(head, in_float64(task), shuffled(in_float64(task)))


def _head_renaming_labels_permutes_the_columns(head: Any, task: HeadTask) -> None:
    renamed, names = renamed_labels(in_float64(task))
    _assert_same_logits(head, in_float64(task), renamed, columns=names)


def _head_every_query_is_served_on_its_own(head: Any, task: HeadTask) -> None:
    task, head = in_float64(task), copy.deepcopy(head).double()
    state = head.fit(task.support_features, task.support_labels)
    alone = torch.cat([head.logits(state, query[None]) for query in task.query_features])
    _assert_close_logits(alone, head, task)


def _head_translation_changes_nothing(head: Any, task: HeadTask) -> None:
    _assert_same_logits(head, moved(in_float64(task)), in_float64(task))  # the moved one has the larger numbers


def _head_rotation_changes_nothing(head: Any, task: HeadTask) -> None:
    _assert_same_logits(head, in_float64(task), rotated(in_float64(task)))


def _head_gradients_equal_finite_differences(head: Any, task: HeadTask) -> None:
    # Metrics have kinks and poles where features coincide or vanish: noise moves the task off them.
    task, head, generator = at_unit_scale(task), copy.deepcopy(head).double(), _fixed_generator()
    noisy = [
        x + torch.randn(x.shape, dtype=x.dtype, generator=generator)
        for x in (task.support_features, task.query_features)
    ]
    task = HeadTask(noisy[0], task.support_labels, noisy[1])
    assert_gradients(lambda x, q: head(x, task.support_labels, q), task)


def _head_float32_is_close_to_float64(head: Any, task: HeadTask) -> None:
    single = HeadTask(task.support_features.float(), task.support_labels, task.query_features.float())
    found = copy.deepcopy(head).float()(single.support_features, single.support_labels, single.query_features)
    _assert(found.dtype == torch.float32, f"logits are {found.dtype}")
    n, d = task.support_features.shape
    underflow = 2 * (n + d + 10) * smallest_number(torch.float32)
    _assert_close_logits(
        found.double(), copy.deepcopy(head).double(), in_float64(single), nudge=_NUDGE_FLOAT32, underflow=underflow
    )


#: Properties of heads by name.
HEAD_PROPERTIES: Mapping[str, Property] = {
    holds.__name__.removeprefix("_head_"): holds
    for holds in (
        _head_one_call_equals_two_steps,
        _head_calls_leave_no_trace,
        _head_support_order_does_not_matter,
        _head_renaming_labels_permutes_the_columns,
        _head_every_query_is_served_on_its_own,
        _head_translation_changes_nothing,
        _head_rotation_changes_nothing,
        _head_gradients_equal_finite_differences,
        _head_float32_is_close_to_float64,
    )
}


def _assert_same_logits(head: Any, task: HeadTask, other: HeadTask, columns: Tensor | slice = slice(None)) -> None:
    """Logits of ``other``, in the order of ``columns``, are those of ``task``."""
    head = copy.deepcopy(head).double()
    found = head(other.support_features, other.support_labels, other.query_features)[:, columns]
    _assert_close_logits(found, head, task)


def _assert_close_logits(
    found: Tensor, head: Any, task: HeadTask, nudge: float = _NUDGE, underflow: float = 0.0
) -> None:
    """Compare logits with those of ``task`` within what nudging its features changes, and an absolute ``underflow``."""
    expected = head(task.support_features, task.support_labels, task.query_features)
    tiny = torch.finfo(expected.dtype).tiny  # numbers below it have no relative precision
    bound = nudge * expected.abs().max().expand_as(expected) + max(underflow, tiny)
    generator = _fixed_generator()
    for _ in range(_PROBES):
        support, queries = (
            x + nudge * x.abs().amax(dim=1, keepdim=True) * torch.randn(x.shape, dtype=x.dtype, generator=generator)
            for x in (task.support_features, task.query_features)
        )
        bound = torch.maximum(bound, (head(support, task.support_labels, queries) - expected).abs())
    assert_within(found, expected, bound)


# ---------------------------------------------------------------- shared


def _assert(condition: Tensor | bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Raise AssertionError naming the first value (m, k) that is not within its bound (m, k)."""
    wrong = (~((found - expected).abs() <= bound)).nonzero()
    if len(wrong):
        m, k = wrong[0].tolist()
        raise AssertionError(
            f"the value of query {m} and class {k} is {found[m, k]:.17g}, but should be {expected[m, k]:.17g} "
            f"within {bound[m, k]:.3g}"
        )


def assert_untouched(task: HeadTask, before: HeadTask, state: Tensor) -> None:
    """Raise AssertionError if the task or torch's random state is no longer what it was before."""
    for name, tensor in vars(task).items():
        _assert(torch.equal(tensor, getattr(before, name)), f"{name} were changed in place")
    _assert(torch.equal(torch.get_rng_state(), state), "torch's global random state was changed")


def assert_gradients(function: Callable[[Tensor, Tensor], Tensor], task: HeadTask) -> None:
    """The derivative along a random direction lies between those of a step back and a step forward.

    So it does for a smooth function, whose central difference is their mean, and at a kink of a concave or convex one.
    """
    generator = _fixed_generator()
    points = task.support_features, task.query_features
    directions = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in points]
    weights = torch.rand(len(task.query_features), len(task.support_labels.unique()), generator=generator).double()

    def value(step: float) -> float:
        return float((weights * function(*(x + step * v for x, v in zip(points, directions))).detach()).sum())

    inputs = [x.clone().requires_grad_() for x in points]
    gradients = torch.autograd.grad((weights * function(*inputs)).sum(), inputs, materialize_grads=True)
    slope = sum(float((gradient * v).sum()) for gradient, v in zip(gradients, directions))
    step = 1e-6
    back, here, forward = (value(shift) for shift in (-step, 0.0, step))
    slopes = sorted([(here - back) / step, (forward - here) / step])
    # Rounding of the values over the step, and a third derivative of the size of the values.
    slack = 1e-6 * max(abs(slope), abs(here), 1.0)
    _assert(
        slopes[0] - slack <= slope <= slopes[1] + slack,
        f"the derivative is {slope:.9g}, but differences give {slopes[0]:.9g} to {slopes[1]:.9g}",
    )


def roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff u of a dtype."""
    return torch.finfo(dtype).eps / 2


def smallest_number(dtype: torch.dtype) -> float:
    """The smallest positive number, subnormal."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
