"""First-order Proto-MAML: MAML whose last layer starts as that of a prototypical network.

Triantafillou et al., "Meta-Dataset: A Dataset of Datasets for Learning to Learn from Few Examples", ICLR 2020, section
3.2, with the numbers of steps of their best model trained on all sources. Its step size, 0.02, took accuracy to chance
on our pretrained network; this one was chosen on validation classes.
"""

from __future__ import annotations

from torch import Tensor

from fewshot_mahalanobis.gaussians.support import class_means
from fewshot_mahalanobis.heads import LinearClassifier
from fewshot_mahalanobis.research.baselines.maml import MAML


class ProtoMAML(MAML):
    """MAML from W_k = 2 c_k and b_k = -||c_k||^2: up to a constant, minus the squared distance to the class mean."""

    name, title, paper_title = "protomaml", "first-order Proto-MAML", "ProtoMAML"
    learning_rate = 0.004
    training_steps, steps = 1, 6

    def first_layer(self, features: Tensor, labels: Tensor) -> LinearClassifier:
        """Return the layer made of the prototypes c_k; the outer gradient flows through them."""
        means = class_means(features, labels)
        return LinearClassifier(2 * means, -means.square().sum(dim=1))
