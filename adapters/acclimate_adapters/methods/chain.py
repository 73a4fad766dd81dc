"""Chains: an adapter that changes the weights, followed by one that corrects the class prior of its answer."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from acclimate_adapters.adapter import (
    Adapter,
    Moving,
    Step,
    Uncorrectable,
    complete,
    enrols,
    require_state,
    shows_frozen,
    slices,
    step_cost,
)
from acclimate_adapters.cost import Cost, Runs
from acclimate_adapters.errors import ConfigurationError
from acclimate_adapters.guard import bounded
from acclimate_adapters.labels import Labelled, learns, lesson_cost
from acclimate_adapters.methods.priors import PriorCorrection
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.state import Form, State

LAYOUTS = 1000  # the layouts of two parts a and b make the layout 1000 a + b


@dataclass(frozen=True, slots=True)
class Chain:
    """Two adapters as one; made by `chain`.

    Method:
        (logits, features) = answer of `weights` to the batch
        logits             = what `prior` makes of them, whose window thus holds answers of the adapted weights

    The state holds both parts' tensors, each under the name of its part, and counts the batches of both. The signals
    are those of both parts; where both measure the same, it is the answer's that counts.

    Departures: none of its own. The class prototypes of FedCal were measured with the global weights.

    Args:
        weights: changes the weights or the statistics.
        prior: corrects the class prior.
    """

    weights: Adapter
    prior: PriorCorrection

    @property
    def name(self) -> str:
        """The names of the parts, joined by a plus sign."""
        return f"{self.weights.name}+{self.prior.name}"

    @property
    def layout(self) -> int:
        """Changes whenever the layout of a part does."""
        return LAYOUTS * self.weights.layout + self.prior.layout

    @property
    def needs(self) -> frozenset[str]:
        """What either part needs."""
        return self.weights.needs | self.prior.needs

    @property
    def shows_frozen(self) -> bool:
        """Whether the weights do."""
        return shows_frozen(self.weights)

    @property
    def enrols(self) -> bool:
        """Whether the weights are enrolled."""
        return enrols(self.weights)

    @property
    def learns(self) -> bool:
        """Whether true labels count for either part."""
        return learns(self.weights) or learns(self.prior)

    def init(self, model: FrozenModel, **enrolment: Tensor) -> State:
        """The state of a client that has sent nothing yet; an enrolment goes to the weights."""
        parts = self.weights.init(model, **enrolment), self.prior.init(model)
        return State(self.name, self.layout, model.content_hash, tensors=join(parts))

    def learn(self, model: FrozenModel, state: State, rows: Labelled) -> State:
        """The state with labelled rows taken in by those parts that learn from them, as `Learning.learn`."""
        require_state(self, model, state)
        parts = [
            part.learn(model, part_of(state, part), rows) if learns(part) else part_of(state, part)
            for part in (self.weights, self.prior)
        ]
        return replace(state, tensors=join(parts))

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """Those of both parts, as `Adapter.form`."""
        return {
            f"{part.name}.{name}": form
            for part in (self.weights, self.prior)
            for name, form in part.form(model, part_of(state, part)).items()
        }

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """Each part bounded in its own way, as `Bounding.bounded`."""
        parts = [
            bounded(part, model, part_of(before, part), part_of(after, part), rows, influence)
            for part in (self.weights, self.prior)
        ]
        return replace(after, tensors=join(parts))

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Of the weights, and of the prior but for its pass, as `Costly.cost`."""
        prior = step_cost(self.prior, model, rows)._replace(forward=Runs())
        return step_cost(self.weights, model, rows).and_also(prior)

    def lesson_cost(self, model: FrozenModel, rows: int) -> Cost:
        """Of the weights, as `CostlyToTeach.lesson_cost`."""
        return lesson_cost(self.weights, model, rows)

    def moved(self, model: FrozenModel, state: State) -> Mapping[str, Tensor]:
        """By the weights, as `Moving.moved`."""
        return self.weights.moved(model, part_of(state, self.weights)) if isinstance(self.weights, Moving) else {}

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return complete(self.slices(model, state, x))

    def slices(self, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Step]:
        """The step in the slices of the weights, as `Sliced.slices`."""
        require_state(self, model, state)
        adapted = yield from slices(self.weights, model, part_of(state, self.weights), x)
        if adapted.features is None:
            raise ConfigurationError(f"adapter {self.weights.name!r} shows no features that {self.name!r} could use")
        answer = self.prior.correct(model, part_of(state, self.prior), adapted.logits, adapted.features)
        new = state.next(join((adapted.state, answer.state)))
        signals = {**adapted.signals, **answer.signals}
        return replace(adapted, logits=answer.logits, state=new, signals=signals, uncorrected=adapted.logits)


def chain(parts: Sequence[Adapter]) -> Chain:
    """Join adapters in the order in which they act: weights first, prior last.

    Raises:
        ConfigurationError: the order makes no sense, with the reason.
    """
    names = [part.name for part in parts]
    whole = "+".join(names)
    priors = [part.name for part in parts if isinstance(part, PriorCorrection)]
    weights = [name for name in names if name not in priors]
    if "none" in names:
        raise ConfigurationError(f"{whole!r}: 'none' changes nothing; leave it out")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"{whole!r}: an adapter can act once only; leave the repetition out")
    if len(weights) > 1:
        raise ConfigurationError(
            f"{whole!r}: {' and '.join(weights)} each start from the global weights; use one of them"
        )
    if len(priors) > 1:
        raise ConfigurationError(
            f"{whole!r}: {' and '.join(priors)} would correct the same class prior twice; use one of them"
        )
    for part in parts:
        if priors and isinstance(part, Uncorrectable):
            raise ConfigurationError(
                f"{whole!r}: no class prior can be corrected beside {part.name!r}, whose answers are "
                f"{part.uncorrectable}; use one of them"
            )
    first, last = parts if len(parts) == 2 else (None, None)
    if first is None or not isinstance(last, PriorCorrection):
        raise ConfigurationError(
            f"{whole!r}: a prior is corrected on what the weights answer; write {'+'.join(weights + priors)!r}"
        )
    return Chain(first, last)


def join(parts: Iterable[State]) -> dict[str, Tensor]:
    """The tensors of several states, each under the name of its adapter."""
    return {f"{part.adapter}.{name}": tensor for part in parts for name, tensor in part.tensors.items()}


def part_of(state: State, adapter: Adapter) -> State:
    """The state of one adapter among those that `join` put together."""
    prefix = f"{adapter.name}."
    tensors: Mapping[str, Tensor] = {
        name.removeprefix(prefix): tensor for name, tensor in state.tensors.items() if name.startswith(prefix)
    }
    return State(adapter.name, adapter.layout, state.model, state.step, tensors)
