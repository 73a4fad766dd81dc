"""What became of clients over time, as callers see it: read at once, or told as it happens."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from acclimate_service.errors import Problem
from acclimate_service.state import ClientScope, ClientUnknown, Point, StateStore, coarser

LOOK_S: Final = 1.0
"""Seconds between two looks for something new."""
MOST_WATCHERS: Final = 256
"""Callers that may be told at a time; further ones get 429."""
_LATEST: Final = 32
"""Points that are read at a look; of a client that is faster, some are told only by the whole timeline."""


class Timelines:
    """The timelines of the clients of one model.

    Args:
        store: the states.
        model: model scope.
        on: whether anything is noted.
    """

    def __init__(self, store: StateStore, model: str, *, on: bool) -> None:
        self._store = store
        self._model = model
        self._on = on
        self._watchers = 0

    async def of(self, client: ClientScope, since: float, resolution_s: float) -> Sequence[Mapping[str, Any]]:
        """The points of a client, the oldest first.

        Args:
            client: whose.
            since: Unix time (s); what was before is left out.
            resolution_s: points of the same so many seconds are one; 0 for all that there are.

        Raises:
            Problem: `timeline_off`.
            ClientUnknown: there is no such client.
            StateError: Redis failed.
        """
        _, points = await self._read(client)
        points = [point for point in points if point.at_ms >= 1000 * since]
        return list(map(_shown, coarser(points, resolution_s) if resolution_s else points))

    async def watch(
        self, client: ClientScope, after: int | None, ended: Callable[[], bool]
    ) -> AsyncGenerator[Mapping[str, Any] | None, None]:
        """What becomes of a client from now on, as it happens, the version that it has first; None where nothing did.

        Args:
            client: whose.
            after: version from which on; None for the present one.
            ended: whether it is time to end.

        Raises:
            Problem: `timeline_off`; `too_many_requests`.
            ClientUnknown: there is no such client, or no longer.
            StateError: Redis failed.
        """
        if self._watchers >= MOST_WATCHERS:
            raise Problem(
                "too_many_requests", f"{MOST_WATCHERS} callers watch clients of this model, which is the most"
            )
        self._watchers += 1
        try:
            version, points = await self._read(client, _LATEST)
            seen = version if after is None or after > version else after
            yield {"version": seen}
            while not ended():
                new = [point for point in points if point.version > seen]
                for point in new:
                    yield _shown(point)
                    seen = point.version
                if not new:
                    yield None
                await asyncio.sleep(LOOK_S)
                _, points = await self._read(client, _LATEST)
        finally:
            self._watchers -= 1

    async def _read(self, client: ClientScope, latest: int = 0) -> tuple[int, Sequence[Point]]:
        if not self._on:
            raise Problem("timeline_off", "ACCLIMATE_TIMELINE is off: nobody notes what becomes of clients")
        found = await self._store.timeline.read(client, self._model, latest)
        if found is None:
            raise ClientUnknown(f"there is no client {client.name!r}; it begins with its first batch")
        return found


def _shown(point: Point) -> Mapping[str, Any]:
    """A point in the words of the interface."""
    vectors = {name: value for name, value in point.measured.items() if name in ("prior", "modules")}
    at = datetime.fromtimestamp(point.at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        "version": point.version,
        "at": at,
        "batches": point.batches,
        "images": point.rows,
        "signals": {name: value for name, value in point.measured.items() if name not in vectors},
        **vectors,
        "events": point.events,
        **({"verdict": point.verdict} if point.verdict else {}),
        **({"taken_over_from": point.replica} if point.replica else {}),
    }
