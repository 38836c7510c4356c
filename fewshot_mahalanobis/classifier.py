"""A scikit-learn classifier over images, by Simple CNAPS."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fewshot_mahalanobis.calibration import Calibration, calibrate, check_settings
from fewshot_mahalanobis.checkpoints.hub import classifier_file, hub_classifier, upload
from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.devices import check_precision, choose_device, choose_dtype, on_cpu, within_memory
from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance
from fewshot_mahalanobis.heads import AutoHead, Head, LinearHead, make_head
from fewshot_mahalanobis.images import ImageBatches
from fewshot_mahalanobis.labels import checked_labels, label_kind
from fewshot_mahalanobis.looks import query_looks, restored, states_of, support_looks, with_unadapted
from fewshot_mahalanobis.networks.adapted_task import AdaptedTask
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.onnx_export import write_onnx, write_program
from fewshot_mahalanobis.refine import check_steps, refined
from fewshot_mahalanobis.rejection import outlier_score, output_labels, predict_or_reject
from fewshot_mahalanobis.saving import FittedState, load_classifier, save_classifier
from fewshot_mahalanobis.sharing import write_repository
from fewshot_mahalanobis.summary import SupportSummary, summarise


class SimpleCNAPSClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):
    """Image classifier that learns its classes from a few images each, in one forward pass.

    Fitting adapts a pretrained network to the support images by FiLM layers and describes each class by a Gaussian of
    their features; a query gets the class of the smallest Mahalanobis distance. There is no training: ``fit`` takes as
    long as extracting the features of the support images.

    Images are a list of file paths, PIL images, arrays (h, w, 3) or (h, w), tensors (3, h, w), or a mixture, each of
    its own size; an array (n, h, w, 3) or (n, h, w); or a tensor (n, 3, h, w) or (n, 1, h, w). Arrays and tensors are
    uint8, or float in [0, 1]. EXIF orientation is applied, transparent pixels become white, and each image is resized
    to a square.

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
    refine : int or "auto", default=0
        Gradient steps of ``fit`` that refine the FiLM parameters; the one counts at which left-out support images are
        most probable. "auto" takes up to ten, and none that brings little: :func:`~fewshot_mahalanobis.refine.refined`.
    device : str or torch.device, default="auto"
        Where the network runs; "auto" is CUDA where there is one, else the CPU.
    precision : {"auto", "float32", "bfloat16"}, default="auto"
        Of the network's convolutions; the head computes in float64. "auto" is bfloat16 for the embedded networks on
        processors (AVX512-BF16, AMX) and CUDA devices that have it natively, else float32; see the page "How fast".
    batch_size : int, default=64
        Images in work at a time, to bound memory; results depend on it only by rounding. A batch that does not fit into
        CUDA's memory is halved until it does, with a warning.
    temperature : float or "auto", default=1.0
        T > 0: the probabilities are the softmax of the logits divided by T. "auto" fits T to support images that are
        left out one at a time; it is 1 if no class has two of them.
    unknown_label : str, int or float, optional
        What ``predict`` gives for an image that is too far from every class. It must be no class, and of the labels'
        type. Needs a class of two support images. With it images take a second pass, through the unadapted network.
    false_rejection_rate : float, default=0.05
        Share of the queries of known classes that get ``unknown_label`` by mistake, in (0, 1). The smallest that n
        support images allow is 1 / (n + 1).
    n_jobs : int, optional
        Threads that decode images, counted as scikit-learn does (-1: all cores). Default: the usable cores, at most 4.
    verbose : int, default=0
        1 shows progress bars.

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
    threshold_ : float or None
        ``predict`` gives ``unknown_label`` where :meth:`outlier_score` is above it; None without ``unknown_label``.
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

    _fixed: dict[str, Any]
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
        head: str | nn.Module = "auto",
        adapt: bool = True,
        refine: int | str = 0,
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
        self.refine = refine
        self.device = device
        self.precision = precision
        self.batch_size = batch_size
        self.temperature = temperature
        self.unknown_label = unknown_label
        self.false_rejection_rate = false_rejection_rate
        self.n_jobs = n_jobs
        self.verbose = verbose

    def fit(self, X: Any, y: ArrayLike) -> SimpleCNAPSClassifier:
        """Adapt to a support set and return the classifier itself. After an error it is what it was before.

        Parameters
        ----------
        X : collection of n images
            The support set, in any order.
        y : array-like of shape (n,)
            Labels: strings, or numbers of one type (integers, Booleans, whole floats); at least two different ones.

        Raises
        ------
        ValueError
            An image or a label cannot be used (the message names it; :class:`~fewshot_mahalanobis.images.ImageError`
            for images), their numbers differ, there is only one class, or a constructor argument is unknown. A
            UserWarning says so if ``false_rejection_rate`` is smaller than so few support images allow.
        """
        device = choose_device(self.device)
        check_precision(self.precision)
        model = self.checkpoint if isinstance(self.checkpoint, SimpleCNAPS) else load_checkpoint(self.checkpoint)
        if model.training or model.device != device:  # else it is shared: nothing here changes a model
            model = copy.deepcopy(model).eval().to(device)
        dtype = choose_dtype(self.precision, model)
        head = _head(self.head, model)
        batches = self._batches(X, model.image_size, "fit")
        labels = checked_labels(y, batches.n_images)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"fit needs at least two classes to tell apart; every label is {classes.tolist()[0]!r}")
        output_labels(classes, self.unknown_label)  # checked, like the next line, before the network runs
        check_settings(self.temperature, self.false_rejection_rate)
        check_steps(self.refine)

        images, targets = batches.stacked(dtype), torch.from_numpy(codes)
        task, _ = within_memory(
            lambda size: model.adapt(images, targets, head=head, adapt=self.adapt, dtype=dtype, batch_size=size),
            batches.batch_size,
        )
        task = refined(model, task, images, steps=self.refine, batch_size=batches.batch_size, progress=self.verbose > 0)
        networks = [task] if self.unknown_label is None else with_unadapted(model, task, images, batches.batch_size)
        self._set_state(networks, classes, device_=device, model_=model, _fixed=self._fixed_by_fit())
        return self

    def partial_fit(self, X: Any, y: ArrayLike) -> SimpleCNAPSClassifier:
        """Add support images ``X`` (n) of known or of new classes ``y`` (n,); returns the classifier itself.

        The network stays adapted as by the first ``fit``; the result is that of one fit to all support images so far
        under that adaptation. ``classes_`` stays sorted, so columns of the logits may move. Before ``fit`` this is
        ``fit``. ValueError as ``fit``, or if a label is of another type than before; the fitted state is kept.
        """
        if not hasattr(self, "task_"):
            return self.fit(X, y)
        batches = self._query_batches(X, "partial_fit")
        labels = checked_labels(y, batches.n_images)
        kind, known = label_kind(labels.tolist()[0]), label_kind(self.classes_.tolist()[0])
        if kind != known:
            raise ValueError(
                f"label {labels.tolist()[0]!r} is a {kind}, but the classifier was fitted to labels of type {known}"
            )
        classes = np.unique(np.concatenate([self.classes_, labels]))
        output_labels(classes, self.unknown_label)  # checked before the network runs
        before = np.searchsorted(classes, self.classes_)[self.task_.support_labels.cpu().numpy()]
        codes = np.concatenate([before, np.searchsorted(classes, labels)])

        networks = self._networks[: 1 if self.unknown_label is None else None]
        new = zip(*self._features(batches, networks), strict=True)
        features = [torch.cat([network.support_features, *found]) for network, found in zip(networks, new, strict=True)]
        targets = torch.from_numpy(codes)
        self._set_state([network.refit(x, targets) for network, x in zip(networks, features, strict=True)], classes)
        return self

    def _set_state(
        self,
        networks: list[AdaptedTask],  # the adapted one and, if it looks at images too, the unadapted one
        classes: NDArray[Any],
        calibration: Calibration | None = None,
        **others: Any,
    ) -> None:
        answers, task = output_labels(classes, self.unknown_label), networks[0]
        if calibration is None:
            calibration = calibrate(
                support_looks(networks),
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
            "_units": calibration.units,
            "_networks": networks,
            "_output_labels": answers,
            **others,
        }
        self.__dict__.update(fitted)  # in one step, so that an interruption comes before it or after it

    # ---------------------------------------------------------------- queries

    def predict(self, X: Any, *, transductive: bool = False) -> NDArray[Any]:
        """Labels (m,) of query images, of the type given to ``fit``.

        An image whose :meth:`outlier_score` is above ``threshold_`` gets ``unknown_label``, if there is one. Images are
        decoded and dropped batch by batch, so any number of paths fits in memory. Each is classified on its own, with
        ``transductive`` after all have refined the classes (page "Many queries at once"). ValueError names a bad image.
        """
        found = self._seen(X, "predict")
        if transductive:
            x, _, scores = (torch.cat([*parts]) for parts in zip(*found, strict=True))
            found = iter([(x, self.task_.transductive_logits(x, self.temperature_), scores)])
        chosen = [predict_or_reject(*seen[1:], self.threshold_) for seen in found]
        return self._output_labels[np.concatenate(chosen)]

    def outlier_score(self, X: Any) -> NDArray[np.float64]:
        """How far images (m of any kind) are from all classes, (m,).

        With ``unknown_label`` it is a sum, in standard deviations of left-out support images: see the page "Unknown
        classes". Without it minus the largest logit, for the Mahalanobis head s times the squared distance.
        """
        return torch.cat([scores.cpu() for *_, scores in self._seen(X, "outlier_score")]).numpy()

    def decision_function(self, X: Any) -> NDArray[np.float32]:
        """Logits (m, k), of the paper's head -s times squared distances; of two classes log-odds (m,) of the second."""
        logits = torch.cat([logits.cpu() for logits in self._logits(X, "decision_function")])
        return (logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits).numpy()

    def predict_log_proba(self, X: Any, *, transductive: bool = False) -> NDArray[np.float64]:
        """Logarithms (m, k) of :meth:`predict_proba`, exact where a probability underflows."""
        logits = torch.cat([logits.cpu() for logits in self._logits(X, "predict_proba", transductive)])
        return torch.log_softmax(logits.double() / self.temperature_, dim=1).numpy()

    def predict_proba(self, X: Any, *, transductive: bool = False) -> NDArray[np.float64]:
        """Probabilities (m, k) of the known classes: the softmax of the logits over T (equation 1 for T = 1)."""
        return np.exp(self.predict_log_proba(X, transductive=transductive))

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Adapted features (m, d) of m images."""
        check_is_fitted(self)
        features = self._features(self._query_batches(X, "transform"), [self.task_])
        return torch.cat([batch.cpu() for (batch,) in features]).numpy()

    def _logits(self, X: Any, name: str, transductive: bool = False) -> Iterator[Tensor]:
        check_is_fitted(self)
        found = (features for (features,) in self._features(self._query_batches(X, name), [self.task_]))
        if transductive:
            return iter([self.task_.transductive_logits(torch.cat([*found]), self.temperature_)])
        return map(self.task_.head_logits, found)

    def _seen(self, X: Any, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Adapted features, logits and outlier scores, batch by batch."""
        check_is_fitted(self)
        states = [] if self._units is None else states_of(self._networks)
        for features in self._features(self._query_batches(X, name), self._networks):
            logits = query_looks(self._networks, states, features)
            yield features[0], logits[0], outlier_score(logits, self._units)

    def _features(self, batches: ImageBatches, networks: list[AdaptedTask]) -> Iterator[list[Tensor]]:
        size = batches.batch_size
        for images in batches:
            found = []
            for network in networks:
                features, size = within_memory(partial(network.features, images), min(size, len(images)))
                found.append(features)
            yield found

    def _query_batches(self, X: Any, name: str) -> ImageBatches:
        return self._batches(X, self.model_.image_size, name, ahead=self.device_.type != "cpu")

    def _batches(self, X: Any, size: int, name: str, ahead: bool = True) -> ImageBatches:
        progress = name if self.verbose else None
        return ImageBatches(X, size, batch_size=self.batch_size, n_jobs=self.n_jobs, ahead=ahead, progress=progress)

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

    def summary(self) -> SupportSummary:
        """Images a class, leave-one-out accuracy, confusions, and support images that look wrong; ``print`` it."""
        check_is_fitted(self)
        return summarise(self.task_, self.classes_)

    # ---------------------------------------------------------------- keeping

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted classifier to one safetensors file, which loads without a checkpoint and without pickle.

        It has the pretrained weights, as float16 where that is lossless, the FiLM parameters and the support features.
        An existing file is replaced, whole or not at all. ValueError if ``head`` is a ``LinearHead`` or of a class of
        your own (pickling keeps any head), OSError if the file cannot be written.
        """
        save_classifier(self._fitted_state(), path)

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
        return load_classifier(cls._restored, path, device, backbone)

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
            Of a new repository; default: the account's setting.
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
        state = self._fitted_state()
        if thumbnails is not None:
            images, labels = thumbnails
            thumbnails = images, checked_labels(labels, ImageBatches(images, 1).n_images)
        with tempfile.TemporaryDirectory() as folder:
            write_repository(Path(folder), repo_id, state, self.summary(), thumbnails)
            return upload(Path(folder), repo_id, private=private, token=token, message="Push fitted classifier")

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
        folder = Path(name)
        file = classifier_file(folder, str(name)) if folder.is_dir() else hub_classifier(str(name), token=token)
        return cls.load(file, device, backbone=backbone)

    def export_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the adapted network and its fitted head as one ONNX file, in float32, replacing any file at ``path``.

        Input "images": float32 (n, 3, s, s), RGB, value / 127.5 - 1, s the model's image size.
        Output "logits": float32 (n, k), a column for each label. The labels are the property "classes", as JSON.
        ImportError if the packages of the extra ``onnx`` are absent; ValueError if the head is of a class of your own
        or has too many numbers for a file (a matrix for each class, with as many rows as support images).
        """
        check_is_fitted(self)
        write_onnx(self.model_, self.task_, path, self.classes_.tolist())

    def export_program(self, path: str | os.PathLike[str]) -> None:
        """Write the adapted network and its fitted head as one ``torch.export`` program, in float32, to a .pt2 file.

        It runs in PyTorch without this package: ``torch.export.load(path, extra_files).module()(images)`` gives the
        logits. Input, output and errors are those of :meth:`export_onnx`; the labels are the extra file "classes".
        """
        check_is_fitted(self)
        write_program(self.model_, self.task_, path, self.classes_.tolist())

    def _fitted_state(self) -> FittedState:
        check_is_fitted(self)
        unknown = None if self.threshold_ is None else self._output_labels.tolist()[-1]
        return FittedState(
            {**self.get_params(deep=False), "head": self.task_.head, **self._fixed, "unknown_label": unknown},
            self.model_,
            self.task_.film,
            self.task_.support_features,
            self.task_.support_labels,
            self.classes_,
            Calibration(self.temperature_, self.threshold_, self._units),
            self.task_._state.settings if isinstance(self.task_.head, AutoHead) else None,
            *(network.support_features for network in self._networks[1:]),
        )

    def _fixed_by_fit(self) -> dict[str, Any]:  # in effect until the next fit, whatever set_params says
        names = ("adapt", "refine", "precision", *(["head"] if isinstance(self.head, str) else []))
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _restored(cls, state: FittedState) -> SimpleCNAPSClassifier:
        self, model = cls(**state.parameters), state.model
        head = _head(self.head, model)
        chosen = head if state.means is None else AutoHead(state.means)
        dtype, features = choose_dtype(self.precision, model), (state.support_features, state.frozen_features)
        networks = restored(model, state.film, chosen, dtype, features, state.support_labels)
        networks[0].head = head  # which chooses anew when examples are added
        others = {"device_": model.device, "model_": model, "_fixed": self._fixed_by_fit()}
        self._set_state(networks, state.classes, state.calibration, **others)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # On the CPU, for machines without this device; the model and the FiLM parameters give back the folded network.
        state = {name: on_cpu(value) for name, value in super().__getstate__().items()}
        if "task_" in state:
            task = self.task_
            film = None if task.film is None else task.film.to(torch.device("cpu"))
            head = None if task.head is self.model_.head else on_cpu(task.head)
            features = [network.support_features.cpu() for network in self._networks]
            state["task_"] = film, head, features, task.support_labels.cpu()
            del state["_networks"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "task_" in state:
            try:
                device = choose_device(self.device_)
            except ValueError:
                device = torch.device("cpu")
                warnings.warn(f"there is no device {self.device_} here: the classifier is on the CPU", stacklevel=2)
            film, head, features, labels = state["task_"]
            self.device_, model = device, self.model_.to(device)
            film = None if film is None else film.to(device)
            head = model.head if head is None else head.to(device)
            dtype = choose_dtype(self._fixed["precision"], model)
            self._networks = restored(model, film, head, dtype, features, labels)
            self.task_ = self._networks[0]


def _head(head: str | nn.Module, model: SimpleCNAPS) -> Head:
    """Find or make the head that a constructor argument names, on the model's device."""
    if isinstance(head, nn.Module):
        return copy.deepcopy(head).to(model.device).eval()  # type: ignore[return-value]
    if head == model.config["head"]:
        return model.head
    if head == LinearHead.name:
        raise ValueError(
            f"the checkpoint has no trained linear head, its head is {model.config['head']!r}: "
            "choose another head or a checkpoint of CNAPS"
        )
    settings = [model.config[name] for name in ("beta", "task_covariance", "one_shot_covariance")]
    made = make_head(head, covariance=RegularizedCovariance(*settings), scale=model.config["scale"])
    return made.to(model.device)
