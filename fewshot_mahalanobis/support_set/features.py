"""Features of examples, support or queries, as a fitted head compares them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor


class Features(NamedTuple):
    """Features of n examples.

    Attributes
    ----------
    adapted : Tensor of shape (n, d)
        What the head classifies.
    unadapted : Tensor of shape (n, d), optional
        Features of the same images by the network without adaptation, for the outlier score. None if the network is not
        adapted, if no query is rejected, or if the examples are not images.
    """

    adapted: Tensor
    unadapted: Tensor | None = None

    @property
    def pretrained(self) -> Tensor:
        """Features by the network as it was pretrained: ``unadapted``, or ``adapted`` if there is no adaptation."""
        return self.adapted if self.unadapted is None else self.unadapted

    def to(self, device: torch.device) -> Features:
        """Move to a device."""
        return Features(self.adapted.to(device), None if self.unadapted is None else self.unadapted.to(device))

    def rows_where(self, chosen: NDArray[Any]) -> Features:
        """Features of some examples, by a mask (n,) or their indices."""
        rows = torch.from_numpy(chosen).to(self.adapted.device)
        return Features(self.adapted[rows], None if self.unadapted is None else self.unadapted[rows])

    def rows(self) -> list[Features]:
        """Features of each example alone."""
        adapted = self.adapted.split(1)
        unadapted = [None] * len(adapted) if self.unadapted is None else self.unadapted.split(1)
        return [Features(*row) for row in zip(adapted, unadapted, strict=True)]

    @classmethod
    def joined(cls, parts: Iterable[Features]) -> Features:
        """Join the features of several sets of examples; all or none have ``unadapted``."""
        adapted, unadapted = zip(*parts, strict=True)
        return cls(torch.cat(adapted), None if unadapted[0] is None else torch.cat(unadapted))
