"""Several sources: what is read of each, what corrects what, and which answers of ``predict`` are taken for labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fewshot_mahalanobis.images.picture_sources import read_sources
from tests.tiny import pictures

#: As `predict --min-probability 0.5` writes it, with a correction, a mark, an answer in doubt and one of no class.
ANSWERS = """path,label,checked,predicted,probability,doubtful
new/0.png,cat,,cat,0.990000,
new/1.png,dog,,cat,0.800000,
new/2.png,dog,x,dog,0.950000,
new/3.png,dog,,dog,0.400000,yes
new/4.png,unknown,,unknown,,yes
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    names = [
        *(f"support/{name}/{i}.png" for name in ("cat", "dog") for i in range(2)),
        *(f"new/{i}.png" for i in range(5)),
    ]
    for name, pixels in zip(names, pictures(len(names), 0), strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path


def taken(*sources: str, **options: str) -> tuple[dict[str, str], list[str]]:
    """Labels by path, and notes."""
    read, notes = read_sources([Path(source) for source in sources], **options)
    assert len({*map(str, read.images)}) == len(read.images)
    return dict(zip(map(str, read.images), read.labels, strict=True)), notes


def test_a_table_of_answers_given_back_unchanged_teaches_nothing(root: Path) -> None:
    (root / "a.csv").write_text(ANSWERS.replace("1.png,dog", "1.png,cat").replace(",x,", ",,"))
    with pytest.raises(ValueError, match=r"a.csv has 5 answers of `predict`, and nobody has checked any: correct"):
        taken("a.csv")
    assert taken("a.csv", rows="all")[0] == {
        f"new/{i}.png": label for i, label in enumerate(["cat", "cat", "dog", "dog", "unknown"])
    }


def test_of_a_table_of_answers_the_changed_and_the_checked_rows_are_taken(root: Path) -> None:
    (root / "a.csv").write_text(ANSWERS)
    labels, notes = taken("a.csv")
    assert labels == {"new/1.png": "dog", "new/2.png": "dog"}
    assert notes == [
        "a.csv: 2 of 5 rows taken (1 changed, 1 checked). "
        "Left out: 3 answers that nobody has checked (--rows all takes them)."
    ]


def test_sure_answers_are_taken_on_request_and_doubtful_ones_only_if_they_were_checked(root: Path) -> None:
    (root / "a.csv").write_text(ANSWERS)
    assert [*taken("a.csv", rows="sure")[0]] == ["new/0.png", "new/1.png", "new/2.png"]
    (root / "a.csv").write_text(ANSWERS.replace("3.png,dog,,", "3.png,dog,TRUE,"))
    assert [*taken("a.csv", rows="sure")[0]] == ["new/0.png", "new/1.png", "new/2.png", "new/3.png"]
    assert [*taken("a.csv")[0]] == ["new/1.png", "new/2.png", "new/3.png"]
    without = "\n".join(line.rpartition(",")[0] for line in ANSWERS.splitlines())
    (root / "a.csv").write_text(without)
    with pytest.raises(ValueError, match="does not say which answers are doubtful"):
        taken("a.csv", rows="sure")


def test_deleted_rows_and_labels_are_not_taken_and_added_rows_are(root: Path) -> None:
    lines = ANSWERS.splitlines()
    (root / "a.csv").write_text("\n".join([lines[0], lines[3].replace("dog,x", ",x"), lines[4], "new/0.png,owl"]))
    labels, notes = taken("a.csv")
    assert labels == {"new/0.png": "owl"}
    assert "1 answer without a label" in notes[0]
    (root / "a.csv").write_text("\n".join([lines[0], lines[1], lines[3]]))
    assert taken("a.csv", rows="all")[0] == {"new/0.png": "cat", "new/2.png": "dog"}


@pytest.mark.parametrize("mark", ["", "no", "No", "FALSE", "0", "-"])
def test_a_mark_that_says_no_is_none(root: Path, mark: str) -> None:
    (root / "a.csv").write_text(ANSWERS.replace("dog,x", f"dog,{mark}"))
    assert [*taken("a.csv")[0]] == ["new/1.png"]


def test_one_of_the_two_columns_is_enough_to_tell(root: Path) -> None:
    (root / "a.csv").write_text("path,label,predicted\nnew/0.png,cat,cat\nnew/1.png,dog,cat\n")
    assert [*taken("a.csv")[0]] == ["new/1.png"]
    (root / "a.csv").write_text("path,label,checked\nnew/0.png,cat,\nnew/1.png,dog,yes\n")
    assert [*taken("a.csv")[0]] == ["new/1.png"]
    (root / "a.csv").write_text("path,label,probability\nnew/0.png,cat,0.5\nnew/1.png,dog,0.5\n")
    assert [*taken("a.csv")[0]] == ["new/0.png", "new/1.png"]  # a table of one's own


def test_a_later_source_corrects_an_earlier_one_however_the_file_is_named(root: Path) -> None:
    (root / "a.csv").write_text(
        f"path,label\nnew/../support/cat/0.png,dog\n{root}/support/dog/1.png,dog\nlink.png,owl\n"
    )
    (root / "link.png").symlink_to(root / "support" / "cat" / "1.png")
    labels, notes = taken("support", "a.csv")
    assert sorted(labels.values()) == ["dog", "dog", "dog", "owl"]
    assert notes == ["a.csv: Corrected: support/cat/0.png (cat -> dog), support/cat/1.png (cat -> owl)."]
    labels, notes = taken("a.csv", "support")  # in this order the folder is right
    assert labels == {f"support/{name}/{i}.png": name for name in ("cat", "dog") for i in range(2)}
    assert "(dog -> cat)" in notes[0]


def test_a_box_corrects_the_same_box_and_no_other(root: Path) -> None:
    head = "path,x,y,width,height,label\n"
    (root / "a.csv").write_text(head + "new/0.png,0,0,6,6,cat\nnew/0.png,6,6,6,6,cat\n")
    (root / "b.csv").write_text(head + "./new/0.png,0,0,6,6,dog\n")
    read, notes = read_sources([Path("a.csv"), Path("b.csv"), Path("support")])
    assert read.labels == ["cat", "dog", "cat", "cat", "dog", "dog"]
    assert len(notes) == 1


def test_boxes_that_predict_wrote_are_taken_like_rows(root: Path) -> None:
    lines = [line.split(",", 1) for line in ANSWERS.splitlines()]
    rows = [f"{path},{'x,y,width,height' if path == 'path' else '0,0,6,6'},{rest}" for path, rest in lines]
    (root / "a.csv").write_text("\n".join(rows))
    read, notes = read_sources([Path("a.csv")])
    assert [Path(image.image).name for image in read.images] == ["1.png", "2.png"]  # type: ignore[union-attr]
    assert "2 of 5 rows taken (1 changed, 1 checked)" in notes[0]


def test_the_folder_of_unsure_images_is_no_class(root: Path) -> None:
    (root / "new").rename(root / "support" / "unsure")
    labels, notes = taken("support")
    assert {*labels.values()} == {"cat", "dog"}
    assert notes == ["support: The folder 'unsure' is no class: 5 images left out."]


def test_one_of_several_folders_may_have_one_class_where_others_are_empty(root: Path) -> None:
    (root / "more" / "owl").mkdir(parents=True)
    (root / "new" / "0.png").rename(root / "more" / "owl" / "0.png")
    assert {*taken("more")[0].values()} == {"owl"}
    (root / "more" / "hen").mkdir()
    assert {*taken("support", "more")[0].values()} == {"cat", "dog", "owl"}
    with pytest.raises(ValueError, match="at least two are needed"):
        taken("more")


def test_a_model_among_the_sources_is_refused_with_the_way_to_give_it(root: Path) -> None:
    (root / "m.safetensors").touch()
    with pytest.raises(ValueError, match=r"m.safetensors is a model, not images. .* --from m.safetensors"):
        taken("m.safetensors", "support")
