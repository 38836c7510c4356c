"""A scikit-learn classifier over images, by Simple CNAPS."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from tqdm.auto import tqdm

from fewshot_mahalanobis.calibration import Calibration, calibrate, check_settings
from fewshot_mahalanobis.checkpoints import load_checkpoint
from fewshot_mahalanobis.checkpoints.format import (
    check_finite,
    check_network,
    checked_settings,
    empty_model,
    filled_model,
    read_tensors,
)
from fewshot_mahalanobis.checkpoints.hub import classifier_file, hub_classifier, upload
from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance
from fewshot_mahalanobis.heads import HEADS, Head, LinearHead, MahalanobisHead
from fewshot_mahalanobis.images import ImageBatches
from fewshot_mahalanobis.networks.film import BlockFilm, Film
from fewshot_mahalanobis.networks.resnet import BLOCKS_PER_LAYER, LAYER_WIDTHS, FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import AdaptedTask, SimpleCNAPS
from fewshot_mahalanobis.onnx_export import write_onnx, write_program
from fewshot_mahalanobis.rejection import labels_to_give, nearest_or_none, outlier_score
from fewshot_mahalanobis.sharing import write_repository

Result = TypeVar("Result")

_FILE_FORMAT = "fewshot_mahalanobis.SimpleCNAPSClassifier"
_FILE_VERSION = 1


class SimpleCNAPSClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):
    """Image classifier that learns its classes from a few images each, in one forward pass.

    Fitting adapts a pretrained ResNet18 to the support images by FiLM layers and describes each class by a
    Gaussian of their adapted features; a query goes to the class of the smallest Mahalanobis distance.
    There is no training: ``fit`` takes as long as extracting the features of the support images.

    Wherever a method takes images, they are any of: a list of file paths, of PIL images, of arrays
    (h, w, 3) or (h, w), of tensors (3, h, w), or of all of these mixed, each of its own size; an array
    (n, h, w, 3) or (n, h, w); a tensor (n, 3, h, w) or (n, 1, h, w). Arrays and tensors are uint8, or float
    in [0, 1]. EXIF orientation is applied, transparency laid on white, and each image resized to a square.

    Parameters
    ----------
    checkpoint : str, path or SimpleCNAPS, default="default"
        The pretrained model: a name of :func:`available_checkpoints`, a folder, a Hub repository
        ("user/repo", optionally "@revision"), or the module itself, of which a copy is used:
        :meth:`SimpleCNAPS.from_backbone` makes one on any other network.
    head : str or nn.Module, default="mahalanobis"
        How queries are classified on the adapted features: "mahalanobis", "euclidean", "manhattan", "cosine",
        "dot_product", or "linear" (the learned classifier of CNAPS, which only a checkpoint trained with it
        has). The checkpoint's own head is used, with its settings, where it is of that name. Or a head object.
    adapt : bool, default=True
        False leaves the network as pretrained ("No Adaptation").
    device : str or torch.device, default="auto"
        Where the network runs; "auto" is CUDA where there is one, else the CPU.
    precision : {"auto", "float32", "bfloat16"}, default="auto"
        Of the network's convolutions; the head always computes in float32 or better. "auto" is bfloat16 for the FiLM
        ResNet18 where the processor (AVX512-BF16, AMX) or the CUDA device has it natively, float32 elsewhere and for
        other backbones: twice as fast on a CPU, with the effect on predictions that the page "How fast" tells. In
        bfloat16 features may vary in their third digit with the batch that an image is in, in float32 in their sixth.
    batch_size : int, default=64
        Images in work at a time. It bounds memory and does not change results. One that does not fit into CUDA's
        memory is halved until it does, with a warning.
    temperature : float or "auto", default=1.0
        T > 0: the probabilities are the softmax of the logits divided by T. "auto" fits it to support images that are
        left out one at a time; where no class has two of them, it is 1.
    unknown_label : str, int or float, optional
        What ``predict`` answers for an image that is too foreign to every class. It is no class, and of the labels'
        type. Needs a class of two support images.
    false_rejection_rate : float, default=0.05
        Share of the queries of known classes that get ``unknown_label`` by mistake, in (0, 1). With n support images
        the smallest that can be had is 1 / (n + 1).
    n_jobs : int, optional
        Threads that decode images, counted as scikit-learn does (-1: all cores). Default: the usable
        cores, at most 4.
    verbose : int, default=0
        1 shows progress bars.

    Attributes
    ----------
    classes_ : ndarray of shape (k,)
        The labels, sorted, of the type given to ``fit``.
    class_counts_ : int64 ndarray of shape (k,)
        Support images of each class.
    n_features_out_ : int
        Entries d of a feature vector, 512 unless the model has another backbone.
    temperature_ : float
        ``temperature``, or what "auto" chose.
    threshold_ : float or None
        ``predict`` answers ``unknown_label`` where :meth:`outlier_score` is above it; None without ``unknown_label``.
    device_ : torch.device
    model_ : SimpleCNAPS
        The pretrained model, unadapted.
    task_ : AdaptedTask
        The model adapted to the support set.

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

    classes_: NDArray[Any]
    class_counts_: NDArray[np.int64]
    n_features_out_: int
    temperature_: float
    threshold_: float | None
    device_: torch.device
    model_: SimpleCNAPS
    task_: AdaptedTask

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | SimpleCNAPS = "default",
        *,
        head: str | nn.Module = "mahalanobis",
        adapt: bool = True,
        device: str | torch.device = "auto",
        precision: str = "auto",
        batch_size: int = 64,
        temperature: float | str = 1.0,
        unknown_label: Any = None,
        false_rejection_rate: float = 0.05,
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.checkpoint = checkpoint
        self.head = head
        self.adapt = adapt
        self.device = device
        self.precision = precision
        self.batch_size = batch_size
        self.temperature = temperature
        self.unknown_label = unknown_label
        self.false_rejection_rate = false_rejection_rate
        self.n_jobs = n_jobs
        self.verbose = verbose

    # ---------------------------------------------------------------- fitting

    def fit(self, X: Any, y: ArrayLike) -> SimpleCNAPSClassifier:
        """Adapt to a support set. After an error the classifier is what it was before.

        Parameters
        ----------
        X : collection of n images
            The support set, in any order; see the class for the kinds.
        y : array-like of shape (n,)
            Their labels: strings, or numbers of one type (integers, Booleans, whole floats). At least two
            different ones.

        Returns
        -------
        SimpleCNAPSClassifier
            Itself.

        Raises
        ------
        ValueError
            An image or a label cannot be used (the message names it; :class:`~fewshot_mahalanobis.images.ImageError`
            for images), their numbers differ, there is one class only, or a constructor argument is unknown.

        Warns
        -----
        UserWarning
            ``false_rejection_rate`` is smaller than so few support images can vouch for.
        """
        device = _device(self.device)
        _check_precision(self.precision)
        model = self._pretrained().to(device)
        dtype = _dtype(self.precision, model)
        head = _head(self.head, model)
        batches = self._batches(X, model.image_size)
        labels = _checked_labels(y, batches.n_images)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"fit needs at least two classes to tell apart; every label is {classes.tolist()[0]!r}")
        labels_to_give(classes, self.unknown_label)  # refused, as the next, before the network has run
        check_settings(self.temperature, self.false_rejection_rate)

        images, targets = self._support_images(batches, dtype), torch.from_numpy(codes)
        task, _ = _within_memory(
            lambda size: model.adapt(images, targets, head=head, adapt=self.adapt, dtype=dtype, batch_size=size),
            batches.batch_size,
        )
        self._set_state(task, classes, device_=device, model_=model)
        return self

    def partial_fit(self, X: Any, y: ArrayLike) -> SimpleCNAPSClassifier:
        """Add support images, of known or of new classes.

        The network stays adapted as by the first ``fit``, and the result is that of one fit to all support
        images so far under that adaptation. On a classifier not yet fitted this is ``fit``.

        Parameters
        ----------
        X : collection of n images
        y : array-like of shape (n,)
            Labels of the same type (string, integer, ...) as the ones before. New ones become classes, and
            ``classes_`` stays sorted, so the columns of the logits may move.

        Returns
        -------
        SimpleCNAPSClassifier
            Itself.

        Raises
        ------
        ValueError
            As ``fit``, or a label is of another type than the earlier ones. The fitted state is kept.
        """
        if not hasattr(self, "task_"):
            return self.fit(X, y)
        batches = self._for_network(X)
        labels = _checked_labels(y, batches.n_images)
        kind, known = _label_kind(labels.tolist()[0]), _label_kind(self.classes_.tolist()[0])
        if kind != known:
            raise ValueError(
                f"label {labels.tolist()[0]!r} is a {kind}, but the classifier was fitted to labels of type {known}"
            )
        classes = np.unique(np.concatenate([self.classes_, labels]))
        labels_to_give(classes, self.unknown_label)  # refused before the network has run
        before = np.searchsorted(classes, self.classes_)[self.task_.support_labels.cpu().numpy()]
        codes = np.concatenate([before, np.searchsorted(classes, labels)])

        features = self._features(batches, "partial_fit")
        task = self.task_.refit(torch.cat([self.task_.support_features, *features]), torch.from_numpy(codes))
        self._set_state(task, classes)
        return self

    def _support_images(self, batches: ImageBatches, dtype: torch.dtype) -> Tensor:
        """All images (n, 3, s, s) in the precision that every layer reads them in; a batch is released once copied."""
        shape = (batches.n_images, 3, batches.size, batches.size)
        images = torch.empty(shape, dtype=dtype, device="cpu", memory_format=torch.channels_last)
        start = 0
        for batch in self._with_progress(batches, "fit"):
            images[start : start + len(batch)] = batch
            start += len(batch)
        return images

    def _pretrained(self) -> SimpleCNAPS:
        """Make a model of this classifier's own."""
        if isinstance(self.checkpoint, SimpleCNAPS):
            return copy.deepcopy(self.checkpoint).eval()
        return load_checkpoint(self.checkpoint)

    def _set_state(
        self, task: AdaptedTask, classes: NDArray[Any], calibration: Calibration | None = None, **others: Any
    ) -> None:
        answers = labels_to_give(classes, self.unknown_label)
        if calibration is None:
            calibration = calibrate(
                task.head,
                task._head_space(task.support_features),
                task.support_labels,
                temperature=self.temperature,
                false_rejection_rate=self.false_rejection_rate,
                reject=self.unknown_label is not None,
            )
        fitted = {
            "task_": task,
            "classes_": classes,
            "class_counts_": np.bincount(task.support_labels.cpu().numpy(), minlength=len(classes)),
            "n_features_out_": task.support_features.shape[1],
            "temperature_": calibration.temperature,
            "threshold_": calibration.threshold,
            "_answers": answers,
            **others,
        }
        self.__dict__.update(fitted)  # in one step: an interruption comes before it or after it

    # ---------------------------------------------------------------- queries

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels of query images.

        Images are decoded, classified and dropped batch by batch, so any number of paths fits in memory. Every
        query is classified on its own: the others in ``X`` do not matter.

        Parameters
        ----------
        X : collection of m images

        Returns
        -------
        ndarray of shape (m,)
            Of the type given to ``fit``. ``unknown_label``, where there is one, for images whose :meth:`outlier_score`
            is above ``threshold_``.

        Raises
        ------
        sklearn.exceptions.NotFittedError
        ValueError
            An image cannot be used; the message names it.
        """
        chosen = [nearest_or_none(logits, self.threshold_) for logits in self._logits(X, "predict")]
        return self._answers[np.concatenate(chosen)]

    def outlier_score(self, X: Any) -> NDArray[np.float64]:
        """How foreign images are to all classes: minus the largest logit of each.

        Defined without ``unknown_label`` too, for a threshold of your own.

        Parameters
        ----------
        X : collection of m images

        Returns
        -------
        float64 ndarray of shape (m,)
            Larger is more foreign; for the Mahalanobis head s times the squared distance to the nearest class.
        """
        return torch.cat([outlier_score(logits).cpu() for logits in self._logits(X, "outlier_score")]).numpy()

    def decision_function(self, X: Any) -> NDArray[np.float32]:
        """Logits of query images; for the Mahalanobis head -s times the squared distance to each class.

        Parameters
        ----------
        X : collection of m images

        Returns
        -------
        float32 ndarray of shape (m, k), or (m,) for two classes
            Columns in the order of ``classes_``. For two classes, as scikit-learn's scorers expect, the
            log-odds of ``classes_[1]``: its logit less the other's.
        """
        logits = torch.cat([logits.cpu() for logits in self._logits(X, "decision_function")])
        return (logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits).numpy()

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Log-probabilities of the known classes: the log-softmax of the logits over T (equation 1 where T is 1).

        Parameters
        ----------
        X : collection of m images

        Returns
        -------
        float64 ndarray of shape (m, k)
            Columns in the order of ``classes_``.
        """
        logits = torch.cat([logits.cpu() for logits in self._logits(X, "predict_proba")])
        return torch.log_softmax(logits.double() / self.temperature_, dim=1).numpy()

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the known classes: the softmax of the logits over T (equation 1 where T is 1).

        Parameters
        ----------
        X : collection of m images

        Returns
        -------
        float64 ndarray of shape (m, k)
            Rows sum to 1; columns in the order of ``classes_``.
        """
        return np.exp(self.predict_log_proba(X))

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Adapted features of images.

        Parameters
        ----------
        X : collection of m images

        Returns
        -------
        float32 ndarray of shape (m, d)
        """
        check_is_fitted(self)
        batches = self._for_network(X)
        return torch.cat([features.cpu() for features in self._features(batches, "transform")]).numpy()

    def _logits(self, X: Any, name: str) -> Iterator[Tensor]:
        check_is_fitted(self)
        for features in self._features(self._for_network(X), name):
            yield self.task_.head_logits(features)

    def _features(self, batches: ImageBatches, name: str) -> Iterator[Tensor]:
        size = batches.batch_size
        for images in self._with_progress(batches, name):
            features, size = _within_memory(partial(self.task_.features, images), min(size, len(images)))
            yield features

    def _batches(self, X: Any, size: int, ahead: bool = True) -> ImageBatches:
        return ImageBatches(X, size, batch_size=self.batch_size, n_jobs=self.n_jobs, ahead=ahead)

    def _for_network(self, X: Any) -> ImageBatches:
        return self._batches(X, self.model_.image_size, ahead=self.device_.type != "cpu")

    def _with_progress(self, batches: ImageBatches, name: str) -> Iterator[Tensor]:
        with tqdm(total=batches.n_images, desc=name, unit="image", disable=not self.verbose) as bar:
            for images in batches:
                yield images
                bar.update(len(images))

    @property
    def _n_features_out(self) -> int:  # for the names that set_output and get_feature_names_out give
        return self.n_features_out_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = True  # of paths
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        return tags

    # ---------------------------------------------------------------- keeping

    def __getstate__(self) -> dict[str, Any]:
        # All on the CPU, so that the pickle opens on a machine without this device, and the folded network left out, as
        # the model and the FiLM parameters give it back.
        state = {name: _on_cpu(value) for name, value in super().__getstate__().items()}
        if "task_" in state:
            task = self.task_
            head = None if task.head is self.model_.head else copy.deepcopy(task.head).cpu()
            state["task_"] = {
                "film": _film_to(task.film, torch.device("cpu")),
                "head": head,
                "support_features": task.support_features.cpu(),
                "support_labels": task.support_labels.cpu(),
            }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "task_" in state:
            try:
                device = _device(self.device_)
            except ValueError:
                device = torch.device("cpu")
                warnings.warn(f"there is no device {self.device_} here: the classifier is on the CPU", stacklevel=2)
            packed = state["task_"]
            self.device_ = device
            self.model_.to(device)
            head = self.model_.head if packed["head"] is None else packed["head"].to(device)
            task = AdaptedTask(self.model_, _film_to(packed["film"], device), head, _dtype(self.precision, self.model_))
            self.task_ = task.refit(packed["support_features"], packed["support_labels"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted classifier to one file, which needs no checkpoint and no pickle to load.

        It is a safetensors file with the pretrained weights, the FiLM parameters and the support features, and JSON
        in its header. Weights are stored as float16 where that loses nothing. The file appears whole or not at all.

        Parameters
        ----------
        path : path
            An existing file is replaced.

        Raises
        ------
        sklearn.exceptions.NotFittedError
        ValueError
            ``head`` is an object of a class of your own or a ``LinearHead``. (Pickling keeps any head.)
        OSError
            The file cannot be written.
        """
        check_is_fitted(self)
        path, head = Path(path), _head_to_json(self.head)
        tensors = {f"model.{name}": tensor for name, tensor in self.model_.state_dict().items()}
        tensors |= _film_tensors(self.task_.film)
        tensors = {name: _smallest_lossless(tensor.detach().cpu()) for name, tensor in tensors.items()}
        tensors["support_features"] = self.task_.support_features.cpu().contiguous()
        tensors["support_labels"] = self.task_.support_labels.cpu().contiguous()
        parameters = self.get_params(deep=False)
        checkpoint = parameters.pop("checkpoint")
        header = {
            "version": _FILE_VERSION,
            "digest": _digest(tensors),
            "model": self.model_.config,
            "checkpoint": None if isinstance(checkpoint, SimpleCNAPS) else os.fspath(checkpoint),
            "parameters": {
                "head": head,
                "adapt": bool(self.adapt),
                "precision": self.precision,
                "batch_size": int(self.batch_size),
                "temperature": self.temperature if isinstance(self.temperature, str) else float(self.temperature),
                "unknown_label": None if self.threshold_ is None else self._answers.tolist()[-1],
                "false_rejection_rate": float(self.false_rejection_rate),
                "n_jobs": None if self.n_jobs is None else int(self.n_jobs),
                "verbose": int(self.verbose),
            },
            "labels": {"dtype": self.classes_.dtype.str, "classes": self.classes_.tolist()},
            "calibration": {"temperature": self.temperature_, "threshold": self.threshold_},
        }
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            try:
                save_file(tensors, temporary, metadata={"format": _FILE_FORMAT, "classifier": json.dumps(header)})
            except SafetensorError as error:  # the library's form of a full disk
                raise OSError(f"{path} cannot be written: {error}") from error
            os.replace(temporary, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device = "auto",
        *,
        checkpoint: SimpleCNAPS | nn.Module | None = None,
    ) -> SimpleCNAPSClassifier:
        """Read a classifier that :meth:`save` wrote, on this or another device.

        Parameters
        ----------
        path : path
        device : str or torch.device, default="auto"
            Where it is to run, whatever it ran on before.
        checkpoint : nn.Module or SimpleCNAPS, optional
            The network, for a classifier on a module given to :meth:`SimpleCNAPS.from_backbone`: the file holds its
            weights, not its code. The module, or a model made of it; a copy is used.

        Returns
        -------
        SimpleCNAPSClassifier
            Fitted.

        Raises
        ------
        FileNotFoundError
        ValueError
            The file is of another kind, of a newer version, damaged or incomplete, or its network is wanted and is not
            given, or is another.
        ImportError
            Its network is one of timm, and timm is absent.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no saved classifier at {path}")
        target = _device(device)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata, names = file.metadata() or {}, set(file.keys())
                shots = file.get_slice("support_labels").get_shape() if "support_labels" in names else [0]
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file, or is damaged or cut short: {error}") from error
        if metadata.get("format") != _FILE_FORMAT:
            raise ValueError(f"{path} is a safetensors file, but not one that SimpleCNAPSClassifier.save wrote")
        header = _checked_header(path, metadata.get("classifier", ""))
        network = checkpoint
        if isinstance(checkpoint, SimpleCNAPS):
            network = getattr(checkpoint.feature_extractor, "network", checkpoint.feature_extractor)
        check_network(str(path), header["model"], network, "SimpleCNAPSClassifier.load(path, checkpoint=network)")
        try:
            model = empty_model(checked_settings(header["model"], "the model's settings"), network)
            # No memory is spent on what the file is compared with.
            with torch.device("meta"):
                film = _empty_film() if any(name.startswith("film.") for name in names) else None
                tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
                tensors |= _film_tensors(film) | {
                    "support_features": torch.empty(*shots[:1], model.feature_extractor.out_features),
                    "support_labels": torch.empty(*shots[:1], dtype=torch.int64),
                }
            tensors = read_tensors(path, tensors)
            if header["digest"] != _digest(tensors):
                raise ValueError("its contents do not match their digest")
            check_finite(path, tensors)
            return cls._restored(model, header, tensors, device, target)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{path} is incomplete, damaged or does not fit together: {error}") from error

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        thumbnails: tuple[Any, ArrayLike] | None = None,
    ) -> str:
        """Put the fitted classifier into a repository of the Hugging Face Hub, with a model card.

        The card tells the classes, their numbers of support images, the settings, and the accuracy on support images
        that were left out. A fitted classifier has no images, so none are shared unless they are handed over here.

        Parameters
        ----------
        repo_id : str
            ``"user/repo"``; made if it is absent.
        private : bool, optional
            Of a new repository; by default as the account has it, which is public for most.
        token : str or bool, optional
            With write permission; by default that of ``hf auth login``.
        thumbnails : (X, y), optional
            Images and their labels, as for ``fit``: the first five of each class are shown on the card, for everyone
            who sees the repository, at 84 x 84 pixels and without their files' metadata.

        Returns
        -------
        str
            Address of the commit.

        Raises
        ------
        sklearn.exceptions.NotFittedError
        ValueError
            ``head`` cannot be saved (see :meth:`save`), or a thumbnail or its label cannot be used.
        UploadError
            The repository cannot be written; it is what it was.
        """
        check_is_fitted(self)
        if thumbnails is not None:
            images, labels = thumbnails
            thumbnails = images, _checked_labels(labels, self._batches(images, 1).n_images)
        with tempfile.TemporaryDirectory() as name:
            write_repository(self, Path(name), repo_id, thumbnails)
            return upload(Path(name), repo_id, private=private, token=token, message="Push fitted classifier")

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        device: str | torch.device = "auto",
        token: str | bool | None = None,
        checkpoint: SimpleCNAPS | nn.Module | None = None,
    ) -> SimpleCNAPSClassifier:
        """Read a classifier that :meth:`push_to_hub` put on the Hugging Face Hub.

        Parameters
        ----------
        name : str or path
            ``"user/repo"`` or ``"user/repo@revision"``, or a folder with a copy of a repository. Downloads are kept in
            ``huggingface_hub``'s cache, which serves without a connection.
        device : str or torch.device, default="auto"
            As for :meth:`load`.
        token : str or bool, optional
            For a private repository; by default that of ``hf auth login``.
        checkpoint : SimpleCNAPS or nn.Module, optional
            As for :meth:`load`.

        Returns
        -------
        SimpleCNAPSClassifier
            Fitted.

        Raises
        ------
        DownloadError
            There is no such repository, revision or connection, or no fitted classifier in it.
        ValueError
            As :meth:`load` raises.
        """
        folder = Path(name)
        file = classifier_file(folder, str(name)) if folder.is_dir() else hub_classifier(str(name), token=token)
        return cls.load(file, device, checkpoint=checkpoint)

    def export_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the adapted network and its fitted head as one ONNX file, in float32.

        Input "images": float32 (n, 3, s, s), RGB, value / 127.5 - 1, s the model's image size (84 by default).
        Output "logits": float32 (n, k), a column for each label. The labels are the property "classes", as JSON.

        Parameters
        ----------
        path : path
            An existing file is replaced, whole or not at all.

        Raises
        ------
        sklearn.exceptions.NotFittedError
        ImportError
            The packages of the extra ``onnx`` are absent.
        ValueError
            The head is of a class of your own, or there are so many classes and support images that the head's
            matrices, of as many rows as there are support images (at most 512), exceed a file's limit.
        """
        check_is_fitted(self)
        write_onnx(self.model_, self.task_, path, self.classes_.tolist())

    def export_program(self, path: str | os.PathLike[str]) -> None:
        """Write the adapted network and its fitted head as one ``torch.export`` program (.pt2), in float32.

        For PyTorch without this package: ``torch.export.load(path, extra_files).module()(images)`` gives the logits.
        Input and output are those of :meth:`export_onnx`. The labels are the extra file "classes", as JSON.

        Parameters
        ----------
        path : path
            Ends in ".pt2". An existing file is replaced, whole or not at all.

        Raises
        ------
        sklearn.exceptions.NotFittedError
        ValueError
            As :meth:`export_onnx` raises it.
        """
        check_is_fitted(self)
        write_program(self.model_, self.task_, path, self.classes_.tolist())

    @classmethod
    def _restored(
        cls,
        model: SimpleCNAPS,
        header: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        device: str | torch.device,
        target: torch.device,
    ) -> SimpleCNAPSClassifier:
        weights = {
            name.removeprefix("model."): tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        model = filled_model(model, weights).to(target)
        checkpoint = header["checkpoint"] if header["checkpoint"] is not None else model
        parameters = {**header["parameters"], "head": _head_from_json(header["parameters"]["head"])}
        classifier = cls(checkpoint, device=device, **parameters)
        film = _film_to(_film_from_tensors(tensors), target)
        task = AdaptedTask(model, film, _head(classifier.head, model), _dtype(classifier.precision, model))
        task = task.refit(tensors["support_features"], tensors["support_labels"])
        classes = _labels_from_json(header["labels"])
        if len(classes) != int(task.support_labels.max()) + 1:
            raise ValueError(f"{len(classes)} labels for {int(task.support_labels.max()) + 1} classes")
        unknown = classifier.unknown_label  # whose length every label takes in one array of text
        if isinstance(unknown, str) and 4 * len(unknown) * (len(classes) + 1) > _MOST_LABEL_BYTES:
            raise ValueError(f"an unknown_label of {len(unknown)} characters")
        calibration = _calibration_from_json(header["calibration"], classifier)
        classifier._set_state(task, classes, calibration, device_=target, model_=model)
        return classifier


class Answers(NamedTuple):
    """What a classifier says of m images."""

    labels: NDArray[Any]  # (m,), as ``predict`` gives them
    probabilities: NDArray[np.float64]  # (m, k), as ``predict_proba``
    unknown: NDArray[np.bool_]  # (m,), whether the image is of no class
    features: NDArray[np.float32]  # (m, d), as ``transform``


def answers(classifier: SimpleCNAPSClassifier, images: Any) -> Answers:
    """All that a fitted classifier says of images, in one pass through its network.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
    images : collection of m images

    Raises
    ------
    sklearn.exceptions.NotFittedError
    ValueError
        An image cannot be used; the message names it.
    """
    features = np.asarray(classifier.transform(images))
    logits = classifier.task_.head_logits(torch.from_numpy(features))
    chosen = nearest_or_none(logits, classifier.threshold_)
    return Answers(
        classifier._answers[chosen],
        torch.softmax(logits.double() / classifier.temperature_, dim=1).cpu().numpy(),
        chosen == len(classifier.classes_),
        features,
    )


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch says "not compiled" by an assertion
        raise ValueError(f"device {device!r} cannot be used here: {error}") from error


def _check_precision(precision: str) -> None:
    if precision not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"precision must be 'auto', 'float32' or 'bfloat16', got {precision!r}")


def _dtype(precision: str, model: SimpleCNAPS) -> torch.dtype:
    """Precision of the convolutions of a model where it is."""
    _check_precision(precision)
    if precision == "auto":
        # The effect on predictions has been measured for this network alone.
        rounded = isinstance(model.feature_extractor, FilmResNet18) and _native_bfloat16(model.device)
        precision = "bfloat16" if rounded else "float32"
    return torch.float32 if precision == "float32" else torch.bfloat16


def _native_bfloat16(device: torch.device) -> bool:
    """Whether convolutions in bfloat16 are instructions of the device, not emulated."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    # Before torch had that: questions of its own, which some versions lack.
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, question, lambda: False)() for question in questions)


