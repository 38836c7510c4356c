"""The ``fewshot-mahalanobis`` command: parses, calls, prints."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewshot_mahalanobis.training.recipes import MetaTrainRecipe, PretrainRecipe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Few-shot image classification with Simple CNAPS: a few images a class, fit, predict.",
    epilog="Exit status: 0 done; 1 what was given cannot be used, nothing was written; 2 unknown command or option; "
    "3 done, but images were skipped (--skip-errors).",
)
checkpoints_app = typer.Typer(help="The named checkpoints: pretrained models that `fit` can start from.")
app.add_typer(checkpoints_app, name="checkpoints")
data_app = typer.Typer(no_args_is_help=True, help="Image data in a folder: what is there, what is missing.")
app.add_typer(data_app, name="data")

#: Exit status where the work is done but images were left out.
SKIPPED = 3
#: Images decoded and classified at a time, which bounds memory.
_CHUNK = 256

# Every command imports what it needs when it runs: --help answers without loading PyTorch.

Device = Annotated[str, typer.Option(help='"auto" (CUDA where there is one, else the CPU) or a torch device.')]
Workers = Annotated[int, typer.Option(min=0, help="Processes that prepare batches; 0 prepares them in this one.")]
Seed = Annotated[int, typer.Option(help="All random choices follow from it.")]
SkipErrors = Annotated[
    bool, typer.Option("--skip-errors", help="Leave out images that cannot be read, list them, and exit with 3.")
]


class Precision(str, Enum):
    """Precision of the convolutions."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Schedule(str, Enum):
    """Learning rate of meta-training over its steps."""

    constant = "constant"
    cosine = "cosine"


class EpisodeKind(str, Enum):
    """Episodes of meta-training."""

    variable = "variable"
    fixed = "fixed"
    small = "small"


