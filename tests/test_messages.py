"""What the covariance and the heads say, whole: when they refuse, and in ``repr``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fewshot_mahalanobis.heads import EuclideanHead, LinearHead, MahalanobisHead
from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance

FIT = RegularizedCovariance()
EYE = torch.eye(2)
LABELS = torch.tensor([0, 1])
NAN = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RegularizedCovariance(0), 'beta must be positive and finite, or "auto", got 0'),
        (lambda: RegularizedCovariance("many"), "beta must be positive and finite, or \"auto\", got 'many'"),
        (
            lambda: RegularizedCovariance(one_shot_covariance="one"),
            'one_shot_covariance must be "zero" or "published", got \'one\'',
        ),
        (lambda: FIT(EYE[0], LABELS), "support features must have shape (n, d) with d >= 1, got (2,)"),
        (lambda: FIT(EYE.long(), LABELS), "support features must be floating point, got torch.int64"),
        (lambda: FIT(NAN, LABELS), "row 1 of support features holds NaN or infinity"),
        (lambda: FIT(EYE, LABELS.int()), "support labels must be int64 of shape (n,), got torch.int32 (2,)"),
        (lambda: FIT(EYE, LABELS[:1]), "2 support features but 1 labels"),
        (lambda: FIT(EYE, LABELS.to("meta")), "support features are on cpu but the labels on meta"),
        (lambda: FIT(EYE[:0], LABELS[:0]), "the support set is empty: at least one example is needed"),
        (lambda: FIT(EYE, LABELS - 1), "labels must be 0..k-1, got -1"),
        (
            lambda: FIT(EYE, LABELS + LABELS),
            "class 1 has no support example although label 2 occurs: labels must be 0..k-1, each with at least one "
            "example",
        ),
        (
            lambda: FIT(1e12 * torch.ones(3, 1).cumsum(0) @ torch.ones(1, 2), torch.zeros(3).long()),
            "the support features are so large that beta I is lost to rounding and Q_k is singular: scale the features "
            "down or raise beta",
        ),
        (
            lambda: FIT(EYE, LABELS).squared_distance(torch.zeros(1, 3)),
            "query features have 3 columns, but the support features had 2",
        ),
        (lambda: FIT(EYE, LABELS).squared_distance(NAN), "row 1 of query features holds NaN or infinity"),
        (lambda: EuclideanHead()(EYE, LABELS, NAN), "row 1 of query features holds NaN or infinity"),
        (lambda: MahalanobisHead(scale=0), "scale must be positive and finite, got 0"),
        (
            lambda: LinearHead(3).fit(EYE, LABELS),
            "support features have 2 columns, but LinearHead was made for in_features=3",
        ),
        (lambda: LinearHead(2).fit(NAN, LABELS), "row 1 of support features holds NaN or infinity"),
        (lambda: LinearHead(2)(EYE, LABELS, NAN), "row 1 of query features holds NaN or infinity"),
    ],
)
def test_a_refusal_names_the_item_and_the_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared below)
        call()
    assert str(caught.value) == message


def test_repr_names_the_settings() -> None:
    head = MahalanobisHead(RegularizedCovariance(2, task_covariance=False, one_shot_covariance="published"), scale=1)
    inner = "RegularizedCovariance(beta=2.0, task_covariance=False, one_shot_covariance='published')"
    assert repr(head.covariance) == inner
    assert repr(head) == f"MahalanobisHead(\n  scale=1.0\n  (covariance): {inner}\n)"
