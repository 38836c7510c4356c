"""Export a classifier with a program that runs it, and prove on pictures that the program gives the same answers."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fewshot_mahalanobis.apps.labelling import image_batches
from fewshot_mahalanobis.checkpoints.files import atomic_replace
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

__all__ = ["PROGRAMS", "Compared", "compare", "export_folder"]

#: Languages in which there is a program -> its file.
PROGRAMS = {"python": "classify.py", "javascript": "classify.mjs", "cpp": "classify.cpp"}
#: A picture is near a threshold if two labels' odds, or its outlier score and the threshold, differ by no more than
#: this share: rounding may decide there.
NEAR = 0.05
_GRAPH = "model.onnx"


class Compared(NamedTuple):
    """One picture's answers by the classifier and by the exported program.

    Parameters
    ----------
    path : Path
    label, exported_label : object
        By the classifier, and by the program.
    probability_difference, score_difference : float
        Largest difference between probabilities, and the difference between the outlier scores.
    is_near : bool
        Whether the picture lies near a threshold, by the classifier.
    """

    path: Path
    label: Any
    exported_label: Any
    probability_difference: float
    score_difference: float
    is_near: bool


def export_folder(
    classifier: SimpleCNAPSClassifier, folder: Path, languages: Sequence[str] = ("python",)
) -> list[Path]:
    """Write the graph that reads pixels, and a program for it in each language, into a folder, which is made if absent.

    Files of these names are replaced.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    ImportError
        The packages of the extra ``onnx`` are absent.
    ValueError
        The classifier has no form as a graph.
    """
    folder.mkdir(exist_ok=True)
    classifier.export_onnx(folder / _GRAPH, pixels=True)
    written = [folder / _GRAPH]
    for language in dict.fromkeys(languages):
        written.append(folder / PROGRAMS[language])
        with atomic_replace(written[-1]) as temporary:
            shutil.copyfile(_program(language), temporary)
    return written


def _program(language: str) -> Path:
    from fewshot_mahalanobis import export

    return Path(os.fspath(export.__file__)).parent / "programs" / PROGRAMS[language]


def compare(classifier: SimpleCNAPSClassifier, folder: Path, paths: Sequence[Path]) -> list[Compared]:
    """Answer for pictures by a classifier and by the Python program in the folder of its export.

    Raises
    ------
    ImportError
        onnxruntime is absent.
    ValueError
        One of the two cannot read a picture.
    """
    specification = importlib.util.spec_from_file_location("exported", folder / PROGRAMS["python"])
    assert specification is not None
    assert specification.loader is not None
    program = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(program)
    except ImportError as error:
        raise ImportError(f"{error}, by which the exported file is checked: pip install onnxruntime") from error
    exported = program.Classifier(folder / _GRAPH)
    problems = dict[Path, str]()
    batches = image_batches(
        classifier, paths, classifier.model_.image_size, problems, "checking", classifier.batch_size
    )
    compared = list[Compared]()
    for batch in batches.decoded():
        features = classifier.features(batch)
        answers, scores = classifier.predict_all(features), classifier.outlier_score(features)
        rows = zip(batch.indices, answers.labels.tolist(), answers.probabilities, scores.tolist(), strict=True)
        for index, label, probabilities, score in rows:
            exported_label, exported_probabilities, exported_score = exported.classify(paths[index])
            compared.append(
                Compared(
                    paths[index],
                    label,
                    exported_label,
                    float(abs(probabilities - exported_probabilities).max()),
                    abs(score - exported_score),
                    _is_near(sorted(probabilities.tolist()), score, exported.threshold),
                )
            )
    if problems:
        path, problem = next(iter(problems.items()))
        raise ValueError(f"{path}: {problem}: check with pictures that can be read")
    return compared


def _is_near(probabilities: list[float], score: float, threshold: float | None) -> bool:
    """Whether a picture's two best labels are nearly as probable, or its score is nearly the threshold."""
    tied = len(probabilities) > 1 and math.log(probabilities[-1] / max(probabilities[-2], 1e-300)) <= NEAR
    return tied or (threshold is not None and abs(score - threshold) <= NEAR * max(1.0, abs(threshold)))
