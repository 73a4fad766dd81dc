"""What one adapter step costs over the bare torch work it cannot avoid.

    acclimate-bench speed [--repeats 40] [--device cuda] [--json FILE]

A floor and the steps compared with it are measured in one process, in turn, on the same batch; the ratio of their
medians is what counts, since absolute times depend on the machine.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, create
from acclimate_adapters.functional import entropy
from acclimate_bench.cost.networks import Network, fashion_cnn, resnet
from acclimate_bench.cost.peer_em import quapy_step
from acclimate_bench.cost.remote import in_blocks, local
from acclimate_bench.cost.report import Report
from acclimate_bench.cost.timing import COLUMNS, Timing, in_turn
from acclimate_service.compute.process import keep_freed_memory

Work: TypeAlias = Callable[[], object]
Timed: TypeAlias = Callable[..., tuple[Timing, ...]]
"""Times pieces of work in turn, each so often."""

GRADIENT, FORWARD = "forward + backward + forward", "forward"


class Row(NamedTuple):
    """A step that may cost a multiple of a floor, if it has a target."""

    name: str
    work: Work
    target: float | None = None


def forward(network: Network) -> Work:
    """One pass of the plain network, without gradient."""

    def work() -> Tensor:
        with torch.no_grad():
            logits: Tensor = network.net(network.x)
        return logits

    return work


def forward_backward_forward(network: Network) -> Work:
    """Forward, backward of the entropy, forward: what any gradient method of this kind has to compute."""
    second = forward(network)

    def work() -> object:
        network.net.zero_grad()
        torch.autograd.backward(entropy(network.net(network.x)).mean())
        return second()

    return work


def steps(model: FrozenModel, x: Tensor, adapter: str, **parameters: float | str) -> Work:
    """One step after the other, each from the state of the last; clients that can enrol have done so."""
    method = create(adapter, **parameters)
    state = method.init(model, **enrolment(model)) if adapter == "fedthe" else method.init(model)

    def work() -> None:
        nonlocal state
        state = method.step(model, state, x).state

    return work


def enrolment(model: FrozenModel) -> dict[str, Tensor]:
    """A personal head that was trained elsewhere."""
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(model.classes, model.feature_size, generator=generator) / model.feature_size**0.5
    return {"personal_head": head, "descriptor": torch.rand(model.feature_size, generator=generator)}


def gradient_rows(network: Network, target: float) -> list[Row]:
    """The steps whose floor is forward, backward, forward."""
    return [Row("atp online", steps(network.model, network.x, "atp", mode="online"), target)]


def forward_rows(network: Network) -> list[Row]:
    """The steps whose floor is one pass: they only read its logits and features."""
    return [
        Row("fedcal em", steps(network.model, network.x, "fedcal", estimator="em"), 1.1),
        Row("fedthe", steps(network.model, network.x, "fedthe"), 1.1),
        Row("bbse", steps(network.model, network.x, "bbse"), 1.1),
        Row("t3a", steps(network.model, network.x, "t3a"), 1.1),
    ]


def em_rows(network: Network) -> list[Row]:
    """`em`, and QuaPy's EMQ beside as many steps of it, where QuaPy is installed."""
    rows = [
        Row("em", steps(network.model, network.x, "em"), 1.1),
        Row("em, 12 steps", steps(network.model, network.x, "em", steps=12)),
    ]
    try:
        return [*rows, Row("frozen pass, QuaPy's EMQ, 12 steps or more", quapy_step(network))]
    except ImportError as error:
        print(f"\nleft out: QuaPy ({error}); pip install quapy")
        return rows


def statistics_rows(network: Network) -> list[Row]:
    """The steps that take two passes, and four."""
    return [
        Row("balanced", steps(network.model, network.x, "balanced"), 2.2),
        Row("consensus", steps(network.model, network.x, "consensus"), 4.2),
    ]


def onnx_rows(network: Network) -> dict[str, list[Row]]:
    """Steps on ONNX Runtime, where it and what exports to it are installed; the floor stays torch."""
    try:
        from acclimate_bench.cost.heads_onnx import onnx_rows as rows
    except ImportError as error:
        print(f"\nleft out: ONNX Runtime ({error}); it takes the extras `cpu` and `export`")
        return {}
    print("\nexporting the network for ONNX Runtime, about a minute ...", flush=True)
    *heads, balanced, consensus = (Row(*row) for row in rows(network))
    return {"heads on ONNX Runtime": heads, "statistics on ONNX Runtime": [balanced, consensus]}


def in_pauses(repeats: int, *works: Work) -> tuple[Timing, ...]:
    """In blocks with pauses: torch's threads stay awake after its work, and would take cores from ONNX Runtime's."""
    return in_blocks(repeats, *map(local, works))


def finished(work: Work, device: torch.device) -> Work:
    """The work including what a GPU does after the call has returned."""
    if device.type != "cuda":
        return work

    def wait() -> None:
        work()
        torch.cuda.synchronize(device)

    return wait


def compare(
    report: Report,
    network: Network,
    repeats: int,
    name: str,
    floor: Work,
    rows: Sequence[Row],
    what: str = "",
    timed: Timed = in_turn,
) -> None:
    """Measure a floor and its steps in turn, and add the table of them; `what` tells it from others over the floor."""
    device = network.x.device
    bare, *timings = timed(repeats, *(finished(work, device) for work in (floor, *(row.work for row in rows))))
    where = f"{device.type}, {torch.get_num_threads()} threads, {network.layout}"
    size = " x ".join(map(str, network.x.shape))
    report.table(f"{network.name}, {size}, {what}over {name}: {where}, {repeats} repeats in turn (ms)", *COLUMNS)
    report.row(name, *bare.cells())
    for row, timing in zip(rows, timings, strict=True):
        report.row(row.name, *timing.cells(bare, row.target))


def run(options: argparse.Namespace) -> int:
    """Print the ratios."""
    keep_freed_memory()  # as the service does
    large, small, report = resnet(options.device), fashion_cnn(options.device), Report()
    for network, target in ((large, 1.3), (small, 1.5)):
        compare(
            report,
            network,
            options.repeats,
            GRADIENT,
            forward_backward_forward(network),
            gradient_rows(network, target),
        )
    cheap = {"heads": forward_rows(large), "EM": em_rows(large), "statistics": statistics_rows(large)}
    for what, rows in cheap.items():
        compare(report, large, options.repeats, FORWARD, forward(large), rows, f"{what} ")
    if options.device == "cpu":
        for what, rows in onnx_rows(large).items():
            compare(report, large, options.repeats, FORWARD, forward(large), rows, f"{what} ", in_pauses)
    report.finish(options.json)
    return 0
