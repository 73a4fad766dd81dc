"""What one adapter step costs over the bare torch work it cannot avoid.

    acclimate bench speed [--repeats 40] [--device cuda] [--json FILE]

Floor and step are measured in one process, in turn, on the same batch; the ratio of their medians is what counts, since
absolute times depend on the machine.
"""

import argparse
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, create
from acclimate_adapters.functional import entropy
from acclimate_service.bench.cost.measure import COLUMNS, in_turn
from acclimate_service.bench.cost.report import Report
from acclimate_service.memory import keep_freed_memory

CLASSES = 10
TARGET = 1.5


def resnet18() -> nn.Module:
    """A ResNet-18 of random weights; its speed is that of a trained one."""
    torch.manual_seed(0)
    net: nn.Module = torchvision.models.resnet18(num_classes=CLASSES).eval()
    return net


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
        torch.autograd.backward(entropy(net(x)).mean())
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


def run(options: argparse.Namespace) -> int:
    """Print the ratios."""
    keep_freed_memory()  # as the service does
    net = resnet18().to(options.device)
    x = torch.rand(20, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(options.device)
    works = (finished(work, x.device) for work in (floor(net, x), online_step(freeze(net), x)))
    bare, step = in_turn(options.repeats, *works)
    where = f"{x.device.type}, {torch.get_num_threads()} threads"
    report = Report()
    report.table(f"ResNet-18, 20 x 3 x 32 x 32, {where}, {options.repeats} repeats in turn (ms)", *COLUMNS)
    report.row("forward + backward + forward", *bare.cells())
    report.row("atp online step", *step.cells(bare, TARGET))
    report.finish(options.json)
    return 0
