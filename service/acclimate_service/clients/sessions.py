"""The sessions of recent clients: one turn at a time for each client, and in memory no more than a budget of bytes."""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from acclimate_service.clients.requests import ClientRequest, too_late
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.device_cache import DeviceCache
from acclimate_service.metrics import SPELLS, Background
from acclimate_service.state import (
    DEADLINE,
    ClientScope,
    KeyReused,
    Request,
    RequestRunning,
    Session,
    Tasks,
)

_log = logging.getLogger(__name__)
ClientSession: TypeAlias = Session[ClientState]
_OVERHEAD: Final = 8 * 1024
"""Bytes that a session takes beside its tensors, so that states without any are bounded too."""
_AT_ONCE: Final = 2
"""Evictions that run at the same time: each holds a second copy of its state, as the bytes of the snapshot."""
_SPARE: Final = 16
"""One part in so many of the budget is kept free, for the states of batches at work."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A client's session for as long as its turn lasts, and the request that the turn is for.

    Whoever begins something that is not to be broken off awaits `request.admit` first: the deadline ends with it.
    """

    session: ClientSession
    request: Request


class Turns:
    """One holder per key at a time; keys that nobody holds or waits for take no memory."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, key: str) -> bool:
        """Whether somebody holds this key, or waits for it."""
        return key in self._queues

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Wait for the turn of this key, and keep it for the block."""
        lock, count = self._queues.get(key, (asyncio.Lock(), 0))
        self._queues[key] = lock, count + 1
        try:
            async with lock:
                yield
        finally:
            _, count = self._queues[key]
            if count == 1:
                del self._queues[key]
            else:
                self._queues[key] = lock, count - 1


class Claims:
    """Turns away a request whose key is at work here already, before it waits for its client's turn.

    Args:
        retry_after_ms: when whoever was turned away may ask again.
    """

    def __init__(self, retry_after_ms: int = 1000) -> None:
        self._retry_after_ms = retry_after_ms
        self._running: dict[str, str] = {}

    @contextmanager
    def hold(self, request: Request) -> Iterator[None]:
        """Claim the request for the block.

        Raises:
            RequestRunning: it is at work already.
            KeyReused: its key is, with another content.
        """
        running = self._running.get(request.rid)
        if running == request.fingerprint:
            raise RequestRunning("a request with this Idempotency-Key is being answered", self._retry_after_ms)
        if running is not None:
            raise KeyReused("this Idempotency-Key is in use with another request; use a new key")
        self._running[request.rid] = request.fingerprint
        try:
            yield
        finally:
            del self._running[request.rid]


