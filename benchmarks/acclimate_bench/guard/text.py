"""The tables of `acclimate-bench guard`, and which of the bars were missed."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from acclimate_bench.accuracy.report import HARM, left_out, rounded, signed, table
from acclimate_bench.guard.replay import Choice
from acclimate_bench.guard.report import BELOW_BETTER, BELOW_FROZEN, Guarded, GuardReport

ACCURACY = ("shift", "method", "frozen", "adapted", "guarded", "vs better", "vs frozen", "lowest run", "bars kept")
VERDICTS = (
    "shift",
    "method",
    "largest loss, adapted",
    "guarded",
    "harmed, adapted",
    "guarded",
    "fleet's verdict after",
    "client's verdict after",
    "false alarms, fleet",
    "clients",
)
_SPENT = ("labelled, %", "harmed, %", "worst client", "accuracy")
NOTE = f"""\
`frozen`, `adapted`, `guarded`: accuracy over the second half of the streams. `vs better`: guarded against the better of
frozen and adapted, mean of the runs; `lowest run`: the run that fared worst against frozen. `bars kept`: how many runs
are as near to the better one as was asked / at most {BELOW_FROZEN:.0f} point under frozen.

`largest loss` and `harmed` (clients that lost more than {HARM:.0f} points against frozen): over whole streams, means of
the runs. `verdict after`: median of labelled rows until the first verdict, and how many had one. `false alarms`: runs,
and streams of clients, with a verdict that all rows, labelled or not, speak against."""


def to_text(report: GuardReport) -> str:
    """Tables in Markdown: for each share of rows labelled what was missed, accuracies, harm and verdicts."""
    protocol = f"{report.protocol}; clients take turns batch by batch; {report.runs} runs with other rows labelled"
    parts = [f"Top-1 accuracy in %, differences in points; {protocol}.", NOTE]
    if len(report.choices) > 1:
        parts += ["## Labels against harm", _spent(report)]
    if report.afterwards:
        parts += ["## Known only afterwards", _afterwards(report)]
    for choice in report.choices:
        for share in report.shares:
            parts += _section(report, share, choice)
    if report.left_out:
        parts += ["## Left out", left_out(report.left_out)]
    return "\n\n".join(parts) + "\n"


def _spent(report: GuardReport) -> str:
    """How many streams of clients were harmed by how many labels, by how rows were chosen; all methods and shifts."""
    heading = ("budget", *(f"{what}, {choice} rows" for choice in report.choices for what in _SPENT))
    rows = [
        [
            f"{100 * share:g} %",
            *(f"{rounded(number, 1):.1f}" for each in report.choices for number in _spent_of(report, share, each)),
        ]
        for share in report.shares
    ]
    return table(heading, rows)


def _spent_of(report: GuardReport, share: float, choice: Choice) -> tuple[float, ...]:
    results = report.only(lambda result: (result.share, result.choice) == (share, choice))
    accuracy = statistics.fmean(result.guarded for result in results)
    worst = min(outcome.loss for result in results for outcome in result.outcomes)
    return report.labelled(share, choice), report.harmed(share, choice), worst, accuracy


def _afterwards(report: GuardReport) -> str:
    """The best method of each shift, and the best one of each client."""
    heading = ("shift", "best method", "frozen", "adapted", "best of each client")
    rows = [
        [found.shift, found.method, *(f"{rounded(number, 1):.1f}" for number in (found.frozen, found.best, found.each))]
        for found in report.afterwards
    ]
    return table(heading, rows)


def _section(report: GuardReport, share: float, choice: Choice) -> list[str]:
    results = report.only(lambda result: (result.share, result.choice) == (share, choice))
    return [
        f"## {100 * share:g} % of rows labelled" + (", as they were asked for" if choice == "asked" else ""),
        "\n".join(_missed(results)),
        table(ACCURACY, _rows(report, results, ACCURACY, _accuracies)),
        table(VERDICTS, _rows(report, results, VERDICTS, _verdicts)),
    ]


def _missed(results: Sequence[Guarded]) -> Iterator[str]:
    """Which bars were met, and the misses by name."""
    allowed = BELOW_BETTER.get(results[0].share)
    if allowed is not None:
        far = [_miss(r, r.over_better.mean()) for r in results if not r.better_met]
        yield _bar(f"At most {_points(allowed)} under the better one, in the mean of the runs", len(results), far)
    under = [_miss(r, r.over_frozen.mean()) for r in results if not r.frozen_met]
    yield _bar(f"At most {_points(BELOW_FROZEN)} under frozen, in the mean of the runs", len(results), under)
    ever = [
        f"{_miss(r, r.over_frozen.min())} in {(~r.keeps_frozen).sum()}" for r in results if not r.keeps_frozen.all()
    ]
    yield _bar(
        f"At most {_points(BELOW_FROZEN)} under frozen, in each of {len(results[0].outcomes)} runs", len(results), ever
    )


def _points(number: float) -> str:
    return f"{number:.0f} point{'' if number == 1 else 's'}"


def _miss(result: Guarded, points: float) -> str:
    return f"`{result.method}` on {result.shift} ({signed(points, 1)})"


def _bar(what: str, of: int, missed: Sequence[str]) -> str:
    return f"- {what}: {of - len(missed)} of {of}" + (f"; missed by {', '.join(missed)}." if missed else ".")


def _rows(
    report: GuardReport, results: Sequence[Guarded], heading: Sequence[str], cells: Callable[[Guarded], list[str]]
) -> list[list[str]]:
    """One row for each shift and method, with dashes for those left out."""
    found = {(result.shift, result.method): cells(result) for result in results}
    nothing = ["-"] * (len(heading) - 2)
    keys = [(shift, method) for shift in report.shifts for method in report.methods]
    return [[shift, method, *found.get((shift, method), nothing)] for shift, method in keys]


def _accuracies(r: Guarded) -> list[str]:
    better, frozen = r.keeps_better, r.keeps_frozen
    return [
        *(f"{rounded(each, 1):.1f}" for each in (r.frozen, r.adapted, r.guarded)),
        *(signed(float(each), 1) for each in (r.over_better.mean(), r.over_frozen.mean(), r.over_frozen.min())),
        f"{'-' if better is None else better.sum()} / {frozen.sum()}",
    ]


def _verdicts(r: Guarded) -> list[str]:
    runs, firsts = r.outcomes, [first for outcome in r.outcomes for first in outcome.client_first]
    return [
        f"{rounded(r.adapted_loss, 1):.1f}",
        f"{rounded(statistics.fmean(each.loss for each in runs), 1):.1f}",
        str(r.adapted_harmed),
        f"{statistics.fmean(each.harmed for each in runs):.1f}",
        _after([each.fleet_first for each in runs]),
        _after(firsts),
        f"{sum(each.fleet_false > 0 for each in runs)} / {len(runs)}",
        f"{sum(each.client_false for each in runs)} / {len(firsts)}",
    ]


def _after(firsts: Sequence[int | None]) -> str:
    """Median of those there are, and how many that is."""
    reached = [first for first in firsts if first is not None]
    return f"{statistics.median(reached):.0f} ({100 * len(reached) / len(firsts):.3g} %)" if reached else "-"
