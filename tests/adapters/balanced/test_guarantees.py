"""What `balanced` must be whatever its implementation: identities, invariances, and mistakes that would be seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, State, Step, create, guarded_step
from acclimate_adapters.balanced.measures import map_em

Rows = Callable[..., tuple[Tensor, Tensor]]
Models = Callable[..., FrozenModel]
Follow = Callable[..., list[Step]]
RECORDED = Path(__file__).parents[2] / "golden/A/expected/balanced.npz"
NOTHING_BENDS = {"style_rows": 1e9, "shrinkage": 1e9}


def test_with_label_shift_certain_and_nothing_bent_it_is_online_em_on_frozen_posteriors(
    small_model: Models, small_rows: Rows, follow: Follow
) -> None:
    """g = 1 and m = 0."""
    model, (rows, labels) = small_model(), small_rows(900, seed=6)
    batches, prior = list(rows[labels == 1].split(20)), np.array([0.5, 0.3, 0.2])
    steps = follow("balanced", model, batches, **NOTHING_BENDS)
    earlier, n = np.zeros(3), 0.0
    for x, step in zip(batches, steps, strict=True):
        p, log_r = map_em(model.frozen(x).logits.log_softmax(-1).numpy(), earlier, n, prior, 20.0, 5)
        earlier, n = earlier + np.exp(log_r).sum(axis=0), n + len(x)
        assert step.signals["prior"] == pytest.approx(p.tolist(), abs=1e-7)
    assert steps[-1].signals["label_shift"] == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(steps[-1].logits, log_r, rtol=0, atol=1e-6)  # style_rows is large, not infinite


@pytest.mark.parametrize(
    ("mistake", "change"),
    [
        ({"style_rows": 10.0}, 1.9),
        ({"shrinkage": 1.0}, 0.86),
        ({"prior_rows": 10.0}, 0.68),
        ({"gate_concentration": 1.0}, 0.33),
        ({"em_steps": 4}, 5e-3),
    ],
    ids=str,
)
def test_each_constant_matters_to_the_recorded_answers(
    mistake: dict[str, Any], change: float, double_model: FrozenModel, streams: Tensor, follow: Follow
) -> None:
    recorded = np.load(RECORDED)["logits_f64"]
    answers = [follow("balanced", double_model, list(stream.double()), **mistake) for stream in streams]
    got = np.stack([[step.logits.numpy() for step in steps] for steps in answers])
    assert float(np.abs(got - recorded).max()) == pytest.approx(change, rel=0.1)


def test_nothing_that_is_passed_in_changes_and_two_runs_are_equal(model: FrozenModel, streams: Tensor) -> None:
    adapter, x = create("balanced"), streams[0, 1].clone()
    state = adapter.step(model, adapter.init(model), streams[0, 0]).state
    before, weights = state.to_bytes(), [model.tensor(name).clone() for name in model.modules]
    steps = [adapter.step(model, state, x) for _ in range(2)]
    assert state.to_bytes() == before
    assert torch.equal(x, streams[0, 1])
    assert all(torch.equal(model.tensor(name), w) for name, w in zip(model.modules, weights, strict=True))
    assert torch.equal(steps[0].logits, steps[1].logits)
    assert steps[0].state.to_bytes() == steps[1].state.to_bytes()
    restored = adapter.step(model, State.from_bytes(before), x)
    assert restored.state.to_bytes() == steps[0].state.to_bytes()


def test_uncorrected_is_the_answer_before_the_prior_was_corrected(
    double_model: FrozenModel, streams: Tensor, follow: Follow
) -> None:
    """With nothing bent that is what the frozen model answers; else it is not, and not the corrected answer either."""
    batches = list(streams[0].double())
    for x, step in zip(batches, follow("balanced", double_model, batches, **NOTHING_BENDS), strict=True):
        assert step.uncorrected is not None
        frozen = double_model.frozen(x).logits.log_softmax(-1)
        torch.testing.assert_close(step.uncorrected, frozen, rtol=0, atol=1e-5)  # style_rows is large, not infinite
        assert not torch.allclose(step.logits, frozen, atol=1e-2)
    for x, step in zip(batches, follow("balanced", double_model, batches), strict=True):
        assert step.uncorrected is not None
        torch.testing.assert_close(step.uncorrected.exp().sum(-1), torch.ones(20, dtype=torch.float64))
        for other in (step.logits, double_model.frozen(x).logits.log_softmax(-1)):
            assert not torch.allclose(step.uncorrected, other, atol=1e-2)


def test_the_guard_does_not_judge_the_prior(logit_model: Models) -> None:
    """After many rows of one class the prior outweighs images that are hardly in doubt: one class, but no collapse."""
    model, adapter = logit_model([0.5, 0.5]), create("balanced", prior_rows=1.0)
    state = adapter.init(model)
    unlike = torch.arange(20, dtype=torch.float64).unsqueeze(-1) / 1000  # rows that are all the same teach nothing
    for _ in range(5):
        state = guarded_step(
            adapter, model, state, torch.tensor([[3.0, 0.0]], dtype=torch.float64) + unlike * 2.0
        ).state
    doubtful = torch.tensor([[0.0, 0.1]], dtype=torch.float64) + unlike  # the frozen model sees the other class only
    step = guarded_step(adapter, model, state, doubtful)
    assert bool((step.logits.argmax(-1) == 0).all())
    assert (step.signals["collapsed"], step.signals["fallback"]) == (1, 0)
    assert step.state.step == 6
    assert step.uncorrected is not None
    torch.testing.assert_close(step.uncorrected, doubtful.log_softmax(-1), rtol=0, atol=1e-12)
