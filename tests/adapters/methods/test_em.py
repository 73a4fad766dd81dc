"""EM against scalar loops and QuaPy, and its edge cases."""

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, NumericalError, Step, create
from acclimate_adapters.methods.priors import floored, maximise_likelihood

MakeModel = Callable[..., FrozenModel]
P_S = [0.5, 0.3, 0.2]


def rows(n: int, k: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def em_step(model: FrozenModel, logits: Tensor, **hyperparameters: float) -> Step:
    adapter = create("em", **hyperparameters)
    return adapter.step(model, adapter.init(model), logits)


def prior_of(step: Step) -> np.ndarray:
    return np.array(step.signals["prior"])


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(v - max(row)) for v in row)
    return [math.exp(v - max(row)) / total for v in row]


def by_hand(logits: Tensor, p_s: list[float], steps: int) -> tuple[list[float], list[list[float]]]:
    """E-step and M-step one number at a time, and the posteriors under their prior."""
    posteriors = [softmax(row) for row in logits.tolist()]

    def expect(q: list[float]) -> list[list[float]]:
        weighted = [[p * qk / sk for p, qk, sk in zip(row, q, p_s, strict=True)] for row in posteriors]
        return [[v / sum(row) for v in row] for row in weighted]

    q = list(p_s)
    for _ in range(steps):
        responsibilities = expect(q)
        q = [sum(row[k] for row in responsibilities) / len(posteriors) for k in range(len(q))]
    return q, expect(q)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_prior_and_posteriors_follow_the_e_and_m_steps_in_scalar_loops(logit_model: MakeModel, steps: int) -> None:
    logits = rows(9, 3)
    step = em_step(logit_model(P_S), logits, steps=steps)
    q, posteriors = by_hand(logits, P_S, steps)
    np.testing.assert_allclose(prior_of(step), q, atol=1e-12)
    np.testing.assert_allclose(step.logits.exp().numpy(), posteriors, atol=1e-12)


def test_first_step_from_a_uniform_prior_is_the_mean_posterior(logit_model: MakeModel) -> None:
    logits = rows(20, 4)
    np.testing.assert_allclose(
        prior_of(em_step(logit_model([0.25] * 4), logits, steps=1)), logits.softmax(-1).mean(0).numpy(), atol=1e-12
    )


