"""The command ``fewshot-mahalanobis``, also ``python -m fewshot_mahalanobis``."""

import gc
import os
import sys

from fewshot_mahalanobis.apps.exit_status import exit_after
from fewshot_mahalanobis.extras import install_command


def main() -> None:
    """Run the command, or say how to install what it needs."""
    os.environ["MPLBACKEND"] = "agg"  # plots are files; the backend of a notebook around may be absent here
    gc.set_threshold(20_000)  # the usual 700 make imports a tenth slower, for few cycles
    exit_after(_command)


def _command() -> None:
    try:
        from fewshot_mahalanobis.apps.cli import app
    except ModuleNotFoundError as error:
        if str(error.name).startswith("fewshot_mahalanobis"):
            raise
        sys.exit(f"error: the command needs {error.name}, and the library does not: {install_command('cli')}")
    app(prog_name="fewshot-mahalanobis")


if __name__ == "__main__":
    main()
