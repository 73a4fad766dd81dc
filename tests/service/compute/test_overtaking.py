"""Short work does not wait for the end of long work, which cannot be interrupted."""

import asyncio
import os
import sys
import threading

import pytest
import torch

from acclimate_service.compute import worker as module
from acclimate_service.compute.shares import FLOW
from acclimate_service.compute.worker import SHORTER, Worker

SHORT_S = 1.0
LONG_S = SHORTER * SHORT_S


@pytest.fixture
def worker():
    worker = Worker(threads=1)
    yield worker
    worker.close()


@pytest.fixture
async def long(worker):
    """The thread is at long work until the event is set."""
    release, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work():
        loop.call_soon_threadsafe(begun.set)
        release.wait()

    busy = asyncio.create_task(worker.share(lambda works: [work()], 0, None, always, seconds=LONG_S))
    await begun.wait()
    yield release
    release.set()
    await busy


async def always():
    """Admit."""


def doubled(works):
    return [2 * work for work in works]


async def test_short_work_is_done_beside_long_work(worker, long):
    for number in range(3):
        assert await worker.share(doubled, number, 1, always, seconds=SHORT_S) == 2 * number
    assert not long.is_set()


async def test_long_work_waits_for_its_turn_and_short_work_beside_it_does_not(worker, long):
    waiting = asyncio.create_task(worker.share(doubled, 5, 1, always, seconds=LONG_S))
    assert await worker.share(doubled, 1, 1, always, seconds=SHORT_S) == 2
    assert not waiting.done()
    long.set()
    assert await waiting == 10


async def test_who_had_least_overtakes_first(worker, long):
    done = []

    def note(works):
        done.extend(works)
        return works

    async def ask(caller, client, seconds):
        FLOW.set(("model", caller, client))
        for _ in range(3):
            await worker.share(note, client, None, always, seconds=seconds)

    begun = threading.Event()
    first = asyncio.create_task(worker.share(lambda works: [begun.wait()], 0, None, always, seconds=SHORT_S))
    flood = [asyncio.create_task(ask("flood", f"flood-{number}", SHORT_S)) for number in range(5)]
    await asyncio.sleep(0)
    light = asyncio.create_task(ask("light", "light", SHORT_S))
    await asyncio.sleep(0)
    begun.set()
    await asyncio.gather(first, light, *flood)
    assert done.index("light") <= 1, done


async def test_nothing_overtakes_short_work(worker):
    release = threading.Event()
    first = asyncio.create_task(worker.share(lambda works: [release.wait()], 0, None, always, seconds=SHORT_S))
    second = asyncio.create_task(worker.share(doubled, 1, 1, always, seconds=SHORT_S))
    await asyncio.sleep(5 * module.PATIENCE_S)
    assert not second.done()
    release.set()
    assert await asyncio.gather(first, second) == [True, 2]


async def test_nothing_overtakes_where_there_is_one_device():
    worker, release = Worker(threads=1, overtaking=False), threading.Event()
    long = asyncio.create_task(worker.share(lambda works: [release.wait()], 0, None, always, seconds=LONG_S))
    short = asyncio.create_task(worker.share(doubled, 1, 1, always, seconds=SHORT_S))
    await asyncio.sleep(5 * module.PATIENCE_S)
    assert not short.done()
    release.set()
    assert await asyncio.gather(long, short) == [True, 2]
    worker.close()


async def test_what_overtakes_is_computed_by_as_many_threads_and_the_second_thread_ends(worker, long, monkeypatch):
    monkeypatch.setattr(module, "KEPT_S", 0.01)

    def threads(works):
        return [(torch.get_num_threads(), threading.current_thread())]

    number, beside = await worker.share(threads, 0, None, always, seconds=SHORT_S)
    assert number == 1
    await asyncio.to_thread(beside.join, 30)
    assert not beside.is_alive()
    assert await worker.share(doubled, 1, 1, always, seconds=SHORT_S) == 2


async def test_what_was_overtaken_may_be_overtaken_by_still_shorter_work(worker, long):
    """A batch of 64 images, which has overtaken one of 256, would hold up one of ten."""
    release, begun = threading.Event(), threading.Event()
    middle = [begun.set, release.wait]
    between = asyncio.create_task(
        worker.share(lambda works: [[each() for each in works[0]]], middle, None, always, 1.0)
    )
    await asyncio.to_thread(begun.wait, 30)
    try:
        assert await asyncio.wait_for(worker.share(doubled, 1, 1, always, seconds=1 / SHORTER), 30) == 2
    finally:
        release.set()
    await between
    assert not long.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
async def test_what_is_overtaken_leaves_the_cores_to_what_overtakes_it_and_no_later_work_does(worker):
    """Beside 256 images of another client, ten took four times as long as alone when both had the same priority."""
    release, begun = threading.Event(), threading.Event()

    def niceness(works):
        return [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]

    def work(works):
        begun.set()
        release.wait()
        return niceness(works)

    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    overtaken = asyncio.create_task(worker.share(work, 0, None, always, seconds=LONG_S))
    await asyncio.to_thread(begun.wait, 30)
    assert await worker.share(niceness, 0, None, always, seconds=SHORT_S) == usual
    release.set()
    assert await overtaken == min(usual + module.BACK, 19)
    assert await worker.share(niceness, 0, None, always, seconds=LONG_S) == usual


async def test_closing_while_work_is_overtaken_leaves_no_thread(worker):
    release, begun = threading.Event(), threading.Event()
    before = set(threading.enumerate())
    overtaken = asyncio.create_task(
        worker.share(lambda works: [(begun.set(), release.wait())], 0, None, always, seconds=LONG_S)
    )
    await asyncio.to_thread(begun.wait, 30)
    assert await worker.share(doubled, 1, 1, always, seconds=SHORT_S) == 2
    assert not worker.close(0.0)
    release.set()
    await overtaken
    left = [each for each in threading.enumerate() if each.name.startswith(module.THREAD) and each not in before]
    await asyncio.to_thread(lambda: [each.join(30) for each in left])
    assert not any(each.is_alive() for each in left)


async def test_short_work_that_is_not_admitted_is_not_begun_and_blocks_nobody(worker, long):
    async def refuse():
        raise PermissionError

    with pytest.raises(PermissionError):
        await worker.share(doubled, 1, 1, refuse, seconds=SHORT_S)
    assert await worker.share(doubled, 1, 1, always, seconds=SHORT_S) == 2


async def test_a_second_thread_that_nobody_was_admitted_to_ends(worker, long, monkeypatch):
    monkeypatch.setattr(module, "KEPT_S", 0.01)
    seen = []

    async def refuse():
        seen.extend(thread for thread in threading.enumerate() if thread not in before)
        raise PermissionError

    before = threading.enumerate()
    with pytest.raises(PermissionError):
        await worker.share(doubled, 1, 1, refuse, seconds=SHORT_S)
    (beside,) = [thread for thread in seen if thread.name.startswith(module.THREAD)]
    await asyncio.to_thread(beside.join, 30)
    assert not beside.is_alive()
