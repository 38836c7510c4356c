"""What the two scikit-learn classifiers share: everything after the features.

fit:            features of the support set (n, d), labels (n,)  ->  FittedHead
predict_proba:  features of queries (m, d)  ->  logits (m, k)  ->  probabilities (m, k)

Of these, ``fit`` is ``_fit_head``. Each classifier has its own ``predict``. Threads may share a classifier: each call
works on a snapshot of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.plain import plain, snapshot
from fewshot_mahalanobis.support_set.calibration import check_settings
from fewshot_mahalanobis.support_set.caller_warnings import warn_caller
from fewshot_mahalanobis.support_set.copies import (
    checked_groups,
    copies_found,
    equal_rows,
    group_means,
    group_names,
    group_rows,
    near_twins,
    once_each,
    warn_of_contradictions,
    warn_of_copies,
)
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import Decisions, FittedHead
from fewshot_mahalanobis.support_set.labels import check_allowed, joined_labels, label_array
from fewshot_mahalanobis.support_set.new_classes import check_proposes, proposed_classes
from fewshot_mahalanobis.support_set.prediction_sets import largest_surprise, surprises_within
from fewshot_mahalanobis.support_set.priors import checked_priors
from fewshot_mahalanobis.support_set.summary import SupportSummary, summarise
from fewshot_mahalanobis.support_set.unknown import Similarity, output_labels

Classifier = TypeVar("Classifier", bound="FittedHeadMixin")

#: Most unlabelled examples that are learned from.
MAX_UNLABELLED = 2000


class Labelled(NamedTuple):
    """Labels of the n examples of all calls, of classes and of none, checked against the settings."""

    labels: NDArray[Any]  # (n,)
    group_names: list[Any]  # n, None where an example is of no group
    known: NDArray[np.bool_]  # (n,), whether an example is of a class
    priors: NDArray[Any] | None  # (k,)
    earlier: int  # how many of them, the first, are of earlier calls


class FittedHeadMixin(ClassifierMixin):
    """The methods of prediction for a classifier that turns what it is given into features.

    The classifier defines ``predict``, ``_query_features`` and :attr:`fitted_head_`, which it makes by ``_fit_head``.
    Whatever ``fit`` learns is one record, ``_fitted``, which takes the place of an earlier one in a single step. Public
    methods work on a :meth:`_snapshot`; the others are called on one.
    """

    #: What ``summary`` calls an example.
    _noun: ClassVar[str] = "example"
    #: Terms of the outlier score beside the head's.
    _similarities: ClassVar[tuple[Similarity, ...]] = ()
    #: Whether examples that are near for their class are altered copies: in few dimensions they are near by chance.
    _has_twins: ClassVar[bool] = False
    _fitted: Any
    temperature: float | str
    priors: Any
    unknown_label: Any
    false_rejection_rate: float

    def _snapshot(self: Classifier) -> Classifier:
        """Copy the fitted classifier, with its settings, so that no other thread changes what a call works on."""
        check_is_fitted(self)
        return snapshot(self)

    @property
    def fitted_head_(self) -> FittedHead:
        """The head fitted to the support set, with the threshold of ``false_rejection_rate`` as that is now."""
        now = copy.copy(self)  # another thread changes neither of the two
        return cast(FittedHead, now._fitted.fitted_head.at_rate(plain(now.false_rejection_rate)))

    def _query_features(self, X: Any, method: str, *, for_outliers: bool = False) -> Iterator[Features]:
        """Check queries and yield their features batch by batch, with those that the outlier score needs if asked."""
        raise NotImplementedError

    def _head_for(
        self, batches: Iterable[Features], transductive: bool, groups: Iterable[Any] | None = None
    ) -> tuple[FittedHead, Iterable[Features]]:
        """The head that classifies queries, and the queries. With ``transductive`` the head learns from them first.

        Queries of one group are one unlabelled example, their mean, and none where one of them has a label.
        """
        head = self.fitted_head_
        if not transductive:
            return head, batches
        head.head.check_learns_unlabelled()
        every = [*batches]
        queries = torch.cat([features.adapted for features in every])
        names = None if groups is None else checked_groups(groups, len(queries))
        some = queries[self._evenly(len(queries))] if names is None else queries
        copies = equal_rows(torch.cat([head.support.adapted.to(some), some]))
        some = once_each(some, len(head.labels), copies, names)
        return head.with_unlabelled(some[self._evenly(len(some))]), every

    def _check_unlabelled(self, head: Head[Any], unlabelled: Any, groups: Iterable[Any] | None) -> None:
        """Raise ValueError if the head learns from no unlabelled examples, or there are groups and no examples."""
        if unlabelled is not None:
            head.check_learns_unlabelled()
        elif groups is not None:
            raise ValueError(f"unlabelled_groups without unlabelled: give the {self._noun}s that they are of")

    def _some_unlabelled(self, m: int, groups: Iterable[Any] | None) -> tuple[NDArray[np.int64], list[Any] | None]:
        """Which of m unlabelled examples to learn from, and the names of their groups, if any were given."""
        try:
            names = None if groups is None else checked_groups(groups, m)
        except ValueError as error:
            raise ValueError(f"unlabelled_groups: {error}") from error
        some = self._evenly(m)
        return some, None if names is None else [names[index] for index in some]

    def _evenly(self, m: int) -> NDArray[np.int64]:
        """Which of m unlabelled examples to learn from: all, or as many as there may be, evenly spread."""
        if m > MAX_UNLABELLED:
            warn_caller(
                f"{m} unlabelled {self._noun}s: {MAX_UNLABELLED} of them, evenly spread, are learned from. More would "
                "hardly change the result"
            )
        return np.linspace(0, m - 1, min(m, MAX_UNLABELLED)).round().astype(np.int64)

    def predict_proba(
        self, X: Any, *, transductive: bool = False, groups: Iterable[Any] | None = None
    ) -> NDArray[np.float64]:
        """Probabilities (m, k) of the known classes: the softmax of the logits over T (equation 1 for T = 1).

        With ``priors`` they are those of equal priors, times the priors, divided by their sum: Bayes' rule. Queries of
        one group share them, from the mean of their logits times the number of independent queries that the group is
        worth: n if they differ as much as n queries of one class do, 1 if they are frames of one burst.
        """
        return np.exp(self.predict_log_proba(X, transductive=transductive, groups=groups))

    def predict_log_proba(
        self, X: Any, *, transductive: bool = False, groups: Iterable[Any] | None = None
    ) -> NDArray[np.float64]:
        """Logarithms (m, k) of :meth:`predict_proba`, finite where a probability underflows, not where a prior is 0."""
        now, groups = self._snapshot(), group_names(groups)
        head, batches = now._head_for(now._query_features(X, "predict_proba"), transductive, groups)
        if groups is None:
            logits = torch.cat([head.logits(features.adapted).cpu() for features in batches])
        else:
            x = torch.cat([features.adapted for features in batches])
            logits = head.joint_logits(head.logits(x), x, group_rows(groups, len(x))).cpu()
        return head.log_probabilities(logits).numpy()

    def predict_set(self, X: Any, coverage: float = 0.9) -> list[NDArray[Any]]:
        """The classes that each query may have, so that for most queries the right one is among them.

        Parameters
        ----------
        X : m queries
        coverage : float, default=0.9
            Share of the queries of known classes whose right class is to be among them, in (0, 1). It is promised on
            average over tasks, from support examples that are left out, copies and groups together; n of them can
            promise n / (n + 1) at most.

        Returns
        -------
        list of m ndarrays
            Labels of classes, the most probable first; at least one, whether or not ``predict`` rejects the query. So
            where more than ``coverage`` of the labels of ``predict`` are right, as many are among them.

        Raises
        ------
        ValueError
            ``coverage`` is not between 0 and 1, or the support examples are too few to keep it: the message says what
            they can.

        References
        ----------
        Vovk: Cross-conformal predictors. Annals of Mathematics and Artificial Intelligence 74, 2015.
        """
        now = self._snapshot()
        head = now.fitted_head_
        limit = largest_surprise(head, coverage)
        sets = list[NDArray[Any]]()
        for features in now._query_features(X, "predict_set"):
            log_probabilities = head.log_probabilities(head.logits(features.adapted)).cpu().numpy()
            inside = surprises_within(log_probabilities, limit)
            ranked = (-log_probabilities).argsort(axis=1, kind="stable")
            sets += [head.classes[row[among[row]]] for row, among in zip(ranked, inside, strict=True)]
        return sets

    def propose_classes(self, X: Any, *, groups: Iterable[Any] | None = None) -> NDArray[np.int64]:
        """Propose new classes: those of the queries that belong to no class and look like one another.

        Parameters
        ----------
        X : m queries
            Those that ``predict`` gives the unknown label are clustered. Copies of one query count once.
        groups : sequence of m strings or numbers, optional
            Queries of one group share an answer, as in ``predict``, and count once.

        Returns
        -------
        int64 ndarray of shape (m,)
            0, 1, 2, ... are proposed classes, of which the first is the tightest and each has at least three different
            queries. -1 is none: a query of a known class, or unlike the others.

        Raises
        ------
        ValueError
            There is no ``unknown_label``, or a query cannot be used.

        Warns
        -----
        UserWarning
            More than 5,000 queries are of no class: 5,000, evenly spread, are clustered, and the others join them.
        """
        names = group_names(groups)
        now = self._snapshot()
        head = now.fitted_head_
        check_proposes(head, self._noun)
        features, copies = now._queries_and_copies(X, "propose_classes")
        decisions = head.predict(features)
        if names is not None:
            decisions = head.joint(decisions, features.adapted, names)
        unknown = decisions.indices.cpu().numpy() == len(head.classes)
        return proposed_classes(head, features.adapted, unknown, copies, names)

    def _queries_and_copies(self, X: Any, method: str) -> tuple[Features, NDArray[np.int64]]:
        """Features of all queries, and the pairs (p, 2) of copies among them."""
        features = Features.joined([*self._query_features(X, method, for_outliers=True)])
        return features, equal_rows(features.adapted)

    def decision_function(self, X: Any) -> NDArray[np.floating]:
        """Logits, shape (m, k). With two classes, the log-odds of ``classes_[1]``, shape (m,).

        The logits of ``head="mahalanobis"`` are -s (x - mu_k)^T Q_k^-1 (x - mu_k), plus T log pi_k with ``priors`` pi.
        """
        now = self._snapshot()
        head, batches = now.fitted_head_, now._query_features(X, "decision_function")
        logits = torch.cat([head.logits(features.adapted).cpu() for features in batches])
        return (logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits).numpy()

    def outlier_score(self, X: Any) -> NDArray[np.float64]:
        """How far queries are from all classes, shape (m,); larger is farther.

        For images with ``unknown_label``, and with examples of no class, it is a sum of terms in standard deviations of
        left-out examples: see the page "Unknown classes". Otherwise it is minus the largest logit; for
        ``head="mahalanobis"`` that is s times the squared distance to the nearest class mean. ``priors`` change nothing
        of it.
        """
        now = self._snapshot()
        head, batches = now.fitted_head_, now._query_features(X, "outlier_score", for_outliers=True)
        return torch.cat([head.outlier_score(features) for features in batches]).cpu().numpy()

    def predict_all(self, X: Any, *, transductive: bool = False, groups: Iterable[Any] | None = None) -> Predictions:
        """Labels, probabilities and features of queries, which go through the network once.

        Parameters
        ----------
        X : m queries
        transductive, groups : optional
            As for :meth:`predict`.

        Returns
        -------
        Predictions
            Named tuple of ``labels`` (m,), ``probabilities`` (m, k), ``unknown`` (m,), whether a query belongs to no
            class, ``features`` (m, d), ``outlier_scores`` (m,) and ``doubts`` (m,).
        """
        now, groups = self._snapshot(), group_names(groups)
        head, batches = now._head_for(now._query_features(X, "predict", for_outliers=True), transductive, groups)
        features, predictions = zip(*((features, head.predict(features)) for features in batches), strict=True)
        decisions, adapted = Decisions.joined(predictions), torch.cat([batch.adapted for batch in features])
        if groups is not None:
            decisions = head.joint(decisions, adapted, groups)
        indices = decisions.indices.numpy()
        return Predictions(
            head.output_labels[indices],
            head.log_probabilities(decisions.logits).exp().numpy(),
            indices == decisions.logits.shape[1],
            adapted.cpu().numpy(),
            decisions.outlier_scores.numpy(),
            head.doubts(decisions).numpy(),
        )

    def score(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Share of queries whose predicted label is right.

        Parameters
        ----------
        X : m queries
        y : array-like of shape (m,)
            Their labels.
        sample_weight : array-like of shape (m,), optional
            Weight of each query.
        """
        return float(super().score(X, label_array(y), sample_weight))

    def summary(self) -> SupportSummary:
        """Examples a class, leave-one-out accuracy, confusions, and support examples that look wrong; ``print`` it."""
        return summarise(self._snapshot().fitted_head_, self._noun)

    def calibrate(self: Classifier, X: Any, groups: Iterable[Any] | None = None) -> Classifier:
        """Set the threshold of rejection from further queries of known classes, and return the classifier itself.

        Nothing is learned from them but the threshold. It then keeps ``false_rejection_rate`` as exactly as so many
        queries allow, whatever the support set was: see ``false_rejection_interval_``. Files and pickles keep it;
        ``fit`` and ``partial_fit`` find a threshold from the support set again.

        Parameters
        ----------
        X : c queries
            Of known classes, drawn as those to come, and none that ``fit`` was given.
        groups : sequence of c strings or numbers, optional
            Queries of one group count once, by their mean.

        Raises
        ------
        ValueError
            There is no ``unknown_label``, or a query cannot be used. The classifier is then as it was.

        Warns
        -----
        UserWarning
            The queries are too few to guarantee ``false_rejection_rate``.
        """
        self._fitted = self._snapshot()._calibrated(X, group_names(groups))
        return self

    def _calibrated(self, X: Any, groups: list[Any] | None) -> Any:
        """Return what ``calibrate`` changes. ``self`` is a copy."""
        head = self.fitted_head_
        if head.outliers is None:
            raise ValueError(
                f"calibrate sets the threshold of rejection, and no {self._noun} is rejected: set unknown_label and fit"
            )
        batches = self._query_features(X, "calibrate", for_outliers=True)
        scores = torch.cat([head.outlier_score(features).cpu() for features in batches])
        if groups is not None:
            scores = group_means(scores, group_rows(groups, len(scores)))
        return self._fitted.with_head(head.calibrated(scores))

    # ---------------------------------------------------------------- fitting

    def _check_params(self) -> None:
        """Raise ValueError if a constructor argument cannot be used, whatever the examples are."""
        check_settings(self.temperature, self.false_rejection_rate)

    def _labelled(
        self, labels: NDArray[Any], group_names: list[Any], allowed: NDArray[Any] | None, earlier: int = 0
    ) -> Labelled:
        """Check the labels (n,) of all calls, of which ``earlier`` ones come first, before anything is computed.

        ValueError if none is of a class, one is not ``allowed``, or ``unknown_label`` or ``priors`` do not fit them.
        """
        known = np.array([self.unknown_label is None or label != self.unknown_label for label in labels.tolist()])
        if not known.any():
            raise ValueError(
                f"every label is unknown_label={self.unknown_label!r}: {self._noun}s of no class need those of classes"
            )
        classes = np.unique(labels[known])
        check_allowed(classes, allowed)
        output_labels(classes, self.unknown_label)
        return Labelled(labels, group_names, known, checked_priors(self.priors, classes, allowed), earlier)

    def _earlier(self, before: FittedHead) -> tuple[Features, NDArray[Any], list[Any]]:
        """Examples of earlier calls, those with a class first, their labels, and the names of their groups.

        ValueError if ``unknown_label`` has become the label of a class.
        """
        output_labels(before.classes, self.unknown_label)
        if before.negatives is None:
            return before.support, before.support_labels, before.group_names
        m = len(before.negatives.adapted)
        if self.unknown_label is None:
            warn_caller(f"{m} {self._noun}s of no class are left out, because unknown_label is None now")
            return before.support, before.support_labels, before.group_names
        labels = joined_labels(before.support_labels, label_array([self.unknown_label] * m))
        return Features.joined([before.support, before.negatives]), labels, before.group_names + [None] * m

    def _fit_head(
        self,
        head: Head[Any],
        features: Features,
        labelled: Labelled,
        copies: NDArray[np.int64],
        unlabelled: Tensor | None,
        name: Callable[[int], str],
        before: FittedHead | None = None,
    ) -> FittedHead:
        """Fit a head to labelled examples and unlabelled ones (m, d), and warn of new copies, by what ``name`` says.

        With ``before`` the earlier examples are known from it, and so are their copies and its unlabelled examples, to
        which ``unlabelled`` ones are added.
        """
        labels, group_names, known, priors, earlier = labelled
        if before is not None and before.pool is not None:
            pool = before.pool.features if unlabelled is None else torch.cat([before.pool.features, unlabelled])
            unlabelled = once_each(pool, len(labels), equal_rows(torch.cat([features.adapted, pool])))
            unlabelled = unlabelled[self._evenly(len(unlabelled))]
        classes, codes = np.unique(labels[known], return_inverse=True)
        places, pairs = known.cumsum() - 1, copies[known[copies].all(axis=1)]
        support, indices = features.rows_where(known), torch.from_numpy(codes)
        fitted = FittedHead.fit(
            head,
            support,
            indices,
            classes,
            temperature=self.temperature,
            priors=priors,
            unknown_label=self.unknown_label,
            false_rejection_rate=self.false_rejection_rate,
            similarities=self._similarities,
            group_names=[*compress(group_names, known)],
            copies=places[pairs],
            twins=near_twins(support.adapted, indices) if self._has_twins else None,
            negatives=None if known.all() else features.rows_where(~known),
        )
        if unlabelled is not None:
            fitted = fitted.with_unlabelled(unlabelled)
        if before is not None and before.calibration is not None:
            warn_caller(
                "the threshold of calibrate() is no longer in force: it comes from the support set again. Call "
                f"calibrate with {self._noun}s that fit was not given to set it anew"
            )
        found = 0 if before is None else copies_found(before.groups, before.group_names)
        warn_of_copies(fitted.groups, fitted.group_names, found)
        warn_of_contradictions(copies, labels, name, earlier)
        return fitted

    def _check_settings_are_fitted(self) -> None:
        """Warn of what was set after ``fit`` and is not in force, before a file is written."""
        head = self.fitted_head_
        late = {"unknown_label": head.unknown_label} if self.unknown_label != head.unknown_label else {}
        if self.temperature not in ("auto", head.temperature):
            late["temperature"] = head.temperature
        if not self._priors_are_fitted():
            late["priors"] = None if head.priors is None else head.priors.tolist()
        if late:
            now = ", ".join(f"{name}={getattr(self, name)!r}" for name in late)
            then = ", ".join(f"{name}={value!r}" for name, value in late.items())
            warn_caller(
                f"{now} was set after fit and is not in force: what is written has {then}. Call fit, or partial_fit "
                f"with more {self._noun}s, to apply it"
            )

    def _priors_are_fitted(self) -> bool:
        fitted = self.fitted_head_.priors
        try:
            priors = checked_priors(self.priors, self.classes_, self._fitted.allowed, warn=False)
        except ValueError:
            return False
        return priors is fitted or (priors is not None and fitted is not None and np.allclose(priors, fitted))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_fitted")

    # ---------------------------------------------------------------- attributes, as scikit-learn names them

    @property
    def classes_(self) -> NDArray[Any]:
        """Labels of the classes, sorted, shape (k,)."""
        return self.fitted_head_.classes

    @property
    def class_counts_(self) -> NDArray[np.int64]:
        """Support examples of each class, shape (k,)."""
        return self.fitted_head_.counts

    @property
    def temperature_(self) -> float:
        """``temperature``, or what "auto" chose."""
        return self.fitted_head_.temperature_of_all

    @property
    def priors_(self) -> NDArray[np.float64]:
        """Shares of the classes among the queries, shape (k,), with sum one."""
        head = self.fitted_head_
        return np.full(len(head.classes), 1 / len(head.classes)) if head.shares is None else head.shares.copy()

    @property
    def false_rejection_interval_(self) -> tuple[float, float] | None:
        """Interval in which the share of queries of known classes that are rejected lies with probability 0.9.

        The threshold promises ``false_rejection_rate`` on average over draws of so many examples; a single draw may be
        luckier or not. None without ``unknown_label``.
        """
        return self.fitted_head_.rate_interval

    @property
    def threshold_(self) -> float | None:
        """Threshold of :meth:`outlier_score`; None without ``unknown_label``."""
        outliers = self.fitted_head_.outliers
        return None if outliers is None else outliers.threshold


class Predictions(NamedTuple):
    """Everything that a classifier says about m queries.

    Parameters
    ----------
    labels : ndarray of shape (m,)
        As ``predict``.
    probabilities : float64 ndarray of shape (m, k)
        As ``predict_proba``.
    unknown : bool ndarray of shape (m,)
        Whether the query belongs to no class.
    features : ndarray of shape (m, d)
        What the head classifies; for images as ``transform``.
    outlier_scores : float64 ndarray of shape (m,)
        As ``outlier_score``.
    doubts : float64 ndarray of shape (m,)
        How near each answer is to another one, from 0 to 1 at the boundary of two classes or of rejection: by these
        answers are ranked, those of no class among the others.
    """

    labels: NDArray[Any]
    probabilities: NDArray[np.float64]
    unknown: NDArray[np.bool_]
    features: NDArray[np.floating]
    outlier_scores: NDArray[np.float64]
    doubts: NDArray[np.float64]
