"""LEO, latent embedding optimization: gradient steps on a code of the classifier, on a frozen network's features.

Rusu, Rao, Sygnowski, Vinyals, Pascanu, Osindero & Hadsell, "Meta-Learning with Latent Embedding Optimization", ICLR
2019, with the sizes, steps and first learning rates of the authors' code. Codes and weights are the means of their
Gaussians, in training as in evaluation, so the penalties that shape those Gaussians (equation 6) are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.checks import class_means
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

    def fit_features(self, features: Tensor, labels: Tensor) -> Tensor:
        """Weights w_k (k, d): algorithm 1, lines 6 to 14. Differentiable twice."""
        features, outer = F.normalize(features, dim=1), torch.is_grad_enabled()
        with torch.enable_grad():
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

    def compare(self, state: Tensor, queries: Tensor) -> Tensor:
        """Dot products with the unit features."""
        return F.normalize(queries, dim=1) @ state.T

    @staticmethod
    def _gradient(weights: Tensor, of: Tensor, features: Tensor, labels: Tensor, outer: bool) -> Tensor:
        """Gradient of the support set's cross-entropy with respect to codes or weights."""
        loss = F.cross_entropy(features @ weights.T, labels)
        return torch.autograd.grad(loss, of, create_graph=outer, retain_graph=True)[0]
