"""Files of boxes: what is read from a table, from COCO and from MegaDetector's results, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fewshot_mahalanobis import Region
from fewshot_mahalanobis.images.boxes import is_box_file, read_boxes

COCO: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "a.png", "width": 60, "height": 40},
        {"id": 9, "file_name": "sub/b.png"},
    ],
    "annotations": [
        {"id": 1, "image_id": 9, "category_id": 3, "bbox": [1.5, 2, 10, 20.25]},
        {"id": 2, "image_id": 7, "category_id": 1, "bbox": [5, 6, 7, 8], "iscrowd": 0},
        {"id": 5, "image_id": 7, "category_id": 1, "bbox": [0, 0, 60, 40], "iscrowd": 1},
    ],
    "categories": [{"id": 1, "name": "hare"}, {"id": 3, "name": "fox"}],
}
MEGADETECTOR: dict[str, Any] = {
    "info": {"format_version": "1.3", "classifier": "another", "detector": "md_v5a"},
    "detection_categories": {"1": "animal", "2": "person"},
    "classification_categories": {"4": "owl"},
    "images": [
        {
            "file": "a.png",
            "detections": [
                {"category": "1", "conf": 0.9, "bbox": [0.1, 0.2, 0.5, 0.5], "classifications": [["4", 0.7]]},
                {"category": "2", "conf": 0.8, "bbox": [0, 0, 1, 1]},
                {"category": "1", "conf": 0.05, "bbox": [0.5, 0.5, 0.25, 0.25]},
            ],
        },
        {"file": "sub/b.png", "detections": []},
        {"file": "c.png", "failure": "Failure image access", "detections": None},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "sub/b.png"):
        Image.new("RGB", (60, 40)).save(tmp_path / name)
    return tmp_path


def written(folder: Path, content: str | dict[str, Any], name: str = "") -> Path:
    file = folder / (name or ("boxes.csv" if isinstance(content, str) else "boxes.json"))
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_table_of_boxes_is_read_in_pixels(folder: Path) -> None:
    table = written(folder, "label;height;path;x;y;width;sex\nfox;4.5;a.png;1;2;3;m\n\nhare;40;sub/b.png;0;0;60;f\n")
    assert is_box_file(table)
    boxes = read_boxes(table, margin=0.2)
    assert boxes.regions == [
        Region(folder / "a.png", (1, 2, 3, 4.5), 0.2),
        Region(folder / "sub/b.png", (0, 0, 60, 40), 0.2),
    ]
    assert [region.name for region in boxes.regions] == ["line 2 of boxes.csv", "line 4 of boxes.csv"]
    assert boxes.labels == ["fox", "hare"]
    assert read_boxes(written(folder, "path,x,y,width,height\na.png,1,2,3,4\n")).labels is None
    assert not is_box_file(written(folder, "path,label,width,height\na.png,fox,60,40\n"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("path,x,y,w,h\na.png,1,2,3,4", "no column 'width': its first line must name path, x, y, width and height"),
        ("path,x,y,width,height\na.png,1,2,3,wide", "line 2 of .*boxes.csv: height is 'wide', not a number"),
        ("path;x;y;width;height\na.png;1;2;3,5;4", "width is '3,5', not a number: write it with a point"),
        ("path,x,y,width,height\na.png,1,2,3,", "height is '', not a number"),
        ("path,x,y,width,height\na.png,1,2,nan,4", r"four finite numbers .*a\.png, line 2 of boxes\.csv"),
        ("path,x,y,width,height,label\n\na.png,1,2,3,4,", "line 3 of .*boxes.csv lacks a path or a label"),
        (
            "path,x,y,width,height,label\na.png,1,2,3,4,x\nsub/../a.png,1,2,3,4,x\na.png,1,2,3,4,y",
            "lines 2 and 4 .* two",
        ),
        ("path,x,y,width,height\n", "has no box"),
        ("path,x,y,width,height\nz.png,1,2,3,4", "none of the 1 files (.|\n)*z.png(.|\n)*--image-folder"),
    ],
)
def test_a_table_that_is_no_table_of_boxes_is_refused_by_its_line(rows: str, message: str, folder: Path) -> None:
    table = written(folder, rows)
    assert is_box_file(table)
    with pytest.raises(ValueError, match=message):
        read_boxes(table)


def test_the_annotations_of_coco_are_regions_with_the_names_of_their_categories(folder: Path) -> None:
    (folder / "annotations").mkdir()
    boxes = read_boxes(written(folder / "annotations", COCO), image_folder=folder)
    assert boxes.regions == [
        Region(folder / "sub/b.png", (1.5, 2, 10, 20.25)),
        Region(folder / "a.png", (5, 6, 7, 8), picture_size=(60, 40)),
    ]
    assert boxes.regions[1].name == "annotation 2 of boxes.json"
    assert boxes.labels == ["fox", "hare"]
    assert boxes.note == "Left out: 1 annotation of crowds (iscrowd)."
    unlabelled = {key: value for key, value in COCO.items() if key != "categories"}
    assert read_boxes(written(folder, unlabelled)).labels is None


def test_the_detections_of_megadetector_are_regions_in_shares_of_the_picture(folder: Path) -> None:
    file = written(folder, MEGADETECTOR)
    boxes = read_boxes(file)
    assert boxes.regions[0] == Region(folder / "a.png", (0.1, 0.2, 0.5, 0.5), normalized=True)
    assert boxes.regions[0].edges(60, 40) == (6, 8, 36, 28)
    assert boxes.regions[2].name == "detection 3 of boxes.json"
    assert boxes.labels is None
    assert boxes.note == "Images that the detector could not read: 1."
    assert [region.box[0] for region in read_boxes(file, min_confidence=0.8).regions] == [0.1, 0]
    assert [region.box[0] for region in read_boxes(file, category="animal").regions] == [0.1, 0.5]
    with pytest.raises(ValueError, match="no detections of category 'bird', but of 'animal', 'person'"):
        read_boxes(file, category="bird")
    with pytest.raises(ValueError, match="they are MegaDetector's"):
        read_boxes(written(folder, COCO), min_confidence=0.5)


def test_labels_become_the_categories_of_coco(folder: Path) -> None:
    boxes = read_boxes(written(folder, COCO))
    document = boxes.fill(["fox", "hare", "?"], [[("hare", 0.75), ("fox", 0.25)], None])
    assert document["categories"] == [{"id": 1, "name": "fox"}, {"id": 2, "name": "hare"}, {"id": 3, "name": "?"}]
    assert document["annotations"] == [{**COCO["annotations"][0], "category_id": 2, "score": 0.75}]
    assert document["images"] == COCO["images"]


def test_labels_become_the_classifications_of_megadetector_in_place_of_earlier_ones(folder: Path) -> None:
    boxes = read_boxes(written(folder, MEGADETECTOR), category="animal")
    document = boxes.fill(["fox", "hare"], [None, [("hare", 0.75), ("fox", 0.25)]])
    expected = copy.deepcopy(MEGADETECTOR)
    expected["info"]["classifier"] = "fewshot-mahalanobis"
    expected["classification_categories"] = {"1": "fox", "2": "hare"}
    first, _, third = expected["images"][0]["detections"]
    del first["classifications"]
    third["classifications"] = [["2", 0.75], ["1", 0.25]]
    assert document == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda coco: coco["annotations"][0].update(image_id=8),
            "annotation 1 of boxes.json is of image 8, which",
        ),
        (lambda coco: coco["annotations"][1].update(category_id=8), "annotation 2 .* category 8, which is not among"),
        (lambda coco: coco["annotations"][0].pop("bbox"), r"annotation 1 of boxes.json \(sub/b.png\) has no bbox"),
        (lambda coco: coco["annotations"][0].update(bbox=[1, 2, 3]), "four finite numbers"),
        (lambda coco: coco["images"][0].pop("id"), "is damaged: KeyError: 'id'"),
        (lambda coco: coco.pop("annotations"), "neither a COCO annotation file, .* nor MegaDetector's results"),
        (lambda coco: coco.update(annotations=[]), "has no box"),
    ],
)
def test_a_damaged_annotation_file_is_refused(change: Any, message: str, folder: Path) -> None:
    coco = copy.deepcopy(COCO)
    change(coco)
    with pytest.raises(ValueError, match=message):
        read_boxes(written(folder, coco))


@pytest.mark.parametrize(
    ("kind", "entry", "message"),
    [
        ("images", {"id": 7, "file_name": "sub/b.png"}, "the image id 7 twice, for 'a.png' and 'sub/b.png'"),
        ("categories", {"id": 3, "name": "owl"}, "the category id 3 twice, for 'fox' and 'owl'"),
        ("images", {"id": 7.0, "file_name": "c.png"}, "the image id 7.0 twice"),
    ],
)
def test_two_files_put_together_with_the_same_ids_are_refused(
    kind: str, entry: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read_boxes(written(folder, {**COCO, kind: [*COCO[kind], entry]}))


def test_what_is_there_twice_and_means_the_same_is_read_rightly(folder: Path) -> None:
    images = [*COCO["images"], COCO["images"][0], {"id": 8, "file_name": "a.png"}]  # once more, and under another id
    annotations = [*COCO["annotations"], {"id": 1, "image_id": 8, "category_id": 4, "bbox": [1, 1, 9, 9]}]
    categories = [*COCO["categories"], {"id": 4, "name": "hare"}]
    file = written(folder, {"images": images, "annotations": annotations, "categories": categories})
    boxes = read_boxes(file)
    assert [
        (Path(region.image).name, label) for region, label in zip(boxes.regions, boxes.labels or [], strict=True)
    ] == [
        ("b.png", "fox"),
        ("a.png", "hare"),
        ("a.png", "hare"),
    ]
    filled = boxes.fill(["fox", "hare"], [None, None, [("fox", 0.6)]])["annotations"]
    assert filled == [{**annotations[-1], "category_id": 1, "score": 0.6}]  # not the other annotation 1


@pytest.mark.parametrize(
    ("fields", "turned"),
    [
        ({"attributes": {"rotation": 15}}, "rotation 15"),
        ({"attributes": {"occluded": True, "rotation": "180.0"}}, "rotation 180.0"),
        ({"rotation": -0.5}, "rotation -0.5"),
        ({"attributes": {"rotation": 0}, "angle": "90°"}, "angle 90"),
        ({"bbox": [30, 20, 10, 20, 0.3]}, "five numbers"),
    ],
)
def test_a_turned_box_is_refused(fields: dict[str, Any], turned: str, folder: Path) -> None:
    coco = copy.deepcopy(COCO)
    coco["annotations"][0].update(fields)
    with pytest.raises(ValueError, match=rf"annotation 1 of boxes.json \(sub/b.png\).*{turned}.*cut out upright"):
        read_boxes(written(folder, coco))
    table = "path,x,y,width,height,rotation\na.png,1,2,3,4,0\na.png,1,2,3,4,{}\n"
    with pytest.raises(ValueError, match=r"line 3 .*\(a.png\) is a turned box \(rotation 22,5\)"):
        read_boxes(written(folder, table.format('"22,5"')))


@pytest.mark.parametrize(
    "fields", [{"rotation": 0.0}, {"rotation": 360}, {"angle": "low"}, {"rotation": None}, ["wet"]]
)
def test_a_box_that_is_not_turned_stays_whatever_its_attributes(fields: Any, folder: Path) -> None:
    coco = copy.deepcopy(COCO)
    coco["annotations"][0]["attributes"] = fields
    assert read_boxes(written(folder, coco)).regions == read_boxes(written(folder, COCO)).regions


def test_backslashes_of_windows_lead_to_the_same_files(folder: Path) -> None:
    coco = copy.deepcopy(COCO)
    coco["images"][1]["file_name"] = "sub\\b.png"
    assert read_boxes(written(folder, coco)).regions == read_boxes(written(folder, COCO)).regions
    table = "path,x,y,width,height\n{},1,2,3,4\n"
    slash, backslash = (read_boxes(written(folder, table.format(p))).regions for p in ("sub/b.png", ".\\sub\\b.png"))
    assert [region.image for region in backslash] == [region.image for region in slash]


def test_json_of_another_kind_is_refused(folder: Path) -> None:
    for text in ("[]", "[{}]", '{"images": 3}', '{"a": []}'):
        with pytest.raises(ValueError, match="neither a COCO annotation file"):
            read_boxes(written(folder, text, "boxes.json"))
    with pytest.raises(ValueError, match="is not JSON in UTF-8"):
        read_boxes(written(folder, "{", "boxes.json"))
