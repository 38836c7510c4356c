"""What a further number of pictures costs on a GPU the first time, and again: benchmarks/results/speed.md.

    python -m benchmarks.gpu

Milliseconds of EfficientNet-Lite0 for batches of several sizes, each the first time and the median of five more.
``--device cpu`` measures the same there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.__main__ import markdown
from benchmarks.record import Table, machine
from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.networks.devices import without_cudnn
from fewshot_mahalanobis.networks.task import AdaptedNetwork
from fewshot_mahalanobis.research.training.run import autocast

#: Numbers of pictures in the order in which they come, of 224 and (in training) 160 pixels.
PICTURES = (32, 33, 34, 40, 64, 5)
TRAINED = (24, 25, 26)
AGAIN = 5


def milliseconds(call: Callable[[], object], device: torch.device) -> list[str]:
    """The first time, and the median of the others."""
    taken = []
    for _ in range(1 + AGAIN):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return [f"{taken[0]:.0f} ms", f"{median(taken[1:]):.0f} ms"]


def table(device: torch.device) -> Table:
    extractor = load_checkpoint("efficientnet-lite0").feature_extractor
    extractor = extractor.to(device).to(memory_format=torch.channels_last).eval()  # type: ignore[attr-defined]
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        network = AdaptedNetwork(extractor, None, dtype)
        for count in PICTURES:
            pictures = torch.rand(count, 3, 224, 224) * 2 - 1
            what = f"features of {count} pictures, {str(dtype).removeprefix('torch.')}"
            rows.append([what, *milliseconds(lambda n=network, x=pictures: n.features(x, len(x)), device)])  # type: ignore[misc]
    for count in TRAINED:
        pictures = (torch.rand(count, 3, 160, 160) * 2 - 1).to(device).contiguous(memory_format=torch.channels_last)
        pictures.requires_grad_()

        def step(pictures: torch.Tensor = pictures) -> None:
            with without_cudnn(device):
                with autocast(device, torch.bfloat16):
                    features = extractor(pictures, None)
                features.float().sum().backward()

        rows.append([f"forward and backward pass, {count} pictures of 160 pixels", *milliseconds(step, device)])
    return Table("Batches of several sizes on a GPU", ["", "the first time", "again"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'no GPU'}; {machine()}\n")
    print(markdown([table(device)]))


if __name__ == "__main__":
    main()
