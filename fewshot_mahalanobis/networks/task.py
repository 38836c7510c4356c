"""A network adapted to a task, and the task: that network with a fitted head."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.cores import cores, map_in_threads, one_thread
from fewshot_mahalanobis.networks.backbone import Backbone
from fewshot_mahalanobis.networks.devices import device_of, without_cudnn
from fewshot_mahalanobis.networks.efficientnet import EfficientNet
from fewshot_mahalanobis.networks.engine import ONNX_RUNTIME, PYTORCH, OnnxRuntime, choose_engine, engine_version
from fewshot_mahalanobis.networks.extractor import FeatureExtractor
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.set_encoder import in_batches
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

#: Pixels at a time on one core, four images of 224 pixels, unless the network says another number. From two to six
#: images no number is faster. With more, the largest maps exceed 32 MB in float32, and glibc fetches fresh, zeroed
#: pages for each of them.
MAX_CPU_PIXELS = 32 * 84 * 84


def is_separable(extractor: FeatureExtractor) -> bool:
    """Whether the convolutions are depthwise and 1 x 1, for :func:`without_cudnn`."""
    return isinstance(extractor, EfficientNet)


class AdaptedNetwork:
    """A feature extractor with FiLM parameters folded into its convolutions: images in, features out.

    Parameters
    ----------
    extractor : FeatureExtractor
        It is not changed.
    film : Film, optional
        FiLM parameters of the task; None leaves the network as pretrained.
    dtype : torch.dtype
        Precision of the convolutions.
    projection : nn.Module, optional
        Learned projection of the features (the "+P" variant).
    pixels : int, optional
        How many pixels of images it is for, if that is known.

    Attributes
    ----------
    film, dtype
        The arguments.
    engine : str
        What computes the features of images on this device: "ONNX Runtime" or "PyTorch".
    device : torch.device
        That of the extractor, to which images are moved.
    out_features : int
        Width d of a feature vector; 512 for the FiLM ResNet18.
    """

    @one_thread()
    def __init__(
        self,
        extractor: FeatureExtractor,
        film: Film | None = None,
        dtype: torch.dtype = torch.float32,
        projection: nn.Module | None = None,
        pixels: int | None = None,
    ) -> None:
        self.film = film
        self.dtype = dtype
        self.device = device_of(extractor)
        self.out_features = extractor.out_features
        with self._own_precision():
            self.extractor = extractor.for_inference(film, dtype)
        self.engine = choose_engine(self.extractor, self.device, dtype, pixels)
        self._run = OnnxRuntime(self.extractor) if self.engine == ONNX_RUNTIME else self.extractor
        self.projection = projection
        self._separable = is_separable(extractor)

    @torch.no_grad()
    def features(self, images: Tensor, batch_size: int = 64) -> Tensor:
        """Features f_theta^tau(x) of images (n, 3, h, w) in [-1, 1] -> (n, d), float32."""
        features = self.unprojected_features(images, batch_size)
        with self._own_precision():
            return features if self.projection is None else self.projection(features)

    @torch.no_grad()
    def unprojected_features(self, images: Tensor, batch_size: int = 64) -> Tensor:
        """Features (n, d) before the projection of the "+P" variant."""
        if len(images) == 0:
            return torch.empty(0, self.out_features, dtype=torch.float32, device=self.device)
        if self.device.type != "cpu":
            return torch.cat([self._extracted(batch) for batch in images.split(batch_size)])
        most = getattr(self._run, "cpu_pixels", MAX_CPU_PIXELS) // images[0, 0].numel()
        batches = _equal_batches(images, max(1, min(batch_size, most)))
        if len(batches) == 1 and isinstance(self.extractor, Backbone):  # which may be large
            return self._extracted(images)
        return torch.cat(map_in_threads(self._extracted, batches))

    def _extracted(self, images: Tensor) -> Tensor:
        images = images.to(self.device, self.dtype)
        if self.engine == PYTORCH:
            images = channels_last(images)
        with self._own_precision(), without_cudnn(self.device) if self._separable else nullcontext():
            features: Tensor = self._run(images)
        return features

    def fingerprint(self) -> bytes | None:
        """Digest of everything that features depend on beside the images; None for a module of the user's own code.

        That is the folded weights, structure, precision, kind of device, engine, and the versions of the code.
        """
        if isinstance(self.extractor, Backbone) and self.extractor.origin is None:
            return None
        if not type(self.extractor).__module__.startswith(__package__.partition(".")[0]):
            return None
        code = __version__, str(self.dtype), self.device.type, engine_version(self.engine)
        digest = hashlib.sha256(repr(code).encode())
        for module in (self.extractor,) if self.projection is None else (self.extractor, self.projection):
            digest.update(repr(module).encode())
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    def _own_precision(self) -> torch.autocast:
        """Leave the caller's autocast: a network that needs its own enters it."""
        return torch.autocast(self.device.type, enabled=False)


class AdaptedTask:
    """A model adapted to one support set, ready for any number of queries.

    Made by :meth:`SimpleCNAPS.adapt`.

    Attributes
    ----------
    network : AdaptedNetwork
    unadapted : AdaptedNetwork or None
        The network as pretrained, if the outlier score compares its features too.
    fitted_head : FittedHead
    """

    def __init__(
        self, network: AdaptedNetwork, fitted_head: FittedHead, unadapted: AdaptedNetwork | None = None
    ) -> None:
        self.network = network
        self.fitted_head = fitted_head
        self.unadapted = unadapted

    def features(self, images: Tensor, batch_size: int = 64) -> Tensor:
        """Adapted features (n, d) of images (n, 3, h, w) in [-1, 1], float32."""
        return self.network.features(images, batch_size)

    def logits(self, query_images: Tensor, batch_size: int = 64) -> Tensor:
        """Logits (m, k) of query images (m, 3, h, w) in [-1, 1]; their softmax is equation 1."""
        return self.fitted_head.logits(self.features(query_images, batch_size))


def _equal_batches(images: Tensor, most: int) -> Sequence[Tensor]:
    """As few batches of at most so many images as give each thread equally many."""
    rounds = -(-len(images) // (cores() * most))
    return images.split(-(-len(images) // (cores() * rounds)))


def channels_last(images: Tensor) -> Tensor:
    """Images (n, c, h, w) in the memory layout in which convolutions are fastest."""
    return images.contiguous(memory_format=torch.channels_last)


class SupportBatches:
    """A support set as batches for a network, channels_last, any number of times.

    Parameters
    ----------
    images : Tensor of shape (n, 3, h, w), or iterable of such batches of it
        Batches are iterated over anew each time.
    size : int
        Most images of a batch.
    device : torch.device
    dtype : torch.dtype
    """

    def __init__(self, images: Tensor | Iterable[Tensor], size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.images, self.size, self.device, self.dtype = images, size, device, dtype

    def __iter__(self) -> Iterator[Tensor]:
        for images in in_batches(self.images, self.size):
            for batch in images.split(self.size):
                yield channels_last(batch.to(self.device, self.dtype))


def check_episode(support_images: Tensor, support_labels: Tensor) -> None:
    """Raise ValueError unless there are images (n, 3, h, w) and as many labels (n,)."""
    if support_images.ndim != 4 or support_images.shape[1] != 3:
        raise ValueError(f"support_images must have shape (n, 3, h, w), not {tuple(support_images.shape)}")
    if support_labels.shape != support_images.shape[:1]:
        raise ValueError(
            f"{len(support_images)} support images need as many labels in one dimension, "
            f"not shape {tuple(support_labels.shape)}"
        )
