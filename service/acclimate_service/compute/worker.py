"""The thread that runs torch, the queue of those who wait for it, and threads beside by which short work overtakes."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch

from acclimate_service.compute.process import slice_of, step_back, take_threads
from acclimate_service.compute.shares import FLOW, Flow, Shares
from acclimate_service.metrics import SPELLS

T = TypeVar("T")
W = TypeVar("W")
Admit: TypeAlias = Callable[[], Awaitable[None]]
Together: TypeAlias = Callable[[Sequence[W]], Sequence[T | Exception]]
"""Does several pieces of work at once, and gives of each the result or what it raised."""

THREAD: Final = "acclimate-torch"
"""How the name of the thread begins."""
MOST_ROWS: Final = 128
"""Rows that are taken together: more gain little over two halves, and let whoever came in between wait too long."""
SHORTER: Final = 3
"""How many times as long as that of others somebody's work must be at least for theirs to overtake it."""
MOST_BESIDE: Final = 2
"""Threads by which work overtakes: what has overtaken may be overtaken once more."""
PATIENCE_S: Final = 0.005
"""Seconds that work goes on before any overtakes it."""
KEPT_S: Final = 1.0
"""Seconds for which a thread beside lives on after its last work. While it is there, OpenMP's threads are more than
the cores, and sleep where they would stay awake for their next work: that makes every step slower."""
BACK: Final = 10
"""How much nicer work that is overtaken becomes: of a core that both want it gets a tenth."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """Somebody who waits: for the turn, and then for the outcome."""

    together: Together[Any, Any]
    work: Any
    rows: int | None  # None: it shares with nobody
    flow: Flow
    seconds: float  # that it is expected to take
    turn: asyncio.Future[None] = field(default_factory=asyncio.Future)
    lane: "_Lane | None" = None  # None: its turn has not come
    admitted: bool = False
    began: float = 0.0
    outcome: asyncio.Future[Any] = field(default_factory=asyncio.Future)  # an error is one like any other


class _Lane:
    """A thread, and what it is at.

    Attributes:
        group: whose turn it is.
        undecided: of these, how many have yet to say whether their work is still wanted.
        began: when what is at hand was begun; None while there is nothing.
        ended: when it had something to do last.
        stepped_back: whether what is at hand was overtaken.
    """

    def __init__(self, threads: int) -> None:
        self.group: list[_Waiting] = []
        self.undecided = 0
        self.began: float | None = None
        self.ended = 0.0
        self._threads, self._closed = threads, False
        self._start()

    def _start(self) -> None:
        self.stepped_back, self.executor = False, ThreadPoolExecutor(1, THREAD)
        self._thread = self.executor.submit(self._prepare).result()

    def _prepare(self) -> int:
        take_threads(self._threads)
        return threading.get_native_id()

    def step_back(self) -> None:
        """Have the work at hand leave the cores to what overtakes it, where both want them."""
        if self.began is not None and not self.stepped_back:
            self.stepped_back = True
            step_back(self._thread, BACK)

    def renew(self) -> None:
        """Have another thread do what is next: one that stepped back may not come forward."""
        if not self._closed:
            self.executor.shutdown(wait=False)
            self._start()

    @property
    def busy_s(self) -> float:
        """Seconds since the work at hand was begun; 0 if there is none."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def may_be_overtaken(self, waiting: _Waiting) -> bool:
        """Whether somebody's work at hand is so much longer than that of somebody who waits."""
        longest = max([each.seconds for each in self.group], default=0.0)
        return SHORTER * waiting.seconds <= longest and waiting.seconds < math.inf

    def close(self, patience_s: float) -> bool:
        """Finish the work at hand and stop the thread; False if that takes longer than this patience."""
        self._closed = True
        self.executor.shutdown(wait=False, cancel_futures=True)
        for thread in self.executor._threads:
            thread.join(None if patience_s == math.inf else patience_s)
        return not any(thread.is_alive() for thread in self.executor._threads)


