"""Times of alternatives measured in turn, so that whatever else the machine does hits all of them alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

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

    @staticmethod
    def header() -> str:
        """The heading of the rows."""
        return f"{'':<32}{'p50 ms':>9}{'p5 ms':>9}{'p95 ms':>9}{'ratio':>8}  target"

    def row(self, name: str, floor: "Timing | None" = None, target: float | None = None) -> str:
        """One line, with the ratio to a floor and whether it meets its target."""
        line = f"{name:<32}{self.median:>9.2f}{self.spread[0]:>9.2f}{self.spread[1]:>9.2f}"
        if floor is None or target is None:
            return line
        ratio = self.median / floor.median
        return f"{line}{ratio:>8.2f}  <= {target} {'met' if ratio <= target else 'MISSED'}"


def in_turn(repeats: int, *works: Callable[[], object], block: int = 1) -> tuple[Timing, ...]:
    """Time each piece of work `repeats` times, in turn, after a warm-up.

    `block` is how often a piece of work runs before the next one has its turn. More than once is fairer where they run
    in different processes: idle threads of OpenMP keep their cores busy for some milliseconds.
    """
    times: tuple[list[float], ...] = tuple([] for _ in works)
    for _ in range(WARM_UP):
        for work in works:
            work()
    for _ in range(-(-repeats // block)):
        for work, seconds in zip(works, times, strict=True):
            for _ in range(block):
                began = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - began)
    return tuple(Timing(tuple(seconds)) for seconds in times)
