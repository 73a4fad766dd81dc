"""What a run found, as tables for people and JSON for programs, always with the protocol it was found under."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter

from acclimate_bench.accuracy.measure import BATCH, LeftOut, Result
from acclimate_bench.accuracy.methods import METHODS
from acclimate_bench.errors import BenchError

R = TypeVar("R")
HARM = 2.0  # points; a client that loses more counts as harmed
HARM_NOTE = f"Change of the client that fared worst, in points / clients that lost more than {HARM:.0f} points."
HEADING = ("method", "clients x images", "mean", "vs none", "vs reference", "worst client", "largest loss", "harmed")


@dataclass(frozen=True, slots=True)
class Protocol:
    """What must be equal for accuracies to be comparable; which images were answered stands in every `Result`."""

    seed: int
    threads: int
    batch: int = BATCH
    order: str = "stored"
    reset: str = "before every client"
    precision: str = "float32"
    device: str = "cpu"
    torch: str = torch.__version__

    def __str__(self) -> str:
        return (
            f"batches of {self.batch} in {self.order} order; state reset {self.reset}; seed {self.seed}; "
            f"{self.threads} thread{'s' if self.threads > 1 else ''}; {self.precision} on {self.device}; "
            f"torch {self.torch}"
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """A result in numbers: accuracies in %, differences in points."""

    mean: float  # over the clients
    gain: float  # over the frozen model on the same images
    gap: float | None  # to the recorded accuracy of the same clients
    worst: float  # accuracy of the client with the lowest
    loss: float  # change against the frozen model of the client that fared worst; 0 when all of them gained
    harmed: int  # clients that lost more than HARM points


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one protocol."""

    protocol: Protocol
    results: tuple[Result, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def shifts(self) -> tuple[str, ...]:
        """Names of the shifts, in the order of the results."""
        return tuple(dict.fromkeys(result.shift for result in self.results))

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in the order in which they are listed; unknown ones of an earlier run come last."""
        return in_order(result.method for result in self.results)

    def find(self, method: str, shift: str) -> Result | None:
        """The result of a method on a shift, if there is one."""
        return next((r for r in self.results if (r.method, r.shift) == (method, shift)), None)

    def only(self, keep: Callable[[Result], bool]) -> "Report":
        """The report with some of the results."""
        return replace(self, results=tuple(filter(keep, self.results)))


def in_order(methods: Iterable[str]) -> tuple[str, ...]:
    """Different methods, in the order in which they are listed; unknown ones come last."""
    listed = [method.name for method in METHODS]
    found = dict.fromkeys(methods)
    return tuple(sorted(found, key=lambda name: listed.index(name) if name in listed else len(listed)))


def figures(result: Result) -> Figures:
    """The numbers of one result."""
    accuracies = [100 * count / result.images for count in result.correct]
    frozen = [100 * count / result.images for count in result.frozen]
    changes = [after - before for after, before in zip(accuracies, frozen, strict=True)]
    mean = statistics.fmean(accuracies)
    return Figures(
        mean=mean,
        gain=mean - statistics.fmean(frozen),
        gap=None if result.reference is None else mean - 100 * statistics.fmean(result.reference),
        worst=min(accuracies),
        loss=min(0.0, *changes),
        harmed=sum(change < -HARM for change in changes),
    )


def to_text(report: Report) -> str:
    """Tables in Markdown: gain and harm on all shifts side by side, then one table for each shift."""
    whole, enrolled = report.only(lambda result: not result.enrolled), report.only(lambda result: result.enrolled > 0)
    parts = [f"Top-1 accuracy in %, differences in points; {report.protocol}."]
    if whole.results:
        parts += ["## Gain over no adaptation", _overview(whole, lambda f: signed(f.gain))]
        parts += ["## Harm", HARM_NOTE, _overview(whole, lambda f: f"{f.loss:.1f} / {f.harmed}")]
        parts += [_details(whole, shift) for shift in whole.shifts]
    if enrolled.results:
        count = enrolled.results[0].enrolled
        parts += [
            f"## With {count} labelled images of each client",
            f"Not comparable with the tables above: the first {count} images of each client are given with labels "
            "and not answered; `none` is measured on the same images as the method.",
            *(_details(enrolled, shift) for shift in enrolled.shifts),
        ]
    if report.left_out:
        parts += ["## Left out", left_out(report.left_out)]
    return "\n\n".join(parts) + "\n"


def rounded(number: float, places: int) -> float:
    """Rounded, ties away from zero: means are multiples of 0.0125, so ties are common."""
    return round(number + math.copysign(1e-9, number), places) + 0.0  # adding 0 turns -0.0 into 0.0


def signed(points: float, places: int = 2) -> str:
    """A difference as it is printed."""
    return f"{rounded(points, places):+.{places}f}"


def to_json(report: Report) -> str:
    """The report with its figures, which `from_json` reads back."""
    results = [{**asdict(result), "figures": asdict(figures(result))} for result in report.results]
    left_out = [asdict(entry) for entry in report.left_out]
    return json.dumps({"protocol": asdict(report.protocol), "results": results, "left_out": left_out}, indent=1) + "\n"


def from_json(path: Path) -> Report:
    """Read what `to_json` wrote; raises BenchError as `read_as`."""
    return read_as(Report, path)


def merge(reports: Sequence[Report]) -> Report:
    """Several runs as one, such as one for each shift; raises BenchError as `require_one_protocol`."""
    require_one_protocol(str(report.protocol) for report in reports)
    results = tuple(result for report in reports for result in report.results)
    return Report(reports[0].protocol, results, tuple(entry for report in reports for entry in report.left_out))


def read_as(kind: type[R], path: Path) -> R:
    """A report of this kind that was written as JSON.

    Raises:
        BenchError: the file cannot be read or holds something else.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} is not what --json of this command writes: {error}") from error


