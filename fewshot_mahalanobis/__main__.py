"""The command ``fewshot-mahalanobis``, also ``python -m fewshot_mahalanobis``."""

import sys


def main() -> None:
    """Run the command, or say how to install what it needs."""
    try:
        from fewshot_mahalanobis.apps.cli import app
    except ModuleNotFoundError as error:
        if str(error.name).startswith("fewshot_mahalanobis"):
            raise
        sys.exit(
            f'error: the command needs {error.name}, and the library does not: pip install "fewshot-mahalanobis[cli]"'
        )
    app(prog_name="fewshot-mahalanobis")


if __name__ == "__main__":
    main()
