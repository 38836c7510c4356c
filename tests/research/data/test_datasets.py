"""The named data sets, read from small folders of their real layouts, and from the project's data where it is."""

import io
import json
import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewshot_mahalanobis.research.data import datasets
from fewshot_mahalanobis.research.data.check import check_data, report
from fewshot_mahalanobis.research.data.datasets import DATA_SETS, download, open_source
from fewshot_mahalanobis.research.data.layouts import class_split, coco_box
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.episodes.meta_dataset import EpisodeLimits, VariableEpisodes
from tests.image_sets import DATA, is_set, needs_data
from tests.research.data.trees import BUILDERS, PER_CLASS, class_folders, colour, save


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the test split of every data set."""
    pytest.importorskip("torchvision")
    folder = tmp_path_factory.mktemp("data")
    for build in BUILDERS.values():
        build(folder)
    return folder


@pytest.fixture
def any_digest(monkeypatch):
    """torchvision reads the CIFAR files of any content."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)


def opened(name, root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that classes or ImageNet's hierarchy are missing is tested by itself
        return open_source(name, root=root, size=4)


def test_there_are_the_thirteen_data_sets_of_the_paper_and_two_more():
    assert set(DATA_SETS) == set(BUILDERS)
    assert len(DATA_SETS) == 15


@pytest.mark.parametrize("name", [n for n in DATA_SETS if n not in ("omniglot", "quickdraw", "mnist")])
def test_the_real_layout_gives_every_class_and_image_of_the_split(root, any_digest, name):
    source = opened(f"{name}:test", root)
    assert source.name == f"{name}/test"
    assert list(source.class_names) == sorted(source.class_names)
    assert len(source.class_names) == DATA_SETS[name].splits["test"][0]
    assert np.bincount(source.labels).tolist() == [PER_CLASS] * len(source.class_names)
    listed = class_split(name)["test"] if (Path(datasets.__file__).parent / "splits" / f"{name}.json").exists() else ()
    order = list(listed) if listed else list(source.class_names)
    assert sorted(order) == list(source.class_names)
    pixels = source.in_memory().images
    assert pixels.shape == (len(source.labels), 4, 4, 3)
    expected = [colour(order.index(name), i) for name in source.class_names for i in range(PER_CLASS)]
    assert (pixels == np.array(expected, np.uint8)[:, None, None]).all()


@pytest.mark.parametrize("name", ["quickdraw", "mnist"])
def test_bitmaps_are_read_as_they_are_light_on_dark(root, name):
    source = opened(f"{name}:test", root)
    order = list(class_split(name)["test"]) if name == "quickdraw" else [str(digit) for digit in range(10)]
    assert list(source.class_names) == sorted(order)
    levels = [sum(colour(order.index(name), i)[:2]) for name in source.class_names for i in range(PER_CLASS)]
    assert (source.images[:] == np.array(levels, np.uint8)[:, None, None, None]).all()


def test_omniglot_is_inverted_and_its_classes_are_characters_of_alphabets(root):
    with pytest.warns(UserWarning, match=r"omniglot:test: .* 40 of its 659 classes"):
        source = open_source("omniglot:test", root=root, size=4)
    alphabets = class_split("omniglot")["test"]
    written = [f"{alphabet}.{character}" for alphabet in alphabets for character in ("character01", "character02")]
    assert list(source.class_names) == sorted(written)
    expected = [colour(written.index(name), i) for name in source.class_names for i in range(PER_CLASS)]
    assert (source.images[:] == np.array(expected, np.uint8)[:, None, None]).all()
    assert source.hierarchy is not None
    assert sorted(map(len, source.hierarchy.groups)) == [2] * len(alphabets)
    episode = VariableEpisodes(source, EpisodeLimits(min_way=2)).draw(0)
    drawn = {source.class_names[k].rpartition(".")[0] for k in source.labels[episode.support]}
    assert len(drawn) == 1


def test_a_box_of_an_object_is_enlarged_by_a_fifth_and_stays_in_the_picture():
    def naive(box, width, height):
        """Every pixel whose centre, at whole coordinates, lies within half a pixel of the enlarged box."""
        x, y, w, h = box
        left, right = x + w / 2 - 0.6 * w, x + w / 2 + 0.6 * w
        top, bottom = y + h / 2 - 0.6 * h, y + h / 2 + 0.6 * h
        columns = [c for c in range(width) if left - 1 < c < right + 1]
        rows = [r for r in range(height) if top - 1 < r < bottom + 1]
        return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1

    rng = np.random.default_rng(0)
    for _ in range(200):
        x, y = rng.uniform(0, 80, 2)
        w, h = rng.uniform(1, 60, 2)
        box = coco_box([x, y, w, h], 100, 90)
        assert np.abs(np.subtract(box, naive([x, y, w, h], 100, 90))).max() <= 1
        assert 0 <= box[0] < box[2] <= 100
        assert 0 <= box[1] < box[3] <= 90
    assert coco_box([10, 10, 20, 20], 100, 100) == (8, 8, 33, 33)
    assert coco_box([0, 0, 100, 100], 100, 100) == (0, 0, 100, 100)


# ImageNet ----------------------------------------------------------------------------------------------------


def test_imagenet_follows_wordnet_where_it_is_given_and_warns_where_not(root, tmp_path):
    with pytest.warns(UserWarning, match=r"without .*wordnet\.is_a\.txt .* https://www\.image-net\.org"):
        assert open_source("ilsvrc_2012:test", root=root).hierarchy is None
    build_imagenet(tmp_path)
    source = open_source("ilsvrc_2012:test", root=tmp_path, size=4)
    assert source.hierarchy is not None
    groups = [{source.class_names[k] for k in group} for group in source.hierarchy.groups]
    devices = class_split("ilsvrc_2012")["test"]
    assert groups == [set(devices[:60]), set(devices[60:]), set(devices)]
    ways = {VariableEpisodes(source).draw(index).way for index in range(5)}
    assert ways == {50}


def build_imagenet(root):
    """Test classes, devices all, below two kinds of device, of which one is reached by a detour."""
    BUILDERS["ilsvrc_2012"](root)
    devices = class_split("ilsvrc_2012")["test"]
    lines = [f"n00000001 {name}" for names in class_split("ilsvrc_2012").values() for name in names if name[1] == "0"]
    lines += ["n00000001 n03183080", "n03183080 n00000010", "n03183080 n00000020", "n00000020 n00000030"]
    lines += [f"n00000010 {name}" for name in devices[:60]] + [f"n00000030 {name}" for name in devices[60:]]
    (root / "ILSVRC2012_img_train" / "wordnet.is_a.txt").write_text("\n".join(lines) + "\n")


def test_imagenet_leaves_out_listed_duplicates(tmp_path):
    BUILDERS["ilsvrc_2012"](tmp_path)
    folder = tmp_path / "ILSVRC2012_img_train"
    name = class_split("ilsvrc_2012")["test"][0]
    (folder / "ImageNet_CUBirds_duplicates.txt").write_text(f"# a list\n{name}/{name}_1.JPEG  # Bird_7.jpg\n")
    source = opened("ilsvrc_2012:test", tmp_path)
    counts = dict(zip(source.class_names, np.bincount(source.labels).tolist(), strict=True))
    assert counts.pop(name) == PER_CLASS - 1
    assert set(counts.values()) == {PER_CLASS}


# The forms of mini- and tieredImageNet ---------------------------------------------------------------------


def test_mini_imagenet_is_read_from_the_lists_of_its_authors(tmp_path):
    rows = ["filename,label"]
    for k in range(16):
        for i in range(PER_CLASS):
            save(tmp_path / "mini-imagenet" / "images" / f"n{k:08d}0000000{i}.jpg", colour(k, i))
            rows.append(f"n{k:08d}0000000{i}.jpg,n{k:08d}")
    (tmp_path / "mini-imagenet" / "val.csv").write_text("\n".join(rows) + "\n")
    check_colours(open_source("mini_imagenet:valid", root=tmp_path, size=4), 16)


def test_mini_imagenet_is_read_from_pickled_arrays(tmp_path):
    folder = tmp_path / "mini_imagenet"
    folder.mkdir()
    pixels = np.array([np.full((4, 4, 3), colour(k, i)) for i in range(PER_CLASS) for k in range(20)], np.uint8)
    rows = {f"n{k:08d}": [k, k + 20] for k in range(20)}
    with (folder / "mini-imagenet-cache-test.pkl").open("wb") as file:
        pickle.dump({"image_data": pixels, "class_dict": rows}, file, protocol=2)
    check_colours(open_source("mini_imagenet:test", root=tmp_path, size=4), 20)


def test_tiered_imagenet_is_read_from_pickled_png(tmp_path):
    folder = tmp_path / "tiered_imagenet"
    folder.mkdir()
    encoded = []
    for k in range(97):
        for i in range(PER_CLASS):
            buffer = io.BytesIO()
            Image.new("RGB", (4, 4), colour(k, i)).save(buffer, format="PNG")
            encoded.append(np.frombuffer(buffer.getvalue(), np.uint8)[:, None])
    labels = {
        "label_specific": np.repeat(np.arange(97), PER_CLASS),
        "label_specific_str": [f"n{k:08d}" for k in range(97)],
    }
    for name, content in (("images_png", encoded), ("labels", labels)):
        with (folder / f"val_{name}.pkl").open("wb") as file:
            pickle.dump(content, file, protocol=2)
    check_colours(open_source("tiered_imagenet:valid", root=tmp_path, size=4), 97)


def check_colours(source, classes):
    assert len(source.class_names) == classes
    expected = [colour(k, i) for k in range(classes) for i in range(PER_CLASS)]
    assert (source.images[:] == np.array(expected, np.uint8)[:, None, None]).all()


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "mini_imagenet"
    folder.mkdir()
    (folder / "mini-imagenet-cache-test.pkl").write_bytes(pickle.dumps({"image_data": Attack()}))
    with pytest.raises(ValueError, match=r"mini-imagenet-cache-test\.pkl: it holds \w+\.mkdir"):
        open_source("mini_imagenet:test", root=tmp_path)
    assert not (tmp_path / "ran").exists()


# Splits, downloads, errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in DATA_SETS if "imagenet" not in n and n not in datasets.TEST_ONLY])
def test_no_class_is_in_two_splits_and_their_numbers_are_meta_datasets(name):
    splits = class_split(name)
    everything = [class_name for names in splits.values() for class_name in names]
    assert len(set(everything)) == len(everything)
    if name == "omniglot":
        assert [len(splits[split]) for split in ("train", "valid", "test")] == [25, 5, 20]
    else:
        assert {s: len(names) for s, names in splits.items() if names} == {
            s: classes for s, (classes, _) in DATA_SETS[name].splits.items()
        }


def test_torchvision_reads_the_same_folders(root):
    from torchvision.datasets import DTD, FGVCAircraft

    assert len(DTD(root, split="test")) == len(opened("dtd:test", root).labels)
    torchvision = FGVCAircraft(root, split="trainval")
    assert len(torchvision) == 1 + len(opened("aircraft:test", root).labels) // 2


@pytest.mark.parametrize("name", [n for n, data_set in DATA_SETS.items() if data_set.torchvision])
def test_a_download_goes_to_where_the_data_set_is_looked_for(tmp_path, monkeypatch, name):
    import torchvision.datasets as original

    calls = []

    def recorder(root, download=False, **options):
        if not download and not Path(root, "made").exists():
            raise RuntimeError("Dataset not found")
        calls.append((download, options))
        Path(root, "made").mkdir(exist_ok=True)

    assert isinstance(getattr(original, DATA_SETS[name].torchvision), type)
    monkeypatch.setattr(original, DATA_SETS[name].torchvision, recorder)
    for downloads in (True, False):  # a second time there is nothing to do
        calls.clear()
        download(name, tmp_path / "new root")
        assert {is_download for is_download, _ in calls} == {downloads}
        assert [path.name for path in (tmp_path / "new root").iterdir()] == ["made"]
    expected = {"omniglot": [{"background": True}, {"background": False}], "mnist": [{"train": False}]}
    expected |= {"cifar10": [{"train": False}], "cifar100": [{"train": False}]}
    assert [options for _, options in calls] == expected.get(name, [{}])


def test_what_cannot_be_downloaded_is_an_error_that_says_where_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"does not download Birds\. Unpack CUB_200_2011\.tgz"):
        download("cu_birds", tmp_path)
    with pytest.raises(ValueError, match="no data set 'cats'; there are ilsvrc_2012, omniglot"):
        download("cats", tmp_path)


