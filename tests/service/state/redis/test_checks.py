"""A Redis that could lose acknowledged state is refused, with every reason."""

import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from acclimate_service.state import Limits, check, check_windows
from acclimate_service.state.errors import StoreUnfit
from acclimate_service.state.redis.checks import Durability, inspect, problems
from acclimate_service.state.redis.embedded import EmbeddedRedis


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


def test_lifetimes_must_cover_requests_and_their_retries():
    check_windows(Limits(), longest_request_ms=600_000, retry_window_ms=600_000)
    with pytest.raises(ValueError, match="state_ttl_ms is 2400000; accepted is more than 2400000"):
        check_windows(Limits(state_ttl_ms=2_400_000), longest_request_ms=600_000, retry_window_ms=1)
    with pytest.raises(ValueError, match="key_min_ms is 900000; accepted is more than 900000"):
        check_windows(Limits(), longest_request_ms=1, retry_window_ms=900_000)
