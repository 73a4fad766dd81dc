"""States as fewer bytes: they fit the budget, come back close, and stay close however often they are stored."""

import bz2
import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from acclimate_adapters import State, StateCorrupt, StateMismatch, create
from acclimate_adapters.compression.allocation import LEVELS, allocate, measure
from acclimate_adapters.compression.coding import FEW, decode, encode
from acclimate_adapters.compression.sensitivity import sensitivity
from acclimate_adapters.methods.atp import mean_direction
from acclimate_adapters.network.direction import direction

BUDGETS = (0.02, 0.05, 0.0625, 0.1, 0.125, 0.19, 0.25, 0.3, 0.5, 0.75)


@pytest.fixture(scope="module")
def atp():
    return create("atp")


@pytest.fixture(scope="module")
def weights(atp, model):
    return sensitivity(atp, model)


@pytest.fixture(scope="module")
def state(follow, model, streams):
    """After six batches of a real client."""
    return follow("atp", model, streams[0])[-1].state


def effect(weights, tensors, others):
    """Root of the summed squared effects of all differences."""
    means = (float((tensors[name] - others[name]).double().square().mean()) for name in weights)
    return sum(weight**2 * mean for weight, mean in zip(weights.values(), means, strict=True)) ** 0.5


def nothing(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_state_keeps_its_budget_and_comes_back_as_what_it_was(state, weights, budget):
    data = encode(state, budget, weights)
    assert 0.93 * budget * state.nbytes < len(data) < budget * state.nbytes + 2000
    back = decode(data)
    assert replace(back, tensors={}) == replace(state, tensors={})
    assert {n: (t.dtype, t.shape) for n, t in back.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in state.tensors.items()
    }


def test_the_more_bytes_the_smaller_the_effect_of_what_is_lost(state, weights):
    effects = [effect(weights, decode(encode(state, b, weights)).tensors, state.tensors) for b in BUDGETS]
    for part in (effects[: BUDGETS.index(FEW)], effects[BUDGETS.index(FEW) :]):
        assert part == sorted(part, reverse=True)
    assert effects[BUDGETS.index(0.0625)] < effects[BUDGETS.index(FEW)], "few terms are nearer than rough numbers"
    whole = effect(weights, nothing(state.tensors), state.tensors)
    assert effects[BUDGETS.index(0.125)] < 0.1 * whole
    assert effects[BUDGETS.index(0.25)] < 0.005 * whole


def test_bits_go_where_errors_matter():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(40_000, dtype=np.float32)
    light, heavy, small = measure(x, 0.01), measure(x, 1.0), measure(x * np.float32(1e-4), 1.0)
    mean = [np.mean(bits) for bits in allocate([light, heavy, small], 3 * 20_000)]
    assert mean[1] > 2 * mean[0]
    assert mean[1] > 2 * mean[2]


def test_the_expected_effect_never_grows_with_the_budget(state, weights):
    measured = [measure(t.reshape(-1).numpy(), weights[n]) for n, t in state.tensors.items()]
    found = []
    for budget in range(0, state.nbytes, state.nbytes // 40):
        bits = allocate(measured, budget)
        sizes = (
            m.sizes()[LEVELS.index(b), p] for m, parts in zip(measured, bits, strict=True) for p, b in enumerate(parts)
        )
        assert sum(map(int, sizes)) <= budget
        levels = [[LEVELS.index(b) for b in parts] for parts in bits]
        found.append(sum(m.effects()[at, range(m.parts)].sum() for m, at in zip(measured, levels, strict=True)))
    assert all(after <= before * 1.02 for before, after in pairwise(found))
    assert found[-1] < 1e-6 * found[0]


@pytest.mark.parametrize(
    ("budget", "off"), [(0.5, 0.01), (0.25, 0.02), (0.125, 0.15), (0.1, 0.03), (0.05, 0.03), (0.02, 0.08)]
)
def test_a_mean_stored_after_each_of_200_batches_follows_the_exact_one(model, streams, weights, state, budget, off):
    """The client changes half-way: a mean that rounding holds fast would be left behind."""
    directions = [direction(model, x, tuple(weights)).tensors for client in (0, 2) for x in streams[client]]
    exact, stored = nothing(state.tensors), replace(state, step=0, tensors=nothing(state.tensors))
    for k in range(1, 201):
        h = directions[k % 6 + (6 if k > 100 else 0)]
        exact = mean_direction(exact, {name: t.clone() for name, t in h.items()}, k)
        mean = mean_direction(stored.tensors, {name: t.clone() for name, t in h.items()}, k)
        stored = decode(encode(stored.next(mean), budget, weights))
    assert effect(weights, stored.tensors, exact) < off * effect(weights, nothing(exact), exact)


def test_a_client_goes_on_from_a_coded_state_almost_as_from_the_exact_one(atp, model, streams, state, weights):
    x = streams[0, 0]
    exact, coded = (atp.step(model, each, x).logits for each in (state, decode(encode(state, 0.125, weights))))
    assert torch.allclose(coded.softmax(1), exact.softmax(1), rtol=0, atol=0.02)
    assert not torch.equal(coded, exact)


@pytest.mark.parametrize("size", [1e-18, 1.0, 1e16])
def test_numbers_of_any_size_that_can_be_rounded_keep_their_direction(size):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * size
    back = decode(encode(State("atp", 1, "f" * 16, 3, {"x": x}), 0.25, {"x": 1.0})).tensors["x"]
    assert float(torch.cosine_similarity(back / size, x / size, dim=0)) > 0.95


def told(text):
    """A table as it is stored."""
    return torch.tensor([*bz2.compress(text.encode())], dtype=torch.uint8)


def table_of(state):
    return json.loads(bz2.decompress(bytes(state.tensors["coded:table"].numpy())))


@pytest.mark.parametrize(("form", "budget"), [("coded.1:", 0.125), ("coded.2:", 0.02)])
def test_forms_of_earlier_versions_whose_table_was_not_compressed_are_read(state, weights, form, budget):
    coded = State.from_bytes(encode(state, budget, weights))
    plain = torch.tensor([*json.dumps(table_of(coded)).encode()], dtype=torch.uint8)
    earlier = replace(coded, adapter=form + "atp", tensors={**coded.tensors, "coded:table": plain})
    read, expected = decode(earlier.to_bytes()), decode(coded.to_bytes())
    assert read.adapter == expected.adapter == "atp"
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_equal_states_give_equal_bytes(state, weights):
    assert len({encode(state, 0.125, weights) for _ in range(3)}) == 1
    assert encode(replace(state, step=state.step + 1), 0.125, weights) != encode(state, 0.125, weights)
    turned = replace(state, tensors=dict(reversed(state.tensors.items())))
    assert encode(turned, 0.125, weights) == encode(state, 0.125, weights)


def test_without_a_budget_or_a_sensitivity_the_bytes_are_those_of_the_exact_state(state, weights, model):
    assert encode(state, 1.0, weights) == encode(state, 0.1, {}) == state.to_bytes()
    assert sensitivity(create("t3a"), model) == {}
    back = decode(state.to_bytes())
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in state.tensors.items())


def test_tensors_of_infinite_weight_keep_three_digits_beside_the_budget_of_the_others():
    x = torch.randn(2, 9000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 6, 9000)
    both = State("atp", 1, "f" * 16, 3, {"fine": x, "x": x})
    together = encode(both, 0.05, {"fine": math.inf, "x": 1.0})
    alone = encode(replace(both, tensors={"x": x}), 0.05, {"x": 1.0})
    assert len(together) - len(alone) == pytest.approx(x.nbytes / 2, abs=100)
    assert float(((decode(together).tensors["fine"] - x) / x).abs().max()) < 2**-7
    exact = replace(both, tensors={"fine": torch.full_like(x, torch.inf), "x": x})
    beside = decode(encode(exact, 0.3, {"fine": math.inf, "x": 1.0})).tensors
    assert bool(beside["fine"].isinf().all())
    assert bool(beside["x"].any()), "nor does it take the bytes of the others where it stays exact"


def test_tensors_that_cannot_be_rounded_stay_exact():
    tensors = {
        "counts": torch.arange(5),
        "empty": torch.empty(0, 3),
        "double": torch.rand(70, dtype=torch.float64),
        "infinite": torch.full((100,), torch.inf),
        "vast": torch.full((5000,), 1e20),
        "unnamed": torch.rand(100),
        "named": torch.rand(3000),
    }
    state = State("atp", 1, "f" * 16, 3, tensors)
    back = decode(encode(state, 0.3, dict.fromkeys(set(tensors) - {"unnamed"}, 1.0)))
    same = {name for name, tensor in tensors.items() if torch.equal(back.tensors[name], tensor)}
    assert same == set(tensors) - {"named"}


def test_a_matrix_of_few_terms_comes_back_with_few_bytes():
    rng = np.random.default_rng(0)
    columns, rows = rng.standard_normal((256, 3), np.float32), rng.standard_normal((3, 128 * 9), np.float32)
    x = torch.from_numpy((columns * np.float32([1, 0.3, 0.1])) @ rows).reshape(256, 128, 3, 3)
    state = State("atp", 1, "f" * 16, 3, {"x": x})
    data = encode(state, 0.006, {"x": 1.0})
    assert len(data) < 0.006 * x.nbytes + 400
    back = decode(data)
    assert back.tensors["x"].shape == x.shape
    assert float((back.tensors["x"] - x).norm() / x.norm()) < 0.01
    rounded = decode(encode(state, FEW, {"x": 1.0})).tensors["x"]
    assert float((rounded - x).norm() / x.norm()) > 0.1, "at twenty times the bytes"


def test_nothing_is_stored_of_a_matrix_without_numbers():
    state = State("atp", 1, "f" * 16, 3, {"x": torch.zeros(128, 64), "y": torch.ones(3)})
    back = decode(encode(state, 0.05, {"x": 1.0, "y": 1.0})).tensors
    assert not back["x"].any()
    assert back["x"].shape == (128, 64)


def test_a_form_that_is_not_known_is_refused_by_its_name(state, weights, model):
    data = State.from_bytes(encode(state, 0.05, weights))
    with pytest.raises(StateMismatch, match=r"made for adapter 'coded\.3:atp', not 'atp'"):
        create("atp").step(model, data, torch.zeros(1, 1, 28, 28))


def test_who_does_not_know_the_form_refuses_it(state, weights, model):
    read = State.from_bytes(encode(state, 0.25, weights))
    with pytest.raises(StateMismatch, match=r"made for adapter 'coded\.3:atp', not 'atp'"):
        read.require("atp", 1, model.content_hash)


def test_sensitivities_compare_the_learned_rates_with_the_scale_of_what_they_move(model, weights):
    rates = model.source.rates
    std = model.tensor("bn2.running_var").mean().sqrt()
    assert weights["bn2.running_mean"] == pytest.approx(float(abs(rates["bn2.running_mean"]) / std))
    for name, by in {
        "conv3.weight": "conv3.weight",
        "bn1.bias": "bn1.weight",
        "bn3.running_var": "bn3.running_var",
    }.items():
        rms = model.tensor(by).square().mean().sqrt()
        assert weights[name] == pytest.approx(float(abs(rates[name]) / rms))


def damaged(data, change):
    """A coded state with another table or other codes, in a sound file."""
    state = State.from_bytes(data)
    table = table_of(state)
    tensors = {"coded:codes": state.tensors["coded:codes"], **change(table, state.tensors["coded:codes"])}
    tensors.setdefault("coded:table", told(json.dumps(table)))
    return replace(state, tensors=tensors).to_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda table, codes: {"coded:codes": codes[:-1]},
        lambda table, codes: {"coded:codes": torch.cat((codes, codes[:1]))},
        lambda table, codes: {"coded:table": told("[1, 2]")},
        lambda table, codes: {"coded:table": told("no JSON")},
        lambda table, codes: {"coded:table": torch.tensor([*b"no bzip2"], dtype=torch.uint8)},
        lambda table, codes: {"coded:table": told(json.dumps(table))[:-20]},
        lambda table, codes: table["bn1.bias"].__setitem__(1, "9") or {},
        lambda table, codes: table["bn1.bias"].__setitem__(0, [10**12]) or {},
        lambda table, codes: table["bn1.bias"].__setitem__(0, [-32]) or {},
        lambda table, codes: table["bn1.bias"].__setitem__(0, "x") or {},
        lambda table, codes: table.__setitem__("bn1.bias", 5) or {},
    ],
    ids=["short", "long", "no table", "no JSON", "no bzip2", "cut", "level", "huge", "negative", "shapeless", "empty"],
)
def test_damaged_codes_are_refused(state, weights, change):
    data = encode(state, 0.1, weights)
    assert decode(damaged(data, lambda table, codes: {})).step == state.step
    with pytest.raises(StateCorrupt, match="not a coded state"):
        decode(damaged(data, change))


@pytest.mark.parametrize(
    "spelt", [["3"], ["3", "3", "3"], ["33", "3"], "3", ["x", "3"]], ids=["odd", "three", "parts", "whole", "level"]
)
def test_damaged_terms_are_refused(state, weights, spelt):
    def change(table, codes):
        table["linear4.weight"][1] = spelt
        return {"coded:table": told(json.dumps(table))}

    data = encode(state, 0.05, weights)
    with pytest.raises(StateCorrupt, match="not a coded state"):
        decode(damaged(data, change))


def test_truncated_bytes_are_refused(state, weights):
    data = encode(state, 0.1, weights)
    for cut in (0, 7, 100, len(data) - 1):
        with pytest.raises(StateCorrupt):
            decode(data[:cut])
