"""Many clients a page at a time, as frozen records: who there is, their states, and who was removed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from acclimate_client.errors import Committed
from acclimate_client.models import ModelRef


@dataclass(frozen=True, slots=True)
class ListedClient:
    """A client among others.

    Attributes:
        hyperparameters: Those that differ from their defaults.
        adaptation: As in `StateInfo`.
        version: Number of changes applied to its state so far.
        bytes: Memory of Redis that it takes.
        changed_at: Its last change, in UTC; None if that was not noted.
        verdict: What its labels show: trusted, undecided or harmful; None if the server does not know.
        labelled: Images with a label; None if the server does not know.
        gain: What adapting it brings in accuracy on these, -1..1; None without labels.
    """

    client_id: str
    adapter: str
    hyperparameters: Mapping[str, Any]
    adaptation: str
    version: int
    bytes: int
    changed_at: datetime | None
    verdict: str | None
    labelled: int | None = None
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What all clients of the caller take, and the most that they may.

    Attributes:
        clients, most_clients: How many there are.
        bytes, most_bytes: Memory of Redis, as it was counted last; None for any.
    """

    clients: int
    most_clients: int
    bytes: int
    most_bytes: int | None


@dataclass(frozen=True, slots=True)
class ClientPage:
    """Some of the clients that have a state.

    Attributes:
        next: `cursor` of the next page, None after the last.
        usage: What all of them take; None if the server does not say.
    """

    model: ModelRef
    clients: tuple[ListedClient, ...]
    next: str | None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class FailedClient:
    """A client of several for which it was not done, and why.

    Attributes:
        code, detail, state_committed: As of `ProblemError`.
    """

    client_id: str
    code: str
    detail: str
    state_committed: Committed


@dataclass(frozen=True, slots=True)
class ExportedState:
    """A client's state.

    Attributes:
        adapter, hyperparameters: With which `Client.configure` makes another client ready for it.
        state: What `Client.import_state` takes.
    """

    client_id: str
    adapter: str
    hyperparameters: Mapping[str, Any]
    version: int
    state: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class StatePage:
    """States of a page of clients.

    Attributes:
        failed: Those whose state could not be read.
        next: `cursor` of the next page, None after the last.
    """

    states: tuple[ExportedState, ...]
    failed: tuple[FailedClient, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class DeletedClients:
    """A page of clients that were to be removed.

    Attributes:
        deleted: Ids of those that are gone.
        failed: Those that are, or may be, there still.
        next: `cursor` of the next page, None after the last.
    """

    deleted: tuple[str, ...]
    failed: tuple[FailedClient, ...]
    next: str | None
