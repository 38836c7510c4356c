"""The ``fewshot-mahalanobis`` command: parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def pretrain(
    sources: Annotated[list[str], typer.Argument()],
    output: Annotated[Path, typer.Option("--output", "-o")],
    validation: Annotated[str | None, typer.Option()] = None,
    epochs: Annotated[int, typer.Option()] = 8,
    device: Annotated[str, typer.Option()] = "auto",
    workers: Annotated[int, typer.Option()] = 0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    from fewshot_mahalanobis.training.pretrain import PretrainRecipe, pretrain

    pretrain(PretrainRecipe(tuple(sources), validation, epochs=epochs, seed=seed), output, device=device, workers=workers)


@app.command()
def checkpoints() -> None:
    """List them."""


if __name__ == "__main__":
    app()
