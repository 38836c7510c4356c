"""The named checkpoints: data, not code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The files are plain git blobs (git's digests are those of the files themselves, none a pointer to large
# file storage), and this host serves a blob at a commit directly, without a redirect or a web page.
_PUBLISHED = "https://raw.githubusercontent.com/plai-group/simple-cnaps/{revision}/model-checkpoints/{path}"
_PUBLISHED_REVISION = "9487356a92bfbbb000f529e43baf5ea59314c4e2"
_PUBLISHED_SETTINGS = {"head": "mahalanobis", "scale": 1.0, "one_shot_covariance": "published"}


@dataclass(frozen=True)
class CheckpointRecord:
    """Facts about a named checkpoint.

    Attributes
    ----------
    name : str
        The argument of :func:`~fewshot_mahalanobis.load_checkpoint` and ``SimpleCNAPSClassifier``.
    url : str or None
        Where it is downloaded from when first used; None for a checkpoint embedded in the package.
    revision : str or None
        Commit of the repository at ``url``.
    blob_id : str or None
        Digest of the file at ``url``, as git computes it: SHA-1 of a header with its size and of its bytes.
    size : int or None
        Bytes of the weights alone; a published file is larger. None if not measured.
    licence : str
        Of the weights.
    image_size : int
        Side of the images it was trained on, in pixels.
    trained_on : str
    settings : mapping
        Arguments of :class:`~fewshot_mahalanobis.SimpleCNAPS` that the conversion sets.
    accuracies : mapping of str to (float, float)
        Data set or task -> accuracy and half-width of its 95 % interval, both in per cent.
        For published files, the figures of their authors.
    """

    name: str
    url: str | None
    revision: str | None
    blob_id: str | None
    size: int | None
    licence: str
    image_size: int
    trained_on: str
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
    transductive: bool = False,
    accuracies: Mapping[str, tuple[float, float]] | None = None,
) -> CheckpointRecord:
    own = {"task_encoder": "transductive", "one_shot_covariance": "zero"} if transductive else {}
    return CheckpointRecord(
        name=name,
        url=_PUBLISHED.format(revision=_PUBLISHED_REVISION, path=path),
        revision=_PUBLISHED_REVISION,
        blob_id=blob_id,
        size=size,
        licence="MIT",
        image_size=84,
        trained_on=trained_on,
        settings={"adaptation": adaptation, **_PUBLISHED_SETTINGS, **own},
        accuracies=accuracies or {},
    )


def _lite(image_size: int, path: str, blob_id: str) -> CheckpointRecord:
    revision = "6e6499b3cfe561a963d9439755be0a37357c7729"
    return CheckpointRecord(
        name=f"lite-simple-cnaps-{image_size}",
        url=f"https://raw.githubusercontent.com/cambridge-mlg/LITE/{revision}/models/{path}",
        revision=revision,
        blob_id=blob_id,
        size=22_845_432,
        licence="MIT",
        image_size=image_size,
        trained_on=(
            "backbone: EfficientNet-B0 on ImageNet; adaptation: the training classes of Meta-Dataset's second version, "
            "with all of ILSVRC-2012 and MNIST"
        ),
        settings={"adaptation": "film", **_PUBLISHED_SETTINGS},
    )


_META_DATASET = "Meta-Dataset: the training classes of ILSVRC-2012 and seven other data sets"

_RECORDS = (
    CheckpointRecord(
        name="resnet18",
        url=None,
        revision=None,
        blob_id=None,
        size=39_706_240,
        licence="MIT; trained in part on ImageNet images, whose terms are non-commercial research",
        image_size=84,
        trained_on=(
            "backbone: mini-ImageNet and Tiny-ImageNet training classes; adaptation: those, Omniglot, CUB-200-2010, "
            "QuickDraw and DTD training classes and drawn glyphs"
        ),
        settings={"adaptation": "film", "head": "mahalanobis", "scale": 0.85, "one_shot_covariance": "zero"},
        accuracies={  # measured: see the model card
            "mini_imagenet_test, 5-way 1-shot": (54.7, 1.2),
            "omniglot/test, 5-way 1-shot": (93.1, 0.6),
            "cub200_2010/test, 5-way 1-shot": (54.6, 1.2),
            "quickdraw345/test, 5-way 1-shot": (64.4, 1.1),
            "gtsrb, 5-way 1-shot": (57.3, 1.2),
            "mnist/test, 5-way 1-shot": (76.4, 1.0),
            "cifar10/test, 5-way 1-shot": (51.4, 1.1),
            "cifar100_test, 5-way 1-shot": (60.2, 1.1),
            "fashion_mnist/test, 5-way 1-shot": (61.3, 1.1),
            "dtd10/test, 3-way 1-shot": (56.9, 1.4),
            "mini_imagenet_test, 5-way 5-shot": (72.5, 1.0),
            "omniglot/test, 5-way 5-shot": (98.4, 0.3),
            "cub200_2010/test, 5-way 5-shot": (74.3, 1.0),
            "quickdraw345/test, 5-way 5-shot": (82.6, 0.9),
            "gtsrb, 5-way 5-shot": (77.8, 1.0),
            "mnist/test, 5-way 5-shot": (92.2, 0.6),
            "cifar10/test, 5-way 5-shot": (69.0, 1.0),
            "cifar100_test, 5-way 5-shot": (78.1, 1.0),
            "fashion_mnist/test, 5-way 5-shot": (79.6, 0.9),
            "dtd10/test, 3-way 5-shot": (74.5, 1.1),
        },
    ),
    CheckpointRecord(
        name="efficientnet-lite0",
        url=None,
        revision=None,
        blob_id=None,
        size=3_450_408,
        licence="MIT; EfficientNet-Lite0 (a dependency) Apache 2.0; both trained on ImageNet images",
        image_size=160,
        trained_on=(
            "backbone: all of ImageNet; adaptation: mini-ImageNet, Tiny-ImageNet, CUB-200-2010, DTD, Omniglot and "
            "QuickDraw training classes, MPEG-7 silhouettes and drawn glyphs"
        ),
        settings={"adaptation": "film", "head": "auto", "scale": 0.12, "beta": 0.3},
        accuracies={  # measured with the head "auto": see the model card
            "mini_imagenet_test, 5-way 1-shot": (77.9, 1.0),
            "omniglot/test, 5-way 1-shot": (91.3, 0.8),
            "cub200_2010/test, 5-way 1-shot": (74.4, 1.0),
            "quickdraw345/test, 5-way 1-shot": (72.5, 1.1),
            "gtsrb, 5-way 1-shot": (68.9, 1.1),
            "mnist/test, 5-way 1-shot": (69.6, 1.1),
            "cifar10/test, 5-way 1-shot": (69.5, 1.1),
            "cifar100_test, 5-way 1-shot": (75.2, 1.0),
            "fashion_mnist/test, 5-way 1-shot": (69.4, 1.1),
            "dtd10/test, 3-way 1-shot": (66.4, 1.2),
            "mini_imagenet_test, 5-way 5-shot": (91.8, 0.6),
            "omniglot/test, 5-way 5-shot": (98.3, 0.3),
            "cub200_2010/test, 5-way 5-shot": (91.8, 0.6),
            "quickdraw345/test, 5-way 5-shot": (88.6, 0.7),
            "gtsrb, 5-way 5-shot": (87.0, 0.8),
            "mnist/test, 5-way 5-shot": (90.6, 0.7),
            "cifar10/test, 5-way 5-shot": (87.1, 0.8),
            "cifar100_test, 5-way 5-shot": (90.5, 0.7),
            "fashion_mnist/test, 5-way 5-shot": (86.0, 0.8),
            "dtd10/test, 3-way 5-shot": (83.4, 1.0),
        },
    ),
    _published(
        "simple-cnaps-meta-dataset",
        "meta-dataset-checkpoints/best_simple_cnaps.pt",
        "9c0ca4595baa05ab886b2abd72d01c1faeac095e",
        size=79_125_192,
        adaptation="film",
        trained_on=_META_DATASET,
        accuracies={  # Bateni et al., CVPR 2020, table 1
            "ILSVRC": (58.6, 1.1),
            "Omniglot": (91.7, 0.6),
            "Aircraft": (82.4, 0.7),
            "Birds": (74.9, 0.8),
            "DTD": (67.8, 0.8),
            "QuickDraw": (77.7, 0.7),
            "Fungi": (46.9, 1.0),
            "VGG Flower": (90.7, 0.5),
            "Traffic Signs": (73.5, 0.7),
            "MSCOCO": (46.2, 1.1),
            "MNIST": (93.9, 0.4),
            "CIFAR10": (74.3, 0.7),
            "CIFAR100": (60.5, 1.0),
        },
    ),
    _published(
        "simple-ar-cnaps-meta-dataset",
        "meta-dataset-checkpoints/best_simple_ar_cnaps.pt",
        "a26a3a0fcf8bda2fc79e0149ac9d679a76286f75",
        size=98_307_784,
        adaptation="auto-regressive",
        trained_on=_META_DATASET,
        accuracies={  # Bateni et al., CVPR 2020, table 1
            "ILSVRC": (56.5, 1.1),
            "Omniglot": (91.1, 0.6),
            "Aircraft": (81.8, 0.8),
            "Birds": (74.3, 0.9),
            "DTD": (72.8, 0.7),
            "QuickDraw": (75.2, 0.8),
            "Fungi": (45.6, 1.0),
            "VGG Flower": (90.3, 0.5),
            "Traffic Signs": (74.7, 0.7),
            "MSCOCO": (44.3, 1.1),
            "MNIST": (95.7, 0.3),
            "CIFAR10": (69.9, 0.8),
            "CIFAR100": (53.6, 1.0),
        },
    ),
    _published(
        "transductive-cnaps-meta-dataset",  # Bateni et al., WACV 2022
        "meta-dataset-checkpoints/best_transductive_cnaps.pt",
        "f24f5c7cbe27ea5dda6ad0d262f350d46bddca7c",
        size=79_391_432,
        adaptation="film",
        trained_on=_META_DATASET,
        transductive=True,
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
)

#: What "default" stands for.
DEFAULT = "efficientnet-lite0"

_BY_NAME = {record.name: record for record in _RECORDS}
#: The records by name, "default" first, which stands for another.
CHECKPOINTS: dict[str, CheckpointRecord] = {"default": _BY_NAME[DEFAULT], **_BY_NAME}


def available_checkpoints() -> dict[str, CheckpointRecord]:
    """List the named checkpoints, without a network.

    Returns
    -------
    dict of str to CheckpointRecord
        By name, ``"default"`` first: it is another name of one of the others.
    """
    return dict(CHECKPOINTS)
