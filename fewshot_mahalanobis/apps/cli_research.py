"""Commands for research: train, evaluate, check data sets."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from fewshot_mahalanobis.apps.cli_options import (
    Cache,
    Device,
    NoCache,
    Precision,
    Seed,
    cache_beside,
    clear_errors,
)
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, PretrainRecipe, Recipe, read_recipe

data_app = typer.Typer(no_args_is_help=True, help="Check or download the data sets in a folder.")

Workers = Annotated[int, typer.Option(min=0, help="Processes that prepare batches; 0: the main process prepares them.")]
Sources = Annotated[
    list[str] | None,
    typer.Argument(help="Folders or zips of class folders; PATH:SPLIT names a split. With --root, data sets by name."),
]
Config = Annotated[
    Path | None, typer.Option(help="TOML or JSON file of settings (a recipe); options on the command line override it.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of the recipe; may be repeated."),
]
Root = Annotated[
    str | None, typer.Option(help="Folder with the data sets given as NAME:SPLIT; paths may start there too.")
]
TrainingPrecision = Annotated[
    Precision | None,
    typer.Option(
        help="Precision of the convolutions; auto: bfloat16 where it is native, else float32.",
        show_default=PretrainRecipe.precision,
    ),
]
TrainingSeed = Annotated[int | None, typer.Option(help="Seed of all random choices.", show_default="0")]
TrainingDevice = Annotated[str, typer.Option(help='"auto" (a GPU where there is one) or "cpu".')]
Lazy = Annotated[
    bool, typer.Option("--lazy", help="Decode images when needed, instead of once into memory (21 kB per image).")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write logs for TensorBoard to the run folder.")]


class Protocol(str, Enum):
    """Episodes of an evaluation."""

    fixed = "fixed"
    variable = "variable"


class TableFormat(str, Enum):
    """Form of an evaluation's results on standard output."""

    markdown = "markdown"
    latex = "latex"
    json = "json"


def pretrain(
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; a stopped run there is continued.")],
    sources: Sources = None,
    config: Config = None,
    assignments: Assignments = None,
    validation: Annotated[str | None, typer.Option(help="Source of other classes to report on.")] = None,
    root: Root = None,
    init: Annotated[
        str | None,
        typer.Option(help="backbone.safetensors of an earlier run, or a checkpoint, to start from; default: none."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, show_default=str(PretrainRecipe.epochs))] = None,
    precision: TrainingPrecision = None,
    device: TrainingDevice = "auto",
    workers: Workers = 0,
    lazy: Lazy = False,
    tensorboard: TensorBoard = False,
    seed: TrainingSeed = None,
) -> None:
    """Train the backbone as an ordinary classifier. The same command continues a stopped run.

    For example:

        fewshot-mahalanobis pretrain mini_imagenet_train.zip -o runs/backbone --set peak_lr=0.1

        accelerate launch --multi_gpu --num_processes 8 -m fewshot_mahalanobis pretrain --config backbone.toml -o runs/b
    """
    from fewshot_mahalanobis.research.training.pretrain import pretrain as run

    with clear_errors():
        recipe = _recipe(
            PretrainRecipe,
            config,
            assignments,
            sources=sources,
            validation=validation,
            root=root,
            init=init,
            epochs=epochs,
            precision=precision,
            seed=seed,
        )
        run(recipe, output, device=device, workers=workers, lazy=lazy, tensorboard=tensorboard)
    typer.echo(f"{output / 'backbone.safetensors'}")


def meta_train(
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; a stopped run there is continued.")],
    sources: Sources = None,
    config: Config = None,
    assignments: Assignments = None,
    backbone: Annotated[
        str | None, typer.Option(help="backbone.safetensors, written by `pretrain`, or a checkpoint: its backbone.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Train a method to compare with (protonet, maml, ...) on the ResNet18, not Simple CNAPS."),
    ] = None,
    validation: Annotated[
        list[str] | None,
        typer.Option(help="Source of other classes to choose the best checkpoint on; may be repeated."),
    ] = None,
    root: Root = None,
    init: Annotated[
        str | None, typer.Option(help="Checkpoint whose adaptation networks to start from; else random weights.")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Training episodes.", show_default=f"{MetaTrainRecipe.tasks:,}")
    ] = None,
    precision: TrainingPrecision = None,
    device: TrainingDevice = "auto",
    workers: Workers = 0,
    lazy: Lazy = False,
    tensorboard: TensorBoard = False,
    seed: TrainingSeed = None,
) -> None:
    """Train the adaptation networks on episodes, with the backbone frozen. The same command continues a stopped run.

    The source "glyphs" is drawn by the package. A source that is named twice counts twice.

    For example:

        fewshot-mahalanobis meta-train photos.zip glyphs --backbone backbone.safetensors -o runs/meta

        fewshot-mahalanobis meta-train --config paper.toml -o runs/cosine --set model.head=cosine --set shot=1

        accelerate launch --multi_gpu --num_processes 8 -m fewshot_mahalanobis meta-train --config paper.toml -o runs/m
    """
    from fewshot_mahalanobis.research.training.meta_train import meta_train as run

    with clear_errors():
        recipe = _recipe(
            MetaTrainRecipe,
            config,
            assignments,
            sources=sources,
            backbone=backbone,
            method=method,
            validation=validation,
            root=root,
            init=init,
            tasks=tasks,
            precision=precision,
            seed=seed,
        )
        run(recipe, output, device=device, workers=workers, lazy=lazy, tensorboard=tensorboard)
    typer.echo(f"{output / ('best' if recipe.validation else 'checkpoint')}")