def test_errors_name_the_data_set_the_split_and_the_remedy(root, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no Birds below .* CUB_200_2011/, cu_birds/\)\. Unpack CUB_200"):
        open_source("cu_birds:test", root=tmp_path)
    with pytest.raises(ValueError, match=r"mscoco has valid and test, not 'train': write mscoco:<split>"):
        open_source("mscoco:train", root=root)
    with pytest.raises(ValueError, match=r"dtd:train: .* holds images of 0 of its 33 classes"):
        open_source("dtd:train", root=root)
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"no batch")
    with pytest.raises(ValueError, match=r"CIFAR10 in .* is incomplete or damaged"):
        open_source("cifar10:test", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="no image source at 'omniglot'"):
        open_source("omniglot:test")  # a path, since there is no root


def test_a_path_opens_lazily_what_load_source_decodes(tmp_path):
    class_folders(tmp_path / "cats", ["a", "b", "c"], "{i}.png")
    source, decoded = open_source(str(tmp_path / "cats"), size=5), load_source(tmp_path / "cats", size=5)
    assert source.class_names == decoded.class_names
    assert not isinstance(source.images, np.ndarray)
    assert np.array_equal(source.in_memory().images, decoded.images)


# data check ---------------------------------------------------------------------------------------------------


def test_check_counts_classes_and_images_and_says_what_is_missing(root, any_digest):
    found = {item.name: item for item in check_data(root)}
    assert set(DATA_SETS) <= set(found)
    for name, data_set in DATA_SETS.items():
        classes = 40 if name == "omniglot" else data_set.splits["test"][0]
        assert found[name].splits["test"] == (classes, PER_CLASS * classes)
        assert found[name].expected == data_set.splits
    assert found["dtd"].splits["train"] == (0, 0)
    text = report(list(found.values()))
    assert "- DTD: train: 33 of 33 classes are missing: blotchy, braided, bubbly, … (33 in all). Run" in text
    assert "- DTD: test: 14 images where 840 are expected; is it unpacked completely?" in text
    assert "- ILSVRC-2012: no wordnet.is_a.txt" in text
    assert "- ILSVRC-2012: no ImageNet_*_duplicates.txt" in text
    assert any(line.split()[:6] == ["dtd:train", "0", "of", "33", "0", "of"] for line in text.splitlines())


