"""Whether a GPU computes the same as the CPU, and what adapting costs there.

    acclimate-bench gpu [--repeats 40] [--batches 10] [--json FILE]

One card, less than five minutes. `--device cpu` rehearses all that needs no card. The exit code is 1 if a difference is
larger than it may be, and 2 without a card.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from acclimate_adapters.network.graphs import Graphs
from acclimate_bench.cost.gpu_checks import check, eager_graphs
from acclimate_bench.cost.networks import Network, fashion_cnn, frozen, resnet
from acclimate_bench.cost.report import Report
from acclimate_bench.cost.speed import (
    FORWARD,
    GRADIENT,
    Row,
    compare,
    forward,
    forward_backward_forward,
    steps,
)
from acclimate_service.compute.process import keep_freed_memory

FORMATS: Final = (
    (torch.float32, torch.channels_last),
    (torch.bfloat16, torch.contiguous_format),
    (torch.bfloat16, torch.channels_last),
)


def run(options: argparse.Namespace) -> int:
    """Print differences and ratios."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "acclimate-bench gpu: torch sees no CUDA device here; --device cpu rehearses without one", file=sys.stderr
        )
        return 2
    keep_freed_memory()  # as the service does
    report = Report()
    near = check(report, device, options.batches)
    for make in (resnet, fashion_cnn):
        measure(report, make(options.device), options.repeats)
    report.finish(options.json)
    return 0 if near else 1


def measure(report: Report, network: Network, repeats: int) -> None:
    """Print what graphs and other formats save with one network."""
    gradient, passes = replays(network)
    compare(report, network, repeats, GRADIENT, forward_backward_forward(network), gradient)
    compare(report, network, repeats, FORWARD, forward(network), passes)
    for other in formats(network):
        rows = [Row("atp online", steps(other.model, other.x, "atp"))]
        compare(report, other, repeats, GRADIENT, forward_backward_forward(other), rows)


def replays(network: Network) -> tuple[list[Row], list[Row]]:
    """Steps with a gradient and steps without, each by plain calls and, where there are graphs, by their replays."""
    found: tuple[list[Row], list[Row]] = [], []
    for way, graphs in ways(network.x.device):
        model = frozen(network, graphs)
        found[0].append(Row(f"atp online, {way}", steps(model, network.x, "atp")))
        found[1].extend(Row(f"{name}, {way}", steps(model, network.x, name)) for name in ("none", "fedcal"))
    return found


def ways(device: torch.device) -> Iterator[tuple[str, Graphs]]:
    """Plain calls, and graphs if the device has any."""
    yield "plain", Graphs(None)
    if device.type == "cuda":
        yield "graphs", eager_graphs(device)


def formats(network: Network) -> Iterator[Network]:
    """The same network in other precisions and layouts, as the service would run it."""
    for dtype, layout in FORMATS:
        net = copy.deepcopy(network.net).to(dtype, memory_format=layout)  # type: ignore[call-overload]
        x = network.x.to(dtype, memory_format=layout)
        name = f"{network.name}, {dtype}, {layout}".replace("torch.", "")
        other = replace(network, name=name, net=net, x=x)
        yield replace(other, model=frozen(other, eager_graphs(x.device)))
