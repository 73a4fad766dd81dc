"""Every result of `reset` and `delete`."""

import asyncio

from redis.asyncio import Redis

from acclimate_service.state import Limits
from acclimate_service.state.outcomes import Absent, Attempt, Committed, Conflict, Deleted, Gone, Mismatch, Repeat, Used

LARGE = {"inline_max": 8, "chunk_bytes": 100}


async def test_a_reset_moves_to_an_empty_state_at_the_next_version(driver):
    first = await driver.committed(state=b"s1")
    attempt = driver.attempt("r")
    outcome = await driver.reset(attempt)
    assert isinstance(outcome, Committed)
    assert (outcome.seq, outcome.life) == (2, first.life)
    head = (await driver.load()).head
    assert (head.seq, head.base, head.has_state, head.tag) == (2, 2, False, attempt.tag)
    assert await driver.state() is None
    assert (await driver.committed(outcome.basis, state=b"s3")).seq == 3


async def test_a_reset_keeps_the_configuration_unless_it_brings_another(driver):
    await driver.committed()
    await driver.reset()
    assert (await driver.load()).head.config == '{"adapter":"atp"}'
    await driver.reset(config='{"adapter":"none"}')
    assert (await driver.load()).head.config == '{"adapter":"none"}'


async def test_a_reset_makes_every_older_basis_stale(driver):
    first = await driver.committed()
    await driver.reset()
    assert isinstance(await driver.commit(first.basis), Conflict)


async def test_a_reset_raises_the_fence(driver):
    await driver.committed()
    fences = []
    for _ in range(2):
        await driver.reset()
        fences.append((await driver.load()).head.fence)
    assert [fence.split(".")[0] for fence in fences] == ["1", "2"]
    assert fences[0] != fences[1]


