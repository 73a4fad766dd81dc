"""Who has had how much of the thread of torch, so that whoever had least is next."""

from collections import defaultdict
from collections.abc import Set
from contextvars import ContextVar
from typing import Final, TypeAlias

Flow: TypeAlias = tuple[str, str]
"""A caller, who cannot choose to be many, and a client of it, which the caller names."""
FLOW: ContextVar[Flow] = ContextVar("flow", default=("", ""))
"""For whom the present task works; by default, for nobody who waits."""
_KEPT: Final = 4096
"""Flows beyond which those are forgotten for whom it makes no difference."""


class Shares:
    """Least attained service, first among callers and then among the clients of a caller.

    Whoever comes anew counts as if it had had what each of those has had by now who wait all the time, the virtual time
    of generalised processor sharing (Parekh and Gallager, IEEE/ACM Transactions on Networking 1(3), 1993): nobody saves
    up shares, and nobody waits for an endless row of newcomers.

    Attributes:
        had: seconds of each caller and of each flow; empty while nobody has had to wait.
    """

    def __init__(self) -> None:
        self.had: dict[tuple[str, ...], float] = {}
        self._time: defaultdict[tuple[str, ...], float] = defaultdict(float)  # among all callers, and within each

    def join(self, flow: Flow) -> None:
        """Begin to wait."""
        for path in (flow[:1], flow):
            self.had[path] = max(self.had.get(path, 0.0), self._time[path[:-1]])

    def rank(self, flow: Flow) -> tuple[float, float]:
        """The lower, the sooner."""
        return self.had[flow[:1]], self.had[flow]

    def charge(self, flow: Flow, seconds: float, waiting: Set[Flow]) -> None:
        """Somebody has had the thread for so long, while others waited."""
        busy = waiting | {flow}
        self._time[()] += seconds / len({caller for caller, _ in busy})
        self._time[flow[:1]] += seconds / len([client for caller, client in busy if caller == flow[0]])
        for path in (flow[:1], flow):
            self.had[path] = self.had.get(path, 0.0) + seconds
        if len(self.had) > _KEPT:
            self._prune(busy)

    def forget(self) -> None:
        """Nobody waits: everybody begins anew."""
        self.had.clear()
        self._time.clear()

    def _prune(self, busy: Set[Flow]) -> None:
        """Forget those who would count for the same if they came anew."""
        kept = {*busy, *(flow[:1] for flow in busy)}
        self.had = {path: had for path, had in self.had.items() if path in kept or had > self._time[path[:-1]]}
        callers = {path[:1] for path in self.had}
        self._time = defaultdict(
            float, {path: time for path, time in self._time.items() if not path or path in callers}
        )
