"""Both training commands on a small source that the tests draw: they learn, report, start from what they are given."""

import copy
import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.checkpoints import load, save_checkpoint
from fewshot_mahalanobis.checkpoints.load import resnet18_weights
from fewshot_mahalanobis.networks.efficientnet import LITE0, EfficientNet
from fewshot_mahalanobis.networks.pooling import read_statistics
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.research.data.datasets import open_training_source
from fewshot_mahalanobis.research.data.sources import ImageSource, load_source
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes, episode_rng
from fewshot_mahalanobis.research.training import meta_train as meta_training
from fewshot_mahalanobis.research.training import run
from fewshot_mahalanobis.research.training.augment import augment_task, cut_to_ink, is_grey
from fewshot_mahalanobis.research.training.best_checkpoint import better_on_most, validation_due
from fewshot_mahalanobis.research.training.meta_train import learning_rate as meta_learning_rate
from fewshot_mahalanobis.research.training.meta_train import meta_train
from fewshot_mahalanobis.research.training.pretrain import (
    TEACHER_WEIGHT,
    NearestMean,
    PositionClassifier,
    Teacher,
    TrainingImages,
    class_loss,
    learning_rate,
    pretrain,
)
from fewshot_mahalanobis.research.training.recipes import MetaTrainRecipe, PretrainRecipe
from fewshot_mahalanobis.research.training.run import RunFolder
from fewshot_mahalanobis.research.training.starting_learner import scale_features_, starting_learner
from fewshot_mahalanobis.research.training.tasks import TrainingTasks
from tests.research.training.small import PRETRAIN, draw_colours, meta_recipe
from tests.tiny import task_representation

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("narrow_resnet18")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draw_colours(tmp_path_factory.mktemp("sources") / "colours")


@pytest.mark.parametrize(("wanted", "drawn"), [(96, 96), (288, 160)])
def test_glyphs_are_drawn_no_larger_than_drawing_thousands_allows(monkeypatch, wanted, drawn):
    monkeypatch.setattr("fewshot_mahalanobis.research.data.glyphs.draw_glyphs", lambda size: size)
    assert open_training_source("glyphs", root=None, size=wanted, lazy=False) == drawn


@pytest.fixture(scope="module")
def backbone(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "backbone"
    pretrain(PretrainRecipe((folder,), folder, **PRETRAIN), output, device="cpu", progress=False)
    return output


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_pretraining_writes_a_backbone_that_loads_and_reports(backbone):
    weights = load_file(backbone / "backbone.safetensors")
    FilmResNet18().load_state_dict(weights)
    log = log_of(backbone)
    assert log[-1]["step"] == 12
    assert [record["validation"] for record in log if "validation" in record][-1] > 0.2


def test_a_command_that_failed_does_not_keep_its_folder(folder, tmp_path):
    with pytest.raises(FileNotFoundError):
        pretrain(PretrainRecipe(("nowhere",), **PRETRAIN), tmp_path, device="cpu", progress=False)
    pretrain(PretrainRecipe((folder,), **{**PRETRAIN, "epochs": 1}), tmp_path, device="cpu", progress=False)
    assert json.loads((tmp_path / "recipe.json").read_text())["sources"] == [folder]


@pytest.mark.parametrize("content", [b"", b"no state"])
def test_a_damaged_state_is_named_with_what_to_do(tmp_path, content):
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"state\.pt is damaged: delete it"):
        RunFolder(tmp_path, {"a": 1}).resume()


def test_a_file_of_another_network_is_no_backbone(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="120 tensors are missing"):
        resnet18_weights(str(tmp_path / "other.safetensors"))


def test_training_that_diverges_is_an_error_and_writes_no_backbone(folder, tmp_path):
    recipe = PretrainRecipe((folder,), **{**PRETRAIN, "peak_lr": 1e30})
    with pytest.raises(ValueError, match="NaN or infinite"):
        pretrain(recipe, tmp_path, device="cpu", progress=False)
    assert not (tmp_path / "backbone.safetensors").exists()


def test_another_recipe_in_the_same_folder_is_refused(folder, backbone):
    with pytest.raises(ValueError, match=r"another recipe \(different: peak_lr\)"):
        pretrain(PretrainRecipe((folder,), folder, **{**PRETRAIN, "peak_lr": 0.1}), backbone, progress=False)


