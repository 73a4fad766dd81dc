"""What a step costs is estimated from the passes it takes, and what costs too much is refused in clear words."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from acclimate_adapters import FrozenModel, Source
from acclimate_adapters.cost import Cost, Runs, forward_pass, gradient_pass, head_step
from acclimate_service.compute.adapters import Configurations, canonical
from acclimate_service.compute.costs import Price, Prices, StepBudget
from acclimate_service.compute.steps import Steps
from acclimate_service.errors import Problem
from acclimate_service.metrics import Metrics

PRICES = Prices(
    forward=Price(0.001, 0.001), gradient=Price(0.01, 0.002), head=Price(0.0, 1e-6), posterior=Price(0.0, 1e-6)
)
"""Of a slow network."""


@pytest.fixture
def budget(serial):
    def of(most_s=10.0, allowed=None):
        return StepBudget(serial.bundle.model, Configurations("none", {}), PRICES, most_s, allowed)

    return of


def refused(require, *arguments):
    with pytest.raises(Problem) as caught:
        require(*arguments)
    return caught.value.code, caught.value.detail


def test_calls_and_rows_add_up():
    cost = forward_pass(5).and_also(gradient_pass(3).times(2), head_step(4))
    assert cost == Cost(forward=Runs(1, 5), gradient=Runs(2, 6), head=Runs(1, 4))
    assert PRICES.seconds(cost) == pytest.approx(0.001 + 5 * 0.001 + 2 * 0.01 + 6 * 0.002 + 4e-6)


@pytest.mark.parametrize(
    ("layers", "classifier"),
    [
        ((nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), "3"),
        ((nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), "1"),
        ((nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3), nn.Hardtanh()), None),
    ],
    ids=["linear", "convolution", "none"],
)
def test_prices_are_measured_whatever_the_network_ends_in(layers, classifier, serial):
    source = Source(prior=torch.full((3,), 1 / 3))
    model = FrozenModel.from_module(nn.Sequential(nn.Conv2d(1, 4, 3), *layers), classifier=classifier, source=source)
    prices = Prices.measured(replace(serial.bundle, model=model))
    assert prices.seconds(head_step(1000)) > 0


def test_a_step_is_accepted_up_to_the_budget_and_told_how_many_images_would_be(budget):
    memo = canonical("memo", {"views": 10})  # each image: 10 ms + 10 views of 2 ms, 2 ms for its answer, 1 ms before
    most = budget(0.335)
    most.require(memo, 10)
    code, detail = refused(most.require, memo, 11)
    assert code == "step_too_costly"
    assert "a step on 11 images would take about 364 ms" in detail
    assert "and 335 ms are accepted (ACCLIMATE_MAX_STEP_MS)" in detail
    assert "send at most 10 images at once, or configure the client with less of views" in detail


def test_what_no_image_could_be_answered_by_is_told_what_to_lower(budget):
    dear = canonical("fedthe_plus", {"steps": 1000, "views": 256, "tuning_steps": 100})
    code, detail = refused(budget().require, dear)
    assert code == "step_too_costly"
    assert "a step on 1 image would take about" in detail
    assert detail.endswith("configure the client with less of views, tuning_steps")


def test_a_chain_costs_what_its_parts_do_with_one_pass_between_them(budget):
    code, detail = refused(budget(0.0).require, canonical("memo+fedcal", {"memo": {"views": 20, "steps": 3}}))
    assert code == "step_too_costly"
    assert detail.endswith("configure the client with less of views, steps")


def test_what_learning_costs_is_bounded_too(budget):
    many = canonical("fedthe", {"examples": 10_000})
    most = budget(0.05)
    most.require_lesson(canonical("fedthe", {}), 20)
    code, detail = refused(most.require_lesson, many, 1)
    assert code == "step_too_costly"
    assert "learning from 1 image would take" in detail
    assert detail.endswith("configure the client with less of examples")


@pytest.mark.parametrize(
    ("name", "options"),
    [("memo", {}), ("memo+em", {}), ("atp+em", {}), ("portfolio", {}), ("portfolio", {"arms": ["atp", "memo"]})],
)
def test_adapters_that_the_operator_does_not_offer_are_refused_in_chains_and_portfolios_too(budget, name, options):
    some = budget(allowed=("none", "atp", "fedcal", "portfolio"))
    some.require(canonical("atp+fedcal", {}))
    some.require(canonical("portfolio", {"arms": ["atp", "fedcal"]}))
    code, detail = refused(some.require, canonical(name, options))
    assert code == "adapter_not_allowed"
    assert "(ACCLIMATE_ADAPTERS)" in detail


def test_a_configuration_that_nobody_knows_is_for_others_to_refuse(budget):
    budget(0.0).require('{"adapter": "gone", "hyperparameters": {}}', 256)
    budget(0.0).require(canonical("fed_ade", {}), 1)  # the model has no anchors


@pytest.fixture
def steps(budget, serial):
    return Steps(serial.bundle, Configurations("none", {}), Metrics(), budget())


def test_what_steps_take_is_learned_for_each_configuration(steps):
    none, atp = canonical("none", {}), canonical("atp", {})
    assert steps.seconds(none, 9) == pytest.approx(0.010)
    for _ in range(100):
        steps._learn([(none, 9)], 0.030)
    assert steps.seconds(none, 19) == pytest.approx(0.060, rel=1e-3)
    assert steps.seconds(atp, 9) == pytest.approx(0.010 + 0.028)
    for _ in range(100):
        steps._learn([(none, 9), (none, 9)], 0.010)  # together
    assert steps.seconds(none, 9) == pytest.approx(0.005, rel=1e-3)


def test_the_configurations_whose_pace_is_known_are_bounded(steps):
    for number in range(2000):
        steps._learn([(canonical("em", {"floor": 1e-5 + number * 1e-7}), 1)], 0.1)
    assert len(steps._pace) == 1024


def test_the_prices_of_a_model_are_measured_and_positive(serial):
    prices = Prices.measured(serial.bundle)
    for price in prices:
        assert price.call >= 0
        assert price.row >= 0
    assert prices.seconds(forward_pass(64)) > 0
    assert prices.seconds(gradient_pass(64)) > 0
