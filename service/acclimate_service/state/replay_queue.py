"""Who replays on one replica, and how long those behind will have to wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

_RECENT: Final = 16
"""Entries over which the time that one takes is averaged, about."""


class Waiting(Protocol):
    """A replay, begun or not."""

    @property
    def left(self) -> int:
        """Entries that it has still to compute, as far as is known."""


class ReplayQueue:
    """Lets a few replays run at a time, in the order of their arrival.

    All at once would end together, when the last caller has given up; a few end one after the other.

    Args:
        at_once: while one computes, the next one reads what it needs.
    """

    def __init__(self, at_once: int = 2) -> None:
        self._at_once = at_once
        self._places = asyncio.Semaphore(at_once)  # first come, first served
        self._line: dict[Waiting, None] = {}
        self._entries = 0
        self._entry_seconds = 0.0

    @asynccontextmanager
    async def place(self, waiting: Waiting) -> AsyncIterator[None]:
        """Wait for a place, and keep it for the block."""
        self._line[waiting] = None
        try:
            async with self._places:
                yield
        finally:
            del self._line[waiting]

    def learn(self, seconds: float) -> None:
        """An entry took so long, beside those that were computed with it."""
        self._entries = min(self._entries + 1, _RECENT)
        each = seconds / min(self._at_once, max(1, len(self._line)))
        self._entry_seconds += (each - self._entry_seconds) / self._entries

    def seconds_until(self, waiting: Waiting) -> float:
        """About how long until this replay has ended (s), those before it included; 0 before anything is known."""
        entries = 0
        if waiting not in self._line:
            return 0.0
        for each in self._line:
            entries += each.left
            if each is waiting:
                break
        return entries * self._entry_seconds