@pytest.mark.parametrize("given", ["file", "checkpoint"])
def test_pretraining_starts_from_the_weights_it_is_given(folder, backbone, tmp_path, given):
    init = str(backbone / "backbone.safetensors" if given == "file" else tmp_path / "checkpoint")
    if given == "checkpoint":
        save_checkpoint(SimpleCNAPS(adaptation="none"), init)
    settings = {**PRETRAIN, "epochs": 1, "peak_lr": 1e-9}  # too small a step to leave the start
    pretrain(PretrainRecipe((folder,), init=init, **settings), tmp_path / "run", device="cpu", progress=False)
    end = load_file(tmp_path / "run" / "backbone.safetensors")
    start = load_file(init) if given == "file" else load_checkpoint(init).feature_extractor.state_dict()
    trained = [name for name, _ in FilmResNet18().named_parameters()]
    for name in trained:
        torch.testing.assert_close(end[name], start[name], rtol=1e-5, atol=1e-6)


def test_images_follow_from_seed_and_number_and_cover_the_epoch(folder):
    recipe = PretrainRecipe((folder,), **PRETRAIN)
    images, again = (TrainingImages([load_source(folder, size=40)], recipe) for _ in range(2))
    assert images.steps == 12
    assert len(images) == 96
    for number in (39, 2, 95):  # in any order
        assert torch.equal(images[number][0], again[number][0])
    assert again[2][0].shape == (3, 32, 32)
    assert again[95][0].shape == (3, 40, 40)
    for epoch in (range(48), range(48, 96)):
        assert torch.stack([images[i][1] for i in epoch]).bincount().tolist() == [8] * 6
    assert not torch.equal(TrainingImages([load_source(folder, size=40)], replace(recipe, seed=1))[2][0], images[2][0])