# What both training commands take.
Sources = Annotated[
    list[str] | None,
    typer.Argument(help="Folders or zips of class folders; PATH:SPLIT names a split. With --root, data sets by name."),
]
Config = Annotated[
    Path | None, typer.Option(help="TOML file of settings, by their names here with _ for -; options here win over it.")
]
Root = Annotated[str | None, typer.Option(help="Folder of the data sets that are given as NAME:SPLIT.")]
TrainingPrecision = Annotated[Precision, typer.Option(help="Precision of the convolutions.")]
TrainingDevice = Annotated[str, typer.Option(help='"auto" (a GPU where there is one) or "cpu".')]
Lazy = Annotated[
    bool, typer.Option("--lazy", help="Decode images when they are asked for, not once into memory (21 kB an image).")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write logs for TensorBoard to the run folder too.")]


@app.command()
def demo(
    picture: Annotated[Path, typer.Option("--picture", "-o", help="PNG to write.")] = Path("fewshot_demo.png"),
    tasks: Annotated[int, typer.Option(min=2, help="Random tasks to average over.")] = 40,
    checkpoint: Annotated[str, typer.Option(help="Name, folder or Hub repository.")] = "default",
) -> None:
    """Classify real handwritten digits from five examples each, and compare with plain baselines.

    Example: fewshot-mahalanobis demo -o digits.png
    """
    from fewshot_mahalanobis.demo import run_demo

    with _clear_errors():
        run_demo(picture, checkpoint=checkpoint, tasks=tasks, say=typer.echo)


@app.command()
def fit(
    support: Annotated[
        Path,
        typer.Argument(help="Folder with one sub-folder of images a class, or a CSV file with columns path,label."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the fitted classifier to.")],
    checkpoint: Annotated[str, typer.Option(help="Name, folder or Hub repository.")] = "default",
    head: Annotated[
        str, typer.Option(help="mahalanobis, euclidean, manhattan, cosine or dot_product.")
    ] = "mahalanobis",
    adapt: Annotated[bool, typer.Option(help="Adapt the network to the support set.")] = True,
    unknown_label: Annotated[
        str | None, typer.Option(help="Label for images that are too foreign to every class; else they get a class.")
    ] = None,
    false_rejection_rate: Annotated[
        float, typer.Option(help="Share of the images of known classes that get --unknown-label by mistake.")
    ] = 0.05,
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Fit a classifier on a few images of each class and save it.

    Paths in a CSV file are relative to the folder that it is in.

    For example:

        fewshot-mahalanobis fit photos/ -o flowers.safetensors

        fewshot-mahalanobis fit labels.csv -o flowers.safetensors --skip-errors

        fewshot-mahalanobis fit photos/ -o flowers.safetensors --unknown-label "no flower"
    """
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
    from fewshot_mahalanobis.data.sources import image_files

    with _clear_errors():
        paths, labels = _read_csv(support) if support.suffix.lower() == ".csv" else image_files(support)
        # Only to find what cannot be read: a support set is small, and `fit` knows the size that its network wants.
        problems = {path: problem for _, _, found in _decoded(paths, 84, "reading") for path, problem in found.items()}
        _stop_unless_skipped(problems, len(paths), skip_errors)
        readable = [(path, label) for path, label in zip(paths, labels, strict=True) if path not in problems]
        if lost := sorted(set(labels) - {label for _, label in readable}):
            raise ValueError(f"no image of class {lost[0]!r} can be read: {output} is not written")
        classifier = SimpleCNAPSClassifier(
            checkpoint,
            head=head,
            adapt=adapt,
            device=device,
            unknown_label=unknown_label,
            false_rejection_rate=false_rejection_rate,
        )
        classifier.fit([path for path, _ in readable], [label for _, label in readable]).save(output)
    counts = ", ".join(f"{name} {n}" for name, n in zip(classifier.classes_, classifier.class_counts_, strict=True))
    typer.echo(f"{output}: {len(classifier.classes_)} classes ({counts})")
    _list_skipped(problems, len(paths))


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="File written by `fit`.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or folders that are searched for images.")],
    as_csv: Annotated[bool, typer.Option("--csv/--json", help="What to write to standard output.")] = True,
    proba: Annotated[bool, typer.Option("--proba", help="Add the probability of every class.")] = False,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Add the K most probable labels, best first, and their probabilities.")
    ] = None,
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Classify images; writes path and label of each to standard output.

    CSV has the columns path and label, a column for each class with --proba, and label_1, probability_1, label_2, ...
    with --top-k. JSON is a list of objects with "path", "label", and "probabilities" and "top" where asked for.
    Probabilities are those of the known classes, also where the label is the unknown one.

    For example:

        fewshot-mahalanobis predict flowers.safetensors holiday/ > labels.csv

        fewshot-mahalanobis predict flowers.safetensors 1.jpg 2.jpg --json --top-k 3
    """
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier, answers
    from fewshot_mahalanobis.data.sources import images_below

    read: list[Path] = []
    labels: list[Any] = []
    probabilities: list[list[float]] = []
    problems: dict[Path, str] = {}
    with _clear_errors():
        paths = [file for entry in images for file in images_below(entry)]
        classifier = SimpleCNAPSClassifier.load(model, device=device)
        classes = classifier.classes_.tolist()
        if top_k is not None and top_k > len(classes):
            raise ValueError(f"--top-k {top_k} is more than the {len(classes)} classes of {model}")
        for chunk, arrays, found in _decoded(paths, classifier.model_.image_size, "predicting"):
            problems |= found
            if not arrays or (problems and not skip_errors):
                continue  # only to find the other images that cannot be read
            read += chunk
            said = answers(classifier, arrays)
            labels += said.labels.tolist()
            if proba or top_k is not None:
                probabilities += said.probabilities.tolist()
        _stop_unless_skipped(problems, len(paths), skip_errors)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name need not be text: its bytes come out as they are
        sys.stdout.reconfigure(errors="surrogateescape")
    rows = []
    for index, (path, label) in enumerate(zip(read, labels, strict=True)):
        row: dict[str, Any] = {"path": str(path), "label": label}
        if proba:
            row["probabilities"] = dict(zip(classes, probabilities[index], strict=True))
        if top_k is not None:
            best = sorted(zip(probabilities[index], classes, strict=True), key=lambda pair: -pair[0])[:top_k]
            row["top"] = [{"label": name, "probability": probability} for probability, name in best]
        rows.append(row)
    if as_csv:
        _write_csv(rows, [*(classes if proba else ())], top_k or 0)
    else:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
    _list_skipped(problems, len(paths))


@app.command("app")
def run_app(
    checkpoint: Annotated[str, typer.Option(help="Name, folder or Hub repository.")] = "default",
    model: Annotated[
        Path | None, typer.Option(help="File written by `fit`, whose classes to start with, instead of a checkpoint.")
    ] = None,
    host: Annotated[
        str, typer.Option(help='Address to listen at; "0.0.0.0" lets other machines of the network in.')
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 7860 on.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Also make a public address, through Gradio's server.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Open a page in the browser: name classes, drop images, classify, download the model.

    For example:

        fewshot-mahalanobis app

        fewshot-mahalanobis app --model flowers.safetensors --port 8000
    """
    with _clear_errors():
        if model is not None and checkpoint != "default":
            raise ValueError("--checkpoint and --model exclude each other: a model file has its own network")
        from fewshot_mahalanobis.app import make_page, serve
        from fewshot_mahalanobis.checkpoints import load_checkpoint
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        start = load_checkpoint(checkpoint) if model is None else SimpleCNAPSClassifier.load(model, device=device)
        serve(make_page(start, device=device), host=host, port=port, share=share)


@app.command()
def pretrain(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; an unfinished run there goes on.")],
    sources: Sources = None,
    config: Config = None,
    validation: Annotated[str | None, typer.Option(help="Source of other classes to report on.")] = None,
    root: Root = None,
    init: Annotated[
        str | None, typer.Option(help="backbone.safetensors of an earlier run to start from; else random weights.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = PretrainRecipe.epochs,
    batch_size: Annotated[int, typer.Option(min=2, help="Of all processes together.")] = PretrainRecipe.batch_size,
    peak_lr: Annotated[float, typer.Option(help="Highest learning rate, at batch size 128.")] = PretrainRecipe.peak_lr,
    precision: TrainingPrecision = Precision.bfloat16,
    device: TrainingDevice = "auto",
    workers: Workers = 0,
    lazy: Lazy = False,
    tensorboard: TensorBoard = False,
    seed: Seed = PretrainRecipe.seed,
) -> None:
    """Train the backbone as an ordinary classifier; killed and started again, it goes on.

    For example:

        fewshot-mahalanobis pretrain mini_imagenet_train.zip -o runs/backbone

        accelerate launch --multi_gpu --num_processes 8 -m fewshot_mahalanobis pretrain --config backbone.toml -o runs/b
    """
    from fewshot_mahalanobis.training.pretrain import pretrain as run

    with _clear_errors():
        recipe = PretrainRecipe(**_recipe_settings(PretrainRecipe, context, config))
        run(recipe, output, device=device, workers=workers, lazy=lazy, tensorboard=tensorboard)
    typer.echo(f"{output / 'backbone.safetensors'}")


@app.command()
def meta_train(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; an unfinished run there goes on.")],
    sources: Sources = None,
    config: Config = None,
    backbone: Annotated[
        str | None, typer.Option(help="backbone.safetensors, written by `pretrain`, or a checkpoint: its backbone.")
    ] = None,
    validation: Annotated[
        list[str] | None,
        typer.Option(help="Source of other classes to choose the best checkpoint on; may be repeated."),
    ] = None,
    root: Root = None,
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
    ] = MetaTrainRecipe.feature_scale,
    tasks: Annotated[int, typer.Option(min=1)] = MetaTrainRecipe.tasks,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Of all processes together.")] = (
        MetaTrainRecipe.tasks_per_step
    ),
    learning_rate: Annotated[float, typer.Option(help="Adam's.")] = MetaTrainRecipe.learning_rate,
    schedule: Annotated[Schedule, typer.Option(help="Of the learning rate; cosine falls to zero.")] = Schedule.constant,
    episodes: Annotated[
        EpisodeKind,
        typer.Option(help="Meta-Dataset's; N-way K-shot; or 5 to 10 ways with 1 to 6 shots."),
    ] = EpisodeKind.variable,
    max_way: Annotated[int, typer.Option(min=5, help="Of variable episodes.")] = MetaTrainRecipe.max_way,
    max_support: Annotated[int, typer.Option(min=5, help="Support images of variable episodes.")] = (
        MetaTrainRecipe.max_support
    ),
    way: Annotated[int, typer.Option(min=2, help="Of fixed episodes.")] = MetaTrainRecipe.way,
    shot: Annotated[int, typer.Option(min=1, help="Of fixed episodes.")] = MetaTrainRecipe.shot,
    queries: Annotated[int, typer.Option(min=1, help="Query images a class, at most.")] = MetaTrainRecipe.queries,
    augment: Annotated[bool, typer.Option(help="See each task through a random camera.")] = MetaTrainRecipe.augment,
    lite: Annotated[
        int | None,
        typer.Option(min=1, help="Bound memory: back-propagate through N random support images a task (LITE)."),
    ] = MetaTrainRecipe.lite,
    precision: TrainingPrecision = Precision.bfloat16,
    validate_every: Annotated[int, typer.Option(min=1, help="Tasks between validations.")] = (
        MetaTrainRecipe.validate_every
    ),
    validation_episodes: Annotated[int, typer.Option(min=1, help="Of each validation source.")] = (
        MetaTrainRecipe.validation_episodes
    ),
    device: TrainingDevice = "auto",
    workers: Workers = 0,
    lazy: Lazy = False,
    tensorboard: TensorBoard = False,
    seed: Seed = MetaTrainRecipe.seed,
) -> None:
    """Train the adaptation networks on episodes, the backbone frozen; killed and started again, it goes on.

    The source "glyphs" is drawn here; a source that is named twice counts twice.

    For example:

        fewshot-mahalanobis meta-train photos.zip glyphs --backbone backbone.safetensors -o runs/meta

        accelerate launch --multi_gpu --num_processes 8 -m fewshot_mahalanobis meta-train --config paper.toml -o runs/m
    """
    from fewshot_mahalanobis.training.meta_train import meta_train as run

    with _clear_errors():
        recipe = MetaTrainRecipe(**_recipe_settings(MetaTrainRecipe, context, config, _MODEL_OPTIONS))
        run(recipe, output, device=device, workers=workers, lazy=lazy, tensorboard=tensorboard)
    typer.echo(f"{output / ('best' if recipe.validation else 'checkpoint')}")


#: Options of `meta-train` that are settings of the model.
_MODEL_OPTIONS = ("adaptation", "head", "task_covariance", "projection", "scale")


def _recipe_settings(
    recipe: type, context: typer.Context, config: Path | None, model_options: Sequence[str] = ()
) -> dict[str, Any]:
    """Arguments of a recipe: what the config file sets, then what the command line does; the rest has its defaults."""
    from fewshot_mahalanobis.training.recipes import read_settings

    settings = read_settings(config, recipe) if config is not None else {}
    known = {field.name: field for field in dataclasses.fields(recipe)}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if name in model_options:
            settings["model"] = {**settings.get("model", {}), name: value}
        elif name in known:
            value = getattr(value, "value", value)
            settings[name] = tuple(value) if isinstance(value, list) else value
    for name, field in known.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in settings:
            raise ValueError(f"no {name} given: name it on the command line or in the file of --config")
    return settings


class Protocol(str, Enum):
    """Episodes of an evaluation."""

    fixed = "fixed"
    variable = "variable"


class TableFormat(str, Enum):
    """Form of an evaluation's results on standard output."""

    markdown = "markdown"
    latex = "latex"
    json = "json"


@app.command()
def evaluate(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Folders or zips of class folders; PATH:SPLIT names a split. With --root, data sets by name."
        ),
    ],
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            help="Name, folder or Hub repository; of several each has a column, compared with the first.",
            show_default="default",
        ),
    ] = None,
    protocol: Annotated[
        Protocol, typer.Option(help="fixed: --way classes, --shot images each. variable: as Meta-Dataset draws them.")
    ] = Protocol.fixed,
    shots: Annotated[list[int] | None, typer.Option("--shot", help="Support images a class; may be repeated.")] = None,
    way: Annotated[int, typer.Option(min=2, help="Classes an episode.")] = 5,
    queries: Annotated[int, typer.Option(min=1, help="Query images a class.")] = 10,
    episodes: Annotated[int, typer.Option(min=2, help="Episodes a source.")] = 600,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            help="Compare these heads; may be repeated. Default: mahalanobis and euclidean, or of several checkpoints "
            "each one's own.",
        ),
    ] = None,
    adapt: Annotated[
        bool | None, typer.Option(help="Only with, or only without adaptation.", show_default="both")
    ] = None,
    no_task_covariance: Annotated[
        bool, typer.Option("--no-task-covariance", help='Compare the Mahalanobis head also without it: "-TR".')
    ] = False,
    projection: Annotated[bool, typer.Option(help='Without it: compare a "+P" checkpoint also without.')] = True,
    in_domain: Annotated[
        list[str] | None,
        typer.Option(help="Data set it was trained on, for the averages; may be repeated. Known of named checkpoints."),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the data sets that are given as NAME:SPLIT.")] = None,
    results: Annotated[
        Path | None, typer.Option("--results", "-o", help="JSON file; what it holds is not redone.")
    ] = None,
    table: Annotated[TableFormat, typer.Option("--format", help="What to write to standard output.")] = (
        TableFormat.markdown
    ),
    plots: Annotated[Path | None, typer.Option(help="Folder for plots of accuracy against shots and ways.")] = None,
    precision: Annotated[Precision, typer.Option(help="Precision of the convolutions.")] = Precision.float32,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Accuracy on episodes of every source, adapted and not, Mahalanobis and Euclidean, with 95 % intervals.

    The paper's figures stand beside where it has some for the source and the method.

    For example:

        fewshot-mahalanobis evaluate photos.zip drawings.zip:test --shot 1 --shot 5 -o results.json

        fewshot-mahalanobis evaluate omniglot:test mnist:test --root data --protocol variable --plots plots
    """
    import torch

    from fewshot_mahalanobis.checkpoints import load_checkpoint
    from fewshot_mahalanobis.evaluation.compare import differences, headings, joined
    from fewshot_mahalanobis.evaluation.curves import plot_curves
    from fewshot_mahalanobis.evaluation.paper_figures import IN_DOMAIN, check_in_domain, published_method
    from fewshot_mahalanobis.evaluation.tables import averages, open_sources, to_latex, to_markdown, variants_of
    from fewshot_mahalanobis.evaluation.tables import evaluate as run
    from fewshot_mahalanobis.training.run import choose_device

    with _clear_errors():
        names = list(dict.fromkeys(checkpoints or ("default",)))
        several = len(names) > 1
        models = {name: load_checkpoint(name).to(choose_device(device)) for name in names}
        variants = {
            name: variants_of(
                model,
                heads or ((model.config["head"],) if several else ()),
                # Of several the first alone is shown without adaptation too.
                True if adapt is None and name != names[0] and model.config["adaptation"] != "none" else adapt,
                task_covariance=not no_task_covariance,
                projection=projection,
            )
            for name, model in models.items()
        }
        if plots is not None and protocol is Protocol.fixed and len(set(shots or (1, 5))) < 2:
            raise ValueError("--plots needs --protocol variable, or several --shot")
        domains = in_domain if several or in_domain is not None else IN_DOMAIN.get(names[0])
        if in_domain is not None:
            size = models[names[0]].image_size
            check_in_domain(in_domain, [source.name for source in open_sources(sources, root, size)])
        evaluations = {
            name: run(
                model,
                sources,
                shots or (1, 5),
                variants=variants[name],
                protocol=protocol.value,
                root=root,
                results=results,
                way=way,
                queries=queries,
                episodes=episodes,
                seed=seed,
                dtype=getattr(torch, precision.value),
            )
            for name, model in models.items()
        }
        records, columns = evaluations[names[0]], {names[0]: {title: title for title in variants[names[0]]}}
        gains: list[dict[str, Any]] = []
        if several:
            columns = headings(models, variants)
            records = joined(evaluations, columns)
            gains = differences(records, next(iter(columns[names[0]].values())), domains)
        if plots is not None:
            plot_curves(records, plots)
    methods = {
        columns[name][title]: method
        for name, model in models.items()
        for title, variant in variants[name].items()
        if (method := published_method(model.config, variant))
    }
    if table is TableFormat.json:
        found = {"records": records, "averages": averages(records, domains)}
        typer.echo(json.dumps(found | ({"differences": gains} if several else {}), indent=1))
    else:
        typer.echo({"markdown": to_markdown, "latex": to_latex}[table.value](records, domains, methods, gains))


@checkpoints_app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> None:
    """List, show or download the named checkpoints; without a command, list them."""
    if context.invoked_subcommand is None:
        list_checkpoints()


@checkpoints_app.command("list")
def list_checkpoints() -> None:
    """List the named checkpoints.

    Example: fewshot-mahalanobis checkpoints list
    """
    from fewshot_mahalanobis.checkpoints import available_checkpoints
    from fewshot_mahalanobis.evaluation.accuracy import markdown_table

    rows = [
        [r.name, "in the package" if r.embedded else "downloaded when first used", r.licence, r.trained_on]
        for r in available_checkpoints().values()
    ]
    typer.echo(markdown_table(rows, ["name", "where", "licence", "trained on"]))


@checkpoints_app.command("show")
def show_checkpoint(name: Annotated[str, typer.Argument(help="A name of `checkpoints list`.")]) -> None:
    """Show what is known of a named checkpoint, its accuracies included.

    Example: fewshot-mahalanobis checkpoints show default
    """
    from fewshot_mahalanobis.checkpoints import available_checkpoints
    from fewshot_mahalanobis.evaluation.accuracy import markdown_table

    with _clear_errors():
        known = available_checkpoints()
        if name not in known:
            raise ValueError(f"no checkpoint is named {name!r}; there are {', '.join(known)}")
    record = known[name]
    facts = {
        "where": record.url or "in the package",
        "size": "" if record.size is None else f"{record.size / 1e6:.0f} MB",
        "licence": record.licence,
        "image size": f"{record.image_size} x {record.image_size} pixels",
        "trained on": record.trained_on,
        **{key.replace("_", " "): str(value) for key, value in record.settings.items()},
    }
    typer.echo(markdown_table([[key, value] for key, value in facts.items() if value], [name, ""]))
    if record.accuracies:
        rows = [[task, f"{mean:.1f} ± {half_width:.1f}"] for task, (mean, half_width) in record.accuracies.items()]
        typer.echo("\n" + markdown_table(rows, ["task", "accuracy, %"]))


@checkpoints_app.command("download")
def download_checkpoint(
    name: Annotated[str, typer.Argument(help='A name of `checkpoints list`, or a Hub repository "user/repo".')],
) -> None:
    """Download a checkpoint, verify it, and keep it for use without a network.

    Example: fewshot-mahalanobis checkpoints download simple-cnaps-meta-dataset
    """
    from fewshot_mahalanobis.checkpoints import load_checkpoint

    with _clear_errors():
        load_checkpoint(name)
    typer.echo(f"{name} is here and can be used without a network")


def _read_csv(file: Path) -> tuple[list[Path], list[str]]:
    """Paths and labels of a CSV file with those columns; paths are relative to its folder."""
    paths, labels = [], []
    with file.open(newline="", encoding="utf-8-sig") as lines:  # -sig: spreadsheets write a byte order mark
        table = csv.DictReader(lines)
        if missing := {"path", "label"} - {*(table.fieldnames or ())}:
            raise ValueError(f"{file} has no column {sorted(missing)[0]!r}: its first line must name path and label")
        for row in table:
            if not row["path"] or not row["label"]:
                raise ValueError(f"line {table.line_num} of {file} lacks a path or a label")
            paths.append(file.parent / row["path"])
            labels.append(row["label"])
    if not paths:
        raise ValueError(f"{file} lists no image")
    return paths, labels


def _decoded(
    paths: Sequence[Path], size: int, description: str
) -> Iterator[tuple[list[Path], list[NDArray[np.uint8]], dict[Path, str]]]:
    """Yield chunk by chunk the paths that can be read, their images (size, size, 3), and what is wrong with the others.

    The next chunk is decoded while one is in use. Progress goes to the standard error of a terminal.
    """
    import joblib
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    console.quiet = not console.is_terminal  # before rich 14.3 a Progress that is disabled ends with an empty line
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    with (
        ThreadPoolExecutor(min(joblib.cpu_count(), 4)) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task(description, total=len(paths))
        ahead = pool.map(partial(_read, size=size), chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], []], strict=True):
            results, ahead = list(ahead), pool.map(partial(_read, size=size), following)
            good = [(path, found) for path, found in zip(chunk, results, strict=True) if not isinstance(found, str)]
            bad = {path: found for path, found in zip(chunk, results, strict=True) if isinstance(found, str)}
            yield [path for path, _ in good], [image for _, image in good], bad
            progress.advance(bar, len(chunk))


def _read(path: Path, size: int) -> NDArray[np.uint8] | str:
    """One image as uint8 (size, size, 3), or what is wrong with it."""
    from fewshot_mahalanobis.images import ImageError, read_square_array

    try:
        return read_square_array(path, size)
    except ImageError as error:
        return str(error)


def _stop_unless_skipped(problems: Mapping[Path, str], total: int, skip_errors: bool) -> None:
    """Raise ValueError where images cannot be read and that is not to be passed over, or none of them can."""
    if problems and (not skip_errors or len(problems) == total):
        _list_problems(problems)
        remedy = "" if skip_errors else ": mend or remove them, or leave them out with --skip-errors"
        raise ValueError(f"{len(problems)} of {total} images cannot be read{remedy}")


def _list_skipped(problems: Mapping[Path, str], total: int) -> None:
    """List what was left out and exit with the status for it; nothing where all was read."""
    if problems:
        _list_problems(problems)
        typer.echo(f"skipped {len(problems)} of {total} images, which cannot be read", err=True)
        raise typer.Exit(SKIPPED)


def _list_problems(problems: Mapping[Path, str]) -> None:
    for path, problem in problems.items():
        typer.echo(f"{path}: {problem}", err=True)


def _write_csv(rows: Sequence[Mapping[str, Any]], classes: Sequence[Any], top_k: int) -> None:
    """Write predictions as CSV: path, label, a probability a class, then the best labels with theirs."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    best = [f"{name}_{place}" for place in range(1, top_k + 1) for name in ("label", "probability")]
    table.writerow(["path", "label", *classes, *best])
    for row in rows:
        all_of_them = [f"{row['probabilities'][name]:.6f}" for name in classes]
        top = [cell for entry in row.get("top", ()) for cell in (entry["label"], f"{entry['probability']:.6f}")]
        table.writerow([row["path"], row["label"], *all_of_them, *top])


@data_app.command("check")
def data_check(root: Annotated[Path, typer.Argument(help="Folder that the data sets are in.")]) -> None:
    """List data sets and other sources in ROOT, with their classes and images, and what is missing."""
    from fewshot_mahalanobis.data.check import check_data, report

    with _clear_errors():
        typer.echo(report(check_data(root)))


@data_app.command("download")
def data_download(
    name: Annotated[str, typer.Argument(help="A data set that torchvision downloads.")],
    root: Annotated[Path, typer.Argument(help="Folder to put it in.")],
) -> None:
    """Download a data set with torchvision."""
    from fewshot_mahalanobis.data.datasets import download

    with _clear_errors():
        download(name, root)


class _clear_errors:
    """Turn the library's errors about what the user gave into one line and exit status 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, OSError, ImportError)):
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
