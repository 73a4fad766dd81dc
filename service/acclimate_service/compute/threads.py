"""How many threads torch takes for one operation: that depends on the thread that asks, and on the work."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import torch

_YIELDING: Final = 5
"""How much nicer than others: beside two busy threads on two cores it gets a quarter of one, and is not starved."""


def take_threads(number: int) -> None:
    """Let torch use so many threads for each operation of the calling thread, whatever others set later."""
    torch.set_num_threads(number)
    torch.get_num_threads()  # what a thread has once asked for is its own; until then it takes what was set last


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use only the calling thread meanwhile.

    Its other threads stay awake for milliseconds after an operation on as few as 200 numbers, and hold the cores that
    ONNX Runtime wants for the network.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pool() -> ThreadPoolExecutor:
    """Threads for reading and writing images and states, in each of which torch uses no other."""
    return ThreadPoolExecutor(thread_name_prefix="acclimate-pool", initializer=partial(take_threads, 1))


def background() -> ThreadPoolExecutor:
    """One thread for what nobody waits for, which leaves the cores to others where they want them.

    A step in torch has its threads wait for each other at every operation: on two cores, one that runs beside them at
    the same priority makes it take twice as long.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="acclimate-background", initializer=_step_back)


def _step_back() -> None:
    take_threads(1)
    if sys.platform == "linux":  # where it is the calling thread's own; elsewhere it would be the whole process
        with suppress(OSError):  # a sandbox may forbid it, and a thread that does not begin would break the pool
            os.nice(_YIELDING)
