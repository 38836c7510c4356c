"""Small folders in the layouts in which the data sets are given out, for tests.

Image ``i`` of the ``k``-th class of a split, in the order of the split's list, is of one colour, ``colour(k, i)``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fewshot_mahalanobis.research.data.layouts import class_split

PER_CLASS = 2


def colour(k: int, i: int) -> tuple[int, int, int]:
    return k % 256, 50 * i + 10, k // 256


def save(path: Path, rgb: tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, rgb).save(path, format="PNG")  # whatever the suffix, so that colours stay exact


def class_folders(folder: Path, names: list[str], file: str) -> None:
    for k, name in enumerate(names):
        for i in range(PER_CLASS):
            save(folder / name / file.format(name=name, i=i), colour(k, i))


def ilsvrc_2012(root: Path) -> None:
    folder = root / "ILSVRC2012_img_train"
    class_folders(folder, list(class_split("ilsvrc_2012")["test"]), "{name}_{i}.JPEG")
    class_folders(folder, ["n02085620"], "{name}_{i}.JPEG")  # of another split


def omniglot(root: Path) -> None:
    k = 0
    for alphabet in class_split("omniglot")["test"]:
        for character in ("character01", "character02"):
            for i in range(PER_CLASS):
                folder = root / "omniglot" / "images_evaluation" / alphabet / character
                save(folder / f"0{k}_0{i}.png", tuple(255 - c for c in colour(k, i)))  # type: ignore[arg-type]
            k += 1


def aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    boxes, lines = [], {"trainval": ["0000099 A318"], "test": []}
    for k, variant in enumerate(class_split("aircraft")["test"]):
        for i, part in enumerate(lines):
            name = f"{k:05d}{i:02d}"
            save(data / "images" / f"{name}.jpg", (0, 0, 0), (12, 10))
            picture = Image.open(data / "images" / f"{name}.jpg")
            picture.paste(colour(k, i), (2, 1, 9, 8))
            picture.save(data / "images" / f"{name}.jpg", format="PNG")
            boxes.append(f"{name} 2 1 9 8")
            lines[part].append(f"{name} {variant}")
    (data / "images_box.txt").write_text("\n".join([*boxes, "0000099 0 0 2 2"]) + "\n")
    for part, rows in lines.items():
        (data / f"images_variant_{part}.txt").write_text("\n".join(rows) + "\n")
    (data / "variants.txt").write_text("\n".join(name for names in class_split("aircraft").values() for name in names))


def cu_birds(root: Path) -> None:
    class_folders(root / "CUB_200_2011" / "images", list(class_split("cu_birds")["test"]), "Bird_{i}.jpg")


def dtd(root: Path) -> None:
    names = list(class_split("dtd")["test"])
    class_folders(root / "dtd" / "dtd" / "images", names, "{name}_{i}.jpg")
    (root / "dtd" / "dtd" / "images" / names[0] / ".directory").write_text("a leftover of the published archive")
    labels = root / "dtd" / "dtd" / "labels"
    labels.mkdir()
    for part in ("train1", "val1"):
        (labels / f"{part}.txt").write_text("")
    (labels / "test1.txt").write_text("\n".join(f"{n}/{n}_{i}.jpg" for n in names for i in range(PER_CLASS)))


def quickdraw(root: Path) -> None:
    (root / "quickdraw").mkdir()
    for k, name in enumerate(class_split("quickdraw")["test"]):
        rows = [np.full(784, colour(k, i)[0] + colour(k, i)[1], np.uint8) for i in range(PER_CLASS)]
        np.save(root / "quickdraw" / f"{name}.npy", np.stack(rows))


def fungi(root: Path) -> None:
    names = list(class_split("fungi")["test"])
    notes = {part: {"categories": [], "images": [], "annotations": []} for part in ("train", "val")}
    for name in (name for names in class_split("fungi").values() for name in names):
        for note in notes.values():
            note["categories"].append({"id": int(name[:4]), "name": name[5:]})
    for k, name in enumerate(names):
        for i, (part, note) in enumerate(notes.items()):
            image = f"{part}{k}"
            note["images"].append({"id": image, "file_name": f"images/{part}/{k}.JPG"})
            note["annotations"].append({"image_id": image, "category_id": int(name[:4])})
            save(root / "fungi" / "images" / part / f"{k}.JPG", colour(k, i))
    for part, note in notes.items():
        (root / "fungi" / f"{part}.json").write_text(json.dumps(note))


def vgg_flower(root: Path) -> None:
    from scipy.io import savemat

    labels = []
    for i in range(PER_CLASS):
        for k, name in enumerate(class_split("vgg_flower")["test"]):
            labels.append(int(name[:3]))
            save(root / "vgg_flower" / "jpg" / f"image_{len(labels):05d}.jpg", colour(k, i))
    savemat(root / "vgg_flower" / "imagelabels.mat", {"labels": np.array([[*labels, 1]])})


def traffic_sign(root: Path) -> None:
    for k in range(43):
        folder = root / "GTSRB" / "Final_Training" / "Images" / f"{k:05d}"
        for i in range(PER_CLASS):
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (5, 4), colour(k, i)).save(folder / f"00000_{i:05d}.ppm")
        (folder / f"GT-{k:05d}.csv").write_text("Filename;Width;Height\n")


def mscoco(root: Path) -> None:
    notes: dict[str, list[dict[str, object]]] = {"categories": [], "images": [], "annotations": []}
    names = list(class_split("mscoco")["test"])
    for number, name in enumerate([*class_split("mscoco")["valid"], *names]):
        notes["categories"].append({"id": 2 * number + 1, "name": name})
    for k in range(len(names)):  # picture k shows object k twice, left and right of its middle
        picture = Image.new("RGB", (40, 20), colour(k, 0))
        picture.paste(colour(k, 1), (20, 0, 40, 20))
        path = root / "mscoco" / "train2017" / f"{k:012d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, format="PNG")
        notes["images"].append({"id": k, "file_name": path.name, "width": 40, "height": 20})
        for x in (5, 25):
            category = notes["categories"][40 + k]["id"]
            notes["annotations"].append({"image_id": k, "category_id": category, "bbox": [x, 5, 10, 10]})
    notes["annotations"].append({"image_id": 0, "category_id": 1, "bbox": [1, 1, 5, 5]})  # a class of another split
    notes["annotations"].append({"image_id": 0, "category_id": 81, "bbox": [100, 1, 5, 5]})  # beyond the picture
    (root / "mscoco" / "annotations").mkdir()
    (root / "mscoco" / "annotations" / "instances_train2017.json").write_text(json.dumps(notes))


def mnist(root: Path) -> None:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        labels = np.tile(np.arange(10, dtype=np.uint8), PER_CLASS)
        levels = np.array([sum(colour(k, n // 10)[:2]) for n, k in enumerate(labels.tolist())], np.uint8)
        images = np.broadcast_to(levels[:, None, None], (len(labels), 28, 28))
        header = [0x803, len(labels), 28, 28]
        (folder / f"{part}-images-idx3-ubyte").write_bytes(np.array(header, ">i4").tobytes() + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            np.array([0x801, len(labels)], ">i4").tobytes() + labels.tobytes()
        )


def cifar(root: Path, classes: int) -> None:
    """CIFAR's files; torchvision's check of their digests must be off."""
    folder = root / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python")
    folder.mkdir()
    names = sorted(f"class {k:03d}" for k in range(classes))
    labels = [k for i in range(PER_CLASS) for k in range(classes)]
    pixels = [np.repeat(colour(k, n // classes), 1024) for n, k in enumerate(labels)]
    key = "labels" if classes == 10 else "fine_labels"
    batch = {"data": np.array(pixels, np.uint8), key: labels}
    meta = {"label_names" if classes == 10 else "fine_label_names": names}
    (folder / ("test_batch" if classes == 10 else "test")).write_bytes(pickle.dumps(batch))
    (folder / ("batches.meta" if classes == 10 else "meta")).write_bytes(pickle.dumps(meta))


def cifar10(root: Path) -> None:
    cifar(root, 10)


def cifar100(root: Path) -> None:
    cifar(root, 100)


def mini_imagenet(root: Path) -> None:
    class_folders(root / "mini_imagenet" / "test", [f"n{k:08d}" for k in range(20)], "{name}_{i}.jpg")


def tiered_imagenet(root: Path) -> None:
    class_folders(root / "tiered_imagenet" / "test", [f"n{k:08d}" for k in range(160)], "{name}_{i}.jpg")


#: Data set -> what builds its test split below a root.
BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder
    for builder in (
        ilsvrc_2012,
        omniglot,
        aircraft,
        cu_birds,
        dtd,
        quickdraw,
        fungi,
        vgg_flower,
        traffic_sign,
        mscoco,
        mnist,
        cifar10,
        cifar100,
        mini_imagenet,
        tiered_imagenet,
    )
}
