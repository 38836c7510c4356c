"""The normalisation layers of a network, which FiLM can follow, in the order of their calls.

BatchNorm, LayerNorm and GroupNorm end in a scale and a shift, so FiLM behind one of them is the same layer with another
scale and shift.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class NormCalls(NamedTuple):
    """The normalisation layers that one forward pass uses.

    Attributes
    ----------
    affine : list of str
        Names of those with a scale and a shift that are called exactly once, in the order of the calls.
    after_spatial : list of str
        Those that are called next after a convolution larger than 1 x 1.
    foldable : list of (str, str)
        Convolution, and the BatchNorm that takes its output.
    """

    affine: list[str]
    after_spatial: list[str]
    foldable: list[tuple[str, str]]


def affine_norms(network: nn.Module) -> dict[str, int]:
    """Names of the normalisation layers with a scale and a shift -> their numbers of feature maps."""
    kinds = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
    norms = {name: module for name, module in network.named_modules() if isinstance(module, kinds)}
    affine = {n: m.weight for n, m in norms.items() if isinstance(m.weight, Tensor) and isinstance(m.bias, Tensor)}
    return {name: len(weight) for name, weight in affine.items() if weight.ndim == 1}


def trace_norms(network: nn.Module, run: Callable[[], Any]) -> NormCalls:
    """Record the calls of convolutions and normalisation layers of ``network`` while ``run()`` calls it."""
    modules = dict(network.named_modules())
    norms = affine_norms(network)
    calls: list[str] = []
    before: dict[str, str] = {}  # norm -> the convolution called before it
    fed: dict[str, str] = {}  # norm -> the convolution whose output it takes
    last: tuple[str, Any] | None = None

    def watch_convolution(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal last
            calls.append(name)
            last = name, output

        return modules[name].register_forward_hook(hook)

    def watch_norm(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            nonlocal last
            calls.append(name)
            if last is not None:
                before[name] = last[0]
                if inputs and inputs[0] is last[1]:
                    fed[name] = last[0]
            last = None

        return modules[name].register_forward_pre_hook(hook)

    handles = [watch_norm(name) for name in norms]
    handles += [watch_convolution(name) for name, module in modules.items() if isinstance(module, nn.Conv2d)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    once = [name for name in calls if calls.count(name) == 1]
    affine = [name for name in once if name in norms]

    def is_spatial(convolution: str) -> bool:
        return max(modules[convolution].kernel_size) > 1

    return NormCalls(
        affine,
        [name for name in affine if name in before and is_spatial(before[name])],
        [(fed[name], name) for name in affine if fed.get(name) in once and _can_be_folded(modules[name])],
    )


def _can_be_folded(norm: nn.Module) -> bool:
    """Whether it is a BatchNorm of maps with running statistics: PyTorch's, or timm's with an activation in it."""
    known = type(norm) is nn.BatchNorm2d or (isinstance(norm, nn.BatchNorm2d) and hasattr(norm, "act"))
    return known and norm.running_mean is not None


def default_positions(calls: NormCalls) -> list[str]:
    """Choose the positions of FiLM by rule.

    In a convolutional network they are the first norm, those behind convolutions larger than 1 x 1, and the last one.
    For inverted bottlenecks these are the stem's norm, each block's depthwise one and the head's (Bronskill et al.,
    NeurIPS 2021). If few norms follow such a convolution, as in a transformer, every norm is chosen.
    """
    if 4 * len(calls.after_spatial) < len(calls.affine):
        return calls.affine
    chosen = {*calls.affine[:1], *calls.after_spatial, *calls.affine[-1:]}
    return [name for name in calls.affine if name in chosen]
