"""The federated rounds of Fed-ADE against Algorithm 1 in slow loops: a network so small that finite differences do."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import (
    Anchors,
    ConfigurationError,
    FrozenModel,
    NumericalError,
    Source,
    State,
    StateMismatch,
)
from acclimate_adapters.functional import keyed_generator
from acclimate_adapters.methods.fed_ade.client import FedAde
from acclimate_adapters.methods.fed_ade.risk import minibatches
from acclimate_adapters.methods.fed_ade.rounds import Update, aggregate, finish, initial_shared, local_update

Weights = dict[str, np.ndarray]
HEAD = ("head.weight", "head.bias")
ADAPTER = FedAde(layers="all", eta_min=0.02, eta_max=0.5, epochs=2, personal_epochs=1, batch_size=5, seed=3)


class Network(nn.Module):
    """Six pixels, four features, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.norm(self.first(x.flatten(1)))))
        return result


def tiny(dtype: torch.dtype) -> FrozenModel:
    rng = torch.Generator().manual_seed(0)
    net = Network().double()
    for value in (*net.parameters(), net.norm.running_mean):
        value.data.copy_(torch.randn(value.shape, generator=rng, dtype=torch.float64))
    net.norm.running_var.copy_(torch.rand(4, generator=rng, dtype=torch.float64) + 0.5)
    anchors = Anchors(
        torch.randn(12, 1, 2, 3, generator=rng, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 1])
    )
    confusion = torch.tensor([[0.8, 0.1, 0.2], [0.1, 0.8, 0.1], [0.1, 0.1, 0.7]], dtype=torch.float64)
    source = Source(prior=torch.full((3,), 1 / 3), anchors=anchors, confusion=confusion)
    return FrozenModel.from_module(net.to(dtype), classifier="head", source=source)


@pytest.fixture(scope="module")
def small() -> FrozenModel:
    return tiny(torch.float64)


