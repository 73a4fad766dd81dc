"""What is stored of a client, as frozen records, and how they are read from what Redis lists."""

from dataclasses import dataclass, field
from typing import Any, Final

from acclimate_service.state.errors import StateCorrupt


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


@dataclass(frozen=True, slots=True)
class Note:
    """A point of a client's timeline, and the replica that it is from; an empty one is not stored."""

    replica: str = ""
    point: bytes = field(default=b"", repr=False)


NO_NOTE: Final = Note()


@dataclass(frozen=True, slots=True)
class Restored:
    """A verified state: the adapter that made it, its version, and the bytes of `State.to_bytes()`."""

    adapter: str
    seq: int
    state: bytes = field(repr=False)


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


def head_of(flat: list[bytes]) -> Head | None:
    """The fields of a head, as Redis lists them; None: there is none.

    Raises:
        StateCorrupt: they cannot be read.
    """
    if not flat:
        return None
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        return _head(fields)
    except (KeyError, ValueError) as error:
        raise StateCorrupt(f"the stored head cannot be read: {error!r}") from error


def _head(fields: dict[bytes, bytes]) -> Head:
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


def description_of(rows: list[Any]) -> Description | None:
    """What `describe` answers; None: there is no client."""
    _, (config, *sizes, paused), ttl_ms, fence, flat, chosen = rows
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
