"""One client as a replica holds it: what its session is given, what it remembers, and the snapshots of that.

All that is remembered may be dropped at any time: Redis has it. Snapshots are taken beside the batches that go on.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Generic

from acclimate_service.state.contract import (
    Alone,
    Lineage,
    Machine,
    Observer,
    Policy,
    Present,
    S,
    Silent,
    Status,
)
from acclimate_service.state.journal import Fenced, Flipped, Stale
from acclimate_service.state.limits import Limits
from acclimate_service.state.outcomes import Conflict, Gone
from acclimate_service.state.places import Places
from acclimate_service.state.records import NO_NOTE, Basis, Note
from acclimate_service.state.redis.keys import ClientScope, new_id
from acclimate_service.state.replay_queue import ReplayQueue
from acclimate_service.state.store import StateStore
from acclimate_service.state.tasks import Logged, Tasks, Watch

_RECENT: Final = 8
"""Steps over which their time is averaged, about."""


@dataclass(frozen=True, slots=True)
class Owed:
    """The answer of a journal entry, whose it is, and the point of the timeline."""

    rid: str
    tag: str
    answer: bytes = field(repr=False)
    note: Note = NO_NOTE


@dataclass(slots=True)
class Track:
    """What this session knows of the stored parts of a state. It changes in the background, the state never does.

    Args:
        base: version of the newest complete state.
        sid: its snapshot, empty if there is none.
        fence: under which the journal is open for this session; empty if it is not.
        sizes: bytes of each journal entry, by version.
        owed: answers not known to be stored, by version. A snapshot must not take their entries away before they are.
        stale: True once this session knows that it knows too little; the state is then to be read again.
    """

    base: int = 0
    sid: str = ""
    fence: str = ""
    sizes: dict[int, int] = field(default_factory=dict)
    owed: dict[int, Owed] = field(default_factory=dict)
    stale: bool = False

    def rebase(self, base: int, sid: str) -> None:
        """A complete state was written."""
        self.base, self.sid = base, sid
        for seq in [seq for seq in self.sizes if seq <= base]:
            del self.sizes[seq]

    @property
    def nbytes(self) -> int:
        """Bytes of the journal."""
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Context(Generic[S]):
    """One client in one model scope, as one replica serves it.

    Args:
        store: the states of all clients.
        limits: those of the store.
        client: the client.
        model: the model scope.
        machine: how its states are computed.
        policy: what the operator decided.
        observer: told of what happens.
        watch: told how work went that nobody waits for.
        clock: monotonic seconds.
        nonce: names this session in its fences.
        replays: of all sessions of the replica.
        places: of all clients; None where nobody counts them.
        lineage: the versions of the model.
    """

    store: StateStore
    limits: Limits
    client: ClientScope
    model: str
    machine: Machine[S]
    policy: Policy
    observer: Observer = field(default_factory=Silent)
    watch: Watch = field(default_factory=Logged)
    clock: Callable[[], float] = time.monotonic
    nonce: str = field(default_factory=new_id)
    replays: ReplayQueue = field(default_factory=ReplayQueue)
    places: Places | None = None
    lineage: Lineage = field(default_factory=Alone)

    @property
    def long_ago(self) -> float:
        """When a state was touched that was read, which need not have extended its life (s)."""
        return self.clock() - self.limits.state_ttl_ms / 1000

    def written_whole(self, size: int, batch_bytes: int) -> bool:
        """Whether a state of that many bytes is written itself, instead of the batch that changes it."""
        return not self.policy.journal or size <= self.limits.inline_max or self.outweighed(size, batch_bytes)

    def outweighed(self, size: int, batch_bytes: int) -> bool:
        """Whether a state is so much smaller than its batch that it goes into its head whatever `inline_max` says."""
        return size <= min(batch_bytes, self.limits.full_max)

    def note(self, point: bytes) -> Note:
        """A point of the client's timeline, as it is stored."""
        return Note(self.nonce.partition("~")[0], point) if point and self.policy.timeline else NO_NOTE

    async def pause(self) -> None:
        """A random moment, so that replicas that met do not meet again."""
        await asyncio.sleep(random.uniform(0, self.limits.jitter_ms) / 1000)

    async def settle(self, track: Track, until: int) -> None:
        """Store the answers owed up to a version; a request whose marker is gone cannot be repeated, nor answered.

        Raises:
            StateError: Redis failed; some may still be owed.
        """
        for seq, owed in sorted(track.owed.items()):
            if seq <= until:
                await self.store.journal.answer(self.client, self.model, owed.rid, owed.tag, owed.answer, owed.note)
                track.owed.pop(seq, None)


