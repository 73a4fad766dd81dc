"""No adaptation: the frozen model itself, the baseline of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from acclimate_adapters.adapter import Step, require_state
from acclimate_adapters.functional import entropy
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State


@dataclass(frozen=True, slots=True)
class NoAdaptation:
    """Answer with the frozen model.

    Method:
        logits = f(x; w_G). The state counts batches and holds no tensor.

    Departures: none.
    """

    name: ClassVar[str] = "none"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet."""
        return State(self.name, self.layout, model.content_hash)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """No tensors, as `Adapter.form`."""
        return {}

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.on_frozen(model, state, model.frozen(model.batch(x)))

    def on_frozen(self, model: FrozenModel, state: State, frozen: Pass) -> Step:
        """Answer the batch of a frozen pass, as `FrozenOnly.on_frozen`."""
        require_state(self, model, state)
        logits = require_finite(frozen.logits)
        return Step(logits, state.next(), {"entropy": float(entropy(logits).mean())}, logits, frozen.features)
