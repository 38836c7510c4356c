"""Extras of the package: what installs the optional dependencies that a missing import asks for."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra: the published package, and a clone of the repository."""
    return f'pip install "fewshot-mahalanobis[{extra}]", in a clone pip install ".[{extra}]"'
