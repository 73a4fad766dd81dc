"""Whole steps of Fed-ADE against Algorithm 1 in NumPy, its identities and its edge cases."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import (
    Anchors,
    ConfigurationError,
    FrozenModel,
    MissingSource,
    NumericalError,
    Source,
    State,
    StateMismatch,
    create,
)
from acclimate_adapters.functional import keyed_generator
from acclimate_adapters.methods.fed_ade.client import FedAde
from acclimate_adapters.methods.fed_ade.risk import minibatches

ANCHORS = 24  # few enough for loops


@pytest.fixture(scope="module")
def sharp(network: nn.Module, source_quantities: Mapping[str, Any]) -> FrozenModel:
    """The network in double precision with few anchors, some classes having one and some several."""
    inputs, labels = source_quantities["anchors"]
    first = [int((labels == k).nonzero()[0]) for k in range(10)]
    rows = torch.tensor(first + [i for i in range(len(labels)) if i not in first][: ANCHORS - 10])
    quantities = {**source_quantities, "anchors": Anchors(inputs[rows], labels[rows])}
    return FrozenModel.from_module(copy.deepcopy(network).double(), classifier="linear5", source=Source(**quantities))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def nearest_on_simplex(m: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Projected gradient descent until nothing moves any more; the projection by bisection of its threshold."""
    w, size = np.full(len(q), 1 / len(q)), 1 / np.linalg.norm(m, 2) ** 2
    for _ in range(2000):
        v = w - size * m.T @ (m @ w - q)
        low, high = v.min() - 1, v.max()
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
        moved, w = w, np.maximum(v - high, 0)
        if abs(moved - w).max() < 1e-13:
            break
    return w


@dataclass
class Slow:
    """One client of Fed-ADE with `layers="head"`, line by line."""

    adapter: FedAde
    model: FrozenModel
    anchors: np.ndarray
    labels: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    q: np.ndarray
    z: np.ndarray

    def step(self, t: int, features: np.ndarray) -> dict[str, Any]:
        before = features @ self.weight.T + self.bias
        q, z = softmax(before).mean(0), unit(features).mean(0)  # Eq. 11 and 13
        s_unc, s_rep = 1 - cosine(self.q, q), (1 - cosine(self.z, z)) / 2  # Eq. 12 and 14
        eta = self.adapter.eta_min + (self.adapter.eta_max - self.adapter.eta_min) * (s_unc + s_rep) / 2  # Eq. 9, 10
        self.q, self.z, w = q, z, self.estimate(before, q)
        for rows in minibatches(ANCHORS, self.adapter.batch_size, 3, keyed_generator(self.adapter.seed, t)):
            self.descend(rows.numpy(), w, eta)
        return {"uncertainty_shift": s_unc, "representation_shift": s_rep, "learning_rate": eta, "prior": w}

    def estimate(self, logits: np.ndarray, q: np.ndarray) -> np.ndarray:
        if self.adapter.mode == "hard":
            q = np.bincount(logits.argmax(-1), minlength=10) / len(logits)
        m = self.model.source.confusion_matrix(self.adapter.mode).double().numpy()
        m = m / m.sum(0)
        result: np.ndarray = np.linalg.inv(m) @ q if self.adapter.weights == "raw" else nearest_on_simplex(m, q)
        return result

    def descend(self, rows: np.ndarray, w: np.ndarray, eta: float) -> None:
        """Eq. 8, the risk of Eq. 4 over all anchors estimated from some rows."""
        weight, bias = self.weight.copy(), self.bias.copy()
        for n in rows:
            factor = w[self.labels[n]] / (self.labels == self.labels[n]).sum() * ANCHORS / len(rows)
            slope = factor * (softmax(self.weight @ self.anchors[n] + self.bias) - np.eye(10)[self.labels[n]])
            weight -= eta * np.outer(slope, self.anchors[n])
            bias -= eta * slope
        self.weight, self.bias = weight, bias