def test_check_names_files_that_are_listed_but_absent_and_files_that_cannot_be_read(tmp_path):
    BUILDERS["aircraft"](tmp_path)
    (tmp_path / "fgvc-aircraft-2013b" / "data" / "images" / "0000301.jpg").unlink()
    BUILDERS["fungi"](tmp_path)
    (tmp_path / "fungi" / "val.json").write_text("{")
    text = report(check_data(tmp_path))
    assert "test: 1 image files are not in" in text
    assert "data/images/0000301.jpg" in text
    assert "- Fungi: test cannot be read: JSONDecodeError" in text
    assert "- Birds: Unpack CUB_200_2011.tgz" in text.partition("Missing")[2]


def test_check_lists_other_folders_and_zips_of_class_folders(tmp_path):
    class_folders(tmp_path / "cats" / "train", ["a", "b"], "{i}.png")
    class_folders(tmp_path / "cats" / "test", ["c", "d", "e"], "{i}.png")
    class_folders(tmp_path / "dogs", ["a", "b"], "{i}.png")
    (tmp_path / "notes").mkdir()
    (tmp_path / "torn.zip").write_bytes(b"PK")
    found = {item.name: item for item in check_data(tmp_path) if item.name not in DATA_SETS}
    assert found.keys() == {"cats", "dogs", "torn.zip"}
    assert found["cats"].splits == {"test": (3, 6), "train": (2, 4)}
    assert found["dogs"].splits == {"": (2, 4)}
    text = report(list(found.values()))
    assert "cats:train" in text
    assert "torn.zip is neither a folder nor a zip" in text
    with pytest.raises(NotADirectoryError, match="nowhere"):
        check_data(tmp_path / "nowhere")


