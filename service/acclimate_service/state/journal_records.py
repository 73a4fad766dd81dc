"""What the scripts of the journal answer, as frozen records, and how replies become records."""

from dataclasses import dataclass, field
from typing import TypeAlias

from acclimate_service.state.errors import Effect, StateCorrupt
from acclimate_service.state.records import (
    Attempt,
    Basis,
    Committed,
    Conflict,
    Gone,
    Head,
    Incomplete,
    Refused,
    Reply,
    change_outcome,
    head_of,
)


@dataclass(frozen=True, slots=True)
class Opened:
    """The journal is ours to write under `head.fence`. `life` is new if the client was."""

    life: str
    head: Head


@dataclass(frozen=True, slots=True)
class Busy:
    """Another replica holds the journal open, for `ms` more unless it goes on writing."""

    ms: int


@dataclass(frozen=True, slots=True)
class Appended:
    """The batch is durable as version `basis.seq`. `touched`: the TTLs of the whole state were extended."""

    basis: Basis
    touched: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """Somebody else opened the journal since."""


@dataclass(frozen=True, slots=True)
class Full:
    """The journal is at its cap. `committed` is "unknown" if an earlier copy of the script had no reply."""

    committed: Effect


@dataclass(frozen=True, slots=True)
class Flipped:
    """The snapshot is the base now."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The snapshot is of a history that is no more, or older than the base."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The request's answer is stored; `stored` is an earlier one, if there was one, which then counts."""

    stored: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Undone:
    """The last entry is gone, and its request was never applied."""

    basis: Basis


@dataclass(frozen=True, slots=True)
class Listed:
    """What an entry of the journal is: version, tag, request id, bytes."""

    seq: int
    tag: str
    rid: str
    size: int


@dataclass(frozen=True, slots=True)
class Written:
    """One entry as it lies in the journal: version, tag, request id, bytes."""

    seq: int
    tag: str
    rid: str
    blob: bytes = field(repr=False)


OpenOutcome: TypeAlias = Opened | Busy | Conflict | Gone
AppendOutcome: TypeAlias = Appended | Fenced | Full | Conflict | Refused
FlipOutcome: TypeAlias = Flipped | Stale | Fenced | Incomplete | Gone
UndoOutcome: TypeAlias = Undone | Answered | Fenced | Conflict | Gone
AnswerOutcome: TypeAlias = Answered | Gone


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
