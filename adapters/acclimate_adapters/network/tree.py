"""Passes of one network with some of its tensors replaced, from several threads at once."""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Place(NamedTuple):
    """Where a module keeps a tensor."""

    holder: dict[str, Any]
    key: str


class Tree(NamedTuple):
    """Modules over shared tensors, and by name where the tensors are; a tied one is in several places."""

    root: nn.Module
    places: Mapping[str, tuple[Place, ...]]


class Trees:
    """A module tree for each thread over the tensors of one network, since a pass swaps tensors in the tree it uses.

    Args:
        net: the network, which is never changed.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._thread = threading.local()

    @contextmanager
    def replacing(self, tensors: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """The calling thread's tree, with these tensors in the places of those of the same names.

        What `torch.func.functional_call` does, which looks every name up at each call.
        """
        tree = self._own()
        places = [(place, tensor) for name, tensor in tensors.items() for place in tree.places[name]]
        before = [place.holder[place.key] for place, _ in places]
        try:
            for place, tensor in places:
                place.holder[place.key] = tensor
            yield tree.root
        finally:
            for (place, _), tensor in zip(places, before, strict=True):
                place.holder[place.key] = tensor

    def _own(self) -> Tree:
        tree: Tree | None = getattr(self._thread, "tree", None)
        if tree is None:
            shared = {id(t): t for t in (*self._net.parameters(), *self._net.buffers())}
            tree = self._thread.tree = _mapped(copy.deepcopy(self._net, memo=shared))
        return tree


def _mapped(root: nn.Module) -> Tree:
    by_tensor: dict[int, list[Place]] = {}
    for module in root.modules():
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                by_tensor.setdefault(id(tensor), []).append(Place(holder, key))
    named = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    return Tree(root, {name: tuple(by_tensor[id(tensor)]) for name, tensor in named})
