"""The Chebyshev distance as a metric."""

from __future__ import annotations

from torch import Tensor

from fewshot_mahalanobis.heads.prototypes import PrototypeHead


class ChebyshevHead(PrototypeHead):
    """Logits = -max_i |x_i - mu_ki|: the largest difference of any feature."""

    name = "chebyshev"
    title = "Chebyshev"

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Minus the largest difference: queries (m, d), class means (k, d) -> logits (m, k)."""
        return -(queries[:, None] - means).abs().amax(dim=2)
