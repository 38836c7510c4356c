"""Fitted classifiers in repositories of the Hugging Face Hub: the files of a repository, and the model card.

A repository is ``classifier.safetensors``, as :meth:`SimpleCNAPSClassifier.save` writes it, and ``README.md``, the
model card. Pictures of the classes are in ``thumbnails/``, if whoever pushes it hands them over.
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from scipy.stats import binomtest

from fewshot_mahalanobis import __version__
from fewshot_mahalanobis.checkpoints.catalogue import CHECKPOINTS
from fewshot_mahalanobis.checkpoints.classifier_file import ClassifierState, write_classifier
from fewshot_mahalanobis.checkpoints.folder import CARD, CLASSIFIER
from fewshot_mahalanobis.checkpoints.hub import hub_name, upload
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.images.decode import ImageBatches
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.labels import checked_labels
from fewshot_mahalanobis.support_set.summary import SupportSummary

#: Side of a thumbnail and the space between two, in pixels; most thumbnails of a class.
SIDE, GAP, MAX_THUMBNAILS = 84, 4, 5

_CARD = """\
---
library_name: fewshot-mahalanobis
pipeline_tag: image-classification
tags:
- few-shot-learning
- image-classification
- simple-cnaps
- mahalanobis-distance
---

# {title}

A few-shot image classifier of {classes} classes, fitted to {images} images in one forward pass, without training:
*Improved Few-Shot Visual Classification* (Bateni et al., CVPR 2020). The file holds features of those images, not the
images.

## Use

After {install}:

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


