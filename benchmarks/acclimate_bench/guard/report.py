"""What replays of the guard found: accuracy, harm and verdicts, against what was asked of it."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from acclimate_bench.accuracy.measure import Hits, LeftOut
from acclimate_bench.accuracy.report import HARM, Protocol, in_order, read_as, require_one_protocol
from acclimate_bench.guard.replay import Choice, Run, Streams

BELOW_BETTER: Final[Mapping[float, float]] = {0.05: 2.0, 0.1: 1.0}
"""Points that the guard may stay under the better of frozen and adapted, by share of rows labelled."""
BELOW_FROZEN: Final = 1.0
"""Points that it may stay under frozen."""
_NOISE = 1e-9  # of sums of floating point numbers


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run in numbers: accuracy in %, differences in points."""

    guarded: float  # accuracy over the second half of the streams
    labelled: float  # rows of whole streams whose label was told, in %
    loss: float  # change against frozen, over whole streams, of the client that fared worst; 0 when all of them gained
    harmed: int  # clients that lost more than HARM points
    fleet_first: int | None  # labelled rows until the fleet's first verdict
    fleet_false: int  # verdicts of the fleet against the truth
    client_first: tuple[int | None, ...]  # own labelled rows of each client until its first verdict
    client_false: int  # clients with verdicts against the truth

    @classmethod
    def of(cls, run: Run, streams: Streams) -> Self:
        """The numbers of one run."""
        loss, harmed = harm(run.hits, streams.frozen_right)
        return cls(
            guarded=second_half(run.hits),
            labelled=100 * float(run.labelled.mean()),
            loss=loss,
            harmed=harmed,
            fleet_first=run.fleet.first,
            fleet_false=run.fleet.false_alarms,
            client_first=tuple(each.first for each in run.clients),
            client_false=sum(each.false_alarms > 0 for each in run.clients),
        )


@dataclass(frozen=True, slots=True)
class Guarded:
    """All runs of one method on one shift with one share of rows labelled; units as in `Outcome`."""

    shift: str
    method: str
    share: float
    clients: int
    images: int  # of each client
    frozen: float  # accuracy over the second half of the streams, and so `adapted`
    adapted: float
    adapted_loss: float
    adapted_harmed: int
    outcomes: tuple[Outcome, ...]  # one for each seed
    choice: Choice = "random"  # which rows were labelled

    @classmethod
    def of(cls, streams: Streams, share: float, runs: Iterable[Run], choice: Choice = "random") -> Self:
        """Put runs beside the frozen and the adapted model on the same streams."""
        loss, harmed = harm(streams.adapted_right, streams.frozen_right)
        return cls(
            shift=streams.shift,
            method=streams.method,
            share=share,
            clients=streams.labels.shape[0],
            images=streams.labels.shape[1],
            frozen=second_half(streams.frozen_right),
            adapted=second_half(streams.adapted_right),
            adapted_loss=loss,
            adapted_harmed=harmed,
            outcomes=tuple(Outcome.of(run, streams) for run in runs),
            choice=choice,
        )

    @property
    def guarded(self) -> float:
        """Accuracy over the second half, mean of the runs."""
        return statistics.fmean(each.guarded for each in self.outcomes)

    @property
    def over_frozen(self) -> NDArray[np.float64]:
        """By run: points over the frozen model."""
        return np.array([each.guarded - self.frozen for each in self.outcomes])

    @property
    def over_better(self) -> NDArray[np.float64]:
        """By run: points over the better of frozen and adapted model; negative where the guard costs something."""
        return np.array([each.guarded - max(self.frozen, self.adapted) for each in self.outcomes])

    @property
    def keeps_better(self) -> NDArray[np.bool_] | None:
        """By run: whether it is near enough to the better model; None for a share of which nothing was asked."""
        allowed = BELOW_BETTER.get(self.share)
        return None if allowed is None else self.over_better >= -allowed - _NOISE

    @property
    def better_met(self) -> bool:
        """Whether the mean of the runs is as near to the better model as was asked for."""
        return float(self.over_better.mean()) >= -BELOW_BETTER.get(self.share, np.inf) - _NOISE

    @property
    def frozen_met(self) -> bool:
        """Whether the mean of the runs is at most BELOW_FROZEN under the frozen model."""
        return float(self.over_frozen.mean()) >= -BELOW_FROZEN - _NOISE

    @property
    def keeps_frozen(self) -> NDArray[np.bool_]:
        """By run: whether it is at most BELOW_FROZEN under the frozen model."""
        return self.over_frozen >= -BELOW_FROZEN - _NOISE


