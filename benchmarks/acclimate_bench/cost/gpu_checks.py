"""Whether a CUDA device computes what the CPU computes, and a replayed graph what the calls it was captured from do."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, create
from acclimate_adapters.network.graphs import CudaCapture, Graphs
from acclimate_bench.cost.inputs import SAMPLES
from acclimate_bench.cost.networks import fashion_cnn, frozen
from acclimate_bench.cost.report import Report, verdict
from acclimate_bench.cost.speed import enrolment
from acclimate_store import load_streams

METHODS: Final = ("atp", "fedcal", "fedthe", "bbse", "t3a", "balanced", "consensus", "tent")
ROWS: Final = 20
TOLERANCES: Final = {torch.float32: 1e-3, torch.float64: 1e-8}
COLUMNS: Final = ("median", "max", "target")


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how the bundled model computes; by graphs, from the second call on, if it `replays`."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    replays: bool = False

    def model(self) -> FrozenModel:
        """The bundled model there."""
        network = fashion_cnn(str(self.device))
        graphs = eager_graphs(self.device) if self.replays else Graphs(None)
        return frozen(replace(network, net=network.net.to(self.dtype)), graphs)


def eager_graphs(device: torch.device) -> Graphs:
    """Graphs that are captured at the second call, which a warm-up is sure to make; none where there are none."""
    return Graphs(CudaCapture(device), patience=1) if device.type == "cuda" else Graphs(None)


def check(report: Report, device: torch.device, batches: int) -> bool:
    """Print how far every method is from the CPU, and whether all are near enough.

    Differences are those of the log-posteriors of a stream, relative to the largest of them in the batch. A maximum far
    from its median is a ReLU or a pooling that decided otherwise within rounding.
    """
    cpu = torch.device("cpu")
    near = True
    with full_precision():
        for dtype in TOLERANCES:
            name = str(dtype).removeprefix("torch.")
            report.table(f"{device} and cpu, {name}, {batches} batches of {ROWS}: relative difference", *COLUMNS)
            near &= _compare(report, Place(cpu, dtype), Place(device, dtype), batches)
        if device.type == "cuda":
            report.table(f"graphs and plain calls, float32, {batches} batches of {ROWS}: relative difference", *COLUMNS)
            near &= _compare(report, Place(device), Place(device, replays=True), batches)
    return near


def _compare(report: Report, reference: Place, place: Place, batches: int) -> bool:
    near, models = True, (reference.model(), place.model())
    for method in METHODS:
        found = differences(method, *models, batches)
        median, most, limit = statistics.median(found), max(found), TOLERANCES[place.dtype]
        report.row(method, f"{median:.1e}", f"{most:.1e}", verdict(most, limit))
        near &= most <= limit
    for failure in models[1].graphs.failures.values():
        report.row("a graph that cannot be captured", "", failure, "MISSED")
        near = False
    return near


def differences(method: str, reference: FrozenModel, model: FrozenModel, batches: int) -> list[float]:
    """Largest relative difference of two models' log-posteriors, batch by batch of one client's stream."""
    answers = zip(stream(method, reference, batches), stream(method, model, batches), strict=True)
    return [float((a - b).abs().max() / a.abs().max()) for a, b in answers]


def stream(method: str, model: FrozenModel, batches: int) -> list[Tensor]:
    """Log-posteriors [B, K] of the batches of one client, in double precision on the CPU."""
    adapter = create(method)
    state = adapter.init(model, **enrolment(model)) if method == "fedthe" else adapter.init(model)
    answers = []
    for x in images(batches):
        step = adapter.step(model, state, x.to(model.device, model.dtype))
        state = step.state
        answers.append(step.logits.double().cpu().log_softmax(dim=-1))
    return answers


def images(batches: int) -> Iterator[Tensor]:
    """The batches [20, 1, 28, 28] of a recorded client, normalised; from the beginning again after the last one."""
    pixels = torch.from_numpy(load_streams(SAMPLES)[0].images)
    whole = torch.split(pixels.float().div(255).sub(0.286).div(0.353), ROWS)
    return (whole[i % (len(pixels) // ROWS)] for i in range(batches))


@contextmanager
def full_precision() -> Iterator[None]:
    """Products keep all digits of single precision for the block: no TF32."""
    products = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [each.fp32_precision for each in products]
    try:
        for each in products:
            each.fp32_precision = "ieee"
        yield
    finally:
        for each, precision in zip(products, before, strict=True):
            each.fp32_precision = precision