def _within_memory(compute: Callable[[int], Result], batch_size: int) -> tuple[Result, int]:
    """``compute(b)`` and b: ``batch_size``, or what is left of it halved until CUDA's memory holds a batch."""
    size = batch_size
    while True:
        try:
            result = compute(size)
            break
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise
        # Out here, where the error no longer keeps the failed attempt's tensors alive.
        torch.cuda.empty_cache()
        size //= 2
    if size < batch_size:
        warnings.warn(
            f"CUDA's memory does not hold a batch of {batch_size} images: going on with {size} at a time. "
            f"Set batch_size={size} to spare the attempt",
            stacklevel=4,
        )
    return result, size


def _head(head: str | nn.Module, model: SimpleCNAPS) -> Head:
    """Find or make the head that a constructor argument stands for, on the model's device."""
    if isinstance(head, nn.Module):
        return copy.deepcopy(head).to(model.device).eval()  # type: ignore[return-value]
    if head not in HEADS:
        raise ValueError(f"head must be one of {sorted(HEADS)} or a head object, got {head!r}")
    if head == model.config["head"]:
        return model.head
    if head == "linear":
        raise ValueError(
            f"the checkpoint has no trained linear head, its head is {model.config['head']!r}: "
            "choose another head or a checkpoint of CNAPS"
        )
    if head == "mahalanobis":  # with the settings that the checkpoint has for it
        settings = [model.config[name] for name in ("beta", "task_covariance", "one_shot_covariance")]
        return MahalanobisHead(RegularizedCovariance(*settings), model.config["scale"]).to(model.device)
    return HEADS[head]().to(model.device)


