"""The one thread that runs torch."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Worker:
    """Runs one piece of work after the other, in the order of the callers, away from the event loop."""

    def __init__(self, threads: int | None = None) -> None:
        """Start the thread; `threads` are those of one torch operation, by default as many as torch would take.

        All other threads, those to come included, are held to one: OpenMP's threads wait for work without sleeping
        only while those of all callers fit on the cores, and a second caller with threads of its own makes every step
        a third slower. A thread begins with the number that was set last in any other, hence the order.
        """
        threads = threads or torch.get_num_threads()
        self._turn = asyncio.Lock()
        self._executor = ThreadPoolExecutor(1, "acclimate-torch")
        self._executor.submit(_take_threads, threads).result()
        torch.set_num_threads(1)

    async def run(self, work: Callable[[], T], admit: Callable[[], Awaitable[None]]) -> T:
        """Wait for the thread, ask `admit` whether the work is still wanted, and do it.

        Work that has begun is finished even if the caller goes away, since a thread cannot be stopped; nobody else's
        begins before.

        Raises:
            Exception: whatever `admit` or `work` raises; when `admit` does, the work is not begun.
        """
        async with self._turn:
            await admit()
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Finish the work at hand and stop the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _take_threads(number: int) -> None:
    torch.set_num_threads(number)
    torch.get_num_threads()  # what a thread has once asked for is its own; until then it takes what others set


async def always() -> None:
    """Admit work that no caller waits for."""
