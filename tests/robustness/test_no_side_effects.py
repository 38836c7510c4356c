"""Every public call leaves the process as it found it, and gives the same bits when it is repeated.

Each call runs twice, in two states of the process that must not matter: with other random seeds, with gradients on and
off, with PyTorch free to choose algorithms and held to deterministic ones. Making a module with random weights, such as
``SimpleCNAPS()``, draws them from torch's generator as any ``nn.Module`` does, and is no call of this kind.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import accelerate  # noqa: F401 (training imports it, which adds a warning filter of its own)
import numpy as np
import onnx
import pytest
import torch
import torch._dynamo  # the first use of an optimiser imports it, which sets a variable and a warning filter
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from torch import Tensor

import fewshot_mahalanobis
from fewshot_mahalanobis import (
    AdaptedFeatures,
    MahalanobisClassifier,
    Region,
    RegularizedCovariance,
    SimpleCNAPS,
    SimpleCNAPSClassifier,
    available_checkpoints,
    load_checkpoint,
    load_folder,
)
from fewshot_mahalanobis.checkpoints import card
from fewshot_mahalanobis.checkpoints.folder import save_checkpoint
from fewshot_mahalanobis.heads import HEADS, LinearHead
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.plotting import Figure, plot_class_gaussians, plot_task
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.evaluation import Variant, evaluate_source
from fewshot_mahalanobis.research.training.meta_train import MetaTrainRecipe, meta_train
from fewshot_mahalanobis.research.training.pretrain import PretrainRecipe, pretrain
from tests.drawn_tasks import make_task
from tests.robustness.process import other_process_state, process_state, process_unchanged

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

SIZE = 32


def bits(value: Any) -> Any:
    """Whatever a call returned as something that equals itself only to the bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes() if value.dtype != object else value.tolist()
    if isinstance(value, torch.nn.Module):
        return bits(value.state_dict())
    if isinstance(value, dict):
        return [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, Path):
        return value.read_bytes()
    assert isinstance(value, str | bytes | int | float | None)
    return value


class World(NamedTuple):
    """What the calls work on; none of them may change it."""

    features: Tensor
    labels: Tensor
    queries: Tensor
    model: SimpleCNAPS
    images: NDArray[np.uint8]
    names: list[str]
    fitted: SimpleCNAPSClassifier
    vectors: MahalanobisClassifier
    saved: Path
    checkpoint: Path


