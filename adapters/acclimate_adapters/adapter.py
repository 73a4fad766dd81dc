"""The contract between the methods and whoever calls them."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar, runtime_checkable

from torch import Tensor

from acclimate_adapters.cost import Cost, forward_pass
from acclimate_adapters.errors import MissingSource, StateMismatch
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.state import Form, State

T = TypeVar("T")
Signal = float | tuple[float, ...]
LONGEST_NAME = 300  # characters of an adapter with its hyper-parameters, in an error


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to one batch.

    Args:
        logits: [B, K] in the precision of the model; log-probabilities up to a row constant.
        state: the client's state with this batch folded in; the one passed in is unchanged.
        signals: label-free measurements by name.
        frozen_logits: [B, K], what the model answers unadapted, when the step came across it.
        features: [B, d], the classifier's input in the pass that gave the logits; what chains hand on.
        uncorrected: [B, K], the logits before the class prior was corrected; None when it was not.
        frozen_features: [B, d], the classifier's input in the frozen pass, when the step came across it.
        by_arm: [B, A], int64, the class that each of several adapters predicts, of which one answered; None elsewhere.
    """

    logits: Tensor
    state: State
    signals: Mapping[str, Signal] = field(default_factory=dict)
    frozen_logits: Tensor | None = None
    features: Tensor | None = None
    uncorrected: Tensor | None = None
    frozen_features: Tensor | None = None
    by_arm: Tensor | None = None

    def __post_init__(self) -> None:
        """Keep the signals from being changed through the caller's own reference."""
        object.__setattr__(self, "signals", MappingProxyType(dict(self.signals)))


class Adapter(Protocol):
    """A method: a frozen dataclass of hyper-parameters with two pure functions."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """Name in the registry; the parts' names joined by plus signs for a chain."""
        ...

    @property
    def layout(self) -> int:
        """Bumped whenever the names, shapes or meaning of the state's tensors change."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """What the frozen model must offer: names of `Source` quantities, or what `FrozenModel.offers` says.

        Every quantity that is read is named, the prior too: a state is of use as long as these are the same.
        """
        ...

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet.

        Raises:
            MissingSource: the model lacks something in `needs`.
        """
        ...

    def form(self, model: FrozenModel, state: State) -> Mapping[str, Form]:
        """What the tensors of a state of this adapter have to be like, by name.

        Args:
            model: the frozen model.
            state: the one that is to be checked, since some adapters have several kinds.
        """
        ...

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W], normalised, B >= 1, and fold it into the state.

        Raises:
            InputError: the batch is empty, of another shape than the network takes, or not finite.
            StateMismatch: the state was made for another adapter, layout or model.
        """
        ...


@runtime_checkable
class FrozenOnly(Adapter, Protocol):
    """An adapter that needs nothing of the network but its frozen pass, which may thus be one of many clients' rows."""

    def on_frozen(self, model: FrozenModel, state: State, frozen: Pass) -> Step:
        """Answer a batch and fold it into the state; `step` is this on the frozen pass of its batch.

        Args:
            model: the frozen model.
            state: the client's state.
            frozen: features [B, d] and logits [B, K] of the batch, never changed.

        Raises:
            StateMismatch: as `step`.
            NumericalError: a logit is not finite.
        """
        ...


