"""What the scripts take and answer, as frozen records, and how replies become records."""

from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from acclimate_service.state.errors import Effect, StateCorrupt
from acclimate_service.state.redis.keys import new_id


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state too large for its head: random id and number of chunks."""

    sid: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version of a client's state in one model scope.

    Args:
        model: content hash of the frozen model (16 hex digits).
        seq: version, +1 per applied change; 0 in a journal that was opened but not written.
        tag: random id of the last change, empty before the first; the compare-and-set compares it.
        base: version of the newest complete state.
        inline: sealed state, empty if there is none or it is in `snapshot`.
        length: bytes of the sealed state, 0 if there is none.
        digest: SHA-256 of the sealed state (64 hex digits), empty if there is none.
        config: adapter and hyper-parameters, as the service wrote them.
        fence: `<counter>.<nonce>` of the last opener of the journal, empty before the first.
        journal_entries, journal_bytes: size of the journal since `base`.
        number: of the newest numbered batch that was applied; 0 if none was.
        paused: True where batches are answered and not folded in.
        version: key of the model version that the state was begun by; empty for that of the scope.
    """

    model: str
    seq: int
    tag: str
    base: int
    inline: bytes = field(repr=False)
    snapshot: Snapshot | None
    length: int
    digest: str
    config: str
    fence: str
    journal_entries: int
    journal_bytes: int
    number: int = 0
    paused: bool = False
    version: str = ""

    @property
    def has_state(self) -> bool:
        """False after a reset, until the next commit."""
        return self.length > 0

    @property
    def sid(self) -> str:
        """Id of the live snapshot, empty if there is none."""
        return self.snapshot.sid if self.snapshot else ""


@dataclass(frozen=True, slots=True)
class Basis:
    """The point of a client's history that a new state was computed from. `Basis()` is a client nobody has seen."""

    life: str = ""
    seq: int = 0
    tag: str = ""
    sid: str = ""


def _basis(life: str, head: Head | None, leftover: str = "") -> Basis:
    return Basis(life, head.seq, head.tag, head.sid) if head else Basis(life, sid=leftover)


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
class Note:
    """A point of a client's timeline, and the replica that it is from; an empty one is not stored."""

    replica: str = ""
    point: bytes = field(default=b"", repr=False)


NO_NOTE: Final = Note()


@dataclass(frozen=True, slots=True)
class Marker:
    """What is remembered of an applied request: its fingerprint, and the version, tag and life it produced."""

    fingerprint: str
    model: str
    seq: int
    tag: str
    life: str


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
class Restored:
    """A verified state: the adapter that made it, its version, and the bytes of `State.to_bytes()`."""

    adapter: str
    seq: int
    state: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Moved:
    """The snapshot was replaced while it was read; `loaded` is what stands now."""

    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Kept:
    """An earlier state that is kept.

    Args:
        slot: where.
        seq: its version, and `at_ms`, when it was stored (Unix milliseconds).
        length, digest, chunks, config: as in `Head` and `Snapshot`.
    """

    slot: int
    seq: int
    at_ms: int
    length: int
    digest: str
    chunks: int
    config: str


@dataclass(frozen=True, slots=True)
class Description:
    """What is stored of a client in one model scope.

    Args:
        seq: version.
        length: bytes of the newest complete state, 0 if there is none.
        config: adapter and hyper-parameters.
        ttl_ms: time it has left.
        base: version of the newest complete state.
        journal_entries, journal_bytes: size of the journal since `base`.
        owner: nonce of the session that writes the journal, empty if nobody does.
        paused: True where batches are answered and not folded in.
        kept: earlier states, the newest first.
        chosen: the configuration that was chosen for the client, whether it has it still or not; empty if none was, or
            before that was noted.
    """

    seq: int
    length: int
    config: str
    ttl_ms: int
    base: int
    journal_entries: int
    journal_bytes: int
    owner: str
    paused: bool = False
    kept: tuple[Kept, ...] = ()
    chosen: str = ""


