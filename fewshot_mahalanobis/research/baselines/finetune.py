"""Finetune: a linear classifier trained on the support set, a baseline of Meta-Dataset.

Triantafillou et al., "Meta-Dataset: A Dataset of Datasets for Learning to Learn from Few Examples", ICLR 2020, section
3.1: 200 steps of Adam at 0.01 on the whole support set, their best settings. They train all layers of the network; here
only the linear layer is trained, so that the features of each image are computed once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.support import check_support, full_precision, result_dtype
from fewshot_mahalanobis.heads import LinearClassifier, LinearLayerHead
from fewshot_mahalanobis.research.baselines.method import Method


class Finetune(LinearLayerHead, Method[LinearClassifier]):
    """Logits = W x + b, W and b by gradient steps from zero on the cross-entropy of the support set."""

    name, title, paper_title = "finetune", "Finetune", "Finetune"
    trains_network = False
    steps, learning_rate = 200, 0.01

    @torch.enable_grad()
    def fit(self, support_features: Tensor, support_labels: Tensor) -> LinearClassifier:
        """Train the layer on support features (n, d), labels (n,); gradients do not flow to the features."""
        ways = len(check_support(support_features, support_labels))
        features = support_features.detach().to(result_dtype(support_features))
        weight = features.new_zeros(ways, features.shape[1], requires_grad=True)
        bias = features.new_zeros(ways, requires_grad=True)
        optimizer = torch.optim.Adam([weight, bias], lr=self.learning_rate)
        with full_precision(features):
            for _ in range(self.steps):
                loss = F.cross_entropy(F.linear(features, weight, bias), support_labels)
                weight.grad, bias.grad = torch.autograd.grad(loss, [weight, bias])
                optimizer.step()
        return LinearClassifier(weight.detach(), bias.detach())
