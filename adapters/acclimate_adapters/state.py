"""What one client carries from batch to batch, and how it becomes bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from acclimate_adapters.errors import StateCorrupt, StateMismatch
from acclimate_adapters.functional import unshared

_HEADER = "acclimate"  # the one metadata entry: several would be written in random order
_PREFIX = 8  # safetensors begins with the length of its JSON header, little-endian


@dataclass(frozen=True, slots=True)
class State:
    """A frozen record: header and named tensors. The only thing that differs between clients.

    Tensors are never changed in place once they are in a state.
    """

    adapter: str  # registry name
    layout: int  # bumped whenever the names, shapes or meaning of the tensors change
    model: str  # content hash of the frozen model it was made for, 16 hex digits
    step: int = 0  # batches folded in so far
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    nbytes: int = field(init=False, repr=False, compare=False)  # of the tensors; counted once, since it is asked often

    def __post_init__(self) -> None:
        """Keep the mapping from being changed through the caller's own reference."""
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "nbytes", sum(tensor.nbytes for tensor in self.tensors.values()))

    def next(self, tensors: Mapping[str, Tensor] | None = None) -> "State":
        """The state after one more batch, with these tensors (unchanged ones when None)."""
        return State(self.adapter, self.layout, self.model, self.step + 1, self.tensors if tensors is None else tensors)

    def require(self, adapter: str, layout: int, model: str) -> None:
        """Refuse a state that was made for something else.

        Raises:
            StateMismatch: naming what differs.
        """
        wanted = {"adapter": adapter, "layout": layout, "model": model}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise StateMismatch(f"the state was made for {name} {getattr(self, name)!r}, not {value!r}")

    def to_bytes(self) -> bytes:
        """Serialise as safetensors; equal states give equal bytes."""
        header = {"adapter": self.adapter, "layout": self.layout, "model": self.model, "step": self.step}
        return safetensors.torch.save(_storable(self.tensors), {_HEADER: json.dumps(header, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "State":
        """Read what `to_bytes` wrote; the tensors are on the CPU.

        Raises:
            StateCorrupt: the bytes are not a state.
        """
        try:
            length = int.from_bytes(data[:_PREFIX], "little")
            metadata = json.loads(data[_PREFIX : _PREFIX + length])["__metadata__"]
            header = json.loads(metadata[_HEADER])
            fields = str(header["adapter"]), int(header["layout"]), str(header["model"]), int(header["step"])
            return cls(*fields, safetensors.torch.load(data))
        except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise StateCorrupt(f"these bytes are not a state: {error}") from error


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each in memory of its own: safetensors refuses those that share it."""
    return dict(zip(tensors, unshared(tensor.detach().cpu().contiguous() for tensor in tensors.values()), strict=True))
