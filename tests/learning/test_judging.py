"""Adapters are judged client by client, beside the frozen model on the same images."""

import numpy as np
import pytest
import torch

from acclimate_adapters import create
from acclimate_learning.clients import Pool, own_clients
from acclimate_learning.errors import LearningError
from acclimate_learning.judging import Judgement, interval, judge
from acclimate_store import Bundle


def test_accuracies_are_those_of_streams_from_the_beginning(bundle: Bundle, pool: Pool) -> None:
    clients = own_clients(pool)[:2]
    told = judge(bundle.model, bundle.manifest.input, clients, "atp", {"mode": "batch"})
    adapter = create("atp", mode="batch")
    for number, client in enumerate(clients):
        state, hits = adapter.init(bundle.model), 0
        for first in range(0, len(client.labels), 20):
            step = adapter.step(bundle.model, state, bundle.prepare(client.images[first : first + 20]))
            state = step.state
            hits += int((step.logits.argmax(1) == torch.from_numpy(client.labels[first : first + 20])).sum())
        assert told.accuracy[number] == pytest.approx(hits / len(client.labels))
        frozen = bundle.model.frozen(bundle.prepare(client.images)).logits.argmax(1).numpy()
        assert told.frozen[number] == pytest.approx((frozen == client.labels).mean())
        predicted = told.predicted[number]
        assert (predicted.labels == client.labels).all()
        assert (predicted.frozen == frozen).all()
        assert (predicted.adapted == client.labels).mean() == told.accuracy[number]
        assert predicted.by_arm is None
    assert told.step_ms > 0


def test_no_adaptation_gains_nothing(bundle: Bundle, pool: Pool) -> None:
    told = judge(bundle.model, bundle.manifest.input, own_clients(pool)[:2], "none")
    assert not told.gains.any()


def gains(*values: float) -> Judgement:
    frozen = np.full(len(values), 0.5)
    return Judgement("atp", {}, frozen + values, frozen, 1.0, 0.0, 0, ())


def test_the_interval_holds_the_mean_of_other_samples_nineteen_times_in_twenty() -> None:
    draw = np.random.default_rng(1)
    held = 0
    for seed in range(200):
        low, high = interval(draw.normal(0.03, 0.05, 40), seed)
        held += low <= 0.03 <= high
    assert 180 <= held <= 199


def test_a_bound_that_is_0_but_for_the_last_bits_is_not_above_0() -> None:
    right = np.array([51, 49, 51, 53, 41, 52, 51, 51, 47, 46, 42, 46, 50, 53, 41, 44, 53, 47, 42, 43])
    gained = np.array([1, 1, 0, 0, -1, 2, 1, 2, 0, 0, 0, -1, 1, -1, 0, 2, 2, -1, 1, 0])
    assert interval((right + gained) / 60 - right / 60)[0] == 0


@pytest.mark.parametrize(
    ("judgement", "obstacle"),
    [
        (gains(*[0.05] * 40), ""),
        (gains(*[0.05] * 38, -0.03, -0.03), ""),  # exactly 5 % are harmed
        (gains(*[0.05] * 37, -0.03, -0.03, -0.04), "it harms 8 % of the clients, the worst by 4.0 points"),
        (gains(*[0.05] * 20, *[-0.02] * 20), ""),  # no client loses more than 2 points
        (gains(*[0.1, -0.1] * 20), "may be none"),
        (gains(*[-0.05] * 40), "may be none"),
        (gains(*[0.0] * 40), "may be none"),
        (gains(*[0.05] * 5), ""),
        (gains(*[0.05] * 4), "it was judged on 4 clients, and 5 are the least"),
    ],
)
def test_a_default_is_earned_by_a_gain_for_certain_that_harms_few(judgement: Judgement, obstacle: str) -> None:
    evidence = judgement.evidence("some clients")
    assert obstacle in evidence.obstacle
    assert bool(obstacle) == bool(evidence.obstacle)


def test_there_must_be_clients(bundle: Bundle) -> None:
    with pytest.raises(LearningError, match="no clients"):
        judge(bundle.model, bundle.manifest.input, [], "none")
