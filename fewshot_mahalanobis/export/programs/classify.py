"""Labels pictures by the graph model.onnx beside this file: python classify.py 1.jpg 2.png.

Needs onnxruntime, numpy and Pillow. Writes a table with path, label and the probability of the most probable class.
"""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageCms, ImageOps


class Classifier:
    """A graph and its labels."""

    def __init__(self, file: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        properties = self.session.get_modelmeta().custom_metadata_map
        self.classes, self.labels = json.loads(properties["classes"]), json.loads(properties["labels"])
        self.size, self.threshold = json.loads(properties["image_size"]), json.loads(properties["threshold"])

    def classify(self, file: Path) -> tuple[Any, list[float], float]:
        """Label of a picture, the probabilities of the classes, and the outlier score."""
        probabilities, label, score = self.session.run(None, {"pixels": pixels(file, self.size)})
        return self.labels[int(label)], probabilities.tolist(), float(score)


def pixels(file: Path, size: int) -> np.ndarray:
    """Read a picture of 8 bits as RGB or RGBA, upright and in sRGB: an array (h, w, 3) or (h, w, 4)."""
    with Image.open(file) as image:
        # A JPEG is decoded at a smaller scale where that suffices, as the classifier does: faster, and the same pixels.
        image.draft(None, (2 * size, 2 * size))
        upright, profile = ImageOps.exif_transpose(image), image.info.get("icc_profile")
    if upright.mode.startswith(("I", "F")):
        raise ValueError(f"{file} has more than 8 bits: convert it to 8 first")
    transparent = upright.mode in ("LA", "PA", "RGBA") or "transparency" in upright.info
    picture = upright.convert("RGBA" if transparent else "RGB")
    if profile:
        colours = upright if upright.mode == "CMYK" else picture.convert("RGB")
        try:
            converted = to_srgb(colours, profile)
        except (ImageCms.PyCMSError, OSError, ValueError):
            return np.asarray(picture)  # a profile that is damaged, or of another kind of colours
        if transparent:
            converted.putalpha(picture.getchannel("A"))
        picture = converted
    return np.asarray(picture)


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert colours by their profile."""
    transform = ImageCms.buildTransform(
        ImageCms.ImageCmsProfile(io.BytesIO(profile)),
        ImageCms.createProfile("sRGB"),
        image.mode,
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    converted: Image.Image = transform.apply(image)
    return converted


if __name__ == "__main__":
    classifier = Classifier(Path(__file__).with_name("model.onnx"))
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["path", "label", "probability"])
    for path in map(Path, sys.argv[1:]):
        label, probabilities, _ = classifier.classify(path)
        table.writerow([path, label, f"{max(probabilities):.6f}"])
