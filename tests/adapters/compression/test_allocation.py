"""The allocation of bits against one that goes part by part and step by step."""

import numpy as np
import pytest

from acclimate_adapters.compression.allocation import LEVELS, PART, allocate, measure
from acclimate_adapters.compression.rounding import BLOCK, exponents, nbytes, scales

LENGTHS = (1, BLOCK + 1, PART - 1, PART, PART + 3, 5 * PART + 70)


def effects_of(x, weight, n):
    """Of storing a part of a tensor of n numbers at each level."""
    energy = float(np.vdot(x, x))
    maxima = [np.abs(x[first : first + BLOCK]).max() for first in range(0, len(x), BLOCK)]
    rounded = []
    for bits in (2, 4, 8):
        steps = scales(exponents(np.array(maxima, np.float32), bits)).astype(np.float64)
        rounded.append(sum(float(step) ** 2 for step, top in zip(steps, maxima, strict=True) if top) * (BLOCK / 6))
    bfloat16 = 2.0**-14 * 3 / 7 / 6
    return [each * weight**2 / n for each in (energy * 100, *rounded, energy * bfloat16, 0.0)]


def steps_of(effects, sizes):
    """Gain per byte, level and further bytes of the steps along the hull of one part."""
    level, found = 0, []
    while True:
        better = [
            ((effects[level] - effects[k]) / max(sizes[k] - sizes[level], 1), -k) for k in range(level + 1, len(LEVELS))
        ]
        if not better or max(better)[0] <= 0:
            return found
        gain, k = max(better)
        found.append((gain, len(found), -k, sizes[-k] - sizes[level]))
        level = -k


def allocate_slowly(tensors, budget):
    parts, steps, bits = [], [], []
    for x, weight in tensors:
        bits.append([0] * -(-len(x) // PART))
        for number in range(len(bits[-1])):
            piece = x[number * PART : (number + 1) * PART]
            sizes = [nbytes(len(piece), level) for level in LEVELS]
            if not np.isfinite(x).all():
                bits[-1][number] = 32
                budget -= sizes[-1]
                continue
            for gain, nth, level, cost in steps_of(effects_of(piece, weight, len(x)), sizes):
                steps.append((-gain, nth, len(parts), level, cost))
            parts.append((len(bits) - 1, number))
    closed = set()
    for _, _, part, level, cost in sorted(steps):
        if cost > budget or part in closed:
            closed.add(part)
        else:
            tensor, number = parts[part]
            bits[tensor][number], budget = LEVELS[level], budget - cost
    return bits


@pytest.mark.parametrize("share", [0, 0.01, 1 / 32, 1 / 8, 0.3, 0.9, 2])
@pytest.mark.parametrize("seed", range(4))
def test_each_part_gets_the_bits_that_it_gets_step_by_step(seed, share):
    rng = np.random.default_rng(seed)
    tensors = [
        (rng.normal(0, 10.0 ** rng.uniform(-6, 3), n).astype(np.float32), 10.0 ** rng.uniform(-2, 2)) for n in LENGTHS
    ]
    tensors[1][0][:BLOCK] = 0
    if seed % 2:
        tensors[3][0][7] = np.nan
    budget = int(share * sum(x.nbytes for x, _ in tensors))
    assert allocate([measure(*each) for each in tensors], budget) == allocate_slowly(tensors, budget)
