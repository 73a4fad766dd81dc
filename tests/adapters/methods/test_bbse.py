"""BBSE against scalar loops and an exhaustive search, and its edge cases."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import ConfigurationError, FrozenModel, MissingSource, Step, create
from acclimate_adapters.methods.bbse import unmix, usable

MakeModel = Callable[..., FrozenModel]
P_S = [0.5, 0.3, 0.2]
C = torch.tensor([[0.8, 0.1, 0.2], [0.1, 0.7, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64)
BLUNT = 0.7 * torch.eye(3, dtype=torch.float64) + 0.1


def rows(n: int, k: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predicting(shares: list[int]) -> Tensor:
    """Sure predictions, `shares[k]` of class k."""
    return 60 * torch.eye(len(shares), dtype=torch.float64).repeat_interleave(torch.tensor(shares), dim=0)


def bbse_step(model: FrozenModel, logits: Tensor, **hyperparameters: str) -> Step:
    adapter = create("bbse", **hyperparameters)
    return adapter.step(model, adapter.init(model), logits)


def prior_of(step: Step) -> np.ndarray:
    return np.array(step.signals["prior"])


def smoothed(q: np.ndarray | list[float]) -> np.ndarray:
    return 0.999 * np.array(q) + 0.001 / len(q)


def projected(v: np.ndarray) -> np.ndarray:
    """Projection onto the simplex by bisection on the threshold."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


def test_posteriors_follow_bayes_with_the_estimated_prior_row_by_row(logit_model: MakeModel) -> None:
    logits = rows(9, 3)
    step = bbse_step(logit_model(P_S, confusion=C), logits)
    q = prior_of(step)
    for answer, row in zip(step.logits.exp().tolist(), logits.softmax(-1).tolist(), strict=True):
        weighted = [p * q[k] / P_S[k] for k, p in enumerate(row)]
        np.testing.assert_allclose(answer, [w / sum(weighted) for w in weighted], atol=1e-12)


@pytest.mark.parametrize("solver", ["simplex", "pinv"])
@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_prior_of_a_mixture_of_confusions_is_recovered(logit_model: MakeModel, mode: str, solver: str) -> None:
    # 0.2, 0.3, 0.5 of the classes, seen through C, are predicted as 29, 28 and 43 of 100
    step = bbse_step(logit_model(P_S, confusion=C), predicting([29, 28, 43]), mode=mode, solver=solver)
    np.testing.assert_allclose(prior_of(step), smoothed([0.2, 0.3, 0.5]), atol=1e-10)


@pytest.mark.parametrize("seed", range(6))
def test_default_has_the_smallest_residual_on_the_simplex(seed: int) -> None:
    mu = rows(1, 3, seed).softmax(-1)[0]
    q = unmix(C, mu, "simplex")
    grid = torch.tensor([[i, j, 100 - i - j] for i in range(101) for j in range(101 - i)]).double() / 100
    best = float((grid @ C.T - mu).norm(dim=1).min())
    assert float((C @ q - mu).norm()) <= best + 1e-12
    assert float((C @ q - mu).norm()) <= float((C @ unmix(C, mu, "pinv") - mu).norm()) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_reference_form_is_the_projected_pseudo_inverse(logit_model: MakeModel, seed: int) -> None:
    logits = rows(9, 3, seed)
    step = bbse_step(logit_model([1 / 3] * 3, confusion=C), logits, solver="pinv")
    raw = np.linalg.pinv(C.numpy()) @ logits.softmax(-1).mean(0).numpy()
    np.testing.assert_allclose(prior_of(step), smoothed(projected(raw)), atol=1e-10)


@pytest.mark.parametrize("solver", ["simplex", "pinv"])
@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_perfect_confusion_gives_the_mean_prediction(logit_model: MakeModel, mode: str, solver: str) -> None:
    logits = rows(20, 3)
    counts = torch.bincount(logits.argmax(-1), minlength=3).double()
    mu = logits.softmax(-1).mean(0) if mode == "soft" else counts / 20
    step = bbse_step(logit_model(P_S, confusion=torch.eye(3)), logits, mode=mode, solver=solver)
    np.testing.assert_allclose(prior_of(step), smoothed(mu.numpy()), atol=1e-12)


def test_each_mode_reads_its_own_confusion_matrix(logit_model: MakeModel) -> None:
    model = logit_model(P_S, confusion={"soft": torch.eye(3), "hard": C})
    logits = predicting([29, 28, 43])
    np.testing.assert_allclose(prior_of(bbse_step(model, logits, mode="soft")), smoothed([0.29, 0.28, 0.43]), atol=1e-9)
    np.testing.assert_allclose(prior_of(bbse_step(model, logits, mode="hard")), smoothed([0.2, 0.3, 0.5]), atol=1e-9)


