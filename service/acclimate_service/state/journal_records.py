"""What the scripts of the journal answer, as frozen records."""

from dataclasses import dataclass, field
from typing import TypeAlias

from acclimate_service.state.errors import Effect
from acclimate_service.state.records import Basis, Conflict, Gone, Head, Incomplete, Refused


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
