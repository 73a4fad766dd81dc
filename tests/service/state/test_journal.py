"""Every result of `open`, `release` and `append`."""

import asyncio
from dataclasses import replace

import pytest
from journal_owner import LARGE, journal_of, open_journal, owner_of
from redis.asyncio import Redis

from acclimate_service.state import Limits, StoreUnavailable
from acclimate_service.state.journal import Appended, Busy, Fenced, Flipped, Full, Opened
from acclimate_service.state.outcomes import Attempt, Conflict, Gone, Mismatch, Repeat, Used
from acclimate_service.state.records import Basis


async def test_opening_creates_a_client_at_version_zero(driver):
    opened = await open_journal(driver)
    loaded = await driver.load()
    assert (opened.life, opened.head) == (loaded.life, loaded.head)
    assert (loaded.head.seq, loaded.head.base, loaded.head.tag, loaded.head.has_state) == (0, 0, "", False)
    assert (loaded.head.fence, loaded.lease.fence) == ("1." + "1" * 16,) * 2
    assert await driver.store.describe(driver.client, driver.model) is None


async def test_opening_again_raises_the_fence_and_needs_no_waiting(driver):
    await open_journal(driver)
    assert (await open_journal(driver)).head.fence == "2." + "1" * 16


async def test_an_open_journal_is_busy_for_others_until_it_is_released(driver):
    owner = await owner_of(driver)
    busy = await open_journal(driver, "2" * 16)
    assert isinstance(busy, Busy)
    assert 0 < busy.ms <= Limits().lease_ms
    await driver.store.journal.release(driver.client, driver.model, owner.fence)
    assert isinstance(await open_journal(driver, "2" * 16), Opened)


async def test_a_release_spares_the_lease_of_another(driver):
    first = await owner_of(driver)
    await owner_of(driver, "2" * 16, force=True)
    await driver.store.journal.release(driver.client, driver.model, first.fence)
    assert (await driver.load()).lease.fence == "2." + "2" * 16


async def test_a_lease_ends_by_itself(make_driver):
    driver = make_driver(lease_ms=20)
    await open_journal(driver)
    await asyncio.sleep(0.05)
    assert isinstance(await open_journal(driver, "2" * 16), Opened)


async def test_force_takes_the_journal_and_fences_its_writer(driver):
    first = await owner_of(driver)
    await owner_of(driver, "2" * 16, force=True)
    assert await first.append() == Fenced()
    assert (await driver.load()).head.seq == 0


async def test_two_creators_of_one_client_meet_in_a_conflict(driver):
    first = await owner_of(driver)
    outcome = await open_journal(driver, "2" * 16, basis=Basis())
    assert isinstance(outcome, Conflict)
    assert outcome.life == first.basis.life


async def test_a_deleted_life_cannot_be_opened(driver):
    owner = await owner_of(driver)
    await driver.store.delete(driver.client)
    assert await open_journal(driver, basis=owner.basis) == Gone()
    tombstone = await driver.load()
    opened = await open_journal(driver)
    assert opened.life not in {owner.basis.life, tombstone.life}
    assert (await driver.load()).continues(tombstone.life)


async def test_a_journal_that_outlived_its_head_is_not_continued(driver, admin: Redis):
    owner = await owner_of(driver)
    await owner.append()
    await admin.delete(driver.client.head(driver.model))
    await owner_of(driver)
    assert await journal_of(driver, admin) == set()


async def test_a_snapshot_that_the_opener_does_not_know_is_a_conflict_though_its_head_expired(
    make_driver, admin: Redis
):
    """Whoever reads again knows it, and has it removed."""
    driver = make_driver(**LARGE)
    before = await driver.committed(state=b"1" * 500)
    await admin.delete(driver.client.head(driver.model))
    assert isinstance(await open_journal(driver, basis=replace(before.basis, sid="0" * 16)), Conflict)
    assert len(await admin.keys("*:s:*")) == 1
    assert isinstance(await open_journal(driver), Opened)
    assert not await admin.keys("*:s:*")


async def test_a_client_that_is_created_by_another_version_than_that_of_the_scope_says_so(driver, admin: Redis):
    journal, (client, model) = driver.store.journal, (driver.client, driver.model)
    basis = (await driver.load()).basis
    assert isinstance(await journal.open(client, model, basis, "1" * 16, "{}", "2" * 16), Opened)
    assert await admin.hget(client.head(model), "ver") == b"2" * 16


