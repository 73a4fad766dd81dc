"""Numbers at few bits: how far they may be off, in the worst case and in the mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from acclimate_adapters.compression.rounding import BLOCK, Dither, block_maxima, decode, encode, nbytes, representable

BITS = (0, 2, 4, 8, 16, 32)
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


def restored(x, bits, seed=0):
    data = encode(x, block_maxima(x), bits, Dither(seed))
    assert len(data) == nbytes(len(x), bits)
    out = np.full_like(x, np.nan)
    decode(memoryview(data), bits, out)
    return out


def bound(x, bits):
    """Most that any number may be off."""
    if bits in (0, 16):
        return np.abs(x) * (1 if bits == 0 else 2.0**-7) + 1e-38
    blocks = np.repeat(block_maxima(x), BLOCK)[: len(x)]
    return 2 * blocks / (2 ** (bits - 1) - 1) + 1e-37


@pytest.mark.parametrize("bits", [0, 2, 4, 8, 16])
@given(x=arrays(np.float32, st.integers(1, 200), elements=NUMBERS), seed=st.integers(0, 2**40))
def test_no_number_is_off_by_more_than_a_step(bits, x, seed):
    assert (np.abs(restored(x, bits, seed) - x) <= bound(x, bits)).all()


@given(x=arrays(np.float32, st.integers(1, 200), elements=NUMBERS))
def test_32_bits_are_exact(x):
    assert restored(x, 32).tobytes() == x.tobytes()


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@given(x=arrays(np.float32, st.integers(1, 200), elements=NUMBERS))
def test_what_was_restored_is_stored_again_without_a_further_error(bits, x):
    once = restored(x, bits, seed=1)
    assert np.array_equal(restored(once, bits, seed=2), once)


@pytest.mark.parametrize(("bits", "off"), [(2, 2.0), (4, 0.3), (8, 0.02), (16, 0.004)])
def test_the_error_is_as_small_as_the_bits_allow_and_has_no_mean(bits, off):
    x = np.random.default_rng(3).standard_normal(100_003, dtype=np.float32)
    error = restored(x, bits) - x
    assert off / 3 < np.sqrt(np.square(error).mean()) < off
    assert abs(error.mean()) < 4 * error.std() / len(x) ** 0.5


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_a_change_far_below_a_step_gets_through_in_the_mean(bits):
    x = np.full(BLOCK, 1.0, np.float32)
    x[1:] = 0.3004
    mean = np.mean([restored(x, bits, seed)[1:] for seed in range(400)], dtype=np.float64)
    assert mean == pytest.approx(0.3004, abs=2e-3)


def test_equal_seeds_give_equal_bytes_and_others_do_not():
    x = np.random.default_rng(4).standard_normal(1000, dtype=np.float32)
    same, again, other = (encode(x, block_maxima(x), 4, Dither(seed)) for seed in (5, 5, 6))
    assert same == again != other


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 1e37])
def test_numbers_without_a_scale_are_told_apart(number):
    x = np.zeros(130, np.float32)
    assert representable(block_maxima(x))
    x[129] = number
    assert not representable(block_maxima(x))


@given(x=arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32)))
def test_the_maximum_of_a_block_is_its_largest_absolute_value_or_what_is_no_number(x):
    expected = [np.abs(x[start : start + BLOCK]).max() for start in range(0, len(x), BLOCK)]
    np.testing.assert_array_equal(block_maxima(x), np.array(expected, np.float32))


@pytest.mark.parametrize("bits", BITS)
def test_data_of_another_length_are_refused(bits):
    x = np.ones(100, np.float32)
    data = encode(x, block_maxima(x), bits, Dither(0))
    with pytest.raises(ValueError, match=f"100 numbers at {bits} bits are {len(data)} bytes"):
        decode(memoryview(data + b"\0"), bits, x)
