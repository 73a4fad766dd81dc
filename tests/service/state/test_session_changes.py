"""Changes of a whole state, looks at it, and what a session forgets."""

import asyncio
from dataclasses import replace

import pytest
from checker.toy import LARGE, PROBE, Toy, ToyFailure, advance, answer_after, answer_of, initial, rework
from redis.asyncio import Redis

from acclimate_service.state import Change, ClientDeleted, KeyReused, KeyUsedBeforeDelete, Policy, Present, StoreFull

SIZES = pytest.mark.parametrize("size", [40, LARGE])
OTHER = b"other"


def reworked(*payloads: bytes):
    """The state after these batches and the change."""
    state = initial("{}")
    for payload in payloads:
        state = advance(state, payload)
    return rework(state, OTHER)


# Whole-state changes.


@SIZES
@pytest.mark.parametrize("warm", [True, False])
async def test_a_whole_state_takes_the_place_of_the_newest_one_and_of_its_journal(make_replica, size: int, warm: bool):
    one = make_replica(size)
    for payload in (b"1", b"2"):
        await one.apply(payload)
    asked, expected = one if warm else make_replica(size), reworked(b"1", b"2")
    applied = await asked.rework(OTHER)
    assert (applied.seq, applied.answer) == (3, answer_of(expected))
    head = await one.head()
    assert (head.base, head.journal_entries, head.config) == (3, 0, expected.config)
    for replica in (one, make_replica(size)):
        assert await replica.seen() == (3, answer_of(advance(expected, PROBE)))
    assert (await one.apply(b"3")).answer == answer_of(advance(expected, b"3"))


@SIZES
async def test_a_client_nobody_has_seen_may_begin_with_a_whole_state(make_replica, size: int):
    replica = make_replica(size)
    applied = await replica.rework(OTHER)
    assert (applied.seq, applied.status, applied.answer) == (1, "cold", answer_of(reworked()))
    assert (await make_replica(size).apply(b"1")).answer == answer_of(advance(reworked(), b"1"))


