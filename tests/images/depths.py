"""One picture in files of 8 to 16 bits, of several formats, with and without a word about its range.

``python -m tests.images.depths PHOTOGRAPH...`` prints how far the features of the default network move.
"""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Grey = NDArray[np.uint16]


class DeepFile(NamedTuple):
    """One entry of the table."""

    name: str
    data: bytes
    says: bool  # the file says its range, or fills the full one


def png(values: Grey, *, sbit: int | None = None, transparent: int | None = None, colours: int = 1) -> bytes:
    """A PNG of 16 bits, grey or RGB with three equal colours."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = values.shape
    kind = 0 if colours == 1 else 2
    rows = values[..., None].repeat(colours, -1).astype(">u2").tobytes()
    stride = 2 * width * colours
    filtered = b"".join(b"\0" + rows[start : start + stride] for start in range(0, len(rows), stride))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    if sbit is not None:
        data += chunk(b"sBIT", bytes([sbit] * colours))
    if transparent is not None:
        data += chunk(b"tRNS", struct.pack(">H", transparent) * colours)
    return data + chunk(b"IDAT", zlib.compress(filtered, 1)) + chunk(b"IEND", b"")


def tiff(
    values: Grey, *, bits: int = 16, white_zero: bool = False, big: bool = False, tags: Sequence[tuple[int, int]] = ()
) -> bytes:
    """An uncompressed grey TIFF; ``tags`` are pairs of a tag and its number."""
    height, width = values.shape
    if bits == 12:
        pairs = values.reshape(-1, 2).astype(np.uint32)
        packed = (pairs[:, 0] << 12) | pairs[:, 1]
        pixels = np.stack([packed >> 16, (packed >> 8) & 255, packed & 255], -1).astype(np.uint8).tobytes()
    else:
        pixels = values.astype(">u2" if big else "<u2").tobytes()
    order = ">" if big else "<"
    entries = {256: width, 257: height, 258: bits, 259: 1, 262: 0 if white_zero else 1, 277: 1, 278: height}
    entries |= {273: 8, 279: len(pixels), **dict(tags)}
    directory = struct.pack(order + "H", len(entries))
    for tag, number in sorted(entries.items()):
        wide = tag in (256, 257, 273, 278, 279)
        directory += struct.pack(order + "HHI", tag, 4 if wide else 3, 1)
        directory += struct.pack(order + "I", number) if wide else struct.pack(order + "HH", number, 0)
    header = (b"MM\0*" if big else b"II*\0") + struct.pack(order + "I", 8 + len(pixels))
    return header + pixels + directory + bytes(4)


def pgm(values: Grey, largest: int) -> bytes:
    return f"P5 {values.shape[1]} {values.shape[0]} {largest}\n".encode() + values.astype(">u2").tobytes()


def jpeg_2000(values: Grey) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "JPEG2000", irreversible=False)
    return buffer.getvalue()


def deep_files(grey: NDArray[np.float64]) -> list[DeepFile]:
    """Forty files of a picture with values in [0, 1] that reach both ends."""
    files = []
    full = np.rint(grey * 65535).astype(np.uint16)
    for bits in (10, 12, 14):
        top = 2**bits - 1
        raw = np.rint(grey * top).astype(np.uint16)
        shifted = (raw << (16 - bits)).astype(np.uint16)
        repeated = shifted | (raw >> (2 * bits - 16)).astype(np.uint16)
        files += [
            DeepFile(f"{bits} bits, PNG", png(raw), False),
            DeepFile(f"{bits} bits, PNG, sBIT, as they are", png(raw, sbit=bits), True),
            DeepFile(f"{bits} bits, PNG, sBIT, shifted", png(shifted, sbit=bits), True),
            DeepFile(f"{bits} bits, PNG, sBIT, repeated", png(repeated, sbit=bits), True),
            DeepFile(f"{bits} bits, RGB PNG", png(raw, colours=3), False),
            DeepFile(f"{bits} bits, TIFF", tiff(raw), False),
            DeepFile(f"{bits} bits, TIFF, big-endian", tiff(raw, big=True), False),
            DeepFile(f"{bits} bits, TIFF, MaxSampleValue", tiff(raw, tags=[(281, top)]), True),
            DeepFile(f"{bits} bits, TIFF, SMaxSampleValue", tiff(raw, big=True, tags=[(340, 0), (341, top)]), True),
            DeepFile(f"{bits} bits, PGM", pgm(raw, top), True),
        ]
    raw = np.rint(grey * 4095).astype(np.uint16)
    thermal = np.rint(51241 + grey * 940).astype(np.uint16)
    inverted = (65535 - full).astype(np.uint16)
    return [
        *files,
        DeepFile("12 bits, TIFF, BitsPerSample 12", tiff(raw, bits=12), True),
        DeepFile("12 bits, TIFF, WhiteIsZero", tiff(4095 - raw, white_zero=True, tags=[(281, 4095)]), True),
        DeepFile("16 bits, PNG", png(full), True),
        DeepFile("16 bits, TIFF", tiff(full), True),
        DeepFile("16 bits, TIFF, WhiteIsZero", tiff(inverted, white_zero=True), True),
        DeepFile("16 bits, JPEG 2000", jpeg_2000(full), True),
        DeepFile("16 bits, PNG, white transparent", png(np.where(grey == 1, 1, full), transparent=1), True),
        DeepFile("thermal, PNG", png(thermal), False),
        DeepFile("thermal, TIFF", tiff(thermal), False),
        DeepFile("thermal, TIFF, Min- and MaxSampleValue", tiff(thermal, tags=[(280, 51241), (281, 52181)]), True),
    ]


def main(photographs: Sequence[str]) -> None:
    from fewshot_mahalanobis import SimpleCNAPSClassifier
    from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(
        list(photographs), range(len(photographs))
    )
    with Image.open(photographs[0]) as image:
        grey = np.asarray(image.convert("L").resize((320, 240)), float)
    grey = (grey - grey.min()) / np.ptp(grey)
    (true,) = classifier.transform([grey])
    rows = []
    for file in deep_files(grey):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (features,) = classifier.transform([io.BytesIO(file.data)])
        distance = np.linalg.norm(features - true) / np.linalg.norm(true)
        rows.append([file.name, "yes" if file.says else "no", f"{distance:.3f}", "yes" if caught else "no"])
    print(markdown_table(rows, ["file", "says its range", "relative distance", "warning"]))


if __name__ == "__main__":
    main(sys.argv[1:])
