"""Folding: BatchNorm and FiLM disappear into the convolutions before them, once per task.

The adaptation is constant within a task, so an adapted network costs what a plain one does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.networks.film import Film, modulated_parameters


class Conv2dSame(nn.Conv2d):
    """A convolution of stride 2 with TensorFlow's "same" padding, as timm has it under this name."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, ceil(h / 2), ceil(w / 2))."""
        (top, bottom), (left, right) = self._padding(input.shape[2]), self._padding(input.shape[3])
        padded = F.pad(input, (left, right, top, bottom))
        return F.conv2d(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)

    def _padding(self, side: int) -> tuple[int, int]:
        """Rows before the first and after the last."""
        total = self.kernel_size[0] - 2 + side % 2
        return total // 2, total - total // 2


class PointwiseConv2d(nn.Conv2d):
    """A convolution of 1 x 1. On a GPU it is a matrix product, see :func:`pointwise`."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (n, C_in, h, w) -> maps (n, C, h, w)."""
        return pointwise(input, self.weight, self.bias) if input.is_cuda else super().forward(input)


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution of 1 x 1 as a matrix product over all positions, which copies nothing of maps in channels_last."""
    return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


#: Activation -> its name and its numbers in oneDNN, and the function. ReLU6 is not in place: exporting that form takes
#: twice as long.
_ACTIVATIONS: dict[str, tuple[str, list[float], Callable[[Tensor], Tensor]]] = {
    "none": ("none", [], lambda x: x),
    "relu": ("relu", [], F.relu_),
    "relu6": ("hardtanh", [0.0, 6.0], lambda x: F.hardtanh(x, 0.0, 6.0)),
}


class FoldedConv(nn.Module):
    """A convolution, the BatchNorm behind it, FiLM, a shortcut and an activation as one convolution with bias.

    It computes activation(gamma * bn(conv(x)) + beta + shortcut), ``bn`` in inference mode. Its weights are
    channels_last, in ``dtype`` if that is given. Not an ``nn.Conv2d``, which would draw initial weights: that takes
    longer than folding.

    A convolution of stride 2 with TensorFlow's "same" padding pads both ends of an odd side alike, and an even side by
    one less at the start. A kernel with a row of zeros before the first does the same at equal padding, without a
    padded copy of the maps.
    """

    @torch.no_grad()
    def __init__(
        self,
        conv: nn.Conv2d,
        bn: nn.BatchNorm2d,
        film: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "none",
    ) -> None:
        super().__init__()
        weight, bias = _folded(conv, bn, film)
        if not (weight.isfinite().all() and bias.isfinite().all()):  # oneDNN's ReLU would turn NaN into 0
            raise ValueError("the network's weights, folded with BatchNorm and FiLM, hold NaN or infinity")
        self.stride, self.padding, self.groups, self.activation = conv.stride, conv.padding, conv.groups, activation
        self.pads_by_size = _pads_by_size(conv)
        if self.pads_by_size:
            weight, self.padding = F.pad(weight, (1, 0, 1, 0)), (conv.kernel_size[0] // 2, conv.kernel_size[1] // 2)
        weight = weight.to(dtype or weight.dtype, memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
        self._for_onednn: dict[int, tuple[torch.Size, Tensor, Tensor]] = {}

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Maps (n, C_in, h, w), and maps to be added (n, C, h', w') -> maps (n, C, h', w')."""
        weight: Tensor = self.weight
        if self.pads_by_size:
            weight = weight[:, :, x.shape[2] % 2 :, x.shape[3] % 2 :]
        name, numbers, activate = _ACTIVATIONS[self.activation]
        if (shortcut is None or name != "hardtanh") and _fuses(x):  # with a sum oneDNN has no ReLU6
            settings = self._weight_for_onednn(x, weight), self.bias, self.padding, self.stride, (1, 1), self.groups
            if shortcut is None:
                return torch.ops.mkldnn._convolution_pointwise(x, *settings, name, numbers, "")
            unary = None if name == "none" else name
            return torch.ops.mkldnn._convolution_pointwise.binary(
                x, shortcut, *settings, "add", 1.0, unary, numbers, ""
            )
        if x.is_cuda and weight.shape[2:] == (1, 1) and self.stride == (1, 1) and self.groups == 1:
            y = pointwise(x, weight, self.bias)
        else:
            y = F.conv2d(x, weight, self.bias, self.stride, self.padding, 1, self.groups)
        return activate(y if shortcut is None else y.add_(shortcut))

    def _weight_for_onednn(self, x: Tensor, weight: Tensor) -> Tensor:
        """The weight in the order in which oneDNN's kernel for maps of this size and this number of threads reads it.

        Without it each call would bring the weight into that order, which takes a third of a call with one image. A
        kernel for other sizes or threads may want another order, and is up to 25 times as slow with this one.
        """
        threads, size = torch.get_num_threads(), x.shape[2:]
        known = self._for_onednn.get(threads)
        if known is None or known[0] != size or known[1] is not self.weight:  # functional_call puts others in its place
            reordered = torch.ops.mkldnn._reorder_convolution_weight(
                weight, self.padding, self.stride, (1, 1), self.groups, x.shape
            )
            self._for_onednn[threads] = known = size, self.weight, reordered
        return known[2]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._for_onednn = {}
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_for_onednn": {}}  # such a tensor can be neither copied nor pickled


