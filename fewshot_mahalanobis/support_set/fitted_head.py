"""A head fitted to a labelled support set: everything that a classifier has learned, in one object."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.support_set.calibration import calibrate
from fewshot_mahalanobis.support_set.copies import joined, within_classes
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.labels import warn_of_similar_labels
from fewshot_mahalanobis.support_set.negatives import similarity_to_negatives
from fewshot_mahalanobis.support_set.priors import checked_priors
from fewshot_mahalanobis.support_set.unknown import SIMILARITIES, OutlierScore, Similarity, Units, output_labels


@dataclass(eq=False, repr=False, kw_only=True)
class FittedHead:
    """A head fitted to the features of a support set, calibrated, with the names of its classes.

    Made by :meth:`fit`, or from what :meth:`kept` returned. It is never changed: more examples make another one.

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
        T > 0: probabilities are softmax(logits / T).
    priors : float64 ndarray of shape (k,) or None
        Shares of the classes among the queries, with sum one; None for equal ones.
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
    state : object
        What ``settled`` keeps of the support set.
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
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        output_labels(self.classes, self.unknown_label)  # checked before it is used
        checked_priors(self.priors, self.classes)
        with torch.no_grad():
            self.state = self.settled.fit_groups(self.support.adapted, self.labels, self.groups)

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
            Share of the queries of known classes that the threshold rejects by mistake, in (0, 1).
        similarities : sequence of Similarity
            What the outlier score adds to the head's distance (``unknown.py``).
        group_names : list of n, optional
            Examples of equal name are left out together, whatever their classes. None stands for no name.
        copies : int64 ndarray of shape (p, 2), optional
            Pairs of copies. Those of one class are left out together, unless both have a name.
        negatives : Features, optional
            Examples of no class, for the outlier score.

        Raises
        ------
        ValueError
            As the head's ``fit``, :func:`calibrate` and :func:`output_labels`.
        """
        labels = labels.to(support.adapted.device)
        classes = np.arange(int(labels.max()) + 1) if classes is None else classes
        warn_of_similar_labels([*classes.tolist(), unknown_label])
        names: list[Any] = [None] * len(labels) if group_names is None else group_names
        pairs = np.empty((0, 2), np.int64) if copies is None else within_classes(copies, labels.cpu().numpy())
        groups = joined(len(labels), pairs, names)
        groups = None if groups is None else groups.to(labels.device)
        with torch.no_grad():
            settled = head.settled(support.adapted, labels, groups)
            chosen_temperature, outliers = calibrate(
                settled,
                support,
                labels,
                groups,
                temperature=temperature,
                false_rejection_rate=false_rejection_rate,
                reject=unknown_label is not None,
                similarities=_with_negatives(similarities, negatives, settled, support, labels, groups),
            )
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
        )

    # ---------------------------------------------------------------- queries

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
        return self.with_priors(self._equal_prior_logits(features))

    @torch.no_grad()
    def _equal_prior_logits(self, features: Tensor) -> Tensor:
        """Logits (m, k) of equal priors: what the head says."""
        return self.settled.logits(self.state, features.to(self.support.adapted.device))

    def transductive_logits(self, features: Tensor) -> Tensor:
        """Logits (m, k) of all queries of a task, adapted features (m, d), by classes that the queries refine."""
        queries = features.to(self.support.adapted.device)
        refined = self.settled.transductive_logits(
            self.state, self.support.adapted, self.labels, queries, self.temperature
        )
        return self.with_priors(refined)

    def with_priors(self, logits: Tensor) -> Tensor:
        """Logits (m, k) of equal priors, plus T log pi_k: their softmax over T is Bayes' rule."""
        shift = self.log_priors()
        return logits if shift is None else logits + self.temperature * shift.to(logits.device)

    def log_priors(self) -> Tensor | None:
        """Log pi_k of each class (k,), float64, minus infinity for a share of 0; None for equal priors."""
        return None if self.priors is None else torch.from_numpy(self.priors).log()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logarithms (m, k) of the probabilities of :meth:`logits` (m, k), float64: equation 1 at the temperature."""
        return torch.log_softmax(logits.double() / self.temperature, dim=1)

    def outlier_score(self, features: Features) -> Tensor:
        """Outlier score (m,) of m queries, float64. It does not depend on priors.

        Without a fitted score it is minus the largest logit of equal priors.
        """
        return self._outlier_score(features, self._equal_prior_logits(features.adapted))

    def _outlier_score(self, features: Features, logits: Tensor) -> Tensor:
        return OutlierScore.of_head(logits) if self.outliers is None else self.outliers(logits, features)

    def predict(self, features: Features, *, transductive: bool = False) -> Decisions:
        """Classify m queries: logits, outlier scores and the index of each query's label in ``output_labels``.

        With ``transductive`` the m queries refine the classes first; their outlier scores do not depend on that.
        """
        of_equal_priors = self._equal_prior_logits(features.adapted)
        scores = self._outlier_score(features, of_equal_priors)
        logits = self.transductive_logits(features.adapted) if transductive else self.with_priors(of_equal_priors)
        indices = logits.argmax(dim=1)
        if self.outliers is not None:
            indices = indices.masked_fill(scores > self.outliers.threshold, logits.shape[1])
        return Decisions(indices, logits, scores)

    def export(self) -> ExportedDecisions:
        """Return the fitted head as a module, in float32, for ONNX and torch.export. ValueError as ``Head.export``."""
        return ExportedDecisions(self)

    # ---------------------------------------------------------------- keeping

    def kept(self) -> dict[str, Any]:
        """Return what a pickle or a file has to keep, on the CPU. :meth:`from_kept` gives back this object."""
        on_cpu = self.to(torch.device("cpu"))
        return {
            "head": on_cpu.head,
            "settled": on_cpu.settled,
            "support": on_cpu.support,
            "labels": on_cpu.labels,
            "classes": on_cpu.classes,
            "temperature": on_cpu.temperature,
            "priors": on_cpu.priors,
            "unknown_label": on_cpu.unknown_label,
            "threshold": None if on_cpu.outliers is None else on_cpu.outliers.threshold,
            "units": None if on_cpu.outliers is None else on_cpu.outliers.units,
            "groups": on_cpu.groups,
            "group_names": on_cpu.group_names,
            "negatives": on_cpu.negatives,
        }

    @classmethod
    def from_kept(cls, kept: dict[str, Any]) -> FittedHead:
        """Undo :meth:`kept`. ValueError if its parts do not fit together."""
        attributes = dict(kept)
        threshold, units = attributes.pop("threshold"), attributes.pop("units")
        return cls(**attributes, outliers=_outlier_score(threshold, units, attributes))

    def __reduce__(self) -> tuple[Any, ...]:
        return FittedHead.from_kept, (self.kept(),)

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
            "negatives": None if self.negatives is None else self.negatives.to(device),
        }
        outliers = self.outliers and _outlier_score(self.outliers.threshold, self.outliers.units, moved)
        return replace(self, **moved, outliers=outliers)


def _outlier_score(threshold: float | None, units: Units | None, of: Mapping[str, Any]) -> OutlierScore | None:
    """The outlier score of a fitted head with the attributes ``of``; None without a threshold."""
    if threshold is None:
        return None
    support, labels = of["support"], of["labels"]
    similarities = _with_negatives(SIMILARITIES, of.get("negatives"), of["settled"], support, labels, of["groups"])
    return OutlierScore(threshold, units, support, labels, similarities)


def _with_negatives(
    similarities: Sequence[Similarity],
    negatives: Features | None,
    settled: Head[Any],
    support: Features,
    labels: Tensor,
    groups: Tensor | None,
) -> tuple[Similarity, ...]:
    """Terms of the outlier score, and the one that examples of no class add if there are any."""
    if negatives is None:
        return tuple(similarities)
    return *similarities, similarity_to_negatives(settled, negatives, support, labels, groups)


class Decisions(NamedTuple):
    """What a fitted head says about m queries."""

    indices: Tensor  # int64 (m,), into ``output_labels``
    logits: Tensor  # (m, k)
    outlier_scores: Tensor  # float64 (m,)


class ExportedDecisions(nn.Module):
    """:meth:`FittedHead.predict` without checks, in float32: features -> probabilities, indices of labels, scores."""

    shift: Tensor | None

    def __init__(self, fitted: FittedHead) -> None:
        super().__init__()
        with torch.no_grad():
            self.head = fitted.settled.export(fitted.state)
        log_priors = fitted.log_priors()
        self.register_buffer("shift", None if log_priors is None else (fitted.temperature * log_priors).float())
        self.temperature = fitted.temperature
        self.outliers = None if fitted.outliers is None else fitted.outliers.export()

    def with_priors(self, logits: Tensor) -> Tensor:
        """Logits (m, k) of the head, plus what priors add."""
        return logits if self.shift is None else logits + self.shift

    def forward(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities (m, k), indices (m,) into ``output_labels`` and outlier scores (m,) of m queries."""
        similarities = self.head(features.adapted)
        logits = self.with_priors(similarities)
        probabilities, indices = torch.softmax(logits / self.temperature, dim=1), logits.argmax(dim=1)
        if self.outliers is None:
            return probabilities, indices, -similarities.amax(dim=1)
        scores = self.outliers(similarities, features)
        return probabilities, torch.where(scores > self.outliers.threshold, logits.shape[1], indices), scores
