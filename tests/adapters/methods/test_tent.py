import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import ConfigurationError, FrozenModel, MissingSource, Source, StateMismatch, create, require
from acclimate_adapters.methods.tent import adam, affine_parameters, mean_entropy
from acclimate_adapters.network.model import Pass

SOURCE = Source(prior=torch.tensor([0.5, 0.5]))


def batch_normalised(network: nn.Module) -> nn.Module:
    """A copy in double precision whose BatchNorm layers, and nothing else, are in training mode."""
    net = copy.deepcopy(network).double().eval().requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    return net


def test_equation_1_against_scalar_loops() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 5))
    total = 0.0
    for row in logits:
        norm = sum(math.exp(z) for z in row)
        total -= sum(math.exp(z) / norm * math.log(math.exp(z) / norm) for z in row)
    answer = Pass(torch.zeros(4, 1), torch.from_numpy(logits))
    assert float(mean_entropy(answer)) == pytest.approx(total / 4, rel=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_equations_2_to_4_against_a_plain_optimizer(
    optimizer: str, double_model: FrozenModel, network: nn.Module, streams: Tensor
) -> None:
    net = batch_normalised(network)
    theta = [p for name, p in net.named_parameters() if name.startswith("bn")]
    for parameter in theta:
        parameter.requires_grad_()
    plain = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](theta, lr=0.05)
    adapter = create("tent", lr=0.05, optimizer=optimizer)
    state = adapter.init(double_model)
    for batch in streams[0, :4].double():
        step = adapter.step(double_model, state, batch)
        state = step.state
        logits = net(batch)
        torch.testing.assert_close(step.logits, logits.detach(), rtol=0, atol=1e-10)
        p = logits.softmax(1)
        plain.zero_grad()
        (-(p * p.log()).sum(1)).mean().backward()
        plain.step()


