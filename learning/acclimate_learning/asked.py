"""What few labels make of adapters: those that the service would ask for, told as soon as it asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from acclimate_adapters import FrozenModel
from acclimate_adapters.portfolio import Portfolio
from acclimate_learning.judging import BATCH, Judgement, Predicted
from acclimate_store.manifest import HARM

RUNS: Final = 5
"""Replays, each with other lots by which rows are asked for."""
PORTFOLIO: Final = "portfolio"


class Replay(Protocol):
    """The guard of the service, which whoever offers the command brings along."""

    def __call__(
        self,
        streams: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]],
        *,
        share: float,
        seed: int,
        batch: int,
        portfolio: Portfolio | None = None,
        model: FrozenModel | None = None,
    ) -> Sequence[tuple[NDArray[np.bool_], int]]:
        """For each client where the answer is right, [N], and how many labels it told.

        Args:
            streams: of each client labels, frozen and adapted classes, [N]; of a portfolio classes of its arms, [N, A].
            share: budget of what is asked, as share of all rows, 0..1.
            seed: of what is drawn.
            batch: rows of a batch.
            portfolio, model: whose arms predicted the streams; None if it was another adapter.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What clients are answered with a budget of labels: by a portfolio, or by an adapter that the guard may overrule.

    Args:
        adapter: its name.
        share: the budget, as share of all rows, 0..1.
        spent: share of the rows that were labelled, 0..1.
        accuracy: of each client's answers, [clients], 0..1; mean of the runs.
        gain: over the frozen model, mean of clients and runs, -1..1.
        worst: gain of the client that fared worst in any run.
        harmed: share of clients that lose more than `HARM`, mean of the runs.
    """

    adapter: str
    share: float
    spent: float
    accuracy: NDArray[np.float64]
    gain: float
    worst: float
    harmed: float

    def figures(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        named = ("adapter", "share", "spent", "gain", "worst", "harmed")
        return {**{name: getattr(self, name) for name in named}, "accuracy": self.accuracy.tolist()}


def with_labels(
    told: Judgement, share: float, replay: Replay, portfolio: Portfolio | None = None, model: FrozenModel | None = None
) -> Asked:
    """Replay what an adapter predicted of all clients; of a portfolio with the adapter and its model."""
    streams = [(each.labels, each.frozen, _classes(each, portfolio, model)) for each in told.predicted]
    runs = [
        replay(streams, share=share, seed=seed, batch=BATCH, portfolio=portfolio, model=model)
        for seed in range(RUNS if share else 1)
    ]
    accuracy = np.array([[right.mean() for right, _ in run] for run in runs])
    gains = accuracy - told.frozen
    return Asked(
        adapter=told.adapter,
        share=share,
        spent=sum(labels for run in runs for _, labels in run) / len(runs) / sum(len(each[0]) for each in streams),
        accuracy=accuracy.mean(0),
        gain=float(gains.mean()),
        worst=float(gains.min()),
        harmed=float((gains < -HARM - 1e-9).mean()),
    )


def _classes(of: Predicted, portfolio: Portfolio | None, model: FrozenModel | None) -> NDArray[np.int64]:
    if portfolio is None or model is None:
        return of.adapted
    if of.by_arm is None:  # its first step failed
        return np.repeat(of.frozen[:, None], len(portfolio.served(model)), axis=1)
    return of.by_arm
