"""DynFed against its equations written out in NumPy, and its identity with ATP."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import ConfigurationError, FrozenModel, Source, StateMismatch, create
from acclimate_adapters.methods.dynfed import RATE, next_rates, rate_network, uniform
from acclimate_adapters.network.direction import direction


def network_in_numpy(alpha: np.ndarray, tau: float, hidden: int, seed: int) -> np.ndarray:
    """Equations 10 and 11 entry by entry."""
    generator, size = torch.Generator().manual_seed(seed), len(alpha)
    first = uniform((hidden, size), 6 / size, generator).numpy()
    second = uniform((size, hidden), 6 / (size + hidden), generator).numpy()
    z = [max(0.0, sum(first[i, j] * alpha[j] for j in range(size))) for i in range(hidden)]
    out = [sum(second[i, j] * z[j] for j in range(hidden)) for i in range(size)]
    return np.array([tau / (1 + math.exp(-value)) for value in out])


@pytest.mark.parametrize(("tau", "hidden", "seed"), [(0.3, 32, 0), (1.7, 5, 9)])
def test_equations_10_and_11_are_the_rate_network(tau: float, hidden: int, seed: int) -> None:
    alpha = torch.linspace(-1, 1, 23, dtype=torch.float64)
    got = rate_network(alpha, tau, hidden, seed)
    np.testing.assert_allclose(got, network_in_numpy(alpha.numpy(), tau, hidden, seed), rtol=0, atol=1e-14)
    assert 0 < float(got.min()) < float(got.max()) < tau


def test_parameters_of_the_rate_network_follow_from_the_seed_and_are_scaled_as_he_and_xavier() -> None:
    draw = uniform((300, 200), 6 / 200, torch.Generator().manual_seed(0))
    assert float(draw.var()) == pytest.approx(2 / 200, rel=0.02)
    alpha = torch.rand(23, dtype=torch.float64)
    assert torch.equal(rate_network(alpha, 0.3, 32, 0), rate_network(alpha, 0.3, 32, 0))
    assert not torch.equal(rate_network(alpha, 0.3, 32, 0), rate_network(alpha, 0.3, 32, 1))


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.99, 1.0])
def test_equation_12_moves_the_rates(lam: float) -> None:
    alpha, wanted = torch.tensor([-0.2, 0.0, 0.7]).double(), torch.tensor([0.1, 0.2, 0.3]).double()
    want = lam * alpha.numpy() + (1 - lam) * wanted.numpy()
    np.testing.assert_allclose(next_rates(alpha, wanted, lam), want, rtol=0, atol=1e-15)


@pytest.mark.parametrize("mode", ["batch", "online"])
def test_identity_is_atp_bit_for_bit(mode: str, model: FrozenModel, streams: Tensor) -> None:
    dynfed, atp = create("dynfed", mode=mode, lam=0.37), create("atp", mode=mode)
    a, b = dynfed.init(model), atp.init(model)
    for batch in streams[0]:
        one, other = dynfed.step(model, a, batch), atp.step(model, b, batch)
        assert torch.equal(one.logits, other.logits)
        assert dict(one.signals).items() >= dict(other.signals).items()
        a, b = one.state, other.state
    assert all(torch.equal(a.tensors[name], tensor) for name, tensor in b.tensors.items())


@pytest.mark.parametrize("mode", ["batch", "online"])
def test_step_is_algorithm_2(mode: str, model: FrozenModel, streams: Tensor) -> None:
    adapter = create("dynfed", arn="mlp", mode=mode, lam=0.9, tau=0.4, seed=3)
    state = adapter.init(model)
    alpha = np.array([model.source.rates.get(name, 0.0) for name in model.modules])  # line 2
    history = {name: torch.zeros_like(model.tensor(name)) for name in model.modules}  # line 1
    for k, batch in enumerate(streams[0, :3], start=1):
        step = adapter.step(model, state, batch)
        state = step.state
        alpha = 0.9 * alpha + 0.1 * network_in_numpy(alpha, 0.4, 32, 3)  # lines 4 and 13
        h = direction(model, batch).tensors  # line 5
        history = {name: (k - 1) / k * history[name] + h[name] / k for name in h}  # line 9
        used = h if mode == "batch" else history
        weights = {n: model.tensor(n) + a * used[n] for n, a in zip(model.modules, alpha, strict=True)}  # 7, 10
        weights |= {n: weights[n].clamp_min(0) for n in model.statistics if n.endswith("running_var")}
        torch.testing.assert_close(step.logits, model.forward(batch, weights), rtol=0, atol=2e-3)  # line 12
        rates = [float(state.tensors[RATE + name]) for name in model.modules]
        np.testing.assert_allclose(rates, alpha, rtol=0, atol=1e-12)


def test_first_batch_already_uses_evolved_rates_and_online_is_batch_there(model: FrozenModel, streams: Tensor) -> None:
    answers = []
    for mode in ("batch", "online"):
        adapter = create("dynfed", arn="mlp", mode=mode, lam=0.5)
        answers.append(adapter.step(model, adapter.init(model), streams[0, 0]).logits)
    assert torch.equal(*answers)
    atp = create("atp", mode="batch")
    assert not torch.equal(answers[0], atp.step(model, atp.init(model), streams[0, 0]).logits)


def test_every_client_of_a_model_follows_the_same_path_of_rates(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("dynfed", arn="mlp", mode="batch")
    states = [adapter.step(model, adapter.init(model), stream[0]).state for stream in streams]
    assert states[0].to_bytes() == states[1].to_bytes() == states[2].to_bytes()


def test_negative_rates_are_kept_and_drift_upwards(make_model: Callable[..., FrozenModel], streams: Tensor) -> None:
    model = make_model(rates={"linear5.bias": -0.5, "bn1.weight": 0.1})
    adapter = create("dynfed", arn="mlp", mode="batch", lam=0.9)
    state, path = adapter.init(model), []
    for batch in streams[0, :3]:
        step = adapter.step(model, state, batch)
        state = step.state
        path.append(float(state.tensors[RATE + "linear5.bias"]))
        assert step.signals["negative_rates"] == 1.0
    assert -0.5 < path[0] < path[1] < path[2] < 0


def test_rates_stop_evolving_at_the_horizon(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("dynfed", arn="mlp", mode="batch", horizon=2)
    state, means = adapter.init(model), []
    for batch in streams[0, :4]:
        step = adapter.step(model, state, batch)
        state = step.state
        means.append(step.signals["mean_rate"])
    assert means[0] < means[1] == means[2] == means[3]


@pytest.mark.parametrize("mode", ["batch", "online"])
def test_mlp_of_full_inertia_is_atp(mode: str, model: FrozenModel, streams: Tensor) -> None:
    dynfed, atp = create("dynfed", arn="mlp", mode=mode, lam=1.0), create("atp", mode=mode)
    one, other = (a.step(model, a.init(model), streams[0, 0]) for a in (dynfed, atp))
    torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=1e-5)


def test_negative_running_variances_are_clamped_and_counted(
    make_model: Callable[..., FrozenModel], streams: Tensor
) -> None:
    model = make_model(rates={"bn4.running_var": 1.29})
    adapter = create("dynfed", mode="batch")
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert step.signals["clamped_variances"] > 0
    assert bool(step.logits.isfinite().all())


def test_batch_of_one_leaves_undefined_variances_alone(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("dynfed", arn="mlp")
    step = adapter.step(model, adapter.init(model), streams[0, 0, :1])
    assert step.signals["undefined_variances"] == 1.0
    assert not step.state.tensors["bn4.running_var"].any()


def test_state_of_another_mode_is_refused(model: FrozenModel, streams: Tensor) -> None:
    online, batch = create("dynfed"), create("dynfed", mode="batch")
    with pytest.raises(StateMismatch, match="mode='batch'"):
        batch.step(model, online.init(model), streams[0, 0])


def test_rule_that_moves_other_modules_refuses_the_state(
    make_model: Callable[..., FrozenModel], streams: Tensor
) -> None:
    model = make_model(rates={"linear5.bias": 0.5})
    identity, mlp = create("dynfed"), create("dynfed", arn="mlp")
    with pytest.raises(StateMismatch, match="arn='mlp'"):
        mlp.step(model, identity.init(model), streams[0, 0])


@pytest.mark.parametrize(
    "wrong",
    [{"tau": 0.0}, {"tau": math.inf}, {"lam": 1.1}, {"lam": -0.1}, {"lam": math.nan}, {"arn": "rnn"}, {"hidden": 0}],
)
def test_hyperparameters_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        create("dynfed", **wrong)


def test_network_of_two_classes_and_no_rates_answers_as_frozen() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    model = FrozenModel.from_module(net, classifier="1", source=Source(prior=torch.tensor([0.5, 0.5]), rates={}))
    adapter, x = create("dynfed"), torch.rand(3, 4)
    assert torch.equal(adapter.step(model, adapter.init(model), x).logits, model.frozen(x).logits)
