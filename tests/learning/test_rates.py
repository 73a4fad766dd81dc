"""Rates are learned as Algorithm 1 says, from the same seeds the same, and stop where they run away."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel
from acclimate_adapters.methods.atp_training import average, refine
from acclimate_learning import rates
from acclimate_learning.clients import Client, Pool, Population, simulate
from acclimate_learning.errors import LearningError
from acclimate_learning.rates import LADDER, Learned, Rates, Recipe, learn_rates
from acclimate_store import Bundle

Clients = tuple[list[Client], list[Client]]


@pytest.fixture(scope="module")
def clients(pool: Pool) -> Clients:
    simulated = Pool(pool.images, pool.labels)
    population = Population(shift="label", teachers=4, judges=4, teacher_images=20, judge_images=20)
    return simulate(simulated, population, "teach"), simulate(simulated, population, "tune")


SHORT = Recipe(rounds=4, cohort=2, lr=0.01, check_every=2)


def test_the_rounds_are_those_of_the_algorithm(bundle: Bundle, clients: Clients) -> None:
    spec, recipe = bundle.manifest.input, Recipe(rounds=2, cohort=2, lr=0.01, epochs=2, batch=10, check_every=2)
    learned = learn_rates(bundle.model, spec, *clients, recipe)
    now, of_rounds = dict.fromkeys(bundle.model.modules, 0.0), []
    for number in (1, 2):
        draw, local = np.random.default_rng([0, number]), []
        for index in sorted(draw.choice(4, 2, replace=False).tolist()):
            own, client = now, clients[0][index]
            for _ in range(2):
                order = draw.permutation(20)
                for part in (order[:10], order[10:]):
                    x, labels = spec.normalise(client.images[part]), torch.from_numpy(client.labels[part])
                    own = refine(bundle.model, own, x, labels, 0.01)
            local.append(own)
        now = average(local)
        of_rounds.append(now)
    assert min(learned.losses, key=lambda n: learned.losses[n]) == 2
    assert learned.rates == pytest.approx(average(of_rounds), rel=1e-6, abs=1e-9)


def test_the_same_seeds_give_the_same_rates(bundle: Bundle, clients: Clients) -> None:
    first, second = (learn_rates(bundle.model, bundle.manifest.input, *clients, SHORT) for _ in range(2))
    assert first.rates == second.rates
    other = learn_rates(bundle.model, bundle.manifest.input, *clients, replace(SHORT, seed=1))
    assert other.losses != first.losses


def test_learning_goes_on_from_a_checkpoint_to_the_same_rates(bundle: Bundle, clients: Clients, tmp_path: Path) -> None:
    spec, file = bundle.manifest.input, tmp_path / "learn.json"
    whole = learn_rates(bundle.model, spec, *clients, SHORT)
    learn_rates(bundle.model, spec, *clients, replace(SHORT, rounds=2), checkpoint=file)
    assert json.loads(file.read_text())["round"] == 2
    told: list[str] = []
    rest = learn_rates(bundle.model, spec, *clients, SHORT, checkpoint=file, progress=told.append)
    assert (rest.rates, rest.losses) == (whole.rates, whole.losses)
    assert set(told) == {"round 3", "round 4"}
    with pytest.raises(LearningError, match="is the checkpoint of another run"):
        learn_rates(bundle.model, spec, *clients, replace(SHORT, seed=3), checkpoint=file)
    file.write_text("{}")
    with pytest.raises(LearningError, match="is no checkpoint of learning"):
        learn_rates(bundle.model, spec, *clients, SHORT, checkpoint=file)


def test_without_a_learning_rate_the_best_of_a_few_is_taken(bundle: Bundle, clients: Clients) -> None:
    recipe = Recipe(rounds=2, cohort=2, search_rounds=2, check_every=1)
    learned = learn_rates(bundle.model, bundle.manifest.input, *clients, recipe)
    assert learned.lr in LADDER


def test_it_ends_once_other_clients_gain_no_more(bundle: Bundle, clients: Clients) -> None:
    teachers, tuners = clients
    wrong = [Client(c.name, c.images, (c.labels + 1) % 10, c.shift, c.kind) for c in teachers]
    recipe = Recipe(rounds=40, cohort=2, lr=0.003, check_every=1, patience=2)
    learned = learn_rates(bundle.model, bundle.manifest.input, wrong, tuners, recipe)
    assert learned.rounds < 40
    assert min(learned.losses.values()) <= learned.losses[0]


@pytest.mark.parametrize("lr", [1e4, 1e30])
def test_rates_that_run_away_stop_it_with_advice(lr: float, bundle: Bundle, clients: Clients) -> None:
    with pytest.raises(LearningError, match=r"give --lr"):
        learn_rates(bundle.model, bundle.manifest.input, *clients, replace(SHORT, lr=lr, check_every=1))


def test_rates_that_run_away_later_go_on_from_the_best_with_the_next_best_learning_rate(
    bundle: Bundle, clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 3 the gradients of whoever learns at the rate that was found are no numbers."""
    found, file = 0.3, tmp_path / "learn.json"
    recipe = Recipe(rounds=6, cohort=2, search_rounds=1, check_every=1, patience=6)
    learning: list[float] = []
    monkeypatch.setattr(rates, "LADDER", (0.003, 0.03, found))
    monkeypatch.setattr(rates, "FIRST", 1)
    losses = {0.003: 0.7, 0.03: 0.6, found: 0.5}
    monkeypatch.setattr(rates._Run, "_tried", lambda run, lr: losses[lr] * run.loss({}))

    def step(model: FrozenModel, now: Rates, x: Tensor, labels: Tensor, lr: float) -> Rates:
        learning.append(lr)
        after = refine(model, now, x, labels, 0.01 * lr)
        return dict.fromkeys(after, math.nan) if lr == found and len(learning) > 4 else after

    monkeypatch.setattr(rates, "refine", step)

    def learn(rounds: int, *, checkpoint: Path | None = None) -> Learned:
        learning.clear()
        chosen = replace(recipe, rounds=rounds)
        return learn_rates(bundle.model, bundle.manifest.input, *clients, chosen, checkpoint=checkpoint)

    whole = learn(6)
    assert learning == [found] * 6 + [0.03] * 6, "two clients a round, of one batch each"
    assert whole.lr == 0.03
    (note,) = whole.notes
    assert "ran away with a learning rate of 0.3 in round 3" in note
    assert "--lr 0.03 begins with it" in note
    assert sorted(whole.losses) == [0, 1, 2, 4, 5, 6]
    assert all(map(math.isfinite, whole.rates.values()))

    learn(3, checkpoint=file)
    rest = learn(6, checkpoint=file)
    assert learning == [0.03] * 6, "what is resumed does not run away once more"
    assert (rest.rates, rest.losses, rest.notes) == (whole.rates, whole.losses, whole.notes)


def test_a_learning_rate_is_looked_for_upwards_while_that_helps_and_else_downwards(
    bundle: Bundle, clients: Clients
) -> None:
    """With labels that are wrong every step harms, a smaller one less; with right ones small steps are too small."""

    def tried(teachers: list[Client], rounds: int) -> tuple[float, list[float]]:
        told: list[str] = []
        recipe = Recipe(rounds=1, cohort=4, search_rounds=rounds)
        learned = learn_rates(bundle.model, bundle.manifest.input, teachers, clients[1], recipe, progress=told.append)
        return learned.lr, sorted({float(what.removeprefix("lr ")) for what in told if what.startswith("lr")})

    wrong = [Client(c.name, c.images, (c.labels + 1) % 10, c.shift, c.kind) for c in clients[0]]
    assert tried(wrong, 1) == (0.001, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
    lr, looked = tried(clients[0], 1)
    assert lr > 0.1
    assert looked == [each for each in LADDER if 0.1 <= each <= max(looked)]
