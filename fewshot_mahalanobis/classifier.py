"""A scikit-learn classifier over images, by Simple CNAPS.

    fit:      support images  ->  network adapted to them  ->  features (n, d)  ->  head fitted to them
    predict:  query images    ->  features (m, d)  ->  logits (m, k)  ->  label

``fit`` and ``predict`` are here. The way from images to features is
:class:`~fewshot_mahalanobis.adapted_features.AdaptedFeatures`, from features to labels
:class:`~fewshot_mahalanobis.support_set.fitted_head.FittedHead`; ``predict_proba`` and its like are in
:class:`~fewshot_mahalanobis.support_set.estimator.FittedHeadMixin`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import Subset

from fewshot_mahalanobis.adapted_features import AdaptedFeatures, FittedNetwork, features_of_batches
from fewshot_mahalanobis.checkpoints.classifier_file import ClassifierState
from fewshot_mahalanobis.heads import make_head
from fewshot_mahalanobis.images.collection import labelled_pairs
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.same_picture import same_pictures, with_small_pictures
from fewshot_mahalanobis.networks.devices import choose_dtype, device_of
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.networks.task import AdaptedNetwork, AdaptedTask
from fewshot_mahalanobis.plain import snapshot
from fewshot_mahalanobis.support_set.caller_warnings import warn_caller
from fewshot_mahalanobis.support_set.copies import chained, checked_groups, equal_rows, group_names, once_each
from fewshot_mahalanobis.support_set.estimator import FittedHeadMixin, Labelled
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.labels import (
    allowed_classes,
    checked_labels,
    joined_labels,
    label_kind,
)
from fewshot_mahalanobis.support_set.summary import SupportSummary, summarise
from fewshot_mahalanobis.support_set.unknown import SIMILARITIES


@dataclass(frozen=True, eq=False)
class _Fitted(FittedNetwork):
    """What ``fit`` learns. ``partial_fit`` makes another one."""

    fitted_head: FittedHead
    unadapted: AdaptedNetwork | None  # the network as pretrained, if the outlier score compares its features too
    allowed: NDArray[Any] | None = None  # every class that may occur, if partial_fit named them
    # First images with a class, then the others; not in files and pickles:
    pictures: torch.Tensor | None = None  # small pictures, for copies
    names: list[str | None] | None = None  # paths, or None

    @cached_property
    def task(self) -> AdaptedTask:
        """The adapted network and the fitted head."""
        return AdaptedTask(self.network, self.fitted_head, self.unadapted)

    def with_head(self, fitted_head: FittedHead) -> _Fitted:
        """The same with another head."""
        return replace(self, fitted_head=fitted_head)

    def to_state(self) -> dict[str, Any]:
        """Return what a pickle keeps, on the CPU."""
        return {**super().to_state(), "fitted_head": self.fitted_head, "allowed": self.allowed}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _Fitted:
        """Undo :meth:`to_state`, on the device that it names."""
        adapted = FittedNetwork.from_state(state)
        fitted_head = state["fitted_head"].to(adapted.device)
        compared = fitted_head.support.unadapted is not None
        unadapted = _unadapted(adapted.model, adapted.network.dtype) if compared else None
        return cls(**vars(adapted), fitted_head=fitted_head, unadapted=unadapted, allowed=state["allowed"])


def _unadapted(model: SimpleCNAPS, dtype: torch.dtype) -> AdaptedNetwork:
    """The network as pretrained."""
    return AdaptedNetwork(model.feature_extractor, None, dtype, model.projection)


class _RowsOfBatches:
    """Some rows of batches of images, by a mask of all of them, any number of times."""

    def __init__(self, batches: Iterable[torch.Tensor], chosen: NDArray[np.bool_]) -> None:
        self.batches, self.chosen = batches, torch.from_numpy(chosen)

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = 0
        for batch in self.batches:
            rows = batch[self.chosen[first : first + len(batch)]]
            first += len(batch)
            if len(rows):
                yield rows


@contextmanager
def _naming_unlabelled() -> Iterator[None]:
    """Say in the error of an image that it is an unlabelled one."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"unlabelled: {error}") from error


def _features_and_pictures(
    images: Iterable[torch.Tensor],
    batches: ImageBatches,
    network: AdaptedNetwork,
    unadapted: AdaptedNetwork | None,
    batch_size: int,
) -> tuple[Features, torch.Tensor | None]:
    """Features of the images of ``batches``, and small pictures of them (m, 3, 48, 48), in which copies are recognised.

    None in place of pictures that were read as nearly one shade, as all of these look alike.
    """
    pictures = list[torch.Tensor]()
    with closing(with_small_pictures(images, pictures)) as seen:  # after an error no thread waits to decode more
        features = Features.joined([*features_of_batches(seen, network, unadapted, batch_size, batches.memory)])
    return features, None if batches.is_narrow else torch.cat(pictures)


