"""The one thread that runs torch."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from acclimate_service.turns import holding

T = TypeVar("T")


class Worker:
    """Runs one piece of work after the other, in the order of the callers, away from the event loop."""

    def __init__(self, threads: int | None = None) -> None:
        """Start the thread; `threads` are those of one torch operation."""
        self._turn = asyncio.Lock()
        self._executor = ThreadPoolExecutor(1, "acclimate-torch", initializer=_set_threads, initargs=(threads,))

    async def run(
        self, work: Callable[[], T], admit: Callable[[], Awaitable[None]], patience: float | None = None
    ) -> T:
        """Wait for the thread, at most `patience` seconds, ask `admit` whether the work is still wanted, and do it.

        Work that has begun is finished even if the caller goes away, since a thread cannot be stopped; nobody else's
        begins before.

        Raises:
            Expired: others kept the thread longer than that; the work is not begun.
            Exception: whatever `admit` or `work` raises; when `admit` does, the work is not begun.
        """
        async with holding(self._turn, patience):
            await admit()
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Finish the work at hand and stop the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
