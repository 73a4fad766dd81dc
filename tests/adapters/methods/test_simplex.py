"""Least squares over the simplex against an exhaustive search over supports."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import NumericalError
from acclimate_adapters.methods.simplex import condition_number, minimise_non_negative, nearest_mixture


def by_exhaustion(columns: np.ndarray, target: np.ndarray, ridge: float = 0.0) -> np.ndarray:
    """The best non-negative one among the minima over all supports, each from its Lagrange conditions."""
    k = columns.shape[1]
    hessian, best, lowest = columns.T @ columns + ridge * np.eye(k), np.zeros(k), np.inf
    for size in range(1, k + 1):
        for support in map(list, itertools.combinations(range(k), size)):
            system = np.ones((size + 1, size + 1))
            system[:size, :size], system[size, size] = hessian[np.ix_(support, support)], 0
            p = np.zeros(k)
            p[support] = np.linalg.solve(system, np.append(columns[:, support].T @ target, 1.0))[:size]
            objective = np.sum((columns @ p - target) ** 2) + ridge * np.sum(p**2)
            if p.min() >= -1e-12 and objective < lowest:
                best, lowest = p, objective
    return best


def problem(seed: int, m: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.rand(m, k, generator=generator, dtype=torch.float64)
    return columns, torch.randn(m, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("k", [2, 3, 4, 6])
@pytest.mark.parametrize("seed", range(12))
def test_weights_are_the_best_of_all_supports(seed: int, k: int) -> None:
    columns, target = problem(seed, 8, k)
    p = nearest_mixture(columns, target)
    np.testing.assert_allclose(p.numpy(), by_exhaustion(columns.numpy(), target.numpy()), atol=1e-10)


@pytest.mark.parametrize("seed", range(8))
def test_ridge_makes_dependent_columns_solvable(seed: int) -> None:
    columns, target = problem(seed, 3, 5)
    p = nearest_mixture(columns, target, ridge=1e-2)
    np.testing.assert_allclose(p.numpy(), by_exhaustion(columns.numpy(), target.numpy(), 1e-2), atol=1e-9)


def test_equal_columns_share_equally_under_a_ridge() -> None:
    columns = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(
        nearest_mixture(columns, torch.tensor([1.0, 0.0]), ridge=1e-6),
        torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize(("k", "sparse"), [(50, True), (50, False), (200, True)])
def test_optimality_conditions_hold_for_many_classes(k: int, sparse: bool) -> None:
    columns, noise = problem(k, 2 * k, k)
    truth = torch.rand(k, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** (9 if sparse else 1)
    target = columns @ (truth / truth.sum()) + 0.02 * noise
    p = nearest_mixture(columns, target)
    slope = columns.T @ (columns @ p - target)
    level = (p * slope).sum()  # the common slope of all positive entries
    assert float(p.min()) >= 0
    assert abs(float(p.sum()) - 1) < 1e-12
    assert float((slope - level).min()) > -1e-9 * k
    assert float((p * (slope - level)).abs().max()) < 1e-9
    assert not sparse or int((p == 0).sum()) > 0


def test_target_that_is_a_mixture_is_recovered_exactly() -> None:
    columns, _ = problem(3, 12, 7)
    truth = torch.tensor([0.4, 0.0, 0.3, 0.0, 0.2, 0.1, 0.0], dtype=torch.float64)
    torch.testing.assert_close(nearest_mixture(columns, columns @ truth), truth, rtol=0, atol=1e-10)


def test_target_beyond_a_corner_gives_that_corner() -> None:
    p = nearest_mixture(torch.eye(3), torch.tensor([5.0, -1.0, -2.0]))
    assert p.tolist() == [1.0, 0.0, 0.0]


def test_weights_are_the_same_bits_each_time() -> None:
    columns, target = problem(5, 30, 20)
    assert torch.equal(nearest_mixture(columns, target), nearest_mixture(columns, target))


@pytest.mark.parametrize("seed", range(200))
def test_pivoting_ends_on_matrices_of_any_sign_pattern(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    q = factor @ factor.T + 1e-3 * torch.eye(12, dtype=torch.float64)
    y = minimise_non_negative(q)
    slope = q @ y - 1
    assert float(y.min()) >= 0
    assert float(slope.min()) > -1e-8
    assert float((slope * y).abs().max()) < 1e-6 * float(y.max())


def test_pivoting_ends_where_exchanging_all_violations_at_once_would_cycle() -> None:
    factor = torch.tensor(
        [
            [-0.1, 0.5, 1.6, -0.2, 0.3, 0.4, -0.6],
            [-0.4, 0.6, 0.9, -1.8, 0.3, -1.1, 2.1],
            [0.5, 0.6, 0.5, -1.7, 2.4, 1.2, 0.5],
            [-0.6, -1.1, 0.9, -1.2, 0.3, 0.0, 0.0],
            [-0.7, 0.9, 0.4, -1.0, 0.8, 1.0, -0.5],
            [-1.7, 0.7, 0.0, -1.1, -0.7, 0.2, -0.4],
            [-0.4, -2.6, 1.5, -1.5, 1.2, -1.4, 0.6],
        ],
        dtype=torch.float64,
    )
    q = factor @ factor.T + 1e-3 * torch.eye(7, dtype=torch.float64)
    y = minimise_non_negative(q)
    assert float((q @ y - 1).min()) > -1e-12
    assert float((y * (q @ y - 1)).abs().max()) < 1e-12


def test_target_too_far_away_to_tell_the_columns_apart_is_a_numerical_error() -> None:
    with pytest.raises(NumericalError, match="cannot be told apart"):
        nearest_mixture(torch.eye(3), torch.full((3,), 1e30))


def test_condition_number_is_the_ratio_of_the_axes() -> None:
    assert condition_number(torch.diag(torch.tensor([4.0, 2.0, 0.5]))) == pytest.approx(8)


@pytest.mark.parametrize("matrix", [torch.ones(3, 3), torch.zeros(2, 2), torch.ones(2, 3)])
def test_condition_number_of_dependent_columns_is_finite_and_huge(matrix: Tensor) -> None:
    assert condition_number(matrix.double()) == 1e12
