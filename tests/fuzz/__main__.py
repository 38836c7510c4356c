"""Coverage-guided fuzzing of the loaders: nothing but the promised errors may come out of them.

    pip install atheris
    python -m tests.fuzz images --seconds 60
    python -m tests.fuzz checkpoints --seconds 60 --corpus corpora/checkpoints
    python -m tests.fuzz classifiers --seconds 60

A failure ends the run with a traceback and leaves the input in a file ``crash-...``; name that file after the options
to run it again. An input that takes longer than ten seconds or four gigabytes is a failure too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fewshot_mahalanobis.images", "fewshot_mahalanobis.checkpoints", "PIL"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz a loader with atheris.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("inputs", nargs="*", help="Run these files only.")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="Folder of inputs, which grows; else a temporary one.")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        target = TARGETS[options.target](Path(temporary))
        corpus = options.corpus or Path(temporary) / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(target.seeds()):
            (corpus / f"seed-{number:03d}").write_bytes(seed)
            target(seed)  # what is imported on first use shall not count as a slow input
        words = Path(temporary) / "words"
        words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words()))
        arguments = [
            sys.argv[0],
            f"-max_total_time={options.seconds}",
            f"-dict={words}",
            "-timeout=10",
            "-rss_limit_mb=4096",
            f"-max_len={target.longest}",
            "-print_final_stats=1",
            *(options.inputs or [str(corpus)]),
        ]
        atheris.Setup(arguments, target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