class Worker:
    """Runs one piece of work after the other, away from the event loop; whoever had least of it so far is next.

    Work that can be done together is: all of it that has queued up while the thread was busy, up to `MOST_ROWS`. Nobody
    waits for company: a thread that has nothing to do begins with the first that comes.

    Nobody waits for the end of others' much longer work, which cannot be interrupted: another thread does theirs
    beside, and what it overtakes leaves the cores to it. That thread is there only as long as it is wanted.
    """

    def __init__(self, threads: int | None = None, *, overtaking: bool = True) -> None:
        """Start the thread; `threads` are those of one torch operation, by default as many as torch would take.

        The calling thread is held to one, as are those of `threads.pool`: OpenMP's threads wait for work without
        sleeping only while those of all callers fit on the cores, and a second caller with threads of its own makes
        every step a third slower.

        Without `overtaking` everything is done in the one thread, as where a device takes one thing after the other
        anyhow.
        """
        self._threads = threads or torch.get_num_threads()
        self._queue: list[_Waiting] = []
        self._lane = _Lane(self._threads)
        self._beside: list[_Lane] = []
        self._overtaking = overtaking
        self._timer: asyncio.TimerHandle | None = None  # until somebody may overtake
        self._shares = Shares()
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

    async def share(
        self, together: Together[W, T], work: W, rows: int | None, admit: Admit, seconds: float = math.inf
    ) -> T:
        """Like `run`, for work that `together` may do along with that of others who wait, and name the same `together`.

        Whose `admit` raises is left out; the others go on without.

        Args:
            together: called in the thread.
            work: handed to it.
            rows: size of the work, of which at most `MOST_ROWS` come together; larger work comes alone, as does work
                whose size is None.
            admit: as in `run`.
            seconds: that the work is expected to take; by default it may take any time.

        Raises:
            Exception: whatever `admit` raises, or `together` gives for this work.
        """
        waiting, came = _Waiting(together, work, rows, FLOW.get(), seconds), time.monotonic()
        self._queue.append(waiting)
        if self._lane.group:
            self._shares.join(waiting.flow)
            self._overtake()
        else:
            self._begin(self._lane, self._next())
        try:
            await waiting.turn
            await admit()  # in the caller's own task, whose deadline may end it
        except BaseException:
            self._decide(waiting, admitted=False)
            raise
        self._decide(waiting, admitted=True)
        outcome: T | BaseException = await waiting.outcome
        if (spells := SPELLS.get()) is not None:
            spells.append(("queue", came, waiting.began))
            spells.append(("compute", waiting.began, time.monotonic()))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def busy_s(self) -> float:
        """Seconds since the work at hand was begun; 0 if there is none. What overtakes it does not count."""
        return self._lane.busy_s

    def close(self, patience_s: float = math.inf) -> bool:
        """Finish the work at hand and stop the threads; False if that takes longer than this patience, for each."""
        ended = [lane.close(patience_s) for lane in (self._lane, *self._beside)]
        return all(ended)

    def _begin(self, lane: _Lane, group: list[_Waiting]) -> None:
        """Let those whose turn it is next say whether their work is still wanted; the thread is free till then.

        Nothing here or below is a task of its own: each would take the event loop one more round before a caller who
        waits for nobody is served.
        """
        lane.group, lane.undecided = group, len(group)
        for waiting in group:
            waiting.lane = lane
            if not waiting.turn.done():  # else its caller is just going away
                waiting.turn.set_result(None)

    def _decide(self, waiting: _Waiting, *, admitted: bool) -> None:
        lane = waiting.lane
        if lane is None:  # its turn has not come
            self._queue.remove(waiting)
            return
        waiting.admitted = admitted
        lane.undecided -= 1
        if lane.undecided:
            return
        lane.group = [each for each in lane.group if each.admitted]
        if lane.group:
            self._do(lane)
        else:
            self._go_on(lane)

    def _go_on(self, lane: _Lane) -> None:
        """Let the thread, which has nothing to do, begin with what is next of those who wait."""
        if lane is not self._lane:
            lane.ended = time.monotonic()
            asyncio.get_running_loop().call_later(KEPT_S, self._retire, lane, lane.ended)
        elif self._queue:
            self._begin(lane, self._next())
        if self._queue:
            self._overtake()

    def _overtake(self) -> None:
        """Let work that waits overtake all work at hand, if that is much longer and has gone on for a while."""
        if not self._overtaking or self._timer is not None:
            return
        busy, free = self._busy(), [lane for lane in self._beside if not lane.group]

        def shorter(waiting: _Waiting) -> bool:
            return all(lane.may_be_overtaken(waiting) for lane in busy)

        if len(busy) > MOST_BESIDE or not any(map(shorter, self._queue)):
            return
        wait_s = PATIENCE_S - min([lane.busy_s for lane in busy], default=math.inf)
        if wait_s > 0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look_again)
            return
        if not free:
            free.append(_Lane(self._threads))
            self._beside += free
        for lane in busy:
            lane.step_back()
        self._begin(free[0], self._next(shorter))

    def _look_again(self) -> None:
        self._timer = None
        self._overtake()

    def _retire(self, lane: _Lane, ended: float) -> None:
        """End a thread beside if it has had nothing to do since."""
        if lane in self._beside and lane.ended == ended and not lane.group:
            self._beside.remove(lane)
            lane.close(0.0)

    def _next(self, wanted: Callable[[_Waiting], bool] | None = None) -> list[_Waiting]:
        """Take whoever had least out of the queue, and who can be served along; equals in the order of arrival.

        Args:
            wanted: of whom; by default of all.
        """
        if len(self._queue) > 1:
            self._queue.sort(key=lambda waiting: self._shares.rank(waiting.flow))
        queue = self._queue if wanted is None else list(filter(wanted, self._queue))
        if not queue:
            return []
        first = queue[0]
        group, rows = [first], first.rows or 0
        for waiting in queue[1:]:
            if first.rows is None or waiting.rows is None or waiting.together != first.together:
                continue
            if rows + waiting.rows > MOST_ROWS:
                break
            group.append(waiting)
            rows += waiting.rows
        taken = set(group)
        self._queue = [waiting for waiting in self._queue if waiting not in taken]
        return group

    def _do(self, lane: _Lane) -> None:
        group = lane.group
        work = partial(_outcomes, group[0].together, [waiting.work for waiting in group])
        loop, lane.began = asyncio.get_running_loop(), time.monotonic()
        for waiting in group:
            waiting.began = lane.began
        try:
            done = loop.run_in_executor(lane.executor, work)
        except RuntimeError as error:  # the thread was stopped
            done = loop.create_future()
            done.set_exception(error)
        done.add_done_callback(partial(self._settle, lane, group))
        if self._queue:
            self._overtake()

    def _settle(self, lane: _Lane, group: Sequence[_Waiting], done: asyncio.Future[Any]) -> None:
        if self._queue:
            self._charge(lane, group)
        elif self._shares.had and self._busy() == [lane]:
            self._shares.forget()
        lane.began, lane.group = None, []
        if lane.stepped_back:
            lane.renew()
        if self._queue or lane is not self._lane:
            self._go_on(lane)
        try:
            outcomes = done.result()
        except BaseException as error:
            outcomes = [error] * len(group)
        for waiting, outcome in zip(group, outcomes, strict=True):
            if not waiting.outcome.done():  # else nobody waits for it any more
                waiting.outcome.set_result(outcome)

    def _busy(self) -> list[_Lane]:
        return [lane for lane in (self._lane, *self._beside) if lane.group]

    def _charge(self, lane: _Lane, group: Sequence[_Waiting]) -> None:
        """Let the time that was taken count for those who shared it; by rows, of which who shares with nobody has 1."""
        each = lane.busy_s / sum([done.rows or 1 for done in group])
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
