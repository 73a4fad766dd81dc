"""Surgical: entropy minimisation on a chosen block of the network (after Lee et al., ICLR 2023)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.cost import Cost, forward_pass, gradient_pass
from acclimate_adapters.errors import ConfigurationError
from acclimate_adapters.functional import entropy
from acclimate_adapters.hyperparameters import check, names, real
from acclimate_adapters.network.direction import direction
from acclimate_adapters.network.model import FrozenModel, require_finite
from acclimate_adapters.state import Form, State


@dataclass(frozen=True, slots=True)
class Surgical:
    """Take one step on the entropy of this batch with the parameters of some layers, from the global weights.

    Method (equations numbered here):
        theta  parameters of the layers `modules`; all else stays frozen
        L      mean entropy of the batch at the global weights w_G                                     (1)
        theta  = theta_G - lr dL/dtheta at w_G                                                         (2)
        logits = f(x; theta), predicted after the update; the next batch starts from w_G again
        BatchNorm layers stay in evaluation mode: they normalise by their running statistics, which do not change.

    Departures:
        The paper fine-tunes a block with labels; that a block adapts to one batch by its entropy is the baseline of
        the ATP paper (section 6), which this follows. Which block, is chosen once on labelled source clients and given
        as `modules`; nothing is chosen here.

    Args:
        modules: names of layers ("layer1.0", "fc") or of single tensors ("fc.bias"); the classifier when empty.
        lr: step size, 0..100. At 0 the answer is that of the frozen model.

    Raises:
        ConfigurationError: `init` and `step`, a name in `modules` fits no parameter of the model.

    Reference: Lee, Chen, Tajwar, Kumar, Yao, Liang, Finn: "Surgical fine-tuning improves adaptation to distribution
    shifts", ICLR 2023.
    """

    name: ClassVar[str] = "surgical"
    layout: ClassVar[int] = 1
    shows_frozen: ClassVar[bool] = True

    modules: tuple[str, ...] = names(doc="layers or tensors to adapt; the classifier when empty")
    lr: float = real(0.01, low=0.0, high=100.0, doc="step size")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    @property
    def needs(self) -> frozenset[str]:
        """Gradients, and a classifier where no layers are named."""
        return frozenset({"gradients", *(() if self.modules else ("classifier",))})

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet; it only counts batches."""
        require(self, model)
        block_parameters(model, self.modules)
        return State(self.name, self.layout, model.content_hash)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """No tensors, as `Adapter.form`."""
        return {}

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward, backward and forward, as `Costly.cost`."""
        return gradient_pass(rows).and_also(forward_pass(rows))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        require_state(self, model, state)
        x = model.batch(x)
        h = direction(model, x, block_parameters(model, self.modules))
        theta = {name: torch.add(model.tensor(name), part, alpha=self.lr) for name, part in h.tensors.items()}
        answer = model.adapted(x, theta)
        logits = require_finite(answer.logits)
        signals = {"entropy": float(entropy(logits).mean()), "frozen_entropy": float(entropy(h.logits).mean())}
        return Step(logits, state.next(), signals, h.logits, answer.features, frozen_features=h.features)


def block_parameters(model: FrozenModel, modules: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names of the parameters of some layers, in the order of the network; of the classifier when `modules` is empty.

    Raises:
        ConfigurationError: a name fits no parameter; running statistics are none.
    """
    wanted = modules or (() if model.classifier is None else (model.classifier,))
    fitting = {m: [name for name in model.parameters if name == m or name.startswith(f"{m}.")] for m in wanted}
    unknown = [m for m, found in fitting.items() if not found]
    if unknown:
        raise ConfigurationError(
            f"no parameter belongs to {', '.join(unknown)}; there are {', '.join(model.parameters)}"
        )
    chosen = {name for found in fitting.values() for name in found}
    return tuple(name for name in model.parameters if name in chosen)
