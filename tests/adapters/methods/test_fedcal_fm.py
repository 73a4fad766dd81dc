"""FedCal's feature matching against a grid, the paper's closed form and hand-made prototypes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from acclimate_adapters import ConfigurationError, FrozenModel, MissingSource, create
from acclimate_adapters.methods.fedcal import match_features, usable

MakeModel = Callable[..., FrozenModel]
P_S = [0.5, 0.3, 0.2]


def rows(n: int, k: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_eq_10_matches_the_mean_feature_of_the_window_on_the_simplex(logit_model: MakeModel, seed: int) -> None:
    prototypes = rows(3, 3, seed + 50).abs()
    batches = [rows(5, 3, 10 * seed + i).abs() for i in range(2)]
    model, adapter = logit_model(P_S, prototypes=prototypes), create("fedcal", estimator="fm")
    state = adapter.step(model, adapter.init(model), batches[0]).state
    step = adapter.step(model, state, batches[1])
    f = torch.cat(batches).mean(0)
    grid = torch.tensor([[i, j, 200 - i - j] for i in range(201) for j in range(201 - i)]).double() / 200
    nearest = float((grid @ prototypes - f).norm(dim=1).min())
    p = torch.tensor(step.signals["prior"], dtype=torch.float64)
    assert float((p @ prototypes - f).norm()) <= nearest + 1e-5


def test_eq_13_closed_form_gives_the_same_prior_while_it_is_positive() -> None:
    c, p_t = rows(4, 9, 1), torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    test_prototypes = c + rows(4, 9, 2, scale=0.02)
    features = test_prototypes.T @ p_t
    estimate = match_features(features.unsqueeze(0), usable(c), torch.full((4,), 0.25, dtype=torch.float64))
    inverse, ones = torch.linalg.inv(c @ c.T), torch.ones(4, dtype=torch.float64)
    shift = inverse @ c @ (c - test_prototypes).T @ p_t
    closed = p_t + shift.sum() * (inverse @ ones) / (ones @ inverse @ ones) - shift
    assert float(closed.min()) > 0
    torch.testing.assert_close(estimate.raw, closed, rtol=0, atol=1e-10)


def test_prior_of_a_true_mixture_of_prototypes_is_recovered() -> None:
    c, p_t = rows(4, 9, 1), torch.tensor([0.6, 0.0, 0.4, 0.0], dtype=torch.float64)
    estimate = match_features((c.T @ p_t).expand(3, 9), usable(c), torch.full((4,), 0.25, dtype=torch.float64))
    torch.testing.assert_close(estimate.raw, p_t, rtol=0, atol=1e-10)


def test_more_classes_than_features_are_matched_with_a_ridge() -> None:
    c, uniform = rows(20, 8, 1).abs(), torch.full((20,), 0.05, dtype=torch.float64)
    estimate = match_features(c.mean(0, keepdim=True), usable(c), uniform)
    assert float(estimate.raw.sum()) == pytest.approx(1)
    assert float(estimate.raw.min()) >= 0
    assert float((c.T @ estimate.raw - c.mean(0)).norm()) < 0.05 * float(c.mean(0).norm())
    assert estimate.signals["condition"] == 1e12


def test_classes_with_equal_prototypes_share_equally() -> None:
    c = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    estimate = match_features(torch.tensor([[3.0, 1.0]]), usable(c), torch.full((3,), 1 / 3))
    torch.testing.assert_close(estimate.raw, torch.tensor([0.375, 0.375, 0.25]), rtol=0, atol=1e-3)


def test_class_without_a_prototype_keeps_its_training_prior() -> None:
    c = torch.tensor([[4.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    estimate = match_features(torch.tensor([[1.0, 3.0, 0.0]]), usable(c), torch.tensor(P_S))
    torch.testing.assert_close(estimate.raw, torch.tensor([0.7 * 0.25, 0.3, 0.7 * 0.75]))
    assert estimate.signals["absent_classes"] == 1


def test_matching_features_needs_prototypes_as_wide_as_the_features(logit_model: MakeModel) -> None:
    adapter = create("fedcal", estimator="fm")
    assert adapter.needs == {"classifier", "prototypes", "prior"}
    assert create("fedcal").needs == {"prior"}
    with pytest.raises(MissingSource, match="prototypes"):
        adapter.init(logit_model(P_S))
    with pytest.raises(ConfigurationError, match="5 features, the network 3"):
        logit_model(P_S, prototypes=rows(3, 5))


def test_a_model_in_double_precision_keeps_its_training_prior(logit_model: Callable[..., FrozenModel]) -> None:
    """The estimate was written into the training prior where both were float64 on the CPU."""
    c = torch.eye(3)
    answers = []
    for dtype in (torch.float64, torch.float32):
        model = logit_model([0.6, 0.3, 0.1], dtype=dtype, prototypes=c)
        adapter = create("fedcal", estimator="fm")
        x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=dtype)
        answers.append(adapter.step(model, adapter.init(model), x).logits.double())
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)


def test_the_condition_of_the_prototypes_is_computed_once(
    logit_model: Callable[..., FrozenModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapter = logit_model([0.6, 0.3, 0.1], prototypes=torch.eye(3)), create("fedcal", estimator="fm")
    x = torch.eye(3, dtype=torch.float64)
    state = adapter.step(model, adapter.init(model), x).state
    monkeypatch.setattr(torch.linalg, "svdvals", None)
    assert adapter.step(model, state, x).signals["condition"] == pytest.approx(1.0)
