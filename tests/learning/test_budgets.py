"""Stored states take as few bytes as keep the answers of exact ones, or nothing is said about them."""

from dataclasses import replace

import numpy as np
import pytest

from acclimate_adapters import create
from acclimate_learning import budgets
from acclimate_learning.budgets import EXACT, LADDER, choose_budget, follow, keeps
from acclimate_learning.clients import Client, Pool, own_clients
from acclimate_store import Bundle
from acclimate_store.manifest import StateBudget


@pytest.fixture(scope="module")
def clients(pool: Pool) -> list[Client]:
    return [replace(each, images=each.images[:60], labels=each.labels[:60]) for each in own_clients(pool)[:4]]


def test_the_least_budget_that_keeps_the_answers_is_chosen(
    bundle: Bundle, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "FEWEST_ROWS", 240)
    spec, method, counted = bundle.manifest.input, create("atp"), []
    found = choose_budget(bundle.model, spec, clients, "atp", "them", progress=lambda: counted.append(1))
    assert found is not None
    exact = follow(method, bundle.model, spec, clients, EXACT)
    labels = np.concatenate([client.labels for client in clients])

    def told(budget: float) -> StateBudget:
        rounded = follow(method, bundle.model, spec, clients, budget)
        right, others = ((each.answers.numpy() == labels).mean() for each in (exact, rounded))
        differ = (rounded.answers != exact.answers).double().mean()
        return StateBudget(budget=budget, nbytes=rounded.nbytes, other=differ, lost=right - others, of="them")

    assert found == told(found.budget)
    assert keeps(found)
    assert found.nbytes < exact.nbytes * 0.3
    assert not keeps(told(LADDER[LADDER.index(found.budget) + 1]))
    assert len(counted) <= 4 * 6, "a ladder of 23 is not tried rung by rung"


@pytest.mark.parametrize(("other", "lost", "kept"), [(0.003, 0.0005, True), (0.0031, 0, False), (0, 0.0006, False)])
def test_answers_are_kept_up_to_both_bounds(other: float, lost: float, kept: bool) -> None:
    assert keeps(StateBudget(budget=0.5, nbytes=1, other=other, lost=lost, of="them")) is kept


def test_too_few_answers_show_nothing(bundle: Bundle, clients: list[Client]) -> None:
    assert choose_budget(bundle.model, bundle.manifest.input, clients, "atp", "them") is None


@pytest.mark.parametrize("adapter", ["fedcal", "balanced"])
def test_states_whose_bytes_do_not_depend_on_it_have_no_budget(
    bundle: Bundle, clients: list[Client], monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    monkeypatch.setattr(budgets, "FEWEST_ROWS", 1)
    assert choose_budget(bundle.model, bundle.manifest.input, clients, adapter, "them") is None
