"""The graph that reads pixels: as Pillow resizes, and as the classifier answers, whatever the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_mahalanobis import SimpleCNAPSClassifier
from fewshot_mahalanobis.export.pixels import PixelsToSquare, add_pixels_to_square
from fewshot_mahalanobis.images.picture import to_square_array
from fewshot_mahalanobis.networks.template import FLOAT32, UINT8, Graph
from tests.tiny import SUPPORT_LABELS, adapting_model, drawn

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
needs_the_page = pytest.mark.skipif(not PAGE.exists(), reason="the page is in a checkout")


def noise(width: int, height: int, mode: str) -> Image.Image:
    """Coarse and fine structure, and with an alpha channel every transparency."""
    rng = np.random.default_rng(width + height)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 4), dtype=np.uint8)).resize((width, height))
    pixels = np.asarray(coarse).astype(int) + rng.integers(-40, 41, (height, width, 4))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize(
    ("width", "height"),
    [(32, 32), (33, 31), (20, 50), (64, 63), (129, 128), (300, 200), (1000, 70), (257, 640), (2, 5)],
)
def test_pixels_become_the_square_that_pillow_makes(width: int, height: int, mode: str) -> None:
    image = noise(width, height, mode)
    square = (PixelsToSquare(32)(torch.from_numpy(np.array(image)))[0].permute(1, 2, 0) + 1) * 127.5
    differences = np.abs(square.numpy() - to_square_array(image, 32))
    assert differences.max() <= 1.01  # of 255
    if min(width, height) < 128:  # otherwise there are blocks, whose means Pillow rounds
        assert (differences > 0.01).mean() < 0.02  # ties of rounding


@pytest.mark.parametrize("size", [32, 41])
def test_the_graph_makes_the_square_that_the_module_makes(size: int) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    graph = Graph()
    images = add_pixels_to_square(graph, graph.input("pixels", UINT8, ["h", "w", "c"]), size)
    graph.output("images", images, FLOAT32, [1, 3, size, size])
    session = onnxruntime.InferenceSession(graph.model(with_weights=True))
    for width, height in ((size, size), (20, 50), (129, 128), (300, 200), (1000, 70), (257, 640), (2, 5)):
        for mode in ("RGB", "RGBA"):
            pixels = np.array(noise(width, height, mode))
            (square,) = session.run(None, {"pixels": pixels})
            differences = np.abs(square - PixelsToSquare(size)(torch.from_numpy(pixels)).numpy()) * 127.5
            assert differences.max() <= 1.01  # of 255
            assert (differences > 0.01).mean() < 0.02  # ties of rounding


@pytest.fixture(scope="module")
def classifier() -> SimpleCNAPSClassifier:
    classifier = SimpleCNAPSClassifier(
        adapting_model(), precision="float32", device="cpu", unknown_label="none", temperature="auto",
        false_rejection_rate=0.3, priors=[0.2, 0.3, 0.5],
    )  # fmt: skip
    return classifier.fit(drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pictures of the classes, and one of none, as people have them."""
    folder = tmp_path_factory.mktemp("files")
    pictures = [Image.fromarray(picture).resize((90, 70)) for picture in drawn(["red", "green", "blue", "red"], 3)]
    rotated, transparent, palette, plain = pictures
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated.rotate(90, expand=True).save(folder / "rotated.jpg", exif=exif)
    transparent.putalpha(Image.linear_gradient("L").resize(transparent.size))
    transparent.save(folder / "transparent.png")
    palette.quantize(16).save(folder / "palette.gif")
    plain.convert("L").save(folder / "grey.png")
    Image.fromarray(np.asarray(plain.convert("L")).astype(np.uint16) * 257).save(folder / "deep.png")
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'
    plain.save(folder / "xmp.jpg", xmp=xmp + b"</x:xmpmeta>")
    noise(400, 300, "RGB").save(folder / "large.jpg")
    return sorted(folder.iterdir())


def snippet() -> str:
    """The lines of the page that decode a file and run the graph."""
    (block,) = (
        code for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "classify" in code
    )
    return block.partition("\nassert")[0].replace("return labels[label]", "return probabilities, label, outlier_score")


def assert_same(answers: list[Any], classifier: SimpleCNAPSClassifier, files: list[Path], properties: Any) -> None:
    labels = json.loads(properties["labels"])
    assert labels == classifier.fitted_head_.output_labels.tolist()
    assert json.loads(properties["threshold"]) == classifier.threshold_
    expected = classifier.predict_all(files)
    scores = classifier.outlier_score(files)
    for (probabilities, label, score), of_file, wanted, outlier in zip(
        answers, expected.labels, expected.probabilities, scores, strict=True
    ):
        assert np.abs(np.asarray(probabilities) - wanted).max() < 0.01
        assert abs(float(score) - outlier) < 0.1 + 0.01 * abs(outlier)  # in standard deviations
        assert labels[int(label)] == of_file


@needs_the_page
@pytest.mark.slow
def test_the_lines_of_the_page_answer_as_the_classifier(
    classifier: SimpleCNAPSClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    classifier.export_onnx("pets.onnx", pixels=True)
    names: dict[str, Any] = {}
    exec(snippet(), names)
    assert_same([names["classify"](file) for file in files], classifier, files, names["properties"])
    assert {"none", "red"} <= set(classifier.predict(files).tolist())


@needs_the_page
def test_a_program_of_one_network_without_a_threshold_answers_as_the_classifier(
    files: list[Path], tmp_path: Path
) -> None:
    classifier = SimpleCNAPSClassifier(adapting_model(), adapt=False, precision="float32", device="cpu")
    classifier.fit(drawn(SUPPORT_LABELS, 0), SUPPORT_LABELS)
    classifier.export_program(tmp_path / "pets.pt2", pixels=True)
    properties = {"labels": "", "threshold": "", "version": ""}
    program = torch.export.load(tmp_path / "pets.pt2", extra_files=properties).module()
    names: dict[str, Any] = {"labels": [], "np": np, "Image": Image}
    exec("from PIL import ImageOps\nside = 32\n" + snippet()[snippet().index("def classify") :], names)

    class Session:
        def run(self, _: None, inputs: dict[str, Any]) -> Any:
            return program(torch.from_numpy(np.array(inputs["pixels"])))

    names["session"] = Session()
    assert_same([names["classify"](file) for file in files], classifier, files, properties)
