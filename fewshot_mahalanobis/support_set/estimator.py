"""What the two scikit-learn classifiers share: everything after the features.

fit:      features of the support set (n, d), labels (n,)  ->  FittedHead
predict:  features of queries (m, d)  ->  logits (m, k)  ->  label of the largest, or the unknown label

The two lines are ``_fit_head`` and ``predict``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.support_set.copies import copies_found, warn_of_contradictions, warn_of_copies
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import Decisions, FittedHead
from fewshot_mahalanobis.support_set.labels import joined_labels, label_array
from fewshot_mahalanobis.support_set.priors import checked_priors
from fewshot_mahalanobis.support_set.summary import SupportSummary, summarise
from fewshot_mahalanobis.support_set.unknown import Similarity, output_labels
from fewshot_mahalanobis.support_set.warn import warn_caller


class FittedHeadMixin(ClassifierMixin):
    """The methods of prediction for a classifier that turns what it is given into features.

    The classifier defines ``_query_features`` and :attr:`fitted_head_`, which it makes by ``_fit_head``. Whatever
    ``fit`` learns is one record, ``_fitted``, which takes the place of an earlier one in a single step.
    """

    #: What ``summary`` calls an example.
    _noun: ClassVar[str] = "example"
    #: Terms of the outlier score beside the head's.
    _similarities: ClassVar[tuple[Similarity, ...]] = ()
    _fitted: Any
    temperature: float | str
    priors: Any
    unknown_label: Any
    false_rejection_rate: float

    @property
    def fitted_head_(self) -> FittedHead:
        """The head fitted to the support set."""
        raise NotImplementedError

    def _query_features(self, X: Any, method: str, *, for_outliers: bool = False) -> Iterator[Features]:
        """Check queries and yield their features batch by batch, with those that the outlier score needs if asked."""
        raise NotImplementedError

    def predict(self, X: Any, *, transductive: bool = False) -> NDArray[Any]:
        """Predict the labels of queries.

        Parameters
        ----------
        X : m queries
            As for ``fit``. They are processed and dropped batch by batch.
        transductive : bool, default=False
            Classify each query on its own, or after all of them have refined the classes (page "Many queries at once").

        Returns
        -------
        ndarray of shape (m,)
            Labels of the type given to ``fit``. A query whose :meth:`outlier_score` is above ``threshold_`` gets
            ``unknown_label``.

        Raises
        ------
        ValueError
            A query cannot be used. The message names it.
        """
        predictions = self._predictions(X, "predict", transductive)
        indices = torch.cat([prediction.indices for _, prediction in predictions])
        return self.fitted_head_.output_labels[indices.cpu().numpy()]

    def _predictions(self, X: Any, method: str, transductive: bool = False) -> Iterator[tuple[Features, Decisions]]:
        check_is_fitted(self)
        batches = self._query_features(X, method, for_outliers=True)
        if transductive:  # each query depends on all
            batches = iter([Features.joined(batches)])
        for features in batches:
            yield features, self.fitted_head_.predict(features, transductive=transductive)

    def predict_proba(self, X: Any, *, transductive: bool = False) -> NDArray[np.float64]:
        """Probabilities (m, k) of the known classes: the softmax of the logits over T (equation 1 for T = 1).

        With ``priors`` they are those of equal priors, times the priors, divided by their sum: Bayes' rule.
        """
        return np.exp(self.predict_log_proba(X, transductive=transductive))

    def predict_log_proba(self, X: Any, *, transductive: bool = False) -> NDArray[np.float64]:
        """Logarithms (m, k) of :meth:`predict_proba`, finite where a probability underflows, not where a prior is 0."""
        logits = self._logits(X, "predict_proba", transductive)
        return self.fitted_head_.log_probabilities(logits).numpy()

    def decision_function(self, X: Any) -> NDArray[np.floating]:
        """Logits, shape (m, k). With two classes, the log-odds of ``classes_[1]``, shape (m,).

        The logits of ``head="mahalanobis"`` are -s (x - mu_k)^T Q_k^-1 (x - mu_k), plus T log pi_k with ``priors`` pi.
        """
        logits = self._logits(X, "decision_function")
        return (logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits).numpy()

    def outlier_score(self, X: Any) -> NDArray[np.float64]:
        """How far queries are from all classes, shape (m,); larger is farther.

        For images with ``unknown_label``, and with examples of no class, it is a sum of terms in standard deviations of
        left-out examples: see the page "Unknown classes". Otherwise it is minus the largest logit; for
        ``head="mahalanobis"`` that is s times the squared distance to the nearest class mean. ``priors`` change nothing
        of it.
        """
        check_is_fitted(self)
        batches = self._query_features(X, "outlier_score", for_outliers=True)
        return torch.cat([self.fitted_head_.outlier_score(features) for features in batches]).cpu().numpy()

    def predict_all(self, X: Any) -> Predictions:
        """Labels, probabilities and features of queries, which go through the network once.

        Parameters
        ----------
        X : m queries

        Returns
        -------
        Predictions
            Named tuple of ``labels`` (m,), ``probabilities`` (m, k), ``unknown`` (m,), whether a query belongs to no
            class, and ``features`` (m, d).
        """
        features, predictions = zip(*self._predictions(X, "predict"), strict=True)
        indices = torch.cat([prediction.indices for prediction in predictions]).cpu().numpy()
        logits = torch.cat([prediction.logits for prediction in predictions]).cpu()
        return Predictions(
            self.fitted_head_.output_labels[indices],
            self.fitted_head_.log_probabilities(logits).exp().numpy(),
            indices == len(self.classes_),
            torch.cat([batch.adapted for batch in features]).cpu().numpy(),
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
        check_is_fitted(self)
        return summarise(self.fitted_head_, self._noun)

    def _logits(self, X: Any, method: str, transductive: bool = False) -> Tensor:
        check_is_fitted(self)
        adapted = (features.adapted for features in self._query_features(X, method))
        if transductive:
            return self.fitted_head_.transductive_logits(torch.cat([*adapted])).cpu()
        return torch.cat([self.fitted_head_.logits(features).cpu() for features in adapted])

    # ---------------------------------------------------------------- fitting

    def _fit_head(
        self,
        head: Head[Any],
        examples: Features,
        labels: NDArray[Any],
        group_names: list[Any],
        copies: NDArray[np.int64],
        name: Callable[[int], str],
        before: FittedHead | None = None,
        earlier: int = 0,
        priors: NDArray[Any] | None = None,
    ) -> FittedHead:
        """Fit a head to examples of classes and of none, and warn of new copies.

        With ``before`` the first ``earlier`` examples are known from it, and so are their copies.
        """
        known = self._of_classes(labels)
        classes, codes = np.unique(labels[known], return_inverse=True)
        group_names = [each for each, of_class in zip(group_names, known, strict=True) if of_class]
        places, pairs = known.cumsum() - 1, copies[known[copies].all(axis=1)]
        fitted = FittedHead.fit(
            head,
            examples.rows_where(known),
            torch.from_numpy(codes),
            classes,
            temperature=self.temperature,
            priors=priors,
            unknown_label=self.unknown_label,
            false_rejection_rate=self.false_rejection_rate,
            similarities=self._similarities,
            group_names=group_names,
            copies=places[pairs],
            negatives=None if known.all() else examples.rows_where(~known),
        )
        found = 0 if before is None else copies_found(before.groups, before.group_names)
        warn_of_copies(fitted.groups, group_names, found)
        warn_of_contradictions(copies, labels, name, earlier)
        return fitted

    def _of_classes(self, labels: NDArray[Any]) -> NDArray[np.bool_]:
        """Which labels (n,) are of classes, and not ``unknown_label``. ValueError if none is."""
        known = np.array([self.unknown_label is None or label != self.unknown_label for label in labels.tolist()])
        if not known.any():
            raise ValueError(
                f"every label is unknown_label={self.unknown_label!r}: {self._noun}s of no class need those of classes"
            )
        return known

    def _earlier(self, before: FittedHead) -> tuple[Features, NDArray[Any]]:
        """Examples that earlier calls were given, of classes and then of none, and their labels.

        ValueError if ``unknown_label`` has become the label of a class.
        """
        output_labels(before.classes, self.unknown_label)
        if before.negatives is None:
            return before.support, before.support_labels
        m = len(before.negatives.adapted)
        if self.unknown_label is None:
            warn_caller(f"{m} {self._noun}s of no class are left out, because unknown_label is None now")
            return before.support, before.support_labels
        labels = joined_labels(before.support_labels, label_array([self.unknown_label] * m))
        return Features.joined([before.support, before.negatives]), labels

    def _check_settings_are_fitted(self) -> None:
        """Warn of what was set after ``fit`` and is not in force, before a file is written."""
        check_is_fitted(self)
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
        return self.fitted_head_.temperature

    @property
    def priors_(self) -> NDArray[np.float64]:
        """Shares of the classes among the queries, shape (k,), with sum one."""
        priors, k = self.fitted_head_.priors, len(self.classes_)
        return np.full(k, 1 / k) if priors is None else priors.copy()

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
    """

    labels: NDArray[Any]
    probabilities: NDArray[np.float64]
    unknown: NDArray[np.bool_]
    features: NDArray[np.floating]
