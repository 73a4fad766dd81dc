"""Whether what callers saw is one uninterrupted history of every client."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from exactly_once.callers import Acknowledgement, Ledger, Work
from exactly_once.streams import serial

from acclimate_store import Bundle

TOLERANCE = 1e-4
"""Between probabilities. Processes differ in the last bits, which add up where replicas choose memory layouts of their
own; a batch that is lost or applied twice makes far more of a difference."""


@dataclass
class Verdict:
    """What was found; a run is sound without violations.

    Attributes:
        lost: versions that no acknowledged batch has.
        doubled: versions that exist beyond one for each batch.
        worst: largest difference of a probability to the serial run.
    """

    lost: int = 0
    doubled: int = 0
    worst: float = 0.0
    violations: list[str] = field(default_factory=list)


def judge(works: Sequence[Work], ledger: Ledger, versions: Mapping[str, int], bundle: Bundle) -> Verdict:
    """Judge the whole run.

    Args:
        works: what was to be sent.
        ledger: what was answered.
        versions: of each client at the end.
        bundle: the model.
    """
    verdict = Verdict(violations=list(ledger.violations))
    for work in works:
        answers = [each for each in ledger.acknowledgements if each.client == work.client]
        start = ledger.started.get(work.client, 0)
        verdict.lost += len(set(range(start + 1, start + len(work.batches) + 1)) - {each.version for each in answers})
        verdict.doubled += max(0, versions[work.client] - start - len(work.batches))
        verdict.violations += _misplaced(work, answers, start, versions[work.client])
        verdict.violations += _repeats(answers)
        worst = _compare(work, answers, bundle)
        verdict.worst = max(verdict.worst, worst)
        if worst > TOLERANCE:
            verdict.violations.append(f"{work.client} was answered unlike the serial run, by {worst:.2g}")
    return verdict


def _misplaced(work: Work, answers: Iterable[Acknowledgement], start: int, end: int) -> Iterator[str]:
    """The batches of each group must have the versions that follow those of the group before."""
    version_of = {each.number: each.version for each in answers}
    expected = start
    for group in work.groups:
        new = [number for number in dict.fromkeys(group) if number + start >= expected]
        found = sorted(version_of.get(number, 0) for number in new)
        if found != list(range(expected + 1, expected + len(new) + 1)):
            yield f"{work.client}: batches {new} have the versions {found}, after {expected}"
        expected += len(new)
    if end != expected:
        yield f"{work.client} is at version {end} at the end; expected is {expected}"


def _repeats(answers: Iterable[Acknowledgement]) -> Iterator[str]:
    """Every answer under a key must be the first one."""
    first: dict[int, Acknowledgement] = {}
    for each in answers:
        expected = first.setdefault(each.number, each)
        what = f"{each.client}-{each.number}"
        if each.probabilities is None or expected.probabilities is None:
            yield f"{what} was answered without predictions ({each.replayed})"
        elif each.version != expected.version:
            yield f"{what} has version {each.version} and version {expected.version}"
        elif not np.allclose(each.probabilities, expected.probabilities, rtol=0, atol=TOLERANCE):
            yield f"{what} was answered in two ways"


def _compare(work: Work, answers: Sequence[Acknowledgement], bundle: Bundle) -> float:
    """Largest difference to the serial run in the order of the versions."""
    ordered = sorted({each.version: each for each in answers}.values(), key=lambda each: each.version)
    expected = serial(bundle, work.adapter, (work.batches[each.number] for each in ordered))
    return max(
        (
            float(np.abs(each.probabilities - probabilities).max())
            for each, probabilities in zip(ordered, expected, strict=True)
            if each.probabilities is not None
        ),
        default=0.0,
    )
