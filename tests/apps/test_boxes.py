"""Boxes through the commands: one label for each, from a table, COCO or MegaDetector, as cropping gives it."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.apps.session import Session
from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.export import web_page
from fewshot_mahalanobis.images.boxes import read_boxes
from fewshot_mahalanobis.images.region import Region
from tests.tiny import COLOURS, adapting_model

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

SIDES = ("x", "y", "width", "height")


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.stdout if status in (0, 3) else result.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(adapting_model(), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six photographs with a noisy patch of each colour; a COCO file, a table and the patches cropped by hand."""
    root, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    coco: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    coco["categories"] = [{"id": 10 + number, "name": name} for number, name in enumerate(COLOURS)]
    rows = ["path,x,y,width,height,label"]
    (root / "crops").mkdir()
    crops = ["path,label"]
    for photograph in range(6):
        pixels = rng.integers(0, 256, (120, 200, 3)).astype(np.uint8)
        coco["images"].append({"id": photograph, "file_name": f"{photograph}.jpg", "width": 200, "height": 120})
        for number, (name, colour) in enumerate(COLOURS.items()):
            x, y, width, height = 5 + 62 * number, int(rng.integers(0, 40)), 50 + photograph, 70
            pixels[y : y + height, x : x + width] = (colour + rng.integers(-35, 36, (height, width, 3))).clip(0, 255)
            box = [x, y, width, height]
            entry = {"id": len(coco["annotations"]), "image_id": photograph, "category_id": 10 + number, "bbox": box}
            coco["annotations"].append(entry)
            rows.append(f"{photograph}.jpg,{x},{y},{width},{height},{name}")
        Image.fromarray(pixels).save(root / f"{photograph}.jpg", quality=90)
    for entry in coco["annotations"]:
        x, y, width, height = entry["bbox"]
        with Image.open(root / f"{entry['image_id']}.jpg") as image:
            image.crop((x, y, x + width, y + height)).save(root / "crops" / f"{entry['id']}.png")
        crops.append(f"crops/{entry['id']}.png,{[*COLOURS][entry['category_id'] - 10]}")
    (root / "coco.json").write_text(json.dumps(coco))
    (root / "boxes.csv").write_text("\n".join(rows))
    (root / "crops.csv").write_text("\n".join(crops))
    return root