def test_check_lists_nothing_that_cannot_be_opened_with_its_root(tmp_path, monkeypatch):
    BUILDERS["cu_birds"](tmp_path)
    class_folders(tmp_path / "cats" / "train", ["a", "b"], "{i}.png")
    class_folders(tmp_path / "cats" / "test", ["c"], "{i}.png")
    class_folders(tmp_path / "cats", ["loose", "more"], "{i}.png")
    class_folders(tmp_path / "dtd", ["a", "b"], "{i}.png")  # not as DTD is given out
    class_folders(tmp_path / "a:b" / "train", ["a", "b"], "{i}.png")
    class_folders(tmp_path / "one", ["a"], "{i}.png")
    class_folders(tmp_path / "nested", ["a", "b", "b/more"], "{i}.png")
    class_folders(tmp_path / "@eaDir", ["a", "b"], "{i}.png")
    class_folders(tmp_path / "cats" / "train" / ".git", ["a"], "{i}.png")
    with zipfile.ZipFile(tmp_path / "dogs.zip", "w") as archive:
        for name in ("val/a", "val/b", "__MACOSX/val/a", "val/#recycle", ".hidden/c"):
            archive.writestr(f"{name}/1.png", (tmp_path / "one" / "a" / "0.png").read_bytes())
    monkeypatch.chdir("/")
    found = check_data(tmp_path)
    sources = {
        f"{item.name}:{split}" if split else item.name: classes
        for item in found
        for split, (classes, _) in item.splits.items()
        if classes
    }
    own = {"cats:train": 2, "./dtd": 2, "a:b:train": 2, "nested": 3, "dogs.zip:val": 2}
    assert sources == own | {"cu_birds:test": 30}
    assert {source: len(open_source(source, root=tmp_path).class_names) for source in own} == own
    text = report(found)
    for remark in (
        "split 'test' of .*cats has 1 class folders with images",
        r"4 images of .*cats are in none of its splits \['test', 'train'\]",
        "cats: Left out: 1 .git folder.",
        r"dogs.zip: Left out: 1 #recycle folder, 1 .hidden folder, 1 __MACOSX folder\.",
        "one: .*has 1 class folders with images",
        rf"{tmp_path}: Left out: 1 @eaDir folder\.",
    ):
        assert re.search(f"- .*{remark}", text), remark


