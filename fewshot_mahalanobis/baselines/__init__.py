"""The methods that the paper compares with, on the network and the episodes of Simple CNAPS.

Each is a head (:class:`~fewshot_mahalanobis.baselines.method.Method`): ``fit`` to a support set, ``logits`` of queries.
``METHODS`` lists them; ``meta-train --method`` trains one, and ``evaluate --method`` sets it beside Simple CNAPS.
"""

from __future__ import annotations

from typing import Any

from fewshot_mahalanobis.baselines.finetune import Finetune
from fewshot_mahalanobis.baselines.knn import KNN
from fewshot_mahalanobis.baselines.matchingnet import MatchingNet
from fewshot_mahalanobis.baselines.method import Method
from fewshot_mahalanobis.baselines.protonet import ProtoNet

#: Every method by its name, in the order of the paper's tables.
METHODS: dict[str, type[Method[Any]]] = {method.name: method for method in (KNN, Finetune, MatchingNet, ProtoNet)}