async def test_a_reset_removes_snapshot_journal_and_lease(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    committed = await driver.committed(state=b"1" * 500)
    client, model = driver.client, driver.model
    await admin.hset(client.journal(model), "2", "entry")
    await admin.set(client.lease(model), "1.nonce")
    await driver.reset()
    keys = (client.snapshot(model, committed.basis.sid), client.journal(model), client.lease(model))
    assert await admin.exists(*keys) == 0


async def test_there_is_nothing_to_reset_in_a_client_nobody_has_seen(driver, admin: Redis):
    assert await driver.reset() == Absent()
    assert not await admin.keys()


async def test_nor_in_a_deleted_one(driver):
    await driver.committed()
    await driver.store.delete(driver.client)
    assert await driver.reset() == Absent()
    assert (await driver.load()).gone


async def test_a_reset_under_a_key_with_another_content_is_a_mismatch(driver):
    await driver.committed(attempt=driver.attempt("k"))
    assert await driver.reset(driver.attempt("k", fingerprint="e" * 32)) == Mismatch()
    assert await driver.reset(driver.attempt("k")) == Repeat(1, driver.model, b"a")


async def test_a_reset_under_a_key_of_a_deleted_life_is_refused(driver):
    await driver.committed(attempt=driver.attempt("k"))
    await driver.store.delete(driver.client)
    await driver.committed()
    assert await driver.reset(driver.attempt("k")) == Used()


async def test_a_reset_meeting_another_snapshot_tries_again(make_driver, link):
    driver, slow = make_driver(**LARGE), make_driver(url=link.url, **LARGE)
    first = await driver.committed(state=b"1" * 500)
    attempt = driver.attempt()
    fault = link.fault("stall", attempt.tag)
    reset = asyncio.create_task(slow.reset(attempt))
    await fault.caught.wait()
    await driver.committed(first.basis, state=b"2" * 500)
    fault.released.set()
    assert (await reset).seq == 3
    assert await driver.state() is None


async def test_a_reset_gives_up_after_its_tries(make_driver, link):
    driver, slow = make_driver(**LARGE), make_driver(url=link.url, tries=1, **LARGE)
    await driver.committed(state=b"1" * 500)
    attempt = driver.attempt()
    fault = link.fault("stall", attempt.tag)
    reset = asyncio.create_task(slow.reset(attempt))
    await fault.caught.wait()
    second = await driver.committed(state=b"2" * 500)
    fault.released.set()
    outcome = await reset
    assert isinstance(outcome, Conflict)
    assert outcome.basis == second.basis
    assert await driver.state() == b"2" * 500


async def test_a_reset_that_meets_a_delete_is_gone(make_driver, link):
    driver, slow = make_driver(), make_driver(url=link.url)
    await driver.committed()
    attempt = Attempt("0" * 32, "f" * 32)
    fault = link.fault("stall", attempt.tag)
    reset = asyncio.create_task(slow.reset(attempt))
    await fault.caught.wait()
    await driver.store.delete(driver.client)
    fault.released.set()
    assert await reset == Gone()


async def test_i9_a_delete_leaves_a_tombstone_and_markers_only(make_driver, admin: Redis):
    driver, other = make_driver(**LARGE), make_driver(model="f" * 16)
    await driver.committed(state=b"1" * 500)
    await other.committed()
    assert await driver.store.delete(driver.client) == Deleted(existed=True)
    client = driver.client
    assert {key.decode() for key in await admin.keys()} == {client.registry, client.markers, client.marker_times}
    assert await admin.hkeys(client.registry) == [b"life", b"from", b"gone"]
    assert 0 < await admin.pttl(client.registry) <= Limits().tombstone_ttl_ms


async def test_a_delete_takes_a_snapshot_whose_head_expired_before_it(make_driver, admin: Redis):
    driver = make_driver(**LARGE)
    await driver.committed(state=b"1" * 500)
    await admin.delete(driver.client.head(driver.model))
    await driver.store.delete(driver.client)
    assert not await admin.keys("*:s:*")


async def test_a_delete_takes_uploads_that_nobody_will_finish(make_driver, admin: Redis):
    """Whoever uploaded is another replica, perhaps dead; the client may be alive, deleted before, or not yet there."""
    driver = make_driver(**LARGE)
    client, model = driver.client, driver.model
    for existed in (False, False, True):
        basis = (await driver.committed()).basis if existed else (await driver.load()).basis
        await driver.store.journal.upload(client, model, basis, "atp", b"1" * 500)
        await driver.store.journal.upload(client, "f" * 16, basis, "atp", b"2" * 500)
        assert len(await admin.keys("*:s:*")) == 2
        assert await driver.store.delete(client) == Deleted(existed)
        allowed = {client.registry, client.markers, client.marker_times}
        assert {key.decode() for key in await admin.keys()} <= allowed
        assert await admin.hkeys(client.registry) == [b"life", b"from", b"gone"]


async def test_a_delete_meeting_a_new_upload_tries_again(make_driver, link, admin: Redis):
    driver, slow = make_driver(**LARGE), make_driver(url=link.url, **LARGE)
    committed = await driver.committed()
    fault = link.fault("stall", committed.life)
    deletion = asyncio.create_task(slow.store.delete(driver.client))
    await fault.caught.wait()
    await driver.store.journal.upload(driver.client, driver.model, committed.basis, "atp", b"1" * 500)
    fault.released.set()
    assert await deletion == Deleted(existed=True)
    assert not await admin.keys("*:s:*")


async def test_a_delete_meeting_an_upload_in_place_of_one_that_expired_tries_again(make_driver, link, admin: Redis):
    """As many uploads as the delete has read, but another one: counting them is not enough."""
    driver, slow = make_driver(**LARGE), make_driver(url=link.url, **LARGE)
    brief = make_driver(**LARGE, upload_ttl_ms=1)
    committed = await driver.committed()
    await brief.store.journal.upload(driver.client, driver.model, committed.basis, "atp", b"1" * 500)
    fault = link.fault("stall", committed.life)
    deletion = asyncio.create_task(slow.store.delete(driver.client))
    await fault.caught.wait()
    await asyncio.sleep(0.002)
    await driver.store.journal.upload(driver.client, driver.model, committed.basis, "atp", b"2" * 500)
    uploads = [name for name in await admin.hkeys(driver.client.registry) if name.startswith(b"u:")]
    assert len(uploads) == 1
    fault.released.set()
    assert await deletion == Deleted(existed=True)
    assert not await admin.keys("*:s:*")


async def test_the_registry_names_an_upload_until_it_is_the_snapshot_or_has_expired(make_driver, admin: Redis):
    driver, brief = make_driver(**LARGE), make_driver(**LARGE, upload_ttl_ms=1)
    client, model = driver.client, driver.model

    async def named() -> set[bytes]:
        return {name for name in await admin.hkeys(client.registry) if name.startswith(b"u:")}

    committed = await driver.committed(state=b"1" * 500)
    assert not await named()
    await brief.store.journal.upload(client, model, committed.basis, "atp", b"2" * 500)
    first = await named()
    assert len(first) == 1
    for key in await admin.keys("*:s:*"):
        if key.decode() != client.snapshot(model, committed.basis.sid):
            await admin.delete(key)  # as it does after a millisecond
    await asyncio.sleep(0.002)
    await driver.store.journal.upload(client, model, committed.basis, "atp", b"3" * 500)
    assert len(await named()) == 1
    assert not await named() & first
    assert await admin.pttl(client.registry) > Limits().upload_ttl_ms


async def test_the_registry_lives_at_least_as_long_as_an_upload_that_it_names(make_driver, admin: Redis):
    """Else a delete would not find what was uploaded for a client whose state is about to expire."""
    driver = make_driver(**LARGE, state_ttl_ms=2000, upload_ttl_ms=60_000)
    committed = await driver.committed(state=b"1" * 500)
    assert await admin.pttl(driver.client.registry) <= 3000
    await driver.store.journal.upload(driver.client, driver.model, committed.basis, "atp", b"2" * 500)
    assert 59_000 < await admin.pttl(driver.client.registry) <= 60_000


async def test_deleting_again_or_what_never_was_does_nothing(driver, admin: Redis):
    assert await driver.store.delete(driver.client) == Deleted(existed=False)
    assert not await admin.keys()
    await driver.committed()
    await driver.store.delete(driver.client)
    tombstone = await driver.load()
    assert await driver.store.delete(driver.client) == Deleted(existed=False)
    assert await driver.load() == tombstone


async def test_a_delete_whose_reply_is_lost_knows_its_own_tombstone(make_driver, link):
    driver = make_driver(url=link.url)
    committed = await driver.committed()
    link.fault("lose reply", committed.life)
    assert await driver.store.delete(driver.client) == Deleted(existed=True)


async def test_a_late_delete_spares_the_next_life(make_driver, link):
    driver, slow = make_driver(), make_driver(url=link.url)
    first = await driver.committed()
    fault = link.fault("stall", first.life)
    late = asyncio.create_task(slow.store.delete(driver.client))
    await fault.caught.wait()
    await driver.store.delete(driver.client)
    await driver.committed(state=b"next life")
    fault.released.set()
    assert await late == Deleted(existed=False)
    assert await driver.state() == b"next life"
