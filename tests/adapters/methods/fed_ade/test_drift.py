"""Drift and learning rate of Fed-ADE (Eq. 9 to 14) against slow loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters.methods.fed_ade.client import cosine_distance, mean_unit_feature, measure_drift

Vector = list[float]


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)


def softmax(row: Vector) -> Vector:
    powers = [math.exp(v - max(row)) for v in row]
    return [p / sum(powers) for p in powers]


def cosine(a: Vector, b: Vector) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def equation_11(logits: list[Vector]) -> Vector:
    rows = [softmax(row) for row in logits]
    return [sum(row[k] for row in rows) / len(rows) for k in range(len(rows[0]))]


def equation_12(q_before: Vector, q: Vector) -> float:
    return 1 - cosine(q_before, q)


def equation_13(features: list[Vector]) -> Vector:
    unit = [[v / math.sqrt(sum(w * w for w in row)) for v in row] for row in features]
    return [sum(row[j] for row in unit) / len(unit) for j in range(len(unit[0]))]


def equation_14(z_before: Vector, z: Vector) -> float:
    return (1 - cosine(z_before, z)) / 2


def equation_9_and_10(low: float, high: float, s_unc: float, s_rep: float) -> float:
    return low + (high - low) * 0.5 * (s_unc + s_rep)


@pytest.mark.parametrize("seed", range(3))
def test_equations_11_to_14_agree_with_loops(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits, features = draw.normal(size=(7, 5)) * 3, draw.normal(size=(7, 4))
    q_before, z_before = draw.dirichlet(np.ones(5)), draw.normal(size=4)
    drift = measure_drift(*(torch.from_numpy(a) for a in (q_before, z_before, logits, features)))
    q, z = equation_11(logits.tolist()), equation_13(features.tolist())
    assert drift.q.tolist() == pytest.approx(q, abs=1e-14)
    assert drift.z.tolist() == pytest.approx(z, abs=1e-14)
    assert drift.uncertainty == pytest.approx(equation_12(q_before.tolist(), q), abs=1e-14)
    assert drift.representation == pytest.approx(equation_14(z_before.tolist(), z), abs=1e-14)
    eta = equation_9_and_10(5e-6, 1e-4, drift.uncertainty, drift.representation)
    assert drift.learning_rate(5e-6, 1e-4) == pytest.approx(eta, rel=1e-12)


def test_cosine_distance_reaches_its_whole_range_and_is_exact_at_0() -> None:
    a = torch.linspace(0, 1, 64).square()
    assert cosine_distance(a, a.clone()) == 0.0
    assert cosine_distance(a, 3 * a) == pytest.approx(0, abs=1e-12)
    assert cosine_distance(tensor(1.0, 0.0), tensor(0.0, 2.0)) == pytest.approx(1)
    assert cosine_distance(a, -a) == pytest.approx(2)


def test_shift_never_exceeds_1() -> None:
    q, z = tensor(1.0, 0.0), tensor(1.0, 0.0)
    drift = measure_drift(q, z, tensor([[-400.0, 400.0]]), tensor([[-1.0, 0.0]]))
    assert drift.shift == 1.0
    rounded_up = drift._replace(uncertainty=1.0000002)
    assert rounded_up.shift == 1.0
    assert rounded_up.learning_rate(0.0, 0.3) == 0.3


def test_features_after_relu_cannot_raise_representation_drift_above_a_half() -> None:
    drift = measure_drift(tensor(0.5, 0.5), tensor(1.0, 0.0), tensor([[0.0, 0.0]]), tensor([[0.0, 1.0]]))
    assert drift.representation == pytest.approx(0.5)


def test_two_classes_drift_little_when_they_go_from_even_to_three_to_one() -> None:
    drift = measure_drift(tensor(0.5, 0.5), tensor(1.0), tensor([[math.log(3), 0.0]]), tensor([[1.0]]))
    assert drift.uncertainty == pytest.approx(0.106, abs=5e-4)


def test_thousand_classes_start_near_the_largest_rate() -> None:
    logits = torch.full((20, 1000), 0.0).index_fill_(1, torch.tensor([0, 1, 2, 3]), 12.0)
    drift = measure_drift(torch.full((1000,), 1e-3), torch.ones(1), logits, torch.ones(20, 1))
    assert drift.uncertainty > 0.9


def test_zero_feature_vectors_are_left_out_of_the_mean_direction() -> None:
    features = tensor([3.0, 4.0], [0.0, 0.0], [9e-13, 0.0], [0.0, 2.0])
    assert mean_unit_feature(features).tolist() == pytest.approx([0.3, 0.9])


def test_batch_of_zero_features_takes_the_smallest_rate_and_keeps_the_last_direction() -> None:
    z_before = tensor(1.0, 0.0)
    drift = measure_drift(tensor(0.5, 0.5), z_before, tensor([[5.0, 0.0]]), tensor([[0.0, 0.0]]))
    assert not drift.defined
    assert drift.representation == 0
    assert drift.uncertainty > 0
    assert drift.learning_rate(1e-3, 1.0) == 1e-3
    assert torch.equal(drift.z, z_before)


def test_client_without_any_direction_so_far_takes_the_smallest_rate() -> None:
    drift = measure_drift(tensor(0.5, 0.5), torch.zeros(2), tensor([[5.0, 0.0]]), tensor([[1.0, 0.0]]))
    assert drift.learning_rate(1e-3, 1.0) == 1e-3
    assert drift.z.tolist() == [1.0, 0.0]
