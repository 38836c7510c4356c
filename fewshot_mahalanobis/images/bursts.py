"""Pictures of one thing: those of one folder, or those that a camera took within seconds of each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from PIL import ExifTags, Image

from fewshot_mahalanobis.images.folders import natural_key
from fewshot_mahalanobis.images.region import Region

__all__ = ["bursts", "by_folder"]


def by_folder(pictures: Sequence[Path | Region]) -> list[str]:
    """The folder of each picture. ValueError if one is a box."""
    return [str(path.parent) for path in _whole(pictures, "folder")]


def bursts(pictures: Sequence[Path | Region], seconds: float) -> list[str]:
    """The burst of each picture: the path of its first one.

    Pictures of one folder follow each other by their EXIF time. One that was taken more than so many seconds after the
    one before begins another burst. A file that is no picture is a burst of its own.

    Raises
    ------
    ValueError
        A picture has no EXIF time, or is a box. The message names it.
    """
    taken = defaultdict[Path, list[tuple[datetime, Path]]](list)
    names = dict[Path, str]()
    for path in dict.fromkeys(_whole(pictures, "seconds")):
        if (time := _taken(path)) is None:
            names[path] = str(path)
        else:
            taken[path.parent].append((time, path))
    for in_folder in taken.values():
        in_folder.sort(key=lambda each: (each[0], natural_key(str(each[1]))))
        first, before = in_folder[0][1], in_folder[0][0]
        for time, path in in_folder:
            if time - before > timedelta(seconds=seconds):
                first = path
            names[path], before = str(first), time
    return [names[path] for path in _whole(pictures, "seconds")]


def _whole(pictures: Sequence[Path | Region], how: str) -> list[Path]:
    for picture in pictures:
        if isinstance(picture, Region):
            raise ValueError(
                f"{picture} is a box, and boxes of one picture are of several things: name those of one thing alike in "
                f"a column of the table, and group by that column, not by {how}"
            )
    return [picture for picture in pictures if not isinstance(picture, Region)]


def _taken(path: Path) -> datetime | None:
    """When a picture was taken, by its EXIF data; None if it is no picture, which whoever reads its pixels will say."""
    try:
        with Image.open(path) as image:
            exif = image.getexif()
            camera = exif.get_ifd(ExifTags.IFD.Exif)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    text = camera.get(ExifTags.Base.DateTimeOriginal) or exif.get(ExifTags.Base.DateTime) or ""
    fraction = str(camera.get(ExifTags.Base.SubsecTimeOriginal) or "0").strip() or "0"
    try:
        time = datetime.strptime(str(text).strip(" \0"), "%Y:%m:%d %H:%M:%S")
        return time + timedelta(seconds=float(f"0.{fraction}"))
    except ValueError:
        raise ValueError(
            f"{path} has no EXIF time, by which bursts are found: group by folder, or by a column of a table"
        ) from None
