"""What meta-training asks of a method beyond being a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.heads import Head

State = TypeVar("State")


class Method(Head[State]):
    """A head that the paper compares with, and that ``meta-train --method`` may train.

    ``METHODS[name]()`` is the method without learned weights, for a network that was not trained for it;
    ``METHODS[name].of_model(settings, in_features)`` has weights yet to be learned or loaded.

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
    def of_model(cls, settings: Mapping[str, Any], in_features: int) -> Method[Any]:
        """Make the method for features of this width, with the settings of a ``Baseline``."""
        return cls()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Training loss of the logits (m, k) of queries with labels (m,): the cross-entropy unless overridden."""
        return F.cross_entropy(logits, labels)
