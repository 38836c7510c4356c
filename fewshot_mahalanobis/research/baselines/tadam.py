"""TADAM: prototypical networks with a learned metric scale and a network that is conditioned on the task.

Oreshkin, Rodriguez & Lacoste, "TADAM: Task dependent adaptive metric for improved few-shot learning", NeurIPS 2018.
The task conditioning is this package's: set encoder and FiLM generator, where the paper has the mean of the class
prototypes and a generator on it. The paper's auxiliary classification task is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.research.baselines.protonet import ProtoNet


class TADAM(ProtoNet):
    """Logits = -alpha ||x - c_k||^2, alpha learned: equation 2."""

    name, title, paper_title = "tadam", "TADAM", "TADAM"
    needs_training = True
    adaptation = "film"

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """Scaled logits of the prototypical network."""
        return self.log_alpha.exp() * super().compare(queries, means)

    def exported_compare(self, queries: Tensor, means: Tensor) -> Tensor:
        """The same by operations that ONNX has."""
        return self.log_alpha.exp() * super().exported_compare(queries, means)