def _head_to_json(head: str | nn.Module) -> str | dict[str, Any]:
    """Describe a head by its name, or by the settings of a Mahalanobis head."""
    if isinstance(head, str):
        return head
    if type(head) is MahalanobisHead and type(head.covariance) is RegularizedCovariance:
        covariance = head.covariance
        settings = (covariance.beta, covariance.task_covariance, covariance.one_shot_covariance)
        return {"scale": head.scale, "covariance": settings}
    for name, known in HEADS.items():
        if type(head) is known and known is not LinearHead:
            return name
    raise ValueError(
        f"a {type(head).__name__} object as head cannot be written to a file: name one of {sorted(HEADS)}, "
        "or pickle the classifier"
    )


def _head_from_json(head: str | dict[str, Any]) -> str | nn.Module:
    if isinstance(head, str):
        return head
    return MahalanobisHead(RegularizedCovariance(*head["covariance"]), head["scale"])


# -------------------------------------------------------------------- labels


def _checked_labels(y: ArrayLike, n_images: int) -> NDArray[Any]:
    """``y`` as an array of shape (n_images,) of strings or of numbers of one type."""
    if y is None:
        raise ValueError("there are no labels: y is None")
    values = np.asarray(y, dtype=object)
    if values.ndim != 1:
        raise ValueError(f"y must have one dimension, a label for each image; its shape is {values.shape}")
    if len(values) != n_images:
        raise ValueError(f"there are {n_images} images but {len(values)} labels: each image needs one")
    first = _label_kind(values[0])
    for index, value in enumerate(values):
        kind = _label_kind(value)
        if kind is None:
            raise ValueError(
                f"y[{index}] is {value!r}: every label must be a string or a whole number, with none missing"
            )
        if kind != first:
            raise ValueError(f"y[{index}] is {value!r}, a {kind}, but y[0] is {values[0]!r}, a {first}: use one type")
    labels = np.asarray(y)
    # Objects other than strings (pandas' nullable integers, say) take the number type they stand for.
    return labels if labels.dtype.kind in "Ubiuf" or first == "string" else np.array(values.tolist())


