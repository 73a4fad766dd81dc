"""How long keys, markers and answers live, and what a full Redis does to them."""

import asyncio

import pytest
from redis.asyncio import Redis

from acclimate_service.state import Limits, StoreFull
from acclimate_service.state.outcomes import Committed, Deleted, Repeat
from acclimate_service.state.records import Basis

LARGE = {"inline_max": 8, "chunk_bytes": 100}


async def ttls(admin: Redis) -> dict[str, int]:
    return {key.decode(): await admin.pttl(key) for key in await admin.keys()}


async def test_a_client_that_is_only_reset_remembers_no_more_requests_than_others(make_driver, admin: Redis):
    driver = make_driver(key_cap=3, key_min_ms=1)
    await driver.committed()
    for _ in range(30):
        await driver.reset()
        await asyncio.sleep(0.002)  # younger markers than `key_min_ms` are kept, however many there are
    assert await admin.hlen(driver.client.markers) <= 3 + 1
    assert await admin.zcard(driver.client.marker_times) == await admin.hlen(driver.client.markers)
    assert not await admin.exists(driver.client.answers, driver.client.answer_times), "nor their answers"


async def test_i8_every_key_expires_and_the_head_goes_first(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    await driver.committed(state=b"1" * 500)
    await driver.committed(state=b"2" * 500)
    lives = await ttls(admin)
    assert len(lives) == 7
    assert all(life > 0 for life in lives.values())
    head = lives[driver.client.head(driver.model)]
    state_ttl = Limits().state_ttl_ms
    assert state_ttl - 2000 < head <= state_ttl
    [snapshot] = [life for key, life in lives.items() if ":s:" in key]
    assert min(snapshot, lives[driver.client.registry]) > 1.4 * state_ttl


async def test_i8_holds_after_reset_and_delete(driver, admin: Redis):
    await driver.committed()
    await driver.reset()
    assert all(life > 0 for life in (await ttls(admin)).values())
    await driver.store.delete(driver.client)
    assert all(life > 0 for life in (await ttls(admin)).values())


async def test_a_read_extends_a_state_past_half_of_its_life_only(driver, admin: Redis):
    await driver.committed()
    head = driver.client.head(driver.model)
    assert not (await driver.load()).touched
    await admin.pexpire(head, Limits().state_ttl_ms // 2 - 1)
    assert (await driver.load()).touched
    assert await admin.pttl(head) > Limits().state_ttl_ms - 2000


async def test_a_read_that_names_a_snapshot_of_an_earlier_version_extends_a_state_without_one(driver, admin: Redis):
    """As a replica does that was the last to hear of a change: the state lies in the head by now."""
    await driver.committed()
    head, snapshot = driver.client.head(driver.model), driver.client.snapshot(driver.model, "0" * 16)
    await admin.pexpire(head, Limits().state_ttl_ms // 2 - 1)
    await admin.hset(snapshot, "0", b"of an upload that nobody finished")
    await admin.pexpire(snapshot, 5000)
    assert (await driver.load(sid="0" * 16)).touched
    assert await admin.pttl(head) > Limits().state_ttl_ms - 2000
    assert await admin.pttl(snapshot) <= 5000, "it is none of the state's"


async def test_reading_a_snapshot_extends_it_first(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    committed = await driver.committed(state=b"1" * 500)
    snapshot = driver.client.snapshot(driver.model, committed.basis.sid)
    for key in (snapshot, driver.client.head(driver.model)):
        await admin.pexpire(key, 60_000)
    assert await driver.state() == b"1" * 500
    assert await admin.pttl(snapshot) > Limits().state_ttl_ms


async def test_a_state_that_nobody_uses_is_gone_after_its_ttl(make_driver, admin: Redis):
    driver = make_driver(state_ttl_ms=40)
    await driver.committed(state=b"idle")
    await asyncio.sleep(0.1)
    assert not await admin.exists(driver.client.head(driver.model), driver.client.registry)
    assert (await driver.committed(state=b"new")).seq == 1


async def grow_old(driver, admin: Redis, ms: float) -> None:
    """As if its requests had come so much earlier."""
    times = await admin.zrange(driver.client.marker_times, 0, -1, withscores=True)
    await admin.zadd(driver.client.marker_times, {rid: at - ms for rid, at in times})


async def test_markers_older_than_key_ttl_are_swept_eight_at_a_time(make_driver, admin: Redis):
    driver, later = make_driver(), make_driver(key_ttl_ms=60_000, key_min_ms=10_000)
    for _ in range(10):
        await driver.committed()
    await grow_old(driver, admin, 60_001)
    await later.committed()
    assert await admin.hlen(driver.client.markers) == 3
    assert await admin.zcard(driver.client.marker_times) == 3
    assert await admin.hlen(driver.client.answers) == 3


async def test_markers_above_the_cap_go_once_they_are_older_than_key_min(make_driver, admin: Redis):
    driver = make_driver(key_cap=2, key_min_ms=30_000)
    early = driver.attempt("early")
    await driver.committed(attempt=early)
    await driver.committed()
    await grow_old(driver, admin, 30_001)
    await driver.committed(answer=b"")
    assert await admin.hlen(driver.client.markers) == 2
    assert not await admin.hexists(driver.client.markers, early.rid)
    assert isinstance(await driver.commit(attempt=driver.attempt("early")), Committed)


async def test_markers_without_an_answer_are_swept_too(make_driver, admin: Redis):
    driver, later = make_driver(), make_driver(key_ttl_ms=60_000, key_min_ms=10_000)
    await driver.committed(answer=b"")
    await grow_old(driver, admin, 60_001)
    await later.committed(answer=b"")
    assert await admin.hlen(driver.client.markers) == 1


async def test_the_oldest_answers_go_first_once_they_take_too_many_bytes(make_driver, admin: Redis):
    driver = make_driver(answer_bytes=25)
    keys = ("one", "two", "three")
    for key in keys:
        await driver.committed(attempt=driver.attempt(key), answer=b"x" * 10)
    outcomes = [await driver.commit(attempt=driver.attempt(key)) for key in keys]
    assert outcomes == [Repeat(1, driver.model, None), *(Repeat(n, driver.model, b"x" * 10) for n in (2, 3))]
    assert await admin.hget(driver.client.registry, "ab") == b"20"
    assert await admin.zcard(driver.client.answer_times) == 2


async def test_an_answer_above_the_whole_budget_is_not_kept(make_driver, admin: Redis):
    driver = make_driver(answer_bytes=25)
    await driver.committed(answer=b"x" * 26)
    assert await admin.hget(driver.client.registry, "ab") == b"0"
    assert not await admin.exists(driver.client.answers, driver.client.answer_times)


async def test_bytes_of_answers_that_expired_are_no_longer_counted(driver, admin: Redis):
    await driver.committed(answer=b"x" * 10)
    await admin.delete(driver.client.answers, driver.client.answer_times)
    await driver.committed(answer=b"x" * 7)
    assert await admin.hget(driver.client.registry, "ab") == b"7"


@pytest.mark.parametrize("state", [b"new", b"1" * 500], ids=["inline", "chunked"])
async def test_i10_a_full_redis_refuses_a_commit_whole(make_driver, admin: Redis, dump, state: bytes):
    driver = make_driver(**LARGE)
    start = await driver.committed(state=b"start")
    before = await dump()
    await admin.config_set("maxmemory", "1")
    with pytest.raises(StoreFull) as refused:
        await driver.commit(start.basis, state=state)
    assert refused.value.committed is False
    assert await dump() == before
    await admin.config_set("maxmemory", "0")
    assert (await driver.committed(start.basis, state=state)).seq == 2


async def test_i10_a_full_redis_creates_no_client(driver, admin: Redis):
    await admin.config_set("maxmemory", "1")
    with pytest.raises(StoreFull):
        await driver.commit(Basis())
    assert not await admin.keys()


async def test_a_full_redis_still_loads_resets_and_deletes(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    await driver.committed(state=b"1" * 500)
    await admin.config_set("maxmemory", "1")
    assert await driver.state() == b"1" * 500
    assert (await driver.reset()).seq == 2
    assert await driver.store.delete(driver.client) == Deleted(existed=True)
    assert (await driver.load()).gone
