"""Every result of `flip`, `answer` and `undo`, and what all scripts of the journal have in common."""

from dataclasses import replace

import pytest
from journal_owner import LARGE, STATE, journal_of, open_journal, owner_of
from redis.asyncio import Redis

from acclimate_service.state import StoreFull
from acclimate_service.state.journal import Answered, Fenced, Flipped, Stale, Undone
from acclimate_service.state.outcomes import Conflict, Gone, Incomplete, Repeat
from acclimate_service.state.records import Snapshot


async def test_a_flip_drops_the_journal_up_to_its_version_and_keeps_the_rest(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    await owner.append()
    taken = owner.basis
    await owner.append(content=b"later")
    assert await owner.snapshot(taken) == Flipped()
    head = (await driver.load()).head
    assert (head.seq, head.base, head.journal_entries) == (3, 2, 1)
    assert await journal_of(driver, admin) == {b"3", b"3m"}
    assert head.journal_bytes == len(await admin.hget(driver.client.journal(driver.model), "3"))
    assert (await driver.store.read_state(driver.client, head)).state == STATE


async def test_a_flip_replaces_the_snapshot_before(make_driver, admin: Redis):
    owner = await owner_of(make_driver(**LARGE))
    for _ in range(2):
        await owner.append()
        await owner.snapshot()
    assert len(await admin.keys("*:s:*")) == 1
    names = await admin.hkeys(owner.driver.client.registry)
    assert not [name for name in names if name.startswith(b"u:")]  # an upload is none any more


async def test_a_flip_is_refused_to_whoever_lost_the_journal(make_driver):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    await owner_of(driver, "2" * 16, force=True)
    assert await owner.snapshot() == Fenced()


async def test_a_stale_snapshot_is_refused(make_driver):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    await owner.append()
    now = owner.basis
    assert await owner.snapshot(replace(now, tag="0" * 16)) == Stale()
    assert await owner.snapshot(replace(now, seq=3)) == Stale()
    assert await owner.snapshot(replace(now, seq=1)) == Stale()
    assert await owner.snapshot(replace(now, sid="0" * 16)) == Stale()
    assert await owner.snapshot() == Flipped()
    assert await owner.snapshot() == Stale()


async def test_a_snapshot_of_a_deleted_life_is_gone(make_driver):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    where = driver.client, driver.model
    snapshot, sealed = await owner.journal.upload(*where, owner.basis, "atp", STATE)
    await driver.store.delete(driver.client)
    assert await owner.journal.flip(*where, owner.basis, owner.fence, snapshot, sealed) == Gone()
    assert await owner.journal.upload(*where, owner.basis, "atp", STATE) == Gone()


async def test_a_snapshot_that_lacks_a_chunk_is_incomplete(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    where = driver.client, driver.model
    snapshot, sealed = await owner.journal.upload(*where, owner.basis, "atp", STATE)
    await admin.hdel(driver.client.snapshot(driver.model, snapshot.sid), "1")
    outcome = await owner.journal.flip(*where, owner.basis, owner.fence, snapshot, sealed)
    assert outcome == Incomplete(committed=False)


async def test_the_same_flip_twice_is_one(make_driver):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    where = driver.client, driver.model
    snapshot, sealed = await owner.journal.upload(*where, owner.basis, "atp", STATE)
    for _ in range(2):
        assert await owner.journal.flip(*where, owner.basis, owner.fence, snapshot, sealed) == Flipped()
    assert isinstance(snapshot, Snapshot)


async def test_the_first_answer_of_an_entry_stays(driver):
    owner = await owner_of(driver)
    attempt = driver.attempt("k")
    await owner.append(attempt=attempt)
    answer = owner.journal.answer
    assert await answer(driver.client, driver.model, attempt.rid, attempt.tag, b"first") == Answered(None)
    assert await answer(driver.client, driver.model, attempt.rid, attempt.tag, b"second") == Answered(b"first")
    assert await owner.append("k") == Repeat(1, driver.model, b"first")


async def test_an_answer_to_another_attempt_or_life_is_gone(driver):
    owner = await owner_of(driver)
    attempt = driver.attempt("k")
    await owner.append(attempt=attempt)
    answer = owner.journal.answer
    assert await answer(driver.client, driver.model, attempt.rid, "0" * 16, b"a") == Gone()
    assert await answer(driver.client, driver.model, "0" * 32, attempt.tag, b"a") == Gone()
    await driver.store.delete(driver.client)
    assert await answer(driver.client, driver.model, attempt.rid, attempt.tag, b"a") == Gone()


async def test_an_answer_too_large_to_store_still_guards_its_entry(make_driver):
    driver = make_driver(answer_max=3)
    owner = await owner_of(driver)
    before, attempt = owner.basis, driver.attempt("k")
    await owner.append(attempt=attempt)
    await owner.journal.answer(driver.client, driver.model, attempt.rid, attempt.tag, b"1234")
    assert await owner.append("k") == Repeat(1, driver.model, None)
    assert await owner.undo(before, attempt) == Answered()


async def test_an_undone_entry_was_never_there(driver, admin: Redis):
    await driver.committed(state=b"base")
    owner = await owner_of(driver)
    before, attempt = owner.basis, driver.attempt("k")
    await owner.append(attempt=attempt)
    undone = await owner.undo(before, attempt)
    assert isinstance(undone, Undone)
    loaded = await driver.load(attempt.rid)
    assert (loaded.basis, loaded.marker) == (undone.basis, None)
    assert undone.basis.seq == before.seq
    assert undone.basis.tag not in {before.tag, attempt.tag}
    assert (loaded.head.journal_entries, loaded.head.journal_bytes) == (0, 0)
    assert await journal_of(driver, admin) == set()
    assert await admin.zscore(driver.client.marker_times, attempt.rid) is None
    owner.basis = undone.basis
    assert (await owner.append("k")).basis.seq == 2


async def test_an_answered_entry_is_not_undone(driver):
    owner = await owner_of(driver)
    before, attempt = owner.basis, driver.attempt("k")
    await owner.append(attempt=attempt)
    await owner.journal.answer(driver.client, driver.model, attempt.rid, attempt.tag, b"told")
    assert await owner.undo(before, attempt) == Answered()
    assert (await driver.load()).head.seq == 1


async def test_only_the_last_entry_is_undone_and_only_by_its_writer(driver):
    owner = await owner_of(driver)
    before, attempt = owner.basis, driver.attempt("k")
    await owner.append(attempt=attempt)
    await owner.append()
    assert isinstance(await owner.undo(before, attempt), Conflict)
    await owner_of(driver, "2" * 16, force=True)
    assert await owner.undo(before, attempt) == Fenced()
    await driver.store.delete(driver.client)
    assert await owner.undo(before, attempt) == Gone()


async def test_the_same_undo_twice_is_one(make_driver, link):
    driver = make_driver(url=link.url)
    owner = await owner_of(driver)
    before, attempt = owner.basis, driver.attempt("k")
    await owner.append(attempt=attempt)
    await owner.append()
    last = driver.attempt("last")
    before, _ = owner.basis, await owner.append(attempt=last)
    link.fault("lose reply", last.tag)
    assert isinstance(await owner.undo(before, last), Undone)
    assert (await driver.load()).head.seq == 2


async def test_every_key_of_a_journal_expires_and_the_head_goes_first(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append("k")
    await owner.snapshot()
    attempt = driver.attempt()
    await owner.append(attempt=attempt)
    await owner.journal.answer(driver.client, driver.model, attempt.rid, attempt.tag, b"a")
    lives = {key.decode(): await admin.pttl(key) for key in await admin.keys()}
    assert len(lives) == 9
    assert all(life > 0 for life in lives.values())
    parts = [life for key, life in lives.items() if key.endswith((":r", ":j")) or ":s:" in key]
    assert len(parts) == 3
    assert min(parts) > lives[driver.client.head(driver.model)]


async def test_an_append_that_knows_another_snapshot_does_not_extend_the_head(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    old = owner.basis
    await owner.snapshot()
    owner.basis = old
    await admin.pexpire(driver.client.head(driver.model), 60_000)
    outcome = await owner.append()
    assert (outcome.basis.seq, outcome.touched) == (2, False)
    assert await admin.pttl(driver.client.head(driver.model)) <= 60_000
    assert await admin.pttl(driver.client.journal(driver.model)) > 60_000


async def test_a_reset_takes_the_journal_from_its_writer(driver, admin: Redis):
    owner = await owner_of(driver)
    await owner.append()
    await driver.reset()
    assert await owner.append() == Fenced()
    assert await journal_of(driver, admin) == set()


async def test_a_delete_takes_journal_lease_and_snapshot_along(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    await owner.snapshot()
    await owner.append()
    await driver.store.delete(driver.client)
    client = driver.client
    assert {key.decode() for key in await admin.keys()} == {client.registry, client.markers, client.marker_times}


async def test_i10_a_full_redis_refuses_open_append_and_chunk_whole(make_driver, admin: Redis, dump):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    lease = driver.client.lease(driver.model).encode()
    before = await dump()
    await admin.config_set("maxmemory", "1")
    for refused in (owner.append(), open_journal(driver, force=True), owner.snapshot()):
        with pytest.raises(StoreFull) as full:
            await refused
        assert full.value.committed is False
    after = await dump()
    assert {**after, lease: b""} == {**before, lease: b""}


async def test_a_full_redis_still_flips_undoes_and_releases(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    owner = await owner_of(driver)
    await owner.append()
    taken, where = owner.basis, (driver.client, driver.model)
    snapshot, sealed = await owner.journal.upload(*where, taken, "atp", STATE)
    attempt = driver.attempt()
    await owner.append(attempt=attempt)
    await admin.config_set("maxmemory", "1")
    assert await owner.journal.flip(*where, taken, owner.fence, snapshot, sealed) == Flipped()
    assert isinstance(await owner.undo(taken, attempt), Undone)
    await owner.journal.release(*where, owner.fence)
    head = (await driver.load()).head
    assert (head.seq, head.base) == (1, 1)


async def test_entries_are_read_a_few_at_a_time(make_driver):
    driver = make_driver(chunk_bytes=100, read_chunks=2)
    owner = await owner_of(driver)
    for content in (b"1" * 5, b"2" * 5, b"3" * 500, b"4" * 5):
        await owner.append(content=content)
    head = (await driver.load()).head
    listed = await driver.store.entries.contents(driver.client, head, 4)
    pieces = driver.store.entries.pieces(listed)
    assert [[each.seq for each in piece] for piece in pieces] == [[1, 2], [3], [4]]
    assert [each.seq for each in await driver.store.entries.fetch(driver.client, driver.model, listed[:2])] == [1, 2]
    assert await driver.store.entries.contents(driver.client, head, 5) is None
    gone = replace(listed[3], seq=5)
    assert await driver.store.entries.fetch(driver.client, driver.model, [gone]) is None
    replaced = replace(listed[3], tag="0" * 16)
    assert await driver.store.entries.fetch(driver.client, driver.model, [replaced]) is None
