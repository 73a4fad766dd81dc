"""The risk of Fed-ADE (Eq. 4) and its descent by the classifier (Eq. 8) against slow loops."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters.functional import keyed_generator
from acclimate_adapters.methods.bbse import usable
from acclimate_adapters.methods.fed_ade.risk import anchor_importance, estimate_labels, fit_head, minibatches
from acclimate_adapters.network.model import AnchorFeatures

Vector = list[float]


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)


def softmax(row: Vector) -> Vector:
    powers = [math.exp(v - max(row)) for v in row]
    return [p / sum(powers) for p in powers]


def equation_4(weights: Vector, losses: Vector, labels: list[int]) -> float:
    risk = 0.0
    for i, weight in enumerate(weights):
        own = [loss for loss, label in zip(losses, labels, strict=True) if label == i]
        if own:
            risk += weight * sum(own) / len(own)
    return risk


def solve_by_elimination(matrix: list[Vector], right: Vector) -> Vector:
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [v / rows[i][i] for v in rows[i]]
        for r in range(len(rows)):
            if r != i:
                rows[r] = [v - rows[r][i] * p for v, p in zip(rows[r], rows[i], strict=True)]
    return [row[-1] for row in rows]


def nearest_on_simplex(m: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The best of the minima over all supports, each by its own normal equations with a multiplier."""
    best, distance = np.zeros(len(q)), math.inf
    for size in range(1, len(q) + 1):
        for support in map(list, itertools.combinations(range(len(q)), size)):
            system = np.ones((size + 1, size + 1))
            system[:size, :size], system[size, size] = m[:, support].T @ m[:, support], 0
            values = np.linalg.solve(system, [*(m[:, support].T @ q), 1.0])[:size]
            w = np.zeros(len(q))
            w[support] = values
            if (values >= 0).all() and np.linalg.norm(m @ w - q) < distance:
                best, distance = w, float(np.linalg.norm(m @ w - q))
    return best


def equation_8(
    head: tuple[list[Vector], Vector],
    features: list[Vector],
    labels: list[int],
    importance: Vector,
    eta: float,
    order: list[list[int]],
) -> tuple[list[Vector], Vector]:
    """Descend the risk minibatch by minibatch, one weight at a time."""
    weight, bias = [list(row) for row in head[0]], list(head[1])
    for rows in order:
        new_weight, new_bias = [list(row) for row in weight], list(bias)
        for n in rows:
            f = features[n]
            p = softmax(
                [sum(w * v for w, v in zip(row, f, strict=True)) + b for row, b in zip(weight, bias, strict=True)]
            )
            for k in range(len(bias)):
                slope = importance[n] * (p[k] - (labels[n] == k)) / len(rows)
                new_bias[k] -= eta * slope
                for j, v in enumerate(f):
                    new_weight[k][j] -= eta * slope * v
        weight, bias = new_weight, new_bias
    return weight, bias


def full_importance(weights: Vector, labels: list[int]) -> Vector:
    counts = [labels.count(k) for k in range(len(weights))]
    mass = sum(w for w, n in zip(weights, counts, strict=True) if n)
    return [weights[label] / mass * len(labels) / counts[label] for label in labels]


# Eq. 4


