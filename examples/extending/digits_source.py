"""scikit-learn's handwritten digits as a source of episodes."""

from __future__ import annotations

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fewshot_mahalanobis.images.picture import to_square_array
from fewshot_mahalanobis.research.data.sources import ImageSource


def digits_source(size: int = 84) -> ImageSource:
    """Return the digits as squares of ``size`` pixels, one class after the other."""
    digits = load_digits()
    order = digits.target.argsort(kind="stable")
    pictures = [Image.fromarray(np.uint8(255 / 16 * image)) for image in digits.images[order]]
    squares = np.stack([to_square_array(picture, size) for picture in pictures])
    return ImageSource("digits", squares, digits.target[order], tuple("0123456789"))
