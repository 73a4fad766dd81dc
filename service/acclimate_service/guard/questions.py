"""What the clients of one model are asked, listed in Redis for whoever labels for many.

A client's open questions are part of its state. The list is told of them beside the requests, and of each client the
newest only: it may lag by a moment, and what a replica that died had not told is told with the client's next question.
Each owner of clients has a list of its own, which goes when nobody is asked for as long as a state lives.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import orjson

from acclimate_service.guard.record import Question
from acclimate_service.metrics import Background
from acclimate_service.state import ClientScope, Limits, StateError, Tasks, Wire, check_model
from acclimate_service.state.redis.scripts import ASKED_FORGET, ASKED_PAGE, ASKED_TELL

MOST_CLIENTS: Final = 1000
"""Clients of one owner that are listed: those that were asked last."""
_TASK: Final = "questions"


class Asked(NamedTuple):
    """The open questions of one client, the newest first."""

    client: str  # its name
    questions: tuple[Question, ...]
    expires_in_s: int  # unless it sends a batch


class Page(NamedTuple):
    """Some clients, those whose questions changed last first, and where the next page begins; empty at the end."""

    clients: tuple[Asked, ...]
    following: str


class _Told(NamedTuple):
    life: str
    seq: int
    questions: tuple[Question, ...]


class Questions:
    """The list of open questions.

    Args:
        wire: exchanges with Redis; whoever made it closes it.
        limits: lifetimes.
        background: watches over what nobody waits for.
        model: scope of the clients' states.
        tenant: of the deployment.
    """

    def __init__(self, wire: Wire, limits: Limits, background: Background, model: str, tenant: str) -> None:
        self._wire = wire
        self._ttl_ms = limits.state_ttl_ms
        self._list = f"acc:{{{tenant}/~{check_model(model)}}}:q"
        self._tasks = Tasks(background)
        self._waiting: dict[ClientScope, _Told] = {}
        self._telling: asyncio.Task[None] | None = None

    def tell(self, client: ClientScope, life: str, seq: int, questions: Sequence[Question]) -> None:
        """List what a client is asked from now on, in the background; nothing takes it from the list.

        Args:
            client: whom.
            life, seq: the point of its history.
            questions: all that are open, the newest last.
        """
        self._waiting[client] = _Told(life, seq, tuple(questions))
        if self._telling is None or self._telling.done():
            self._telling = self._tasks.start(_TASK, self._tell_all())

    async def told(self) -> None:
        """Wait until the list knows all that this replica has to tell."""
        if self._telling is not None:
            await asyncio.wait([self._telling])

    async def page(self, owner: str, most: int, after: str = "") -> Page:
        """The open questions of an owner's clients.

        Args:
            owner: of the clients; empty for those of nobody.
            most: clients on a page, at least 1.
            after: what the page before said of the `following` one.

        Raises:
            StateError: Redis failed.
        """
        await self.told()
        reply = await self._wire.run(ASKED_PAGE, self._keys(owner), (most, after, self._ttl_ms))
        rows = [reply.rows[start : start + 4] for start in range(1, len(reply.rows), 4)]
        asked = [
            Asked(name.decode().rpartition("/")[2], _questions(text), int(left_ms) // 1000)
            for name, text, left_ms, _ in rows
        ]
        return Page(tuple(asked), rows[-1][3].decode() if len(rows) == most else "")

    async def forget(self, client: ClientScope) -> None:
        """Take a client from the list; raises StateError where Redis fails."""
        self._waiting.pop(client, None)
        await self._wire.run(ASKED_FORGET, self._keys(client.owner), (client.client, ""))

    async def aclose(self) -> None:
        """Tell what is left to tell."""
        await self.told()
        await self._tasks.aclose()

    async def _tell_all(self) -> None:
        failure: StateError | None = None
        while self._waiting:
            client = next(iter(self._waiting))
            try:
                await self._tell(client, self._waiting.pop(client))
            except StateError as error:
                failure = error
        if failure is not None:
            raise failure

    async def _tell(self, client: ClientScope, told: _Told) -> None:
        """What a deleted client was asked is taken away again: it may have been deleted just before."""
        keys, text = self._keys(client.owner), orjson.dumps(told.questions, default=tuple) if told.questions else b""
        args = (client.client, told.life, told.seq, text, self._ttl_ms, MOST_CLIENTS)
        await self._wire.run(ASKED_TELL, keys, args)
        life, gone = await self._wire.read("HMGET", client.registry, "life", "gone")
        if gone or (life or b"").decode() != told.life:
            await self._wire.run(ASKED_FORGET, keys, (client.client, told.life))

    def _keys(self, owner: str) -> tuple[str, str]:
        return f"{self._list}:{owner}", f"{self._list}t:{owner}"


def _questions(text: bytes) -> tuple[Question, ...]:
    """The newest first."""
    return tuple(Question(request_id, tuple(rows)) for request_id, rows in reversed(orjson.loads(text)))
