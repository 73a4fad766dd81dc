"""The clients of a tenant, page by page, with what operators ask for first: adapter, last change, verdict."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from acclimate_service.clients.clients import adaptation
from acclimate_service.clients.requests import rfc3339
from acclimate_service.compute.adapters import Configurations
from acclimate_service.guard.evidence import verdict
from acclimate_service.guard.fleet import Fleet
from acclimate_service.state import Listed, Listing

_MOST_AT_ONCE: Final = 1000
"""Keys that Redis looks at before others are served again: half a millisecond."""
_MOST_KEYS: Final = 50_000
"""Keys that are looked at for one page, which may have fewer clients for it: 25 ms of Redis."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which clients; what is None does not matter.

    Args:
        adapter: name of the adapter that they have.
        active_since: Unix time (s) that their last change is no earlier than.
        verdict: what their labels show.
    """

    adapter: str | None = None
    active_since: float | None = None
    verdict: str | None = None

    @classmethod
    def of(cls, adapter: str | None, active_since: datetime | None, verdict: str | None) -> Self:
        """As a caller says it."""
        return cls(adapter, None if active_since is None else active_since.timestamp(), verdict)


@dataclass(frozen=True, slots=True)
class Page:
    """Some clients, and where the next ones are; None after the last."""

    clients: Sequence[Mapping[str, Any]]
    cursor: str | None


class Roster:
    """Lists the clients of one model.

    Args:
        listing: of their states.
        configurations: of the model.
        fleet: what labels say; None if nobody compares.
    """

    def __init__(self, listing: Listing, configurations: Configurations, fleet: Fleet | None) -> None:
        self._listing = listing
        self._configurations = configurations
        self._fleet = fleet

    async def page(self, owner: str, wanted: Wanted, limit: int, cursor: str = "") -> Page:
        """Some of an owner's clients, in no order.

        Args:
            owner: empty for nobody's.
            wanted: which of them.
            limit: most clients of a page; it has fewer, or none, where it took long to find them.
            cursor: of the page before.

        Raises:
            StaleCursor: it is none of these servers'.
            StateError: Redis failed.
        """
        walk, rows, looked, count = await self._listing.walk(cursor), list[Mapping[str, Any]](), 0, limit
        while not walk.over and looked < _MOST_KEYS:
            clients, after = await self._listing.step(walk, owner, count)
            listed = await self._listing.describe(clients)
            found = await asyncio.gather(*(self._row(each) for each in listed if self._fits(each, wanted)))
            fitting = [row for row in found if wanted.verdict in (None, row["verdict"])]
            if len(rows) + len(fitting) > limit:
                if rows:
                    break  # the next page begins with these
                if count > 1:
                    count //= 2
                    continue
            rows += fitting
            walk, looked, count = after, looked + count, min(2 * count, _MOST_AT_ONCE)
        return Page(rows, None if walk.over else str(walk))

    def _fits(self, listed: Listed, wanted: Wanted) -> bool:
        """As far as can be told without its labels."""
        if wanted.active_since is not None and (listed.changed_ms or 0) < 1000 * wanted.active_since:
            return False
        return wanted.adapter in (None, self._configurations.describe(listed.config)["adapter"])

    async def _row(self, listed: Listed) -> Mapping[str, Any]:
        counts = None if self._fleet is None else await self._fleet.own(listed.client, listed.config)
        return {
            "client_id": listed.client.name,
            **self._configurations.describe(listed.config),
            "adaptation": adaptation(listed.paused),
            "version": listed.seq,
            "bytes": await self._listing.footprint(listed),
            "changed_at": None if listed.changed_ms is None else rfc3339(listed.changed_ms / 1000),
            "shift": listed.shift,
            "agreement": listed.agreement,
            "labelled": None if counts is None else counts.labelled,
            "gain": (counts.wins - counts.losses) / counts.labelled if counts and counts.labelled else None,
            "verdict": None if self._fleet is None or counts is None else verdict(counts, self._fleet.alpha),
        }
