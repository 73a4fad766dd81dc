"""How the images of a pass lie in memory, which decides how fast convolutions and pooling are, not what they give."""

import copy
from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from acclimate_adapters.network.packed import Convolution, can_pack
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
