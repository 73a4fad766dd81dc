"""What a session tells of itself, what is told of a client, and the pause between chunks."""

from time import perf_counter

import pytest
from checker.toy import LARGE, batch_of
from journal_owner import LARGE as CHUNKED
from journal_owner import owner_of

from acclimate_service.state import Context, Limits, Policy, Session


async def test_events_are_told_once_and_in_their_order(make_replica):
    one, two = make_replica(LARGE), make_replica(LARGE)
    await one.apply(b"1", key="k")
    await one.apply(b"2")
    assert one.events == ["found cold", "lease_taken", "delta appended", "found warm", "delta appended"]
    await one.session.evict()
    assert one.events[-1] == "snapshot"
    await two.apply(b"3")
    assert two.events == ["lease_taken", "found restored", "delta appended"]
    await two.apply(b"1", key="k")
    assert two.events[3:] == ["found warm", "delta replay"]


async def test_a_small_state_is_told_as_written_whole_and_a_conflict_as_such(make_replica):
    one, two = make_replica(), make_replica()
    await one.apply(b"1")
    await two.apply(b"2")
    await one.apply(b"3")
    assert one.events == [
        *("found cold", "full committed"),
        *("found warm", "full conflict", "found restored", "full committed"),
    ]


async def test_looks_are_told_too(make_replica):
    replica = make_replica(LARGE)
    await replica.apply(b"1")
    looker = make_replica(LARGE)
    await looker.seen()
    await looker.session.present()
    assert looker.events == ["replayed 1", "found restored", "found warm"]


async def test_nobody_need_listen(make_replica):
    replica = make_replica(LARGE)
    context = Context(replica.store, Limits(), replica.client, replica.model, replica.machine, Policy("{}"))
    assert (await Session(context).apply(replica.request(), batch_of(b"1"))).seq == 1
    assert replica.events == []


# Description.


async def test_a_description_tells_the_journal_and_its_owner(make_replica):
    replica = make_replica(LARGE)
    await replica.apply(b"1")
    await replica.apply(b"2")
    described = await replica.store.describe(replica.client, replica.model)
    head = await replica.head()
    assert (described.seq, described.base, described.journal_entries) == (2, 0, 2)
    assert described.journal_bytes == head.journal_bytes > 0
    assert head.fence.endswith("." + described.owner)
    assert len(described.owner) == 16
    await replica.session.evict()
    described = await replica.store.describe(replica.client, replica.model)
    assert (described.base, described.journal_entries, described.journal_bytes, described.owner) == (2, 0, 0, "")


async def test_a_description_extends_no_life(make_replica, admin):
    replica = make_replica(state_ttl_ms=100_000)
    await replica.apply(b"1")
    await admin.pexpire(replica.client.head(replica.model), 10_000)
    assert (await replica.store.describe(replica.client, replica.model)).ttl_ms <= 10_000
    assert await admin.pttl(replica.client.head(replica.model)) <= 10_000


# The gap between chunks.


async def test_a_background_snapshot_pauses_between_its_chunks_and_a_commit_does_not(make_driver):
    driver = make_driver(**CHUNKED, chunk_gap_ms=40)
    began = perf_counter()
    await driver.committed(state=b"s" * 250)
    assert perf_counter() - began < 0.08
    owner = await owner_of(driver)
    await owner.append()
    began = perf_counter()
    await owner.snapshot()  # of four chunks
    assert perf_counter() - began >= 0.12


def test_the_gap_may_be_nothing_and_no_other_number_may():
    assert Limits(chunk_gap_ms=0).chunk_gap_ms == 0
    with pytest.raises(ValueError, match="chunk_gap_ms is -1; accepted is any whole number from 0 on"):
        Limits(chunk_gap_ms=-1)
    with pytest.raises(ValueError, match="tries is 0; accepted is any whole number from 1 on"):
        Limits(tries=0)
