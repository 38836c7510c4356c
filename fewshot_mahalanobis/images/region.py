"""A part of an image, which is classified as if it were the whole."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.plain import quoted

__all__ = ["Region"]

#: A box reaches beyond its picture by rounding alone if by at most this many pixels, or this share of the side.
_ROUNDING, _ROUNDED_SHARE = 1, 0.001


@dataclass(frozen=True)
class Region:
    """A part of an image, for wherever an image is taken. It gives what the image gives after cropping, to the bit.

    Boxes are in the picture as viewers and annotation tools show it: after its EXIF orientation is applied. The picture
    is decoded at full size, once for all of its regions in a collection that are not far apart.

    Parameters
    ----------
    image : image
        A path, PIL image, array or any other kind of image that a classifier takes.
    box : (float, float, float, float)
        Left edge, upper edge, width and height in pixels. Edges are rounded to whole pixels, as Pillow's ``crop`` does.
    margin : float, default=0.0
        How far the region reaches beyond the box on each side, as a share of the box's width and height. It ends where
        the picture ends.
    normalized : bool, default=False
        The box is in shares of the picture's width and height, from 0 to 1, instead of pixels.
    picture_size : (int, int), optional
        Width and height of the picture that the box was drawn in, if that is known: a picture of another size, or one
        that was not turned, is then refused.
    name : str, optional
        What messages add to the box, such as the row of a table.

    Raises
    ------
    ValueError
        The box is not four finite numbers, the margin is negative, or the image is a region. A box that is empty,
        reaches beyond its picture by more than rounding (a pixel, or a thousandth of the side) or may be in the other
        unit is refused with the image: :class:`~fewshot_mahalanobis.images.errors.ImageError`.

    Examples
    --------
    >>> from fewshot_mahalanobis import Region
    >>> Region("street.jpg", (410, 220, 96, 180), margin=0.1).edges(1024, 768)
    (400, 202, 516, 418)
    """

    image: Any
    box: tuple[float, float, float, float]
    margin: float = 0.0
    normalized: bool = field(default=False, kw_only=True)
    picture_size: tuple[int, int] | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.image, Region):
            raise ValueError("a region of a region: give the box in the whole picture")
        box: Any = self.box  # of any type as long as it is not checked
        box = box.tolist() if hasattr(box, "tolist") else box
        numbers = [*box] if isinstance(box, Iterable) and not isinstance(box, str | bytes) else [box]
        numbers = [number.item() if hasattr(number, "item") else number for number in numbers]
        if len(numbers) != 4 or not all(map(_is_number, numbers)):
            raise ValueError(
                f"a box is four finite numbers (x, y, width, height), got {quoted(self.box)}{self._of_image()}"
            )
        if not _is_number(self.margin) or self.margin < 0:
            raise ValueError(
                f"margin must be a finite number of at least 0, got {quoted(self.margin)}{self._of_image()}"
            )
        object.__setattr__(self, "box", tuple(numbers))

    def __str__(self) -> str:
        """Path or kind of its image, and its box."""
        return f"{_path(self.image) or type(self.image).__name__}, {self.place}"

    @property
    def path(self) -> str | None:
        """Path of its image, if that is one."""
        return _path(self.image)

    @property
    def place(self) -> str:
        """The box in words, and ``name``."""
        return f"box ({', '.join(map(str, self.box))})" + (f", {self.name}" if self.name else "")

    def problem(self) -> str | None:
        """Why the box is invalid, as far as the box alone shows; or None."""
        width, height = self.box[2:]
        if width <= 0 or height <= 0:
            return f"the box is empty: its width is {width} and its height {height}"
        if not self.normalized and max(width, height) <= 1 + _ROUNDED_SHARE:
            return (
                "the box is no larger than a pixel, and boxes are in pixels: if it is in shares of the picture's width "
                "and height, multiply it by them, or say so in Python with Region(..., normalized=True)"
            )
        if self.normalized and max(self.box) > 1 + _ROUNDED_SHARE:
            return "the box is to be in shares of the picture's width and height, from 0 to 1: is it in pixels?"
        return None

    def pixels(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left edge, upper edge, width and height of the box, without margin, in pixels of a picture of this size."""
        left, top, right, bottom = self._edges(width, height, 0.0)
        return left, top, right - left, bottom - top

    def edges(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, upper, right and lower edge of the region in a picture of this size, as Pillow's ``crop`` takes them.

        ImageError if the box is empty, reaches beyond the picture, or was drawn in a picture of another size.
        """
        return self._edges(width, height, self.margin)

    def _edges(self, width: int, height: int, margin: float) -> tuple[int, int, int, int]:
        problem = self.problem() or self._other_picture(width, height)
        if problem is not None:
            raise ImageError(problem)
        x, y, w, h = self.box
        unit_x, unit_y = (width, height) if self.normalized else (1, 1)
        left, right = _edges_along(x * unit_x, (x + w) * unit_x, width, margin)
        top, bottom = _edges_along(y * unit_y, (y + h) * unit_y, height, margin)
        if not 0 <= left <= right <= width or not 0 <= top <= bottom <= height:
            raise ImageError(f"the box reaches beyond the picture, which has {width} x {height} pixels")
        if left == right or top == bottom:
            raise ImageError("the box is empty: it is narrower than a pixel")
        return left, top, right, bottom

    def _other_picture(self, width: int, height: int) -> str | None:
        if self.picture_size is None or tuple(self.picture_size) == (width, height):
            return None
        drawn = "{} x {}".format(*self.picture_size)
        turned = tuple(self.picture_size) == (height, width)
        return f"the box is of a picture of {drawn} pixels, and this one has {width} x {height}" + (
            ": was it drawn before the picture was turned by its EXIF orientation?" if turned else ""
        )

    def _of_image(self) -> str:
        named = ", ".join(filter(None, (_path(self.image), self.name)))
        return f" ({named})" if named else ""


def _path(image: Any) -> str | None:
    return os.fsdecode(image) if isinstance(image, str | os.PathLike) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _edges_along(first: float, last: float, side: int, margin: float) -> tuple[int, int]:
    """Edges of a box along one side of its picture, the margin added, as whole pixels; beyond it if the box is."""
    allowed = max(_ROUNDING, _ROUNDED_SHARE * side)
    if first < -allowed or last > side + allowed:
        return -1, -1
    margin *= last - first
    return round(max(first - margin, 0)), round(min(last + margin, side))