def random_images(n: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(n, SIZE, SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    features, labels, queries = make_task(0, [1, 3, 2], 8, queries=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=SIZE).eval()
    images, names = random_images(6, seed=1), ["a", "b", "c", "b", "a", "b"]
    fitted = SimpleCNAPSClassifier(model, device="cpu", precision="float32").fit(images, names)
    vectors = MahalanobisClassifier().fit(features.numpy(), labels.numpy())
    fitted.save(folder / "classifier.safetensors")
    save_checkpoint(model, folder / "checkpoint")
    return World(
        features,
        labels,
        queries,
        model,
        images,
        names,
        fitted,
        vectors,
        folder / "classifier.safetensors",
        folder / "checkpoint",
    )


def images_of(world: World) -> Tensor:
    return torch.cat(list(ImageBatches(world.images, SIZE)))


def codes_of(world: World) -> Tensor:
    return torch.tensor([ord(name) - ord("a") for name in world.names])


def gaussians_of(world: World) -> Any:
    return RegularizedCovariance()(*support_of(world))


def classifier_of(world: World) -> SimpleCNAPSClassifier:
    """A fitted classifier that a call may change."""
    return copy.copy(world.fitted)


def support_of(world: World) -> tuple[Tensor, Tensor]:
    return world.features, world.labels


def head_logits(name: str) -> Callable[[World, Path], Any]:
    def call(world: World, folder: Path) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = LinearHead(world.features.shape[1]) if name == "linear" else HEADS[name]()
        return head(*support_of(world), world.queries), head.leave_one_out_logits(*support_of(world))

    return call


def logits_without_gradients(world: World, folder: Path) -> Any:
    """With gradients the head computes in float64, which is the next test's."""
    with torch.no_grad():
        return world.model(images_of(world), codes_of(world), images_of(world)[:2])


def fitted_vectors(world: World, folder: Path) -> Any:
    classifier = MahalanobisClassifier(head="mahalanobis", beta=0.3).fit(world.features.numpy(), world.labels.numpy())
    before = classifier.predict_log_proba(world.queries.numpy())
    classifier.partial_fit(world.queries.numpy(), [0, 5, 2])
    return before, classifier.classes_, classifier.predict_log_proba(world.queries.numpy())


def fitted_images(world: World, folder: Path) -> Any:
    classifier = SimpleCNAPSClassifier(world.model, device="cpu").fit(world.images, world.names)
    return classifier.fitted_head_.support.adapted, classifier.classes_, classifier.class_counts_


def partly_fitted_images(world: World, folder: Path) -> Any:
    classifier = classifier_of(world).partial_fit(random_images(2, seed=3), ["d", "a"])
    return classifier.fitted_head_.support.adapted, classifier.classes_, classifier.class_counts_


def saved(world: World, folder: Path) -> Any:
    world.fitted.save(folder / "saved")
    return contents(folder / "saved")


def contents(path: Path) -> Any:
    """What a safetensors file has; its header is in no order."""
    with safe_open(path, framework="pt") as file:
        return sorted(file.metadata().items()), [(name, file.get_tensor(name)) for name in sorted(file.keys())]


def exported(world: World, folder: Path) -> Any:
    world.fitted.export_onnx(folder / "graph.onnx")
    return [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(folder / "graph.onnx").graph.initializer]


def exported_page(world: World, folder: Path) -> Any:
    """The page's files but for the graph, which is compared above and whose digest they hold."""
    world.fitted.export_page(folder / "page", support=world.images)
    return sorted(file.name for file in (folder / "page").iterdir()), (folder / "page" / "style.css").read_text()


def exported_program(world: World, folder: Path) -> Any:
    world.fitted.export_program(folder / "graph.pt2")
    return torch.export.load(folder / "graph.pt2").module()(images_of(world))


def pushed(world: World, folder: Path) -> Any:
    """The files that would go to the Hub."""

    def keep(files: Path, *_: Any, **__: Any) -> str:
        shutil.copytree(files, folder / "repository")
        return "address"

    with mock.patch.object(card, "upload", keep):
        world.fitted.push_to_hub("user/letters", thumbnails=(world.images, world.names))
    return [path for path in sorted((folder / "repository").rglob("*")) if path.suffix in (".md", ".jpg")]


def on_a_backbone(world: World, folder: Path) -> Any:
    backbone = torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten())
    model = SimpleCNAPS.from_backbone(backbone, image_size=SIZE, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    return SimpleCNAPSClassifier(model, device="cpu").fit(world.images, world.names).predict_proba(world.images)


def rejecting(world: World, folder: Path) -> Any:
    """Temperature and threshold are chosen; what is foreign is given to no class."""
    settings: dict[str, Any] = {"temperature": "auto", "unknown_label": "none", "false_rejection_rate": 0.4}
    classifier = SimpleCNAPSClassifier(world.model, device="cpu", **settings).fit(world.images, world.names)
    return (
        classifier.temperature_,
        classifier.threshold_,
        classifier.predict(world.images),
        classifier.outlier_score(world.images),
    )


def written_checkpoint(world: World, folder: Path) -> Any:
    world.model.save_pretrained(folder / "checkpoint")
    return [folder / "checkpoint" / name for name in ("config.json", "model.safetensors")]


def adapted(world: World, folder: Path) -> Any:
    task = world.model.adapt(images_of(world), codes_of(world))
    return (
        task.fitted_head.support.adapted,
        task.logits(images_of(world)[:2]),
        task.fitted_head.state.means,
    )


def small_source(name: str = "noise") -> ImageSource:
    images = np.concatenate([random_images(3, seed) // 2 + 60 * seed for seed in range(3)]).astype(np.uint8)
    return ImageSource(name, images, np.repeat(np.arange(3), 3), ("a", "b", "c"))


def evaluated(world: World, folder: Path) -> Any:
    variants = [Variant(True, "mahalanobis"), Variant(False, "cosine")]
    found = evaluate_source(world.model, small_source(), variants, way=2, shot=1, queries=1, episodes=2)
    return [found[variant] for variant in variants]


def drawn(world: World, folder: Path) -> Any:
    figure = Figure()
    plot_task(world.fitted, world.images, world.names, world.images[:2], figure=figure)
    figure.savefig(folder / "task.png")
    axes = plot_class_gaussians(world.features, world.labels, ax=Figure().subplots())
    return folder / "task.png", [ellipse.get_path().vertices for ellipse in axes.patches]


def saved_vectors(world: World, folder: Path) -> Any:
    world.vectors.save(folder / "vectors")
    loaded = MahalanobisClassifier.load(folder / "vectors")
    return contents(folder / "vectors"), loaded.predict_proba(world.queries.numpy())


def exported_vectors(world: World, folder: Path) -> Any:
    world.vectors.export_onnx(folder / "vectors.onnx")
    return folder / "vectors.onnx"


def listed(world: World, folder: Path) -> Any:
    for name in ("a", "b"):
        (folder / name).mkdir()
        Image.fromarray(world.images[0]).save(folder / name / "0.png")
    paths, labels = load_folder(folder)
    return [path.read_bytes() for path in paths], labels


CALLS: dict[str, Callable[[World, Path], Any]] = {
    "RegularizedCovariance": lambda world, folder: (gaussians_of(world).means, gaussians_of(world).counts),
    'RegularizedCovariance("auto")': lambda world, folder: RegularizedCovariance("auto")(*support_of(world)).beta,
    "squared_distance": lambda world, folder: gaussians_of(world).squared_distance(world.queries),
    "covariance": lambda world, folder: gaussians_of(world).covariance(),
    "precision": lambda world, folder: gaussians_of(world).precision(),
    **{f"{head} head": head_logits(head) for head in HEADS},
    "MahalanobisClassifier.fit and partial_fit": fitted_vectors,
    "MahalanobisClassifier.predict": lambda world, folder: world.vectors.predict(world.queries.numpy()),
    "MahalanobisClassifier.predict_proba": lambda world, folder: world.vectors.predict_proba(world.queries.numpy()),
    "MahalanobisClassifier.decision_function": lambda world, folder: world.vectors.decision_function(
        world.queries.numpy()
    ),
    "MahalanobisClassifier.save and load": saved_vectors,
    "MahalanobisClassifier.export_onnx": exported_vectors,
    "SimpleCNAPS.forward": logits_without_gradients,
    "SimpleCNAPS.adapt": adapted,
    "SimpleCNAPS.save_pretrained": written_checkpoint,
    "SimpleCNAPS.from_pretrained": lambda world, folder: SimpleCNAPS.from_pretrained(str(world.checkpoint)),
    "available_checkpoints": lambda world, folder: [record.name for record in available_checkpoints().values()],
    "load_checkpoint by name": lambda world, folder: load_checkpoint("default"),
    "load_checkpoint by path": lambda world, folder: load_checkpoint(world.checkpoint),
    "fit": fitted_images,
    "partial_fit": partly_fitted_images,
    "predict": lambda world, folder: world.fitted.predict(world.images[:2]),
    "predict_proba": lambda world, folder: world.fitted.predict_proba(world.images[:2]),
    "predict_log_proba": lambda world, folder: world.fitted.predict_log_proba(world.images[:2]),
    "decision_function": lambda world, folder: world.fitted.decision_function(world.images[:2]),
    "transform": lambda world, folder: world.fitted.transform(world.images[:2]),
    "AdaptedFeatures": lambda world, folder: (
        AdaptedFeatures(world.model, device="cpu").fit(world.images).transform(world.images[:2])
    ),
    "Region": lambda world, folder: world.fitted.transform([Region(world.images[0], (2, 3, 20, 10))]),
    "features": lambda world, folder: world.fitted.features(world.images[:2]).adapted,
    "image_batches": lambda world, folder: list(world.fitted.image_batches(world.images[:2])),
    "summary": lambda world, folder: str(world.fitted.summary()),
    "score": lambda world, folder: world.fitted.score(world.images, world.names),
    "save": saved,
    "load": lambda world, folder: SimpleCNAPSClassifier.load(world.saved, device="cpu").transform(world.images[:2]),
    "pickling": lambda world, folder: pickle.loads(pickle.dumps(world.fitted)).transform(world.images[:2]),
    "temperature and unknown_label": rejecting,
    "export_onnx": exported,
    "export_program": exported_program,
    "export_page": exported_page,
    "push_to_hub": pushed,
    "from_pretrained": lambda world, folder: SimpleCNAPSClassifier.from_pretrained(world.saved.parent).transform(
        world.images[:2]
    ),
    "from_backbone": on_a_backbone,
    "evaluate_source": evaluated,
    "load_folder": listed,
    "plots": drawn,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "export_" in n else ()) for n in CALLS])
def test_a_call_leaves_the_process_as_it_was_and_repeats_to_the_bit(name: str, world: World, tmp_path: Path) -> None:
    call = CALLS[name]
    fitted = [
        world.fitted.model_,
        world.fitted.fitted_head_.support.adapted,
        world.fitted.classes_,
        world.vectors.means_,
    ]
    arguments = [world.features, world.labels, world.queries, world.model, world.images, *fitted]
    before = bits(arguments)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with process_unchanged():
        first = bits(call(world, tmp_path / "first"))
    with other_process_state(), process_unchanged():
        second = bits(call(world, tmp_path / "second"))
    assert first == second
    assert bits(arguments) == before


def test_logits_with_gradients_are_those_without_to_1e_5(world: World) -> None:
    logits = world.model(images_of(world), codes_of(world), images_of(world)[:2])
    assert logits.requires_grad
    torch.testing.assert_close(logits.detach(), logits_without_gradients(world, Path()), rtol=1e-5, atol=0.0)


def test_every_public_name_and_every_method_of_the_classifiers_is_called_here() -> None:
    called = inspect.getsource(sys.modules[__name__]).partition("def test_")[0]
    heads = {head.__name__ for head in HEADS.values()}
    assert [name for name in fewshot_mahalanobis.__all__ if f"{name}(" not in called and name not in heads] == []
    for estimator in (SimpleCNAPSClassifier, MahalanobisClassifier, AdaptedFeatures):
        own = vars(estimator).items()
        methods = [name for name, value in own if isinstance(value, FunctionType | classmethod) and name[0] != "_"]
        assert [name for name in methods if f".{name}(" not in called] == []


def test_training_leaves_the_process_as_it_was_and_repeats_to_the_bit(tmp_path: Path) -> None:
    root = tmp_path / "source"
    for k in range(5):
        (root / f"class{k}").mkdir(parents=True)
        for i, image in enumerate(random_images(3, seed=k)):
            Image.fromarray(image).save(root / f"class{k}" / f"{i}.png")
    phases = ((1.0, SIZE),)
    first = PretrainRecipe((str(root),), epochs=1, batch_size=8, phases=phases, image_size=SIZE)

    def trained(folder: Path) -> Any:
        backbone = pretrain(first, folder / "backbone", device="cpu", progress=False)
        second = MetaTrainRecipe(
            (str(root),),
            str(tmp_path / "run0" / "backbone" / "backbone.safetensors"),
            tasks=1,
            tasks_per_step=1,
            phases=phases,
            model={"image_size": SIZE},
        )
        return bits([backbone, meta_train(second, folder / "model", device="cpu", progress=False)])

    with process_unchanged():
        weights = trained(tmp_path / "run0")
    with other_process_state():
        torch.set_grad_enabled(True)  # training needs gradients
        with process_unchanged():
            assert trained(tmp_path / "run1") == weights


@pytest.mark.process
@pytest.mark.slow
def test_importing_every_module_leaves_the_process_as_it_was() -> None:
    """In a fresh interpreter, in which the packages that it depends on are imported already."""
    program = f"""
from __future__ import annotations
import contextlib, copy, importlib, locale, logging, os, pkgutil, random, signal, socket, sys, warnings
from pathlib import Path
from typing import Any
import matplotlib, numpy as np, torch
from PIL import Image, ImageFile
import filelock, hypothesis, hypothesis.extra.numpy, huggingface_hub, joblib, matplotlib.figure, matplotlib.patches
import platformdirs, requests, safetensors.torch
import scipy, sklearn.base, sklearn.covariance, sklearn.datasets, sklearn.utils.validation, tqdm.auto, typer
import torch.utils.data
{inspect.getsource(process_state)}
before = process_state()
import fewshot_mahalanobis
for module in pkgutil.walk_packages(fewshot_mahalanobis.__path__, "fewshot_mahalanobis."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert "fewshot-mahalanobis[" in str(error), error
after = process_state()
sys.exit(", ".join(name for name in before if before[name] != after[name]) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_the_batch_size_moves_features_by_rounding_alone(batch_size: int, world: World) -> None:
    """Convolutions add in an order that may depend on the batch: float32 features agree to 2^-16 of the largest."""
    whole = world.fitted.transform(world.images)
    classifier = classifier_of(world).set_params(batch_size=batch_size)
    features = classifier.transform(world.images)
    assert np.abs(features - whole).max() <= 2.0**-16 * np.abs(whole).max()
    decoded = torch.cat(list(ImageBatches(world.images, SIZE, batch_size=batch_size)))
    assert torch.equal(decoded, images_of(world))
