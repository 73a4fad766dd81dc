"""What a session is given, and what it answers: a machine that computes states, requests, and what became of them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from acclimate_service.state.encoding import Batch


class Stated(Protocol):
    """A state of a client, whatever it is."""

    @property
    def point(self) -> bytes:
        """What the timeline is to say of the batch that led to it, as `Point.encode`; empty for nothing."""
        ...

    @property
    def beside(self) -> int:
        """Bytes in memory of what is not stored with it."""
        ...


S = TypeVar("S", bound=Stated)
Stored = TypeVar("Stored")
"""A state, or its bytes."""
Start: TypeAlias = Callable[[], Awaitable[None]]
Status: TypeAlias = Literal["cold", "reset", "restored", "rolled_back", "warm"]
Replayed: TypeAlias = Literal["none", "stored", "recomputed", "unavailable"]
Way: TypeAlias = Literal["full", "delta"]


class Machine(Protocol[S]):
    """How states of clients are made, changed and turned into bytes. States are never changed in place.

    `engine` names what computes: device kind and library version. Another one may differ in the last bits.
    """

    @property
    def engine(self) -> str:
        """At most 255 bytes."""
        ...

    async def initial(self, config: str) -> S:
        """The state of a client that has seen nothing."""
        ...

    async def step(self, state: S, batch: Batch, start: Start) -> tuple[S, bytes]:
        """The next state, and the answer.

        Equal states and batches give equal results, however often and wherever they are computed.

        Args:
            state: before the batch.
            batch: what to compute.
            start: to be awaited when the turn of this batch has come, just before it is computed, and again whenever it
                is interrupted. What it raises ends the step; an error before it is taken as "not begun".
        """
        ...

    async def serialise(self, state: S, *, awaited: bool = True) -> bytes:
        """The bytes of a state; they do not name its configuration.

        Args:
            state: the state.
            awaited: False if steps are to go before it.
        """
        ...

    async def deserialise(self, config: str, data: bytes) -> S:
        """The state that `serialise` wrote, to go on under this configuration."""
        ...

    def size(self, state: S) -> int:
        """About how many bytes a state takes, in memory and stored exactly; `serialise` may give fewer.

        It is what a cache counts, and what is weighed against a batch: the batch is what keeps the state exact.
        """
        ...

    def adapter(self, state: S) -> str:
        """Name of the adapter that made the state."""
        ...


async def always() -> None:
    """Admit whatever asks."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a caller.

    Args:
        rid: request id, of its idempotency key or random.
        fingerprint: of all that decides its result.
        admit: asked when the turn of the batch has come; raises if nobody waits for it any more.
        number: place of the batch in the client's stream, from 1 on; 0 if the caller does not number it.
        life: existence of the client that it is for; empty for the one that is found.
    """

    rid: str
    fingerprint: str
    admit: Start = field(default=always, compare=False)
    number: int = 0
    life: str = ""


@dataclass(frozen=True, slots=True)
class Present(Generic[S]):
    """The newest state of a client.

    Args:
        life: the existence of the client, empty if it has none yet.
        seq: version, 0 before the first change.
        config: adapter and hyper-parameters.
        state: the state.
        status: where it was found.
        paused: whether batches are answered and not folded in.
    """

    life: str
    seq: int
    config: str
    state: S
    status: Status
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Earlier(Generic[S]):
    """A state that the client had at version `seq`, and its configuration then."""

    seq: int
    config: str
    state: S


@dataclass(frozen=True, slots=True)
class Change(Generic[Stored]):
    """What takes the place of a whole state.

    Args:
        config, state: adapter and hyper-parameters, and the state.
        answer: to whoever asked for it.
        paused: whether batches are no longer folded in from now on; None leaves that as it is.
        back: version that this is again: what was kept of it and since is forgotten; 0 for something new.
        chosen: whether somebody chose the configuration for the client, so that it outlives versions of the model.
        point: of the client's timeline, as `timeline` encodes it; empty for none.
    """

    config: str
    state: Stored
    answer: bytes = field(repr=False)
    paused: bool | None = None
    back: int = 0
    chosen: bool = False
    point: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Applied:
    """The request is part of the client's history.

    Args:
        seq: the version it led to.
        life: the existence of the client, and `model`, the model scope that this version belongs to.
        answer: None for a reset, and where the answer of a repeated request is not to be had ("unavailable").
        replayed: "none" if this very call applied it, else where the answer of the first one came from.
        status: where the state was found.
        lost: versions that Redis lost, if it was "rolled_back".
    """

    seq: int
    life: str
    model: str
    answer: bytes | None
    replayed: Replayed = "none"
    status: Status = "warm"
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """An answer that changed nothing, computed from version `seq` of a client that may be paused."""

    seq: int
    answer: bytes
    status: Status
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator decides.

    Args:
        config: adapter and hyper-parameters of new clients.
        journal: False where inputs may not be kept: every batch then writes the whole state.
        strict_engine: refuse to replay what another engine computed, instead of counting it.
        keep: earlier states of a client that are kept to go back to.
        timeline: whether what becomes of a client is noted.
    """

    config: str
    journal: bool = True
    strict_engine: bool = False
    keep: int = 0
    timeline: bool = False


class Lineage(Protocol):
    """The versions of a model, of which one is served: what is of use of the states of the others.

    A model scope is shared by all versions whose states may be of use to each other. Whether one is depends on its
    configuration, since adapters differ in what they read beside the network.
    """

    @property
    def version(self) -> str:
        """Key of the version that is served (16 hex digits); empty if it is that of the scope."""
        ...

    @property
    def earlier(self) -> Sequence[str]:
        """Other scopes, in which clients may have been served before, the latest first."""
        ...

    def goes_on(self, config: str, version: str) -> bool:
        """Whether a state of this configuration that was begun by that version is of use."""
        ...

    def inherited(self, config: str, scope: str, chosen: str) -> str:
        """What a client begins anew with that had this configuration in that scope; empty for that of new clients.

        Args:
            config: which it had.
            scope: where.
            chosen: the configuration that was chosen for the client; empty if none was, or before that was noted.
        """
        ...


class Alone(Lineage):
    """There was no other version."""

    @property
    def version(self) -> str:
        """That of the scope."""
        return ""

    @property
    def earlier(self) -> Sequence[str]:
        """None."""
        return ()

    def goes_on(self, config: str, version: str) -> bool:
        """It is."""
        return True

    def inherited(self, config: str, scope: str, chosen: str) -> str:
        """The same."""
        return config


class Observer(Protocol):
    """Told of each event once, as it happens, on the event loop: it must be quick and must not raise."""

    def found(self, status: str) -> None:
        """A request got the state it starts from; `status` is one of `Status`, "warm" if it was in memory."""

    def wrote(self, way: Way, result: str) -> None:
        """Redis answered a write of the whole state ("full") or of a batch ("delta").

        Args:
            way: which.
            result: name of the outcome's class in lower case, such as "committed", "appended" or "conflict".
        """

    def opened(self, stolen: bool) -> None:
        """The journal was opened for writing; `stolen`: from a replica that did not let it go in time."""

    def replayed(self, entries: int, seconds: float) -> None:
        """Entries of the journal were read and computed again."""

    def snapshot(self, taken: bool, nbytes: int) -> None:
        """A snapshot was attempted; `nbytes` were written if it was taken, else it is 0."""

    def engine_changed(self) -> None:
        """An entry is computed again by another engine than the one that computed it first."""


class Silent(Observer):
    """Does nothing."""
