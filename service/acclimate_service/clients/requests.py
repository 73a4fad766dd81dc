"""What callers want of clients, and what they get."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from acclimate_service.errors import CommittedField, Problem
from acclimate_service.state import ClientScope


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """Something that a caller wants of a client.

    Args:
        client: whose state.
        rid, fingerprint: tell a repeated request from a new one.
        deadline: monotonic seconds; work that has not begun by then is dropped.
        gone: whether the caller has hung up.
        keyed: whether the caller can repeat it, by an idempotency key.
        name: request id, as the caller is told it.
        number: place of the batch in the client's stream, 0 if the caller does not number its batches.
        life: existence of the client that it is for; empty for the one that is found.
    """

    client: ClientScope
    rid: str
    fingerprint: str
    deadline: float
    gone: Callable[[], Awaitable[bool]]
    keyed: bool = False
    name: str = ""
    number: int = 0
    life: str = ""

    @property
    def patience(self) -> float:
        """Seconds left until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    async def admit(self) -> None:
        """Drop work that nobody waits for any more, before it is begun.

        Raises:
            Problem: `deadline_exceeded`.
        """
        if time.monotonic() >= self.deadline:
            raise too_late()
        if await self.gone():
            raise Problem("deadline_exceeded", "the caller hung up before the request's turn came; nothing was changed")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and what became of the client's state.

    Args:
        answer: what a repeat of the request gets too.
        version: of the client's state.
        status: where the state was found.
        committed: whether this request is part of the client's history.
        replayed: where the answer of a repeated request came from.
        lost: versions that Redis lost, if the state was "rolled_back".
    """

    answer: Mapping[str, Any]
    version: int
    status: str
    committed: CommittedField
    replayed: str = "none"
    lost: int = 0


def too_late() -> Problem:
    """The deadline came before the turn of the request."""
    return Problem("deadline_exceeded", "the deadline passed before the request's turn came; nothing was changed")
