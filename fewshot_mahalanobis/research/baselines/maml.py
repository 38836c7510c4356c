"""First-order MAML: a few gradient steps on the support set from weights that were trained for it.

Finn, Abbeel & Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017, without second
derivatives (section 5.2), with its step size and numbers of steps for mini-ImageNet. As in Meta-Dataset (Triantafillou
et al., ICLR 2020) the last layer starts at zero, and BatchNorm's weights stay. Meta-Dataset's steps, ten times as
large, led to infinite weights on our pretrained network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewshot_mahalanobis.gaussians.support import check_support, full_precision, result_dtype
from fewshot_mahalanobis.heads import LinearClassifier, LinearLayerHead
from fewshot_mahalanobis.research.baselines.method import Method

#: Images processed at a time, which bounds memory.
BATCH = 64


class MAML(LinearLayerHead, Method[LinearClassifier]):
    """Logits = W x + b after gradient steps on W, b and the network's convolutions.

    As a head on features it moves W and b alone;
    :class:`~fewshot_mahalanobis.research.baselines.baseline.Baseline` moves all.
    """

    name, title, paper_title = "maml", "first-order MAML", "MAML"
    needs_training = True
    adaptation = "gradients"
    learning_rate = 0.01
    #: Gradient steps in training, and afterwards.
    training_steps, steps = 5, 10

    def first_layer(self, features: Tensor, labels: Tensor) -> LinearClassifier:
        """Return the layer that the steps begin with, for support features (n, d) and labels (n,)."""
        ways = int(labels.max()) + 1
        return LinearClassifier(features.new_zeros(ways, features.shape[1]), features.new_zeros(ways))

    def adapt(
        self, network: nn.Module, images: Tensor, labels: Tensor, steps: int
    ) -> tuple[dict[str, Tensor], LinearClassifier]:
        """Take the gradient steps.

        Parameters
        ----------
        network : nn.Module
            Images to features (n, d). It is not changed.
        images : Tensor of shape (n, ...)
            Support images.
        labels : int64 Tensor of shape (n,)
        steps : int

        Returns
        -------
        weights : dict of str to Tensor
            Weights of the network that were moved, by name. Their gradient with respect to the network's own weights is
            the identity: first-order MAML.
        layer : LinearClassifier
        """
        weights: dict[str, Tensor] = {name: weight for name, weight in network.named_parameters() if weight.ndim > 1}
        layer = self.first_layer(torch.cat([network(batch) for batch in images.split(BATCH)]), labels)
        for _ in range(steps):
            moving = [*weights.values(), *layer]
            gradients = self._gradients(network, list(weights), moving, images, labels)
            # theta' = theta - alpha grad_theta L(theta), section 2.2
            moved = [w - self.learning_rate * g for w, g in zip(moving, gradients, strict=True)]
            weights, layer = dict(zip(weights, moved[:-2], strict=True)), LinearClassifier(*moved[-2:])
        return weights, layer

    def adapt_network(
        self, network: nn.Module, images: Tensor, labels: Tensor, *, training: bool
    ) -> tuple[dict[str, Tensor], LinearClassifier]:
        """Take the gradient steps of training, or the larger number of a test."""
        return self.adapt(network, images, labels, self.training_steps if training else self.steps)

    @torch.enable_grad()
    def _gradients(
        self, network: nn.Module, names: list[str], moving: list[Tensor], images: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Gradients of the support set's mean cross-entropy, which are constants for the outer loop."""
        leaves = [w.detach().requires_grad_() for w in moving]
        sums = [torch.zeros_like(w) for w in leaves]
        for batch, targets in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            features = functional_call(network, dict(zip(names, leaves[:-2], strict=True)), (batch.detach(),))
            with full_precision(features):
                loss = F.cross_entropy(F.linear(features, *leaves[-2:]), targets, reduction="sum") / len(labels)
            sums = [a + b for a, b in zip(sums, torch.autograd.grad(loss, leaves), strict=True)]
        return sums

    def fit(self, support_features: Tensor, support_labels: Tensor) -> LinearClassifier:
        """Take gradient steps on W and b alone, on support features (n, d) and labels (n,)."""
        check_support(support_features, support_labels)
        with full_precision(support_features):
            features = support_features.to(result_dtype(support_features))
            return self.adapt(nn.Identity(), features, support_labels, self.steps)[1]
