"""Files of weights that say what a test or the fuzzer wants."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def safetensors(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file of a header (bytes as they are, else as JSON), which claims to have ``size`` bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def parts_of(file: Path) -> tuple[bytes, bytes]:
    """Header and data of a safetensors file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length], content[8 + length :]


class Forgery:
    """A saved classifier whose safetensors header and JSON may be changed, its weights zeros that take no room on disk.

    Who reads it leaves the digest out of play, as a forger would compute it anew.
    """

    def __init__(self, saved: Path, path: Path) -> None:
        header, data = parts_of(saved)
        self.header: dict[str, Any] = json.loads(header)
        self.tensors = {name: entry for name, entry in self.header.items() if name != "__metadata__"}
        self.json: Any = json.loads(self.header["__metadata__"]["classifier"])
        self.small = {
            name: data[start:end]
            for name in ("support_features", "support_labels")
            for start, end in [self.header[name]["data_offsets"]]
        }
        self.path = path

    def write(self, text: str | None = None) -> Path:
        self.header["__metadata__"]["classifier"] = json.dumps(self.json) if text is None else text
        end = max(entry["data_offsets"][1] for name, entry in self.header.items() if name != "__metadata__")
        with self.path.open("wb") as file:
            file.write(safetensors(self.header))
            start = file.tell()
            file.truncate(start + end)
            for name, data in self.small.items():
                if name in self.header:
                    file.seek(start + self.header[name]["data_offsets"][0])
                    file.write(data)
        return self.path