def _label_kind(value: Any) -> str | None:
    """Name the type of one label; None if it cannot be one."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool | np.bool_):
        return "Boolean"
    if isinstance(value, Integral):
        return "whole number"
    if isinstance(value, Real) and float(value).is_integer():
        return "float"
    return None


# -------------------------------------------------------------------- files


#: Fields of the header of a saved classifier, and of three of them, with their types in JSON.
_HEADER = {
    "version": int,
    "digest": str,
    "model": dict,
    "checkpoint": str | None,
    "parameters": dict,
    "labels": dict,
    "calibration": dict,
}
_PARAMETERS = {
    "head": str | dict,
    "adapt": bool,
    "precision": str,
    "batch_size": int,
    "temperature": str | float,
    "unknown_label": str | int | float | None,
    "false_rejection_rate": float,
    "n_jobs": int | None,
    "verbose": int,
}
_LABELS = {"dtype": str, "classes": list}
_CALIBRATION = {"temperature": float, "threshold": float | None}
#: Most bytes of a file's labels as an array: a hostile dtype may be of any width.
_MOST_LABEL_BYTES = 2**28


def _checked_header(path: Path, text: str) -> dict[str, Any]:
    """Parse the header of a saved classifier, refusing fields that are missing, unknown or of another type."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from error
    version = header.get("version") if isinstance(header, dict) else None
    if type(version) is int and version > _FILE_VERSION:
        raise ValueError(
            f"{path} was written by a newer version (format {version}, this one reads up to {_FILE_VERSION}): "
            "upgrade fewshot_mahalanobis"
        )
    _check_fields(path, "its header", header, _HEADER)
    _check_fields(path, "its parameters", header["parameters"], _PARAMETERS)
    _check_fields(path, "its labels", header["labels"], _LABELS)
    _check_fields(path, "its calibration", header["calibration"], _CALIBRATION)
    return header


