"""What the scripts answer, as frozen records: what became of a change, and a client as it is loaded."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from acclimate_service.state.errors import Effect, StateCorrupt
from acclimate_service.state.records import Basis, Head, Restored, head_of
from acclimate_service.state.redis.keys import new_id


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a script. `unsettled`: an earlier copy of it had no reply, and may still land."""

    rows: list[Any]
    unsettled: bool

    @property
    def effect(self) -> Effect:
        """Of a refusal for a reason that may pass: it says nothing of the earlier copy."""
        return "unknown" if self.unsettled else False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at applying a request: request id, fingerprint of its content, and the tag the change will carry.

    A new try, computed on another basis, is a new Attempt; sending the same one again is always safe. `number` is that
    of a numbered batch; 0 leaves the number of the client's newest one.
    """

    rid: str
    fingerprint: str
    number: int = 0
    tag: str = field(default_factory=new_id)


@dataclass(frozen=True, slots=True)
class Committed:
    """The change is durable as version `seq`. `duplicate`: an earlier copy of this very attempt had done it."""

    basis: Basis
    duplicate: bool = False

    @property
    def seq(self) -> int:
        """Version that this change produced."""
        return self.basis.seq

    @property
    def life(self) -> str:
        """Life of the client that this change belongs to."""
        return self.basis.life


@dataclass(frozen=True, slots=True)
class Repeat:
    """The request was applied before, as version `seq` of `model`; `answer` is None if it is not stored.

    `life` is the life of the client that it belongs to.
    """

    seq: int
    model: str
    answer: bytes | None
    life: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The idempotency key was used before with another content."""


@dataclass(frozen=True, slots=True)
class Used:
    """The idempotency key was used before the client was deleted."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Another change came first; `head` is what stands now (None: no state), so that no extra read is needed.

    `committed` is "unknown" if an earlier copy of the script had no reply and may still find what it expects.
    """

    life: str
    head: Head | None
    committed: Effect = False

    @property
    def basis(self) -> Basis:
        """What the next attempt is to be computed from."""
        return _basis(self.life, self.head)