def test_equations_3_and_4_against_scalar_loops() -> None:
    rng = np.random.default_rng(1)
    gradients, lr = rng.normal(0, 1, (5, 3)), 0.1
    theta, m, v = [1.0, -2.0, 0.5], [0.0] * 3, [0.0] * 3
    carried: Mapping[str, Tensor] = {
        "w": torch.tensor(theta, dtype=torch.float64),
        "adam.mean.w": torch.zeros(3, dtype=torch.float64),
        "adam.square.w": torch.zeros(3, dtype=torch.float64),
    }
    for t, g in enumerate(gradients, start=1):
        carried = adam(carried, {"w": torch.from_numpy(g)}, t, lr)
        for i in range(3):
            m[i] = 0.9 * m[i] + 0.1 * g[i]
            v[i] = 0.999 * v[i] + 0.001 * g[i] ** 2
            theta[i] -= lr * (m[i] / (1 - 0.9**t)) / (math.sqrt(v[i] / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(carried["w"].numpy(), theta, rtol=1e-12)


def test_with_step_size_0_it_is_plain_batch_normalisation(
    double_model: FrozenModel, network: nn.Module, streams: Tensor
) -> None:
    net, adapter = batch_normalised(network), create("tent", lr=0)
    state = adapter.init(double_model)
    for batch in streams[0, :2].double():
        step = adapter.step(double_model, state, batch)
        state = step.state
        torch.testing.assert_close(step.logits, net(batch), rtol=0, atol=1e-10)


def test_the_answer_is_from_before_the_update(model: FrozenModel, streams: Tensor) -> None:
    small, large = (create("tent", lr=lr) for lr in (1e-3, 1.0))
    steps = [adapter.step(model, adapter.init(model), streams[0, 0]) for adapter in (small, large)]
    assert torch.equal(steps[0].logits, steps[1].logits)
    later = [a.step(model, s.state, streams[0, 1]).logits for a, s in zip((small, large), steps, strict=True)]
    assert not torch.equal(*later)


def test_all_batch_norm_layers_are_trained_unless_some_are_named(model: FrozenModel) -> None:
    every = [f"bn{i}.{kind}" for i in range(1, 5) for kind in ("weight", "bias")]
    assert list(affine_parameters(model)) == every
    assert affine_parameters(model, ("bn4", "bn2")) == ("bn2.weight", "bn2.bias", "bn4.weight", "bn4.bias")


def test_a_layer_that_is_not_named_normalises_by_the_batch_and_keeps_its_parameters(
    model: FrozenModel, streams: Tensor
) -> None:
    adapter = create("tent", lr=0.1, layers=["bn1"])
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert step.state.tensors.keys() == {"bn1.weight", "bn1.bias"}
    every = create("tent", lr=0.1)
    assert torch.equal(step.logits, every.step(model, every.init(model), streams[0, 0]).logits)


def test_a_name_that_is_no_normalisation_layer_is_refused(model: FrozenModel) -> None:
    with pytest.raises(ConfigurationError, match=r"conv1.*bn1, bn2, bn3, bn4"):
        create("tent", layers=("bn1", "conv1")).init(model)


@pytest.mark.parametrize("other", [{"optimizer": "adam"}, {"layers": ("bn1",)}])
def test_a_state_of_other_hyperparameters_is_refused(
    other: Mapping[str, Any], model: FrozenModel, streams: Tensor
) -> None:
    for maker, user in ((other, {}), ({}, other)):
        with pytest.raises(StateMismatch, match="optimizer"):
            create("tent", **user).step(model, create("tent", **maker).init(model), streams[0, 0])


def test_one_value_per_channel_uses_the_running_statistics(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("tent", lr=0.01)
    step = adapter.step(model, adapter.init(model), streams[0, 0, :1])
    assert step.signals["undefined_variances"] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in step.state.tensors.values())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_constant_images_are_answered(optimizer: str, model: FrozenModel) -> None:
    adapter = create("tent", lr=0.01, optimizer=optimizer)
    state = adapter.init(model)
    for _ in range(3):
        step = adapter.step(model, state, torch.full((20, 1, 28, 28), 0.5))
        state = step.state
        assert bool(step.logits.isfinite().all())
        assert all(bool(tensor.isfinite().all()) for tensor in state.tensors.values())


def test_dropout_stays_off(streams: Tensor) -> None:
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 2)).train()
    model = FrozenModel.from_module(net, classifier="3", source=SOURCE)
    adapter = create("tent", lr=0)
    state = adapter.init(model)
    first = adapter.step(model, state, streams[0, 0])
    assert torch.equal(first.logits, adapter.step(model, first.state, streams[0, 0]).logits)


def test_layers_without_affine_parameters_are_normalised_and_nothing_is_trained(streams: Tensor) -> None:
    net = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.Flatten(), nn.Linear(784, 2))
    model = FrozenModel.from_module(net, classifier="2", source=SOURCE)
    adapter = create("tent")
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert step.state.nbytes == 0
    assert step.state.step == 1
    assert not torch.equal(step.logits, model.frozen(streams[0, 0]).logits)


def test_a_network_without_normalisation_is_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 2))
    with pytest.raises(MissingSource, match="normalisation"):
        require(create("tent"), FrozenModel.from_module(net, classifier="1", source=SOURCE))


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 4), nn.LayerNorm([4, 26, 26])], ids=["group", "layer"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_layer_and_group_norms_are_trained_where_there_is_no_batch_norm(
    norm: nn.Module, optimizer: str, streams: Tensor
) -> None:
    """Against a plain step of torch's own optimizers on the same network."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), copy.deepcopy(norm), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 10)
    net = nn.Sequential(*layers).eval()
    model = FrozenModel.from_module(net, classifier="4", source=Source(prior=torch.full((10,), 0.1)))
    adapter = create("tent", lr=0.01, optimizer=optimizer)
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    trained = dict(net[1].named_parameters())
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    logits = net(streams[0, 0])
    torch.testing.assert_close(step.logits, logits.detach())
    torch.distributions.Categorical(logits=logits).entropy().mean().backward()
    kind(trained.values(), lr=0.01).step()
    for name, tensor in trained.items():
        torch.testing.assert_close(step.state.tensors[f"1.{name}"], tensor.detach(), rtol=1e-4, atol=1e-4)
    assert create("tent", layers=("1",)).init(model).tensors.keys() == {"1.weight", "1.bias"}
