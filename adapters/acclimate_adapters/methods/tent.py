"""Tent: entropy minimisation through the affine parameters of normalisation layers (Wang et al., ICLR 2021)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.cost import Cost, gradient_pass
from acclimate_adapters.errors import ConfigurationError
from acclimate_adapters.functional import at_least_float32, entropy
from acclimate_adapters.hyperparameters import check, choice, names, real
from acclimate_adapters.network.gradient import BatchStatistics, gradient
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # Adam's customary constants, which the authors use
MEAN, SQUARE = "adam.mean.", "adam.square."

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Tent:
    """Normalise by the batch and take one step per batch on the entropy of the predictions.

    Method (equations numbered here):
        theta  weight and bias of the normalisation layers `layers`; carried from batch to batch, all else stays frozen
        H      = -sum_k p_k ln p_k, the entropy of one prediction; L is its mean over the batch        (1)
        SGD    theta <- theta - lr dL/dtheta                                                           (2)
        Adam   m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2                                       (3)
               theta <- theta - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), t the batch        (4)
        logits come from the pass that L was measured on: the answer is from *before* this batch's update, as in the
        authors' program. Every BatchNorm layer, trained or not, normalises by the batch (biased variance), and the
        gradient flows through its statistics. No other layer leaves evaluation mode.

    Departures:
        The affine parameters of all BatchNorm layers are trained; the authors' program collects BatchNorm2d only: name
        those in `layers` to reproduce it. A network without BatchNorm has its LayerNorm and GroupNorm layers trained,
        as the authors' follow-up does; they normalise each row by itself, before and after.
        A layer that sees one value per channel normalises by its running statistics; a signal counts such layers.
        SGD has no momentum.

    Args:
        lr: step size, 0..100. At 0 the method is plain batch normalisation, not the frozen model.
        optimizer: "sgd" or "adam".
        layers: names of the normalisation layers whose weight and bias are trained. When empty, all BatchNorm layers;
            without any, all LayerNorm and GroupNorm layers.

    Raises:
        ConfigurationError: `init` and `step`, a name in `layers` is no normalisation layer of the model.

    Reference: Wang, Shelhamer, Liu, Olshausen, Darrell: "Tent: Fully test-time adaptation by entropy minimization",
    ICLR 2021.
    """

    name: ClassVar[str] = "tent"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"normalisation", "gradients"})

    lr: float = real(1e-3, low=0.0, high=100.0, doc="step size")
    optimizer: str = choice("sgd", "adam", doc="sgd has no momentum; adam keeps two moments per parameter")
    layers: tuple[str, ...] = names(doc="normalisation layers whose weight and bias are trained; all when empty")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: the global parameters, and zero moments for Adam.

        Raises:
            MissingSource: the model has no normalisation layer that could be adapted.
        """
        require(self, model)
        tensors = {name: at_least_float32(model.tensor(name)) for name in affine_parameters(model, self.layers)}
        if self.optimizer == "adam":
            zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            tensors |= {kind + name: zero for kind in (MEAN, SQUARE) for name, zero in zeros.items()}
        return State(self.name, self.layout, model.content_hash, tensors=tensors)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """The trained parameters and, for Adam, their moments, as `Adapter.form`."""
        trained = {name: model.tensor(name) for name in affine_parameters(model, self.layers)}
        forms = {name: Form.of(tensor, torch.float32) for name, tensor in trained.items()}
        if self.optimizer == "adam":
            for name, tensor in trained.items():
                moment = Form.of(at_least_float32(tensor))
                forms |= {MEAN + name: moment, SQUARE + name: moment._replace(low=0)}
        return forms

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward and backward, as `Costly.cost`."""
        return gradient_pass(rows)

    def moved(self, model: FrozenModel, state: State) -> dict[str, Tensor]:
        """The trained parameters against the global ones, as `Moving.moved`."""
        return {
            name: state.tensors[name].to(model.device) - model.tensor(name)
            for name in affine_parameters(model, self.layers)
        }

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        require_state(self, model, state)
        trained = affine_parameters(model, self.layers)
        carried = {name: tensor.to(model.device) for name, tensor in state.tensors.items()}
        theta = {name: at_least_float32(carried[name]) for name in trained}
        rule = BatchStatistics()
        g, answer = gradient(model, model.batch(x), theta, mean_entropy, rule)
        logits = require_finite(answer.logits)
        if self.optimizer == "adam":
            new = adam(carried, g, state.step + 1, self.lr)
        else:
            new = {name: torch.sub(theta[name], g[name], alpha=self.lr) for name in theta}
        signals = {"entropy": float(entropy(logits).mean()), "undefined_variances": float(rule.undefined)}
        return Step(logits, state.next(new), signals, features=answer.features)


def mean_entropy(answer: Pass) -> Tensor:
    """Mean entropy [] of the predictions of a pass, in nats (1)."""
    return entropy(answer.logits).mean()


def affine_parameters(model: FrozenModel, layers: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names of the weights and biases of the normalisation layers asked for; see `Tent` for an empty `layers`.

    Layers without affine parameters contribute none.

    Raises:
        ConfigurationError: one of the layers is no normalisation layer.
    """
    batch_norms = [name.removesuffix(".running_mean") for name in model.statistics if name.endswith(".running_mean")]
    known = [*batch_norms, *model.row_norms]
    unknown = sorted(set(layers) - set(known))
    if unknown:
        raise ConfigurationError(f"no normalisation layer is named {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = [layer for layer in known if layer in layers] if layers else batch_norms or known
    candidates = [f"{layer}.{kind}" for layer in wanted for kind in ("weight", "bias")]
    return tuple(name for name in candidates if name in model.modules)


def adam(carried: Tensors, gradients: Tensors, t: int, lr: float) -> dict[str, Tensor]:
    """One step of Adam, (3) and (4), written in the operations of the customary program.

    Args:
        carried: parameters by name and both moments by prefixed name, in single precision at least: eps, small squares
            and small steps are 0 in half.
        gradients: by name.
        t: number of this step, from 1.
        lr: step size.

    Returns:
        The same names with new tensors.
    """
    new = {}
    for name, g in gradients.items():
        mean = torch.lerp(carried[MEAN + name], g, 1 - BETA1)
        square = torch.addcmul(carried[SQUARE + name] * BETA2, g, g, value=1 - BETA2)
        scale = square.sqrt() / math.sqrt(1 - BETA2**t) + EPS
        new[name] = torch.addcdiv(at_least_float32(carried[name]), mean, scale, value=-lr / (1 - BETA1**t))
        new |= {MEAN + name: mean, SQUARE + name: square}
    return new