def unit(features: np.ndarray) -> np.ndarray:
    result: np.ndarray = features / np.sqrt((features**2).sum(-1, keepdims=True))
    return result


@pytest.mark.parametrize("hyperparameters", [{}, {"weights": "raw"}, {"mode": "hard"}], ids=str)
def test_whole_steps_agree_with_algorithm_1(
    hyperparameters: dict[str, Any], sharp: FrozenModel, streams: Tensor
) -> None:
    adapter = FedAde(eta_min=0.01, eta_max=2.0, epochs=2, personal_epochs=1, batch_size=7, seed=5, **hyperparameters)
    assert sharp.anchor_features is not None
    anchors, labels = (part.numpy() for part in sharp.anchor_features)
    head = sharp.tensor("linear5.weight").numpy(), sharp.tensor("linear5.bias").numpy()
    slow = Slow(adapter, sharp, anchors, labels, *head, np.full(10, 0.1), unit(anchors).mean(0))
    state = adapter.init(sharp)
    for t, x in enumerate(streams[0, :3, :5].double()):
        features = sharp.frozen(x).features.numpy()
        expected = slow.step(t, features)
        step = adapter.step(sharp, state, x)
        state = step.state
        for signal, value in expected.items():
            assert step.signals[signal] == pytest.approx(value, abs=1e-8), signal
        np.testing.assert_allclose(step.logits, features @ slow.weight.T + slow.bias, atol=1e-7)
        np.testing.assert_allclose(state.tensors["personal.linear5.weight"], slow.weight, atol=1e-7)
        np.testing.assert_allclose(state.tensors["personal.linear5.bias"], slow.bias, atol=1e-7)
        np.testing.assert_allclose(state.tensors["q"], slow.q, atol=1e-7)
        np.testing.assert_allclose(state.tensors["z"], slow.z, atol=1e-10)
        torch.testing.assert_close(step.frozen_logits, sharp.frozen(x).logits)
        torch.testing.assert_close(step.features, sharp.frozen(x).features)


@pytest.mark.parametrize("layers", ["head", "all"])
def test_same_batch_twice_gives_the_smallest_rate(layers: str, model: FrozenModel, streams: Tensor) -> None:
    adapter = create("fed_ade", layers=layers)
    first = adapter.step(model, adapter.init(model), streams[0, 0])
    second = adapter.step(model, first.state, streams[0, 0])
    assert first.signals["learning_rate"] > 1e-5
    assert second.signals["learning_rate"] == pytest.approx(5e-6, rel=1e-4)
    assert second.signals["representation_shift"] == 0


def test_step_lowers_the_risk_of_the_batch_it_answers(sharp: FrozenModel, streams: Tensor) -> None:
    adapter = FedAde(eta_min=0.01, eta_max=0.1)
    state = adapter.init(sharp)
    anchors = sharp.anchor_features
    assert anchors is not None

    def risk(state: State, weights: Tensor) -> float:
        logits = anchors.features @ state.tensors["personal.linear5.weight"].T + state.tensors["personal.linear5.bias"]
        losses = nn.functional.cross_entropy(logits, anchors.labels, reduction="none")
        return float(sum(weights[k] * losses[anchors.labels == k].mean() for k in range(10)))  # Eq. 4

    for x in streams[0, :4].double():
        step = adapter.step(sharp, state, x)
        weights = torch.tensor(step.signals["prior"], dtype=torch.float64)
        assert risk(step.state, weights) < risk(state, weights)
        state = step.state


