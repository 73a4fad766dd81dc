"""Whoever had least of the thread is next: first among callers, then among the clients that a caller names."""

import asyncio
import threading

import pytest

from acclimate_service.compute.shares import FLOW, Shares
from acclimate_service.compute.worker import Worker


@pytest.fixture
def worker():
    worker = Worker(threads=1)
    yield worker
    worker.close()


async def always():
    """Admit."""


class Line:
    """Work that waits behind a door, and the order in which it was done."""

    def __init__(self, worker):
        self.worker, self.done, self.waiting, self._door = worker, [], [], threading.Event()

    async def shut(self):
        self.waiting.append(asyncio.create_task(self.worker.run(self._door.wait, always)))
        await asyncio.sleep(0)

    async def add(self, caller, client, times=1, seconds=0.0):
        async def one():
            FLOW.set((caller, client))
            for _ in range(times):
                await self.worker.run(lambda: (threading.Event().wait(seconds), self.done.append(client)), always)

        self.waiting.append(asyncio.create_task(one()))
        await asyncio.sleep(0)

    async def open(self):
        self._door.set()
        await asyncio.gather(*self.waiting)
        return self.done


async def test_a_caller_with_many_clients_gets_no_more_than_one_with_one(worker):
    line = Line(worker)
    await line.shut()
    for number in range(20):
        await line.add("flood", f"flood-{number}", seconds=0.005)
    await line.add("light", "light")
    done = await line.open()
    assert len(done) == 21
    assert done.index("light") == 1, done


async def test_a_client_that_had_little_comes_before_those_that_had_much(worker):
    line = Line(worker)
    await line.shut()
    for number in range(4):
        await line.add("all", f"heavy-{number}", times=5, seconds=0.005)
    await line.add("all", "light", times=3)
    done = await line.open()
    last = max(place for place, client in enumerate(done) if client == "light")
    assert last <= 4 + 2 * 3, done  # the one that is just served comes again after another one has begun


async def test_equals_have_their_turns_in_the_order_of_their_arrival(worker):
    line = Line(worker)
    await line.shut()
    for number in range(5):
        await line.add("all", "one", seconds=0.001)
        await line.add("all", f"{number}", seconds=0.001)
    done = await line.open()
    assert [client for client in done if client != "one"] == ["0", "1", "2", "3", "4"]


async def test_nobody_saves_up_shares_and_an_idle_thread_forgets_all(worker):
    line = Line(worker)
    await line.shut()
    await line.add("a", "a", times=3, seconds=0.002)
    await line.add("b", "b", times=3, seconds=0.002)
    await line.open()
    assert not worker._shares.had
    shares = Shares()
    shares.join(("a", "a"))
    shares.join(("b", "b"))
    shares.charge(("a", "a"), 5.0, {("b", "b")})
    shares.join(("new", "new"))
    assert shares.rank(("new", "new")) == (2.5, 0.0)


def test_flows_are_bounded_in_number():
    shares = Shares()
    for number in range(20_000):
        flow, following = (("caller", f"{place}") for place in (number, number + 1))
        shares.join(following)
        shares.charge(flow, 0.001, {following})
    assert len(shares.had) <= 4097


def test_a_model_with_many_callers_has_no_more_than_one_with_a_single_caller():
    shares, served = Shares(), []
    waiting = [("a", f"caller {number}", "cam") for number in range(9)] + [("b", "caller", "cam")] * 9
    for flow in waiting:
        shares.join(flow)
    while ("b", "caller", "cam") in waiting:
        waiting.sort(key=shares.rank)
        flow = waiting.pop(0)
        served.append(flow[0])
        shares.charge(flow, 0.01, set(waiting))
    assert abs(served[:12].count("a") - served[:12].count("b")) <= 1
