"""What meta-training asks of a method beyond being a head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.heads import Head

State = TypeVar("State")


class Method(Head[State]):
    """A head that the paper compares with, and that ``meta-train --method`` may train.

    ``METHODS[name]()`` is the method without learned weights, for a network that was not trained for it;
    ``METHODS[name].for_model(settings, in_features)`` has weights yet to be learned or loaded.

    Attributes
    ----------
    needs_training : bool
        Whether it is of no use on the features of a network that was not trained for it.
    trains_network : bool
        Whether meta-training changes the network's weights too. A method that neither has weights of its own nor
        changes those of the network has nothing to train.
    adaptation : {"none", "film", "gradients"}
        How the network adapts to a task: not at all, by FiLM like Simple CNAPS, or by gradient steps.
    """

    needs_training: ClassVar[bool] = False
    trains_network: ClassVar[bool] = True
    adaptation: ClassVar[str] = "none"

    @classmethod
    def for_model(cls, settings: Mapping[str, Any], in_features: int) -> Method[Any]:
        """Make the method for features of this width, with the settings of a ``Baseline``."""
        return cls()

    @property
    def base_classes(self) -> int:
        """Number of training classes that it keeps weights of."""
        return 0

    def prepare(self, classes: Iterable[Tensor]) -> None:
        """Take features (n, d) of a few images of each training class, before training begins."""

    def adapt_network(
        self, network: nn.Module, images: Tensor, labels: Tensor, *, training: bool
    ) -> tuple[dict[str, Tensor], State | None]:
        """Adapt the network to a support set by other means than FiLM.

        Parameters
        ----------
        network : nn.Module
            Images to features (n, d). It is not changed.
        images : Tensor of shape (n, ...)
            Support images.
        labels : int64 Tensor of shape (n,)
        training : bool
            Whether the task is one of training.

        Returns
        -------
        weights : dict of str to Tensor
            Weights of the network that change, by name.
        state
            The method's own state if it was adapted together with the network; None if it is to be fitted to features.
        """
        return {}, None

    def training_logits(
        self, support_features: Tensor, support_labels: Tensor, query_features: Tensor, classes: Tensor | None
    ) -> Tensor:
        """Logits (m, k) of a training task, whose ``classes`` (k,) are numbered among all training classes."""
        return self(support_features, support_labels, query_features)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Training loss of the logits (m, k) of queries with labels (m,): the cross-entropy unless overridden."""
        return F.cross_entropy(logits, labels)
