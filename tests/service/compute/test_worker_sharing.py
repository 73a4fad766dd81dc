"""Work that is done together: who joins, who is left out, and what becomes of those who go away."""

import asyncio
import threading

import pytest

from acclimate_service.compute.worker import MOST_ROWS, Worker


@pytest.fixture
def worker():
    worker = Worker(threads=1)
    yield worker
    worker.close()


@pytest.fixture
async def held(worker):
    """The thread is busy until the event is set."""
    release = threading.Event()
    busy = asyncio.create_task(worker.run(release.wait, always))
    await asyncio.sleep(0.01)
    yield release
    release.set()
    await busy


class Together:
    """Doubles numbers, a negative one is an error of its own; remembers what came together."""

    def __init__(self):
        self.groups = []

    def __call__(self, works):
        self.groups.append(list(works))
        return [ValueError(f"{work} is negative") if work < 0 else 2 * work for work in works]


async def always():
    """Admit."""


async def refuse():
    raise PermissionError


def begin(worker, together, *works, rows=1, admit=always):
    return [asyncio.create_task(worker.share(together, work, rows, admit)) for work in works]


async def test_the_first_does_not_wait_and_what_waits_meanwhile_is_done_together(worker, held):
    together = Together()
    tasks = begin(worker, together, 1, 2, 3)
    await asyncio.sleep(0.01)
    assert together.groups == []
    held.set()
    assert await asyncio.gather(*tasks) == [2, 4, 6]
    assert together.groups == [[1, 2, 3]]
    assert await worker.share(together, 4, 1, always) == 8
    assert together.groups[1:] == [[4]]


async def test_others_come_between_in_the_order_of_their_arrival(worker, held):
    together, other, log = Together(), Together(), []
    first = begin(worker, together, 1)
    await asyncio.sleep(0)
    alone = asyncio.create_task(worker.run(lambda: log.append(len(together.groups)), always))
    await asyncio.sleep(0)
    rest = begin(worker, other, 7) + begin(worker, together, 2)
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(*first, alone, *rest)
    assert together.groups == [[1, 2]]
    assert other.groups == [[7]]
    assert log == [1]


async def test_together_come_no_more_rows_than_may(worker, held):
    together = Together()
    tasks = begin(worker, together, 1, 2, 3, rows=MOST_ROWS // 2) + begin(worker, together, 4, rows=5 * MOST_ROWS)
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(*tasks)
    assert together.groups == [[1, 2], [3], [4]]


async def test_whoever_is_not_admitted_is_left_out(worker, held):
    together = Together()
    tasks = begin(worker, together, 1) + begin(worker, together, 2, admit=refuse) + begin(worker, together, 3)
    await asyncio.sleep(0)
    held.set()
    one, two, three = await asyncio.gather(*tasks, return_exceptions=True)
    assert (one, three) == (2, 6)
    assert isinstance(two, PermissionError)
    assert together.groups == [[1, 3]]


async def test_when_nobody_is_admitted_nothing_is_done(worker, held):
    together = Together()
    tasks = begin(worker, together, 1, 2, admit=refuse)
    await asyncio.sleep(0)
    held.set()
    assert all(isinstance(e, PermissionError) for e in await asyncio.gather(*tasks, return_exceptions=True))
    assert together.groups == []


async def test_a_deadline_that_passes_in_the_queue_takes_only_its_own_work_out(worker, held):
    together = Together()
    (staying,) = begin(worker, together, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await worker.share(together, 2, 1, always)
    held.set()
    assert await staying == 2
    assert together.groups == [[1]]


async def test_a_deadline_that_passes_at_the_very_moment_of_the_turn_holds_nobody_up(worker, held):
    together = Together()
    leaving, staying = begin(worker, together, 1, 2)
    await asyncio.sleep(0)
    held.set()
    while worker._queue:  # noqa: ASYNC110 - until its turn has come, though it does not know yet
        await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == 4
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_admitted_work_is_finished_although_its_caller_goes_away(worker, held):
    together, asked, answer = Together(), asyncio.Event(), asyncio.Event()

    async def ask():
        asked.set()
        await answer.wait()

    (leaving,) = begin(worker, together, 1)
    (slow,) = begin(worker, together, 2, admit=ask)
    await asyncio.sleep(0)
    held.set()
    await asked.wait()  # the other one is admitted, and waits for this answer
    leaving.cancel()
    answer.set()
    assert await slow == 4
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert together.groups == [[1, 2]]


async def test_an_error_reaches_the_one_whose_it_is(worker, held):
    tasks = begin(worker, Together(), 1, -1)
    held.set()
    one, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert one == 2
    assert isinstance(other, ValueError)


async def test_an_error_of_the_whole_reaches_all_and_the_next_is_served(worker, held):
    def fail(_):
        raise ZeroDivisionError

    tasks = begin(worker, fail, 1, 2)
    await asyncio.sleep(0)
    held.set()
    assert all(isinstance(e, ZeroDivisionError) for e in await asyncio.gather(*tasks, return_exceptions=True))
    assert await worker.run(lambda: 5, always) == 5


@pytest.mark.parametrize("fail", [lambda _: next(iter(())), lambda works: [StopIteration() for _ in works]])
async def test_even_an_error_that_no_future_takes_reaches_all_and_the_next_is_served(worker, held, fail):
    tasks = begin(worker, fail, 1, 2)
    await asyncio.sleep(0)
    held.set()
    async with asyncio.timeout(5):
        raised = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error.__cause__) for error in raised] == [StopIteration] * 2
        assert await worker.run(lambda: 5, always) == 5
