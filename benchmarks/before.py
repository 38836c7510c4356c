"""``predict`` and a whole task from files: an earlier commit of the package against this one.

    git worktree add ../before 6cf1c78
    python -m benchmarks.before ../before

The files are JPEGs of 12 megapixels and of 400 x 300 pixels. Each measurement is a process of its own, and the packages
take turns, so what slows the machine for a while slows both.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.photographs import FILES, SIZE, draw
from benchmarks.timing import ratio, show
from fewshot_mahalanobis.research.evaluation.tables import markdown_table

SMALL = (400, 300)
#: Of this package; None is its default.
IMAGE_SIZES = (None, 160)


def measured(large: str, small: str, image_size: int | None) -> dict[str, float]:
    """Seconds, and the peak memory of the process in MB after ``predict``; 25 files are the support set of a task.

    Its source text runs in the earlier commit's folder too, so it uses nothing else of this module.
    """
    import time
    import warnings
    from pathlib import Path

    from fewshot_mahalanobis import SimpleCNAPSClassifier

    warnings.simplefilter("ignore")  # the drawn files are pieces of two photographs, so some look like copies
    labels = [index % 5 for index in range(25)]
    options = {} if image_size is None else {"image_size": image_size}
    classifier = SimpleCNAPSClassifier(device="cpu", **options)
    paths, small_paths = (sorted(Path(folder).glob("*.jpg")) for folder in (large, small))
    classifier.fit(small_paths[:25], labels).predict(small_paths[25:50])  # loads and compiles what is needed once

    seconds = {}
    start = time.perf_counter()
    classifier.predict(paths)
    seconds["predict"] = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()  # not ru_maxrss, which begins at what the parent process held
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    for name, files in (("task", paths), ("small task", small_paths)):
        start = time.perf_counter()
        classifier.fit(files[:25], labels).predict(files[25:])
        seconds[name] = time.perf_counter() - start
    return {**seconds, "peak": peak}


def in_checkout(checkout: Path, *arguments: object) -> dict[str, float]:
    """Run ``measured`` in a process that imports the package of ``checkout``."""
    code = f"{inspect.getsource(measured)}\nimport json\nprint(json.dumps(measured{arguments!r}))"
    command = [sys.executable, "-c", f"from __future__ import annotations\n{code}"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before", description=__doc__)
    parser.add_argument("before", type=Path, help="checkout of the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    here = Path(__file__).parents[1]
    packages = {"before": (chosen.before, None)} | {
        "now" if size is None else f"now, {size} pixels": (here, size) for size in IMAGE_SIZES
    }
    with tempfile.TemporaryDirectory() as large, tempfile.TemporaryDirectory() as small:
        draw(Path(large), FILES, SIZE)
        draw(Path(small), FILES, SMALL)
        rounds = [
            {title: in_checkout(checkout, large, small, size) for title, (checkout, size) in packages.items()}
            for _ in range(chosen.rounds)
        ]

    titles = {
        "predict": f"`predict` on {FILES} files of 12 megapixels",
        "task": f"task: `fit` 25 and `predict` {FILES - 25} of them",
        "small task": f"task from files of {SMALL[0]} x {SMALL[1]} pixels",
    }
    rows = []
    for key, title in titles.items():
        seconds = {package: [each[package][key] for each in rounds] for package in packages}
        faster = [f"{show(seconds[name])}; {ratio(seconds['before'], seconds[name])}" for name in list(packages)[1:]]
        rows.append([title, show(seconds["before"]), *faster])
    print(markdown_table(rows, ["seconds; times as fast as before", *packages]))
    peaks = {package: max(each[package]["peak"] for each in rounds) for package in packages}
    print("Peak memory after predict: " + ", ".join(f"{name} {peak:.0f} MB" for name, peak in peaks.items()))


if __name__ == "__main__":
    main()