@runtime_checkable
class Costly(Adapter, Protocol):
    """An adapter whose step takes more of the network than one pass without gradient, and says what."""

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Of the step on a batch of so many rows, for a client of whom all is known that it may know."""
        ...


def step_cost(adapter: Adapter, model: FrozenModel, rows: int) -> Cost:
    """What the step of an adapter takes on a batch of so many rows."""
    return adapter.cost(model, rows) if isinstance(adapter, Costly) else forward_pass(rows)


@runtime_checkable
class Sliced(Adapter, Protocol):
    """An adapter whose step may take long, and comes in slices: between two of them others may do their work."""

    def slices(self, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Step]:
        """`step`, which is this without a pause; given up between two slices, it has changed nothing."""
        ...


def slices(adapter: Adapter, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Step]:
    """The step of any adapter, in the slices that it has."""
    if isinstance(adapter, Sliced):
        return (yield from adapter.slices(model, state, x))
    return adapter.step(model, state, x)


def complete(work: Generator[None, None, T]) -> T:
    """What work in slices comes to, all at once."""
    try:
        while True:
            next(work)
    except StopIteration as done:
        result: T = done.value
        return result


@runtime_checkable
class ShowsFrozen(Adapter, Protocol):
    """An adapter whose step comes across the whole frozen pass, so that nobody beside it has to take one."""

    @property
    def shows_frozen(self) -> bool:
        """Whether it does; a chain has to ask its first part."""
        ...


def shows_frozen(adapter: Adapter) -> bool:
    """Whether the steps of an adapter have `frozen_logits` and `frozen_features`."""
    return isinstance(adapter, ShowsFrozen) and adapter.shows_frozen


@runtime_checkable
class Moving(Adapter, Protocol):
    """An adapter that changes modules of the network."""

    def moved(self, model: FrozenModel, state: State) -> Mapping[str, Tensor]:
        """By how much a client's modules differ from the global ones, by name, each of the shape of its module."""
        ...


@runtime_checkable
class Uncorrectable(Adapter, Protocol):
    """An adapter whose answers are not logits under the training prior, so that no prior correction may follow it."""

    @property
    def uncorrectable(self) -> str:
        """What they are instead, as the end of the sentence "its answers are"."""
        ...


@runtime_checkable
class Composed(Adapter, Protocol):
    """An adapter that runs others, which its name does not tell."""

    @property
    def parts(self) -> frozenset[str]:
        """Names of all of them, and its own."""
        ...


def parts_of(adapter: Adapter) -> frozenset[str]:
    """Names of all adapters that take part in one, itself or the parts of a chain among them."""
    return adapter.parts if isinstance(adapter, Composed) else frozenset(adapter.name.split("+"))


@runtime_checkable
class Enrolling(Adapter, Protocol):
    """An adapter that may begin with labelled examples of the client."""

    @property
    def enrols(self) -> bool:
        """Whether it does; a chain has to ask its first part."""
        ...

    def init(self, model: FrozenModel, **enrolment: Tensor) -> State:
        """The state of a client that has sent nothing yet but its enrolment.

        Args:
            model: the frozen model.
            enrolment: x [N, C, H, W], normalised, and labels [N], int64 in 0..K-1; none at all leaves it out.

        Raises:
            InputError: the enrolment cannot be used.
        """
        ...


def enrols(adapter: Adapter) -> TypeGuard[Enrolling]:
    """Whether the adapter takes labelled examples of the client."""
    return isinstance(adapter, Enrolling) and adapter.enrols


def require_state(adapter: Adapter, model: FrozenModel, state: State) -> None:
    """Refuse a state that this adapter cannot go on from.

    Raises:
        StateMismatch: the state was made for another adapter, layout or model, or with other hyper-parameters, or its
            tensors are of another shape, type or range.
    """
    state.require(adapter.name, adapter.layout, model.content_hash)
    try:
        state.require_form(adapter.form(model, state))
    except StateMismatch as error:
        raise StateMismatch(f"{error}; it was not made by {str(adapter)[:LONGEST_NAME]}") from error


@runtime_checkable
class Sparing(Adapter, Protocol):
    """An adapter that does without some of what it needs where the model lacks it."""

    @property
    def dispensable(self) -> frozenset[str]:
        """Those of its `needs`."""
        ...


def indispensable(adapter: Adapter) -> frozenset[str]:
    """What the adapter cannot do without."""
    return adapter.needs - adapter.dispensable if isinstance(adapter, Sparing) else adapter.needs


def missing(adapter: Adapter, model: FrozenModel) -> tuple[str, ...]:
    """What the adapter cannot do without and the model does not offer, sorted."""
    return tuple(sorted(indispensable(adapter) - model.offers))


def require(adapter: Adapter, model: FrozenModel) -> None:
    """Refuse an adapter that this model cannot serve.

    Raises:
        MissingSource: naming everything that is missing.
    """
    lacking = missing(adapter, model)
    if lacking:
        raise MissingSource(f"adapter {adapter.name!r} needs {', '.join(lacking)}, which the model does not carry")
