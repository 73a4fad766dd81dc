"""When a session takes a snapshot, and what it keeps in memory."""

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
from checker.toy import LARGE, PROBE, Toy, answer_after, batch_of
from redis.asyncio import Redis

from acclimate_service.state import JournalFull, StoreFull

# Snapshots.


async def wait_for(replica, event: str) -> None:
    for _ in range(3000):
        if event in replica.events:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{event} did not come: {replica.events}")


@pytest.mark.parametrize(
    "limits", [{"snapshot_entries": 3}, {"snapshot_replay_ms": 1}, {"snapshot_idle_ms": 20}], ids=str
)
async def test_a_snapshot_is_taken_when_it_is_due(make_replica, limits: dict[str, int]):
    machine = Toy(lambda count: LARGE, pause=lambda: 0.002)
    replica = make_replica(machine=machine, **limits)
    payloads = [b"1", b"2", b"3"]
    for payload in payloads:
        await replica.apply(payload)
    await wait_for(replica, "snapshot")
    assert (await replica.head()).base > 0
    assert await make_replica(LARGE).seen() == (3, answer_after(*payloads, PROBE))


async def test_steps_that_were_slow_for_a_while_are_not_held_to_be_so_for_ever(make_replica):
    pauses = [0.2] * 4
    machine = Toy(lambda count: LARGE, pause=lambda: pauses.pop() if pauses else 0.0)
    replica = make_replica(machine=machine, snapshot_replay_ms=750)
    for number in range(40):
        await replica.apply(bytes([number]))
    await wait_for(replica, "snapshot")
    assert replica.events.count("snapshot") == 1
    assert (await replica.head()).base == 4


async def test_a_snapshot_is_taken_when_the_journal_outweighs_the_state(make_replica):
    replica = make_replica(300, full_max=1)
    await replica.apply(b"x" * 310)
    await wait_for(replica, "snapshot")
    assert (await replica.head()).base == 1


async def test_batches_go_on_while_a_snapshot_is_taken(make_replica):
    machine, gate = Toy(lambda count: LARGE), asyncio.Event()
    replica = make_replica(machine=machine, snapshot_entries=2)
    serialise = machine.serialise

    async def held_up(state, **how):
        data = await serialise(state, **how)
        await gate.wait()
        return data

    machine.serialise = held_up
    for payload in (b"1", b"2", b"3"):
        await replica.apply(payload)
    gate.set()
    await wait_for(replica, "snapshot")
    head = await replica.head()
    assert (head.seq, head.base, head.journal_entries) == (3, 2, 1)
    assert (await replica.apply(b"4")).status == "warm"
    assert await make_replica(LARGE).seen() == (4, answer_after(b"1", b"2", b"3", b"4", PROBE))


async def test_a_snapshot_that_is_waited_for_does_not_wait_for_one_in_the_background(make_replica):
    machine = Toy(lambda count: LARGE)
    replica, serialise, stuck = (
        make_replica(machine=machine, snapshot_entries=2, journal_entries=3),
        machine.serialise,
        0,
    )

    async def queued(state, *, awaited=True):
        nonlocal stuck
        if not awaited:
            stuck += 1
            await asyncio.Event().wait()
        return await serialise(state, awaited=awaited)

    machine.serialise = queued
    for number in range(8):
        assert (await replica.apply(bytes([number]))).seq == number + 1
    assert stuck
    assert (await replica.head()).base > 0


async def test_a_full_journal_is_made_room_in_by_a_snapshot(make_replica):
    replica = make_replica(LARGE, journal_entries=2)
    for number in range(5):
        assert (await replica.apply(bytes([number]))).seq == number + 1
    assert (await replica.head()).journal_entries <= 2
    assert replica.machine.steps == 5


async def test_a_journal_that_no_snapshot_makes_shorter_refuses_batches(make_replica):
    replica = make_replica(machine=Toy(lambda count: LARGE, refuses=lambda: True), journal_entries=2)
    await replica.apply(b"1")
    await replica.apply(b"2")
    with pytest.raises(JournalFull) as full:
        await replica.apply(b"3")
    assert full.value.committed is False
    replica.machine.refuses = lambda: False
    assert (await replica.apply(b"4")).answer == answer_after(b"1", b"2", b"4")


async def test_answers_are_stored_before_their_entries_go(make_replica):
    one, two = make_replica(LARGE), make_replica(LARGE)
    await one.apply(b"1", key="k")
    await one.session.aclose()  # with its answer not sent
    await two.apply(b"2")
    await two.session.evict()
    assert (await two.head()).base == 2
    again = await make_replica(LARGE).apply(b"1", key="k")
    assert (again.replayed, again.answer) == ("stored", answer_after(b"1"))


async def test_an_evicted_client_has_a_snapshot_and_no_lease(make_replica):
    replica = make_replica(LARGE)
    await replica.apply(b"1")
    assert replica.session.nbytes >= LARGE
    await replica.session.evict()
    loaded = await replica.store.load(replica.client, replica.model)
    assert (loaded.head.base, loaded.lease, replica.session.nbytes) == (1, None, 0)
    assert (await replica.apply(b"2")).status == "restored"


