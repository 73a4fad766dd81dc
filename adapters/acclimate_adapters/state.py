"""What one client carries from batch to batch, and how it becomes bytes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Self, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from acclimate_adapters.errors import StateCorrupt, StateMismatch
from acclimate_adapters.functional import unshared

T = TypeVar("T", str, int)

LARGEST_COUNT = 2**53  # of batches, and the largest layout: what a double holds exactly
_HEADER = "acclimate"  # the one metadata entry: several would be written in random order
_PREFIX = 8  # safetensors begins with the length of its JSON header, little-endian


class Form(NamedTuple):
    """What a tensor of a state has to be like."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # any of these
    low: float = -math.inf  # of every number, included; NaN is within no bounds
    high: float = math.inf

    @classmethod
    def of(cls, tensor: Tensor, *dtypes: torch.dtype, low: float = -math.inf, high: float = math.inf) -> Self:
        """That of a tensor, which may also be of the other types."""
        return cls(tuple(tensor.shape), (tensor.dtype, *dtypes), low, high)

    def problem(self, tensor: Tensor) -> str | None:
        """What is wrong with a tensor; None if nothing is."""
        if tensor.shape != self.shape:
            return f"has shape {[*tensor.shape]}, not {[*self.shape]}"
        if tensor.dtype not in self.dtypes:
            return f"is of {tensor.dtype}, not {' or '.join(map(str, self.dtypes))}"
        bounded = self.low > -math.inf or self.high < math.inf
        if bounded and not bool(((tensor >= self.low) & (tensor <= self.high)).all()):
            return f"holds numbers outside {self.low:g}..{self.high:g}"
        return None


def count(*shape: int, high: float = LARGEST_COUNT) -> Form:
    """The form of whole numbers from 0 to `high`, included."""
    return Form(shape, (torch.int64,), 0, high)


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

    def require_form(self, forms: Mapping[str, Form]) -> None:
        """Refuse a state whose tensors are not of these forms, by name.

        Raises:
            StateMismatch: naming what differs first.
        """
        if self.tensors.keys() != forms.keys():
            lacking, strange = sorted(forms.keys() - self.tensors.keys()), sorted(self.tensors.keys() - forms.keys())
            raise StateMismatch(f"the state lacks the tensors {_some(lacking)} and holds {_some(strange)} instead")
        for name, form in forms.items():
            problem = form.problem(self.tensors[name])
            if problem is not None:
                raise StateMismatch(f"{name} of the state {problem}")

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
            return cls(
                adapter=_checked(header["adapter"], str),
                layout=_checked(header["layout"], int),
                model=_checked(header["model"], str),
                step=_checked(header["step"], int),
                tensors=safetensors.torch.load(data),
            )
        except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise StateCorrupt(f"these bytes are not a state: {error}") from error


def _checked(value: object, kind: type[T]) -> T:
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= LARGEST_COUNT):
        raise ValueError(f"its header holds {value!r} where {kind.__name__} belongs, numbers from 0 to {LARGEST_COUNT}")
    return value


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])]) or "none"


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each in memory of its own: safetensors refuses those that share it."""
    return dict(zip(tensors, unshared(tensor.detach().cpu().contiguous() for tensor in tensors.values()), strict=True))
