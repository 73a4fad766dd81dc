"""Times of alternatives measured in turn, so that whatever else the machine does hits all of them alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from acclimate_bench.cost.report import verdict

COLUMNS = ("p50", "p5", "p95", "ratio", "target")
WARM_UP = 5


@dataclass(frozen=True)
class Timing:
    """Times of one piece of work, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return 1000 * statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """5 % and 95 % quantiles in milliseconds."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[len(ordered) // 20], 1000 * ordered[-1 - len(ordered) // 20]

    def cells(self, floor: "Timing | None" = None, target: float | None = None) -> tuple[object, ...]:
        """A row under `COLUMNS`, with the ratio to a floor and whether it meets its target."""
        if floor is None:
            return self.median, *self.spread, "", ""
        ratio = self.median / floor.median
        return self.median, *self.spread, ratio, verdict(ratio, target)


def in_turn(repeats: int, *works: Callable[[], object]) -> tuple[Timing, ...]:
    """Time each piece of work of this process `repeats` times, in turn, after a warm-up."""
    times: tuple[list[float], ...] = tuple([] for _ in works)
    for _ in range(WARM_UP):
        for work in works:
            work()
    for _ in range(repeats):
        for work, seconds in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return tuple(Timing(tuple(seconds)) for seconds in times)