@pytest.fixture(scope="module")
def batches() -> Tensor:
    """[3 clients, 2 batches, 6 samples, 1, 2, 3]."""
    return torch.randn(3, 2, 6, 1, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def forward(w: Weights, statistics: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = x.reshape(len(x), -1) @ w["first.weight"].T + w["first.bias"]
    unit = (hidden - statistics["norm.running_mean"]) / np.sqrt(statistics["norm.running_var"] + 1e-5)
    features = np.maximum(unit * w["norm.weight"] + w["norm.bias"], 0)
    return features, features @ w["head.weight"].T + w["head.bias"]


def equation_4(w: Weights, statistics: Weights, x: np.ndarray, labels: list[int], importance: list[float]) -> float:
    _, logits = forward(w, statistics, x)
    total = 0.0
    for row, label, r in zip(logits.tolist(), labels, importance, strict=True):
        total += r * (math.log(sum(math.exp(v) for v in row)) - row[label])
    return total / len(labels)


def descend(
    w: Weights,
    trained: list[str],
    statistics: Weights,
    x: np.ndarray,
    labels: list[int],
    importance: list[float],
    eta: float,
) -> Weights:
    """One step of Eq. 6 or 8, its gradient by central differences of one weight after the other."""
    new = {name: value.copy() for name, value in w.items()}
    for name in trained:
        for i in np.ndindex(w[name].shape):
            risks = []
            for shift in (1e-6, -1e-6):
                moved = {**w, name: w[name].copy()}
                moved[name][i] += shift
                risks.append(equation_4(moved, statistics, x, labels, importance))
            new[name][i] -= eta * (risks[0] - risks[1]) / 2e-6
    return new


def numpy(tensors: Mapping[str, Tensor], prefix: str = "") -> Weights:
    return {n.removeprefix(prefix): t.numpy().copy() for n, t in tensors.items() if n.startswith(prefix)}


def measured(adapter: FedAde, model: FrozenModel, batch: Tensor, state: State | None = None) -> State:
    return adapter.step(model, state or adapter.init(model), batch).state


def test_two_rounds_of_two_clients_agree_with_algorithm_1_in_loops(small: FrozenModel, batches: Tensor) -> None:
    states = [measured(ADAPTER, small, batches[0, 0]), measured(ADAPTER, small, batches[1, 0, :4])]
    anchors, statistics = small.source.anchors, {n: small.tensor(n).numpy() for n in small.statistics}
    assert anchors is not None
    x, labels = anchors.inputs.numpy(), anchors.labels.tolist()
    shared = initial_shared(small)
    slow_shared, slow_heads = numpy(shared), [{n: small.tensor(n).numpy() for n in HEAD}] * 2
    for r in range(2):
        slow: list[Weights] = []
        for state, head in zip(states, slow_heads, strict=True):  # line 11, Eq. 6
            w = {**slow_shared, **head}
            weights, eta = state.tensors["labels"].tolist(), float(state.tensors["eta"])
            importance = [weights[i] * 12 / labels.count(i) for i in labels]
            for rows in minibatches(12, 5, 2, keyed_generator(3, 1, r, 0)):
                part = rows.tolist()
                w = descend(
                    w, list(w), statistics, x[part], [labels[i] for i in part], [importance[i] for i in part], eta
                )
            slow.append(w)
        updates = [local_update(ADAPTER, small, state, shared, r) for state in states]
        for update, w in zip(updates, slow, strict=True):
            for name, value in update.shared.items():
                np.testing.assert_allclose(value, w[name], atol=1e-7)
            for name in HEAD:
                np.testing.assert_allclose(update.state.tensors[f"personal.{name}"], w[name], atol=1e-7)
        assert [update.samples for update in updates] == [6, 4]

        slow_shared = {n: (6 * slow[0][n] + 4 * slow[1][n]) / 10 for n in slow_shared}  # line 14, Eq. 7
        shared = aggregate(shared, updates)
        for name, value in shared.items():
            np.testing.assert_allclose(value, slow_shared[name], atol=1e-7)

        slow_heads = []
        for state, w in zip(states, slow, strict=True):  # lines 17 and 18, Eq. 8
            w = {**w, **slow_shared}
            weights, eta = state.tensors["labels"].tolist(), float(state.tensors["eta"])
            importance = [weights[i] * 12 / labels.count(i) for i in labels]
            for rows in minibatches(12, 5, 1, keyed_generator(3, 1, r, 1)):
                part = rows.tolist()
                part_labels, part_importance = [labels[i] for i in part], [importance[i] for i in part]
                w = descend(w, list(HEAD), statistics, x[part], part_labels, part_importance, eta)
            slow_heads.append({n: w[n] for n in HEAD})
        states = [finish(ADAPTER, small, update.state, shared, r) for update in updates]
        for state, head in zip(states, slow_heads, strict=True):
            for name in HEAD:
                np.testing.assert_allclose(state.tensors[f"personal.{name}"], head[name], atol=1e-7)
            for name, value in slow_shared.items():
                np.testing.assert_allclose(state.tensors[f"shared.{name}"], value, atol=1e-7)

    answer = ADAPTER.step(small, states[0], batches[0, 1])  # between rounds: the client's own layers
    _, logits = forward({**slow_shared, **slow_heads[0]}, statistics, batches[0, 1].numpy())
    np.testing.assert_allclose(answer.logits, logits, atol=1e-6)


def test_step_between_rounds_measures_and_leaves_the_layers(small: FrozenModel, batches: Tensor) -> None:
    state = measured(ADAPTER, small, batches[0, 0])
    step = ADAPTER.step(small, state, batches[0, 1])
    layers = [name for name in state.tensors if "." in name]
    assert all(torch.equal(step.state.tensors[name], state.tensors[name]) for name in layers)
    torch.testing.assert_close(step.logits, small.frozen(batches[0, 1]).logits)
    assert not torch.equal(step.state.tensors["q"], state.tensors["q"])
    assert float(step.state.tensors["eta"]) == step.signals["learning_rate"]
    assert int(step.state.tensors["samples"]) == 6


def test_rounds_count_no_batch_and_measure_no_drift(small: FrozenModel, batches: Tensor) -> None:
    state = measured(ADAPTER, small, batches[0, 0])
    update = local_update(ADAPTER, small, state, initial_shared(small), 0)
    done = finish(ADAPTER, small, update.state, aggregate(initial_shared(small), [update]), 0)
    assert done.step == state.step == 1
    assert done.nbytes == state.nbytes
    for name in ("q", "z", "eta", "samples", "labels"):
        assert torch.equal(done.tensors[name], state.tensors[name])


def test_rounds_change_neither_model_nor_state_nor_shared_layers(small: FrozenModel, batches: Tensor) -> None:
    state, shared = measured(ADAPTER, small, batches[0, 0]), initial_shared(small)
    before = state.to_bytes(), {n: small.tensor(n).clone() for n in small.modules}
    update = local_update(ADAPTER, small, state, shared, 0)
    finish(ADAPTER, small, update.state, aggregate(shared, [update]), 0)
    assert state.to_bytes() == before[0]
    assert all(torch.equal(small.tensor(n), value) for n, value in before[1].items())
    assert not any(t.requires_grad for t in (*update.shared.values(), *update.state.tensors.values()))


def test_round_repeats_to_the_bit_and_another_round_takes_another_order(small: FrozenModel, batches: Tensor) -> None:
    state, shared = measured(ADAPTER, small, batches[0, 0]), initial_shared(small)
    first, again, other = (local_update(ADAPTER, small, state, shared, r).shared for r in (0, 0, 1))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)


def test_round_on_a_loaded_state_and_in_inference_mode_is_the_same_round(small: FrozenModel, batches: Tensor) -> None:
    state, shared = measured(ADAPTER, small, batches[0, 0]), initial_shared(small)
    expected = local_update(ADAPTER, small, state, shared, 0)
    with torch.inference_mode():
        inferred = measured(ADAPTER, small, batches[0, 0])
        update = local_update(ADAPTER, small, inferred, shared, 0)
        done = finish(ADAPTER, small, update.state, aggregate(shared, [update]), 0)
    again = local_update(ADAPTER, small, done, update.shared, 1)
    assert all(bool(t.isfinite().all()) for t in again.shared.values())
    loaded = local_update(ADAPTER, small, State.from_bytes(state.to_bytes()), shared, 0)
    for name, value in expected.shared.items():
        assert torch.equal(update.shared[name], value)
        assert torch.equal(loaded.shared[name], value)


def test_rate_0_leaves_every_layer_as_it_is(small: FrozenModel, batches: Tensor) -> None:
    still = replace(ADAPTER, eta_min=0.0, eta_max=0.0)
    state, shared = measured(still, small, batches[0, 0]), initial_shared(small)
    update = local_update(still, small, state, shared, 0)
    done = finish(still, small, update.state, aggregate(shared, [update]), 0)
    assert done.to_bytes() == state.to_bytes()


def test_aggregation_weighs_by_samples_and_averages_floating_buffers(small: FrozenModel) -> None:
    state = ADAPTER.init(small)
    parts = [
        {"w": torch.tensor([1.0, 2.0]), "norm.running_mean": torch.tensor([0.0])},
        {"w": torch.tensor([5.0, 2.0]), "norm.running_mean": torch.tensor([10.0])},
    ]
    even = aggregate(parts[0], [Update(part, 8, state) for part in parts])
    assert even["norm.running_mean"].tolist() == [5.0]
    uneven = aggregate(parts[0], [Update(parts[0], 1, state), Update(parts[1], 3, state)])
    assert uneven["w"].tolist() == [4.0, 2.0]


def test_client_without_samples_weighs_nothing_and_nobody_keeps_the_shared_layers(small: FrozenModel) -> None:
    state = ADAPTER.init(small)
    shared = {"w": torch.tensor([7.0])}
    idle, busy = Update({"w": torch.tensor([1.0])}, 0, state), Update({"w": torch.tensor([3.0])}, 2, state)
    assert aggregate(shared, [idle, busy])["w"].tolist() == [3.0]
    assert aggregate(shared, [idle])["w"].tolist() == [7.0]
    assert aggregate(shared, [])["w"].tolist() == [7.0]
    assert int(state.tensors["samples"]) == 0


def test_update_that_is_not_finite_poisons_nobody(small: FrozenModel) -> None:
    state, good = ADAPTER.init(small), {"w": torch.tensor([1.0])}
    with pytest.raises(NumericalError, match="w"):
        aggregate(good, [Update(good, 1, state), Update({"w": torch.tensor([math.nan])}, 1, state)])


def test_update_with_other_names_or_shapes_is_refused(small: FrozenModel, batches: Tensor) -> None:
    state, good = measured(ADAPTER, small, batches[0, 0]), {"w": torch.tensor([1.0])}
    for bad in ({"v": torch.tensor([1.0])}, {"w": torch.tensor([1.0, 2.0])}, {}):
        with pytest.raises(ConfigurationError, match="name or shape"):
            aggregate(good, [Update(bad, 1, state)])
    with pytest.raises(ConfigurationError, match="name or shape"):
        local_update(ADAPTER, small, state, good, 0)


def test_update_that_explodes_is_an_error(small: FrozenModel, batches: Tensor) -> None:
    state = measured(ADAPTER, small, batches[0, 0])
    shared = {name: tensor * 1e200 for name, tensor in initial_shared(small).items()}
    with pytest.raises(NumericalError):
        local_update(ADAPTER, small, state, shared, 0)


def test_adapter_or_state_of_the_head_alone_takes_no_part_in_rounds(small: FrozenModel, batches: Tensor) -> None:
    head = replace(ADAPTER, layers="head")
    state = measured(head, small, batches[0, 0])
    with pytest.raises(ConfigurationError, match="all"):
        local_update(head, small, state, initial_shared(small), 0)
    with pytest.raises(StateMismatch):
        local_update(ADAPTER, small, state, initial_shared(small), 0)


def test_shared_layers_are_all_parameters_but_the_heads(small: FrozenModel) -> None:
    assert set(initial_shared(small)) == {"first.weight", "first.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_of_a_half_precision_model_move_its_layers_as_far_as_in_single(
    dtype: torch.dtype, batches: Tensor
) -> None:
    """A step of 1e-4 is lost beside weights of 1 in half precision."""
    adapter, lengths = replace(ADAPTER, eta_min=1e-4, eta_max=1e-4), []
    for precision in (torch.float32, dtype):
        model = tiny(precision)
        shared = initial_shared(model)
        state = adapter.step(model, adapter.init(model), batches[0, 0].to(precision)).state
        update = local_update(adapter, model, state, shared, 0)
        after = finish(adapter, model, update.state, aggregate(shared, [update]), 0)
        moved = [after.tensors[n].float() - state.tensors[n].float() for n in after.tensors if "." in n]
        lengths.append(float(torch.cat([part.flatten() for part in moved]).norm()))
        assert adapter.step(model, after, batches[0, 1].to(precision)).logits.dtype == precision
    assert lengths[1] == pytest.approx(lengths[0], rel=0.2)