def test_batch_of_one_is_answered_with_a_label_estimate_on_the_simplex(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("fed_ade")
    step = adapter.step(model, adapter.init(model), streams[0, 0, :1])
    prior = step.signals["prior"]
    assert isinstance(prior, tuple)
    assert sum(prior) == pytest.approx(1)
    assert min(prior) >= 0


def test_seed_changes_the_order_of_the_anchors_alone(model: FrozenModel, streams: Tensor) -> None:
    one, other = (create("fed_ade", eta_max=0.1, seed=seed) for seed in (0, 1))
    a, b = (adapter.step(model, adapter.init(model), streams[0, 0]) for adapter in (one, other))
    assert a.signals["learning_rate"] == b.signals["learning_rate"]
    assert not torch.equal(a.logits, b.logits)
    torch.testing.assert_close(a.logits, b.logits, atol=0.5, rtol=0)


def test_step_counts_classes_without_anchors(
    make_model: Callable[..., FrozenModel], source_quantities: Mapping[str, Any], streams: Tensor
) -> None:
    inputs, labels = source_quantities["anchors"]
    kept = (labels != 3) & (labels != 8)
    model = make_model(anchors=Anchors(inputs[kept], labels[kept]))
    step = create("fed_ade").step(model, create("fed_ade").init(model), streams[0, 0])
    assert step.signals["classes_without_anchors"] == 2
    assert bool(step.logits.isfinite().all())


def test_singular_confusion_is_reported_and_survived(make_model: Callable[..., FrozenModel], streams: Tensor) -> None:
    model = make_model(confusion=torch.full((10, 10), 0.1))
    step = create("fed_ade").step(model, create("fed_ade").init(model), streams[0, 0])
    assert step.signals["refused"] == 1
    assert step.signals["prior"] == pytest.approx([0.1] * 10)


def test_state_that_became_non_finite_is_an_error(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("fed_ade")
    state = adapter.init(model)
    broken = {**state.tensors, "personal.linear5.bias": torch.full((10,), math.nan)}
    with pytest.raises(NumericalError):
        adapter.step(model, State(state.adapter, state.layout, state.model, 0, broken), streams[0, 0])


def test_states_of_the_two_layer_settings_are_not_mixed_up(model: FrozenModel, streams: Tensor) -> None:
    head, everything = create("fed_ade"), create("fed_ade", layers="all")
    for adapter, other in ((head, everything), (everything, head)):
        with pytest.raises(StateMismatch, match="layers="):
            adapter.step(model, other.init(model), streams[0, 0])


def test_state_of_the_head_setting_holds_no_more_than_the_head_and_two_summaries(model: FrozenModel) -> None:
    assert create("fed_ade").init(model).nbytes == 4 * (64 * 10 + 10 + 10 + 64)


@pytest.mark.parametrize(
    "wrong", [{"eta_min": 1e-3, "eta_max": 1e-4}, {"eta_max": math.nan}, {"eta_min": -1e-6}, {"batch_size": 0}], ids=str
)
def test_rates_and_sizes_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        create("fed_ade", **wrong)


def test_rounds_need_gradients_which_the_head_alone_does_not() -> None:
    alone = {"anchors", "confusion", "prior", "linear_classifier"}
    assert create("fed_ade").needs == alone
    assert create("fed_ade", layers="all").needs == {*alone, "gradients"}


def test_model_without_anchors_or_matrix_is_refused_at_the_start(
    make_model: Callable[..., FrozenModel], source_quantities: Mapping[str, Any]
) -> None:
    with pytest.raises(MissingSource, match="anchors"):
        create("fed_ade").init(make_model(anchors=None))
    with pytest.raises(MissingSource, match="confusion"):
        create("fed_ade").init(make_model(confusion=None))
    with pytest.raises(ConfigurationError, match="hard"):
        create("fed_ade", mode="hard").init(make_model(confusion={"soft": source_quantities["confusion"]["soft"]}))


def test_the_confusion_matrix_is_decomposed_once(
    sharp: FrozenModel, streams: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = create("fed_ade")
    state = adapter.step(sharp, adapter.init(sharp), streams[0, 0]).state
    monkeypatch.setattr(torch.linalg, "svdvals", None)
    assert adapter.step(sharp, state, streams[0, 1]).signals["condition"] > 1
