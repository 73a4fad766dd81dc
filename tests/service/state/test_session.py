"""One client on several replicas, each with a session of its own: how batches are written and found."""

import asyncio

import pytest
from checker.toy import LARGE, PROBE, Toy, answer_after, failing_once
from redis.asyncio import Redis

from acclimate_service.state import Policy, StateCorrupt, StateUnreadable

# Small states are written whole, large ones by their batches.


@pytest.mark.parametrize("size", [40, LARGE])
async def test_batches_are_applied_in_order_and_answered(make_replica, size: int):
    replica = make_replica(size)
    payloads = [bytes([number]) for number in range(12)]
    for number, payload in enumerate(payloads):
        applied = await replica.apply(payload)
        assert (applied.seq, applied.replayed) == (number + 1, "none")
        assert applied.answer == answer_after(*payloads[: number + 1])
    assert await make_replica(size).seen() == (12, answer_after(*payloads, PROBE))


async def test_a_small_state_is_written_whole_and_a_large_one_as_its_batch(make_replica):
    small, large = make_replica(40, client="small"), make_replica(LARGE, client="large")
    for replica in (small, large):
        await replica.apply(b"1")
    assert ((await small.head()).base, (await small.head()).length > 40) == (1, True)
    assert ((await large.head()).base, (await large.head()).journal_entries) == (0, 1)


async def test_a_state_smaller_than_its_batch_is_written_whole_into_the_head(make_replica):
    replica = make_replica(500)
    await replica.apply(b"x" * 550)
    head = await replica.head()
    assert (head.base, head.snapshot, len(head.inline) > 500) == (1, None, True)


async def test_a_batch_is_appended_while_it_is_computed(make_replica):
    machine, appended, finish = Toy(lambda count: LARGE), [], asyncio.Event()
    replica = make_replica(machine=machine)
    step = machine.step

    async def slow(state, batch, start):
        done = await step(state, batch, start)
        for _ in range(100):
            appended.append((await replica.head()).seq)
            if appended[-1]:
                break
            await asyncio.sleep(0.01)
        await finish.wait()
        return done

    machine.step = slow
    finish.set()
    assert (await replica.apply(b"1")).seq == 1
    assert appended[-1] == 1


async def test_a_state_that_outgrows_its_head_is_appended_without_computing_again(make_replica):
    replica = make_replica(machine=Toy(lambda count: 60 if count < 3 else LARGE))
    for payload in (b"1", b"2", b"3"):
        await replica.apply(payload)
    head = await replica.head()
    assert (head.seq, head.base, replica.machine.steps) == (3, 2, 3)
    assert await make_replica().seen() == (3, answer_after(b"1", b"2", b"3", PROBE))


async def test_a_state_that_shrinks_is_written_whole_again(make_replica):
    replica = make_replica(machine=Toy(lambda count: LARGE if count < 3 else 60))
    for payload in (b"1", b"2", b"3", b"4"):
        await replica.apply(payload)
    head = await replica.head()
    assert (head.seq, head.base, head.journal_entries) == (4, 4, 0)
    again = make_replica()
    assert (await again.apply(b"1", key=None)).seq == 5


async def test_without_a_journal_every_batch_writes_a_snapshot_and_no_input(make_replica, admin: Redis):
    replica = make_replica(LARGE, policy=Policy("{}", journal=False))
    for payload in (b"1", b"2"):
        await replica.apply(payload)
    head = await replica.head()
    assert (head.seq, head.base, head.snapshot is not None) == (2, 2, True)
    assert not await admin.exists(replica.client.journal(replica.model))
    assert len(await admin.keys("*:s:*")) == 1


async def test_replicas_of_every_kind_may_take_turns(make_replica):
    replicas = [
        make_replica(LARGE),
        make_replica(LARGE, inline_max=5000),
        make_replica(LARGE, policy=Policy("{}", journal=False)),
    ]
    payloads = [bytes([number]) for number in range(9)]
    for number, payload in enumerate(payloads):
        applied = await replicas[number % 3].apply(payload)
        assert (applied.seq, applied.answer) == (number + 1, answer_after(*payloads[: number + 1]))


# Opening.


async def test_another_replica_restores_a_state_from_its_journal(make_replica):
    one, two = make_replica(LARGE), make_replica(LARGE)
    await one.apply(b"1")
    await one.apply(b"2")
    applied = await two.apply(b"3")
    assert (applied.seq, applied.status, applied.answer) == (3, "restored", answer_after(b"1", b"2", b"3"))
    assert two.events == ["lease_stolen", "replayed 2", "found restored", "delta appended"]
    assert two.machine.steps == 3


async def test_a_journal_that_was_let_go_is_opened_without_waiting(make_replica):
    one, two = make_replica(LARGE), make_replica(LARGE, steal_after_ms=60_000)
    await one.apply(b"1")
    await one.session.evict()
    async with asyncio.timeout(5):
        assert (await two.apply(b"2")).seq == 2
    assert two.machine.steps == 1  # restored from the snapshot


async def test_a_writer_that_lost_its_journal_computes_its_batch_on_the_newer_state(make_replica):
    one, two = make_replica(LARGE), make_replica(LARGE)
    await one.apply(b"1")
    await two.apply(b"2")
    applied = await one.apply(b"3")
    assert (applied.seq, applied.answer) == (3, answer_after(b"1", b"2", b"3"))


async def test_a_batch_that_cannot_be_computed_again_is_never_skipped(make_replica):
    one, two = make_replica(LARGE), make_replica(machine=failing_once())
    await one.apply(b"1")
    with pytest.raises(StateUnreadable, match="version 1"):
        await two.apply(b"2")
    assert (await two.apply(b"2")).seq == 2


async def test_a_damaged_or_missing_entry_is_corruption(make_replica, admin: Redis):
    one, two = make_replica(LARGE), make_replica(LARGE)
    await one.apply(b"1")
    journal = one.client.journal(one.model)
    entry = await admin.hget(journal, "1")
    await admin.hset(journal, "1", entry[:-1] + b"?")
    with pytest.raises(StateCorrupt, match="checksum"):
        await two.apply(b"2")
    await admin.hdel(journal, "1")
    with pytest.raises(StateCorrupt, match="misses an entry"):
        await two.apply(b"2")


async def test_a_replay_on_another_engine_is_counted_or_refused(make_replica):
    one = make_replica(LARGE)
    await one.apply(b"1")
    other = Toy(lambda count: LARGE)
    other.engine = "toy 2"
    with pytest.raises(StateUnreadable, match="toy 1"):
        await make_replica(machine=other, policy=Policy("{}", strict_engine=True)).apply(b"2")
    lenient = make_replica(machine=other)
    assert (await lenient.apply(b"2")).seq == 2
    assert "replay_engine_changed" in lenient.events
