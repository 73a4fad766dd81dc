"""Numbers at 16, 8, 4 or 2 bits, as bytes.

8 bits and fewer: blocks of 64 numbers share a scale, a power of two, as in the microscaling formats of the Open Compute
Project (MX specification 1.0, section 5): one byte holds its exponent. 2 bits are -1, 0 and 1. 16 bits are bfloat16.
All of them round stochastically: a number between two steps becomes either, with the chance that makes the mean exact.
"""

from collections.abc import Iterator
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK: Final = 64
_RUN: Final = 1 << 15
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
    reduces short rows of integers three times as fast as rows of floats.
    """
    full = len(x) // BLOCK * BLOCK
    maxima = np.empty(-(-len(x) // BLOCK), np.uint32)
    for start in range(0, full, _RUN):
        stop = min(start + _RUN, full)
        sizes = x[start:stop].view(np.uint32) & _SIZE
        sizes.reshape(-1, BLOCK).max(axis=1, out=maxima[start // BLOCK : stop // BLOCK])
    if full < len(x):
        maxima[-1] = (x[full:].view(np.uint32) & _SIZE).max()
    return maxima.view(np.float32)


def exponents(maxima: Floats, bits: int) -> Bytes:
    """Biased exponent of the least power of two with which 2^(bits-1) - 1 steps reach each maximum."""
    raised = (maxima.view(np.uint32) + np.uint32((1 << (_MANTISSA - bits + 2)) - 1)) >> np.uint32(_MANTISSA)
    return np.maximum(raised.astype(np.int32) - (bits - 2), 1).astype(np.uint8)


def scales(exponent: Bytes) -> Floats:
    """The powers of two with these biased exponents."""
    return (exponent.astype(np.uint32) << np.uint32(_MANTISSA)).view(np.float32)


def representable(maxima: Floats) -> bool:
    """Whether blocks with these maxima can be rounded: all are finite, and their squares far from overflow."""
    return bool((maxima < _HUGE).all())


Count = TypeVar("Count", int, NDArray[np.int64])


def nbytes(n: Count, bits: int) -> Count:
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
    inverse = scales(np.uint8(2 * _BIAS) - exponent)
    codes = np.empty(len(x), np.uint8)
    for run, blocks in _runs(len(x)):
        _round(x[run], inverse[blocks], np.float32(1 << (bits - 1)), dither, codes[run])
    return exponent.tobytes() + _pack(codes, bits).tobytes()


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
            _scale(out[run], scale[blocks], out[run])


def _runs(n: int) -> Iterator[tuple[slice, slice]]:
    """Stretches of numbers, and their blocks."""
    for start in range(0, n, _RUN):
        stop = min(start + _RUN, n)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def _scale(x: Floats, factors: Floats, out: Floats) -> None:
    """Multiply each block by its factor."""
    full = len(x) // BLOCK
    split = full * BLOCK
    np.multiply(x[:split].reshape(full, BLOCK), factors[:full, None], out=out[:split].reshape(full, BLOCK))
    if split < len(x):
        np.multiply(x[split:], factors[-1], out=out[split:])


def _round(x: Floats, inverse: Floats, middle: np.float32, dither: Dither, out: Bytes) -> None:
    """Steps of each number above `middle`, rounded down after adding a random part of one: exact in 24 bits."""
    steps = np.empty_like(x)
    _scale(x, inverse, steps)
    chance = dither.draw(len(x)).astype(np.float32)
    chance *= np.float32(2.0**-16)
    chance += middle
    steps += chance
    np.copyto(out, steps, casting="unsafe")


def _to_bfloat16(x: Floats, dither: Dither) -> bytes:
    """Add a random part of the last bit kept, and cut."""
    raised = x.view(np.uint32) + dither.draw(len(x))
    return (raised >> np.uint32(16)).astype("<u2").tobytes()


def _pack(codes: Bytes, bits: int) -> Bytes:
    """Several to a byte: the first stretch of them in the low bits, the next ones above."""
    size = -(-len(codes) * bits // 8)
    packed = codes[:size].copy()
    for place in range(1, 8 // bits):
        stretch = codes[place * size : (place + 1) * size]
        packed[: len(stretch)] |= stretch << np.uint8(place * bits)
    return packed


def _unpack(packed: Bytes, bits: int, n: int) -> Bytes:
    if bits == 8:
        return packed
    mask = np.uint8((1 << bits) - 1)
    return np.concatenate([packed >> np.uint8(place) & mask for place in range(0, 8, bits)])[:n]
