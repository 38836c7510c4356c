"""Fitted classifiers in repositories of the Hugging Face Hub: what a repository holds, and the model card.

A repository is ``classifier.safetensors``, as :meth:`SimpleCNAPSClassifier.save` writes it, and ``README.md``, the
model card; with pictures of the classes in ``thumbnails/`` if, and only if, whoever pushes it hands them over.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import ModelCardData
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest

from fewshot_mahalanobis.checkpoints.format import CARD, CLASSIFIER
from fewshot_mahalanobis.checkpoints.hub import hub_name
from fewshot_mahalanobis.checkpoints.table import CHECKPOINTS
from fewshot_mahalanobis.images import ImageBatches

if TYPE_CHECKING:
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier

#: Side of a thumbnail in pixels, the space between two, and how many a class has at most.
_SIDE, _GAP, _MOST = 84, 4, 5

_CARD = """\
---
{metadata}
---

# {title}

A few-shot image classifier of {classes} classes, fitted to {images} images in one forward pass, without training:
*Improved Few-Shot Visual Classification* (Bateni et al., CVPR 2020). The file holds features of those images, not the
images.

## Use

With `pip install {packages}`:

```python
from fewshot_mahalanobis import SimpleCNAPSClassifier

classifier = SimpleCNAPSClassifier.from_pretrained("{repo_id}"{argument})
classifier.predict(["photo.jpg"])  # also predict_proba, partial_fit with more images, export_onnx
```

{own}## Classes

{table}

## Accuracy

{accuracy}

## Settings