def test_images_decoded_when_asked_for_are_the_same_and_give_no_warning(folder):
    recipe = PretrainRecipe((folder,), **PRETRAIN)
    at_once = TrainingImages([load_source(folder, size=40)], recipe)
    later = TrainingImages([load_source(folder, size=40, lazy=True)], recipe)
    torch.set_warn_always(True)  # else PyTorch warns once in a process, and perhaps did before
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for one, other in zip(at_once[7], later[7], strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_warn_always(False)


def test_a_backbone_that_has_to_tell_quarter_turns_learns_to(tmp_path):
    """Only the rotation can be learnt: both classes are noise with a bright upper half."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 120, (48, 24, 24, 3), dtype=np.uint8)
    pictures[:, :12] += 120
    for number, picture in enumerate(pictures):
        path = tmp_path / "source" / f"c{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    source = str(tmp_path / "source")
    settings = {**PRETRAIN, "epochs": 8, "batch_size": 24, "peak_lr": 0.1, "rotation": 0.75}
    settings |= {"image_size": 24, "phases": ((1.0, 24),)}
    pretrain(PretrainRecipe((source,), **settings), tmp_path / "run", device="cpu", progress=False)
    losses = [record["loss"] for record in log_of(tmp_path / "run")]
    guess = math.log(2) + math.log(4)
    assert losses[0] > 0.8 * guess
    assert losses[-1] < guess - 0.5 * math.log(4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_dense_loss_is_the_mean_over_positions_and_the_other_that_of_the_mean(smoothing):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 9, 5, generator=generator)
    labels = torch.randint(5, (4,), generator=generator)
    plain = PretrainRecipe(("a",), label_smoothing=smoothing)
    at_each = [F.cross_entropy(outputs[:, p], labels, label_smoothing=smoothing) for p in range(9)]
    of_mean = F.cross_entropy(outputs.mean(1), labels, label_smoothing=smoothing)
    torch.testing.assert_close(class_loss(outputs, labels, replace(plain, dense=True)), sum(at_each) / 9)
    torch.testing.assert_close(class_loss(outputs, labels, plain), of_mean)


def test_the_mean_over_positions_is_the_output_for_the_features(folder):
    images = load_source(folder, size=40).network_input(range(12))
    model = PositionClassifier(FilmResNet18(), 7).eval()
    with torch.no_grad():
        outputs = model(images)
        torch.testing.assert_close(outputs.mean(1), model.linear(model.backbone(images)), rtol=1e-4, atol=1e-4)
    assert outputs.shape == (12, 9, 7)


def test_a_dense_backbone_learns_the_classes(folder, tmp_path):
    settings = {**PRETRAIN, "epochs": 8, "batch_size": 24, "peak_lr": 0.02, "dense": True}
    settings |= {"image_size": 24, "phases": ((1.0, 24),)}
    pretrain(PretrainRecipe((folder,), **settings), tmp_path, device="cpu", progress=False)
    assert log_of(tmp_path)[-1]["loss"] < 0.5 * math.log(6)


def test_a_backbone_with_a_teacher_learns_its_features(folder, tmp_path):
    settings = {**PRETRAIN, "epochs": 8, "batch_size": 24, "peak_lr": 0.1, "teacher": LITE0, "teacher_size": 32}
    settings |= {"image_size": 24, "phases": ((1.0, 24),)}
    pretrain(PretrainRecipe((folder,), **settings), tmp_path, device="cpu", progress=False)
    losses = [record["loss"] for record in log_of(tmp_path)]
    assert losses[-1] < 0.5 * TEACHER_WEIGHT  # without a guess, standardised features have a mean square of 1


def test_the_features_of_a_teacher_are_standardised_over_the_batch(folder):
    images = load_source(folder, size=40).network_input(range(12))
    features = Teacher(LITE0, 32, torch.float32)(images)
    resized = F.interpolate(images, (32, 32), mode="bilinear", antialias=True)
    raw = EfficientNet.pretrained(32)(resized)
    torch.testing.assert_close(
        features, (raw - raw.mean(0)) / (raw.var(0, correction=0) + 1e-5).sqrt(), rtol=1e-3, atol=1e-3
    )


def test_sources_with_a_class_in_common_share_its_label(folder):
    source = load_source(folder, size=40)
    half = replace(source, name="half", images=source.images[:16], labels=source.labels[:16], class_names=("c0", "c1"))
    images = TrainingImages([source, half], PretrainRecipe((folder,), **PRETRAIN))
    assert len(images.class_names) == 6
    assert images.labels.bincount().tolist() == [16, 16, 8, 8, 8, 8]


def test_learning_rates_warm_up_peak_and_fall_to_zero():
    recipe = PretrainRecipe(("a",))
    rates = [learning_rate(step, 1000, recipe) for step in range(1000)]
    assert max(rates) == pytest.approx(recipe.peak_lr, rel=1e-3)
    assert rates[0] < 0.05 * recipe.peak_lr
    assert rates[-1] < 1e-3 * recipe.peak_lr
    assert all(a >= b for a, b in pairwise(rates[50:]))
    cosine = MetaTrainRecipe(("a",), "b", schedule="cosine")
    meta = [meta_learning_rate(step, 100, cosine) for step in range(100)]
    assert max(meta) == pytest.approx(5e-4, rel=0.01)
    assert meta[-1] < 1e-6
    assert meta_learning_rate(99, 100, MetaTrainRecipe(("a",), "b")) == 5e-4  # the paper's is constant


def test_the_default_recipe_is_the_paper_s():
    """Appendix "Experimental details" of Bateni et al., CVPR 2020."""
    recipe = MetaTrainRecipe(("a",), "b").on_device("cuda")
    assert MetaTrainRecipe(("a",), "b").on_device("cpu").tasks_per_step == 4
    assert MetaTrainRecipe(("a",), "b", tasks_per_step=3).on_device("cpu").tasks_per_step == 3
    assert (recipe.tasks, recipe.tasks_per_step, recipe.learning_rate, recipe.penalty) == (110_000, 16, 0.0005, 0.001)
    assert recipe.tasks // recipe.tasks_per_step == 6_875  # gradient steps
    due = [step for step in range(6_875) if validation_due(step, recipe)]
    assert [(step + 1) * 16 for step in due] == list(range(10_000, 110_001, 10_000))
    assert (recipe.episodes, recipe.max_way, recipe.max_support, recipe.augment) == ("variable", 40, 400, False)


def test_a_step_that_passes_several_validations_validates_once():
    recipe = MetaTrainRecipe(("a",), "b", tasks=64, tasks_per_step=16, validate_every=24)
    assert [validation_due(step, recipe) for step in range(4)] == [False, True, True, False]


def test_better_is_better_on_at_least_half_of_the_sources():
    best = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}
    assert better_on_most(best, None)
    assert not better_on_most(best, best)
    assert better_on_most({"a": 0.51, "b": 0.51, "c": 0.1, "d": 0.1}, best)
    assert not better_on_most({"a": 0.9, "b": 0.5, "c": 0.5, "d": 0.5}, best)
    assert better_on_most({"a": 0.6}, {"a": 0.5})


def test_meta_training_changes_the_adapters_alone_and_writes_a_checkpoint(folder, backbone, tmp_path):
    recipe = meta_recipe(folder, backbone, validation=(folder,), feature_scale=2.0, tasks=8)
    model = meta_train(recipe, tmp_path, device="cpu", progress=False)
    loaded = load_checkpoint(tmp_path / "checkpoint")
    assert loaded.config == model.config
    half = {name: value.half().float() if value.ndim > 1 else value for name, value in model.state_dict().items()}
    assert all(torch.equal(value, half[name]) for name, value in loaded.state_dict().items())
    start = load_file(backbone / "backbone.safetensors")
    assert torch.equal(model.feature_extractor.conv1.weight, start["conv1.weight"])
    assert torch.equal(model.feature_extractor.layers[3][1].bn2.running_mean, start["layers.3.1.bn2.running_mean"])
    log = log_of(tmp_path)
    assert [record["step"] for record in log] == [1, 2, 3, 4]
    assert 0 <= log[-1]["validation"][folder] <= 1


def test_adaptation_networks_are_taken_over_as_they_are_whatever_the_feature_scale(folder, backbone, tmp_path):
    meta_train(meta_recipe(folder, backbone, feature_scale=0.2), tmp_path, device="cpu", progress=False)
    trained = load_checkpoint(tmp_path / "checkpoint").state_dict()
    on = starting_learner(meta_recipe(folder, backbone, feature_scale=0.2, init=str(tmp_path / "checkpoint"))).model
    for name, weight in on.state_dict().items():
        torch.testing.assert_close(weight, trained[name], rtol=1e-3, atol=1e-3)  # the backbone was stored in float16
        if not name.startswith("feature_extractor."):
            assert torch.equal(weight, trained[name]), name


def test_a_finished_run_started_again_keeps_the_scale_it_learned(folder, backbone, tmp_path):
    recipe = meta_recipe(folder, backbone, learn_scale=True, learning_rate=0.01)
    scale = meta_train(recipe, tmp_path, device="cpu", progress=False).head.scale
    assert scale != SimpleCNAPS(image_size=32).head.scale
    again = meta_train(recipe, tmp_path, device="cpu", progress=False)
    assert again.head.scale == load_checkpoint(tmp_path / "checkpoint").head.scale == scale


POOLING = [
    {"maps": "final"},
    {"maps": "last_block", "weight": 0.6, "sigma": 1.0},
    {"maps": "final", "weight": 0.5, "sigma": 0.7},
]


def lite0_recipe(folder, **settings):
    model = {"image_size": 32, "head": "auto", "frozen_features": True, **settings.pop("model", {})}
    own = {"tasks": 6, "tasks_per_step": 2, "learning_rate": 0.01, "episodes": "fixed", "way": 3, "shot": 1}
    more = {"queries": 2, "precision": "float32", **settings}
    return MetaTrainRecipe((folder,), LITE0, model=model, **own, **more)


@pytest.mark.slow
def test_a_run_learns_the_pooling_and_goes_on_where_it_was_interrupted(folder, tmp_path, monkeypatch):
    recipe = lite0_recipe(folder, model={"image_size": 96, "pooling": POOLING}, learn_pooling=True, average=0.5)
    unbroken = meta_train(recipe, tmp_path / "unbroken", device="cpu", progress=False)
    found = unbroken.config["backbone"]["pooling"]
    assert found[0] == {"maps": "final", "kind": "mean", "exponent": 1.0, "weight": 1.0}  # of which nothing is learned
    for number, name in [(1, "weight"), (1, "sigma"), (2, "weight"), (2, "sigma")]:
        assert 0.001 < abs(math.log(found[number][name] / POOLING[number][name])) < 1
    assert load_checkpoint(tmp_path / "unbroken" / "checkpoint").config == unbroken.config

    def interrupted(step, *arguments):
        if step == 2:
            raise KeyboardInterrupt
        return meta_learning_rate(step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(meta_training, "learning_rate", interrupted)
        patch.setattr(run, "SAVE_EVERY", 0.0)
        with pytest.raises(KeyboardInterrupt):
            meta_train(recipe, tmp_path / "broken", device="cpu", progress=False)
    resumed = meta_train(recipe, tmp_path / "broken", device="cpu", progress=False)
    assert resumed.config == unbroken.config
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, unbroken.state_dict()[name]), name


def test_the_weights_of_the_last_steps_are_averaged(folder, backbone, tmp_path, monkeypatch):
    states = []
    recipe = meta_recipe(folder, backbone, tasks=6, learning_rate=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", lambda run, state, now: states.append(copy.deepcopy(state()["model"])))
        meta_train(recipe, tmp_path / "plain", device="cpu", progress=False)
    averaged = meta_train(replace(recipe, average=2 / 3), tmp_path / "averaged", device="cpu", progress=False)
    _, second, third = states
    moved = 0.0
    for name, weight in averaged.named_parameters():
        wanted = (second[f"model.{name}"] + third[f"model.{name}"]) / 2
        torch.testing.assert_close(weight, wanted, rtol=1e-4, atol=1e-6, msg=name)
        moved += float((weight - third[f"model.{name}"]).detach().abs().sum())
    assert moved > 0


def test_statistics_that_a_checkpoint_lacks_do_not_change_its_task_representation(folder, tmp_path):
    backbone = EfficientNet.pretrained(32, None, read_statistics(POOLING[:2]))
    first = SimpleCNAPS(image_size=32, head="auto", frozen_features=True, backbone=backbone)
    torch.nn.init.normal_(first.feature_encoder.weight, std=0.1)
    first.save_pretrained(tmp_path)
    recipe = lite0_recipe(folder, model={"pooling": POOLING}, init=str(tmp_path))
    model, support = starting_learner(recipe).model, torch.rand(5, 3, 32, 32) * 2 - 1
    assert model.feature_encoder.in_features == 2 * (1280 + 320 + 1280)
    with torch.no_grad():
        wanted = task_representation(first, support)
        torch.testing.assert_close(task_representation(model, support), wanted, rtol=1e-4, atol=1e-5)
        assert wanted.abs().max() > 0.1
    other = lite0_recipe(folder, model={"pooling": POOLING[1:]}, init=str(tmp_path))
    with pytest.raises(ValueError, match="belongs to another model"):
        starting_learner(other)
    for length in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"Expected `float` > 0.0 - at `\$.backbone.length`"):
            starting_learner(lite0_recipe(folder, model={"length": length}))
    kept = lite0_recipe(
        folder, model={"pooling": POOLING[2:], "length": 23.0, "frozen_pooling": POOLING[:2]}, init=str(tmp_path)
    )
    model = starting_learner(kept).model
    assert model.feature_extractor.out_features == 1280
    with torch.no_grad():
        torch.testing.assert_close(task_representation(model, support), wanted, rtol=1e-4, atol=1e-5)


def test_the_pooling_of_the_film_resnet18_is_not_learned(folder, backbone):
    with pytest.raises(ValueError, match="learn_pooling is for an EfficientNet"):
        starting_learner(meta_recipe(folder, backbone, learn_pooling=True))


def test_the_best_checkpoint_is_that_of_the_best_validation(folder, backbone, tmp_path, monkeypatch):
    """Validation accuracies are played: 0.3, 0.6, 0.5, 0.2 after the four steps."""
    played = iter([0.3, 0.6, 0.5, 0.2])
    monkeypatch.setattr(meta_training, "validate", lambda *arguments, **options: {folder: next(played)})
    recipe = meta_recipe(folder, backbone, validation=(folder,), validate_every=2, tasks=8)
    seen = []
    save = meta_training.CNAPSLearner.forward

    def forward(self, *arguments):
        seen.append(self.model.film_generator.layers[0].shared[0].weight.detach().clone())
        return save(self, *arguments)

    monkeypatch.setattr(meta_training.CNAPSLearner, "forward", forward)
    meta_train(recipe, tmp_path, device="cpu", progress=False)
    best = load_checkpoint(tmp_path / "best").film_generator.layers[0].shared[0].weight
    assert torch.equal(best, seen[4].half().float())  # the weights that the third step starts with
    assert not torch.equal(best, load_checkpoint(tmp_path / "checkpoint").film_generator.layers[0].shared[0].weight)


def test_loss_and_gradient_of_a_step_are_means_over_its_tasks_and_the_penalty_counts_once(folder, backbone, tmp_path):
    """Against a plain loop: Adam's first step moves every weight by its rate, against the sign of the gradient."""
    recipe = meta_recipe(folder, backbone, tasks=2, precision="float32", penalty=30.0)
    trained = meta_train(recipe, tmp_path, device="cpu", progress=False)
    model = starting_learner(recipe).model
    tasks = TrainingTasks([load_source(folder, size=32)], recipe, 32)
    losses = []
    for task in (tasks[0], tasks[1]):
        logits = model(task.support_images, task.support_labels, task.query_images)
        losses.append(torch.nn.functional.cross_entropy(logits, task.query_labels))
    scales = [p for name, p in model.film_generator.named_parameters() if ".scales." in name]
    (sum(losses) / 2 + 30.0 * sum((p**2).sum() for p in scales)).backward()
    assert log_of(tmp_path)[0]["loss"] == pytest.approx((sum(losses) / 2).item(), rel=1e-5)
    for (name, before), after in zip(model.named_parameters(), trained.parameters(), strict=True):
        if before.grad is not None:
            expected = before - recipe.learning_rate * before.grad / (before.grad.abs() + 1e-8)
            sure = before.grad.abs() > 1e-6  # smaller ones are rounding noise
            torch.testing.assert_close(after[sure], expected[sure], rtol=1e-4, atol=1e-5, msg=name)


def test_the_floor_adds_what_the_loss_exceeds_that_without_adaptation(folder, backbone, tmp_path):
    """Against a plain loop: Adam's first step moves every weight by its rate, against the sign of the gradient."""
    recipe = meta_recipe(folder, backbone, tasks=2, precision="float32", penalty=0.0, floor=3.0)
    trained = meta_train(recipe, tmp_path, device="cpu", progress=False)
    model = starting_learner(recipe).model
    tasks = TrainingTasks([load_source(folder, size=32)], recipe, 32)
    objective = torch.zeros(())
    for task in (tasks[0], tasks[1]):
        logits = model(task.support_images, task.support_labels, task.query_images)
        with torch.no_grad():
            features = [model.feature_extractor(images) for images in (task.support_images, task.query_images)]
            before = model.head(features[0], task.support_labels, features[1])
        loss, floor = (torch.nn.functional.cross_entropy(x, task.query_labels) for x in (logits, before))
        objective = objective + (loss + 3.0 * (loss - floor).clamp(min=0)) / 2
    objective.backward()
    for (name, start), after in zip(model.named_parameters(), trained.parameters(), strict=True):
        if start.grad is not None:
            expected = start - recipe.learning_rate * start.grad / (start.grad.abs() + 1e-8)
            sure = start.grad.abs() > 1e-6
            torch.testing.assert_close(after[sure], expected[sure], rtol=1e-4, atol=1e-5, msg=name)


def test_sizes_are_drawn_for_each_task(folder, backbone):
    recipe = meta_recipe(folder, backbone, sizes=(32, 48), augment=True, camera=True, tasks=16)
    tasks = TrainingTasks([load_source(folder, size=48)], recipe, 32)
    sides = [tasks[number].support_images.shape[-1] for number in range(16)]
    assert {*sides} == {32, 48}
    assert torch.equal(tasks[3].query_images, tasks[3].query_images)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"sizes": (32,), "phases": ((1.0, 32),)}, "sizes"), ({"floor": 1.0, "method": "protonet"}, "floor")],
)
def test_settings_that_exclude_each_other_are_refused(settings, message, folder, backbone):
    with pytest.raises(ValueError, match=message):
        meta_recipe(folder, backbone, **settings)


