"""ATP: adaptation with one learned rate per module (Bao et al., NeurIPS 2023)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.compression.sensitivity import scale
from acclimate_adapters.cost import Cost, forward_pass, gradient_pass
from acclimate_adapters.functional import at_least_float32, entropy
from acclimate_adapters.hyperparameters import check, choice
from acclimate_adapters.network.direction import Direction, direction
from acclimate_adapters.network.graphs import Outcome
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State

VARIANCE = ".running_var"


@dataclass(frozen=True, slots=True)
class Atp:
    """Move every module along its unsupervised direction, as far as its learned adaptation rate says.

    Method:
        h_k    direction of batch k at the global weights w_G: the negative entropy gradient for parameters (Eq. 4),
               batch statistic - running statistic for BatchNorm statistics (Eq. 5), both from one pass in which every
               layer normalises by its running statistics; `network.direction`
        alpha  one adaptation rate per module (`Source.rates`), learned from source clients (Eq. 7); may be negative
        batch  w_k = w_G + alpha * h_k                            (Eq. 6, Algorithm 2 line 6)
        online w_k = w_G + alpha * (h_1 + ... + h_k) / k          (Eq. 8, Algorithm 2 lines 8 and 9)
        logits = f(x_k; w_k), predicted after the update          (Algorithm 2 line 10)

    Departures:
        A running variance that the update would make negative is set to 0 (the paper is silent; the authors' program
        does it too, but per batch before averaging, which differs once a variance is clamped).
        The batch's variance is the unbiased one, like the running variance (the paper is silent). That of one value per
        channel is undefined; its direction is 0 and a signal counts it.
        Every batch counts the same in the mean, whatever its size, as in the paper.

    Args:
        mode: "online" keeps the mean direction of all batches so far; "batch" adapts to each batch alone.

    Reference: Bao, Wei, Wang, He: "Adaptive Test-Time Personalization for Federated Learning", NeurIPS 2023.
    """

    name: ClassVar[str] = "atp"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"gradients", "rates"})
    shows_frozen: ClassVar[bool] = True

    mode: str = choice("online", "batch", doc="online averages the directions of all batches; batch uses the last one")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: a zero direction for each module that has a rate.

        Raises:
            MissingSource: the model carries no rates.
        """
        require(self, model)
        kept = active_modules(model) if self.mode == "online" else ()
        return State(self.name, self.layout, model.content_hash, tensors=zero_directions(model, kept))

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """A direction for each module that has a rate, as `Adapter.form`."""
        return direction_forms(model, active_modules(model)) if self.mode == "online" else {}

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward, backward and forward, as `Costly.cost`."""
        return gradient_pass(rows).and_also(forward_pass(rows))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        require_state(self, model, state)
        modules = active_modules(model)
        x = model.batch(x)
        h = direction(model, x, modules)
        new = state.next(mean_direction(state.tensors, h.tensors, state.step + 1) if self.mode == "online" else {})
        return answer(model, new, x, h, new.tensors or h.tensors, model.source.rates or {})

    def moved(self, model: FrozenModel, state: State) -> dict[str, Tensor]:
        """Rate times mean direction, as `Moving.moved`; nothing in mode "batch", which keeps no direction."""
        rates = model.source.rates or {}
        return {name: rates[name] * mean for name, mean in state.tensors.items()}

    def sensitivity(self, model: FrozenModel) -> dict[str, float]:
        """How far an error of a direction moves its module, relative to the module's scale (`sensitivity.Tolerant`)."""
        rates = model.source.rates or {}
        return {name: abs(rates[name]) / scale(model, name) for name in active_modules(model)}


def active_modules(model: FrozenModel) -> tuple[str, ...]:
    """Modules whose adaptation rate is not 0, in the order of the network."""
    rates = model.source.rates or {}
    return tuple(name for name in model.modules if rates.get(name, 0.0) != 0.0)


