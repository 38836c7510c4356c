"""The ``fewshot-mahalanobis`` command: parses, calls, prints."""

from __future__ import annotations

import io
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.apps.cli_options import (
    Checkpoint,
    Device,
    SkipErrors,
    check_output,
    clear_errors,
    number_of,
    report_skipped,
)
from fewshot_mahalanobis.apps.cli_research import data_app, evaluate, meta_train, pretrain

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Few-shot image classification with Simple CNAPS: a few images per class, fit, predict.",
    epilog="Exit status: 0 done; 1 the input cannot be used, nothing was written; 2 unknown command or option; "
    "3 done, but images were skipped (--skip-errors); 130 stopped by Ctrl-C.",
)
checkpoints_app = typer.Typer(help="The named checkpoints: pretrained models that `fit` can start from.")
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(data_app, name="data")

Model = Annotated[Path, typer.Argument(help="File written by `fit`.")]
Host = Annotated[str, typer.Option(help='Address to listen on; "0.0.0.0" admits other machines of the network.')]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 7860.")]
Share = Annotated[bool, typer.Option("--share", help="Also make a public address through Gradio's server.")]
Browser = Annotated[bool, typer.Option(help="Open the page in the browser.")]
Images = Annotated[list[Path], typer.Argument(help="Images, or folders that are searched for images.")]

# Every command imports what it needs when it runs, after what can be checked without: --help answers and typing
# errors are reported without loading PyTorch.


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fewshot-mahalanobis {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run before every command."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names and labels need not be valid text, nor fit a terminal
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="backslashreplace")
        else:  # what `fit` reads; bytes of a name that is no text stay as they are
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")


@app.command()
def demo(
    picture: Annotated[Path, typer.Option("--picture", "-o", help="PNG to write.")] = Path("fewshot_demo.png"),
    tasks: Annotated[int, typer.Option(min=2, help="Random tasks of digits to average over.")] = 10,
    checkpoint: Checkpoint = "default",
) -> None:
    """Classify photographs and handwritten digits from five examples each, and compare with plain baselines.

    Example: fewshot-mahalanobis demo -o demo.png
    """
    from fewshot_mahalanobis.apps.demo import run_demo

    with clear_errors():
        check_output(picture)
        run_demo(picture, checkpoint=checkpoint, tasks=tasks, say=typer.echo)


