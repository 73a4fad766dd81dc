"""How many bits each part of a state is worth, under a budget of bytes."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from acclimate_adapters.rounding import BLOCK, Floats, block_maxima, exponents, nbytes, representable, scales

LEVELS: Final = (0, 2, 4, 8, 16, 32)
PART: Final = 4096
"""Numbers of a tensor that share a level; a multiple of the block."""
_ALIGNED: Final = 100.0
"""How many times more an error counts that drops a part. Rounding errors are random and cancel out in the logits; what
a part of a direction does to them adds up, as that is what a direction is for. With 10 to 10,000 the results are the
same; with 1, a budget of 1/8 changes the predicted probabilities ten times as much (benchmark data, `atp`)."""
_ROUNDED: Final = 1 / 6
"""Mean of f (1 - f) over f in 0..1: the variance of stochastic rounding, in squared steps."""
_BFLOAT16: Final = 2.0**-14 * 3 / 7 * _ROUNDED
"""The same of bfloat16 in squares of the number; (3/7) 4^e is the mean of 1/x^2 over an octave of numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A tensor with what its rounding depends on.

    Args:
        x: its numbers [N].
        maxima: `block_maxima(x)`.
        weight: what an error counts: the effect of one is weight^2 times the mean square of it over the tensor.
    """

    x: Floats
    maxima: Floats
    weight: float

    @property
    def parts(self) -> int:
        """How many parts it has."""
        return -(-len(self.x) // PART)

    @property
    def exact_only(self) -> bool:
        """Whether its numbers are such that it cannot be rounded."""
        return not representable(self.maxima)

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each part at each level, [levels, parts]."""
        numbers = np.minimum(PART, len(self.x) - np.arange(0, len(self.x), PART))
        return np.stack([nbytes(numbers, bits) for bits in LEVELS])

    def effects(self) -> NDArray[np.float64]:
        """Expected effect of storing each part at each level, [levels, parts]."""
        firsts = np.arange(0, len(self.x), PART)
        energy = np.array([float(np.vdot(x, x)) for x in (self.x[first : first + PART] for first in firsts)])
        rounded = [self._rounded(bits, firsts) for bits in (2, 4, 8)]
        rows = [energy * _ALIGNED, *rounded, energy * _BFLOAT16, np.zeros(len(firsts))]
        return np.stack(rows) * (self.weight**2 / len(self.x))

    def _rounded(self, bits: int, firsts: NDArray[np.int64]) -> NDArray[np.float64]:
        steps = np.where(self.maxima > 0, scales(exponents(self.maxima, bits)), 0).astype(np.float64)
        return np.add.reduceat(steps**2, firsts // BLOCK) * (BLOCK * _ROUNDED)


def measure(x: Floats, weight: float) -> Measured:
    """Measure a tensor [N]."""
    return Measured(x, block_maxima(x), weight)


def allocate(tensors: list[Measured], budget: int) -> list[list[int]]:
    """Bits of each part of each tensor, so that the sum of all effects is small.

    Greedy on marginal effects: from nothing at all, that step comes next which avoids most per byte and still fits.
    Steps lead along the convex hull of each part's effects over its bytes, where greedy is as good as any choice but
    for the last bytes (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Trans.
    ASSP 1988). Tensors that cannot be rounded get 32 bits whatever the budget is.

    Args:
        tensors: what is to be stored.
        budget: bytes for all of it.
    """
    effects = np.concatenate([tensor.effects() for tensor in tensors], axis=1)
    sizes = np.concatenate([tensor.sizes() for tensor in tensors], axis=1)
    exact = np.repeat([tensor.exact_only for tensor in tensors], [tensor.parts for tensor in tensors])
    levels = np.where(exact, len(LEVELS) - 1, 0)
    left = budget - int(sizes[-1, exact].sum())
    closed = set[int]()
    for part, level, cost in _raises(np.where(exact, 0, effects), sizes):
        if cost > left or part in closed:
            closed.add(part)
        else:
            levels[part], left = level, left - cost
    bits = np.array(LEVELS)[levels]
    return [part.tolist() for part in np.split(bits, np.cumsum([tensor.parts for tensor in tensors])[:-1])]


def _raises(effects: NDArray[np.float64], sizes: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Part, new level and further bytes of all steps along the hulls, those first that avoid most per byte."""
    parts, indices = np.arange(effects.shape[1]), np.arange(len(LEVELS))[:, None]
    level, found = np.zeros_like(parts), []
    for _ in LEVELS[1:]:
        cost = sizes - sizes[level, parts]
        gains = np.where(indices > level, (effects[level, parts] - effects) / np.maximum(cost, 1), 0)
        best = gains.argmax(axis=0)
        worth = gains[best, parts] > 0
        found.append(np.stack([gains[best, parts], parts, best, cost[best, parts]])[:, worth])
        level = np.where(worth, best, level)
    steps = np.concatenate(found, axis=1)
    order = np.argsort(-steps[0], kind="stable")
    return [(int(part), int(above), int(cost)) for part, above, cost in steps[1:, order].T.tolist()]
