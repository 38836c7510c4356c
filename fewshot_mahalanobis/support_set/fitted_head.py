"""A head fitted to a labelled support set: everything that a classifier has learned, in one object."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewshot_mahalanobis.cores import one_thread_if_small
from fewshot_mahalanobis.gaussians.pool import Pool
from fewshot_mahalanobis.gaussians.temperature import temperature_of_confidence
from fewshot_mahalanobis.gaussians.unlabelled import memberships
from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.support_set.calibration import calibrate, check_settings
from fewshot_mahalanobis.support_set.copies import group_means, group_rows, grouped
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.labels import warn_of_similar_labels
from fewshot_mahalanobis.support_set.negatives import left_out_negatives, similarity_to_negatives
from fewshot_mahalanobis.support_set.priors import checked_priors
from fewshot_mahalanobis.support_set.unknown import (
    SIMILARITIES,
    LeftOutScores,
    OutlierScore,
    Similarity,
    Units,
    output_labels,
)
from fewshot_mahalanobis.support_set.witnesses import ClassMetric, witnesses

#: Where every class has one example, none can be left out to calibrate probabilities. Those by the support set alone
#: are right on average. Unlabelled examples make them surer, by this share of what is missing to certainty.
GAINED_CONFIDENCE = 0.25
#: Unit of the distance from the threshold of rejection for doubts, in standard deviations of left-out scores; from
#: validation classes.
_DOUBT_UNIT = 0.25


#: What is kept as tensors, by its name in files: where it is in a fitted head, and its shape: n support examples, m of
#: no class, u unlabelled ones, c of calibration, d features, k classes.
_TENSORS = {
    "support_features": ("support.adapted", "nd"),
    "unadapted_features": ("support.unadapted", "nd"),
    "support_labels": ("labels", "n"),
    "support_groups": ("groups", "n"),
    "groups_with_twins": ("groups_with_twins", "n"),
    "negative_features": ("negatives.adapted", "md"),
    "unadapted_negatives": ("negatives.unadapted", "md"),
    "unlabelled_features": ("pool.features", "ud"),
    "memberships": ("pool.memberships", "uk"),
    "calibration_scores": ("calibration", "c"),
}
_CPU = torch.device("cpu")


class Values(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A state beside heads, classes and tensors, in types of JSON; ``group_names`` is None if none was named."""

    temperature: float
    priors: list[float] | None
    unknown_label: str | int | float | None
    threshold: float | None
    units: dict[str, tuple[float, float]] | None
    group_names: list[str | int | float | None] | None
    pool_temperature: float = 1.0  # files of earlier versions have neither
    false_rejection_rate: float | None = None


def expected_tensors(
    shapes: Mapping[str, Sequence[int]], d: int, k: int, dtype: torch.dtype, *, images: bool
) -> dict[str, Tensor]:
    """What a state with tensors of these ``shapes`` must have, for d features of a type and k classes.

    The tensors take no memory. Only ``images`` have features without adaptation.
    """
    rows = {"n": "support_labels", "m": "negative_features", "u": "unlabelled_features", "c": "calibration_scores"}
    sizes = {size: ([*shapes.get(name, ())] or [int(size == "m")])[0] for size, name in rows.items()} | {"d": d, "k": k}
    types = {"n": torch.int64, "uk": torch.float32, "c": torch.float64}
    wanted = {"support_features", "support_labels", *shapes}
    return {
        name: torch.empty([sizes[size] for size in shape], dtype=types.get(shape, dtype), device="meta")
        for name, (_, shape) in _TENSORS.items()
        if name in wanted and (images or not name.startswith("unadapted"))
    }


