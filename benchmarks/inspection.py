r"""Good against defect: false alarms and defects found, with good pictures alone and with a few defects.

    python -m benchmarks.inspection --cells elpv-dataset/src/elpv_dataset/data --steel X-SDD/datas --tasks 7 \
        --queries 40 -o benchmarks/results/inspection.json

Cells: photographs of solar cells by their own light (ELPV, Buerhop-Latza et al., 2018), sound ones against certain
defects, in two kinds that a factory would not mix. Steel: surfaces of hot-rolled strip (X-SDD, Feng et al., 2021). None
is free of marks, so the prints of the finishing rolls pass for good, and the six other kinds are the defects.

A task draws 20 good pictures and 3 defects to fit, and other pictures to be judged. Nothing was chosen on these sets.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import make_scorer
from sklearn.model_selection import LeaveOneOut, TunedThresholdClassifierCV, cross_val_predict

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.research.evaluation.result import Accuracy
from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

GOOD, DEFECT = "good", "defect"
GOOD_SHOTS, DEFECT_SHOTS = 20, 3
#: Promised share of false alarms. Twenty pictures can promise 1 / 21 and more.
RATE = 0.05
#: A defect that is missed costs this many false alarms.
COST = 10
#: What passes for good on steel.
HARMLESS = "finishing roll printing"

Pictures = Mapping[str, Sequence[Path]]  # good and defect
Shares = dict[str, tuple[float, float]]  # way to decide -> false alarms and defects found


def cells(folder: Path) -> dict[str, Pictures]:
    """Good and defective cells of both kinds, by the table beside them: path, probability of a defect, kind."""
    sets: dict[str, dict[str, list[Path]]] = {}
    for line in (folder / "labels.csv").read_text().splitlines():
        path, defective, kind = line.split()
        if float(defective) in (0.0, 1.0):
            label = DEFECT if float(defective) else GOOD
            sets.setdefault(f"solar cells, {kind}crystalline", {GOOD: [], DEFECT: []})[label].append(folder / path)
    return {**sets}


def steel(folder: Path) -> dict[str, Pictures]:
    """Steel with the prints of rolls, and with other marks."""
    files = sorted(folder.glob("*/*.*"))
    return {
        "steel": {
            GOOD: [file for file in files if file.parent.name == HARMLESS],
            DEFECT: [file for file in files if file.parent.name != HARMLESS],
        }
    }


def cost(truth: NDArray[Any], predicted: NDArray[Any], pos_label: str) -> float:
    """Cost of a picture on average, in false alarms."""
    missed, alarms = (truth == pos_label) & (predicted != pos_label), (truth != pos_label) & (predicted == pos_label)
    return float(np.mean(COST * missed + alarms))


def measure(pictures: Pictures, queries: int, seed: int) -> Shares:
    """False alarms and defects found in one task, by each way to decide."""
    rng = np.random.default_rng(seed)
    drawn = {name: [files[i] for i in rng.permutation(len(files))] for name, files in pictures.items()}
    good, defects = drawn[GOOD][:GOOD_SHOTS], drawn[DEFECT][:DEFECT_SHOTS]
    asked = [*drawn[GOOD][GOOD_SHOTS:][:queries], *drawn[DEFECT][DEFECT_SHOTS:][:queries]]
    is_good = np.arange(len(asked)) < queries
    alarms: dict[str, NDArray[np.bool_]] = {}

    one = SimpleCNAPSClassifier(unknown_label=DEFECT, false_rejection_rate=RATE).fit(good, [GOOD] * len(good))
    alarms["good pictures alone"] = one.predict(asked) == DEFECT

    X, y = [*good, *defects], np.repeat([GOOD, DEFECT], [len(good), len(defects)])
    two = SimpleCNAPSClassifier(unknown_label="unknown", false_rejection_rate=RATE).fit(X, y)
    labels, probabilities, _, queried = two.predict_all(asked)
    alarms["both, defect or unknown"] = labels != GOOD
    of_defect = probabilities[:, 0]  # "defect" comes first in the alphabet
    alarms["both, the more probable"] = of_defect >= 0.5

    support = two.fitted_head_.support.adapted.cpu().numpy()  # as AdaptedFeatures gives them
    left_out = cross_val_predict(MahalanobisClassifier(), support, y, cv=LeaveOneOut(), method="predict_proba")[:, 0]
    threshold = np.quantile(left_out[y == GOOD], 1 - RATE, method="weibull")
    alarms["both, the threshold of left-out good pictures"] = of_defect > threshold
    scorers = {
        "both, tuned to balanced accuracy": "balanced_accuracy",
        f"both, tuned to a cost of {COST} to 1": make_scorer(cost, greater_is_better=False, pos_label=DEFECT),
    }
    for name, scoring in scorers.items():
        tuned = TunedThresholdClassifierCV(MahalanobisClassifier(), scoring=scoring, cv=3).fit(support, y)
        alarms[name] = tuned.predict(queried) == DEFECT
    return {name: (float(a[is_good].mean()), float(a[~is_good].mean())) for name, a in alarms.items()}


def tables(results: Mapping[str, Sequence[Shares]]) -> str:
    """Markdown: a table for each set."""
    parts = []
    for name, tasks in results.items():
        rows = []
        for way in tasks[0]:
            false, found = (Accuracy.of(np.array([task[way][column] for task in tasks])) for column in (0, 1))
            rows.append([way, *(f"{100 * a.mean:.1f} ± {100 * a.half_width:.1f}" for a in (false, found))])
        header = ["fitted to, decided by", "false alarms, %", "defects found, %"]
        parts.append(f"### {name}, {len(tasks)} tasks\n\n{markdown_table(rows, header)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cells", type=Path, help="folder with labels.csv of ELPV")
    parser.add_argument("--steel", type=Path, help="folder with the class folders of X-SDD")
    parser.add_argument("--tasks", type=int, default=10, help="tasks a set")
    parser.add_argument("--queries", type=int, default=50, help="pictures of each kind to judge in a task")
    parser.add_argument("--results", "-o", type=Path, required=True, help="JSON file; a run that was cut off goes on")
    arguments = parser.parse_args()
    sets = {
        **(cells(arguments.cells) if arguments.cells else {}),
        **(steel(arguments.steel) if arguments.steel else {}),
    }
    results: dict[str, list[Shares]] = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    warnings.filterwarnings("ignore", message=".*copies of others.*")
    for seed in range(arguments.tasks):
        for name, pictures in sets.items():
            done = results.setdefault(name, [])
            if len(done) == seed:
                done.append(measure(pictures, arguments.queries, seed))
                arguments.results.write_text(json.dumps(results, indent=1))
    print(tables(results))


if __name__ == "__main__":
    main()
