"""The safeguards of the protocol, each with the history that breaks it when it is removed (cx n of the protocol)."""

import asyncio

import pytest
from redis.asyncio import Redis

from acclimate_service.state import Limits, StoreFull
from acclimate_service.state.chunks import Chunks
from acclimate_service.state.outcomes import Attempt, Committed, Conflict, Deleted, Gone, Incomplete, Mismatch, Repeat
from acclimate_service.state.records import Basis, Snapshot
from acclimate_service.state.redis.scripts import CHUNK, DELETE

LARGE = {"inline_max": 8, "chunk_bytes": 100}


async def test_cx_1_two_replicas_never_overwrite_each_other(make_driver):
    one, two = make_driver(), make_driver()
    start = await one.committed(state=b"s1")
    await one.committed(start.basis, state=b"s2 of one")
    outcome = await two.commit(start.basis, state=b"s2 of two")
    assert isinstance(outcome, Conflict)
    assert await one.state() == b"s2 of one"
    assert (await two.committed(outcome.basis, state=b"s3 of two")).seq == 3


async def test_cx_3_an_equal_version_is_not_an_equal_history(driver, admin: Redis):
    old = await driver.committed(state=b"old history")
    await admin.delete(driver.client.head(driver.model))  # idle time took the head, its client still lives
    new = await driver.committed(state=b"new history")
    assert (new.seq, new.life) == (old.seq, old.life)
    assert isinstance(await driver.commit(old.basis, state=b"old history, continued"), Conflict)
    assert await driver.state() == b"new history"


async def test_cx_3_a_late_writer_never_resurrects_a_deleted_state(driver):
    old = await driver.committed(state=b"old life")
    await driver.store.delete(driver.client)
    await driver.committed(state=b"new life")
    assert await driver.commit(old.basis, state=b"old life, continued") == Gone()
    assert await driver.state() == b"new life"


async def test_cx_5_a_retry_that_was_admitted_beside_its_original_is_not_applied_again(driver):
    await driver.committed()
    original, retry = driver.attempt("k"), driver.attempt("k")
    admitted = await driver.load(retry.rid)
    assert admitted.verdict(retry.fingerprint) is None
    first = await driver.committed(admitted.basis, original, answer=b"first")
    assert await driver.commit(admitted.basis, retry, answer=b"second") == Repeat(2, driver.model, b"first")
    assert await driver.commit(first.basis, retry, answer=b"second") == Repeat(2, driver.model, b"first")
    assert (await driver.load()).head.seq == 2


async def test_cx_6_a_request_without_a_key_is_applied_once_though_its_reply_is_lost(make_driver, link):
    driver = make_driver(url=link.url)
    start = await driver.committed(state=b"s1")
    attempt = driver.attempt()
    link.fault("lose reply", attempt.tag)
    outcome = await driver.commit(start.basis, attempt, state=b"s2")
    assert outcome == Committed(Basis(start.life, 2, attempt.tag, ""), duplicate=True)
    assert (await driver.load()).head.seq == 2


async def test_cx_7_another_content_is_not_answered_under_the_same_key(driver):
    await driver.committed(attempt=driver.attempt("k"), state=b"s1")
    other = driver.attempt("k", fingerprint="e" * 32)
    assert (await driver.load(other.rid)).verdict(other.fingerprint) == Mismatch()
    assert await driver.commit(attempt=other, state=b"s2") == Mismatch()
    assert await driver.state() == b"s1"


async def test_cx_10_a_repeated_reset_does_not_wipe_what_was_acknowledged_since(driver):
    await driver.committed(state=b"s1")
    reset = driver.attempt("reset")
    assert (await driver.reset(reset)).seq == 2
    await driver.committed(state=b"s3")
    assert (await driver.reset(reset)).duplicate
    assert await driver.reset(driver.attempt("reset")) == Repeat(2, driver.model, None)
    assert await driver.state() == b"s3"


