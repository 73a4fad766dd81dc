"""How many images may be under way, and how many of them may be one client's."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from acclimate_service.problems import Problem


class WaitingRows:
    """Room for images that were read and wait for their turn, or for their answer.

    A client that has some under way may have no more than it leaves free, as with the places of batches. A batch that
    meets nobody else's is always let in, however large.
    """

    def __init__(self, room: int) -> None:
        """Offer room for so many."""
        self._room = room
        self._taken: Counter[str] = Counter()

    @contextmanager
    def hold(self, client: str, rows: int) -> Iterator[None]:
        """Take room for so many images for the block.

        Raises:
            Problem: `too_many_requests`.
        """
        self._check(client, rows)
        self._taken[client] += rows
        try:
            yield
        finally:
            self._taken[client] -= rows
            if not self._taken[client]:
                del self._taken[client]

    def _check(self, client: str, rows: int) -> None:
        total, own = self._taken.total(), self._taken[client]
        free = self._room - total
        if total and rows > free:
            detail = f"{total} images are waiting already, which leaves no room for {rows} more"
            raise Problem("too_many_requests", f"{detail}; try again shortly")
        if own and own + rows > free:
            detail = f"{own} images of this client are waiting already, and room for {free} is kept for others"
            raise Problem("too_many_requests", f"{detail}; try again shortly")
