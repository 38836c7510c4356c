"""How much a prediction depends on each support example."""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_mahalanobis.networks.adapted_task import AdaptedTask


def support_influence(task: AdaptedTask, query_features: Tensor) -> Tensor:
    """Influence of each support example on each prediction: log p(y | S) - log p(y | S without example i), in nats.

    y is the class predicted with the whole support set S, p is equation 1. The head is refitted without each example
    in turn, so the influence is exact for every head; the network stays as it was adapted. A positive influence
    supports the prediction, a negative one opposes it. Without an example of influence 0.69 a small probability is
    halved.

    Parameters
    ----------
    task : AdaptedTask
        ``classifier.task_``.
    query_features : Tensor of shape (m, 512)
        Adapted features, as ``classifier.transform`` gives them.

    Returns
    -------
    Tensor of shape (m, n)
        NaN for the only example of a class: without it there is no such class.
    """
    log_p = task.head_logits(query_features).double().log_softmax(1)
    predicted = log_p.argmax(1, keepdim=True)
    influence = log_p.new_full((len(query_features), len(task.support_labels)), torch.nan)
    counts = task.support_labels.bincount()
    for i in (counts[task.support_labels] > 1).nonzero()[:, 0].tolist():
        rest = torch.arange(len(task.support_labels), device=task.support_labels.device) != i
        without = task.refit(task.support_features[rest], task.support_labels[rest])
        log_p_without = without.head_logits(query_features).double().log_softmax(1)
        influence[:, i] = (log_p - log_p_without).gather(1, predicted)[:, 0]
    return influence