async def test_an_eviction_whose_snapshot_fails_loses_nothing(make_replica):
    replica = make_replica(machine=Toy(lambda count: LARGE, refuses=lambda: True))
    await replica.apply(b"1")
    await replica.session.evict()
    assert replica.events[-2:] == ["snapshot_failed", "snapshot failed: ToyFailure()"]
    assert (await replica.apply(b"2")).answer == answer_after(b"1", b"2")


# Memory.


async def test_a_look_changes_nothing(make_replica, dump):
    replica = make_replica(LARGE)
    assert (await replica.session.look(batch_of(PROBE))).answer == answer_after(PROBE)
    await replica.apply(b"1")
    await replica.settled()
    before = await dump()
    for each in (replica, make_replica(LARGE)):
        assert await each.seen() == (1, answer_after(b"1", PROBE))
    assert await dump() == before
    assert (await replica.apply(b"2")).status == "warm"


async def test_a_state_in_memory_needs_no_read_until_half_of_its_life_is_over(make_replica, admin: Redis):
    replica = make_replica(state_ttl_ms=100_000)
    await replica.apply(b"1")
    await admin.config_resetstat()

    async def scripts_run() -> int:
        stats = await admin.info("commandstats")
        return stats.get("cmdstat_evalsha", {}).get("calls", 0)

    await replica.apply(b"2")
    assert await scripts_run() == 1
    replica.now += 51
    await replica.apply(b"3")
    assert await scripts_run() == 3


async def test_a_large_state_in_memory_costs_one_round_trip_too(make_replica, admin: Redis):
    replica = make_replica(LARGE)
    await replica.apply(b"1")
    await replica.settled()
    await admin.config_resetstat()
    await replica.apply(b"2")
    await replica.settled()
    stats = await admin.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 2  # the append, and the answer nobody waits for


async def test_versions_that_redis_lost_are_reported(make_replica, admin: Redis):
    replica = make_replica()
    await replica.apply(b"1")
    saved = [(key, await admin.dump(key), await admin.pttl(key)) for key in await admin.keys()]
    await replica.apply(b"lost")
    await replica.apply(b"lost too")
    for key, value, ttl in saved:
        await admin.restore(key, ttl, value, replace=True)
    applied = await replica.apply(b"2")
    assert (applied.seq, applied.status, applied.lost) == (2, "rolled_back", 2)
    assert applied.answer == answer_after(b"1", b"2")
    assert (await replica.apply(b"3")).lost == 0


async def test_a_client_that_redis_lost_altogether_is_reported_and_one_that_expired_or_was_deleted_is_not(
    make_replica, admin: Redis
):
    replica, ttl_s = make_replica(), 100 * 24 * 3600
    for loss in (admin.flushall, admin.flushall):
        await replica.apply(b"1")
        await replica.apply(b"2")
        await loss()
        applied = await replica.apply(b"3")
        assert (applied.seq, applied.status, applied.lost) == (1, "rolled_back", 2)
        assert applied.answer == answer_after(b"3")
        await replica.session.delete()
        assert (await replica.apply(b"4")).status == "cold"
        await replica.session.delete()
    await replica.apply(b"5")
    await admin.flushall()
    replica.now += ttl_s
    assert (await replica.apply(b"6")).status == "cold"


async def test_a_full_redis_keeps_the_state_in_memory(make_replica, admin: Redis):
    replica = make_replica(LARGE)
    await replica.apply(b"1")
    await replica.settled()
    await admin.config_set("maxmemory", "1")
    with pytest.raises(StoreFull) as full:
        await replica.apply(b"2")
    assert full.value.committed is False
    await admin.config_set("maxmemory", "0")
    assert (await replica.apply(b"3")).status == "warm"


async def test_a_client_that_is_handed_over_with_every_batch_still_gets_its_snapshots(make_replica):
    pair = [make_replica(LARGE, snapshot_entries=3, chunk_gap_ms=10) for _ in range(2)]
    for number in range(6):
        giver, taker = pair[number % 2], pair[1 - number % 2]
        await giver.session.hand_over()
        assert (await taker.apply(bytes([number]))).answer == answer_after(*(bytes([n]) for n in range(number + 1)))
    head = await pair[0].head()
    assert head.base > 0, "no snapshot was ended"
    assert head.journal_entries < 6


async def test_a_state_that_was_exchanged_is_let_go_of_and_the_other_gets_the_snapshot(make_replica):
    replica = make_replica(LARGE, snapshot_idle_ms=50)
    await replica.apply(b"1")
    state = replica.session.memory.held.state
    gone = weakref.ref(state)
    replica.session.exchange(state, replace(state))
    del state
    gc.collect()
    assert gone() is None, "what waits for the client to be idle keeps it"
    await wait_for(replica, "snapshot")
    assert (await replica.head()).base == 1
