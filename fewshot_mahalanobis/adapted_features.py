"""Features of images by a network that is adapted to them, as a scikit-learn transformer.

    fit:        images  ->  network adapted to them
    transform:  images  ->  features (n, d)

:class:`~fewshot_mahalanobis.SimpleCNAPSClassifier` is this transformer with a head.
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.memory import FEATURES, PictureMemory, remembered_in
from fewshot_mahalanobis.images.pages import reading_of
from fewshot_mahalanobis.networks.devices import (
    check_precision,
    choose_device,
    choose_dtype,
    device_of,
    on_cpu,
)
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS, adapted_network
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.plain import snapshot
from fewshot_mahalanobis.support_set.features import Features

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class FittedNetwork:
    """What ``fit`` learns: a pretrained model, and its network adapted to the images.

    A pickle has the model and the FiLM parameters, which give back the adapted network. It opens on the CPU, with a
    warning, where its device is absent.
    """

    device: torch.device
    model: SimpleCNAPS
    precision: str
    network: AdaptedNetwork

    def to_state(self) -> dict[str, Any]:
        """Return what a pickle keeps, on the CPU."""
        film = None if self.network.film is None else self.network.film.to(torch.device("cpu"))
        return {"device": self.device, "model": on_cpu(self.model), "film": film, "precision": self.precision}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> FittedNetwork:
        """Undo :meth:`to_state`, on the device that it names."""
        try:
            device = choose_device(state["device"])
        except ValueError:
            device = torch.device("cpu")
            warnings.warn(f"there is no device {state['device']} here: what was fitted is on the CPU", stacklevel=2)
        model = state["model"].to(device)
        film = None if state["film"] is None else state["film"].to(device)
        dtype = choose_dtype(state["precision"], model.feature_extractor)
        network = AdaptedNetwork(model.feature_extractor, film, dtype, model.projection)
        return FittedNetwork(device, model, state["precision"], network)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_state, (self.to_state(),)


class AdaptedFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Features of images, by a pretrained network that one forward pass adapts to them; no labels are needed.

    They serve all of scikit-learn: regression, clustering, several labels on one image, any classifier. For one label
    on each image, :class:`SimpleCNAPSClassifier` has the same features and a head for few examples.

    Images are what :class:`SimpleCNAPSClassifier` takes: files, PIL images, arrays or tensors, each of its own size.

    Parameters
    ----------
    checkpoint : str, path or SimpleCNAPS, default="default"
        The pretrained model: a name of :func:`available_checkpoints`, a folder, a Hub repository ("user/repo",
        optionally "@revision"), or the module itself, which is used as it is and never changed. ``memory=`` of a
        pipeline recognises a name or a folder, but no module.
    adapt : bool, default=True
        False leaves the network as pretrained: the features of an image then depend on no other image.
    image_size : int, optional
        Side of the square that images are resized to, in pixels; by default the checkpoint's.
    device : str or torch.device, default="auto"
        Where the network runs; "auto" is CUDA where there is one, else the CPU.
    precision : {"auto", "float32", "bfloat16"}, default="auto"
        Precision of the convolutions, as for :class:`SimpleCNAPSClassifier`.
    batch_size : int, default=64
        Images processed at a time. It bounds memory; results depend on it only by rounding.
    value_range : (float, float), optional
        The values that are black and white in images of numbers, as for :class:`SimpleCNAPSClassifier`.
    pages, bands : optional
        The page of a stack and the bands that are read, as for :class:`SimpleCNAPSClassifier`.
    n_jobs : int, optional
        Threads that decode images, counted as in scikit-learn (-1: all cores). By default the usable cores, at most 4.
    verbose : int, default=0
        1 shows progress bars.
    memory : path, optional
        Folder in which pictures and features are remembered, as for :class:`SimpleCNAPSClassifier`.

    Attributes
    ----------
    n_features_out_ : int
        Width d of a feature vector.
    device_ : torch.device
    model_ : SimpleCNAPS
        The pretrained model, unadapted.
    precision_ : str
        ``precision`` as it was when the network was adapted.
    engine_ : str
        What runs the network: "PyTorch", or "ONNX Runtime" where it is installed and faster (see the page "How fast").

    References
    ----------
    Bateni, Goyal, Masrani, Wood, Sigal: Improved Few-Shot Visual Classification. CVPR 2020.

    Examples
    --------
    >>> from fewshot_mahalanobis import AdaptedFeatures
    >>> from sklearn.cluster import KMeans
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.pipeline import make_pipeline
    >>> images = load_digits(n_class=3).images[:30] / 16
    >>> make_pipeline(AdaptedFeatures(), KMeans(3, random_state=0)).fit_predict(images).shape
    (30,)
    """

    _fitted: FittedNetwork

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | SimpleCNAPS = "default",
        *,
        adapt: bool = True,
        image_size: int | None = None,
        device: str | torch.device = "auto",
        precision: str = "auto",
        batch_size: int = 64,
        value_range: tuple[float, float] | None = None,
        pages: str | int | Sequence[int] | None = None,
        bands: int | Sequence[int] | None = None,
        n_jobs: int | None = None,
        verbose: int = 0,
        memory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.adapt = adapt
        self.image_size = image_size
        self.device = device
        self.precision = precision
        self.batch_size = batch_size
        self.value_range = value_range
        self.pages = pages
        self.bands = bands
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.memory = memory

    def fit(self, X: Any, y: Any = None) -> AdaptedFeatures:
        """Adapt the network to images and return the transformer itself. After an error it is what it was before.

        Parameters
        ----------
        X : collection of n images
            They should show what the task is like: all of its classes, as evenly as there are images.
        y : ignored
            Adaptation needs no labels.

        Raises
        ------
        ValueError
            An image cannot be used (:class:`~fewshot_mahalanobis.images.errors.ImageError`, which names it), or a
            constructor argument is unknown.
        """
        now = snapshot(self)
        now._check_params()
        model, batches = now._model_and_batches(X)
        dtype = choose_dtype(now.precision, model.feature_extractor)
        network, _ = now._adapted_network(model, batches, dtype, batches.batch_size)
        self._fitted = FittedNetwork(network.device, model, now.precision, network)
        return self

    def transform(self, X: Any) -> NDArray[Any]:
        """Adapted features (m, d) of m images, float32."""
        check_is_fitted(self)
        now = snapshot(self)
        return torch.cat([features.adapted for features in now._query_features(X, "transform")]).cpu().numpy()

    # ---------------------------------------------------------------- images -> adapted network

    def _check_params(self) -> None:
        """Raise ValueError if a constructor argument cannot be used, whatever the images are."""
        choose_device(self.device)
        check_precision(self.precision)
        reading_of(self)

    def _model_and_batches(self, X: Any) -> tuple[SimpleCNAPS, ImageBatches]:
        """The pretrained model on its device, and the images to fit to."""
        device = choose_device(self.device)
        model = self._model_on(device)
        return model, self._batches(X, model.image_size, device, "fit")

    def _model_on(self, device: torch.device) -> SimpleCNAPS:
        """The pretrained model; the one given where it fits, as nothing here changes a model."""
        if isinstance(self.checkpoint, nn.Module) and not isinstance(self.checkpoint, SimpleCNAPS):
            raise ValueError(
                f"checkpoint is a {type(self.checkpoint).__name__}, a network without a head: make the checkpoint with "
                "SimpleCNAPS.from_backbone(network, image_size=..., mean=..., std=...)"
            )
        model = self.checkpoint if isinstance(self.checkpoint, SimpleCNAPS) else load_checkpoint(self.checkpoint)
        if self.image_size is not None:
            model = model.at_size(self.image_size)
        if model.training or device_of(model) != device:
            model = copy.deepcopy(model).eval().to(device)
        return model

    def _adapted_network(
        self, model: SimpleCNAPS, images: Iterable[Tensor], dtype: torch.dtype, batch_size: int
    ) -> tuple[AdaptedNetwork, int]:
        """The network adapted to batches of images, and how many images at a time the memory holds."""
        adapted = partial(adapted_network, model, images, adapt=self.adapt, dtype=dtype)
        return _within_memory(lambda size: adapted(batch_size=size), batch_size)

    # ---------------------------------------------------------------- images -> features

    def _query_features(self, X: Any, method: str) -> Iterator[Features]:
        batches = self._query_batches(X, method)
        return features_of_batches(batches, self._fitted.network, None, batches.batch_size, batches.memory)

    def _query_batches(self, X: Any, name: str) -> ImageBatches:
        return self._batches(X, self.model_.image_size, self.device_, name)

    def _batches(self, X: Any, size: int, device: torch.device, progress: str) -> ImageBatches:
        batches = self.image_batches(X, size, progress=progress)
        # On a CPU the network has all cores, and all of its threads would wait for the one whose core decodes.
        batches.ahead = device.type != "cpu"
        return batches

    def image_batches(
        self,
        X: Any,
        size: int | None = None,
        *,
        on_error: Callable[[ImageError], object] | None = None,
        progress: str | None = None,
    ) -> ImageBatches:
        """Images as this estimator reads them, by its ``value_range``, ``pages`` and ``bands``.

        Parameters
        ----------
        X : collection of m images
        size : int, optional
            Side of the squares, in pixels; by default that of the network's input.
        on_error : callable, optional
            Called with the error of each image that cannot be used, which is then left out.
        progress : str, optional
            Name of the progress bar, shown with ``verbose=1``.

        Returns
        -------
        ImageBatches
            An iterable of float32 batches (b, 3, size, size) in [-1, 1].
        """
        return ImageBatches(
            X,
            self.model_.image_size if size is None else size,
            batch_size=self.batch_size,
            n_jobs=self.n_jobs,
            on_error=on_error,
            value_range=self.value_range,
            pages=self.pages,
            bands=self.bands,
            progress=progress if self.verbose else None,
            memory=remembered_in(self.memory),
        )

    # ---------------------------------------------------------------- attributes

    @property
    def device_(self) -> torch.device:
        """Where the network runs."""
        return self._fitted.device

    @property
    def model_(self) -> SimpleCNAPS:
        """The pretrained model, unadapted."""
        return self._fitted.model

    @property
    def precision_(self) -> str:
        """``precision`` as it was when the network was adapted."""
        return self._fitted.precision

    @property
    def engine_(self) -> str:
        """What runs the network: "PyTorch", or "ONNX Runtime" where that is faster."""
        return self._fitted.network.engine

    @property
    def n_features_out_(self) -> int:
        """Width d of a feature vector."""
        return self._fitted.network.out_features

    @property
    def _n_features_out(self) -> int:  # for the names that set_output and get_feature_names_out give
        return self.n_features_out_

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_fitted")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = True  # of paths
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        return tags

    def __copy__(self) -> AdaptedFeatures:
        """An estimator of its own, which shares the network: nothing changes that."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        # A module given as checkpoint goes to the CPU, for machines without this device; so does what was fitted.
        return {name: on_cpu(value) for name, value in copy.copy(self).__dict__.items()}


def features_of_batches(
    batches: Iterable[Tensor],
    network: AdaptedNetwork,
    unadapted: AdaptedNetwork | None,
    batch_size: int,
    memory: PictureMemory | None = None,
) -> Iterator[Features]:
    """Features of each batch by one network or two, ``batch_size`` images at a time, or as many as the memory held.

    With a ``memory`` those of images that a network has seen before are taken from there.
    """
    networks = [each for each in (network, unadapted) if each is not None]
    fingerprints = [None if memory is None else each.fingerprint() for each in networks]
    for images in batches:
        batch_size, found = min(batch_size, len(images)), list[Tensor]()
        for each, fingerprint in zip(networks, fingerprints, strict=True):
            if memory is None or fingerprint is None:
                features, batch_size = _within_memory(partial(each.features, images), batch_size)
            else:
                features, batch_size = _remembered_features(images, each, batch_size, memory, fingerprint)
            found.append(features)
        yield Features(*found)


def _remembered_features(
    images: Tensor, network: AdaptedNetwork, batch_size: int, memory: PictureMemory, fingerprint: bytes
) -> tuple[Tensor, int]:
    """Features (n, d) of images (n, 3, s, s), computed only for those that are not in memory."""
    pixels = images.to(network.dtype).permute(0, 2, 3, 1).contiguous().view(torch.uint8).cpu().numpy()
    keys = [FEATURES + hashlib.sha256(fingerprint + hashlib.sha256(image).digest()).digest() for image in pixels]
    known = memory.get(keys)
    missing = [index for index, key in enumerate(keys) if key not in known]
    if missing:
        some = images if len(missing) == len(keys) else images[missing]
        computed, batch_size = _within_memory(partial(network.features, some), min(batch_size, len(missing)))
        new = {keys[index]: row.tobytes() for index, row in zip(missing, computed.cpu().numpy(), strict=True)}
        memory.put(new)
        known |= new
    rows = np.frombuffer(bytearray(b"".join(known[key] for key in keys)), np.float32)
    return torch.from_numpy(rows.reshape(len(keys), -1)).to(network.device), batch_size


def _within_memory(compute: Callable[[int], Result], batch_size: int) -> tuple[Result, int]:
    """Call ``compute(batch_size)``; halve the size, with a warning, until CUDA's memory holds such a batch.

    Returns
    -------
    (Result, int)
        The result, and the size that worked.

    Raises
    ------
    torch.cuda.OutOfMemoryError
        The memory does not hold one image.
    """
    size = batch_size
    while True:
        try:
            result = compute(size)
            break
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise
        # Outside the handler, where the error no longer keeps the failed attempt's tensors alive.
        torch.cuda.empty_cache()
        size //= 2
    if size < batch_size:
        warnings.warn(
            f"CUDA's memory does not hold a batch of {batch_size} images: continuing with {size} at a time. "
            f"Set batch_size={size} to avoid the failed attempt",
            stacklevel=2,
        )
    return result, size
