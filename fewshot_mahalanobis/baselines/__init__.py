"""The methods that the paper compares with, on the network and the episodes of Simple CNAPS.

Each is a head (:class:`~fewshot_mahalanobis.baselines.method.Method`): ``fit`` to a support set, ``logits`` of queries.
``METHODS`` lists them; ``meta-train --method`` trains one, and ``evaluate --method`` sets it beside Simple CNAPS.
"""

from __future__ import annotations

from typing import Any

from fewshot_mahalanobis.baselines.finetune import Finetune
from fewshot_mahalanobis.baselines.gaussian_protonet import GaussianProtoNet
from fewshot_mahalanobis.baselines.gidaris import Gidaris
from fewshot_mahalanobis.baselines.knn import KNN
from fewshot_mahalanobis.baselines.leo import LEO
from fewshot_mahalanobis.baselines.maml import MAML
from fewshot_mahalanobis.baselines.matchingnet import MatchingNet
from fewshot_mahalanobis.baselines.method import Method
from fewshot_mahalanobis.baselines.protomaml import ProtoMAML
from fewshot_mahalanobis.baselines.protonet import ProtoNet
from fewshot_mahalanobis.baselines.relationnet import RelationNet
from fewshot_mahalanobis.baselines.tadam import TADAM
from fewshot_mahalanobis.baselines.tpn import TPN

#: Every method by its name, in the order of the paper's tables.
METHODS: dict[str, type[Method[Any]]] = {
    method.name: method
    for method in (
        MAML, RelationNet, KNN, MatchingNet, Finetune, ProtoNet, ProtoMAML, GaussianProtoNet,
        Gidaris, TADAM, TPN, LEO,
    )
}  # fmt: skip
