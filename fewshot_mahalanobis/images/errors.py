"""The error of an image that cannot be used."""

from __future__ import annotations


class ImageError(ValueError):
    """An image, or a collection of images, cannot be used. The message names it and the remedy.

    Attributes
    ----------
    reason : str
        The message without the name of the image.
    index : int or None
        Position of the image in its collection.
    """

    def __init__(self, reason: str, index: int | None = None, name: str = "") -> None:
        super().__init__(reason if index is None else f"image {index} ({name}): {reason}")
        self.reason = reason
        self.index = index
