"""How many bits each part of a state is worth, under a budget of bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from acclimate_adapters.compression.rounding import (
    BLOCK,
    Floats,
    block_maxima,
    exponents,
    nbytes,
    representable,
    scales,
)

Integers = NDArray[np.int64]

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
_SCALED: Final = np.array([[2], [4], [8]], np.int32)
"""The levels at which blocks have a scale, [levels, 1]."""
_FULL: Final = np.array([[nbytes(PART, bits)] for bits in LEVELS])
"""Bytes of a whole part at each level, [levels, 1]."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A tensor with what its rounding depends on.

    Args:
        x: its numbers [N].
        maxima: `block_maxima(x)`.
        weight: what an error counts: the effect of one is weight^2 times the mean square of it over the tensor. If it
            is infinite, the tensor gets 16 bits.
        coarse: whether it may get 2 or 4 bits. What is rounded anew whenever it is stored, as the terms of a matrix
            are, would then take up more at each turn than the mean of the batches lets go, and grow beyond all bounds.
    """

    x: Floats
    maxima: Floats
    weight: float
    coarse: bool = True

    @property
    def parts(self) -> int:
        """How many parts it has."""
        return -(-len(self.x) // PART)

    @property
    def exact_only(self) -> bool:
        """Whether its numbers are such that it cannot be rounded."""
        return not representable(self.maxima)

    @property
    def least(self) -> int:
        """The level that it has whatever the budget is: exact, bfloat16, or nothing at all."""
        if self.exact_only:
            return LEVELS.index(32)
        return LEVELS.index(16) if math.isinf(self.weight) else LEVELS.index(0)

    @property
    def owed(self) -> int:
        """Bytes of the budget that it takes beforehand."""
        return int(self.sizes()[-1].sum()) if self.exact_only and math.isfinite(self.weight) else 0

    def sizes(self) -> Integers:
        """Bytes of each part at each level, [levels, parts]."""
        sizes = np.repeat(_FULL, self.parts, axis=1)
        last = len(self.x) - (self.parts - 1) * PART
        sizes[:, -1] = [nbytes(last, bits) for bits in LEVELS]
        return sizes

    def effects(self) -> NDArray[np.float64]:
        """Expected effect of storing each part at each level, [levels, parts]; 0 if the level does not depend on it."""
        effects = np.zeros((len(LEVELS), self.parts))
        if not self.least:
            energies = _energies(self.x)
            effects[0] = energies * _ALIGNED
            effects[1:4] = self._squared_steps() * (BLOCK * _ROUNDED)
            effects[4] = energies * _BFLOAT16
            if not self.coarse:
                effects[1:3] = effects[0]
            effects *= self.weight**2 / len(self.x)
        return effects

    def _squared_steps(self) -> NDArray[np.float64]:
        """Sum over the blocks of each part of their squared step, [3, parts]: at 2, 4 and 8 bits."""
        steps = (scales(exponents(self.maxima, _SCALED)) * (self.maxima > 0)).astype(np.float64)
        steps *= steps
        return np.add.reduceat(steps, np.arange(0, len(self.maxima), PART // BLOCK), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A column and a row whose product is stored, both at one level; either without the other would be nothing."""

    column: Measured
    row: Measured

    parts: ClassVar = 1
    owed: ClassVar = 0
    least: ClassVar = LEVELS.index(0)

    def sizes(self) -> Integers:
        """Bytes of both at each level, [levels, 1]."""
        sizes: Integers = sum(vector.sizes().sum(axis=1, keepdims=True) for vector in (self.column, self.row))
        return sizes

    def effects(self) -> NDArray[np.float64]:
        """Expected effect of storing both at each level, [levels, 1]; without them the product is lost, but once."""
        effects: NDArray[np.float64] = sum(
            vector.effects().sum(axis=1, keepdims=True) for vector in (self.column, self.row)
        )
        effects[0] /= 2
        return effects


def measure(x: Floats, weight: float, *, coarse: bool = True) -> Measured:
    """Measure a tensor [N]."""
    return Measured(x, block_maxima(x), weight, coarse)


def allocate(tensors: Sequence[Measured | Product], budget: int) -> list[list[int]]:
    """Bits of each part of each tensor, and of each product, so that the sum of all effects is small.

    Greedy on marginal effects: from nothing at all, that step comes next which avoids most per byte and still fits.
    Steps lead along the convex hull of each part's effects over its bytes, where greedy is as good as any choice but
    for the last bytes (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Trans.
    ASSP 1988). Tensors that cannot be rounded get 32 bits whatever the budget is, and those of infinite weight 16.

    Args:
        tensors: what is to be stored.
        budget: bytes for all of it but the tensors of infinite weight.
    """
    effects = np.concatenate([tensor.effects() for tensor in tensors], axis=1)
    sizes = np.concatenate([tensor.sizes() for tensor in tensors], axis=1)
    levels = np.repeat([tensor.least for tensor in tensors], [tensor.parts for tensor in tensors])
    left = budget - sum(tensor.owed for tensor in tensors)
    parts, raised, costs = _raises(effects, sizes)
    done = _fitting(parts, costs, left)
    np.maximum.at(levels, parts[done], raised[done])
    bits = np.array(LEVELS)[levels]
    return [part.tolist() for part in np.split(bits, np.cumsum([tensor.parts for tensor in tensors])[:-1])]


def _energies(x: Floats) -> NDArray[np.float64]:
    """Sum of the squares of each part of x [N]."""
    whole = len(x) // PART * PART
    parts, rest = x[:whole].reshape(-1, PART), x[whole:]
    # One dot product for each part, in the order of `vdot`: other sums would round otherwise, and change the bytes.
    energies = np.matmul(parts[:, None, :], parts[:, :, None]).reshape(-1).astype(np.float64)
    return np.append(energies, np.vdot(rest, rest)) if len(rest) else energies


def _raises(effects: NDArray[np.float64], sizes: Integers) -> tuple[Integers, Integers, Integers]:
    """Part, new level and further bytes of all steps along the hulls, those first that avoid most per byte."""
    parts, indices = np.arange(effects.shape[1]), np.arange(len(LEVELS))[:, None]
    level, found = np.zeros_like(parts), []
    for _ in LEVELS[1:]:
        cost = sizes - sizes[level, parts]
        gains = np.where(indices > level, (effects[level, parts] - effects) / np.maximum(cost, 1), 0)
        best = gains.argmax(axis=0)
        gain = gains[best, parts]
        worth = gain > 0
        found.append((gain[worth], parts[worth], best[worth], cost[best, parts][worth]))
        level = np.where(worth, best, level)
    gain, *steps = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(-gain, kind="stable")
    part, raised, cost = (each[order] for each in steps)
    return part, raised, cost


def _fitting(parts: Integers, costs: Integers, left: int) -> NDArray[np.bool_]:
    """Which steps are done, one after another: those that still fit, if no earlier one of their part did not."""
    done = np.cumsum(costs) <= left  # as long as all fit, which most of those do that ever will
    first = int(np.count_nonzero(done))
    left -= int(costs[:first].sum())
    closed = set[int]()
    for step, part, cost in zip(range(first, len(parts)), parts[first:].tolist(), costs[first:].tolist(), strict=True):
        if cost > left or part in closed:
            closed.add(part)
        else:
            done[step], left = True, left - cost
    return done