@dataclass(frozen=True, slots=True)
class Gone:
    """The life this change belongs to was ended by a DELETE."""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A chunk of the upload is missing. `committed` is "unknown" if an earlier copy of the script had no reply."""

    committed: Effect


@dataclass(frozen=True, slots=True)
class Absent:
    """There is nothing to reset. `committed` is "unknown" if an earlier copy of the script had no reply."""

    committed: Effect = False


@dataclass(frozen=True, slots=True)
class Deleted:
    """The client is gone. `existed` is False if it had been before."""

    existed: bool


Refused: TypeAlias = Repeat | Mismatch | Used | Gone
CommitOutcome: TypeAlias = Committed | Conflict | Incomplete | Refused
ResetOutcome: TypeAlias = Committed | Conflict | Absent | Refused
DeleteOutcome: TypeAlias = Deleted | Conflict


def commit_outcome(reply: Reply, attempt: Attempt, sid: str) -> CommitOutcome:
    """The reply of `commit`, sent with this attempt and the id of its snapshot."""
    if reply.rows[0] == b"INCOMPLETE":
        return Incomplete(reply.effect)
    return change_outcome(reply.rows, attempt, sid)


def reset_outcome(reply: Reply, attempt: Attempt) -> ResetOutcome:
    """The reply of `reset`, sent with this attempt. It compares no tag, so a later state may suit an earlier copy."""
    if reply.rows[0] == b"ABSENT":
        return Absent(reply.effect)
    outcome = change_outcome(reply.rows, attempt, "")
    return replace(outcome, committed=reply.effect) if isinstance(outcome, Conflict) else outcome


def change_outcome(rows: list[Any], attempt: Attempt, sid: str) -> Committed | Conflict | Refused:
    """What the scripts that carry a marker have in common."""
    match rows:
        case [b"OK", seq, life, duplicate]:
            return Committed(Basis(life.decode(), int(seq), attempt.tag, sid), duplicate == b"1")
        case _:
            return change_refusal(rows)


def change_refusal(rows: list[Any]) -> Conflict | Refused:
    """Why one of them changed nothing.

    Raises:
        StateCorrupt: it says what this version does not know.
    """
    match rows:
        case [b"CONFLICT", life, head]:
            return Conflict(life.decode(), head_of(head))
        case [b"REPLAY", seq, model, answer, life]:
            return Repeat(int(seq), model.decode(), answer or None, life.decode())
        case [b"MISMATCH"]:
            return Mismatch()
        case [b"USED"]:
            return Used()
        case [b"GONE"]:
            return Gone()
        case _:
            raise StateCorrupt(f"a script answered {rows!r}, which this version does not know", "unknown")


@dataclass(frozen=True, slots=True)
class Marker:
    """What is remembered of an applied request: its fingerprint, and the version, tag and life it produced."""

    fingerprint: str
    model: str
    seq: int
    tag: str
    life: str


@dataclass(frozen=True, slots=True)
class Lease:
    """Whoever holds the journal open: its fence, and the milliseconds it has left."""

    fence: str
    ms: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything stored about a client in one model scope, and about one request.

    Args:
        life: present life, that of a tombstone if `gone`, empty for a client nobody has seen.
        gone: True after a DELETE.
        origin: the life or tombstone that `life` took over from, empty if there was none.
        marker, answer: of the request asked for; None if it was never applied, or the answer is no longer stored.
        head: None if there is no state in this model scope.
        touched: True if this read extended the TTLs.
        lease: of the replica that writes the journal; None if nobody does.
        leftover: id of the snapshot of a head that has expired, empty if there is none.
    """

    life: str
    gone: bool
    origin: str
    marker: Marker | None
    answer: bytes | None
    head: Head | None
    touched: bool
    lease: Lease | None = None
    leftover: str = ""

    @property
    def basis(self) -> Basis:
        """What the next attempt is to be computed from."""
        return _basis(self.life, self.head, self.leftover)

    def continues(self, admission_life: str) -> bool:
        """Whether a request admitted in `admission_life` still belongs to this client, or a DELETE came between."""
        return self.life == admission_life or (not self.gone and self.origin == admission_life)

    def verdict(self, fingerprint: str) -> Repeat | Mismatch | Used | None:
        """What a request with this fingerprint gets without being applied; None: it is new."""
        if self.marker is None:
            return None
        if self.marker.life != self.life:
            return Used()
        if self.marker.fingerprint != fingerprint:
            return Mismatch()
        return Repeat(self.marker.seq, self.marker.model, self.answer, self.life)


@dataclass(frozen=True, slots=True)
class Moved:
    """The snapshot was replaced while it was read; `loaded` is what stands now."""

    loaded: Loaded


ReadOutcome: TypeAlias = Restored | Moved | None


def loaded(reply: Reply) -> Loaded:
    """The reply of `load`.

    Raises:
        StateCorrupt: the stored head or marker cannot be read.
    """
    _, life, gone, origin, marker, answer, flat, touched, fence, lease_ms, recorded = reply.rows
    head = head_of(flat)
    return Loaded(
        life=life.decode(),
        gone=gone == b"1",
        origin=origin.decode(),
        marker=_marker(marker),
        answer=answer or None,
        head=head,
        touched=touched == b"1",
        lease=Lease(fence.decode(), lease_ms) if fence else None,
        leftover=recorded.decode() if recorded and head is None else "",
    )


def _marker(text: bytes | None) -> Marker | None:
    if text is None:
        return None
    try:
        fingerprint, model, seq, tag, life = text.decode().split("|")
        return Marker(fingerprint, model, int(seq), tag, life)
    except ValueError as error:
        raise StateCorrupt("a stored idempotency marker cannot be read") from error


def _basis(life: str, head: Head | None, leftover: str = "") -> Basis:
    return Basis(life, head.seq, head.tag, head.sid) if head else Basis(life, sid=leftover)