def test_a_run_may_add_features_to_the_checkpoint_it_starts_from(folder, backbone, tmp_path):
    meta_train(meta_recipe(folder, backbone), tmp_path / "first", device="cpu", progress=False)
    wider = {"image_size": 32, "frozen_features": True}
    recipe = meta_recipe(folder, backbone, model=wider, init=str(tmp_path / "first" / "checkpoint"))
    model, before = (
        starting_learner(recipe).model,
        load_checkpoint(str(tmp_path / "first" / "checkpoint")),
    )
    support = torch.rand(5, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        assert torch.equal(task_representation(model, support), task_representation(before, support))


def test_meta_training_starts_from_the_adaptation_networks_it_is_given(folder, backbone, tmp_path):
    first = meta_train(meta_recipe(folder, backbone, tasks=2), tmp_path / "first", device="cpu", progress=False)
    settings = {"tasks": 2, "learning_rate": 1e-9, "seed": 1}  # too small a step to leave the start
    recipe = meta_recipe(folder, backbone, init=str(tmp_path / "first" / "checkpoint"), **settings)
    second = meta_train(recipe, tmp_path / "second", device="cpu", progress=False)
    for (name, value), before in zip(second.named_parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(value, before, rtol=1e-3, atol=1e-4, msg=name)
    other = meta_recipe(folder, backbone, init=recipe.init, model={"image_size": 32, "adaptation": "auto-regressive"})
    with pytest.raises(ValueError, match="belongs to another model"):
        meta_train(other, tmp_path / "third", device="cpu", progress=False)


def test_the_backbone_may_be_that_of_a_checkpoint(folder, backbone, tmp_path):
    first = meta_train(meta_recipe(folder, backbone, tasks=2), tmp_path / "first", device="cpu", progress=False)
    recipe = replace(meta_recipe(folder, backbone), backbone=str(tmp_path / "first" / "checkpoint"))
    start = starting_learner(recipe).model
    saved = load_checkpoint(recipe.backbone).feature_extractor.state_dict()
    for name, value in start.feature_extractor.state_dict().items():
        assert torch.equal(value, saved[name]), name
    (scale, *_), (trained, *_) = (
        [p for name, p in model.film_generator.named_parameters() if ".scales." in name] for model in (start, first)
    )
    assert not torch.equal(scale, trained)  # the adaptation networks are not taken over


def test_a_checkpoint_on_another_network_gives_no_backbone(folder, backbone, monkeypatch):
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 4))
    other = SimpleCNAPS.from_backbone(other, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    monkeypatch.setattr(load, "load_checkpoint", lambda name: other)
    with pytest.raises(ValueError, match="'other' is no FilmResNet18"):
        starting_learner(replace(meta_recipe(folder, backbone), backbone="other"))


def test_a_model_without_adaptation_cannot_be_meta_trained(folder, backbone, tmp_path):
    recipe = meta_recipe(folder, backbone, model={"image_size": 40, "adaptation": "none"})
    with pytest.raises(ValueError, match="nothing to meta-train"):
        meta_train(recipe, tmp_path, progress=False)


@pytest.mark.parametrize("kind", ["variable", "fixed", "small"])
def test_tasks_follow_from_seed_and_number(kind, folder, backbone):
    recipe = meta_recipe(folder, backbone, episodes=kind, augment=True, lite=3, phases=((0.5, 32), (0.5, 40)))
    tasks = TrainingTasks([load_source(folder, size=40)], recipe, 40)
    for number in (0, 7):
        first, second = tasks[number], tasks[number]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert first.support_images.shape[2] == (32 if number == 0 else 40)
        assert set(first.query_labels.tolist()) <= set(first.support_labels.tolist())
        assert first.support_images.abs().max() <= 1


def test_tasks_are_the_episodes_of_the_samplers(folder, backbone):
    source = load_source(folder, size=40)
    fixed = TrainingTasks([source], meta_recipe(folder, backbone, episodes="fixed", seed=3), 40)[5]
    episode = FixedEpisodes(source, 5, 1, 2, seed=3).draw(5)
    assert torch.equal(fixed.support_images, source.network_input(episode.support))
    assert torch.equal(fixed.query_labels, torch.from_numpy(episode.query_labels))
    recipe = meta_recipe(folder, backbone, episodes="variable", seed=3, max_way=5, max_support=7)
    variable = TrainingTasks([source], recipe, 40)
    tasks = [variable[number] for number in range(10)]
    assert {len(task.support_labels) for task in tasks} <= {5, 6, 7}
    assert {int(task.support_labels.max()) + 1 for task in tasks} == {5}


def test_lite_moves_a_random_subset_of_the_support_to_the_front(folder, backbone):
    source = load_source(folder, size=40)
    plain, lite = (TrainingTasks([source], meta_recipe(folder, backbone, lite=size), 40) for size in (None, 2))
    first_labels = []
    for number in range(12):
        task, moved = plain[number], lite[number]
        order = [
            next(j for j, image in enumerate(task.support_images) if torch.equal(image, moved_image))
            for moved_image in moved.support_images
        ]
        assert sorted(order) == list(range(len(order)))
        assert torch.equal(moved.support_labels, task.support_labels[order])
        assert torch.equal(moved.query_images, task.query_images)
        first_labels.append(order[0])
    assert len(set(first_labels)) > 2


def test_workers_make_the_same_tasks(folder, backbone, tmp_path):
    recipe = meta_recipe(folder, backbone, tasks=4)
    alone, helped = (
        meta_train(recipe, tmp_path / str(workers), device="cpu", workers=workers, lazy=workers > 0, progress=False)
        for workers in (0, 1)
    )
    for (name, value), other in zip(alone.state_dict().items(), helped.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.process
@pytest.mark.slow
def test_an_error_leaves_no_worker_that_the_process_waits_for_at_exit():
    script = """
from types import SimpleNamespace
import torch
from fewshot_mahalanobis.research.training.run import remaining
alone = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
with remaining(range(100), 0, 100, alone, workers=1) as items:
    next(items)
    raise ValueError("a step failed")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "ValueError: a step failed")


def test_logs_for_tensorboard_hold_what_the_log_holds(folder, backbone, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = meta_recipe(folder, backbone, tasks=4, validation=(folder,))
    meta_train(recipe, tmp_path, device="cpu", progress=False, tensorboard=True)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    log = log_of(tmp_path)
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in log]
    [validation] = events.Scalars(f"validation/{folder}")
    assert validation.value == pytest.approx(log[-1]["validation"][folder])


def test_logs_after_the_saved_state_are_forgotten_when_a_run_goes_on(tmp_path):
    run = RunFolder(tmp_path, {"a": 1})
    assert run.resume() is None
    for step in (1, 2, 3):
        run.log(step, loss=step / 2)
        if step == 2:
            run.save(lambda: {"step": 2}, now=True)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # where a kill cut it off
    again = RunFolder(tmp_path, {"a": 1})
    assert again.resume() == {"step": 2}
    again.log(3, loss=9.0)
    assert [record["loss"] for record in log_of(tmp_path)] == [0.5, 1.0, 9.0]


def test_a_gpu_by_number_is_refused_with_what_to_do(folder, tmp_path):
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        pretrain(PretrainRecipe((folder,)), tmp_path / "run", device="cuda:1")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"heads": "linear"}}, "no setting 'heads'"),
        ({"episodes": "some"}, "episodes must be 'variable' or 'fixed' or 'small', not 'some'"),
        ({"lite": 0}, "lite = 0: Expected `int` >= 1"),
        ({"tasks": 1}, "less than one step"),
        ({"episodes": "fixed", "shot": 9}, "classes of at least 10 images"),
        ({"root": "nowhere", "sources": ("dtd:train",)}, "no DTD below nowhere"),
        ({"model": {"task_covariance": "False"}}, "Expected `bool`, got `str`"),
        ({"method": "protonet", "model": {"image_size": "84"}}, "image_size must be a whole number from 32 to 1024"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused_by_name(settings, message, folder, backbone, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        meta_train(meta_recipe(folder, backbone, **settings), tmp_path, device="cpu", progress=False)


def test_the_features_of_a_network_by_name_are_not_scaled():
    with pytest.raises(ValueError, match=r"set model\.beta"):
        starting_learner(MetaTrainRecipe(("a",), LITE0, feature_scale=0.5))


def test_backbone_is_validated_in_the_precision_of_the_recipe(folder, backbone):
    network = FilmResNet18()
    network.load_state_dict(load_file(backbone / "backbone.safetensors"))
    seen = []
    network.conv1.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for dtype in (torch.float32, torch.bfloat16):
        NearestMean(load_source(folder, size=8), dtype, episodes=2).accuracy(network, torch.device("cpu"))
        assert seen.pop() == dtype


def test_backbone_is_validated_on_classes_of_unequal_and_few_images():
    """5-way 5-shot on classes of 6 to 30 images, against a plain loop over the queries."""
    sizes = [6, 30, 9, 20, 25, 3]  # the last one has too few images and is never drawn
    labels = np.repeat(np.arange(6), sizes)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 16, 16, 3), dtype=np.uint8)
    source = ImageSource("uneven", pixels, labels, tuple("abcdef"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = FilmResNet18().eval()
    accuracy = NearestMean(source, torch.float32, episodes=3).accuracy(network, torch.device("cpu"))
    sampler, expected = FixedEpisodes(source, 5, 5, 15), []
    for episode in (sampler.draw(index) for index in range(3)):
        with torch.no_grad():
            support, query = (network(source.network_input(i)) for i in (episode.support, episode.query))
        means = [support[torch.from_numpy(episode.support_labels == k)].mean(0) for k in range(5)]
        nearest = [min(range(5), key=lambda k: float((q - means[k]).norm())) for q in query]
        expected.append(float(np.mean(np.array(nearest) == episode.query_labels)))
    assert accuracy == pytest.approx(np.mean(expected))
    with pytest.raises(ValueError, match="needs 5 classes of at least 6 images; this source has 4"):
        NearestMean(replace(source, labels=np.repeat(np.arange(6), [5, 31, 9, 20, 25, 3])), torch.float32)


def test_augmentation_treats_every_image_of_a_task_alike():
    image = torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for grey in (True, False):
        seen = [augment_task(image.expand(3, -1, -1, -1), 32, grey, episode_rng(0, i)) for i in range(20)]
        for images in seen:
            assert images.shape == (3, 3, 32, 32)
            assert torch.equal(images[0], images[2])
        assert len({float(images.sum()) for images in seen}) == 20


def test_cutting_to_the_ink_fills_the_frame_and_keeps_proportions():
    images = torch.ones(3, 3, 40, 40)
    images[0, :, 5:15, 20:25] = -1  # 10 high, 5 wide
    images[1, :, 30:32, 2:10] = -1  # 2 high, 8 wide
    cut = cut_to_ink(images, margin=0.0)
    assert torch.equal(cut[2], images[2])  # no ink: as it was
    for image, (height, width) in zip(cut[:2], ((40, 20), (10, 40)), strict=True):
        ink = image[0] < 0
        assert abs(int(ink.any(1).sum()) - height) <= 2
        assert abs(int(ink.any(0).sum()) - width) <= 2
        rows, columns = ink.any(1).nonzero()[:, 0].double(), ink.any(0).nonzero()[:, 0].double()
        assert rows.mean() == pytest.approx(19.5, abs=1)
        assert columns.mean() == pytest.approx(19.5, abs=1)
    wide = cut_to_ink(images, margin=1.0)
    assert abs(int((wide[0, 0] < 0).any(1).sum()) - 20) <= 2


def test_grey_sources_are_told_from_colour_ones(folder):
    source = load_source(folder, size=40)
    assert not is_grey(source)
    assert is_grey(replace(source, images=np.repeat(source.images[..., :1], 3, axis=-1)))


def test_scaling_features_scales_them_exactly_adapted_or_not():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, scales in model.film_generator.named_parameters():
            if ".scales." in name:  # FiLM of a size that shows
                scales.copy_(0.3 * torch.randn(scales.shape, generator=generator))
    images, labels = torch.rand(6, 3, 32, 32, generator=generator), torch.tensor([0, 0, 0, 1, 1, 1])
    plain, adapted = model.feature_extractor(images), model.adapt(images, labels).features(images)
    scale_features_(model, 3.0)
    torch.testing.assert_close(model.feature_extractor(images), 3 * plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.adapt(images, labels).features(images), 3 * adapted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, adapted, rtol=0.1)
