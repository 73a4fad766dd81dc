"""Directions of networks that are not what a first guess expects: layers that do not run, half precision."""

import copy

import pytest
import torch
import torchvision
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, create, direction
from acclimate_adapters.methods.atp import mean_direction
from acclimate_adapters.methods.atp_training import refine

AUXILIARY = "aux1.conv.bn.running_mean", "aux1.conv.bn.running_var"


@pytest.fixture(scope="module")
def googlenet() -> FrozenModel:
    """GoogLeNet, whose auxiliary heads only training runs; every module has a rate."""
    torch.manual_seed(0)
    net = torchvision.models.googlenet(num_classes=4, init_weights=False, aux_logits=True)
    names = [name for name, tensor in net.state_dict().items() if tensor.is_floating_point()]
    source = Source(prior=torch.full((4,), 0.25), rates=dict.fromkeys(names, 0.01))
    return FrozenModel.from_module(net, classifier="fc", source=source)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_layer_that_evaluation_does_not_run_has_direction_zero(googlenet: FrozenModel, images: Tensor) -> None:
    h = direction(googlenet, images)
    assert h.tensors.keys() == set(googlenet.modules)
    assert not any(bool(h.tensors[name].any()) for name in AUXILIARY)
    assert bool(h.tensors["conv1.bn.running_mean"].any())


@pytest.mark.parametrize("name", ["atp", "dynfed"])
def test_network_with_auxiliary_heads_is_adapted(name: str, googlenet: FrozenModel, images: Tensor) -> None:
    adapter = create(name)
    step = adapter.step(googlenet, adapter.init(googlenet), images)
    assert bool(step.logits.isfinite().all())
    assert not torch.equal(step.logits, googlenet.frozen(images).logits)
    assert not any(bool(step.state.tensors[name].any()) for name in AUXILIARY)


def test_rates_of_layers_that_do_not_run_stay(googlenet: FrozenModel, images: Tensor) -> None:
    before = dict.fromkeys(googlenet.modules, 0.5)
    after = refine(googlenet, before, images, torch.tensor([0, 1, 2, 3]), lr=0.1)
    assert [after[name] for name in AUXILIARY] == [0.5, 0.5]
    assert after["conv1.bn.running_mean"] != 0.5


@pytest.mark.parametrize("name", ["atp", "dynfed"])
def test_mean_of_a_bfloat16_model_is_kept_in_single_precision(
    name: str, network: nn.Module, model: FrozenModel, streams: Tensor
) -> None:
    source = Source(prior=model.source.prior, rates=model.source.rates)
    half = FrozenModel.from_module(copy.deepcopy(network).bfloat16(), classifier="linear5", source=source)
    adapter = create(name)
    first = adapter.init(half)
    step = adapter.step(half, first, streams[0, 0, :4])
    for state in (first, step.state):
        assert {t.dtype for n, t in state.tensors.items() if not n.startswith("rate:")} == {torch.float32}
    assert step.logits.dtype == torch.bfloat16


def test_mean_follows_directions_of_half_precision() -> None:
    """Of the order of 1/k, its steps are soon below what bfloat16 tells apart."""
    mean = {"w": torch.zeros(1)}
    for k in range(600):
        mean = mean_direction(mean, {"w": torch.tensor([1.0 if k < 300 else 2.0]).bfloat16()}, k + 1)
    assert mean["w"].item() == pytest.approx(1.5, abs=1e-4)


def test_state_whose_means_are_in_half_precision_goes_on_in_single() -> None:
    before, h = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, {"w": torch.tensor([2.0, 2.0]).bfloat16()}
    after = mean_direction(before, h, 1000)["w"]
    assert after.tolist() == pytest.approx([1.001, 2.0], abs=1e-6)
