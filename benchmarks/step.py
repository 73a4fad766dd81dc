"""What one adapter step costs over the bare torch work it cannot avoid.

    python benchmarks/step.py [--repeats 40] [--device cuda]

Floor and step are measured in one process, in turn, on the same batch; the ratio of their medians is what counts, since
absolute times depend on the machine.
"""

import argparse
from collections.abc import Callable

import torch
import torchvision
from measure import Timing, in_turn
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, create
from acclimate_adapters.functional import entropy

CLASSES = 10
TARGET = 1.5


def resnet18() -> nn.Module:
    """A ResNet-18 of random weights; its speed is that of a trained one."""
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=CLASSES).eval()


def freeze(net: nn.Module) -> FrozenModel:
    """The network with a rate for every module, the most expensive case."""
    prior = torch.full((CLASSES,), 1 / CLASSES)
    bare = FrozenModel.from_module(net, classifier="fc", source=Source(prior=prior))
    return FrozenModel.from_module(
        net, classifier="fc", source=Source(prior=prior, rates=dict.fromkeys(bare.modules, 0.01))
    )


def floor(net: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward, backward of the entropy, forward: what any gradient method of this kind has to compute."""

    def work() -> Tensor:
        net.zero_grad()
        entropy(net(x)).mean().backward()
        with torch.no_grad():
            logits: Tensor = net(x)
        return logits

    return work


def online_step(model: FrozenModel, x: Tensor) -> Callable[[], object]:
    """One ATP-online step after the other, each from the state of the last."""
    adapter = create("atp", mode="online")
    state = adapter.init(model)

    def work() -> None:
        nonlocal state
        state = adapter.step(model, state, x).state

    return work


def finished(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work including what a GPU does after the call has returned."""
    if device.type != "cuda":
        return work

    def wait() -> None:
        work()
        torch.cuda.synchronize(device)

    return wait


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    net = resnet18().to(options.device)
    x = torch.rand(20, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(options.device)
    works = (finished(work, x.device) for work in (floor(net, x), online_step(freeze(net), x)))
    bare, step = in_turn(options.repeats, *works)
    where = f"{x.device.type}, {torch.get_num_threads()} threads"
    print(f"ResNet-18, 20 x 3 x 32 x 32, {where}, {options.repeats} repeats in turn")
    print(Timing.header())
    print(bare.row("forward + backward + forward"))
    print(step.row("atp online step", bare, TARGET))


if __name__ == "__main__":
    main()