def _pool(
    unlabelled: ImageBatches | Features, names: list[Any] | None, network: AdaptedNetwork, examples: torch.Tensor
) -> torch.Tensor:
    """Adapted features (m, d) of unlabelled images, without those of ``examples`` (n, d), and of copies one."""
    if isinstance(unlabelled, Features):
        features, pictures = unlabelled.adapted.to(examples), None
    else:
        with _naming_unlabelled():
            (features, _), pictures = _features_and_pictures(
                unlabelled, unlabelled, network, None, unlabelled.batch_size
            )
    n, copies = len(examples), equal_rows(torch.cat([examples, features]))
    if pictures is not None:
        copies = np.concatenate([same_pictures(pictures, features) + n, copies])
    return once_each(features, n, copies, names)


def _classes_first(
    known: NDArray[np.bool_], pictures: torch.Tensor | None, names: list[str | None] | None
) -> tuple[torch.Tensor | None, list[str | None] | None]:
    """Small pictures and paths of images of classes, which are ``known``, and then of the others."""
    order = (~known).argsort(kind="stable")
    return (
        None if pictures is None else pictures[torch.from_numpy(order)],
        None if names is None else [names[index] for index in order],
    )


class SimpleCNAPSClassifier(FittedHeadMixin, AdaptedFeatures):
    """Image classifier that learns its classes from a few images each, in one forward pass.

    Fitting adapts a pretrained network to the support images by FiLM layers and describes each class by a Gaussian of
    their features; a query gets the most probable class. With the paper's head that is the class of the smallest
    Mahalanobis distance. There is no training: ``fit`` takes as long as extracting the features of the support images.

    Images are a list of file paths, bytes of files, opened files, PIL images, arrays (h, w, 3) or (h, w), tensors
    (3, h, w), parts of any of these (:class:`Region`), or a mixture, each of its own size; any other sequence of them
    with a length and ``[]``; an array (n, h, w, 3) or (n, h, w); or a tensor (n, 3, h, w) or (n, 1, h, w). Arrays and
    tensors are uint8, or float in [0, 1]. EXIF orientation and colour profile are applied, transparent pixels become
    white, and each image is resized to a square.

    The features are those of :class:`AdaptedFeatures`. The methods of prediction, which read them, are inherited from
    :class:`~fewshot_mahalanobis.support_set.estimator.FittedHeadMixin`, all but ``predict``.

    Parameters
    ----------
    checkpoint : str, path or SimpleCNAPS, default="default"
        The pretrained model: a name of :func:`available_checkpoints`, a folder, a Hub repository ("user/repo",
        optionally "@revision"), or the module itself, which is used as it is and never changed.
        :meth:`SimpleCNAPS.from_backbone` makes one of any other network.
    head : str or nn.Module, default="auto"
        How queries are classified on the adapted features. "auto" is :class:`~fewshot_mahalanobis.heads.AutoHead`,
        Gaussians whose settings are chosen on the support set; "mahalanobis" is the paper's head. Also "euclidean",
        "manhattan", "cosine", "dot_product", or "linear" (the learned classifier of CNAPS, for checkpoints trained
        with it); the checkpoint's own head, with its settings, if that has this name. Or a head object.
    adapt : bool, default=True
        False leaves the network as pretrained ("No Adaptation").
    image_size : int, optional
        Side of the square that images are resized to, in pixels; by default the checkpoint's. Smaller images take less
        time, larger ones show finer detail. The default checkpoint was trained for 128 to 288 pixels: see the page "How
        fast".
    device : str or torch.device, default="auto"
        Where the network runs; "auto" is CUDA where there is one, else the CPU.
    precision : {"auto", "float32", "bfloat16"}, default="auto"
        Precision of the convolutions. The head always computes in float64. "auto" is bfloat16 for the embedded networks
        on processors (AVX512-BF16, AMX) and CUDA devices that have it natively, else float32; see the page "How fast".
    batch_size : int, default=64
        Images processed at a time. It bounds memory; results depend on it only by rounding. ``fit`` keeps up to four
        batches, and reads the images of a larger support set twice; of up to 512 images the default checkpoint's set
        encoder keeps its first maps, 0.3 MB an image. A batch that does not fit into CUDA's memory is halved until it
        does, with a warning.
    temperature : float or "auto", default=1.0
        T > 0: the probabilities are the softmax of the logits divided by T. "auto" fits T to support images that are
        left out one at a time; it is 1 if no class has two of them.
    priors : array-like of shape (k,), mapping of label to share, or "equal", optional
        Shares of the classes among the queries, by which probabilities and labels follow Bayes' rule; an array is in
        the order of ``classes_``. By default they are those estimated among the ``unlabelled`` images of ``fit``, and
        equal without any, whatever the numbers of support images.
    unknown_label : str, int or float, optional
        Label that ``predict`` gives to an image too far from every class, of their labels' type. At least one class
        needs two support images; a single class is enough. Every image then takes a second pass, through the network
        without adaptation. Images that have this label in ``fit`` and ``partial_fit`` are examples of no class, which
        need not look alike: images like them are rejected.
    false_rejection_rate : float, default=0.05
        Share of the queries of known classes that get ``unknown_label`` by mistake, in (0, 1). The smallest that n
        support images allow is 1 / (n + 1). With examples of no class it may be up to twice as large, as far as fewer
        of them are taken for known classes. ``set_params`` changes it without another fit.
    value_range : (float, float), optional
        The values that are black and white in arrays and tensors, of support and queries alike, and in files and PIL
        images of more than 8 bits that do not declare it: (0, 4095) for a camera of 12 bits. By default 0 and 255,
        65535 (files of 16 bits) or 1 (floats), with a warning if a collection uses a small part of that.
    pages : {"first", "max", "mean"}, int or (int, int, int), optional
        Which page of a file of several is the picture, of support and queries alike: one, by its number from 0 on; the
        largest or mean values of all; or three grey ones as red, green and blue. By default a stack is an error, and of
        an animation the first frame is used, with a warning.
    bands : int, (int, int, int) or (int, int, int, int), optional
        Which bands of files, arrays and tensors are red, green and blue, or one that is grey, by their numbers from 0
        on; the fourth is opacity. By default bands that are neither colours nor opacity are an error.
    n_jobs : int, optional
        Threads that decode images, counted as in scikit-learn (-1: all cores). By default the usable cores, at most 4.
    verbose : int, default=0
        1 shows progress bars.
    memory : path, optional
        Folder in which the pictures of files, as the network reads them, and features are remembered for later calls
        and other programs: they are neither read nor computed again. It has at most 2 GB, and what is no longer used
        makes room. Files and saved classifiers do not name it.

    Attributes
    ----------
    classes_ : ndarray of shape (k,)
        The labels, sorted, of the type given to ``fit``.
    class_counts_ : int64 ndarray of shape (k,)
        Support images of each class.
    n_features_out_ : int
        Width d of a feature vector; 512 for the FiLM ResNet18.
    temperature_ : float
        ``temperature``, or what "auto" chose.
    priors_ : ndarray of shape (k,)
        The shares in force, with sum one.
    threshold_ : float or None
        ``predict`` gives ``unknown_label`` where :meth:`outlier_score` is above it; None without ``unknown_label``.
    false_rejection_interval_ : (float, float) or None
        Where the share of queries of known classes that are rejected lies with probability 0.9.
    fitted_head_ : FittedHead
        The head fitted to the support set, with its calibration.
    device_ : torch.device
    model_ : SimpleCNAPS
        The pretrained model, unadapted.
    precision_ : str
        ``precision`` as it was when the classifier was fitted.
    engine_ : str
        What runs the network: "PyTorch", or "ONNX Runtime" where it is installed and faster (see the page "How fast").
    task_ : AdaptedTask
        The adapted network and the fitted head.

    References
    ----------
    Bateni, Goyal, Masrani, Wood, Sigal: Improved Few-Shot Visual Classification. CVPR 2020.

    Examples
    --------
    >>> from fewshot_mahalanobis import SimpleCNAPSClassifier
    >>> from sklearn.datasets import load_digits
    >>> digits = load_digits()
    >>> images = digits.images / 16
    >>> classifier = SimpleCNAPSClassifier().fit(images[:50], digits.target[:50])
    >>> classifier.predict(images[50:53]).shape
    (3,)
    """

    _noun = "image"
    _similarities = SIMILARITIES
    _has_twins = True
    _fitted: _Fitted

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | SimpleCNAPS = "default",
        *,
        head: str | nn.Module = "auto",
        adapt: bool = True,
        image_size: int | None = None,
        device: str | torch.device = "auto",
        precision: str = "auto",
        batch_size: int = 64,
        temperature: float | str = 1.0,
        priors: Any = None,
        unknown_label: Any = None,
        false_rejection_rate: float = 0.05,
        value_range: tuple[float, float] | None = None,
        pages: str | int | Sequence[int] | None = None,
        bands: int | Sequence[int] | None = None,
        n_jobs: int | None = None,
        verbose: int = 0,
        memory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.head = head
        self.adapt = adapt
        self.image_size = image_size
        self.device = device
        self.precision = precision
        self.batch_size = batch_size
        self.temperature = temperature
        self.priors = priors
        self.unknown_label = unknown_label
        self.false_rejection_rate = false_rejection_rate
        self.value_range = value_range
        self.pages = pages
        self.bands = bands
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.memory = memory

    def fit(
        self,
        X: Any,
        y: ArrayLike | None = None,
        groups: Iterable[Any] | None = None,
        unlabelled: Any = None,
        unlabelled_groups: Iterable[Any] | None = None,
    ) -> SimpleCNAPSClassifier:
        """Adapt to a support set and return the classifier itself. After an error it is what it was before.

        Parameters
        ----------
        X : collection of n images
            The support set, in any order. Or, without ``y``, a map-style dataset of (image, label) pairs with its
            ``classes``, such as torchvision's ``ImageFolder`` or a ``Subset`` of one. Its pairs count, not ``targets``.
        y : array-like of shape (n,)
            Labels: strings, or numbers of one type (integers, Booleans, whole floats); at least two different ones, or
            one with ``unknown_label``.
        groups : sequence of n strings or numbers, optional
            Images of one group, such as frames of one video or pictures of one object, are left out together where
            threshold, temperature and settings are chosen by leaving images out; each group counts once. A group may
            have images of several classes. By default copies are recognised and form groups: the same image of a class
            again, compressed, mirrored or slightly cropped; and so do the regions of one photograph. A UserWarning says
            how many copies there are, and another one names those that are in different classes.
        unlabelled : collection of m images, optional
            Images without a label, such as all others of a folder. They show where the classes lie, how many of each
            there are (``priors_``) and how far images of one class spread. They need not be of all classes, and some
            may be of none; copies count once. The network is adapted to ``X`` alone. Of more than 2,000 images
            only 2,000, evenly spread, are used, with a warning. For the heads "auto" and "mahalanobis"; one class alone
            learns nothing from them.
        unlabelled_groups : sequence of m strings or numbers, optional
            Unlabelled images of one group, such as frames of one burst, count once, by their mean, and not at all if
            one of them is a labelled image. They are groups of their own, whatever ``groups`` are called.

        Raises
        ------
        ValueError
            An image or a label cannot be used (the message names it;
            :class:`~fewshot_mahalanobis.images.errors.ImageError` for images), their numbers differ, there is only one
            class and no ``unknown_label``, ``priors`` do not fit the classes, or a constructor argument is unknown. A
            UserWarning says so if ``false_rejection_rate`` is smaller than so few support images allow.
        """
        if y is None and (pairs := labelled_pairs(X)) is not None:
            X, y = pairs
        self._fitted = snapshot(self)._fit(X, y, groups, unlabelled, unlabelled_groups, None)
        return self

    def _fit(
        self,
        X: Any,
        y: ArrayLike | None,
        groups: Iterable[Any] | None,
        unlabelled: Any,
        unlabelled_groups: Iterable[Any] | None,
        allowed: NDArray[Any] | None,
    ) -> _Fitted:
        """Return what ``fit`` learns. ``self`` is a copy, whose settings no other thread changes."""
        # 1. Check the settings, and load the pretrained model, on its device.
        self._check_params()
        model, batches = self._model_and_batches(X)
        head = make_head(self.head, model.config, model.head).to(device_of(model))

        # 2. Check labels and groups: what is wrong is found before the network runs.
        labels = checked_labels(y, batches.n_images)
        names = batches.photographs() if groups is None else checked_groups(groups, batches.n_images)
        labelled = self._labelled(labels, names, allowed)
        self._check_tells_apart(labelled, allowed)
        self._check_unlabelled(head, unlabelled, unlabelled_groups)
        others = None if unlabelled is None else self._unlabelled_batches(unlabelled, unlabelled_groups, model)

        # 3. Adapt the network to the images of classes.
        dtype = choose_dtype(self.precision, model.feature_extractor)
        images = batches.several_times(dtype)
        shown = images if labelled.known.all() else _RowsOfBatches(images, labelled.known)
        network, batch_size = self._adapted_network(model, shown, dtype, batches.batch_size)
        unadapted = _unadapted(model, dtype) if self.unknown_label is not None and network.film else None

        # 4. Features of all images, and the copies among them.
        features, pictures = _features_and_pictures(images, batches, network, unadapted, batch_size)
        copies = np.empty((0, 2), np.int64) if pictures is None else same_pictures(pictures, features.adapted)
        pool = None if others is None else _pool(*others, network, features.adapted)

        # 5. Fit the head.
        fitted_head = self._fit_head(head, features, labelled, copies, pool, batches.name)
        pictures, paths = _classes_first(labelled.known, pictures, batches.names())
        return _Fitted(network.device, model, self.precision, network, fitted_head, unadapted, allowed, pictures, paths)

    def _unlabelled_batches(
        self, unlabelled: Any, groups: Iterable[Any] | None, model: SimpleCNAPS
    ) -> tuple[ImageBatches | Features, list[Any] | None]:
        """Unlabelled images, or Features of them, to learn from, and the names of their groups."""
        if isinstance(unlabelled, Features):
            some, names = self._some_unlabelled(len(unlabelled.adapted), groups)
            return unlabelled.rows_where(some), names
        with _naming_unlabelled():
            batches = self._batches(unlabelled, model.image_size, device_of(model), "unlabelled")
            some, names = self._some_unlabelled(batches.n_images, groups)
            if len(some) < batches.n_images:
                images: Subset[Any] = Subset(batches.images, some.tolist())
                batches = self._batches(images, model.image_size, device_of(model), "unlabelled")
        return batches, names

    def _check_params(self) -> None:
        AdaptedFeatures._check_params(self)
        FittedHeadMixin._check_params(self)

    def _check_tells_apart(self, labelled: Labelled, allowed: NDArray[Any] | None) -> None:
        """Raise ValueError if there is one class alone, and nothing to tell it from."""
        several = len(np.unique(labelled.labels)) > 1 or (allowed is not None and len(allowed) > 1)
        if self.unknown_label is None and not several:
            raise ValueError(
                f"fit needs at least two classes to tell apart; every label is {labelled.labels.tolist()[0]!r}. To "
                "tell this class from everything else, set unknown_label (on the command line --unknown-label). A "
                "stream that begins with one class names all of them: partial_fit(X, y, classes=...)"
            )

    def predict(self, X: Any, *, transductive: bool = False, groups: Iterable[Any] | None = None) -> NDArray[Any]:
        """Predict the labels of images.

        Parameters
        ----------
        X : collection of m images
            As for ``fit``, or what :meth:`features` returned. They are processed and dropped batch by batch.
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
            An image cannot be used. The message names it.
        """
        return self._snapshot()._predict(X, transductive, group_names(groups))

    def _predict(self, X: Any, transductive: bool, groups: list[Any] | None) -> NDArray[Any]:
        """Return what ``predict`` does. ``self`` is a copy, as for ``_fit``."""
        # 1. Features, batch by batch, by the network as it was adapted.
        queries = self._query_features(X, "predict", for_outliers=True)
        # 2. The fitted head; if asked, it learns from the queries first.
        head, batches = self._head_for(queries, transductive, groups)
        # 3. The class of the largest logit, or the unknown label where the outlier score is above the threshold.
        return head.output_labels[head.decide(batches, groups).indices.cpu().numpy()]

    def _query_features(self, X: Any, method: str, *, for_outliers: bool = False) -> Iterator[Features]:
        if isinstance(X, Features):
            return iter([self._own(X)])
        batches, fitted = self._query_batches(X, method), self._fitted
        unadapted = fitted.unadapted if for_outliers else None
        return features_of_batches(batches, fitted.network, unadapted, batches.batch_size, batches.memory)

    def _queries_and_copies(self, X: Any, method: str) -> tuple[Features, NDArray[np.int64]]:
        if isinstance(X, Features):
            return super()._queries_and_copies(X, method)
        batches = self._query_batches(X, method)
        features, pictures = _features_and_pictures(
            batches, batches, self._fitted.network, self._fitted.unadapted, batches.batch_size
        )
        x = features.adapted
        return features, equal_rows(x) if pictures is None else same_pictures(pictures, x)

    def partial_fit(
        self,
        X: Any,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        groups: Iterable[Any] | None = None,
        unlabelled: Any = None,
        unlabelled_groups: Iterable[Any] | None = None,
    ) -> SimpleCNAPSClassifier:
        """Add support images of known or new classes.

        The network stays adapted as by the first ``fit``; the result is that of one fit to all support images so far
        under that adaptation. ``classes_`` stays sorted, so columns of the logits may move. Before ``fit`` this is
        ``fit``, so let the first images show what the task is like.

        Parameters
        ----------
        X : collection of n images, or Features
            Or what :meth:`features` returned for them.
        y : array-like of shape (n,)
            Labels, of the type given to ``fit``.
        classes : array-like, optional
            Every label that may ever occur, remembered by later calls and in files; ``classes_`` holds those that have
            occurred. If no call names them, any label may occur, and the first call needs two classes, or one with
            ``unknown_label``.
        groups : sequence of n strings or numbers, optional
            As for ``fit``; equal groups of different calls are one. Without them new images are compared with all
            images so far; after :meth:`load`, copies of earlier images are recognised only if they are the same again.
        unlabelled : collection of m images, or Features, optional
            As for ``fit``; they join those of earlier calls, of which an image that has got a label is left out.
        unlabelled_groups : sequence of m strings or numbers, optional
            As for ``fit``, for the images of this call.

        Raises
        ------
        ValueError
            As ``fit``; a label is of another type than before or none of ``classes``, or these are not those of an
            earlier call. The fitted state is kept.
        """
        self._fitted = snapshot(self)._fit_more(X, y, classes, groups, unlabelled, unlabelled_groups)
        return self

    def _fit_more(
        self,
        X: Any,
        y: ArrayLike,
        classes: ArrayLike | None,
        groups: Iterable[Any] | None,
        unlabelled: Any,
        unlabelled_groups: Iterable[Any] | None,
    ) -> _Fitted:
        """Return what ``partial_fit`` learns. ``self`` is a copy, as for ``_fit``."""
        fitted = getattr(self, "_fitted", None)
        allowed = allowed_classes(classes, fitted and fitted.allowed)
        if fitted is None:
            return self._fit(X, y, groups, unlabelled, unlabelled_groups, allowed)

        # 1. Check settings, labels and groups; earlier examples come first.
        self._check_params()
        before, network, unadapted = self.fitted_head_, fitted.network, fitted.unadapted
        batches = None if isinstance(X, Features) else self._query_batches(X, "partial_fit")
        n = len(X.adapted) if batches is None else batches.n_images
        added = checked_labels(y, n)
        kind, known = label_kind(added.tolist()[0]), label_kind(before.classes.tolist()[0])
        if kind != known:
            raise ValueError(
                f"label {added.tolist()[0]!r} is a {kind}, but the classifier was fitted to labels of type {known}"
            )
        old, earlier_labels, earlier_names = self._earlier(before)
        earlier, labels = len(earlier_labels), joined_labels(earlier_labels, added)
        photographs = [None] * n if batches is None else batches.photographs(earlier)
        names = earlier_names + (photographs if groups is None else checked_groups(groups, n))
        labelled = self._labelled(labels, names, allowed, earlier)
        self._check_unlabelled(before.head, unlabelled, unlabelled_groups)
        others = None if unlabelled is None else self._unlabelled_batches(unlabelled, unlabelled_groups, fitted.model)

        # 2. Features of the new images by the network as it was adapted, and the copies among all.
        if self.unknown_label is None:
            unadapted, old = None, Features(old.adapted)
        elif unadapted is None and network.film is not None:
            warn_caller(
                "unknown_label was set after fit, which kept no features of the network without adaptation: unknown "
                "images are recognised by adapted features alone. To compare both, fit again to all support images"
            )
        if batches is None:
            new, seen = self._own(X), None
        else:
            new, seen = _features_and_pictures(batches, batches, network, unadapted, batches.batch_size)
        features = Features.joined([old, Features(new.adapted) if unadapted is None else new])
        pictures, copies = self._copies(seen, features.adapted, earlier)
        if batches is not None and batches.is_narrow:
            pictures, copies = None, copies[(copies < earlier).all(axis=1)]
        pool = None if others is None else _pool(*others, network, features.adapted)

        # 3. Fit the head to all.
        def name(index: int) -> str:
            if index < earlier:
                return f"earlier image {index}"
            return f"image {index - earlier}" if batches is None else batches.name(index - earlier)

        fitted_head = self._fit_head(before.head, features, labelled, copies, pool, name, before)
        paths = None if batches is None else batches.names()
        if paths is not None or fitted.names is not None:
            paths = [*(fitted.names or [None] * earlier)[:earlier], *(paths or [None] * n)]
        pictures, paths = _classes_first(labelled.known, pictures, paths)
        return replace(
            fitted, fitted_head=fitted_head, unadapted=unadapted, allowed=allowed, pictures=pictures, names=paths
        )

    def _copies(
        self, added: torch.Tensor | None, features: torch.Tensor, n: int
    ) -> tuple[torch.Tensor | None, NDArray[np.int64]]:
        """Small pictures of all images, n and those ``added``, and the pairs of copies by the features of all.

        A classifier that was loaded or unpickled has no pictures of earlier images, and one that was given features has
        none of those. For those it knows only the groups, and recognises a new image that has the same features.
        """
        if self._fitted.pictures is not None and added is not None:
            pictures = torch.cat([self._fitted.pictures[:n], added])
            return pictures, same_pictures(pictures, features)
        groups = self.fitted_head_.groups
        known = [equal_rows(features)] if groups is None else [equal_rows(features), chained(groups)]
        if added is not None:
            known.append(same_pictures(added, features[n:]) + n)
        return None, np.concatenate(known)

    def _own(self, features: Features) -> Features:
        """Features that this classifier's network computed, on its device."""
        own = self.fitted_head_.support
        known = features.unadapted is not None or own.unadapted is None
        if features.adapted.shape[1:] != own.adapted.shape[1:] or not known:
            raise ValueError("these features are of another classifier: compute them by the features() of this one")
        return features.to(self.device_)

    def features(self, X: Any) -> Features:
        """Features of m images, which ``predict`` and its like and ``partial_fit`` take in place of the images.

        Parameters
        ----------
        X : collection of m images

        Returns
        -------
        Features
            Adapted features (m, d) and, with ``unknown_label``, those of the network without adaptation. They hold for
            as long as the network stays adapted as it is: until the next ``fit``.
        """
        return Features.joined([*self._snapshot()._query_features(X, "features", for_outliers=True)])

    def summary(self) -> SupportSummary:
        """Examples a class, leave-one-out accuracy, confusions, and support images that look wrong; ``print`` it.

        Images that came as files are called by their paths, until the classifier is saved or pickled.
        """
        fitted = self._snapshot()._fitted
        names = fitted.names and fitted.names[: len(fitted.fitted_head.labels)]
        return replace(summarise(fitted.fitted_head, self._noun), names=names)

    # ---------------------------------------------------------------- attributes

    @property
    def task_(self) -> AdaptedTask:
        """The adapted network and the fitted head."""
        now = self._snapshot()
        task, head = now._fitted.task, now.fitted_head_
        return task if task.fitted_head is head else AdaptedTask(task.network, head, now._fitted.unadapted)

    # ---------------------------------------------------------------- saving, loading, sharing, export

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted classifier to one safetensors file, which loads without a checkpoint and without pickle.

        It has the pretrained weights, as float16 where that is lossless, the FiLM parameters and the support features.
        An existing file is replaced, whole or not at all. ValueError if ``head`` is a ``LinearHead`` or of a class of
        your own (pickling keeps any head), OSError if the file cannot be written.
        """
        from fewshot_mahalanobis.checkpoints.classifier_file import write_classifier

        write_classifier(self._snapshot()._state(), path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device = "auto",
        *,
        backbone: SimpleCNAPS | nn.Module | None = None,
    ) -> SimpleCNAPSClassifier:
        """Read a classifier that :meth:`save` wrote, on this or another device.

        Parameters
        ----------
        path : path
        device : str or torch.device, default="auto"
            Where it is to run.
        backbone : nn.Module or SimpleCNAPS, optional
            The network of a classifier on a module given to :meth:`SimpleCNAPS.from_backbone`, as the file has its
            weights but not its code: the module, or a model made of it. A copy is used.

        Raises
        ------
        ValueError
            The file is of another kind, of a newer version or damaged, or ``backbone`` is missing, not needed or
            another network. FileNotFoundError if it is absent; ImportError if timm is, and the network is one of it.
        """
        from fewshot_mahalanobis.checkpoints.classifier_file import read_classifier

        return cls._of(read_classifier(path, device, backbone))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        thumbnails: tuple[Any, ArrayLike] | None = None,
    ) -> str:
        """Put the fitted classifier into a repository of the Hugging Face Hub; returns the address of the commit.

        The model card has the classes, their numbers of support images, the settings and the leave-one-out accuracy.
        Support images are not shared, except for ``thumbnails``.

        Parameters
        ----------
        repo_id : str
            ``"user/repo"``; made if it is absent.
        private : bool, optional
            Visibility of a new repository; default: the account's setting.
        token : str or bool, optional
            With write permission; default: that of ``hf auth login``.
        thumbnails : (X, y), optional
            Images and their labels, as for ``fit``: the card shows everyone who sees the repository the first five of
            each class, at 84 x 84 pixels and without their files' metadata.

        Raises
        ------
        ValueError
            ``head`` cannot be saved (see :meth:`save`), or a thumbnail or its label cannot be used; UploadError if the
            repository cannot be written, which then is what it was.
        """
        from fewshot_mahalanobis.checkpoints.card import push_classifier

        now = self._snapshot()
        return push_classifier(repo_id, now._state(), now.summary(), thumbnails, private=private, token=token)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        device: str | torch.device = "auto",
        token: str | bool | None = None,
        backbone: SimpleCNAPS | nn.Module | None = None,
    ) -> SimpleCNAPSClassifier:
        """Read a classifier that :meth:`push_to_hub` put on the Hugging Face Hub.

        Parameters
        ----------
        name : str or path
            ``"user/repo"`` or ``"user/repo@revision"``, or a folder with a copy of a repository. Downloads are kept in
            ``huggingface_hub``'s cache, which serves without a connection.
        device, token, backbone : optional
            As for :meth:`load` and :meth:`push_to_hub`, with the errors of :meth:`load`; DownloadError if there is no
            such repository, revision or connection, or no fitted classifier in it.
        """
        from fewshot_mahalanobis.checkpoints.hub import pretrained_classifier

        return cls.load(pretrained_classifier(name, token=token), device, backbone=backbone)

    def export_onnx(self, path: str | os.PathLike[str], *, pixels: bool = False) -> None:
        """Write the adapted network and its fitted head as one ONNX file, in float32, replacing any file at ``path``.

        Parameters
        ----------
        path : path
        pixels : bool, default=False
            False: the input "images" is float32 (n, 3, s, s), RGB, value / 127.5 - 1, s the model's image size, and the
            output "logits" (n, k) has a column for each label. True: the input "pixels" is one picture of any size,
            uint8 (h, w, 3) or (h, w, 4); the outputs are "probabilities" (k,), "label", an index into the property
            "labels", which has the unknown label too, and "outlier_score". The file's properties describe both; the
            labels of the columns are "classes", as JSON.

        Raises
        ------
        ImportError
            The packages of the extra ``onnx`` are absent.
        ValueError
            The head is of a class of your own without ``export``, or has too many numbers for a file (a matrix for each
            class, with as many rows as support images).
        """
        from fewshot_mahalanobis.export.graph import write_onnx

        write_onnx(*self._snapshot()._exported(), path, pixels=pixels)

    def export_program(self, path: str | os.PathLike[str], *, pixels: bool = False) -> None:
        """Write the adapted network and its fitted head as one ``torch.export`` program, in float32, to a .pt2 file.

        It runs in PyTorch without this package: ``torch.export.load(path, extra_files).module()(images)`` gives the
        logits. Input, output and errors are those of :meth:`export_onnx`; its properties are the extra files.

        Parameters
        ----------
        path : path
        pixels : bool, default=False
            As for :meth:`export_onnx`.
        """
        from fewshot_mahalanobis.export.graph import write_program

        write_program(*self._snapshot()._exported(), path, pixels=pixels)

    def export_page(
        self,
        folder: str | os.PathLike[str],
        *,
        title: str = "Picture classifier",
        support: Any = None,
        runtime: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write a web page that classifies in its visitor's browser: a folder of files for any web server.

        Visitors drop pictures or use their camera, and see label, probabilities and, with ``support``, the support
        images nearest to the picture. Nothing is sent anywhere. The page can be installed as an app, and works without
        a network after the first visit.

        Parameters
        ----------
        folder : path
            Absent, empty, or with an earlier page, whose files are replaced.
        title : str, default="Picture classifier"
            Heading of the page and name of the app.
        support : collection of images, optional
            Images given to ``fit`` or ``partial_fit``, all or some of them, in any order. Every visitor can see them,
            at 84 x 84 pixels and without their files' metadata. A fitted classifier itself keeps no images.
        runtime : path, optional
            Folder with the files of the npm package onnxruntime-web, which are copied, so that the page asks no other
            server for anything. By default browsers load them from cdn.jsdelivr.net and check their digests.

        Raises
        ------
        ValueError
            As :meth:`export_onnx`; ``folder`` has other files; an image of ``support`` is none of the support set; or
            ``runtime`` is of another version. FileNotFoundError if ``runtime`` lacks a file. The message names the
            version to install.
        ImportError
            The packages of the extra ``onnx`` are absent.
        """
        from fewshot_mahalanobis.export.web_page import write_web_page

        now = self._snapshot()
        pictures = None if support is None else now._query_batches(support, "export_page")
        write_web_page(folder, *now._exported(), title=title, support=pictures, runtime=runtime)

    # ---------------------------------------------------------------- state of files

    def _state(self) -> ClassifierState:
        """Constructor arguments, model, and what was fitted, for a file."""
        self._check_settings_are_fitted()
        fitted = self._fitted
        film, parameters = fitted.network.film, self.get_params(deep=False)
        return ClassifierState(parameters, fitted.model, film, fitted.precision, self.fitted_head_, fitted.allowed)

    def _exported(self) -> tuple[SimpleCNAPS, AdaptedTask]:
        """What a graph is made of."""
        self._check_settings_are_fitted()
        return self.model_, self.task_

    @classmethod
    def _of(cls, state: ClassifierState) -> SimpleCNAPSClassifier:
        self = cls(**state.parameters)
        self._fitted = _Fitted.from_state({**vars(state), "device": device_of(state.model)})
        return self
