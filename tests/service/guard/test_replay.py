"""Replays against the adapters themselves: every batch really taken, every question asked and answered."""

from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate_adapters import Labelled
from acclimate_adapters.portfolio import Portfolio
from acclimate_service.guard.evidence import Counts, Pooled
from acclimate_service.guard.policy import decide
from acclimate_service.guard.record import Label, Record, most_asked
from acclimate_service.guard.replay import Stream, answers, turns
from acclimate_store import Catalogue, load_streams

SHIPPED = Path(__file__).parents[3] / "model_store"
ARMS = ("t3a", "fedcal(estimator=em)")
CLIENTS, ROWS, BATCH = 3, 100, 20


@pytest.fixture(scope="module")
def three():
    """A model, a portfolio, and three clients with their labels."""
    bundle = Catalogue(SHIPPED / "bundles").load("fashion-cnn", "1")
    sent = load_streams(SHIPPED / "samples/fashion-hybrid/streams.npz")[:CLIENTS]
    batches = [(bundle.prepare(each.images[:ROWS]), np.asarray(each.labels[:ROWS])) for each in sent]
    return bundle.model, Portfolio(ARMS), batches


def classes(logits):
    return logits.argmax(dim=-1, keepdim=True)


def predicted(model, portfolio, x):
    """What the frozen model and each arm predict of a stream, [N, 1 + A]."""
    state, found = portfolio.init(model), []
    for part in torch.split(x, BATCH):
        step = portfolio.step(model, state, part)
        state = step.state
        found.append(torch.cat([classes(step.frozen_logits), step.by_arm], 1))
    return torch.cat(found).numpy()


def by_hand(model, portfolio, batches, share, seed):
    """Clients who take real steps, as the service takes them."""
    order = np.random.default_rng(seed).permutation(CLIENTS)
    states, records = [portfolio.init(model)] * CLIENTS, [Record()] * CLIENTS
    right = np.zeros((CLIENTS, ROWS), bool)
    for start in range(0, ROWS, BATCH):
        for client in order:
            x, labels = (each[start : start + BATCH] for each in batches[client])
            if told := [portfolio.told(state) for state in states if sum(portfolio.told(state))]:
                shares = portfolio.shares(model, np.sum(told, axis=0))
                states[client] = portfolio.informed(states[client], shares)
            step = portfolio.step(model, states[client], x)
            frozen, adapted = classes(step.frozen_logits)[:, 0], classes(step.logits)[:, 0]
            fleet = Pooled(tuple(each.counts for each in records if each.counts != Counts()))
            answer = decide(records[client].counts, fleet, "follow-fleet").answer
            given = frozen if answer == "frozen" else adapted
            right[client, start : start + BATCH] = given.numpy() == labels
            name = f"{seed} {client} {start}"
            record = records[client].append(
                name, frozen.tolist(), adapted.tolist(), answering=answer, by_arm=step.by_arm.tolist()
            )
            rivals = portfolio.rivals(step.state, most_asked(share))
            record, rows = record.ask(name, share, wanted=rivals is not None, rivals=rivals)
            records[client], tally = record.tell([Label(name, row, int(labels[row])) for row in rows])
            assert tally.counted == len(rows)
            states[client] = step.state
            if rows:
                seen = torch.cat([frozen[:, None], step.by_arm], 1)[list(rows)]
                states[client] = portfolio.learn(
                    model, step.state, Labelled(torch.from_numpy(labels[list(rows)]), predicted=seen)
                )
    return right, [record.counts.labelled for record in records]


@pytest.mark.parametrize(("share", "seed"), [(0.05, 0), (0.3, 1)])
def test_a_portfolio_answers_as_if_every_step_had_been_taken(three, share, seed):
    model, portfolio, batches = three
    streams = []
    for x, labels in batches:
        seen = predicted(model, portfolio, x)
        streams.append((labels, seen[:, 0], seen[:, 1:]))
    told = answers(streams, share=share, seed=seed, batch=BATCH, portfolio=portfolio, model=model)
    right, labels = by_hand(model, portfolio, batches, share, seed)
    assert np.array_equal([each.right for each in told], right)
    assert [each.labels for each in told] == labels
    assert sum(labels) > 0


def test_streams_may_have_different_lengths_and_a_last_batch_that_is_not_full():
    zeros = [Stream(*[np.zeros(rows, np.int64)] * 3) for rows in (5, 50)]
    seen = [(turn.client, turn.rows.start, len(turn.adapted)) for turn in turns(zeros, order=(1, 0), batch=20, seed=0)]
    assert seen == [(1, 0, 20), (0, 0, 5), (1, 20, 20), (1, 40, 10)]
    told = answers(zeros, share=0.5, seed=0, batch=20)
    assert [each.right.all() for each in told] == [True, True]
    assert [each.labels for each in told] == [0, 0], "where nothing differs nothing is asked"


def test_a_client_whom_every_label_speaks_against_is_answered_by_the_frozen_model_before_long():
    labels = np.arange(200) % 10
    told = answers([(labels, labels, (labels + 1) % 10)], share=0.1, seed=0, batch=20)[0]
    assert not told.right[:20].any()
    assert told.right[-20:].all()
    assert 7 <= told.labels <= 12  # seven losses without a win are the fewest that are ever enough
