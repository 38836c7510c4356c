"""LEO, latent embedding optimization: gradient steps on a code of the classifier, on a frozen network's features.

Rusu, Rao, Sygnowski, Vinyals, Pascanu, Osindero & Hadsell, "Meta-Learning with Latent Embedding Optimization", ICLR
2019, with the sizes, steps and first learning rates of the authors' code. Codes and weights are the means of their
Gaussians, in training as in evaluation, so the penalties that shape those Gaussians (equation 6) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.support import check_features, check_support, class_means, full_precision
from fewshot_mahalanobis.research.baselines.method import Method

LATENTS = 64


class LEO(Method[Tensor]):
    """Logits = x . w_k of unit features x; w_k is decoded from a code z_k and moved by gradient steps."""

    name, title, paper_title = "leo", "LEO", "LEO"
    needs_training, trains_network = True, False
    code_steps, weight_steps = 5, 5

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(in_features, LATENTS, bias=False)
        widths = [2 * LATENTS] * 2
        layers = [nn.Linear(2 * LATENTS, width, bias=False) for width in widths]
        self.relation = nn.Sequential(
            layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(2 * LATENTS, LATENTS, bias=False)
        )
        self.decoder = nn.Linear(LATENTS, in_features, bias=False)
        self.code_rate = nn.Parameter(torch.ones(LATENTS))
        self.weight_rate = nn.Parameter(torch.full((in_features,), 0.001))

    @classmethod
    def for_model(cls, settings: Mapping[str, Any], in_features: int) -> LEO:
        """Make the method, with weights yet to be learned or loaded, for features of this width."""
        return cls(in_features)

    def fit(self, support_features: Tensor, support_labels: Tensor) -> Tensor:
        """Weights w_k (k, d) from support features (n, d) and labels (n,): algorithm 1, lines 6 to 14.

        Differentiable twice.
        """
        check_support(support_features, support_labels)
        labels, outer = support_labels, torch.is_grad_enabled()
        with full_precision(support_features), torch.enable_grad():
            features = F.normalize(support_features.to(self.encoder.weight.dtype), dim=1)
            codes = self.encode(features, labels)
            weights = self.decoder(codes)  # equation 3
            for _ in range(self.code_steps):  # equation 4
                codes = codes - self.code_rate * self._gradient(weights, codes, features, labels, outer)
                weights = self.decoder(codes)
            for _ in range(self.weight_steps):
                weights = weights - self.weight_rate * self._gradient(weights, weights, features, labels, outer)
        return weights if outer else weights.detach()

    def encode(self, features: Tensor, labels: Tensor) -> Tensor:
        """Codes z_k (k, 64): the relations of the images of a class to all images, averaged (equations 1 and 2)."""
        encoded = self.encoder(features)
        shape = (len(encoded), len(encoded), LATENTS)
        pairs = torch.cat([encoded[:, None].expand(shape), encoded.expand(shape)], dim=2)
        return class_means(self.relation(pairs).mean(dim=1), labels)

    def logits(self, state: Tensor, query_features: Tensor) -> Tensor:
        """Dot products (m, k) of the weights with the unit features of queries (m, d)."""
        check_features(query_features, "query features", width=state.shape[1])
        with full_precision(query_features):
            return F.normalize(query_features.to(state.dtype), dim=1) @ state.T

    @staticmethod
    def _gradient(weights: Tensor, of: Tensor, features: Tensor, labels: Tensor, outer: bool) -> Tensor:
        """Gradient of the support set's cross-entropy with respect to codes or weights."""
        loss = F.cross_entropy(features @ weights.T, labels)
        return torch.autograd.grad(loss, of, create_graph=outer, retain_graph=True)[0]
