"""The networks through which a classifier looks at images: the adapted one and, to tell foreign images, the unadapted.

rejection.py has the looks themselves and the score that they make.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fewshot_mahalanobis.devices import within_memory
from fewshot_mahalanobis.heads import CosineHead, Head
from fewshot_mahalanobis.networks.adapted_task import AdaptedTask
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.rejection import Look, looks_of


def support_looks(networks: Sequence[AdaptedTask]) -> list[Look]:
    """Looks at the support set of the adapted network and, where there is one, the unadapted."""
    task = networks[0]
    features = task.support_features
    return looks_of(task.head, task.head_features(features), features, networks[-1].support_features)


def states_of(networks: Sequence[AdaptedTask]) -> list[Any]:
    """Of each look but the first, which is the task's own, the state of its head fitted to the support set."""
    return [look.head.fit(look.features, networks[0].support_labels) for look in support_looks(networks)[1:]]


def query_looks(networks: Sequence[AdaptedTask], states: Sequence[Any], features: Sequence[Tensor]) -> list[Tensor]:
    """Logits (m, k) of queries by the first look and those with a state, by their features (m, d) from each network."""
    first, *others = looks_of(networks[0].head, features[0], features[0], features[-1])
    found = [look.head.logits(state, look.features) for look, state in zip(others, states, strict=False)]
    return [networks[0].head_logits(first.features), *found]


def with_unadapted(model: SimpleCNAPS, task: AdaptedTask, support_images: Tensor, batch_size: int) -> list[AdaptedTask]:
    """The task and, if it is adapted, the model without FiLM on the same support images (n, 3, h, w)."""
    if task.film is None:
        return [task]
    unadapted = model.with_film(None, CosineHead(), task.dtype)
    features, _ = within_memory(partial(unadapted.features, support_images), batch_size)
    return [task, unadapted.refit(features, task.support_labels)]


def restored(
    model: SimpleCNAPS,
    film: Film | None,
    head: Head,
    dtype: torch.dtype,
    support_features: Iterable[Tensor | None],
    support_labels: Tensor,
) -> list[AdaptedTask]:
    """The adapted network and, if there are support features of it too, the unadapted one, fitted to them."""
    made: list[tuple[Film | None, Head]] = [(film, head), (None, CosineHead())]
    given = [(of, features) for of, features in zip(made, support_features, strict=False) if features is not None]
    return [model.with_film(*of, dtype).refit(features, support_labels) for of, features in given]
