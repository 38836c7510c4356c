"""The ``fewshot-mahalanobis`` command: parses, calls, prints."""

from __future__ import annotations

import csv
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Few-shot image classification with Simple CNAPS: a few images a class, fit, predict.",
)

# Every command imports what it needs when it runs: --help answers without loading PyTorch.

Device = Annotated[str, typer.Option(help='"auto" (CUDA where there is one, else the CPU) or a torch device.')]
Workers = Annotated[int, typer.Option(min=0, help="Processes that prepare batches; 0 prepares them in this one.")]
Seed = Annotated[int, typer.Option(help="All random choices follow from it.")]


class Precision(str, Enum):
    """Precision of the convolutions."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def demo(
    picture: Annotated[Path, typer.Option("--picture", "-o", help="PNG to write.")] = Path("fewshot_demo.png"),
    tasks: Annotated[int, typer.Option(min=2, help="Random tasks to average over.")] = 40,
    checkpoint: Annotated[str, typer.Option(help="Name, folder or Hub repository.")] = "default",
) -> None:
    """Classify real handwritten digits from five examples each, and compare with plain baselines."""
    from fewshot_mahalanobis.demo import run_demo

    run_demo(picture, checkpoint=checkpoint, tasks=tasks, say=typer.echo)


@app.command()
def fit(
    support: Annotated[Path, typer.Argument(help="Folder with one sub-folder of images a class.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the fitted classifier to.")],
    checkpoint: Annotated[str, typer.Option(help="Name, folder or Hub repository.")] = "default",
    head: Annotated[
        str, typer.Option(help="mahalanobis, euclidean, manhattan, cosine or dot_product.")
    ] = "mahalanobis",
    adapt: Annotated[bool, typer.Option(help="Adapt the network to the support set.")] = True,
    device: Device = "auto",
) -> None:
    """Fit a classifier on a folder of class folders and save it.

    Example: fewshot-mahalanobis fit photos/ -o flowers.safetensors
    """
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
    from fewshot_mahalanobis.episodes.sources import image_files

    with _clear_errors():
        paths, labels = image_files(support)
        classifier = SimpleCNAPSClassifier(checkpoint, head=head, adapt=adapt, device=device, verbose=1)
        classifier.fit(paths, labels).save(output)
    counts = ", ".join(f"{name} {n}" for name, n in zip(classifier.classes_, classifier.class_counts_, strict=True))
    typer.echo(f"{output}: {len(classifier.classes_)} classes ({counts})")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="File written by `fit`.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or folders that are searched for images.")],
    proba: Annotated[bool, typer.Option("--proba", help="Add the probability of every class.")] = False,
    device: Device = "auto",
) -> None:
    """Classify images; writes CSV (path, label) to standard output.

    Example: fewshot-mahalanobis predict flowers.safetensors holiday/ > labels.csv
    """
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
    from fewshot_mahalanobis.episodes.sources import images_below

    with _clear_errors():
        paths = [file for entry in images for file in images_below(entry)]
        classifier = SimpleCNAPSClassifier.load(model, device=device)
        probabilities = classifier.predict_proba(paths)
    table = csv.writer(sys.stdout)
    table.writerow(["path", "label", *(classifier.classes_ if proba else ())])
    for path, row in zip(paths, probabilities, strict=True):
        table.writerow([path, classifier.classes_[row.argmax()], *(f"{p:.6f}" for p in row if proba)])


@app.command()
def pretrain(
    sources: Annotated[list[str], typer.Argument(help="Folders or zips of class folders; PATH:SPLIT names a split.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; an unfinished run there goes on.")],
    validation: Annotated[str | None, typer.Option(help="Source of other classes to report on.")] = None,
    init: Annotated[
        str | None, typer.Option(help="backbone.safetensors of an earlier run to start from; else random weights.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 8,
    batch_size: Annotated[int, typer.Option(min=2)] = 128,
    peak_lr: Annotated[float, typer.Option(help="Highest learning rate, at batch size 128.")] = 0.2,
    device: Device = "auto",
    workers: Workers = 0,
    seed: Seed = 0,
) -> None:
    """Train the backbone as an ordinary classifier; killed and started again, it goes on.

    Example: fewshot-mahalanobis pretrain mini_imagenet_train.zip -o runs/backbone
    """
    from fewshot_mahalanobis.training.pretrain import PretrainRecipe
    from fewshot_mahalanobis.training.pretrain import pretrain as run

    recipe = PretrainRecipe(
        tuple(sources), validation, init=init, epochs=epochs, batch_size=batch_size, peak_lr=peak_lr, seed=seed
    )
    with _clear_errors():
        run(recipe, output, device=device, workers=workers)
    typer.echo(f"{output / 'backbone.safetensors'}")


@app.command()
def meta_train(
    sources: Annotated[
        list[str],
        typer.Argument(help='Folders or zips of class folders, or "glyphs" (drawn here); named twice counts twice.'),
    ],
    backbone: Annotated[str, typer.Option(help="backbone.safetensors, written by `pretrain`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; an unfinished run there goes on.")],
    validation: Annotated[list[str] | None, typer.Option(help="Sources of other classes to report on.")] = None,
    init: Annotated[
        str | None, typer.Option(help="Checkpoint whose adaptation networks to start from; else random weights.")
    ] = None,
    adaptation: Annotated[str, typer.Option(help="film or auto-regressive.")] = "film",
    head: Annotated[str, typer.Option(help="mahalanobis, euclidean, manhattan, cosine, dot_product or linear.")] = (
        "mahalanobis"
    ),
    task_covariance: Annotated[bool, typer.Option(help='Without it: the "-TR" ablation.')] = True,
    projection: Annotated[bool, typer.Option(help='The "+P" variant.')] = False,
    scale: Annotated[float, typer.Option(help="s of the Mahalanobis head.")] = 1.0,
    feature_scale: Annotated[
        float, typer.Option(help="Factor on the backbone's features, so that beta = 1 fits.")
    ] = 1.0,
    tasks: Annotated[int, typer.Option(min=1)] = 16_000,
    tasks_per_step: Annotated[int, typer.Option(min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="Adam's, falling to zero by half a cosine.")] = 5e-4,
    device: Device = "auto",
    workers: Workers = 0,
    seed: Seed = 0,
) -> None:
    """Train the adaptation networks on episodes, the backbone frozen; killed and started again, it goes on.

    Example: fewshot-mahalanobis meta-train photos.zip glyphs --backbone backbone.safetensors -o runs/meta
    """
    from fewshot_mahalanobis.training.meta_train import MetaTrainRecipe
    from fewshot_mahalanobis.training.meta_train import meta_train as run

    model = {
        "adaptation": adaptation,
        "head": head,
        "task_covariance": task_covariance,
        "projection": projection,
        "scale": scale,
    }
    recipe = MetaTrainRecipe(
        tuple(sources),
        backbone,
        tuple(validation or ()),
        model,
        init,
        feature_scale=feature_scale,
        tasks=tasks,
        tasks_per_step=tasks_per_step,
        learning_rate=learning_rate,
        seed=seed,
    )
    with _clear_errors():
        run(recipe, output, device=device, workers=workers)
    typer.echo(f"{output / 'checkpoint'}")


@app.command()
def evaluate(
    sources: Annotated[list[str], typer.Argument(help="Folders or zips of class folders; PATH:SPLIT names a split.")],
    checkpoint: Annotated[str, typer.Option(help="Name, folder or Hub repository.")] = "default",
    shots: Annotated[list[int] | None, typer.Option("--shot", help="Support images a class; may be repeated.")] = None,
    way: Annotated[int, typer.Option(min=2, help="Classes an episode.")] = 5,
    queries: Annotated[int, typer.Option(min=1, help="Query images a class.")] = 10,
    episodes: Annotated[int, typer.Option(min=2, help="Episodes a source.")] = 600,
    results: Annotated[
        Path | None, typer.Option("--results", "-o", help="JSON file; what it holds is not redone.")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Precision of the convolutions.")] = Precision.float32,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Accuracy on episodes of every source, adapted and not, Mahalanobis and Euclidean, with 95 % intervals."""
    import torch

    from fewshot_mahalanobis.checkpoints import load_checkpoint
    from fewshot_mahalanobis.evaluation.report import evaluate as run
    from fewshot_mahalanobis.evaluation.report import to_markdown
    from fewshot_mahalanobis.training.run import choose_device

    with _clear_errors():
        records = run(
            load_checkpoint(checkpoint).to(choose_device(device)),
            sources,
            shots or (1, 5),
            results=results,
            way=way,
            queries=queries,
            episodes=episodes,
            seed=seed,
            dtype=getattr(torch, precision.value),
        )
    typer.echo(to_markdown(records))


@app.command()
def checkpoints() -> None:
    """List the named checkpoints."""
    from fewshot_mahalanobis.checkpoints import available_checkpoints
    from fewshot_mahalanobis.evaluation.evaluate import markdown_table

    rows = [
        [r.name, "in the package" if r.embedded else "downloaded when first used", r.licence, r.trained_on]
        for r in available_checkpoints().values()
    ]
    typer.echo(markdown_table(rows, ["name", "where", "licence", "trained on"]))


class _clear_errors:
    """Turn the library's errors about what the user gave into one line and exit status 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, OSError)):
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
