"""What a caller learns, and what Redis holds, when the connection between them fails."""

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from acclimate_service.state import ClientScope, StoreUnavailable
from acclimate_service.state.outcomes import Committed, Conflict, Repeat
from acclimate_service.state.records import Basis


async def test_a_lost_reply_is_asked_for_again(make_driver, link):
    driver = make_driver(url=link.url)
    await driver.committed()
    attempt = driver.attempt()
    link.fault("lose reply", attempt.tag)
    link.fault("lose reply", attempt.tag)
    outcome = await driver.commit(attempt=attempt)
    assert isinstance(outcome, Committed)
    assert (outcome.seq, outcome.duplicate) == (2, True)


async def test_a_change_without_any_reply_is_unknown_and_its_retry_is_a_replay(make_driver, link):
    driver = make_driver(url=link.url, resend=1)
    start = await driver.committed()
    attempt = driver.attempt("k")
    for _ in range(2):
        link.fault("lose reply", attempt.tag)
    with pytest.raises(StoreUnavailable) as lost:
        await driver.commit(start.basis, attempt)
    assert lost.value.committed == "unknown"
    assert await driver.commit(start.basis, driver.attempt("k")) == Repeat(2, driver.model, b"answer")


async def test_a_reply_that_does_not_come_in_time_counts_as_lost(make_driver, link):
    driver = make_driver(url=link.url, connection={"reply_timeout": 0.1})
    await driver.committed()
    attempt = driver.attempt()
    fault = link.fault("stall", attempt.tag)
    outcome = await driver.commit(attempt=attempt)
    assert outcome == Committed(Basis(outcome.life, 2, attempt.tag, ""))
    fault.released.set()  # the first copy lands last
    await asyncio.sleep(0.05)
    assert (await driver.load()).head.seq == 2


async def test_a_redis_that_cannot_be_reached_has_committed_nothing(make_driver, tmp_path):
    driver = make_driver(url=f"unix://{tmp_path}/absent.sock")
    with pytest.raises(StoreUnavailable) as unreachable:
        await driver.commit(Basis())
    assert unreachable.value.committed is False


async def test_a_lost_read_has_committed_nothing(make_driver, link):
    driver = make_driver(url=link.url)
    await driver.committed()
    rid = "0" * 32
    for _ in range(3):
        link.fault("lose reply", rid)
    with pytest.raises(StoreUnavailable) as lost:
        await driver.load(rid)
    assert lost.value.committed is False
    assert (await driver.load(rid)).head.seq == 1


async def test_a_read_only_redis_has_committed_nothing(driver, admin: Redis):
    start = await driver.committed()
    await admin.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(StoreUnavailable, match="takes no changes") as refused:
            await driver.commit(start.basis)
    finally:
        await admin.replicaof("NO", "ONE")
    assert refused.value.committed is False
    assert (await driver.committed(start.basis)).seq == 2


async def test_a_script_that_fails_for_another_reason_is_unknown(driver, admin: Redis):
    start = await driver.committed()
    await admin.delete(driver.client.markers)
    await admin.set(driver.client.markers, "of another type")
    with pytest.raises(StoreUnavailable, match="WRONGTYPE") as failed:
        await driver.commit(start.basis)
    assert failed.value.committed == "unknown"


async def test_a_caller_who_goes_away_leaves_the_change_running_and_the_pool_whole(make_driver, link):
    driver = make_driver(url=link.url, connection={"max_connections": 1})
    start = await driver.committed(state=b"s1")
    attempt = driver.attempt("k")
    fault = link.fault("stall", attempt.tag)
    caller = asyncio.create_task(driver.commit(start.basis, attempt, state=b"s2"))
    await fault.caught.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    fault.released.set()
    loaded = await driver.load(attempt.rid)  # on the one connection there is: it must not read the other's reply
    assert loaded.verdict(attempt.fingerprint) == Repeat(2, driver.model, b"answer")
    assert await driver.state() == b"s2"


async def test_closing_waits_for_what_was_sent(make_driver, driver, link):
    slow = make_driver(url=link.url)
    attempt = slow.attempt("k")
    fault = link.fault("stall", attempt.tag)
    caller = asyncio.create_task(slow.commit(Basis(), attempt))
    await fault.caught.wait()
    caller.cancel()
    closing = asyncio.create_task(slow.store.aclose())
    await asyncio.sleep(0.02)
    assert not closing.done()
    fault.released.set()
    await closing
    assert (await driver.load(attempt.rid)).head.seq == 1


async def test_callers_above_the_number_of_connections_share_them(make_driver, admin: Redis):
    driver = make_driver(connection={"max_connections": 2})
    await driver.committed()
    loads = await asyncio.gather(*(driver.load() for _ in range(50)))
    assert {loaded.head.seq for loaded in loads} == {1}
    assert len(await admin.client_list()) <= 2 + 1


async def test_a_reply_that_is_overdue_ends_the_connection_for_all_who_share_it(make_driver, link):
    driver = make_driver(url=link.url, resend=1, connection={"max_connections": 1, "reply_timeout": 0.1})
    await driver.committed()
    attempts = [driver.attempt("a"), driver.attempt("b")]
    fault = link.fault("stall", attempts[0].tag)
    basis = (await driver.load()).basis
    first = asyncio.create_task(driver.commit(basis, attempts[0]))
    await fault.caught.wait()
    second = await driver.commit(basis, attempts[1])
    outcomes = {type(outcome) for outcome in (await first, second)}
    assert outcomes == {Committed, Conflict}
    fault.released.set()  # the first copy lands last
    await asyncio.sleep(0.05)
    assert (await driver.load()).head.seq == 2


async def test_a_connection_that_redis_closed_is_replaced(driver, admin: Redis):
    await driver.committed()
    await admin.client_kill_filter(_type="normal", skipme=True)
    assert (await driver.load()).head.seq == 1


async def test_replies_of_any_size_reach_the_callers_who_asked_for_them(make_driver):
    driver = make_driver(connection={"max_connections": 1}, inline_max=10_000_000)
    clients = [replace(driver, client=ClientScope(f"c{size}")) for size in (0, 1, 70_000, 3_000_000)]
    states = [bytes([number]) * int(each.client.client[1:]) for number, each in enumerate(clients)]
    for each, state in zip(clients, states, strict=True):
        await each.committed(state=state)
    assert await asyncio.gather(*(each.state() for each in clients * 5)) == states * 5