def zero_directions(model: FrozenModel, modules: Iterable[str]) -> dict[str, Tensor]:
    """The mean of no directions yet, by module; in single precision at least, as all means."""
    return {name: torch.zeros_like(at_least_float32(model.tensor(name))) for name in modules}


def direction_forms(model: FrozenModel, modules: Iterable[str]) -> dict[str, Form]:
    """The forms of mean directions, by module; earlier versions kept them in the precision of the model."""
    return {name: Form.of(model.tensor(name), torch.float32) for name in modules}


def mean_direction(mean: Mapping[str, Tensor], h: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Mean of k directions from the mean of the first k - 1 and the k-th (Algorithm 2, line 8).

    Written as mean + (h - mean) / k, which stays exact to single precision for any k that occurs. In half precision a
    step of 1 / k would soon be rounded away, so the mean is in single precision at least. The result takes the place of
    h where it can, which is this batch's own; `mean`, which belongs to a state, stays what it is.
    """
    latest = {name: at_least_float32(part) for name, part in h.items()}
    return {name: torch.lerp(mean[name].to(new), new, 1.0 / k, out=new) for name, new in latest.items()}


def answer(
    model: FrozenModel, state: State, x: Tensor, h: Direction, used: Mapping[str, Tensor], rates: Mapping[str, float]
) -> Step:
    """The prediction after the update (Algorithm 2, line 10).

    Args:
        model: the frozen model.
        state: the state after this batch.
        x: [B, C, H, W], a batch that `FrozenModel.batch` has checked.
        h: its direction, with the prediction of the frozen model.
        used: the direction to move along, by module: h itself or a mean.
        rates: alpha of each of these modules.
    """
    prediction, clamped = adapted_pass(model, x, used, rates)
    logits = require_finite(prediction.logits)
    signals = {
        "entropy": float(entropy(logits).mean()),
        "frozen_entropy": float(entropy(h.logits).mean()),
        "clamped_variances": float(clamped),
        "undefined_variances": float(len(h.undefined)),
        "constant_channels": float(h.constant),
    }
    return Step(logits, state, signals, h.logits, prediction.features, frozen_features=h.features)


def adapted_pass(
    model: FrozenModel, x: Tensor, h: Mapping[str, Tensor], rates: Mapping[str, float]
) -> tuple[Pass, Tensor]:
    """The pass of a batch through the modules of `adapt`, and how many variances were clamped.

    Update and pass are one graph for each size of batch and set of rates: adapted statistics belong to one client, but
    the rates that are constants in it are the same for all.
    """
    names = tuple(h)

    def update(tensors: Sequence[Tensor]) -> Outcome:
        batch, *parts = tensors
        adapted, clamped = adapt(model, dict(zip(names, parts, strict=True)), rates)
        answer = model.adapted(batch, adapted)
        return Outcome((answer.features, answer.logits, clamped))

    key = "adapted", names, *(rates[name] for name in names)
    features, logits, clamped = model.graphs.call(key, update, (x, *h.values())).tensors
    return Pass(features, logits), clamped


def moved(tensor: Tensor, part: Tensor, rate: float) -> Tensor:
    """A module after its update (Eq. 6), in its own precision."""
    return torch.add(tensor, part, alpha=rate).to(tensor.dtype)


def adapt(model: FrozenModel, h: Mapping[str, Tensor], rates: Mapping[str, float]) -> tuple[dict[str, Tensor], Tensor]:
    """Adapted modules w_G + alpha * h (Eq. 6), running variances clamped at 0.

    Returns:
        The modules by name, and how many variances were clamped, a tensor [].
    """
    adapted = {name: moved(model.tensor(name), part, rates[name]) for name, part in h.items()}
    variances = [tensor for name, tensor in adapted.items() if name.endswith(VARIANCE)]
    if not variances:
        return adapted, torch.zeros((), device=model.device)
    clamped = (torch.cat(variances) < 0).sum()
    torch._foreach_clamp_min_(variances, 0)
    return adapted, clamped