Refused: TypeAlias = Repeat | Mismatch | Used | Gone
CommitOutcome: TypeAlias = Committed | Conflict | Incomplete | Refused
ResetOutcome: TypeAlias = Committed | Conflict | Absent | Refused
DeleteOutcome: TypeAlias = Deleted | Conflict
ReadOutcome: TypeAlias = Restored | Moved | None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a script. `unsettled`: an earlier copy of it had no reply, and may still land."""

    rows: list[Any]
    unsettled: bool

    @property
    def effect(self) -> Effect:
        """Of a refusal for a reason that may pass: it says nothing of the earlier copy."""
        return "unknown" if self.unsettled else False


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


def description(reply: Reply) -> Description | None:
    """The reply of `describe`; None: there is no client."""
    _, (config, *sizes, paused), ttl_ms, fence, flat, chosen = reply.rows
    if config is None or ttl_ms < 0:
        return None
    seq, length, base, entries, nbytes = map(int, sizes)
    owner = fence.decode().partition(".")[2] if fence else ""
    if not seq:
        return None
    return Description(
        seq=seq,
        length=length,
        config=config.decode(),
        ttl_ms=ttl_ms,
        base=base,
        journal_entries=entries,
        journal_bytes=nbytes,
        owner=owner,
        paused=paused == b"1",
        kept=kept_of(flat),
        chosen=(chosen or b"").decode(),
    )


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


def chunk_refusal(reply: Reply) -> Conflict | Gone | None:
    """The reply of `chunk`; None: accepted."""
    match reply.rows:
        case [b"OK"]:
            return None
        case [b"CONFLICT", life, head]:
            return Conflict(life.decode(), head_of(head))
        case _:
            return Gone()


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


def _marker(text: bytes | None) -> Marker | None:
    if text is None:
        return None
    try:
        fingerprint, model, seq, tag, life = text.decode().split("|")
        return Marker(fingerprint, model, int(seq), tag, life)
    except ValueError as error:
        raise StateCorrupt("a stored idempotency marker cannot be read") from error


def kept_of(flat: list[bytes]) -> tuple[Kept, ...]:
    """The index of kept states, as Redis lists it; the newest one comes first.

    Raises:
        StateCorrupt: it cannot be read.
    """
    try:
        return tuple(sorted(map(_kept, flat[::2], flat[1::2]), key=lambda kept: -kept.seq))
    except ValueError as error:
        raise StateCorrupt(f"the index of kept states cannot be read: {error!r}") from error


def _kept(slot: bytes, text: bytes) -> Kept:
    seq, at, length, digest, chunks, config = text.decode().split("|", 5)
    return Kept(int(slot), int(seq), int(at), int(length), digest, int(chunks), config)


def head_of(flat: list[bytes]) -> Head | None:
    """The fields of a head, as Redis lists them; None: there is none.

    Raises:
        StateCorrupt: they cannot be read.
    """
    if not flat:
        return None
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        return _parse(fields)
    except (KeyError, ValueError) as error:
        raise StateCorrupt(f"the stored head cannot be read: {error!r}") from error


def _parse(fields: dict[bytes, bytes]) -> Head:
    if fields[b"v"] != b"1":
        raise StateCorrupt(f"the stored head has format {fields[b'v']!r}; this version reads format 1")
    sid, chunks = fields[b"snap"].decode(), int(fields[b"n"])
    return Head(
        model=fields[b"model"].decode(),
        seq=int(fields[b"seq"]),
        tag=fields[b"tag"].decode(),
        base=int(fields[b"base"]),
        inline=fields[b"st"],
        snapshot=Snapshot(sid, chunks) if sid else None,
        length=int(fields[b"len"]),
        digest=fields[b"sum"].decode(),
        config=fields[b"cfg"].decode(),
        fence=fields[b"fence"].decode(),
        journal_entries=int(fields[b"jn"]),
        journal_bytes=int(fields[b"jb"]),
        number=int(fields.get(b"num", b"0")),
        paused=fields.get(b"paused") == b"1",
        version=fields.get(b"ver", b"").decode(),
    )