@dataclass(frozen=True, slots=True)
class Afterwards:
    """What is best on one shift, known only afterwards: accuracy in % over the second half of the streams.

    Of the methods that answer as much as any; `each` has for each client the best of them and the frozen model.
    """

    shift: str
    frozen: float
    method: str
    best: float
    each: float

    @classmethod
    def of(cls, streams: Sequence[Streams]) -> Self:
        """The best of what several methods did for the same clients."""
        size = max(one.labels.size for one in streams)
        full = [one for one in streams if one.labels.size == size]
        best = max(full, key=lambda one: second_half(one.adapted_right))
        half = size // len(full[0].labels) // 2
        clients = [full[0].frozen_right, *(one.adapted_right for one in full)]
        each = np.max([hits[:, half:].mean(axis=1) for hits in clients], axis=0)
        frozen, adapted = second_half(best.frozen_right), second_half(best.adapted_right)
        return cls(best.shift, frozen, best.method, adapted, 100 * float(each.mean()))


@dataclass(frozen=True, slots=True)
class GuardReport:
    """All results of one protocol."""

    protocol: Protocol
    runs: int  # with the seeds 0, 1, ...
    results: tuple[Guarded, ...]
    left_out: tuple[LeftOut, ...] = ()
    afterwards: tuple[Afterwards, ...] = ()  # one for each shift

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of rows labelled, ascending."""
        return tuple(sorted({result.share for result in self.results}))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """How the labelled rows were chosen."""
        return tuple(dict.fromkeys(result.choice for result in self.results))

    def harmed(self, share: float, choice: Choice) -> float:
        """Clients that lost more than HARM points, in % of those of all methods and shifts, mean of the runs."""
        results = self.only(lambda result: (result.share, result.choice) == (share, choice))
        harmed = sum(statistics.fmean(each.harmed for each in result.outcomes) for result in results)
        return 100 * harmed / sum(result.clients for result in results)

    def labelled(self, share: float, choice: Choice) -> float:
        """Rows whose label was told, in % of those of all methods and shifts, mean of the runs."""
        results = self.only(lambda result: (result.share, result.choice) == (share, choice))
        rows = [result.clients * result.images for result in results]
        shares = [statistics.fmean(each.labelled for each in result.outcomes) for result in results]
        return sum(share * number for share, number in zip(shares, rows, strict=True)) / sum(rows)

    @property
    def shifts(self) -> tuple[str, ...]:
        """Names of the shifts, in the order of the results."""
        return tuple(dict.fromkeys(result.shift for result in self.results))

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in the order in which they are listed; unknown ones of an earlier run come last."""
        return in_order(result.method for result in self.results)

    def only(self, keep: Callable[[Guarded], bool]) -> tuple[Guarded, ...]:
        """Some of the results."""
        return tuple(filter(keep, self.results))


def second_half(hits: Hits) -> float:
    """Accuracy in % over the second half of streams [C, N]."""
    return 100 * float(hits[:, hits.shape[1] // 2 :].mean())


def harm(hits: Hits, frozen: Hits) -> tuple[float, int]:
    """Largest loss of a client [C, N] against the frozen model in points, 0 or less, and how many were harmed."""
    changes = 100 * (hits.sum(axis=1) - frozen.sum(axis=1)) / hits.shape[1]
    return min(0.0, float(changes.min())), int((changes < -HARM).sum())


def to_json(report: GuardReport) -> str:
    """The report with every run, which `from_json` reads back."""
    return TypeAdapter(GuardReport).dump_json(report).decode() + "\n"


def from_json(path: Path) -> GuardReport:
    """Read what `to_json` wrote; raises BenchError as `read_as`."""
    return read_as(GuardReport, path)


def merge(reports: Sequence[GuardReport]) -> GuardReport:
    """Several reports as one, such as one for each shift; raises BenchError as `require_one_protocol`."""
    require_one_protocol(f"{report.protocol}; {report.runs} runs" for report in reports)
    results = tuple(result for report in reports for result in report.results)
    left_out = tuple(entry for report in reports for entry in report.left_out)
    afterwards = tuple(entry for report in reports for entry in report.afterwards)
    return GuardReport(reports[0].protocol, reports[0].runs, results, left_out, afterwards)