def test_a_source_below_the_root_is_found_and_any_other_path_too(tmp_path, monkeypatch):
    class_folders(tmp_path / "data" / "cats", ["a", "b"], "{i}.png")
    class_folders(tmp_path / "dogs" / "train", ["c", "d"], "{i}.png")
    monkeypatch.chdir(tmp_path)
    assert open_source("cats", root="data").class_names == ("a", "b")
    assert open_source("dogs:train", root="data").class_names == ("c", "d")
    assert open_source(str(tmp_path / "dogs:train"), root="data").class_names == ("c", "d")
    with pytest.raises(FileNotFoundError, match="'birds'"):
        open_source("birds", root="data")


@pytest.mark.parametrize("folder", [".git", "@eaDir", "$RECYCLE.BIN", "#recycle"])
def test_folders_that_are_no_classes_are_no_classes_of_named_data_sets(tmp_path, folder):
    BUILDERS["mini_imagenet"](tmp_path)
    BUILDERS["omniglot"](tmp_path)
    alphabet = tmp_path / "omniglot" / "images_evaluation" / class_split("omniglot")["test"][0]
    for place in (tmp_path / "mini_imagenet" / "test", alphabet):
        save(place / folder / "1.png", (0, 0, 0))
    for source, classes in (("mini_imagenet:test", 20), ("omniglot:test", 40)):
        with pytest.warns(UserWarning, match=rf"Left out: 1 {re.escape(folder)} folder"):
            assert len(open_source(source, root=tmp_path).class_names) == classes


