"""Snapshots of a state whose journal grows, taken beside the batches that go on."""

import asyncio
import logging
from typing import Final, Generic

from acclimate_service.state.contract import S
from acclimate_service.state.errors import StateError
from acclimate_service.state.held import Context, Held
from acclimate_service.state.journal_records import Fenced, Flipped, Stale
from acclimate_service.state.records import Conflict, Gone
from acclimate_service.state.tasks import Tasks

_log = logging.getLogger(__name__)
_RECENT: Final = 8
"""Steps over which their time is averaged, about."""


class Snapshotter(Generic[S]):
    """Decides when a snapshot is due, and takes it. One that fails is taken again at the next occasion.

    Attributes:
        failure: why the last one that was not taken was not.
    """

    def __init__(self, context: Context[S], tasks: Tasks) -> None:
        self._context = context
        self._tasks = tasks
        self._running: asyncio.Task[bool] | None = None
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

    async def now(self, held: Held[S]) -> bool:
        """Take a snapshot of this state, unless there is one; False if that failed.

        One that waits in the background, behind those of others, is given up: nothing of it is written yet.
        """
        if self._running is not None and self._in_background:
            self._running.cancel()
        await self.finish()
        return await self._begin(held, awaited=True)

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

    def _begin(self, held: Held[S], *, awaited: bool = False) -> asyncio.Task[bool]:
        if self._running is None:
            self._running = self._tasks.start(self._attempt(held, awaited))
            self._running.add_done_callback(self._ended)
        return self._running

    def _ended(self, _: asyncio.Task[bool]) -> None:
        self._running = None

    async def _attempt(self, held: Held[S], awaited: bool) -> bool:
        if held.track.base >= held.seq:
            return True
        nbytes, self.failure = 0, "another replica has changed the client since"
        try:
            if not held.track.stale:
                nbytes = await self._take(held, awaited)
        except Exception as error:  # nothing is lost: the journal has it all
            self.failure = f"{type(error).__name__}: {error}".removesuffix(": ")
            expected = isinstance(error, StateError)  # its words say all there is to know
            _log.warning(
                "a snapshot failed, the journal stays as long as it is: %s",
                self.failure,
                exc_info=None if expected else error,
            )
        self._context.observer.snapshot(nbytes > 0, nbytes)
        return nbytes > 0

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
                context.client, context.model, basis, track.fence, snapshot, sealed
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
