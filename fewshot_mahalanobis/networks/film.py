"""FiLM, feature-wise linear modulation: gamma * x + beta per feature map (Perez et al., AAAI 2018).

FiLM behind a BatchNorm in inference mode is that BatchNorm with another scale and shift. This form serves while
gradients flow to gamma and beta. Once a task's adaptation is fixed, the convolution before the BatchNorm absorbs both
(:mod:`~fewshot_mahalanobis.networks.folding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Film(Mapping[str, tuple[Tensor, Tensor]]):
    """FiLM parameters of a network: position -> (gamma, beta), each of shape (C,).

    A position is the name of the normalisation layer that FiLM follows, as in ``named_modules()`` of the network:
    "layers.0.1.bn2" is the second BatchNorm of block 1 of layer 0 of the FiLM ResNet18. The attribute
    ``film_positions`` of a network lists its positions and their widths C.

    Parameters
    ----------
    parameters : mapping of str to (Tensor, Tensor)
    """

    def __init__(self, parameters: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self._parameters = dict(parameters)

    @classmethod
    def identity(cls, positions: Mapping[str, int]) -> Film:
        """FiLM parameters that change nothing, gamma = 1 and beta = 0, for positions and their widths."""
        return cls({name: (torch.ones(width), torch.zeros(width)) for name, width in positions.items()})

    def __getitem__(self, position: str) -> tuple[Tensor, Tensor]:
        return self._parameters[position]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def within(self, module: str) -> Film:
        """The positions inside a module, named as that module names them."""
        start = module + "."
        return Film({name.removeprefix(start): pair for name, pair in self.items() if name.startswith(start)})

    def to(self, device: torch.device) -> Film:
        """The same parameters on another device."""
        return Film({name: (gamma.to(device), beta.to(device)) for name, (gamma, beta) in self.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by their names in a file: "film.layers.0.1.bn2.gamma" and so on."""
        return {
            f"film.{position}.{name}": tensor
            for position, pair in self.items()
            for name, tensor in zip(("gamma", "beta"), pair, strict=True)
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Film:
        """Undo :meth:`tensors`, in float32; other tensors of the file are left out.

        Raises
        ------
        KeyError
            A gamma has no beta.
        """
        positions = [name[5:-6] for name in tensors if name.startswith("film.") and name.endswith(".gamma")]
        return cls({p: (tensors[f"film.{p}.gamma"].float(), tensors[f"film.{p}.beta"].float()) for p in positions})


def film_batch_norm(bn: nn.BatchNorm2d, x: Tensor, film: tuple[Tensor, Tensor]) -> Tensor:
    """Gamma * bn(x) + beta, with ``bn`` in inference mode whatever mode the module is in.

    Scale and shift stay in float32 when x is in bfloat16, where gamma = 1.002 would round to 1.
    """
    gamma, beta = film
    weight, bias = bn.weight * gamma, bn.bias * gamma + beta
    return F.batch_norm(x, bn.running_mean, bn.running_var, weight, bias, training=False, eps=bn.eps)


def modulated_parameters(network: nn.Module, film: Film) -> dict[str, Tensor]:
    """Return the parameters that FiLM replaces, by name: (w, b) of a norm become (gamma w, gamma b + beta)."""
    replaced = {}
    for name, (gamma, beta) in film.items():
        norm: Any = network.get_submodule(name)
        replaced[f"{name}.weight"], replaced[f"{name}.bias"] = norm.weight * gamma, norm.bias * gamma + beta
    return replaced