@dataclass(frozen=True, slots=True)
class Held(Generic[S]):
    """A state in memory, and the point of the client's history that it stands for.

    Args:
        life, seq, tag: that point.
        config: adapter and hyper-parameters.
        state: the state.
        track: of its stored parts.
        touched: when Redis last extended its life for sure (seconds of the session's clock).
        status: how it was found.
        lost: versions that Redis had lost, if it was "rolled_back".
        number: of the newest numbered batch that was applied; 0 if none was.
        paused: whether batches are answered and not folded in.
    """

    life: str
    seq: int
    tag: str
    config: str
    state: S
    track: Track
    touched: float
    status: Status
    lost: int = 0
    number: int = 0
    paused: bool = False

    @property
    def basis(self) -> Basis:
        """What a change computed from this state is to be based on."""
        return Basis(self.life, self.seq, self.tag, self.track.sid)

    @property
    def present(self) -> Present[S]:
        """What a caller is shown of it."""
        return Present(self.life, self.seq, self.config, self.state, self.status, self.paused)

    def at(self, basis: Basis, number: int = 0) -> "Held[S]":
        """The same state at another point, to which the batch of this number led, if it had one."""
        return replace(self, life=basis.life, seq=basis.seq, tag=basis.tag, number=number or self.number)


class Memory(Generic[S]):
    """The one place for the state of a client on one replica.

    `held` is the newest state, as far as is known: None while the outcome of a change is not. `past` is one that the
    client had, or what a replay has come to: where the next replay may begin.
    """

    def __init__(self) -> None:
        self.held: Held[S] | None = None
        self.past: Held[S] | None = None
        self._acknowledged = Basis()
        self._touched = 0.0

    def take(self) -> Held[S] | None:
        """Take the state out, so that nobody goes on from it without asking Redis."""
        held, self.held = self.held, None
        self.past = held or self.past
        return held

    def keep(self, held: Held[S]) -> None:
        """Go on from this state."""
        self.held, self.past = held, None

    def drop(self) -> None:
        """Forget all states."""
        self.held = self.past = None

    def acknowledge(self, held: Held[S]) -> None:
        """Keep the state of a change that is being acknowledged."""
        self.keep(held)
        self._acknowledged, self._touched = held.basis, held.touched

    def lost(self, life: str, seq: int) -> int:
        """How many acknowledged versions a Redis that shows this one has lost."""
        known = self._acknowledged
        return max(0, known.seq - seq) if known.life == life else 0

    def vanished(self, since: float) -> int:
        """How many acknowledged versions a Redis that has never heard of the client has lost.

        0 if the last one was before `since`, so that the client may have expired; a deleted one leaves a tombstone.
        """
        return self._acknowledged.seq if self._touched > since else 0


