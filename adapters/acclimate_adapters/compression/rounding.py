"""Numbers at 16, 8, 4 or 2 bits, as bytes.

8 bits and fewer: blocks of 64 numbers share a scale, a power of two, as in the microscaling formats of the Open Compute
Project (MX specification 1.0, section 5): one byte holds its exponent. 2 bits are -1, 0 and 1. 16 bits are bfloat16.
All of them round stochastically: a number between two steps becomes either, with the chance that makes the mean exact.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK: Final = 64
_RUN: Final = 1 << 16
"""Numbers per turn of the loop: what fits the cache of a core. A multiple of `BLOCK`."""
_MANTISSA: Final = 23
_BIAS: Final = 127
_SIZE: Final = np.uint32((1 << 31) - 1)
"""The bits of a number but for its sign."""
_HUGE: Final = np.float32(2.0**56)
"""From here on numbers are not rounded: sums of thousands of their squares would overflow."""


class Dither:
    """Random numbers that depend on the seed alone; equal states are to become equal bytes."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.SFC64(seed)

    def draw(self, n: int) -> NDArray[np.uint16]:
        """So many uniform numbers, 0..65535."""
        return self._bits.random_raw(-(-n // 4)).view(np.uint16)[:n]


def block_maxima(x: Floats) -> Floats:
    """Largest absolute value of each block of x [N]; the last block may be short.

    Without their signs, floats are ordered as the integers of the same bits are, NaN above all others, and NumPy
    reduces short rows of integers twice as fast as rows of floats.
    """
    sizes = x.view(np.uint32) & _SIZE
    return np.maximum.reduceat(sizes, np.arange(0, len(x), BLOCK)).view(np.float32)


def exponents(maxima: Floats, bits: int | NDArray[np.int32]) -> Bytes:
    """Biased exponent of the least power of two with which 2^(bits-1) - 1 steps reach each maximum; at least 1.

    Args:
        maxima: [blocks].
        bits: 2, 4 or 8, or several of them as [levels, 1], for a result [levels, blocks].
    """
    up, down = (1 << (_MANTISSA - bits + 2)) - 1, (bits - 2) << _MANTISSA
    least = (1 << _MANTISSA) - up + down
    found = np.maximum(maxima.view(np.int32), least)
    found += up - down
    found >>= _MANTISSA
    return found.astype(np.uint8)


def scales(exponent: Bytes) -> Floats:
    """The powers of two with these biased exponents."""
    return (exponent.astype(np.uint32) << np.uint32(_MANTISSA)).view(np.float32)


_INVERSES: Final = scales(np.uint8(2 * _BIAS) - np.arange(256, dtype=np.uint8))
"""One over the scale, for each biased exponent."""


def representable(maxima: Floats) -> bool:
    """Whether blocks with these maxima can be rounded: all are finite, and their squares far from overflow."""
    return bool((maxima < _HUGE).all())


def nbytes(n: int, bits: int) -> int:
    """Bytes that `encode` gives for n numbers."""
    return (n * bits + 7) // 8 + (-(-n // BLOCK) if bits in (2, 4, 8) else 0)


def encode(x: Floats, maxima: Floats, bits: int, dither: Dither) -> bytes:
    """Round and pack.

    Args:
        x: [N], finite.
        maxima: `block_maxima(x)`.
        bits: 0 (nothing is kept), 2, 4, 8, 16 or 32 (exact).
        dither: decides what becomes of numbers between two steps.
    """
    if bits == 32:
        return x.astype("<f4", copy=False).tobytes()
    if bits == 16:
        return b"".join(_to_bfloat16(x[i : i + _RUN], dither) for i in range(0, len(x), _RUN))
    if bits == 0:
        return b""
    exponent = exponents(maxima, bits)
    inverse = _INVERSES.take(exponent)
    codes = np.empty(len(x), np.uint8)
    for run, blocks in _runs(len(x)):
        _round(x[run], inverse[blocks], 1 << (bits - 1), dither, codes[run])
    return b"".join((exponent.data, _pack(codes, bits).data))


def decode(data: memoryview, bits: int, out: Floats) -> None:
    """Write the numbers that `encode` was given, rounded.

    Raises:
        ValueError: data has not `nbytes(len(out), bits)` bytes.
    """
    if len(data) != nbytes(len(out), bits):
        raise ValueError(f"{len(out)} numbers at {bits} bits are {nbytes(len(out), bits)} bytes, not {len(data)}")
    if bits == 32:
        out[:] = np.frombuffer(data, "<f4")
    elif bits == 16:
        np.left_shift(np.frombuffer(data, "<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    elif bits == 0:
        out[:] = 0
    else:
        raw, heads = np.frombuffer(data, np.uint8), -(-len(out) // BLOCK)
        scale, codes = scales(raw[:heads]), _unpack(raw[heads:], bits, len(out))
        for run, blocks in _runs(len(out)):
            np.subtract(codes[run], np.float32(1 << (bits - 1)), out=out[run], dtype=np.float32)
            out[run] *= _spread(scale[blocks], len(out[run]))


def _runs(n: int) -> Iterator[tuple[slice, slice]]:
    """Stretches of numbers, and their blocks."""
    for start in range(0, n, _RUN):
        stop = min(start + _RUN, n)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def _spread(factors: Floats, n: int) -> Floats:
    """The factor of each of n numbers, given those of their blocks."""
    return np.repeat(factors, BLOCK)[:n]


def _round(x: Floats, inverse: Floats, middle: int, dither: Dither, out: Bytes) -> None:
    """Steps of each number above `middle`, rounded down after adding a random part of one: exact in 24 bits."""
    chance = dither.draw(len(x)).astype(np.float32)
    chance *= 2.0**-16
    chance += middle
    steps = _spread(inverse, len(x))
    steps *= x
    steps += chance
    np.copyto(out, steps, casting="unsafe")


def _to_bfloat16(x: Floats, dither: Dither) -> bytes:
    """Add a random part of the last bit kept, and cut."""
    raised = x.view(np.uint32) + dither.draw(len(x))
    return (raised >> np.uint32(16)).astype("<u2").tobytes()


def _pack(codes: Bytes, bits: int) -> Bytes:
    """Several to a byte, in place: the first stretch of them in the low bits, the next ones above."""
    size = -(-len(codes) * bits // 8)
    packed = codes[:size]
    for place in range(1, 8 // bits):
        stretch = codes[place * size : (place + 1) * size]
        packed[: len(stretch)] |= stretch << np.uint8(place * bits)
    return packed


def _unpack(packed: Bytes, bits: int, n: int) -> Bytes:
    if bits == 8:
        return packed
    mask = np.uint8((1 << bits) - 1)
    return np.concatenate([packed >> np.uint8(place) & mask for place in range(0, 8, bits)])[:n]
