"""The Mahalanobis classifier of Simple CNAPS for any feature vectors, as a scikit-learn estimator."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data

from fewshot_mahalanobis.calibration import calibrate
from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance
from fewshot_mahalanobis.gaussians.uncertain_means import choose_means_settings
from fewshot_mahalanobis.heads import AutoHead, MahalanobisHead
from fewshot_mahalanobis.rejection import Look, outlier_score, output_labels, predict_or_reject
from fewshot_mahalanobis.transduction import transductive_logits


class MahalanobisClassifier(ClassifierMixin, BaseEstimator):
    """Nearest class mean under regularised Mahalanobis distances.

    It suits few examples in many dimensions; a class of one example will do. By default all settings are chosen on the
    training examples. ``head="mahalanobis"`` is that of Simple CNAPS: the probability of class k is the softmax of
    -s (x - mu_k)^T Q_k^-1 (x - mu_k), with Q_k = lambda_k Sigma_k + (1 - lambda_k) Sigma + beta I and
    lambda_k = n_k / (n_k + 1), equations 1-3 of Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020.

    Parameters
    ----------
    beta : float or "auto", default=1.0
        Of ``head="mahalanobis"``, like ``task_covariance`` and ``scale``: weight of the identity in Q_k, > 0, in
        squared feature units. It should be of the order of a feature's variance. "auto" chooses it when fitted, by
        leaving out one training example at a time.
    head : {"auto", "mahalanobis"}, default="auto"
        :class:`~fewshot_mahalanobis.heads.AutoHead`, or the paper's head.
    task_covariance : bool, default=True
        False leaves the covariance of all classes together out: Q_k = Sigma_k + beta I.
    scale : float, default=1.0
        s > 0. It sharpens the probabilities and does not change the predictions.
    temperature : float or "auto", default=1.0
        T > 0: the probabilities are the softmax of the logits divided by T. "auto" fits it to training examples that
        are left out one at a time; where no class has two of them, it is 1.
    unknown_label : str or number, optional
        What ``predict`` answers for a query that is too foreign to every class. It is no class, and of the labels'
        type. Needs a class of two examples.
    false_rejection_rate : float, default=0.05
        Share of the queries of known classes that get ``unknown_label`` by mistake, in (0, 1). With n training examples
        the smallest that can be had is 1 / (n + 1).

    Attributes
    ----------
    classes_ : ndarray of shape (k,)
        Labels seen so far, sorted.
    class_counts_ : ndarray of shape (k,)
        Training examples of each class.
    means_ : ndarray of shape (k, d)
        Class means.
    beta_ : float
        ``beta``, or what was chosen.
    temperature_ : float
        ``temperature``, or what "auto" chose.
    threshold_ : float or None
        ``predict`` answers ``unknown_label`` where :meth:`outlier_score` is above it; None without ``unknown_label``.
    n_features_in_ : int
        Feature width d.
    feature_names_in_ : ndarray of shape (d,)
        Column names, where ``X`` has them and all are strings.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> MahalanobisClassifier().fit(X[::10], y[::10]).predict(X[5:6])
    array([0])
    """

    def __init__(
        self,
        beta: float | str = 1.0,
        *,
        head: str = "auto",
        task_covariance: bool = True,
        scale: float = 1.0,
        temperature: float | str = 1.0,
        unknown_label: Any = None,
        false_rejection_rate: float = 0.05,
    ) -> None:
        self.beta = beta
        self.head = head
        self.task_covariance = task_covariance
        self.scale = scale
        self.temperature = temperature
        self.unknown_label = unknown_label
        self.false_rejection_rate = false_rejection_rate

    def fit(self, X: ArrayLike, y: ArrayLike) -> MahalanobisClassifier:
        """Fit the Gaussian of each class.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
            Labels of any type.

        Raises
        ------
        ValueError
            On invalid data or parameters. The estimator is then as it was.

        Warns
        -----
        UserWarning
            ``false_rejection_rate`` is smaller than so few examples can guarantee.
        """
        fresh = copy(self)
        features, labels = validate_data(fresh, X, y, dtype=np.float64)
        check_classification_targets(labels)
        return self._become(fresh, features, labels, allowed=None)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> MahalanobisClassifier:
        """Add examples, of known or new classes: equal to ``fit`` on all examples given so far.

        The examples are kept for that, as Sigma and the class covariances need them.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        classes : array-like, optional
            Every label that may ever occur, remembered by later calls; ``classes_`` holds those that have occurred.
            If no call names them, any label may occur.

        Raises
        ------
        ValueError
            On invalid data, a label outside ``classes``, or ``classes`` other than an earlier call's. The estimator
            is then as it was.
        """
        fresh = copy(self)
        first = not hasattr(self, "classes_")
        features, labels = validate_data(fresh, X, y, dtype=np.float64, reset=first)
        check_classification_targets(labels)
        allowed = None if first else self._allowed
        if classes is not None:
            named = unique_labels(classes)
            if allowed is not None and not np.array_equal(named, allowed):
                raise ValueError(f"classes are {named.tolist()}, but an earlier partial_fit named {allowed.tolist()}")
            allowed = named
        if not first:
            unique_labels(self._labels, labels)  # raises where strings would meet numbers
            features, labels = np.concatenate([self._features, features]), np.concatenate([self._labels, labels])
        if allowed is not None and len(unknown := np.setdiff1d(labels, allowed)):
            raise ValueError(f"label {unknown.tolist()[0]!r} is not among the classes {allowed.tolist()}")
        return self._become(fresh, features, labels, allowed)

    def _become(
        self,
        fresh: MahalanobisClassifier,
        features: NDArray[np.float64],
        labels: NDArray[Any],
        allowed: NDArray[Any] | None,
    ) -> MahalanobisClassifier:
        """Fit ``fresh``, a copy of this estimator, and take its place: an error leaves this one untouched."""
        fresh._features, fresh._labels, fresh._allowed = np.array(features), np.array(labels), allowed
        fresh.classes_, indices, fresh.class_counts_ = np.unique(labels, return_inverse=True, return_counts=True)
        fresh._output_labels = output_labels(fresh.classes_, self.unknown_label)
        support, targets = torch.from_numpy(fresh._features), torch.tensor(indices, dtype=torch.int64)
        if self.head == AutoHead.name:
            if (self.beta, self.task_covariance, self.scale) != (1.0, True, 1.0):
                raise ValueError(
                    'beta, task_covariance and scale are settings of head="mahalanobis"; head="auto" chooses its own'
                )
            fresh._head = AutoHead(choose_means_settings(support, targets))
            fresh._state = fresh._head.fit(support, targets)
            gaussians = fresh._state.gaussians
        elif self.head == MahalanobisHead.name:
            covariance = RegularizedCovariance(self.beta, self.task_covariance)
            fresh._head = MahalanobisHead(covariance.with_chosen_settings(support, targets), self.scale)
            fresh._state = gaussians = fresh._head.fit(support, targets)
        else:
            raise ValueError(f'head must be "auto" or "mahalanobis", got {self.head!r}')
        fresh.means_, fresh.beta_ = fresh._state.means.numpy(), gaussians.beta
        fresh.temperature_, fresh.threshold_, _ = calibrate(
            [Look(fresh._head, support)],
            targets,
            temperature=self.temperature,
            false_rejection_rate=self.false_rejection_rate,
            reject=self.unknown_label is not None,
        )
        self.__dict__ = fresh.__dict__
        return self

    def _logits(self, X: ArrayLike, transductive: bool = False) -> torch.Tensor:
        check_is_fitted(self)
        queries = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))
        if not transductive:
            return self._head.logits(self._state, queries)
        labels = torch.from_numpy(np.searchsorted(self.classes_, self._labels))
        support = torch.from_numpy(self._features)
        return transductive_logits(self._head, self._state, support, labels, queries, self.temperature_)

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Logits (n, k), for the paper's head -s (x - mu_k)^T Q_k^-1 (x - mu_k).

        Of two classes second minus first, shape (n,).
        """
        logits = self._logits(X).numpy()
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def outlier_score(self, X: ArrayLike) -> NDArray[np.float64]:
        """How foreign each row is to all classes, shape (n,): s times the squared distance to the nearest class mean.

        Larger is more foreign. Defined without ``unknown_label`` too.
        """
        return outlier_score([self._logits(X)]).numpy()

    def predict(self, X: ArrayLike, *, transductive: bool = False) -> NDArray[Any]:
        """Label of the nearest class for each row, shape (n,), or ``unknown_label`` where even that is too far.

        Each row is classified on its own, with ``transductive`` after all have refined the classes (page "Many queries
        at once").
        """
        logits = self._logits(X)
        refined = self._logits(X, transductive) if transductive else logits
        return self._output_labels[predict_or_reject(refined, outlier_score([logits]), self.threshold_)]

    def predict_proba(self, X: ArrayLike, *, transductive: bool = False) -> NDArray[np.float64]:
        """Probability of each known class (equation 1, at the temperature), shape (n, k), in ``classes_``'s order."""
        return (self._logits(X, transductive) / self.temperature_).softmax(dim=1).numpy()

    def predict_log_proba(self, X: ArrayLike, *, transductive: bool = False) -> NDArray[np.float64]:
        """Logarithms of the probabilities, shape (n, k); finite where a probability rounds to zero."""
        return (self._logits(X, transductive) / self.temperature_).log_softmax(dim=1).numpy()
