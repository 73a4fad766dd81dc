"""Passes in channels_last with packed convolutions, against plain ones."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, InputError, Source
from acclimate_adapters.network.direction import direction
from acclimate_adapters.network.layouts import Convolution, Layouts, can_pack

CHANNELS_LAST = torch.channels_last


class Flat(nn.Module):
    """Depends on how its activations lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x).view(len(x), -1))
        return logits


@pytest.fixture
def x() -> Tensor:
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(288, 4)).eval().requires_grad_(False)


@pytest.fixture
def make_frozen(net: nn.Sequential) -> Callable[..., FrozenModel]:
    def make(**layouts: bool) -> FrozenModel:
        model = FrozenModel.from_module(net, classifier="5", source=Source(prior=torch.full((4,), 0.25)))
        return model.with_layouts(**layouts) if layouts else model

    return make


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(3, 4, 1, stride=2, bias=False),
        nn.Conv2d(3, 6, (3, 1), padding=(2, 1), dilation=(2, 1), groups=3),
        nn.Conv2d(3, 64, 7, stride=2, padding=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_packed_convolution_gives_what_the_plain_one_does(convolution: nn.Conv2d, rows: int, x: Tensor) -> None:
    assert can_pack(convolution)
    packed = Convolution(convolution)
    with torch.no_grad():
        for batch in (x[:rows], x[:rows].to(memory_format=CHANNELS_LAST), x.transpose(2, 3)[:rows]):
            torch.testing.assert_close(packed(batch), convolution(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(3, 8, 3, padding="same"),
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 8, 3, dtype=torch.float64),
        nn.utils.spectral_norm(nn.Conv2d(3, 8, 3)),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)),
        nn.Conv1d(3, 8, 3),
        nn.Linear(3, 8),
    ],
    ids=str,
)
def test_what_is_no_plain_convolution_is_not_packed(other: nn.Module) -> None:
    assert not can_pack(other)


def test_each_pass_answers_as_the_plain_one(make_frozen: Callable[..., FrozenModel], x: Tensor) -> None:
    plain, weights = make_frozen(), {"3.weight": torch.rand(8, 8, 3, 3), "1.running_mean": torch.rand(8)}
    for frozen in (False, True):
        for adapted in (False, True):
            model = make_frozen(frozen=frozen, adapted=adapted)
            assert model.content_hash == plain.content_hash
            torch.testing.assert_close(model.frozen(x).logits, plain.frozen(x).logits)
            torch.testing.assert_close(model.features(x), plain.features(x))
            for replaced in (weights, {"1.running_mean": torch.rand(8)}, {"0.bias": torch.rand(8)}):
                torch.testing.assert_close(model.forward(x, replaced), plain.forward(x, replaced))
            for name, h in direction(model, x).tensors.items():
                torch.testing.assert_close(h, direction(plain, x).tensors[name])


def test_only_frozen_passes_run_on_packed_convolutions(net: nn.Sequential) -> None:
    layouts = Layouts.of(net, frozen=True, adapted=False)
    assert layouts.weights == {"0.weight", "3.weight"}
    with torch.no_grad():
        assert layouts.of_pass(["1.weight"]) is layouts.frozen
        assert layouts.of_pass(["3.weight"]) is layouts.adapted
    assert layouts.of_pass([]) is layouts.adapted
    with layouts.frozen.trees.replacing({}) as tree:
        assert isinstance(tree[3], Convolution)


def test_a_replaced_weight_counts_even_under_the_name_of_what_is_no_convolution(x: Tensor) -> None:
    net = nn.Sequential(nn.ParameterList([torch.rand(4, 3, 3, 3)]), nn.Conv2d(3, 4, 3)).requires_grad_(False)
    net[1].weight = net[0][0]  # it goes by the name of the list
    replaced, layouts = {"0.0": torch.rand(4, 3, 3, 3)}, Layouts.of(net, frozen=True, adapted=True)
    with torch.no_grad(), layouts.of_pass(replaced).trees.replacing(replaced) as tree:
        torch.testing.assert_close(tree[1](x), F.conv2d(x, replaced["0.0"], net[1].bias))


def test_threads_share_one_packed_weight(net: nn.Sequential, x: Tensor) -> None:
    layouts, packed = Layouts.of(net, frozen=True, adapted=False), list[int]()

    def run() -> None:
        with layouts.frozen.trees.replacing({}) as tree, torch.no_grad():
            tree(x)
            packed.append(id(tree[0]._convolve._packed))

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert packed[0] == packed[1]


def test_a_copied_network_has_the_same_packed_weight(net: nn.Sequential) -> None:
    convolution = Convolution(net[0])
    assert copy.deepcopy(convolution)._convolve is convolution._convolve


def test_a_network_without_convolutions_can_be_asked_for_channels_last() -> None:
    net = nn.Sequential(nn.Linear(3, 4))
    model = FrozenModel.from_module(net, classifier="0", source=Source(prior=torch.full((4,), 0.25)))
    x = torch.rand(2, 3)
    other = model.with_layouts(frozen=True, adapted=True)
    torch.testing.assert_close(other.frozen(x).logits, F.linear(x, model.tensor("0.weight"), model.tensor("0.bias")))


def test_a_network_that_depends_on_memory_refuses_channels_last_and_is_left_whole(x: Tensor) -> None:
    torch.manual_seed(0)
    model = FrozenModel.from_module(Flat(), classifier="head", source=Source(prior=torch.full((4,), 0.25)))
    other = model.with_layouts(frozen=True, adapted=True)
    with pytest.raises(InputError, match="view"):
        other.frozen(x)
    with pytest.raises(InputError, match="view"):
        direction(other, x)
    assert model.frozen(x).logits.shape == (5, 4)
