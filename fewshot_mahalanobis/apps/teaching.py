"""The page that is taught in its visitor's browser, from a checkpoint or a fitted classifier."""

from __future__ import annotations

import os

import numpy as np

from fewshot_mahalanobis.apps.example import sheet
from fewshot_mahalanobis.apps.session import UNKNOWN
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.export.web_page.teaching_page import write_teaching_page
from fewshot_mahalanobis.heads import AutoHead
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

__all__ = ["export_teaching_page"]


def export_teaching_page(
    folder: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | SimpleCNAPS | SimpleCNAPSClassifier = "default",
    *,
    title: str = "Teach a picture classifier",
    runtime: str | os.PathLike[str] | None = None,
) -> None:
    """Write a web page on which its visitor teaches a classifier: a folder of files for any web server.

    Visitors name classes, drop pictures or use their camera, and see answers at once. All of it happens in their
    browser, which keeps the pictures for the next visit; nothing is sent anywhere. The page can be installed as an app,
    and works without a network after the first visit. What was taught can be downloaded as a file that
    :meth:`SimpleCNAPSClassifier.load` reads, and such a file can be dropped onto the page.

    Parameters
    ----------
    folder : path
        Absent, empty, or with an earlier page, whose files are replaced.
    checkpoint : str, path, SimpleCNAPS or SimpleCNAPSClassifier
        What adapts to the visitor's classes; or a fitted classifier, whose classes are there from the start and whose
        adaptation stays.
    title : str
        Heading of the page and name of the app.
    runtime : path, optional
        As for :meth:`SimpleCNAPSClassifier.export_page`.

    Raises
    ------
    ValueError
        As :meth:`SimpleCNAPSClassifier.export_page`; a fitted classifier has another head than ``"auto"``, has learned
        from unlabelled images, or has labels that are not text; or the checkpoint is auto-regressive.
    ImportError
        The packages of the extra ``onnx`` are absent.
    """
    if isinstance(checkpoint, SimpleCNAPSClassifier):
        fitted = checkpoint.fitted_head_
        if not isinstance(fitted.settled, AutoHead):
            raise ValueError(f'the page has the head "auto" alone, not {fitted.settled.name!r}: fit with head="auto"')
        if fitted.pool is not None:
            raise ValueError("the page cannot go on from what unlabelled images taught: fit without unlabelled=")
        if fitted.classes.dtype.kind not in "UO":
            raise ValueError(f"the classes of the page have names, not numbers such as {fitted.classes.tolist()[0]!r}")
        classifier = checkpoint
    else:
        classifier = _fitted_to_noise(checkpoint)
    goes_on = classifier is checkpoint
    write_teaching_page(
        folder, classifier.model_, classifier.save, goes_on=goes_on, title=title, runtime=runtime, example=sheet()
    )


def _fitted_to_noise(checkpoint: str | os.PathLike[str] | SimpleCNAPS) -> SimpleCNAPSClassifier:
    """A classifier whose file has the same entries as one fitted to real pictures."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    classifier = SimpleCNAPSClassifier(
        checkpoint, head="auto", device="cpu", unknown_label=UNKNOWN, false_rejection_rate=0.5
    )
    return classifier.fit(noise, ["a", "a", "b", "b"], groups=range(4))
