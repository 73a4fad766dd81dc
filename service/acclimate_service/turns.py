"""First come, first served, one at a time for each key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Expired(Exception):
    """The turn did not come in time."""


class Turns:
    """One holder per key at a time; keys that nobody holds or waits for take no memory."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    @asynccontextmanager
    async def hold(self, key: str, patience: float | None = None) -> AsyncIterator[None]:
        """Wait for the turn of this key, at most `patience` seconds, and keep it for the block.

        Raises:
            Expired: others held it longer than that.
        """
        lock, count = self._queues.get(key, (asyncio.Lock(), 0))
        self._queues[key] = lock, count + 1
        try:
            async with holding(lock, patience):
                yield
        finally:
            _, count = self._queues[key]
            if count == 1:
                del self._queues[key]
            else:
                self._queues[key] = lock, count - 1


@asynccontextmanager
async def holding(lock: asyncio.Lock, patience: float | None) -> AsyncIterator[None]:
    """Wait for a lock, at most `patience` seconds, and keep it for the block.

    Raises:
        Expired: others held it longer than that.
    """
    try:
        async with asyncio.timeout(patience):
            await lock.acquire()
    except TimeoutError:
        raise Expired from None
    try:
        yield
    finally:
        lock.release()