async def test_cx_14_a_head_is_not_extended_without_its_snapshot(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    committed = await driver.committed(state=b"1" * 500)
    head = driver.client.head(driver.model)
    parts = (driver.client.registry, driver.client.snapshot(driver.model, committed.basis.sid))
    for key in (head, *parts):
        await admin.pexpire(key, 60_000)
    assert not (await driver.load()).touched
    assert not (await driver.load(sid="0" * 16)).touched
    assert await admin.pttl(head) <= 60_000
    assert (await driver.load(sid=committed.basis.sid)).touched
    for key in parts:
        assert await admin.pttl(key) > await admin.pttl(head) > Limits().state_ttl_ms - 1000


async def test_cx_15_a_request_admitted_before_a_delete_does_not_recreate_the_client(driver):
    admitted = (await driver.committed()).basis
    await driver.store.delete(driver.client)
    assert await driver.commit(admitted) == Gone()
    assert (await driver.load()).gone


async def test_cx_15_nor_does_one_admitted_before_the_client_existed(driver):
    admitted = (await driver.load()).basis
    await driver.committed()
    await driver.store.delete(driver.client)
    assert await driver.commit(admitted) == Gone()
    assert not (await driver.load()).continues(admitted.life)
    await driver.committed()
    assert await driver.commit(admitted) == Gone()
    assert not (await driver.load()).continues(admitted.life)


async def test_cx_15_but_one_that_met_the_creator_of_its_client_goes_on(driver):
    admitted = (await driver.load()).basis
    await driver.committed()
    assert (await driver.load()).continues(admitted.life)


async def test_cx_16_not_committed_is_not_said_while_a_delayed_copy_may_land(make_driver, link, admin: Redis):
    driver = make_driver(url=link.url)
    start = await driver.committed(state=b"s1")
    attempt = driver.attempt("k")
    delayed = link.fault("hold", attempt.tag)
    await admin.config_set("maxmemory", "1")
    with pytest.raises(StoreFull) as refused:
        await driver.commit(start.basis, attempt, state=b"s2")
    assert refused.value.committed == "unknown"
    await admin.config_set("maxmemory", "0")
    delayed.released.set()
    await delayed.landed.wait()
    assert (await driver.load(attempt.rid)).verdict(attempt.fingerprint) == Repeat(2, driver.model, b"answer")


async def test_cx_16_an_incomplete_upload_settles_nothing_either(make_driver, link, admin: Redis):
    driver = make_driver(url=link.url, **LARGE)
    attempt = driver.attempt()
    delayed = link.fault("hold", attempt.tag)
    repeated = link.fault("stall", attempt.tag)
    commit = asyncio.create_task(driver.commit(Basis(), attempt, state=b"1" * 500))
    await repeated.caught.wait()
    [upload] = await admin.keys("*:s:*")
    await admin.hdel(upload, "0")
    repeated.released.set()
    assert await commit == Incomplete(committed="unknown")
    assert not delayed.landed.is_set()


async def test_cx_17_a_marker_younger_than_key_min_survives_any_number_of_others(make_driver, admin: Redis):
    driver = make_driver(key_cap=3)
    attempt = driver.attempt("early")
    basis = (await driver.committed(attempt=attempt)).basis
    for _ in range(10):
        basis = (await driver.committed(basis)).basis
    assert await driver.commit(attempt=driver.attempt("early")) == Repeat(1, driver.model, b"a")
    assert await admin.hlen(driver.client.markers) == 11


async def test_cx_18_an_incomplete_snapshot_never_becomes_the_state(make_driver, link, admin: Redis):
    driver = make_driver(url=link.url, **LARGE)
    start = await driver.committed(state=b"whole")
    attempt = driver.attempt()
    fault = link.fault("stall", attempt.tag)
    commit = asyncio.create_task(driver.commit(start.basis, attempt, state=b"1" * 500))
    await fault.caught.wait()
    [upload] = await admin.keys("*:s:*")
    await admin.hdel(upload, "2")
    fault.released.set()
    assert await commit == Incomplete(committed=False)
    assert await driver.state() == b"whole"


async def test_cx_19_a_late_copy_of_a_chunk_does_not_shorten_the_life_of_a_live_snapshot(
    make_driver, make_wire, admin: Redis
):
    driver = make_driver(**LARGE)
    committed = await driver.committed(state=b"1" * 500)
    snapshot = driver.client.snapshot(driver.model, committed.basis.sid)
    before, ttl = await admin.dump(snapshot), await admin.pttl(snapshot)
    keys = (driver.client.registry, driver.client.head(driver.model), snapshot)
    reply = await make_wire().run(CHUNK, keys, (committed.life, committed.basis.sid, 0, b"late", 1))
    assert reply.rows == [b"OK"]
    assert await admin.dump(snapshot) == before
    assert await admin.pttl(snapshot) > ttl - 1000


async def test_cx_20_an_upload_nobody_commits_expires(make_wire, driver, admin: Redis):
    chunks = Chunks(make_wire(), Limits(upload_ttl_ms=5000))
    uploaded = await chunks.upload(driver.client, driver.model, "", b"1" * 500)
    assert isinstance(uploaded, Snapshot)
    assert 0 < await admin.pttl(driver.client.snapshot(driver.model, uploaded.sid)) <= 5000


async def test_cx_20_a_delete_that_knows_another_snapshot_is_refused(make_driver, make_wire, dump):
    driver = make_driver(**LARGE)
    committed = await driver.committed(state=b"1" * 500)
    before, client = await dump(), driver.client
    parts = (client.head(driver.model), client.journal(driver.model), client.lease(driver.model))
    keys = (client.registry, client.answers, client.answer_times, *parts, client.snapshot(driver.model, "0" * 16))
    args = (committed.life, "1" * 16, 1000, 1, driver.model, "0" * 16)
    assert (await make_wire().run(DELETE, keys, args)).rows == [b"CONFLICT"]
    assert (await make_wire().run(DELETE, keys[:3], (*args[:3], 0))).rows == [b"CONFLICT"]
    assert await dump() == before


async def test_cx_20_a_delete_takes_a_snapshot_that_was_replaced_meanwhile(make_driver, link, admin: Redis):
    driver, slow = make_driver(**LARGE), make_driver(url=link.url, **LARGE)
    first = await driver.committed(state=b"1" * 500)
    fault = link.fault("stall", first.basis.sid)
    delete = asyncio.create_task(slow.store.delete(driver.client))
    await fault.caught.wait()
    await driver.committed(first.basis, Attempt("0" * 32, "f" * 32), state=b"2" * 500)
    fault.released.set()
    assert await delete == Deleted(existed=True)
    client = driver.client
    assert {key.decode() for key in await admin.keys()} == {client.registry, client.markers, client.marker_times}