@dataclass(eq=False, repr=False, kw_only=True)
class FittedHead:
    """A head fitted to the features of a support set, calibrated, with the names of its classes.

    Made by :meth:`fit`, or from what :meth:`to_state` returned. It is never changed: more examples make another one.

    Attributes
    ----------
    head : Head
        As it was given. It chooses its settings anew when examples are added.
    settled : Head
        The same head with the settings that it chose on this support set.
    support : Features
        n support examples.
    labels : int64 Tensor of shape (n,)
        Their classes, as indices into ``classes``.
    classes : ndarray of shape (k,)
        The labels of the classes, sorted.
    temperature : float
        T > 0: probabilities by the support set alone are softmax(logits / T).
    priors : float64 ndarray of shape (k,) or None
        Shares of the classes among the queries, with sum one, as they were given; None if none were.
    unknown_label : str, int, float or None
        Label of queries whose outlier score exceeds the threshold; None if no query is rejected.
    outliers : OutlierScore or None
        None if no query is rejected.
    groups : int64 Tensor of shape (n,) or None
        Support examples of equal number are left out together; None if each is a group of its own.
    group_names : list of n
        Names of groups that the user gave, None where they gave none.
    negatives : Features or None
        Examples of no class.
    pool : Pool or None
        Unlabelled examples, by their adapted features, and the classes that they belong to.
    groups_with_twins : int64 Tensor of shape (n,) or None
        As ``groups``, where near twins are left out together too; None if there are none.
    false_rejection_rate : float
        The rate that the threshold is for.
    calibration : float64 Tensor of shape (c,) or None
        Outlier scores of further examples of known classes, which the threshold comes from in place of left-out ones.
    state : object
        What ``settled`` keeps of the support set. Outlier scores and everything that is left out are by this alone.
    state_of_all : object
        The same of the support set and the unlabelled examples; ``state`` if there are none. Logits are by this.
    """

    head: Head[Any]
    settled: Head[Any]
    support: Features
    labels: Tensor
    classes: NDArray[Any]
    temperature: float
    priors: NDArray[Any] | None
    unknown_label: Any
    outliers: OutlierScore | None
    groups: Tensor | None
    group_names: list[Any]
    negatives: Features | None = None
    pool: Pool | None = None
    groups_with_twins: Tensor | None = None
    false_rejection_rate: float = 0.05
    calibration: Tensor | None = None
    state: Any = field(init=False)
    state_of_all: Any = field(init=False)

    def __post_init__(self) -> None:
        output_labels(self.classes, self.unknown_label)  # checked before it is used
        checked_priors(self.priors, self.classes)
        with torch.no_grad(), one_thread_if_small(self.support.adapted):
            support = self.support.adapted, self.labels, self.groups
            self.state = self.settled.fit_groups(*support)
            self.state_of_all = self.state if self.pool is None else self.settled.fit_pool(*support, self.pool)

    @classmethod
    def fit(
        cls,
        head: Head[Any],
        support: Features,
        labels: Tensor,
        classes: NDArray[Any] | None = None,
        *,
        temperature: float | str = 1.0,
        priors: NDArray[Any] | None = None,
        unknown_label: Any = None,
        false_rejection_rate: float = 0.05,
        similarities: Sequence[Similarity] = SIMILARITIES,
        group_names: list[Any] | None = None,
        copies: NDArray[np.int64] | None = None,
        twins: NDArray[np.int64] | None = None,
        negatives: Features | None = None,
    ) -> FittedHead:
        """Fit a head to a support set and calibrate it.

        Parameters
        ----------
        head : Head
        support : Features
            n support examples.
        labels : int64 Tensor of shape (n,)
            0..k-1, each at least once.
        classes : ndarray of shape (k,), optional
            Labels of the classes, sorted; by default their indices.
        temperature : float or "auto"
            "auto" chooses T on left-out support examples.
        priors : float64 ndarray of shape (k,), optional
            As :func:`checked_priors` returns them.
        unknown_label : str, int or float, optional
            With it queries can be rejected, at a threshold from left-out support examples.
        false_rejection_rate : float
            Share of the queries of known classes that the threshold rejects by mistake, in (0, 1); with ``negatives``
            up to twice as large.
        similarities : sequence of Similarity
            What the outlier score adds to the head's distance (``unknown.py``).
        group_names : list of n, optional
            Examples of equal name are left out together, whatever their classes. None stands for no name.
        copies : int64 ndarray of shape (p, 2), optional
            Pairs of copies. Those of one class are left out together, unless both have a name.
        twins : int64 ndarray of shape (p, 2), optional
            Pairs that settings and calibration leave out together, as if they were copies (``near_twins``).
        negatives : Features, optional
            Examples of no class, for the outlier score.

        Raises
        ------
        ValueError
            As the head's ``fit``, :func:`calibrate` and :func:`output_labels`.
        """
        labels = labels.to(support.adapted.device)
        classes = np.arange(int(labels.max()) + 1) if classes is None else classes
        warn_of_similar_labels([*classes.tolist(), unknown_label], labels.bincount(minlength=len(classes)).tolist())
        names: list[Any] = [None] * len(labels) if group_names is None else group_names
        groups, groups_with_twins = grouped(labels, names, copies, twins)
        apart = groups if groups_with_twins is None else groups_with_twins
        with torch.no_grad(), one_thread_if_small(support.adapted):
            settled = head.settled(support.adapted, labels, apart)
            support_set = _SupportSet(settled, support, labels, apart, negatives)
            chosen_temperature, outliers = support_set.calibrated(
                similarities, temperature, false_rejection_rate, reject=unknown_label is not None
            )
        if outliers is not None and groups_with_twins is not None:  # threshold and units are those with twins
            left_out = outliers.left_out
            outliers = support_set._replace(groups=groups).score(outliers.threshold, outliers.units)
            assert outliers is not None
            outliers.left_out = left_out
        return cls(
            head=head,
            settled=settled,
            support=support,
            labels=labels,
            classes=classes,
            temperature=chosen_temperature,
            priors=priors,
            unknown_label=unknown_label,
            outliers=outliers,
            groups=groups,
            group_names=names,
            negatives=negatives,
            groups_with_twins=groups_with_twins,
            false_rejection_rate=false_rejection_rate,
        )

    def with_unlabelled(self, unlabelled: Tensor) -> FittedHead:
        """Learn from unlabelled examples (m, d) too, no copies among them, which take the place of earlier ones.

        They say nothing where there is one class alone. ValueError if the head does not learn from such examples.
        """
        self.head.check_learns_unlabelled()
        features, k = unlabelled.to(self.support.adapted.device), len(self.classes)
        if k == 1:
            found = features.new_zeros(len(features), k)
        else:
            support = self.support.adapted, self.labels, self.groups
            log_priors = None if self.priors is None else torch.from_numpy(self.priors).log()
            with one_thread_if_small(self.support.adapted, features):
                found = memberships(self.settled.unlabelled_settings(*support), *support, features, log_priors)
        pool = Pool(features, found.float())  # as a file keeps them
        learned = replace(self, pool=pool)
        if k > 1 and len(features) and self.counts.max() == 1:
            alone = self.with_priors(self._equal_prior_logits(self.state, features)) / self.temperature
            confidence = float(alone.double().softmax(dim=1).amax(dim=1).mean())
            confidence += GAINED_CONFIDENCE * (1 - confidence)
            temperature = temperature_of_confidence(learned.logits(features) / self.temperature, confidence)
            learned.pool = replace(pool, temperature=temperature)
        return learned

    def without(self, left_out: NDArray[np.bool_]) -> FittedHead:
        """The same head, with its settings and temperature, fitted to the other support examples; it rejects nothing.

        Every class needs one that stays, of the n in the mask (n,).
        """
        rest = ~left_out
        rows = torch.from_numpy(rest).to(self.labels.device)
        groups = None if self.groups is None else self.groups[rows]
        return replace(
            self,
            support=self.support.rows_where(rest),
            labels=self.labels[rows],
            groups=groups,
            group_names=[*compress(self.group_names, rest)],
            groups_with_twins=None,
            calibration=None,
            unknown_label=None,
            outliers=None,
            negatives=None,
            pool=None,
        )

    # ---------------------------------------------------------------- rejection

    def at_rate(self, false_rejection_rate: float) -> FittedHead:
        """The same with the threshold of another rate, which takes no other fit; this object itself if it is this one.

        ValueError if the rate is not between 0 and 1; a UserWarning if so few examples cannot guarantee it.
        """
        if self.outliers is None or false_rejection_rate == self.false_rejection_rate:
            return self
        known = self.__dict__.setdefault("_at_rates", {self.false_rejection_rate: self})
        if false_rejection_rate not in known:
            check_settings(1.0, false_rejection_rate)
            outliers = self.outliers.with_threshold(self.left_out_scores.threshold(false_rejection_rate))
            known[false_rejection_rate] = self._with(outliers=outliers, false_rejection_rate=false_rejection_rate)
        return cast(FittedHead, known[false_rejection_rate])

    def _with(self, **changed: Any) -> FittedHead:
        """The same with other attributes, on which the states of the heads do not depend."""
        other = FittedHead.__new__(FittedHead)
        other.__dict__.update({**vars(self), **changed})
        return other

    def calibrated(self, scores: Tensor) -> FittedHead:
        """The same with the threshold from outlier scores (c,) of further examples of known classes."""
        assert self.outliers is not None
        found = LeftOutScores(scores)
        outliers = self.outliers.with_threshold(found.threshold(self.false_rejection_rate))
        outliers.left_out = found
        return self._with(outliers=outliers, calibration=scores, _at_rates={})

    @property
    def rate_interval(self) -> tuple[float, float] | None:
        """Interval of the share of queries of known classes that are rejected, with probability 0.9."""
        return None if self.outliers is None else self.left_out_scores.rate_interval(self.outliers.threshold)

    @property
    def left_out_scores(self) -> LeftOutScores:
        """Outlier scores of left-out support examples, or of those in their place.

        A file has none of left-out ones: they are computed again when asked for.
        """
        assert self.outliers is not None
        if self.outliers.left_out is None and self.calibration is not None:
            self.outliers.left_out = LeftOutScores(self.calibration)
        if self.outliers.left_out is None:
            units = self.outliers.units or {}
            similarities = [term for term in SIMILARITIES if term.name in units]
            support_set = _SupportSet(self.settled, self.support, self.labels, self.apart, self.negatives)
            with torch.no_grad(), one_thread_if_small(self.support.adapted):
                _, again = support_set.calibrated(similarities, self.temperature, 0.5, reject=True)  # at any rate
            assert again is not None
            self.outliers.left_out = again.left_out
            assert self.outliers.left_out is not None
        return self.outliers.left_out

    def doubts(self, decisions: Decisions) -> Tensor:
        """Doubt (m,) of each answer, float64 in [0, 1]: 1 at the nearest boundary, of two classes or of rejection.

        Of two classes it is 1 - (p_1 - p_2) by the probabilities of the two best ones; of rejection
        2 / (1 + exp(abs(a - t) / u)) by the outlier score a, its threshold t and u, a quarter of the standard deviation
        of the scores of left-out examples. The larger counts; a rejected query has the latter alone.
        """
        probabilities = self.log_probabilities(decisions.logits).exp()
        k = probabilities.shape[1]
        best = probabilities.topk(min(k, 2), dim=1).values
        between_classes = 1 - (best[:, 0] - best[:, 1]) if k > 1 else torch.zeros_like(best[:, 0])
        if self.outliers is None:
            return between_classes
        unit = _DOUBT_UNIT * self.left_out_scores.spread
        distance = (decisions.outlier_scores - self.outliers.threshold).abs() / unit
        near_threshold = 2 * torch.sigmoid(-distance)
        return torch.where(decisions.indices == k, near_threshold, torch.maximum(between_classes, near_threshold))

    # ---------------------------------------------------------------- queries

    @property
    def apart(self) -> Tensor | None:
        """Support examples of equal number (n,) are left out together where settings are chosen and calibrated."""
        return self.groups if self.groups_with_twins is None else self.groups_with_twins

    def metric(self) -> ClassMetric:
        """Coordinates of the default head's model of this support set, whatever the head."""
        return ClassMetric.of(self.settled, self.support.adapted, self.labels, self.apart)

    @property
    def support_labels(self) -> NDArray[Any]:
        """Label of each support example, (n,)."""
        return self.classes[self.labels.cpu().numpy()]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Support examples of each class, (k,)."""
        return np.bincount(self.labels.cpu().numpy(), minlength=len(self.classes))

    @property
    def output_labels(self) -> NDArray[Any]:
        """Labels that :meth:`predict` gives the indices of: the classes, then the unknown label."""
        return output_labels(self.classes, self.unknown_label)

    def logits(self, features: Tensor) -> Tensor:
        """Logits (m, k) of queries' adapted features (m, d)."""
        return self.with_priors(self._equal_prior_logits(self.state_of_all, features))

    @torch.no_grad()
    def _equal_prior_logits(self, state: Any, features: Tensor) -> Tensor:
        """Logits (m, k) by ``state`` or ``state_of_all``."""
        with one_thread_if_small(features):
            return self.settled.logits(state, features.to(self.support.adapted.device))

    def with_priors(self, logits: Tensor) -> Tensor:
        """Logits (m, k) of equal priors, plus T log pi_k: Bayes' rule at temperature T."""
        shift = self.log_priors()
        return logits if shift is None else logits + self.temperature * shift.to(logits.device)

    @property
    def shares(self) -> NDArray[np.float64] | None:
        """Shares of the classes (k,): the ``priors``, or those among the unlabelled examples; None for equal ones."""
        if self.priors is not None or self.pool is None:
            return self.priors
        return self.pool.shares().double().cpu().numpy()

    def log_priors(self) -> Tensor | None:
        """Log pi_k of each class (k,), float64, minus infinity for a share of 0; None for equal shares."""
        shares = self.shares
        return None if shares is None else torch.from_numpy(shares).log()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logarithms (m, k) of the probabilities of :meth:`logits` (m, k), float64: equation 1 at the temperature."""
        return torch.log_softmax(logits.double() / self.temperature_of_all, dim=1)

    @property
    def temperature_of_all(self) -> float:
        """The temperature of probabilities: that of the support set, times that of the unlabelled examples."""
        return self.temperature * (1.0 if self.pool is None else self.pool.temperature)

    def outlier_score(self, features: Features) -> Tensor:
        """Outlier score (m,) of m queries, float64. It depends on the support set alone.

        Without a fitted score it is minus the largest logit of equal priors.
        """
        return self._outlier_score(self._equal_prior_logits(self.state, features.adapted), features)

    def _outlier_score(self, logits: Tensor, features: Features) -> Tensor:
        with one_thread_if_small(features.adapted):
            return OutlierScore.head_score(logits) if self.outliers is None else self.outliers(logits, features)

    def predict(self, features: Features) -> Decisions:
        """Classify m queries: logits, outlier scores and the index of each query's label in ``output_labels``."""
        by_support = self._equal_prior_logits(self.state, features.adapted)
        by_all = by_support if self.pool is None else self._equal_prior_logits(self.state_of_all, features.adapted)
        return self._decided(self.with_priors(by_all), self._outlier_score(by_support, features))

    def _decided(self, logits: Tensor, scores: Tensor) -> Decisions:
        indices = logits.argmax(dim=1)
        if self.outliers is not None:
            indices = indices.masked_fill(scores > self.outliers.threshold, logits.shape[1])
        return Decisions(indices, logits, scores)

    def decide(self, batches: Iterable[Features], groups: Sequence[Any] | None = None) -> Decisions:
        """Classify the queries of several batches, of which those of one group, by their names, share an answer."""
        if groups is None:
            return Decisions.joined([self.predict(features) for features in batches])
        every = Features.joined(batches)
        return self.joint(self.predict(every), every.adapted, groups)

    def joint(self, decisions: Decisions, features: Tensor, groups: Sequence[Any]) -> Decisions:
        """Decisions for m queries of which those of one group, by their names (m,), are pictures of one thing.

        All get the :meth:`joint_logits` of their features (m, d), and the mean of their outlier scores. ValueError if
        a name is missing.
        """
        rows = group_rows(groups, len(decisions.logits))
        scores = group_means(decisions.outlier_scores, rows)[rows]
        return self._decided(self.joint_logits(decisions.logits, features, rows), scores)

    @torch.no_grad()
    def joint_logits(self, logits: Tensor, features: Tensor, rows: Tensor) -> Tensor:
        """Logits (m, k) of groups, whose numbers are ``rows`` (m,), from those (m, k) of queries' features (m, d).

        A group's mean logits, without priors, are multiplied by the number of independent queries that the group is
        worth (``witnesses.py``).
        """
        with one_thread_if_small(features):
            metric = self.metric()
            worth = witnesses(
                metric(features.to(self.support.adapted.device)), rows.to(metric.means.device), metric.means
            )
        mean, log_priors = group_means(logits, rows), self.log_priors()
        shift = 0.0 if log_priors is None else self.temperature * log_priors.to(mean)
        more = (worth.to(mean) - 1)[:, None] * (mean - shift)
        return torch.where(mean.isinf(), mean, mean + more)[rows.to(mean.device)]

    def export(self) -> ExportedDecisions:
        """Return the fitted head as a module, in float32, for ONNX and torch.export. ValueError as ``Head.export``."""
        return ExportedDecisions(self)

    # ---------------------------------------------------------------- keeping

    def to_state(self) -> dict[str, Any]:
        """Return what a pickle or a file has to keep, on the CPU. :meth:`from_state` gives back this object.

        Returns
        -------
        dict
            "head"; "settled", None if it is "head" itself; "classes"; "values", a :class:`Values`; and "tensors", a
            dict of those of ``_TENSORS`` that there are.
        """
        kept, outliers = self.to(torch.device("cpu")), self.outliers
        values = Values(
            temperature=self.temperature,
            priors=None if self.priors is None else self.priors.tolist(),
            unknown_label=self.unknown_label,
            threshold=None if outliers is None else outliers.threshold,
            units=None if outliers is None else outliers.units,
            group_names=None if {*self.group_names} == {None} else self.group_names,
            pool_temperature=1.0 if self.pool is None else self.pool.temperature,
            false_rejection_rate=self.false_rejection_rate,
        )
        tensors = {name: _attribute(kept, path) for name, (path, _) in _TENSORS.items()}
        return {
            "head": kept.head,
            "settled": None if self.settled is self.head else kept.settled,
            "classes": kept.classes,
            "values": values,
            "tensors": {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device = _CPU) -> FittedHead:
        """Undo :meth:`to_state`, on a device. ValueError if its parts do not fit together."""
        values, classes, head = state["values"], state["classes"], state["head"].to(device)
        _check_fit_together(values, state["tensors"], classes)
        kept: dict[str, Any] = {
            name: state["tensors"][name].to(device) if name in state["tensors"] else None for name in _TENSORS
        }
        labels, groups = kept["support_labels"], kept["support_groups"]
        support = Features(kept["support_features"], kept["unadapted_features"])
        settled = state["settled"]
        settled = head.settled(support.adapted, labels, groups) if settled is None else settled.to(device)
        negatives = kept["negative_features"]
        negatives = None if negatives is None else Features(negatives, kept["unadapted_negatives"])
        pool, calibration, rate = kept["unlabelled_features"], kept["calibration_scores"], values.false_rejection_rate
        return cls(
            head=head,
            settled=settled,
            support=support,
            labels=labels,
            classes=classes,
            temperature=values.temperature,
            priors=None if values.priors is None else np.array(values.priors),
            unknown_label=values.unknown_label,
            outliers=_SupportSet(settled, support, labels, groups, negatives).score(values.threshold, values.units),
            groups=groups,
            group_names=[None] * len(labels) if values.group_names is None else values.group_names,
            negatives=negatives,
            pool=None if pool is None else Pool(pool, kept["memberships"], values.pool_temperature),
            groups_with_twins=kept["groups_with_twins"],
            false_rejection_rate=cls.false_rejection_rate if rate is None else rate,
            calibration=None if calibration is None else calibration.cpu(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return FittedHead.from_state, (self.to_state(),)

    def to(self, device: torch.device) -> FittedHead:
        """Move to a device; this object itself if it is there."""
        if self.support.adapted.device == device:
            return self
        moved: dict[str, Any] = {
            "head": copy.deepcopy(self.head).to(device),
            "settled": copy.deepcopy(self.settled).to(device),
            "support": self.support.to(device),
            "labels": self.labels.to(device),
            "groups": None if self.groups is None else self.groups.to(device),
            "groups_with_twins": None if self.groups_with_twins is None else self.groups_with_twins.to(device),
            "negatives": None if self.negatives is None else self.negatives.to(device),
            "pool": None if self.pool is None else self.pool.to(device),
        }
        if self.outliers is not None:
            support_set = _SupportSet(*(moved[name] for name in _SupportSet._fields))
            moved["outliers"] = support_set.score(self.outliers.threshold, self.outliers.units)
        return replace(self, **moved)


def _attribute(of: Any, path: str) -> Any:
    """An attribute of attributes, as "pool.features"; None where one of them is None."""
    for name in path.split("."):
        of = None if of is None else getattr(of, name)
    return of


def _check_fit_together(values: Values, tensors: Mapping[str, Tensor], classes: NDArray[Any]) -> None:
    """Raise ValueError unless a state can be that of a fitted head: it may come from a damaged file."""
    labels, names = tensors["support_labels"], tensors.keys()
    if labels.numel() == 0 or int(labels.min()) < 0 or int(labels.max()) + 1 != len(classes):
        raise ValueError(f"{len(classes)} labels for the classes of {labels.numel()} support images")
    if not (values.temperature > 0 and math.isfinite(values.temperature)):
        raise ValueError(f"a temperature of {values.temperature}")
    if (values.threshold is None) != (values.unknown_label is None) or (values.units and values.threshold is None):
        raise ValueError(f"a threshold of {values.threshold} with unknown_label={values.unknown_label!r}")
    rate = values.false_rejection_rate
    if rate is not None and not 0 < rate < 1:
        raise ValueError(f"a false_rejection_rate of {rate}")
    if values.group_names is not None and len(values.group_names) != len(labels):
        raise ValueError(f"{len(values.group_names)} names of groups of {len(labels)} support images")
    if "negative_features" not in names:
        if "unadapted_negatives" in names:
            raise ValueError("examples of no class without their adapted features")
    elif not len(tensors["negative_features"]) or ("unadapted_features" in names) != ("unadapted_negatives" in names):
        raise ValueError("examples of no class without the features that those of classes have")
    if "calibration_scores" in names and (values.threshold is None or not len(tensors["calibration_scores"])):
        raise ValueError("a calibration of a threshold that there is not, or from no example")
    if ("unlabelled_features" in names) != ("memberships" in names):
        raise ValueError("unlabelled examples without their classes, or these without the examples")
    if "memberships" in names:
        memberships = tensors["memberships"]
        if bool((memberships < 0).any() or (memberships.sum(dim=1) > 1 + 1e-3).any()):
            raise ValueError("memberships of unlabelled examples that are negative or sum to more than 1")
        if not (values.pool_temperature > 0 and math.isfinite(values.pool_temperature)):
            raise ValueError(f"a temperature of {values.pool_temperature} with unlabelled examples")


class _SupportSet(NamedTuple):
    """What calibration and the outlier score are fitted to."""

    settled: Head[Any]
    support: Features
    labels: Tensor
    groups: Tensor | None
    negatives: Features | None

    def score(self, threshold: float | None, units: Units | None) -> OutlierScore | None:
        """The outlier score of a threshold and units that are known; None without a threshold."""
        if threshold is None:
            return None
        return OutlierScore(threshold, units, self.support, self.labels, self._terms(SIMILARITIES))

    def calibrated(
        self, similarities: Sequence[Similarity], temperature: float | str, false_rejection_rate: float, reject: bool
    ) -> tuple[float, OutlierScore | None]:
        """Temperature and outlier score by leaving examples out."""
        settled, support, labels, groups, negatives = self
        terms, left_out = self._terms(similarities), None
        if reject and negatives is not None:
            left_out = left_out_negatives(settled, negatives, support, labels, groups, terms)
        return calibrate(
            settled,
            support,
            labels,
            groups,
            temperature=temperature,
            false_rejection_rate=false_rejection_rate,
            reject=reject,
            similarities=terms,
            negatives=left_out,
        )

    def _terms(self, similarities: Sequence[Similarity]) -> tuple[Similarity, ...]:
        """Terms of the outlier score, and the one that examples of no class add if there are any."""
        settled, support, labels, groups, negatives = self
        if negatives is None:
            return tuple(similarities)
        return *similarities, similarity_to_negatives(settled, negatives, support, labels, groups)


class Decisions(NamedTuple):
    """What a fitted head says about m queries."""

    indices: Tensor  # int64 (m,), into ``output_labels``
    logits: Tensor  # (m, k)
    outlier_scores: Tensor  # float64 (m,)

    @classmethod
    def joined(cls, parts: Iterable[Decisions]) -> Decisions:
        """Join the decisions for several sets of queries, on the CPU."""
        return cls(*(torch.cat(each).cpu() for each in zip(*parts, strict=True)))


class ExportedDecisions(nn.Module):
    """:meth:`FittedHead.predict` without checks, in float32: features -> probabilities, indices of labels, scores."""

    shift: Tensor | None

    def __init__(self, fitted: FittedHead) -> None:
        super().__init__()
        with torch.no_grad():
            self.head = fitted.settled.export(fitted.state_of_all)
            self.support_head = None if fitted.pool is None else fitted.settled.export(fitted.state)
        log_priors = fitted.log_priors()
        self.register_buffer("shift", None if log_priors is None else (fitted.temperature * log_priors).float())
        self.temperature = fitted.temperature_of_all
        self.outliers = None if fitted.outliers is None else fitted.outliers.export()

    def with_priors(self, logits: Tensor) -> Tensor:
        """Logits (m, k) of the head, plus what priors add."""
        return logits if self.shift is None else logits + self.shift

    def forward(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities (m, k), indices (m,) into ``output_labels`` and outlier scores (m,) of m queries."""
        similarities = self.head(features.adapted)
        logits = self.with_priors(similarities)
        if self.support_head is not None:  # outlier scores are by the support set alone
            similarities = self.support_head(features.adapted)
        probabilities, indices = torch.softmax(logits / self.temperature, dim=1), logits.argmax(dim=1)
        if self.outliers is None:
            return probabilities, indices, -similarities.amax(dim=1)
        scores = self.outliers(similarities, features)
        return probabilities, torch.where(scores > self.outliers.threshold, logits.shape[1], indices), scores
