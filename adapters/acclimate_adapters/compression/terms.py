"""The leading terms of a matrix: what a direction does to a network is in few of them.

The direction of a weight is a mean of gradients, each a product of what comes into the layer and what is asked of it.
The inputs of a client lie along few directions, so that a few products have nearly all of the effect, where rounding
spreads as many bytes over all numbers.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from acclimate_adapters.compression.rounding import Floats

MOST: Final = 8
"""Terms of a matrix among which bytes are given."""
_SPARE: Final = 4
_TURNS: Final = 2
"""Power iterations (Halko, Martinsson, Tropp, SIAM Review 53, 2011, Algorithm 4.4)."""


class Term(NamedTuple):
    """A column [M] and a row [N] that are multiplied, both of the same length, whose square is `size`."""

    column: Floats
    row: Floats
    size: float


def leading(matrix: Floats, seed: int) -> list[Term]:
    """The at most `MOST` terms whose sum is about the nearest to a matrix [M, N] that there is, the largest first.

    Args:
        matrix: of finite numbers.
        seed: of the probes that find them; equal seeds give equal terms.
    """
    rows, columns = matrix.shape
    count = min(MOST + _SPARE, rows, columns)
    probes = np.random.Generator(np.random.SFC64(seed)).standard_normal((columns, count), np.float32)
    basis = _orthonormal(matrix @ probes)
    for _ in range(_TURNS):
        basis = _orthonormal(matrix @ _orthonormal(matrix.T @ basis))
    left, sizes, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    lengths = np.sqrt(sizes)
    return [
        Term(np.ascontiguousarray(basis @ left[:, k]) * lengths[k], right[k] * lengths[k], float(sizes[k]))
        for k in range(min(MOST, count))
    ]


def _orthonormal(x: Floats) -> NDArray[np.float32]:
    return np.linalg.qr(x)[0]
