import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageFile
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import FixedThresholdClassifier
from typer.testing import CliRunner

import fewshot_mahalanobis
from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, available_checkpoints
from fewshot_mahalanobis.apps import server
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.labelling import predict_files
from fewshot_mahalanobis.checkpoints import DownloadError, save_checkpoint

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.stderr if status else result.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_checkpoint(SimpleCNAPS(image_size=32), folder, dtype=torch.float16)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, colour in (("red", (220, 30, 30)), ("blue", (30, 30, 220)), ("green", (30, 200, 30))):
        (root / name).mkdir()
        for i in range(3):
            pixels = np.clip(np.array(colour) + rng.normal(0, 25, (40, 30, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def test_every_command_has_help():
    listed = run("--help")
    for command in ("demo", "fit", "predict", "export", "cache", "pretrain", "meta-train", "evaluate", "checkpoints"):
        assert command in listed
        assert "Usage" in run(command, "--help")
    for command in (("demo",), ("fit",), ("predict",), *(("checkpoints", c) for c in ("list", "show", "download"))):
        assert f"fewshot-mahalanobis {' '.join(command)}" in run(*command, "--help")  # an example
    assert "Exit status" in listed


@pytest.mark.process
def test_help_and_version_answer_without_loading_pytorch() -> None:
    for option in ("--help", "--version"):
        code = f"import sys; from fewshot_mahalanobis.apps.cli import app; app([{option!r}], standalone_mode=False)"
        code += "; assert not {'torch', 'sklearn', 'scipy'} & {*sys.modules}, 'loaded'"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert run("--version") == f"fewshot-mahalanobis {fewshot_mahalanobis.__version__}\n"


def test_fit_then_predict_labels_a_folder(checkpoint, photos, tmp_path):
    model = tmp_path / "model.safetensors"
    said = run("fit", photos, "-o", model, "--checkpoint", checkpoint, "--device", "cpu")
    assert "3 classes (blue 3, green 3, red 3)" in said
    rows = list(
        csv.DictReader(io.StringIO(run("predict", model, photos / "red", photos / "blue" / "1.png", "--proba")))
    )
    assert [Path(row["path"]).parent.name for row in rows] == ["red", "red", "red", "blue"]
    for row in rows:
        probabilities = {name: float(row[name]) for name in ("blue", "green", "red")}
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert row["label"] == max(probabilities, key=probabilities.get)
    assert [row["label"] for row in rows] == ["red", "red", "red", "blue"]


@pytest.fixture(scope="module")
def model(checkpoint, photos, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("model") / "colours.safetensors"
    run("fit", photos, "-o", file, "--checkpoint", checkpoint, "--device", "cpu")
    return file


def table_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_fitting_a_csv_of_paths_and_labels_is_fitting_the_folder(checkpoint, photos, model, tmp_path):
    """Paths are relative to the CSV, columns in any order, with the byte order mark that spreadsheets write."""
    lines = [f"{path.parent.name},{path.relative_to(photos)},x" for path in sorted(photos.glob("*/*.png"))]
    (photos / "labels.csv").write_text("\n".join(["label,path,note", *lines]), encoding="utf-8-sig")
    try:
        run("fit", photos / "labels.csv", "-o", tmp_path / "m", "--checkpoint", checkpoint, "--device", "cpu")
    finally:
        (photos / "labels.csv").unlink()
    assert run("predict", tmp_path / "m", photos, "--proba") == run("predict", model, photos, "--proba")


def test_what_predict_writes_is_a_table_that_fit_reads_once_it_was_checked(
    checkpoint, photos, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(photos)
    given = ("fit", "labels.csv", "-o", tmp_path / "m", "--checkpoint", checkpoint, "--device", "cpu")
    table = run("predict", model, "red", "blue")
    assert table.splitlines()[0] == "path,label,checked,predicted,probability"
    try:
        Path("labels.csv").write_text(table)
        assert "nobody has checked any" in run(*given, status=1)
        assert not (tmp_path / "m").exists()
        assert "2 classes (blue 3, red 3)" in run(*given, "--rows", "all")
        Path("labels.csv").write_text(table.replace("0.png,red,,", "0.png,red,x,").replace(",blue,,", ",sky,,"))
        assert "2 classes (red 1, sky 3)" in run(*given)
    finally:
        Path("labels.csv").unlink()


def test_doubtful_answers_are_marked_in_csv_and_json(photos, model):
    rows = table_of(run("predict", model, photos, "--min-probability", 0.5, "--top-k", 1))
    assert [*rows[0]][:6] == ["path", "label", "checked", "predicted", "probability", "doubtful"]
    limit = np.mean(sorted(float(row["probability"]) for row in rows)[4:6])
    rows = table_of(run("predict", model, photos, "--min-probability", limit, "--top-k", 1))
    assert {row["doubtful"] for row in rows} == {"yes", ""}
    for row in rows:
        assert row["probability"] == row["probability_1"]
        assert row["checked"] == ""
        assert row["predicted"] == row["label"]
    marked = [row["doubtful"] == "yes" for row in rows]
    assert [float(row["probability"]) < limit for row in rows] == marked
    entries = json.loads(run("predict", model, photos, "--min-probability", limit, "--json"))
    assert [entry["doubtful"] for entry in entries] == marked


def test_further_pictures_calibrate_a_model(checkpoint, photos, model, tmp_path):
    rejecting = tmp_path / "rejecting.safetensors"
    run("fit", photos, "-o", rejecting, "--checkpoint", checkpoint, "--unknown-label", "?", "--device", "cpu")
    said = run("calibrate", rejecting, photos, "-o", tmp_path / "calibrated", "--false-rejection-rate", "0.3")
    expected = SimpleCNAPSClassifier.load(rejecting, device="cpu").set_params(false_rejection_rate=0.3)
    expected.calibrate(sorted(photos.rglob("*.png")))
    calibrated = SimpleCNAPSClassifier.load(tmp_path / "calibrated", device="cpu")
    assert calibrated.threshold_ == pytest.approx(expected.threshold_, rel=1e-6)
    low, high = expected.false_rejection_interval_
    assert f"{100 * low:.2g} to {100 * high:.2g} % of the images of known classes will be rejected" in said
    refused = run("calibrate", model, photos, "-o", tmp_path / "refused", status=1)
    assert "no image is rejected: set unknown_label and fit" in refused
    assert not (tmp_path / "refused").exists()


def test_candidates_are_those_of_predict_set_and_several_are_doubtful(photos, model):
    classifier = SimpleCNAPSClassifier.load(model, device="cpu")
    rows = table_of(run("predict", model, photos, "--coverage", "0.6"))
    expected = classifier.predict_set([row["path"] for row in rows], coverage=0.6)
    assert [row["candidates"] for row in rows] == ["; ".join(found) for found in expected]
    assert [row["doubtful"] for row in rows] == ["yes" if len(found) > 1 else "" for found in expected]
    answers = json.loads(run("predict", model, photos, "--coverage", "0.6", "--json"))
    assert [answer["candidates"] for answer in answers] == [found.tolist() for found in expected]
    assert "exclude each other" in run(
        "predict", model, photos, "--coverage", "0.6", "--min-probability", "0.5", status=1
    )
    assert "coverage must lie between 0 and 1" in run("predict", model, photos, "--coverage", "1", status=1)


def test_proposed_classes_are_those_of_propose_classes(checkpoint, photos, model, tmp_path):
    rejecting, new = tmp_path / "rejecting.safetensors", tmp_path / "new"
    table = tmp_path / "known.csv"
    known = [path for path in sorted(photos.rglob("*.png")) if path.parent.name != "blue"]
    table.write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in known))
    run("fit", table, "-o", rejecting, "--checkpoint", checkpoint, "--unknown-label", "?", "--device", "cpu")
    classifier = SimpleCNAPSClassifier.load(rejecting, device="cpu").set_params(false_rejection_rate=0.4)
    new.mkdir()
    rng = np.random.default_rng(1)
    for i in range(4):
        blue = np.clip(np.array((30, 30, 220)) + rng.normal(0, 25, (40, 30, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(blue).save(new / f"{i}.png")
    everything = [photos, new, "--propose", "--false-rejection-rate", "0.4", "--device", "cpu"]
    rows = table_of(run("predict", rejecting, *everything))
    found = classifier.propose_classes([row["path"] for row in rows])
    assert found.max() == 0
    assert found.min() == -1
    assert [row["new_class"] for row in rows] == ["new-1" if number == 0 else "" for number in found]
    answers = json.loads(run("predict", rejecting, *everything, "--json"))
    assert [answer["new_class"] for answer in answers] == [row["new_class"] or None for row in rows]
    run("predict", rejecting, *everything, "-o", tmp_path / "answers.parquet")
    columns = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "answers.parquet").to_pydict()
    assert columns["new_class"] == [row["new_class"] or None for row in rows]
    grouped = table_of(run("predict", rejecting, *everything, "--group-by", "folder"))
    groups = [str(Path(row["path"]).parent) for row in grouped]
    assert {row["new_class"] for row in grouped} == {
        ""
    }  # four folders are four examples, of which none is like another
    assert classifier.propose_classes([row["path"] for row in grouped], groups=groups).max() == -1
    assert "this classifier rejects none: set unknown_label" in run("predict", model, photos, "--propose", status=1)
    run("sort", rejecting, *everything, "-o", tmp_path / "sorted")
    assert len([*(tmp_path / "sorted" / "_" / "new-1").iterdir()]) == sum(found == 0)


def taken(file: Path, seconds: int) -> None:
    """Write the EXIF time of a picture."""
    with Image.open(file) as image:
        exif, time = Image.Exif(), f"2026:05:01 12:{seconds // 60:02}:{seconds % 60:02}"
        exif[ExifTags.IFD.Exif] = {ExifTags.Base.DateTimeOriginal: time}
        image.copy().save(file, exif=exif)


@pytest.mark.parametrize("how", ["seconds=60", "seconds 60", "folder", "column=thing"])
def test_pictures_of_one_thing_get_one_label(how, photos, model, tmp_path):
    sources, times = sorted(photos.glob("*/*.png")), [0, 40, 95, 200, 230, 10, 30, 130]  # a chain of gaps of at most 60
    files = [tmp_path / "traps" / ("one" if i < 5 else "two") / f"{i}.png" for i in range(8)]
    for file, source, seconds in zip(files, sources, times, strict=False):
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, file)
        taken(file, seconds)
    chains = {"seconds": [0, 0, 0, 3, 3, 5, 5, 7], "folder": [0] * 5 + [1] * 3, "column": [*"abababcc"]}
    groups = chains[how.replace(" ", "=").split("=")[0]]
    where = tmp_path / "traps"
    if how.startswith("column"):
        rows = [f"{file},{group}" for file, group in zip(files, groups, strict=True)]
        (where / "table.csv").write_text("\n".join(["path,thing", *rows]))
        where /= "table.csv"
    rows = table_of(run("predict", model, where, "--group-by", how))
    classifier = SimpleCNAPSClassifier.load(model, device="cpu")
    expected = classifier.predict_all(files, groups=groups)
    assert [row["path"] for row in rows] == [str(file) for file in files]
    assert [row["label"] for row in rows] == expected.labels.tolist()
    np.testing.assert_allclose(
        [float(row["probability"]) for row in rows], expected.probabilities.max(axis=1), atol=1e-5
    )
    names = [row["group"] for row in rows]
    assert [names.index(name) for name in names] == [groups.index(group) for group in groups]
    if how == "seconds=60":
        assert names[0] == str(files[0])
        run("sort", model, where, "-o", tmp_path / "sorted", "--group-by", how, "--min-probability", "0")
        placed = {file.name: file.parent.name for file in (tmp_path / "sorted").rglob("*.png")}
        assert [placed[file.name] for file in files] == expected.labels.tolist()


def test_unlabelled_pictures_of_one_thing_count_once(photos, checkpoint, tmp_path):
    files = [tmp_path / "trap" / f"{i}.png" for i in range(6)]
    (tmp_path / "trap").mkdir()
    for file, source, seconds in zip(
        files, sorted(photos.glob("*/*.png")), [0, 50, 200, 260, 1000, 1090], strict=False
    ):
        pixels = np.asarray(Image.open(source))[:, ::-1]
        Image.fromarray(pixels.clip(10, 210)).save(file)
        taken(file, seconds)
    (tmp_path / "cut.png").write_bytes(b"no picture")
    made, settings = tmp_path / "made.safetensors", ("--checkpoint", checkpoint, "--device", "cpu", "--skip-errors")
    said = run("fit", photos, "-o", made, *settings, "--unlabelled", tmp_path / "trap", "--group-by", "seconds=60")
    assert "and 4 unlabelled images" in said
    fitted = SimpleCNAPSClassifier.load(made, device="cpu")
    x = fitted.transform(files)
    means = [x[:2].mean(axis=0), x[2:4].mean(axis=0), x[4], x[5]]
    np.testing.assert_allclose(fitted.fitted_head_.pool.features, means, rtol=1e-4, atol=1e-5)
    (tmp_path / "table.csv").write_text(
        "\n".join(["path,thing", *(f"{file},{name}" for file, name in zip(files, "abcabc")), "cut.png,b"])
    )
    table = ("--unlabelled", tmp_path / "table.csv", "--group-by", "column=thing")
    run("fit", photos, "-o", made, *settings, *table, status=3)  # one is skipped
    assert len(SimpleCNAPSClassifier.load(made, device="cpu").fitted_head_.pool.features) == 3
    assert "--group-by folder is for the images of --unlabelled" in run(
        "fit", photos, "-o", made, *settings, "--group-by", "folder", status=1
    )


def test_groups_that_cannot_be_found_are_refused(photos, model, tmp_path):
    one = next(photos.glob("*/*.png"))
    (tmp_path / "table.csv").write_text(f"path,thing\n{one},\n")
    (tmp_path / "boxes.csv").write_text(f"path,x,y,width,height\n{one},0,0,5,5\n")
    for arguments, message in {
        (photos, "--group-by", "seconds=60"): "0.png has no EXIF time, by which bursts are found",
        (photos, "--group-by", "minutes=1"): "--group-by minutes=1: it is folder, seconds=60 or column=NAME",
        (photos, "--group-by", "seconds=-1"): "it is folder, seconds=60 or column=NAME",
        (photos, "--group-by", "column=thing"): "has no columns, and pictures are to be grouped by the column thing",
        (tmp_path / "table.csv", "--group-by", "column=track"): "has no column 'track'",
        (tmp_path / "table.csv", "--group-by", "column=thing"): "names no thing: give each picture the group",
        (tmp_path / "boxes.csv", "--group-by", "folder"): "is a box, and boxes of one picture are of several things",
    }.items():
        assert message in run("predict", model, *arguments, status=1)
    assert "sort takes images and folders" in run(
        "sort", model, photos, "-o", tmp_path / "x", "--group-by", "column=a", status=1
    )


@pytest.fixture
def new(photos, tmp_path, monkeypatch) -> Path:
    """Six more pictures, and a table of two of them as ``predict`` would have written it, corrected."""
    monkeypatch.chdir(tmp_path)
    for index, picture in enumerate([*sorted(photos.glob("red/*")), *sorted(photos.glob("blue/*"))]):
        pixels = np.asarray(Image.open(picture))[:, ::-1]
        (tmp_path / "new").mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(20, 200)).save(tmp_path / "new" / f"{index}.png")
    table = tmp_path / "corrected.csv"
    table.write_text(
        "path,label,checked,predicted,probability\nnew/0.png,red,x,red,0.9\nnew/3.png,blue,,green,0.5\n"
        "new/1.png,green,,green,0.6\nnew/2.png,unknown,x,unknown,\n"
    )
    return table


def said_by(*arguments: object) -> tuple[str, list[str]]:
    """Standard output and the lines of standard error."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr.splitlines()


def test_fit_learns_from_a_folder_and_a_corrected_table_together(checkpoint, photos, new, tmp_path):
    settings = ("--checkpoint", checkpoint, "--device", "cpu", "--groups", "none")
    out, said = said_by("fit", photos, new, "-o", "m", *settings)
    assert out == "m: 3 classes (blue 4, green 3, red 4)\n"
    assert said == [
        f"{new}: 3 of 4 rows taken (1 changed, 2 checked). "
        "Left out: 1 answer that nobody has checked (--rows all takes them).",
        "Left out: 1 image labelled 'unknown', which is no class. To learn from them, set --unknown-label when the "
        "model is made.",
    ]
    images = [*sorted(photos.glob("*/*.png")), tmp_path / "new" / "0.png", tmp_path / "new" / "3.png"]
    expected = SimpleCNAPSClassifier(checkpoint, device="cpu")
    expected.fit(images, [*(path.parent.name for path in images[:9]), "red", "blue"], groups=range(11))
    fitted = SimpleCNAPSClassifier.load("m", device="cpu")
    np.testing.assert_array_equal(fitted.fitted_head_.support.adapted, expected.fitted_head_.support.adapted)


def test_fit_from_a_model_is_partial_fit(photos, model, new, tmp_path):
    out, _ = said_by("fit", "--from", model, new, "-o", "m", "--groups", "none")
    assert out == "m: 3 classes (blue 4, green 3, red 4)\n"
    expected = SimpleCNAPSClassifier.load(model, device="cpu")
    expected.partial_fit([tmp_path / "new" / "0.png", tmp_path / "new" / "3.png"], ["red", "blue"], groups=["0", "3"])
    paths = sorted(photos.glob("*/*.png"))
    found = SimpleCNAPSClassifier.load("m", device="cpu").decision_function(paths)
    np.testing.assert_allclose(found, expected.decision_function(paths), rtol=1e-5)
    (tmp_path / "one" / "owl").mkdir(parents=True)
    shutil.copy(tmp_path / "new" / "5.png", tmp_path / "one" / "owl")
    said = run("fit", "--from", "m", "one", "-o", "m", "--report")  # one class, into the same file
    assert "4 classes (blue 4, green 3, owl 1, red 4)" in said
    assert "12 support images of 4 classes" in said


def test_a_class_that_is_added_has_its_share(photos, model, new, tmp_path):
    (tmp_path / "one" / "owl").mkdir(parents=True)
    shutil.copy(tmp_path / "new" / "5.png", tmp_path / "one" / "owl")
    fit = ("fit", "--from", model, tmp_path / "one", "-o", "m", "--priors")
    assert "the class 'owl' has no share" in run(*fit, "red=0.5,green=0.3,blue=0.2", status=1)
    run(*fit, "red=0.4,green=0.3,blue=0.2,owl=0.1")
    found = SimpleCNAPSClassifier.load("m")
    assert dict(zip(found.classes_, found.priors_, strict=True)) == {"red": 0.4, "green": 0.3, "blue": 0.2, "owl": 0.1}


def test_a_model_to_start_from_has_its_settings_already(model, new):
    said = run("fit", "--from", model, new, "-o", "m", "--head", "cosine", "--unknown-label", "no", status=1)
    assert "error: --head, --unknown-label: --from has these settings" in said
    assert not Path("m").exists()


def test_the_folder_of_the_unknown_label_has_examples_of_no_class(checkpoint, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "green").rename(tmp_path / "photos" / "Neither")
    settings = ("--checkpoint", checkpoint, "--device", "cpu", "--false-rejection-rate", 0.3)
    out, said = said_by("fit", tmp_path / "photos", "-o", tmp_path / "m", *settings, "--unknown-label", "neither")
    assert "2 classes (blue 3, red 3), and 3 images of no class" in out
    assert not any("Left out" in line for line in said)
    negatives = SimpleCNAPSClassifier.load(tmp_path / "m", device="cpu").fitted_head_.negatives
    assert len(negatives.adapted) == 3


@pytest.mark.parametrize(
    ("rows", "settings", "classes", "said"),
    [
        # As `predict` of a model with --unknown-label writes it: no probability.
        (
            "{},neither,x,neither,",
            (),
            "(blue 3, green 3, red 3)",
            "Left out: 1 image labelled 'neither', which is no class. To",
        ),
        (
            "{},Neither,,cat,0.6\n{},cat,,neither,",
            (),
            "(blue 3, cat 1, green 3, red 3)",
            "Left out: 1 image labelled 'neither'",
        ),
        (
            "{},neither,x,neither,",
            ("--unknown-label", "other"),
            "(blue 3, green 3, red 3)\n",
            "--unknown-label is 'other'.",
        ),
        ("{},neither,x,neither,", ("--unknown-label", "Neither"), "red 3), and 1 image of no class", ""),
        # By hand, or by a person in a review.
        (
            "{},None of these,x,cat,0.4",
            (),
            "None of these 1, blue 3",
            "1 image labelled 'None of these' is learned as a class",
        ),
        (
            "{},unknown,x,cat,0.4",
            ("--unknown-label", "other"),
            "unknown 1",
            "'unknown' is learned as a class like any other",
        ),
        ("{},neither,x,neither,0.4", (), "neither 1", ""),  # a class of that model
    ],
)
def test_labels_of_no_class_in_a_table_are_said_whatever_they_are_called(
    rows, settings, classes, said, checkpoint, photos, new, tmp_path
):
    lines = rows.format("new/0.png", "new/1.png")
    new.write_text(f"path,label,checked,predicted,probability\n{lines}\n")
    given = ("--checkpoint", checkpoint, "--device", "cpu", "--groups", "none", *settings)
    out, notes = said_by("fit", photos, new, "-o", "m", *given)
    assert classes in out
    about = [note for note in notes if "Left out: 1 image" in note or "learned as a class" in note]
    assert len(about) == bool(said)
    assert said in "".join(about)


def test_sorting_again_says_what_changed_its_class(checkpoint, photos, model, tmp_path):
    output, first = tmp_path / "sorted", sorted(photos.glob("*/*.png"))
    run("sort", model, photos, "-o", output, "--min-probability", 1)
    said = run("sort", model, photos, "-o", output, "--min-probability", 0)
    assert said.splitlines()[:2] == [f"{output}: 0 images sorted", "No longer unsure: 9 images"]
    assert "  0.png -> blue/0.png" in said.splitlines()
    table = tmp_path / "other.csv"
    other = {"red": "blue", "blue": "red", "green": "green"}
    table.write_text("path,label\n" + "".join(f"{path},{other[path.parent.name]}\n" for path in first))
    run("fit", table, "-o", tmp_path / "m", "--checkpoint", checkpoint, "--device", "cpu")
    said = run("sort", tmp_path / "m", photos, "-o", output, "--min-probability", 0).splitlines()
    assert said[1] == "Now called otherwise, and left where they are: 6 images"
    assert re.fullmatch(r"  blue/0\.png: red \(\d+%\)", said[2])


@pytest.mark.parametrize(("separator", "name"), [(";", "a.csv"), ("\t", "a.csv"), ("\t", "a.TSV"), (" , ", "a.txt")])
def test_a_table_may_have_other_separators_and_spaces_and_be_given_from_elsewhere(
    separator, name, checkpoint, photos, model, tmp_path, monkeypatch
):
    lines = [f"{path.parent.name}{separator}{path.relative_to(photos)}" for path in sorted(photos.glob("*/*.png"))]
    lines[0] = f" {lines[0]} "
    (photos / name).write_text("\r\n".join([f"label{separator}path", *lines]))
    monkeypatch.chdir(tmp_path)
    try:
        run("fit", photos / name, "-o", "m", "--checkpoint", checkpoint, "--device", "cpu")
    finally:
        (photos / name).unlink()
    assert run("predict", "m", photos, "--proba") == run("predict", model, photos, "--proba")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("file,label\na.png,cat", "no column 'path'"),
        ("path,label\na.png,cat\nb.png,", "line 3 of .* lacks a path or a label"),
        ("path,label", "lists no image"),
        (b"path,label\nf\xfcr.png,cat", "not in UTF-8"),
    ],
)
def test_a_csv_that_is_not_paths_and_labels_is_refused(lines, message, tmp_path):
    (tmp_path / "labels.csv").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    said = run("fit", tmp_path / "labels.csv", "-o", tmp_path / "m", status=1)
    assert re.search(message, said)
    assert not (tmp_path / "m").exists()


def test_the_best_labels_come_in_order_in_csv_and_json(photos, model):
    (row,) = table_of(run("predict", model, photos / "red" / "0.png", "--top-k", 2, "--proba"))
    everything = {name: float(row[name]) for name in ("blue", "green", "red")}
    ranked = sorted(everything, key=everything.get, reverse=True)
    assert [row["label"], row["label_1"], row["label_2"]] == [ranked[0], ranked[0], ranked[1]]
    assert float(row["probability_2"]) == everything[ranked[1]]
    assert "label_3" not in row

    (entry,) = json.loads(run("predict", model, photos / "red" / "0.png", "--json", "--top-k", 2, "--proba"))
    assert entry["path"] == row["path"]
    assert entry["label"] == row["label"]
    assert [best["label"] for best in entry["top"]] == ranked[:2]
    assert sum(entry["probabilities"].values()) == pytest.approx(1)
    assert entry["probabilities"]["blue"] == pytest.approx(everything["blue"], abs=1e-6)
    (entry,) = json.loads(run("predict", model, photos / "red" / "0.png", "--json"))
    assert set(entry) == {"path", "label"}


def test_a_class_is_labelled_from_the_threshold_of_its_probability_on(photos, model):
    rows = table_of(run("predict", model, photos, "--proba"))
    by_probability = sorted(rows, key=lambda row: float(row["green"]))
    threshold = float(by_probability[5]["green"]) - 1e-6  # four images of nine reach it
    for row in table_of(run("predict", model, photos, "--proba", "--threshold", f"green={threshold}")):
        others = max(("blue", "red"), key=lambda name: float(row[name]))
        assert row["label"] == ("green" if float(row["green"]) >= threshold else others)
    assert {row["label"] for row in table_of(run("predict", model, photos, "--threshold", "blue=0"))} == {"blue"}
    for wrong, message in (
        ("green", "it is CLASS=P"),
        ("green=most", "it is CLASS=P"),
        ("green=1.5", "a probability P from 0 to 1"),
        ("gold=0.5", "'gold' is none of the classes blue, green, red"),
    ):
        assert message in run("predict", model, photos, "--threshold", wrong, status=1)


def test_with_two_classes_a_threshold_is_that_of_scikit_learn(checkpoint, photos, tmp_path):
    paths = sorted([*photos.glob("red/*.png"), *photos.glob("blue/*.png")])
    classifier = SimpleCNAPSClassifier(checkpoint, device="cpu").fit(paths, [path.parent.name for path in paths])
    probabilities = sorted(classifier.predict_proba(paths)[:, 1])
    for threshold in (0.0, probabilities[2], 0.5, probabilities[4], 1.0):
        fixed = FixedThresholdClassifier(FrozenEstimator(classifier), threshold=threshold, pos_label="red")
        expected = fixed.fit(paths, classifier.predict(paths)).predict(paths).tolist()
        predictions, _ = predict_files(classifier, paths, threshold=("red", threshold))
        assert [prediction.label for prediction in predictions] == expected


def test_good_pictures_alone_are_told_from_everything_else(checkpoint, photos, tmp_path):
    (tmp_path / "parts").mkdir()
    shutil.copytree(photos / "green", tmp_path / "parts" / "good")
    fit = ("fit", tmp_path / "parts", "-o", tmp_path / "m", "--checkpoint", checkpoint, "--device", "cpu")
    assert "To tell this class from everything else, set unknown_label (on the command line --unknown-label)" in run(
        *fit, status=1
    )
    said = run(*fit, "--unknown-label", "defect", "--false-rejection-rate", "0.3", "--report")
    assert "1 class (good 3)" in said
    assert "not measured, as there is one class" in said
    assert [row["label"] for row in table_of(run("predict", tmp_path / "m", photos / "red"))] == ["defect"] * 3
    said = run("predict", tmp_path / "m", photos / "red", "--threshold", "good=0", status=1)
    assert "with one class, good, every probability is 1" in said


def test_more_labels_than_there_are_classes_are_refused(photos, model):
    assert "--top-k 4 is more than the 3 classes" in run("predict", model, photos, "--top-k", 4, status=1)


def test_answers_do_not_depend_on_the_batches(photos, model):
    classifier, paths = SimpleCNAPSClassifier.load(model, device="cpu"), sorted(photos.glob("*/*.png"))
    whole, _ = predict_files(classifier, paths, probabilities=True)
    parts, _ = predict_files(classifier.set_params(batch_size=2), paths, probabilities=True)
    for answer, again in zip(whole, parts, strict=True):
        assert (answer.path, answer.label) == (again.path, again.label)
        assert answer.probabilities == pytest.approx(again.probabilities, abs=1e-5)


@pytest.fixture
def spoilt(photos, tmp_path) -> Path:
    """The photos with an empty file, and a text, among the red ones."""
    shutil.copytree(photos, tmp_path / "spoilt")
    (tmp_path / "spoilt" / "red" / "empty.png").touch()
    (tmp_path / "spoilt" / "red" / "text.jpg").write_text("hello")
    return tmp_path / "spoilt"


@pytest.mark.parametrize("side", [48, 64])
def test_another_image_size_reads_the_files_as_python_does(side, checkpoint, photos, tmp_path):
    paths = sorted(photos.glob("*/*.png"))
    options = ("--checkpoint", checkpoint, "--device", "cpu", "--image-size", side)
    run("fit", photos, "-o", tmp_path / "m", *options)
    fitted = SimpleCNAPSClassifier.load(tmp_path / "m", device="cpu")
    expected = SimpleCNAPSClassifier(checkpoint, device="cpu", image_size=side)
    expected.fit(paths, [path.parent.name for path in paths])
    np.testing.assert_array_equal(fitted.fitted_head_.support.adapted, expected.fitted_head_.support.adapted)


def test_unreadable_images_stop_a_command_which_lists_them_all_and_writes_nothing(spoilt, checkpoint, model, tmp_path):
    for arguments in (
        ("fit", spoilt, "-o", tmp_path / "m", "--checkpoint", checkpoint, "--device", "cpu"),
        ("predict", model, spoilt),
    ):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 1
        assert result.stdout == ""
        for name in ("empty.png", "text.jpg"):
            assert f"{spoilt / 'red' / name}: " in result.stderr
        assert "error: 2 of 11 images cannot be read" in result.stderr
        assert "--skip-errors" in result.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("command", ["fit", "predict", "sort"])
def test_every_command_decodes_a_file_once(command, checkpoint, model, photos, tmp_path, monkeypatch):
    decoded = list[str]()
    load = ImageFile.ImageFile.load

    def counted(image):
        decoded.extend([image.fp.name] if image.tile else [])
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    if command == "fit":
        run("fit", photos, "-o", tmp_path / "m", "--checkpoint", checkpoint, "--unknown-label", "other", "--report")
    else:
        options = ["-o", tmp_path / "sorted"] if command == "sort" else ["--proba"]
        run(command, model, photos, *options, "--no-cache")
    assert sorted(decoded) == sorted(str(path) for path in photos.glob("*/*.png"))


def test_what_one_command_has_read_the_others_take_from_the_cache(checkpoint, photos, tmp_path, monkeypatch):
    model, cache = tmp_path / "m.safetensors", tmp_path / ".fewshot-mahalanobis"
    given = ("fit", photos, "-o", model, "--checkpoint", checkpoint)
    run(*given, "--no-cache")
    expected = run("predict", model, photos, "--proba", "--no-cache")
    assert not cache.exists()
    run(*given)
    assert f"{cache}: 9 pictures and" in run("cache", model)
    fewer = tmp_path / "fewer.csv"  # to which the network adapts anew
    paths = sorted(photos.glob("*/*.png"))[1:]
    fewer.write_text("\n".join(["path,label", *(f"{path},{path.parent.name}" for path in paths)]))
    adapting_anew = ("fit", fewer, "-o", tmp_path / "other.safetensors", "--checkpoint", checkpoint)
    run(*adapting_anew, "--no-cache")
    expected_of_fewer = run("predict", tmp_path / "other.safetensors", photos, "--proba", "--no-cache")
    assert expected_of_fewer != expected
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", None)  # no file can be decoded
        assert run("predict", model, photos, "--proba") == expected
        run("sort", model, photos, "-o", tmp_path / "sorted")
        run("fit", "--from", model, photos, "-o", tmp_path / "more")
        run(*given)
        run(*adapting_anew)
        assert run("predict", tmp_path / "other.safetensors", photos, "--proba") == expected_of_fewer
        run("fit", photos, "-o", model, "--checkpoint", checkpoint, "--unknown-label", "other")
        run("calibrate", model, photos, "-o", model)
    assert f"{cache}: 0 pictures and 0 times features" in run("cache", model, "--clear")
    other = tmp_path / "elsewhere"
    run("predict", model, photos, "--cache", other)
    assert f"{other}: 9 pictures" in run("cache", "--cache", other)
    monkeypatch.setenv("FEWSHOT_MAHALANOBIS_PICTURES", str(other))
    assert f"{other}: 9 pictures" in run("cache", model)


def test_unreadable_images_are_skipped_on_request_and_listed_with_status_3(spoilt, checkpoint, model, photos, tmp_path):
    clean = run("predict", model, photos)
    result = CliRunner().invoke(app, ["predict", str(model), str(spoilt), "--skip-errors"])
    assert result.exit_code == 3
    rows, expected = table_of(result.stdout.replace(str(spoilt), str(photos))), table_of(clean)
    unread = [row for row in rows if row["error"]]
    assert [{name: row[name] for name in expected[0]} for row in rows if not row["error"]] == expected
    assert [Path(row["path"]).name for row in unread] == ["empty.png", "text.jpg"]
    assert not any(row[name] for row in unread for name in ("label", "checked", "predicted", "probability"))
    listed = result.stderr.splitlines()
    assert [line.split(": ")[0] for line in listed[:2]] == [str(spoilt / "red" / n) for n in ("empty.png", "text.jpg")]
    assert listed[2] == "skipped 2 of 11 images, which cannot be read"

    settings = ["--checkpoint", str(checkpoint), "--device", "cpu", "--skip-errors"]
    result = CliRunner().invoke(app, ["fit", str(spoilt), "-o", str(tmp_path / "m"), *settings])
    assert result.exit_code == 3
    assert "3 classes (blue 3, green 3, red 3)" in result.stdout
    assert run("predict", tmp_path / "m", photos, "--proba") == run("predict", model, photos, "--proba")


def test_a_class_or_a_command_left_without_images_is_an_error(spoilt, model, tmp_path):
    for image in (spoilt / "red").glob("?.png"):
        image.unlink()
    said = run("fit", spoilt, "-o", tmp_path / "m", "--skip-errors", status=1)
    assert "no image of class 'red' can be read" in said
    assert "2 of 2 images cannot be read" in run("predict", model, spoilt / "red", "--skip-errors", status=1)


def test_what_the_user_gave_wrongly_is_one_line_and_status_1(checkpoint, photos, tmp_path):
    said = run("fit", tmp_path / "nowhere", "-o", tmp_path / "m", status=1)
    assert said.startswith("error: no folder")
    (tmp_path / "broken.safetensors").write_text("hello")
    said = run("predict", tmp_path / "broken.safetensors", photos, status=1)
    assert said.startswith("error: ")
    assert "broken.safetensors" in said
    said = run("evaluate", photos, "--checkpoint", tmp_path / "none", status=1)
    assert "none" in said


def test_an_output_that_cannot_be_written_is_said_before_any_work(photos, model, tmp_path, monkeypatch):
    monkeypatch.setattr("fewshot_mahalanobis.images.decode.decode_batches", None)
    for command in (("fit", photos), ("sort", model, photos), ("demo",)):
        said = run(*command, "-o", tmp_path / "none" / "m", status=1)
        assert (
            said
            == f"error: cannot write {tmp_path / 'none' / 'm'}: there is no folder {tmp_path / 'none'}. Make it first\n"
        )
    assert "it is a folder" in run("fit", photos, "-o", tmp_path, status=1)


def test_a_backbone_of_timm_takes_the_place_of_a_checkpoint(photos, tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **options: real(name, **options))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, *repository, **options: None)
    assert "3 classes" in run("fit", photos, "-o", tmp_path / "m", "--backbone", "test_resnet", "--device", "cpu")
    assert len(table_of(run("predict", tmp_path / "m", photos))) == 9
    both = run("fit", photos, "-o", tmp_path / "m", "--backbone", "test_resnet", "--checkpoint", "x", status=1)
    assert "exclude each other" in both


def test_without_a_connection_a_backbone_is_refused_after_one_question(photos, tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    monkeypatch.setattr(timm, "create_model", None)  # whose retries take a minute
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def unreachable(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    said = run("fit", photos, "-o", tmp_path / "m", "--backbone", "resnet18.a1_in1k", status=1)
    assert "no connection to https://" in said
    assert "Name or service not known" in said


def test_images_are_sorted_into_folders(photos, model, tmp_path):
    said = run("sort", model, photos, "-o", tmp_path / "sorted", "--min-probability", 0)
    assert said == f"{tmp_path / 'sorted'}: 9 images sorted (blue 3, green 3, red 3)\n"
    assert {p.parent.name for p in (tmp_path / "sorted").glob("*/*.png")} == {"blue", "green", "red"}
    assert len(list(photos.glob("*/*.png"))) == 9
    assert run("sort", model, photos, "-o", tmp_path / "sorted") == f"{tmp_path / 'sorted'}: 0 images sorted\n"

    shutil.copytree(photos, tmp_path / "photos")
    run("sort", model, tmp_path / "photos", "-o", tmp_path / "links", "--link")
    assert all(file.is_symlink() for file in (tmp_path / "links").glob("*/*.png"))
    run("sort", model, tmp_path / "photos", "-o", tmp_path / "moved", "--move")
    assert not list((tmp_path / "photos").glob("*/*.png"))
    assert len(list((tmp_path / "moved").glob("*/*.png"))) == 9
    assert "exclude each other" in run("sort", model, photos, "-o", tmp_path / "no", "--move", "--link", status=1)


def test_a_review_takes_skip_errors_as_other_commands_do(photos, model, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(server.Server, "serve", lambda server, browser: served.append(server))
    (tmp_path / "broken.png").write_text("hello")
    for more in ([], ["--skip-errors"]):
        result = CliRunner().invoke(
            app, ["review", str(model), str(photos), str(tmp_path / "broken.png"), "-o", str(tmp_path / "c.csv"), *more]
        )
        assert result.exit_code == 0, result.output
        assert "broken.png: not an image file" in result.stderr
    assert len(served) == 2


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="names that are no text")
@pytest.mark.slow
def test_names_that_standard_output_cannot_encode_are_written(photos, tmp_path):
    for folder, name in (("red", b"caf\xe9"), ("blue", "\u9ce5".encode())):
        shutil.copytree(photos / folder, tmp_path / "photos" / os.fsdecode(name))

    def written(*arguments: object) -> bytes:
        command = [sys.executable, "-m", "fewshot_mahalanobis", *map(str, arguments)]
        environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("fit", tmp_path / "photos", "-o", tmp_path / "m", "--image-size", 32, "--device", "cpu")  # not the narrow one
    said = written("predict", tmp_path / "m", tmp_path / "photos")
    for line in (b"/caf\xe9/0.png,caf\xe9", b"/\xe9\xb3\xa5/0.png,\xe9\xb3\xa5"):
        assert line in said


def test_pictures_of_twelve_bits_are_read_over_the_range_that_was_given_to_fit(checkpoint, tmp_path):
    rng = np.random.default_rng(0)
    for name, level in (("dark", 0.3), ("bright", 0.7)):
        for index in range(3):
            values = np.clip(level + rng.normal(0, 0.1, (24, 24)), 0, 1)
            for folder, picture in (("12", np.rint(4095 * values).astype(np.uint16)), ("8", np.uint8(255 * values))):
                file = tmp_path / folder / name / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(file)
    settings = ("--checkpoint", checkpoint, "--device", "cpu")
    run("fit", tmp_path / "12", "-o", tmp_path / "m", *settings, "--value-range", 0, 4095)
    classifier = SimpleCNAPSClassifier.load(tmp_path / "m")
    assert classifier.value_range == (0, 4095)
    file = Path("dark", "0.png")
    found, expected = (classifier.transform([tmp_path / folder / file]) for folder in ("12", "8"))
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    said = run("predict", tmp_path / "m", tmp_path / "12")
    assert [line.split(",")[1] for line in said.splitlines()[1:]] == 3 * ["bright"] + 3 * ["dark"]
    assert "low < high" in run("fit", tmp_path / "12", "-o", tmp_path / "n", *settings, "--value-range", 9, 0, status=1)


def test_a_report_names_the_image_with_the_wrong_label(photos, checkpoint, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "red" / "0.png").rename(tmp_path / "photos" / "blue" / "moved.png")
    settings = ("--checkpoint", checkpoint, "--device", "cpu", "--head", "euclidean")
    said = run("fit", tmp_path / "photos", "-o", tmp_path / "m", *settings, "--report")
    assert "9 support images of 3 classes" in said
    assert "Leave-one-out accuracy: 8 of 9" in said
    assert str(tmp_path / "photos" / "blue" / "moved.png") in said
    assert "Leave-one-out" not in run("fit", photos, "-o", tmp_path / "m", *settings)


def test_what_was_found_beside_the_images_is_said(photos, checkpoint, model, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "red" / "film.mp4").write_bytes(b"film")
    (tmp_path / "photos" / "empty").mkdir()
    settings = ["--checkpoint", str(checkpoint), "--device", "cpu"]
    result = CliRunner().invoke(app, ["fit", str(tmp_path / "photos"), "-o", str(tmp_path / "m"), *settings])
    assert result.exit_code == 0
    assert "1 MP4 file" in result.stderr
    assert "No image in class folder 'empty'" in result.stderr
    result = CliRunner().invoke(app, ["predict", str(model), str(tmp_path / "photos")])
    assert "1 MP4 file" in result.stderr


def test_checkpoints_lists_the_table():
    listed = run("checkpoints", "list")
    assert "default" in listed
    assert "simple-cnaps-meta-dataset" in listed
    assert "MIT" in listed
    assert run("checkpoints") == listed


def test_a_checkpoint_is_shown_with_its_accuracies():
    record = available_checkpoints()["simple-cnaps-meta-dataset"]
    shown = run("checkpoints", "show", record.name)
    for fact in (record.url, record.licence, record.trained_on, "79 MB", "VGG Flower", "90.7 ± 0.5"):
        assert fact in shown
    assert "in the package" in run("checkpoints", "show", "default")
    assert "no checkpoint is named 'defualt'" in run("checkpoints", "show", "defualt", status=1)


def test_downloading_says_when_a_checkpoint_is_there_and_why_when_not(checkpoint, monkeypatch):
    assert "default is here" in run("checkpoints", "download", "default")

    def offline(name: str) -> None:
        raise DownloadError(f"could not download {name}")

    monkeypatch.setattr("fewshot_mahalanobis.checkpoints.load.load_checkpoint", offline)
    said = run("checkpoints", "download", "simple-cnaps-meta-dataset", status=1)
    assert said == "error: could not download simple-cnaps-meta-dataset\n"


def test_evaluate_prints_a_table_with_intervals(checkpoint, photos, tmp_path):
    settings = ("--checkpoint", checkpoint, "--way", 3, "--shot", 1, "--queries", 1, "--episodes", 3, "--device", "cpu")
    table = run("evaluate", photos, *settings, "-o", tmp_path / "r.json")
    assert f"| {photos.name}, 3-way 1-shot" in table
    assert "±" in table
    assert (tmp_path / "r.json").exists()
    assert run("evaluate", photos, *settings, "-o", tmp_path / "r.json").splitlines()[-3:] == table.splitlines()[-3:]


def test_groups_come_from_a_column_of_the_table_or_there_are_none(checkpoint, photos, tmp_path):
    files = sorted(photos.rglob("*.png"))
    again = tmp_path / "again.png"
    again.write_bytes(files[0].read_bytes())
    rows = [f"{path},{path.parent.name},{i // 2}" for i, path in enumerate(files)]
    table, output = tmp_path / "table.csv", tmp_path / "model.safetensors"
    table.write_text("\n".join(["path,label,film", *rows, f"{again},{files[0].parent.name},again"]))
    arguments = ("fit", table, "-o", output, "--checkpoint", checkpoint)
    run(*arguments, "--groups", "film")
    assert SimpleCNAPSClassifier.load(output).fitted_head_.group_names[:3] == ["0", "0", "1"]
    run(*arguments, "--groups", "none")
    assert SimpleCNAPSClassifier.load(output).fitted_head_.groups is None
    assert "has no column 'take'" in run(*arguments, "--groups", "take", status=1)
    assert "a folder or a JSON file has no columns" in run("fit", photos, "-o", output, "--groups", "film", status=1)


def test_a_picture_in_two_classes_is_named_by_its_files(checkpoint, photos, tmp_path):
    support = tmp_path / "support"
    shutil.copytree(photos, support)
    first, second = sorted(folder for folder in support.iterdir() if folder.is_dir())[:2]
    picture = sorted(first.glob("*.png"))[0]
    shutil.copy(picture, second / "again.png")
    arguments = ("fit", support, "-o", tmp_path / "model.safetensors", "--checkpoint", checkpoint)
    said = CliRunner().invoke(app, [str(argument) for argument in arguments]).stderr
    assert "in different classes" in said
    assert str(picture) in said
    assert str(second / "again.png") in said


def test_shares_of_the_classes_are_priors_of_the_saved_classifier(checkpoint, photos, tmp_path):
    model = tmp_path / "model.safetensors"
    fit = ("fit", photos, "-o", model, "--checkpoint", checkpoint, "--device", "cpu")
    run(*fit, "--priors", "red=0.7, blue=0.1,green=0.2")
    assert SimpleCNAPSClassifier.load(model).priors_.tolist() == [0.1, 0.2, 0.7]
    run(*fit, "--priors", "red=1,blue=0,green=0")
    labels = {row["label"] for row in csv.DictReader(io.StringIO(run("predict", model, photos)))}
    assert labels == {"red"}
    for wrong, message in (
        ("red=0.5,blue=half,green=0", "'blue=half' is not LABEL=SHARE"),
        ("red", "'red' is not LABEL=SHARE"),
        ("0.5,0.3,0.2", "'0.5' is not LABEL=SHARE"),
        ("red=0.5,blue=0.5", "the class 'green' has no share"),
        ("red=0.5,blue=0.5", "On the command line: fit --priors"),
        ("red=0.5,blue=0.3,green=0.1,gold=0.1", "'gold' is none of the classes"),
        ("red=1.5,blue=-0.5,green=0", "the share of 'blue' is -0.5"),
    ):
        assert message in run(*fit, "--priors", wrong, status=1)


def test_a_label_with_a_comma_has_its_share_in_quotes(checkpoint, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "green").rename(tmp_path / "photos" / "green, a=b")
    model, priors = tmp_path / "model.safetensors", 'red=0.5,"green, a=b=0.2",blue=0.3'
    run("fit", tmp_path / "photos", "-o", model, "--checkpoint", checkpoint, "--priors", priors)
    classifier = SimpleCNAPSClassifier.load(model)
    assert dict(zip(classifier.classes_, classifier.priors_, strict=True)) == {
        "blue": 0.3,
        "green, a=b": 0.2,
        "red": 0.5,
    }


def test_pages_and_bands_that_were_given_to_fit_are_those_of_predict(checkpoint, tmp_path):
    rng = np.random.default_rng(0)
    for name, level in (("dark", 60), ("bright", 180)):
        (tmp_path / "stacks" / name).mkdir(parents=True)
        for index in range(3):
            black, told = np.zeros((24, 24, 3), np.uint8), rng.integers(level - 30, level + 30, (24, 24, 3), np.uint8)
            first, second = map(Image.fromarray, (black, told))
            first.save(tmp_path / "stacks" / name / f"{index}.tif", save_all=True, append_images=[second])
    settings = ("--checkpoint", checkpoint, "--device", "cpu")
    said = run("fit", tmp_path / "stacks", "-o", tmp_path / "m", *settings, status=1)
    assert "0.tif: it is a stack of several pages" in said
    assert "fit --pages" in said
    run("fit", tmp_path / "stacks", "-o", tmp_path / "m", *settings, "--pages", "1", "--bands", "2,1,0")
    classifier = SimpleCNAPSClassifier.load(tmp_path / "m")
    assert (classifier.pages, classifier.bands) == (1, (2, 1, 0))
    said = run("predict", tmp_path / "m", tmp_path / "stacks")
    assert [line.split(",")[1] for line in said.splitlines()[1:]] == 3 * ["bright"] + 3 * ["dark"]
    assert "pages must be" in run(
        "fit", tmp_path / "stacks", "-o", tmp_path / "n", *settings, "--pages", "each", status=1
    )


@pytest.mark.process
@pytest.mark.parametrize(
    "backend", ["module://matplotlib_inline.backend_inline", "module://no_such_module", "Qt5Agg", "no such backend", ""]
)
def test_the_command_draws_whatever_backend_its_environment_names(backend: str, tmp_path: Path) -> None:
    draw = (
        "import sys; sys.modules['matplotlib_inline'] = None\n"
        "from fewshot_mahalanobis import __main__ as command\n"
        "def draw():\n"
        "    from matplotlib import pyplot\n"
        "    pyplot.figure(figsize=(2, 1), dpi=50)\n"
        "    pyplot.savefig('drawn.png')\n"
        "command.exit_after = lambda run: draw()\n"
        "command.main()"
    )
    environment = {**os.environ, "MPLBACKEND": backend}
    subprocess.run([sys.executable, "-c", draw], env=environment, cwd=tmp_path, check=True)
    with Image.open(tmp_path / "drawn.png") as drawn:
        assert drawn.size == (100, 50)
