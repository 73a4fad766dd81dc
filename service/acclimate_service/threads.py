"""How many threads torch takes for one operation: that depends on the thread that asks, and on the work."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch


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
