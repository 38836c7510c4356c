"""Fitted classifiers and checkpoints on a hub, by the real ``huggingface_hub`` client against a server here."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest
from sklearn.exceptions import NotFittedError

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.checkpoints import CheckpointError, DownloadError, UploadError
from fewshot_mahalanobis.checkpoints.card import model_card, public_checkpoint
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.networks.backbone import Backbone
from tests.checkpoints.checkpoint_server import Hub, Server, hub_on_this_machine
from tests.networks.test_backbone import MEAN, SIZE, STD, classifier_on, own_network, seeded

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

LABELS = np.array(["blue", "green", "red", "green", "blue", "red", "green", "blue", "alone"])


def coloured(labels: NDArray[Any], seed: int) -> NDArray[np.uint8]:
    """Noise over a colour for each label."""
    colours = {"blue": (40, 60, 220), "green": (50, 200, 60), "red": (220, 50, 40), "alone": (200, 200, 30)}
    noise = np.random.default_rng(seed).normal(0, 40, (len(labels), 24, 24, 3))
    return np.clip(np.array([colours[label] for label in labels])[:, None, None] + noise, 0, 255).astype(np.uint8)


def model_of_timm() -> SimpleCNAPS:
    """A small network of timm with random weights, under the name by which timm makes it."""
    network = seeded(lambda: timm.create_model("test_vit.r160_in1k", num_classes=0, img_size=SIZE))
    backbone = Backbone.wrap(network, image_size=SIZE, mean=MEAN, std=STD, origin="test_vit.r160_in1k")
    return SimpleCNAPS(adaptation="none", beta="auto", image_size=SIZE, backbone=backbone).eval()


@pytest.fixture(scope="module")
def fitted() -> SimpleCNAPSClassifier:
    each_its_own = range(len(LABELS))  # pictures of one colour would pass for copies
    return SimpleCNAPSClassifier(model_of_timm(), device="cpu").fit(coloured(LABELS, 0), LABELS, groups=each_its_own)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_on_this_machine(monkeypatch, tmp_path / "cache", large_files=("classifier.safetensors",)) as hub:
        yield hub


def files_of(hub: Hub, repository: str) -> dict[str, bytes]:
    return hub.commits[repository][-1][1]


# ------------------------------------------------------------------------------------- there and back


def test_a_pushed_classifier_comes_back(hub: Hub, fitted: SimpleCNAPSClassifier) -> None:
    address = fitted.push_to_hub("user/colours", private=True, token="hf_secret")
    assert address.startswith(f"{hub.server.url}/user/colours/commit/")
    assert hub.created[0]["name"] == "colours"
    assert hub.created[0].get("visibility", hub.created[0].get("private")) in ("private", True)
    assert hub.tokens - {None} == {"Bearer hf_secret"}  # none where the bytes go: that address is for them alone
    assert sorted(files_of(hub, "user/colours")) == ["README.md", "classifier.safetensors"]
    assert ("PUT", "/large") in hub.server.requests

    restored = SimpleCNAPSClassifier.from_pretrained("user/colours", device="cpu")
    queries = coloured(LABELS, 1)
    np.testing.assert_allclose(restored.predict_proba(queries), fitted.predict_proba(queries), rtol=1e-5)
    assert restored.predict(queries).tolist() == fitted.predict(queries).tolist()
    restored.partial_fit(queries, LABELS)


def test_a_revision_and_the_cache_serve_without_a_connection(
    hub: Hub, fitted: SimpleCNAPSClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted.push_to_hub("user/colours", token="hf_secret")
    first = hub.commits["user/colours"][0][0]
    hub.commit("user/colours", {"classifier.safetensors": b"something else"})
    assert SimpleCNAPSClassifier.from_pretrained(f"user/colours@{first}").classes_.tolist() == fitted.classes_.tolist()
    with pytest.raises(ValueError, match="not a safetensors file"):
        SimpleCNAPSClassifier.from_pretrained("user/colours")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert SimpleCNAPSClassifier.from_pretrained(f"user/colours@{first}").classes_.tolist() == fitted.classes_.tolist()


def test_a_folder_with_a_copy_of_a_repository_is_read(hub: Hub, fitted: SimpleCNAPSClassifier, tmp_path: Path) -> None:
    fitted.push_to_hub("user/colours", token="hf_secret")
    for name, content in files_of(hub, "user/colours").items():
        (tmp_path / name).write_bytes(content)
    assert SimpleCNAPSClassifier.from_pretrained(tmp_path).classes_.tolist() == fitted.classes_.tolist()


def test_a_classifier_on_a_module_of_ones_own_comes_back_with_that_module(hub: Hub) -> None:
    fitted = classifier_on(seeded(own_network)).fit(coloured(LABELS, 0), LABELS)
    fitted.push_to_hub("user/own", token="hf_secret")
    assert 'from_pretrained("user/own", backbone=network)' in files_of(hub, "user/own")["README.md"].decode()
    with pytest.raises(CheckpointError, match="backbone=network"):
        SimpleCNAPSClassifier.from_pretrained("user/own")
    restored = SimpleCNAPSClassifier.from_pretrained("user/own", backbone=own_network())
    assert restored.predict(coloured(LABELS, 1)).tolist() == fitted.predict(coloured(LABELS, 1)).tolist()


def test_the_path_of_a_checkpoint_on_this_machine_is_not_shared(
    hub: Hub, fitted: SimpleCNAPSClassifier, tmp_path: Path
) -> None:
    model_of_timm().save_pretrained(tmp_path / "secret project")
    local = SimpleCNAPSClassifier(tmp_path / "secret project", device="cpu").fit(coloured(LABELS, 0), LABELS)
    local.push_to_hub("user/colours", token="hf_secret")
    assert not any(b"secret" in content for content in files_of(hub, "user/colours").values())
    assert local.checkpoint == tmp_path / "secret project"
    restored = SimpleCNAPSClassifier.from_pretrained("user/colours")
    restored.fit(coloured(LABELS, 1), LABELS)  # by the model in the file


def test_only_names_that_others_can_use_are_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "model").mkdir(parents=True)
    names = ["default", "user/repo", "user/repo@v1", "my/model", "/home/me/model", tmp_path, model_of_timm()]
    assert [public_checkpoint(name) for name in names] == ["default", "user/repo", "user/repo@v1", *[None] * 4]


# ------------------------------------------------------------------------------------- the model card


def test_the_card_tells_the_classes_the_use_and_the_accuracy_on_left_out_images(
    hub: Hub, fitted: SimpleCNAPSClassifier
) -> None:
    fitted.push_to_hub("user/colours", token="hf_secret")
    text = files_of(hub, "user/colours")["README.md"].decode()
    card = huggingface_hub.ModelCard(text)
    assert card.data.library_name == "fewshot-mahalanobis"
    assert card.data.pipeline_tag == "image-classification"
    assert "few-shot-learning" in card.data.tags
    for label, count in zip(*np.unique(LABELS, return_counts=True), strict=True):
        assert f"| {label} | {count} |" in text
    assert "test&#95;vit&#46;r160&#95;in1k" in text

    # Refitted without each image in turn, where its class has another: what the card says was found by downdating.
    images, right = coloured(LABELS, 0), 0
    head = AutoHead(fitted.fitted_head_.settled.settings)
    for i in np.flatnonzero(LABELS != "alone"):
        rest = np.arange(len(LABELS)) != i
        others = SimpleCNAPSClassifier(model_of_timm(), device="cpu", head=head).fit(images[rest], LABELS[rest])
        right += others.predict(images[i : i + 1])[0] == LABELS[i]
    summary = fitted.summary()
    assert (summary.right, summary.counted) == (right, 8)
    interval = binomtest(int(right), 8).proportion_ci(method="wilson")
    assert "Each of 8 support images (1 more are alone in their class) was left out in turn" in text
    assert f"**{right / 8:.1%}** (95 % Wilson interval {interval.low:.1%} to {interval.high:.1%})" in text


def test_the_code_on_the_card_runs(hub: Hub, fitted: SimpleCNAPSClassifier, tmp_path: Path, monkeypatch: Any) -> None:
    fitted.push_to_hub("user/colours", token="hf_secret")
    (code,) = re.findall(r"```python\n(.*?)```", files_of(hub, "user/colours")["README.md"].decode(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Image.fromarray(coloured(LABELS[:1], 1)[0]).save("photo.jpg")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["classifier"].classes_.tolist() == fitted.classes_.tolist()


def card_of(classifier: SimpleCNAPSClassifier) -> str:
    return model_card("user/colours", classifier._state(), classifier.summary())


def test_labels_are_text_on_the_card_whatever_markdown_makes_of_them(fitted: SimpleCNAPSClassifier) -> None:
    nasty = "[a](http://b) | <img src=x>\n# **c**"
    images, labels = coloured(LABELS[:4], 0), [nasty, "other", nasty, "other"]
    card = card_of(SimpleCNAPSClassifier(fitted.model_, device="cpu").fit(images, labels))
    (row,) = [line for line in card.splitlines() if "http" in line]
    assert row.count("|") == 3
    assert not set("[]<>*#`(") & set(row.replace("&#", ""))


def test_a_card_of_single_images_claims_no_accuracy(fitted: SimpleCNAPSClassifier) -> None:
    single = SimpleCNAPSClassifier(fitted.model_, device="cpu").fit(coloured(LABELS[:3], 0), LABELS[:3])
    card = card_of(single)
    assert "Not measured" in card
    assert "%" not in card.split("## Accuracy")[1].split("## Settings")[0]


def test_images_of_no_class_and_priors_are_on_the_card(hub: Hub, fitted: SimpleCNAPSClassifier, tmp_path: Path) -> None:
    of_classes = LABELS != "alone"
    labels = np.where(of_classes, LABELS, "none")
    images, model = coloured(LABELS, 0), fitted.model_
    priors = {"blue": 0.7, "green": 0.2, "red": 0.1}
    both = SimpleCNAPSClassifier(model, device="cpu", unknown_label="none", false_rejection_rate=0.2, priors=priors)
    both.fit(images, labels).push_to_hub("user/colours", token="hf_secret", thumbnails=(images, labels))
    files = files_of(hub, "user/colours")
    card = files["README.md"].decode()
    assert "| images of no class, which teach what to reject | 1 |" in card
    assert re.search(r"\| priors \| blue 0.*7, green 0.*2, red 0.*1 \|", card)
    assert "| none |" not in card
    assert "of 3 classes, fitted to 8 images" in card
    assert sorted(name for name in files if "thumbnails/" in name) == [f"thumbnails/{i}.jpg" for i in range(3)]
    without = SimpleCNAPSClassifier(model, device="cpu", unknown_label="none", false_rejection_rate=0.2)
    plain = card_of(without.fit(images[of_classes], labels[of_classes]))
    assert "of no class" not in plain
    assert "| priors | equal |" in plain


def test_thumbnails_are_shared_only_when_they_are_handed_over(hub: Hub, fitted: SimpleCNAPSClassifier) -> None:
    exif = Image.Exif()
    exif[0x010E] = "at home"  # the description of the picture
    pictures_of_mine = [Image.fromarray(pixels) for pixels in coloured(LABELS, 0)]
    for picture in pictures_of_mine:
        picture.info["exif"] = exif.tobytes()
    fitted.push_to_hub("user/colours", token="hf_secret", thumbnails=(pictures_of_mine, LABELS))
    files = files_of(hub, "user/colours")
    strips = {name: Image.open(io.BytesIO(files[name])) for name in files if name.startswith("thumb")}
    assert sorted(strips) == [f"thumbnails/{index}.jpg" for index in range(4)]
    assert strips["thumbnails/1.jpg"].size == (3 * 84 + 2 * 4, 84)  # three blue ones
    red, green, blue = np.asarray(strips["thumbnails/1.jpg"])[:, :84].reshape(-1, 3).mean(axis=0)
    assert blue > 2 * max(red, green)
    assert not any(b"at home" in content for content in files.values())
    assert "| blue | 3 | ![](thumbnails/1.jpg) |" in files["README.md"].decode()


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("thumbnails", "message"),
    [
        ((coloured(LABELS, 0), LABELS[:3]), "9 images but 3 labels"),
        ((coloured(LABELS, 0)[:1], ["violet"]), "'violet', which is none of the classes"),
        (([], []), "no images"),
        ((["absent.jpg"], ["red"]), "no such file"),
    ],
)
def test_wrong_thumbnails_are_refused_before_anything_is_pushed(
    thumbnails: Any, message: str, hub: Hub, fitted: SimpleCNAPSClassifier
) -> None:
    with pytest.raises(ValueError, match=message):
        fitted.push_to_hub("user/colours", token="hf_secret", thumbnails=thumbnails)
    assert not hub.commits


def test_an_unfitted_classifier_is_not_pushed(hub: Hub) -> None:
    with pytest.raises(NotFittedError):
        SimpleCNAPSClassifier().push_to_hub("user/colours")
    assert not hub.server.requests


def test_a_push_that_fails_is_one_clear_error(hub: Hub, fitted: SimpleCNAPSClassifier, monkeypatch: Any) -> None:
    with pytest.raises(UploadError, match="user/my colours"):
        fitted.push_to_hub("user/my colours", token="hf_secret")
    with Server(lambda handler: None) as gone:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone.url)
    with pytest.raises(UploadError, match=r"write permission.*hf auth login") as caught:
        fitted.push_to_hub("user/colours", token="hf_secret")
    assert gone.url in str(caught.value)


def test_a_checkpoint_and_a_classifier_are_told_apart(hub: Hub, fitted: SimpleCNAPSClassifier) -> None:
    model_of_timm().push_to_hub("user/checkpoint", token="hf_secret")
    with pytest.raises(DownloadError, match=r"no fitted classifier.*SimpleCNAPSClassifier\('user/checkpoint'\)"):
        SimpleCNAPSClassifier.from_pretrained("user/checkpoint")
    fitted.push_to_hub("user/colours", token="hf_secret")
    with pytest.raises(CheckpointError, match=r"fitted classifier.*from_pretrained"):
        SimpleCNAPSClassifier("user/colours").fit(coloured(LABELS, 0), LABELS)


def test_an_absent_repository_is_a_clear_error(hub: Hub) -> None:
    with pytest.raises(DownloadError, match="user/absent"):
        SimpleCNAPSClassifier.from_pretrained("user/absent")


# ------------------------------------------------------------------------------------- checkpoints


def test_a_pushed_checkpoint_has_a_card_whose_metadata_the_hub_reads(hub: Hub) -> None:
    model_of_timm().push_to_hub("user/checkpoint", token="hf_secret")
    card = huggingface_hub.ModelCard(files_of(hub, "user/checkpoint")["README.md"].decode())
    assert card.data.library_name == "fewshot-mahalanobis"
    assert card.data.license is None  # it is not ours to say
    assert "timm's `test_vit.r160_in1k`" in card.content
    assert 'SimpleCNAPSClassifier("user/repo")' in card.content
    restored = SimpleCNAPS.from_pretrained("user/checkpoint@main")
    images = torch.ones(1, 3, SIZE, SIZE)
    assert torch.equal(restored.feature_extractor(images), model_of_timm().feature_extractor(images))


@pytest.mark.parametrize(
    "content",
    [b"[]", b'"text"', b"[" * 100_000, b"\xff\xfe", b'{"image_size": NaN}', b"{", b"7" * 5000, b" " * 70_000 + b"{}"],
    ids=["list", "string", "deep", "bytes", "NaN", "half", "long number", "long"],
)
def test_a_hostile_config_is_refused_by_from_pretrained_too(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        SimpleCNAPS.from_pretrained(tmp_path)
