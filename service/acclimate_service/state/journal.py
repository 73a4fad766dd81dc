"""The journal of a large state: batches are appended to it, and a snapshot now and then makes it short again.

What its scripts answer comes first, then the journal itself, then how replies become answers.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from acclimate_service.state.chunks import Chunks
from acclimate_service.state.encoding import Batch, Entry, Sealed, encode_entry, hashing, seal
from acclimate_service.state.errors import Effect, StateCorrupt
from acclimate_service.state.limits import Limits
from acclimate_service.state.outcomes import Attempt, Conflict, Gone, Incomplete, Refused, Reply, change_refusal
from acclimate_service.state.records import NO_NOTE, Basis, Head, Note, Snapshot, head_of
from acclimate_service.state.redis.announcements import HAND_OVER
from acclimate_service.state.redis.keys import ClientScope, new_id
from acclimate_service.state.redis.scripts import ANSWER, APPEND, FLIP, OPEN, RELEASE, UNDO
from acclimate_service.state.redis.wire import Argument, Wire


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


OpenOutcome: TypeAlias = Opened | Busy | Conflict | Gone
AppendOutcome: TypeAlias = Appended | Fenced | Full | Conflict | Refused
FlipOutcome: TypeAlias = Flipped | Stale | Fenced | Incomplete | Gone
UndoOutcome: TypeAlias = Undone | Answered | Fenced | Conflict | Gone
AnswerOutcome: TypeAlias = Answered | Gone


class Journal:
    """Writes the journals of any client, in any model scope. Errors are those of `StateStore`.

    Args:
        wire: exchanges with Redis.
        limits: sizes and lifetimes; replicas may differ in them.
    """

    def __init__(self, wire: Wire, limits: Limits) -> None:
        self._wire = wire
        self._limits = limits
        self._chunks = Chunks(wire, limits)
        self._lifetimes = (limits.state_ttl_ms, limits.key_ttl_ms, limits.key_min_ms, limits.key_cap)

    async def open(
        self,
        client: ClientScope,
        model: str,
        basis: Basis,
        nonce: str,
        config: str,
        version: str = "",
        *,
        force: bool = False,
    ) -> OpenOutcome:
        """Take the lease and a new fence, and create the client if there is none.

        Args:
            client: whose journal.
            model: model scope.
            basis: its life must be the present one; if its snapshot is too, the TTLs are extended.
            nonce: names the opener: its own lease does not stop it.
            config: adapter and hyper-parameters of a client that is created.
            version: key of the model version that it is created by; empty for that of the scope.
            force: take the lease from another replica.
        """
        keys = (
            client.registry,
            client.head(model),
            client.journal(model),
            client.lease(model),
            client.snapshot(model, basis.sid),
            client.timeline(model),
            *client.kept(model),
        )
        args: tuple[Argument, ...] = (
            basis.life,
            nonce,
            int(force),
            basis.sid,
            new_id(),
            model,
            config,
            self._limits.lease_ms,
            self._limits.state_ttl_ms,
            version,
        )
        return open_outcome(await self._wire.run(OPEN, keys, args))

    async def append(
        self, client: ClientScope, model: str, basis: Basis, fence: str, attempt: Attempt, batch: Batch, engine: str
    ) -> AppendOutcome:
        """Make a batch durable as the version after `basis`, and remember its request.

        Args:
            client: whose journal.
            model: model scope.
            basis: the version that the batch is computed from.
            fence: under which the journal was opened.
            attempt: the request, and the tag of this try; sending it again is safe.
            batch: the batch.
            engine: device kind and library version that compute it.
        """
        limits = self._limits
        blob = await hashing(partial(encode_entry, client, Entry(basis.seq + 1, batch, engine)), batch.nbytes)
        keys = (
            *client.requests,
            client.head(model),
            client.journal(model),
            client.lease(model),
            client.snapshot(model, basis.sid),
        )
        args: tuple[Argument, ...] = (
            attempt.rid,
            attempt.fingerprint,
            attempt.tag,
            basis.life,
            basis.tag,
            fence,
            basis.sid,
            model,
            blob,
            limits.journal_entries,
            limits.journal_bytes,
            limits.lease_ms,
            *self._lifetimes,
            attempt.number,
        )
        return append_outcome(await self._wire.run(APPEND, keys, args), attempt, basis.sid)

    async def upload(
        self, client: ClientScope, model: str, basis: Basis, adapter: str, state: bytes
    ) -> tuple[Snapshot, Sealed] | Conflict | Gone:
        """Write the state of version `basis.seq` as a snapshot, which expires unless `flip` makes it the base."""
        sealed = await hashing(partial(seal, client, model, adapter, basis.seq, state), len(state))
        gap_ms = self._limits.chunk_gap_ms
        placed = await self._chunks.upload(client, model, basis.life, sealed.blob, gap_ms)
        return (placed, sealed) if isinstance(placed, Snapshot) else placed

    async def flip(
        self,
        client: ClientScope,
        model: str,
        basis: Basis,
        fence: str,
        snapshot: Snapshot,
        sealed: Sealed,
        keep: int = 0,
    ) -> FlipOutcome:
        """Make an uploaded snapshot the base.

        Args:
            client: whose journal.
            model: model scope.
            basis: version and tag that the snapshot is of, and the snapshot that it replaces.
            fence: under which the journal was opened.
            snapshot: the upload, and `sealed`, what was uploaded.
            keep: as in `StateStore.commit`.
        """
        keys = (
            client.registry,
            client.head(model),
            client.journal(model),
            client.snapshot(model, basis.sid),
            client.snapshot(model, snapshot.sid),
            *(client.kept(model) if keep else ()),
        )
        args: tuple[Argument, ...] = (
            basis.life,
            fence,
            basis.seq,
            basis.tag,
            basis.sid,
            snapshot.sid,
            snapshot.chunks,
            len(sealed.blob),
            sealed.digest,
            model,
            self._limits.state_ttl_ms,
            keep,
            self._limits.keep_every_ms,
        )
        return flip_outcome(await self._wire.run(FLIP, keys, args))

    async def answer(
        self, client: ClientScope, model: str, rid: str, tag: str, answer: bytes, note: Note = NO_NOTE
    ) -> AnswerOutcome:
        """Store the answer of an entry; from then on nobody takes the entry back. One too large is stored as empty."""
        keys = (client.registry, client.markers, client.answers, client.answer_times, *client.noted(model))
        kept = answer if len(answer) <= self._limits.answer_max else b""
        limits = self._limits
        noted = (note.replica, note.point, limits.timeline_points)
        args = (rid, tag, kept, limits.key_ttl_ms, limits.answer_bytes, *noted)
        return answer_outcome(await self._wire.run(ANSWER, keys, args))

    async def undo(
        self, client: ClientScope, model: str, before: Basis, number: int, fence: str, attempt: Attempt
    ) -> UndoOutcome:
        """Take back the entry of `attempt`, the last one.

        Args:
            client: whose journal.
            model: model scope.
            before: the version that it was appended to, and `number`, that of the newest numbered batch then.
            fence: under which the journal was opened.
            attempt: what is taken back.
        """
        keys = (
            client.registry,
            client.markers,
            client.marker_times,
            client.answers,
            client.head(model),
            client.journal(model),
        )
        tag = new_id()
        args = (attempt.rid, attempt.tag, tag, before.life, fence, number)
        return undo_outcome(await self._wire.run(UNDO, keys, args), before, tag)

    async def ask(self, client: ClientScope, model: str) -> None:
        """Ask whoever has the journal open to release it, if nothing is under way there. It need not be heard."""
        await self._wire.publish(HAND_OVER, f"{model}/{client.tenant}/{client.client}")

    async def release(self, client: ClientScope, model: str, fence: str) -> None:
        """Let others open the journal without waiting."""
        await self._wire.run(RELEASE, (client.lease(model),), (fence,))


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
        case [b"OK", seq, life, _, *touched]:
            return Appended(Basis(life.decode(), int(seq), attempt.tag, sid), touched == [b"1"])
        case [b"FENCED"]:
            return Fenced()
        case [b"JFULL"]:
            return Full(reply.effect)
        case rows:
            return change_refusal(rows)


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