# The project's data ------------------------------------------------------------------------------------------


@needs_data
def test_check_finds_the_projects_image_sets():
    found = {item.name: item for item in check_data(DATA)}
    assert found["mini_imagenet"].splits == {"train": (64, 38_400), "valid": (16, 1_600), "test": (20, 12_000)}
    assert found["omniglot.zip"].splits == {"train": (883, 17_660), "valid": (81, 1_620), "test": (659, 13_180)}
    assert found["gtsrb.zip"].splits == {"test": (43, 4_300)}
    assert found["aircraft"].folder is None
    assert "meta_dataset_splits" not in found


@needs_data
def test_the_projects_zips_give_meta_dataset_episodes():
    source = open_source(f"{DATA}/omniglot.zip:test")
    assert source.hierarchy is not None
    assert len(source.hierarchy.groups) == 20
    alphabets = {name.rpartition(".")[0] for name in source.class_names}
    assert alphabets == set(class_split("omniglot")["test"])
    episode = VariableEpisodes(source, seed=1).draw(0)
    images = source.network_input(episode.query[:3])
    assert images.shape == (3, 3, 84, 84)
    assert len({source.class_names[k].rpartition(".")[0] for k in source.labels[episode.support]}) == 1
    mini = open_source("mini_imagenet:test", root=DATA)
    assert (len(mini.class_names), len(mini.labels)) == (20, 12_000)
    assert mini.images[[0, -1]].std() > 10


@pytest.mark.parametrize(
    ("value", "required"),
    [(None, False), ("", False), ("0", False), ("no", False), ("False", False), ("1", True), ("yes", True)],
)
def test_the_image_sets_are_required_where_the_variable_says_yes(value, required, monkeypatch):
    monkeypatch.delenv("FEWSHOT_MAHALANOBIS_REQUIRE_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("FEWSHOT_MAHALANOBIS_REQUIRE_DATA", value)
    assert is_set("FEWSHOT_MAHALANOBIS_REQUIRE_DATA") is required


@needs_data
@pytest.mark.parametrize("path", sorted((DATA / "meta_dataset_splits").glob("*.json")), ids=lambda path: path.stem)
def test_the_packages_splits_are_meta_datasets(path):
    name = path.stem.removesuffix("_alphabets")
    assert class_split(name) == {split: tuple(names) for split, names in json.loads(path.read_text()).items()}


@pytest.mark.parametrize("name", ["omniglot", "mnist", "dtd"])
def test_a_failed_download_names_the_data_set(name, tmp_path, monkeypatch):
    def failing(root, download=False, **settings):
        if download:
            Path(root, "half").mkdir(exist_ok=True)
        raise RuntimeError("no mirror answered" if download else "Dataset not found")

    monkeypatch.setattr(datasets.layouts, "torchvision_class", lambda _: failing)
    with pytest.raises(OSError, match=f"{datasets.DATA_SETS[name].title} could not be downloaded: no mirror answered"):
        datasets.download(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_half_unpacked_data_set_is_not_taken_for_a_whole_one_nor_written_over(tmp_path, monkeypatch):
    def unpacking(root, download=False, **settings):
        if not download:
            raise RuntimeError("Dataset not found")
        Path(root, "omniglot-py").mkdir(exist_ok=True)

    monkeypatch.setattr(datasets.layouts, "torchvision_class", lambda _: unpacking)
    (tmp_path / "omniglot-py").mkdir()
    (tmp_path / "omniglot-py" / "mine").touch()
    with pytest.raises(FileExistsError, match=r"omniglot-py is there and is not the whole of Omniglot: move it away"):
        datasets.download("omniglot", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["omniglot-py", "mine"]
