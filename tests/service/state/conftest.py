"""A real Redis, stores on it, and a link between the two that fails on command."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from acclimate_service.embedded import EmbeddedRedis
from acclimate_service.state import (
    Attempt,
    Basis,
    ClientScope,
    CommitOutcome,
    Committed,
    Limits,
    Loaded,
    ResetOutcome,
    Restored,
    StateStore,
    Wire,
    connect,
    random_rid,
)

MODEL = "0123456789abcdef"
FINGERPRINT = "f" * 32


@dataclass
class Fault:
    """What happens to the next command that holds `needle`; `caught` is set when it came by."""

    kind: Literal["lose reply", "hold", "stall"]
    needle: bytes
    caught: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class Link:
    """A unix socket in front of Redis. Faults:

    - `lose reply`: the command lands, the caller's connection breaks.
    - `hold`: the caller's connection breaks, the command lands once released.
    - `stall`: the command waits until released, then all goes on as if nothing had happened.
    """

    def __init__(self, upstream: str, path: Path) -> None:
        self._upstream = upstream
        self._path = path
        self._faults: list[Fault] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    def fault(self, kind: Literal["lose reply", "hold", "stall"], needle: str) -> Fault:
        self._faults.append(Fault(kind, needle.encode()))
        return self._faults[-1]

    async def __aenter__(self) -> "Link":
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies, commands = await asyncio.open_unix_connection(self._upstream)
        relay = asyncio.create_task(self._relay(replies, writer))
        try:
            while data := await reader.read(1 << 20):
                fault = next((each for each in self._faults if each.needle in data), None)
                if fault is None:
                    commands.write(data)
                elif await self._strike(fault, data, relay, replies, commands, writer):
                    return
        finally:
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)
            commands.close()
            writer.close()

    async def _strike(
        self,
        fault: Fault,
        data: bytes,
        relay: asyncio.Task[None],
        replies: asyncio.StreamReader,
        commands: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Act on a command; True if the connection is over."""
        self._faults.remove(fault)
        fault.caught.set()
        if fault.kind == "stall":
            await fault.released.wait()
            commands.write(data)
            return False
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        if fault.kind == "hold":
            writer.close()
            await fault.released.wait()
        commands.write(data)
        await replies.read(1)
        fault.landed.set()
        return True

    @staticmethod
    async def _relay(replies: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await replies.read(1 << 20):
            writer.write(data)


@dataclass(frozen=True)
class Driver:
    """One client, as one replica drives it."""

    store: StateStore
    client: ClientScope
    model: str = MODEL

    async def load(self, rid: str | None = None, sid: str = "") -> Loaded:
        return await self.store.load(self.client, self.model, rid, sid)

    def attempt(self, key: str | None = None, fingerprint: str = FINGERPRINT) -> Attempt:
        return Attempt(self.client.rid(key) if key else random_rid(), fingerprint)

    async def commit(
        self,
        basis: Basis | None = None,
        attempt: Attempt | None = None,
        state: bytes = b"state",
        answer: bytes = b"answer",
    ) -> CommitOutcome:
        """Commit on the present basis, unless another is named."""
        return await self.store.commit(
            self.client,
            self.model,
            basis if basis is not None else (await self.load()).basis,
            attempt or self.attempt(),
            state,
            adapter="atp",
            config='{"adapter":"atp"}',
            answer=answer,
        )

    async def committed(
        self, basis: Basis | None = None, attempt: Attempt | None = None, state: bytes = b"state", answer: bytes = b"a"
    ) -> Committed:
        outcome = await self.commit(basis, attempt, state, answer)
        assert isinstance(outcome, Committed)
        return outcome

    async def reset(self, attempt: Attempt | None = None, config: str = "") -> ResetOutcome:
        return await self.store.reset(self.client, self.model, attempt or self.attempt(), config)

    async def state(self) -> bytes | None:
        """The state now stored."""
        head = (await self.load()).head
        assert head is not None
        restored = await self.store.read_state(self.client, head)
        assert restored is None or isinstance(restored, Restored)
        return restored.state if restored else None


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture
async def admin(redis_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A plain client on an empty Redis."""
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    yield client
    await client.config_set("maxmemory", "0")
    await client.aclose()


@pytest_asyncio.fixture
async def make_store(redis_server: EmbeddedRedis, admin: Redis) -> AsyncIterator[Callable[..., StateStore]]:
    """Make a store, with limits of its own; `url`, `connection` (for `connect`) and `resend` are for faults."""
    stores: list[StateStore] = []

    def make(url: str = redis_server.url, connection: dict[str, Any] | None = None, **limits: int) -> StateStore:
        chosen = Limits(**limits)
        wire = Wire(connect(url, **(connection or {})), resend=chosen.resend, jitter_ms=chosen.jitter_ms)
        stores.append(StateStore(wire, chosen))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


@pytest_asyncio.fixture
async def make_wire(redis_server: EmbeddedRedis, admin: Redis) -> AsyncIterator[Callable[..., Wire]]:
    wires: list[Wire] = []

    def make(url: str = redis_server.url, **connection: Any) -> Wire:
        wires.append(Wire(connect(url, **connection)))
        return wires[-1]

    yield make
    for wire in wires:
        await wire.aclose()


@pytest.fixture
def make_driver(make_store: Callable[..., StateStore]) -> Callable[..., Driver]:
    """Make a replica that serves one client: `cam-7` unless named."""

    def make(client: str = "cam-7", model: str = MODEL, **store: Any) -> Driver:
        return Driver(make_store(**store), ClientScope(client), model)

    return make


@pytest.fixture
def driver(make_driver: Callable[..., Driver]) -> Driver:
    return make_driver()


@pytest_asyncio.fixture
async def link(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Link]:
    upstream = unquote(redis_server.url.removeprefix("unix://"))
    async with Link(upstream, tmp_path_factory.mktemp("link") / "l.sock") as link:
        yield link


@pytest.fixture
def dump(admin: Redis) -> Callable[[], Any]:
    """Everything Redis holds, key by key, in its own serialisation."""

    async def dump() -> dict[bytes, bytes]:
        return {key: await admin.dump(key) for key in await admin.keys()}

    return dump
