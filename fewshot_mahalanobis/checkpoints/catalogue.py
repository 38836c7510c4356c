"""The catalogue of named checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

# The files are plain git blobs (git's digests are those of the files themselves, none a pointer to large
# file storage), and this host serves a blob at a commit directly, without a redirect or a web page.
_PUBLISHED = "https://raw.githubusercontent.com/plai-group/simple-cnaps/{revision}/model-checkpoints/{path}"
_PUBLISHED_REVISION = "9487356a92bfbbb000f529e43baf5ea59314c4e2"
#: Checkpoint -> data set or task -> accuracy and half-width; for two published checkpoints from the paper's table 1.
_ACCURACIES = {
    name: {task: (mean, half_width) for task, (mean, half_width) in tasks.items()}
    for name, tasks in json.loads((files(__package__) / "accuracies.json").read_text(encoding="utf-8")).items()
}
_PUBLISHED_SETTINGS = {"head": "mahalanobis", "scale": 1.0, "one_shot_covariance": "published"}


@dataclass(frozen=True)
class CheckpointRecord:
    """Facts about a named checkpoint.

    Attributes
    ----------
    name : str
        The argument of :func:`~fewshot_mahalanobis.load_checkpoint` and ``SimpleCNAPSClassifier``.
    size : int or None
        Bytes of the weights alone; a published file is larger. None if not measured.
    licence : str
        Licence of the weights.
    image_size : int
        Side of the images it was trained on, in pixels.
    trained_on : str
    url : str or None
        Address it is downloaded from when first used; None for a checkpoint embedded in the package.
    revision : str or None
        Commit of the repository at ``url``.
    blob_id : str or None
        Digest of the file at ``url``, as git computes it: SHA-1 of a header with its size and of its bytes.
    timm : str or None
        Name of a frozen network of timm, which fetches its weights from the Hugging Face Hub.
    settings : mapping
        Arguments of :class:`~fewshot_mahalanobis.SimpleCNAPS` that the conversion sets.
    accuracies : mapping of str to (float, float)
        Data set or task -> accuracy and half-width of its 95 % interval, both in per cent.
        For published files, the figures of their authors.
    """

    name: str
    size: int | None
    licence: str
    image_size: int
    trained_on: str
    url: str | None = None
    revision: str | None = None
    blob_id: str | None = None
    timm: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    accuracies: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False, repr=False)

    @property
    def embedded(self) -> bool:
        """Whether it comes with the package and needs no network."""
        return self.url is None


def _published(
    name: str,
    path: str,
    blob_id: str,
    *,
    size: int,
    adaptation: str,
    trained_on: str,
) -> CheckpointRecord:
    return CheckpointRecord(
        name=name,
        url=_PUBLISHED.format(revision=_PUBLISHED_REVISION, path=path),
        revision=_PUBLISHED_REVISION,
        blob_id=blob_id,
        size=size,
        licence="MIT",
        image_size=84,
        trained_on=trained_on,
        settings={"adaptation": adaptation, **_PUBLISHED_SETTINGS},
        accuracies=_ACCURACIES.get(name, {}),
    )


def _lite(image_size: int, path: str, blob_id: str) -> CheckpointRecord:
    revision = "6e6499b3cfe561a963d9439755be0a37357c7729"
    return CheckpointRecord(
        name=f"lite-simple-cnaps-{image_size}",
        url=f"https://raw.githubusercontent.com/cambridge-mlg/LITE/{revision}/models/{path}",
        revision=revision,
        blob_id=blob_id,
        size=22_840_312,
        licence="MIT",
        image_size=image_size,
        trained_on=(
            "backbone: EfficientNet-B0 on ImageNet; adaptation: the training classes of Meta-Dataset's second version, "
            "with all of ILSVRC-2012 and MNIST"
        ),
        settings={"adaptation": "film", **_PUBLISHED_SETTINGS},
    )


def _timm(name: str, timm: str, *, size: int, trained_on: str) -> CheckpointRecord:
    """A network for the default head, not adapted, at 224 pixels, whatever size timm would take."""
    return CheckpointRecord(
        name=name,
        url=f"https://huggingface.co/timm/{timm}",
        timm=timm,
        size=size,
        licence="Apache 2.0",
        image_size=224,
        trained_on=trained_on,
        settings={"adaptation": "none", "head": "auto"},
    )


_META_DATASET = "Meta-Dataset: the training classes of ILSVRC-2012 and seven other data sets"

_RECORDS = (
    CheckpointRecord(
        name="resnet18",
        size=20_108_640,
        licence="MIT; trained in part on ImageNet images, whose terms are non-commercial research",
        image_size=96,
        trained_on=(
            "backbone: mini-ImageNet, Tiny-ImageNet, Omniglot, CUB-200-2010, QuickDraw and DTD training classes, with "
            "a teacher that saw all of ImageNet; adaptation: those, MPEG-7 silhouettes and drawn glyphs"
        ),
        settings={"adaptation": "film", "head": "mahalanobis", "one_shot_covariance": "zero"},
        accuracies=_ACCURACIES["resnet18"],
    ),
    CheckpointRecord(
        name="efficientnet-lite0",
        size=3_854_872,
        licence="MIT; EfficientNet-Lite0 (a dependency) Apache 2.0; both trained on ImageNet images",
        image_size=224,
        trained_on=(
            "backbone: all of ImageNet; adaptation: mini-ImageNet, Tiny-ImageNet, CUB-200-2010, DTD, Omniglot and "
            "QuickDraw training classes, MPEG-7 silhouettes, drawn glyphs, and 13 sets of photographs at full size, "
            "ImageNet's among them"
        ),
        settings={"adaptation": "film", "head": "auto", "scale": 0.12, "beta": 0.3},
        accuracies=_ACCURACIES["efficientnet-lite0"],
    ),
    _published(
        "simple-cnaps-meta-dataset",
        "meta-dataset-checkpoints/best_simple_cnaps.pt",
        "9c0ca4595baa05ab886b2abd72d01c1faeac095e",
        size=79_125_192,
        adaptation="film",
        trained_on=_META_DATASET,
    ),
    _published(
        "simple-ar-cnaps-meta-dataset",
        "meta-dataset-checkpoints/best_simple_ar_cnaps.pt",
        "a26a3a0fcf8bda2fc79e0149ac9d679a76286f75",
        size=98_307_784,
        adaptation="auto-regressive",
        trained_on=_META_DATASET,
    ),
    _published(
        "no-adaptation-meta-dataset",
        "pretrained_resnets/pretrained_resnet_meta_dataset.pt.tar",
        "74a8467d9a93a56e505e08b1a9ece69a8dfa310e",
        size=44_726_176,
        adaptation="none",
        trained_on="the training classes of ILSVRC-2012 in Meta-Dataset, supervised, no meta-training",
    ),
    _published(
        "no-adaptation-mini-imagenet",
        "pretrained_resnets/pretrained_resnet_mini_imagenet.pt.tar",
        "55a1f2cd60aa3aebe77b2b91cae9b4b4a1faf79d",
        size=44_726_176,
        adaptation="none",
        trained_on="the training classes of mini-ImageNet, supervised, no meta-training",
    ),
    # Bronskill et al., NeurIPS 2021: the first is the paper's. Their figures are not known here.
    _lite(224, "meta-trained_lite_224.pt", "ce9a139c4aae81c93091ac6858a14c50fffa9087"),
    _lite(84, "meta-trained_84.pt", "e1524244e7b78fc29d0c3a231d5c0827c7026225"),
    # Oquab et al., TMLR 2024; Caron et al., ICCV 2021; Tschannen et al., 2025.
    _timm(
        "dinov2-small",
        "vit_small_patch14_dinov2.lvd142m",
        size=88_224_768,
        trained_on="142 million photographs without labels (LVD-142M)",
    ),
    _timm(
        "dinov2-base",
        "vit_base_patch14_dinov2.lvd142m",
        size=346_318_848,
        trained_on="142 million photographs without labels (LVD-142M)",
    ),
    _timm(
        "dino-small",
        "vit_small_patch16_224.dino",
        size=86_662_656,
        trained_on="the images of ImageNet (ILSVRC-2012) without their labels",
    ),
    _timm(
        "siglip2-base",
        "vit_base_patch16_siglip_224.v2_webli",
        size=371_536_896,
        trained_on="images of the web with their texts (WebLI)",
    ),
)

#: The checkpoint that "default" is another name of.
DEFAULT = "efficientnet-lite0"

_BY_NAME = {record.name: record for record in _RECORDS}
#: The records by name, "default" first.
CHECKPOINTS: dict[str, CheckpointRecord] = {"default": _BY_NAME[DEFAULT], **_BY_NAME}


def available_checkpoints() -> dict[str, CheckpointRecord]:
    """List the named checkpoints, without a network.

    Returns
    -------
    dict of str to CheckpointRecord
        By name, ``"default"`` first: it is another name of one of the others.
    """
    return dict(CHECKPOINTS)
