"""Open the methods that ``evaluate --method`` compares with Simple CNAPS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewshot_mahalanobis.research.baselines import METHODS
from fewshot_mahalanobis.research.baselines.model import Baseline, read_baseline
from fewshot_mahalanobis.research.evaluation.accuracy import Variant


def open_methods(methods: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Baseline]]:
    """Open methods for a checkpoint's frozen network, and trained methods, both by the headings of their rows.

    Each is a name of ``METHODS`` or the folder of a method that ``meta-train --method`` trained. ValueError if it is
    neither, needs training, or is named twice; CheckpointError if the folder cannot be read.
    """
    frozen: dict[str, Variant] = {}
    trained: dict[str, Baseline] = {}
    for method in methods:
        kind = METHODS.get(method)
        if kind is None and not Path(method).is_dir():
            raise ValueError(f"there is no method {method!r} and no such folder: methods are {', '.join(METHODS)}")
        if kind is not None and kind.needs_training:
            raise ValueError(
                f"{method} needs training: `meta-train --method {method} -o RUN`, then `--method RUN/best`"
            )
        if kind is None:
            baseline = read_baseline(Path(method))
            title = baseline.head.title
            twice = title in trained
            trained[title] = baseline
        else:
            title = f"{kind.title}, frozen network" if kind.trains_network else kind.title
            twice = title in frozen
            frozen[title] = Variant(False, method)
        if twice:
            raise ValueError(f"two methods are called {title!r}: evaluate them one by one")
    return frozen, trained
