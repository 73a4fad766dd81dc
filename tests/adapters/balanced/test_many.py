"""Clients whose rows go through the network together get what each gets alone."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, InputError, NumericalError, State, StateMismatch, Step
from acclimate_adapters.balanced.balanced import Balanced

Models = Callable[..., FrozenModel]
Nets = Callable[..., nn.Sequential]
RowsOf = Callable[..., tuple[Tensor, Tensor]]
SIZES = (20, 1, 7, 20)


@pytest.fixture
def clients(streams: Tensor) -> list[list[Tensor]]:
    """Three rounds of batches of four clients; two of them change in the last one."""
    rounds = [[streams[c % 3, b, :n] for c, n in enumerate(SIZES)] for b in range(3)]
    rounds[2][0], rounds[2][3] = streams[1, 2], streams[2, 2] * 3
    return rounds


def alone(adapter: Balanced, model: FrozenModel, states: Sequence[State], batches: Sequence[Tensor]) -> list[Step]:
    return [adapter.step(model, state, x) for state, x in zip(states, batches, strict=True)]


def assert_alike(together: Sequence[Step], apart: Sequence[Step], tolerance: float) -> None:
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=tolerance)
        assert one.uncorrected is not None
        assert one.features is not None
        torch.testing.assert_close(one.uncorrected, other.uncorrected, rtol=0, atol=tolerance)
        torch.testing.assert_close(one.features, other.features, rtol=1e-5, atol=tolerance)
        assert one.signals.keys() == other.signals.keys()
        for name, value in other.signals.items():
            assert one.signals[name] == pytest.approx(value, rel=1e-4, abs=tolerance)
        assert one.state.step == other.state.step
        for name, tensor in other.state.tensors.items():
            torch.testing.assert_close(one.state.tensors[name], tensor, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_merged_steps_are_those_of_each_client_alone_also_when_some_restart(
    precision: torch.dtype,
    tolerance: float,
    model: FrozenModel,
    double_model: FrozenModel,
    clients: list[list[Tensor]],
) -> None:
    adapter, used = Balanced(), model if precision == torch.float32 else double_model
    states = [adapter.init(used) for _ in SIZES]
    for batches in clients:
        batches = [x.to(precision) for x in batches]
        together, apart = adapter.step_many(used, states, batches), alone(adapter, used, states, batches)
        assert_alike(together, apart, tolerance)
        states = [step.state for step in apart]
    assert [step.signals["restarted"] for step in together] == [1, 0, 0, 1]


def test_the_order_of_the_clients_does_not_matter(double_model: FrozenModel, clients: list[list[Tensor]]) -> None:
    adapter, batches = Balanced(), [x.double() for x in clients[0]]
    states = [adapter.init(double_model) for _ in batches]
    forwards = adapter.step_many(double_model, states, batches)
    assert_alike(adapter.step_many(double_model, states, batches[::-1])[::-1], forwards, 1e-10)


def test_networks_without_batch_norm_are_merged_too(logit_model: Models) -> None:
    adapter, model = Balanced(), logit_model([0.5, 0.3, 0.2])
    batches = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (4, 9)]
    states = [adapter.init(model)] * 2
    assert_alike(adapter.step_many(model, states, batches), alone(adapter, model, states, batches), 1e-12)


def test_batches_of_two_shapes_and_foreign_states_are_refused(small_model: Models, small_rows: RowsOf) -> None:
    adapter, model, x = Balanced(), small_model(), small_rows(4)[0]
    mine, foreign = adapter.init(model), adapter.init(small_model(prior=[0.2, 0.3, 0.5]))
    with pytest.raises(InputError, match="must be of one shape"):
        adapter.step_many(model, [mine, mine], [x, x[..., :2]])
    with pytest.raises(StateMismatch):
        adapter.step_many(model, [mine, foreign], [x, x])


def test_values_that_overflow_are_an_error_whoever_sent_them(
    small_net: Nets, small_model: Models, small_rows: RowsOf
) -> None:
    adapter, model = Balanced(), small_model(small_net(dtype=torch.float32))
    state, sound = adapter.init(model), small_rows(4)[0].float()
    with pytest.raises(NumericalError):
        adapter.step_many(model, [state, state], [sound, torch.full((2, 2, 3, 3), 1e25)])
    assert bool(adapter.step(model, state, sound).logits.isfinite().all())
