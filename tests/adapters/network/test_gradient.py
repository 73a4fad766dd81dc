import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, create
from acclimate_adapters.methods.tent import mean_entropy
from acclimate_adapters.network.gradient import BatchStatistics, gradient
from acclimate_adapters.network.model import Pass


def test_the_gradient_is_the_finite_difference_of_the_objective() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = FrozenModel.from_module(net, classifier="3", source=Source(prior=torch.tensor([0.5, 0.5])))
    x = torch.randn(6, 3, dtype=torch.float64)
    at = {name: model.tensor(name) for name in ("0.weight", "1.bias")}
    g, answer = gradient(model, x, at, mean_entropy, BatchStatistics())
    for name, tensor in at.items():
        for index in torch.cartesian_prod(*map(torch.arange, tensor.shape)).reshape(tensor.numel(), -1).tolist():
            moved = []
            for sign in (1, -1):
                nudged = tensor.clone()
                nudged[tuple(index)] += sign * 1e-6
                with torch.no_grad():
                    moved.append(mean_entropy(model.run(x, at | {name: nudged}, BatchStatistics())))
            assert float(g[name][tuple(index)]) == pytest.approx(float(moved[0] - moved[1]) / 2e-6, abs=1e-8)
    assert not answer.logits.requires_grad


def test_a_parameter_that_the_objective_does_not_reach_has_gradient_zero(model: FrozenModel, streams: Tensor) -> None:
    def features(answer: Pass) -> Tensor:
        return answer.features.sum()

    g, _ = gradient(model, streams[0, 0], {n: model.tensor(n) for n in ("bn4.bias", "linear5.bias")}, features)
    assert torch.equal(g["linear5.bias"], torch.zeros(10))
    assert bool(g["bn4.bias"].any())


def test_without_parameters_there_is_only_the_pass(model: FrozenModel, streams: Tensor) -> None:
    g, answer = gradient(model, streams[0, 0], {}, mean_entropy)
    assert g == {}
    assert torch.equal(answer.logits, model.frozen(streams[0, 0]).logits)


def test_batch_statistics_fall_back_layer_by_layer(model: FrozenModel, streams: Tensor) -> None:
    rule = BatchStatistics()
    model.run(streams[0, 0, :1], normalise=rule)
    assert rule.undefined == 1  # bn4 sees one value per channel, the others a map
    rule = BatchStatistics()
    model.run(streams[0, 0], normalise=rule)
    assert rule.undefined == 0


@pytest.mark.parametrize("name", ["memo", "shot", "surgical", "t3a", "tent"])
def test_a_caller_in_inference_mode_gets_the_same_answers(name: str, model: FrozenModel, streams: Tensor) -> None:
    adapter = create(name)
    expected, plain = [], adapter.init(model)
    for batch in streams[0, :2, :4]:
        step = adapter.step(model, plain, batch)
        plain = step.state
        expected.append(step.logits)
    with torch.inference_mode():
        state = adapter.init(model)
        for batch, logits in zip(streams[0, :2, :4].clone(), expected, strict=True):
            step = adapter.step(model, state, batch)
            state = step.state
            torch.testing.assert_close(step.logits, logits, rtol=0, atol=0)
    assert state.to_bytes() == plain.to_bytes()
