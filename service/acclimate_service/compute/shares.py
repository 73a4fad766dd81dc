"""Who has had how much of the thread of torch, so that whoever had least is next."""

from collections import defaultdict
from collections.abc import Set
from contextvars import ContextVar
from typing import Final, TypeAlias

Flow: TypeAlias = tuple[str, ...]
"""A model, a caller, who cannot choose to be many, and a client of it, which the caller names."""
FLOW: ContextVar[Flow] = ContextVar("flow", default=("", "", ""))
"""For whom the present task works; by default, for nobody who waits."""
_KEPT: Final = 4096
"""Flows beyond which those are forgotten for whom it makes no difference."""


class Shares:
    """Least attained service: first among models, then among the callers of one, then among the clients of a caller.

    Whoever comes anew counts as if it had had what each of those has had by now who wait all the time, the virtual time
    of generalised processor sharing (Parekh and Gallager, IEEE/ACM Transactions on Networking 1(3), 1993): nobody saves
    up shares, and nobody waits for an endless row of newcomers.

    Attributes:
        had: seconds of each flow and what it is part of; empty while nobody has had to wait.
    """

    def __init__(self) -> None:
        self.had: dict[tuple[str, ...], float] = {}
        self._time: defaultdict[tuple[str, ...], float] = defaultdict(float)  # among all models, and within each path

    def join(self, flow: Flow) -> None:
        """Begin to wait."""
        for path in _paths(flow):
            self.had[path] = max(self.had.get(path, 0.0), self._time[path[:-1]])

    def rank(self, flow: Flow) -> tuple[float, ...]:
        """The lower, the sooner."""
        return tuple([self.had[path] for path in _paths(flow)])

    def charge(self, flow: Flow, seconds: float, waiting: Set[Flow]) -> None:
        """Somebody has had the thread for so long, while others waited."""
        busy = waiting | {flow}
        for path in _paths(flow):
            among = path[:-1]
            self._time[among] += seconds / len({each[: len(path)] for each in busy if each[: len(among)] == among})
            self.had[path] = self.had.get(path, 0.0) + seconds
        if len(self.had) > _KEPT:
            self._prune(busy)

    def forget(self) -> None:
        """Nobody waits: everybody begins anew."""
        self.had.clear()
        self._time.clear()

    def _prune(self, busy: Set[Flow]) -> None:
        """Forget those who would count for the same if they came anew."""
        kept = {path for flow in busy for path in _paths(flow)}
        self.had = {path: had for path, had in self.had.items() if path in kept or had > self._time[path[:-1]]}
        among = {path[:-1] for path in self.had}
        self._time = defaultdict(float, {path: time for path, time in self._time.items() if path in among})


def _paths(flow: Flow) -> list[tuple[str, ...]]:
    return [flow[:length] for length in range(1, len(flow) + 1)]
