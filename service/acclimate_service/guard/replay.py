"""Recorded streams once more under the guard, as if some of their rows had been labelled.

The clients take turns, a batch each. Once a batch is answered some of its rows are labelled, and what was told counts
for the next answer of this client and of every other one. Records, questions and decisions are those of the service;
only the store is not: what all clients told is known everywhere at once, where replicas hear of it with a delay.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from acclimate_adapters import FrozenModel, Labelled
from acclimate_adapters.portfolio import Portfolio
from acclimate_service.guard.evidence import WEIGHT, Answer, Counts, Pooled
from acclimate_service.guard.policy import by_own, decide
from acclimate_service.guard.record import Label, Record, most_asked

Classes: TypeAlias = NDArray[np.int64]
Chosen: TypeAlias = Callable[[int, slice], Sequence[int]]
"""Which rows of a client are labelled beside those asked for: places in the batch of these rows."""
_EVERY_LABEL: Final = 1e9
"""More labels than any client has: what they might decide is open, so that rivals are always named."""


class Stream(NamedTuple):
    """One client's rows, in the order of sending."""

    labels: Classes  # [N]
    frozen: Classes  # [N]
    adapted: Classes  # [N]; of a portfolio [N, A], what each arm predicted


class Turn(NamedTuple):
    """One batch of one client."""

    client: int
    rows: slice
    answer: Answer
    adapted: Classes  # [B], that of the arm that answers
    told: tuple[int, ...]  # places in the batch that were labelled afterwards
    own: Counts  # all that the client told by then
    fleet: Pooled  # what all clients told by then


class Arms:
    """The arms of a portfolio, and what labels made of them so far.

    Here they learn nothing from labels, and never rest.

    Args:
        portfolio: the adapter.
        model: that it is for.
        clients: how many there are.
    """

    def __init__(self, portfolio: Portfolio, model: FrozenModel, clients: int) -> None:
        self._portfolio, self._model = portfolio, model
        self._states = [portfolio.init(model)] * clients
        self._counted: dict[int, tuple[int, ...]] = {}

    def answer(self, client: int, stream: Stream, rows: slice) -> Classes:
        """What the arm predicts of a batch that answers the client, [B]."""
        if self._counted:
            kinds = [sum(each) for each in zip(*self._counted.values(), strict=True)]
            shares = self._portfolio.shares(self._model, kinds)
            self._states[client] = self._portfolio.informed(self._states[client], shares)
        arm, _ = self._portfolio.rivals(self._states[client], _EVERY_LABEL) or (0, 0)
        return stream.adapted[rows, arm - 1] if arm else stream.frozen[rows]

    def rivals(self, client: int, share: float) -> tuple[int, int] | None:
        """The two best arms, as long as labels within the budget could change which of them answers."""
        return self._portfolio.rivals(self._states[client], most_asked(share))

    def tell(self, client: int, stream: Stream, rows: Sequence[int]) -> None:
        """Let a client's labels of some rows of its stream choose; among all clients it counts with its first rows."""
        predicted = torch.from_numpy(np.column_stack([stream.frozen[rows], stream.adapted[rows]]))
        told = Labelled(torch.from_numpy(stream.labels[rows]), predicted=predicted)
        self._states[client] = self._portfolio.learn(self._model, self._states[client], told)
        kinds = self._portfolio.told(self._states[client])
        if client not in self._counted or sum(kinds) <= WEIGHT:
            self._counted[client] = kinds


def turns(
    streams: Sequence[Stream],
    *,
    order: Sequence[int],
    batch: int,
    seed: int,
    ask: float = 0.0,
    chosen: Chosen = lambda client, rows: (),
    arms: Arms | None = None,
) -> Iterator[Turn]:
    """Answer all streams under the guard, by the policy `follow-fleet`.

    Args:
        streams: of the clients; a shorter one ends earlier.
        order: in which the clients take turns.
        batch: rows of a batch.
        seed: of the lots by which rows are asked for.
        ask: budget of what is asked, as share of all rows, 0..1.
        chosen: rows that are labelled without being asked for.
        arms: of the portfolio that predicted the streams; None if it was another adapter.
    """
    records, pooled, fleet = [Record() for _ in streams], dict[int, Counts](), Pooled()
    for start in range(0, max(len(each.labels) for each in streams), batch):
        for client in order:
            stream, rows = streams[client], slice(start, start + batch)
            if start >= len(stream.labels):
                continue
            request_id, record = f"{seed} {client} {start}", records[client]
            answer = decide(record.counts, fleet, "follow-fleet").answer
            adapted = stream.adapted[rows] if arms is None else arms.answer(client, stream, rows)
            frozen, labels = stream.frozen[rows].tolist(), stream.labels[rows].tolist()
            by_arm = () if arms is None else stream.adapted[rows].tolist()
            record = record.append(request_id, frozen, adapted.tolist(), answering=answer, by_arm=by_arm)
            told = tuple(chosen(client, rows))
            if ask:
                rivals = None if arms is None else arms.rivals(client, ask)
                wanted = by_own(record.counts) is None if arms is None else rivals is not None
                record, asked = record.ask(request_id, ask, wanted=wanted, rivals=rivals)
                told += asked
            records[client], _ = record.tell(Label(request_id, place, labels[place]) for place in told)
            if told:
                room = max(0, WEIGHT - record.counts.labelled)
                counted = (Counts.of(frozen[place], int(adapted[place]), labels[place]) for place in told[:room])
                pooled[client] = sum(counted, pooled.get(client, Counts()))
                fleet = Pooled(tuple(pooled.values()))
                if arms is not None:
                    arms.tell(client, stream, [start + place for place in told])
            yield Turn(client, rows, answer, adapted, told, records[client].counts, fleet)


class Answered(NamedTuple):
    """What became of one client's stream."""

    right: NDArray[np.bool_]  # [N], where the answer that was given is right
    labels: int  # told by the client


def answers(
    streams: Sequence[tuple[Classes, Classes, Classes]],
    *,
    share: float,
    seed: int,
    batch: int,
    portfolio: Portfolio | None = None,
    model: FrozenModel | None = None,
) -> list[Answered]:
    """What clients are answered who tell every label that they are asked for.

    Args:
        streams: of each client the fields of `Stream`.
        share: budget of what is asked, as share of all rows, 0..1.
        seed: of the lots, and of the order in which the clients take turns.
        batch: rows of a batch.
        portfolio, model: whose arms predicted the streams; None if it was another adapter.
    """
    sent = [Stream(*each) for each in streams]
    order = np.random.default_rng(seed).permutation(len(sent)).tolist()
    arms = None if portfolio is None or model is None else Arms(portfolio, model, len(sent))
    right, labels = [np.zeros(len(each.labels), bool) for each in sent], [0] * len(sent)
    for turn in turns(sent, order=order, batch=batch, seed=seed, ask=share, arms=arms):
        stream = sent[turn.client]
        given = turn.adapted if turn.answer == "adapted" else stream.frozen[turn.rows]
        right[turn.client][turn.rows] = given == stream.labels[turn.rows]
        labels[turn.client] += len(turn.told)
    return [Answered(*each) for each in zip(right, labels, strict=True)]
