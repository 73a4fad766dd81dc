"""How much an error in each tensor of a state matters, as its adapter tells: all that compression asks of a method."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from acclimate_adapters.adapter import Adapter
from acclimate_adapters.network.model import FrozenModel


@runtime_checkable
class Tolerant(Protocol):
    """An adapter whose state may be stored with errors."""

    def sensitivity(self, model: FrozenModel) -> Mapping[str, float]:
        """Weight of an error in those tensors of the state that tolerate one; above 0.

        Errors of two tensors, each as the root of its mean square times this weight, are to do the same harm. An
        infinite weight is for tensors whose numbers are all to stay good to three digits, however few bytes there are.
        """
        ...


def sensitivity(adapter: Adapter, model: FrozenModel) -> Mapping[str, float]:
    """What an adapter says of its tensors; nothing if they are to stay as they are."""
    return adapter.sensitivity(model) if isinstance(adapter, Tolerant) else {}


def scale(model: FrozenModel, module: str) -> float:
    """What the size of a change of a module is to be compared with, in root mean square.

    Parameters with the weight of their layer, running means with the standard deviation, running variances with
    themselves; 1 where that is 0.
    """
    layer, _, kind = module.rpartition(".")
    if kind == "running_mean":
        return float(model.tensor(f"{layer}.running_var").clamp_min(0).mean().sqrt()) or 1.0
    weight = f"{layer}.weight" if layer else "weight"
    compared = weight if kind != "running_var" and weight in model.modules else module
    return float(model.tensor(compared).double().square().mean().sqrt()) or 1.0