@pytest.mark.parametrize("seed", range(3))
def test_raw_weights_are_the_inverse_of_the_confusion_matrix_times_q(seed: int) -> None:
    draw = np.random.default_rng(seed)
    m = draw.dirichlet(np.ones(5), size=5).T + np.eye(5)
    m, q = m / m.sum(0), draw.dirichlet(np.ones(5))
    estimate = estimate_labels(
        usable(torch.from_numpy(m)), torch.from_numpy(q), torch.full((5,), 0.2), constrained=False
    )
    assert estimate.labels.tolist() == pytest.approx(solve_by_elimination(m.tolist(), q.tolist()), abs=1e-12)
    assert float(estimate.labels.sum()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_simplex_weights_are_the_best_over_all_supports(seed: int) -> None:
    draw = np.random.default_rng(seed)
    m = draw.dirichlet(np.ones(4), size=4).T + 0.5 * np.eye(4)
    m, q = m / m.sum(0), draw.dirichlet(np.full(4, 0.3))
    estimate = estimate_labels(
        usable(torch.from_numpy(m)), torch.from_numpy(q), torch.full((4,), 0.25), constrained=True
    )
    assert estimate.labels.tolist() == pytest.approx(nearest_on_simplex(m, q).tolist(), abs=1e-9)


@pytest.mark.parametrize("constrained", [True, False])
def test_labels_that_the_matrix_explains_are_recovered(constrained: bool) -> None:
    m, labels = tensor([0.8, 0.1, 0.0], [0.2, 0.7, 0.1], [0.0, 0.2, 0.9]), tensor(0.1, 0.6, 0.3)
    estimate = estimate_labels(usable(m), m @ labels, torch.full((3,), 1 / 3), constrained=constrained)
    assert estimate.labels.tolist() == pytest.approx(labels.tolist(), abs=1e-9)
    assert not estimate.refused


def test_permuted_classes_permute_the_estimated_labels() -> None:
    draw = np.random.default_rng(0)
    m = torch.from_numpy(draw.dirichlet(np.ones(6), size=6).T + np.eye(6))
    q, p = torch.from_numpy(draw.dirichlet(np.full(6, 0.2))), torch.tensor([3, 1, 5, 0, 4, 2])
    prior = torch.full((6,), 1 / 6)
    for constrained in (True, False):
        plain = estimate_labels(usable(m), q, prior, constrained=constrained).labels
        permuted = estimate_labels(usable(m[p][:, p]), q[p], prior, constrained=constrained).labels
        torch.testing.assert_close(permuted, plain[p])


@pytest.mark.parametrize("constrained", [True, False])
def test_singular_confusion_falls_back_to_the_source_prior(constrained: bool) -> None:
    m, prior = tensor([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]), tensor(0.2, 0.3, 0.5)
    estimate = estimate_labels(usable(m), tensor(0.6, 0.3, 0.1), prior, constrained=constrained)
    assert estimate.refused
    assert estimate.labels.tolist() == prior.tolist()
    assert estimate.condition > 1e3


def test_class_absent_from_the_confusion_cohort_counts_as_perfectly_predicted() -> None:
    m = tensor([0.9, 0.1, 0.0], [0.1, 0.9, 0.0], [0.0, 0.0, 0.0])
    estimate = estimate_labels(usable(m), tensor(0.2, 0.4, 0.4), torch.full((3,), 1 / 3), constrained=True)
    assert estimate.absent_classes == 1
    assert float(estimate.labels[2]) == pytest.approx(0.4)


def test_mean_of_weighted_losses_is_the_risk_of_equation_4() -> None:
    draw = np.random.default_rng(1)
    labels, losses = [0, 1, 1, 2, 2, 2, 0, 1], draw.random(8)
    for weights in ([0.5, 0.2, 0.3], [1.3, -0.4, 0.1]):
        importance = anchor_importance(tensor(weights), torch.tensor(labels))
        risk = equation_4(weights, losses.tolist(), labels)
        assert float((importance * torch.from_numpy(losses)).mean()) == pytest.approx(risk)


def test_class_without_anchors_loses_its_weight_to_the_others() -> None:
    importance = anchor_importance(tensor(0.2, 0.5, 0.3), torch.tensor([0, 2, 2]))
    assert importance.tolist() == pytest.approx([3 * 0.4, 1.5 * 0.6, 1.5 * 0.6])
    assert importance.tolist() == pytest.approx(full_importance([0.2, 0.5, 0.3], [0, 2, 2]))


@pytest.mark.parametrize("weights", [(0.0, 1.0), (-0.5, 1.5)])
def test_without_weight_on_classes_with_anchors_nothing_is_learned(weights: tuple[float, float]) -> None:
    assert anchor_importance(tensor(weights), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


def test_every_pass_visits_every_anchor_once_and_in_another_order() -> None:
    batches = list(minibatches(10, 4, 2, keyed_generator(1)))
    assert [len(rows) for rows in batches] == [4, 4, 2, 4, 4, 2]
    first, second = torch.cat(batches[:3]).tolist(), torch.cat(batches[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


# Eq. 8


@pytest.mark.parametrize("bias", [True, False])
def test_equation_8_agrees_with_loops(bias: bool) -> None:
    draw = np.random.default_rng(2)
    weight, offset = draw.normal(size=(3, 4)), draw.normal(size=3) * bias
    features, labels = draw.normal(size=(9, 4)), draw.integers(0, 3, 9)
    importance, order = (
        draw.random(9) - 0.2,
        [torch.tensor([4, 1, 8, 2]), torch.tensor([0, 3, 5, 6]), torch.tensor([7])],
    )
    head = {"weight": torch.from_numpy(weight)} | ({"bias": torch.from_numpy(offset)} if bias else {})
    anchors = AnchorFeatures(torch.from_numpy(features), torch.from_numpy(labels))
    fitted = fit_head(head, anchors, torch.from_numpy(importance), 0.7, order)
    rows = [r.tolist() for r in order]
    arguments = features.tolist(), labels.tolist(), importance.tolist(), 0.7, rows
    slow_weight, slow_bias = equation_8((weight.tolist(), offset.tolist()), *arguments)
    if bias:
        np.testing.assert_allclose(fitted["weight"], slow_weight, atol=1e-13)
        np.testing.assert_allclose(fitted["bias"], slow_bias, atol=1e-13)
    else:
        assert fitted.keys() == {"weight"}
    assert torch.equal(head["weight"], torch.from_numpy(weight))


def test_slope_of_the_head_is_that_of_autograd() -> None:
    torch_rng = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, generator=torch_rng, dtype=torch.float64)
    features = torch.randn(6, 4, generator=torch_rng, dtype=torch.float64)
    labels, r = torch.tensor([0, 1, 2, 0, 1, 2]), torch.rand(6, generator=torch_rng, dtype=torch.float64)
    leaf = weight.clone().requires_grad_()
    risk = (r * nn.functional.cross_entropy(features @ leaf.T, labels, reduction="none")).mean()
    (slope,) = torch.autograd.grad(risk, leaf)
    fitted = fit_head({"weight": weight}, AnchorFeatures(features, labels), r, 0.3, [torch.arange(6)])
    torch.testing.assert_close(fitted["weight"], weight - 0.3 * slope)
