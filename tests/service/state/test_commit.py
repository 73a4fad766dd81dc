"""Every result of `load`, `commit` and `chunk`."""

import asyncio

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from acclimate_service.state import StateCorrupt
from acclimate_service.state.outcomes import (
    Attempt,
    Committed,
    Conflict,
    Gone,
    Incomplete,
    Mismatch,
    Moved,
    Repeat,
    Used,
)
from acclimate_service.state.records import Basis

LARGE = {"inline_max": 8, "chunk_bytes": 100}


async def test_a_client_nobody_has_seen_has_no_life_and_no_head(driver):
    loaded = await driver.load("0" * 32)
    assert (loaded.life, loaded.gone, loaded.head, loaded.marker, loaded.answer) == ("", False, None, None, None)
    assert loaded.basis == Basis()


async def test_the_first_commit_creates_a_life_and_version_one(driver):
    attempt = driver.attempt("k")
    committed = await driver.committed(attempt=attempt, state=b"s1", answer=b"a1")
    loaded = await driver.load(attempt.rid)
    assert committed == Committed(Basis(loaded.life, 1, attempt.tag, ""))
    assert (loaded.head.seq, loaded.head.base, loaded.head.tag) == (1, 1, attempt.tag)
    assert (loaded.head.fence, loaded.head.journal_entries, loaded.head.journal_bytes) == ("", 0, 0)
    assert loaded.head.config == '{"adapter":"atp"}'
    assert (loaded.marker.seq, loaded.marker.life, loaded.answer) == (1, loaded.life, b"a1")
    assert await driver.state() == b"s1"


async def test_a_commit_goes_on_from_the_commit_before_without_a_read(driver):
    first = await driver.committed(Basis(), state=b"s1")
    second = await driver.committed(first.basis, state=b"s2")
    assert (second.seq, second.life) == (2, first.life)
    assert await driver.state() == b"s2"


async def test_the_same_attempt_twice_is_a_duplicate(driver):
    attempt = driver.attempt("k")
    first = await driver.committed(Basis(), attempt)
    assert await driver.commit(Basis(), attempt) == Committed(first.basis, duplicate=True)
    assert (await driver.load()).head.seq == 1


async def test_a_second_creator_meets_a_conflict_that_carries_the_head(driver):
    first = await driver.committed(Basis(), state=b"s1")
    outcome = await driver.commit(Basis())
    assert isinstance(outcome, Conflict)
    assert outcome.basis == first.basis
    assert (await driver.store.read_state(driver.client, outcome.head)).state == b"s1"


async def test_another_attempt_of_an_applied_request_is_a_replay_of_its_answer(driver):
    first = await driver.committed(attempt=driver.attempt("k"), answer=b"first answer")
    outcome = await driver.commit(attempt=driver.attempt("k"))
    assert outcome == Repeat(first.seq, driver.model, b"first answer")


async def test_a_replay_says_when_its_answer_was_never_stored(make_driver):
    driver = make_driver(answer_max=5)
    await driver.committed(attempt=driver.attempt("long"), answer=b"123456")
    await driver.committed(attempt=driver.attempt("none"), answer=b"")
    assert await driver.commit(attempt=driver.attempt("long")) == Repeat(1, driver.model, None)
    assert await driver.commit(attempt=driver.attempt("none")) == Repeat(2, driver.model, None)


async def test_a_replay_names_the_model_it_was_written_for(driver, make_driver):
    other = make_driver(model="f" * 16)
    await driver.committed(attempt=driver.attempt("k"))
    assert await other.commit(attempt=other.attempt("k")) == Repeat(1, driver.model, b"a")


async def test_a_key_used_before_a_delete_is_refused_after_it(driver):
    await driver.committed(attempt=driver.attempt("k"))
    await driver.store.delete(driver.client)
    attempt = driver.attempt("k")
    assert (await driver.load(attempt.rid)).verdict(attempt.fingerprint) == Used()
    assert await driver.commit(attempt=attempt) == Used()
    await driver.committed()
    assert await driver.commit(attempt=attempt) == Used()


async def test_a_state_of_a_deleted_life_is_gone(driver):
    first = await driver.committed()
    await driver.store.delete(driver.client)
    assert await driver.commit(first.basis) == Gone()


async def test_a_deleted_client_starts_a_new_life_at_version_one(driver):
    first = await driver.committed(state=b"old")
    await driver.store.delete(driver.client)
    tombstone = await driver.load()
    second = await driver.committed(tombstone.basis, state=b"new")
    loaded = await driver.load()
    assert second.seq == 1
    assert second.life not in {first.life, tombstone.life}
    assert (loaded.gone, loaded.origin) == (False, tombstone.life)
    assert await driver.state() == b"new"


async def test_model_scopes_of_a_client_share_its_life_but_not_its_version(driver, make_driver):
    other = make_driver(model="f" * 16)
    first = await driver.committed()
    await driver.committed()
    assert (await other.committed(state=b"other")).basis.seq == 1
    assert (await other.load()).life == first.life
    assert await driver.state() == b"state"


