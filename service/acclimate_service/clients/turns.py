"""First come, first served, one at a time for each key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """One holder per key at a time; keys that nobody holds or waits for take no memory."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, key: str) -> bool:
        """Whether somebody holds this key, or waits for it."""
        return key in self._queues

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Wait for the turn of this key, and keep it for the block."""
        lock, count = self._queues.get(key, (asyncio.Lock(), 0))
        self._queues[key] = lock, count + 1
        try:
            async with lock:
                yield
        finally:
            _, count = self._queues[key]
            if count == 1:
                del self._queues[key]
            else:
                self._queues[key] = lock, count - 1
