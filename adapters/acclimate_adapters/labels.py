"""Adapters that learn from true labels, where somebody tells them after the answer.

A labelled row is one whose posterior is known: it is 1 for its class. So expectation maximisation over rows of which
some are labelled adds their counts n_k to the M-step, each with a weight w:

    q_k = (sum_i r_ik + w n_k) / (n + w sum_k n_k)

With w = 1 this is the EM of Nigam et al. (2000) for partly labelled data, where only the class prior is unknown; their
EM-lambda weighs the other way round, the unlabelled rows less. Every row is in the sum over i already when its label
comes, so that w is how much more than once its label counts.

Reference: Nigam, McCallum, Thrun, Mitchell: "Text Classification from Labeled and Unlabeled Documents using EM",
    Machine Learning 39, 2000; Saerens, Latinne, Decaestecker, Neural Computation 14(1), 2002.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from acclimate_adapters.adapter import Adapter
from acclimate_adapters.cost import Cost, forward_pass
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.state import State


class Labelled(NamedTuple):
    """Rows whose class is known."""

    labels: Tensor  # [N], int64 in 0..K-1
    x: Tensor | None = None  # [N, C, H, W], normalised; None where the images are not at hand any more
    predicted: Tensor | None = None  # [N, 1 + A], int64: the class that the frozen model predicted, then `Step.by_arm`


@runtime_checkable
class Learning(Adapter, Protocol):
    """An adapter that may take true labels into a client's state."""

    @property
    def learns(self) -> bool:
        """Whether it does: by default none of them."""
        ...

    def learn(self, model: FrozenModel, state: State, rows: Labelled) -> State:
        """The state with some labelled rows taken in, N >= 1; the one passed in is unchanged, and no batch is counted.

        Each row is to be told once.

        Raises:
            InputError: the images are of another shape than the network takes, or not finite; or a label is no class.
            StateMismatch: the state was made for another adapter, layout or model.
        """
        ...


def learns(adapter: Adapter) -> TypeGuard[Learning]:
    """Whether the adapter takes true labels."""
    return isinstance(adapter, Learning) and adapter.learns


@runtime_checkable
class Informed(Adapter, Protocol):
    """An adapter that chooses by what labels say of several arms: its client's, and those of all clients together."""

    def told(self, state: State) -> tuple[int, ...]:
        """How many rows that count this client's labels told of, by kind; those of several clients add up."""
        ...

    def shares(self, model: FrozenModel, kinds: Sequence[int]) -> tuple[float, ...]:
        """What rows of all clients, by kind, say of each arm: what share of them it has right, in 0..1."""
        ...

    def rivals(self, state: State, labels: float) -> tuple[int, int] | None:
        """The arm that answers, and the one that comes next, by their places in `Labelled.predicted`.

        None if the former would still answer if so many further labels of this client all spoke against it.
        """
        ...

    def informed(self, state: State, shares: Sequence[float]) -> State:
        """The state that knows these `shares`."""
        ...


@runtime_checkable
class CostlyToTeach(Adapter, Protocol):
    """An adapter that does more with labelled images than one pass, and says what."""

    def lesson_cost(self, model: FrozenModel, rows: int) -> Cost:
        """Of an enrolment with so many labelled images, or of taking them in."""
        ...


def lesson_cost(adapter: Adapter, model: FrozenModel, rows: int) -> Cost:
    """What it takes to enrol a client with so many labelled images, or to take them in."""
    return adapter.lesson_cost(model, rows) if isinstance(adapter, CostlyToTeach) else forward_pass(rows)
