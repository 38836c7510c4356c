"""The error of an image that cannot be used."""

from __future__ import annotations

#: Longest beginning and end of another library's message that is quoted.
_MOST = 300


def shortened(error: Exception) -> str:
    """The message of another library's error, shortened, as it may quote a whole input."""
    text = str(error)
    return text if len(text) <= 2 * _MOST else f"{text[:_MOST]} ... {text[-_MOST:]}"


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
