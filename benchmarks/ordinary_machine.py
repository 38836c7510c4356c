"""A processor without native bfloat16: what training and classifying cost there, and what ``precision="auto"`` saves.

    python -m benchmarks.ordinary_machine

Each figure comes from a separate process with one thread: once with all instructions of the processor, and once with
AVX-512 and native bfloat16 hidden (``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2``), as on most laptops. A
training step is forward and backward on random images.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn import functional as F

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.networks.devices import native_bfloat16, native_dtype
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table
from fewshot_mahalanobis.research.training.run import autocast

HIDDEN = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
IMAGES, SIZE, ROUNDS = 24, 40, 3
CPU = torch.device("cpu")


def seconds(call: Callable[[], object]) -> float:
    """Median time of a call after a first one, which is not counted."""
    times = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def measured() -> dict[str, float]:
    """Seconds of each step, measured in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.rand(IMAGES, 3, SIZE, SIZE).mul(2).sub(1).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(IMAGES) % 4
    network = torch.nn.Sequential(FilmResNet18(), torch.nn.Linear(512, 4)).to(memory_format=torch.channels_last)
    model = SimpleCNAPS(image_size=SIZE).train().to(memory_format=torch.channels_last)

    def step(module: torch.nn.Module, loss: Callable[[], torch.Tensor], dtype: torch.dtype) -> None:
        module.zero_grad()
        with autocast(CPU, dtype):
            value = loss()
        value.float().backward()

    def pretrain() -> torch.Tensor:
        return F.cross_entropy(network(images), labels)

    def meta_train() -> torch.Tensor:
        return F.cross_entropy(model(images[:12], labels[:12], images[12:]), labels[12:])

    found = {}
    for title, dtype in (("bfloat16, as before", torch.bfloat16), ("auto", native_dtype("auto", CPU))):
        found[f"pretrain, {title}"] = seconds(lambda: step(network, pretrain, dtype))  # noqa: B023
        found[f"meta-train, {title}"] = seconds(lambda: step(model, meta_train, dtype))  # noqa: B023
    default = load_checkpoint("default")
    pictures = (torch.rand(100, 3, 160, 160) * 255).to(torch.uint8)
    classifier = SimpleCNAPSClassifier(default, device="cpu")
    found["whole task"] = seconds(
        lambda: classifier.fit(pictures[:25], [i % 5 for i in range(25)]).predict(pictures[25:])
    )
    batch = pictures[:25].float() / 127.5 - 1
    with torch.no_grad():
        found["FiLM parameters"] = seconds(lambda: film_parameters(default, batch))
    return {**found, "native": float(native_bfloat16(CPU))}


def main() -> None:
    if "--measure" in sys.argv:
        print(json.dumps(measured()))
        return
    results = []
    for hidden in ({}, HIDDEN):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **hidden}
        command = [sys.executable, "-m", "benchmarks.ordinary_machine", "--measure"]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        results.append(json.loads(output.splitlines()[-1]))
    plain, hidden_ = results
    if not plain["native"]:
        print("This processor has no native bfloat16: both columns are alike.")
    rows = []
    for name in ("pretrain", "meta-train"):
        for title, of in (("as it is", plain), ("bfloat16 hidden", hidden_)):
            before, after = of[f"{name}, bfloat16, as before"], of[f"{name}, auto"]
            rows.append([f"one step of {name}, {title}", f"{before:.2f} s", f"{after:.2f} s", f"{before / after:.1f}"])
    print(markdown_table(rows, [f"{IMAGES} images of {SIZE} px, one thread", "bfloat16", "auto", "times as fast"]))
    rows = [
        [n, f"{plain[n]:.2f} s", f"{hidden_[n]:.2f} s", f"{hidden_[n] / plain[n]:.1f}"]
        for n in ("whole task", "FiLM parameters")
    ]
    print(
        markdown_table(rows, ["default checkpoint, auto, one thread", "as it is", "bfloat16 hidden", "times as slow"])
    )


if __name__ == "__main__":
    main()
