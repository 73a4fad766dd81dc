"""How many batches may be under way, and how many of them may be one client's."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from acclimate_service.problems import Problem

_FEW: Final = 8
"""Batches that any client may have under way while there is a place at all."""


class Admission:
    """Places for batches. A client takes no more of them than it leaves free, so that nobody takes them all.

    This is the dynamic threshold of Choudhury and Hahne (IEEE/ACM Transactions on Networking 6(2), 1998) with a factor
    of 1: one flooding client gets half of the places, two get a third each, and some are always left for others.
    """

    def __init__(self, places: int) -> None:
        """Offer so many places."""
        self._places = places
        self._taken: Counter[str] = Counter()

    @contextmanager
    def hold(self, client: str) -> Iterator[None]:
        """Take a place for the block.

        Raises:
            Problem: `too_many_requests`.
        """
        self._check(client)
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]

    def _check(self, client: str) -> None:
        total, own = self._taken.total(), self._taken[client]
        free = self._places - total
        if free <= 0:
            raise Problem("too_many_requests", f"{total} batches are waiting already; try again shortly")
        if own >= max(_FEW, free):
            detail = f"{own} batches of this client are waiting already, and {free} places are kept for others"
            raise Problem("too_many_requests", f"{detail}; try again shortly")
