import copy
import math

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, InputError, Source, create
from acclimate_adapters.adapter import complete
from acclimate_adapters.functional import keyed_generator
from acclimate_adapters.methods.memo import fine_tune, marginal_entropy
from acclimate_adapters.methods.views import views
from acclimate_adapters.network.model import Pass


def test_equations_1_and_2_against_scalar_loops() -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    p = [[math.exp(z) / sum(map(math.exp, row)) for z in row] for row in logits.tolist()]
    marginal = [sum(row[k] for row in p) / 4 for k in range(5)]
    expected = -sum(v * math.log(v) for v in marginal)
    assert float(marginal_entropy(Pass(torch.zeros(4, 1), logits))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_equation_3_against_a_plain_optimizer(
    steps: int, double_model: FrozenModel, network: nn.Module, streams: Tensor
) -> None:
    x = streams[0, 0, :2].double()
    adapter = create("memo", views=8, lr=0.05, steps=steps, seed=7)
    step = adapter.step(double_model, adapter.init(double_model), x)
    for row, image in enumerate(x):
        net = copy.deepcopy(network).double().eval()
        augmented = views(image, 8, keyed_generator(7, 0, row))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(steps):
            p_bar = net(augmented).softmax(1).mean(0)
            optimizer.zero_grad()
            (-(p_bar * p_bar.log()).sum()).backward()
            optimizer.step()
        torch.testing.assert_close(step.logits[row], net(image[None])[0].detach(), rtol=0, atol=1e-10)


def test_one_step_lowers_the_entropy_it_descends(model: FrozenModel, streams: Tensor) -> None:
    augmented = views(streams[0, 0, 0], 16, keyed_generator(0, 0, 0))
    before = marginal_entropy(model.frozen(augmented))
    weights = complete(fine_tune(model, augmented, lr=1e-3, steps=1))
    after = marginal_entropy(model.adapted(augmented, weights))
    assert float(after) < float(before)


def test_an_answer_depends_on_no_other_image(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("memo", views=4, lr=0.05)
    together = adapter.step(model, adapter.init(model), streams[0, 0, :3]).logits
    alone = adapter.step(model, adapter.init(model), streams[0, 0, :1]).logits
    assert torch.equal(together[:1], alone)
    mixed = torch.cat([streams[1, 0, :2], streams[0, 0, 2:3]])
    assert torch.equal(together[2], adapter.step(model, adapter.init(model), mixed).logits[2])


def test_nothing_is_carried_but_the_number_of_batches(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("memo", views=4, lr=0.5)
    state = adapter.init(model)
    for expected in (1, 2):
        state = adapter.step(model, state, streams[0, 0, :2]).state
        assert (state.step, state.nbytes) == (expected, 0)


def test_views_follow_from_seed_and_batch(model: FrozenModel, streams: Tensor) -> None:
    x = streams[0, 0, :2]
    adapter, other = (create("memo", views=4, lr=0.05, seed=seed) for seed in (0, 1))
    first = adapter.step(model, adapter.init(model), x)
    assert torch.equal(first.logits, adapter.step(model, adapter.init(model), x).logits)
    assert not torch.equal(first.logits, adapter.step(model, first.state, x).logits)
    assert not torch.equal(first.logits, other.step(model, other.init(model), x).logits)


def test_a_class_that_no_view_believes_in_has_a_finite_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -1e4], [2.0, 0.0, -2e4]], requires_grad=True)
    loss = marginal_entropy(Pass(torch.zeros(2, 1), logits))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool(loss.isfinite() & gradient.isfinite().all())


def test_constant_images_are_answered(model: FrozenModel) -> None:
    adapter = create("memo", views=2, lr=0.05)
    assert bool(adapter.step(model, adapter.init(model), torch.full((3, 1, 28, 28), 0.5)).logits.isfinite().all())


def test_what_is_no_image_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    model = FrozenModel.from_module(net, classifier="0", source=Source(prior=torch.tensor([0.5, 0.5])))
    adapter = create("memo")
    with pytest.raises(InputError, match=r"\[C, H, W\]"):
        adapter.step(model, adapter.init(model), torch.ones(3, 4))
