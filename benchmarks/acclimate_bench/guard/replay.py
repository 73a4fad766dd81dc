"""The guard on recorded streams: what clients would have been answered, had some of their rows been labelled.

The clients take turns, a batch each. Once a batch is answered, rows of it are labelled: each with the same chance
(`random`), or those that the service asks for (`asked`). Those labels count for the next answer of this client and of
every other one. The guard is the service's own, its questions too; only the store is not: the fleet's evidence is
pooled in memory and always up to date, where replicas hear of it with a delay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from acclimate_bench.accuracy.measure import (
    BATCH,
    Classes,
    Hits,
    LeftOut,
    adapted_classes,
    frozen_classes,
    obstacle,
    part_of,
)
from acclimate_bench.accuracy.methods import Method
from acclimate_bench.data.shift import Shift
from acclimate_bench.options import Progress
from acclimate_service.guard.evidence import Verdict, verdict
from acclimate_service.guard.replay import Stream, turns

Choice: TypeAlias = Literal["random", "asked"]
CHOICES: Final[tuple[Choice, ...]] = ("random", "asked")


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """What the clients of a shift sent, in the order of sending, and what was predicted with and without a method."""

    shift: str
    method: str
    labels: Classes  # [C, N]
    frozen: Classes  # [C, N]
    adapted: Classes  # [C, N]

    @property
    def frozen_right(self) -> Hits:
        """Where the frozen model is right, [C, N]."""
        return np.equal(self.frozen, self.labels)

    @property
    def adapted_right(self) -> Hits:
        """Where the adapted model is right, [C, N]."""
        return np.equal(self.adapted, self.labels)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What was concluded from one body of evidence over time.

    Args:
        untrue: verdicts that all rows of these clients, labelled or not, speak against.
        now: the last verdict.
        first: labelled rows when it was first other than "undecided".
        false_alarms: how often it became one of the untrue ones.
    """

    untrue: frozenset[Verdict]
    now: Verdict = "undecided"
    first: int | None = None
    false_alarms: int = 0

    def hear(self, now: Verdict, labelled: int) -> "Verdicts":
        """What was concluded once this was the verdict, after so many labelled rows."""
        if now == self.now:
            return self
        first = labelled if self.first is None else self.first
        return Verdicts(self.untrue, now, first, self.false_alarms + (now in self.untrue))


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One replay."""

    hits: Hits  # [C, N], where the answer that was given is right
    labelled: Hits  # [C, N], where the label was told
    fleet: Verdicts
    clients: tuple[Verdicts, ...]


def recorded_streams(shift: Shift, methods: Sequence[Method], seed: int, done: Progress) -> Iterator[Streams | LeftOut]:
    """Predict all that replays need, once for each method; arguments as in `accuracy.measure`."""
    frozen = frozen_classes(shift, done)
    for method in methods:
        reason = obstacle(method, shift)
        if reason is not None:
            yield LeftOut(method.name, shift.name, reason)
            continue
        part, adapted = part_of(method, shift), adapted_classes(method, shift, seed, done)
        yield Streams(shift.name, method.name, part.of(shift.labels), part.of(frozen), adapted)


def replay(streams: Streams, share: float, seed: int, choice: Choice = "random") -> Run:
    """Answer all streams under the guard, by the policy `follow-fleet`.

    Args:
        streams: what was predicted.
        share: chance of each row to be labelled, or budget of what is asked, 0..1.
        seed: of the order in which the clients take turns, and of which rows are labelled. With the same seed a larger
            share labels the rows of a smaller one and others, where they are random.
        choice: which rows are labelled.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(streams.labels)).tolist()
    random = rng.random(streams.labels.shape) < (share if choice == "random" else 0.0)
    given, labelled = np.empty(streams.labels.shape, bool), np.zeros(streams.labels.shape, bool)
    fleet = Verdicts(untrue(streams.frozen_right, streams.adapted_right))
    clients = [Verdicts(untrue(*both)) for both in zip(streams.frozen_right, streams.adapted_right, strict=True)]
    for turn in turns(
        [*map(Stream, streams.labels, streams.frozen, streams.adapted)],
        order=order, batch=BATCH, seed=seed, ask=share if choice == "asked" else 0.0,
        chosen=lambda client, rows: np.flatnonzero(random[client, rows]).tolist(),
    ):  # fmt: skip
        given[turn.client, turn.rows] = turn.answer == "adapted"
        if turn.told:
            labelled[turn.client, turn.rows.start + np.array(turn.told)] = True
            clients[turn.client] = clients[turn.client].hear(verdict(turn.own), turn.own.labelled)
            fleet = fleet.hear(turn.fleet.verdict(), int(labelled.sum()))
    hits = np.where(given, streams.adapted_right, streams.frozen_right)
    return Run(hits, labelled, fleet, tuple(clients))


def untrue(frozen_right: Hits, adapted_right: Hits) -> frozenset[Verdict]:
    """Verdicts that contradict which model is right more often."""
    gain = int(adapted_right.sum()) - int(frozen_right.sum())
    wrong: dict[Verdict, bool] = {"harmful": gain >= 0, "trusted": gain <= 0}
    return frozenset(each for each, is_wrong in wrong.items() if is_wrong)
