"""The per-client state in Redis: load it, commit a new version of it, reset it, delete it."""

import asyncio
import random
from dataclasses import dataclass, replace
from functools import partial

from acclimate_service.state.chunks import Chunks
from acclimate_service.state.contract import Change
from acclimate_service.state.encoding import hashing, seal, unseal_pieces
from acclimate_service.state.entries import Entries
from acclimate_service.state.errors import Doubt, StateCorrupt
from acclimate_service.state.footprint import footprint
from acclimate_service.state.journal import Journal
from acclimate_service.state.limits import Limits
from acclimate_service.state.outcomes import (
    Absent,
    Attempt,
    CommitOutcome,
    Conflict,
    Deleted,
    DeleteOutcome,
    Gone,
    Loaded,
    Moved,
    ReadOutcome,
    Reply,
    ResetOutcome,
    commit_outcome,
    loaded,
    reset_outcome,
)
from acclimate_service.state.records import (
    NO_NOTE,
    Basis,
    Description,
    Head,
    Kept,
    Note,
    Restored,
    description_of,
    kept_of,
)
from acclimate_service.state.redis.announcements import DROP
from acclimate_service.state.redis.keys import ClientScope, new_id, random_rid
from acclimate_service.state.redis.scripts import CHOOSE, COMMIT, DELETE, DESCRIBE, LOAD, MEND, RESET
from acclimate_service.state.redis.wire import Argument, Wire
from acclimate_service.state.timeline import Timeline


@dataclass(frozen=True, slots=True)
class _Registry:
    """What there is of a client.

    Args:
        life: of the client, or of its tombstone; empty for one that nobody has seen.
        alive: whether it has not been deleted.
        scopes: id of the live snapshot of each model scope.
        uploads: model scope of each snapshot that is being uploaded, or was not finished, by its id.
    """

    life: str
    alive: bool
    scopes: dict[str, str]
    uploads: dict[str, str]