class Sessions:
    """Least recently used out first; a client whose turn is taken stays. Dropping a session loses nothing.

    New clients wait while those who are to leave for them are still being written away: however many come one after the
    other, what is in memory does not outgrow the budget by more than the states of the batches at work, which are not
    known before they are there.
    """

    def __init__(
        self,
        make: Callable[[ClientScope], ClientSession],
        budget: int,
        background: Background,
        device_cache: DeviceCache | None = None,
        waiting: Mapping[int, int] | None = None,
    ) -> None:
        """Keep at most `budget` bytes of sessions.

        Args:
            make: a session.
            budget: bytes, of states in memory and of what else counts among them.
            background: watches over what nobody waits for.
            device_cache: those on a device have a budget of their own.
            waiting: bytes of states that are still to be written, by their identity: those that are no client's newest
                any more count in the budget too.
        """
        self._make = make
        self._whole = self._budget = budget
        self._kept = budget - budget // _SPARE
        self._device_cache = device_cache
        self._claims = Claims()
        self._turns = Turns()
        self._sessions: OrderedDict[str, ClientSession] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._newest: dict[str, int] = {}  # identities of the states in memory
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._writing: set[str] = set()  # of those who leave, who are being written away
        self._evicting = asyncio.Semaphore(_AT_ONCE)
        self._replaying: set[str] = set()
        self._checking: asyncio.Task[None] | None = None
        self._waiting = {} if waiting is None else waiting
        self._tasks = Tasks(background)
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @asynccontextmanager
    async def turn(self, wanted: ClientRequest) -> AsyncIterator[Turn]:
        """Wait for the client's turn and keep it for the block, in the order of arrival.

        Raises:
            RequestRunning, KeyReused: the key is at work on this replica already.
            Problem: `deadline_exceeded`, also from within the block, until `request.admit` has been passed there.
        """
        client = wanted.client.client
        if client in self._leaving:
            self._keep(client)
        at_once, came = client in self._sessions and client not in self._turns, time.monotonic()
        DEADLINE.set(wanted.deadline)
        try:
            async with asyncio.timeout(max(0.0, wanted.deadline - time.monotonic())) as limit:

                async def admit() -> None:
                    await wanted.admit()
                    limit.reschedule(None)

                request = Request(wanted.rid, wanted.fingerprint, admit, wanted.number, wanted.life)
                with self._claims.hold(request):
                    try:
                        async with self._turns.hold(client):
                            if not at_once:
                                await self._room_for(client)
                                await wanted.admit()
                            if (spells := SPELLS.get()) is not None:
                                spells.append(("queue", came, time.monotonic()))
                            yield Turn(self._session(wanted.client), request)
                    finally:
                        self._account(client)
        except TimeoutError:
            if not limit.expired():
                raise
            session = self._sessions.get(client)
            if session is None:
                raise too_late() from None
            raise too_late(session.replay_s, "unknown" if session.knows(wanted.rid) else False) from None
        finally:
            DEADLINE.set(math.inf)

    def divide(self, parts: int) -> None:
        """Keep to one of so many parts of the budgets: as many versions of the model share them."""
        self._budget = self._whole // parts
        self._kept = self._budget - self._budget // _SPARE
        self._shrink("")
        if self._device_cache is not None:
            self._device_cache.divide(parts)
            self._spare_device(self._device_cache, "", None)

    def peek(self, client: ClientScope) -> ClientSession | None:
        """The session of a client, if there is one, to be looked at only."""
        return self._sessions.get(client.client)

    @property
    def leases(self) -> int:
        """Clients whose journals this replica writes."""
        return sum([bool(each.memory.held and each.memory.held.track.fence) for each in self._sessions.values()])

    def journals(self) -> tuple[int, int]:
        """Entries and bytes of the journals of all clients in memory."""
        tracks = [session.memory.held.track for session in self._sessions.values() if session.memory.held]
        return sum(len(track.sizes) for track in tracks), sum(track.nbytes for track in tracks)

    def drop(self, client: str) -> None:
        """Forget the state of a client, which is to be read again."""
        session = self._sessions.get(client)
        if session is not None:
            session.drop()

    def check_all(self) -> None:
        """Changes may have gone unheard: ask Redis before any state is used, forget those of the deleted."""
        for session in self._sessions.values():
            session.doubt()
        if self._checking is not None:
            self._checking.cancel()
        self._checking = self._tasks.start("check", self._check(tuple(self._sessions.values())))

    def hand_over(self, client: str) -> None:
        """Give a client to another replica that waits for it, but not while a turn is taken: it will be asked again."""
        if client in self._sessions and client not in self._turns:
            self._tasks.start("hand_over", self._hand_over(client))

    async def aclose(self, budget_s: float) -> None:
        """Evict every session, within so many seconds; what is not evicted has more to replay, and nothing is lost."""
        try:
            async with asyncio.timeout(budget_s):
                leaving = [self._leave(client) for client in tuple(self._sessions)]
                await asyncio.gather(*leaving, return_exceptions=True)
        except TimeoutError:
            _log.warning("%d clients were left without a last snapshot; nothing is lost", len(self._sessions))
        await self._tasks.aclose()
        for session in self._sessions.values():
            await session.aclose()

    @property
    def _used(self) -> int:
        if not self._waiting:
            return self.nbytes
        newest = set(self._newest.values())
        return self.nbytes + sum(size for state, size in self._waiting.items() if state not in newest)

    async def _room_for(self, client: str) -> None:
        """Wait, if the client is a new one, while those who are to leave still use up the budget."""
        while client not in self._sessions and self._used > self._budget and self._leaving:
            await asyncio.wait(self._leaving.values(), return_when=asyncio.FIRST_COMPLETED)

    def _session(self, client: ClientScope) -> ClientSession:
        session = self._sessions.get(client.client)
        if session is None:
            session = self._sessions[client.client] = self._make(client)
        self._sessions.move_to_end(client.client)
        return session

    def _account(self, client: str) -> None:
        """Weigh a client's session, which nobody holds any more, and make room if need be."""
        session = self._sessions.get(client)
        if session is None:
            return
        size = session.nbytes + _OVERHEAD
        self.nbytes += size - self._sizes.get(client, 0)
        self._sizes[client] = size
        self._newest[client] = id(session.memory.held and session.memory.held.state)
        if self.nbytes > self._kept or self._waiting:
            self._shrink(client)
        if self._device_cache is not None:
            self._spare_device(self._device_cache, client, session)
        if session.replay_s is not None and client not in self._replaying:
            self._replaying.add(client)
            self._tasks.start("account", self._account_after_replay(client, session))

    async def _account_after_replay(self, client: str, session: ClientSession) -> None:
        """Weigh a state that is computed again for nobody who still waits."""
        try:
            await session.replay_ended()
        finally:
            self._replaying.discard(client)
        if self._sessions.get(client) is session:
            self._account(client)

    async def _check(self, sessions: Sequence[ClientSession]) -> None:
        """Look for deletions. Where that fails, whoever uses a state asks first, as long as it is in doubt."""
        for session in sessions:
            await session.check()

    def _shrink(self, latest: str) -> None:
        """Begin to evict what is not to be kept: the latest one if it has no room by itself, else the oldest."""
        excess = self._used - self._kept - sum(self._sizes.get(client, 0) for client in self._leaving)
        if excess <= 0:
            return
        homeless = self._sizes.get(latest, 0) > self._kept
        for client in (latest, *self._sessions) if homeless else tuple(self._sessions):
            if client not in self._turns and client not in self._leaving and client not in self._replaying:
                excess -= self._sizes.get(client, 0)
                self._leave(client)
            if excess <= 0:
                break

    def _spare_device(self, cache: DeviceCache, latest: str, session: ClientSession | None) -> None:
        """Begin to move states that are beyond the budget of the device's memory to the host's."""
        held = session.memory.held if session else None
        for client in cache.used(latest, held.state if held else None):
            if client in self._sessions:
                self._tasks.start("unload", self._unload(client, self._sessions[client], cache))

    async def _unload(self, client: str, session: ClientSession, cache: DeviceCache) -> None:
        held = session.memory.held
        if held is not None:
            moved = await asyncio.to_thread(cache.move, held.state)
            # the end of a turn weighs it again; one that was evicted meanwhile says nothing of the next
            if client not in self._turns and self._sessions.get(client) is session:
                session.exchange(held.state, moved)
                self._spare_device(cache, client, session)

    async def _hand_over(self, client: str) -> None:
        try:
            async with self._turns.hold(client):
                session = self._sessions.get(client)
                if session is not None:
                    await session.hand_over()
        finally:
            self._account(client)

    def _leave(self, client: str) -> asyncio.Task[None]:
        if client not in self._leaving:
            task = self._leaving[client] = self._tasks.start("evict", self._evict(client))
            task.add_done_callback(partial(self._left, client))
        return self._leaving[client]

    def _left(self, client: str, task: asyncio.Task[None]) -> None:
        if self._leaving.get(client) is task:
            del self._leaving[client]

    def _keep(self, client: str) -> None:
        """Let a client stay that was to leave, unless it is being written away already."""
        if client not in self._writing:
            self._leaving.pop(client).cancel()

    async def _evict(self, client: str) -> None:
        """Take the turn first: who waits for it must not keep others from leaving."""
        async with self._turns.hold(client), self._evicting:
            session = self._sessions.get(client)
            if session is None:
                return
            self._writing.add(client)
            try:
                await session.evict()
                await session.aclose()
            finally:
                self._writing.discard(client)
            del self._sessions[client]
            self.nbytes -= self._sizes.pop(client, 0)
            self._newest.pop(client, None)
            if self._device_cache is not None:
                self._spare_device(self._device_cache, client, None)
