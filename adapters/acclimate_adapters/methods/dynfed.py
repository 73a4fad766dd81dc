"""DynFed: ATP whose adaptation rates evolve from batch to batch (paper under double-blind review)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.cost import Cost, forward_pass, gradient_pass
from acclimate_adapters.hyperparameters import check, choice, integer, real
from acclimate_adapters.methods.atp import active_modules, answer, direction_forms, mean_direction, zero_directions
from acclimate_adapters.network.direction import direction
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.state import Form, State

RATE = "rate:"  # a state holds alpha_t of module m under "rate:m", the mean direction of m under "m"


@dataclass(frozen=True, slots=True)
class DynFed:
    """Move every module along its unsupervised direction at a rate that a fixed rule changes with every batch.

    Method:
        h_k      direction of batch k at the global weights w_G (Eq. 6 and 7); `network.direction`
        alpha_0  the learned rates alpha_G of all modules (`Source.rates`)
        g        adaptive rate network: tau * sigmoid(W_2 relu(W_1 alpha + b_1) + b_2)            (Eq. 10, 11)
                 ("mlp"), or g(alpha) = alpha ("identity")
        alpha_k  = lam * alpha_{k-1} + (1 - lam) * g(alpha_{k-1}), before batch k       (Eq. 12, Algorithm 2 line 4)
        batch    w_k = w_G + alpha_k * h_k                                              (Eq. 8, Algorithm 2 line 7)
        online   w_k = w_G + alpha_k * (h_1 + ... + h_k) / k                     (Eq. 13, Algorithm 2 lines 9, 10)
        logits   = f(x_k; w_k)                                                               (Algorithm 2 line 12)

    The paper's points that call for care:
        g sees the rates alone, no data: every client of a model follows the same path, against the paper's word
        "client-specific". The first batch already uses alpha_1. Mode "batch" too depends on the number of batches
        before. A sigmoid is positive, so learned negative rates drift upwards; none is clipped. A wrong `tau` is worse
        than the identity (the paper's Table 3), which is why the identity is the default.

    Departures:
        Eq. 12 is computed as alpha + (1 - lam) * (g(alpha) - alpha), so that the identity is ATP bit for bit. (The
        paper's text and Algorithm 2 call it Eq. 11, and Eq. 13 Eq. 12; the numbers here are those printed.)
        The rates evolve during the first `horizon` batches only; the paper leaves open what an endless stream does.
        With the identity this has no effect.
        The paper gives no lambda, no size and no parameters of g: 0.99, 32 hidden units, He-uniform W_1 and
        Xavier-uniform W_2 from `seed`, b_1 = b_2 = 0.
        Variances that turn negative or are undefined are treated as in ATP.

    Args:
        arn: "identity" or "mlp".
        mode: "online" keeps the mean direction of all batches so far; "batch" adapts to each batch alone.
        tau: above 0, upper end of the rates that the MLP asks for. The paper found 0.3 best for mixed kinds of shift,
            1.7 for a single kind.
        lam: 0..1, inertia of the rates; 1 keeps them.
        hidden: hidden units of the MLP.
        seed: parameters of the MLP.
        horizon: number of batches during which the rates evolve.

    Reference: "DynFed: Dynamic Test-Time Adaptation for Federated Learning with Adaptive Rate Networks", anonymous.
    """

    name: ClassVar[str] = "dynfed"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"gradients", "rates"})
    shows_frozen: ClassVar[bool] = True

    arn: str = choice("identity", "mlp", doc="rule by which the rates evolve; identity keeps them and equals atp")
    mode: str = choice("online", "batch", doc="online averages the directions of all batches; batch uses the last one")
    tau: float = real(0.3, low=1e-6, high=100.0, doc="upper end of the rates that the mlp asks for")
    lam: float = real(0.99, low=0.0, high=1.0, doc="inertia of the rates; 1 keeps them")
    hidden: int = integer(32, low=1, high=4096, doc="hidden units of the mlp")
    seed: int = integer(0, low=0, high=2**31 - 1, doc="parameters of the mlp")
    horizon: int = integer(20, low=0, high=2**31 - 1, doc="number of batches during which the rates evolve")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: the learned rates and, online, zero directions.

        Raises:
            MissingSource: the model carries no rates.
        """
        require(self, model)
        modules = self._modules(model)
        learned = model.source.rates or {}
        rates = rate_tensors({name: learned.get(name, 0.0) for name in modules})
        directions = zero_directions(model, modules if self.mode == "online" else ())
        return State(self.name, self.layout, model.content_hash, tensors=rates | directions)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """A rate and, online, a direction for each module, as `Adapter.form`."""
        modules = self._modules(model)
        rates = {RATE + name: Form((), (torch.float64,)) for name in modules}
        return rates | direction_forms(model, modules if self.mode == "online" else ())

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward, backward and forward, as `Costly.cost`."""
        return gradient_pass(rows).and_also(forward_pass(rows))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        require_state(self, model, state)
        modules = self._modules(model)
        online = self.mode == "online"
        x = model.batch(x)
        rates = self._evolve({name: state.tensors[RATE + name].item() for name in modules}, state.step)
        h = direction(model, x, modules)
        mean = mean_direction(state.tensors, h.tensors, state.step + 1) if online else {}
        step = answer(model, state.next(rate_tensors(rates) | mean), x, h, mean or h.tensors, rates)
        return replace(step, signals={**step.signals, **rate_signals(rates)})

    def moved(self, model: FrozenModel, state: State) -> dict[str, Tensor]:
        """Rate times mean direction, as `Moving.moved`; nothing in mode "batch", which keeps no direction."""
        return {
            name: state.tensors[RATE + name].item() * mean
            for name, mean in state.tensors.items()
            if not name.startswith(RATE)
        }

    def _modules(self, model: FrozenModel) -> tuple[str, ...]:
        """Modules whose rate is not 0 at some time: the MLP moves every rate away from 0."""
        return active_modules(model) if self.arn == "identity" else model.modules

    def _evolve(self, rates: Mapping[str, float], batches: int) -> dict[str, float]:
        """Rates of the next batch (Algorithm 2, line 4) after so many batches."""
        if batches >= self.horizon:
            return dict(rates)
        alpha = torch.tensor([*rates.values()], dtype=torch.float64)
        wanted = alpha if self.arn == "identity" else rate_network(alpha, self.tau, self.hidden, self.seed)
        return dict(zip(rates, next_rates(alpha, wanted, self.lam).tolist(), strict=True))


def next_rates(alpha: Tensor, wanted: Tensor, lam: float) -> Tensor:
    """lam * alpha + (1 - lam) * g(alpha) (Eq. 12), which leaves rates alone that are what g wants.

    Args:
        alpha: [M], the rates so far, of any sign.
        wanted: [M], g(alpha).
        lam: 0..1, inertia.
    """
    return torch.lerp(alpha, wanted, 1 - lam)


def rate_network(alpha: Tensor, tau: float, hidden: int, seed: int) -> Tensor:
    """The adaptive rate network g (Eq. 10 and 11): one hidden layer with fixed random parameters, no bias.

    Args:
        alpha: [M], float64.
        tau: scale of the output.
        hidden: width of the hidden layer.
        seed: parameters.

    Returns:
        [M], in 0..tau.
    """
    generator = torch.Generator().manual_seed(seed)
    first = uniform((hidden, len(alpha)), 6 / len(alpha), generator)  # He: variance 2 / inputs, for a ReLU
    second = uniform((len(alpha), hidden), 6 / (len(alpha) + hidden), generator)  # Xavier, for the sigmoid
    return tau * torch.sigmoid(second @ torch.relu(first @ alpha))


def uniform(shape: tuple[int, int], squared_bound: float, generator: torch.Generator) -> Tensor:
    """Numbers uniform in -sqrt(squared_bound)..sqrt(squared_bound), float64; exact on every processor."""
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * math.sqrt(squared_bound)


def rate_tensors(rates: Mapping[str, float]) -> dict[str, Tensor]:
    """Rates as a state holds them: float64, so that a learned rate stays what it is."""
    return {RATE + name: torch.tensor(rate, dtype=torch.float64) for name, rate in rates.items()}


def rate_signals(rates: Mapping[str, float]) -> dict[str, float]:
    """Where the rates have drifted: their mean, and how many are negative."""
    mean = math.fsum(rates.values()) / max(len(rates), 1)
    return {"mean_rate": mean, "negative_rates": float(sum(rate < 0 for rate in rates.values()))}
