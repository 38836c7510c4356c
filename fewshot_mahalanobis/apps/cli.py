"""The ``fewshot-mahalanobis`` command: parses, calls, prints."""

from __future__ import annotations

import csv
import io
import math
import shlex
import sys
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from fewshot_mahalanobis.images.boxes import Boxes
    from fewshot_mahalanobis.images.folders import LabelledImages
    from fewshot_mahalanobis.images.region import Region

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
ImagesOrBoxes = Annotated[
    list[Path],
    typer.Argument(
        help="Images, folders that are searched for images, or files of boxes in images: a CSV file with columns "
        "path,x,y,width,height, a COCO annotation file or MegaDetector's results (.json)."
    ),
]
ImageFolder = Annotated[
    Path | None, typer.Option(help="Where the paths in a table or a file of boxes start. Default: that file's folder.")
]
Margin = Annotated[
    float,
    typer.Option(
        min=0,
        help="Widen boxes on each side by this share of their width and height, the same in each command.",
    ),
]
MinConfidence = Annotated[
    float, typer.Option(min=0, max=1, help="Leave out MegaDetector's detections of less confidence.")
]
Category = Annotated[
    str | None, typer.Option(help="Leave out MegaDetector's detections of other categories; animal, say.")
]


class Rows(str, Enum):
    """Rows of a table that `predict` wrote."""

    checked = "checked"
    sure = "sure"
    all = "all"


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
    context: typer.Context,
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Folders with a sub-folder of images for each class, CSV files (.csv, .tsv, .txt) with columns "
            "path,label, for boxes in the images also x,y,width,height in pixels, or COCO annotation files (.json). "
            "A later one corrects the labels of an earlier one."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the fitted classifier to.")],
    model: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Add the images to those of this file, which `fit` wrote, with its network and settings."
        ),
    ] = None,
    rows: Annotated[
        Rows,
        typer.Option(
            help="What to take of a table that `predict` wrote: rows that were checked or changed; also those that are "
            "not doubtful (sure); or all."
        ),
    ] = Rows.checked,
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
        str | None,
        typer.Option(
            help="Label for images unlike every class, which otherwise get the nearest one. Images with this label in "
            "the support are examples of no class."
        ),
    ] = None,
    false_rejection_rate: Annotated[
        float, typer.Option(help="Share of images of known classes that may get --unknown-label by mistake.")
    ] = 0.05,
    priors: Annotated[
        str | None,
        typer.Option(
            help="Shares of the classes among the images to classify: cat=0.9,dog=0.1. By default all are equal."
        ),
    ] = None,
    image_folder: ImageFolder = None,
    margin: Margin = 0.0,
    groups: Annotated[
        str | None,
        typer.Option(
            help="Images that belong together, such as frames of one video: the column of the table that names their "
            "group; or none, if no two do. By default copies are recognised, and boxes of one image belong together."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Show leave-one-out accuracy, confused classes and suspect images.")
    ] = False,
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Fit a classifier on a few images of each class and save it.

    Paths in a table or a file of boxes are relative to the folder that it is in. Images with the unknown label, and
    those in a folder called unsure, are left out.

    For example:

        fewshot-mahalanobis fit photos/ -o flowers.safetensors

        fewshot-mahalanobis fit photos/ corrected.csv -o flowers.safetensors --skip-errors --report

        fewshot-mahalanobis fit --from flowers.safetensors corrected.csv -o flowers.safetensors

        fewshot-mahalanobis fit photos/ -o flowers.safetensors --unknown-label "no flower"
    """
    with clear_errors():
        check_output(output)
        shares = None if priors is None else _shares(priors)
        if backbone is not None and checkpoint != "default":
            raise ValueError("--checkpoint and --backbone exclude each other: both name the network")
        if model is not None and (given := [name for name in _OF_A_MODEL if _is_given(context, name)]):
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{options}: --from has these settings from {model}. Without --from they can be changed")
        labelled = _read_sources(
            sources,
            image_folder=image_folder,
            margin=margin,
            rows=rows.value,
            group_column=None if groups == "none" else groups,
            at_least=2 if model is None else 1,
        )

        from fewshot_mahalanobis.apps.labelling import fit_files
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
        from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

        if model is not None:
            classifier = SimpleCNAPSClassifier.load(model, device=device)
            if shares is not None:
                classifier.set_params(priors=shares)
        else:
            classifier = SimpleCNAPSClassifier(
                checkpoint if backbone is None else SimpleCNAPS.from_backbone(backbone, image_size=image_size),
                head=head,
                adapt=adapt,
                image_size=image_size if backbone is None else None,
                value_range=value_range,
                device=device,
                priors=shares,
                unknown_label=unknown_label,
                false_rejection_rate=false_rejection_rate,
            )
        images, labels, group_names, _ = _with_unknown_label(labelled, classifier.unknown_label)
        if groups == "none":
            group_names = [*map(str, images)]
        skipped = fit_files(
            classifier, images, labels, groups=group_names, skip_errors=skip_errors, add=model is not None
        )
        classifier.save(output)
    counts = ", ".join(f"{name} {n}" for name, n in zip(classifier.classes_, classifier.class_counts_, strict=True))
    classes = "class" if len(classifier.classes_) == 1 else "classes"
    negatives = classifier.fitted_head_.negatives
    of_no_class = "" if negatives is None else f", and {number_of(len(negatives.adapted), 'image')} of no class"
    typer.echo(f"{output}: {len(classifier.classes_)} {classes} ({counts}){of_no_class}")
    if report:
        typer.echo(classifier.summary().describe())
    report_skipped(skipped, len(images))


@app.command()
def predict(
    model: Model,
    images: ImagesOrBoxes,
    as_csv: Annotated[bool, typer.Option("--csv/--json", help="Format of the output.")] = True,
    proba: Annotated[bool, typer.Option("--proba", help="Add the probability of each class.")] = False,
    top_k: Annotated[
        int, typer.Option(min=0, help="Add the K most probable labels, best first, and their probabilities.")
    ] = 0,
    min_probability: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Mark images as doubtful that are less probable than this, or of no class."),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            help="CLASS=P: an image gets this label if the probability of the class is at least P, else the most "
            "probable other one; defect=0.2, say. An image unlike every class stays unknown."
        ),
    ] = None,
    image_folder: ImageFolder = None,
    margin: Margin = 0.0,
    min_confidence: MinConfidence = 0.0,
    category: Category = None,
    skip_errors: SkipErrors = False,
    device: Device = "auto",
) -> None:
    """Classify images, or boxes in them. Writes the path and label of each to standard output.

    CSV has the columns path and label, checked (empty, for your mark), predicted (the label again) and probability;
    with --min-probability doubtful, with --proba one for each class, and with --top-k label_1, probability_1, label_2,
    ... To teach the model, correct labels or mark those that are right in checked, and give the table to `fit`.

    JSON is a list of objects with "path", "label" and, if asked for, "doubtful", "probabilities" and "top".
    Probabilities are of the known classes, even if the label is the one for unknown images.

    For boxes, CSV has x, y, width and height too, in pixels. With --json a file of COCO or MegaDetector is written
    again, with the labels as its categories or classifications.

    For example:

        fewshot-mahalanobis predict flowers.safetensors holiday/ > labels.csv

        fewshot-mahalanobis predict flowers.safetensors 1.jpg 2.jpg --json --top-k 3

        fewshot-mahalanobis predict birds.safetensors detections.json --json --category animal > classified.json

        fewshot-mahalanobis predict parts.safetensors today/ --threshold defect=0.2 > labels.csv
    """
    from fewshot_mahalanobis.apps.labelling import filled_in, predict_files, to_json, write_csv
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

    with clear_errors():
        pictures, files = _images_and_boxes(
            images, image_folder=image_folder, margin=margin, min_confidence=min_confidence, category=category
        )
        again = [] if as_csv else [file for file in files if file.document is not None]
        if again and len(images) > 1:
            raise ValueError("--json writes a JSON file of boxes again, with labels: give it alone")
        if again and min_probability is not None:
            raise ValueError("--min-probability is for tables: a JSON file of boxes has the probability of each label")
        classifier = SimpleCNAPSClassifier.load(model, device=device)
        classes = classifier.classes_.tolist()
        if top_k > len(classes):
            raise ValueError(f"--top-k {top_k} is more than the {len(classes)} classes of {model}")
        wanted = proba or top_k > 0 or bool(again)
        limit = None if threshold is None else _threshold(threshold, classes)
        predictions, skipped = predict_files(
            classifier, pictures, probabilities=wanted, threshold=limit, skip_errors=skip_errors
        )
    if as_csv:
        write_csv(sys.stdout, predictions, classes if proba else [], top_k, min_probability)
    elif again:
        labels, shown = classifier.fitted_head_.output_labels.tolist(), len(classes) if proba else max(top_k, 1)
        typer.echo(filled_in(again[0], predictions, skipped, labels, shown))
    else:
        typer.echo(to_json(predictions, proba, top_k, min_probability))
    report_skipped(skipped, len(pictures))


def _threshold(text: str, classes: list[Any]) -> tuple[Any, float]:
    """The class and the probability of "CLASS=P"."""
    if len(classes) == 1:
        raise ValueError(
            f"--threshold {text}: with one class, {classes[0]}, every probability is 1. What is none of it is rejected "
            "by the --false-rejection-rate that the model was fitted with"
        )
    name, _, share = text.rpartition("=")
    try:
        limit = float(share)
    except ValueError:
        limit = math.nan
    if not 0 <= limit <= 1:
        raise ValueError(
            f"--threshold {text}: it is CLASS=P with a probability P from 0 to 1, such as {classes[0]}=0.2"
        )
    for label in classes:
        if str(label) == name:
            return label, limit
    raise ValueError(f"--threshold {text}: {name!r} is none of the classes {', '.join(map(str, classes))}")


#: Options of `fit` that a model file has already.
_OF_A_MODEL = (
    *("checkpoint", "backbone", "head", "adapt", "image_size", "value_range"),
    *("unknown_label", "false_rejection_rate"),
)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read_sources(sources: list[Path], **options: Any) -> LabelledImages:
    """Images and labels of folders, tables and files of boxes; says what was left out and what was corrected."""
    from fewshot_mahalanobis.images.sources import read_sources

    labelled, notes = read_sources(sources, **options)
    for note in notes:
        _note(note)
    return labelled


def _with_unknown_label(labelled: LabelledImages, unknown_label: Any) -> LabelledImages:
    """With this label, however it is written, as examples of no class; without them if there is no such label."""
    from fewshot_mahalanobis.support_set.labels import folded

    if unknown_label is None:
        return _of_classes(labelled, None, ". To learn from them, set --unknown-label when the model is made")
    none = str(unknown_label)
    return labelled._replace(labels=[none if folded(label) == folded(none) else label for label in labelled.labels])


def _of_classes(labelled: LabelledImages, unknown_label: Any, remedy: str = "") -> LabelledImages:
    """Without the images of no class; says how many these are."""
    from fewshot_mahalanobis.apps.session import UNKNOWN
    from fewshot_mahalanobis.support_set.labels import folded

    none = UNKNOWN if unknown_label is None else str(unknown_label)
    known = [folded(label) != folded(none) for label in labelled.labels]
    if not all(known):
        images = number_of(known.count(False), "image")
        _note(f"Left out: {images} labelled {none!r}, which is no class{remedy}.")
    return labelled.where(known)


def _note(note: str) -> None:
    if note:
        typer.echo(note, err=True)


def _shares(priors: str) -> dict[str, float]:
    """The share of each label in "cat=0.9,dog=0.1". An entry with a comma stands in quotes, as in CSV."""
    shares = {}
    for entry in next(csv.reader([priors], skipinitialspace=True), []):
        label, _, share = entry.rpartition("=")
        try:
            shares[label.strip()] = float(share)
        except ValueError:
            label = ""
        if not label.strip():
            raise ValueError(f"--priors: {entry!r} is not LABEL=SHARE, such as cat=0.9")
    return shares


def _images_and_boxes(places: list[Path], **of_boxes: Any) -> tuple[list[Path | Region], list[Boxes]]:
    """The files, all image files below the folders, and the regions of files of boxes; and these files."""
    from fewshot_mahalanobis.images.boxes import is_box_file, read_boxes

    images: list[Path | Region] = []
    files: list[Boxes] = []
    for place in places:
        if is_box_file(place):
            files.append(read_boxes(place, **of_boxes))
            images += files[-1].regions
            _note(files[-1].note)
        else:
            images += _image_files([place])
    if not files and any(of_boxes.values()):
        options = ", ".join(f"--{name.replace('_', '-')}" for name, value in of_boxes.items() if value)
        raise ValueError(f"{options}: for files of boxes, and there is none")
    return images, files


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

    Again with a better model, it moves what is no longer unsure, and lists sorted images that it now calls otherwise.

    For example:

        fewshot-mahalanobis sort flowers.safetensors holiday/ -o sorted/

        fewshot-mahalanobis sort flowers.safetensors holiday/ -o sorted/ --link
    """
    with clear_errors():
        if link and move:
            raise ValueError("--link and --move exclude each other")
        check_output(output, folder=True)

        from fewshot_mahalanobis.images.boxes import is_box_file

        for place in filter(is_box_file, images):
            raise ValueError(
                f"{place} has boxes, and sort puts whole images into folders: label the boxes by predict, which "
                "writes a table, or on a page by review"
            )
        paths = _image_files(images)

        from fewshot_mahalanobis.apps.sorting import sort_files
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        classifier = SimpleCNAPSClassifier.load(model, device=device)
        done = sort_files(
            classifier,
            paths,
            output,
            how="link" if link else "move" if move else "copy",
            min_probability=min_probability,
            skip_errors=skip_errors,
        )
    counts = Counter(file.sorted_as.parent.name for file in done.new)
    listed = f" ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})" if counts else ""
    typer.echo(f"{output}: {number_of(len(done.new), 'image')} sorted{listed}")
    if done.no_longer_unsure:
        typer.echo(f"No longer unsure: {number_of(len(done.no_longer_unsure), 'image')}")
        for file in done.no_longer_unsure:
            typer.echo(f"  {file.path.name} -> {file.sorted_as.relative_to(output.resolve())}")
    if done.called_otherwise:
        typer.echo(f"Now called otherwise, and left where they are: {number_of(len(done.called_otherwise), 'image')}")
        for file in done.called_otherwise:
            typer.echo(f"  {file.sorted_as.relative_to(output.resolve())}: {file.label} ({file.probability:.0%})")
    report_skipped(done.problems, len(paths))


@app.command()
def page(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the page; made if absent.")],
    model: Annotated[Path | None, typer.Argument(help="File written by `fit`.", show_default=False)] = None,
    teach: Annotated[bool, typer.Option("--teach", help="A page on which the visitor teaches a classifier.")] = False,
    start: Annotated[
        Path | None, typer.Option("--model", help="With --teach: start with the classes of a file that `fit` wrote.")
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Heading of the page and name of the app.", show_default=False)
    ] = None,
    support: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder or table that `fit` learned from; give the option again for each. The page then shows the "
            "pictures that are nearest to the visitor's. Every visitor can see them."
        ),
    ] = None,
    image_folder: ImageFolder = None,
    margin: Margin = 0.0,
    runtime: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the npm package onnxruntime-web 1.30.0, to be copied: the page then asks no other server "
            "for anything. By default browsers load it from cdn.jsdelivr.net."
        ),
    ] = None,
) -> None:
    """Write a web page that classifies in its visitor's browser, or with --teach one that is taught there.

    Pictures stay on the visitor's device. The page is a folder for any web server. It can be installed as an app, and
    works without a network after the first visit.

    For example:

        fewshot-mahalanobis page flowers.safetensors -o flowers/

        fewshot-mahalanobis page flowers.safetensors -o flowers/ --support photos/ --title "Which flower is it?"

        fewshot-mahalanobis page --teach -o teach/ --model flowers.safetensors
    """
    with clear_errors():
        if teach and (model is not None or support):
            raise ValueError("--teach takes no MODEL and no --support: name the file to start from as --model")
        if not teach and (model is None or start is not None):
            raise ValueError("name the file that `fit` wrote as MODEL; --model is for a page to be taught, --teach")
        check_output(output, folder=True)
        labelled = _read_sources(support, image_folder=image_folder, margin=margin, at_least=1) if support else None

        from fewshot_mahalanobis.apps.teaching import export_teaching_page
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        named = {} if title is None else {"title": title}
        if model is not None:
            classifier = SimpleCNAPSClassifier.load(model)
            pictures = labelled and _of_classes(labelled, classifier.unknown_label).images
            classifier.export_page(output, **named, support=pictures, runtime=runtime)
        else:
            checkpoint = "default" if start is None else SimpleCNAPSClassifier.load(start)
            export_teaching_page(output, checkpoint, **named, runtime=runtime)
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
    images: ImagesOrBoxes,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Table of the labels, written after every answer; an earlier one goes on."),
    ] = Path("checked.csv"),
    image_folder: ImageFolder = None,
    margin: Margin = 0.0,
    min_confidence: MinConfidence = 0.0,
    category: Category = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    browser: Browser = True,
    device: Device = "auto",
) -> None:
    """Open a page in the browser to label images: the model asks about one at a time, and shows all of its answers.

    Or boxes in images: the table then has x, y, width and height too. It learns from every label. The page offers the
    labels, which `fit` reads, and the model for download.

    For example:

        fewshot-mahalanobis review flowers.safetensors holiday/

        fewshot-mahalanobis review flowers.safetensors holiday/ -o holiday.csv

        fewshot-mahalanobis review birds.safetensors detections.json --category animal
    """
    with clear_errors():
        check_output(output)
        paths, _ = _images_and_boxes(
            images, image_folder=image_folder, margin=margin, min_confidence=min_confidence, category=category
        )

        from fewshot_mahalanobis.apps.review import Review
        from fewshot_mahalanobis.apps.review_page import ReviewServer
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        reviewed = Review(SimpleCNAPSClassifier.load(model, device=device), paths, output)
        for path, problem in reviewed.problems.items():
            typer.echo(f"{path}: {problem}", err=True)
        if reviewed.labels or reviewed.other_rows:
            others = f", and {number_of(reviewed.other_rows, 'row')} about others" if reviewed.other_rows else ""
            typer.echo(f"{output} has labels of {number_of(len(reviewed.labels), 'image')} already{others}", err=True)
        ReviewServer(reviewed, host, port).serve(browser=browser)


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
