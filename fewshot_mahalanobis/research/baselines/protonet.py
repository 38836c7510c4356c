"""Prototypical networks (Snell, Swersky & Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017)."""

from __future__ import annotations

from torch import Tensor

from fewshot_mahalanobis.heads import EuclideanHead
from fewshot_mahalanobis.research.baselines.method import Method


class ProtoNet(EuclideanHead, Method[Tensor]):
    """Logits = -||x - c_k||^2, c_k the mean support feature of the class: equations 1 and 2.

    That is the package's Euclidean head, on a network that is trained for it.
    """

    name, title, paper_title = "protonet", "ProtoNet", "ProtoNet"
