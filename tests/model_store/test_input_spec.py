import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from acclimate_adapters.errors import InputError
from acclimate_store import InputSpec, Resize

SPEC = InputSpec(channels=3, height=5, width=4, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@pytest.fixture
def pixels() -> NDArray[np.uint8]:
    values = np.arange(3 * 256, dtype=np.uint16).reshape(-1, 3).astype(np.uint8)  # every value in every channel
    return np.ascontiguousarray(values[:240].reshape(12, 5, 4, 3).transpose(0, 3, 1, 2))


def by_the_formula(unit: NDArray[np.float32]) -> NDArray[np.float32]:
    mean, std = (np.array(v, dtype=np.float32)[:, None, None] for v in (SPEC.mean, SPEC.std))
    result: NDArray[np.float32] = (unit - mean) / std
    return result


def test_uint8_is_normalised_bit_for_bit_as_by_numpy(pixels: NDArray[np.uint8]) -> None:
    expected = by_the_formula(pixels.astype(np.float32) / np.float32(255))
    assert SPEC.normalise(pixels).dtype == torch.float32
    np.testing.assert_array_equal(SPEC.normalise(pixels).numpy(), expected)


def test_float32_pixels_give_what_the_same_uint8_pixels_give(pixels: NDArray[np.uint8]) -> None:
    unit = pixels.astype(np.float32) / np.float32(255)
    assert torch.equal(SPEC.normalise(unit), SPEC.normalise(pixels))


def test_tensors_and_arrays_are_the_same_to_it(pixels: NDArray[np.uint8]) -> None:
    assert torch.equal(SPEC.normalise(torch.from_numpy(pixels)), SPEC.normalise(pixels))


def test_the_batch_is_left_as_it_was() -> None:
    batch = torch.rand(2, 3, 5, 4)
    before = batch.clone()
    SPEC.normalise(batch)
    assert torch.equal(batch, before)


def test_a_read_only_request_buffer_is_accepted_without_a_warning(pixels: NDArray[np.uint8]) -> None:
    frozen = np.frombuffer(pixels.tobytes(), dtype=np.uint8).reshape(pixels.shape)
    assert torch.equal(SPEC.normalise(frozen), SPEC.normalise(pixels))


@pytest.mark.parametrize("shape", [(3, 5, 4), (0, 3, 5, 4), (2, 3, 4, 5), (2, 1, 5, 4), (2, 5, 4, 3)])
def test_another_shape_is_refused_and_the_right_one_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"\[B, 3, 5, 4\]"):
        SPEC.normalise(np.zeros(shape, dtype=np.uint8))


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float16, np.bool_])
def test_another_type_is_refused_and_the_right_ones_named(dtype: type) -> None:
    with pytest.raises(InputError, match=r"uint8 \(0..255\) or float32 \(0..1\)"):
        SPEC.normalise(np.zeros((1, 3, 5, 4), dtype=dtype))


def test_a_resize_without_crop_stretches_to_a_square() -> None:
    resize = Resize(size=32, interpolation="bicubic", antialias=True)
    square = InputSpec(channels=1, height=32, width=32, mean=(0.5,), std=(0.5,), resize=resize)
    assert square.shape == (1, 32, 32)


def test_a_crop_decides_the_input_size() -> None:
    resize = Resize(size=256, interpolation="bilinear", antialias=False, crop=224)
    assert InputSpec(channels=1, height=224, width=224, mean=(0,), std=(1,), resize=resize).resize == resize