@SIZES
async def test_a_repeated_change_gets_its_first_answer_and_changes_nothing(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    first = await one.rework(OTHER, key="k")
    await one.apply(b"1")
    for replica in (one, two):
        again = await replica.rework(OTHER, key="k")
        assert (again.seq, again.answer, again.replayed) == (1, first.answer, "stored")
    with pytest.raises(KeyReused):
        await two.session.apply(two.request("k", "e" * 32), two.machine.rework)
    assert (await one.head()).seq == 2


async def test_a_change_needs_no_lease_and_the_writer_of_the_journal_goes_on_from_it(make_replica):
    one, two = make_replica(LARGE), make_replica(LARGE, steal_after_ms=60_000)
    await one.apply(b"1")
    owner = (await one.store.describe(one.client, one.model)).owner
    async with asyncio.timeout(5):
        await two.rework(OTHER)
    assert two.events == ["replayed 1", "found restored", "full committed"]
    assert (await two.store.describe(two.client, two.model)).owner == owner
    assert (await one.apply(b"2")).answer == answer_of(advance(reworked(b"1"), b"2"))


async def test_a_large_changed_state_is_uploaded_and_a_small_one_lies_in_its_head(make_replica):
    for size, uploaded in ((LARGE, True), (40, False)):
        replica = make_replica(size, client=f"cam-{size}")
        await replica.rework(OTHER)
        assert ((await replica.head()).snapshot is not None) == uploaded


async def test_answers_are_stored_before_a_change_drops_their_entries(make_replica, admin: Redis):
    one = make_replica(LARGE)
    await one.apply(b"1", key="k")
    await one.settled()
    await admin.delete(one.client.answers, one.client.answer_times)
    await make_replica(LARGE).rework(OTHER)
    again = await one.apply(b"1", key="k")
    assert (again.replayed, again.answer) == ("stored", answer_after(b"1"))


@SIZES
async def test_a_change_is_made_again_of_the_state_that_came_between(make_replica, size: int):
    one, two, seen = make_replica(size), make_replica(size), list[int]()
    await one.apply(b"1")

    async def change(present: Present) -> Change:
        seen.append(present.seq)
        if len(seen) == 1:
            await two.apply(b"2")
        return await one.machine.rework(present, OTHER)

    applied = await one.session.apply(one.request(), change)
    assert (applied.seq, seen) == (3, [1, 2])
    assert applied.answer == answer_of(reworked(b"1", b"2"))


@SIZES
async def test_a_change_that_raises_passes_its_error_on_and_changes_nothing(make_replica, dump, size: int):
    replica = make_replica(size)
    await replica.apply(b"1")
    await replica.settled()
    before = await dump()
    replica.machine.fails = lambda: True
    with pytest.raises(ToyFailure):
        await replica.rework(OTHER)
    replica.machine.fails = lambda: False
    assert await dump() == before
    assert (await replica.apply(b"2")).status == "warm"


async def test_a_change_that_nobody_waits_for_is_not_begun(make_replica):
    replica = make_replica()

    async def refuse() -> None:
        raise TimeoutError("too late")

    request = replace(replica.request(), admit=refuse)
    with pytest.raises(TimeoutError):
        await replica.session.apply(request, replica.machine.rework)
    assert await replica.head() is None


@SIZES
async def test_a_change_of_a_client_deleted_meanwhile_is_refused(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    await two.apply(b"1")

    async def change(present: Present) -> Change:
        await two.session.delete()
        return await one.machine.rework(present, OTHER)

    with pytest.raises(ClientDeleted) as ended:
        await one.session.apply(one.request("k"), change)
    assert ended.value.committed is False
    assert await one.head() is None
    await one.rework(OTHER, key="k")
    await two.session.delete()
    with pytest.raises(KeyUsedBeforeDelete):
        await one.rework(OTHER, key="k")


async def test_a_change_that_a_full_redis_refuses_keeps_the_state_in_memory(make_replica, admin: Redis):
    replica = make_replica()
    await replica.apply(b"1")
    await admin.config_set("maxmemory", "1")
    with pytest.raises(StoreFull) as full:
        await replica.rework(OTHER)
    assert full.value.committed is False
    await admin.config_set("maxmemory", "0")
    assert (await replica.apply(b"2")).status == "warm"


async def test_a_snapshot_under_way_does_not_undo_a_change(make_replica):
    machine, gate = Toy(lambda count: LARGE), asyncio.Event()
    replica, serialise = make_replica(machine=machine, snapshot_entries=2), machine.serialise

    async def held_up(state, **how):
        data = await serialise(state, **how)
        if state.config == "{}":
            await gate.wait()
        return data

    machine.serialise = held_up
    for payload in (b"1", b"2"):
        await replica.apply(payload)
    await replica.rework(OTHER)
    gate.set()
    await replica.session.evict()
    assert await make_replica(LARGE).seen() == (3, answer_of(advance(reworked(b"1", b"2"), PROBE)))


# Without a journal.


async def test_a_replica_without_a_journal_goes_on_from_the_journal_of_another(make_replica, admin: Redis):
    one, two = make_replica(LARGE), make_replica(LARGE, policy=Policy("{}", journal=False))
    for payload in (b"1", b"2"):
        await one.apply(payload, key=payload.decode())
    await one.settled()
    await admin.delete(one.client.answers, one.client.answer_times)
    assert (await two.apply(b"3")).answer == answer_after(b"1", b"2", b"3")
    head = await two.head()
    assert (head.base, head.journal_entries, head.snapshot is not None) == (3, 0, True)
    assert not await admin.exists(two.client.journal(two.model))
    again = await two.apply(b"2", key="2")
    assert (again.replayed, again.answer) == ("stored", answer_after(b"1", b"2"))
    assert (await two.apply(b"4")).status == "warm"
    assert (await one.apply(b"5")).answer == answer_after(b"1", b"2", b"3", b"4", b"5")


# Looking and forgetting.


@SIZES
async def test_the_present_state_is_shown_and_nothing_changes(make_replica, dump, size: int):
    one = make_replica(size)
    assert await one.session.present() == Present("", 0, "{}", initial("{}"), "cold")
    applied = await one.apply(b"1")
    await one.settled()
    before = await dump()
    for replica, status in ((one, "warm"), (make_replica(size), "restored")):
        expected = Present(applied.life, 1, "{}", advance(initial("{}"), b"1"), status)
        assert await replica.session.present() == expected
    assert await dump() == before


@SIZES
async def test_a_dropped_state_is_read_again(make_replica, dump, size: int):
    replica = make_replica(size)
    await replica.apply(b"1")
    await replica.settled()
    before = await dump()
    replica.session.drop()
    assert (replica.session.nbytes, await dump()) == (0, before)
    assert (await replica.apply(b"2")).status == "restored"


@SIZES
async def test_a_drop_during_a_request_disturbs_it_not(make_replica, size: int):
    machine = Toy(lambda count: size)
    replica, step = make_replica(machine=machine), machine.step
    await replica.apply(b"1")

    async def dropped(state, batch, start):
        replica.session.drop()
        return await step(state, batch, start)

    machine.step = dropped
    assert (await replica.apply(b"2")).answer == answer_after(b"1", b"2")
    assert await replica.seen() == (2, answer_after(b"1", b"2", PROBE))


async def test_the_size_of_the_journal_in_memory_is_told(make_replica):
    replica = make_replica(LARGE)
    assert replica.session.memory.held is None
    await replica.apply(b"12")
    await replica.apply(b"345")
    track = replica.session.memory.held.track
    assert (len(track.sizes), track.nbytes) == (2, 5)
    await replica.rework(OTHER)
    track = replica.session.memory.held.track
    assert (len(track.sizes), track.nbytes) == (0, 0)
