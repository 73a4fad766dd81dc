"""Turns the replies of the journal's scripts into records."""

from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.journal_records import (
    Answered,
    AnswerOutcome,
    Appended,
    AppendOutcome,
    Busy,
    Fenced,
    FlipOutcome,
    Flipped,
    Full,
    Opened,
    OpenOutcome,
    Stale,
    Undone,
    UndoOutcome,
)
from acclimate_service.state.records import Attempt, Basis, Committed, Conflict, Gone, Incomplete
from acclimate_service.state.redis.wire import Reply
from acclimate_service.state.replies import change_outcome, head_of


def open_outcome(reply: Reply) -> OpenOutcome:
    """The reply of `open`."""
    match reply.rows:
        case [b"OK", life, flat] if head := head_of(flat):
            return Opened(life.decode(), head)
        case [b"BUSY", ms]:
            return Busy(int(ms))
        case [b"CONFLICT", life, flat]:
            return Conflict(life.decode(), head_of(flat))
        case [b"GONE"]:
            return Gone()
        case rows:
            raise _unknown(rows)


def append_outcome(reply: Reply, attempt: Attempt, sid: str) -> AppendOutcome:
    """The reply of `append`, sent with this attempt on a state whose snapshot is `sid`."""
    match reply.rows:
        case [b"FENCED"]:
            return Fenced()
        case [b"JFULL"]:
            return Full(reply.effect)
    outcome = change_outcome(reply.rows[:4] if reply.rows[0] == b"OK" else reply.rows, attempt, sid)
    if isinstance(outcome, Committed):
        return Appended(outcome.basis, touched=reply.rows[4:] == [b"1"])
    return outcome


def flip_outcome(reply: Reply) -> FlipOutcome:
    """The reply of `flip`."""
    match reply.rows:
        case [b"OK"]:
            return Flipped()
        case [b"STALE"]:
            return Stale()
        case [b"FENCED"]:
            return Fenced()
        case [b"INCOMPLETE"]:
            return Incomplete(committed=False)
        case [b"GONE"]:
            return Gone()
        case rows:
            raise _unknown(rows)


def answer_outcome(reply: Reply) -> AnswerOutcome:
    """The reply of `answer`."""
    match reply.rows:
        case [b"OK", stored]:
            return Answered(stored)
        case [b"GONE"]:
            return Gone()
        case rows:
            raise _unknown(rows)


def undo_outcome(reply: Reply, before: Basis, tag: str) -> UndoOutcome:
    """The reply of `undo`, sent with a new tag to return to the version of `before`."""
    match reply.rows:
        case [b"OK", seq]:
            return Undone(Basis(before.life, int(seq), tag, before.sid))
        case [b"ANSWERED"]:
            return Answered()
        case [b"FENCED"]:
            return Fenced()
        case [b"CONFLICT", life, flat]:
            return Conflict(life.decode(), head_of(flat))
        case [b"GONE"]:
            return Gone()
        case rows:
            raise _unknown(rows)


def _unknown(rows: object) -> StateCorrupt:
    return StateCorrupt(f"a script answered {rows!r}, which this version does not know", "unknown")
