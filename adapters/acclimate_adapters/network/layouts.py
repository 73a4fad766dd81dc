"""How the images of a pass lie in memory, which decides how fast convolutions and pooling are, not what they give.

On a CPU, convolutions of passes in channels_last are packed: their frozen weights are laid out once as its kernels want
them. Otherwise oneDNN lays them out at every call, a third of a ResNet-18's forward pass on few images.
"""

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from acclimate_adapters.network.probes import adopt
from acclimate_adapters.network.tree import Trees


class Layout(NamedTuple):
    """The layout of one kind of passes."""

    trees: Trees
    channels_last: bool

    def laid_out(self, x: Tensor) -> Tensor:
        """The batch x [B, ...]; images [B, C, H, W] as the layout says."""
        return x.to(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x


class Layouts(NamedTuple):
    """The layouts of all passes of a network."""

    frozen: Layout  # of those without gradient that leave the weights of convolutions as they are
    adapted: Layout  # of the others
    weights: frozenset[str]  # names of the weights of convolutions

    @classmethod
    def of(cls, net: nn.Module, *, frozen: bool = False, adapted: bool = False) -> Self:
        """Those kinds of passes in channels_last that are asked for; convolutions of frozen ones are then packed."""
        modules = net.named_modules(remove_duplicate=False)
        weights = frozenset(f"{name}.weight" for name, module in modules if isinstance(module, _ConvNd))
        trees = Trees(net)
        return cls(Layout(Trees(_packed(net)) if frozen else trees, frozen), Layout(trees, adapted), weights)

    def of_pass(self, replaced: Iterable[str]) -> Layout:
        """That of a pass, given the names of the modules that are replaced in it."""
        return self.adapted if torch.is_grad_enabled() or not self.weights.isdisjoint(replaced) else self.frozen


def _packed(net: nn.Module) -> nn.Module:
    """A network over the same tensors whose convolutions are packed where they can be."""
    shared = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    twin = copy.deepcopy(net, memo=shared)
    for name, module in list(twin.named_modules()):
        if can_pack(module):
            twin.set_submodule(name, Convolution(module))
    return twin


class Packed:
    """A frozen convolution whose weight is in oneDNN's own layout from its first use on; shared by copies of a network.

    Args:
        origin: the convolution, whose weight is never written to.
    """

    def __init__(self, origin: nn.Conv2d) -> None:
        self._weight = origin.weight
        self._padding = tuple(map(int, origin.padding))
        self._stride, self._dilation, self._groups = origin.stride, origin.dilation, origin.groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve x [B, C, H, W] without gradient; in channels_last by the packed weight.

        Another weight is taken as it is, and so are all where x only stands for images, in the export of a graph.
        """
        if weight is self._weight and type(x) is Tensor and x.dim() == 4 and x.dtype is weight.dtype:
            geometry = self._padding, self._stride, self._dilation, self._groups
            result: Tensor = torch.ops.mkldnn._convolution_pointwise(x, self._packed, bias, *geometry, "none", (), "")
            return result
        return F.conv2d(x, weight, bias, self._stride, self._padding, self._dilation, self._groups)

    @cached_property
    def _packed(self) -> Tensor:
        geometry = [*self._padding], [*self._stride], [*self._dilation], self._groups
        with torch.inference_mode(False), torch.no_grad():
            packed: Tensor = torch._C._nn.mkldnn_reorder_conv2d_weight(self._weight.to_mkldnn(), *geometry)
        return packed


class Convolution(nn.Module):
    """A frozen convolution with the same tensors under the same names, whose weight is packed."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, origin: nn.Conv2d) -> None:
        super().__init__()
        adopt(self, origin)
        self._convolve = Packed(origin)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x [B, C, H, W]."""
        return self._convolve(x, self.weight, self.bias)


def can_pack(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a plain convolution in single precision on a CPU with oneDNN."""
    return (
        type(module) is nn.Conv2d
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and "weight" in module._parameters
        and not (module._forward_hooks or module._forward_pre_hooks)
        and module.weight.device.type == "cpu"
        and module.weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )
