import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from acclimate_adapters import InputError
from acclimate_adapters.functional import batch_statistics, class_labels, entropy, finite, project_to_simplex, unshared

vectors = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6)


def test_entropy_is_that_of_a_hand_worked_distribution() -> None:
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert float(entropy(p.log())) == pytest.approx(1.5 * math.log(2), abs=1e-12)


def test_entropy_of_equal_logits_is_the_logarithm_of_the_class_count() -> None:
    assert float(entropy(torch.zeros(1000))) == pytest.approx(math.log(1000), rel=1e-6)


def test_entropy_of_a_certain_prediction_is_zero_and_finite() -> None:
    assert float(entropy(torch.tensor([1e4, 0.0, -1e4]))) == 0


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 5), (2, 3, 2, 2, 2)])
def test_batch_statistics_are_the_mean_and_unbiased_variance_of_every_channel(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, variance = batch_statistics(x)
    assert variance is not None
    for c in range(3):
        values = x[:, c].flatten().tolist()
        m = sum(values) / len(values)
        v = sum((value - m) ** 2 for value in values) / (len(values) - 1)
        assert float(mean[c]) == pytest.approx(m, abs=1e-12)
        assert float(variance[c]) == pytest.approx(v, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entropy_and_statistics_of_half_precision_are_computed_in_single(dtype: torch.dtype) -> None:
    x = (300 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))).to(dtype)  # squares overflow float16
    mean, variance = batch_statistics(x)
    torch.testing.assert_close((mean, variance), batch_statistics(x.float()), rtol=0, atol=0)
    faint = torch.zeros(1000, dtype=dtype)
    faint[0] = 20  # the others have a probability that float16 rounds to 0
    torch.testing.assert_close(entropy(faint), entropy(faint.float()), rtol=0, atol=0)
    assert entropy(faint).dtype == torch.float32


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (torch.tensor([0, 3]), "these run from 0 to 3"),
        (torch.tensor([-1, 1]), "these run from -1 to 1"),
        (torch.tensor([0.0, 1.0]), "these are torch.float32"),
        (torch.tensor([0, 1, 2]), r"of shape \[3\]"),
        (torch.tensor([[0], [1]]), r"of shape \[2, 1\]"),
    ],
)
def test_labels_that_fit_no_batch_are_refused_with_what_is_wanted(labels: torch.Tensor, reason: str) -> None:
    with pytest.raises(InputError, match=f"2 labels are needed, int64, from 0 to 2; .*{reason}"):
        class_labels(labels, 2, 3)


def test_batch_statistics_are_those_that_batch_norm_stores() -> None:
    x = torch.rand(7, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    layer = nn.BatchNorm2d(3, momentum=1.0).train()
    layer(x)
    mean, variance = batch_statistics(x)
    torch.testing.assert_close((mean, variance), (layer.running_mean, layer.running_var))


def test_variance_of_one_value_per_channel_is_undefined() -> None:
    mean, variance = batch_statistics(torch.tensor([[1.0, 2.0]]))
    assert variance is None
    assert mean.tolist() == [1, 2]


@given(vectors)
def test_projection_is_on_the_simplex_and_no_vertex_grid_point_is_closer(values: list[float]) -> None:
    v = torch.tensor(values, dtype=torch.float64)
    p = project_to_simplex(v)
    assert float(p.min()) >= 0
    assert float(p.sum()) == pytest.approx(1, abs=1e-9)
    steps = 4
    for counts in itertools.product(range(steps + 1), repeat=len(values)):
        if sum(counts) == steps:
            other = torch.tensor(counts, dtype=torch.float64) / steps
            assert float((v - p).norm()) <= float((v - other).norm()) + 1e-9


@given(vectors)
def test_projection_satisfies_the_optimality_condition(values: list[float]) -> None:
    """v - p is constant on the support and not larger off it (the KKT conditions of the projection)."""
    v = torch.tensor(values, dtype=torch.float64)
    p = project_to_simplex(v)
    gap = v - p
    level = gap[p > 0].max()
    assert torch.allclose(gap[p > 0], level.expand_as(gap[p > 0]), atol=1e-9)
    assert bool((gap[p == 0] <= level + 1e-9).all())


def test_projection_of_rows_is_the_projection_of_each_row() -> None:
    v = torch.tensor([[1.29, -0.14, -0.14], [0.2, 0.3, 0.5]])
    torch.testing.assert_close(project_to_simplex(v), torch.tensor([[1.0, 0, 0], [0.2, 0.3, 0.5]]))


@pytest.mark.parametrize("shape", [(20, 4), (20, 4, 7), (20, 4, 3, 5), (2, 4, 2, 2, 2)])
def test_batch_statistics_are_as_exact_as_those_of_one_pass_in_double_precision(shape: tuple[int, ...]) -> None:
    x = 1000 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for layout in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        mean, variance = batch_statistics(layout)
        exact = torch.var_mean(x.double(), [d for d in range(x.dim()) if d != 1])
        torch.testing.assert_close((variance, mean), tuple(t.float() for t in exact), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_variance_of_equal_values_is_exactly_0(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.2, 0.7], dtype=dtype).view(1, 3, 1, 1).expand(7, 3, 5, 5)
    mean, variance = batch_statistics(x)
    assert variance is not None
    assert torch.equal(mean, x[0, :, 0, 0])
    assert not variance.any()


def test_finite_numbers_are_finite_even_if_their_sum_is_not() -> None:
    assert finite(torch.tensor([3e38, 3e38]))
    assert finite(torch.tensor([60000.0, 60000.0], dtype=torch.float16))
    for wrong in (math.nan, math.inf, -math.inf):
        assert not finite(torch.tensor([1.0, wrong]))
    assert not finite(torch.tensor([math.inf, -math.inf]))


def test_unshared_tensors_can_be_written_to_one_by_one_and_those_that_could_before_are_not_copied() -> None:
    shared, alone = torch.arange(4.0), torch.ones(2)
    given = [shared, shared, shared[1:], torch.zeros(()).expand(3), alone]
    before = [tensor.tolist() for tensor in given]
    found = unshared(given)
    assert found[0] is shared
    assert found[4] is alone
    for tensor, numbers in zip(found, before, strict=True):
        assert tensor.tolist() == numbers
        tensor.add_(1)
        assert tensor.tolist() == [number + 1 for number in numbers]
