"""What is remembered before the first BatchNorm layer is what would be computed anew, whatever a network does."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.balanced.stem import Stem


def ramp(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_a_repeated_computation_gives_the_very_same_tensors() -> None:
    stem, x, weight = Stem(), ramp(2, 3, 5, 5), ramp(4, 3, 2, 2)
    results = []
    for _ in range(2):
        with stem:
            results.append(F.relu(F.conv2d(x, weight, stride=2)))
    assert results[0] is results[1]


def test_other_values_or_tensors_are_computed() -> None:
    stem, x = Stem(), ramp(3, 3)
    with stem:
        assert torch.add(x, 1) is not torch.add(x, 2)
        assert torch.add(x, 1) is not torch.add(x, 1.0)
        assert torch.add(x, x, alpha=1) is not torch.add(x, x, alpha=2)
        assert torch.add(x, 1) is not torch.add(x.clone(), 1)
        assert torch.equal(torch.add(x, 2), ramp(3, 3) + 2)


def test_a_result_that_was_written_to_is_computed_anew() -> None:
    stem, x = Stem(), ramp(3)
    with stem:
        first = x * 2
    first.zero_()
    with stem:
        assert torch.equal(x * 2, ramp(3) * 2)


def test_an_input_that_was_written_to_gives_a_new_result() -> None:
    stem, x = Stem(), ramp(3)
    with stem:
        before = x * 2
        x += 1
        assert torch.equal(x * 2, before + 2)


def test_a_network_that_works_in_place_before_its_first_layer_is_computed_as_without() -> None:
    def network(x: Tensor) -> Tensor:
        y = x * 3
        y[0] = 7
        y.add_(1).relu_()
        return y + 1

    stem, x = Stem(), ramp(4)
    for _ in range(3):
        with stem:
            assert torch.equal(network(x), torch.tensor([9.0, 5.0, 8.0, 11.0]))


def test_tensors_of_inference_mode_are_computed() -> None:
    with torch.inference_mode():
        stem, x = Stem(), ramp(3)
        with stem:
            first = x * 2
            first += 1
            assert torch.equal(x * 2, ramp(3) * 2)


def test_arguments_that_cannot_be_compared_are_computed() -> None:
    stem, x = Stem(), ramp(2)
    with stem:
        assert torch.equal(torch.cat([x, x]), torch.tensor([0.0, 1.0, 0.0, 1.0]))
        assert torch.cat([x, x]) is not torch.cat([x, x])
