"""Methods on the network: episodes in, logits out; gradient steps against a plain loop; files; both commands."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

import fewshot_mahalanobis
from fewshot_mahalanobis import SimpleCNAPS
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.checkpoints import CheckpointError, save_checkpoint
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.research.baselines import METHODS
from fewshot_mahalanobis.research.baselines.baseline import Baseline, read_baseline
from fewshot_mahalanobis.research.baselines.maml import MAML
from fewshot_mahalanobis.research.data.sources import load_source
from fewshot_mahalanobis.research.evaluation.accuracy import Variant, head_of
from fewshot_mahalanobis.research.training.meta_train import meta_train
from fewshot_mahalanobis.research.training.tasks import TrainingTasks
from tests.research.training.small import draw_colours, meta_recipe

pytestmark = [pytest.mark.usefixtures("narrow_resnet18"), pytest.mark.training]


def make(name: str, **settings: Any) -> Baseline:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Baseline(head=name, image_size=32, **settings)


@pytest.fixture(scope="module")
def task() -> tuple[Tensor, Tensor, Tensor]:
    """Support images (5, 3, 32, 32) of three classes, labels, and query images (4, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(9, 3, 32, 32, generator=generator) * 2 - 1
    return images[:5], torch.tensor([0, 2, 1, 0, 2]), images[5:]


@pytest.mark.parametrize("name", ["protonet", "tadam", "leo", "gidaris"])
def test_an_adapted_task_gives_the_logits_of_the_forward_pass(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    model = make(name)
    logits = model(*task)
    assert logits.shape == (4, 3)
    torch.testing.assert_close(model.adapt(*task[:2]).logits(task[2]), logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["maml", "protomaml"])
def test_first_order_maml_against_a_plain_loop(name: str, task: tuple[Tensor, Tensor, Tensor]) -> None:
    support, labels, queries = task
    model = make(name)
    assert isinstance(model.head, MAML)
    model.head.training_steps, model.head.steps, model.head.learning_rate = 2, 2, 0.003
    right = torch.tensor([1, 0, 2, 1])
    logits = model(support, labels, queries)
    F.cross_entropy(logits, right).backward()

    network = copy.deepcopy(model.feature_extractor)
    features = network(support).detach()
    means = torch.stack([features[labels == k].mean(dim=0) for k in range(3)])
    weight, bias = (2 * means, -means.square().sum(1)) if name == "protomaml" else (0 * means, torch.zeros(3))
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    convolutions = [w for w in network.parameters() if w.ndim == 4]
    steps = torch.optim.SGD([*convolutions, weight, bias], lr=0.003)
    for _ in range(2):
        steps.zero_grad()
        F.cross_entropy(F.linear(network(support), weight, bias), labels).backward()
        steps.step()
    network.zero_grad()
    expected = F.linear(network(queries), weight, bias)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.adapt(support, labels).logits(queries), logits, rtol=1e-3, atol=1e-3)
    if name == "maml":  # the gradient at the weights after the steps is the first-order one; prototypes add theirs
        F.cross_entropy(expected, right).backward()
        for mine, theirs in zip(model.feature_extractor.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-5)


def test_gidaris_attends_to_other_classes_than_those_of_the_task() -> None:
    head = make("gidaris").head
    generator = torch.Generator().manual_seed(0)
    base = F.normalize(torch.randn(6, 64, generator=generator), dim=1)
    features, labels = torch.randn(3, 64, generator=generator), torch.tensor([0, 1, 1])
    query = torch.randn(1, 64, generator=generator)
    head.imprint(base)
    head.hidden = torch.tensor([1, 4])
    weights = []
    for x in F.normalize(features, dim=1):
        attention = torch.stack([torch.exp(10 * (x @ base[b])) for b in (0, 2, 3, 5)])
        weights.append(x + (attention / attention.sum()) @ base[[0, 2, 3, 5]])
    novel = [weights[0], (weights[1] + weights[2]) / 2]
    expected = [10 * float(F.cosine_similarity(query[0], w, dim=0)) for w in novel]
    assert head(features, labels, query)[0].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("name", "message"), [("knn", "has nothing to train"), ("protonets", "there is no method")])
