import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import ConfigurationError, FrozenModel, create
from acclimate_adapters.methods.surgical import block_parameters


def entropy_oracle(logits: Tensor) -> Tensor:
    p = logits.softmax(1)
    return -(p * p.log()).sum(1).mean()


@pytest.mark.parametrize("modules", [("linear5",), ("conv2", "bn2"), ("bn4.weight",)])
def test_equations_1_and_2_against_a_plain_optimizer(
    modules: tuple[str, ...], double_model: FrozenModel, network: nn.Module, streams: Tensor
) -> None:
    adapter = create("surgical", modules=modules, lr=0.3)
    step = adapter.step(double_model, adapter.init(double_model), streams[0, 0].double())
    net = copy.deepcopy(network).double().eval().requires_grad_(False)
    chosen = [p for name, p in net.named_parameters() if any(name == m or name.startswith(m + ".") for m in modules)]
    for parameter in chosen:
        parameter.requires_grad_()
    optimizer = torch.optim.SGD(chosen, lr=0.3)
    entropy_oracle(net(streams[0, 0].double())).backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(step.logits, net(streams[0, 0].double()), rtol=0, atol=1e-11)


def test_it_is_atp_on_single_batches_with_one_rate_for_the_block(
    make_model: Callable[..., FrozenModel], streams: Tensor
) -> None:
    rates = dict.fromkeys(("conv3.weight", "bn3.weight", "bn3.bias"), 0.2)
    model = make_model(rates=rates)
    atp, surgical = create("atp", mode="batch"), create("surgical", modules=("conv3", "bn3"), lr=0.2)
    for batch in streams[1, :3]:
        answers = [adapter.step(model, adapter.init(model), batch).logits for adapter in (atp, surgical)]
        torch.testing.assert_close(*answers, rtol=0, atol=1e-6)


def test_each_batch_starts_from_the_global_weights(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("surgical", modules=("conv1",), lr=1.0)
    later = adapter.step(model, adapter.step(model, adapter.init(model), streams[0, 0]).state, streams[0, 1])
    assert torch.equal(later.logits, adapter.step(model, adapter.init(model), streams[0, 1]).logits)
    assert later.state.nbytes == 0


def test_the_classifier_is_the_default_block(model: FrozenModel) -> None:
    assert block_parameters(model) == ("linear5.weight", "linear5.bias")


def test_a_block_is_named_by_layers_or_tensors_in_any_order(model: FrozenModel) -> None:
    assert block_parameters(model, ("linear5.bias", "bn1", "bn1.bias")) == ("bn1.weight", "bn1.bias", "linear5.bias")


@pytest.mark.parametrize("name", ["linear", "bn2.running_mean", "nowhere", ""])
def test_a_name_that_fits_no_parameter_is_refused(name: str, model: FrozenModel) -> None:
    with pytest.raises(ConfigurationError, match="no parameter belongs to"):
        create("surgical", modules=("bn1", name)).init(model)


def test_a_batch_of_one_and_constant_images_are_answered(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("surgical", modules=("bn4",), lr=0.1)
    for x in (streams[0, 0, :1], torch.full((20, 1, 28, 28), 0.5)):
        assert bool(adapter.step(model, adapter.init(model), x).logits.isfinite().all())
