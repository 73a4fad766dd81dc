"""What callers want of clients, and what they are told of it."""

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.steps import GUARDED
from acclimate_service.errors import CommittedField, Problem
from acclimate_service.state import Applied, ClientScope, Description, Looked, StateStore

BACKGROUND_PATIENCE_S: Final = 60.0
"""Longest wait for its turn of a request that no caller sent."""
_TAG: Final = re.compile(r'"v(\d{1,15})"')
_UNAVAILABLE: Final[Mapping[str, Any]] = {"predictions": [], "signals": {}}
"""Stands for the answer of an applied batch that is no longer stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who waits for an answer.

    Args:
        deadline: monotonic seconds; work that has not begun by then is dropped.
        gone: whether the caller has hung up.
        tenant: to whom what is not for a client is charged; empty where there are no keys.
    """

    deadline: float
    gone: Callable[[], Awaitable[bool]]
    tenant: str = ""

    async def admit(self) -> None:
        """Drop work that nobody waits for any more, before it is begun.

        Raises:
            Problem: `deadline_exceeded`.
        """
        if time.monotonic() >= self.deadline:
            raise too_late()
        if await self.gone():
            raise Problem("deadline_exceeded", "the caller hung up before the request's turn came; nothing was changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest(Caller):
    """Something that a caller wants of a client.

    Args:
        client: whose state.
        rid, fingerprint: tell a repeated request from a new one.
        keyed: whether the caller can repeat it, by an idempotency key.
        name: request id, as the caller is told it.
        number: place of the batch in the client's stream, 0 if the caller does not number its batches.
        life: existence of the client that it is for; empty for the one that is found.
    """

    client: ClientScope
    rid: str
    fingerprint: str
    keyed: bool = False
    name: str = ""
    number: int = 0
    life: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and what became of the client's state.

    Args:
        answer: JSON object, what a repeat of the request gets too.
        version: of the client's state.
        status: where the state was found.
        committed: whether this request is part of the client's history.
        replayed: where the answer of a repeated request came from.
        lost: versions that Redis lost, if the state was "rolled_back".
        life: the existence of the client whose history the request is part of; empty if it is part of none.
        configuration: of the client, where `life` is given and it is known.
        paused: whether the client's batches are answered and not folded in.
        scope: of the model that a repeated request was applied to; empty for any other one.
    """

    answer: bytes
    version: int
    status: str
    committed: CommittedField
    replayed: str = "none"
    lost: int = 0
    life: str = ""
    configuration: str = ""
    paused: bool = False
    scope: str = ""

    @property
    def members(self) -> Mapping[str, Any]:
        """What the answer says."""
        members: Mapping[str, Any] = orjson.loads(self.answer)
        return members


async def never_gone() -> bool:
    """Of a request that no caller sent: nobody hangs up."""
    return False


def too_late(replay_s: float | None = None, committed: CommittedField = False) -> Problem:
    """The deadline came before the turn of the request.

    Args:
        replay_s: seconds after which the client's state is there again; None if nothing but its turn was waited for.
        committed: "unknown" for a repeat of what was applied before.
    """
    wait = (
        "the deadline passed before the request's turn came"
        if replay_s is None
        else ("the deadline passed while the client's state was computed again from its journal, which goes on")
    )
    outcome = "it was applied before, send it again for its answer" if committed else "nothing was changed"
    headers = {} if replay_s is None else {"Retry-After": str(max(1, math.ceil(replay_s)))}
    return Problem("deadline_exceeded", f"{wait}; {outcome}", committed, headers)


def rfc3339(seconds: float) -> str:
    """A Unix time as callers read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def etag(version: int) -> str:
    """The entity tag of a state."""
    return f'"v{version}"'


@dataclass(frozen=True, slots=True)
class Precondition:
    """The header If-Match: versions that may be replaced.

    Args:
        versions: None accepts any.
        exists: True accepts only a client that is there.
    """

    versions: frozenset[int] | None = None
    exists: bool = False

    @classmethod
    def parse(cls, header: str | None) -> "Precondition":
        """Read the header; None when the caller sent none.

        Raises:
            Problem: `invalid_request`.
        """
        if header is None:
            return cls()
        if header.strip() == "*":
            return cls(exists=True)
        tags = [_TAG.fullmatch(tag.strip()) for tag in header.split(",")]
        versions = frozenset(int(tag[1]) for tag in tags if tag is not None)
        if len(tags) != sum(tag is not None for tag in tags):
            detail = f"If-Match is {header[:40]!r}; it takes the ETag of an exported state, such as {etag(5)}, or *"
            raise Problem("invalid_request", detail)
        return cls(versions, exists=True)

    def check(self, version: int) -> None:
        """Refuse a state of another version; 0 is that of a client nobody has seen.

        Raises:
            Problem: `precondition_failed`.
        """
        if (self.versions is not None and version not in self.versions) or (self.exists and version == 0):
            found = etag(version) if version else "not there"
            raise Problem(
                "precondition_failed", f"the client's state is {found}, not what If-Match names; export it anew"
            )


class Replies:
    """Makes the replies for the clients of one model.

    Args:
        store: the states.
        model: content hash of the model.
        configurations: the adapters.
    """

    def __init__(self, store: StateStore, model: str, configurations: Configurations) -> None:
        self._store = store
        self._model = model
        self._configurations = configurations

    async def of(self, client: ClientScope, applied: Applied, configuration: str = "") -> Reply:
        """The reply to a request that is part of the client's history.

        Raises:
            StateError: Redis failed; the request is part of the history all the same.
        """
        if applied.answer is None:
            answer = orjson.dumps({"adapter": await self.adapter_of(client), **_UNAVAILABLE})
        else:
            answer = applied.answer
        return Reply(
            answer=answer,
            version=applied.seq,
            status=_status(answer, applied.status),
            committed=True,
            replayed=applied.replayed,
            lost=applied.lost,
            life=applied.life,
            configuration=configuration,
            scope="" if applied.replayed == "none" else applied.model,
        )

    def of_look(self, looked: Looked) -> Reply:
        """The reply to a batch that changes nothing."""
        status = _status(looked.answer, looked.status)
        return Reply(looked.answer, looked.seq, status, committed=False, paused=looked.paused)

    async def describe(self, client: ClientScope) -> Description | None:
        """What is stored of a client, but for the state itself; None if there is none."""
        return await self._store.describe(client, self._model)

    async def footprint(self, client: ClientScope) -> int:
        """Bytes of Redis's memory that a client takes; raises StateError."""
        return await self._store.footprint(client, self._model)

    async def note_choice(self, client: ClientScope, configuration: str) -> None:
        """Note that a client's configuration was chosen for it, which it has already; raises StateError."""
        await self._store.note_choice(client, self._model, configuration)

    async def adapter_of(self, client: ClientScope) -> str:
        """Name of the adapter a client runs, or would begin with."""
        stored = await self.describe(client)
        adapter: str = self._configurations.describe(stored.config if stored else "")["adapter"]
        return adapter


def _status(answer: bytes, found: str) -> str:
    """Where the state was found, unless there is something to be said about the answer itself."""
    return "guarded" if GUARDED in answer and found != "rolled_back" else found
