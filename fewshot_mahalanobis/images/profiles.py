"""ICC colour profiles: pictures in other colour spaces as sRGB, which the networks were trained on."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

#: Colour space of a profile's header -> mode of the pixels that it describes.
_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
#: Largest difference, in levels of 255, of a profile that is sRGB but for rounding.
_ROUNDING = 2


class ProfileError(ValueError):
    """A colour profile is damaged."""


def profile_mode(profile: bytes) -> str | None:
    """Mode of the pixels that a profile describes ("RGB", "L", "CMYK"), by its header, or None."""
    return _MODES.get(profile[16:20].decode("latin-1").strip())


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image in the mode of its profile to sRGB; ProfileError if the profile is damaged.

    A profile that is sRGB but for rounding changes nothing.
    """
    transform = _transform(profile, image.mode)
    return image.convert("RGB") if transform is None else transform.apply(image)


@lru_cache(maxsize=32)  # the pictures of a camera have one profile, and setting up takes longer than a small picture
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Conversion from a profile to sRGB by relative colorimetry; None if it changes no colour."""
    try:
        transform = ImageCms.buildTransform(
            ImageCms.getOpenProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError) as error:
        raise ProfileError(str(error)) from error
    if mode == "CMYK":
        return transform
    steps = np.arange(0, 256, 15, dtype=np.uint8)
    colours = np.stack(np.meshgrid(*[steps] * len(mode), indexing="ij"), axis=-1).reshape(1, -1, len(mode))
    palette = Image.fromarray(colours if mode == "RGB" else colours[..., 0])
    change = np.asarray(transform.apply(palette), int) - np.asarray(palette.convert("RGB"), int)
    return None if np.abs(change).max() <= _ROUNDING else transform
