"""The directions of many clients in one pass are those of each by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, InputError
from acclimate_adapters.network.directions import directions


def assert_same(model: FrozenModel, batches: list[Tensor], tolerance: float, modules: tuple[str, ...] | None) -> None:
    together = directions(model, batches, modules)
    assert len(together) == len(batches)
    for batch, found in zip(batches, together, strict=True):
        alone = model.direction(batch, modules)
        torch.testing.assert_close(dict(found.tensors), dict(alone.tensors), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found.logits, alone.logits, rtol=tolerance, atol=tolerance)
        assert (found.undefined, found.constant) == (alone.undefined, alone.constant)


WANTED = [None, ("bn1.running_mean", "bn1.running_var"), ("linear5.weight", "bn2.running_var"), ()]


@pytest.mark.parametrize("modules", WANTED)
def test_in_single_precision(model: FrozenModel, modules: tuple[str, ...] | None) -> None:
    # noise: the flat background of real images has ties that a pooling decides by rounding
    noise = torch.randn(3, 20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert_same(model, [model.batch(x) for x in noise], 1e-5, modules)


@pytest.mark.parametrize("modules", WANTED)
def test_in_double_precision(double_model: FrozenModel, streams: Tensor, modules: tuple[str, ...] | None) -> None:
    assert_same(double_model, [double_model.batch(x) for x in streams[:, 1]], 1e-10, modules)


def test_one_client_alone(double_model: FrozenModel, streams: Tensor) -> None:
    assert_same(double_model, [double_model.batch(streams[0, 0])], 1e-10, None)


def test_constant_channels_are_counted_and_undefined_variances_named_for_each_client(
    small_model: Callable[..., FrozenModel], small_rows: Any
) -> None:
    model = small_model()
    one, other = small_rows(1, seed=1)[0], small_rows(1, seed=2)[0].clone()
    other[:, 0] = 3.0  # a constant channel
    assert [found.constant for found in directions(model, [one, other])] == [0, 1]
    assert_same(model, [one, other], 1e-10, None)
    assert directions(model, [one, other])[0].undefined == ("bn2.running_var",)


def test_what_a_client_gets_shares_no_memory_with_others(model: FrozenModel, streams: Tensor) -> None:
    first, second = directions(model, [model.batch(x) for x in streams[:2, 0]], ("linear5.bias",))
    before = second.tensors["linear5.bias"].clone()
    first.tensors["linear5.bias"].zero_()
    assert torch.equal(second.tensors["linear5.bias"], before)
    assert first.tensors["linear5.bias"].untyped_storage().nbytes() == 40


def test_batches_of_different_shape_are_refused(model: FrozenModel, streams: Tensor) -> None:
    with pytest.raises(InputError, match="must be of one shape"):
        directions(model, [streams[0, 0], streams[0, 0, :3]])
    with pytest.raises(InputError, match="must be of one shape"):
        directions(model, [])