@app.command()
def fit(
    support: Annotated[
        Path,
        typer.Argument(
            help="Folder with a sub-folder of images for each class, or a CSV file (.csv, .tsv, .txt) with columns "
            "path,label."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the fitted classifier to.")],
    checkpoint: Checkpoint = "default",
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Pretrained network of timm instead of a checkpoint, not adapted; for example resnet18.a1_in1k."
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(help="How classes are compared: auto, mahalanobis, euclidean, manhattan, cosine or dot_product."),
    ] = "auto",
    adapt: Annotated[bool, typer.Option(help="Adapt the network to the support set.")] = True,
    image_size: Annotated[
        int | None,
        typer.Option(help="Side that images are resized to, in pixels: smaller is faster. Default: the checkpoint's."),
    ] = None,
    value_range: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="Values that are black and white in images of more than 8 bits whose file does not say it, saved for "
            "the images to classify: 0 4095 for a camera of 12 bits."
        ),
    ] = None,
    unknown_label: Annotated[
        str | None, typer.Option(help="Label for images unlike every class. Without it they get the nearest class.")
    ] = None,
    false_rejection_rate: Annotated[
        float, typer.Option(help="Share of images of known classes that may get --unknown-label by mistake.")
    ] = 0.05,
    groups: Annotated[
        str | None,
        typer.Option(
            help="Images that belong together, such as frames of one video: the column of the table that names their "
            "group; or none, if no two do. By default copies are recognised."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Show leave-one-out accuracy, confused classes and suspect images.")
    ] = False,
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Fit a classifier on a few images of each class and save it.

    Paths in a table are relative to the folder that it is in.

    For example:

        fewshot-mahalanobis fit photos/ -o flowers.safetensors

        fewshot-mahalanobis fit labels.csv -o flowers.safetensors --skip-errors --report

        fewshot-mahalanobis fit photos/ -o flowers.safetensors --unknown-label "no flower"
    """
    with clear_errors():
        check_output(output)
        if backbone is not None and checkpoint != "default":
            raise ValueError("--checkpoint and --backbone exclude each other: both name the network")
        paths, labels = _labelled_files(support)
        group_names = None if groups is None else _groups(support, paths, groups)

        from fewshot_mahalanobis.apps.labelling import fit_files
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
        from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

        classifier = SimpleCNAPSClassifier(
            checkpoint if backbone is None else SimpleCNAPS.from_backbone(backbone, image_size=image_size),
            head=head,
            adapt=adapt,
            image_size=image_size if backbone is None else None,
            value_range=value_range,
            device=device,
            unknown_label=unknown_label,
            false_rejection_rate=false_rejection_rate,
        )
        skipped = fit_files(classifier, paths, labels, groups=group_names, skip_errors=skip_errors)
        classifier.save(output)
    counts = ", ".join(f"{name} {n}" for name, n in zip(classifier.classes_, classifier.class_counts_, strict=True))
    typer.echo(f"{output}: {len(classifier.classes_)} classes ({counts})")
    if report:
        typer.echo(classifier.summary().describe([path for path in paths if path not in skipped]))
    report_skipped(skipped, len(paths))


@app.command()
def predict(
    model: Model,
    images: Images,
    as_csv: Annotated[bool, typer.Option("--csv/--json", help="Format of the output.")] = True,
    proba: Annotated[bool, typer.Option("--proba", help="Add the probability of each class.")] = False,
    top_k: Annotated[
        int, typer.Option(min=0, help="Add the K most probable labels, best first, and their probabilities.")
    ] = 0,
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Classify images. Writes the path and label of each to standard output.

    CSV has the columns path and label, with --proba one for each class, and with --top-k label_1, probability_1,
    label_2, ... JSON is a list of objects with "path", "label" and, if asked for, "probabilities" and "top".
    Probabilities are of the known classes, even if the label is the one for unknown images.

    For example:

        fewshot-mahalanobis predict flowers.safetensors holiday/ > labels.csv

        fewshot-mahalanobis predict flowers.safetensors 1.jpg 2.jpg --json --top-k 3
    """
    from fewshot_mahalanobis.apps.labelling import predict_files, to_json, write_csv
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

    with clear_errors():
        paths = _image_files(images)
        classifier = SimpleCNAPSClassifier.load(model, device=device)
        classes = classifier.classes_.tolist()
        if top_k > len(classes):
            raise ValueError(f"--top-k {top_k} is more than the {len(classes)} classes of {model}")
        wanted = proba or top_k > 0
        predictions, skipped = predict_files(classifier, paths, probabilities=wanted, skip_errors=skip_errors)
    if as_csv:
        write_csv(sys.stdout, predictions, classes if proba else [], top_k)
    else:
        typer.echo(to_json(predictions, proba, top_k))
    report_skipped(skipped, len(paths))


def _labelled_files(support: Path) -> tuple[list[Path], list[str]]:
    """Image files and labels of a folder with a sub-folder per class, or of a table."""
    from fewshot_mahalanobis.images.folders import find_class_images, read_labels

    if support.suffix.lower() in (".csv", ".tsv", ".txt") and not support.is_dir():
        return read_labels(support)
    images = find_class_images(support)
    if note := images.note():
        typer.echo(note, err=True)
    return images.paths, images.labels


def _groups(support: Path, paths: list[Path], column: str) -> list[str]:
    """The group of each image, by a column of the table; each its own for "none"."""
    from fewshot_mahalanobis.images.folders import labelled_rows

    if column == "none":
        return [str(path) for path in paths]
    if support.is_dir():
        raise ValueError(f"--groups {column}: a folder has no columns. Give a table with path, label and {column}")
    return [group for _, group in labelled_rows(support, "path", column)]


def _image_files(files_or_folders: list[Path]) -> list[Path]:
    """The files, and all image files below the folders."""
    from fewshot_mahalanobis.images.folders import find_images

    paths = []
    for place in files_or_folders:
        images = find_images(place)
        if note := images.note():
            typer.echo(f"{place}: {note}", err=True)
        paths += images.paths
    return paths


@app.command()
def sort(
    model: Model,
    images: Images,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the sorted images; made if absent.")],
    link: Annotated[bool, typer.Option("--link", help="Make links instead of copies.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Move the images instead of copying them.")] = False,
    min_probability: Annotated[
        float, typer.Option(min=0, max=1, help="Images less probable than this go to the folder `unsure`.")
    ] = 0.5,
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Copy images to a folder for each class. Without --move the images themselves stay where they are.

    For example:

        fewshot-mahalanobis sort flowers.safetensors holiday/ -o sorted/

        fewshot-mahalanobis sort flowers.safetensors holiday/ -o sorted/ --link
    """
    with clear_errors():
        if link and move:
            raise ValueError("--link and --move exclude each other")
        check_output(output, folder=True)
        paths = _image_files(images)

        from fewshot_mahalanobis.apps.sorting import sort_files
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        classifier = SimpleCNAPSClassifier.load(model, device=device)
        sorted_files, skipped = sort_files(
            classifier,
            paths,
            output,
            how="link" if link else "move" if move else "copy",
            min_probability=min_probability,
            skip_errors=skip_errors,
        )
    counts = Counter(file.sorted_as.parent.name for file in sorted_files)
    listed = f" ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})" if counts else ""
    typer.echo(f"{output}: {number_of(len(sorted_files), 'image')} sorted{listed}")
    report_skipped(skipped, len(paths))


@app.command()
def page(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the page; made if absent.")],
    title: Annotated[str, typer.Option(help="Heading of the page and name of the app.")] = "Picture classifier",
    support: Annotated[
        Path | None,
        typer.Option(
            help="The folder or table that `fit` learned from: the page then shows the pictures that are nearest to "
            "the visitor's. Every visitor can see them."
        ),
    ] = None,
    runtime: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the npm package onnxruntime-web 1.30.0, to be copied: the page then asks no other server "
            "for anything. By default browsers load it from cdn.jsdelivr.net."
        ),
    ] = None,
) -> None:
    """Write a web page that classifies in its visitor's browser, for any web server.

    Pictures stay on the visitor's device. The page can be installed as an app, and works without a network after the
    first visit.

    For example:

        fewshot-mahalanobis page flowers.safetensors -o flowers/

        fewshot-mahalanobis page flowers.safetensors -o flowers/ --support photos/ --title "Which flower is it?"
    """
    with clear_errors():
        check_output(output, folder=True)
        pictures = None if support is None else _labelled_files(support)[0]

        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        classifier = SimpleCNAPSClassifier.load(model)
        classifier.export_page(output, title=title, support=pictures, runtime=runtime)
    size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    typer.echo(f"{output}: a page of {size:.0f} MB, for any web server with https. To look at it here:")
    typer.echo(f"    python3 -m http.server --bind 127.0.0.1 --directory {shlex.quote(str(output))}")
    typer.echo("and open http://127.0.0.1:8000")


@app.command("app")
def run_app(
    checkpoint: Checkpoint = "default",
    model: Annotated[
        Path | None, typer.Option(help="Start with the classes of a file that `fit` wrote, instead of a checkpoint.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    share: Share = False,
    browser: Browser = True,
    device: Device = "auto",
) -> None:
    """Open a page in the browser: name classes, drop images, classify, download the model.

    For example:

        fewshot-mahalanobis app

        fewshot-mahalanobis app --model flowers.safetensors --port 8000
    """
    with clear_errors():
        if model is not None and checkpoint != "default":
            raise ValueError("--checkpoint and --model exclude each other: a model file has its own network")
        from fewshot_mahalanobis.apps.page import make_page, serve
        from fewshot_mahalanobis.checkpoints.load import load_checkpoint
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        start = load_checkpoint(checkpoint) if model is None else SimpleCNAPSClassifier.load(model, device=device)
        serve(make_page(start, device=device), host=host, port=port, share=share, browser=browser)


@app.command()
def review(
    model: Model,
    images: Images,
    host: Host = "127.0.0.1",
    port: Port = None,
    share: Share = False,
    browser: Browser = True,
    device: Device = "auto",
) -> None:
    """Open a page in the browser that asks for the labels of the images that teach the model most.

    It learns from every answer; download the model from the page when done.

    Example: fewshot-mahalanobis review flowers.safetensors holiday/
    """
    with clear_errors():
        paths = _image_files(images)

        from fewshot_mahalanobis.apps.page import make_page, serve
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        page = make_page(SimpleCNAPSClassifier.load(model, device=device), device=device, queries=list(map(str, paths)))
        serve(page, host=host, port=port, share=share, browser=browser)


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
    from fewshot_mahalanobis.research.evaluation.tables import markdown_table

    records = available_checkpoints()
    default = records.pop("default").name
    rows = [
        [
            f"{name} (default)" if name == default else name,
            "in the package" if r.embedded else "downloaded when first used" + ", by timm" * (r.timm is not None),
            r.licence,
            r.trained_on,
        ]
        for name, r in records.items()
    ]
    typer.echo(markdown_table(rows, ["name", "where", "licence", "trained on"]))


@checkpoints_app.command("show")
def show_checkpoint(name: Annotated[str, typer.Argument(help="A name of `checkpoints list`.")]) -> None:
    """Show a named checkpoint: origin, licence, training data, accuracies.

    Example: fewshot-mahalanobis checkpoints show default
    """
    from fewshot_mahalanobis.checkpoints import available_checkpoints
    from fewshot_mahalanobis.research.evaluation.tables import markdown_table

    with clear_errors():
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
    typer.echo(markdown_table([[key, value] for key, value in facts.items() if value], [record.name, ""]))
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
    from fewshot_mahalanobis.checkpoints.load import load_checkpoint

    with clear_errors():
        load_checkpoint(name)
    typer.echo(f"{name} is here and can be used without a network")


for command in (pretrain, meta_train, evaluate):
    app.command()(command)
