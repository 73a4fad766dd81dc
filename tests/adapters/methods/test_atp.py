import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import (
    ConfigurationError,
    FrozenModel,
    MissingSource,
    Source,
    StateMismatch,
    create,
    require,
)
from acclimate_adapters.methods.atp import adapt, mean_direction
from acclimate_adapters.network.direction import direction


def test_batch_mode_answers_with_eq_6(model: FrozenModel, streams: Tensor) -> None:
    x, rates = streams[0, 0], model.source.rates or {}
    h = direction(model, x).tensors
    by_hand = {name: model.tensor(name) + rates[name] * h[name] for name in model.modules}
    by_hand |= {name: t.clamp(min=0) for name, t in by_hand.items() if name.endswith("running_var")}
    logits = create("atp", mode="batch").step(model, create("atp", mode="batch").init(model), x).logits
    torch.testing.assert_close(logits, model.forward(x, by_hand), rtol=0, atol=1e-5)


def test_online_mode_answers_with_the_mean_of_all_directions_eq_8(model: FrozenModel, streams: Tensor) -> None:
    adapter, rates = create("atp", mode="online"), model.source.rates or {}
    state, directions = adapter.init(model), []
    for x in streams[0, :4]:
        step = adapter.step(model, state, x)
        state = step.state
        directions.append(direction(model, x).tensors)
        by_hand = {}
        for name in model.modules:
            mean = sum(h[name].double() for h in directions) / len(directions)
            by_hand[name] = (model.tensor(name).double() + rates[name] * mean).float()
        by_hand |= {name: t.clamp(min=0) for name, t in by_hand.items() if name.endswith("running_var")}
        torch.testing.assert_close(step.logits, model.forward(x, by_hand), rtol=0, atol=1e-4)


