"""A model adapted to one task."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.heads import Head
from fewshot_mahalanobis.networks.extractor import FeatureExtractor
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.transduction import transductive_logits

#: Pixels at a time: larger CPU batches make every layer allocate fresh, zeroed pages.
MAX_CPU_PIXELS = 32 * 84 * 84


class AdaptedTask:
    """A model adapted to one support set, ready for any number of queries.

    Made by :meth:`SimpleCNAPS.adapt`, or unfitted by :meth:`SimpleCNAPS.with_film`.

    Attributes
    ----------
    film : Film, or None
        The FiLM parameters of the task; None without adaptation.
    head : Head
    support_features : Tensor of shape (n, d)
        Adapted features of the support set, float32; d = 512 for the FiLM ResNet18.
    support_labels : int64 Tensor of shape (n,)
    dtype : torch.dtype
        Precision of the convolutions.
    """

    support_features: Tensor
    support_labels: Tensor
    _state: Any

    def __init__(
        self,
        extractor: FeatureExtractor,
        film: Film | None,
        head: Head,
        dtype: torch.dtype,
        *,
        projection: nn.Module | None,
        device: torch.device,
    ) -> None:
        self.film = film
        self.head = head
        self.dtype = dtype
        self._projection = projection
        self._extractor = extractor.for_inference(film, dtype)
        self._out_features = extractor.out_features
        self._device = device

    @torch.no_grad()
    def refit(self, support_features: Tensor, support_labels: Tensor) -> AdaptedTask:
        """The same adapted network with its head fitted to other support features (n, d): more shots, new classes.

        Labels are int64 (n,). The new task shares this one's network; this one is unchanged.
        """
        task = copy.copy(self)
        task.support_features = support_features.to(self._device)
        task.support_labels = support_labels.to(self._device)
        task._state = self.head.fit(task.head_features(task.support_features), task.support_labels)
        return task

    @torch.no_grad()
    def features(self, images: Tensor, batch_size: int = 64) -> Tensor:
        """Adapted features f_theta^tau(x) of images (n, 3, h, w) in [-1, 1] -> (n, 512), float32."""
        most = batch_size
        if self._device.type == "cpu" and len(images):
            most = min(batch_size, max(1, MAX_CPU_PIXELS // images[0, 0].numel()))
        chunks = images.split(most) if len(images) else ()
        features = [self._extractor(channels_last(chunk.to(self._device, self.dtype))) for chunk in chunks]
        return torch.cat(features) if features else torch.empty(0, self._out_features, device=self._device)

    @torch.no_grad()
    def head_logits(self, features: Tensor) -> Tensor:
        """Logits (m, k) of adapted features (m, 512)."""
        return self.head.logits(self._state, self.head_features(features.to(self._device)))

    def transductive_logits(self, features: Tensor, temperature: float = 1.0) -> Tensor:
        """Logits (m, k) of all queries' adapted features (m, d), by classes that these refine (``transduction.py``)."""
        support, queries = (self.head_features(f.to(self._device)) for f in (self.support_features, features))
        return transductive_logits(self.head, self._state, support, self.support_labels, queries, temperature)

    def logits(self, query_images: Tensor, batch_size: int = 64) -> Tensor:
        """Logits (m, k) of query images (m, 3, h, w) in [-1, 1]; their softmax is equation 1."""
        return self.head_logits(self.features(query_images, batch_size))

    def head_features(self, features: Tensor) -> Tensor:
        """What the head classifies: adapted features (n, d), projected where the model has a projection."""
        return features if self._projection is None else self._projection(features)


def channels_last(images: Tensor) -> Tensor:
    """Images (n, c, h, w) in the memory layout that convolutions are fastest in."""
    return images.contiguous(memory_format=torch.channels_last)
