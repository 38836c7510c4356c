"""All that a fitted classifier says of images, at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.rejection import predict_or_reject


class Predictions(NamedTuple):
    """What a classifier gives for m images."""

    labels: NDArray[Any]  # (m,), as ``predict``
    probabilities: NDArray[np.float64]  # (m, k), as ``predict_proba``
    unknown: NDArray[np.bool_]  # (m,), whether the image is of no class
    features: NDArray[np.float32]  # (m, d), as ``transform``


def predict_all(classifier: SimpleCNAPSClassifier, images: Any) -> Predictions:
    """Labels, probabilities and features of images, each of which goes through the classifier's networks once."""
    batches = zip(*classifier._seen(images, "predict"), strict=True)
    features, logits, scores = (torch.cat([*found]).cpu() for found in batches)
    chosen = predict_or_reject(logits, scores, classifier.threshold_)
    return Predictions(
        classifier._output_labels[chosen],
        torch.softmax(logits.double() / classifier.temperature_, dim=1).numpy(),
        chosen == len(classifier.classes_),
        features.numpy(),
    )
