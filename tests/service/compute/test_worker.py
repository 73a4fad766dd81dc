import asyncio
import threading

import pytest
import torch

from acclimate_service.compute.worker import Worker


@pytest.fixture
def worker():
    worker = Worker(threads=1)
    yield worker
    worker.close()


async def always():
    """Admit."""


async def test_work_runs_in_order_in_one_thread_that_is_not_the_caller(worker):
    ran = []

    def work(number):
        ran.append((number, threading.get_ident()))
        return number

    results = await asyncio.gather(*(worker.run(lambda n=n: work(n), always) for n in range(5)))
    assert results == [0, 1, 2, 3, 4]
    assert [number for number, _ in ran] == results
    assert len({thread for _, thread in ran} | {threading.get_ident()}) == 2


async def test_the_thread_uses_the_number_of_torch_threads_it_was_given(worker):
    assert await worker.run(torch.get_num_threads, always) == 1


async def test_every_other_thread_is_held_to_one_so_that_openmp_need_not_sleep():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    worker = Worker()
    try:
        assert torch.get_num_threads() == 1
        assert await worker.run(torch.get_num_threads, always) == 2
        assert await asyncio.to_thread(torch.get_num_threads) == 1, "a thread that began later took more"
        assert await worker.run(torch.get_num_threads, always) == 2
    finally:
        worker.close()
        torch.set_num_threads(before)


async def test_work_that_is_not_admitted_is_not_begun_and_does_not_block_the_next(worker):
    async def refuse():
        raise PermissionError

    begun = []
    with pytest.raises(PermissionError):
        await worker.run(lambda: begun.append(1), refuse)
    assert not begun
    assert await worker.run(lambda: 2, always) == 2


async def test_an_error_of_the_work_reaches_its_caller_alone(worker):
    failing = worker.run(lambda: 1 // 0, always)
    fine = worker.run(lambda: 1, always)
    failure, one = await asyncio.gather(failing, fine, return_exceptions=True)
    assert isinstance(failure, ZeroDivisionError)
    assert one == 1


async def test_work_whose_turn_does_not_come_in_time_is_not_begun(worker):
    release, begun = threading.Event(), []
    long = asyncio.create_task(worker.run(release.wait, always))
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await worker.run(lambda: begun.append(1), always)
    release.set()
    assert await long
    assert not begun


async def test_begun_work_is_finished_before_the_next_even_if_its_caller_goes_away(worker):
    release, log = threading.Event(), []
    gone = asyncio.create_task(worker.run(lambda: (release.wait(), log.append("first")), always))
    await asyncio.sleep(0.01)
    gone.cancel()
    following = asyncio.create_task(worker.run(lambda: log.append("second"), always))
    await asyncio.sleep(0.01)
    assert log == []
    release.set()
    await following
    assert log == ["first", "second"]


async def test_closing_waits_for_the_work_at_hand():
    worker, release, log = Worker(), threading.Event(), []
    running = asyncio.create_task(worker.run(lambda: (release.wait(), log.append("done")), always))
    await asyncio.sleep(0.01)
    release.set()
    await asyncio.to_thread(worker.close)
    assert log == ["done"]
    await running
