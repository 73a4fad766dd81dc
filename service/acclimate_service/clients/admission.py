"""Admission control: how much may be under way, and how much of it may be one client's."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from acclimate_service.errors import Problem

_FEW: Final = 8
"""Batches that any client may have under way while there is a place at all."""


class DynamicThreshold:
    """Room for what is under way. A client takes no more of it than it leaves free, so that nobody takes it all.

    This is the dynamic threshold of Choudhury and Hahne (IEEE/ACM Transactions on Networking 6(2), 1998) with a factor
    of 1: one flooding client gets half of the room, two get a third each, and some is always left for others. What
    meets nothing else is always let in, however large.

    Args:
        room: how much there is.
        of: what it is counted in, as callers are told.
        few: how much any client may have under way while there is room at all.
    """

    def __init__(self, room: int, of: str, few: int = 0) -> None:
        self._room = room
        self._of = of
        self._few = few
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How much is taken."""
        return self._taken.total()

    @contextmanager
    def hold(self, client: str, amount: int = 1) -> Iterator[None]:
        """Take so much room for the block.

        Raises:
            Problem: `too_many_requests`.
        """
        total, own = self._taken.total(), self._taken[client]
        free = self._room - total
        if total and amount > free:
            detail = f"{total} {self._of} are waiting already, which leaves no room for {amount} more"
            raise Problem("too_many_requests", f"{detail}; try again shortly")
        if own and own + amount > max(self._few, free):
            detail = f"{own} {self._of} of this client are waiting already, and room for {free} is kept for others"
            raise Problem("too_many_requests", f"{detail}; try again shortly")
        self._taken[client] += amount
        try:
            yield
        finally:
            self._taken[client] -= amount
            if not self._taken[client]:
                del self._taken[client]


class Admission:
    """What may be under way.

    Attributes:
        batches: counted from before their bodies are read until they are answered, which bounds the memory of all.
        rows: images in those whose bodies have been read.
    """

    def __init__(self, max_batches: int, max_rows: int) -> None:
        self.batches = DynamicThreshold(max_batches, "batches", few=_FEW)
        self.rows = DynamicThreshold(max_rows, "images")
