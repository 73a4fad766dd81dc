"""A replay is begun once, outlives whoever waits for it, and nothing of it is computed twice."""

import asyncio
import math
import time

import pytest
import pytest_asyncio
from checker.toy import LARGE, Toy, answer_after, batch_of

from acclimate_service.state import StateUnreadable
from acclimate_service.state.redis.wire import DEADLINE
from acclimate_service.state.replay_queue import ReplayQueue

LONG = {"snapshot_entries": 1000, "snapshot_replay_ms": 1_000_000, "lease_ms": 30, "steal_after_ms": 200}


class Slow(Toy):
    """A machine whose steps wait until they are let through."""

    def __init__(self, size: int = LARGE) -> None:
        super().__init__(lambda count: size)
        self.open = asyncio.Event()
        self.open.set()
        self.begun = asyncio.Event()

    async def step(self, state, batch, start):
        self.begun.set()
        await self.open.wait()
        return await super().step(state, batch, start)


async def grown(replica, entries: int) -> list[bytes]:
    """Batches that lie in the client's journal."""
    payloads = [b"%d" % number for number in range(entries)]
    for payload in payloads:
        await replica.apply(payload)
    return payloads


async def crashed(replica) -> None:
    """Its lease has ended, and it says nothing."""
    await asyncio.sleep(LONG["lease_ms"] / 1000)


async def until(told) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(10):
        while not told():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest_asyncio.fixture
async def pair(make_replica):
    """A replica that dies, and one that takes its client over; states are far larger than their journal."""
    machine = Slow(10_000)
    return make_replica(10_000, **LONG), make_replica(machine=machine, **LONG), machine


async def test_a_replay_outlives_the_caller_who_began_it(pair):
    dead, heir, machine = pair
    payloads = await grown(dead, 12)
    await crashed(dead)
    machine.open.clear()
    for _ in range(3):  # each gives up before it is through
        caller = asyncio.create_task(heir.apply(b"too late"))
        await machine.begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert heir.session.replay_s is not None
    machine.open.set()
    await heir.session.replay_ended()
    assert heir.session.replay_s is None
    applied = await heir.apply(b"next")
    assert (applied.seq, applied.answer) == (13, answer_after(*payloads, b"next"))
    assert machine.steps == 12 + 1
    assert heir.events.count("replayed 12") == 1


async def test_a_replay_that_fails_after_its_caller_gave_up_is_told_with_its_cause(pair):
    dead, heir, machine = pair
    await grown(dead, 3)
    await crashed(dead)
    machine.open.clear()
    caller = asyncio.create_task(heir.apply(b"too late"))
    await machine.begun.wait()
    caller.cancel()
    await asyncio.wait([caller])
    machine.fails = lambda: True
    machine.open.set()
    await heir.session.replay_ended()
    (told,) = [event for event in heir.events if event.startswith("replay failed: StateUnreadable")]
    assert "ToyFailure" in told


async def test_a_replay_has_no_deadline_though_the_caller_who_began_it_had_one(pair):
    dead, heir, machine = pair
    payloads = await grown(dead, 3)
    await crashed(dead)
    deadlines = set()

    async def step(state, batch, start, step=machine.step):
        deadlines.add(DEADLINE.get())
        return await step(state, batch, start)

    machine.step = step

    async def ask():
        DEADLINE.set(time.monotonic() + 5)
        return await heir.session.present()

    assert (await asyncio.create_task(ask())).seq == len(payloads)
    assert deadlines == {math.inf}


async def test_who_asks_meanwhile_waits_for_the_same_replay(pair):
    dead, heir, machine = pair
    payloads = await grown(dead, 6)
    await crashed(dead)
    looks = await asyncio.gather(*(heir.session.look(batch_of(b"look")) for _ in range(5)))
    assert {look.answer for look in looks} == {answer_after(*payloads, b"look")}
    assert machine.steps == 6 + 5


async def test_what_a_read_replayed_is_not_computed_again_by_a_batch(pair):
    dead, heir, machine = pair
    payloads = await grown(dead, 6)
    await crashed(dead)
    assert await heir.session.present()
    assert (await heir.apply(b"next")).answer == answer_after(*payloads, b"next")
    assert machine.steps == 6 + 1


async def test_a_replay_goes_on_from_where_another_change_stopped_it(pair):
    dead, heir, machine = pair
    payloads = await grown(dead, 6)
    await heir.session.present()
    for payload in (b"a", b"b"):  # the other is alive after all
        await dead.apply(payload)
    await crashed(dead)
    applied = await heir.apply(b"next")
    assert applied.answer == answer_after(*payloads, b"a", b"b", b"next")
    assert machine.steps == 6 + 2 + 1


async def test_a_state_in_memory_is_no_beginning_for_another_history(pair):
    dead, heir, _ = pair
    await grown(dead, 6)
    await heir.session.present()
    await dead.session.delete()
    others = [b"other %d" % number for number in range(8)]
    for payload in others:
        await dead.apply(payload)
    await crashed(dead)
    assert (await heir.apply(b"next")).answer == answer_after(*others, b"next")


