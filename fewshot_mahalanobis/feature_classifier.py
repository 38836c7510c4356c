"""The Mahalanobis classifier of Simple CNAPS for any feature vectors, as a scikit-learn estimator."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import validate_data

from fewshot_mahalanobis.gaussians.support import class_means
from fewshot_mahalanobis.heads import PAPER_SETTINGS, AutoHead, Head, MahalanobisHead, make_head
from fewshot_mahalanobis.plain import snapshot
from fewshot_mahalanobis.support_set.copies import checked_groups, equal_rows, group_names, once_each
from fewshot_mahalanobis.support_set.estimator import FittedHeadMixin
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.labels import allowed_classes, joined_labels, label_array


class _Fitted(NamedTuple):
    """What ``fit`` learns. ``partial_fit`` makes another one."""

    columns: BaseEstimator  # width and names of the columns of X, where scikit-learn's validate_data writes them
    fitted_head: FittedHead
    allowed: NDArray[Any] | None  # every class that may occur, if partial_fit named them

    def with_head(self, fitted_head: FittedHead) -> _Fitted:
        """The same with another head."""
        return _Fitted(self.columns, fitted_head, self.allowed)


class MahalanobisClassifier(FittedHeadMixin, BaseEstimator):
    """Nearest class mean under regularised Mahalanobis distances.

    It suits few examples in many dimensions; a class may have a single example. By default all settings are chosen on
    the training examples. ``head="mahalanobis"`` is the head of Simple CNAPS: the probability of class k is the softmax
    of -s (x - mu_k)^T Q_k^-1 (x - mu_k), with Q_k = lambda_k Sigma_k + (1 - lambda_k) Sigma + beta I and
    lambda_k = n_k / (n_k + 1), equations 1-3 of Bateni et al., "Improved Few-Shot Visual Classification", CVPR 2020.

    Parameters
    ----------
    beta : float or "auto", optional
        Weight of the identity in Q_k, > 0, in squared feature units. It should be of the order of a feature's variance.
        "auto" chooses it by leaving out one training example at a time. By default 1 with ``head="mahalanobis"``.
        ``beta``, ``task_covariance`` and ``scale`` are settings of the paper's head: giving one of them selects it.
    head : str or Head, default="auto"
        "auto" is :class:`~fewshot_mahalanobis.heads.AutoHead`, or the paper's head if one of its settings is given.
        "mahalanobis" is the paper's head. Also "euclidean", "manhattan", "cosine" and "dot_product", or a head object.
    task_covariance : bool, optional
        False leaves out the covariance of all classes together: Q_k = Sigma_k + beta I. By default True.
    scale : float, optional
        s > 0. It sharpens the probabilities and does not change the predictions. By default 1.
    temperature : float or "auto", default=1.0
        T > 0: the probabilities are the softmax of the logits divided by T. "auto" fits it to training examples that
        are left out one at a time. It is 1 if no class has two examples.
    priors : array-like of shape (k,), mapping of label to share, or "equal", optional
        Shares of the classes among the queries, by which probabilities and labels follow Bayes' rule; an array is in
        the order of ``classes_``. By default they are those estimated among the ``unlabelled`` examples of ``fit``, and
        equal without any, whatever the numbers of training examples: unlike LinearDiscriminantAnalysis, which takes
        them from those.
    unknown_label : str or number, optional
        Label that ``predict`` gives to a query too far from every class, of their labels' type. At least one class
        needs two examples; a single class is enough. Those that have this label in ``fit`` and ``partial_fit`` are
        examples of no class, which need not look alike: queries like them are rejected.
    false_rejection_rate : float, default=0.05
        Share of the queries of known classes that get ``unknown_label`` by mistake, in (0, 1). With n training examples
        the smallest possible share is 1 / (n + 1). With examples of no class it may be up to twice as large, as far as
        fewer of them are taken for known classes. ``set_params`` changes it without another fit.

    Attributes
    ----------
    classes_ : ndarray of shape (k,)
        Labels seen so far, sorted.
    class_counts_ : ndarray of shape (k,)
        Training examples of each class.
    means_ : ndarray of shape (k, d)
        Class means.
    beta_ : float or None
        ``beta``, or what was chosen; None for heads without it.
    temperature_ : float
        ``temperature``, or what "auto" chose.
    priors_ : ndarray of shape (k,)
        The shares in force, with sum one.
    threshold_ : float or None
        ``predict`` gives ``unknown_label`` where :meth:`outlier_score` is above it; None without ``unknown_label``.
    false_rejection_interval_ : (float, float) or None
        Where the share of queries of known classes that are rejected lies with probability 0.9.
    fitted_head_ : FittedHead
        The head fitted to the training examples, with its calibration.
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

    _fitted: _Fitted

    def __init__(
        self,
        beta: float | str | None = None,
        *,
        head: str | Head[Any] = "auto",
        task_covariance: bool | None = None,
        scale: float | None = None,
        temperature: float | str = 1.0,
        priors: Any = None,
        unknown_label: Any = None,
        false_rejection_rate: float = 0.05,
    ) -> None:
        self.beta = beta
        self.head = head
        self.task_covariance = task_covariance
        self.scale = scale
        self.temperature = temperature
        self.priors = priors
        self.unknown_label = unknown_label
        self.false_rejection_rate = false_rejection_rate

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        groups: Iterable[Any] | None = None,
        unlabelled: ArrayLike | None = None,
        unlabelled_groups: Iterable[Any] | None = None,
    ) -> MahalanobisClassifier:
        """Fit the Gaussian of each class.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
            Labels of any type.
        groups : sequence of n strings or numbers, optional
            Examples of one group, such as copies or frames of one video, are left out together where settings,
            temperature and threshold are chosen by leaving examples out; each group counts once. A group may have
            examples of several classes. By default, examples of one class with equal features are a group, if the
            features are not of a kind that is often equal by chance.
        unlabelled : array-like of shape (m, d), optional
            Examples without a label. They show where the classes lie, how many examples each has (``priors_``) and how
            far those of one class spread. They need not be of all classes, and some may be of none; equal ones count
            once. Of more than 2,000 only 2,000, evenly spread, are used, with a warning. For the heads "auto" and
            "mahalanobis".
        unlabelled_groups : sequence of m strings or numbers, optional
            Unlabelled examples of one group, such as frames of one burst, count once, by their mean, and not at all if
            one of them is a labelled example. They are groups of their own, whatever ``groups`` are called.

        Raises
        ------
        ValueError
            On invalid data or parameters. The estimator is then as it was.

        Warns
        -----
        UserWarning
            ``false_rejection_rate`` is smaller than so few examples can guarantee, or examples are copies; those in
            different classes are named.
        """
        self._fitted = snapshot(self)._fit(X, y, None, groups, unlabelled, unlabelled_groups, None)
        return self

    def predict(self, X: ArrayLike, *, transductive: bool = False, groups: Iterable[Any] | None = None) -> NDArray[Any]:
        """Predict the labels of queries.

        Parameters
        ----------
        X : array-like of shape (m, d)
            As for ``fit``.
        transductive : bool, default=False
            Learn from all m of them as unlabelled examples first, in the place of those of ``fit``, for this call
            alone: see the page "Unlabelled pictures". Labels then depend on the other queries.
        groups : sequence of m strings or numbers, optional
            Queries of one group, such as frames of one burst, share a label, by the probabilities of
            :meth:`predict_proba` and their mean outlier score.

        Returns
        -------
        ndarray of shape (m,)
            Labels of the type given to ``fit``. A query whose :meth:`outlier_score` is above ``threshold_`` gets
            ``unknown_label``.

        Raises
        ------
        ValueError
            On invalid data.
        """
        return self._snapshot()._predict(X, transductive, group_names(groups))

    def _predict(self, X: ArrayLike, transductive: bool, groups: list[Any] | None) -> NDArray[Any]:
        """Return what ``predict`` does. ``self`` is a :func:`snapshot`."""
        head, batches = self._head_for(self._query_features(X, "predict"), transductive, groups)
        return head.output_labels[head.decide(batches, groups).indices.cpu().numpy()]

    def _query_features(self, X: ArrayLike, method: str, *, for_outliers: bool = False) -> Iterator[Features]:
        checked = validate_data(self, X, dtype=np.float64, reset=False)
        yield Features(torch.tensor(checked, device="cpu"))

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        groups: Iterable[Any] | None = None,
        unlabelled: ArrayLike | None = None,
        unlabelled_groups: Iterable[Any] | None = None,
    ) -> MahalanobisClassifier:
        """Add examples, of known or new classes: equal to ``fit`` on all examples given so far.

        The examples are kept for that, as Sigma and the class covariances need them.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        classes : array-like, optional
            Every label that may ever occur, remembered by later calls and in files; ``classes_`` holds those that have
            occurred. If no call names them, any label may occur.
        groups : sequence of n strings or numbers, optional
            As for ``fit``; equal groups of different calls are one.
        unlabelled : array-like of shape (m, d), optional
            As for ``fit``; they join those of earlier calls, of which an example that has got a label is left out.
        unlabelled_groups : sequence of m strings or numbers, optional
            As for ``fit``, for the examples of this call.

        Raises
        ------
        ValueError
            On invalid data, a label outside ``classes``, or ``classes`` other than an earlier call's. The estimator
            is then as it was.
        """
        now = snapshot(self)
        self._fitted = now._fit(X, y, classes, groups, unlabelled, unlabelled_groups, getattr(now, "_fitted", None))
        return self

    def _fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None,
        groups: Iterable[Any] | None,
        unlabelled: ArrayLike | None,
        unlabelled_groups: Iterable[Any] | None,
        fitted: _Fitted | None,
    ) -> _Fitted:
        """Return what ``fit`` learns, or ``partial_fit`` after what was ``fitted``. ``self`` is a :func:`snapshot`."""
        # 1. Check the settings, the examples and their labels; earlier examples come first.
        self._check_params()
        head, allowed = self._head(), allowed_classes(classes, fitted and fitted.allowed)
        columns, x, labels = self._checked(X, y, fitted)
        features, names = Features(torch.tensor(x, device="cpu")), checked_groups(groups, len(labels))
        before, earlier = None, 0
        if fitted is not None:
            before = self.fitted_head_
            unique_labels(before.support_labels, labels)  # raises where strings would meet numbers
            old, earlier_labels, earlier_names = self._earlier(before)
            features, earlier = Features.joined([old, features]), len(earlier_labels)
            labels, names = joined_labels(earlier_labels, labels), earlier_names + names
        labelled = self._labelled(labels, names, allowed, earlier)
        self._check_unlabelled(head, unlabelled, unlabelled_groups)

        # 2. Fit the head, to unlabelled examples too.
        pool = None if unlabelled is None else self._pool(unlabelled, unlabelled_groups, columns, features.adapted)
        copies = equal_rows(features.adapted)
        fitted_head = self._fit_head(head, features, labelled, copies, pool, "example {}".format, before)
        return _Fitted(columns, fitted_head, allowed)

    def _pool(
        self, unlabelled: ArrayLike, groups: Iterable[Any] | None, columns: BaseEstimator, features: torch.Tensor
    ) -> torch.Tensor:
        """Unlabelled examples (m, d) that differ from the ``features`` (n, d) and from each other."""
        try:
            checked = validate_data(columns, unlabelled, dtype=np.float64, reset=False, estimator=self)
        except ValueError as error:
            raise ValueError(f"unlabelled: {error}") from error
        some, names = self._some_unlabelled(len(checked), groups)
        pool = torch.from_numpy(checked[some])
        return once_each(pool, len(features), equal_rows(torch.cat([features, pool])), names)

    def _checked(
        self, X: ArrayLike, y: ArrayLike, fitted: _Fitted | None = None
    ) -> tuple[BaseEstimator, NDArray[np.float64], NDArray[Any]]:
        """Columns, features (n, d) and labels (n,), which fit each other and the columns of what was ``fitted``."""
        checks: dict[str, Any] = {"dtype": np.float64, "estimator": self}  # the one that messages name
        if fitted is None:
            columns = BaseEstimator()
            features, labels = validate_data(columns, X, label_array(y), **checks)
        else:
            columns = fitted.columns
            features, labels = validate_data(self, X, label_array(y), reset=False, **checks)
        check_classification_targets(labels)
        return columns, features, labels

    def _head(self) -> Head[Any]:
        given = {"beta": self.beta, "task_covariance": self.task_covariance, "scale": self.scale}
        given = {name: value for name, value in given.items() if value is not None}
        named = MahalanobisHead.name if given and self.head == AutoHead.name else self.head
        if given and named != MahalanobisHead.name:
            raise ValueError(f'{", ".join(given)}: settings of head="mahalanobis", not of {self.head!r}')
        return make_head(named, {**PAPER_SETTINGS, **given})

    # ---------------------------------------------------------------- saving, loading, export

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted classifier to one safetensors file, which loads without pickle.

        It has the training examples and the settings. An existing file is replaced, whole or not at all. ValueError if
        ``head`` has learned weights or is of a class of your own (pickling keeps any head), OSError if the file cannot
        be written.
        """
        from fewshot_mahalanobis.checkpoints.classifier_file import write_feature_classifier

        write_feature_classifier(*self._snapshot()._state(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MahalanobisClassifier:
        """Read a classifier that :meth:`save` wrote.

        Raises
        ------
        ValueError
            The file is of another kind, of a newer version or damaged. FileNotFoundError if it is absent.
        """
        from fewshot_mahalanobis.checkpoints.classifier_file import read_feature_classifier

        return cls._of(*read_feature_classifier(path))

    def export_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted classifier as one ONNX file, in float32, replacing any file at ``path``.

        The input "features" is float32 (n, d). The outputs are "probabilities" (n, k), "label" (n,), indices into the
        property "labels", which has the unknown label too, and "outlier_score" (n,). The file's properties describe
        them; the labels of the columns are "classes", as JSON.

        Raises
        ------
        ImportError
            The packages of the extra ``onnx`` are absent.
        ValueError
            The head is of a class of your own without ``export``, or has too many numbers for a file.
        """
        from fewshot_mahalanobis.export.graph import write_head_onnx

        write_head_onnx(self._snapshot()._exported(), path)

    def _state(self) -> tuple[dict[str, Any], list[str] | None, FittedHead, NDArray[Any] | None]:
        """Constructor arguments, names of the columns, and what was fitted, for a file."""
        self._check_settings_are_fitted()
        fitted = self._fitted
        columns = getattr(fitted.columns, "feature_names_in_", None)
        names = None if columns is None else columns.tolist()
        return self.get_params(deep=False), names, self.fitted_head_, fitted.allowed

    def _exported(self) -> FittedHead:
        """What a graph is made of."""
        self._check_settings_are_fitted()
        return self.fitted_head_

    @classmethod
    def _of(
        cls,
        parameters: dict[str, Any],
        names: list[str] | None,
        fitted_head: FittedHead,
        allowed: NDArray[Any] | None,
    ) -> MahalanobisClassifier:
        self, columns = cls(**parameters), BaseEstimator()
        columns.n_features_in_ = fitted_head.support.adapted.shape[1]
        if names is not None:
            columns.feature_names_in_ = np.array(names, dtype=object)
        self._fitted = _Fitted(columns, fitted_head, allowed)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return dict(super().__getstate__())  # a copy: a first fit in another thread would change its size

    # ---------------------------------------------------------------- attributes

    @property
    def n_features_in_(self) -> int:
        """Feature width d."""
        return self._fitted.columns.n_features_in_

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """Column names, shape (d,), if ``X`` had them and all were strings."""
        return self._fitted.columns.feature_names_in_

    @property
    def means_(self) -> NDArray[np.float64]:
        """Class means, shape (k, d)."""
        head = self.fitted_head_
        return class_means(head.support.adapted, head.labels).numpy()

    @property
    def beta_(self) -> float | None:
        """``beta``, or what was chosen; None for heads without it."""
        settled = self.fitted_head_.settled
        if isinstance(settled, MahalanobisHead):
            return settled.covariance.settings.ridge
        return settled.settings.beta if isinstance(settled, AutoHead) and settled.settings else None
