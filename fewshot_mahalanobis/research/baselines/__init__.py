"""The methods that the paper compares with, on the network and the episodes of Simple CNAPS.

Each is a head (:class:`~fewshot_mahalanobis.research.baselines.method.Method`) with ``fit`` and ``logits``. ``METHODS``
lists them; ``meta-train --method`` trains one, and ``evaluate --method`` compares it with Simple CNAPS.
"""

from __future__ import annotations

from typing import Any

from fewshot_mahalanobis.research.baselines.finetune import Finetune
from fewshot_mahalanobis.research.baselines.gaussian_protonet import GaussianProtoNet
from fewshot_mahalanobis.research.baselines.gidaris import Gidaris
from fewshot_mahalanobis.research.baselines.knn import KNN
from fewshot_mahalanobis.research.baselines.leo import LEO
from fewshot_mahalanobis.research.baselines.maml import MAML
from fewshot_mahalanobis.research.baselines.matchingnet import MatchingNet
from fewshot_mahalanobis.research.baselines.method import Method
from fewshot_mahalanobis.research.baselines.protomaml import ProtoMAML
from fewshot_mahalanobis.research.baselines.protonet import ProtoNet
from fewshot_mahalanobis.research.baselines.relationnet import RelationNet
from fewshot_mahalanobis.research.baselines.tadam import TADAM
from fewshot_mahalanobis.research.baselines.tpn import TPN

#: Every method by its name, in the order of the paper's tables.
METHODS: dict[str, type[Method[Any]]] = {
    method.name: method
    for method in (
        MAML, RelationNet, KNN, MatchingNet, Finetune, ProtoNet, ProtoMAML, GaussianProtoNet,
        Gidaris, TADAM, TPN, LEO,
    )
}  # fmt: skip
