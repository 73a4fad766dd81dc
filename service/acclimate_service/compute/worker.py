"""The one thread that runs torch, and the queue of those who wait for it."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch

from acclimate_service.compute.process import slice_of, take_threads
from acclimate_service.compute.shares import FLOW, Flow, Shares

T = TypeVar("T")
W = TypeVar("W")
Admit: TypeAlias = Callable[[], Awaitable[None]]
Together: TypeAlias = Callable[[Sequence[W]], Sequence[T | Exception]]
"""Does several pieces of work at once, and gives of each the result or what it raised."""

THREAD: Final = "acclimate-torch"
"""How the name of the thread begins."""
MOST_ROWS: Final = 128
"""Rows that are taken together: more gain little over two halves, and let whoever came in between wait too long."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """Somebody who waits: for the turn, and then for the outcome."""

    together: Together[Any, Any]
    work: Any
    rows: int | None  # None: it shares with nobody
    flow: Flow
    turn: asyncio.Future[None] = field(default_factory=asyncio.Future)
    admitted: bool = False
    outcome: asyncio.Future[Any] = field(default_factory=asyncio.Future)  # an error is one like any other


class Worker:
    """Runs one piece of work after the other, away from the event loop; whoever had least of it so far is next.

    Work that can be done together is: all of it that has queued up while the thread was busy, up to `MOST_ROWS`. Nobody
    waits for company: a thread that has nothing to do begins with the first that comes.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Start the thread; `threads` are those of one torch operation, by default as many as torch would take.

        The calling thread is held to one, as are those of `threads.pool`: OpenMP's threads wait for work without
        sleeping only while those of all callers fit on the cores, and a second caller with threads of its own makes
        every step a third slower.
        """
        threads = threads or torch.get_num_threads()
        self._queue: list[_Waiting] = []
        self._group: list[_Waiting] = []  # whose turn it is
        self._shares = Shares()
        self._undecided = 0  # of these, who have yet to say whether their work is still wanted
        self._began: float | None = None  # when what is at hand was begun
        self._executor = ThreadPoolExecutor(1, THREAD)
        self._executor.submit(take_threads, threads).result()
        take_threads(1)

    async def run(self, work: Callable[[], T], admit: Admit) -> T:
        """Wait for the thread, ask `admit` whether the work is still wanted, and do it.

        Work that has begun is finished even if the caller goes away, since a thread cannot be stopped; nobody else's
        begins before.

        Raises:
            Exception: whatever `admit` or `work` raises; when `admit` does, the work is not begun.
        """
        return await self.share(_alone, work, None, admit)

    async def run_slices(self, work: Generator[None, None, T], admit: Admit) -> T:
        """Like `run`, for work that lets others have a turn now and then. `admit` is asked again before each slice.

        Raises:
            Exception: whatever `admit` or `work` raises; when `admit` does, the work is given up.
        """
        try:
            while not (done := await self.run(partial(slice_of, work), admit)):
                pass
        except BaseException:
            with suppress(ValueError):  # a slice that still runs is the last one
                work.close()
            raise
        return done[0]

    async def share(self, together: Together[W, T], work: W, rows: int | None, admit: Admit) -> T:
        """Like `run`, for work that `together` may do along with that of others who wait, and name the same `together`.

        Whose `admit` raises is left out; the others go on without.

        Args:
            together: called in the thread.
            work: handed to it.
            rows: size of the work, of which at most `MOST_ROWS` come together; larger work comes alone, as does work
                whose size is None.
            admit: as in `run`.

        Raises:
            Exception: whatever `admit` raises, or `together` gives for this work.
        """
        waiting = _Waiting(together, work, rows, FLOW.get())
        self._queue.append(waiting)
        if self._group:
            self._shares.join(waiting.flow)
        else:
            self._begin()
        try:
            await waiting.turn
            await admit()  # in the caller's own task, whose deadline may end it
        except BaseException:
            self._decide(waiting, admitted=False)
            raise
        self._decide(waiting, admitted=True)
        outcome: T | BaseException = await waiting.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def busy_s(self) -> float:
        """Seconds since the work at hand was begun; 0 if there is none."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def close(self, patience_s: float = math.inf) -> bool:
        """Finish the work at hand and stop the thread; False if that takes longer than this patience."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for thread in self._executor._threads:
            thread.join(None if patience_s == math.inf else patience_s)
        return not any(thread.is_alive() for thread in self._executor._threads)

    def _begin(self) -> None:
        """Let those whose turn it is next say whether their work is still wanted; the thread is free till then.

        Nothing here or below is a task of its own: each would take the event loop one more round before a caller who
        waits for nobody is served.
        """
        self._group = self._next() if self._queue else []
        self._undecided = len(self._group)
        for waiting in self._group:
            if not waiting.turn.done():  # else its caller is just going away
                waiting.turn.set_result(None)

    def _decide(self, waiting: _Waiting, *, admitted: bool) -> None:
        if waiting in self._queue:  # its turn has not come
            self._queue.remove(waiting)
            return
        waiting.admitted = admitted
        self._undecided -= 1
        if self._undecided:
            return
        group = [each for each in self._group if each.admitted]
        if group:
            self._do(group)
        else:
            self._begin()

    def _next(self) -> list[_Waiting]:
        """Take whoever had least out of the queue, and who can be served along; equals in the order of arrival."""
        if len(self._queue) > 1:
            self._queue.sort(key=lambda waiting: self._shares.rank(waiting.flow))
        first = self._queue[0]
        group, rows = [first], first.rows or 0
        for waiting in self._queue[1:]:
            if first.rows is None or waiting.rows is None or waiting.together != first.together:
                continue
            if rows + waiting.rows > MOST_ROWS:
                break
            group.append(waiting)
            rows += waiting.rows
        taken = set(group)
        self._queue = [waiting for waiting in self._queue if waiting not in taken]
        return group

    def _do(self, group: Sequence[_Waiting]) -> None:
        work = partial(_outcomes, group[0].together, [waiting.work for waiting in group])
        loop, self._began = asyncio.get_running_loop(), time.monotonic()
        try:
            done = loop.run_in_executor(self._executor, work)
        except RuntimeError as error:  # the thread was stopped
            done = loop.create_future()
            done.set_exception(error)
        done.add_done_callback(partial(self._settle, group))

    def _settle(self, group: Sequence[_Waiting], done: asyncio.Future[Any]) -> None:
        if self._queue:
            self._charge(group)
        elif self._shares.had:
            self._shares.forget()
        self._began = None
        self._begin()
        try:
            outcomes = done.result()
        except BaseException as error:
            outcomes = [error] * len(group)
        for waiting, outcome in zip(group, outcomes, strict=True):
            if not waiting.outcome.done():  # else nobody waits for it any more
                waiting.outcome.set_result(outcome)

    def _charge(self, group: Sequence[_Waiting]) -> None:
        """Let the time that was taken count for those who shared it; by rows, of which who shares with nobody has 1."""
        each = self.busy_s / sum([done.rows or 1 for done in group])
        flows = {waiting.flow for waiting in self._queue}
        for done in group:
            self._shares.charge(done.flow, each * (done.rows or 1), flows)


def _outcomes(together: Together[W, T], works: Sequence[W]) -> Sequence[T | Exception]:
    """What became of each. An error is caught here already: a future takes no `StopIteration`, and would never end."""
    try:
        return together(works)
    except Exception as error:
        return [error] * len(works)


def _alone(works: Sequence[Callable[[], T]]) -> Sequence[T | Exception]:
    (work,) = works
    return [work()]
