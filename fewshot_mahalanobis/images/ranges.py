"""Numbers of other depths than 8 bits as 0 to 255."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_mahalanobis.images.errors import ImageError

#: Tolerance for floats just outside [0, 1].
_ROUNDING = 1e-6


def unit_to_eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Floats in [0, 1] -> 0 to 255, rounded: k / 255 gives k."""
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(low) or not np.isfinite(high):
        raise ImageError("it contains NaN or infinity")
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        remedy = "map them back with (x + 1) / 2" if -1 <= low < 0 and high <= 1 else "divide by 255"
        raise ImageError(
            f"its values run from {low:g} to {high:g}, but floats must lie in [0, 1]: "
            f"{remedy}, or by whatever spans [0, 1]"
        )
    return np.rint(np.clip(values, 0, 1).astype(np.float32) * 255).astype(np.uint8)


def sixteen_to_eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Integers from 0 to 65535 -> 0 to 255, rounded: 257 k gives k."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ImageError(f"its values run from {low} to {high}, but integer grey must lie in 0 to 65535: rescale it")
    return np.rint(values / 257).astype(np.uint8)
