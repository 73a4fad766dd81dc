"""What adapters learn from true labels, against scalar loops, and that they learn nothing unless told to."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, InputError, Labelled, State, StateMismatch, create, learns

MakeModel = Callable[..., FrozenModel]
P_S = [0.5, 0.3, 0.2]
LABELS = torch.tensor([2, 2, 0, 2])
COUNTS = [1, 0, 3]


def rows(n: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prior_after_labels(model: FrozenModel, batch: Tensor, name: str = "fedcal", **hyperparameters: Any) -> np.ndarray:
    adapter = create(name, **hyperparameters)
    state = adapter.learn(model, adapter.init(model), Labelled(LABELS))  # type: ignore[attr-defined]
    return np.array(adapter.step(model, state, batch).signals["prior"])


def em(
    posteriors: list[list[float]], known: list[float], extra: float, start: list[float], steps: int, least: float = 0.0
) -> list[float]:
    """EM by the M-step q = (sum of r + known) / (n + extra), in plain loops, until a step moves q by less."""
    q = list(start)
    for _ in range(steps):
        weighted = [[p * q[k] / P_S[k] for k, p in enumerate(row)] for row in posteriors]
        sums = [sum(row[k] / sum(row) for row in weighted) for k in range(3)]
        new = [(sums[k] + known[k]) / (len(posteriors) + extra) for k in range(3)]
        moved, q = sum(abs(a - b) for a, b in zip(new, q, strict=True)), new
        if moved < least:
            break
    return q


@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_labels_are_rows_with_known_posteriors_to_the_em_of_fedcal(logit_model: MakeModel, weight: float) -> None:
    batch = rows(12)
    found = prior_after_labels(logit_model(P_S), batch, estimator="em", label_weight=weight)
    known = [weight * n for n in COUNTS]
    np.testing.assert_allclose(found, em(batch.softmax(-1).tolist(), known, weight * 4, P_S, 100, 1e-4))


def test_labels_are_added_to_the_counts_of_predicted_classes(logit_model: MakeModel) -> None:
    batch = rows(12)
    counts = torch.bincount(batch.argmax(-1), minlength=3).tolist()
    found = prior_after_labels(logit_model(P_S), batch, label_weight=2.0)
    np.testing.assert_allclose(found, [(counts[k] + P_S[k] + 2 * COUNTS[k]) / (12 + 1 + 8) for k in range(3)])


def test_labels_are_averaged_with_the_matched_features(logit_model: MakeModel) -> None:
    batch = rows(12)
    model = logit_model(P_S, prototypes=torch.zeros(3, 3, dtype=torch.float64))
    found = prior_after_labels(model, batch, estimator="fm", label_weight=2.0)
    np.testing.assert_allclose(found, [(12 * P_S[k] + 2 * COUNTS[k]) / 20 for k in range(3)])


def test_labels_are_rows_with_known_posteriors_to_balanced(logit_model: MakeModel) -> None:
    batch, model = rows(12), logit_model(P_S, moments={})
    found = prior_after_labels(model, batch, "balanced", label_weight=2.0)
    known = [2 * COUNTS[k] + 20 * P_S[k] for k in range(3)]
    start = [each / 28 for each in known]
    np.testing.assert_allclose(found, em(batch.softmax(-1).tolist(), known, 28, start, 5), atol=1e-12)


def test_balanced_forgets_labels_as_it_forgets_rows(logit_model: MakeModel) -> None:
    model, adapter = logit_model(P_S, moments={}), create("balanced", label_weight=1.0, memory=0.9)
    state = adapter.learn(model, adapter.init(model), Labelled(LABELS))  # type: ignore[attr-defined]
    after = adapter.step(model, state, rows(12)).state
    np.testing.assert_allclose(after.tensors["labelled"], [n * 0.9**12 for n in COUNTS])


def test_fedcal_counts_the_last_labels_of_a_window(logit_model: MakeModel) -> None:
    model, adapter = logit_model(P_S), create("fedcal", label_weight=1.0, window=3, pseudo_count=0.0)
    state = adapter.init(model)
    for label in [1, 1, 2, 2, 0]:
        state = adapter.learn(model, state, Labelled(torch.tensor([label])))  # type: ignore[attr-defined]
    batch = 9 * torch.eye(3, dtype=torch.float64)
    np.testing.assert_allclose(adapter.step(model, state, batch).signals["prior"], [2 / 6, 1 / 6, 3 / 6])


@pytest.mark.parametrize("name", ["fedcal", "balanced", "bn_adapt+fedcal"])
def test_labels_move_the_answers_and_change_neither_the_state_before_nor_its_count(
    name: str, model: FrozenModel, streams: Tensor
) -> None:
    weights = {"label_weight": 5.0}
    adapter = create(name, **({"fedcal": weights} if "+" in name else weights))
    assert learns(adapter)
    state = adapter.step(model, adapter.init(model), streams[0, 0]).state
    before = state.to_bytes()
    told = adapter.learn(model, state, Labelled(torch.full((20,), 7)))
    assert state.to_bytes() == before
    assert (told.step, told.tensors.keys()) == (state.step, state.tensors.keys())
    plain, taught = (adapter.step(model, each, streams[0, 1]).logits.softmax(-1)[:, 7] for each in (state, told))
    assert bool((taught > plain).all())
    assert State.from_bytes(told.to_bytes()).to_bytes() == told.to_bytes()


@pytest.mark.parametrize("name", ["fedcal", "balanced"])
def test_without_labels_the_answers_are_those_of_an_adapter_that_takes_none(
    name: str, model: FrozenModel, streams: Tensor
) -> None:
    plain, learning = create(name), create(name, label_weight=2.0)
    assert not learns(plain)
    states = [adapter.init(model) for adapter in (plain, learning)]
    assert states[0].tensors.keys() < states[1].tensors.keys()
    for batch in streams[0]:
        one, other = (
            adapter.step(model, state, batch) for adapter, state in zip((plain, learning), states, strict=True)
        )
        assert torch.equal(one.logits, other.logits)
        states = [one.state, other.state]


@pytest.mark.parametrize("name", ["em", "none", "atp", "bn_adapt+em"])
def test_adapters_that_keep_no_counts_learn_nothing(name: str) -> None:
    assert not learns(create(name))


@pytest.mark.parametrize("name", ["fedcal", "balanced"])
def test_what_is_no_class_is_not_learned(name: str, model: FrozenModel) -> None:
    adapter = create(name, label_weight=1.0)
    with pytest.raises(InputError, match="from 0 to 9"):
        adapter.learn(model, adapter.init(model), Labelled(torch.tensor([10])))  # type: ignore[attr-defined]
    with pytest.raises(StateMismatch):
        adapter.learn(model, create("none").init(model), Labelled(torch.tensor([1])))  # type: ignore[attr-defined]


def test_a_state_that_counts_no_labels_takes_none(model: FrozenModel) -> None:
    adapter = create("balanced", label_weight=1.0)
    with pytest.raises(StateMismatch, match="label_weight="):
        adapter.learn(model, create("balanced").init(model), Labelled(torch.tensor([1])))  # type: ignore[attr-defined]


def test_labelled_images_enrol_a_client_of_fedthe_as_if_all_had_come_at_once(
    model: FrozenModel, streams: Tensor
) -> None:
    images, labels = streams[0].flatten(0, 1)[:30], torch.arange(30) % 10
    adapter, bare = create("fedthe", examples=50), create("fedthe")
    state = adapter.init(model, x=images[:10], labels=labels[:10])
    state = adapter.step(model, state, streams[1, 0]).state
    history = state.tensors["history"]
    for part in (slice(10, 25), slice(25, 30)):
        state = adapter.learn(model, state, Labelled(labels[part], images[part]))
    at_once = bare.init(model, x=images, labels=labels)
    for name in ("personal_head", "descriptor"):
        torch.testing.assert_close(state.tensors[name], at_once.tensors[name])
    assert torch.equal(state.tensors["history"], history)
    assert state.step == 1
    after = adapter.step(model, state, streams[1, 1])
    assert after.signals["enrolled"] == 1.0
    assert State.from_bytes(after.state.to_bytes()).tensors.keys() == state.tensors.keys()


def test_fedthe_remembers_the_last_examples_and_begins_with_them_where_nobody_enrolled(
    model: FrozenModel, streams: Tensor
) -> None:
    images, labels = streams[0].flatten(0, 1)[:30], torch.arange(30) % 10
    adapter, bare = create("fedthe", examples=20), create("fedthe")
    state = adapter.init(model)
    assert adapter.learn(model, state, Labelled(labels)) is state, "labels without their images teach nothing"
    state = adapter.learn(model, state, Labelled(labels, images))
    last = bare.init(model, x=images[10:], labels=labels[10:])
    torch.testing.assert_close(state.tensors["descriptor"], last.tensors["descriptor"])
    assert state.tensors["examples"].shape == (20, model.feature_size)