def _fuses(x: Tensor) -> bool:
    """Whether oneDNN can do convolution, sum and activation in one pass over the maps, by what ``torch.compile`` calls.

    No gradient passes that, and no exported graph has it. The operations are private to PyTorch; the tests hold them to
    the plain ones under the oldest and the newest version. Against these, a network takes less processor time by 6 %
    (default checkpoint, 224 pixels, one image), 17 % (eight images), 15 and 3 % (resnet18): float32, AVX2, one thread,
    PyTorch 2.14, medians of 9 in turns.
    """
    if x.device.type != "cpu" or x.requires_grad or type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled("cpu"):  # which knows nothing of this operation
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return False
    return x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _folded(conv: nn.Conv2d, bn: nn.BatchNorm2d, film: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that computes gamma * bn(conv(x)) + beta."""
    scale, shift = _scale_and_shift(bn)
    if conv.bias is not None:
        shift = shift + conv.bias.double() * scale
    if film is not None:
        gamma, beta = film[0].double(), film[1].double()
        scale, shift = scale * gamma, shift * gamma + beta
    return conv.weight * scale.to(conv.weight.dtype)[:, None, None, None], shift.to(conv.weight.dtype)


def _scale_and_shift(bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """BatchNorm in inference mode as scale * x + shift, both float64 (C,)."""
    assert bn.running_mean is not None
    assert bn.running_var is not None
    # One number per feature map: float64 costs nothing here and saves a rounding.
    scale = bn.weight.double() / torch.sqrt(bn.running_var.double() + bn.eps)
    return scale, bn.bias.double() - bn.running_mean.double() * scale


@torch.no_grad()
def fold_network(
    network: nn.Module, foldable: Sequence[tuple[str, str]], film: Film | None = None, keep: Sequence[str] = ()
) -> nn.Module:
    """Copy a network for inference, its convolutions absorbing FiLM and the BatchNorms behind them.

    Parameters
    ----------
    network : nn.Module
        In evaluation mode. The copy shares every tensor that is not changed.
    foldable : sequence of (str, str)
        Convolution and BatchNorm, from :func:`~fewshot_mahalanobis.networks.norms.trace_norms`.
    film : Film, optional
        Behind a norm that cannot be folded, it replaces that norm's scale and shift.
    keep : sequence of str
        BatchNorms that stay.
    """
    # New parameters that share memory: moving a module changes its parameters in place.
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in network.parameters()}
    folded = copy.deepcopy(network, shared | {id(buffer): buffer for buffer in network.buffers()})
    for name, value in modulated_parameters(network, Film({}) if film is None else film).items():
        owner, _, attribute = name.rpartition(".")
        setattr(folded.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
    for conv_name, norm_name in foldable:
        if norm_name in keep:
            continue
        conv, norm = folded.get_submodule(conv_name), folded.get_submodule(norm_name)
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        if _pads_by_size(conv):
            _put(folded, conv_name, FoldedConv(conv, norm))
        else:
            conv.weight, conv.bias = (nn.Parameter(x, requires_grad=False) for x in _folded(conv, norm))
        _put(folded, norm_name, _activation_of(norm))
    return folded


def _pads_by_size(conv: nn.Conv2d) -> bool:
    """Whether it has TensorFlow's "same" padding, ours or timm's, in a form that :class:`FoldedConv` knows."""
    timm_layers = sys.modules.get("timm.layers")  # a network of timm has imported it
    same = (Conv2dSame,) if timm_layers is None else (Conv2dSame, timm_layers.Conv2dSame)
    odd_square = conv.kernel_size[0] == conv.kernel_size[1] and conv.kernel_size[0] % 2 == 1
    return type(conv) in same and conv.stride == (2, 2) and conv.dilation == (1, 1) and odd_square


def _activation_of(norm: nn.BatchNorm2d) -> nn.Module:
    """Return what timm's BatchNorms do beside normalising."""
    if type(norm) is nn.BatchNorm2d:
        return nn.Identity()
    return nn.Sequential(getattr(norm, "drop", nn.Identity()), norm.act)  # type: ignore[arg-type]


def _put(network: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of this name; newer versions of PyTorch have ``set_submodule``."""
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, module)
