"""The passes of `balanced`: each equation by itself, and rows of several clients in one pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from acclimate_adapters import FrozenModel, InputError, Source, create
from acclimate_adapters.balanced.client import HYPOTHESES, deviations_of
from acclimate_adapters.balanced.moments import Layer, SourceMoments, source_moments
from acclimate_adapters.balanced.passes import Passed, Rows, Terms, TorchPasses, bend, rescale, shrink
from acclimate_adapters.network.probes import Norm

Rows_ = Callable[..., tuple[Tensor, Tensor]]
Models = Callable[..., FrozenModel]
Nets = Callable[..., nn.Sequential]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def layer(
    variance: Tensor, mean: Tensor | float = 0.0, running_mean: float = 0.0, running_var: Tensor | float = 1.0
) -> Layer:
    """A layer of the source from V [c], M1 and the running statistics."""
    mean, running_mean, running_var = (
        torch.as_tensor(t, dtype=torch.float64) for t in (mean, running_mean, running_var)
    )
    bounds = -0.95 * running_var, 19 * running_var
    return Layer(running_mean, running_var, *bounds, running_var / variance, mean, 1 / (len(variance) * variance))


def pass_over(model: FrozenModel, x: Tensor, **changes: Tensor | None) -> Passed:
    """The pass of one new client, with some of its terms changed."""
    source = SourceMoments.of(model)
    nothing, one = torch.zeros_like(source.overall).unsqueeze(1), source.prior.new_ones(1)
    terms = Terms(source.overall.unsqueeze(1), nothing, one, one, None)._replace(**changes)
    return TorchPasses(model, source)(Rows.of([x], source.prior))(terms)


def test_equation_4_james_stein_factor() -> None:
    eta, n, factor, one = 0.375, 20, 2.0, double(1).reshape(1, 1)
    noise = double(factor * eta / n).reshape(1, 1)  # of V = 1, 4 and omega = 0.5, 1
    source = layer(double(1, 4))
    measured = shrink(source, double(0.6, -0.4).reshape(1, 2), one, noise)  # lambda = 0.2
    assert float(measured) == pytest.approx(0.8125, abs=1e-12)
    assert float(shrink(source, double(0, 0).reshape(1, 2), one, noise)) == 0
    assert float(shrink(source, double(0.06, -0.04).reshape(1, 2), one, noise)) == 0  # noise
    assert float(shrink(source, double(1e6, 1e6).reshape(1, 2), one, noise)) == pytest.approx(1)


def test_equations_1_and_2_bend_the_running_statistics() -> None:
    source = layer(double(1.0), mean=0.5, running_mean=0.52, running_var=1.1)
    mean, variance = bend(source, double(0.2), double(0.6), double(0.75))  # M2 = 1.25
    assert (float(mean), float(variance)) == pytest.approx((0.67, 1.397), abs=1e-9)
    _, wholly = bend(source, double(0.2), double(0.6), double(1))
    assert float(wholly) / 1.1 == pytest.approx(1.36, abs=1e-9)  # rho


@pytest.mark.parametrize(("second", "ratio"), [(1e9, 20.0), (-1e9, 0.05)])
def test_the_ratio_of_variances_is_bounded(second: float, ratio: float) -> None:
    source = layer(double(1.0), running_var=2.0)
    _, variance = bend(source, double(0.0), double(second), double(1))
    assert float(variance) == pytest.approx(2 * ratio)


def test_layers_that_do_not_bend_answer_as_the_frozen_model(double_model: FrozenModel, streams: Tensor) -> None:
    """H0 and H1, which differ in the moments that they expect, with m = 0 in every layer."""
    x, source = streams[0, 0].double(), SourceMoments.of(double_model)
    frozen = double_model.frozen(x).logits.log_softmax(-1)
    for expected in (source.overall, double(*range(10)) / 45 @ source.by_class):
        passed = pass_over(double_model, x, expected=expected.unsqueeze(1), most=double(0))
        torch.testing.assert_close(passed.logits.log_softmax(-1), frozen, rtol=0, atol=1e-12)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("space", [(), (5,), (3, 4), (2, 3, 2)])
def test_rows_of_several_clients_are_normalised_each_by_its_own_statistics(
    affine: bool, space: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    norm = Norm("norm", nn.BatchNorm1d(6, affine=affine).double())
    for parameter in norm.parameters():
        parameter.data = random(6)
    batches = [random(n, 6, *space) for n in (3, 1, 2)]
    rows = Rows.of(batches, double(0))
    mean, variance = random(3, 6), random(3, 6).abs() + 0.1
    expected = [norm.by_statistics(x, m, v) for x, m, v in zip(batches, mean, variance, strict=True)]
    with torch.no_grad():
        torch.testing.assert_close(rescale(norm, rows.x, rows, mean, variance), torch.cat(expected))
        torch.testing.assert_close(
            rescale(norm, batches[0], Rows.of(batches[:1], double(0)), mean[:1], variance[:1]), expected[0]
        )


def test_half_precision_stays_half(double_model: FrozenModel) -> None:
    norm = Norm("norm", nn.BatchNorm2d(2).to(torch.bfloat16))
    x = torch.ones(4, 2, 3, 3, dtype=torch.bfloat16)
    rows = Rows.of([x[:1], x[1:]], torch.zeros(()))
    with torch.no_grad():
        assert rescale(norm, x, rows, torch.zeros(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


def test_batches_of_two_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"must be of one shape, not \[\[2, 1, 4, 4\], \[2, 1, 5, 5\]\]"):
        Rows.of([torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 5, 5)], torch.zeros(()))


class BranchNotTaken(nn.Sequential):
    """A classifier with a BatchNorm layer that only training runs, like the auxiliary heads of GoogLeNet."""

    def forward(self, x: Tensor) -> Tensor:
        for name, module in self.named_children():
            x = x if name == "auxiliary" and not self.training else module(x)
        return x


def test_a_layer_that_does_not_run_keeps_its_moments(small_net: Nets, small_rows: Rows_) -> None:
    net = BranchNotTaken()
    for name, module in [("auxiliary", nn.BatchNorm2d(2).double()), *small_net().named_children()]:
        net.add_module(name, module)
    prior = double(0.5, 0.3, 0.2)
    bare = FrozenModel.from_module(net, classifier="head", source=Source(prior=prior))
    made = source_moments(bare, [small_rows(120, 3, seed=9)])
    model = FrozenModel.from_module(net, classifier="head", source=Source(prior=prior, moments=made))
    adapter = create("balanced")
    steps = [adapter.step(model, adapter.init(model), small_rows(20)[0])]
    steps.append(adapter.step(model, steps[0].state, small_rows(20, seed=1)[0]))
    for step in steps:
        assert len(step.signals["shrink"]) == 2  # type: ignore[arg-type]
        for hypothesis in HYPOTHESES:
            deviations = step.state.tensors[deviations_of(hypothesis)]
            assert not deviations[:, :2].any()
            assert bool(deviations[:, 2:].all())
    assert "style_drift" in steps[1].signals


class Counted(TorchFunctionMode):
    """Counts the convolutions that are really computed, and the sums of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = self.sums = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.convolutions += func is torch.conv2d
        self.sums += func is Tensor.sum and args[0].shape[1:] == (32, 26, 26)
        return func(*args, **(kwargs or {}))


def test_both_passes_share_the_first_convolution_and_its_sums(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("balanced")
    state = adapter.init(model)
    with Counted() as counted:
        for batch in streams[0, :2]:
            state = adapter.step(model, state, batch).state
    assert counted.convolutions == 2 * (1 + 2 + 2)  # of three, the first once
    assert counted.sums == 2 * 2  # of the values and of their squares
