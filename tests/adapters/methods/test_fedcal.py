"""FedCal, equation by equation against scalar loops and exhaustive search, and its edge cases."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, State, StateMismatch, Step, create

MakeModel = Callable[..., FrozenModel]
P_S = [0.5, 0.3, 0.2]
UNIFORM = [0.25] * 4


@pytest.fixture(scope="module")
def labels() -> Tensor:
    """True classes of the streams [3, 6, 20]."""
    return torch.from_numpy(np.load(Path(__file__).parents[2] / "golden/A/stream.npz")["labels"])


def rows(n: int, k: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predicting(shares: Sequence[int]) -> Tensor:
    """Confident predictions, `shares[k]` of class k."""
    return 8 * torch.eye(len(shares), dtype=torch.float64).repeat_interleave(torch.tensor(shares), dim=0)


def run(model: FrozenModel, batches: Sequence[Tensor], **hyperparameters: Any) -> list[Step]:
    adapter = create("fedcal", **hyperparameters)
    state, steps = adapter.init(model), []
    for batch in batches:
        steps.append(adapter.step(model, state, batch))
        state = steps[-1].state
    return steps


def prior_of(step: Step) -> np.ndarray:
    return np.array(step.signals["prior"])


def test_eq_5_rescales_each_posterior_by_the_ratio_of_the_priors(logit_model: MakeModel) -> None:
    logits = rows(9, 3)
    (step,) = run(logit_model(P_S), [logits])
    p_t = prior_of(step)
    for answer, row in zip(step.logits.exp().tolist(), logits.softmax(-1).tolist(), strict=True):
        rescaled = [p_t[k] / P_S[k] * p for k, p in enumerate(row)]
        np.testing.assert_allclose(answer, [r / sum(rescaled) for r in rescaled], atol=1e-12)


def test_eq_6_counts_the_predicted_classes_of_the_window(logit_model: MakeModel) -> None:
    batches = [rows(7, 4, seed) for seed in range(3)]
    step = run(logit_model(UNIFORM), batches, pseudo_count=0.0)[-1]
    counts = [0, 0, 0, 0]
    for batch in batches:
        for row in batch.tolist():
            counts[row.index(max(row))] += 1
    np.testing.assert_allclose(prior_of(step), [c / 21 for c in counts], atol=1e-12)


def test_pseudo_count_is_one_row_spread_like_the_training_prior(logit_model: MakeModel) -> None:
    (step,) = run(logit_model(P_S), [predicting([3, 1, 0])])
    np.testing.assert_allclose(prior_of(step), [3.5 / 5, 1.3 / 5, 0.2 / 5], atol=1e-12)


def test_eq_8_and_9_are_iterated_to_convergence_over_the_window(logit_model: MakeModel) -> None:
    batches = [rows(6, 3, seed) for seed in range(3)]
    step = run(logit_model(P_S), batches, estimator="em")[-1]
    posteriors, q, steps = torch.cat(batches).softmax(-1).tolist(), list(P_S), 0
    while True:
        weighted = [[p * q[k] / P_S[k] for k, p in enumerate(row)] for row in posteriors]
        new = [sum(row[k] / sum(row) for row in weighted) / len(weighted) for k in range(3)]
        moved, q, steps = sum(abs(a - b) for a, b in zip(new, q, strict=True)), new, steps + 1
        if moved < 1e-4:
            break
    np.testing.assert_allclose(prior_of(step), q, atol=1e-12)
    assert step.signals["iterations"] == steps
    assert step.signals["converged"] == 1


def test_em_that_does_not_converge_says_so_and_answers(logit_model: MakeModel) -> None:
    weak = rows(20, 3, scale=0.05)
    (step,) = run(logit_model(P_S), [weak], estimator="em")
    assert step.signals["iterations"] <= 100
    assert bool(step.logits.isfinite().all())


def test_window_keeps_the_last_rows_only(logit_model: MakeModel) -> None:
    model = logit_model(UNIFORM)
    batches = [predicting([4, 0, 0, 0]), predicting([0, 4, 0, 0]), predicting([0, 0, 4, 0])]
    step = run(model, batches, window=6, pseudo_count=0.0)[-1]
    np.testing.assert_allclose(prior_of(step), [0, 2 / 6, 4 / 6, 0], atol=3e-6)
    assert step.signals["rows"] == 6


def test_batch_larger_than_the_window_leaves_its_last_rows(logit_model: MakeModel) -> None:
    steps = run(logit_model(UNIFORM), [predicting([5, 0, 3, 2]), predicting([0, 0, 0, 1])], window=4, pseudo_count=0.0)
    np.testing.assert_allclose(prior_of(steps[0]), [0, 0, 2 / 4, 2 / 4], atol=3e-6)
    np.testing.assert_allclose(prior_of(steps[1]), [0, 0, 1 / 4, 3 / 4], atol=3e-6)


@pytest.mark.parametrize("estimator", ["pl", "em", "fm"])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_window_does_not_depend_on_how_the_rows_were_batched(logit_model: MakeModel, estimator: str, size: int) -> None:
    model, stream = logit_model(P_S, prototypes=3 * torch.eye(3)), rows(18, 3)
    split = run(model, stream.split(size), estimator=estimator, window=10)[-1]
    whole = run(model, [stream], estimator=estimator, window=10)[-1]
    np.testing.assert_allclose(prior_of(split), prior_of(whole), atol=1e-12)


def test_window_holds_the_original_posteriors_not_the_corrected_ones(logit_model: MakeModel) -> None:
    batches = [predicting([9, 1, 0]), rows(10, 3)]
    last = run(logit_model(P_S), batches, window=20)[-1]
    torch.testing.assert_close(last.state.tensors["log_posteriors"], torch.cat(batches).log_softmax(-1))
    assert not torch.allclose(last.logits, batches[1].log_softmax(-1))


def test_next_applies_the_estimate_of_the_earlier_slots(logit_model: MakeModel) -> None:
    model, batches = logit_model(UNIFORM), [predicting([8, 2, 0, 0]), predicting([0, 0, 5, 5]), rows(10, 4)]
    later, current = (run(model, batches, apply=apply) for apply in ("next", "current"))
    torch.testing.assert_close(later[0].logits.exp(), batches[0].softmax(-1))
    assert later[0].signals["rows"] == 0
    for k in (0, 1):
        np.testing.assert_allclose(prior_of(later[k + 1]), prior_of(current[k]), atol=1e-12)
        assert later[k].state.to_bytes() == current[k].state.to_bytes()


@pytest.mark.parametrize("estimator", ["pl", "em", "fm"])
def test_sudden_change_of_the_prior_is_forgotten_within_five_slots(logit_model: MakeModel, estimator: str) -> None:
    model = logit_model(UNIFORM, prototypes=8 * torch.eye(4))
    slots = [predicting([10, 10, 0, 0])] * 10 + [predicting([0, 0, 10, 10])] * 5
    steps = run(model, slots, estimator=estimator, apply="next")
    np.testing.assert_allclose(prior_of(steps[10])[:2].sum(), 1, atol=0.02)
    fresh = run(model, slots[10:] + slots[-1:], estimator=estimator, apply="next")[-1]
    after = run(model, slots + slots[-1:], estimator=estimator, apply="next")[-1]
    np.testing.assert_allclose(prior_of(after), prior_of(fresh), atol=1e-9)


def test_threshold_rectification_drops_classes_below_half_the_second_largest(logit_model: MakeModel) -> None:
    (step,) = run(logit_model(UNIFORM), [predicting([10, 6, 3, 2])], rectify="threshold", pseudo_count=0.0)
    np.testing.assert_allclose(prior_of(step), [10 / 19, 6 / 19, 3 / 19, 0], atol=2e-6)  # 2 < 3; 3 is not < 3
    assert prior_of(step)[3] == pytest.approx(1e-6)


def test_binary_rectification_makes_the_remaining_classes_equal(logit_model: MakeModel) -> None:
    (step,) = run(logit_model(UNIFORM), [predicting([10, 6, 3, 2])], rectify="binary")
    np.testing.assert_allclose(prior_of(step), [1 / 3, 1 / 3, 1 / 3, 0], atol=2e-6)


def test_rectified_class_is_dropped_in_spite_of_its_pseudo_count(logit_model: MakeModel) -> None:
    (step,) = run(logit_model(UNIFORM), [predicting([10, 9, 0, 0])], rectify="threshold")
    np.testing.assert_allclose(prior_of(step), [10.25 / 19.5, 9.25 / 19.5, 0, 0], atol=3e-6)


@pytest.mark.parametrize("mode", ["threshold", "binary"])
@pytest.mark.parametrize("estimator", ["pl", "em", "fm"])
def test_rectification_skips_a_prior_of_one_class(logit_model: MakeModel, estimator: str, mode: str) -> None:
    model, batch = logit_model(UNIFORM, prototypes=30 * torch.eye(4)), [30 * predicting([9, 0, 0, 0]) / 8] * 2
    plain = run(model, batch, estimator=estimator)[-1]
    rectified = run(model, batch, estimator=estimator, rectify=mode)[-1]
    np.testing.assert_allclose(prior_of(rectified), prior_of(plain), atol=1e-12)


@pytest.mark.parametrize("mode", ["threshold", "binary"])
def test_rectification_never_removes_the_second_of_two_classes(logit_model: MakeModel, mode: str) -> None:
    (step,) = run(logit_model([0.5, 0.5]), [predicting([19, 1])], rectify=mode)
    assert prior_of(step)[1] > 0.04


@pytest.mark.parametrize("estimator", ["pl", "em"])
def test_unshifted_stream_keeps_the_predicted_classes(logit_model: MakeModel, estimator: str) -> None:
    row = [2.0, 0.5, -1.0, 0.0]
    logits = torch.tensor([row[i:] + row[:i] for i in range(4)] * 5, dtype=torch.float64)
    (step,) = run(logit_model(UNIFORM), [logits], estimator=estimator)
    assert torch.equal(step.logits.argmax(-1), logits.argmax(-1))
    torch.testing.assert_close(step.logits.exp(), logits.softmax(-1), rtol=0, atol=1e-9)


def test_prior_equal_to_that_of_training_keeps_every_posterior(logit_model: MakeModel) -> None:
    logits = rows(20, 3)
    (step,) = run(logit_model(P_S, prototypes=torch.zeros(3, 3)), [logits], estimator="fm")  # nothing to match
    np.testing.assert_allclose(prior_of(step), P_S, atol=1e-12)
    torch.testing.assert_close(step.logits.exp(), logits.softmax(-1), rtol=0, atol=1e-12)
    assert torch.equal(step.logits.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("estimator", ["pl", "em", "fm"])
def test_permuting_the_classes_permutes_the_prior(logit_model: MakeModel, estimator: str) -> None:
    logits, order, prototypes = rows(20, 3), [2, 0, 1], rows(3, 3, 4)
    (plain,) = run(logit_model(P_S, prototypes=prototypes), [logits], estimator=estimator)
    permuted_model = logit_model([P_S[i] for i in order], prototypes=prototypes[order][:, order])
    (permuted,) = run(permuted_model, [logits[:, order]], estimator=estimator)
    np.testing.assert_allclose(prior_of(permuted), prior_of(plain)[order], atol=1e-12)


@pytest.mark.parametrize("estimator", ["pl", "em", "fm"])
def test_all_identical_images_leave_every_class_possible(logit_model: MakeModel, estimator: str) -> None:
    model, batch = logit_model(UNIFORM, prototypes=8 * torch.eye(4)), predicting([20, 0, 0, 0])
    step = run(model, [batch] * 6, estimator=estimator, pseudo_count=0.0)[-1]
    assert prior_of(step).min() == pytest.approx(1e-6, rel=1e-6)
    assert prior_of(step).sum() == pytest.approx(1, abs=1e-12)


def test_class_not_seen_yet_can_still_win(logit_model: MakeModel) -> None:
    steps = run(
        logit_model(UNIFORM), [predicting([20, 0, 0, 0])] * 5 + [3 * predicting([0, 1, 0, 0])], pseudo_count=0.0
    )
    assert int(steps[-1].logits.argmax()) == 1


def test_thousand_classes_and_twenty_rows_give_unseen_ones_one_pseudo_row_together(logit_model: MakeModel) -> None:
    model, logits = logit_model([1e-3] * 1000), rows(20, 1000, scale=8.0)
    (step,) = run(model, [logits])
    unseen = np.delete(prior_of(step), logits.argmax(-1).numpy())
    np.testing.assert_allclose(unseen, 1e-3 / 21, rtol=1e-6)


def test_window_of_a_thousand_classes_takes_400_kilobytes(logit_model: MakeModel) -> None:
    state = create("fedcal").init(logit_model([1e-3] * 1000, dtype=torch.float32))
    assert state.nbytes == 400_008


@pytest.mark.parametrize("other", [{"window": 50}, {"estimator": "fm"}])
def test_window_of_other_hyperparameters_is_refused(logit_model: MakeModel, other: dict[str, Any]) -> None:
    model = logit_model(P_S, prototypes=torch.eye(3))
    with pytest.raises(StateMismatch, match=r"(lacks the tensors log_posteriors|has shape \[50, 3\]).*window=100"):
        create("fedcal").step(model, create("fedcal", **other).init(model), rows(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model_keeps_its_window_in_single_precision(logit_model: MakeModel, dtype: torch.dtype) -> None:
    (step,) = run(logit_model(P_S, dtype=dtype), [rows(20, 3).to(dtype)], estimator="em")
    assert step.logits.dtype == dtype
    assert step.state.tensors["log_posteriors"].dtype == torch.float32
    assert bool(step.logits.isfinite().all())


def test_restart_in_mid_stream_changes_nothing(logit_model: MakeModel) -> None:
    model, adapter = logit_model(P_S), create("fedcal", window=8)
    state = adapter.init(model)
    for seed in range(3):
        state = adapter.step(model, state, rows(3, 3, seed)).state
    restored = State.from_bytes(state.to_bytes())
    a, b = (adapter.step(model, s, rows(3, 3, 9)) for s in (state, restored))
    assert torch.equal(a.logits, b.logits)
    assert math.isclose(float(str(a.signals["shift"])), float(str(b.signals["shift"])))


def test_label_shift_is_corrected_on_real_images(model: FrozenModel, streams: Tensor, labels: Tensor) -> None:
    def accuracy(name: str) -> float:
        adapter, right = create(name), 0
        for stream, truth in zip(streams, labels, strict=True):
            state = adapter.init(model)
            for batch, y in zip(stream, truth, strict=True):
                step = adapter.step(model, state, batch)
                state, right = step.state, right + int((step.logits.argmax(-1) == y).sum())
        return right / labels.numel()

    assert accuracy("fedcal") > accuracy("none") + 0.005