async def test_one_stray_request_elsewhere_leaves_the_client_warm_at_home(pair):
    home, other, machine = pair
    payloads = await grown(home, 12)
    home.events.clear()
    machine.open.clear()
    stray = asyncio.create_task(other.apply(b"stray"))
    await machine.begun.wait()
    stray.cancel()
    await asyncio.wait([stray])
    for number in range(5):
        applied = await home.apply(b"home %d" % number)
        payloads.append(b"home %d" % number)
        assert applied.answer == answer_after(*payloads)
    assert not any(event.startswith("replayed") for event in home.events)
    machine.open.set()


async def test_a_journal_is_given_back_by_whoever_replays_it_for_nobody(pair):
    home, other, machine = pair
    payloads = await grown(home, 12)
    machine.open.clear()
    stray = asyncio.create_task(other.apply(b"stray"))
    await machine.begun.wait()
    stray.cancel()
    await asyncio.wait([stray])
    await other.session.hand_over()  # as home asks for it
    home.events.clear()
    assert (await home.apply(b"home")).answer == answer_after(*payloads, b"home")
    assert "lease_stolen" not in home.events
    machine.open.set()
    assert (await other.apply(b"other")).answer == answer_after(*payloads, b"home", b"other")


async def test_a_replay_that_fails_gives_the_journal_back_and_says_why_to_who_asks_next(pair):
    dead, heir, machine = pair
    await grown(dead, 3)
    await crashed(dead)
    machine.fails = lambda: True
    for _ in range(2):
        with pytest.raises(StateUnreadable):
            await heir.apply(b"next")
    assert (await dead.store.load(dead.client, dead.model)).lease is None


async def test_a_replica_that_dies_while_it_replays_leaves_a_snapshot_of_what_it_came_to(make_replica):
    limits = {**LONG, "snapshot_entries": 4}
    dead = make_replica(10_000, **LONG)
    payloads = await grown(dead, 16)
    await crashed(dead)
    machine = Slow(10_000)
    second = make_replica(machine=machine, **limits)

    async def step_by_step(state, batch, start, step=machine.step):
        if machine.steps == 8:
            machine.open.clear()
        return await step(state, batch, start)

    machine.step = step_by_step
    caller = asyncio.create_task(second.apply(b"never"))
    await until(lambda: "snapshot" in second.events)
    caller.cancel()
    await asyncio.wait([caller])
    await second.session.aclose()
    await crashed(second)
    third = make_replica(10_000, **LONG)
    assert (await third.apply(b"next")).answer == answer_after(*payloads, b"next")
    assert third.machine.steps < 16 + 1 - 3


async def test_an_answer_too_large_to_be_stored_is_computed_once_however_often_its_caller_gives_up(make_replica):
    limits = {**LONG, "answer_max": 1}
    dead = make_replica(10_000, **limits)
    for number in range(6):
        await dead.apply(b"%d" % number, key=f"k{number}")
    await crashed(dead)
    machine = Slow(10_000)
    heir = make_replica(machine=machine, **limits)
    machine.open.clear()
    for _ in range(3):
        caller = asyncio.create_task(heir.apply(b"2", key="k2"))
        await machine.begun.wait()
        caller.cancel()
        await asyncio.wait([caller])
    machine.open.set()
    repeated = await heir.apply(b"2", key="k2")
    assert (repeated.replayed, repeated.answer) == ("recomputed", answer_after(b"0", b"1", b"2"))
    assert machine.steps == 6
    await heir.apply(b"6")  # which stores all answers, these as none
    machine.steps = 0
    repeated = await heir.apply(b"3", key="k3")
    assert (repeated.replayed, repeated.answer) == ("recomputed", answer_after(b"0", b"1", b"2", b"3"))
    assert machine.steps <= 1 + 4


async def test_a_few_are_replayed_at_a_time_and_the_oldest_waiting_is_through_first(make_replica):
    queue, machine, clients = ReplayQueue(at_once=2), Slow(10_000), 6
    heirs = []
    for number in range(clients):
        dead = make_replica(10_000, client=f"c{number}", **LONG)
        await grown(dead, 4)
        heirs.append(make_replica(machine=machine, client=f"c{number}", replays=queue, **LONG))
    await asyncio.sleep(LONG["lease_ms"] / 1000)
    machine.open.clear()
    ended: list[int] = []

    async def ask(number: int) -> None:
        await heirs[number].session.present()
        ended.append(number)

    asking = []
    for number in range(clients):
        asking.append(asyncio.create_task(ask(number)))
        await until(lambda number=number: len(queue._line) == number + 1)
    queue.learn(1.0)
    waits = [heir.session.replay_s for heir in heirs]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(waits[0] * clients)
    assert sum(heir.events.count("lease_taken") for heir in heirs) == 0
    machine.open.set()
    await asyncio.gather(*asking)
    assert [number // 2 for number in ended] == [0, 0, 1, 1, 2, 2]
    assert machine.steps == 4 * clients


async def test_after_an_interruption_states_are_checked_and_not_computed_again(make_replica):
    one, two = make_replica(10_000, **LONG), make_replica(10_000, **LONG)
    payloads = await grown(one, 6)
    one.session.doubt()
    await one.session.check()
    steps = one.machine.steps
    assert (await one.apply(b"next")).answer == answer_after(*payloads, b"next")
    assert one.machine.steps == steps + 1
    assert one.events.count("lease_taken") == 1
    await two.session.delete()
    one.session.doubt()
    await one.session.check()
    assert one.session.nbytes == 0
