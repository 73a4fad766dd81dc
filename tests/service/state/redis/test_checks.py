"""A Redis that could lose acknowledged state is refused, with every reason."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from acclimate_service.state import Limits, check, check_windows
from acclimate_service.state.errors import StoreUnfit
from acclimate_service.state.redis import checks
from acclimate_service.state.redis.checks import Durability, Probe, inspect, problems
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state.redis.wire import Wire
from acclimate_service.state.tasks import Logged


@pytest_asyncio.fixture
async def own_server(tmp_path) -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis(tmp_path) as server:
        yield server


async def change(server: EmbeddedRedis, *command: str) -> None:
    async with Redis.from_url(server.url) as client:
        await client.execute_command(*command)


async def test_the_embedded_redis_is_fit(make_wire, own_server):
    facts = await check(make_wire(own_server.url))
    assert facts.version >= (6, 2)
    assert (facts.role, facts.replicas, facts.cluster) == ("master", 0, False)
    assert facts.durability == Durability.EVERYSEC


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_redis_that_evicts_is_refused(make_wire, own_server, policy: str):
    await change(own_server, "CONFIG", "SET", "maxmemory-policy", policy)
    with pytest.raises(StoreUnfit, match=f"'{policy}'.*set it to noeviction"):
        await check(make_wire(own_server.url))


async def test_a_redis_without_an_append_only_file_is_refused_unless_overridden(make_wire, own_server):
    await change(own_server, "CONFIG", "SET", "appendonly", "no")
    wire = make_wire(own_server.url)
    with pytest.raises(StoreUnfit, match="appendonly yes"):
        await check(wire)
    assert (await check(wire, override=True)).durability == Durability.NONE


async def test_a_replica_is_refused(make_wire, own_server):
    await change(own_server, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnfit, match="role is 'slave'"):
        await check(make_wire(own_server.url))


@pytest.mark.parametrize(("policy", "durability"), [("always", "always"), ("everysec", "everysec"), ("no", "none")])
async def test_durability_follows_appendfsync(make_wire, own_server, policy: str, durability: str):
    await change(own_server, "CONFIG", "SET", "appendfsync", policy)
    assert (await inspect(make_wire(own_server.url))).durability == durability


async def test_where_config_is_forbidden_the_durability_is_unknown(make_wire, own_server):
    await change(own_server, "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-config")
    facts = await check(make_wire(own_server.url.replace("unix://", "unix://app:secret@")))
    assert facts.durability == Durability.UNKNOWN


async def test_all_reasons_are_named_at_once(make_wire, own_server):
    facts = await inspect(make_wire(own_server.url))
    worst = dataclasses.replace(
        facts, version=(6, 0, 9), role="slave", aof_enabled=False, aof_healthy=False, maxmemory_policy="volatile-lru"
    )
    found = problems(worst)
    assert len(found) == 5
    assert "6.0.9" in found[0]
    assert problems(facts) == ()


@pytest_asyncio.fixture
async def make_probe(make_wire):
    probes = []

    async def make(url, **options):
        wire = make_wire(url)
        probes.append(Probe(wire, await inspect(wire), Logged(), tenant="default", **options))
        return probes[-1]

    yield make
    for probe in probes:
        await probe.aclose()


@pytest.fixture
def always_looks(monkeypatch):
    """A probe that was answered just before is no answer."""
    monkeypatch.setattr(checks, "EVERY_S", 0.0)


def setting(name: str, refusing: str, accepting: str, says: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    return ("CONFIG", "SET", name, refusing), ("CONFIG", "SET", name, accepting), says


REFUSALS = {
    "a full memory": setting("maxmemory", "1", "0", "Redis is full"),
    "too few replicas": setting("min-replicas-to-write", "1", "0", "NOREPLICAS"),
    "a replica": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "read only replica"),
    "no right to write": (("ACL", "SETUSER", "default", "-set"), ("ACL", "SETUSER", "default", "+@all"), "can't run"),
    "no right to scripts": (("ACL", "SETUSER", "default", "-evalsha"), ("ACL", "SETUSER", "default", "+@all"), "perm"),
}


@pytest.mark.usefixtures("always_looks")
@pytest.mark.parametrize(("refuse", "accept", "says"), REFUSALS.values(), ids=REFUSALS)
async def test_whatever_refuses_a_change_is_an_obstacle_with_its_reason(own_server, make_probe, refuse, accept, says):
    probe = await make_probe(own_server.url)
    assert await probe.obstacle() is None
    await change(own_server, *refuse)
    assert says in await probe.obstacle()
    await change(own_server, *accept)
    assert await probe.obstacle() is None


@pytest.mark.usefixtures("always_looks")
async def test_a_redis_that_hangs_is_an_obstacle_in_time(own_server, make_probe):
    probe = await make_probe(own_server.url)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(5):
            assert await probe.obstacle() == "Redis does not answer within 1 s"
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    async with asyncio.timeout(20):
        while await probe.obstacle() is not None:
            pass


async def test_who_asks_soon_after_another_is_told_the_same(own_server, make_probe):
    probe = await make_probe(own_server.url)
    assert set(await asyncio.gather(*(probe.obstacle() for _ in range(50)))) == {None}
    async with Redis.from_url(own_server.url) as client:
        assert (await client.info("commandstats"))["cmdstat_set"]["calls"] == 1


@pytest.mark.usefixtures("always_looks")
async def test_after_a_reconnection_redis_is_asked_again_what_it_is(own_server, make_probe):
    probe, trusting = await make_probe(own_server.url), await make_probe(own_server.url, override=True)
    await change(own_server, "CONFIG", "SET", "appendfsync", "always")
    assert (await probe.obstacle(), probe.facts.durability) == (None, "everysec")
    probe.reconnected()
    assert (await probe.obstacle(), probe.facts.durability) == (None, "always")
    await change(own_server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    for each in (probe, trusting):
        each.reconnected()
    assert "set it to noeviction" in await probe.obstacle()
    assert await trusting.obstacle() is None
    await change(own_server, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert await probe.obstacle() is None, "what is unfit is asked until it is fit"


@pytest.mark.usefixtures("always_looks")
async def test_of_a_cluster_each_master_is_tried_and_one_that_takes_changes_is_enough(cluster, cluster_link):
    wire = Wire(cluster_link)
    probe, masters = Probe(wire, await inspect(wire), Logged(), tenant="default"), cluster.masters
    assert {wire.server_of(key) for key in probe._keys()} == set(wire.masters)
    try:
        for master in masters:
            assert await probe.obstacle() is None
            master.client.config_set("min-replicas-to-write", 9)
        assert "NOREPLICAS" in await probe.obstacle()
    finally:
        for master in masters:
            master.client.config_set("min-replicas-to-write", 0)
        await probe.aclose()


def test_lifetimes_must_cover_requests_and_their_retries():
    check_windows(Limits(), longest_request_ms=600_000, retry_window_ms=600_000)
    with pytest.raises(ValueError, match="state_ttl_ms is 2400000; accepted is more than 2400000"):
        check_windows(Limits(state_ttl_ms=2_400_000), longest_request_ms=600_000, retry_window_ms=1)
    with pytest.raises(ValueError, match="key_min_ms is 900000; accepted is more than 900000"):
        check_windows(Limits(), longest_request_ms=1, retry_window_ms=900_000)
