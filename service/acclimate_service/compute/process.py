"""The process set up for this work: how many cores it may use, the threads of torch, the C library's allocator.

How many threads torch takes for one operation depends on the thread that asks, and on the work.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

import torch

T = TypeVar("T")
_SLICE_S: Final = 0.01
"""How long work that can be interrupted goes on before others have a turn."""
_YIELDING: Final = 5
"""How much nicer than others: beside two busy threads on two cores it gets a quarter of one, and is not starved."""
_SETTING: Final = threading.Lock()
"""Held from setting a number of threads until it is the calling thread's own."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGEST_REUSED: Final = 32 * 2**20  # bytes; the most that glibc takes
_LARGEST_KEPT: Final = 512 * 2**20
_KEPT_AFTER: Final = 64 * 2**20


def take_threads(number: int) -> None:
    """Let torch use so many threads for each operation of the calling thread, whatever others set later."""
    with _SETTING:
        torch.set_num_threads(number)
        torch.get_num_threads()  # what a thread has once asked for is its own; until then it takes what was set last


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use only the calling thread meanwhile.

    Its other threads stay awake for milliseconds after an operation on as few as 200 numbers, and hold the cores that
    ONNX Runtime wants for the network.
    """
    before = torch.get_num_threads()
    take_threads(1)
    try:
        yield
    finally:
        take_threads(before)


def slice_of(work: Generator[None, None, T]) -> tuple[T] | None:
    """Go on with work in steps for a while; its result, if it was finished."""
    end = time.perf_counter() + _SLICE_S
    try:
        while time.perf_counter() < end:
            next(work)
    except StopIteration as done:
        return (done.value,)
    return None


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
    step_back(threading.get_native_id(), _YIELDING)


def step_back(thread: int, by: int) -> None:
    """Make a thread of this process so much nicer, for good: only the privileged may take that back."""
    if sys.platform == "linux":  # where a thread has a priority of its own; elsewhere it would be the whole process
        with suppress(OSError):  # a sandbox may forbid it, and a thread that does not begin would break the pool
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)


def available_cores(root: Path = Path("/")) -> int:
    """Cores that the affinity mask allows, and no more whole ones than the quota of any cgroup around this process.

    Threads beyond the quota are worse than useless: the kernel stops all of them for the rest of each period, while the
    others wait for the last one.

    Args:
        root: of the file system that describes the process.

    Returns:
        At least 1.
    """
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affine, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas in cores, of every level of both kinds of cgroups; levels without one are left out."""
    for folder in _folders(root):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:  # -1 is no quota either
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue


def _folders(root: Path) -> Iterator[Path]:
    """Folders that may tell a quota: of the process's own cgroup and of those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        inside = PurePosixPath(path.lstrip("/"))
        yield from (mount / level for level in (inside, *inside.parents))


def return_freed_memory() -> None:
    """Give memory back to the kernel that is freed and kept; the next activations pay for new pages, once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(_KEPT_AFTER)


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed activations for the next batch, for the whole process.

    By default it returns large blocks to the kernel, and every step pays for having each page of each activation mapped
    in and cleared anew: 15 to 20 % of an ATP step. Other C libraries are left alone.

    All threads share the main arena. glibc gives others to further threads, of pieces of 64 MiB each of which goes back
    to the kernel as soon as it is empty, whatever the thresholds say: as the states of a client come and go, a step of
    a ResNet-18 cost up to 2,900 page faults, and 4 to 8 ms more in one process than in the next.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_REUSED)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_ARENA_MAX, 1)
