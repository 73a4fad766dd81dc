"""The questions that clients are asked: of one client by its state, of many by the list."""

from typing import Any

from acclimate_service.clients.requests import ClientRequest, Replies
from acclimate_service.clients.sessions import Sessions
from acclimate_service.errors import Problem
from acclimate_service.guard.questions import Page, Questions
from acclimate_service.state import ClientScope, ClientUnknown


class Asking:
    """Says whose labels are asked for. All methods raise Problem, and StateError of the state protocol.

    Args:
        sessions, replies: of the service.
        questions: the list; None without a guard, which alone remembers what rows were predicted as.
    """

    def __init__(self, sessions: Sessions, replies: Replies, questions: Questions | None) -> None:
        self._sessions = sessions
        self._replies = replies
        self._questions = questions

    async def of_client(self, request: ClientRequest) -> dict[str, Any]:
        """The open questions of one client, the newest first, and when they expire."""
        self._required()
        stored = await self._replies.describe(request.client)
        if stored is None:
            raise ClientUnknown(f"there is no client {request.client.name!r}, so it is asked nothing")
        async with self._sessions.turn(request) as turn:
            record = (await turn.session.present()).state.record
        asks = [
            {"request_id": question.request_id, "rows": question.rows, "expires_in_rows": left}
            for question, left in (record.open_questions() if record else ())
        ]
        return {"asks": asks, "expires_in_s": stored.ttl_ms // 1000}

    async def of_all(self, owner: str, most: int, after: str) -> Page:
        """Those of an owner's clients, as `Questions.page`."""
        return await self._required().page(owner, most, after)

    def note(self, client: ClientScope) -> None:
        """Have the list know what a client is asked after a change of its record."""
        session = self._sessions.peek(client)
        held = session.memory.held if session else None
        if self._questions is not None and held is not None and held.state.record is not None:
            self._questions.tell(client, held.life, held.seq, held.state.record.questions)

    def _required(self) -> Questions:
        if self._questions is None:
            raise Problem("guard_off", "ACCLIMATE_GUARD is off: nobody remembers what the rows were predicted as")
        return self._questions
