"""One run: a fleet, its callers, chaos, and the verdict."""

import random
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from exactly_once import chaos, streams
from exactly_once.callers import Caller, Ledger, Work, groups
from exactly_once.changes import Changer
from exactly_once.fleet import EXPECTED_ENDS, Fleet
from exactly_once.verdict import Verdict, judge

from acclimate_client import Client

REPLICAS: tuple[Mapping[str, int], ...] = ({"inline_max": 4096}, {}, {"inline_max": 2**24})
"""One that keeps next to nothing inline, one as it comes, one that keeps everything: they must agree."""
ADAPTERS = {"atp": 30, "fedcal": 10}
CALLERS = 8
CHANGERS = 4
"""Clients that are labelled, configured, reset, given states and deleted between their batches."""


@dataclass(frozen=True)
class Report:
    """What a run did and what came of it."""

    seed: int
    seconds: float
    ledger: Ledger
    dealt: Mapping[str, int]
    ends: Mapping[str, int]
    refusals: Mapping[str, int]
    verdict: Verdict

    def __str__(self) -> str:
        replays = Counter(each.replayed for each in self.ledger.acknowledgements)
        return "\n".join(
            (
                f"seed {self.seed}: {self.ledger.batches} batches acknowledged in {self.seconds:.0f} s",
                f"answers: {_listed(replays)}",
                f"chaos: {_listed(self.dealt)}",
                f"replicas ended: {_listed(self.ends)}",
                f"retries by cause: {_listed(self.ledger.failures)}",
                f"5xx at nginx: {_listed(self.refusals)}",
                f"lost {self.verdict.lost}, doubled {self.verdict.doubled}, worst difference {self.verdict.worst:.2g}",
                *self.verdict.violations,
            )
        )


def run(seed: int, batches: int, directory: Path) -> Report:
    """Send so many batches of 40 clients to three replicas while blows fall, and judge the answers.

    Args:
        seed: draws what is sent and what happens, though not who is faster.
        batches: in all, shared evenly.
        directory: of the database and the logs.
    """
    works = plan_works(seed, batches)
    total = sum(len(work.batches) for work in works)
    ledger = Ledger()
    began = time.monotonic()
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(directory, REPLICAS, sticky=False))
        blows = chaos.Chaos(fleet)
        sdks = [stack.enter_context(Client(fleet.balancer.url, max_retries=0)) for _ in range(CALLERS)]
        callers = [Caller(sdk, ledger, f"caller {seed} {number}") for number, sdk in enumerate(sdks)]
        shares = [works[number::CALLERS] for number in range(CALLERS)]
        bundle = streams.load_bundle()
        changers = [
            Changer(callers[number], f"changing-{number}", streams.batches(number, 20), bundle)
            for number in range(CHANGERS)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(CALLERS + CHANGERS))
        with blows.during(chaos.plan(seed, total), lambda: ledger.batches):
            changing = [pool.submit(each.run, f"changes {seed}", batches // 50) for each in changers]
            list(pool.map(Caller.run, callers, shares))
            for each in changing:
                each.result()
        versions = {work.client: callers[0].close_up(work) for work in works}
        refusals = fleet.balancer.failures()
    verdict = judge(works, ledger, versions, bundle)
    strange = set(fleet.ends) - set(EXPECTED_ENDS.values())
    verdict.violations += [f"a replica ended by itself, {end}" for end in strange]
    return Report(seed, time.monotonic() - began, ledger, blows.dealt, fleet.ends, refusals, verdict)


def plan_works(seed: int, batches: int) -> list[Work]:
    """What every client sends."""
    adapters = [adapter for adapter, clients in ADAPTERS.items() for _ in range(clients)]
    each = batches // len(adapters)
    return [
        Work(
            client=f"{adapter}-{number}",
            adapter=adapter,
            batches=streams.batches(number, each),
            groups=groups(random.Random(f"groups {seed} {number}"), each),
        )
        for number, adapter in enumerate(adapters)
    ]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
