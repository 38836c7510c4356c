"""Sorting: files go where the classifier says, nothing is overwritten or lost, and a run can be repeated."""

from __future__ import annotations

import os
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps import sorting
from fewshot_mahalanobis.apps.sorting import sort_files
from fewshot_mahalanobis.images.folders import UNSURE
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from tests.tiny import LABELS, drawn, pictures, tiny_classifier, tiny_model

#: What ``sort_files`` returns if there is nothing to do.
NOTHING = ([], [], [], {}, [])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Eight pictures that ``tiny_classifier`` was fitted to, in two folders with the same names."""
    paths = []
    for index, image in enumerate(pictures(8, 1)):
        path = tmp_path / "photos" / "ab"[index % 2] / f"{index // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    return tiny_classifier()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("how", ["copy", "link", "move"])
def test_files_go_to_the_folder_of_their_class(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, how: Any
) -> None:
    output, originals = tmp_path / "sorted", [path.read_bytes() for path in files]
    expected = classifier.predict(files).tolist()
    sorted_files, _, _, problems, _ = sort_files(classifier, files, output, how=how, min_probability=0)
    assert not problems
    assert [file.label for file in sorted_files] == expected
    for path, original, label, file in zip(files, originals, expected, sorted_files, strict=True):
        assert file.path == path
        assert file.sorted_as.parent == output / label
        assert file.sorted_as.read_bytes() == original
        assert file.sorted_as.is_symlink() == (how == "link")
        assert path.exists() == (how != "move")
    assert len({file.sorted_as for file in sorted_files}) == len(files)  # two files of each name


def test_pictures_that_are_sorted_together_teach_where_the_classes_lie(tmp_path: Path) -> None:
    classifier, files = tiny_classifier(head="mahalanobis"), [tmp_path / f"{index}.png" for index in range(8)]
    for path, image in zip(files, pictures(8, 3), strict=True):
        Image.fromarray(image).save(path)
    alone, expected = (classifier.predict_all(files, transductive=teach) for teach in (False, True))
    found = sort_files(classifier, files, tmp_path / "sorted", min_probability=0, together=True).new
    assert [file.label for file in found] == expected.labels.tolist()
    np.testing.assert_allclose([file.probability for file in found], expected.probabilities.max(axis=1), rtol=1e-6)
    assert not np.allclose(expected.probabilities, alone.probabilities)
    by_group = sort_files(
        classifier, files, tmp_path / "groups", min_probability=0, together=True, groups=[*"aabbccdd"]
    )
    shared = classifier.predict_all(files, transductive=True, groups=[*"aabbccdd"])
    assert [file.label for file in by_group.new] == shared.labels.tolist()


def test_of_equal_names_the_later_gets_a_number(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    output, file = tmp_path / "sorted", files[0]
    label = classifier.predict([file])[0]
    (output / label).mkdir(parents=True)
    (output / label / file.name).write_text("mine")
    sorted_files = sort_files(classifier, [file], output, min_probability=0).new
    assert sorted_files[0].sorted_as == output / label / f"{file.stem}-2.png"
    assert (output / label / file.name).read_text() == "mine"


def test_files_in_doubt_go_to_the_unsure_folder(files: list[Path], tmp_path: Path) -> None:
    classifier = tiny_classifier()
    sure = classifier.predict_proba(files).max(axis=1)
    limit = float(np.sort(sure)[2:4].mean())  # between two, as other batches round otherwise
    sorted_files = sort_files(classifier, files, tmp_path / "one", min_probability=limit).new
    assert [file.sorted_as.parent.name == UNSURE for file in sorted_files] == [p < limit for p in sure]

    classifier = tiny_classifier(unknown_label="none", false_rejection_rate=0.4)
    state = classifier.fitted_head_.to_state()
    median = float(np.median(classifier.outlier_score(files)))
    state["values"] = msgspec.structs.replace(state["values"], threshold=median)
    classifier._fitted = replace(classifier._fitted, fitted_head=FittedHead.from_state(state))
    expected = classifier.predict(files).tolist()
    assert expected.count("none") == 4
    for folder, min_probability in (("two", 0), ("three", 1)):  # rejected ones are in no doubt
        sorted_files = sort_files(classifier, files, tmp_path / folder, min_probability=min_probability).new
        assert [file.label for file in sorted_files] == expected
        others = {label: label if min_probability == 0 else UNSURE for label in expected} | {"none": "none"}
        assert [file.sorted_as.parent.name for file in sorted_files] == [others[label] for label in expected]
    again = sort_files(classifier, files, tmp_path / "three", min_probability=0)
    assert again.new == again.called_otherwise == []
    assert len(again.no_longer_unsure) == 4
    unsure = msgspec.structs.replace(state["values"], unknown_label=UNSURE)
    odd = tiny_classifier(unknown_label=UNSURE, false_rejection_rate=0.4)
    odd._fitted = replace(odd._fitted, fitted_head=FittedHead.from_state(state | {"values": unsure}))
    rejected = [
        file for file in sort_files(odd, files, tmp_path / "four", min_probability=0).new if file.label == UNSURE
    ]
    assert {file.sorted_as.parent.name for file in rejected} == {UNSURE}
    assert sort_files(odd, [], tmp_path / "four", min_probability=0) == NOTHING


@pytest.mark.parametrize("how", ["copy", "link"])
def test_a_second_run_adds_new_files_only_wherever_the_user_moved_the_others(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, how: Any
) -> None:
    output = tmp_path / "sorted"
    first = sort_files(classifier, files[:5], output, how=how, min_probability=0).new
    corrected = output / "another class" / "renamed.png"
    corrected.parent.mkdir()
    first[0].sorted_as.rename(corrected)
    second = sort_files(classifier, files, output, how=how, min_probability=0).new
    assert [file.path for file in second] == files[5:]
    assert not first[0].sorted_as.exists()
    assert corrected.read_bytes() == files[0].read_bytes()
    assert sort_files(classifier, files, output, how=how) == NOTHING


@pytest.mark.parametrize("folder", ["#recycle", ".Trash-1000", "@eaDir"])
def test_a_file_in_a_bin_is_not_taken_for_a_sorted_one(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, folder: str
) -> None:
    thrown_away = tmp_path / "sorted" / folder / "1.png"
    thrown_away.parent.mkdir(parents=True)
    thrown_away.write_bytes(files[0].read_bytes())
    sorted_files = sort_files(classifier, files[:2], tmp_path / "sorted").new
    assert [file.path for file in sorted_files] == files[:2]


def test_another_file_of_the_same_size_is_not_taken_for_a_sorted_one(
    classifier: SimpleCNAPSClassifier, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{number}.ppm" for number in range(2)]
    for path, pixels in zip(paths, pictures(2, 3), strict=True):
        Image.fromarray(pixels).save(path)
    assert paths[0].stat().st_size == paths[1].stat().st_size
    sort_files(classifier, paths[:1], tmp_path / "sorted")
    sorted_files = sort_files(classifier, paths, tmp_path / "sorted").new
    assert [file.path for file in sorted_files] == paths[1:]


def test_an_image_is_sorted_once_however_it_is_named(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "photos")
    output = Path("..") / "photos" / "sorted"
    given = [*files, Path("a", files[0].name), Path("..", "photos", "b", files[1].name)]
    sorted_files = sort_files(classifier, given, output, min_probability=0).new
    assert sorted(file.path.resolve() for file in sorted_files) == sorted(files)
    copies = [path for path in Path().rglob("*.png") if path.parts[0] == "sorted"]
    assert len(copies) == len(files)
    assert sort_files(classifier, [*files, *copies], output) == NOTHING


def test_sorting_a_folder_into_itself_is_refused(classifier: SimpleCNAPSClassifier, files: list[Path]) -> None:
    photos = files[0].parent.parent
    before = contents(photos)
    with pytest.raises(ValueError, match=r"sort into another folder, such as .*sorted"):
        sort_files(classifier, files, photos)
    assert contents(photos) == before
    assert sort_files(classifier, [], photos) == NOTHING


@pytest.mark.parametrize("how", ["copy", "link", "move"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_run_can_be_repeated(
    classifier: SimpleCNAPSClassifier,
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    how: Any,
) -> None:
    originals = sorted(path.read_bytes() for path in files)
    output, put, number = tmp_path / "sorted", sorting._put, 0

    def interrupted(*arguments: Any) -> None:
        nonlocal number
        number += 1
        if number == 4:
            if when == "after":
                put(*arguments)
            raise KeyboardInterrupt
        put(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sorting, "_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sort_files(classifier, files, output, how=how, min_probability=0)
    sort_files(classifier, [path for path in files if path.exists()], output, how=how, min_probability=0)
    assert sorted(contents(output).values()) == originals


@pytest.mark.parametrize("how", ["copy", "move"])
def test_an_error_while_copying_leaves_no_half_file(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(28, "No space left on device")

    links = []  # a link is not renamed but its file is copied, as it is to another disk
    for path in files:
        links.append(path.with_suffix(".link.png"))
        links[-1].symlink_to(path)
    output = tmp_path / "sorted"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(OSError, match=r"cannot write .*sorted.*\.png: No space.* Make room"):
            sort_files(classifier, links, output, how=how, min_probability=0)
    assert contents(output) == {}
    assert all(link.is_symlink() for link in links)
    assert len(sort_files(classifier, links, output, how=how, min_probability=0)[0]) == len(files)
    assert all(link.is_symlink() for link in links) == (how == "copy")
    assert all(path.is_file() for path in files)
    assert not any(path.is_symlink() for path in output.glob("*/*"))


def test_what_cannot_be_sorted_is_reported_before_anything_is_written(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "photos" / "broken.png"
    broken.write_text("hello")
    output = tmp_path / "sorted"
    with pytest.raises(ValueError, match="1 of 9 images cannot be read"):
        sort_files(classifier, [*files, broken], output)
    assert not output.exists()
    sorted_files, _, _, problems, _ = sort_files(classifier, [*files, broken], output, skip_errors=True)
    assert len(sorted_files) == 8
    assert problems.keys() == {broken}
    for labels, message in ((["a/b", "a:b"], "share the folder 'a_b'"), (["x", UNSURE], "rename the class")):
        odd = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), labels * 4)
        with pytest.raises(ValueError, match=message):
            sort_files(odd, files, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_class_names_become_folders_of_any_system(files: list[Path], tmp_path: Path) -> None:
    names = {"blue": "sky/blue", "green": "..", "red": "red?"}
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), [names[n] for n in LABELS])
    sorted_files = sort_files(classifier, files, tmp_path / "deep" / "sorted", min_probability=0).new
    assert {file.sorted_as.parent.name for file in sorted_files} == {"sky_blue", "__", "red_"}


@pytest.mark.parametrize(
    ("label", "folder"),
    [
        ("con", "con_"),
        ("NUL", "NUL_"),
        ("Com1.old", "Com1_.old"),
        ("lpt9 ", "lpt9_"),
        ("aux .jpg", "aux_ .jpg"),
        ("CONOUT$", "CONOUT$_"),
        ("com¹", "com¹_"),
        ("con_", "con_"),
        ("console", "console"),
        ("com10", "com10"),
        ("my con", "my con"),
    ],
)
def test_a_class_called_like_a_device_of_windows_gets_another_folder(
    label: str, folder: str, files: list[Path], tmp_path: Path
) -> None:
    names = {"blue": label, "green": "b", "red": "c"}
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), [names[n] for n in LABELS])
    sorted_files = sort_files(classifier, files, tmp_path / "sorted", min_probability=0).new
    assert {file.sorted_as.parent.name for file in sorted_files if file.label == label} == {folder}


def test_classes_that_another_system_would_put_into_one_folder_are_refused(files: list[Path], tmp_path: Path) -> None:
    for labels in (["con", "con_"], ["STRASSE", "straße"], ["caf\u00e9", "cafe\u0301"], ["x?", "x*"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `fit` says that they look alike
            classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), labels * 4)
        with pytest.raises(ValueError, match=r"would share the folder .*: rename the class"):
            sort_files(classifier, files, tmp_path / "sorted")
        assert not (tmp_path / "sorted").exists()


@pytest.mark.parametrize("character", ["a", "é", "猫", "🐈"])
@pytest.mark.parametrize("how", ["copy", "link", "move"])
def test_names_that_are_too_long_are_shortened_and_found_again(
    character: str, files: list[Path], tmp_path: Path, how: Any
) -> None:
    long = character * 300
    names = {"blue": long + "1", "green": long + "2", "red": character}
    classifier = SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), [names[n] for n in LABELS])
    renamed, stem = [], character * (251 // len(character.encode()))
    for file in files:  # of two folders, so that names are taken; the longest that there can be
        renamed.append(file.rename(file.with_name(stem[: -int(file.stem) - 1] + "x" * int(file.stem) + ".png")))
    originals = sorted(path.read_bytes() for path in renamed)
    sorted_files = sort_files(classifier, renamed, tmp_path / "sorted", how=how, min_probability=0).new
    by_label = {file.label: file.sorted_as.parent.name for file in sorted_files}
    assert len(set(by_label.values())) == len(by_label) == 3
    assert all(folder.startswith(character) for folder in by_label.values())
    assert sorted(file.sorted_as.read_bytes() for file in sorted_files) == originals
    assert {file.sorted_as.suffix for file in sorted_files} == {".png"}
    if how != "move":
        assert sort_files(classifier, renamed, tmp_path / "sorted", how=how, min_probability=0) == NOTHING


def test_side_files_move_with_their_pictures(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    photos, output = tmp_path / "photos" / "a", tmp_path / "sorted"
    (photos / "1.JPEG").write_bytes(files[2].read_bytes())  # called like 1.png, and first
    names = {
        "0.xmp": "0.png",  # darktable, Lightroom
        "0.png.xmp": "0.png",
        "0.png.supplemental-metadata.json": "0.png",
        "0.AAE": "0.png",
        "1.THM": "1.JPEG",
        "1.png.json": "1.png",
        "2.CR2": "2.png",
        "2.txt": "2.png",
    }
    for name in names:
        (photos / name).write_text(name)
    for name in ("00.xmp", "0_edited.xmp", "notes.txt", ".DS_Store", "3"):  # of no picture here
        (photos / name).write_text(name)
    (photos / "3.d").mkdir()
    pictures_of_a = [photos / name for name in ("0.png", "1.JPEG", "1.png", "2.png", "3.png")]
    for how in ("copy", "link"):
        done = sort_files(classifier, pictures_of_a, tmp_path / how, how=how, min_probability=0)  # type: ignore[arg-type]
        assert done.went_along == []
        assert {path.name for path in (tmp_path / how).rglob("*.*")} == {path.name for path in pictures_of_a}
    label = str(classifier.predict(pictures_of_a[:1])[0])
    (output / label).mkdir(parents=True)
    (output / label / "0.AAE").write_text("of another 0")  # so the picture and all of its side files get a number
    done = sort_files(classifier, pictures_of_a, output, how="move", min_probability=1)
    assert sorted(path.name for path in done.went_along) == sorted(names)
    assert {path.name for path in photos.iterdir()} == {"00.xmp", "0_edited.xmp", "notes.txt", ".DS_Store", "3", "3.d"}
    for name, picture in names.items():
        assert (output / UNSURE / name).read_text() == name
        assert (output / UNSURE / picture).exists()
    again = sort_files(classifier, [], output, min_probability=0)
    places = {file.path.name: file.sorted_as for file in again.no_longer_unsure}
    assert places["0.png"] == output / label / "0-2.png"
    for name, picture in names.items():
        moved = places[picture].with_name(places[picture].stem + name.removeprefix(Path(picture).stem))
        assert moved.read_text() == name
    assert (output / label / "0.AAE").read_text() == "of another 0"
    assert list((output / UNSURE).iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
@pytest.mark.parametrize("mode", [0o600, 0o444, 0o755])
def test_a_copy_has_the_mode_of_its_picture(
    mode: int, classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    files[0].chmod(mode)
    [file] = sort_files(classifier, files[:1], tmp_path / "sorted").new
    assert stat.S_IMODE(file.sorted_as.stat().st_mode) == mode


def reversed_classifier() -> SimpleCNAPSClassifier:
    """Fitted to the same pictures, but blue is called red, and red blue."""
    other = {"blue": "red", "red": "blue", "green": "green"}
    return SimpleCNAPSClassifier(tiny_model(), device="cpu").fit(pictures(8, 1), [other[name] for name in LABELS])


@pytest.mark.parametrize("how", ["copy", "link", "move"])
@pytest.mark.parametrize("given_again", [True, False])
def test_what_was_unsure_goes_to_its_class_once_a_model_is_sure(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, how: Any, given_again: bool
) -> None:
    output, originals = tmp_path / "sorted", sorted(path.read_bytes() for path in files)
    first = sort_files(classifier, files, output, how=how, min_probability=1)
    assert {file.sorted_as.parent for file in first.new} == {output / UNSURE}
    assert sort_files(classifier, [], output, how=how, min_probability=1) == NOTHING
    paths = files if given_again and how != "move" else list((output / UNSURE).iterdir()) if given_again else []
    again = sort_files(classifier, paths, output, how=how, min_probability=0)
    assert again.new == again.called_otherwise == []
    assert sorted(file.path for file in again.no_longer_unsure) == sorted(file.sorted_as for file in first.new)
    for file in again.no_longer_unsure:
        assert file.sorted_as.parent == output / file.label
        assert file.sorted_as.is_symlink() == (how == "link")
    assert sorted(file.sorted_as.read_bytes() for file in again.no_longer_unsure) == originals
    assert list((output / UNSURE).iterdir()) == []


def test_sorted_files_that_a_model_calls_otherwise_are_listed_and_stay(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "sorted"
    first = sort_files(classifier, files, output, min_probability=0)
    own = first.new[0].sorted_as.rename(output / "my own.png")
    (output / "mine").mkdir()
    own = own.rename(output / "mine" / "0.png")  # no class of the model, which cannot judge it
    before, better = contents(output), reversed_classifier()
    again = sort_files(better, files, output, min_probability=0)
    assert again.new == again.no_longer_unsure == []
    assert contents(output) == before
    labels = dict(zip(files, better.predict(files).tolist(), strict=True))
    expected = [file for file in first.new[1:] if labels[file.path] != file.label]
    assert 0 < len(expected) < len(files)
    assert [(file.path, file.sorted_as) for file in again.called_otherwise] == [
        (file.path, file.sorted_as) for file in expected
    ]
    assert [file.label for file in again.called_otherwise] == [labels[file.path] for file in expected]
    assert sort_files(better, files, output, min_probability=1) == NOTHING  # it is not sure enough


def rejecting_classifier(unknown_label: str = "unknown") -> SimpleCNAPSClassifier:
    """Of red and green patches."""
    classifier = SimpleCNAPSClassifier(
        tiny_model(), device="cpu", unknown_label=unknown_label, false_rejection_rate=0.2
    )
    return classifier.fit(drawn(["red", "green"] * 4, 1), ["red", "green"] * 4)


def patches(folder: Path, seed: int) -> list[Path]:
    """Four blue patches, two red ones and one that is like no other."""
    folder.mkdir()
    images = [*drawn(["blue"] * 4 + ["red"] * 2, seed), np.full((24, 24, 3), 255 * (seed % 2), np.uint8)]
    for index, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{seed}-{index}.png")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("how", ["copy", "link", "move"])
@pytest.mark.parametrize("unknown_label", ["unknown", UNSURE])
def test_proposed_classes_are_sub_folders_of_that_of_no_class(tmp_path: Path, how: Any, unknown_label: str) -> None:
    classifier, output = rejecting_classifier(unknown_label), tmp_path / "sorted"
    paths = patches(tmp_path / "a", 2)
    expected = classifier.propose_classes(paths).tolist()
    assert expected[:4] == [0] * 4
    assert expected[4:] == [-1] * 3
    first = sort_files(classifier, paths, output, how=how, min_probability=0, propose=True)
    of_none = output / unknown_label
    assert [file.sorted_as.parent for file in first.new] == [of_none / "new-1"] * 4 + [output / "red"] * 2 + [of_none]
    assert {file.label for file in first.new} == {unknown_label, "red"}
    if how != "move":
        again = sort_files(classifier, paths, output, how=how, min_probability=0, propose=True)
        assert again.new == again.called_otherwise == again.no_longer_unsure == []
    (of_none / "new-1").rename(of_none / "okapi")  # whoever has named it need not fear that it fills up again
    (of_none / "new-7").mkdir()
    later = sort_files(classifier, patches(tmp_path / "b", 3), output, how=how, min_probability=0, propose=True)
    assert {file.sorted_as.parent for file in later.new if file.path.stem < "3-4"} == {of_none / "new-8"}
    assert len([*(of_none / "okapi").iterdir()]) == 4


def test_a_classifier_that_rejects_nothing_sorts_no_proposed_classes(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="this classifier rejects none: set unknown_label"):
        sort_files(classifier, files, tmp_path / "sorted", propose=True)
    assert not (tmp_path / "sorted").exists()