async def test_an_append_makes_a_version_and_keeps_the_base(driver, admin: Redis):
    start = await driver.committed(state=b"base")
    owner = await owner_of(driver)
    attempt = driver.attempt("k")
    appended = await owner.append(attempt=attempt)
    assert appended == Appended(Basis(start.life, 2, attempt.tag, ""), touched=True)
    loaded = await driver.load(attempt.rid)
    assert (loaded.head.seq, loaded.head.base, loaded.head.tag) == (2, 1, attempt.tag)
    assert (loaded.marker.seq, loaded.marker.tag, loaded.answer) == (2, attempt.tag, None)
    [size] = [len(entry) for entry in await admin.hmget(driver.client.journal(driver.model), "2")]
    assert (loaded.head.journal_entries, loaded.head.journal_bytes) == (1, size)
    assert await journal_of(driver, admin) == {b"2", b"2m"}


async def test_the_same_append_twice_is_one(driver):
    owner = await owner_of(driver)
    before, attempt = owner.basis, driver.attempt("k")
    first = await owner.append(attempt=attempt)
    owner.basis = before
    assert (await owner.append(attempt=attempt)).basis == first.basis
    assert (await driver.load()).head.seq == 1


async def test_an_append_on_another_history_is_a_conflict(driver):
    await driver.committed()
    owner = await owner_of(driver)
    second = await driver.committed(state=b"of a replica that needs no fence")
    outcome = await owner.append()
    assert isinstance(outcome, Conflict)
    assert outcome.basis == second.basis


async def test_an_append_of_an_applied_request_is_a_replay(driver):
    owner = await owner_of(driver)
    await owner.append("k")
    assert await owner.append("k") == Repeat(1, driver.model, None)
    other = Attempt(driver.client.rid("k"), "e" * 32)
    assert await owner.append(attempt=other) == Mismatch()


async def test_an_append_to_a_deleted_client_is_gone_and_its_key_used(driver):
    owner = await owner_of(driver)
    await owner.append("k")
    await driver.store.delete(driver.client)
    assert await owner.append("k2") == Gone()
    assert await (await owner_of(driver)).append("k") == Used()


@pytest.mark.parametrize("cap", [{"journal_entries": 2}, {"journal_bytes": 170}])
async def test_a_journal_at_its_cap_is_full_until_a_snapshot(make_driver, cap: dict[str, int]):
    owner = await owner_of(make_driver(**cap))
    await owner.append()
    await owner.append()
    assert await owner.append() == Full(committed=False)
    assert await owner.snapshot() == Flipped()
    assert isinstance(await owner.append(), Appended)


async def test_a_full_journal_settles_nothing_about_an_earlier_copy(make_driver, link):
    driver = make_driver(url=link.url, journal_entries=1)
    owner = await owner_of(driver)
    await owner.append()
    attempt = driver.attempt()
    link.fault("lose reply", attempt.tag)
    assert await owner.append(attempt=attempt) == Full(committed="unknown")


async def test_an_append_whose_reply_is_lost_is_asked_for_again(make_driver, link):
    driver = make_driver(url=link.url)
    owner = await owner_of(driver)
    attempt = driver.attempt()
    link.fault("lose reply", attempt.tag)
    assert (await owner.append(attempt=attempt)).basis.seq == 1


async def test_an_append_without_any_reply_is_unknown(make_driver, link):
    driver = make_driver(url=link.url, resend=1)
    owner = await owner_of(driver)
    attempt = driver.attempt("k")
    for _ in range(2):
        link.fault("lose reply", attempt.tag)
    with pytest.raises(StoreUnavailable) as lost:
        await owner.append(attempt=attempt)
    assert lost.value.committed == "unknown"


async def test_an_append_renews_the_lease(driver, admin: Redis):
    owner = await owner_of(driver)
    await admin.pexpire(driver.client.lease(driver.model), 50)
    await owner.append()
    assert (await driver.load()).lease.ms > 2000


async def test_an_append_sweeps_old_markers(make_driver, admin: Redis):
    owner = await owner_of(make_driver(key_cap=2, key_min_ms=20))
    await owner.append()
    await owner.append()
    await asyncio.sleep(0.05)
    await owner.append()
    assert await admin.hlen(owner.driver.client.markers) == 2
