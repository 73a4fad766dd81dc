"""Least squares over the probability simplex, solved exactly."""

import torch
from torch import Tensor

from acclimate_adapters.errors import NumericalError

LARGEST_CONDITION = 1e3  # beyond it the mixing weights are decided by noise
SINGULAR = 1e12  # reported for a singular matrix, whose condition number is infinite
TOLERANCE = 1e-10  # of the optimality conditions, relative to their scale
PATIENCE = 3  # exchanges without progress before single ones guarantee it


def condition_number(matrix: Tensor) -> float:
    """Ratio of the largest to the smallest singular value, 1..1e12; 1e12 where the columns are dependent.

    Args:
        matrix: [m, n], finite.
    """
    if matrix.shape[0] < matrix.shape[1]:
        return SINGULAR
    values = torch.linalg.svdvals(matrix)
    largest, smallest = float(values[0]), float(values[-1])
    return largest / smallest if smallest > largest / SINGULAR else SINGULAR


def nearest_mixture(columns: Tensor, target: Tensor, ridge: float = 0.0) -> Tensor:
    """Mixing weights p >= 0 with sum 1 that minimise |columns p - target|^2 + ridge |p|^2.

    On the simplex columns p - target = (columns - target 1^T) p, so the objective is p^T Q p, and adding a constant to
    every entry of Q changes nothing. Hence p = y / sum(y), where y minimises y^T Q y / 2 - sum(y) over y >= 0.

    Args:
        columns: [m, K]; linearly independent, unless ridge > 0.
        target: [m].
        ridge: >= 0.

    Returns:
        [K] in double precision on the CPU, where this small problem is fastest.

    Raises:
        NumericalError: the target is so far away that rounding makes the columns look alike.
    """
    residuals = columns.cpu().double() - target.cpu().double().unsqueeze(-1)
    q = residuals.T @ residuals
    q.diagonal().add_(ridge)
    y = minimise_non_negative(q + q.diagonal().mean())
    return y / y.sum()


def minimise_non_negative(q: Tensor) -> Tensor:
    """The y >= 0 that minimises y^T q y / 2 - sum(y).

    Block principal pivoting (Portugal, Judice, Vicente, "A comparison of block pivoting and interior-point algorithms
    for linear least squares problems with nonnegative variables", Math. Comp. 1994): all variables that violate the
    optimality conditions change sides at once; when that stops helping, one at a time do, which always ends.

    Args:
        q: [K, K], symmetric positive definite, double precision.

    Raises:
        NumericalError: q is singular.
    """
    k = len(q)
    passive = torch.zeros(k, dtype=torch.bool)  # the variables that may be positive
    y, slope = torch.zeros_like(q[0]), -torch.ones_like(q[0])
    fewest, patience = k + 1, PATIENCE
    for _ in range(10 * k + 100):
        violated = torch.where(passive, y < -TOLERANCE * y.abs().max(), slope < -TOLERANCE).nonzero().flatten()
        if len(violated) == 0:
            break
        fewest, patience = (len(violated), PATIENCE) if len(violated) < fewest else (fewest, patience - 1)
        exchanged = violated if patience >= 0 else violated[-1:]
        passive[exchanged] = ~passive[exchanged]
        inside = passive.nonzero().flatten()
        y = torch.zeros_like(y)
        solution, failed = torch.linalg.solve_ex(q[inside][:, inside], torch.ones_like(y[inside]))
        if int(failed):
            raise NumericalError("the mixing weights cannot be told apart at this precision")
        y[inside] = solution
        slope = q @ y - 1
    return y.clamp_min(0)
