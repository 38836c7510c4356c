"""Labels as people have them: spellings that look alike, large whole numbers, types that NumPy would change."""

from __future__ import annotations

import re
import unicodedata
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier, load_folder
from fewshot_mahalanobis.images.folders import read_labels
from fewshot_mahalanobis.support_set.labels import check_text, checked_labels, warn_of_similar_labels
from tests.tiny import pictures, tiny_classifier, tiny_model

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
ALIKE = [("cat", "Cat"), ("cat", "cat "), ("two words", "two\u00a0words"), ("cat", "\uff43at"), (COMPOSED, DECOMPOSED)]


def features(*labels: Any) -> tuple[np.ndarray, list[Any]]:
    """Two rows a label, far from those of other labels."""
    rows = np.random.default_rng(0).normal(size=(2 * len(labels), 4))
    return rows + 20 * np.repeat(np.arange(len(labels)), 2)[:, None], [label for label in labels for _ in range(2)]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_labels_that_look_alike_are_named_in_one_warning(one: str, other: str) -> None:
    shown = [(ascii if one == COMPOSED else repr)(label) for label in sorted([one, other])]
    X, y = features(one, "dog", other)
    with pytest.warns(UserWarning, match="look alike") as caught:
        classifier = MahalanobisClassifier().fit(X, y)
    (warning,) = [w for w in caught if "look alike" in str(w.message)]
    assert all(name in str(warning.message) for name in shown)
    assert "dog" not in str(warning.message)
    assert warning.filename == __file__
    assert len(classifier.classes_) == 3
    with pytest.warns(UserWarning, match="look alike"):
        MahalanobisClassifier(unknown_label=other).fit(*features(one, "dog"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier = MahalanobisClassifier().fit(*features(one, "dog"))
    with pytest.warns(UserWarning, match="look alike"):
        classifier.partial_fit(*features(other))


def said_of(labels: list[Any], counts: list[int] | None = None) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_similar_labels(labels, counts or [])
    return " ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("007", "7"),
        ("1,0", "1"),
        ("1E5", "1.00E+05"),
        ("7.61E+12", "7612345678901"),
        ("8.0E+12", "7999999999999"),  # rounded up
        ("1234567890123450", "1234567890123456"),  # a spreadsheet keeps 15 digits
        ("Ã©mu", "ému"),  # UTF-8 read as Windows-1252, as Mac OS Roman, and twice
        ("√©mu", "ému"),
        ("ÃƒÂ©mu", "ému"),
        ("Ã\x81guila", "Águila"),  # with a byte that Windows-1252 leaves open
        ("itâ€™s", "it's"),  # the curly apostrophe at that
        ("caf\ufffd", "café"),
        ("?pfel", "Äpfel"),
        ("cat\u200b", "cat"),
        ("\ufeffcat", "cat"),
        ("soft\u00adware", "software"),
        ("“big” one", '"big" one'),
        ("A\u20131", "A-1"),
    ],
)
def test_labels_that_a_spreadsheet_or_an_encoding_changed_look_alike(one: str, other: str) -> None:
    for labels in ([one, "dog", other], [other, "dog", one]):
        said = said_of(labels)
        assert "look alike" in said
        assert "dog" not in said


@pytest.mark.parametrize(
    "labels",
    [
        ["1", "2", "10", "100"],
        ["1,000", "1"],  # or 1000
        ["-1", "1"],
        ["A1", "A01"],  # wells of a plate
        ["v1.0", "v1"],
        ["1e5", "123456"],  # no spreadsheet shortens so short a number
        ["?", "猫", "犬"],
        ["Apfel", "Äpfel"],
        ["nan", "inf"],
        ["Ã", "é"],
    ],
)
def test_other_labels_do_not_look_alike(labels: list[str]) -> None:
    assert said_of(labels) == ""


def test_a_shortened_number_is_named_even_alone() -> None:
    assert "shortened '7.61E+12': long numbers that begin alike become one label" in said_of(["7.61E+12", "cat"])
    assert said_of(["7.61E+2", "1E5"]) == ""


@pytest.mark.parametrize(
    ("rare", "common"),
    [
        ("pygmy_marmosset", "pygmy_marmoset"),
        ("Sunflwer", "sunflower"),
        ("dandeloin", "dandelion"),
        ("red admirall", "red admiral"),
        ("golden retriewer 2", "golden retriever 2"),
        ("flowers", "flower"),
    ],
)
def test_a_rare_label_one_slip_away_from_a_common_one_is_named(rare: str, common: str) -> None:
    assert f"{rare!r}: did you mean {common!r}?" in said_of(["dog", rare, common], [5, 1, 4])
    assert said_of(["dog", rare, common], [5, 2, 5]) == ""  # not so rare
    assert said_of(["dog", common, rare], [5, 4, 0]) == ""  # named to partial_fit, without examples
    X, _ = features(rare, common)
    with pytest.warns(UserWarning, match=f"did you mean '{common}'"):
        MahalanobisClassifier().fit(X[[0, 2, 3, 2, 3]], [rare, *[common] * 4])