async def test_a_large_state_is_stored_in_chunks_and_read_back(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    state = bytes(range(256)) * 5
    committed = await driver.committed(state=state)
    head = (await driver.load()).head
    assert head.inline == b""
    assert head.snapshot.sid == committed.basis.sid
    assert head.snapshot.chunks == 14 == await admin.hlen(driver.client.snapshot(driver.model, head.sid))
    assert await driver.state() == state


async def test_a_new_snapshot_replaces_the_old_one(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    first = await driver.committed(state=b"1" * 500)
    second = await driver.committed(first.basis, state=b"2" * 300)
    small = await driver.committed(second.basis, state=b"3")
    for sid in (first.basis.sid, second.basis.sid):
        assert not await admin.exists(driver.client.snapshot(driver.model, sid))
    assert small.basis.sid == ""
    assert await driver.state() == b"3"


async def test_a_basis_with_another_snapshot_is_a_conflict(make_driver):
    driver = make_driver(**LARGE)
    first = await driver.committed(state=b"1" * 500)
    wrong = Basis(first.life, first.seq, first.basis.tag, "")
    outcome = await driver.commit(wrong)
    assert isinstance(outcome, Conflict)
    assert outcome.basis == first.basis


async def test_a_snapshot_that_moved_while_it_was_read_says_so(make_driver):
    driver = make_driver(**LARGE)
    await driver.committed(state=b"1" * 500)
    stale = (await driver.load()).head
    second = await driver.committed(state=b"2" * 500)
    moved = await driver.store.read_state(driver.client, stale)
    assert isinstance(moved, Moved)
    assert moved.loaded.basis == second.basis


async def test_a_missing_chunk_under_a_live_head_is_corruption(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    committed = await driver.committed(state=b"1" * 500)
    await admin.hdel(driver.client.snapshot(driver.model, committed.basis.sid), "3")
    with pytest.raises(StateCorrupt, match="misses a chunk"):
        await driver.state()


async def test_an_upload_into_a_deleted_life_is_gone(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    first = await driver.committed()
    await driver.store.delete(driver.client)
    assert await driver.commit(first.basis, state=b"1" * 500) == Gone()
    assert not await admin.keys("*:s:*")


async def test_an_upload_by_a_second_creator_is_a_conflict(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    first = await driver.committed()
    outcome = await driver.commit(Basis(), state=b"1" * 500)
    assert isinstance(outcome, Conflict)
    assert outcome.basis == first.basis
    assert not await admin.keys("*:s:*")


async def test_a_description_tells_version_size_and_time_left(driver):
    assert await driver.store.describe(driver.client, driver.model) is None
    await driver.committed(state=b"1234")
    described = await driver.store.describe(driver.client, driver.model)
    assert (described.seq, described.config) == (1, '{"adapter":"atp"}')
    assert described.length > 4
    assert 0 < described.ttl_ms <= 7 * 24 * 3600 * 1000


async def test_all_keys_of_a_client_share_one_cluster_slot(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    await driver.committed(state=b"1" * 500)
    keys = await admin.keys()
    assert len(keys) == 7
    assert len({key_slot(key) for key in keys}) == 1


async def test_a_verdict_tells_the_four_cases_apart(driver):
    attempt = driver.attempt("k")
    assert (await driver.load(attempt.rid)).verdict(attempt.fingerprint) is None
    await driver.committed(attempt=attempt)
    loaded = await driver.load(attempt.rid)
    assert loaded.verdict(attempt.fingerprint) == Repeat(1, driver.model, b"a")
    assert loaded.verdict("e" * 32) == Mismatch()


async def test_scripts_are_sent_again_in_full_to_a_redis_that_forgot_them(driver, admin: Redis):
    await driver.committed()
    await admin.script_flush()
    assert (await driver.committed()).seq == 2


async def test_an_upload_that_lost_a_chunk_is_incomplete(make_driver, link, admin: Redis):
    driver = make_driver(url=link.url, **LARGE)
    attempt = Attempt("0" * 32, "f" * 32)
    fault = link.fault("stall", attempt.tag)
    commit = asyncio.create_task(driver.commit(Basis(), attempt, state=b"1" * 500))
    await fault.caught.wait()
    [upload] = await admin.keys("*:s:*")
    await admin.hdel(upload, "0")
    fault.released.set()
    assert await commit == Incomplete(committed=False)
    assert (await driver.load()).life == ""


async def test_a_choice_is_noted_only_of_a_client_that_still_has_the_configuration(driver):
    await driver.committed()
    for config, chosen in (("another", ""), ('{"adapter":"atp"}', '{"adapter":"atp"}')):
        await driver.store.note_choice(driver.client, driver.model, config)
        assert (await driver.store.describe(driver.client, driver.model)).chosen == chosen
