"""The ``fewshot-mahalanobis`` command: parses, calls, prints."""

from __future__ import annotations

import csv
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
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Fit a classifier on a few images of each class and save it.

    Paths in a CSV file are relative to the folder that it is in.

    For example:

        fewshot-mahalanobis fit photos/ -o flowers.safetensors

        fewshot-mahalanobis fit labels.csv -o flowers.safetensors --skip-errors
    """
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
    from fewshot_mahalanobis.episodes.sources import image_files

    with _clear_errors():
        paths, labels = _read_csv(support) if support.suffix.lower() == ".csv" else image_files(support)
        # Only to find what cannot be read: a support set is small, and `fit` knows the size that its network wants.
        problems = {path: problem for _, _, found in _decoded(paths, 84, "reading") for path, problem in found.items()}
        _stop_unless_skipped(problems, len(paths), skip_errors)
        readable = [(path, label) for path, label in zip(paths, labels, strict=True) if path not in problems]
        if lost := sorted(set(labels) - {label for _, label in readable}):
            raise ValueError(f"no image of class {lost[0]!r} can be read: {output} is not written")
        classifier = SimpleCNAPSClassifier(checkpoint, head=head, adapt=adapt, device=device)
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

    For example:

        fewshot-mahalanobis predict flowers.safetensors holiday/ > labels.csv

        fewshot-mahalanobis predict flowers.safetensors 1.jpg 2.jpg --json --top-k 3
    """
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
    from fewshot_mahalanobis.episodes.sources import images_below

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
            if proba or top_k is not None:
                found_probabilities = classifier.predict_proba(arrays)
                probabilities += found_probabilities.tolist()
                labels += classifier.classes_[found_probabilities.argmax(axis=1)].tolist()
            else:
                labels += classifier.predict(arrays).tolist()
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
    from fewshot_mahalanobis.evaluation.evaluate import markdown_table

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
    from fewshot_mahalanobis.evaluation.evaluate import markdown_table

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
    from fewshot_mahalanobis.episodes.check import check_data, report

    with _clear_errors():
        typer.echo(report(check_data(root)))


@data_app.command("download")
def data_download(
    name: Annotated[str, typer.Argument(help="A data set that torchvision downloads.")],
    root: Annotated[Path, typer.Argument(help="Folder to put it in.")],
) -> None:
    """Download a data set with torchvision."""
    from fewshot_mahalanobis.episodes.datasets import download

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
