"""What a replica says of itself, again and again, so that whichever is asked tells the same of all."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from prometheus_client import Histogram

from acclimate_service.metrics import Background, Metrics
from acclimate_service.state import PRESENCE_EVERY_S, Presence, StateError, Tasks

_TASK: Final = "presence"
_WINDOW_S: Final = 60
_ANSWERS: Final = ("/predict", "/infer")
"""How routes end that answer batches."""


class Speaker:
    """Tells the others of this replica, until it is closed.

    Args:
        presence: where it is told.
        name: of the replica, different after each start.
        about: what is to be told.
        background: watches over it.
    """

    def __init__(
        self, presence: Presence, name: str, about: Callable[[], Awaitable[Mapping[str, Any]]], background: Background
    ) -> None:
        self._presence = presence
        self._name = name
        self._about = about
        self._background = background
        self._tasks = Tasks(background)

    def start(self) -> None:
        """Begin to speak."""
        self._tasks.start(_TASK, self._repeat())

    async def aclose(self) -> None:
        """Take leave; where Redis is away, the others see it after some time."""
        await self._tasks.aclose()
        with suppress(StateError):
            await self._presence.tell(self._name, {})

    async def _repeat(self) -> None:
        while True:
            await self._background.run(_TASK, self._tell)
            await asyncio.sleep(PRESENCE_EVERY_S)

    async def _tell(self) -> None:
        await self._presence.tell(self._name, await self._about())


class Stages:
    """How long the stages of requests took within about a minute, each time it is looked.

    Args:
        metrics: of the service.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before = deque[dict[str, dict[float, float]]](maxlen=round(_WINDOW_S / PRESENCE_EVERY_S))

    def look(self) -> dict[str, dict[str, float | None]]:
        """Of each stage the number, and what half and 95 % of them took at most (s); None above the longest bucket."""
        now = self._counted()
        before = self._before[0] if self._before else {}
        self._before.append(now)
        return {stage: _quantiles(counts, before.get(stage, {})) for stage, counts in now.items()}

    def _counted(self) -> dict[str, dict[float, float]]:
        """Observations up to each bound of a bucket, by stage."""
        metrics, counts = self._metrics, dict[str, dict[float, float]]()
        for stage, bound, number in (
            *_buckets(metrics.request_seconds, lambda labels: "answer" * labels["route"].endswith(_ANSWERS)),
            *_buckets(metrics.phases, lambda labels: labels["phase"]),
            *_buckets(metrics.redis_seconds, lambda _: "redis"),
        ):
            of_stage = counts.setdefault(stage, {})
            of_stage[bound] = of_stage.get(bound, 0.0) + number
        return counts


def _buckets(histogram: Histogram, stage_of: Callable[[Mapping[str, str]], str]) -> Iterator[tuple[str, float, float]]:
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket") and (stage := stage_of(sample.labels)):
                yield stage, float(sample.labels["le"]), sample.value


def _quantiles(now: Mapping[float, float], before: Mapping[float, float]) -> dict[str, float | None]:
    new = {bound: number - before.get(bound, 0.0) for bound, number in sorted(now.items())}
    number = new[math.inf]

    def at_most(share: float) -> float | None:
        bound = next(bound for bound, counted in new.items() if counted >= share * number)
        return None if bound == math.inf else bound

    return {"number": number, **({"p50_s": at_most(0.5), "p95_s": at_most(0.95)} if number else {})}
