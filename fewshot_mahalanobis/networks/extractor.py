"""What turns images into features: what Simple CNAPS asks of it, and what frozen pretrained networks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewshot_mahalanobis.networks.film import Film, modulated_parameters
from fewshot_mahalanobis.networks.folding import fold_network

Self = TypeVar("Self", bound=nn.Module)


class FeatureExtractor(Protocol):
    """What Simple CNAPS asks of the module that turns images into features, besides being an ``nn.Module``.

    There are three: :class:`~fewshot_mahalanobis.networks.resnet.FilmResNet18`,
    :class:`~fewshot_mahalanobis.networks.efficientnet.EfficientNet` and, for any other network,
    :class:`~fewshot_mahalanobis.networks.backbone.Backbone`.
    """

    @property
    def out_features(self) -> int:
        """Entries d of a feature vector."""

    @property
    def film_positions(self) -> Mapping[str, int]:
        """Names of the layers that take FiLM parameters -> their numbers of feature maps; empty if there are none."""

    @property
    def bfloat16_measured(self) -> bool:
        """Whether the effect of bfloat16 on predictions has been measured, and found small."""

    @property
    def for_set_encoder(self) -> FeatureExtractor:
        """The frozen network as the set encoder reads it: its features may be other means of the same maps."""

    @property
    def network(self) -> nn.Module:
        """The network whose modules :attr:`film_positions` names."""

    def prepared(self, images: Tensor) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> what the network reads."""

    def __call__(self, images: Tensor, film: Film | None = None) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> features (n, d), float32; differentiable with respect to ``film``."""

    def for_inference(self, film: Film | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        """Return an independent module, images -> features, that is adapted and computes in ``dtype``."""

    def eval(self) -> Any:
        """Set evaluation mode, as any ``nn.Module``."""


class FrozenNetwork(nn.Module):
    """A pretrained network that is never trained; FiLM may follow its normalisation layers.

    Parameters
    ----------
    network : nn.Module
        Images (n, 3, s, s) as :meth:`prepared` leaves them -> features (n, d) or (n, d, 1, 1). It is taken, not copied:
        its parameters lose their gradient, and it runs in evaluation mode whatever mode is set.
    image_size : int
        Side s of the images, in pixels.
    foldable : sequence of (str, str)
        Convolutions, and the BatchNorms that take their outputs.

    Attributes
    ----------
    film_positions : dict of str to int
        Normalisation layers that FiLM follows -> their numbers of feature maps.
    """

    bfloat16_measured = False

    def __init__(self, network: nn.Module, image_size: int, foldable: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()
        self.image_size = image_size
        self.foldable = foldable
        self.film_positions: dict[str, int] = {}

    def train(self: Self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return nn.Module.train(self, False)

    @property
    def for_set_encoder(self: Self) -> Self:
        """Itself: the set encoder reads the features."""
        return self

    def prepared(self, images: Tensor) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> what the network reads."""
        return images

    def forward(self, images: Tensor, film: Film | None = None) -> Tensor:
        """Images -> features.

        Parameters
        ----------
        images : Tensor of shape (n, 3, s, s)
            In [-1, 1]. If they are bfloat16, the network runs under autocast, so modules that were not written for
            bfloat16 throughout work too.
        film : Film, optional
            At :attr:`film_positions`; gradients flow to it.

        Returns
        -------
        Tensor of shape (n, d)
            float32.

        Raises
        ------
        ValueError
            The network's output is not a tensor (n, d) or (n, d, 1, 1).
        """
        # Some networks call ``view`` and cannot read channels_last. One that can be folded has been tried.
        layout = torch.channels_last if self.foldable else torch.contiguous_format
        x = self.prepared(images.float()).contiguous(memory_format=layout)
        bfloat16 = images.dtype == torch.bfloat16
        with torch.autocast(images.device.type, torch.bfloat16) if bfloat16 else nullcontext():
            if film is None:
                return _vectors(self.network(x))
            # Folding the BatchNorms without FiLM saves a third of the time; to fold them anew takes little.
            network = fold_network(self.network, self.foldable, keep=[*self.film_positions])
            learned = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
            return _vectors(functional_call(network, learned | modulated_parameters(network, film), (x,)))

    def folded(self, film: Film | None = None) -> nn.Module:
        """Return the network with FiLM and BatchNorms inside its convolutions; other tensors are shared."""
        network = fold_network(self.network, self.foldable, film)
        return network.to(memory_format=torch.channels_last) if self.foldable else network


def _vectors(output: Any) -> Tensor:
    """Check the network's output and return it as features (n, d), float32."""
    remedy = "wrap the network in a module that returns features (n, d)"
    if not isinstance(output, Tensor):
        raise ValueError(f"the backbone gives a {type(output).__name__}, not one tensor: {remedy}")
    if output.ndim == 4 and output.shape[2] == output.shape[3] == 1:
        output = output.flatten(1)
    if output.ndim != 2 or output.shape[1] == 0:
        if output.ndim == 4:
            remedy = "for maps (n, d, h, w) use nn.Sequential(network, nn.AdaptiveAvgPool2d(1))"
        raise ValueError(f"the backbone gives a tensor of shape {tuple(output.shape)}, not features (n, d): {remedy}")
    return output.float()
