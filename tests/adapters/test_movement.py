"""How far modules have moved: the network with the movement added answers what the client was answered."""

import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, create
from acclimate_adapters.adapter import Moving
from acclimate_adapters.compression.sensitivity import scale
from acclimate_adapters.movement import movement


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("atp", {}),
        ("dynfed", {}),
        ("dynfed", {"arn": "mlp"}),
        ("tent", {"lr": 0.1}),
        ("tent", {"lr": 0.01, "optimizer": "adam"}),
        ("shot", {"lr": 0.01}),
        ("fed_ade", {}),
        ("fed_ade", {"layers": "all"}),
        ("atp+fedcal", {}),
    ],
)
def test_the_movement_is_that_of_the_modules_that_answer(model: FrozenModel, streams: Tensor, name: str, options: dict):
    adapter = create(name, **options)
    state = adapter.init(model)
    assert set(movement(adapter, model, state).values()) <= {0.0}
    for x in streams[0, :3]:
        state = adapter.step(model, state, x).state
    assert isinstance(adapter, Moving)
    moved, sizes = adapter.moved(model, state), movement(adapter, model, state)
    assert moved.keys() == sizes.keys() <= set(model.modules)
    for module, change in moved.items():
        assert change.shape == model.tensor(module).shape
        expected = float(change.double().square().mean().sqrt()) / scale(model, module)
        assert sizes[module] == pytest.approx(expected, rel=1e-4, abs=1e-9)
    if options.get("layers") != "all":  # which rounds move
        assert max(sizes.values()) > 0


def test_the_modules_of_atp_are_those_that_it_answers_with(model: FrozenModel, streams: Tensor):
    adapter = create("atp")
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    moved = {name: model.tensor(name) + change for name, change in adapter.moved(model, step.state).items()}
    clamped = {name: each.clamp_min(0) if name.endswith("running_var") else each for name, each in moved.items()}
    torch.testing.assert_close(model.adapted(streams[0, 0], clamped).logits, step.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["none", "fedcal", "t3a", "balanced"])
def test_adapters_that_change_no_module_move_nothing(model: FrozenModel, name: str):
    adapter = create(name)
    assert movement(adapter, model, adapter.init(model)) == {}
