"""Whatever a user calls an image, as the tensor the network reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def to_square_array(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """One decoded image as uint8 RGB of shape (size, size, 3)."""
    rgb = image.convert("RGB")
    if rgb.size != (size, size):
        rgb = rgb.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(rgb)
