"""A real Redis, stores and sessions on it, and a link between the two that fails on command."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from acclimate_service.state import (
    Applied,
    Change,
    ClientScope,
    Context,
    Limits,
    Policy,
    Request,
    Session,
    StateStore,
    Wire,
    connect,
    random_rid,
)
from acclimate_service.state.outcomes import Attempt, CommitOutcome, Committed, Loaded, ResetOutcome
from acclimate_service.state.records import Basis, Head, Restored
from acclimate_service.state.redis.cluster import Cluster
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state.redis.link import Server, dial
from acclimate_service.state.replay_queue import ReplayQueue

sys.path.insert(0, str(Path(__file__).parent))  # where the tests find `checker` and `faulty_link`
from checker.recorder import Recorder
from checker.toy import PROBE, Toy, batch_of
from faulty_link import Link
from redis_cluster import RedisCluster, redis_cluster

MODEL = "0123456789abcdef"
FINGERPRINT = "f" * 32


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
            Change('{"adapter":"atp"}', state, answer),
            adapter="atp",
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


class Replica:
    """One session of one client, and what it observed."""

    def __init__(
        self,
        store: StateStore,
        limits: Limits,
        client: str,
        model: str,
        machine: Toy,
        policy: Policy,
        replays: ReplayQueue,
    ) -> None:
        self.store = store
        self.client = ClientScope(client)
        self.model = model
        self.machine = machine
        self.events: list[str] = []
        self.now = 0.0  # seconds that its clock is ahead
        clock = asyncio.get_running_loop().time
        context = Context(
            store,
            limits,
            self.client,
            model,
            machine,
            policy,
            Recorder(self.events.append),
            self,
            clock=lambda: clock() + self.now,
            replays=replays,
        )
        self.session = Session(context)

    def failed(self, task: str, error: Exception) -> None:
        self.events.append(f"{task} failed: {error!r}")

    def succeeded(self, task: str) -> None:
        """Nobody asks."""

    def request(self, key: str | None = None, fingerprint: str = FINGERPRINT, number: int = 0) -> Request:
        return Request(self.client.rid(key) if key else random_rid(), fingerprint, number=number)

    async def apply(self, payload: bytes, key: str | None = None, number: int = 0) -> Applied:
        return await self.session.apply(self.request(key, number=number), batch_of(payload))

    async def rework(self, content: bytes, key: str | None = None) -> Applied:
        """Replace the whole state."""
        return await self.session.apply(self.request(key), partial(self.machine.rework, content=content))

    async def seen(self) -> tuple[int, bytes]:
        """Version, and answer to the probe, of what is durable."""
        looked = await self.session.look(batch_of(PROBE))
        return looked.seq, looked.answer

    async def settled(self) -> None:
        """Wait until nothing goes on in the background, such as the storing of an answer."""
        while running := set(self.session._tasks._running):
            await asyncio.wait(running)

    async def head(self) -> Head | None:
        return (await self.store.load(self.client, self.model)).head


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_server(integration: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedRedis]:
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
    """Make a store, with limits of its own; `url`, `connection` (for `dial`) and `resend` are for faults.

    A `link` goes before both; whoever made it closes it.
    """
    stores: list[StateStore] = []

    def make(
        url: str = redis_server.url,
        connection: dict[str, Any] | None = None,
        link: Cluster | None = None,
        **limits: int,
    ) -> StateStore:
        chosen = Limits(**limits)
        way = link or Server(dial(url, **(connection or {})))
        wire = Wire(way, resend=chosen.resend, jitter_ms=chosen.jitter_ms)
        stores.append(StateStore(wire, chosen))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


@pytest_asyncio.fixture
async def make_wire(redis_server: EmbeddedRedis, admin: Redis) -> AsyncIterator[Callable[..., Wire]]:
    wires: list[Wire] = []

    def make(url: str = redis_server.url, **connection: Any) -> Wire:
        wires.append(Wire(Server(dial(url, **connection))))
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
async def make_replica(make_store: Callable[..., StateStore]) -> AsyncIterator[Callable[..., "Replica"]]:
    """Make a replica that serves `cam-7` by a session; its states take `size` bytes, unless `machine` says more."""
    replicas: list[Replica] = []

    def make(
        size: int = 40,
        machine: Toy | None = None,
        client: str = "cam-7",
        model: str = MODEL,
        policy: Policy = Policy("{}"),  # noqa: B008
        url: str | None = None,
        link: Cluster | None = None,
        replays: ReplayQueue | None = None,
        **limits: int,
    ) -> Replica:
        chosen = {"inline_max": 100, "full_max": 600, "chunk_bytes": 150, "steal_after_ms": 40, **limits}
        store = make_store(**({"url": url} if url else {}), link=link, **chosen)
        machine = machine or Toy(lambda count: size)
        queue = replays or ReplayQueue()
        replicas.append(Replica(store, Limits(**chosen), client, model, machine, policy, queue))
        return replicas[-1]

    yield make
    for replica in replicas:
        await replica.session.aclose()


@pytest.fixture(scope="session")
def cluster_servers(integration: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def cluster(cluster_servers: RedisCluster) -> RedisCluster:
    """A whole and empty cluster."""
    cluster_servers.heal()
    cluster_servers.flush()
    return cluster_servers


@pytest_asyncio.fixture
async def make_cluster_link(cluster: RedisCluster) -> AsyncIterator[Callable[..., Awaitable[Cluster]]]:
    links: list[Cluster] = []

    async def make(**options: Any) -> Cluster:
        links.append(await connect(cluster.url, **options))
        return links[-1]

    yield make
    for each in links:
        await each.aclose()


@pytest_asyncio.fixture
async def cluster_link(make_cluster_link: Callable[..., Awaitable[Cluster]]) -> Cluster:
    return await make_cluster_link()


@pytest_asyncio.fixture
async def link(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Link]:
    upstream = unquote(redis_server.url.removeprefix("unix://"))
    async with Link(upstream, tmp_path_factory.mktemp("link") / "l.sock") as link:
        yield link


@pytest.fixture
def dump(admin: Redis) -> Callable[[], Any]:
    """All that Redis holds, key by key. Its own serialisation would tell the order of hashes, too, which may change."""
    read: dict[bytes, Callable[[bytes], Awaitable[Any]]] = {
        b"hash": admin.hgetall,
        b"string": admin.get,
        b"zset": lambda key: admin.zrange(key, 0, -1, withscores=True),
    }

    async def dump() -> dict[bytes, Any]:
        kinds = {key: await admin.type(key) for key in await admin.keys()}
        return {key: await read[kind](key) for key, kind in kinds.items() if kind != b"none"}  # which is gone by now

    return dump
