"""Admission control: how much may be under way, and how much of it may be one client's."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from acclimate_service.compute.shares import Flow
from acclimate_service.errors import Problem

_FEW: Final = 8
"""Batches that any client may have under way while there is a place at all."""
_TIMES: Final = 4
"""How many times as much as it leaves free a caller may have, who may be a balancer or speak for many."""


class DynamicThreshold:
    """Room for what is under way. A client takes no more of it than it leaves free, so that nobody takes it all.

    This is the dynamic threshold of Choudhury and Hahne (IEEE/ACM Transactions on Networking 6(2), 1998) with a factor
    of 1: one flooding client gets half of the room, two get a third each, and some is always left for others. Since a
    caller may name any number of clients, all those of one together are held to the same with a factor of 4: they get
    four fifths. What meets nothing else is always let in, however large.

    Args:
        room: how much there is.
        of: what it is counted in, as callers are told.
        few: how much any client may have under way while there is room at all.

    Attributes:
        taken: how much is taken.
        most: the most that was taken at a time, until somebody lowers it.
    """

    def __init__(self, room: int, of: str, few: int = 0) -> None:
        self._room = room
        self._of = of
        self._few = few
        self._taken: Counter[Flow] = Counter()  # by clients, and by their callers
        self.taken = 0
        self.most = 0

    @contextmanager
    def hold(self, flow: Flow, amount: int = 1) -> Iterator[None]:
        """Take so much room for the block.

        Raises:
            Problem: `too_many_requests`.
        """
        free = self._room - self.taken
        if self.taken and amount > free:
            detail = f"{self.taken} {self._of} are waiting already, which leaves no room for {amount} more"
            raise Problem("too_many_requests", f"{detail}; try again shortly")
        caller = flow[:-1]
        for who, path, times in (("client", flow, 1), ("caller", caller, _TIMES)):
            own = self._taken[path]
            if own and own + amount > times * max(self._few, free):
                detail = f"{own} {self._of} of this {who} are waiting already, and room for {free} is kept for others"
                raise Problem("too_many_requests", f"{detail}; try again shortly")
        self.taken += amount
        self.most = max(self.most, self.taken)
        self._taken[flow] += amount
        self._taken[caller] += amount
        try:
            yield
        finally:
            self.taken -= amount
            for path in (flow, caller):
                self._taken[path] -= amount
                if not self._taken[path]:
                    del self._taken[path]


class Backlog:
    """Refuses what would have to wait too long for the device, by what all that is under way will take of it.

    Models have equal shares of the device, and so have the callers of a model and the clients of a caller
    (`compute.shares`). So a batch waits for no more of another client than its own client has under way with it, for no
    more of another caller than its own caller has then, and so on.

    Args:
        most_s: longest wait that is accepted.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._taken: dict[Flow, list[float]] = {}

    @contextmanager
    def hold(self, flow: Flow, seconds: float) -> Iterator[None]:
        """Count so many seconds of the device for the block.

        Raises:
            Problem: `too_many_requests`, with the time after which the wait will be short enough.
        """
        excess = (self._wait(flow, seconds) if self._taken else 0.0) - self._most_s
        if excess > 0:
            detail = (
                f"a batch of this client would wait about {1000 * (excess + self._most_s):,.0f} ms for the device, and "
                f"{1000 * self._most_s:,.0f} ms are accepted (ACCLIMATE_MAX_QUEUE_MS); try again later"
            )
            raise Problem("too_many_requests", detail, headers={"Retry-After": str(math.ceil(excess))})
        own = self._taken.setdefault(flow, [])
        own.append(seconds)
        try:
            yield
        finally:
            own.remove(seconds)
            if not own:
                del self._taken[flow]

    def _wait(self, flow: Flow, seconds: float) -> float:
        """Seconds until a batch that takes so many is begun, if nobody comes after it."""
        until = sum(self._taken.get(flow, ())) + seconds
        for length in range(len(flow), 0, -1):
            beside = defaultdict[Flow, float](float)
            for other, held in self._taken.items():
                if other[: length - 1] == flow[: length - 1] and other[:length] != flow[:length]:
                    beside[other[:length]] += sum(held)
            until += sum([min(each, until) for each in beside.values()])
        return until - seconds


class Admission:
    """What may be under way.

    Attributes:
        batches: counted from before their bodies are read until they are answered, which bounds the memory of all.
        rows: images in those whose bodies have been read.
        backlog: what they will take of the device.
    """

    def __init__(self, max_batches: int, max_rows: int, max_queue_s: float) -> None:
        self.batches = DynamicThreshold(max_batches, "batches", few=_FEW)
        self.rows = DynamicThreshold(max_rows, "images")
        self.backlog = Backlog(max_queue_s)