class StateStore:
    """The state of every client, shared by all replicas: any number of stores may serve the same client.

    A change is a compare-and-set on the tag of the last one, so a state computed on another basis is never written.
    Cancelling a caller leaves what was sent running. All methods take `model`, the content hash of the frozen model (16
    hex digits; anything else is a ValueError), and raise StoreUnavailable or StoreFull, whose `committed` says whether
    the change may still land. `journal` writes the journals of large states, `entries` reads them, and `timeline`
    what became of clients.

    Args:
        wire: exchanges with Redis; the store closes it.
        limits: sizes and lifetimes; replicas may differ in them.
    """

    def __init__(self, wire: Wire, limits: Limits) -> None:
        self._wire = wire
        self._limits = limits
        self._chunks = Chunks(wire, limits)
        self._lifetimes = (limits.state_ttl_ms, limits.key_ttl_ms, limits.key_min_ms, limits.key_cap)
        self.journal = Journal(wire, limits)
        self.entries = Entries(wire, limits)
        self.timeline = Timeline(wire)

    async def load(self, client: ClientScope, model: str, rid: str | None = None, sid: str = "") -> Loaded:
        """Read the head, the life of the client, and what is known of one request.

        Extends the TTLs where less than half of them is left, unless a snapshot is live that is not the one named.

        Args:
            client: whose state.
            model: model scope.
            rid: the request asked about.
            sid: id of the live snapshot, where the caller knows it.

        Raises:
            StateCorrupt: the stored head or marker cannot be read.
        """
        keys = (
            client.registry,
            client.markers,
            client.answers,
            client.head(model),
            client.journal(model),
            client.snapshot(model, sid),
            client.lease(model),
            client.timeline(model),
        )
        return loaded(await self._wire.run(LOAD, keys, (rid or "", sid, self._limits.state_ttl_ms, model)))

    async def read_state(self, client: ClientScope, head: Head) -> ReadOutcome:
        """Read and verify the state a head points at. None: there is none, the client starts from the initial state.

        Raises:
            StateCorrupt: a part is missing under a head that did not move, or the verification failed.
        """
        if not head.has_state:
            return None
        pieces: list[bytes] | None = [head.inline]
        if head.snapshot:
            await self.load(client, head.model, sid=head.sid)  # extends the snapshot before it is read
            key, number = client.snapshot(head.model, head.sid), head.snapshot.chunks
            pieces = await self._chunks.fetch(key, number)
        if pieces is None:
            return await self._moved(client, head)
        verify = partial(unseal_pieces, pieces, head.digest, client, head.model, head.base)
        return await hashing(verify, sum(map(len, pieces)))

    async def kept(self, client: ClientScope, model: str) -> tuple[Kept, ...]:
        """Earlier states that are kept of a client, the newest first."""
        return kept_of(await self._wire.read("HGETALL", client.kept(model)[0]))

    async def read_kept(self, client: ClientScope, model: str, kept: Kept) -> Restored | None:
        """Read and verify an earlier state; None: it is not kept any more.

        Raises:
            StateCorrupt: the verification failed.
        """
        try:
            pieces = await self._chunks.fetch(client.kept(model)[1 + kept.slot], kept.chunks)
            if pieces is not None:
                verify = partial(unseal_pieces, pieces, kept.digest, client, model, kept.seq)
                return await hashing(verify, kept.length)
        except StateCorrupt:
            if kept in await self.kept(client, model):
                raise
        return None

    async def commit(
        self,
        client: ClientScope,
        model: str,
        basis: Basis,
        attempt: Attempt,
        change: Change[bytes],
        *,
        adapter: str,
        inline: bool = False,
        keep: int = 0,
        version: str = "",
        note: Note = NO_NOTE,
    ) -> CommitOutcome:
        """Replace the whole state by the one computed on `basis`, and remember the request and its answer.

        Args:
            client: whose state.
            model: model scope.
            basis: what the state was computed from: that of the last `Loaded`, `Committed` or `Conflict`.
            attempt: the request, and the tag of this try.
            change: the bytes of the state, which above `inline_max` are uploaded in chunks first, and an answer, which
                is not stored if it is empty or larger than `answer_max`.
            adapter: name of the adapter that made the state.
            inline: put the state into its head whatever its size.
            keep: how many earlier states to keep, the one that is replaced among them if it is time for one; 0 leaves
                them as they are.
            version: key of the model version that made the state; empty for that of the scope.
            note: of the client's timeline.
        """
        limits, state = self._limits, change.state
        sealed = await hashing(partial(seal, client, model, adapter, basis.seq + 1, state), len(state))
        whole = inline or len(state) <= limits.inline_max
        placed = None if whole else await self._chunks.upload(client, model, basis.life, sealed.blob)
        if isinstance(placed, Conflict | Gone):
            return placed
        sid = placed.sid if placed else ""
        keys = (
            *client.requests,
            client.head(model),
            client.journal(model),
            client.snapshot(model, basis.sid),
            client.snapshot(model, sid),
            client.timeline(model),
            *(client.kept(model) if keep or change.back or not basis.seq else ()),
        )
        args: tuple[Argument, ...] = (
            attempt.rid,
            attempt.fingerprint,
            attempt.tag,
            basis.life,
            basis.tag,
            basis.sid,
            new_id(),
            model,
            sid,
            placed.chunks if placed else 0,
            b"" if placed else sealed.blob,
            len(sealed.blob),
            sealed.digest,
            change.config,
            change.answer if len(change.answer) <= limits.answer_max else b"",
            *self._lifetimes,
            limits.answer_bytes,
            attempt.number,
            _flag(change.paused),
            keep,
            limits.keep_every_ms,
            change.back,
            version,
            _flag(change.chosen),
            note.replica,
            note.point,
            limits.timeline_points,
        )
        return commit_outcome(await self._wire.run(COMMIT, keys, args), attempt, sid)

    async def reset(
        self,
        client: ClientScope,
        model: str,
        attempt: Attempt,
        config: str = "",
        paused: bool | None = None,
        *,
        version: str = "",
        note: Note = NO_NOTE,
    ) -> ResetOutcome:
        """Go back to the initial state, at a new version.

        Args:
            client: whose state.
            model: model scope.
            attempt: the request; sending it again does not reset again.
            config: adapter and hyper-parameters that were chosen for the client; empty keeps the present ones.
            paused: as in `commit`.
            version: key of the model version that begins it; empty for that of the scope.
            note: of the client's timeline.

        Returns:
            Conflict only after `tries` attempts that all met another change.
        """
        basis, doubt = (await self.load(client, model)).basis, Doubt()
        refused: Conflict | Absent = Conflict(basis.life, None)
        for _ in range(self._limits.tries):
            with doubt:
                outcome = await self._reset(client, model, basis, attempt, config, paused, version, note)
            if not isinstance(outcome, Conflict | Absent):
                return outcome
            refused = outcome
            doubt.learn(outcome.committed)
            if isinstance(outcome, Absent):
                break
            basis = outcome.basis
            await self._pause()
        return replace(refused, committed=doubt.committed)

    async def reset_from(
        self, client: ClientScope, model: str, basis: Basis, config: str, version: str, note: Note = NO_NOTE
    ) -> ResetOutcome:
        """Go back to the initial state, unless another change came since `basis`; arguments as in `reset`."""
        return await self._reset(
            client, model, basis, Attempt(random_rid(), ""), config, None, version, note, compare=True
        )

    async def delete(self, client: ClientScope) -> DeleteOutcome:
        """Remove a client from every model scope; deleting it again does nothing.

        Returns:
            Conflict, without a head, only after `tries` attempts that all met a change of its snapshots.
        """
        registry, doubt = await self._registry(client), Doubt()
        life = registry.life
        for _ in range(self._limits.tries):
            if registry.life != life or not (registry.alive or registry.uploads):
                return Deleted(existed=False)
            with doubt:
                reply = await self._delete(client, registry)
                if reply.rows[0] == b"OK":
                    await self._wire.publish(DROP, f"{client.tenant}/{client.client}")
                    return Deleted(registry.alive and reply.rows[1:] == [b"1"])
                doubt.learn(reply.effect)
                await self._pause()
                registry = await self._registry(client)
        return Conflict(life, None, doubt.committed)

    async def mend(self, client: ClientScope, model: str) -> None:
        """Remove values of other types from under a client's names; with its registry goes all that only that names."""
        keys = {
            client.registry: "hash",
            client.markers: "hash",
            client.marker_times: "zset",
            client.answers: "hash",
            client.answer_times: "zset",
            client.head(model): "hash",
            client.journal(model): "hash",
            client.lease(model): "string",
            client.timeline(model): "list",
            **dict.fromkeys(client.kept(model), "hash"),
        }
        reply = await self._wire.run(MEND, tuple(keys), tuple(keys.values()))
        if reply.rows[1] == b"1":
            await self._remove_all(client)

    async def describe(self, client: ClientScope, model: str) -> Description | None:
        """What is stored of a client, without reading the state or extending its life. None: there is none."""
        keys = (client.head(model), client.lease(model), client.kept(model)[0], client.registry)
        return description_of((await self._wire.run(DESCRIBE, keys, ())).rows)

    async def footprint(self, client: ClientScope, model: str) -> int:
        """Bytes of Redis's memory that a client takes."""
        return await footprint(self._wire, client, model)

    async def note_choice(self, client: ClientScope, model: str, config: str) -> None:
        """Note that a configuration which a client has already was chosen for it, as `Description.chosen` says."""
        await self._wire.run(CHOOSE, (client.registry, client.head(model)), (config,))

    async def aclose(self) -> None:
        """Wait for what is still running, then close the connections."""
        await self._wire.aclose()

    async def _reset(
        self,
        client: ClientScope,
        model: str,
        basis: Basis,
        attempt: Attempt,
        config: str,
        paused: bool | None,
        version: str,
        note: Note,
        *,
        compare: bool = False,
    ) -> ResetOutcome:
        keys = (
            *client.requests,
            client.head(model),
            client.journal(model),
            client.lease(model),
            client.snapshot(model, basis.sid),
            client.timeline(model),
        )
        args: tuple[Argument, ...] = (
            attempt.rid,
            attempt.fingerprint,
            attempt.tag,
            basis.life,
            basis.sid,
            model,
            config,
            *self._lifetimes,
            _flag(paused),
            version,
            _flag(bool(config) and not compare),
            note.replica,
            note.point,
            self._limits.timeline_points,
            *((basis.tag,) if compare else ()),
        )
        return reset_outcome(await self._wire.run(RESET, keys, args), attempt)

    async def _registry(self, client: ClientScope) -> _Registry:
        flat: list[bytes] = await self._wire.read("HGETALL", client.registry)
        fields = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}
        life = fields.get("life", "")
        return _Registry(
            life,
            alive=bool(life) and "gone" not in fields,
            scopes={name[2:]: sid for name, sid in fields.items() if name.startswith("m:")},
            uploads={name[2:]: model.partition("|")[0] for name, model in fields.items() if name.startswith("u:")},
        )

    async def _remove_all(self, client: ClientScope) -> None:
        """Unlink every key of a client but the markers, which refuse late repeats."""
        server, cursor, pattern = self._wire.server_of(client.registry), b"0", client.registry[:-1] + "*"
        while True:
            cursor, found = await self._wire.read("SCAN", cursor, "MATCH", pattern, "COUNT", 10_000, at=server)
            names = {name.decode() for name in found} - {client.markers, client.marker_times}
            if names:
                await self._wire.run(MEND, tuple(names), ("none",) * len(names))
            if cursor == b"0":
                return

    async def _delete(self, client: ClientScope, registry: _Registry) -> Reply:
        keys = [client.registry, client.answers, client.answer_times]
        args: list[Argument] = [registry.life, new_id(), self._limits.tombstone_ttl_ms, len(registry.scopes)]
        for model, sid in registry.scopes.items():
            keys += [client.head(model), client.journal(model), client.lease(model), client.snapshot(model, sid)]
            keys += [client.timeline(model), *client.kept(model)]
            args += [model, sid]
        for sid, model in registry.uploads.items():
            keys.append(client.snapshot(model, sid))
            args.append(sid)
        return await self._wire.run(DELETE, keys, args)

    async def _moved(self, client: ClientScope, head: Head) -> Moved:
        now = await self.load(client, head.model)
        if now.head is not None and (now.head.tag, now.head.sid) == (head.tag, head.sid):
            raise StateCorrupt(f"version {head.seq} of the stored state misses a chunk")
        return Moved(now)

    async def _pause(self) -> None:
        await asyncio.sleep(random.uniform(0, self._limits.jitter_ms) / 1000)


def _flag(value: bool | None) -> str:
    return "" if value is None else str(int(value))