def test_mode_without_its_matrix_is_refused_before_the_first_batch(logit_model: MakeModel) -> None:
    with pytest.raises(ConfigurationError, match="no hard confusion matrix"):
        create("bbse", mode="hard").init(logit_model(P_S, confusion={"soft": C}))
    with pytest.raises(MissingSource, match="confusion"):
        create("bbse").init(logit_model(P_S))


@pytest.mark.parametrize("solver", ["simplex", "pinv"])
def test_all_predictions_one_class_give_a_smoothed_corner(logit_model: MakeModel, solver: str) -> None:
    # unconstrained, the estimate would be (1.29, -0.14, -0.14)
    step = bbse_step(logit_model([1 / 3] * 3, confusion=BLUNT), predicting([20, 0, 0]), solver=solver)
    np.testing.assert_allclose(prior_of(step), smoothed([1, 0, 0]), atol=1e-9)


def test_confused_pair_does_not_blow_the_estimate_up(logit_model: MakeModel) -> None:
    # the pseudo-inverse makes (7.95, -7.05, 0.1) of this batch
    pair = torch.tensor([[0.51, 0.49, 0.0], [0.49, 0.51, 0.0], [0.0, 0.0, 1.0]])
    step = bbse_step(logit_model([1 / 3] * 3, confusion=pair), predicting([6, 3, 1]), mode="hard")
    np.testing.assert_allclose(prior_of(step), smoothed([0.9, 0, 0.1]), atol=0.01)
    assert step.signals["condition"] == pytest.approx(50)
    assert step.signals["refused"] == 0


@pytest.mark.parametrize(
    "confusion",
    [
        torch.full((3, 3), 1 / 3),
        torch.tensor([[0.5001, 0.4999, 0.0], [0.4999, 0.5001, 0.0], [0.0, 0.0, 1.0]]),
        torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0], [0.0, 0.0, 0.0]]),  # a class that is never predicted
    ],
)
def test_ill_conditioned_confusion_keeps_the_training_prior(logit_model: MakeModel, confusion: Tensor) -> None:
    logits = rows(20, 3)
    step = bbse_step(logit_model(P_S, confusion=confusion), logits)
    assert step.signals["refused"] == 1
    assert 1e3 < float(str(step.signals["condition"])) < math.inf
    np.testing.assert_allclose(prior_of(step), P_S, atol=1e-12)
    torch.testing.assert_close(step.logits.exp(), logits.softmax(-1), rtol=0, atol=1e-12)


def test_class_absent_from_the_measured_cohort_counts_as_recognised(logit_model: MakeModel) -> None:
    confusion = torch.tensor([[0.9, 0.2, 0.0], [0.1, 0.8, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    step = bbse_step(logit_model(P_S, confusion=confusion), predicting([2, 3, 5]))
    expected = np.append(np.linalg.solve(confusion[:2, :2].numpy(), [0.2, 0.3]), 0.5)
    assert step.signals["absent_classes"] == 1
    np.testing.assert_allclose(prior_of(step), smoothed(expected), atol=1e-9)


def test_columns_stored_with_rounding_are_made_to_sum_to_one() -> None:
    confusion = (C * 1.0005).float()
    torch.testing.assert_close(usable(confusion).matrix.sum(0), torch.ones(3).double(), rtol=0, atol=1e-15)


def test_permuting_the_classes_permutes_the_prior(logit_model: MakeModel) -> None:
    logits, order = rows(20, 3), [2, 0, 1]
    plain = bbse_step(logit_model(P_S, confusion=C), logits)
    permuted = bbse_step(logit_model([P_S[i] for i in order], confusion=C[order][:, order]), logits[:, order])
    np.testing.assert_allclose(prior_of(permuted), prior_of(plain)[order], atol=1e-12)


def test_two_classes_work(logit_model: MakeModel) -> None:
    confusion = torch.tensor([[0.9, 0.2], [0.1, 0.8]])
    step = bbse_step(logit_model([0.5, 0.5], confusion=confusion), predicting([9, 1]))
    np.testing.assert_allclose(prior_of(step), smoothed([1.0, 0.0]), atol=1e-6)


def test_thousand_classes_and_twenty_rows_are_answered(logit_model: MakeModel) -> None:
    confusion = 0.8 * torch.eye(1000) + 0.2 / 1000
    step = bbse_step(logit_model([1e-3] * 1000, confusion=confusion), rows(20, 1000, scale=8.0))
    assert prior_of(step).min() >= 1e-6 * (1 - 1e-9)
    assert prior_of(step).sum() == pytest.approx(1, abs=1e-9)
    assert bool(step.logits.isfinite().all())