def _check_fields(path: Path, what: str, values: Any, types: Mapping[str, Any]) -> None:
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise ValueError(f"{path} is incomplete or damaged: {what} must have the fields {', '.join(types)}")
    for name, wanted in types.items():
        # bool is a subclass of int.
        if not isinstance(values[name], wanted) or isinstance(values[name], bool) != (wanted is bool):
            raise ValueError(f"{path} is damaged: {name!r} of {what} is {values[name]!r}")


def _labels_from_json(labels: Mapping[str, Any]) -> NDArray[Any]:
    """``classes_`` of a saved classifier; ValueError, TypeError or OverflowError if they cannot be that."""
    dtype, classes = np.dtype(labels["dtype"]), labels["classes"]
    if dtype.kind not in "OUbiuf" or dtype.itemsize * len(classes) > _MOST_LABEL_BYTES:
        raise ValueError(f"labels of type {labels['dtype']!r}")
    array = np.array(classes, dtype=dtype)
    if _checked_labels(array, len(classes)).tolist() != classes or np.unique(array).tolist() != classes:
        raise ValueError(f"labels that are not sorted, not different or not of type {labels['dtype']!r}")
    return array


def _calibration_from_json(values: Mapping[str, Any], classifier: SimpleCNAPSClassifier) -> Calibration:
    """What a saved classifier was calibrated to; ValueError if it cannot be."""
    check_settings(classifier.temperature, classifier.false_rejection_rate)
    calibration = Calibration(**values)
    if not (calibration.temperature > 0 and math.isfinite(calibration.temperature)):
        raise ValueError(f"a temperature of {calibration.temperature}")
    threshold = calibration.threshold
    if (threshold is None) != (classifier.unknown_label is None) or (threshold and not math.isfinite(threshold)):
        raise ValueError(f"a threshold of {threshold} with unknown_label={classifier.unknown_label!r}")
    return calibration


