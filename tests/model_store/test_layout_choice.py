"""A model's passes are laid out in memory as they are fastest, unless they would answer otherwise."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source
from acclimate_store import Catalogue
from acclimate_store.layout_choice import fastest

SHIPPED = Path(__file__).parents[2] / "model_store/bundles"
SHAPE = (3, 6, 6)


class Particular(nn.Module):
    """Takes longer where `slow` says so, by 2 ms, and answers otherwise in channels_last if it is `fickle`."""

    def __init__(self, slow: str = "", *, fickle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self._slow, self._fickle = slow, fickle

    def forward(self, x: Tensor) -> Tensor:
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        if self._slow == ("channels_last" if channels_last else "contiguous"):
            time.sleep(0.002)
        logits: Tensor = self.head(self.conv(x).relu().mean((2, 3)))
        return logits + 1 if self._fickle and channels_last else logits


class Flat(nn.Module):
    """Depends on how its activations lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x).view(len(x), -1))
        return logits


def frozen(net: nn.Module) -> FrozenModel:
    return FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.full((2,), 0.5)))


def test_the_faster_layout_is_taken() -> None:
    assert fastest(frozen(Particular("contiguous")), SHAPE).layout == "channels_last"


def test_the_layout_of_images_stays_where_another_is_no_faster() -> None:
    assert fastest(frozen(Particular("channels_last")), SHAPE).layout == "contiguous"


@pytest.mark.parametrize("net", [Flat(), Particular("contiguous", fickle=True)], ids=["refuses", "answers otherwise"])
def test_a_network_that_cannot_take_a_layout_does_without(net: nn.Module) -> None:
    model = frozen(net)
    chosen, layout = fastest(model, SHAPE)
    x = torch.rand(3, *SHAPE)
    assert layout == "contiguous"
    assert torch.equal(chosen.frozen(x).logits, model.frozen(x).logits)


def test_a_shipped_model_keeps_its_answers_and_its_hash() -> None:
    model = Catalogue(SHIPPED).load("fashion-cnn", "1").model
    chosen, _ = fastest(model, (1, 28, 28))
    x = torch.rand(20, 1, 28, 28)
    torch.testing.assert_close(chosen.frozen(x).logits, model.frozen(x).logits)
    assert chosen.content_hash == model.content_hash