class Snapshotter(Generic[S]):
    """Decides when a snapshot is due, and takes it. One that fails is taken again at the next occasion.

    Attributes:
        failure: why the last one that was not taken was not.
    """

    def __init__(self, context: Context[S], tasks: Tasks) -> None:
        self._context = context
        self._tasks = tasks
        self._running: asyncio.Task[None] | None = None
        self._in_background = False  # its state is being serialised when nothing else is to be done
        self._idle: asyncio.TimerHandle | None = None
        self._steps = 0
        self._step_seconds = 0.0
        self.failure = ""

    def measure(self, seconds: float) -> None:
        """Learn how long a step takes these days: a machine that was slow for a while is not held to be so for ever."""
        self._steps = min(self._steps + 1, _RECENT)
        self._step_seconds += (seconds - self._step_seconds) / self._steps

    def consider(self, held: Held[S]) -> None:
        """Take a snapshot of this state if one is due, and one more if need be once the client has been idle."""
        self.forget()
        if self._due(held):
            self._begin(held)
        delay = self._context.limits.snapshot_idle_ms / 1000
        self._idle = asyncio.get_running_loop().call_later(delay, self._begin, held)

    def keep(self, held: Held[S]) -> None:
        """Take a snapshot of what a replay has come to, if one is due."""
        if self._running is None and self._due(held):
            self._begin(held)

    def forget(self) -> None:
        """Give up waiting for the client to be idle."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def follow(self, held: Held[S]) -> None:
        """Wait for the client to be idle as before, but with this equal state: the other one is let go of."""
        if self._idle is not None:
            at = self._idle.when()
            self.forget()
            self._idle = asyncio.get_running_loop().call_at(at, self._begin, held)

    async def now(self, held: Held[S]) -> None:
        """Take a snapshot of this state, unless there is one. Whether that succeeds is told as of any other.

        One that waits in the background, behind those of others, is given up: nothing of it is written yet.
        """
        if self._running is not None and self._in_background:
            self._running.cancel()
        await self.finish()
        await asyncio.wait([self._begin(held, awaited=True)])

    async def finish(self) -> None:
        """Wait for the snapshot that is being taken, if one is."""
        while self._running is not None:
            await asyncio.wait([self._running])

    def _due(self, held: Held[S]) -> bool:
        limits, entries = self._context.limits, len(held.track.sizes)
        replay_ms = entries * 1000 * self._step_seconds
        return (
            entries >= limits.snapshot_entries
            or replay_ms >= limits.snapshot_replay_ms
            or held.track.nbytes >= self._context.machine.size(held.state)
        )

    def _begin(self, held: Held[S], *, awaited: bool = False) -> asyncio.Task[None]:
        if self._running is None:
            self._running = self._tasks.start("snapshot", self._attempt(held, awaited))
            self._running.add_done_callback(self._ended)
        return self._running

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running = None

    async def _attempt(self, held: Held[S], awaited: bool) -> None:
        if held.track.base >= held.seq:
            return
        nbytes, self.failure = 0, "another replica has changed the client since"
        try:
            if not held.track.stale:
                nbytes = await self._take(held, awaited)
        except Exception as error:  # nothing is lost: the journal has it all
            self.failure = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._context.observer.snapshot(False, 0)
            raise
        self._context.observer.snapshot(nbytes > 0, nbytes)

    async def _take(self, held: Held[S], awaited: bool) -> int:
        """Bytes written, 0 if it is not the base now.

        State, version and tag come from one frozen record, so the snapshot is never labelled with a later one.
        """
        context, track = self._context, held.track
        await context.settle(track, held.seq)
        basis = held.basis
        state, adapter = await self._serialised(held, awaited), context.machine.adapter(held.state)
        uploaded = await context.store.journal.upload(context.client, context.model, basis, adapter, state)
        if isinstance(uploaded, Conflict | Gone):
            track.stale = True
            return 0
        snapshot, sealed = uploaded
        try:
            flipped = await context.store.journal.flip(
                context.client, context.model, basis, track.fence, snapshot, sealed, context.policy.keep
            )
        except BaseException:
            track.stale = True  # it may have landed
            raise
        if isinstance(flipped, Flipped):
            track.rebase(basis.seq, snapshot.sid)
        elif isinstance(flipped, Fenced | Gone) or (isinstance(flipped, Stale) and track.base < basis.seq):
            track.stale = True
        return len(sealed.blob) if isinstance(flipped, Flipped) else 0

    async def _serialised(self, held: Held[S], awaited: bool) -> bytes:
        self._in_background = not awaited
        try:
            return await self._context.machine.serialise(held.state, awaited=awaited)
        finally:
            self._in_background = False