@pytest.fixture(scope="module")
def model(checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "model.safetensors"
    said = run(
        "fit", folder / "coco.json", "-o", file, "--checkpoint", checkpoint, "--device", "cpu", "--groups", "none"
    )
    assert "3 classes (blue 6, green 6, red 6)" in said
    return file


def megadetector(folder: Path) -> dict[str, Any]:
    """The boxes of the COCO file as shares, one photograph after another."""
    coco, images = json.loads((folder / "coco.json").read_text()), list[dict[str, Any]]()
    for image in coco["images"]:
        boxes = [entry["bbox"] for entry in coco["annotations"] if entry["image_id"] == image["id"]]
        detections = [
            {"category": "1", "conf": 0.9, "bbox": [x / 200, y / 120, width / 200, height / 120]}
            for x, y, width, height in boxes
        ]
        images.append({"file": image["file_name"], "detections": detections})
    return {"info": {"format_version": "1.3"}, "detection_categories": {"1": "animal"}, "images": images}


def table_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_coco_a_table_and_cropping_by_hand_fit_the_same_classifier(
    checkpoint: Path, folder: Path, model: Path, tmp_path: Path
) -> None:
    fitted = SimpleCNAPSClassifier.load(model, device="cpu")
    for source in ("boxes.csv", "crops.csv"):
        file = tmp_path / f"{source}.safetensors"
        run("fit", folder / source, "-o", file, "--checkpoint", checkpoint, "--groups", "none")
        other = SimpleCNAPSClassifier.load(file, device="cpu")
        assert np.array_equal(other.fitted_head_.support.adapted, fitted.fitted_head_.support.adapted)
        assert other.fitted_head_.support_labels.tolist() == fitted.fitted_head_.support_labels.tolist()


def test_every_kind_of_file_gets_the_labels_of_cropping_by_hand(folder: Path, model: Path, tmp_path: Path) -> None:
    detections = folder / "detections.json"
    detections.write_text(json.dumps(megadetector(folder)))
    by_hand = table_of(run("predict", model, *(folder / f"crops/{i}.png" for i in range(18)), "--proba"))
    boxes = [entry["bbox"] for entry in json.loads((folder / "coco.json").read_text())["annotations"]]
    for file in ("coco.json", "boxes.csv", "detections.json"):
        rows = table_of(run("predict", model, folder / file, "--proba"))
        assert [[*row] for row in rows[:1]] == [
            ["path", *SIDES, "label", "checked", "predicted", "probability", *COLOURS]
        ]
        assert [[int(row[side]) for side in SIDES] for row in rows] == boxes
        assert [Path(row["path"]) for row in rows] == [folder / f"{i // 3}.jpg" for i in range(18)]
        for name in ("label", *COLOURS):
            assert [row[name] for row in rows] == [row[name] for row in by_hand]
    answers = tmp_path / "answers.csv"
    answers.write_text(run("predict", model, detections))
    again = table_of(run("predict", model, answers))
    assert [row["label"] for row in again] == [row["label"] for row in by_hand]
    json_rows = json.loads(run("predict", model, folder / "boxes.csv", "--json"))
    assert json_rows[4] == {"path": str(folder / "1.jpg"), "box": boxes[4], "label": by_hand[4]["label"]}


def test_the_same_json_is_written_with_its_classification(folder: Path, model: Path, tmp_path: Path) -> None:
    document = megadetector(folder)
    document["images"][0]["detections"][1]["conf"] = 0.1
    file = tmp_path / "detections.json"
    file.write_text(json.dumps(document))
    given = ("--image-folder", folder, "--min-confidence", 0.2, "--json")
    filled = json.loads(run("predict", model, file, *given, "--top-k", 2))
    assert filled["classification_categories"] == {"1": "blue", "2": "green", "3": "red"}
    detections = [detection for image in filled["images"] for detection in image["detections"]]
    assert "classifications" not in detections[1]
    rows = table_of(run("predict", model, folder / "boxes.csv", "--top-k", 2))
    for detection, row in [*zip(detections, rows, strict=True)][2:]:
        expected = [[row[f"label_{place}"], float(row[f"probability_{place}"])] for place in (1, 2)]
        found = [[filled["classification_categories"][number], share] for number, share in detection["classifications"]]
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert [share for _, share in found] == pytest.approx([share for _, share in expected], abs=1e-6)
    for detection in detections:
        detection.pop("classifications", None)
    assert filled["images"] == document["images"]

    coco = json.loads(run("predict", model, folder / "coco.json", "--json"))
    assert coco["categories"] == [{"id": 1, "name": "blue"}, {"id": 2, "name": "green"}, {"id": 3, "name": "red"}]
    names = {category["id"]: category["name"] for category in coco["categories"]}
    assert [names[entry["category_id"]] for entry in coco["annotations"]] == [row["label"] for row in rows]

    again = ("--json", "--threshold", "green=0", "--top-k", 2)
    coco = json.loads(run("predict", model, folder / "coco.json", *again))
    assert {names[entry["category_id"]] for entry in coco["annotations"]} == {"green"}
    filled = json.loads(run("predict", model, file, *given[:2], *again))
    first = [detection["classifications"] for image in filled["images"] for detection in image["detections"]]
    assert {filled["classification_categories"][shown[0][0]] for shown in first} == {"green"}
    assert all(len(shown) == 2 for shown in first)


def test_boxes_that_are_none_are_listed_with_file_row_and_box_and_skipped_on_request(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    table = tmp_path / "boxes.csv"
    table.write_text(
        "path,x,y,width,height\n0.jpg,5,5,50,60\n0.jpg,160,5,50,60\n1.jpg,0.2,0.2,0.5,0.5\ngone.jpg,1,2,3,4\n"
    )
    said = run("predict", model, table, "--image-folder", folder, status=1)
    for name, box, line, why in (
        ("0.jpg", "160, 5, 50, 60", 3, "the box reaches beyond the picture, which has 200 x 120 pixels"),
        ("1.jpg", "0.2, 0.2, 0.5, 0.5", 4, "no larger than a pixel"),
        ("gone.jpg", "1, 2, 3, 4", 5, "no such file"),
    ):
        assert f"{folder / name}, box ({box}), line {line} of boxes.csv: " in said
        assert why in said
    assert "3 of 4 images cannot be read" in said
    rows = table_of(run("predict", model, table, "--image-folder", folder, "--skip-errors", status=3))
    assert [(row["x"], bool(row["label"])) for row in rows] == [
        ("5", True),
        ("160", False),
        ("0.2", False),
        ("1", False),
    ]
    assert [bool(row["error"]) for row in rows] == [False, True, True, True]


def test_an_unknown_box_gets_its_label_alone(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    unknown = ("--unknown-label", "?", "--false-rejection-rate", 0.2)
    run("fit", folder / "boxes.csv", "-o", file, "--checkpoint", checkpoint, "--groups", "none", *unknown)
    Image.fromarray(np.indices((120, 200)).sum(0).astype(np.uint8) % 2 * 255).save(tmp_path / "stripes.png")
    detections = [{"category": "1", "conf": 0.9, "bbox": [0, 0, 0.5, 0.5]}]
    document = {"detection_categories": {"1": "animal"}, "images": [{"file": "stripes.png", "detections": detections}]}
    (tmp_path / "md.json").write_text(json.dumps(document))
    filled = json.loads(run("predict", file, tmp_path / "md.json", "--json", "--top-k", 3))
    assert filled["classification_categories"]["4"] == "?"
    assert filled["images"][0]["detections"][0]["classifications"] == [["4", 1.0]]


def test_groups_of_boxes_come_from_a_column_with_a_group_for_each_box(
    checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    rows = (folder / "boxes.csv").read_text().splitlines()
    table, file = tmp_path / "boxes.csv", tmp_path / "model.safetensors"
    table.write_text("\n".join([rows[0] + ",animal", *(f"{row},{i % 9}" for i, row in enumerate(rows[1:]))]))
    given = ("fit", table, "-o", file, "--checkpoint", checkpoint, "--image-folder", folder)
    run(*given, "--groups", "animal")
    assert SimpleCNAPSClassifier.load(file, device="cpu").fitted_head_.group_names == [str(i % 9) for i in range(18)]
    table.write_text(table.read_text()[:-1])
    assert "line 19 of" in run(*given, "--groups", "animal", status=1)


def test_options_of_boxes_are_refused_where_there_are_none(folder: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert "--margin, --category: for files of boxes" in run(
        "predict", model, folder / "0.jpg", "--margin", 0.1, "--category", "animal", status=1
    )
    assert "--margin is for boxes" in run("fit", folder / "crops.csv", "-o", out, "--margin", 0.1, status=1)
    assert "give it alone" in run("predict", model, folder / "coco.json", folder / "0.jpg", "--json", status=1)
    (tmp_path / "md.json").write_text(json.dumps(megadetector(folder)))
    said = run("fit", tmp_path / "md.json", "-o", out, "--image-folder", folder, status=1)
    assert "boxes without labels" in said
    assert not out.exists()


def test_a_margin_shows_what_is_around_the_boxes(folder: Path, model: Path) -> None:
    plain, wider = (run("predict", model, folder / "boxes.csv", "--proba", "--margin", share) for share in (0, 0.5))
    assert [row["x"] for row in table_of(plain)] == [row["x"] for row in table_of(wider)]
    assert [row["red"] for row in table_of(plain)] != [row["red"] for row in table_of(wider)]


def test_a_report_names_regions(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    rows = (folder / "boxes.csv").read_text().replace("5,blue", "5,blue").splitlines()
    table = tmp_path / "boxes.csv"
    table.write_text("\n".join([*rows[:-1], rows[-1].replace("red", "blue")]))
    out = tmp_path / "model.safetensors"
    given = ("--image-folder", folder, "--groups", "none", "--report")
    said = run("fit", table, "-o", out, "--checkpoint", checkpoint, *given)
    assert f"{folder / '5.jpg'}, box (129, " in said


def test_a_page_shows_the_regions_that_fit_learned_from(
    folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "write_page_onnx", lambda model, task, path, **options: path.write_bytes(b"graph"))
    run("page", model, "-o", tmp_path / "page", "--support", folder / "coco.json")
    shown = json.loads((tmp_path / "page" / "page.json").read_text())["support"]
    for index, colour in enumerate((*COLOURS.values(),) * 6):
        with Image.open(io.BytesIO(base64.b64decode(shown[index]["picture"].split(",")[1]))) as picture:
            assert np.abs(np.asarray(picture, float).mean((0, 1)) - colour).max() < 20


def test_coco_annotations_that_predict_scored_are_learned_only_on_request(
    checkpoint: Path, folder: Path, model: Path, tmp_path: Path
) -> None:
    document = json.loads(run("predict", model, folder / "coco.json", "--json"))
    scored, out = tmp_path / "scored.json", tmp_path / "model.safetensors"
    given = ("fit", scored, "-o", out, "--checkpoint", checkpoint, "--image-folder", folder, "--groups", "none")
    scored.write_text(json.dumps(document))
    said = run(*given, status=1)
    assert "18 annotations with a score, answers of a network (--rows all takes them)" in said
    assert not out.exists()
    assert "3 classes" in run(*given, "--rows", "all")
    for entry in document["annotations"][:9]:  # as a tool writes what somebody has corrected
        del entry["score"]
    scored.write_text(json.dumps(document))
    assert "3 classes (blue 3, green 3, red 3)" in run(*given)


# ---------------------------------------------------------------- review and sort


def regions_of(file: Path, **options: Any) -> list[Region]:
    return read_boxes(file, **options).regions


def test_boxes_are_reviewed_as_they_are_predicted_and_fit_reads_the_table(
    checkpoint: Path, folder: Path, model: Path, tmp_path: Path
) -> None:
    (folder / "detections.json").write_text(json.dumps(megadetector(folder)))
    classifier = SimpleCNAPSClassifier.load(model, device="cpu")
    predicted = [row["label"] for row in table_of(run("predict", model, folder / "coco.json"))]
    expected = "path,x,y,width,height,label\n" + "".join(
        f"{folder / path},{x},{y},{width},{height},purple\n"
        for path, x, y, width, height, _ in (
            line.split(",") for line in (folder / "boxes.csv").read_text().split()[5:7]
        )
    )
    for name in ("coco.json", "boxes.csv", "detections.json"):
        table = tmp_path / f"{name}.csv"
        review = Session(classifier, regions_of(folder / name), table)
        assert [answer and answer.label for answer in map(review.answer, range(18))] == predicted
        review.label([4, 5], "purple")
        assert review.table_text() == table.read_text() == expected  # the same boxes, in pixels
        again = Session(classifier, regions_of(folder / "coco.json")[3:], table)
        assert again.labels == {1: "purple", 2: "purple"}
        fewer = Session(classifier, regions_of(folder / "detections.json")[5:], table)
        assert (fewer.labels, fewer.other_rows) == ({0: "purple"}, 1)
    out = tmp_path / "model.safetensors"
    said = run("fit", folder / "boxes.csv", table, "-o", out, "--checkpoint", checkpoint, "--groups", "none")
    assert "purple 2" in said


def test_a_reviewed_region_is_shown_and_learned_with_the_others_of_its_photograph(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    classifier = SimpleCNAPSClassifier.load(model, device="cpu")
    review = Session(classifier, regions_of(folder / "boxes.csv"), tmp_path / "checked.csv")
    for picture, colour in enumerate((*COLOURS.values(),) * 6):
        with Image.open(io.BytesIO(review.thumbnail(picture))) as thumbnail:
            assert np.abs(np.asarray(thumbnail, float).mean((0, 1)) - colour).max() < 20
            width, height = review.pictures[picture].source.box[2:]  # type: ignore[union-attr]
            assert thumbnail.size == (round(128 * width / height), 128)
    review.label([3, 4, 6], "green")
    assert review.classifier is not None
    assert review.classifier.fitted_head_.group_names[-3:] == [str(folder / "1.jpg")] * 2 + [str(folder / "2.jpg")]


def test_boxes_and_whole_images_are_reviewed_apart(folder: Path, model: Path, tmp_path: Path) -> None:
    classifier = SimpleCNAPSClassifier.load(model, device="cpu")
    boxes, table = regions_of(folder / "boxes.csv"), tmp_path / "checked.csv"
    with pytest.raises(ValueError, match="boxes and whole images"):
        Session(classifier, [*boxes, folder / "0.jpg"], table)
    Session(classifier, [folder / "0.jpg"], table).label([0], "red")
    with pytest.raises(
        ValueError, match=r"no table that a review of boxes wrote, whose first line is path,x,y,width,hei"
    ):
        Session(classifier, boxes, table)
    assert table.read_text().splitlines()[0] == "path,label"
    assert "--category: for files of boxes" in run("review", model, folder / "0.jpg", "--category", "animal", status=1)


def test_sort_refuses_boxes_and_names_what_takes_them(folder: Path, model: Path, tmp_path: Path) -> None:
    for name in ("boxes.csv", "coco.json"):
        said = run("sort", model, folder / "0.jpg", folder / name, "-o", tmp_path / "sorted", status=1)
        assert f"{folder / name} has boxes, and sort puts whole images into folders" in said
        assert "predict" in said
        assert not (tmp_path / "sorted").exists()
