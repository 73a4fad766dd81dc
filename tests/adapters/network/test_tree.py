"""Passes with replaced tensors, against `torch.func.functional_call`."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from acclimate_adapters.network.tree import Trees


def tied() -> nn.Sequential:
    """A network whose two layers share their weight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval().requires_grad_(False)
    net[2].weight = net[0].weight
    return net


@pytest.fixture
def replaced() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "0.weight": torch.randn(3, 3, generator=generator),
        "1.running_mean": torch.randn(3, generator=generator),
        "2.bias": torch.randn(3, generator=generator),
    }


def test_a_pass_with_replaced_tensors_is_that_of_functional_call(replaced: dict[str, Tensor]) -> None:
    net, x = tied(), torch.rand(4, 3)
    with Trees(net).replacing(replaced) as tree:
        assert torch.equal(tree(x), functional_call(net, replaced, x))


def test_a_tied_tensor_is_replaced_in_all_its_places_under_either_name() -> None:
    net, x, weight = tied(), torch.rand(4, 3), torch.randn(3, 3)
    for name in ("0.weight", "2.weight"):
        with Trees(net).replacing({name: weight}) as tree:
            assert torch.equal(tree(x), functional_call(net, {name: weight}, x))


def test_a_thread_sees_nothing_of_what_another_replaced(replaced: dict[str, Tensor]) -> None:
    net, x, seen = tied(), torch.rand(4, 3), list[Tensor]()
    trees = Trees(net)

    def look() -> None:
        with trees.replacing({}) as tree:
            seen.append(tree(x))

    with trees.replacing(replaced):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert torch.equal(seen[0], net(x))


def test_the_tensors_return_to_their_places_even_after_an_error(replaced: dict[str, Tensor]) -> None:
    net, x = tied(), torch.rand(4, 3)
    trees = Trees(net)
    with pytest.raises(RuntimeError), trees.replacing(replaced) as tree:
        tree(torch.rand(4, 5))
    with trees.replacing({}) as tree:
        assert torch.equal(tree(x), net(x))
        assert all(mine is theirs for mine, theirs in zip(tree.parameters(), net.parameters(), strict=True))


def test_gradients_flow_to_replaced_tensors(replaced: dict[str, Tensor]) -> None:
    leaf = replaced["0.weight"].requires_grad_()
    with Trees(tied()).replacing({"0.weight": leaf}) as tree:
        (gradient,) = torch.autograd.grad(tree(torch.rand(4, 3)).sum(), [leaf])
    assert bool(gradient.any())