class Summed(nn.Module):
    """Uses only the sum of two parameters, and only the sum over a third: autograd gives tensors that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.spread = (nn.Parameter(torch.full((4, 4), 0.1 * i)) for i in (1, 2, 3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.head(x @ (self.one + self.other) + self.spread.sum())
        return features


def test_parameters_with_one_gradient_for_all_keep_a_mean_each() -> None:
    torch.manual_seed(0)
    net, prior = Summed(), torch.full((3,), 1 / 3)
    rates = dict.fromkeys(("one", "other", "spread"), 0.1)
    model = FrozenModel.from_module(net, classifier="head", source=Source(prior=prior, rates=rates))
    adapter, batches = create("atp"), torch.randn(3, 5, 4)
    state = adapter.init(model)
    for x in batches:
        state = adapter.step(model, state, x).state
    for name in rates:
        mean = torch.stack([direction(model, x).tensors[name] for x in batches]).mean(0)
        torch.testing.assert_close(state.tensors[name], mean, rtol=1e-5, atol=1e-7)


def test_first_online_step_is_the_batch_step(model: FrozenModel, streams: Tensor) -> None:
    online, batch = create("atp", mode="online"), create("atp", mode="batch")
    a, b = (adapter.step(model, adapter.init(model), streams[1, 0]) for adapter in (online, batch))
    assert torch.equal(a.logits, b.logits)


@pytest.mark.slow
def test_mean_over_a_million_directions_stays_exact() -> None:
    """The running mean in single precision against the exact mean, k up to 1e6."""
    generator = torch.Generator().manual_seed(0)
    mean, total = {"m": torch.zeros(4)}, torch.zeros(4, dtype=torch.float64)
    k = 0
    for _ in range(1000):
        block = torch.rand(1000, 4, generator=generator) - 0.2
        total += block.double().sum(0)
        for h in block.unbind():
            k += 1
            mean = mean_direction(mean, {"m": h.clone()}, k)
    torch.testing.assert_close(mean["m"].double(), total / k, rtol=0, atol=1e-4)


def test_mean_direction_leaves_the_old_mean_as_it_was() -> None:
    old = {"m": torch.ones(3)}
    new = mean_direction(old, {"m": torch.full((3,), 5.0)}, 4)
    assert old["m"].tolist() == [1, 1, 1]
    assert new["m"].tolist() == [2, 2, 2]


def test_negative_rate_moves_against_the_direction(model: FrozenModel) -> None:
    adapted, _ = adapt(model, {"bn1.running_mean": torch.ones(32)}, {"bn1.running_mean": -0.5})
    torch.testing.assert_close(adapted["bn1.running_mean"], model.tensor("bn1.running_mean") - 0.5)


def test_variance_driven_below_zero_is_clamped_and_counted(model: FrozenModel) -> None:
    h = -model.tensor("bn1.running_var")
    h[:5] = 0
    adapted, clamped = adapt(model, {"bn1.running_var": h}, {"bn1.running_var": 2.0})
    assert clamped == 27
    assert float(adapted["bn1.running_var"].min()) == 0
    assert torch.equal(adapted["bn1.running_var"][:5], model.tensor("bn1.running_var")[:5])


def test_modules_without_a_rate_carry_no_direction(make_model: Callable[..., FrozenModel], streams: Tensor) -> None:
    model = make_model(rates={"bn2.running_mean": 0.3, "bn2.weight": 0.0})
    adapter = create("atp")
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert step.state.tensors.keys() == {"bn2.running_mean"}


def test_statistics_alone_run_no_backward_pass(make_model: Callable[..., FrozenModel], streams: Tensor) -> None:
    model = make_model(rates={"bn1.running_mean": 0.3, "bn4.running_var": 0.3})
    adapter = create("atp")
    with torch.autograd.profiler.profile() as profile:
        adapter.step(model, adapter.init(model), streams[0, 0])
    assert not [event for event in profile.function_events if "backward" in event.name.lower()]


def test_backward_pass_stops_at_the_earliest_module_with_a_rate(
    make_model: Callable[..., FrozenModel], streams: Tensor
) -> None:
    def convolutions_backward(rates: dict[str, float]) -> int:
        model, adapter = make_model(rates=rates), create("atp")
        with torch.autograd.profiler.profile() as profile:
            adapter.step(model, adapter.init(model), streams[0, 0])
        return sum(event.name == "aten::convolution_backward" for event in profile.function_events)

    assert convolutions_backward({"linear5.weight": 0.1, "bn4.bias": 0.1}) == 0
    assert convolutions_backward({"bn3.weight": 0.1}) == 0
    assert convolutions_backward({"bn2.weight": 0.1}) == 1
    assert convolutions_backward({"conv1.weight": 0.1}) == 3


def test_constant_images_give_a_finite_answer(model: FrozenModel) -> None:
    """A variance of 0 normalises by 1 / sqrt(eps)."""
    adapter = create("atp")
    step = adapter.step(model, adapter.init(model), torch.full((20, 1, 28, 28), 0.7))
    assert bool(step.logits.isfinite().all())


def test_batch_of_one_counts_the_variance_it_cannot_measure(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("atp")
    step = adapter.step(model, adapter.init(model), streams[0, 0, :1])
    assert step.signals["undefined_variances"] == 1  # bn4, one value per channel
    assert not bool(step.state.tensors["bn4.running_var"].any())


def test_short_batch_counts_as_much_as_a_long_one(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("atp")
    state = adapter.step(model, adapter.init(model), streams[0, 0]).state
    state = adapter.step(model, state, streams[0, 1, :3]).state
    long, short = (direction(model, x).tensors["conv1.weight"] for x in (streams[0, 0], streams[0, 1, :3]))
    torch.testing.assert_close(state.tensors["conv1.weight"], (long + short) / 2)


def test_state_of_the_other_mode_is_refused(model: FrozenModel, streams: Tensor) -> None:
    with pytest.raises(StateMismatch, match="mode"):
        create("atp", mode="online").step(model, create("atp", mode="batch").init(model), streams[0, 0])


def test_model_without_rates_is_refused_when_required(make_model: Callable[..., FrozenModel]) -> None:
    with pytest.raises(MissingSource, match="rates"):
        require(create("atp"), make_model(rates=None))


@pytest.mark.parametrize("hyperparameters", [{"mode": "sometimes"}, {"mood": "online"}])
def test_wrong_hyperparameters_are_refused(hyperparameters: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        create("atp", **hyperparameters)


def test_the_mean_of_a_half_precision_model_follows_in_single_precision(network: nn.Module, streams: Tensor) -> None:
    """In bfloat16 a thousandth of a step is rounded away."""
    mean = mean_direction({"w": torch.ones(3)}, {"w": torch.full((3,), 2.0, dtype=torch.bfloat16)}, 1000)
    torch.testing.assert_close(mean["w"], torch.full((3,), 1.001))
    source = Source(prior=torch.full((10,), 0.1), rates={"bn1.weight": 0.1, "bn1.running_var": 0.5})
    half = FrozenModel.from_module(copy.deepcopy(network).bfloat16(), classifier="linear5", source=source)
    for name in ("atp", "dynfed"):
        adapter = create(name)
        step = adapter.step(half, adapter.init(half), streams[0, 0])
        assert step.state.tensors["bn1.weight"].dtype is torch.float32
        assert step.logits.dtype is torch.bfloat16
        tensors = {n: t.bfloat16() if t.dtype is torch.float32 else t for n, t in step.state.tensors.items()}
        earlier = replace(step.state, tensors=tensors)  # as versions before kept it
        assert adapter.step(half, earlier, streams[0, 1]).state.tensors["bn1.weight"].dtype is torch.float32
