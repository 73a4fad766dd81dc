"""What became of a client over time, bounded: the older, the coarser.

A point is noted with the change that it is of, by the script that makes the change durable, or stores its answer; see
`note` in `redis/scripts/_common.lua`. The list is thinned out in the background: of n batches there are left about
RATIO (1 + ln(n / RATIO)) points, to twice as many.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Final

from acclimate_service.state.encoding import Point
from acclimate_service.state.redis.keys import ClientScope
from acclimate_service.state.redis.scripts import THIN
from acclimate_service.state.redis.scripts import TIMELINE as READ
from acclimate_service.state.redis.wire import Argument, Wire

RATIO: Final = 32
"""A point of several batches stands for at most 1 in so many of those after it."""
EVERY: Final = 128
"""Versions after which the timeline is thinned out. It reads all points: four times as often, that took as long as all
else that a timeline adds to a batch."""


def grouped(batches: Sequence[int]) -> list[range]:
    """Which points are to become one: each of several stands for at most 1 in `RATIO` of what came after it.

    Args:
        batches: that each point stands for, the oldest first.
    """
    groups: list[range] = []  # the newest first
    last, after, room = 0, 0, 0  # batches of the last group; all that came after it, and 1 in `RATIO` of that
    for at in reversed(range(len(batches))):
        weight = max(1, batches[at])
        if last + weight <= room:
            groups[-1], last = range(at, groups[-1].stop), last + weight
        else:
            room, last = after // RATIO, weight
            groups.append(range(at, at + 1))
        after += weight
    return groups[::-1]


def coarser(points: Iterable[Point], resolution_s: float) -> list[Point]:
    """Points that fall into the same interval of so many seconds as one."""
    found: list[Point] = []
    for point in points:
        if found and found[-1].at_ms // (1000 * resolution_s) == point.at_ms // (1000 * resolution_s):
            found[-1] = found[-1].then(point)
        else:
            found.append(point)
    return found


class Timeline:
    """Reads the timelines of clients, and thins them out.

    Args:
        wire: exchanges with Redis.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def read(self, client: ClientScope, model: str, latest: int = 0) -> tuple[int, list[Point]] | None:
        """Version of a client, and its points, the oldest first; None: there is no such client.

        Args:
            client: whose.
            model: model scope.
            latest: only so many of the newest; 0 for all.

        Raises:
            StateCorrupt: they cannot be read.
            StoreUnavailable: Redis is away.
        """
        keys = client.noted(model)
        _, seq, stored = (await self._wire.run(READ, keys, (-latest,))).rows
        return (int(seq), [Point.decode(each) for each in stored]) if seq and int(seq) else None

    async def thin(self, client: ClientScope, model: str) -> None:
        """Let older points become fewer; nothing happens if another replica was first.

        Raises:
            StateError: as `read`.
        """
        stored: list[bytes] = await self._wire.read("LRANGE", client.timeline(model), 0, -1)
        changed: list[Argument] = []  # place, and what is there from now on: nothing where a point goes
        for group in grouped([Point.batches_of(each) for each in stored]):
            if len(group) > 1:
                first, *others = group
                merged = reduce(Point.then, [Point.decode(stored[at]) for at in group])
                changed += [first, merged.store()]
                for at in others:
                    changed += [at, b""]
        if changed:
            await self._wire.run(THIN, (client.timeline(model),), (len(stored), stored[0], stored[-1], *changed))