def push_classifier(
    repo_id: str,
    state: ClassifierState,
    summary: SupportSummary,
    thumbnails: tuple[Any, ArrayLike] | None,
    *,
    private: bool | None,
    token: str | bool | None,
) -> str:
    """Push a fitted classifier with its card, and thumbnails of (images, labels); the address of the commit.

    ValueError as :func:`write_classifier`, or if a thumbnail or its label cannot be used; UploadError as
    :func:`upload`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        strips = {} if thumbnails is None else _write_strips(folder, state, *thumbnails)
        (folder / CARD).write_text(model_card(repo_id, state, summary, strips), encoding="utf-8")
        if public_checkpoint(state.parameters["checkpoint"]) is None:  # others lack a path of this machine
            state = replace(state, parameters={**state.parameters, "checkpoint": state.model})
        write_classifier(state, folder / CLASSIFIER)
        return upload(folder, repo_id, private=private, token=token, message="Push fitted classifier")


def model_card(
    repo_id: str, state: ClassifierState, summary: SupportSummary, strips: dict[int, str] | None = None
) -> str:
    """Markdown that describes a fitted classifier; ``strips`` are picture files of classes, by their index."""
    parameters, config = state.parameters, state.model.config
    backbone = config.get("backbone", {"network": "FiLM ResNet18 of Simple CNAPS"})
    timm_name = backbone.get("origin")
    network = timm_name or backbone.get("network")
    head, unknown = parameters["head"], state.fitted_head.unknown_label
    settings: dict[str, Any] = {
        "network": network or "its author's own",
        "checkpoint": public_checkpoint(parameters["checkpoint"]) or "in the file",
        "adapted to the support images": "no" if state.film is None else "yes",
        "head": head if isinstance(head, str) else repr(head),
        "image size": f"{config['image_size']} x {config['image_size']}",
        "temperature": f"{state.fitted_head.temperature_of_all:.3g}",
        "priors": _listed_priors(state.fitted_head),
        "label of unknown images": "none"
        if unknown is None
        else f"{unknown!r}, at a false rejection rate of {parameters['false_rejection_rate']:g}",
        **({"images of no class, which teach what to reject": summary.of_no_class} if summary.of_no_class else {}),
        "written by": f"fewshot-mahalanobis {__version__}, torch {torch.__version__}",
    }
    rows = [
        (_escape(label), count, *([f"![]({strips[index]})" if index in strips else ""] if strips else []))
        for index, (label, count) in enumerate(summary.counts.items())
    ]
    return _CARD.format(
        title=repo_id.rsplit("/", 1)[-1],
        repo_id=repo_id,
        classes=len(summary.counts),
        images=sum(summary.counts.values()),
        install=install_command("backbones" if timm_name else "hub"),
        argument="" if network else ", backbone=network",
        own="" if network else "`network` is the module whose weights are in the file; its code is not.\n\n",
        table=_table(("class", "support images", *(["some of them"] if strips else [])), rows),
        accuracy=_accuracy(summary, adapted=state.film is not None),
        settings=_table(("setting", "value"), [(name, _escape(value)) for name, value in settings.items()]),
    )


def _listed_priors(fitted: FittedHead) -> str:
    if fitted.shares is None:
        return "equal"
    return ", ".join(f"{label} {share:.3g}" for label, share in zip(fitted.classes, fitted.shares, strict=True))


def public_checkpoint(checkpoint: Any) -> str | None:
    """Return the name by which others can load a checkpoint; None for a module or a path of this machine."""
    if not isinstance(checkpoint, str):
        return None
    hub = hub_name(checkpoint) is not None and not os.path.isdir(checkpoint)  # noqa: PTH112
    return checkpoint if checkpoint in CHECKPOINTS or hub else None


def _accuracy(summary: SupportSummary, adapted: bool) -> str:
    right, counted, images = summary.right, summary.counted, sum(summary.counts.values())
    if len(summary.counts) == 1:
        return "Not measured: there is one class, and nothing to take an image of it for."
    if not counted:
        return "Not measured: every class has one support image, and none can be left out."
    interval = binomtest(right, counted).proportion_ci(0.95, method="wilson")
    skipped = f" ({images - counted} more are alone in their class)" if images > counted else ""
    seen = (
        "The network had been adapted to all of them; only the head was fitted without the one left out"
        if adapted
        else "The network is not adapted, so only the choice of settings may have used the one left out"
    )
    return (
        f"Each of {counted} support images{skipped} was left out in turn and classified by the others: {right} came "
        f"out right, **{right / counted:.1%}** (95 % Wilson interval {interval.low:.1%} to {interval.high:.1%}). "
        f"{seen}. No other images were tried: where new ones look different, expect less."
    )


def _write_strips(folder: Path, state: ClassifierState, X: Any, y: ArrayLike) -> dict[int, str]:
    """Write the first images of each class side by side as one JPEG, without their files' metadata."""
    parameters, classes = state.parameters, state.fitted_head.classes
    settings = {name: parameters[name] for name in ("n_jobs", "value_range", "pages", "bands")}
    images = ImageBatches(X, SIDE, **settings)
    labels = checked_labels(y, images.n_images)
    indices = {label: index for index, label in enumerate(state.fitted_head.output_labels.tolist())}
    if unknown := [label for label in labels.tolist() if label not in indices]:
        raise ValueError(f"thumbnails have the label {unknown[0]!r}, which is none of the classes")
    chosen: dict[int, list[NDArray[np.uint8]]] = {}
    remaining = iter(labels.tolist())
    for batch in images.decoded():
        for pixels in batch.pixels:
            index = indices[next(remaining)]
            if index == len(classes):  # of no class
                continue
            pictures = chosen.setdefault(index, [])
            if len(pictures) < MAX_THUMBNAILS:
                pictures.append(pixels)
    (folder / "thumbnails").mkdir()
    strips = {}
    for index, pictures in sorted(chosen.items()):
        strip = Image.new("RGB", (len(pictures) * (SIDE + GAP) - GAP, SIDE), "white")
        for place, pixels in enumerate(pictures):
            strip.paste(Image.fromarray(pixels), (place * (SIDE + GAP), 0))
        strips[index] = f"thumbnails/{index}.jpg"
        strip.save(folder / strips[index], quality=90)
    return strips


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _escape(text: Any) -> str:
    """Escape a user's text for a cell of a Markdown table."""
    escaped = html.escape(" ".join(str(text).split()))
    return "".join(f"&#{ord(sign)};" if sign in r"\`*_{}[]()#+-.!|~" else sign for sign in escaped)