def _smallest_lossless(tensor: Tensor) -> Tensor:
    """Copy in float16 if every value survives that, else as it is."""
    half = tensor.to(torch.float16)
    lossless = tensor.dtype == torch.float32 and torch.equal(half.float(), tensor)
    return half.contiguous() if lossless else tensor.contiguous().clone()


def _film_tensors(film: Film | None) -> dict[str, Tensor]:
    if film is None:
        return {}
    return {
        f"film.{layer}.{block}.{name}": tensor
        for layer, blocks in enumerate(film)
        for block, parameters in enumerate(blocks)
        for name, tensor in parameters._asdict().items()
    }


def _film_from_tensors(tensors: Mapping[str, Tensor]) -> Film | None:
    if not any(name.startswith("film.") for name in tensors):
        return None
    return [
        [
            BlockFilm(*(tensors[f"film.{layer}.{block}.{name}"].float() for name in BlockFilm._fields))
            for block in range(BLOCKS_PER_LAYER)
        ]
        for layer in range(len(LAYER_WIDTHS))
    ]


def _empty_film() -> Film:
    """FiLM parameters of the shapes that the network takes, without values."""
    return [
        [BlockFilm(*(torch.empty(width) for _ in BlockFilm._fields)) for _ in range(BLOCKS_PER_LAYER)]
        for width in LAYER_WIDTHS
    ]


def _film_to(film: Film | None, device: torch.device) -> Film | None:
    if film is None:
        return None
    return [[BlockFilm(*(tensor.to(device) for tensor in block)) for block in blocks] for blocks in film]


def _on_cpu(value: Any) -> Any:
    """A module as itself if it is on the CPU, else a copy there; anything else as it is."""
    elsewhere = isinstance(value, nn.Module) and any(p.device.type != "cpu" for p in value.parameters())
    return copy.deepcopy(value).cpu() if elsewhere else value


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names, types, shapes and bytes of tensors on the CPU."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
