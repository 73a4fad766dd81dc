"""Many writers, one client: everything acknowledged is in its history, once and in order."""

import asyncio
import hashlib
import os
import random

import pytest

from acclimate_service.state import StoreUnavailable
from acclimate_service.state.outcomes import Attempt, Committed, Conflict, Repeat
from acclimate_service.state.records import Restored
from acclimate_service.state.redis.embedded import EmbeddedRedis


def step(state: bytes, batch: bytes) -> bytes:
    """A toy adapter: any lost, doubled or swapped batch changes every later state."""
    return hashlib.sha256(state + batch).digest()


async def apply(driver, batch: bytes, rid: str) -> int:
    """What a service does with one batch, until it is applied; the version it produced."""
    loaded = await driver.load(rid)
    basis, head = loaded.basis, loaded.head
    while True:
        restored = await driver.store.read_state(driver.client, head) if head else None
        state = restored.state if isinstance(restored, Restored) else b""
        outcome = await driver.commit(basis, Attempt(rid, "f" * 32), step(state, batch), answer=batch)
        if not isinstance(outcome, Conflict):
            assert isinstance(outcome, Committed | Repeat)
            return outcome.seq
        basis, head = outcome.basis, outcome.head
        await asyncio.sleep(random.uniform(0, 0.02))


def history(seqs: dict[bytes, int]) -> bytes:
    """The state that the batches give in the order of their versions."""
    state = b""
    for batch in sorted(seqs, key=lambda batch: seqs[batch]):
        state = step(state, batch)
    return state


async def test_two_replicas_apply_a_hundred_concurrent_commits_each_exactly_once(make_driver):
    replicas = make_driver(), make_driver()
    batches = [f"{replica}:{number}".encode() for replica in range(2) for number in range(100)]
    turn = asyncio.Semaphore(8)

    async def one(index: int, batch: bytes) -> int:
        async with turn:
            return await apply(replicas[index // 100], batch, f"{index:032x}")

    seqs = await asyncio.gather(*(one(index, batch) for index, batch in enumerate(batches)))
    assert sorted(seqs) == list(range(1, 201))
    assert await replicas[0].state() == history(dict(zip(batches, seqs, strict=True)))


async def test_a_request_sent_to_two_replicas_at_once_is_applied_once(make_driver):
    replicas = make_driver(), make_driver()
    for number in range(20):
        rid = f"{number:032x}"
        seqs = await asyncio.gather(*(apply(replica, rid.encode(), rid) for replica in replicas))
        assert seqs == [number + 1, number + 1]


async def test_killing_redis_loses_nothing_that_was_acknowledged(tmp_path, make_driver):
    """With `everysec` Redis may reply before it writes while an earlier fsync is under way; `always` never does."""
    server = EmbeddedRedis(tmp_path, appendfsync="always")
    await server.start()
    seqs: dict[bytes, int] = {}
    busy = asyncio.Event()

    async def write() -> None:
        driver = make_driver(url=server.url)
        for number in range(10_000):
            batch = str(number).encode()
            seqs[batch] = await apply(driver, batch, f"{number:032x}")
            if number == 20:
                busy.set()

    writer = asyncio.create_task(write())
    await asyncio.wait_for(busy.wait(), timeout=30)
    os.kill(server.pid, 9)
    await server.stop()  # before it is started again
    with pytest.raises(StoreUnavailable):
        await writer
    async with server:
        driver = make_driver(url=server.url)
        acknowledged = len(seqs)
        head = (await driver.load()).head
        if head.seq > acknowledged:  # the last one landed, its reply was lost
            seqs[str(acknowledged).encode()] = head.seq
        assert head.seq == len(seqs)
        assert await driver.state() == history(seqs)