def _recipe(kind: type[Recipe], config: Path | None, assignments: list[str] | None, **options: Any) -> Recipe:
    """Make a recipe from the config file; --set overrides it, and other options override both."""
    settings = {name: getattr(value, "value", value) for name, value in options.items() if value not in (None, [])}
    return read_recipe(kind, config, assignments or (), settings)


# What ``evaluate`` takes.
EvaluationSources = Annotated[
    list[str],
    typer.Argument(help="Folders or zips of class folders; PATH:SPLIT names a split. With --root, data sets by name."),
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoint",
        help="Name, folder or Hub repository; may be repeated: each has a column and is compared with the first.",
        show_default="default",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Method to compare with: knn, finetune, matchingnet, protonet or tpn, on the checkpoint's network, or "
        "the folder of a method trained by `meta-train --method`; may be repeated.",
    ),
]
EpisodeProtocol = Annotated[
    Protocol, typer.Option(help="fixed: --way classes, --shot images each. variable: as Meta-Dataset draws them.")
]
Shots = Annotated[
    list[int] | None,
    typer.Option("--shot", min=1, help="Support images per class; repeatable.", show_default="1, 5"),
]
Way = Annotated[int, typer.Option(min=2, help="Classes per episode (fixed protocol).")]
Queries = Annotated[int, typer.Option(min=1, help="Query images per class, at most.")]
EpisodeCount = Annotated[int, typer.Option(min=2, help="Episodes per source.")]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        help="Head to compare; may be repeated. Default: the checkpoint's own, mahalanobis and euclidean; with "
        "several checkpoints, the own head of each.",
    ),
]
Adapt = Annotated[bool | None, typer.Option(help="Only with or only without adaptation.", show_default="both")]
NoTaskCovariance = Annotated[
    bool, typer.Option("--no-task-covariance", help='Also compare without the task covariance ("-TR").')
]
WithProjection = Annotated[
    bool, typer.Option(help='Without it: also compare a "+P" checkpoint without its projection.')
]
InDomain = Annotated[
    list[str] | None,
    typer.Option(
        help="Data set that the checkpoint was trained on, for averages; may be repeated. Known for named ones."
    ),
]
ImageSize = Annotated[
    int | None, typer.Option(help="Side that images are resized to, in pixels. Default: each checkpoint's.")
]
RootFolder = Annotated[
    Path | None, typer.Option(help="Folder with the data sets given as NAME:SPLIT; paths may start there too.")
]
Results = Annotated[
    Path | None,
    typer.Option("--results", "-o", help="JSON file of results; results that it already holds are not computed again."),
]
Form = Annotated[TableFormat, typer.Option("--format", help="What to write to standard output.")]
Plots = Annotated[Path | None, typer.Option(help="Folder for plots of accuracy against shots and ways.")]
EvaluationPrecision = Annotated[
    Precision,
    typer.Option(help="Precision of the convolutions; auto: bfloat16 where it is native, else float32."),
]


def evaluate(
    sources: EvaluationSources,
    checkpoints: Checkpoints = None,
    methods: Methods = None,
    protocol: EpisodeProtocol = Protocol.fixed,
    shots: Shots = None,
    way: Way = 5,
    queries: Queries = 10,
    episodes: EpisodeCount = 600,
    heads: Heads = None,
    adapt: Adapt = None,
    no_task_covariance: NoTaskCovariance = False,
    projection: WithProjection = True,
    in_domain: InDomain = None,
    image_size: ImageSize = None,
    root: RootFolder = None,
    results: Results = None,
    table: Form = TableFormat.markdown,
    plots: Plots = None,
    precision: EvaluationPrecision = Precision.auto,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure accuracy on episodes of every source, with 95 % intervals.

    By default the checkpoint is evaluated with and without adaptation, with its own, the Mahalanobis and the Euclidean
    head. The paper's figures for that source and method are shown beside, if there are any. With -o or --cache the
    pictures of the sources are read once.

    For example:

        fewshot-mahalanobis evaluate photos.zip drawings.zip:test --shot 1 --shot 5 -o results.json

        fewshot-mahalanobis evaluate omniglot:test mnist:test --root data --protocol variable --plots plots
    """
    from fewshot_mahalanobis.research.evaluation.report import Compared, Settings, evaluate_checkpoints

    with clear_errors():
        text = evaluate_checkpoints(
            Compared(
                checkpoints or ["default"],
                methods or (),
                heads or (),
                adapt,
                task_covariance=not no_task_covariance,
                projection=projection,
                image_size=image_size,
            ),
            sources,
            Settings(protocol.value, tuple(shots or (1, 5)), way, queries, episodes, seed, precision.value),
            in_domain=in_domain,
            root=root,
            file=results,
            memory=None if no_cache else cache or (results and cache_beside(results)),
            plots=plots,
            device=device,
            form=table.value,
        )
    typer.echo(text)


@data_app.command("check")
def data_check(root: Annotated[Path, typer.Argument(help="Folder of the data sets.")]) -> None:
    """List the data sets in ROOT with their numbers of classes and images, and what is missing."""
    from fewshot_mahalanobis.research.data.check import check_data, report

    with clear_errors():
        text = report(check_data(root))
    typer.echo(text)


@data_app.command("download")
def data_download(
    name: Annotated[str, typer.Argument(help="A data set that torchvision downloads.")],
    root: Annotated[Path, typer.Argument(help="Folder to put it in.")],
) -> None:
    """Download a data set with torchvision."""
    from fewshot_mahalanobis.research.data.datasets import download

    with clear_errors():
        download(name, root)