def test_what_cannot_be_trained_is_said(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``colours``, a source; ``backbone.safetensors``, random weights; ``checkpoint``, a model that does not adapt."""
    root = tmp_path_factory.mktemp("methods")
    draw_colours(root / "colours")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_file(FilmResNet18().state_dict(), root / "backbone.safetensors")
        save_checkpoint(SimpleCNAPS(adaptation="none", image_size=32), root / "checkpoint")
    return root


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"knn", "finetune", "maml"}))  # MAML is slow, as Proto-MAML
def test_a_method_is_trained_and_read_again(name: str, folder: Path) -> None:
    recipe = meta_recipe(str(folder / "colours"), folder, method=name, tasks=2, precision="float32")
    model = meta_train(recipe, folder / name, device="cpu", progress=False)
    record = json.loads((folder / name / "log.jsonl").read_text().splitlines()[-1])
    assert np.isfinite(record["loss"])
    before = load_file(folder / "backbone.safetensors")["conv1.weight"]
    assert torch.equal(before, model.feature_extractor.conv1.weight) != METHODS[name].trains_network
    again = read_baseline(folder / name / "checkpoint")
    assert again.config == model.config
    assert (folder / name / "checkpoint" / "README.md").read_text().startswith(f"# {METHODS[name].title}")
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], weight, rtol=1e-3, atol=1e-4)  # float16


def test_a_task_names_its_classes_among_those_of_all_sources(folder: Path) -> None:
    source = load_source(folder / "colours", size=32)
    recipe = meta_recipe("first", folder, sources=("first", "first", "second"))
    tasks = TrainingTasks([source, source, source], recipe, 32)
    seen = {tuple((tasks[number].classes // 6).unique().tolist()) for number in range(8)}
    assert seen == {(0,), (1,)}  # classes 0 to 5 are of the first source, 6 to 11 of the second
    assert all(len(tasks[number].classes) == 5 for number in range(8))


def run(folder: Path, *options: Any, status: int = 0) -> str:
    settings = ("--checkpoint", folder / "checkpoint", "--device", "cpu", "--episodes", 2, "--queries", 1, "--shot", 1)
    result = CliRunner().invoke(app, ["evaluate", *map(str, (folder / "colours", *settings, *options))])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_methods_are_rows_beside_simple_cnaps(folder: Path, tmp_path: Path) -> None:
    for name in ("protomaml", "protonet"):
        make(name).save(tmp_path / name)
    names = ["knn", "protonet", tmp_path / "protomaml", tmp_path / "protonet"]
    options = [text for name in names for text in ("--method", name)]
    (folder / "mnist").symlink_to(folder / "colours")
    table = run(folder, *options, "-o", tmp_path / "r.json", folder / "mnist").splitlines()
    assert [cell.strip() for cell in table[0].split("|")[1:5]] == [
        "method", "colours, 5-way 1-shot", "mnist, 5-way 1-shot", "average of 2, 5-way 1-shot",
    ]  # fmt: skip
    rows = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in table[2:] if line.startswith("|")}
    assert list(rows) == [
        "Simple CNAPS, not adapted", "k-NN", "ProtoNet, frozen network", "first-order Proto-MAML", "ProtoNet",
        "paper: ProtoNet",
    ]  # fmt: skip
    assert rows["paper: ProtoNet"] == "74.3 ± 0.8*"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "maml"), "maml needs training"),
        (("--method", "nothing"), "there is no method 'nothing' and no such folder"),
        (("--method", "knn", "--method", "knn"), "two methods are called 'k-NN'"),
    ],
)
def test_a_method_that_cannot_be_evaluated_is_said(folder: Path, options: tuple[str, ...], message: str) -> None:
    assert message in run(folder, *options, status=1)


def test_a_trained_method_stays_at_its_image_size(folder: Path, tmp_path: Path) -> None:
    make("protonet").save(tmp_path)
    assert "--image-size is for checkpoints" in run(folder, "--method", tmp_path, "--image-size", 48, status=1)
    assert "ProtoNet, frozen network" in run(folder, "--method", "protonet", "--image-size", 48)


def test_a_checkpoint_of_simple_cnaps_is_no_method(folder: Path) -> None:
    with pytest.raises(CheckpointError):
        read_baseline(folder / "checkpoint")


def test_a_trained_method_is_no_simple_cnaps_and_nobody_asks_which_it_is() -> None:
    assert not isinstance(make("protonet"), SimpleCNAPS)
    package = Path(fewshot_mahalanobis.__file__).parent
    files = [*(package / "research").rglob("*.py"), package / "apps" / "cli_research.py"]
    questions = [file.name for file in files if re.search(r"isinstance\([^)]*(Baseline|SimpleCNAPS)", file.read_text())]
    assert questions == []


def test_a_trained_method_has_no_other_head() -> None:
    model = make("protonet")
    assert head_of(model, Variant(False, "protonet")) is model.head
    with pytest.raises(ValueError, match="trained with the method 'protonet', not with 'cosine'"):
        head_of(model, Variant(False, "cosine"))
