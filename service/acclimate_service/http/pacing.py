"""The pace at which a caller is refused, and its large bodies are read: unbounded, it would keep the loop busy.

A refusal takes the event loop about a millisecond, and a caller of some dozens of connections asks again as soon as it
is refused: 700 times a second. Fifteen uploads without end come at half a gigabyte a second. Everybody else's batches
then wait for the loop a dozen times on their way, and torch's thread for Python's lock after each of its operations.
"""

import asyncio
import time
from collections import Counter
from functools import lru_cache
from ipaddress import ip_network
from typing import Final

from starlette.requests import Request

REFUSALS_PER_S: Final = 50
"""Refusals that a caller gets in a second; further ones leave later, but for `LONGEST_S`."""
LONGEST_S: Final = 1.0
"""Longest time that a refusal is kept; no refused request need come back sooner."""
MOST_KEPT: Final = 1024
"""Refusals that are kept at a time; further ones leave at once."""
PIECE_BYTES: Final = 64 * 1024
"""What comes in at once, from which on it is part of a large body."""
BYTES_PER_S: Final = 64 * 2**20
"""Of large bodies of a caller, while others have requests under way."""
_CALLERS: Final = 4096
"""Callers beyond which those are forgotten whose time has come."""


class _Pace:
    """When each caller's next time comes."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def wait_s(self, caller: str, gap_s: float, longest_s: float) -> float:
        """Seconds until a caller's turn, at most so many; its next one comes not before `gap_s` after it."""
        now = time.monotonic()
        if len(self._next) >= _CALLERS:
            self._next = {each: later for each, later in self._next.items() if later > now}
        at = min(max(now, self._next.get(caller, now)), now + longest_s)
        self._next[caller] = at + gap_s
        return at - now


class Refusals:
    """Keeps refusals back until it is their caller's time for one."""

    def __init__(self) -> None:
        self._pace, self._kept = _Pace(), 0

    async def keep(self, caller: str) -> None:
        """Wait until a refusal of this caller may leave: the first one at once, further ones evenly."""
        wait_s = self._pace.wait_s(caller, 1 / REFUSALS_PER_S, LONGEST_S)
        if wait_s > 0 and self._kept < MOST_KEPT:
            self._kept += 1
            try:
                await asyncio.sleep(wait_s)
            finally:
                self._kept -= 1


class Uploads:
    """Says how long a connection is to rest after a piece of a large body, while others have requests under way.

    Attributes:
        under_way: requests of each address; whoever adds some takes them away again.
    """

    def __init__(self) -> None:
        self.under_way = Counter[str]()
        self._pace = _Pace()

    def leave(self, address: str, requests: int) -> None:
        """A connection of an address ends, with so many requests under way."""
        self.under_way[address] -= requests
        if not self.under_way[address]:
            del self.under_way[address]

    def rest_s(self, address: str, nbytes: int) -> float:
        """Seconds until the connection that so many bytes came on is read again; 0: at once."""
        if not any(requests for other, requests in self.under_way.items() if other != address):
            return 0.0
        gap_s = nbytes / BYTES_PER_S
        return gap_s + self._pace.wait_s(address, gap_s, LONGEST_S)


def caller_of(http: Request) -> str:
    """Who sends a request: the tenant of its key, else its address."""
    tenant: str = http.state.caller.tenant
    return tenant or network_of(http.client.host if http.client else "")


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """An address; of IPv6, where a network is what a site gets, its network."""
    return str(ip_network((address, 64), strict=False)) if ":" in address else address
