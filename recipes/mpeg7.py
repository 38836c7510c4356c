"""Silhouettes of MPEG-7 CE-Shape-1 as a zip of class folders, as the recipes of EfficientNet-Lite0 read it.

    python recipes/mpeg7.py FOLDER mpeg7.zip

FOLDER has the set's 1,400 files, "apple-1.gif" to "watch-20.gif", 20 of each of 70 classes; nothing is fetched. Each is
padded with black to a square and resized to 112 pixels.
"""

import io
import sys
import zipfile
from pathlib import Path

from PIL import Image

SIDE = 112


def prepare(folder: Path, output: Path) -> int:
    """Write the zip and count its images."""
    files = sorted(folder.glob("*-*.gif"))
    with zipfile.ZipFile(output, "w") as archive:
        for file in files:
            with Image.open(file) as opened:
                image = opened.convert("L")
            side = max(image.size)
            square = Image.new("L", (side, side))
            square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            content = io.BytesIO()
            square.resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(content, "PNG")
            name = file.stem.lower()
            archive.writestr(f"train/{name.rsplit('-', 1)[0]}/{name}.png", content.getvalue())
    return len(files)


if __name__ == "__main__":
    print(f"{sys.argv[2]}: {prepare(Path(sys.argv[1]), Path(sys.argv[2]))} images")
