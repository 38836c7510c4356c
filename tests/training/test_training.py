"""Both training commands on small sources that the tests draw: they learn, and a killed run goes on."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fewshot_mahalanobis import load_checkpoint
from fewshot_mahalanobis.episodes.sampling import episode_rng
from fewshot_mahalanobis.episodes.sources import load_source
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.training.meta_train import (
    MetaTrainRecipe,
    TrainingTasks,
    cut_to_ink,
    is_grey,
    meta_train,
    one_camera,
    scale_features_,
)
from fewshot_mahalanobis.training.meta_train import learning_rate as meta_learning_rate
from fewshot_mahalanobis.training.pretrain import PretrainRecipe, TrainingBatches, learning_rate, pretrain

SMALL = {"epochs": 2, "batch_size": 8, "peak_lr": 0.05, "phases": ((0.5, 32), (0.5, 40)), "image_size": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six classes, each of one colour with noise: 8 images each."""
    root, rng = tmp_path_factory.mktemp("sources") / "colours", np.random.default_rng(0)
    for k in range(6):
        (root / f"c{k}").mkdir(parents=True)
        colour = rng.integers(0, 256, 3)
        for i in range(8):
            pixels = np.clip(colour + rng.normal(0, 30, (40, 40, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"c{k}" / f"{i}.png")
    return str(root)


@pytest.fixture(scope="module")
def backbone(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "backbone"
    pretrain(PretrainRecipe((folder,), folder, **SMALL), output, device="cpu", progress=False)
    return output


class Interrupted(Exception):
    pass


def interrupt_after(monkeypatch, run_class, calls):
    """Make the ``calls``-th state saved the last thing a run does."""
    save, count = run_class.save, 0

    def interrupted(self, state):
        nonlocal count
        save(self, state)
        count += 1
        if count == calls:
            raise Interrupted

    monkeypatch.setattr(run_class, "save", interrupted)


def test_pretraining_writes_a_backbone_that_loads_and_reports(backbone):
    weights = load_file(backbone / "backbone.safetensors")
    FilmResNet18().load_state_dict(weights)
    log = [json.loads(line) for line in (backbone / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 12
    assert [record["validation"] for record in log if "validation" in record][-1] > 0.2


def test_a_killed_pretraining_continues_to_the_same_weights(folder, backbone, tmp_path, monkeypatch):
    from fewshot_mahalanobis.training.run import RunFolder

    with monkeypatch.context() as patch:
        interrupt_after(patch, RunFolder, 5)
        with pytest.raises(Interrupted):
            pretrain(PretrainRecipe((folder,), folder, **SMALL), tmp_path, device="cpu", save_every=0, progress=False)
    assert not (tmp_path / "backbone.safetensors").exists()
    pretrain(PretrainRecipe((folder,), folder, **SMALL), tmp_path, device="cpu", progress=False)
    expected = load_file(backbone / "backbone.safetensors")
    for name, value in load_file(tmp_path / "backbone.safetensors").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_another_recipe_in_the_same_folder_is_refused(folder, backbone):
    with pytest.raises(ValueError, match=r"another recipe \(different: peak_lr\)"):
        pretrain(PretrainRecipe((folder,), folder, **{**SMALL, "peak_lr": 0.1}), backbone, progress=False)


def test_pretraining_starts_from_the_weights_it_is_given(folder, backbone, tmp_path):
    given = str(backbone / "backbone.safetensors")
    settings = {**SMALL, "epochs": 1, "peak_lr": 1e-9}  # too small a step to leave the start
    pretrain(PretrainRecipe((folder,), init=given, **settings), tmp_path, device="cpu", progress=False)
    start, end = load_file(given), load_file(tmp_path / "backbone.safetensors")
    trained = [name for name, _ in FilmResNet18().named_parameters()]
    for name in trained:
        torch.testing.assert_close(end[name], start[name], rtol=1e-5, atol=1e-6)


def test_batches_follow_from_seed_and_number_and_cover_the_epoch(folder):
    recipe = PretrainRecipe((folder,), **SMALL)
    batches, again = (TrainingBatches([load_source(folder, size=40)], recipe) for _ in range(2))
    assert len(batches) == 12
    images, labels = batches[4]
    assert torch.equal(images, again[4][0])
    assert torch.equal(labels, again[4][1])
    assert images.shape == (8, 3, 32, 32)
    assert batches[7][0].shape == (8, 3, 40, 40)
    assert torch.cat([batches[i][1] for i in range(6)]).bincount().tolist() == [8] * 6


def test_sources_with_a_class_in_common_share_its_label(folder):
    source = load_source(folder, size=40)
    half = replace(source, name="half", images=source.images[:16], labels=source.labels[:16], class_names=("c0", "c1"))
    batches = TrainingBatches([source, half], PretrainRecipe((folder,), **SMALL))
    assert len(batches.class_names) == 6
    assert batches.labels.bincount().tolist() == [16, 16, 8, 8, 8, 8]


def test_learning_rates_warm_up_peak_and_fall_to_zero():
    recipe = PretrainRecipe(("a",))
    rates = [learning_rate(step, 1000, recipe) for step in range(1000)]
    assert max(rates) == pytest.approx(recipe.peak_lr, rel=1e-3)
    assert rates[0] < 0.05 * recipe.peak_lr
    assert rates[-1] < 1e-3 * recipe.peak_lr
    assert all(a >= b for a, b in pairwise(rates[50:]))
    meta = [meta_learning_rate(step, 100, MetaTrainRecipe(("a",), "b")) for step in range(100)]
    assert max(meta) == pytest.approx(5e-4, rel=0.01)
    assert meta[-1] < 1e-6


def recipe_for(folder, backbone, **settings):
    small = {"tasks": 8, "tasks_per_step": 2, "phases": ((0.5, 32), (0.5, 40)), "model": {"image_size": 40}}
    return MetaTrainRecipe((folder,), str(backbone / "backbone.safetensors"), **{**small, **settings})


def test_meta_training_changes_the_adapters_alone_and_writes_a_checkpoint(folder, backbone, tmp_path):
    recipe = recipe_for(folder, backbone, validation=(folder,), feature_scale=2.0)
    model = meta_train(recipe, tmp_path, device="cpu", progress=False)
    loaded = load_checkpoint(tmp_path / "checkpoint")
    assert loaded.config == model.config
    half = {name: value.half().float() if value.ndim > 1 else value for name, value in model.state_dict().items()}
    assert all(torch.equal(value, half[name]) for name, value in loaded.state_dict().items())
    start = load_file(backbone / "backbone.safetensors")
    assert torch.equal(model.feature_extractor.conv1.weight, start["conv1.weight"])
    assert torch.equal(model.feature_extractor.layers[3][1].bn2.running_mean, start["layers.3.1.bn2.running_mean"])
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 4
    assert 0 <= log[-1]["validation"]["colours"] <= 1


def test_a_killed_meta_training_continues_to_the_same_weights(folder, backbone, tmp_path, monkeypatch):
    from fewshot_mahalanobis.training.run import RunFolder

    whole = meta_train(recipe_for(folder, backbone), tmp_path / "whole", device="cpu", progress=False)
    with monkeypatch.context() as patch:
        interrupt_after(patch, RunFolder, 2)
        with pytest.raises(Interrupted):
            meta_train(recipe_for(folder, backbone), tmp_path / "cut", device="cpu", save_every=0, progress=False)
    resumed = meta_train(recipe_for(folder, backbone), tmp_path / "cut", device="cpu", progress=False)
    for name, value in resumed.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_meta_training_starts_from_the_adaptation_networks_it_is_given(folder, backbone, tmp_path):
    first = meta_train(recipe_for(folder, backbone), tmp_path / "first", device="cpu", progress=False)
    recipe = recipe_for(folder, backbone, init=str(tmp_path / "first" / "checkpoint"), learning_rate=1e-9, seed=1)
    second = meta_train(recipe, tmp_path / "second", device="cpu", progress=False)
    for (name, value), before in zip(second.named_parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(value, before, rtol=1e-3, atol=1e-4, msg=name)
    other = recipe_for(folder, backbone, init=recipe.init, model={"image_size": 40, "adaptation": "auto-regressive"})
    with pytest.raises(ValueError, match="of another model"):
        meta_train(other, tmp_path / "third", device="cpu", progress=False)


def test_a_model_without_adaptation_cannot_be_meta_trained(folder, backbone, tmp_path):
    recipe = recipe_for(folder, backbone, model={"image_size": 40, "adaptation": "none"})
    with pytest.raises(ValueError, match="nothing to meta-train"):
        meta_train(recipe, tmp_path, progress=False)


def test_tasks_follow_from_seed_and_number(folder, backbone):
    tasks = TrainingTasks([load_source(folder, size=40)], recipe_for(folder, backbone))
    for number in (0, 7):
        first, second = tasks[number], tasks[number]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert first.support_images.shape[2] == (32 if number == 0 else 40)
        assert set(first.query_labels.tolist()) <= set(first.support_labels.tolist())
        assert first.support_images.abs().max() <= 1


def test_one_camera_treats_every_image_of_a_task_alike():
    image = torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for grey in (True, False):
        seen = [one_camera(image.expand(3, -1, -1, -1), 32, grey, episode_rng(0, i)) for i in range(20)]
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
