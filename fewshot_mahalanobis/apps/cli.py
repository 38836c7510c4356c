"""The ``fewshot-mahalanobis`` command: parses, calls, prints."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.apps.cli_options import (
    Cache,
    Checkpoint,
    Device,
    NoCache,
    SkipErrors,
    cache_beside,
    check_output,
    clear_errors,
    number_of,
    numbers_in,
    report_skipped,
)
from fewshot_mahalanobis.apps.cli_research import data_app, evaluate, meta_train, pretrain

if TYPE_CHECKING:
    from fewshot_mahalanobis.apps.exporting import Compared
    from fewshot_mahalanobis.apps.journal import Journal
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
    from fewshot_mahalanobis.images.folders import LabelledImages
    from fewshot_mahalanobis.images.picture_sources import Pictures
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
Token = Annotated[
    str | None,
    typer.Option(
        envvar="FEWSHOT_MAHALANOBIS_TOKEN",
        help="What the page and programs must present. Default: a new one where --host admits others.",
        show_default=False,
    ),
]
LabelsOutput = Annotated[
    Path,
    typer.Option("--output", "-o", help="Table of the labels, written after every answer; an earlier one goes on."),
]
Browser = Annotated[bool, typer.Option(help="Open the page in the browser.")]
Images = Annotated[list[Path], typer.Argument(help="Images, or folders that are searched for images.")]
ImagesOrBoxes = Annotated[
    list[Path],
    typer.Argument(
        help="Images, folders that are searched for images, CSV files with a column path, or files of boxes in images: "
        "a CSV file with columns path,x,y,width,height, a COCO annotation file or MegaDetector's results (.json)."
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


FalseRejectionRate = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Share of images of known classes that may get the unknown label by mistake, in place of the one that the "
        "model was fitted with.",
    ),
]


Propose = Annotated[
    bool,
    typer.Option(
        "--propose",
        help="Propose new classes: images of no class that look like one another. For a model with an unknown label.",
    ),
]


GroupBy = Annotated[
    str | None,
    typer.Option(
        help="Pictures of one thing, which get one label: those of one folder (folder), those taken within N seconds "
        "of each other, by EXIF time (seconds=N), or those of one name in a column of the table (column=NAME)."
    ),
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
    unlabelled: Annotated[
        list[Path] | None,
        typer.Option(
            help="Images without a label to learn from too: a file, a folder or a table. May be given several times."
        ),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(
            help="Images of --unlabelled that show one thing and count once: those of one folder (folder), those taken "
            "within N seconds of each other (seconds=N), or those of one name in a column of the table (column=NAME)."
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
            help="Values that are black and white in images of more than 8 bits that do not declare it, saved for "
            "the images to classify: 0 4095 for a camera of 12 bits."
        ),
    ] = None,
    pages: Annotated[
        str | None,
        typer.Option(
            help="Page that is read of files of several, saved for the images to classify: first, a number counted "
            "from 0, max or mean of all, or three grey ones as red, green and blue: 0,1,2."
        ),
    ] = None,
    bands: Annotated[
        str | None,
        typer.Option(
            help="Bands that are red, green and blue in files of more, counted from 0, or one: 3,2,1. Saved likewise."
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
            help="Shares of the classes among the images to classify: cat=0.9,dog=0.1; or equal. By default those "
            "among the images of --unlabelled, and equal ones without any."
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
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
) -> None:
    """Fit a classifier on a few images of each class and save it.

    Paths in a table or a file of boxes are relative to the folder that it is in. Images in a folder called unsure are
    left out, and without --unknown-label also those labelled unknown.

    For example:

        fewshot-mahalanobis fit photos/ -o flowers.safetensors

        fewshot-mahalanobis fit photos/ corrected.csv -o flowers.safetensors --skip-errors --report

        fewshot-mahalanobis fit --from flowers.safetensors corrected.csv -o flowers.safetensors

        fewshot-mahalanobis fit photos/ -o flowers.safetensors --unknown-label "no flower"

        fewshot-mahalanobis fit photos/ --unlabelled holiday/ -o flowers.safetensors
    """
    with clear_errors():
        check_output(output)
        shares = None if priors is None else _shares(priors)
        if group_by is not None and not unlabelled:
            raise ValueError(
                f"--group-by {group_by} is for the images of --unlabelled. Groups of labelled ones are in a column of "
                "their table: --groups COLUMN"
            )
        others = _find_pictures(unlabelled or [], group_by)
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
                pages=numbers_in(pages),
                bands=numbers_in(bands),
                device=device,
                priors=shares,
                unknown_label=unknown_label,
                false_rejection_rate=false_rejection_rate,
            )
        classifier.set_params(memory=None if no_cache else cache or cache_beside(output))
        labelled = _with_unknown_label(labelled, classifier.unknown_label)
        if groups == "none":
            labelled = labelled._replace(groups=[*map(str, labelled.images)])
        skipped = fit_files(classifier, labelled, others, skip_errors=skip_errors, add=model is not None)
        classifier.save(output)
    counts = ", ".join(f"{name} {n}" for name, n in zip(classifier.classes_, classifier.class_counts_, strict=True))
    classes = "class" if len(classifier.classes_) == 1 else "classes"
    negatives = classifier.fitted_head_.negatives
    rejected = "" if negatives is None else f", and {number_of(len(negatives.adapted), 'image')} of no class"
    pool = classifier.fitted_head_.pool
    others_too = "" if pool is None else f", and {number_of(len(pool.features), 'unlabelled image')}"
    typer.echo(f"{output}: {len(classifier.classes_)} {classes} ({counts}){rejected}{others_too}")
    if report:
        typer.echo(classifier.summary().describe())
    report_skipped(skipped, len(labelled.images) + len(others.images))


@app.command()
def predict(
    model: Model,
    images: ImagesOrBoxes,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write, .csv, .json or .parquet, instead of standard output. After an interruption the same "
            "command goes on where it was.",
        ),
    ] = None,
    as_csv: Annotated[
        bool | None, typer.Option("--csv/--json", help="Format of standard output; a file has that of its ending.")
    ] = None,
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
    false_rejection_rate: FalseRejectionRate = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Add the candidates of each image, the classes that it may have, so that for this share of images of "
            "known classes the right one is among them: 0.9, say. Those with several are marked as doubtful."
        ),
    ] = None,
    group_by: GroupBy = None,
    propose: Propose = False,
    unlabelled: Annotated[Path | None, typer.Option(hidden=True)] = None,
    image_folder: ImageFolder = None,
    margin: Margin = 0.0,
    min_confidence: MinConfidence = 0.0,
    category: Category = None,
    skip_errors: SkipErrors = False,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
) -> None:
    """Classify images, or boxes in them. Writes the path and label of each to standard output, or to a file with -o.

    While it works, the answers so far are in a file beside that of -o, called like it and .partial. With --skip-errors
    an image that cannot be read has a row too, and why in its column error. With --group-by or --propose there are no
    answers before the last image is read, and so none in that file.

    CSV has the columns path and label, checked (empty, for your mark), predicted (the label again) and probability;
    with --min-probability doubtful, with --proba one for each class, and with --top-k label_1, probability_1, label_2,
    ... To teach the model, correct labels or mark those that are right in checked, and give the table to `fit`.

    JSON is a list of objects with "path", "label" and, if asked for, "doubtful", "probabilities" and "top".
    Probabilities are of the known classes, even if the label is the one for unknown images.

    A model with an unknown label also gives the class that the probability is of, outlier_score and outlier_threshold,
    above which an image is unknown, and doubt, from 0 to 1, by which rows can be ranked. With --propose the column
    new_class has new-1, new-2, ... for unknown images that look like one another, the most alike first.

    For boxes, CSV has x, y, width and height too, in pixels. With --json a file of COCO or MegaDetector is written
    again, with the labels as its categories or classifications.

    For example:

        fewshot-mahalanobis predict flowers.safetensors holiday/ -o labels.csv

        fewshot-mahalanobis predict flowers.safetensors 1.jpg 2.jpg --json --top-k 3

        fewshot-mahalanobis predict birds.safetensors detections.json --json --category animal > classified.json

        fewshot-mahalanobis predict parts.safetensors today/ --threshold defect=0.2 > labels.csv
    """
    with clear_errors():
        ending = _ending(output, as_csv)
        if unlabelled is not None:
            raise ValueError(
                "--unlabelled is for fit: a model learns once, and then answers any picture. Fit it with --unlabelled, "
                "and predict by that"
            )
        if output is not None:
            check_output(output)
        elif sys.__stdout__ is None:
            raise OSError("standard output is closed, and the labels are written to it")

        from fewshot_mahalanobis.apps import answer_files, labelling

        if ending == ".parquet":
            answer_files.import_parquet()
        found = _find_pictures(
            images,
            group_by,
            image_folder=image_folder,
            margin=margin,
            min_confidence=min_confidence,
            category=category,
        )
        pictures, groups = found.images, found.groups
        again = [] if ending != ".json" else [file for file in found.boxes if file.document is not None]
        if again and len(images) > 1:
            raise ValueError("--json writes a JSON file of boxes again, with labels: give it alone")
        if again and (min_probability is not None or coverage is not None):
            option = "--min-probability is" if coverage is None else "--coverage is"
            raise ValueError(f"{option} for tables: a JSON file of boxes has the probability of each label")
        if again and propose:
            raise ValueError("--propose is for tables: a JSON file of boxes has no place for proposed classes")
        if coverage is not None and min_probability is not None:
            raise ValueError("--min-probability and --coverage exclude each other: both mark what is doubtful")
        classifier = _loaded(model, device, cache, no_cache, false_rejection_rate)
        head = classifier.fitted_head_
        classes = head.classes.tolist()
        if top_k > len(classes):
            raise ValueError(f"--top-k {top_k} is more than the {len(classes)} classes of {model}")
        wanted = proba or top_k > 0 or bool(again)
        limit = None if threshold is None else _threshold(threshold, classes)
        journal = None
        if output is not None and groups is None and not propose:
            settings = pictures, limit, wanted, coverage, false_rejection_rate
            journal = _journal(output.with_name(f"{output.name}.partial"), model, *settings)
        predictions, skipped = labelling.predict_files(
            classifier,
            pictures,
            probabilities=wanted,
            threshold=limit,
            coverage=coverage,
            groups=groups,
            propose=propose,
            skip_errors=skip_errors,
            journal=journal,
        )
        rows = labelling.with_unreadable(pictures, predictions, skipped)
        if again:
            shown = len(classes) if proba else max(top_k, 1)
            text = answer_files.filled_in(again[0], rows, head.output_labels.tolist(), shown) + "\n"
        elif ending == ".json":
            text = answer_files.to_json(rows, proba, top_k, min_probability) + "\n"
        else:
            columns = answer_files.answer_columns(rows, classes if proba else [], top_k, min_probability, skip_errors)
            text = "" if ending == ".parquet" else answer_files.to_csv(columns)
        if output is not None:
            from fewshot_mahalanobis.checkpoints.files import atomic_replace

            with atomic_replace(output) as temporary:
                if ending == ".parquet":
                    answer_files.write_parquet(temporary, columns)
                else:
                    temporary.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        if journal is not None:
            journal.remove()
    if output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{output}: {number_of(len(rows) - len(skipped), 'image')} labelled")
    report_skipped(skipped, len(pictures))


def _loaded(
    model: Path, device: str, cache: Path | None, no_cache: bool, false_rejection_rate: float | None = None
) -> SimpleCNAPSClassifier:
    """A fitted classifier that remembers pictures, with another rate than that of its file if one is given."""
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

    classifier = SimpleCNAPSClassifier.load(model, device=device)
    classifier.set_params(memory=None if no_cache else cache or cache_beside(model))
    if false_rejection_rate is None:
        return classifier
    if classifier.unknown_label is None:
        raise ValueError("--false-rejection-rate: the model rejects nothing. Fit it with --unknown-label")
    return classifier.set_params(false_rejection_rate=false_rejection_rate)


def _ending(output: Path | None, as_csv: bool | None) -> str:
    """The ending of a file that says its format; ".csv" or ".json" for standard output."""
    ending = ".json" if as_csv is False else ".csv"
    if output is None:
        return ending
    if as_csv is not None and output.suffix.lower() != ending:
        raise ValueError(
            f"-o {output}: --csv and --json are for standard output. The ending of the file says its format"
        )
    if output.suffix.lower() not in (".csv", ".json", ".parquet"):
        raise ValueError(f"-o {output}: the ending of the file says its format: .csv, .json or .parquet")
    return output.suffix.lower()


def _journal(file: Path, model: Path, pictures: Sequence[Path | Region], *settings: Any) -> Journal:
    """The answers of an earlier run by this model with these settings; says how many there are."""
    from fewshot_mahalanobis.apps.journal import Journal

    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    journal = Journal(file, {"program": __version__, "model": digest, "settings": settings})
    if journal.begun_anew:
        _note(f"{file} has answers of another model or with other options: it is begun anew.")
    found = [journal.find(picture) for picture in pictures]
    known = sum(answer is not None and answer["error"] is None for answer in found)
    _note(f"{file} has the answers for {known:,} of {number_of(len(pictures), 'image')} already." if known else "")
    return journal


def _threshold(text: str, classes: list[Any]) -> tuple[Any, float]:
    """The class and the probability of "CLASS=P"."""
    if len(classes) == 1:
        raise ValueError(
            f"--threshold {text}: with one class, {classes[0]}, every probability is 1. What is none of it is rejected "
            "by --false-rejection-rate"
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
    *("checkpoint", "backbone", "head", "adapt", "image_size", "value_range", "pages", "bands"),
    *("unknown_label", "false_rejection_rate"),
)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read_sources(sources: list[Path], **options: Any) -> LabelledImages:
    """Images and labels of folders, tables and files of boxes; says what was left out and what was corrected."""
    from fewshot_mahalanobis.images.picture_sources import read_sources

    labelled, notes = read_sources(sources, **options)
    for note in notes:
        _note(note)
    return labelled


def _with_unknown_label(labelled: LabelledImages, unknown_label: Any) -> LabelledImages:
    """With this label, in any spelling, for examples of no class; without other labels of rejected images.

    A label that only sounds as if it were of no class stays a class, with a note.
    """
    from fewshot_mahalanobis.support_set.labels import folded

    if unknown_label is None:
        labelled = _without_rejected(labelled, None, ". To learn from them, set --unknown-label when the model is made")
    else:
        none = str(unknown_label)
        labels = [none if folded(label) == folded(none) else label for label in labelled.labels]
        others = frozenset(label for label in labelled.rejected_labels if folded(label) != folded(none))
        labelled = _without(labelled._replace(labels=labels), others, f" for `predict`: --unknown-label is {none!r}")
    for label, count in Counter(labelled.labels).items():
        if folded(label) in _SOUND_LIKE_NO_CLASS and label != unknown_label:
            _note(
                f"{number_of(count, 'image')} labelled {label!r} {'is' if count == 1 else 'are'} learned as a class "
                "like any other. With this --unknown-label when the model is made, they are examples of no class."
            )
    return labelled


#: Labels that people give pictures of no class.
_SOUND_LIKE_NO_CLASS = {"none of these", "none of them", "none of the above", "none", "nothing", "no class", "unknown"}


def _without_rejected(labelled: LabelledImages, unknown_label: Any, remedy: str = "") -> LabelledImages:
    """Without the images of no class; says how many these are."""
    from fewshot_mahalanobis.apps.session import UNKNOWN

    none = UNKNOWN if unknown_label is None else str(unknown_label)
    return _without(labelled, {none, *labelled.rejected_labels}, remedy)


def _without(labelled: LabelledImages, labels: Collection[str], remedy: str) -> LabelledImages:
    """Without the images with one of these labels, however it is written; says how many these are."""
    from fewshot_mahalanobis.support_set.labels import folded

    names = {folded(label): label for label in labels}
    left_out = Counter(names[folded(label)] for label in labelled.labels if folded(label) in names)
    for label, count in left_out.items():
        _note(f"Left out: {number_of(count, 'image')} labelled {label!r}, which is no class{remedy}.")
    return labelled.where([folded(label) not in names for label in labelled.labels])


def _note(note: str) -> None:
    if note:
        typer.echo(note, err=True)


def _shares(priors: str) -> dict[str, float] | str:
    """The share of each label in "cat=0.9,dog=0.1", or "equal". An entry with a comma stands in quotes, as in CSV."""
    if priors == "equal":
        return priors
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


def _find_pictures(places: list[Path], group_by: str | None = None, **options: Any) -> Pictures:
    """The pictures of files, folders and tables, and the groups of ``--group-by``; says what was left out."""
    how, value = _grouping(group_by)

    from fewshot_mahalanobis.images.picture_sources import find_pictures

    found = find_pictures(places, group_column=value if how == "column" else None, **options)
    for note in found.notes:
        _note(note)
    return found if how == "column" else found._replace(groups=_groups_of(found.images, how, value))


def _grouping(text: str | None) -> tuple[str, str]:
    """Split "column=NAME" or "seconds=N" at its "="; "folder" has nothing after it."""
    how, _, value = (text or "").replace(" ", "=", 1).partition("=")
    is_number = value.replace(".", "", 1).isdecimal()
    if text is not None and not (
        (how == "folder" and not value) or (how == "column" and value) or (how == "seconds" and is_number)
    ):
        raise ValueError(f"--group-by {text}: it is folder, seconds=60 or column=NAME")
    return how, value


def _groups_of(pictures: Sequence[Path | Region], how: str, value: str) -> list[str] | None:
    """The group of each picture by its folder or its time; None if neither is asked for."""
    from fewshot_mahalanobis.images.bursts import bursts, by_folder

    if how == "folder":
        return by_folder(pictures)
    return bursts(pictures, float(value)) if how == "seconds" else None


@app.command()
def calibrate(
    model: Model,
    images: Annotated[
        list[Path], typer.Argument(help="Further images of known classes, which `fit` was not given, or their folders.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; it may be MODEL itself.")],
    false_rejection_rate: FalseRejectionRate = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
) -> None:
    """Set the threshold of rejection from further images of known classes, without learning from them.

    From the few images of `fit` the share of false alarms is uncertain. More good images make it certain.

    Example: fewshot-mahalanobis calibrate parts.safetensors more_good/ -o parts.safetensors
    """
    with clear_errors():
        check_output(output)
        paths = _find_pictures(images).images

        classifier = _loaded(model, device, cache, no_cache, false_rejection_rate)
        classifier.calibrate(paths).save(output)
    interval = classifier.false_rejection_interval_
    assert interval is not None  # or there would be nothing to calibrate
    typer.echo(
        f"{output}: by {number_of(len(paths), 'image')}, {100 * interval[0]:.2g} to {100 * interval[1]:.2g} % of the "
        "images of known classes will be rejected (with probability 0.9)"
    )


@app.command()
def sort(
    model: Model,
    images: Images,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the sorted images; made if absent.")],
    link: Annotated[bool, typer.Option("--link", help="Make links instead of copies.")] = False,
    move: Annotated[
        bool, typer.Option("--move", help="Move the images, and their side files, instead of copying.")
    ] = False,
    min_probability: Annotated[
        float, typer.Option(min=0, max=1, help="Images less probable than this go to the folder `unsure`.")
    ] = 0.5,
    false_rejection_rate: FalseRejectionRate = None,
    group_by: GroupBy = None,
    propose: Propose = False,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Learn from all of the images first: where each class lies, and how many of each there are.",
        ),
    ] = False,
    skip_errors: SkipErrors = False,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
) -> None:
    """Copy images to a folder for each class. Without --move the images themselves stay where they are.

    Images of no class go to a folder called like the unknown label, with --propose those that look like one another to
    sub-folders new-1, new-2, ... of it. Side files, which --move takes along, are files that are no
    images and have the name of one: 1.xmp, 1.jpg.json or 1.CR2 beside 1.jpg.

    While it works, the answers so far are in a file sorting.partial of the folder: after an interruption the same
    command goes on from there.

    Run again with a better model, it moves images that are no longer unsure to their classes, and lists sorted images
    whose label is now another.

    For example:

        fewshot-mahalanobis sort flowers.safetensors holiday/ -o sorted/

        fewshot-mahalanobis sort flowers.safetensors holiday/ -o sorted/ --link --together
    """
    with clear_errors():
        if link and move:
            raise ValueError("--link and --move exclude each other")
        check_output(output, folder=True)
        how, value = _grouping(group_by)
        if how == "column":
            raise ValueError(f"--group-by {group_by}: sort takes images and folders, which have no columns")

        from fewshot_mahalanobis.images.boxes import is_box_file

        for place in filter(is_box_file, images):
            raise ValueError(
                f"{place} has boxes, and sort puts whole images into folders: label the boxes by predict, which "
                "writes a table, or on a page by review"
            )
        from fewshot_mahalanobis.images.folders import find_images, kinds_of

        found = {place: find_images(place) for place in images}
        paths = [path for in_place in found.values() for path in in_place.paths]

        groups = _groups_of(paths, how, value)

        from fewshot_mahalanobis.apps.sorting import sort_files

        classifier = _loaded(model, device, cache, no_cache, false_rejection_rate)
        journal = None
        if groups is None and not together and not propose:  # else answers depend on images that are still to be read
            journal = _journal(output / "sorting.partial", model, paths, false_rejection_rate)
        done = sort_files(
            classifier,
            paths,
            output,
            how="link" if link else "move" if move else "copy",
            min_probability=min_probability,
            groups=groups,
            together=together,
            propose=propose,
            skip_errors=skip_errors,
            journal=journal,
        )
        if journal is not None:
            journal.remove()
    for place, in_place in found.items():
        if note := in_place.without(file for file in done.went_along if file.is_relative_to(place)).note():
            _note(f"{place}: {note}")
    if done.went_along:
        _note(f"Moved with their images: {kinds_of(done.went_along)}.")
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
    space: Annotated[
        bool, typer.Option("--space", help="Add the README.md that makes the folder a static Space of Hugging Face.")
    ] = False,
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
        if not support and (margin or image_folder is not None):
            raise ValueError("--margin and --image-folder are for the pictures of --support, and there are none")
        check_output(output, folder=True)
        labelled = _read_sources(support, image_folder=image_folder, margin=margin, at_least=1) if support else None

        from fewshot_mahalanobis.apps.teaching import export_teaching_page
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        named = {} if title is None else {"title": title}
        if model is not None:
            classifier = SimpleCNAPSClassifier.load(model)
            pictures = labelled and _without_rejected(labelled, classifier.unknown_label).images
            classifier.export_page(output, **named, support=pictures, runtime=runtime)
        else:
            checkpoint = "default" if start is None else SimpleCNAPSClassifier.load(start)
            export_teaching_page(output, checkpoint, **named, runtime=runtime)
        readme = output / "README.md"
        if space and not readme.exists():  # which its owner may have written
            heading = json.dumps(title or "Picture classifier", ensure_ascii=False)
            readme.write_text(f"---\ntitle: {heading}\nsdk: static\napp_file: index.html\n---\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    typer.echo(f"{output}: a page of {size:.0f} MB, for any web server with https. To look at it here:")
    typer.echo(f"    python3 -m http.server --bind 127.0.0.1 --directory {shlex.quote(str(output))}")
    typer.echo("and open http://127.0.0.1:8000")


@app.command("app")
def run_app(
    images: Annotated[
        list[Path] | None,
        typer.Argument(help="Images, folders or files of boxes, to be labelled on the page.", show_default=False),
    ] = None,
    checkpoint: Checkpoint = "default",
    model: Annotated[
        Path | None, typer.Option(help="Start with the classes of a file that `fit` wrote, instead of a checkpoint.")
    ] = None,
    output: LabelsOutput = Path("checked.csv"),
    image_folder: ImageFolder = None,
    margin: Margin = 0.0,
    min_confidence: MinConfidence = 0.0,
    category: Category = None,
    group_by: GroupBy = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    token: Token = None,
    browser: Browser = True,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
) -> None:
    """Open a page in the browser: name classes, drop images, classify, correct, download the model.

    Or label IMAGES there, see `review`. The page is a service for programs too.

    For example:

        fewshot-mahalanobis app

        fewshot-mahalanobis app holiday/

        fewshot-mahalanobis app --model flowers.safetensors --port 8000 --no-browser
    """
    with clear_errors():
        if model is not None and checkpoint != "default":
            raise ValueError("--checkpoint and --model exclude each other: a model file has its own network")
        if group_by is not None and not images:
            raise ValueError(f"--group-by {group_by}: name the images or the table that it groups")
        if images:
            check_output(output)
        found = _find_pictures(
            images or [],
            group_by,
            image_folder=image_folder,
            margin=margin,
            min_confidence=min_confidence,
            category=category,
        )

        from fewshot_mahalanobis.apps.server import Server
        from fewshot_mahalanobis.apps.session import Session
        from fewshot_mahalanobis.checkpoints.load import load_checkpoint

        start = load_checkpoint(checkpoint) if model is None else _loaded(model, device, cache, no_cache)
        session = Session(start, found.images, output if images else None, device=device, groups=found.groups)
        for path, problem in session.problems.items():
            typer.echo(f"{path}: {problem}", err=True)
        if session.labels or session.other_rows:
            others = f", and {number_of(session.other_rows, 'row')} about others" if session.other_rows else ""
            typer.echo(f"{output} has labels of {number_of(len(session.labels), 'image')} already{others}", err=True)
        Server(session, host, port, token).serve(browser=browser)


@app.command()
def review(
    model: Model,
    images: ImagesOrBoxes,
    output: LabelsOutput = Path("checked.csv"),
    image_folder: ImageFolder = None,
    margin: Margin = 0.0,
    min_confidence: MinConfidence = 0.0,
    category: Category = None,
    group_by: GroupBy = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    token: Token = None,
    browser: Browser = True,
    skip_errors: Annotated[
        bool,
        typer.Option("--skip-errors", help="As it is anyway: images that cannot be read are left out and listed."),
    ] = False,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
) -> None:
    """Open the page of `app` on images: the model asks about one at a time, and shows all of its answers.

    Boxes in images can be labelled too: the table then has x, y, width and height. The model learns from every label.
    The page offers the labels, which `fit` reads, and the model for download.

    For example:

        fewshot-mahalanobis review flowers.safetensors holiday/

        fewshot-mahalanobis review flowers.safetensors holiday/ -o holiday.csv

        fewshot-mahalanobis review birds.safetensors detections.json --category animal

        fewshot-mahalanobis review animals.safetensors camera/ --group-by seconds=60
    """
    run_app(
        images,
        model=model,
        output=output,
        image_folder=image_folder,
        margin=margin,
        min_confidence=min_confidence,
        category=category,
        group_by=group_by,
        host=host,
        port=port,
        token=token,
        browser=browser,
        cache=cache,
        no_cache=no_cache,
        device=device,
    )


class Language(str, Enum):
    """Languages of the programs beside an exported graph."""

    python = "python"
    javascript = "javascript"
    cpp = "cpp"


@app.command()
def export(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files; made if absent.")],
    language: Annotated[
        list[Language] | None,
        typer.Option(help="Program to write beside the graph; may be given several times. Default: python."),
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(help="Images, or a folder of them, on which model and program are compared; may be repeated."),
    ] = None,
) -> None:
    """Write the model as an ONNX file that reads pixels, with a program that labels pictures by it.

    The program runs without this package: the one in Python needs onnxruntime, numpy and Pillow. With --check, model
    and program label the same pictures; a table shows the largest differences, and the exit status is 1 if a label
    differs that is not near a threshold.

    For example:

        fewshot-mahalanobis export flowers.safetensors -o shipped/ --check holiday/

        fewshot-mahalanobis export flowers.safetensors -o shipped/ --language cpp --language javascript
    """
    with clear_errors():
        check_output(output, folder=True)
        from fewshot_mahalanobis.images.folders import find_images

        pictures = list[Path]()
        for place in check or []:
            found = find_images(place)
            pictures += found.paths
            _note(f"{place}: {found.note()}" if found.note() else "")

        from fewshot_mahalanobis.apps.exporting import compare, export_folder
        from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

        languages = [each.value for each in language or [Language.python]]
        if pictures and "python" not in languages:
            raise ValueError("--check runs the program in Python: add --language python")
        classifier = SimpleCNAPSClassifier.load(model, device="cpu")
        files = export_folder(classifier, output, languages)
        size = sum(file.stat().st_size for file in files) / 1e6
        typer.echo(f"{output}: {', '.join(file.name for file in files)}, {size:.1f} MB")
        compared = compare(classifier, output, pictures) if pictures else []
    if compared:
        _report_comparison(compared)


#: Most pictures that are listed, those that differ most first.
_MOST_COMPARED = 10


def _report_comparison(compared: Sequence[Compared]) -> None:
    """A table of the largest differences, and exit status 1 if a label differs that is not near a threshold."""
    from statistics import median

    from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

    def importance(each: Compared) -> tuple[bool, float]:
        return each.label != each.exported_label, each.probability_difference

    shown = sorted(compared, key=importance, reverse=True)[:_MOST_COMPARED]
    rows = [
        [
            str(each.path),
            str(each.label),
            str(each.exported_label),
            f"{each.probability_difference:.1e}",
            f"{each.score_difference:.1e}",
            "yes" if each.is_near else "",
        ]
        for each in shown
    ]
    names = ["picture", "model", "exported", "probability differs by", "score by", "near a threshold"]
    typer.echo(markdown_table(rows, names))
    differences = [each.probability_difference for each in compared]
    other = [each for each in compared if each.label != each.exported_label]
    wrong = [each for each in other if not each.is_near]
    typer.echo(
        f"{number_of(len(compared), 'picture')}: {len(compared) - len(other)} with the same label, {len(other)} with "
        f"another ({len(other) - len(wrong)} near a threshold). Probabilities differ by {max(differences):.1e} at "
        f"most, by {median(differences):.1e} in the median."
    )
    if near := [str(each.path) for each in compared if each.is_near]:
        listed = ", ".join(near[:_MOST_COMPARED]) + (", ..." if len(near) > _MOST_COMPARED else "")
        typer.echo(f"Near a threshold, where rounding may decide: {listed}")
    if wrong:
        typer.echo(f"error: {number_of(len(wrong), 'picture')} got another label, not near a threshold", err=True)
        raise typer.Exit(1)


@app.command("cache")
def show_cache(
    model: Annotated[Path, typer.Argument(help="A model file; by default one in this folder.")] = Path("model"),
    cache: Cache = None,
    clear: Annotated[bool, typer.Option("--clear", help="Forget everything in it.")] = False,
) -> None:
    """Show how many pictures are remembered beside a model, or clear them.

    They are read from there, as the network sees them, and not from their files again. A file that was changed is read
    anew.

    For example:

        fewshot-mahalanobis cache flowers.safetensors

        fewshot-mahalanobis cache flowers.safetensors --clear
    """
    from fewshot_mahalanobis.images.memory import MOST_BYTES, PictureMemory

    with clear_errors():
        memory = PictureMemory(cache or cache_beside(model))
        if clear:
            memory.clear()
        pictures, features, size = memory.contents()
    typer.echo(
        f"{memory.folder}: {number_of(pictures, 'picture')} and {features:,} times features, {size / 1e6:,.1f} MB "
        f"of at most {MOST_BYTES / 1e6:,.0f} MB"
    )


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
    from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

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
    from fewshot_mahalanobis.research.evaluation.result_tables import markdown_table

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
