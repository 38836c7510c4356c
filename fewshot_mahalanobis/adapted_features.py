"""Features of images by a network that is adapted to them, as a scikit-learn transformer.

    fit:        images  ->  network adapted to them
    transform:  images  ->  features (n, d)

:class:`~fewshot_mahalanobis.SimpleCNAPSClassifier` is this transformer with a head.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.networks.devices import (
    check_precision,
    choose_device,
    choose_dtype,
    device_of,
    on_cpu,
)
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS, adapted_network
from fewshot_mahalanobis.networks.task import AdaptedNetwork
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

    def kept(self) -> dict[str, Any]:
        """Return what a pickle keeps, on the CPU."""
        film = None if self.network.film is None else self.network.film.to(torch.device("cpu"))
        return {"device": self.device, "model": on_cpu(self.model), "film": film, "precision": self.precision}

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> FittedNetwork:
        """Undo :meth:`kept`, on the device that it names."""
        try:
            device = choose_device(kept["device"])
        except ValueError:
            device = torch.device("cpu")
            warnings.warn(f"there is no device {kept['device']} here: what was fitted is on the CPU", stacklevel=2)
        model = kept["model"].to(device)
        film = None if kept["film"] is None else kept["film"].to(device)
        dtype = choose_dtype(kept["precision"], model.feature_extractor)
        network = AdaptedNetwork(model.feature_extractor, film, dtype, model.projection)
        return FittedNetwork(device, model, kept["precision"], network)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).restored, (self.kept(),)


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
    n_jobs : int, optional
        Threads that decode images, counted as in scikit-learn (-1: all cores). By default the usable cores, at most 4.
    verbose : int, default=0
        1 shows progress bars.

    Attributes
    ----------
    n_features_out_ : int
        Width d of a feature vector.
    device_ : torch.device
    model_ : SimpleCNAPS
        The pretrained model, unadapted.
    precision_ : str
        ``precision`` as it was when the network was adapted.

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
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.checkpoint = checkpoint
        self.adapt = adapt
        self.image_size = image_size
        self.device = device
        self.precision = precision
        self.batch_size = batch_size
        self.value_range = value_range
        self.n_jobs = n_jobs
        self.verbose = verbose

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
        model, batches = self._model_and_batches(X)
        dtype = choose_dtype(self.precision, model.feature_extractor)
        network, _ = self._adapted_network(model, batches, dtype, batches.batch_size)
        self._fitted = FittedNetwork(network.device, model, self.precision, network)
        return self

    def transform(self, X: Any) -> NDArray[Any]:
        """Adapted features (m, d) of m images, float32."""
        check_is_fitted(self)
        return torch.cat([features.adapted for features in self._query_features(X, "transform")]).cpu().numpy()

    # ---------------------------------------------------------------- images -> adapted network

    def _model_and_batches(self, X: Any) -> tuple[SimpleCNAPS, ImageBatches]:
        """The pretrained model on its device, and the images to fit to; ValueError if a setting is unknown."""
        device = choose_device(self.device)
        check_precision(self.precision)
        model = self._model_on(device)
        return model, self._batches(X, model.image_size, device, "fit")

    def _model_on(self, device: torch.device) -> SimpleCNAPS:
        """The pretrained model. It is shared if it is as it is needed: nothing here changes a model."""
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
        return features_of_batches(batches, self._fitted.network, None, batches.batch_size)

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
        """Images as this estimator reads them, by its ``value_range``.

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
            progress=progress if self.verbose else None,
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
        other = type(self)(**self.get_params(deep=False))
        if hasattr(self, "_fitted"):
            other._fitted = self._fitted
        return other

    def __getstate__(self) -> dict[str, Any]:
        # A module given as checkpoint goes to the CPU, for machines without this device; so does what was fitted.
        return {name: on_cpu(value) for name, value in super().__getstate__().items()}


def features_of_batches(
    batches: Iterable[Tensor], network: AdaptedNetwork, unadapted: AdaptedNetwork | None, batch_size: int
) -> Iterator[Features]:
    """Features of each batch by one network or two; ``batch_size`` images are tried at a time, then what has fitted."""
    for images in batches:
        adapted, batch_size = _within_memory(partial(network.features, images), min(batch_size, len(images)))
        pretrained = None
        if unadapted is not None:
            pretrained, batch_size = _within_memory(partial(unadapted.features, images), batch_size)
        yield Features(adapted, pretrained)


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
