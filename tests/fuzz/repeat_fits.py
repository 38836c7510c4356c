"""Fit and predict over and over, and say by how much the process grew.

    python -m tests.fuzz.repeat_fits 1000

The first fifty fits are left out of account: allocators and caches fill up in them.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np

from fewshot_mahalanobis import SimpleCNAPSClassifier, load_checkpoint

WARM_UP = 50


def resident_megabytes() -> float:
    """Resident memory of this process; Linux."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def main(fits: int) -> None:
    rng = np.random.default_rng(0)
    classifier = SimpleCNAPSClassifier(load_checkpoint("resnet18"))
    start = 0.0
    for number in range(WARM_UP + fits + 1):
        images = rng.integers(0, 256, size=(8, 32, 32, 3), dtype=np.uint8)
        classifier.fit(images[:4], ["a", "b", "a", "b"]).partial_fit(images[4:6], ["b", "c"]).predict(images[6:])
        if number >= WARM_UP and (number - WARM_UP) % max(1, fits // 10) == 0:
            gc.collect()
            now = resident_megabytes()
            start = start or now
            print(f"{number - WARM_UP:6d} fits: {now:8.1f} MB, {now - start:+.1f} MB", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
