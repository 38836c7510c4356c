"""A corpus of odd and of hostile images, through every way in: the right picture, or an error that names the item."""

from __future__ import annotations

import csv
import io
import os
import socket
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import EpsImagePlugin, ExifTags, Image, ImageCms, ImageFile, ImageOps
from typer.testing import CliRunner

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.images.errors import ImageError
from fewshot_mahalanobis.research.data.sources import load_source
from tests.tiny import tiny_classifier

SIZE = 32


def tensor_of(images: Any) -> torch.Tensor:
    return torch.cat(list(ImageBatches(images, SIZE)))


def picture() -> NDArray[np.uint8]:
    """Smooth, without symmetry, (24, 40, 3)."""
    y, x = np.mgrid[:24, :40]
    return np.stack([6 * x, 10 * y, 3 * x + 5 * y], axis=-1).astype(np.uint8)


def encoded(image: Image.Image | NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(np.ascontiguousarray(image))
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def uniform(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (40, 24), colour)


# ------------------------------------------------------------------------------- files that are pictures


def _oriented(kind: str, orientation: int, **options: Any) -> bytes:
    """The picture as a camera stores it, turned, with the tag that tells a viewer to turn it back."""
    p = picture()
    stored = {
        1: p, 2: p[:, ::-1], 3: p[::-1, ::-1], 4: p[::-1], 5: p.swapaxes(0, 1), 6: np.rot90(p, 1),
        7: p[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(p, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(stored, kind, exif=exif, **options)


def _animated(kind: str, **options: Any) -> bytes:
    frames = [uniform("RGB", colour) for colour in ("red", "lime", "blue")]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def _palette_with_transparency() -> bytes:
    image = Image.new("P", (40, 24), 1)
    image.putpalette([10, 200, 30, 0, 0, 0])
    return encoded(image, transparency=1)


NAMES = [
    "new\nline.png", "tab\tquote'\".png", "-dash.png", "{0} %s.png", "ünïcödé 图.png", os.fsdecode(b"\xff\xe9.png")
]  # fmt: skip
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
#: Name -> contents, and the pixels (h, w, 3) that a viewer shows.
PICTURES: dict[str, tuple[Callable[[], bytes], Callable[[], Any]]] = {
    "wrong extension.jpg": (lambda: encoded(picture()), picture),
    "one pixel.png": (lambda: encoded(picture()[:1, :1]), lambda: picture()[:1, :1]),
    "1 x 5000.png": (lambda: encoded(uniform("RGB", "teal").resize((1, 5000))), lambda: uniform("RGB", "teal")),
    "5000 x 1.png": (lambda: encoded(uniform("RGB", "teal").resize((5000, 1))), lambda: uniform("RGB", "teal")),
    "CMYK.tif": (lambda: encoded(uniform("CMYK", (0, 255, 0, 0)), "TIFF"), lambda: uniform("RGB", (255, 0, 255))),
    "CMYK.jpg": (lambda: encoded(uniform("CMYK", (255, 0, 0, 0)), "JPEG"), lambda: uniform("RGB", (0, 255, 255))),
    "16 bit.png": (lambda: encoded(uniform("I;16", 257 * 90)), lambda: uniform("RGB", (90, 90, 90))),
    "16 bit.tif": (lambda: encoded(uniform("I;16", 257 * 90), "TIFF"), lambda: uniform("RGB", (90, 90, 90))),
    "palette, transparent.png": (_palette_with_transparency, lambda: uniform("RGB", "white")),
    "animated.gif": (lambda: _animated("GIF"), lambda: uniform("RGB", "red")),
    "animated.png": (lambda: _animated("PNG"), lambda: uniform("RGB", "red")),
    "animated.webp": (lambda: _animated("WEBP", lossless=True), lambda: uniform("RGB", "red")),
    "colour profile.png": (lambda: encoded(picture(), icc_profile=SRGB), picture),
    "damaged profile.png": (lambda: encoded(picture(), icc_profile=b"junk" * 999), picture),
    "exif is junk.png": (lambda: encoded(picture(), exif=b"Exif\0\0junk junk"), picture),
    "unknown orientation.png": (lambda: encoded(picture(), exif=_exif_of(9)), picture),
    **{f"orientation {o}.png": (lambda o=o: _oriented("PNG", o), picture) for o in range(1, 9)},
    **{f"orientation {o}.tif": (lambda o=o: _oriented("TIFF", o), picture) for o in range(1, 9)},
    **{f"orientation {o}.webp": (lambda o=o: _oriented("WEBP", o, lossless=True), picture) for o in range(1, 9)},
    **{
        name: (lambda: encoded(picture()), picture)
        for name in NAMES
    },
}  # fmt: skip


def _exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    for name, (contents, _) in PICTURES.items():
        (folder / name).write_bytes(contents())
    return [folder / name for name in PICTURES]


@pytest.fixture(scope="module")
def shown() -> torch.Tensor:
    """What a viewer shows of each picture, through arrays."""
    return tensor_of([np.asarray(pixels()) for _, pixels in PICTURES.values()])


def assert_the_same(tensor: torch.Tensor, shown: torch.Tensor) -> None:
    for index, name in enumerate(PICTURES):
        # JPEG rounds to one grey level, and WebP's canvas of an animation is YUV.
        tolerance = 5 if name.endswith((".jpg", "animated.webp")) else 0
        assert (tensor[index] - shown[index]).abs().max() * 127.5 <= tolerance, name


def test_every_odd_file_gives_the_right_picture_from_its_path(pictures: list[Path], shown: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", "image .*damaged profile.png.*: its colour profile is damaged", UserWarning)
        warnings.filterwarnings("default", "image .*exif is junk.png.*: its EXIF data are damaged", UserWarning)
        warnings.filterwarnings("default", r"image .*animated.gif.*\(and 2 more\): it has several frames", UserWarning)
        with pytest.warns(UserWarning, match="damaged profile.png"):
            assert_the_same(tensor_of(pictures), shown)
        with pytest.warns(UserWarning, match="damaged profile.png"):
            assert_the_same(tensor_of([os.fspath(path) for path in pictures]), shown)


@pytest.mark.filterwarnings("ignore:.*its colour profile is damaged")
def test_a_path_that_is_bytes_inside_is_read(pictures: list[Path], shown: torch.Tensor) -> None:
    entries = {entry.name: entry for entry in os.scandir(os.fsencode(pictures[0].parent))}
    assert_the_same(tensor_of([entries[os.fsencode(name)] for name in PICTURES]), shown)


@pytest.mark.filterwarnings("ignore:.*its colour profile is damaged")
def test_every_odd_file_gives_the_right_picture_as_a_lazily_opened_image(
    pictures: list[Path], shown: torch.Tensor
) -> None:
    assert_the_same(tensor_of([Image.open(path) for path in pictures]), shown)


@pytest.mark.filterwarnings("ignore:its colour profile is damaged")
@pytest.mark.parametrize("archive", [False, True], ids=["folder", "zip"])
def test_every_odd_file_gives_the_right_picture_from_a_source(
    archive: bool, pictures: list[Path], shown: torch.Tensor, tmp_path: Path
) -> None:
    root = tmp_path / "source.zip" if archive else tmp_path / "source"
    names = {path: f"{index:03d}{path.suffix}" for index, path in enumerate(pictures)}
    if archive:
        with zipfile.ZipFile(root, "w") as file:
            for label in "ab":
                for path, name in names.items():
                    file.write(path, f"{label}/{name}")
    else:
        for label in "ab":
            (root / label).mkdir(parents=True)
            for path, name in names.items():
                (root / label / name).symlink_to(path)
    source = load_source(root, size=SIZE)
    assert_the_same(source.network_input(np.flatnonzero(source.labels == 0)), shown)


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    return tiny_classifier()


@pytest.fixture
def predict(
    classifier: SimpleCNAPSClassifier, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """The command, without the time to load a model."""
    monkeypatch.setattr(SimpleCNAPSClassifier, "load", lambda *_, **__: classifier)
    model = str(tmp_path_factory.mktemp("model") / "model")  # beside which pictures are remembered
    return lambda *arguments: CliRunner().invoke(app, ["predict", model, "--", *map(os.fspath, arguments)])


@pytest.mark.filterwarnings("ignore:.*its colour profile is damaged")
def test_every_odd_file_is_classified_by_the_command(
    pictures: list[Path], classifier: SimpleCNAPSClassifier, predict: Callable[..., Any]
) -> None:
    result = predict(*pictures)
    assert result.exit_code == 0, result.output
    rows = list(csv.reader(io.StringIO(result.stdout, newline="")))[1:]
    assert [row[1] for row in rows] == classifier.predict([np.asarray(p()) for _, p in PICTURES.values()]).tolist()
    named = [row[0] for row in rows]
    for path, name in zip(pictures, named, strict=True):
        assert name == os.fspath(path) or not path.name.isprintable()


# --------------------------------------------------------------------------- files that are no pictures


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG of any claimed size, with these rows alone."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _jpeg_of_size(width: int, height: int) -> bytes:
    data = encoded(picture(), "JPEG")
    at = data.index(b"\xff\xc0") + 5  # start of frame: length, precision, height, width
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def _bmp_of_size(width: int, height: int) -> bytes:
    data = encoded(picture(), "BMP")
    return data[:18] + struct.pack("<ii", width, height) + data[26:]


def _gif_of_size(width: int, height: int) -> bytes:
    data = encoded(Image.fromarray(picture()).convert("P"), "GIF")
    return data[:6] + struct.pack("<HH", width, height) + data[10:]


KINDS = {
    "jpg": ("JPEG", {"progressive": True}),
    "png": ("PNG", {}),
    "tif": ("TIFF", {"compression": "jpeg"}),
    "webp": ("WEBP", {}),
}


def _cut(kind: str, tenths: int) -> bytes:
    name, options = KINDS[kind]
    noise = np.random.default_rng(0).integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
    data = encoded(noise, name, **options)  # type: ignore[arg-type]
    return data[: len(data) * tenths // 10]


#: Name -> contents, and what the error says.
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "zero bytes.jpg": (lambda: b"", "empty|not an image file"),
    "one byte.png": (lambda: b"\x89", "not an image file"),
    "page.jpg": (lambda: b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>", "not an image file"),
    "bomb.png": (lambda: png(20_000, 20_000), "too many"),
    "bomb.jpg": (lambda: _jpeg_of_size(20_000, 20_000), "too many"),
    "bomb.bmp": (lambda: _bmp_of_size(20_000, 20_000), "too many"),
    "bomb.gif": (lambda: _gif_of_size(65_535, 65_535), "too many"),
    "bomb.ppm": (lambda: b"P6 20000 20000 255\n", "too many"),
    "largest.png": (lambda: png(2**31 - 1, 2**31 - 1), "too many|not an image file"),
    "thin.png": (lambda: png(1, 70_000), "too many"),
    "wide.ppm": (lambda: b"P6 70000 1 255\n" + bytes(210_000), "too many"),
    "program.png": (lambda: encoded(picture(), "EPS"), "PostScript is a program"),
    **{
        f"cut at {tenth} tenths.{kind}": (
            lambda tenth=tenth, kind=kind: _cut(kind, tenth),
            "cannot be decoded|not an image file|empty",
        )
        for kind in KINDS
        for tenth in range(10)
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("refused")
    for name, (contents, _) in REFUSED.items():
        (folder / name).write_bytes(contents())
    return [(folder / name, message) for name, (_, message) in REFUSED.items()]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Sizes of the files whose pixels Pillow starts to allocate and to read."""
    sizes: list[tuple[int, int]] = []
    load_prepare = ImageFile.ImageFile.load_prepare

    def watched(image: ImageFile.ImageFile) -> None:
        sizes.append(image.size)
        load_prepare(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load_prepare", watched)
    return sizes  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of a cut TIFF before it raises
@pytest.mark.parametrize("limit", ["as it is", "lifted", "cut files let through"])
def test_every_bad_file_is_refused_by_index_and_path(
    limit: str, refused: list[tuple[Path, str]], loads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "lifted":  # as other code in the process may have done
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", limit == "cut files let through")
    for path, message in refused:
        with pytest.raises(ImageError, match=message) as caught:
            tensor_of([picture(), path])
        assert f"image 1 ({os.fspath(path)!r})" in str(caught.value)
    assert (limit == "cut files let through") == ImageFile.LOAD_TRUNCATED_IMAGES
    assert max(width * height for width, height in loads) < 10_000


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cut_files", [False, True], ids=["as it is", "cut files let through"])
def test_every_bad_file_is_refused_as_a_lazily_opened_image(
    cut_files: bool, refused: list[tuple[Path, str]], loads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", cut_files)
    opened = 0
    for path, message in refused:
        try:
            image = Image.open(path)
        except Exception:  # then there is no image to pass on
            continue
        opened += 1
        with pytest.raises(ImageError, match=message) as caught:
            tensor_of([picture(), image])
        assert f"image 1 ({os.fspath(path)!r})" in str(caught.value)
        image.close()
    assert opened >= 20
    assert max(width * height for width, height in loads) < 10_000


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("archive", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize("cut_files", [False, True], ids=["as it is", "cut files let through"])
def test_every_bad_file_is_refused_by_a_source(
    cut_files: bool, archive: bool, refused: list[tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", cut_files)
    good = encoded(picture())
    for index, (path, _) in enumerate(refused):
        root, name = tmp_path / f"{index}", f"b/{path.name}"
        if archive:
            root = root.with_suffix(".zip")
            with zipfile.ZipFile(root, "w") as file:
                file.writestr("a/good.png", good)
                file.write(path, name)
        else:
            for label in "ab":
                (root / label).mkdir(parents=True)
            (root / "a" / "good.png").write_bytes(good)
            (root / name).symlink_to(path)
        with pytest.raises(ValueError, match="cannot read image") as caught:
            load_source(root, size=SIZE)
        assert name in str(caught.value)
        assert os.fspath(root) in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_bad_file_is_refused_by_the_command(refused: list[tuple[Path, str]], predict: Callable[..., Any]) -> None:
    for path, _ in refused:
        result = predict(path)
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert os.fspath(path) in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "GIF"])
@pytest.mark.parametrize("form", ["path", "bytes", "opened file", "lazily opened image"])
def test_cut_files_are_refused_in_threads_although_other_code_lets_them_through(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 50, 3), np.uint8)), kind)
    files = []
    for index in range(40):
        files.append(tmp_path / f"{index}")
        files[-1].write_bytes(whole[: len(whole) * 3 // 5] if index % 7 == 3 else whole)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    Image.open(files[3]).load()  # as other code reads it
    forms: dict[str, Callable[[Path], Any]] = {
        "path": str,
        "bytes": Path.read_bytes,
        "opened file": lambda file: io.BytesIO(file.read_bytes()),
        "lazily opened image": Image.open,
    }
    problems: list[ImageError] = []
    batches = ImageBatches(
        [forms[form](file) for file in files], SIZE, batch_size=5, n_jobs=4, on_error=problems.append
    )
    assert sum(map(len, batches)) == 34
    assert [problem.index for problem in problems] == [3, 10, 17, 24, 31, 38]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    with pytest.raises(ImageError, match="image 3 "):
        tensor_of([forms[form](file) for file in files])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_an_array_too_large_to_convert_is_refused_by_its_shape() -> None:
    endless = np.broadcast_to(np.uint8(7), (20_000, 20_000, 3))
    for images in ([endless], endless[None], torch.zeros(1).expand(1, 3, 20_000, 20_000)):
        with pytest.raises(ImageError, match="20000 x 20000 pixels are too many"):
            ImageBatches(images, SIZE)
    with pytest.raises(ImageError, match="too many"):
        ImageBatches([np.broadcast_to(np.uint8(7), (10**9, 1))], SIZE)


def test_postscript_is_never_handed_to_its_interpreter(
    predict: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **_: ran.append(arguments))
    path, archive = tmp_path / "source" / "a" / "photo.jpg", tmp_path / "source.zip"
    for label in "ab":
        (tmp_path / "source" / label).mkdir(parents=True)
        (tmp_path / "source" / label / "photo.jpg").write_bytes(encoded(picture(), "EPS"))
    with zipfile.ZipFile(archive, "w") as file:
        for label in "ab":
            file.write(path, f"{label}/photo.jpg")
    for item in (path, Image.open(path)):
        with pytest.raises(ImageError, match="convert it to PNG"):
            tensor_of([item])
    for source in (tmp_path / "source", archive):
        with pytest.raises(ValueError, match="convert it to PNG"):
            load_source(source, size=SIZE)
    assert "convert it to PNG" in predict(path).stderr
    assert ran == []


def test_pictures_near_the_limits_are_read(tmp_path: Path) -> None:
    for name, shape in (("tall.png", (65_535, 2)), ("wide.png", (2, 65_535))):
        (tmp_path / name).write_bytes(encoded(np.full(shape, 200, np.uint8)))
    expected = tensor_of(np.full((2, 9, 9), 200, np.uint8))
    assert torch.equal(tensor_of([tmp_path / "tall.png", tmp_path / "wide.png"]), expected)


# -------------------------------------------------------------------------------------- what is no file


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes and links")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (_folder, "it is a folder"),
        (_pipe, "it is a pipe"),
        (_socket, "it is a pipe, a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "or a device"),
        (lambda path: path.symlink_to("nowhere"), "a link to nothing"),
        (lambda path: path.symlink_to(path.name), "cannot be read: .*[Ll]ink"),
    ],
    ids=["absent", "folder", "pipe", "socket", "device", "dangling link", "link to itself"],
)
def test_what_is_no_file_is_refused_without_opening_it(
    make: Callable[[Path], None], message: str, predict: Callable[..., Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = Path("photo.png")
    make(path)
    with pytest.raises(ImageError, match=message) as caught:
        ImageBatches([picture(), path], SIZE)
    assert "image 1 ('photo.png')" in str(caught.value)
    result = predict(path)
    assert result.exit_code == 1
    assert "photo.png" in result.stderr


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "file.png/inside.png"])
def test_a_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.png").write_bytes(encoded(picture()))
    with pytest.raises(ImageError, match=r"image 1 .*cannot be read"):
        ImageBatches([picture(), name], SIZE)
    with pytest.raises(ImageError, match="wrap it in a list"):
        ImageBatches(name, SIZE)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes and links")
def test_what_is_no_file_is_no_image_of_a_folder(tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / label).mkdir()
        (tmp_path / label / "good.png").write_bytes(encoded(picture()))
    _pipe(tmp_path / "a" / "pipe.png")
    _folder(tmp_path / "a" / "folder.png")
    assert len(load_source(tmp_path, size=SIZE).images) == 2


def _as_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.mark.skipif(_as_root(), reason="root may read every file; the next test stands in")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "private.png"
    path.write_bytes(encoded(picture()))
    path.chmod(0)
    with pytest.raises(ImageError, match=r"image 1 \('.*private.png'\): it cannot be read: Permission denied"):
        tensor_of([picture(), path])
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "a.png").write_bytes(encoded(picture()))
    closed.chmod(0)
    try:
        with pytest.raises(ImageError, match=r"image 1 \('.*a.png'\): it cannot be read: Permission denied"):
            tensor_of([picture(), closed / "a.png"])
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize("call", ["open", "stat"])
def test_a_refusal_of_the_system_is_passed_on_with_index_and_path(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "private.png"
    path.write_bytes(encoded(picture()))
    owner: Any = Path if call == "open" else os
    original = getattr(owner, call)

    def refusing(name: Any, *arguments: Any, **options: Any) -> Any:
        if os.fspath(name) == os.fspath(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return original(name, *arguments, **options)

    monkeypatch.setattr(owner, call, refusing)
    with pytest.raises(ImageError, match=r"image 1 \('.*private.png'\): it cannot be read: Permission denied"):
        tensor_of([picture(), path])


def test_the_last_bad_file_of_many_is_named_and_the_threads_end(tmp_path: Path) -> None:
    path = tmp_path / "bad.png"
    path.write_bytes(png(30, 30))
    images = [ImageOps.flip(Image.fromarray(picture()))] * 99
    with pytest.raises(ImageError, match=r"image 99 \('.*bad.png'\)"):
        tensor_of([*images, path])
