"""What callers see when a master of a cluster is replaced, and what becomes of what they were told."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from checker.toy import PROBE, answer_after
from redis_cluster import RedisCluster, Server, until

from acclimate_service.state import Applied, Change, ClientScope, Limits, StateError, StateStore, Wire, random_rid
from acclimate_service.state.outcomes import Attempt, Committed
from acclimate_service.state.redis.cluster import Cluster

MODEL = "0123456789abcdef"
CLIENTS = 20
LONGEST = 8.0
"""Seconds that a request may take while a master is replaced."""


@dataclass
class Caller:
    """Sends the batches of one client, and holds the session to what it says of them."""

    replica: object
    history: list[bytes] = field(default_factory=list)
    lost: int = 0
    longest: float = 0.0
    refused: list[StateError] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        clock, number = asyncio.get_running_loop().time, 0
        while not stop.is_set():
            payload, begun = b"%d" % number, clock()
            self.check(payload, await self.send(payload, f"k{number}"))
            self.longest = max(self.longest, clock() - begun)
            number += 1
            await asyncio.sleep(0.005)

    async def send(self, payload: bytes, key: str) -> Applied:
        while True:
            try:
                return await self.replica.apply(payload, key)
            except StateError as error:
                self.refused.append(error)
                await asyncio.sleep(0.1)

    def check(self, payload: bytes, applied: Applied) -> None:
        """It goes on from all that was acknowledged, or from a beginning of it, and says so."""
        lost = len(self.history) - (applied.seq - 1)
        said = applied.lost if applied.status == "rolled_back" else 0
        assert lost == said, f"{lost} versions lost, {said} said: {applied}"
        self.lost += lost
        self.history = [*self.history[: applied.seq - 1], payload]
        assert applied.answer == answer_after(*self.history)

    async def conclude(self) -> None:
        assert await self.replica.seen() == (len(self.history), answer_after(*self.history, PROBE))


@pytest_asyncio.fixture
async def callers(cluster_link: Cluster, make_replica) -> list[Caller]:
    """Half of them with states that are written whole, half with a journal."""
    return [Caller(make_replica((40, 1000)[n % 2], client=f"c{n}", link=cluster_link)) for n in range(CLIENTS)]


async def under_load(callers: list[Caller], trouble: Callable[[], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    running = [asyncio.create_task(caller.run(stop)) for caller in callers]
    await asyncio.sleep(0.2)
    await trouble()
    await asyncio.sleep(0.2)
    stop.set()
    await asyncio.gather(*running)
    for caller in callers:
        await caller.conclude()
    print(f"{sum(len(caller.history) for caller in callers)} batches, {sum(caller.lost for caller in callers)} lost,")
    print(
        f"longest {max(caller.longest for caller in callers):.1f} s, refused {[caller.refused for caller in callers]}"
    )


async def replaced(cluster: RedisCluster, master: Server, heir: Server) -> None:
    await asyncio.to_thread(until, lambda: heir.leads)
    master.start()  # in this thread: a server ends with the one that started it
    await asyncio.to_thread(until, cluster.healed)


async def test_a_change_waits_for_its_replicas_and_is_counted_if_they_are_too_few(cluster_link):
    client = ClientScope("cam-7")
    for replicas, missed in ((1, 0), (2, 1)):
        wire = Wire(cluster_link, replicas=replicas, wait_ms=200)
        store = StateStore(wire, Limits())
        loaded = await store.load(client, MODEL)
        attempt = Attempt(random_rid(), "f" * 32)
        change = Change("", b"state", b"")
        assert isinstance(await store.commit(client, MODEL, loaded.basis, attempt, change, adapter="toy"), Committed)
        assert wire.unreplicated == missed


async def test_a_planned_fail_over_goes_unnoticed(cluster, callers):
    async def fail_over() -> None:
        heir = cluster.replica_of(cluster.masters[0])
        heir.client.cluster("failover")
        await asyncio.to_thread(until, lambda: heir.leads)

    await under_load(callers, fail_over)
    assert all(not caller.refused and not caller.lost for caller in callers)
    await asyncio.to_thread(until, cluster.healed)


@pytest.mark.slow
async def test_a_killed_master_is_replaced_while_its_callers_wait(cluster, callers):
    async def kill() -> None:
        master = cluster.masters[0]
        heir = cluster.replica_of(master)
        master.kill()
        await replaced(cluster, master, heir)

    await under_load(callers, kill)
    assert all(not caller.refused for caller in callers)
    assert max(caller.longest for caller in callers) < LONGEST


@pytest.mark.slow
async def test_what_a_killed_master_had_told_nobody_is_lost_and_said(cluster, callers):
    async def kill_unheard() -> None:
        master = cluster.masters[0]
        heir = cluster.replica_of(master)
        os.kill(heir.process.pid, signal.SIGSTOP)
        master.client.client_kill_filter(_type="replica")
        await asyncio.sleep(0.2)
        master.kill()
        os.kill(heir.process.pid, signal.SIGCONT)
        await replaced(cluster, master, heir)

    await under_load(callers, kill_unheard)
    assert sum(caller.lost for caller in callers) > 0
    assert max(caller.longest for caller in callers) < LONGEST


@pytest.mark.slow
async def test_a_master_that_hangs_is_replaced_as_one_that_died(cluster, callers):
    async def hang() -> None:
        master = cluster.masters[0]
        heir = cluster.replica_of(master)
        os.kill(master.process.pid, signal.SIGSTOP)
        await asyncio.to_thread(until, lambda: heir.client.info("replication")["role"] == "master")
        os.kill(master.process.pid, signal.SIGCONT)
        await asyncio.to_thread(until, cluster.healed)

    await under_load(callers, hang)
    assert max(caller.longest for caller in callers) < LONGEST