{settings}
"""


def write_repository(
    classifier: SimpleCNAPSClassifier,
    folder: Path,
    repo_id: str,
    thumbnails: tuple[Any, NDArray[Any]] | None,
) -> None:
    """Write what goes into the repository ``repo_id``: the classifier, the model card, the thumbnails."""
    strips = {} if thumbnails is None else _write_strips(folder, classifier.classes_, *thumbnails)
    if public_checkpoint(classifier.checkpoint) is None:  # a path tells strangers of this machine and helps nobody
        anonymous = object.__new__(type(classifier))
        anonymous.__dict__ = {**classifier.__dict__, "checkpoint": classifier.model_}
        anonymous.save(folder / CLASSIFIER)
    else:
        classifier.save(folder / CLASSIFIER)
    (folder / CARD).write_text(model_card(classifier, repo_id, strips), encoding="utf-8")


def model_card(classifier: SimpleCNAPSClassifier, repo_id: str, strips: dict[int, str] | None = None) -> str:
    """Markdown that tells what a fitted classifier is, from what it knows of itself.

    Parameters
    ----------
    classifier : SimpleCNAPSClassifier
        Fitted.
    repo_id : str
        Where it will be.
    strips : dict of int to str, optional
        Picture files of classes, by index.
    """
    from fewshot_mahalanobis import __version__  # which imports this module

    metadata = ModelCardData(
        library_name="fewshot-mahalanobis",
        pipeline_tag="image-classification",
        tags=["few-shot-learning", "image-classification", "simple-cnaps", "mahalanobis-distance"],
    )
    config = classifier.model_.config
    backbone = config.get("backbone")
    ours = backbone is None or backbone["timm"] is not None
    settings: dict[str, Any] = {
        "network": "FiLM ResNet18 of Simple CNAPS" if backbone is None else backbone["timm"] or "its author's own",
        "checkpoint": public_checkpoint(classifier.checkpoint) or "in the file",
        "adapted to the support images": "no" if classifier.task_.film is None else "yes",
        "head": classifier.head if isinstance(classifier.head, str) else repr(classifier.head),
        "image size": f"{config['image_size']} x {config['image_size']}",
        "temperature": f"{classifier.temperature_:.3g}",
        "answer for unknown images": "none"
        if classifier.unknown_label is None
        else f"{classifier.unknown_label!r}, at a false rejection rate of {classifier.false_rejection_rate:g}",
        "written by": f"fewshot-mahalanobis {__version__}, torch {torch.__version__}",
    }
    counts = classifier.class_counts_.tolist()
    rows = [
        (_escape(label), count, *([f"![]({strips[index]})" if index in strips else ""] if strips else []))
        for index, (label, count) in enumerate(zip(classifier.classes_.tolist(), counts, strict=True))
    ]
    return _CARD.format(
        metadata=metadata.to_yaml(),
        title=repo_id.rsplit("/", 1)[-1],
        repo_id=repo_id,
        classes=len(counts),
        images=sum(counts),
        packages="'fewshot-mahalanobis[backbones]'" if backbone and backbone["timm"] else "fewshot-mahalanobis",
        argument="" if ours else ", checkpoint=network",
        own="" if ours else "`network` is the module whose weights are in the file: its code is not.\n\n",
        table=_table(("class", "support images", *(["some of them"] if strips else [])), rows),
        accuracy=_accuracy(classifier),
        settings=_table(("setting", "value"), [(name, _escape(value)) for name, value in settings.items()]),
    )


def public_checkpoint(checkpoint: Any) -> str | None:
    """The name of a checkpoint that others can load by it; None for a module and for a path of this machine."""
    if not isinstance(checkpoint, str):
        return None
    hub = hub_name(checkpoint) is not None and not os.path.isdir(checkpoint)  # noqa: PTH112
    return checkpoint if checkpoint in CHECKPOINTS or hub else None


def leave_one_out_hits(classifier: SimpleCNAPSClassifier) -> tuple[int, int]:
    """How many support images the head fitted to the others tells right, and of how many that have a class-mate."""
    task = classifier.task_
    with torch.no_grad():
        logits = task.head.leave_one_out_logits(task._head_space(task.support_features), task.support_labels)
    told = task.support_labels.bincount()[task.support_labels] > 1
    right = logits.argmax(dim=1) == task.support_labels
    return int((right & told).sum()), int(told.sum())


def _accuracy(classifier: SimpleCNAPSClassifier) -> str:
    right, told = leave_one_out_hits(classifier)
    alone = len(classifier.task_.support_labels) - told
    if not told:
        return "Not measured: every class has one support image, and none can be left out."
    interval = binomtest(right, told).proportion_ci(0.95, method="wilson")
    skipped = f" ({alone} more are alone in their class)" if alone else ""
    seen = (
        "Only the head was fitted without the one left out: the network had been adapted to all of them"
        if classifier.task_.film is not None
        else "The network is not adapted, so only the choice of settings may have seen the one left out"
    )
    return (
        f"Of {told} support images{skipped}, each left out in turn and told by the others, {right} came out right: "
        f"**{right / told:.1%}** (95 % Wilson interval {interval.low:.1%} to {interval.high:.1%}). {seen}. No images "
        "but these were looked at: where new ones look different, expect less."
    )


def _write_strips(folder: Path, classes: NDArray[Any], images: Any, labels: NDArray[Any]) -> dict[int, str]:
    """Write the first images of each class side by side as one JPEG, without what their files say of them."""
    unknown = np.setdiff1d(labels, classes)
    if len(unknown):
        raise ValueError(f"thumbnails have the label {unknown.tolist()[0]!r}, which is none of the classes")
    chosen: dict[int, list[NDArray[np.uint8]]] = {}
    indices = iter(np.searchsorted(classes, labels).tolist())
    for batch in ImageBatches(images, _SIDE):
        for pixels in ((batch + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy():
            of_class = chosen.setdefault(next(indices), [])
            if len(of_class) < _MOST:
                of_class.append(pixels)
    (folder / "thumbnails").mkdir()
    strips = {}
    for index, pictures in sorted(chosen.items()):
        strip = Image.new("RGB", (len(pictures) * (_SIDE + _GAP) - _GAP, _SIDE), "white")
        for place, pixels in enumerate(pictures):
            strip.paste(Image.fromarray(pixels), (place * (_SIDE + _GAP), 0))
        strips[index] = f"thumbnails/{index}.jpg"
        strip.save(folder / strips[index], quality=90)
    return strips


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _escape(text: Any) -> str:
    """Text of a user's as text of a table's cell, whatever Markdown and HTML would make of it."""
    escaped = html.escape(" ".join(str(text).split()))
    return "".join(f"&#{ord(sign)};" if sign in r"\`*_{}[]()#+-.!|~" else sign for sign in escaped)