def require_one_protocol(protocols: Iterable[str]) -> None:
    """Refuse to let results stand side by side that cannot.

    Raises:
        BenchError: the protocols differ.
    """
    found = tuple(dict.fromkeys(protocols))
    if len(found) > 1:
        raise BenchError(f"these runs cannot be compared, their protocols differ: {'; and '.join(found)}")


def _overview(report: Report, cell: Callable[[Figures], str]) -> str:
    def row(method: str) -> list[str]:
        found = [report.find(method, shift) for shift in report.shifts]
        return [method, *("-" if result is None else cell(figures(result)) for result in found)]

    return table(["method", *report.shifts], [row(method) for method in report.methods if method != "none"])


def _details(report: Report, shift: str) -> str:
    rows = [_row(result) for result in report.results if result.shift == shift]
    return f"### {shift}\n\n{table(HEADING, rows)}"


def _row(result: Result) -> list[str]:
    f = figures(result)
    return [
        result.method,
        f"{len(result.clients)} x {result.images}",
        f"{rounded(f.mean, 2):.2f}",
        signed(f.gain),
        "" if f.gap is None else signed(f.gap),
        f"{f.worst:.1f}",
        f"{f.loss:.1f}",
        str(f.harmed),
    ]


def left_out(entries: Iterable[LeftOut]) -> str:
    """A list of what was left out, with what shares a reason together."""
    shifts: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        shifts.setdefault((entry.method, entry.reason), []).append(entry.shift)
    methods: dict[tuple[str, str], list[str]] = {}
    for (method, reason), found in shifts.items():
        methods.setdefault((", ".join(found), reason), []).append(f"`{method}`")
    return "\n".join(f"- {', '.join(found)} on {where}: {reason}." for (where, reason), found in methods.items())


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal; all but the first to the right."""
    cells = [list(heading), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heading))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join([first, *others])} |"

    rule = [f"{'-' * (width - 1)}{':' if i else '-'}" for i, width in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])