@pytest.mark.filterwarnings("ignore:the method has reached the maximum number of iterations")
@pytest.mark.parametrize("steps", [2, 30, 1000])
def test_prior_is_that_of_quapy(
    module: Callable[[str], ModuleType],
    model: FrozenModel,
    streams: Tensor,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emq = module("quapy.method.aggregative").EMQ
    monkeypatch.setattr(emq, "MAX_ITER", steps)
    p_s = np.array([0.19] + [0.09] * 9)
    log_p = model.frozen(streams[1].flatten(0, 1)).logits.double().log_softmax(-1)
    theirs, _ = emq.EM(p_s, log_p.exp().numpy(), epsilon=0)
    ours = maximise_likelihood(log_p, torch.from_numpy(p_s), steps)
    np.testing.assert_allclose(ours.prior.numpy(), theirs, atol=1e-9)


def test_likelihood_never_decreases_and_belongs_to_the_returned_prior(logit_model: MakeModel) -> None:
    logits = rows(20, 3)
    model = logit_model(P_S)
    gains = [em_step(model, logits, steps=steps).signals["likelihood_gain"] for steps in (1, 2, 3, 5, 10, 100)]
    assert gains == sorted(gains)
    assert gains[0] > 0
    q, _ = by_hand(logits, P_S, 5)
    ratios = [sum(p * a / b for p, a, b in zip(softmax(row), q, P_S, strict=True)) for row in logits.tolist()]
    assert gains[3] == pytest.approx(sum(map(math.log, ratios)) / len(ratios), abs=1e-12)


def test_lack_of_convergence_is_a_signal_and_no_error(logit_model: MakeModel) -> None:
    model, logits = logit_model(P_S), rows(20, 3)
    assert em_step(model, logits, steps=2).signals["converged"] == 0
    assert em_step(model, logits, steps=1000).signals["converged"] == 1


def test_batch_distributed_like_the_training_data_is_left_alone(logit_model: MakeModel) -> None:
    row = [2.0, 0.5, -1.0, 0.0]
    logits = torch.tensor([row[i:] + row[:i] for i in range(4)], dtype=torch.float64)  # mean posterior is uniform
    step = em_step(logit_model([0.25] * 4), logits, steps=50)
    torch.testing.assert_close(step.logits.exp(), logits.softmax(-1), rtol=0, atol=1e-12)
    assert step.signals["shift"] == pytest.approx(0, abs=1e-12)


def test_permuting_the_classes_permutes_the_prior(logit_model: MakeModel) -> None:
    logits, order = rows(20, 3), [2, 0, 1]
    plain = em_step(logit_model(P_S), logits, steps=5)
    permuted = em_step(logit_model([P_S[i] for i in order]), logits[:, order], steps=5)
    np.testing.assert_allclose(prior_of(permuted), prior_of(plain)[order], atol=1e-12)


def test_prior_is_found_when_the_model_is_right(logit_model: MakeModel) -> None:
    truth, p_s = torch.tensor([0.1, 0.2, 0.7]).double(), torch.tensor(P_S).double()
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(truth, 10_000, replacement=True, generator=generator)
    x = torch.eye(3).double()[labels] * 2 + rows(10_000, 3, scale=1.0)  # class means 2 e_k, unit variance
    step = em_step(logit_model(P_S), 2 * x + p_s.log(), steps=200)  # log p(x|k) = 2 x_k up to a constant
    np.testing.assert_allclose(prior_of(step), truth.numpy(), atol=0.02)


def test_all_rows_of_one_class_leave_every_class_its_floor(logit_model: MakeModel) -> None:
    logits = torch.tensor([[900.0, 0.0, 0.0]] * 20)
    step = em_step(logit_model(P_S), logits, steps=1000)
    assert prior_of(step).min() == pytest.approx(1e-6)
    assert prior_of(step).sum() == pytest.approx(1, abs=1e-12)
    assert bool(step.logits.isfinite().all())


def test_posteriors_too_small_for_any_float_give_no_nan(logit_model: MakeModel) -> None:
    logits = torch.tensor([[0.0, -2000.0, -3000.0], [-2000.0, 0.0, -3000.0]])
    step = em_step(logit_model(P_S), logits, steps=100)
    np.testing.assert_allclose(prior_of(step), [0.5, 0.5, 1e-6], atol=2e-6)
    assert bool(step.logits.isfinite().all())


def test_row_with_all_its_mass_on_a_floored_class_still_has_posteriors(logit_model: MakeModel) -> None:
    logits = torch.cat([torch.tensor([[400.0, 0.0, 0.0]] * 1000), torch.tensor([[0.0, 400.0, 0.0]])])
    step = em_step(logit_model(P_S), logits, floor=1e-2)
    torch.testing.assert_close(step.logits[-1].exp(), torch.tensor([0.0, 1.0, 0.0]).double(), rtol=0, atol=1e-9)


def test_two_classes_work(logit_model: MakeModel) -> None:
    step = em_step(logit_model([0.5, 0.5]), torch.tensor([[3.0, 0.0]] * 9 + [[0.0, 3.0]]))
    assert prior_of(step)[0] > 0.85


def test_thousand_classes_and_twenty_rows_keep_the_floor_and_the_sum(logit_model: MakeModel) -> None:
    step = em_step(logit_model([1e-3] * 1000), rows(20, 1000, scale=8.0), steps=100)
    assert prior_of(step).min() >= 1e-6 * (1 - 1e-9)
    assert prior_of(step).sum() == pytest.approx(1, abs=1e-9)


def test_floor_leaves_a_prior_above_it_as_it_is() -> None:
    prior = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    torch.testing.assert_close(floored(prior, 1e-2), prior, rtol=0, atol=1e-15)


def test_floor_that_the_classes_cannot_all_have_is_lowered() -> None:
    prior = floored(torch.eye(500, dtype=torch.float64)[0], 1e-2)
    assert float(prior.sum()) == pytest.approx(1)
    assert float(prior.min()) == pytest.approx(1e-3)


def test_half_precision_model_is_answered_in_its_precision_from_single_precision_sums(logit_model: MakeModel) -> None:
    logits = rows(50, 3)
    half = em_step(logit_model(P_S, dtype=torch.bfloat16), logits.bfloat16())
    exact = em_step(logit_model(P_S), logits.bfloat16())
    assert half.logits.dtype == torch.bfloat16
    np.testing.assert_allclose(prior_of(half), prior_of(exact), atol=1e-6)


def test_non_finite_logits_are_a_numerical_error(logit_model: MakeModel) -> None:
    adapter, model = create("em"), logit_model(P_S)
    logits = torch.tensor([[float("inf"), 0.0, 0.0]])
    with pytest.raises(NumericalError):
        adapter.correct(model, adapter.init(model), logits, logits)


def test_frozen_logits_and_features_are_those_of_the_frozen_pass(model: FrozenModel, streams: Tensor) -> None:
    step, frozen = em_step(model, streams[0, 0]), model.frozen(streams[0, 0])
    assert step.frozen_logits is not None
    assert step.features is not None
    assert torch.equal(step.frozen_logits, frozen.logits)
    assert torch.equal(step.features, frozen.features)


def test_single_rows_are_answered_with_a_sharper_prediction(model: FrozenModel, streams: Tensor) -> None:
    step = em_step(model, streams[0, 0, :1])
    assert step.frozen_logits is not None
    assert int(step.logits.argmax()) == int(step.frozen_logits.argmax())
    assert float(step.logits.softmax(-1).max()) >= float(step.frozen_logits.softmax(-1).max())