@pytest.mark.parametrize(
    ("rare", "common"),
    [
        ("class_a", "class_b"),
        ("cat", "car"),
        ("male", "female"),
        ("type1", "type2"),
        ("sunflower 1", "sunflower 11"),
        ("typical", "atypical"),
        ("nitrite", "nitrate"),
        ("woman", "women"),
        ("left hand", "left hands up"),
        ("category_aa", "category_ab"),
        ("inactive", "active"),
    ],
)
def test_short_names_numbers_and_other_words_are_no_slips(rare: str, common: str) -> None:
    assert said_of([rare, common], [1, 50]) == ""
    assert said_of([common, rare], [1, 50]) == ""


def test_images_get_the_same_warning() -> None:
    with pytest.warns(UserWarning, match="'Red' and 'red'"):
        SimpleCNAPSClassifier(tiny_model()).fit(pictures(4, 0), ["red", "blue", "Red", "blue"])
    with pytest.warns(UserWarning, match="'Red' and 'red'"):
        tiny_classifier().partial_fit(pictures(1, 0), ["Red"])


def test_folders_and_tables_give_composed_labels(tmp_path: Path) -> None:
    for folder in (COMPOSED, DECOMPOSED, "tea"):
        (tmp_path / folder).mkdir()
        Image.fromarray(pictures(1, 0)[0]).save(tmp_path / folder / "1.png")
    assert sorted(load_folder(tmp_path)[1]) == [COMPOSED, COMPOSED, "tea"]
    table = tmp_path / "labels.csv"
    table.write_text(f"path,label\ntea/1.png,{DECOMPOSED}\ntea/1.png,{COMPOSED}\n", encoding="utf-8")
    assert read_labels(table).labels == [COMPOSED, COMPOSED]


LARGE = 2**53


def fitted_to_images(y: Any) -> Any:
    return SimpleCNAPSClassifier(tiny_model()).fit(pictures(len(y), 0), y)


def fitted_to_features(y: Any) -> Any:
    return MahalanobisClassifier().fit(np.random.default_rng(0).normal(size=(len(y), 3)), y)


@pytest.mark.parametrize("fitted", [fitted_to_images, fitted_to_features])
def test_whole_numbers_stay_whole(fitted: Any) -> None:
    mixed = [np.uint64(LARGE), LARGE + 1, np.int64(3), 3]  # np.asarray makes float64 of these, and two classes of three
    assert fitted(mixed).classes_.tolist() == [3, LARGE, LARGE + 1]
    assert fitted([2**63, 5, 2**63, 5]).classes_.tolist() == [5, 2**63]
    with pytest.raises(ValueError, match="no integer type holds the labels -1 and 9223372036854775808"):
        fitted([2**63, -1])


def test_whole_numbers_stay_whole_in_partial_fit(tmp_path: Path) -> None:
    signed, unsigned = np.array([LARGE, LARGE + 2]), np.array([LARGE + 1, LARGE + 3], np.uint64)
    expected = [LARGE, LARGE + 1, LARGE + 2, LARGE + 3]
    images = pictures(4, 0)
    classifier = SimpleCNAPSClassifier(tiny_model()).fit(images[:2], signed).partial_fit(images[2:], unsigned)
    assert classifier.classes_.tolist() == expected
    assert sorted(classifier.predict(images).tolist()) == expected
    classifier.save(tmp_path / "classifier.safetensors")
    X = np.eye(4)
    other = MahalanobisClassifier(head="euclidean").fit(X[:2], signed).partial_fit(X[2:], unsigned)
    assert other.classes_.tolist() == expected
    assert other.predict(X).tolist() == [LARGE, LARGE + 2, LARGE + 1, LARGE + 3]
    named = MahalanobisClassifier().partial_fit(X[:2], signed, classes=signed)
    with pytest.raises(ValueError, match=f"label {LARGE + 1} is not among"):
        named.partial_fit(X[2:], unsigned)


def test_fractions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"y\[0\] is Fraction\(1, 1\)"):
        fitted_to_images([Fraction(1), Fraction(2)])


@pytest.mark.skipif(not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="NumPy 1")
def test_numpys_own_strings_serve_everywhere(tmp_path: Path) -> None:
    images, y = pictures(4, 0), np.array(["a", "b", "a", "b"], dtype=np.dtypes.StringDType())
    X = images.reshape(4, -1)[:, :5].astype(float)
    for classifier, queries in ((SimpleCNAPSClassifier(tiny_model()), images), (MahalanobisClassifier(), X)):
        classifier.fit(queries, y).partial_fit(queries, y)
        assert classifier.score(queries, y) == classifier.score(queries, y.tolist())
        assert classifier.predict(queries).dtype.kind == "U"


@pytest.mark.parametrize("name", ["caf\udce9", "\udcff", "a\udce4b"])
def test_a_name_in_latin_1_is_named_before_a_page_is_made(name):
    shown = re.escape(repr(name.encode("utf-8", "backslashreplace").decode()))
    with pytest.raises(ValueError, match=f"the class {shown} has a name that is not valid UTF-8: rename its folder"):
        check_text(["tea", name])
    check_text(["café", "猫", "🐈", 3, True])


@pytest.mark.parametrize("long", [b"x" * 10**6, {"bytes": b"x" * 10**6}, "y" * 10**6])
def test_a_message_does_not_quote_a_whole_encoded_picture(long: Any) -> None:
    labels = np.array([1, long, 2], dtype=object)
    with pytest.raises(ValueError, match=r"^y\[1\] is ") as caught:
        checked_labels(labels, 3)
    assert len(str(caught.value)) < 1000
