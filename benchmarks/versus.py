"""An earlier commit and this checkout in turns, on processors with AVX2 alone: time, and peak memory.

    python -m benchmarks.versus d78aa57

Each call runs in a process of its own, once with the earlier commit's package and once with this one's, round by round.
Within a process a call is made twice, of which the second counts; a command in the terminal is timed from its start.
With ``--native`` the processor keeps its AVX-512. The last table compares the network with ONNX Runtime alone, on the
graph that ``export_onnx`` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
TASK, TERMINAL = "5-way 5-shot task of files, 75 queries", "one picture in the terminal"
#: Calls, and how many pictures are classified.
CASES = {"200 arrays": 200, "200 files": 200, TASK: 75, TERMINAL: 1, "2,000 files": 2000}
FILES, SIZE = 2025, (400, 300)
#: The earlier package has no benchmarks of this name, so the process reads this file itself.
CHILD = "import runpy, sys; runpy.run_path(sys.argv[1])['measure'](*sys.argv[2:])"


def main() -> None:
    from benchmarks.ordinary_machine import HIDDEN
    from benchmarks.photographs import draw
    from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--native", action="store_true", help="hide none of the processor's instructions")
    parser.add_argument("--quick", action="store_true", help="once, of few different pictures")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        earlier, pictures = folder / "earlier", folder / "pictures"
        earlier.mkdir()
        pictures.mkdir()
        archive = subprocess.run(["git", "archive", chosen.commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", earlier], input=archive, check=True)
        draw(pictures, 30 if chosen.quick else FILES, SIZE)  # fewer are classified several times
        environment = os.environ | ({} if chosen.native else HIDDEN)
        run = {which: _runner(root, pictures, environment) for which, root in (("then", earlier), ("now", ROOT))}
        rows = []
        for case in CASES:
            found: dict[str, list[dict[str, float]]] = {which: [] for which in run}
            for _ in range(1 if chosen.quick else chosen.rounds):
                for which, measured in found.items():
                    measured.append(run[which](case))
            rows.append(_row(case, found))
        print(markdown_table(rows, ["", chosen.commit, "now", "times as fast", "peak memory, now to then"]))
        shares = [
            [str(cores), f"{run['now'](f'network {cores}')['share']:.2f}"]
            for cores in dict.fromkeys((1, os.cpu_count() or 1))
        ]
        print("\n" + markdown_table(shares, ["cores", "the network's speed as a share of ONNX Runtime's"]))


def _row(case: str, found: dict[str, list[dict[str, float]]]) -> list[str]:
    from benchmarks.timing import ratio, show

    then, now = ([one["seconds"] for one in found[which]] for which in ("then", "now"))
    memory = median(one["megabytes"] for one in found["now"]) / median(one["megabytes"] for one in found["then"])
    return [case, show(then), show(now), ratio(then, now), f"{memory:.2f}"]


def _runner(root: Path, pictures: Path, environment: dict[str, str]) -> Callable[[str], dict[str, float]]:
    """Measures a case with the package in ``root``."""

    def run(case: str) -> dict[str, float]:
        command = [sys.executable, "-c", CHILD, __file__, case, str(pictures)]
        of_root = environment | {"PYTHONPATH": str(root)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=pictures.parent, env=of_root)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


# ---------------------------------------------------------------- in a process of its own, with either package


def measure(case: str, folder: str) -> None:
    """Print seconds and peak memory of a case as JSON."""
    files = sorted(Path(folder).glob("*.jpg"))
    warnings.filterwarnings("ignore", message=".*copies")  # the files are pieces of two photographs
    if case == TERMINAL:
        print(json.dumps(_in_terminal(files)))
    elif case.startswith("network"):
        print(json.dumps({"share": _share_of_runtime(int(case.split()[1]))}))
    else:
        call = _call(case, files)
        call()
        start = time.perf_counter()
        call()
        print(json.dumps({"seconds": time.perf_counter() - start, "megabytes": _peak_megabytes("self")}))


def _call(case: str, files: list[Path]) -> Callable[[], Any]:
    import numpy as np

    from fewshot_mahalanobis import SimpleCNAPSClassifier

    labels = np.repeat(np.arange(5), 5)
    queries = (files[25:] * CASES[case])[: CASES[case]]
    if case == TASK:
        return lambda: SimpleCNAPSClassifier(device="cpu").fit(files[:25], labels).predict(queries)
    classifier = SimpleCNAPSClassifier(device="cpu").fit(files[:25], labels)
    if case == "200 arrays":
        arrays = np.random.default_rng(0).integers(0, 256, (CASES[case], 224, 224, 3), dtype=np.uint8)
        return lambda: classifier.predict(arrays)
    return lambda: classifier.predict(queries)


def _in_terminal(files: list[Path]) -> dict[str, float]:
    """The process that measures loads nothing large itself, as the peak of a child begins at what its parent holds."""
    code = "import sys; from fewshot_mahalanobis import SimpleCNAPSClassifier as Classifier; "
    code += "Classifier(device='cpu').fit(sys.argv[1:5], [0, 0, 1, 1]).save('model.safetensors')"
    subprocess.run([sys.executable, "-c", code, *map(str, files[:4])], check=True)
    command = [sys.executable, "-m", "fewshot_mahalanobis", "predict", "model.safetensors", str(files[5])]
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"the command failed: {' '.join(command)}")
    return {"seconds": time.perf_counter() - start, "megabytes": usage.ru_maxrss / 1000}


def _share_of_runtime(cores: int) -> float:
    """Speed of the network as a share of that of the exported graph in ONNX Runtime with so many threads."""
    import numpy as np
    import onnxruntime
    import torch

    from fewshot_mahalanobis import SimpleCNAPSClassifier

    torch.set_num_threads(cores)
    pictures = np.random.default_rng(0).integers(0, 256, (64, 224, 224, 3), dtype=np.uint8)
    classifier = SimpleCNAPSClassifier(device="cpu", precision="float32").fit(pictures[:6], [0, 1] * 3)
    classifier.export_onnx("network.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores
    session = onnxruntime.InferenceSession("network.onnx", options, providers=["CPUExecutionProvider"])
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float().contiguous() / 127.5 - 1
    batches = [batch.numpy() for batch in images.split(4)]
    calls: list[Callable[[], Any]] = [
        lambda: classifier.task_.network.features(images),
        lambda: [session.run(None, {"images": batch}) for batch in batches],
    ]
    shares = []
    for _ in range(7):
        seconds = []
        for call in calls:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        shares.append(seconds[1] / seconds[0])
    return median(shares[1:])  # the first warms up


def _peak_megabytes(process: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
