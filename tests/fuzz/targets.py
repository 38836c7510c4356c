"""What is fuzzed, with inputs to start from: each target is called with bytes and raises where a promise is broken."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.checkpoints import CheckpointError, classifier_file, save_checkpoint
from fewshot_mahalanobis.images import picture as images_module
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.images.picture import read_square_array
from tests.checkpoints.forging import Forgery, parts_of, safetensors
from tests.tiny import unadapted_model

SIDE = 16
#: Values that JSON allows and no field expects.
ODD = [b"null", b"true", b"1e999", b"NaN", b"-1", b"[[[[", b"\\ud800"]


def promise(kept: bool, what: str) -> None:
    if not kept:
        raise AssertionError(f"promised: {what}")


def quoted(names: Iterable[str]) -> list[bytes]:
    return [f'"{name}"'.encode() for name in names]


class Images:
    """Any bytes as an image file, and the same once more as an image that the user has opened."""

    longest = 1 << 14

    def __init__(self, folder: Path) -> None:
        # The promise holds for any limit; a low one leaves the time to other things than large empty pictures.
        images_module.MAX_PIXELS = 1 << 18
        warnings.simplefilter("ignore")  # Pillow's, of odd metadata

    def __call__(self, data: bytes) -> None:
        try:
            from_file = read_square_array(io.BytesIO(data), SIDE)
        except ImageError:
            from_file = None
        else:
            promise(from_file.shape == (SIDE, SIDE, 3) and from_file.dtype == np.uint8, "a square of RGB")
        try:
            image = Image.open(io.BytesIO(data))
        except Exception:  # Pillow's own, before this package has a say
            promise(from_file is None, "what Pillow refuses is refused")
            return
        try:
            (batch,) = ImageBatches([image], SIDE, n_jobs=1)
        except ImageError as error:
            promise("image 0" in str(error), "the error names the item")
            promise(from_file is None, "what is refused when opened is refused as a file")
        else:
            pixels = ((batch[0] + 1) * 127.5).round().permute(1, 2, 0).numpy().astype(np.uint8)
            promise(from_file is not None and (pixels == from_file).all(), "the same picture from both")

    def seeds(self) -> Iterator[bytes]:
        y, x = np.mgrid[:12, :20]
        picture = Image.fromarray(np.stack([12 * x, 20 * y, 5 * x + 9 * y], axis=-1).astype(np.uint8))
        exif = Image.Exif()
        exif[0x0112] = 6
        for kind, mode, options in (
            ("JPEG", "RGB", {"exif": exif}), ("JPEG", "CMYK", {}), ("JPEG", "L", {"progressive": True}),
            ("PNG", "RGBA", {}), ("PNG", "I;16", {}), ("PNG", "P", {"transparency": 1}), ("GIF", "P", {}),
            ("GIF", "P", {"save_all": True, "append_images": [picture]}), ("BMP", "RGB", {}), ("TGA", "RGB", {}),
            ("TIFF", "RGB", {"exif": exif}), ("TIFF", "F", {}), ("TIFF", "L", {"compression": "tiff_lzw"}),
            ("PPM", "RGB", {}), ("WEBP", "RGBA", {}), ("ICO", "RGB", {}), ("PCX", "RGB", {}), ("SGI", "RGB", {}),
            ("DDS", "RGBA", {}), ("EPS", "RGB", {}), ("IM", "RGB", {}), ("XBM", "1", {}),
        ):  # fmt: skip
            buffer = io.BytesIO()
            image = Image.new(mode, picture.size, 9000) if mode == "I;16" else picture.convert(mode)
            if mode == "F":
                image = image.point(lambda value: value * (1 / 255) + 0)
            image.save(buffer, kind, **options)
            yield buffer.getvalue()

    def words(self) -> list[bytes]:
        marks = b"IHDR IDAT acTL fcTL tRNS eXIf iCCP Exif\0\0 II*\0 MM\0* \xff\xc0 \xff\xda \xff\xd9 RIFF WEBPVP8X ANMF"
        return [*marks.split(b" "), b"%!PS-Adobe-3.0", b"NETSCAPE2.0"]


class Checkpoints:
    """Half of the bytes as ``config.json``, half as ``model.safetensors``; the first byte chooses the mixture.

    0 to 63 takes both from the input, up to 127 a sound configuration and up to 255 sound weights.
    """

    longest = 1 << 15

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole = folder / "checkpoint", folder / "whole"
        self.folder.mkdir()
        save_checkpoint(unadapted_model(), self.whole, dtype=torch.float16)
        self.config = (self.whole / "config.json").read_bytes()
        self.header, _ = parts_of(self.whole / "model.safetensors")

    def __call__(self, data: bytes) -> None:
        choice, data = data[:1] or b"\0", data[1:]
        weights = self.folder / "model.safetensors"
        weights.unlink(missing_ok=True)
        if choice[0] >= 128:
            config = data
            weights.hardlink_to(self.whole / "model.safetensors")
        elif choice[0] >= 64:
            config = self.config
            weights.write_bytes(data)
        else:
            config, _, rest = data.partition(b"\0\0\0\0")
            weights.write_bytes(rest)
        (self.folder / "config.json").write_bytes(config)
        try:
            model = load_checkpoint(self.folder)
        except CheckpointError as error:
            promise(str(self.folder) in str(error), "the error names the file")
        else:
            promise(not any(tensor.is_meta for tensor in model.state_dict().values()), "every weight is there")

    def seeds(self) -> Iterator[bytes]:
        yield b"\xff" + self.config
        yield b"\x40" + safetensors(self.header)
        yield b"\x40" + safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4)
        yield b"\0" + self.config + b"\0\0\0\0" + safetensors(b"{}")

    def words(self) -> list[bytes]:
        names = [*json.loads(self.config), "dtype", "shape", "data_offsets", "__metadata__", "F32", "F16", "I64"]
        return quoted(names) + ODD


class Classifiers:
    """The JSON of a saved classifier's header, or with a first byte from 128 the whole file.

    The weights behind it are zeros that take no room on disk. A sound header gets as far as their digest, which no
    guess meets; so it is not computed, and what comes after it, the labels, is tried on its own.
    """

    longest = 1 << 14

    def __init__(self, folder: Path) -> None:
        classifier = SimpleCNAPSClassifier(unadapted_model(), device="cpu")
        images = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8)
        classifier.fit(images, ["a", "b", "b"]).save(folder / "saved")
        self.forgery = Forgery(folder / "saved", folder / "forged")
        self.text: str = self.forgery.header["__metadata__"]["classifier"]
        classifier_file._digest = lambda tensors: ""

    def __call__(self, data: bytes) -> None:
        if data[:1] >= b"\x80":
            self.forgery.path.write_bytes(data[1:])
        else:
            text = data[1:].decode("utf-8", "replace")
            self.forgery.write(text)
            self._labels(text)
        try:
            SimpleCNAPSClassifier.load(self.forgery.path, device="cpu")
        except ValueError as error:
            promise(str(self.forgery.path) in str(error), "the error names the file")

    @staticmethod
    def _labels(text: str) -> None:
        try:
            labels = json.loads(text)["labels"]
            dtype, classes = labels["dtype"], labels["classes"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return
        if type(dtype) is str and type(classes) is list:
            try:
                array = classifier_file._classes(classifier_file.Labels(dtype, classes))
            except (ValueError, TypeError, OverflowError):
                return
            promise(array.tolist() == classes, "labels come as they were written")

    def seeds(self) -> Iterator[bytes]:
        yield b"\0" + self.text.encode()
        for labels in ({"dtype": "<i8", "classes": [1, 2]}, {"dtype": "|O", "classes": ["a", "bb"]}):
            yield b"\0" + json.dumps({**json.loads(self.text), "labels": labels}).encode()
        yield b"\xff" + safetensors(self.forgery.header)

    def words(self) -> list[bytes]:
        fields = json.loads(self.text)
        names = [*fields, *fields["model"], *fields["parameters"], *fields["labels"]]
        return quoted([*names, "<U9", "<f8", "|b1", "V9", "O", "<M8[s]"]) + ODD


TARGETS = {"images": Images, "checkpoints": Checkpoints, "classifiers": Classifiers}
